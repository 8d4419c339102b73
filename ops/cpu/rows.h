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

// Largest f(i) for i in [0, n), NaN if there is one; -inf of nothing.
template <class T, class F>
DT_MATH T MaxOf(int64_t n, const F& f) {
  T lane[kLanes];
  for (int k = 0; k < kLanes; ++k) lane[k] = -__builtin_inff();
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) lane[k] = Maximum(lane[k], f(i + k));
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] = Maximum(lane[k], f(i));
  T m = lane[0];
  for (int k = 1; k < kLanes; ++k) m = Maximum(m, lane[k]);
  return m;
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
