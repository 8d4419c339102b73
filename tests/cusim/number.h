// What registers hold: 16-bit floating point, NaNs and single rounding as PTX has them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

namespace cusim {

struct F16 {
  uint16_t bits;
};
struct BF16 {
  uint16_t bits;
};
struct FlushedF32 {  // .ftz: subnormal inputs and results are zeros of their sign
  float value;
};

template <class T>
inline T Get(uint64_t slot) {
  T t;
  std::memcpy(&t, &slot, sizeof t);
  return t;
}
template <class T>
inline uint64_t Put(T t) {
  uint64_t slot = 0;
  std::memcpy(&slot, &t, sizeof t);
  return slot;
}

// The sum and the fused multiply-add in double, rounded to odd: rounding such a value once more, to
// at most 51 bits, gives what one rounding of the exact value gives.
inline double Odd(double sum, double error) {
  if (error == 0 || !std::isfinite(sum)) return sum;
  if (std::bit_cast<uint64_t>(sum) & 1) return sum;
  return std::nextafter(sum, error > 0 ? HUGE_VAL : -HUGE_VAL);
}
inline double AddOdd(double a, double b) {
  const double sum = a + b, part = sum - a;
  return Odd(sum, (a - (sum - part)) + (b - part));
}

// A double as a 16-bit number of `mantissa` bits and the exponent bias `bias`, rounded to nearest
// even, or toward zero.
template <int mantissa, int bias>
inline uint16_t Narrow(double v, bool toward_zero = false) {
  constexpr int exponent_max = (1 << (15 - mantissa)) - 1;
  if (std::isnan(v)) return 0x7fff;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  v = std::fabs(v);
  constexpr uint16_t infinity = exponent_max << mantissa;
  if (std::isinf(v)) return sign | infinity;
  if (v == 0) return sign;
  const int exponent = std::max(std::ilogb(v), 1 - bias);
  // In units of the last place: at most 2^(mantissa + 1), exact.
  const double units = std::ldexp(v, mantissa - exponent);
  double whole = std::trunc(units);
  if (!toward_zero) {
    const double rest = units - whole;
    if (rest > 0.5 || (rest == 0.5 && std::fmod(whole, 2) != 0)) whole += 1;
  }
  // A carry into the next exponent comes out of the sum by itself.
  const int64_t bits =
      static_cast<int64_t>(whole) + (static_cast<int64_t>(exponent + bias - 1) << mantissa);
  if (bits >= infinity) return toward_zero ? sign | (infinity - 1) : sign | infinity;
  return static_cast<uint16_t>(sign | bits);
}
template <int mantissa, int bias>
inline double Widen(uint16_t bits) {
  const int exponent = bits >> mantissa & ((1 << (15 - mantissa)) - 1);
  const int fraction = bits & ((1 << mantissa) - 1);
  double v;
  if (exponent == (1 << (15 - mantissa)) - 1) {
    v = fraction ? std::numeric_limits<double>::quiet_NaN() : HUGE_VAL;
  } else if (exponent == 0) {
    v = std::ldexp(fraction, 1 - bias - mantissa);
  } else {
    v = std::ldexp((1 << mantissa) + fraction, exponent - bias - mantissa);
  }
  return bits & 0x8000 ? -v : v;
}

inline float Flush(float f) {
  return std::fabs(f) < std::numeric_limits<float>::min() ? std::copysign(0.0f, f) : f;
}

// How a register's T is computed with: Real(x) gives float or double, FromReal<T> rounds once.
inline double Real(F16 x) { return Widen<10, 15>(x.bits); }
inline double Real(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float Real(float x) { return x; }
inline double Real(double x) { return x; }
inline float Real(FlushedF32 x) { return Flush(x.value); }

inline float CanonicalNan() { return std::bit_cast<float>(0x7fffffffu); }
template <class T, class R>
inline T FromReal(R v) {
  if constexpr (std::is_same_v<T, F16>) return {Narrow<10, 15>(v)};
  if constexpr (std::is_same_v<T, BF16>) return {Narrow<7, 127>(v)};
  if constexpr (std::is_same_v<T, float>) {
    return v == v ? static_cast<float>(v) : CanonicalNan();
  }
  if constexpr (std::is_same_v<T, FlushedF32>) {
    return {v == v ? Flush(static_cast<float>(v)) : CanonicalNan()};
  }
  if constexpr (std::is_same_v<T, double>) return v;
}

// One rounding each, of T.
template <class T>
inline T Add(T a, T b) {
  if constexpr (sizeof(T) == 2) return FromReal<T>(AddOdd(Real(a), Real(b)));
  if constexpr (sizeof(T) != 2) return FromReal<T>(Real(a) + Real(b));
}
template <class T>
inline T Mul(T a, T b) {
  return FromReal<T>(Real(a) * Real(b));  // of 16-bit numbers: exact before
}
template <class T>
inline T Fma(T a, T b, T c) {
  if constexpr (sizeof(T) == 2) return FromReal<T>(AddOdd(Real(a) * Real(b), Real(c)));
  if constexpr (sizeof(T) != 2) return FromReal<T>(std::fma(Real(a), Real(b), Real(c)));
}
template <class T>
inline T Negate(T a) {  // the sign bit, of NaNs too
  uint64_t bits = Put(a);
  bits ^= uint64_t{1} << (sizeof(T) * 8 - 1);
  return Get<T>(bits);
}

// The larger or smaller: a number against a NaN, +0 above -0.
template <class T>
inline T Extreme(T a, T b, bool larger, bool nan_wins) {
  const auto x = Real(a), y = Real(b);
  const bool nan_a = x != x, nan_b = y != y;
  if (nan_a || nan_b) {
    if (nan_wins || (nan_a && nan_b)) return FromReal<T>(x + y);
    return nan_a ? FromReal<T>(y) : FromReal<T>(x);
  }
  if (x == y) return FromReal<T>(std::signbit(x) == larger ? y : x);
  return FromReal<T>((x > y) == larger ? x : y);
}

}  // namespace cusim
