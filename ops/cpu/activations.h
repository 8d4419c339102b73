// Activation functions and their derivatives, for f64 and f32, under the rule of math.h.
#pragma once

#include "dtensor/ops/cpu/real.h"

namespace dtensor {
namespace DT_LEVEL_NS {

// log(1 + e^(beta x)) / beta; x itself where beta x is above the threshold.
template <class T>
DT_MATH T Softplus(T x, T beta, T threshold) {
  const T y = beta * x;
  return y > threshold ? x : Log1p(Exp(y)) / beta;
}
template <class T>
DT_MATH T LogSigmoid(T x) {
  return Minimum(x, T(0)) - Log1p(Exp(-Fabs(x)));
}
// tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2); 1 from x = 40 on.
template <class T>
DT_MATH T TanhOfSoftplus(T x) {
  const T e = Exp(x > T(40) ? T(40) : x), n = e * (e + T(2));
  return n / (n + T(2));
}
template <class T>
DT_MATH T MishGrad(T x) {
  const T t = TanhOfSoftplus(x);
  return Fma(x * Sigmoid(x), T(1) - t * t, t);
}
template <class T>
DT_MATH T Elu(T x, T alpha, T scale, T input_scale) {
  return x < T(0) ? Expm1(x * input_scale) * (alpha * scale) : x * scale;
}
template <class T>
DT_MATH T EluGrad(T x, T alpha, T scale, T input_scale) {
  return x <= T(0) ? input_scale * (alpha * scale) * Exp(x * input_scale) : scale;
}
template <class T>
DT_MATH T HardSigmoid(T x) {
  const T y = x + T(3), low = y < T(0) ? T(0) : y;  // which NaN passes
  return (low > T(6) ? T(6) : low) / T(6);
}
template <class T>
DT_MATH T HardSwishGrad(T x) {
  const T inner = x / T(3) + T(0.5);
  return x <= T(-3) ? T(0) : x < T(3) ? inner : T(1);
}
// A NaN stays one.
template <class T>
DT_MATH T SoftShrink(T x, T lambd) {
  const T inside = x != x ? x : T(0);
  return x > lambd ? x - lambd : x < -lambd ? x + lambd : inside;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
