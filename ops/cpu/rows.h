// Loops over one row that every family uses. Sums run in 16 fixed lanes that are added in a fixed
// order, so that all CPU levels give the same bits.
#pragma once

#include <cstdint>

#include "dtensor/ops/cpu/math.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {
namespace DT_LEVEL_NS {

static constexpr int kLanes = 16;

template <class T>
DT_MATH T AddLanes(const T* lane) {
  T a[8], b[4];
  for (int k = 0; k < 8; ++k) a[k] = lane[k] + lane[k + 8];
  for (int k = 0; k < 4; ++k) b[k] = a[k] + a[k + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

// Sum of f(i) for i in [0, n).
template <class T, class F>
DT_MATH T SumOf(int64_t n, const F& f) {
  T lane[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] += f(i + k);
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] += f(i);
  return AddLanes(lane);
}

// The first f(i) in the order for i in [0, n), n > 0; NaN if there is one. Order::Of(a, b) is a
// where it comes before b. NaN is looked for beside, which leaves vectors one instruction for each.
template <class Order, class T, class F>
DT_MATH T FirstOf(int64_t n, const F& f) {
  T lane[kLanes];
  int32_t nan[kLanes] = {};
  for (int k = 0; k < kLanes; ++k) lane[k] = f(0);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) {
      const T v = f(i + k);
      lane[k] = Order::Of(v, lane[k]);
      nan[k] |= v != v ? 1 : 0;
    }
  }
  for (int k = 0; i < n; ++i, ++k) {
    const T v = f(i);
    lane[k] = Order::Of(v, lane[k]);
    nan[k] |= v != v ? 1 : 0;
  }
  T first = lane[0];
  for (int k = 1; k < kLanes; ++k) {
    first = Order::Of(lane[k], first);
    nan[0] |= nan[k];
  }
  return nan[0] != 0 ? static_cast<T>(__builtin_nan("")) : first;
}
struct LargerFirst {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return a > b ? a : b;
  }
};
struct SmallerFirst {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return a < b ? a : b;
  }
};
// Largest f(i); -inf of nothing.
template <class T, class F>
DT_MATH T MaxOf(int64_t n, const F& f) {
  return n == 0 ? static_cast<T>(-__builtin_inf()) : FirstOf<LargerFirst, T>(n, f);
}
template <class T>
DT_MATH T MaxOf(const T* x, int64_t n) {
  return MaxOf<T>(n, [x](int64_t i) { return x[i]; });
}

static inline int64_t ProductOf(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
