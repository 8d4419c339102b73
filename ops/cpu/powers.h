// Powers with a number as exponent, as every element function for every computing type.
#pragma once

#include "dtensor/ops/cpu/arithmetic.h"

namespace dtensor {
namespace DT_LEVEL_NS {
// torch.pow's exact cases; the choice is the same for a whole loop.
template <class T>
DT_MATH T PowScalar(T x, T s) {
  if (s == T(2)) return Mul(x, x);
  if (s == T(3)) return Mul(Mul(x, x), x);
  if (s == T(1)) return x;
  if (s == T(0)) return T(1);
  return Pow(x, s);
}
DT_MATH double PowScalar(double x, double s) {
  if (s == 0.5) return Sqrt(x);
  if (s == -0.5) return 1.0 / Sqrt(x);
  if (s == -1.0) return 1.0 / x;
  if (s == -2.0) return 1.0 / (x * x);
  return PowScalar<double>(x, s);
}
DT_MATH float PowScalar(float x, float s) {
  if (s == 0.5f) return Sqrt(x);
  if (s == -0.5f) return 1.0f / Sqrt(x);
  if (s == -1.0f) return 1.0f / x;
  if (s == -2.0f) return 1.0f / (x * x);
  return PowScalar<float>(x, s);
}

// A number and the exponent that its whole run has, in halves, for those of torch.pow's exact cases
// that models use most: the loop of a kernel chooses once.
template <class T, int halves>
struct Raised {
  T value;
};
template <class T, int halves>
DT_MATH T PowScalar(Raised<T, halves> x, T) {
  return PowScalar(x.value, T(halves) / T(2));
}
template <class T>
DT_MATH T PowScalar(Usual<T> x, T s) {  // for none of the exact cases
  return Pow(x.value, s);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
