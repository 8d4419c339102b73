// grid_sample and its gradients. A thread per element gathers its terms in the CPU's order; of x's
// gradient, what the points read is sorted by where it lies: no atomics.
#include "dtensor/tensor/cuda/kernels/segments.h"
// What comes after it is device code.
#include "dtensor/tensor/cuda/math.h"
//
#include "dtensor/ops/conv/grid_points.h"

namespace dtensor::cuda {
namespace {

namespace dev = ::dtensor::device_code;

// Point `i` of all.
template <class X>
__device__ dev::GridPoint<Computed<X>> PointAt(const dev::Grid& g, const X* grid, int64_t i) {
  using T = Computed<X>;
  return dev::PointOf<T>(g, [&](int k) { return static_cast<T>(Widen(grid[i * g.dims + k])); });
}

// y [n, c, points]
template <class X>
__global__ void __launch_bounds__(kThreads, 1)
    GridSample(const __grid_constant__ dev::Grid g, const X* x, const X* grid, X* y) {
  using T = Computed<X>;
  for (int64_t i = GridStart(); i < g.n * g.c * g.points; i += GridStep()) {
    const int64_t plane = i / g.points, p = i - plane * g.points;
    const dev::GridPoint<T> point = PointAt(g, grid, plane / g.c * g.points + p);
    const X* const from = x + plane * g.plane;
    T sum = 0;
    for (int k = 0; k < g.num_corners; ++k) {
      const dev::GridCorner<T> corner = dev::CornerOf(g, point, k);
      if (corner.offset >= 0) sum += Widen(from[corner.offset]) * corner.weight;
    }
    Store(sum, y + i);
  }
}

// x, grid; mode, padding, corners
void GridSampleKernel(const KernelCall& c) {
  const int64_t n = NumelOf(c.out[0]);
  if (n == 0) return;
  const dev::Grid g = dev::GridOf(c.in[0], c.in[1], c.attrs);
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    GridSample<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(g, In<X>(c, 0), In<X>(c, 1),
                                                           Out<X>(c, 0));
    CheckLaunch();
  });
}

// --- gradients

// What the points read, an item per corner of each point: its place in [n, plane], or -1, its
// weight, and the slopes of that in the order of x's dims.
template <class T>
struct Corners {
  int64_t count;
  int64_t* places;
  T *weights, *slopes;
  Corners(const KernelCall& c, const dev::Grid& g)
      : count(g.n * g.points * g.num_corners),
        places(Scratch<int64_t>(c, count)),
        weights(Scratch<T>(c, count)),
        slopes(Scratch<T>(c, count * g.dims)) {}
  bool ok() const { return places != nullptr && weights != nullptr && slopes != nullptr; }
  __device__ int64_t operator()(int64_t item) const { return places[item]; }
};

template <class X>
__global__ void __launch_bounds__(kThreads)
    FindCorners(const __grid_constant__ dev::Grid g, const X* grid, Corners<Computed<X>> corners) {
  using T = Computed<X>;
  for (int64_t i = GridStart(); i < corners.count; i += GridStep()) {
    const int64_t p = i / g.num_corners;
    const dev::GridPoint<T> point = PointAt(g, grid, p);
    const dev::GridCorner<T> corner =
        dev::CornerOf(g, point, static_cast<int>(i - p * g.num_corners));
    corners.places[i] = corner.offset < 0 ? -1 : p / g.points * g.plane + corner.offset;
    corners.weights[i] = corner.weight;
    for (int d = 0; d < dev::kMaxGridDims; ++d) {
      if (d < g.dims) corners.slopes[i * g.dims + d] = corner.slope[d];
    }
  }
}

// dx[n, column, place] = the sum of dy[n, column, p] by the weights of the corners there.
template <class X>
struct SumCorners {
  const X* dy;
  X* dx;
  const Computed<X>* weights;
  int64_t c, points, plane, num_corners;
  using Acc = Computed<X>;
  __device__ Acc Start(int64_t, int64_t) const { return 0; }
  __device__ Acc Add(Acc sum, int64_t item, int64_t column) const {
    const int64_t p = item / num_corners, n = p / points;
    return sum + Widen(dy[(n * c + column) * points + (p - n * points)]) * weights[item];
  }
  __device__ void Finish(int64_t place, int64_t column, Acc sum) const {
    const int64_t n = place / plane;
    Store(sum, dx + (n * c + column) * plane + (place - n * plane));
  }
};

// dgrid [n, points, dims], whose numbers are in the order opposite to x's dims.
template <class X>
__global__ void __launch_bounds__(kThreads)
    GridGradient(const __grid_constant__ dev::Grid g, const X* dy, const X* x,
                 Corners<Computed<X>> corners, X* dgrid) {
  using T = Computed<X>;
  for (int64_t i = GridStart(); i < g.n * g.points * g.dims; i += GridStep()) {
    const int64_t at = i / g.dims, n = at / g.points, p = at - n * g.points;
    const int64_t dim = g.dims - 1 - (i - at * g.dims);
    T sum = 0;
    for (int64_t channel = 0; channel < g.c; ++channel) {
      const T v = Widen(dy[(n * g.c + channel) * g.points + p]);
      for (int k = 0; k < g.num_corners; ++k) {
        const int64_t item = at * g.num_corners + k, place = corners.places[item];
        if (place < 0) continue;
        const T there = Widen(x[(n * g.c + channel) * g.plane + (place - n * g.plane)]);
        sum += v * there * corners.slopes[item * g.dims + dim];
      }
    }
    Store(sum, dgrid + i);
  }
}

// dy, x, grid; mode, padding, corners -> dx, dgrid
void GridSampleBackwardKernel(const KernelCall& c) {
  const dev::Grid g = dev::GridOf(c.in[1], c.in[2], c.attrs);
  const int64_t bytes = NumelOf(c.out[0]) * SizeOf(c.out[0].dtype);
  if (bytes > 0) {
    NoteError(cudaMemsetAsync(c.out[0].data, 0, static_cast<size_t>(bytes), StreamOf(c)));
  }
  if (g.n * g.points == 0) return;
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    const Corners<Computed<X>> corners(c, g);
    if (!corners.ok()) return;
    FindCorners<<<BlocksFor(corners.count), kThreads, 0, StreamOf(c)>>>(g, In<X>(c, 2), corners);
    CheckLaunch();
    const SumCorners<X> apply = {In<X>(c, 0), Out<X>(c, 0), corners.weights, g.c,
                                 g.points,    g.plane,      g.num_corners};
    RunSegments(c, corners, apply, corners.count, g.n * g.plane, g.c);
    const int64_t numbers = g.n * g.points * g.dims;
    GridGradient<<<BlocksFor(numbers), kThreads, 0, StreamOf(c)>>>(g, In<X>(c, 0), In<X>(c, 1),
                                                                   corners, Out<X>(c, 1));
    CheckLaunch();
  });
}

}  // namespace

void AddGridSampleKernels(AddKernelFn add) {
  add("grid_sample", GridSampleKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("grid_sample_backward", GridSampleBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor::cuda
