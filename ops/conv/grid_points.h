// Where the points of a grid lie among the elements of x: what grid_sample and its gradients read,
// on the CPU and in device code, over two or three spatial dims.
#pragma once

#include <cstdint>

#include "dtensor/ops/conv/grid_sample.h"
#include "dtensor/ops/cpu/arithmetic.h"
#include "dtensor/tensor/kernel.h"

#ifdef __CUDACC__  // so that no array is indexed, which would lie in local memory then
#define DT_UNROLL _Pragma("unroll")
#else
#define DT_UNROLL
#endif

namespace dtensor {
namespace DT_LEVEL_NS {

inline constexpr int kMaxGridDims = 3, kMaxCorners = 8;

// The sizes of a call, as this rank has them: x [n, c, in...], grid [n, points, dims].
struct Grid {
  int dims, num_corners;  // elements that a point reads
  int64_t n, c, points, plane;
  int64_t in[kMaxGridDims];
  GridMode mode;
  GridPadding padding;
  bool corners;
};

// attrs: mode, padding, corners
static inline Grid GridOf(const TensorRef& x, const TensorRef& grid, const Attr* attrs) {
  Grid g = {};
  g.dims = x.ndim - 2;
  g.n = x.sizes[0];
  g.c = x.sizes[1];
  g.points = g.plane = 1;
  for (int d = 1; d < grid.ndim - 1; ++d) g.points *= grid.sizes[d];
  for (int d = 0; d < g.dims; ++d) {
    g.in[d] = x.sizes[2 + d];
    g.plane *= g.in[d];
  }
  g.mode = static_cast<GridMode>(attrs[0].i);
  g.padding = static_cast<GridPadding>(attrs[1].i);
  g.corners = attrs[2].i != 0;
  g.num_corners = g.mode == GridMode::kNearest ? 1 : 1 << g.dims;
  return g;
}

// A place along one dim, and its derivative by the number in the grid.
template <class T>
struct GridPlace {
  T at, slope;
};

// Reflected at low / 2 and high / 2 until it is between.
template <class T>
DT_MATH void Reflect(GridPlace<T>* p, int64_t low, int64_t high) {
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
  const T extra = Fmod(away, span), flips = Floor(away / span);
  const bool odd = Fmod(flips, T(2)) != 0;
  p->at = odd ? span - extra + least : extra + least;
  if (odd) p->slope = -p->slope;
}

template <class T>
DT_MATH GridPlace<T> PlaceOf(const Grid& g, T v, int64_t in) {
  const T size = static_cast<T>(in);
  GridPlace<T> p = g.corners ? GridPlace<T>{(v + 1) / 2 * (size - 1), (size - 1) / 2}
                             : GridPlace<T>{((v + 1) * size - 1) / 2, size / 2};
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

// A point by dims of x: the element at or before it, what is left to it from there, and how that
// changes with the number in the grid.
template <class T>
struct GridPoint {
  int64_t low[kMaxGridDims];
  T part[kMaxGridDims], slope[kMaxGridDims];
};
// number(k): number k of the point; the first is of the last dim.
template <class T, class Number>
DT_MATH GridPoint<T> PointOf(const Grid& g, const Number& number) {
  GridPoint<T> point = {};
  const bool nearest = g.mode == GridMode::kNearest;
  DT_UNROLL
  for (int d = 0; d < kMaxGridDims; ++d) {
    if (d >= g.dims) continue;
    const GridPlace<T> p = PlaceOf(g, number(g.dims - 1 - d), g.in[d]);
    const T first = nearest ? RoundEven(p.at) : Floor(p.at);
    point.low[d] = static_cast<int64_t>(first);
    point.part[d] = nearest ? T(0) : p.at - first;
    point.slope[d] = nearest ? T(0) : p.slope;
  }
  return point;
}

// One of the elements that a point reads: its offset in a plane, -1 outside of it, its weight, and
// the derivatives of that by the numbers in the grid, in the order of x's dims.
template <class T>
struct GridCorner {
  int64_t offset;
  T weight, slope[kMaxGridDims];
};
// Bit d of k: the element after the point in dim d, not the one before.
template <class T>
DT_MATH GridCorner<T> CornerOf(const Grid& g, const GridPoint<T>& point, int k) {
  GridCorner<T> c = {0, 1, {point.slope[0], point.slope[1], point.slope[2]}};
  DT_UNROLL
  for (int d = 0; d < kMaxGridDims; ++d) {
    if (d >= g.dims) continue;
    const bool high = (k >> d & 1) != 0;
    const int64_t i = point.low[d] + (high ? 1 : 0);
    const bool inside = i >= 0 && i < g.in[d] && c.offset >= 0;
    c.offset = inside ? c.offset * g.in[d] + i : -1;
    const T weight = high ? point.part[d] : T(1) - point.part[d];
    c.weight *= weight;
    DT_UNROLL
    for (int e = 0; e < kMaxGridDims; ++e) c.slope[e] *= e != d ? weight : high ? T(1) : T(-1);
  }
  return c;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
