// What reductions and arithmetic do with two elements, in the type that they are computed in: a
// float, or an integer, which wraps around; truth values are combined as such. Branch-free, so that
// loops vectorise. All of it is static: code of one CPU level must not serve another. Files that
// are compiled once may use it too; DT_LEVEL_NS is then the namespace's name as it stands.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtensor/tensor/dtype.h"

namespace dtensor {
namespace DT_LEVEL_NS {
#ifndef DT_MATH  // as device code: tensor/cuda/math.h
#define DT_MATH static inline __attribute__((always_inline))
#endif

// The unsigned integer in which T wraps around: no narrower than int, to which factors would be
// promoted, and overflow.
template <class T>
using Wrapping = std::common_type_t<std::make_unsigned_t<T>, unsigned>;

template <class T>
DT_MATH T Add(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) + static_cast<Wrapping<T>>(b));
  } else {
    return a + b;
  }
}
template <class T>
DT_MATH T Mul(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<Wrapping<T>>(a) * static_cast<Wrapping<T>>(b));
  } else {
    return a * b;
  }
}
// Of a double __builtin_signbit would keep loops from vectors (GCC 12).
DT_MATH bool SignBit(float x) { return __builtin_signbit(x) != 0; }
DT_MATH bool SignBit(double x) { return __builtin_bit_cast(int64_t, x) < 0; }
#ifdef __CUDACC__  // a function takes a device more registers here
#define DT_SIGN_BIT(x) (__builtin_signbit(x) != 0)
#else
#define DT_SIGN_BIT(x) SignBit(x)
#endif

// NaN on either side wins, and 0 is more than -0: so terms may be joined in any order, and what is
// made of a maximum of terms is the maximum of what is made of each.
template <class T>
DT_MATH T Maximum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a > b ? a : b;
  } else {
    return (a > b) | (a != a) | ((a == b) & DT_SIGN_BIT(b)) ? a : b;
  }
}
template <class T>
DT_MATH T Minimum(T a, T b) {
  if constexpr (std::is_integral_v<T>) {
    return a < b ? a : b;
  } else {
    return (a < b) | (a != a) | ((a == b) & DT_SIGN_BIT(a)) ? a : b;
  }
}

DT_MATH Bool Add(Bool a, Bool b) { return {static_cast<uint8_t>((a.value != 0) | (b.value != 0))}; }
DT_MATH Bool Mul(Bool a, Bool b) { return {static_cast<uint8_t>((a.value != 0) & (b.value != 0))}; }
DT_MATH Bool Maximum(Bool a, Bool b) { return Add(a, b); }
DT_MATH Bool Minimum(Bool a, Bool b) { return Mul(a, b); }

// Two terms of a reduction as one; those of kAvg are a sum until it is divided.
template <ReduceOp kOp, class T>
DT_MATH T Reduced(T a, T b) {
  if constexpr (kOp == ReduceOp::kMax) {
    return Maximum(a, b);
  } else if constexpr (kOp == ReduceOp::kMin) {
    return Minimum(a, b);
  } else if constexpr (kOp == ReduceOp::kProd) {
    return Mul(a, b);
  } else {
    return Add(a, b);
  }
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
