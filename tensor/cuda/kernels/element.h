// Elements in the type that kernels compute in, and kernels chosen by dtype.
#pragma once

#include "dtensor/tensor/cuda/launch.h"

namespace dtensor::cuda {

// f64 is computed in f64, other floats in f32; integers as they are, truth values as bytes.
template <class X>
struct ComputedIn {
  using type = X;
};
template <>
struct ComputedIn<BFloat16> {
  using type = float;
};
template <>
struct ComputedIn<Half> {
  using type = float;
};
template <>
struct ComputedIn<Bool> {
  using type = uint8_t;
};
template <class X>
using Computed = typename ComputedIn<X>::type;

template <class X>
__device__ inline Computed<X> Widen(X x) {
  return x;
}
__device__ inline float Widen(BFloat16 x) { return ToFloat(x); }
__device__ inline float Widen(Half x) { return ToFloat(x); }
__device__ inline uint8_t Widen(Bool x) { return x.value != 0; }

template <class T>
__device__ inline void Store(T x, T* out) {
  *out = x;
}
__device__ inline void Store(float x, BFloat16* out) { *out = ToBFloat16(x); }
__device__ inline void Store(float x, Half* out) { *out = ToHalf(x); }
__device__ inline void Store(uint8_t x, Bool* out) { out->value = x; }

// run(X{}) with the type of a floating dtype.
template <class Run>
void VisitFloat(DType dtype, const Run& run) {
  switch (dtype) {
    case DType::kF64:
      return run(double{});
    case DType::kF32:
      return run(float{});
    case DType::kBF16:
      return run(BFloat16{});
    default:  // no other is registered
      return run(Half{});
  }
}
// run(U{}) with an unsigned integer as wide as the elements: for what only moves them.
template <class Run>
void VisitSize(DType dtype, const Run& run) {
  switch (LogSizeOf(dtype)) {
    case 0:
      return run(uint8_t{});
    case 1:
      return run(uint16_t{});
    case 2:
      return run(uint32_t{});
    default:
      return run(uint64_t{});
  }
}

// A contiguous array of floats of any dtype, for operands that are small beside the others.
struct Floats {
  const void* data;
  DType dtype;
  explicit Floats(const TensorRef& t) : data(t.data), dtype(t.dtype) {}
  template <class T>
  __device__ T At(int64_t i) const {
    switch (dtype) {
      case DType::kF64:
        return static_cast<T>(static_cast<const double*>(data)[i]);
      case DType::kF32:
        return static_cast<const float*>(data)[i];
      case DType::kBF16:
        return ToFloat(static_cast<const BFloat16*>(data)[i]);
      default:
        return ToFloat(static_cast<const Half*>(data)[i]);
    }
  }
};
// The same of indices: int32 or int64.
struct Indices {
  const void* data;
  bool wide;
  explicit Indices(const TensorRef& t) : data(t.data), wide(t.dtype == DType::kI64) {}
  __device__ int64_t operator[](int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

template <class T>
const T* In(const KernelCall& c, int i) {
  return static_cast<const T*>(c.in[static_cast<size_t>(i)].data);
}
template <class T>
T* Out(const KernelCall& c, int i) {
  return static_cast<T*>(c.out[static_cast<size_t>(i)].data);
}
inline int64_t ProductOf(const TensorRef& t, int from, int to) {
  int64_t n = 1;
  for (int d = from; d < to; ++d) n *= t.sizes[d];
  return n;
}
// What this rank has of factor `f`; all of `local` where it is not cut.
inline FactorRange PartOf(const KernelCall& c, size_t f, int64_t local) {
  if (c.factors.size() <= f || c.factors[f].global < 0) return {0, local, local};
  return c.factors[f];
}
// The least power of two that is not less than n, at most `most`.
inline int PowerOfTwo(int64_t n, int most) {
  int p = 1;
  while (p < n && p < most) p *= 2;
  return p;
}

// NaN on either side wins, and 0 is more than -0, as on the CPU.
template <class T>
__device__ inline T Maximum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a > b ? a : b;
  } else {
    return a > b || a != a || (a == b && signbit(b)) ? a : b;
  }
}
template <class T>
__device__ inline T Minimum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a < b ? a : b;
  } else {
    return a < b || a != a || (a == b && signbit(a)) ? a : b;
  }
}

__device__ inline float ExpOf(float x) { return expf(x); }
__device__ inline double ExpOf(double x) { return exp(x); }
__device__ inline float LogOf(float x) { return logf(x); }
__device__ inline double LogOf(double x) { return log(x); }
__device__ inline float Root(float x) { return sqrtf(x); }
__device__ inline double Root(double x) { return sqrt(x); }
__device__ inline float MulAdd(float a, float b, float c) { return fmaf(a, b, c); }
__device__ inline double MulAdd(double a, double b, double c) { return fma(a, b, c); }

}  // namespace dtensor::cuda
