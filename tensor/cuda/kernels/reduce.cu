// Sums, products and extremes over any dims, where the extremes are, and amax_backward.
#include <type_traits>

#include "dtensor/tensor/cuda/kernels/fold.h"

namespace dtensor::cuda {
namespace {

template <class T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T>;

// Integers wrap around.
struct Sum {
  template <class T>
  __device__ static T Start() {
    return T(0);
  }
  template <class T>
  __device__ static T Term(T x) {
    return x;
  }
  template <class T>
  __device__ static T Join(T a, T b) {
    if constexpr (kIsFloat<T>) return a + b;
    return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  }
};
struct SumSquares : Sum {
  template <class T>
  __device__ static T Term(T x) {
    return x * x;
  }
};
struct Product {
  template <class T>
  __device__ static T Start() {
    return T(1);
  }
  template <class T>
  __device__ static T Term(T x) {
    return x;
  }
  template <class T>
  __device__ static T Join(T a, T b) {
    if constexpr (kIsFloat<T>) return a * b;
    return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
  }
};
// Of nothing: an infinity, or the least or greatest of the integers.
template <class T, bool kGreatest>
__device__ T Bound() {
  if constexpr (kIsFloat<T>) return static_cast<T>(kGreatest ? INFINITY : -INFINITY);
  if constexpr (std::is_unsigned_v<T>) return static_cast<T>(kGreatest ? ~T(0) : T(0));
  if constexpr (sizeof(T) == 8) return static_cast<T>(kGreatest ? INT64_MAX : INT64_MIN);
  return static_cast<T>(kGreatest ? INT32_MAX : INT32_MIN);
}
struct Max {
  template <class T>
  __device__ static T Start() {
    return Bound<T, false>();
  }
  template <class T>
  __device__ static T Term(T x) {
    return x;
  }
  template <class T>
  __device__ static T Join(T a, T b) {
    return Maximum(a, b);
  }
};
struct Min : Max {
  template <class T>
  __device__ static T Start() {
    return Bound<T, true>();
  }
  template <class T>
  __device__ static T Join(T a, T b) {
    return Minimum(a, b);
  }
};

// Reads X, computes in T, writes To.
template <class X, class T, class To, class Op>
struct OpFold {
  using Acc = T;
  const X* x;
  To* out;
  __device__ Acc Start() const { return Op::template Start<T>(); }
  __device__ Acc Term(int64_t at, int64_t, int64_t) const {
    return Op::Term(static_cast<T>(Widen(x[at])));
  }
  __device__ Acc Join(Acc a, Acc b) const { return Op::Join(a, b); }
  __device__ void Finish(int64_t o, Acc acc) const {
    if constexpr (std::is_same_v<To, Bool>) acc = acc != 0;  // the greatest byte is true
    Store(acc, out + o);
  }
};

template <class Op, class X, class T, class To>
void Reduce(const KernelCall& c) {
  RunFold(c, OpFold<X, T, To, Op>{In<X>(c, 0), Out<To>(c, 0)}, FoldPlan(c.in[0], c.attrs[0]));
}
template <class Op>
void ReduceFloats(const KernelCall& c) {
  VisitFloat(c.in[0].dtype, [&](auto x) {
    using X = decltype(x);
    Reduce<Op, X, Computed<X>, X>(c);
  });
}
// Sums and products of integers are int64, extremes have the type of the elements.
template <class Op>
void ReduceToWide(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return Reduce<Op, int64_t, int64_t, int64_t>(c);
    case DType::kI32:
      return Reduce<Op, int32_t, int64_t, int64_t>(c);
    case DType::kU8:
      return Reduce<Op, uint8_t, int64_t, int64_t>(c);
    case DType::kBool:
      return Reduce<Op, Bool, int64_t, int64_t>(c);
    default:
      return ReduceFloats<Op>(c);
  }
}
template <class Op>
void ReduceToSame(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return Reduce<Op, int64_t, int64_t, int64_t>(c);
    case DType::kI32:
      return Reduce<Op, int32_t, int32_t, int32_t>(c);
    case DType::kU8:
      return Reduce<Op, uint8_t, uint8_t, uint8_t>(c);
    case DType::kBool:
      return Reduce<Op, Bool, uint8_t, Bool>(c);
    default:
      return ReduceFloats<Op>(c);
  }
}

// The first of the elements before which no other comes; NaN comes before all numbers.
template <class X, bool kLargest>
struct PlaceFold {
  struct Acc {
    Computed<X> value;
    int64_t place;  // -1: none yet
  };
  const X* x;
  X* values;
  int64_t* places;
  __device__ static bool Before(Computed<X> a, Computed<X> b) {
    return (kLargest ? a > b : a < b) || (a != a && b == b);
  }
  __device__ Acc Start() const { return {Computed<X>(0), -1}; }
  __device__ Acc Term(int64_t at, int64_t r, int64_t) const { return {Widen(x[at]), r}; }
  __device__ Acc Join(Acc a, Acc b) const {
    if (a.place < 0) return b;
    if (b.place < 0 || Before(a.value, b.value)) return a;
    return Before(b.value, a.value) || b.place < a.place ? b : a;
  }
  __device__ void Finish(int64_t o, Acc acc) const {
    Store(acc.value, values + o);
    places[o] = acc.place;
  }
};
template <class X, bool kLargest>
void Place(const KernelCall& c) {
  const int64_t axis = c.attrs[0].i;
  RunFold(c, PlaceFold<X, kLargest>{In<X>(c, 0), Out<X>(c, 0), Out<int64_t>(c, 1)},
          FoldPlan(c.in[0], &axis, 1));
}
template <bool kLargest>
void PlaceKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  if (x.ndim > 0 && x.sizes[c.attrs[0].i] == 0) {
    return c.workspace->Fail("the dim has no elements");
  }
  switch (x.dtype) {
    case DType::kI64:
      return Place<int64_t, kLargest>(c);
    case DType::kI32:
      return Place<int32_t, kLargest>(c);
    case DType::kU8:
    case DType::kBool:
      return Place<uint8_t, kLargest>(c);
    default:
      return VisitFloat(x.dtype, [&](auto e) { Place<decltype(e), kLargest>(c); });
  }
}

// How many elements are equal to the largest.
template <class X>
struct TieFold {
  using Acc = Computed<X>;
  const X *x, *y;
  Acc* count;
  __device__ Acc Start() const { return Acc(0); }
  __device__ Acc Term(int64_t at, int64_t, int64_t o) const {
    return Widen(x[at]) == Widen(y[o]) ? Acc(1) : Acc(0);
  }
  __device__ Acc Join(Acc a, Acc b) const { return a + b; }
  __device__ void Finish(int64_t o, Acc acc) const { count[o] = acc; }
};
// dy is shared among them. Where the largest is NaN nothing is equal to it: 0 / 0.
template <class X>
__global__ void __launch_bounds__(kThreads)
    ShareAmongTies(const X* dy, const X* x, const X* y, const Computed<X>* count, Walk outputs,
                   X* dx, int64_t n) {
  using T = Computed<X>;
  for (int64_t i = GridStart(); i < n; i += GridStep()) {
    const int64_t o = outputs.At(i);
    const T share = Widen(x[i]) == Widen(y[o]) ? static_cast<T>(Widen(dy[o])) : T(0);
    Store(share / count[o], dx + i);
  }
}

// dy, x, y, all contiguous -> dx
void AmaxBackwardKernel(const KernelCall& c) {
  const TensorRef& x = c.in[1];
  const int64_t n = NumelOf(x);
  if (n == 0) return;
  const FoldPlan plan(x, c.attrs[0]);
  // From a place in x to that of its output: folded dims do not move it.
  Walk outputs;
  int64_t strides[kMaxDims], step = 1, next = c.attrs[0].n - 1;
  for (int d = x.ndim - 1; d >= 0; --d) {
    const bool folded = next >= 0 && c.attrs[0].ints[next] == d;
    if (folded) --next;
    strides[d] = folded ? 0 : step;
    if (!folded) step *= x.sizes[d];
  }
  for (int d = 0; d < x.ndim; ++d) outputs.Append(x.sizes[d], strides[d]);
  VisitFloat(x.dtype, [&](auto e) {
    using X = decltype(e);
    auto* count = Scratch<Computed<X>>(c, plan.outs);
    if (count == nullptr) return;
    RunFold(c, TieFold<X>{In<X>(c, 1), In<X>(c, 2), count}, plan);
    ShareAmongTies<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(
        In<X>(c, 0), In<X>(c, 1), In<X>(c, 2), count, outputs, Out<X>(c, 0), n);
    CheckLaunch();
  });
}

}  // namespace

void AddReduceKernels(AddKernelFn add) {
  constexpr KernelLayout kStrided = KernelLayout::kStrided;
  add("sum", ReduceToWide<Sum>, kAllDTypes, kStrided);
  add("prod", ReduceToWide<Product>, kAllDTypes, kStrided);
  add("sum_squares", ReduceFloats<SumSquares>, kFloatDTypes, kStrided);
  for (const char* name : {"amax", "any"}) add(name, ReduceToSame<Max>, kAllDTypes, kStrided);
  for (const char* name : {"amin", "all"}) add(name, ReduceToSame<Min>, kAllDTypes, kStrided);
  add("amax_backward", AmaxBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
  add("max_dim", PlaceKernel<true>, kAllDTypes, kStrided);
  add("min_dim", PlaceKernel<false>, kAllDTypes, kStrided);
}

}  // namespace dtensor::cuda
