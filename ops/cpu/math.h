// Element functions of the CPU kernels: branch-free, so that loops vectorise, and built from IEEE
// operations and explicit fma only, so that every CPU level gives the same bits.
//
// Errors against the exact value: f64 about 2 ulp, f32 too, erfc 4
// (tests/ops/pointwise_values_test). Sources: range reduction as in Muller, "Elementary Functions";
// f64's log by the atanh series of (m - 1) / (m + 1), its erf by Taylor polynomials around 25
// centres (erf_table.h); polynomials of f32 by Remez's exchange (float_table.h).
#pragma once

#include <cstdint>

#include "dtensor/ops/cpu/erf_table.h"
#include "dtensor/ops/cpu/float_table.h"
#include "dtensor/tensor/cpu/kernels/element_ops.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {
namespace DT_LEVEL_NS {
DT_MATH double Fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
DT_MATH float Fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DT_MATH double Sqrt(double x) { return __builtin_sqrt(x); }
DT_MATH float Sqrt(float x) { return __builtin_sqrtf(x); }
DT_MATH double Fabs(double x) { return __builtin_fabs(x); }
DT_MATH float Fabs(float x) { return __builtin_fabsf(x); }
DT_MATH double CopySign(double x, double s) { return __builtin_copysign(x, s); }
DT_MATH float CopySign(float x, float s) { return __builtin_copysignf(x, s); }

DT_MATH uint64_t Bits(double x) {
  uint64_t u;
  __builtin_memcpy(&u, &x, 8);
  return u;
}
DT_MATH uint32_t Bits(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
DT_MATH double FromBits(uint64_t u) {
  double x;
  __builtin_memcpy(&x, &u, 8);
  return x;
}
DT_MATH float FromBits(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}

// c[0] + c[1] x + ... + c[N] x^N, without a loop, which vectorisers would stop at.
template <int N, class T>
DT_MATH T Horner(const T* c, T x) {
  if constexpr (N == 0) {
    return c[0];
  } else {
    return Fma(Horner<N - 1>(c + 1, x), x, c[0]);
  }
}

// The same for odd N by pairs of terms, of which half as many wait for each other. z: x^2.
template <int N, class T>
DT_MATH T HornerOfPairs(const T* c, T x, T z) {
  static_assert(N % 2 == 1);
  const T pair = Fma(c[1], x, c[0]);
  if constexpr (N == 1) {
    return pair;
  } else {
    return Fma(HornerOfPairs<N - 2>(c + 2, x, z), z, pair);
  }
}

// Adding this rounds to an integer, which then stands in the low mantissa bits.
static constexpr double kRoundF64 = 6755399441055744.0;  // 1.5 * 2^52
static constexpr float kRoundF32 = 12582912.0f;          // 1.5 * 2^23

// 2^n for n given as the float that holds it (|n| small enough for a normal result).
DT_MATH double Exp2Int(double n) { return FromBits((Bits(n + kRoundF64) + 1023) << 52); }
DT_MATH float Exp2Int(float n) { return FromBits((Bits(n + kRoundF32) + 127) << 23); }

// expm1(r) for |r| <= ln(2) / 2, as r + r^2 * q(r).
DT_MATH double Expm1Core(double r) {
  double q = 1.0 / 87178291200.0;
  q = Fma(q, r, 1.0 / 6227020800.0);
  q = Fma(q, r, 1.0 / 479001600.0);
  q = Fma(q, r, 1.0 / 39916800.0);
  q = Fma(q, r, 1.0 / 3628800.0);
  q = Fma(q, r, 1.0 / 362880.0);
  q = Fma(q, r, 1.0 / 40320.0);
  q = Fma(q, r, 1.0 / 5040.0);
  q = Fma(q, r, 1.0 / 720.0);
  q = Fma(q, r, 1.0 / 120.0);
  q = Fma(q, r, 1.0 / 24.0);
  q = Fma(q, r, 1.0 / 6.0);
  q = Fma(q, r, 0.5);
  return Fma(r * r, q, r);
}
DT_MATH float Expm1Core(float r) { return Fma(r * r, Horner<4>(kExp, r), r); }

// x = n ln 2 + r. Returns n, writes r.
DT_MATH double ReduceLn2(double x, double* r) {
  const double n = Fma(x, 1.4426950408889634, kRoundF64) - kRoundF64;
  *r = Fma(-n, 1.9082149292705877e-10, Fma(-n, 0.693147180369123816490, x));
  return n;
}
DT_MATH float ReduceLn2(float x, float* r) {
  const float n = Fma(x, 1.44269504f, kRoundF32) - kRoundF32;
  *r = Fma(-n, -2.12194440e-4f, Fma(-n, 0.693359375f, x));
  return n;
}

// exp(r) * 2^n; the scale is applied in two halves so that subnormal results round once.
DT_MATH double ScaledExp(double r, double n) {
  const double half = (n * 0.5 + kRoundF64) - kRoundF64;
  return (1.0 + Expm1Core(r)) * Exp2Int(half) * Exp2Int(n - half);
}
DT_MATH float ScaledExp(float r, float n) {
  const float half = (n * 0.5f + kRoundF32) - kRoundF32;
  return (1.0f + Expm1Core(r)) * Exp2Int(half) * Exp2Int(n - half);
}
// Below and above these the result is 0 and inf. The one bounds x and the other the result: as two
// bounds of x compilers make them one choice among three, which takes longer.
DT_MATH double Exp(double x) {
  const double y = x < -746.0 ? -746.0 : x;
  double r;
  const double n = ReduceLn2(y, &r);
  return x > 710.0 ? __builtin_inf() : ScaledExp(r, n);
}
DT_MATH float Exp(float x) {
  const float y = x < -104.0f ? -104.0f : x;
  float r;
  const float n = ReduceLn2(y, &r);
  return x > 89.0f ? __builtin_inff() : ScaledExp(r, n);
}

// expm1 for 0 <= x <= 45 (f64), 0 <= x <= 20 (f32): what tanh needs.
DT_MATH double Expm1Positive(double x) {
  double r;
  const double s = Exp2Int(ReduceLn2(x, &r));
  return Fma(s, Expm1Core(r), s - 1.0);
}
DT_MATH float Expm1Positive(float x) {
  float r;
  const float s = Exp2Int(ReduceLn2(x, &r));
  return Fma(s, Expm1Core(r), s - 1.0f);
}

DT_MATH double Tanh(double x) {
  const double a = Fabs(x), y = a > 22.0 ? 22.0 : a;
  const double e = Expm1Positive(2.0 * y);
  return CopySign(e / (e + 2.0), x);
}
DT_MATH float Tanh(float x) {
  const float a = Fabs(x), y = a > 10.0f ? 10.0f : a;
  const float e = Expm1Positive(2.0f * y);
  return CopySign(e / (e + 2.0f), x);
}

DT_MATH double Sigmoid(double x) { return 1.0 / (1.0 + Exp(-x)); }
DT_MATH float Sigmoid(float x) { return 1.0f / (1.0f + Exp(-x)); }

// log(x) = e ln 2 + 2 atanh((m - 1) / (m + 1)) with m in [sqrt(1/2), sqrt(2)): e, and the logarithm
// of m as a head, which is exact, and a tail.
template <class T>
struct LogParts {
  T e, head, tail;
};
// x = m 2^e with m in [sqrt(1/2), sqrt(2)), for normal x > 0: e, and writes m. Without a signed
// shift or a conversion of 64 bits, which AVX2 has not: e + 1024 is put into the low bits of 2^52.
DT_MATH double SplitExponent(double x, double* m) {
  const uint64_t u = Bits(x) - 0x3FE6A09E667F3BCDull;
  const uint64_t power = u & uint64_t{0xFFF0000000000000};
  *m = FromBits(Bits(x) - power);
  const uint64_t shifted = (u + (uint64_t{1024} << 52)) >> 52;
  return FromBits(shifted | Bits(4503599627370496.0)) - 4503599627371520.0;
}
DT_MATH LogParts<double> SplitLog(double x) {
  const bool tiny = x < 2.2250738585072014e-308;
  const double y = tiny ? x * 18014398509481984.0 : x;  // 2^54
  double m;
  const double ed = SplitExponent(y, &m) - (tiny ? 54.0 : 0.0);
  const double f = m - 1.0, s = f / (m + 1.0), z = s * s;
  double p = 1.0 / 25.0;
  p = Fma(p, z, 1.0 / 23.0);
  p = Fma(p, z, 1.0 / 21.0);
  p = Fma(p, z, 1.0 / 19.0);
  p = Fma(p, z, 1.0 / 17.0);
  p = Fma(p, z, 1.0 / 15.0);
  p = Fma(p, z, 1.0 / 13.0);
  p = Fma(p, z, 1.0 / 11.0);
  p = Fma(p, z, 1.0 / 9.0);
  p = Fma(p, z, 1.0 / 7.0);
  p = Fma(p, z, 1.0 / 5.0);
  p = Fma(p, z, 1.0 / 3.0);
  // 2s = f - s f exactly, which keeps the leading term free of the division's rounding.
  return {ed, f, Fma(2.0 * s * z, p, -s * f)};
}
// For normal x > 0.
DT_MATH LogParts<float> SplitLogOfNormal(float x) {
  const uint32_t u = Bits(x) - 0x3F3504F3u;  // sqrt(1/2)
  const float e = static_cast<float>(static_cast<int32_t>(u) >> 23);
  const float f = FromBits((u & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
  return {e, f, f * f * Fma(f, Horner<8>(kLog, f), -0.5f)};
}
DT_MATH LogParts<float> SplitLog(float x) {
  const bool tiny = x < 1.17549435e-38f;
  const LogParts<float> p = SplitLogOfNormal(tiny ? x * 16777216.0f : x);  // 2^24
  return {p.e - (tiny ? 24.0f : 0.0f), p.head, p.tail};
}
// `r`, where x has a logarithm.
DT_MATH double LogOr(double x, double r) {
  r = x > 1.7976931348623157e308 ? x : r;
  r = x == 0.0 ? -__builtin_inf() : r;
  return x >= 0.0 ? r : __builtin_nan("");
}
DT_MATH float LogOr(float x, float r) {
  r = x > 3.40282347e38f ? x : r;
  r = x == 0.0f ? -__builtin_inff() : r;
  return x >= 0.0f ? r : __builtin_nanf("");
}
DT_MATH double Log(double x) {
  const LogParts<double> p = SplitLog(x);
  const double r = Fma(p.e, 1.9082149292705877e-10, p.tail);
  return LogOr(x, Fma(p.e, 0.693147180369123816490, p.head + r));
}
DT_MATH float LogOf(const LogParts<float>& p) {
  const float r = Fma(p.e, -2.12194440e-4f, p.tail);
  return Fma(p.e, 0.693359375f, p.head + r);
}
DT_MATH float Log(float x) { return LogOr(x, LogOf(SplitLog(x))); }

template <class T>
DT_MATH T Lesser(T a, T b) {
  return a < b ? a : b;
}
// The row of the nearest centre is indexed by the mantissa bits that rounding leaves. For the loop
// to vectorise it is indexed where it is read, without a branch: the bound is one of integers,
// which order numbers >= 0 as they are, and NaN takes the last row.
DT_MATH double Erf(double x) {
  const double a = Fabs(x), y = FromBits(Lesser(Bits(a), Bits(6.0)));
  const double rounded = y * 4.0 + kRoundF64;
  const double h = (a > 6.0 ? 6.0 : a) - (rounded - kRoundF64) * 0.25;
  const uint64_t i = Bits(rounded) & 31;
  double p = kErfF64[i][15];
#define DT_TERM(k) p = Fma(p, h, kErfF64[i][k])
  DT_TERM(14);
  DT_TERM(13);
  DT_TERM(12);
  DT_TERM(11);
  DT_TERM(10);
  DT_TERM(9);
  DT_TERM(8);
  DT_TERM(7);
  DT_TERM(6);
  DT_TERM(5);
  DT_TERM(4);
  DT_TERM(3);
  DT_TERM(2);
  DT_TERM(1);
  DT_TERM(0);
#undef DT_TERM
  return CopySign(p, x);
}
// Away from 0 as 1 - erfc(x), whose logarithm is smooth.
DT_MATH float Erf(float x) {
  const float a = Fabs(x), z = a * a, y = a > 3.92f ? 3.92f : a;
  float r;
  const float n = ReduceLn2(Horner<7>(kErfFar, y), &r);
  const float left = (1.0f + Expm1Core(r)) * Exp2Int(n);
  return a < 0.8f ? Fma(x, Horner<5>(kErfNear, z), x) : CopySign(1.0f - left, x);
}

// Bounds of floats as bounds of integers, which order them by sign and size: of a bound of floats
// compilers make two instructions and more. NaN may pass or not.
DT_MATH double AtMost(double x, double high) { return x < high ? x : high; }
DT_MATH float AtMost(float x, float high) {
  return FromBits(static_cast<uint32_t>(
      Lesser(static_cast<int32_t>(Bits(x)), static_cast<int32_t>(Bits(high)))));
}
DT_MATH double PositivePart(double x) { return x < 0.0 ? 0.0 : x; }
DT_MATH float PositivePart(float x) {
  const int32_t bits = static_cast<int32_t>(Bits(x));
  return FromBits(static_cast<uint32_t>(bits > 0 ? bits : 0));
}

// What a normal distribution leaves beyond |x| on one side: erfc(|x| / sqrt(2)) / 2, to about the
// absolute error that 1 + erf has.
DT_MATH double Beyond(double x) { return 0.5 - 0.5 * Erf(Fabs(x) * 0.70710678118654752440); }
DT_MATH float Beyond(float x) {
  constexpr float kRound = kRoundF32 + 126.0f;  // leaves the bits of 2^(n - 1), of n = -126 none
  const float a = Fabs(x), log2 = a * HornerOfPairs<9>(kBeyond, a, a * a);
  const float p = FromBits(Lesser(Bits(log2), Bits(-126.0f)));  // unsigned: by size
  const float shifted = p + kRound, r = p - (shifted - kRound);
  return Fma(HornerOfPairs<5>(kExp2, r, r * r), r, 1.0f) * FromBits(Bits(shifted) << 23);
}

// libm's, one binary for every level: correctly rounded but for the last bit, not vectorised.
DT_MATH double Pow(double x, double y) { return __builtin_pow(x, y); }
// 2^(y log2(x)) in float64, of which 12 digits are right: rounded once.
DT_MATH double Log2To12Digits(double x) {  // x > 0, normal
  double m;
  const double e = SplitExponent(x, &m);
  const double s = (m - 1.0) / (m + 1.0), z = s * s;
  static constexpr double kSeries[] = {1.0,       1.0 / 3.0,  1.0 / 5.0, 1.0 / 7.0,
                                       1.0 / 9.0, 1.0 / 11.0, 1.0 / 13.0};
  return Fma(2.8853900817779268 * s, Horner<6>(kSeries, z), e);
}
DT_MATH double Exp2To12Digits(double x) {  // |x| <= 200
  const double n = (x + kRoundF64) - kRoundF64, r = (x - n) * 0.69314718055994530942;
  static constexpr double kSeries[] = {
      1.0,         1.0,          0.5,           1.0 / 6.0,      1.0 / 24.0,     1.0 / 120.0,
      1.0 / 720.0, 1.0 / 5040.0, 1.0 / 40320.0, 1.0 / 362880.0, 1.0 / 3628800.0};
  return Horner<10>(kSeries, r) * Exp2Int(n);
}
DT_MATH bool IsWhole(float x) {
  const float a = Fabs(x);
  return !(a < 8388608.0f) | ((a + 8388608.0f) - 8388608.0f == a);
}
DT_MATH float Pow(float x, float y) {
  const float a = Fabs(x), infinity = __builtin_inff();
  const double l = Log2To12Digits(static_cast<double>(a)), t = static_cast<double>(y) * l;
  const double up = t > 200.0 ? 200.0 : t, between = up < -200.0 ? -200.0 : up;
  const float r = static_cast<float>(Exp2To12Digits(between));
  // What has no logarithm: 0 and infinity are each other's inverse.
  const float end = (a == 0.0f) == (y < 0.0f) ? infinity : 0.0f;
  const float size = (a == 0.0f) | (a == infinity) ? end : r;
  const bool whole = IsWhole(y), odd = whole & !IsWhole(0.5f * y);
  const float signed_size = odd ? CopySign(size, x) : size;
  const bool none = (x < 0.0f) & (a < infinity) & !whole;
  const float of_one = a == 1.0f ? 1.0f : signed_size;  // also to an infinity
  const float with_sign = a == 1.0f && Fabs(y) < infinity ? signed_size : of_one;
  const float number = (x != x) | (y != y) ? x + y : none ? __builtin_nanf("") : with_sign;
  return (x == 1.0f) | (y == 0.0f) ? 1.0f : number;
}
// Integer power by squaring; wraps around; negative exponents give 0 except for bases 1 and -1.
DT_MATH int64_t Pow(int64_t x, int64_t y) {
  if (y < 0) return x == 1 ? 1 : x == -1 ? (y % 2 == 0 ? 1 : -1) : 0;
  uint64_t base = static_cast<uint64_t>(x), result = 1;
  for (; y > 0; y >>= 1, base *= base) {
    if (y & 1) result *= base;
  }
  return static_cast<int64_t>(result);
}

// Integers wrap around, as in element_ops.h.
DT_MATH double Neg(double a) { return -a; }
DT_MATH float Neg(float a) { return -a; }
DT_MATH int64_t Neg(int64_t a) { return static_cast<int64_t>(0 - static_cast<uint64_t>(a)); }
DT_MATH double Abs(double a) { return Fabs(a); }
DT_MATH float Abs(float a) { return Fabs(a); }
DT_MATH int64_t Abs(int64_t a) { return a < 0 ? Neg(a) : a; }
// a + alpha * b; alpha = 1 must not round twice.
template <class T>
DT_MATH T AddScaled(T a, T b, T alpha) {
  return Add(a, alpha == T(1) ? b : Mul(alpha, b));
}

// NaN in x passes; of crossed bounds the upper one wins.
template <class T>
DT_MATH T Clamp(T x, T lo, T hi) {
  const T y = !(x <= lo) ? x : lo, z = !(y >= hi) ? y : hi;  // of equals, as 0 and -0, the bound
  return lo != lo ? lo : hi != hi ? hi : z;
}

// GELU and its derivative; tanh form as in Hendrycks & Gimpel 2016. `approx` is the same for a
// whole loop, which the compiler takes out of it.
template <class T>
DT_MATH T GeluInner(T x) {
  return T(0.79788456080286535588) * Fma(T(0.044715) * x * x, x, x);
}
template <class T>
DT_MATH T Gelu(T x, bool approx) {
  if (approx) return T(0.5) * x * (T(1) + Tanh(GeluInner(x)));
  // x where it is above 0, less what the tail takes, which is nothing from x = 40 on. As PyTorch,
  // NaN at minus infinity.
  const T a = Fabs(AtMost(x, T(40)));
  return Fma(-a, Beyond(a), PositivePart(x));
}
template <class T>
DT_MATH T GeluGrad(T x, bool approx) {
  if (approx) {
    const T t = Tanh(GeluInner(x));
    const T dt = T(0.79788456080286535588) * Fma(T(0.134145) * x, x, T(1));
    return T(0.5) * (T(1) + t) + T(0.5) * x * (T(1) - t * t) * dt;
  }
  const T tail = Beyond(x), cdf = x < T(0) ? tail : T(1) - tail;
  return Fma(x, T(0.39894228040143267794) * Exp(T(-0.5) * x * x), cdf);
}
template <class T>
DT_MATH T SiluGrad(T x) {
  const T s = Sigmoid(x);
  return s * Fma(x, T(1) - s, T(1));
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
