// Running sums, products and extremes along a dim. A team of threads walks a line in tiles, each a
// parallel prefix (Hillis and Steele 1986) of what came before and its elements. Sums and products
// of floats run in float64 and are rounded once per element. A tile of which any part leaves the
// range of float64 is walked again from its first element to its last, as on the CPU: there the
// parts that a prefix joins are none of the running sums and products.
#include <cfloat>
#include <type_traits>

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {
namespace {

// A dim of n between outer and inner ones; a block has kThreads / lanes lines.
struct LinePlan {
  int64_t n, inner, lines;
  int lanes;
  LinePlan(const TensorRef& x, int64_t axis) {
    const int dim = x.ndim == 0 ? 0 : static_cast<int>(axis);
    n = x.ndim == 0 ? 1 : x.sizes[dim];
    inner = ProductOf(x, dim + 1, x.ndim);
    lines = ProductOf(x, 0, dim) * inner;
    lanes = PowerOfTwo(n, kThreads);
  }
  unsigned blocks() const {
    return static_cast<unsigned>((lines * lanes + kThreads - 1) / kThreads);
  }
  __device__ int64_t At(int64_t line, int64_t i) const {
    return (line / inner * n + i) * inner + line % inner;
  }
};

// A scan is a struct by value: Acc, Start(), Term(at, i), Join(before, after), Put(at, before,
// with): what came before an element, and what is with it. Where kMayLeave, Left(a, b, joined) says
// whether joining two parts has left the range in which the order does not matter.
template <class Scan>
__global__ void __launch_bounds__(kThreads) ScanLines(Scan scan, LinePlan plan, bool reverse) {
  using Acc = typename Scan::Acc;
  __shared__ alignas(Acc) char memory[2 * kThreads * sizeof(Acc)];
  __shared__ unsigned left[kThreads];  // whether that line's tile has
  const int t = static_cast<int>(threadIdx.x), lane = t % plan.lanes, first = t - lane;
  const int64_t line = (blockIdx.x * int64_t{kThreads} + t) / plan.lanes;
  Acc* from = reinterpret_cast<Acc*>(memory);
  Acc* to = from + kThreads;
  Acc carry = scan.Start();
  for (int64_t tile = 0; tile < plan.n; tile += plan.lanes) {
    const int64_t k = tile + lane, i = reverse ? plan.n - 1 - k : k;
    const bool mine = line < plan.lines && k < plan.n;
    const int64_t at = mine ? plan.At(line, i) : 0;
    const Acc term = mine ? scan.Term(at, i) : scan.Start();
    from[t] = term;
    if (Scan::kMayLeave && lane == 0) left[first] = 0;
    __syncthreads();
    bool leaves = false;
    const auto join = [&](const Acc& a, const Acc& b) {
      const Acc joined = scan.Join(a, b);
      if constexpr (Scan::kMayLeave) leaves = leaves || scan.Left(a, b, joined);
      return joined;
    };
    for (int d = 1; d < plan.lanes; d *= 2) {
      to[t] = lane >= d ? join(from[t - d], from[t]) : from[t];
      __syncthreads();
      Acc* const swap = from;
      from = to;
      to = swap;
    }
    Acc before = lane == 0 ? carry : scan.Join(carry, from[t - 1]), with = join(carry, from[t]);
    Acc all = scan.Join(carry, from[first + plan.lanes - 1]);
    if constexpr (Scan::kMayLeave) {
      to[t] = term;
      if (leaves) atomicOr(left + first, 1u);
      __syncthreads();
      if (left[first] != 0) {
        all = carry;
        for (int l = 0; l < plan.lanes; ++l) {
          if (l == lane) before = all;
          all = scan.Join(all, to[first + l]);
          if (l == lane) with = all;
        }
      }
    }
    if (mine) scan.Put(at, before, with);
    carry = all;
    __syncthreads();
  }
}

struct Sums {
  template <class T>
  __device__ static T Start() {
    return T(0);
  }
  __device__ static double Join(double a, double b) { return a + b; }
  __device__ static bool Left(double a, double b, double sum) {
    return isfinite(a) && isfinite(b) && !isfinite(sum);
  }
  __device__ static int64_t Join(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct Products {
  template <class T>
  __device__ static T Start() {
    return T(1);
  }
  __device__ static double Join(double a, double b) { return a * b; }
  // Zeros, infinities and NaN that are elements stay what they are in any order.
  __device__ static bool Left(double a, double b, double product) {
    const bool numbers = a != 0 && b != 0 && isfinite(a) && isfinite(b);
    const double least = fmin(fmin(fabs(a), fabs(b)), fabs(product));
    return numbers && !(least >= DBL_MIN && isfinite(product));
  }
  __device__ static int64_t Join(int64_t a, int64_t b) {
    return static_cast<int64_t>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
// The logarithm of a sum of exponentials: never further from its terms than their largest.
struct LogSums {
  template <class T>
  __device__ static T Start() {
    return -static_cast<T>(INFINITY);
  }
  __device__ static double Join(double a, double b) {
    const double high = Maximum(a, b), low = a < b ? a : b;
    const double gap = low == high ? 0 : low - high;  // infinities have no difference
    return high + log(1 + exp(gap));
  }
  __device__ static bool Left(double, double, double) { return false; }
};

template <class X, class T, class Op>
struct Running {
  using Acc = T;
  static constexpr bool kMayLeave = std::is_same_v<T, double>;  // integers wrap around
  const X* x;
  X* y;
  bool exclusive;  // each element before it is added
  __device__ Acc Start() const { return Op::template Start<T>(); }
  __device__ Acc Term(int64_t at, int64_t) const { return static_cast<T>(Widen(x[at])); }
  __device__ Acc Join(Acc a, Acc b) const { return Op::Join(a, b); }
  __device__ bool Left(Acc a, Acc b, Acc joined) const { return Op::Left(a, b, joined); }
  __device__ void Put(int64_t at, Acc before, Acc with) const {
    Store(static_cast<Computed<X>>(exclusive ? before : with), y + at);
  }
};

template <class Scan>
void RunScan(const KernelCall& c, const Scan& scan, const LinePlan& plan, bool reverse) {
  if (plan.lines * plan.n == 0) return;
  ScanLines<<<plan.blocks(), kThreads, 0, StreamOf(c)>>>(scan, plan, reverse);
  CheckLaunch();
}
// attrs: dim, reverse, exclusive
template <class Op>
void ScanFloats(const KernelCall& c) {
  const LinePlan plan(c.in[0], c.attrs[0].i);
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    RunScan(c, Running<X, double, Op>{In<X>(c, 0), Out<X>(c, 0), c.attrs[2].i != 0}, plan,
            c.attrs[1].i != 0);
  });
}
template <class Op>
void ScanKernel(const KernelCall& c) {
  if (c.in[0].dtype != DType::kI64) return ScanFloats<Op>(c);
  RunScan(c,
          Running<int64_t, int64_t, Op>{In<int64_t>(c, 0), Out<int64_t>(c, 0), c.attrs[2].i != 0},
          LinePlan(c.in[0], c.attrs[0].i), c.attrs[1].i != 0);
}

// Of equal elements the last is the extreme; NaN is one until another NaN comes.
template <class X, bool kRising>
struct Extremes {
  static constexpr bool kMayLeave = false;
  struct Acc {
    Computed<X> value;
    int64_t place;  // -1: none yet
  };
  const X* x;
  X* values;
  int64_t* places;
  __device__ Acc Start() const { return {Computed<X>(0), -1}; }
  __device__ Acc Term(int64_t at, int64_t i) const { return {Widen(x[at]), i}; }
  __device__ Acc Join(Acc a, Acc b) const {
    if (a.place < 0) return b;
    if (b.place < 0) return a;
    const bool ahead = kRising ? b.value >= a.value : b.value <= a.value;
    return b.value != b.value || (a.value == a.value && ahead) ? b : a;
  }
  __device__ void Put(int64_t at, Acc, Acc with) const {
    Store(with.value, values + at);
    places[at] = with.place;
  }
};
template <class X, bool kRising>
void RunExtremes(const KernelCall& c) {
  RunScan(c, Extremes<X, kRising>{In<X>(c, 0), Out<X>(c, 0), Out<int64_t>(c, 1)},
          LinePlan(c.in[0], c.attrs[0].i), false);
}
template <bool kRising>
void ExtremesKernel(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return RunExtremes<int64_t, kRising>(c);
    case DType::kI32:
      return RunExtremes<int32_t, kRising>(c);
    case DType::kU8:
    case DType::kBool:
      return RunExtremes<uint8_t, kRising>(c);
    default:
      return VisitFloat(c.in[0].dtype, [&](auto e) { RunExtremes<decltype(e), kRising>(c); });
  }
}

// dx[i] = (product of x before i) (dy[i] + x[i + 1] (dy[i + 1] + x[i + 2] (...))): no division, so
// zeros need nothing of their own. A thread per line.
template <class X>
__global__ void __launch_bounds__(kThreads)
    CumprodBackward(const X* dy, const X* x, X* dx, Computed<X>* before, LinePlan plan) {
  for (int64_t line = GridStart(); line < plan.lines; line += GridStep()) {
    double run = 1;
    for (int64_t i = 0; i < plan.n; ++i) {
      const int64_t at = plan.At(line, i);
      before[at] = static_cast<Computed<X>>(run);
      run *= static_cast<double>(Widen(x[at]));
    }
    double after = 0;
    for (int64_t i = plan.n - 1; i >= 0; --i) {
      const int64_t at = plan.At(line, i);
      run = static_cast<double>(Widen(dy[at])) + after;
      Store(static_cast<Computed<X>>(static_cast<double>(before[at]) * run), dx + at);
      after = static_cast<double>(Widen(x[at])) * run;
    }
  }
}
// dy, x; dim
void CumprodBackwardKernel(const KernelCall& c) {
  const LinePlan plan(c.in[0], c.attrs[0].i);
  if (plan.lines * plan.n == 0) return;
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    auto* before = Scratch<Computed<X>>(c, plan.lines * plan.n);
    if (before == nullptr) return;
    CumprodBackward<<<BlocksFor(plan.lines), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), In<X>(c, 1), Out<X>(c, 0), before, plan);
    CheckLaunch();
  });
}

}  // namespace

void AddScanKernels(AddKernelFn add) {
  constexpr uint32_t kSummed = kFloatDTypes | DTypeBit(DType::kI64);
  constexpr KernelLayout kContiguous = KernelLayout::kContiguous;
  add("cumsum", ScanKernel<Sums>, kSummed, kContiguous);
  add("cumprod", ScanKernel<Products>, kSummed, kContiguous);
  add("logcumsumexp", ScanFloats<LogSums>, kFloatDTypes, kContiguous);
  add("cumprod_backward", CumprodBackwardKernel, kFloatDTypes, kContiguous);
  add("cummax", ExtremesKernel<true>, kAllDTypes, kContiguous);
  add("cummin", ExtremesKernel<false>, kAllDTypes, kContiguous);
}

}  // namespace dtensor::cuda
