// Functions of real numbers beyond those of math.h, under the same rule: branch-free, IEEE
// operations and fma only, the same bits at every CPU level. Where float32 would need a polynomial
// of its own the float64 one serves it: the result is then rounded once.
//
// Sources: Muller, "Elementary Functions" (expm1, log1p by the rounding error of 1 + x, hyperbolic
// functions by expm1); DLMF chapter 4 (inverse functions by others) and 7 (erfc, erfcx); Shepherd
// and Laframboise 1981 (erfcx); Winitzki 2008 (where the iteration for erfinv starts); Giles 2010
// (erfinv of float32).
#pragma once

#include "dtensor/ops/cpu/arithmetic.h"
#include "dtensor/ops/cpu/math.h"
#include "dtensor/ops/cpu/real_table.h"

namespace dtensor {
namespace DT_LEVEL_NS {

// float32 by float64.
#define DT_FLOAT_BY_DOUBLE(Name) \
  DT_MATH float Name(float x) { return static_cast<float>(Name(static_cast<double>(x))); }

template <class T>
static constexpr T kLn2 = T(0.69314718055994530942);

// --- powers of e and 2. Of numbers beyond `lo` and `hi` the result is that of a limit.
template <class T>
DT_MATH T Within(T x, T lo, T hi) {  // NaN passes
  const T y = x < lo ? lo : x;
  return y > hi ? hi : y;
}
// 2 (2^(n-1) expm1(r) + (2^(n-1) - 1/2)): 2^(n-1) is finite where 2^n is not.
template <class T>
DT_MATH T Expm1Within(T x) {
  T r;
  const T half = Exp2Int(ReduceLn2(x, &r) - T(1));
  const T y = Fma(half, Expm1Core(r), half - T(0.5));
  return y + y;
}
DT_MATH double Expm1(double x) { return x == 0.0 ? x : Expm1Within(Within(x, -45.0, 710.0)); }
DT_MATH float Expm1(float x) { return x == 0.0f ? x : Expm1Within(Within(x, -20.0f, 89.0f)); }
template <class T>
DT_MATH T Exp2Within(T x) {
  const T n = RoundEven(x);
  return ScaledExp((x - n) * kLn2<T>, n);
}
DT_MATH double Exp2(double x) { return Exp2Within(Within(x, -1080.0, 1025.0)); }
DT_MATH float Exp2(float x) { return Exp2Within(Within(x, -155.0f, 129.0f)); }
// exp(x) / 2 for x >= 0, finite where cosh is.
template <class T>
DT_MATH T HalfExpWithin(T x) {
  T r;
  const T n = ReduceLn2(x, &r);
  return ScaledExp(r, n - T(1));
}
DT_MATH double HalfExp(double x) { return HalfExpWithin(Within(x, 0.0, 711.0)); }
DT_MATH float HalfExp(float x) { return HalfExpWithin(Within(x, 0.0f, 90.0f)); }

// --- logarithms. A power of two has an exact one to base 2.
template <class T>
DT_MATH T Log2(T x) {
  const LogParts<T> p = SplitLog(x);
  return LogOr(x, Fma(p.head + p.tail, T(1.4426950408889634074), p.e));
}
DT_MATH double Log10(double x) {  // log10(2) in two parts, the first of them of 32 bits
  const LogParts<double> p = SplitLog(x);
  const double m = (p.head + p.tail) * 0.43429448190325182765;
  return LogOr(x, Fma(p.e, 0.3010299955494702, Fma(p.e, 1.1451100898021838e-10, m)));
}
DT_FLOAT_BY_DOUBLE(Log10)
// What rounding 1 + x lost, over 1 + x, is added to log(1 + x).
template <class T>
DT_MATH T Log1p(T x) {
  const T u = T(1) + x, lost = x - (u - T(1));
  const T r = Log(u) + lost / u;
  const T whole = x < Infinity(T()) ? r : x;
  return x == T(-1) ? -Infinity(T()) : x == T(0) ? x : whole;
}

// --- hyperbolic functions and their inverses
template <class T>
DT_MATH T Sinh(T x) {
  const T a = Fabs(x), e = Expm1(a > T(22) ? T(22) : a);
  const T small = T(0.5) * (e + e / (e + T(1)));
  return CopySign(a > T(22) ? HalfExp(a) : a != a ? a : small, x);
}
template <class T>
DT_MATH T Cosh(T x) {
  const T h = HalfExp(Fabs(x));
  return h + T(0.25) / h;
}
// log(x + sqrt(x^2 +- 1)); of large numbers log(2 x).
template <class T>
DT_MATH T Asinh(T x) {
  const T a = Fabs(x), s = a > T(1e8) ? T(1) : a * a;
  const T small = Log1p(a + s / (T(1) + Sqrt(s + T(1))));
  return CopySign(a > T(1e8) ? Log(a) + kLn2<T> : small, x);
}
template <class T>
DT_MATH T Acosh(T x) {
  const T t = x - T(1), s = x > T(1e8) ? T(0) : Fma(t, t, t + t);
  const T r = x > T(1e8) ? Log(x) + kLn2<T> : Log1p(t + Sqrt(s));
  return x >= T(1) ? r : T(__builtin_nan(""));
}
template <class T>
DT_MATH T Atanh(T x) {
  const T a = Fabs(x);
  return CopySign(T(0.5) * Log1p((a + a) / (T(1) - a)), x);
}

// --- arc functions
// The angle of the point (x, y), x, y >= 0: atan(t) = atan(c) + atan((t - c) / (1 + c t)), with c
// the nearest of 0, 1/2 and 1.
DT_MATH double AtanOfQuadrant(double y, double x) {
  const double lo = y > x ? x : y, hi = y > x ? y : x;
  const double t = lo == hi ? (lo == 0.0 ? 0.0 : 1.0) : lo / hi;
  const double c = t > 0.75 ? 1.0 : t > 0.25 ? 0.5 : 0.0;
  const double at_c = t > 0.75 ? 0.78539816339744831 : t > 0.25 ? 0.46364760900080612 : 0.0;
  const double u = (t - c) / Fma(c, t, 1.0), z = u * u;
  static constexpr double kSeries[] = {
      1.0 / 3.0,   -1.0 / 5.0, 1.0 / 7.0,   -1.0 / 9.0, 1.0 / 11.0,  -1.0 / 13.0, 1.0 / 15.0,
      -1.0 / 17.0, 1.0 / 19.0, -1.0 / 21.0, 1.0 / 23.0, -1.0 / 25.0, 1.0 / 27.0};
  const double r = at_c + Fma(-z * u, Horner<12>(kSeries, z), u);
  return y > x ? (1.5707963267948966 - r) + 6.123233995736766e-17 : r;
}
DT_MATH double Atan2(double y, double x) {
  const double r = AtanOfQuadrant(Fabs(y), Fabs(x));
  const double angle = SignBit(x) ? (3.141592653589793 - r) + 1.2246467991473532e-16 : r;
  return y != y || x != x ? y + x : CopySign(angle, y);
}
DT_MATH double Atan(double x) { return CopySign(AtanOfQuadrant(Fabs(x), 1.0), x); }
DT_MATH double Asin(double x) {
  return CopySign(AtanOfQuadrant(Fabs(x), Sqrt((1.0 - x) * (1.0 + x))), x);
}
DT_MATH double Acos(double x) { return Atan2(Sqrt((1.0 - x) * (1.0 + x)), x); }
// pi / 2 in two parts.
static constexpr float kQuarterTurn = 1.57079637f, kQuarterTurnTail = -4.37113883e-8f;
DT_MATH float AtanOfQuadrant(float y, float x) {
  const float lo = y > x ? x : y, hi = y > x ? y : x;
  const float t = lo == hi ? (lo == 0.0f ? 0.0f : 1.0f) : lo / hi, z = t * t;
  const float r = Fma(t * z, Horner<8>(kAtan, z), t);
  return y > x ? (kQuarterTurn - r) + kQuarterTurnTail : r;
}
DT_MATH float Atan2(float y, float x) {
  const float r = AtanOfQuadrant(Fabs(y), Fabs(x));
  const float back = (2.0f * kQuarterTurn - r) + 2.0f * kQuarterTurnTail;
  return (y != y) | (x != x) ? y + x : CopySign(SignBit(x) ? back : r, y);
}
DT_MATH float Atan(float x) { return CopySign(AtanOfQuadrant(Fabs(x), 1.0f), x); }
// asin(a) for 0 <= a <= 1/2; above, half of what is left to pi / 2.
DT_MATH float AsinPart(float a) {
  const float rest = 0.5f * (1.0f - a), z = a > 0.5f ? rest : a * a;
  const float s = a > 0.5f ? Sqrt(rest) : a;
  return Fma(s * z, Horner<5>(kAsin, z), s);
}
DT_MATH float Asin(float x) {
  const float a = Fabs(x), r = AsinPart(a);
  return CopySign(a > 0.5f ? (kQuarterTurn - 2.0f * r) + kQuarterTurnTail : r, x);
}
DT_MATH float Acos(float x) {
  const float r = AsinPart(Fabs(x));
  const float far =
      x > 0.0f ? 2.0f * r : (2.0f * kQuarterTurn - 2.0f * r) + 2.0f * kQuarterTurnTail;
  const float near = (kQuarterTurn - CopySign(r, x)) + kQuarterTurnTail;
  return Fabs(x) > 0.5f ? far : near;
}

// sqrt(x^2 + y^2) without overflow; an infinity wins against NaN.
template <class T>
DT_MATH T Hypot(T x, T y) {
  const T a = Fabs(x), b = Fabs(y);
  const T hi = a > b ? a : b, lo = a > b ? b : a, q = lo / hi;
  const T r = hi * Sqrt(Fma(q, q, T(1)));
  const T finite = hi == T(0) ? a + b : r;
  return IsInf(x) || IsInf(y) ? Infinity(T()) : finite;
}
// log(e^x + e^y), and to base 2.
template <class T>
DT_MATH T LogAddExp(T x, T y) {
  const T m = Maximum(x, y);
  return x == y ? x + kLn2<T> : m + Log1p(Exp(-Fabs(x - y)));
}
template <class T>
DT_MATH T LogAddExp2(T x, T y) {
  const T m = Maximum(x, y);
  return x == y ? x + T(1) : m + Log1p(Exp2(-Fabs(x - y))) * T(1.4426950408889634074);
}
// x log(y), and x log(1 + y); 0 for x = 0 unless y is NaN.
template <class T>
DT_MATH T TimesLog(T x, T log, T y) {
  return y != y ? y : x == T(0) ? T(0) : x * log;
}
// -x log(x)
template <class T>
DT_MATH T Entropy(T x) {
  const T below = x < T(0) ? -Infinity(T()) : x;  // 0, NaN
  return x > T(0) ? -x * Log(x) : below;
}
template <class T>
DT_MATH T Logit(T x, T eps) {
  const T inside = x < eps ? eps : x > T(1) - eps ? T(1) - eps : x, z = eps < T(0) ? x : inside;
  return Log(z / (T(1) - z));
}
template <class T>
DT_MATH T LogitGrad(T x, T eps) {
  const T lo = eps < T(0) ? T(0) : eps, outside = eps < T(0) ? T(__builtin_nan("")) : T(0);
  return x < lo || x > T(1) - lo ? outside : T(1) / (x * (T(1) - x));
}

// --- the error function: what is left of it, and its inverse
// exp(x^2) erfc(x) for x >= 0.
DT_MATH double ErfcxPositive(double x) {
  const double y = x < 1e300 ? x : 1e300, t = (y - 3.0) / (y + 3.0);
  const double p = Horner<26>(kErfcx, t);
  return x != x ? x : p / Fma(2.0, y, 1.0);
}
// exp(-x^2), with what rounding x^2 loses.
DT_MATH double ExpMinusSquare(double x) {
  const double a = Fabs(x), y = a > 40.0 ? 40.0 : a, s = y * y;
  return Fma(-Fma(y, y, -s), Exp(-s), Exp(-s));
}
DT_MATH double Erfc(double x) {
  const double a = Fabs(x), tail = ExpMinusSquare(a) * ErfcxPositive(a);
  return x < 0.0 ? 2.0 - tail : tail;
}
// From 1/2 on erfcx(a) exp(r) 2^n, where -a^2 = n ln 2 + r is rounded once. 2^(n + 24) is a normal
// number for every n from which something is left, and what is subnormal is rounded by the last
// product alone. From 10.2 on nothing is left; NaN passes by the quotient.
DT_MATH float Erfc(float x) {
  constexpr float kRound = kRoundF32 + 127.0f + 24.0f;
  const float a = Fabs(x), y = AtMost(a, 10.2f), z = y * y, u = 1.0f / (a + 2.5f);
  const float shifted = Fma(z, -1.44269504f, kRound), n = shifted - kRound;
  const float r = Fma(-n, -2.12194440e-4f, Fma(-y, y, -(n * 0.693359375f)));
  const float g = Horner<8>(kErfcxF32, Fma(y, u, -0.5f)) * u;
  const float grown = Fma(g * r, Fma(Horner<4>(kExp, r), r, 1.0f), g);  // g exp(r)
  const float tail = grown * FromBits(Bits(shifted) << 23) * 5.9604644775390625e-8f;
  const float far = x < 0.0f ? 2.0f - tail : tail;
  return a < 0.5f ? 1.0f - Fma(x, Horner<4>(kErfcNear, z), x) : far;
}
DT_MATH double Erfcx(double x) {
  const double p = ErfcxPositive(Fabs(x)), y = x < -27.0 ? -27.0 : x, s = y * y;
  const double grown = Fma(Fma(y, y, -s), Exp(s), Exp(s));
  return x < 0.0 ? (x < -27.0 ? __builtin_inf() : Fma(2.0, grown, -p)) : p;
}
// Halley's step from y towards erf(y) = x; near 1 it looks at 1 - x, which is exact.
DT_MATH double ErfinvStep(double y, double x) {
  const double left = x < 0.5 ? Erf(y) - x : (1.0 - x) - Erfc(y);
  const double u = left * 0.88622692545275801365 * Exp(y * y);
  return y - u / Fma(y, u, 1.0);
}
DT_MATH double Erfinv(double x) {
  const double a = Fabs(x), l = Log1p(-a * a);
  const double b = Fma(0.5, l, 2.0 / (3.141592653589793 * 0.147)), c = -l / 0.147;
  const double root = Sqrt(Fma(b, b, c));
  const double start = Sqrt(b > 0.0 ? c / (root + b) : root - b);
  const double y = ErfinvStep(ErfinvStep(start, a), a);
  const double end = a == 1.0 ? __builtin_inf() : __builtin_nan("");
  return CopySign(a < 1.0 ? y : end, x);
}
// In w = -log(1 - x^2), which grows as erfinv(x)^2 does (Giles 2010).
DT_MATH float Erfinv(float x) {
  const float a = Fabs(x), w = -Log((1.0f - a) * (1.0f + a));
  const float near = Horner<9>(kErfinvNear, w - 2.5f);
  const float far = Horner<9>(kErfinvFar, Sqrt(w > 0.0f ? w : 0.0f) - 3.0f);
  const float r = x * (w < 5.0f ? near : far);
  return a < 1.0f ? r : a == 1.0f ? CopySign(__builtin_inff(), x) : __builtin_nanf("");
}
// The normal distribution function, its logarithm, and what the gradient of that takes.
DT_MATH double Ndtr(double x) { return 0.5 * Erfc(x * -0.70710678118654752440); }
DT_MATH double LogNdtr(double x) {
  const double t = x * -0.70710678118654752440;
  const double left = Log(0.5 * ErfcxPositive(t > 0.0 ? t : 0.0)) - t * t;
  return x < -1.0 ? left : Log1p(-0.5 * Erfc(-t));
}
DT_MATH double LogNdtrGrad(double x) {
  return 0.79788456080286535588 / Erfcx(x * -0.70710678118654752440);
}
DT_FLOAT_BY_DOUBLE(Ndtr)
DT_FLOAT_BY_DOUBLE(LogNdtr)
DT_FLOAT_BY_DOUBLE(LogNdtrGrad)

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
