// sin, cos and tan of every finite number, branch-free.
//
// x is an integer M times 2^(e - 52); what M is multiplied with is 2/pi * 2^(e - 52) modulo 4, of
// which a table holds 212 bits for every exponent (after Payne and Hanek 1983): the quarter turn
// and what is left of it are right to 2^-158, where no float64 comes nearer than 2^-62 to a
// multiple of pi / 2 (Muller, "Elementary Functions", chapter 11).
#pragma once

#include "dtensor/ops/cpu/arithmetic.h"
#include "dtensor/ops/cpu/trig_table.h"

namespace dtensor {
namespace DT_LEVEL_NS {

struct Quarters {
  int64_t n;          // quarter turns, of which the last two bits count
  double head, tail;  // what is left, in radians, within pi / 4
};
// head + tail = a + b, exactly (Knuth).
template <class T>
DT_MATH T TwoSum(T a, T b, T* tail) {
  const T s = a + b, v = s - a;
  *tail = (a - (s - v)) + (b - v);
  return s;
}
DT_MATH Quarters QuartersOf(double a) {  // a >= 0
  const int64_t exponent = static_cast<int64_t>(Bits(a) >> 52) - 1023;
  const int64_t below = exponent < -1 ? -1 : exponent, at = below > 1023 ? 1024 : below + 1;
  const double m =
      FromBits((Bits(a) & uint64_t{0x000FFFFFFFFFFFFF}) | uint64_t{0x4330000000000000});
  // Indexed where they are read: through a pointer to the row the loop would not vectorise.
  const double t0 = kTrigTable.row[at][0], t1 = kTrigTable.row[at][1];
  const double t2 = kTrigTable.row[at][2], t3 = kTrigTable.row[at][3];
  const double p0 = m * t0, q0 = Fma(m, t0, -p0), p1 = m * t1, q1 = Fma(m, t1, -p1);
  const double p2 = m * t2, q2 = Fma(m, t2, -p2) + m * t3;
  const double turns = 4.0 * RoundEven(p0 * 0.25);
  double r0, r1, r2, r3, r4, r5;
  const double s0 = TwoSum(p0 - turns, q0, &r0), s1 = TwoSum(s0, p1, &r1);
  const double n = (s1 + kRoundF64) - kRoundF64;
  // From the greatest to the least: what is left after the whole quarters may be small.
  const double s2 = TwoSum(s1 - n, TwoSum(r0, r1, &r2), &r3);
  const double s3 = TwoSum(s2, TwoSum(q1, p2, &r4), &r5);
  const double tail = (r3 + r5) + (r2 + r4 + q2), head = s3 + tail, rest = tail - (head - s3);
  const double radians = head * 1.5707963267948966;
  const double low = Fma(head, 1.5707963267948966, -radians);
  const bool small = a < 0.78539816339744828;
  return {small ? 0 : static_cast<int64_t>(Bits(n + kRoundF64)), small ? a : radians,
          small ? 0.0 : low + Fma(head, 6.123233995736766e-17, rest * 1.5707963267948966)};
}

// Taylor's series within pi / 4.
DT_MATH double SinOf(const Quarters& q) {
  const double z = q.head * q.head;
  double p = 1.0 / 355687428096000.0;
  p = Fma(p, -z, 1.0 / 1307674368000.0);
  p = Fma(p, -z, 1.0 / 6227020800.0);
  p = Fma(p, -z, 1.0 / 39916800.0);
  p = Fma(p, -z, 1.0 / 362880.0);
  p = Fma(p, -z, 1.0 / 5040.0);
  p = Fma(p, -z, 1.0 / 120.0);
  p = Fma(p, -z, 1.0 / 6.0);
  return q.head + Fma(-z * q.head, p, Fma(-0.5 * z, q.tail, q.tail));
}
DT_MATH double CosOf(const Quarters& q) {
  const double z = q.head * q.head;
  double p = 1.0 / 20922789888000.0;
  p = Fma(p, -z, 1.0 / 87178291200.0);
  p = Fma(p, -z, 1.0 / 479001600.0);
  p = Fma(p, -z, 1.0 / 3628800.0);
  p = Fma(p, -z, 1.0 / 40320.0);
  p = Fma(p, -z, 1.0 / 720.0);
  p = Fma(p, -z, 1.0 / 24.0);
  const double half = 0.5 * z, w = 1.0 - half;
  return w + (((1.0 - w) - half) + Fma(z * z, p, -q.head * q.tail));
}

DT_MATH double FiniteOr(double x, double r) { return x - x == 0.0 ? r : __builtin_nan(""); }
DT_MATH double Sin(double x) {
  const Quarters q = QuartersOf(Fabs(x));
  const double s = (q.n & 1) != 0 ? CosOf(q) : SinOf(q), r = (q.n & 2) != 0 ? -s : s;
  return FiniteOr(x, SignBit(x) ? -r : r);
}
DT_MATH double Cos(double x) {
  const Quarters q = QuartersOf(Fabs(x));
  const double s = (q.n & 1) != 0 ? SinOf(q) : CosOf(q);
  return FiniteOr(x, ((q.n + 1) & 2) != 0 ? -s : s);
}
DT_MATH double Tan(double x) {
  const Quarters q = QuartersOf(Fabs(x));
  const double s = SinOf(q), c = CosOf(q);
  const double r = (q.n & 1) != 0 ? -c / s : s / c;
  return FiniteOr(x, SignBit(x) ? -r : r);
}

// float32 below 2^17: a multiple of pi / 2 in three parts is taken away. The first difference is
// exact, for both of its terms are multiples of 2^-23 and it is less than one (Cody and Waite 1980,
// with fma).
static constexpr float kLargeAngle = 131072.0f;
DT_MATH bool IsLargeAngle(float x) { return !(Fabs(x) < kLargeAngle); }
struct QuartersF32 {
  uint32_t n;
  float head, tail;
};
// Of first + second the rounding error is second - (head - first): first is a multiple of the last
// place of second, so that head - first is exact, also where first is the lesser one. fma takes it
// from n times the second part as that is before it is rounded.
DT_MATH QuartersF32 QuartersOf(float x) {
  const float shifted = Fma(x, 0.636619772f, kRoundF32), n = shifted - kRoundF32;
  const float first = Fma(-n, 1.57079637f, x), head = first + n * 4.37113883e-8f;
  const float lost = Fma(n, 4.37113883e-8f, first - head);
  return {Bits(shifted), head, Fma(n, 1.71512451e-15f, lost)};
}
// (head + tail)^2, rounded once, for cos: what it loses there counts as half.
DT_MATH float SquareOf(const QuartersF32& q) {
  return Fma(q.head, q.head, (q.head + q.head) * q.tail);
}
DT_MATH float SinOf(const QuartersF32& q) {
  const float z = SquareOf(q);
  return q.head + Fma(q.head * z, Horner<3>(kSin, z), q.tail);
}
DT_MATH float CosOf(const QuartersF32& q) {
  const float z = SquareOf(q);
  return Fma(z, Fma(z, Horner<2>(kCos, z), -0.5f), 1.0f);
}
// s, with its sign turned where `sign`, as bits, has one.
DT_MATH float Turned(float s, uint32_t sign) { return FromBits(Bits(s) ^ (sign & 0x80000000u)); }
DT_MATH float Sin(Usual<float> x) {
  const QuartersF32 q = QuartersOf(Fabs(x.value));
  return Turned((q.n & 1) != 0 ? CosOf(q) : SinOf(q), (q.n << 30) ^ Bits(x.value));
}
DT_MATH float Cos(Usual<float> x) {
  const QuartersF32 q = QuartersOf(x.value);
  return Turned((q.n & 1) != 0 ? SinOf(q) : CosOf(q), (q.n + 1) << 30);
}
// A quotient of polynomials, turned over after odd quarters: one division serves both.
DT_MATH float Tan(Usual<float> x) {
  const QuartersF32 q = QuartersOf(Fabs(x.value));
  const float z = q.head * q.head;
  const float over = q.head + Fma(q.head * z, kTan[0], q.tail);
  const float under = Fma(z, Horner<2>(kTan + 1, z), 1.0f);
  const bool odd = (q.n & 1) != 0;
  const float above = odd ? under : over, below = odd ? over : under;
  return Turned(above / below, (q.n << 31) ^ Bits(x.value));
}
#define DT_OF_ANY_ANGLE(Name)                                                 \
  DT_MATH float Name(float x) {                                               \
    return IsLargeAngle(x) ? static_cast<float>(Name(static_cast<double>(x))) \
                           : Name(Usual<float>{x});                           \
  }
DT_OF_ANY_ANGLE(Sin)
DT_OF_ANY_ANGLE(Cos)
DT_OF_ANY_ANGLE(Tan)
#undef DT_OF_ANY_ANGLE

// sin(pi x) / (pi x), and its derivative; at 0 the quotients are 1 / 1 and 0 / 1.
template <class T>
DT_MATH T Sinc(T x) {
  const T y = T(3.14159265358979323846) * x, whole = T(y == T(0));
  return (Sin(y) + whole) / (y + whole);
}
template <class T>
DT_MATH T SincGrad(T x) {
  const T y = T(3.14159265358979323846) * x, square = y * x;
  return (y * Cos(y) - Sin(y)) / (square + T(square == T(0)));
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
