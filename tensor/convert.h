// One element of a dtype as another: what copies do, on the CPU and in device code.
#pragma once

#include <cstdint>
#include <type_traits>

#include "dtensor/tensor/dtype.h"

namespace dtensor {

// What arithmetic on an element type is done in.
template <class T>
DT_HOST_DEVICE static inline auto AsNumber(T v) {
  if constexpr (std::is_same_v<T, Bool>) {
    return static_cast<uint8_t>(v.value != 0);
  } else if constexpr (std::is_arithmetic_v<T>) {
    return v;
  } else {
    return ToFloat(v);
  }
}

// Out of range (and NaN) gives the lowest int64 or int32, as the hardware instruction does; what is
// narrower is cut out of an int64.
template <class D, class T>
DT_HOST_DEVICE static inline D Integer(T v) {
  if constexpr (std::is_floating_point_v<T>) {
    const auto wide = static_cast<double>(v);
    if constexpr (std::is_same_v<D, int32_t>) {
      return wide > -2147483649.0 && wide < 2147483648.0 ? static_cast<int32_t>(wide) : INT32_MIN;
    }
    return static_cast<D>(wide > -9223372036854775808.0 && wide < 9223372036854775808.0
                              ? static_cast<int64_t>(wide)
                              : INT64_MIN);
  } else {
    return static_cast<D>(v);
  }
}

// `v` as an element of type D.
template <class S, class D>
DT_HOST_DEVICE static inline void FromNumber(S v, D* out) {
  if constexpr (std::is_same_v<D, Bool>) {
    out->value = v != S(0);
  } else if constexpr (std::is_floating_point_v<D>) {
    *out = static_cast<D>(v);
  } else if constexpr (std::is_integral_v<D>) {
    *out = Integer<D>(v);
  } else {
    RoundTo(static_cast<float>(v), out);
  }
}

}  // namespace dtensor
