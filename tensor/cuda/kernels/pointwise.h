// Pointwise kernels: one template for all ops of ops/pointwise, whose lines give the expression
// (table.inc of this folder), as they do for the CPU.
#pragma once

#include <type_traits>

#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cuda/launch.h"
#include "dtensor/tensor/cuda/math.h"

namespace dtensor::cuda {

// What an op computes from: inputs, one of which may be a mask of bools, and whether it gives
// bools.
struct PointwiseKind {
  int ins, mask;
  bool bool_out, quotient;  // quotient: whole numbers are not divided by 0
};

constexpr int kMaxIns = 3;

// Attributes, as every computing type reads them.
struct Numbers {
  double d[3];
  int64_t i[3];
};
struct FlatArgs {
  int64_t n;
  void* data[1 + kMaxIns];  // the output, then the inputs
  Numbers numbers;
};
template <int N>
struct StridedArgs {
  Strided<N> arrays;
  void* data[N];
  Numbers numbers;
};

// Elements that a thread of a flat kernel loads and stores at once.
DT_HOST_DEVICE constexpr int PackOf(size_t bytes) { return bytes == 8 ? 2 : 4; }

// One op: its kernels for elements of each dtype, null where it has none.
struct PointwiseOp {
  PointwiseKind kind;
  const void* flat[kNumDTypes];     // of FlatArgs: all arrays are runs
  const void* strided[kNumDTypes];  // of StridedArgs<1 + ins>
};
// The dtype of the first input that is not the mask picks the kernel; an array of another dtype is
// converted.
void RunPointwise(const KernelCall& call, const PointwiseOp& op);

// --- device code --------------------------------------------------------------------------------

__device__ inline double NumberAs(const Numbers& n, int k, double) { return n.d[k]; }
__device__ inline float NumberAs(const Numbers& n, int k, float) {
  return static_cast<float>(n.d[k]);
}
__device__ inline int64_t NumberAs(const Numbers& n, int k, int64_t) { return n.i[k]; }

template <class Op, class S>
struct Element {
  using T = ComputedAs<S>;
  using Out = std::conditional_t<Op::kKind.bool_out, Bool, S>;
  // Of input k.
  template <int k>
  using In = std::conditional_t<k == Op::kKind.mask, Bool, S>;

  T v[3] = {};  // a, b, c
  bool mask = false;
  template <int k>
  __device__ void Set(In<k> value) {
    if constexpr (k == Op::kKind.mask) {
      mask = value.value != 0;
    } else {
      v[k - (Op::kKind.mask == 0 ? 1 : 0)] = AsComputed(value);
    }
  }
  __device__ Out Result(const Numbers& numbers) const {
    Out result;
    FromNumber(Op::template Apply<T>(v[0], v[1], v[2], mask, numbers), &result);
    return result;
  }
};

template <class T>
__device__ T& At(void* data, int64_t i) {
  return static_cast<T*>(data)[i];
}

template <class Op, class S>
__global__ void Flat(const __grid_constant__ FlatArgs args) {
  using E = Element<Op, S>;
  constexpr int V = PackOf(sizeof(S)), ins = Op::kKind.ins;
  const int64_t packs = args.n / V, items = packs + args.n % V;
  for (int64_t i = GridStart(); i < items; i += GridStep()) {
    if (i < packs) {
      const auto a = At<Pack<typename E::template In<0>, V>>(args.data[1], i);
      Pack<typename E::template In<1>, V> b;
      Pack<typename E::template In<2>, V> c;
      if constexpr (ins > 1) b = At<decltype(b)>(args.data[2], i);
      if constexpr (ins > 2) c = At<decltype(c)>(args.data[3], i);
      Pack<typename E::Out, V> out;
#pragma unroll
      for (int k = 0; k < V; ++k) {
        E e;
        e.template Set<0>(a.v[k]);
        if constexpr (ins > 1) e.template Set<1>(b.v[k]);
        if constexpr (ins > 2) e.template Set<2>(c.v[k]);
        out.v[k] = e.Result(args.numbers);
      }
      At<decltype(out)>(args.data[0], i) = out;
    } else {
      const int64_t at = packs * V + (i - packs);
      E e;
      e.template Set<0>(At<typename E::template In<0>>(args.data[1], at));
      if constexpr (ins > 1) e.template Set<1>(At<typename E::template In<1>>(args.data[2], at));
      if constexpr (ins > 2) e.template Set<2>(At<typename E::template In<2>>(args.data[3], at));
      At<typename E::Out>(args.data[0], at) = e.Result(args.numbers);
    }
  }
}

template <class Op, class S>
__global__ void AnyStrides(const __grid_constant__ StridedArgs<1 + Op::kKind.ins> args) {
  using E = Element<Op, S>;
  constexpr int ins = Op::kKind.ins;
  for (int64_t i = GridStart(); i < args.arrays.numel; i += GridStep()) {
    int32_t at[1 + ins];
    args.arrays.Offsets(static_cast<uint32_t>(i), at);
    E e;
    e.template Set<0>(At<typename E::template In<0>>(args.data[1], at[1]));
    if constexpr (ins > 1) e.template Set<1>(At<typename E::template In<1>>(args.data[2], at[2]));
    if constexpr (ins > 2) e.template Set<2>(At<typename E::template In<2>>(args.data[3], at[3]));
    At<typename E::Out>(args.data[0], at[0]) = e.Result(args.numbers);
  }
}

// The kernels of `Op` for the dtypes of a set.
template <class Op, uint32_t dtypes>
PointwiseOp PointwiseOpOf() {
  PointwiseOp op = {Op::kKind, {}, {}};
#define DT_KERNELS(name, type, ...)                                                          \
  if constexpr ((dtypes & DTypeBit(DType::name)) != 0) {                                     \
    op.flat[static_cast<int>(DType::name)] = reinterpret_cast<const void*>(&Flat<Op, type>); \
    op.strided[static_cast<int>(DType::name)] =                                              \
        reinterpret_cast<const void*>(&AnyStrides<Op, type>);                                \
  }
  DT_FLOAT_DTYPES(DT_KERNELS)
  DT_INTEGER_DTYPES(DT_KERNELS)
#undef DT_KERNELS
  return op;
}
template <class Op, uint32_t dtypes>
void PointwiseKernel(const KernelCall& call) {
  static const PointwiseOp op = PointwiseOpOf<Op, dtypes>();
  RunPointwise(call, op);
}

// Of each table of ops/pointwise.
void AddElementwiseKernels(AddKernelFn add);
void AddLogicKernels(AddKernelFn add);
void AddActivationKernels(AddKernelFn add);
void AddRealKernels(AddKernelFn add);

}  // namespace dtensor::cuda
