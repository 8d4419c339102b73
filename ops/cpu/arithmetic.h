// Element functions with exact results: rounding, remainders, bits. For every computing type of a
// pointwise kernel: f64, f32 and int64.
#pragma once

#include <cstdint>

#include "dtensor/ops/cpu/math.h"

namespace dtensor {
namespace DT_LEVEL_NS {

// A number for which a function has a shorter way than for all: overloads take it, and the loop of
// a kernel gives it where no element of a run is another (ops/pointwise/kernels/table.inc). Both
// ways give the same bits for such a number: a result depends on its element alone.
template <class T>
struct Usual {
  T value;
};
// How far x is above the least normal number, as bits. That is less than infinity is for all of
// which Log needs to know nothing more, and only for them: one comparison finds them.
DT_MATH uint32_t BitsAboveTiny(float x) { return Bits(x) - 0x00800000u; }
static constexpr uint32_t kInfinityAboveTiny = 0x7F000000u;
DT_MATH float Log(Usual<float> x) { return LogOf(SplitLogOfNormal(x.value)); }

// --- rounding: from 2^52 (2^23) on every number is whole; below, adding that power rounds.
DT_MATH double RoundEven(double x) {
  const double a = Fabs(x), whole = (a + 4503599627370496.0) - 4503599627370496.0;
  return a < 4503599627370496.0 ? CopySign(whole, x) : x;
}
DT_MATH float RoundEven(float x) {
  const float a = Fabs(x), whole = (a + 8388608.0f) - 8388608.0f;
  return a < 8388608.0f ? CopySign(whole, x) : x;
}
template <class T>
DT_MATH T Floor(T x) {
  const T r = RoundEven(x);
  return r > x ? r - T(1) : r;
}
template <class T>
DT_MATH T Ceil(T x) {
  return -Floor(-x);
}
template <class T>
DT_MATH T Trunc(T x) {
  return CopySign(Floor(Fabs(x)), x);
}
DT_MATH int64_t RoundEven(int64_t x) { return x; }
DT_MATH int64_t Floor(int64_t x) { return x; }
DT_MATH int64_t Ceil(int64_t x) { return x; }
DT_MATH int64_t Trunc(int64_t x) { return x; }

// To a multiple of 1 / power, or of power itself.
template <class T>
DT_MATH T RoundTo(T x, T power, bool multiples) {
  return multiples ? RoundEven(x / power) * power : RoundEven(x * power) / power;
}

// --- signs and special values
template <class T>
DT_MATH T Sign(T x) {
  return T((x > T(0)) - (x < T(0)));
}
DT_MATH bool SignBit(int64_t x) { return x < 0; }
DT_MATH double Infinity(double) { return __builtin_inf(); }
DT_MATH float Infinity(float) { return __builtin_inff(); }
DT_MATH bool IsPosInf(double x) { return x == __builtin_inf(); }
DT_MATH bool IsPosInf(float x) { return x == __builtin_inff(); }
DT_MATH bool IsPosInf(int64_t) { return false; }
DT_MATH bool IsNegInf(double x) { return x == -__builtin_inf(); }
DT_MATH bool IsNegInf(float x) { return x == -__builtin_inff(); }
DT_MATH bool IsNegInf(int64_t) { return false; }
template <class T>
DT_MATH bool IsFinite(T x) {
  return Fabs(x) < Infinity(T());
}
DT_MATH bool IsFinite(int64_t) { return true; }
template <class T>
DT_MATH bool IsInf(T x) {
  return IsPosInf(x) || IsNegInf(x);
}
// Infinities become the greatest numbers where nothing else is asked for: a bound, in bits.
template <class T>
DT_MATH T NanToNum(T x, T nan, T posinf, T neginf) {
  const T greatest = static_cast<T>(sizeof(T) == 4 ? 3.40282347e38f : 1.7976931348623157e308);
  if (posinf == greatest && neginf == -greatest) {
    const T y = CopySign(FromBits(Lesser(Bits(Fabs(x)), Bits(greatest))), x);
    return x != x ? nan : y;
  }
  return x != x ? nan : IsPosInf(x) ? posinf : IsNegInf(x) ? neginf : x;
}
DT_MATH int64_t NanToNum(int64_t x, int64_t, int64_t, int64_t) { return x; }

// NaN only where both are.
template <class T>
DT_MATH T FMax(T a, T b) {
  return a != a ? b : b != b ? a : Maximum(a, b);
}
template <class T>
DT_MATH T FMin(T a, T b) {
  return a != a ? b : b != b ? a : Minimum(a, b);
}

// --- division. Integers: the caller has refused b = 0; the least number over -1 wraps around.
DT_MATH double Fmod(double a, double b) { return __builtin_fmod(a, b); }
DT_MATH float Fmod(float a, float b) { return __builtin_fmodf(a, b); }
// The same where the quotient is one of the numbers that all have whole neighbours: rounded to a
// whole number it is too large by one at most, and what is left is exact.
template <class T>
static constexpr T kLargeQuotient =
    sizeof(T) == 4 ? T(4194304) : T(2251799813685248);  // 2^22, 2^51
template <class T>
DT_MATH T Fmod(Usual<T> a, Usual<T> b) {
  const T x = Fabs(a.value), y = Fabs(b.value), r = Fma(-Floor(x / y), y, x);
  return CopySign(r < T(0) ? r + y : r, a.value);
}
template <class T>
DT_MATH bool HasLargeQuotient(T a, T b) {
  return !((Fabs(a) < Fabs(b) * kLargeQuotient<T>)&(Fabs(b) < Infinity(T())));
}
DT_MATH int64_t Fmod(int64_t a, int64_t b) { return b == -1 || b == 0 ? 0 : a % b; }
// The sign of b, as Python's %.
template <class T>
DT_MATH T WithSignOf(T r, T b) {
  return (r != T(0)) & ((r < T(0)) != (b < T(0))) ? r + b : r;
}
template <class T>
DT_MATH T Remainder(T a, T b) {
  return WithSignOf(Fmod(a, b), b);
}
template <class T>
DT_MATH T Remainder(Usual<T> a, Usual<T> b) {
  return WithSignOf(Fmod(a, b), b.value);
}
template <class T>
DT_MATH T TruncDivide(T a, T b) {
  return Trunc(a / b);
}
DT_MATH int64_t TruncDivide(int64_t a, int64_t b) { return b == -1 ? Neg(a) : b == 0 ? 0 : a / b; }
// From the remainder r, which is exact: a / b itself may have been rounded up to a whole number.
template <class T>
DT_MATH T FloorQuotient(T a, T b, T r) {
  const T down = (r != T(0)) & ((r < T(0)) != (b < T(0))) ? T(1) : T(0);
  const T q = (a - r) / b - down, f = Floor(q);
  const T whole = q - f > T(0.5) ? f + T(1) : f;
  const T signed_zero = CopySign(T(0), a / b);
  return b == T(0) ? a / b : q == T(0) ? signed_zero : whole;
}
template <class T>
DT_MATH T FloorDivide(T a, T b) {
  return FloorQuotient(a, b, Fmod(a, b));
}
template <class T>
DT_MATH T FloorDivide(Usual<T> a, Usual<T> b) {
  return FloorQuotient(a.value, b.value, Fmod(a, b));
}
DT_MATH int64_t FloorDivide(int64_t a, int64_t b) {
  const int64_t q = TruncDivide(a, b), r = Fmod(a, b);
  return r != 0 && (r < 0) != (b < 0) ? q - 1 : q;
}

// --- integers
DT_MATH int64_t Gcd(int64_t a, int64_t b) {
  uint64_t x = static_cast<uint64_t>(Abs(a)), y = static_cast<uint64_t>(Abs(b));
  while (y != 0) {
    const uint64_t r = x % y;
    x = y;
    y = r;
  }
  return static_cast<int64_t>(x);
}
DT_MATH int64_t Lcm(int64_t a, int64_t b) {
  const int64_t g = Gcd(a, b);
  return g == 0 ? 0 : Abs(Mul(TruncDivide(a, g), b));
}
// Shifts by a negative number, or by all bits and more, leave nothing but the sign.
DT_MATH int64_t ShiftLeft(int64_t a, int64_t by) {
  return by < 0 || by > 63 ? 0 : static_cast<int64_t>(static_cast<uint64_t>(a) << by);
}
DT_MATH int64_t ShiftRight(int64_t a, int64_t by) { return a >> (by < 0 || by > 63 ? 63 : by); }

// The next number after a towards b. `dropped`: how many mantissa bits of f32 the dtype lacks: 0,
// 13 (float16, whose subnormals start at 2^-14) or 16 (bfloat16).
DT_MATH double NextAfter(double a, double b, int64_t) { return __builtin_nextafter(a, b); }
DT_MATH float NextAfter(float a, float b, int64_t dropped) {
  if (dropped == 0 || a != a || b != b || a == b) return __builtin_nextafterf(a, b);
  const bool half = dropped == 13;
  const float least = half ? 5.9604644775390625e-8f : FromBits(uint32_t{1} << 16);
  if (a == 0.0f) return b > 0.0f ? least : -least;
  const bool away = (b > a) == (a > 0.0f);
  if (half && Fabs(a) > 65504.0f) return away ? a : CopySign(65504.0f, a);
  const float edge = 6.103515625e-5f;  // 2^-14, below which steps are equal
  if (half && (Fabs(a) < edge || (Fabs(a) == edge && !away))) return b > a ? a + least : a - least;
  const uint32_t step = uint32_t{1} << (half ? 13 : 16);
  return FromBits(away ? Bits(a) + step : Bits(a) - step);
}

// Between a and b, from the nearer one, so that both ends are exact.
template <class T>
DT_MATH T Lerp(T a, T b, T weight) {
  const T from_a = a + weight * (b - a), from_b = b - (b - a) * (T(1) - weight);
  return Fabs(weight) < T(0.5) ? from_a : from_b;
}

// |a - b| within atol + |rtol b|; infinities only if they are equal.
template <class T>
DT_MATH bool IsClose(T a, T b, T rtol, T atol, bool equal_nan) {
  const T difference = Fabs(a - b);
  const bool near = IsFinite(difference) && difference <= atol + Fabs(rtol * b);
  return a == b || near || (equal_nan && a != a && b != b);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
