// Running sums, products and extremes along a dim. Sums and products of float32 run in float64 and
// are rounded once per element.
#include "dtensor/ops/cpu/math.h"
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// Start: of nothing; Next: with one element more; Value: of what has been taken in.
template <class T>
struct Sums {
  using State = T;
  static T Start() { return T(0); }
  DT_MATH T Next(T before, T x) { return Add(before, x); }
  DT_MATH T Value(T all) { return all; }
};
template <class T>
struct Products {
  using State = T;
  static T Start() { return T(1); }
  DT_MATH T Next(T before, T x) { return Mul(before, x); }
  DT_MATH T Value(T all) { return all; }
};
// The logarithm of a running sum of exponentials, which is kept as times of the largest of them: no
// element waits for the logarithm of the one before it.
template <class T>
struct LogSums {
  struct State {
    T high, times;
  };
  static State Start() { return {-static_cast<T>(__builtin_inf()), T(0)}; }
  DT_MATH State Next(State before, T x) {
    const T high = Maximum(before.high, x), low = before.high < x ? before.high : x;
    const T gap = low == high ? T(0) : low - high;  // infinities of one sign have no difference
    const T e = Exp(gap);
    return {high, before.high < x ? before.times * e + T(1) : before.times + e};
  }
  DT_MATH T Value(State all) { return all.high + Log(all.times); }
};

// A dim of n between outer and inner ones, walked from either end.
struct Lines {
  int64_t outer, n, inner, first, step;
  Lines(const TensorRef& x, int dim, bool reverse)
      : outer(ProductOf(x, 0, dim)),
        n(x.sizes[dim]),
        inner(ProductOf(x, dim + 1, x.ndim)),
        first(reverse ? (n - 1) * inner : 0),
        step(reverse ? -inner : inner) {}
};

// attrs: dim, reverse, exclusive (each element before it is added).
template <class T, class Scan>
void ScanLines(const KernelCall& c) {
  const Lines l(c.in[0], static_cast<int>(c.attrs[0].i), c.attrs[1].i != 0);
  const bool exclusive = c.attrs[2].i != 0;
  const T* in = static_cast<const T*>(c.in[0].data) + l.first;
  T* out = static_cast<T*>(c.out[0].data) + l.first;
  if (l.n == 0) return;
  using State = typename Scan::State;
  auto* states =
      static_cast<State*>(c.workspace->Allocate(l.inner * static_cast<int64_t>(sizeof(State))));
  for (int64_t o = 0; o < l.outer; ++o) {
    const T* x = in + o * l.n * l.inner;
    T* y = out + o * l.n * l.inner;
    if (l.inner == 1) {
      State state = Scan::Start();
      for (int64_t i = 0; i < l.n; ++i, x += l.step, y += l.step) {
        const State next = Scan::Next(state, *x);
        *y = static_cast<T>(Scan::Value(exclusive ? state : next));
        state = next;
      }
      continue;
    }
    for (int64_t j = 0; j < l.inner; ++j) states[j] = Scan::Start();
    for (int64_t i = 0; i < l.n; ++i, x += l.step, y += l.step) {
      for (int64_t j = 0; j < l.inner; ++j) {
        const State next = Scan::Next(states[j], x[j]);
        y[j] = static_cast<T>(Scan::Value(exclusive ? states[j] : next));
        states[j] = next;
      }
    }
  }
}

template <template <class> class Scan>
void ScanKernel(const KernelCall& c) {
  if (c.in[0].dtype == DType::kI64) return ScanLines<int64_t, Scan<int64_t>>(c);
  RunFloating(c, ScanLines<double, Scan<double>>, ScanLines<float, Scan<double>>);
}
void LogSumsKernel(const KernelCall& c) {
  RunFloating(c, ScanLines<double, LogSums<double>>, ScanLines<float, LogSums<double>>);
}

// dx[i] = (product of x before i) (dy[i] + x[i + 1] (dy[i + 1] + x[i + 2] (...))): no division, so
// zeros need nothing of their own.
template <class T>
void CumprodBackward(const KernelCall& c) {
  const Lines l(c.in[0], static_cast<int>(c.attrs[0].i), false);
  if (l.n * l.inner == 0) return;
  auto* run = static_cast<double*>(c.workspace->Allocate(l.inner * 8));
  for (int64_t o = 0; o < l.outer; ++o) {
    const int64_t start = o * l.n * l.inner;
    const T* dy = static_cast<const T*>(c.in[0].data) + start;
    const T* x = static_cast<const T*>(c.in[1].data) + start;
    T* dx = static_cast<T*>(c.out[0].data) + start;
    for (int64_t j = 0; j < l.inner; ++j) run[j] = 1;
    for (int64_t i = 0; i < l.n * l.inner; i += l.inner) {
      for (int64_t j = 0; j < l.inner; ++j) {
        dx[i + j] = static_cast<T>(run[j]);
        run[j] *= static_cast<double>(x[i + j]);
      }
    }
    for (int64_t i = (l.n - 1) * l.inner; i >= 0; i -= l.inner) {
      const bool last = i == (l.n - 1) * l.inner;
      for (int64_t j = 0; j < l.inner; ++j) {
        const double after = last ? 0 : static_cast<double>(x[i + l.inner + j]) * run[j];
        run[j] = static_cast<double>(dy[i + j]) + after;
        dx[i + j] = static_cast<T>(dx[i + j] * run[j]);
      }
    }
  }
}
void CumprodBackwardKernel(const KernelCall& c) {
  RunFloating(c, CumprodBackward<double>, CumprodBackward<float>);
}

// Of equal elements the last is the extreme; NaN is one until another NaN comes.
struct Rising {
  template <class T>
  DT_MATH bool Takes(T best, T x) {
    return (x != x) | ((best == best) & (x >= best));
  }
};
struct Falling {
  template <class T>
  DT_MATH bool Takes(T best, T x) {
    return (x != x) | ((best == best) & (x <= best));
  }
};

// The first element from i on that is taken, or n. Several are looked at in one go.
template <class T, class Order>
int64_t NextTaken(const T* x, int64_t i, int64_t n, T best) {
  constexpr int64_t kAtOnce = 32;  // as a vector loop: fewer would be unrolled
  for (; i + kAtOnce <= n; i += kAtOnce) {
    int taken = 0;
    for (int64_t k = 0; k < kAtOnce; ++k) taken |= Order::Takes(best, x[i + k]);
    if (taken != 0) break;
  }
  while (i < n && !Order::Takes(best, x[i])) ++i;
  return i;
}

// In stretches of one extreme, of which most lines have few.
template <class T, class Order>
void ExtremeLine(const T* x, int64_t n, T* values, int64_t* indices) {
  for (int64_t i = 0; i < n;) {
    const int64_t at = i;
    const T best = x[at];
    i = NextTaken<T, Order>(x, i + 1, n, best);
    for (int64_t k = at; k < i; ++k) values[k] = best;
    for (int64_t k = at; k < i; ++k) indices[k] = at;
  }
}

template <class T, class Order>
void ExtremeLines(const KernelCall& c) {
  const Lines l(c.in[0], static_cast<int>(c.attrs[0].i), false);
  const T* x = static_cast<const T*>(c.in[0].data);
  T* values = static_cast<T*>(c.out[0].data);
  auto* indices = static_cast<int64_t*>(c.out[1].data);
  if (l.inner == 1) {
    for (int64_t o = 0; o < l.outer; ++o) {
      ExtremeLine<T, Order>(x + o * l.n, l.n, values + o * l.n, indices + o * l.n);
    }
    return;
  }
  for (int64_t o = 0; o < l.outer; ++o) {
    for (int64_t i = 0; i < l.n; ++i) {
      for (int64_t j = 0; j < l.inner; ++j, ++x, ++values, ++indices) {
        const bool takes = i == 0 || Order::Takes(values[-l.inner], *x);
        *values = takes ? *x : values[-l.inner];
        *indices = takes ? i : indices[-l.inner];
      }
    }
  }
}

template <class Order>
void ExtremeKernel(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return ExtremeLines<int64_t, Order>(c);
    case DType::kI32:
      return ExtremeLines<int32_t, Order>(c);
    case DType::kU8:
    case DType::kBool:
      return ExtremeLines<uint8_t, Order>(c);
    default:
      return RunFloating(c, ExtremeLines<double, Order>, ExtremeLines<float, Order>);
  }
}

}  // namespace

void RegisterScan(AddKernelFn add) {
  constexpr uint32_t kSummed = kFloatDTypes | DTypeBit(DType::kI64);
  add("cumsum", ScanKernel<Sums>, kSummed, KernelLayout::kContiguous);
  add("cumprod", ScanKernel<Products>, kSummed, KernelLayout::kContiguous);
  add("cumprod_backward", CumprodBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("logcumsumexp", LogSumsKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("cummax", ExtremeKernel<Rising>, kAllDTypes, KernelLayout::kContiguous);
  add("cummin", ExtremeKernel<Falling>, kAllDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
