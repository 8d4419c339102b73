// The gamma family: rare, so plain loops and libm's logarithm of gamma, the same binary at every
// CPU level. float32 by float64, the logarithm and digamma without branches, so that loops
// vectorise. Sources: DLMF 5.5 and 5.11 (lgamma, digamma), 5.15 and 25.11 (polygamma).
#pragma once

#include <math.h>  // lgamma_r

#include "dtensor/ops/cpu/trig.h"

namespace dtensor {
namespace DT_LEVEL_NS {

#ifdef __CUDACC__
#define DT_CALL static __device__ inline
DT_CALL double Lgamma(double x) { return lgamma(x); }
#else
#define DT_CALL static inline
DT_CALL double Lgamma(double x) {
  int sign;
  return lgamma_r(x, &sign);
}
#endif

// pi / tan(pi x) of a number that is not whole.
DT_CALL double PiCot(double x) {
  return 3.14159265358979323846 / Tan(3.14159265358979323846 * (x - RoundEven(x)));
}

// psi(x), by recurrence to x >= 10 and Stirling's series there; below 0 by reflection.
DT_CALL double Digamma(double x) {
  if (x == 0.0) return -1.0 / x;  // an infinity of the other sign
  if (x < 0.0 && x == Floor(x)) return __builtin_nan("");
  const double reflected = x < 0.0 ? PiCot(x) : 0.0;
  if (x < 0.0) x = 1.0 - x;
  double shift = 0.0;
  for (; x < 10.0; x += 1.0) shift -= 1.0 / x;
  if (x > 1e17) return (x - x == 0.0 ? Log(x) : x) - reflected;
  static constexpr double kSeries[] = {// B(2k) / 2k
                                       1.0 / 12.0,   -1.0 / 120.0,    1.0 / 252.0,
                                       -1.0 / 240.0, 1.0 / 132.0,     -691.0 / 32760.0,
                                       1.0 / 12.0,   -3617.0 / 8160.0};
  const double z = 1.0 / (x * x);
  double p = 0.0;
  for (int k = 7; k >= 0; --k) p = Fma(p, z, kSeries[k]);
  return ((Log(x) - 0.5 / x - p * z) + shift) - reflected;
}

// Sum over k >= 0 of 1 / (x + k)^s for whole s >= 2 and x > 0, by Euler and Maclaurin from x >= 12.
DT_CALL double HurwitzZeta(double s, double x) {
  if (IsPosInf(x)) return 0.0;
  double sum = 0.0;
  for (; x < 12.0; x += 1.0) sum += Pow(x, -s);
  static constexpr double kSeries[] = {// B(2k) / (2k)!
                                       1.0 / 12.0,
                                       -1.0 / 720.0,
                                       1.0 / 30240.0,
                                       -1.0 / 1209600.0,
                                       1.0 / 47900160.0,
                                       -691.0 / 1307674368000.0,
                                       1.0 / 74724249600.0,
                                       -3617.0 / 10670622842880000.0,
                                       43867.0 / 5109094217170944000.0};
  const double last = Pow(x, -s);
  sum += last * x / (s - 1.0) + 0.5 * last;
  double term = last / x * s;  // s (s + 1) ... (s + 2k) x^(-s - 2k - 1)
  for (int k = 0; k < 9; ++k) {
    sum += kSeries[k] * term;
    term *= (s + 2.0 * k + 1.0) * (s + 2.0 * k + 2.0) / (x * x);
  }
  return sum;
}
// Below 0 the terms on the other side of the pole are a sum of that kind, less its rest.
DT_CALL double ZetaAnywhere(double s, bool even, double x) {
  if (x > 0.0) return HurwitzZeta(s, x);
  if (x == Floor(x)) return __builtin_inf();
  // To the pole above x: not 1 - f, which is 0 beside it.
  const double f = x - Floor(x), up = (Floor(x) + 1.0) - x;
  const double behind = HurwitzZeta(s, up) - HurwitzZeta(s, 1.0 - x);
  return HurwitzZeta(s, f) + (even ? behind : -behind);
}

// The n-th derivative of digamma.
DT_CALL double Polygamma(double x, int64_t n) {
  if (n == 0) return Digamma(x);
  if (x != x) return x;
  double factorial = 1.0;
  for (int64_t k = 2; k <= n && k < 200; ++k) factorial *= static_cast<double>(k);
  const double sum = factorial * ZetaAnywhere(static_cast<double>(n + 1), n % 2 == 1, x);
  return n % 2 == 1 ? sum : -sum;
}

#ifdef __CUDACC__
DT_CALL float Lgamma(float x) { return static_cast<float>(Lgamma(static_cast<double>(x))); }
DT_CALL float Digamma(float x) { return static_cast<float>(Digamma(static_cast<double>(x))); }
#else
// sin and cos of pi x by Taylor's series at what is left of half a turn.
struct PiTurn {
  double sin, cos;
};
DT_MATH PiTurn PiTurnOf(double x) {
  static constexpr double kSin[] = {// 1 / (2k + 1)!
                                    1.0,
                                    1.0 / 6.0,
                                    1.0 / 120.0,
                                    1.0 / 5040.0,
                                    1.0 / 362880.0,
                                    1.0 / 39916800.0,
                                    1.0 / 6227020800.0,
                                    1.0 / 1307674368000.0,
                                    1.0 / 355687428096000.0,
                                    1.0 / 121645100408832000.0,
                                    1.0 / 51090942171709440000.0};
  static constexpr double kCos[] = {// 1 / (2k)!
                                    1.0,
                                    1.0 / 2.0,
                                    1.0 / 24.0,
                                    1.0 / 720.0,
                                    1.0 / 40320.0,
                                    1.0 / 3628800.0,
                                    1.0 / 479001600.0,
                                    1.0 / 87178291200.0,
                                    1.0 / 20922789888000.0,
                                    1.0 / 6402373705728000.0,
                                    1.0 / 2432902008176640000.0};
  const double t = 3.14159265358979323846 * (x - RoundEven(x)), z = -t * t;
  return {t * Horner<10>(kSin, z), Horner<10>(kCos, z)};
}

// Stirling's series at 8 and more, less the logarithm of the product that leads there; below 1/2 by
// reflection. Terms cancel to 1e-14 near its zeros, where float32's neighbours are 1e-7 apart.
DT_MATH float Lgamma(float single) {
  const double x = static_cast<double>(single), a = x < 0.5 ? 1.0 - x : x;
  const bool near = a < 8.0;
  const double s = near ? a : 1.0, y = near ? a + 8.0 : a;
  const double product = (s * (s + 7.0)) * ((s + 1.0) * (s + 6.0)) *
                         (((s + 2.0) * (s + 5.0)) * ((s + 3.0) * (s + 4.0)));
  static constexpr double kSeries[] = {// B(2k) / (2k (2k - 1))
                                       1.0 / 12.0,    -1.0 / 360.0,      1.0 / 1260.0,
                                       -1.0 / 1680.0, 1.0 / 1188.0,      -691.0 / 360360.0,
                                       1.0 / 156.0,   -3617.0 / 122400.0};
  const double r = 1.0 / y, tail = r * Horner<7>(kSeries, r * r) + 0.91893853320467274178;
  const double beyond = near ? Log(product) : 0.0;
  const double right = (Fma(y - 0.5, Log(y), -y) - beyond) + tail;
  const double reflected = Log(3.14159265358979323846 / Fabs(PiTurnOf(x).sin)) - right;
  const double anywhere = x < 0.5 ? reflected : right;
  const double finite = x == 1.0 || x == 2.0 ? 0.0 : anywhere;
  return static_cast<float>(x - x == 0.0 ? finite : x * x);  // of both infinities the positive one
}

// As Digamma; the sum of reciprocals as one fraction.
DT_MATH float Digamma(float single) {
  const double x = static_cast<double>(single), a = x < 0.0 ? 1.0 - x : x;
  const bool near = a < 10.0;
  const double s = near ? a : 1.0, y = near ? a + 10.0 : a;
  double over = 1.0, under = s;
#define DT_TERM(k)                \
  over = Fma(over, s + k, under); \
  under *= s + k;
  DT_TERM(1.0)
  DT_TERM(2.0)
  DT_TERM(3.0)
  DT_TERM(4.0)
  DT_TERM(5.0)
  DT_TERM(6.0)
  DT_TERM(7.0)
  DT_TERM(8.0)
  DT_TERM(9.0)
#undef DT_TERM
  static constexpr double kSeries[] = {// B(2k) / 2k
                                       1.0 / 12.0,   -1.0 / 120.0,    1.0 / 252.0,
                                       -1.0 / 240.0, 1.0 / 132.0,     -691.0 / 32760.0,
                                       1.0 / 12.0,   -3617.0 / 8160.0};
  const double r = 1.0 / y, z = r * r, sum = near ? over / under : 0.0;
  const double right = (Fma(-0.5, r, Log(y)) - z * Horner<7>(kSeries, z)) - sum;
  const PiTurn turn = PiTurnOf(x);
  const double reflected = right - 3.14159265358979323846 * turn.cos / turn.sin;
  const double usual = x < 0.0 ? reflected : right;
  const double pole = x == 0.0 ? -1.0 / x : __builtin_nan("");
  return static_cast<float>(x == 0.0 || (x < 0.0 && x == Floor(x)) ? pole : usual);
}
#endif
DT_CALL float Polygamma(float x, int64_t n) {
  return static_cast<float>(Polygamma(static_cast<double>(x), n));
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
