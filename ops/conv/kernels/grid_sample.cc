// grid_sample and its gradients: every point of a grid reads the elements of x around it, of all
// channels. Over two or three spatial dims.
#include "dtensor/ops/conv/grid_points.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// The elements that a point reads, in the order of their numbers.
template <class T>
struct Corners {
  GridCorner<T> all[kMaxCorners];
  // `v`: the numbers of the point.
  Corners(const Grid& g, const T* v) {
    const GridPoint<T> point = PointOf<T>(g, [v](int k) { return v[k]; });
    for (int k = 0; k < g.num_corners; ++k) all[k] = CornerOf(g, point, k);
  }
};

// x [n, c, in..], grid [n, out.., dims]; mode, padding, corners -> y [n, c, out..]
template <class T>
void GridSampleOf(const KernelCall& c) {
  const Grid g = GridOf(c.in[0], c.in[1], c.attrs);
  const auto* points = static_cast<const T*>(c.in[1].data);
  for (int64_t n = 0; n < g.n; ++n) {
    const T* x = static_cast<const T*>(c.in[0].data) + n * g.c * g.plane;
    T* y = static_cast<T*>(c.out[0].data) + n * g.c * g.points;
    for (int64_t p = 0; p < g.points; ++p, points += g.dims) {
      const Corners<T> corners(g, points);
      for (int64_t channel = 0; channel < g.c; ++channel) {
        T sum = 0;
        for (int k = 0; k < g.num_corners; ++k) {
          const GridCorner<T>& corner = corners.all[k];
          if (corner.offset >= 0) sum += x[channel * g.plane + corner.offset] * corner.weight;
        }
        y[channel * g.points + p] = sum;
      }
    }
  }
}

// dy, x, grid; mode, padding, corners -> dx, dgrid
template <class T>
void GridSampleBackwardOf(const KernelCall& c) {
  const Grid g = GridOf(c.in[1], c.in[2], c.attrs);
  const auto* points = static_cast<const T*>(c.in[2].data);
  auto* dgrid = static_cast<T*>(c.out[1].data);
  auto* all_dx = static_cast<T*>(c.out[0].data);
  for (int64_t i = 0; i < g.n * g.c * g.plane; ++i) all_dx[i] = 0;
  for (int64_t n = 0; n < g.n; ++n) {
    const T* x = static_cast<const T*>(c.in[1].data) + n * g.c * g.plane;
    const T* dy = static_cast<const T*>(c.in[0].data) + n * g.c * g.points;
    T* dx = all_dx + n * g.c * g.plane;
    for (int64_t p = 0; p < g.points; ++p, points += g.dims, dgrid += g.dims) {
      const Corners<T> corners(g, points);
      for (int d = 0; d < g.dims; ++d) dgrid[d] = 0;
      for (int64_t channel = 0; channel < g.c; ++channel) {
        const T v = dy[channel * g.points + p];
        for (int k = 0; k < g.num_corners; ++k) {
          const GridCorner<T>& corner = corners.all[k];
          if (corner.offset < 0) continue;
          const int64_t at = channel * g.plane + corner.offset;
          dx[at] += v * corner.weight;
          for (int d = 0; d < g.dims; ++d) dgrid[g.dims - 1 - d] += v * x[at] * corner.slope[d];
        }
      }
    }
  }
}

void GridSampleKernel(const KernelCall& c) {
  RunFloating(c, GridSampleOf<double>, GridSampleOf<float>);
}
void GridSampleBackwardKernel(const KernelCall& c) {
  RunFloating(c, GridSampleBackwardOf<double>, GridSampleBackwardOf<float>);
}

}  // namespace

void RegisterGridSample(AddKernelFn add) {
  add("grid_sample", GridSampleKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("grid_sample_backward", GridSampleBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
