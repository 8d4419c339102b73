// grid_sample and its gradients: every point of a grid reads the elements of x around it, of all
// channels. Over two or three spatial dims.
#include "dtensor/ops/conv/grid_sample.h"

#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

constexpr int kMaxDims = 3, kMaxCorners = 8;

double Floor(double v) { return __builtin_floor(v); }
float Floor(float v) { return __builtin_floorf(v); }
double Nearest(double v) { return __builtin_nearbyint(v); }
float Nearest(float v) { return __builtin_nearbyintf(v); }
double Remainder(double a, double b) { return __builtin_fmod(a, b); }
float Remainder(float a, float b) { return __builtin_fmodf(a, b); }

// The sizes of a call, as this rank has them: x [n, c, in...], grid [n, points, dims].
struct Grid {
  int dims;
  int64_t n, c, points, plane;
  int64_t in[kMaxDims];
  GridMode mode;
  GridPadding padding;
  bool corners;
};

Grid GridOf(const TensorRef& x, const TensorRef& grid, const Attr* attrs) {
  Grid g;
  g.dims = x.ndim - 2;
  g.n = x.sizes[0];
  g.c = x.sizes[1];
  g.points = ProductOf(grid, 1, grid.ndim - 1);
  g.plane = ProductOf(x, 2, x.ndim);
  for (int d = 0; d < g.dims; ++d) g.in[d] = x.sizes[2 + d];
  g.mode = static_cast<GridMode>(attrs[0].i);
  g.padding = static_cast<GridPadding>(attrs[1].i);
  g.corners = attrs[2].i != 0;
  return g;
}

// A place along one dim, and its derivative by the number in the grid.
template <class T>
struct Place {
  T at, slope;
};

// Reflected at low / 2 and high / 2 until it is between.
template <class T>
void Reflect(Place<T>* p, int64_t low, int64_t high) {
  if (low == high) {
    *p = {0, 0};
    return;
  }
  const T least = static_cast<T>(low) / 2, span = static_cast<T>(high - low) / 2;
  T away = p->at - least;
  if (away < 0) {
    away = -away;
    p->slope = -p->slope;
  }
  const T extra = Remainder(away, span), flips = Floor(away / span);
  const bool odd = Remainder(flips, T(2)) != 0;
  p->at = odd ? span - extra + least : extra + least;
  if (odd) p->slope = -p->slope;
}

template <class T>
Place<T> PlaceOf(const Grid& g, T v, int64_t in) {
  const T size = static_cast<T>(in);
  Place<T> p = g.corners ? Place<T>{(v + 1) / 2 * (size - 1), (size - 1) / 2}
                         : Place<T>{((v + 1) * size - 1) / 2, size / 2};
  if (g.padding == GridPadding::kReflection) {
    g.corners ? Reflect(&p, 0, 2 * (in - 1)) : Reflect(&p, -1, 2 * in - 1);
  }
  if (g.padding != GridPadding::kZeros) {
    if (!(p.at > 0)) p = {0, 0};
    if (p.at >= size - 1) p = {size - 1, 0};
  }
  // Far outside, and what is no number: nowhere, but an integer.
  if (!(p.at > T(-1e9) && p.at < T(1e9))) p = {-100, p.slope};
  return p;
}

// The elements that a point reads: offsets in a plane, -1 outside of it, their weights, and the
// derivatives of those by the numbers in the grid.
template <class T>
struct Corners {
  int count;
  int64_t offset[kMaxCorners];
  T weight[kMaxCorners], slope[kMaxCorners][kMaxDims];
};

// `v`: the numbers of the point, of the last dim first.
template <class T>
Corners<T> CornersOf(const Grid& g, const T* v) {
  int64_t low[kMaxDims];
  T part[kMaxDims], slope[kMaxDims];
  const bool nearest = g.mode == GridMode::kNearest;
  for (int d = 0; d < g.dims; ++d) {
    const Place<T> p = PlaceOf(g, v[g.dims - 1 - d], g.in[d]);
    const T first = nearest ? Nearest(p.at) : Floor(p.at);
    low[d] = static_cast<int64_t>(first);
    part[d] = nearest ? T(0) : p.at - first;
    slope[d] = nearest ? T(0) : p.slope;
  }
  Corners<T> all;
  all.count = nearest ? 1 : 1 << g.dims;
  for (int k = 0; k < all.count; ++k) {
    all.offset[k] = 0;
    all.weight[k] = 1;
    for (int e = 0; e < g.dims; ++e) all.slope[k][e] = slope[e];
    for (int d = 0; d < g.dims; ++d) {
      const bool high = (k >> d & 1) != 0;
      const int64_t i = low[d] + (high ? 1 : 0);
      const bool inside = i >= 0 && i < g.in[d] && all.offset[k] >= 0;
      all.offset[k] = inside ? all.offset[k] * g.in[d] + i : -1;
      const T weight = high ? part[d] : T(1) - part[d];
      all.weight[k] *= weight;
      for (int e = 0; e < g.dims; ++e) all.slope[k][e] *= e != d ? weight : high ? T(1) : T(-1);
    }
  }
  return all;
}

// x [n, c, in..], grid [n, out.., dims]; mode, padding, corners -> y [n, c, out..]
template <class T>
void GridSampleOf(const KernelCall& c) {
  const Grid g = GridOf(c.in[0], c.in[1], c.attrs);
  const auto* points = static_cast<const T*>(c.in[1].data);
  for (int64_t n = 0; n < g.n; ++n) {
    const T* x = static_cast<const T*>(c.in[0].data) + n * g.c * g.plane;
    T* y = static_cast<T*>(c.out[0].data) + n * g.c * g.points;
    for (int64_t p = 0; p < g.points; ++p, points += g.dims) {
      const Corners<T> all = CornersOf(g, points);
      for (int64_t channel = 0; channel < g.c; ++channel) {
        T sum = 0;
        for (int k = 0; k < all.count; ++k) {
          if (all.offset[k] >= 0) sum += x[channel * g.plane + all.offset[k]] * all.weight[k];
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
      const Corners<T> all = CornersOf(g, points);
      for (int d = 0; d < g.dims; ++d) dgrid[d] = 0;
      for (int64_t channel = 0; channel < g.c; ++channel) {
        const T v = dy[channel * g.points + p];
        for (int k = 0; k < all.count; ++k) {
          if (all.offset[k] < 0) continue;
          const int64_t at = channel * g.plane + all.offset[k];
          dx[at] += v * all.weight[k];
          for (int d = 0; d < g.dims; ++d) dgrid[g.dims - 1 - d] += v * x[at] * all.slope[k][d];
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
