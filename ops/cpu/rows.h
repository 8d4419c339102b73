// Loops over one row that every family uses. Sums and products run in 16 fixed lanes that are
// joined in a fixed order, so that all CPU levels give the same bits.
#pragma once

#include <cstdint>

#include "dtensor/ops/cpu/math.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {
namespace DT_LEVEL_NS {

static constexpr int kLanes = 16;

// Joins `lanes` by halves: k with k + lanes / 2, and so on.
template <int lanes, class Join, class T>
DT_MATH T JoinLanes(T* lane) {
  if constexpr (lanes == 1) {
    return lane[0];
  } else {
    for (int k = 0; k < lanes / 2; ++k) lane[k] = Join::Of(lane[k], lane[k + lanes / 2]);
    return JoinLanes<lanes / 2, Join>(lane);
  }
}

struct JoinBySum {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return a + b;
  }
};
// Joins f(i) for i in [0, n), and `start`.
template <class Join, class T, class F>
DT_MATH T JoinOf(T start, int64_t n, const F& f) {
  T lane[kLanes];
  for (int k = 0; k < kLanes; ++k) lane[k] = start;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    _Pragma("GCC ivdep") for (int k = 0; k < kLanes; ++k) lane[k] = Join::Of(lane[k], f(i + k));
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] = Join::Of(lane[k], f(i));
  return JoinLanes<kLanes, Join>(lane);
}

// Sum of f(i) for i in [0, n).
template <class T, class F>
DT_MATH T SumOf(int64_t n, const F& f) {
  return JoinOf<JoinBySum, T>(T(0), n, f);
}

// Order::Before(a, b): whether a comes before b; NaN does before all numbers, and of two that are
// equal neither does.
struct LargerFirst {
  template <class T>
  DT_MATH bool Before(T a, T b) {
    return (a > b) | ((a != a) & (b == b));
  }
};
struct SmallerFirst {
  template <class T>
  DT_MATH bool Before(T a, T b) {
    return (a < b) | ((a != a) & (b == b));
  }
};
// Keeps in each of `lanes` the first of those f(i), from `*at` on, that fall to it.
template <int lanes, class Order, class T, class F>
DT_MATH void FirstInLanes(int64_t n, const F& f, int64_t* at, T* lane) {
  for (; *at + lanes <= n; *at += lanes) {
    for (int k = 0; k < lanes; ++k) {
      const T v = f(*at + k);
      lane[k] = Order::Before(v, lane[k]) ? v : lane[k];
    }
  }
}
// The first f(i) in the order for i in [0, n), n > 0. Four vectors wait for each other less than
// one.
template <class Order, class T, class F>
DT_MATH T FirstOf(int64_t n, const F& f) {
  constexpr int kMany = 4 * kLanes;
  T lane[kMany];
  for (int k = 0; k < kMany; ++k) lane[k] = f(0);
  int64_t i = 0;
  FirstInLanes<kMany, Order>(n, f, &i, lane);
  FirstInLanes<kLanes, Order>(n, f, &i, lane);
  for (; i < n; ++i) lane[0] = Order::Before(f(i), lane[0]) ? f(i) : lane[0];
  for (int k = kLanes; k < kMany; ++k) {
    lane[k % kLanes] = Order::Before(lane[k], lane[k % kLanes]) ? lane[k] : lane[k % kLanes];
  }
  T first = lane[0];
  for (int k = 1; k < kLanes; ++k) first = Order::Before(lane[k], first) ? lane[k] : first;
  return first;
}
// The largest number, which takes one instruction.
struct JoinByMax {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return b > a ? b : a;
  }
};
struct JoinByNan {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return b == b ? a : b;
  }
};
// Largest f(i) of floats, -inf of nothing; a NaN, which is looked for besides, wins.
template <class T, class F>
DT_MATH T MaxOf(int64_t n, const F& f) {
  constexpr int kMany = 2 * kLanes;
  T lane[kMany], nan[kMany];
  for (int k = 0; k < kMany; ++k) {
    lane[k] = static_cast<T>(-__builtin_inf());
    nan[k] = T(0);
  }
  const auto take = [&](int k, T v) {
    lane[k] = JoinByMax::Of(lane[k], v);
    nan[k] = JoinByNan::Of(nan[k], v);
  };
  int64_t i = 0;
  for (; i + kMany <= n; i += kMany) {
    for (int k = 0; k < kMany; ++k) take(k, f(i + k));
  }
  for (; i + kLanes <= n; i += kLanes) {
    for (int k = 0; k < kLanes; ++k) take(k, f(i + k));
  }
  // Beside the lanes, which stay in registers.
  T most = static_cast<T>(-__builtin_inf()), any = T(0);
  for (; i < n; ++i) {
    most = JoinByMax::Of(most, f(i));
    any = JoinByNan::Of(any, f(i));
  }
  most = JoinByMax::Of(most, JoinLanes<kMany, JoinByMax>(lane));
  any = JoinByNan::Of(any, JoinLanes<kMany, JoinByNan>(nan));
  return any == any ? most : any;
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
