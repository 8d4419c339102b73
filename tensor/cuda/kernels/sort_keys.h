// Elements as unsigned numbers in the same order, for kernels that only compare: the largest number
// stands for NaN, of whatever sign, and zeros of both signs are one.
#pragma once

#include <type_traits>

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

inline constexpr uint64_t kNan = ~uint64_t{0};  // of floats

template <class U>
__device__ inline uint64_t FloatKey(U bits, U infinity) {
  constexpr U kSign = static_cast<U>(U{1} << (8 * sizeof(U) - 1));
  const U size = static_cast<U>(bits & static_cast<U>(~kSign));
  if (size > infinity) return kNan;
  if (size == 0) return kSign;
  return static_cast<U>((bits & kSign) != 0 ? ~bits : bits | kSign);
}
__device__ inline uint64_t KeyOf(double x) {
  return FloatKey(static_cast<uint64_t>(__double_as_longlong(x)), uint64_t{0x7FF0000000000000u});
}
__device__ inline uint64_t KeyOf(float x) { return FloatKey(__float_as_uint(x), 0x7F800000u); }
__device__ inline uint64_t KeyOf(BFloat16 x) { return FloatKey(x.bits, uint16_t{0x7F80u}); }
__device__ inline uint64_t KeyOf(Half x) { return FloatKey(x.bits, uint16_t{0x7C00u}); }
__device__ inline uint64_t KeyOf(int64_t x) {
  return static_cast<uint64_t>(x) ^ (uint64_t{1} << 63);
}
__device__ inline uint64_t KeyOf(int32_t x) {
  return static_cast<uint32_t>(x) ^ (uint32_t{1} << 31);
}
__device__ inline uint64_t KeyOf(uint8_t x) { return x; }
__device__ inline uint64_t KeyOf(Bool x) { return x.value != 0; }
// So many of the lowest bits of keys are enough to order them.
template <class X>
inline constexpr int kKeyBits = std::is_same_v<X, Bool> ? 1 : 8 * static_cast<int>(sizeof(X));
template <class X>
inline constexpr bool kHasNan = !std::is_integral_v<X> && !std::is_same_v<X, Bool>;

}  // namespace dtensor::cuda
