// Loops over one row that every family uses. Sums and products run in fixed lanes that are joined
// in a fixed order, so that all CPU levels give the same bits.
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
// Joins f(i) for i in [0, n), and `start`, in `lanes`: each of them, and all.
template <int lanes, class Join, class T, class F>
DT_MATH void FillLanes(T start, int64_t n, const F& f, T* lane) {
  for (int k = 0; k < lanes; ++k) lane[k] = start;
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    _Pragma("GCC ivdep") for (int k = 0; k < lanes; ++k) lane[k] = Join::Of(lane[k], f(i + k));
  }
  for (int k = 0; i < n; ++i, ++k) lane[k] = Join::Of(lane[k], f(i));
}
template <int lanes, class Join, class T, class F>
DT_MATH T JoinOf(T start, int64_t n, const F& f) {
  T lane[lanes];
  FillLanes<lanes, Join>(start, n, f, lane);
  return JoinLanes<lanes, Join>(lane);
}

// Sum of f(i) for i in [0, n).
template <class T, class F>
DT_MATH T SumOf(int64_t n, const F& f) {
  return JoinOf<kLanes, JoinBySum, T>(T(0), n, f);
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
// The largest number and the least, which take one instruction: of 0 and -0 any. The zero that
// wins.
struct JoinByMax {
  static constexpr bool kNegativeZero = false;
  template <class T>
  DT_MATH T Of(T a, T b) {
    return b > a ? b : a;
  }
};
struct JoinByMin {
  static constexpr bool kNegativeZero = true;
  template <class T>
  DT_MATH T Of(T a, T b) {
    return b < a ? b : a;
  }
};
struct JoinByNan {
  template <class T>
  DT_MATH T Of(T a, T b) {
    return b == b ? a : b;
  }
};
// Joins f(i) of floats by maximum or minimum, `start` of nothing; a NaN wins, and 0 is more than
// -0. Sums beside them, for which other units are free, are NaN if one is there: else only where
// infinities of both signs are, or large numbers make them. Zeros are looked at where one won.
template <class Join, class T, class F>
DT_MATH T ExtremeOf(T start, int64_t n, const F& f) {
  constexpr int kMany = 2 * kLanes;
  T lane[kMany], sum[kMany];
  for (int k = 0; k < kMany; ++k) {
    lane[k] = start;
    sum[k] = T(0);
  }
  int64_t i = 0;
  for (; i + kMany <= n; i += kMany) {
    for (int k = 0; k < kMany; ++k) {
      const T v = f(i + k);
      lane[k] = Join::Of(lane[k], v);
      sum[k] += v;
    }
  }
  // Beside the lanes, which stay in registers.
  T most = start, any = T(0);
  for (; i < n; ++i) {
    most = Join::Of(most, f(i));
    any += f(i);
  }
  int32_t odd = any != any ? 1 : 0;
  for (int k = 0; k < kMany; ++k) odd |= sum[k] != sum[k] ? 1 : 0;
  if (odd != 0) {
    T nan = T(0);
    for (i = 0; i < n; ++i) nan = JoinByNan::Of(nan, f(i));
    if (nan != nan) return nan;
  }
  most = Join::Of(most, JoinLanes<kMany, Join>(lane));
  if (most != T(0)) return most;
  int32_t wins = 0;
  for (i = 0; i < n; ++i) {
    const T v = f(i);
    wins |= (v == T(0)) & (SignBit(v) == Join::kNegativeZero) ? 1 : 0;
  }
  return (wins != 0) == Join::kNegativeZero ? -T(0) : T(0);
}
template <class T>
DT_MATH T MaxOf(const T* x, int64_t n) {
  return ExtremeOf<JoinByMax, T>(static_cast<T>(-__builtin_inf()), n,
                                 [x](int64_t i) { return x[i]; });
}

static inline int64_t ProductOf(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
