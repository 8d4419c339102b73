// Optimizer updates, norms and scaling over runs of elements. Outputs may be the inputs themselves:
// each element is read before it is written.
#include <cmath>

#include "dtensor/ops/cpu/math.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
const T* In(const KernelCall& c, int i) {
  return static_cast<const T*>(c.in[i].data);
}
template <class T>
T* Out(const KernelCall& c, int i) {
  return static_cast<T*>(c.out[i].data);
}
int64_t CountOf(const TensorRef& t) {
  int64_t n = 1;
  for (int d = 0; d < t.ndim; ++d) n *= t.sizes[d];
  return n;
}
template <class T>
T Number(const KernelCall& c, int attr) {
  return static_cast<T>(c.attrs[attr].d);
}
// What a parameter decays by: nothing at a rate of 0, though 0 times infinity is NaN.
template <class T>
inline T Decay(T rate, T p) {
  return rate != 0 ? rate * p : T(0);
}

// p, g; lr, weight_decay, maximize
template <class T>
void Sgd(const KernelCall& c) {
  const T lr = Number<T>(c, 0), decay = Number<T>(c, 1), sign = c.attrs[2].i != 0 ? T(-1) : T(1);
  const T *p = In<T>(c, 0), *g = In<T>(c, 1);
  T* out = Out<T>(c, 0);
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = p[i] - lr * (sign * g[i] + Decay(decay, p[i]));
}

// p, m, g; lr, momentum, dampening, weight_decay, nesterov, maximize, step
template <class T>
void SgdMomentum(const KernelCall& c) {
  const T lr = Number<T>(c, 0), momentum = Number<T>(c, 1), keep = static_cast<T>(1 - c.attrs[2].d),
          decay = Number<T>(c, 3), sign = c.attrs[5].i != 0 ? T(-1) : T(1);
  const bool nesterov = c.attrs[4].i != 0, first = c.attrs[6].i == 1;
  const T *p = In<T>(c, 0), *m = In<T>(c, 1), *g = In<T>(c, 2);
  T *p_out = Out<T>(c, 0), *m_out = Out<T>(c, 1);
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = sign * g[i] + Decay(decay, p[i]);
    const T b = first ? d : momentum * m[i] + keep * d;
    m_out[i] = b;
    p_out[i] = p[i] - lr * (nesterov ? d + momentum * b : b);
  }
}

// p, m, v, [x,] g; lr, beta1, beta2, eps, weight_decay, maximize, step. The decay is of the
// parameter (decoupled), or a part of the gradient.
template <class T, bool kAmsgrad, bool kDecoupled>
void Adam(const KernelCall& c) {
  const double lr = c.attrs[0].d, beta1 = c.attrs[1].d, beta2 = c.attrs[2].d;
  const double t = static_cast<double>(c.attrs[6].i);
  const double bias1 = 1 - std::pow(beta1, t), bias2_root = std::sqrt(1 - std::pow(beta2, t));
  const T shrink = static_cast<T>(1 - lr * c.attrs[4].d), decay = Number<T>(c, 4),
          w1 = static_cast<T>(1 - beta1), b2 = static_cast<T>(beta2),
          w2 = static_cast<T>(1 - beta2), size = static_cast<T>(lr / bias1),
          root = static_cast<T>(1 / bias2_root), eps = Number<T>(c, 3),
          sign = c.attrs[5].i != 0 ? T(-1) : T(1);
  const T *p = In<T>(c, 0), *m = In<T>(c, 1), *v = In<T>(c, 2);
  const T *x = kAmsgrad ? In<T>(c, 3) : nullptr, *g = In<T>(c, kAmsgrad ? 4 : 3);
  T *p_out = Out<T>(c, 0), *m_out = Out<T>(c, 1), *v_out = Out<T>(c, 2);
  T* x_out = kAmsgrad ? Out<T>(c, 3) : nullptr;
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = kDecoupled ? sign * g[i] : sign * g[i] + Decay(decay, p[i]);
    const T average = m[i] + w1 * (d - m[i]);
    m_out[i] = average;
    T second = v_out[i] = b2 * v[i] + w2 * d * d;
    if (kAmsgrad) second = x_out[i] = x[i] > second ? x[i] : second;
    const T from = kDecoupled ? p[i] * shrink : p[i];
    p_out[i] = from - size * (average / (Sqrt(second) * root + eps));
  }
}

// p, s, g; lr, lr_decay, eps, weight_decay, maximize, step
template <class T>
void Adagrad(const KernelCall& c) {
  const double step = static_cast<double>(c.attrs[5].i);
  const T lr = static_cast<T>(c.attrs[0].d / (1 + (step - 1) * c.attrs[1].d)),
          eps = Number<T>(c, 2), decay = Number<T>(c, 3), sign = c.attrs[4].i != 0 ? T(-1) : T(1);
  const T *p = In<T>(c, 0), *s = In<T>(c, 1), *g = In<T>(c, 2);
  T *p_out = Out<T>(c, 0), *s_out = Out<T>(c, 1);
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = sign * g[i] + Decay(decay, p[i]);
    const T squares = s_out[i] = s[i] + d * d;
    p_out[i] = p[i] - lr * (d / (Sqrt(squares) + eps));
  }
}

// p, v, [b,] [a,] g; lr, alpha, eps, weight_decay, momentum, maximize
template <class T, bool kMomentum, bool kCentered>
void Rmsprop(const KernelCall& c) {
  const T lr = Number<T>(c, 0), alpha = Number<T>(c, 1), rest = static_cast<T>(1 - c.attrs[1].d),
          eps = Number<T>(c, 2), decay = Number<T>(c, 3), momentum = Number<T>(c, 4),
          sign = c.attrs[5].i != 0 ? T(-1) : T(1);
  constexpr int kB = 2, kA = kMomentum ? 3 : 2, kG = kA + (kCentered ? 1 : 0);
  const T *p = In<T>(c, 0), *v = In<T>(c, 1), *g = In<T>(c, kG);
  const T *b = kMomentum ? In<T>(c, kB) : nullptr, *a = kCentered ? In<T>(c, kA) : nullptr;
  T *p_out = Out<T>(c, 0), *v_out = Out<T>(c, 1);
  T *b_out = kMomentum ? Out<T>(c, kB) : nullptr, *a_out = kCentered ? Out<T>(c, kA) : nullptr;
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = sign * g[i] + Decay(decay, p[i]);
    T second = v_out[i] = alpha * v[i] + rest * d * d;
    if (kCentered) {
      const T average = a_out[i] = a[i] + rest * (d - a[i]);
      second = second - average * average;
    }
    T way = d / (Sqrt(second) + eps);
    if (kMomentum) way = b_out[i] = momentum * b[i] + way;
    p_out[i] = p[i] - lr * way;
  }
}

// x; p. Eight running sums, so that the loop is as wide as the machine and the order is fixed.
template <class T>
void PowerSum(const KernelCall& c) {
  const double type = c.attrs[0].d;
  const T* x = In<T>(c, 0);
  const int64_t n = CountOf(c.in[0]);
  double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (type == 2) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int k = 0; k < 8; ++k) {
        const double e = static_cast<double>(x[i + k]);
        sums[k] += e * e;
      }
    }
    for (; i < n; ++i) sums[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) sums[0] += std::pow(std::fabs(static_cast<double>(x[i])), type);
  }
  *Out<double>(c, 0) =
      ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class T>
void MaxAbs(const KernelCall& c) {
  const T* x = In<T>(c, 0);
  const int64_t n = CountOf(c.in[0]);
  double most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double e = std::fabs(static_cast<double>(x[i]));
    if (!(most >= e)) most = most != most ? most : e;  // NaN stays
  }
  *Out<double>(c, 0) = most;
}

// Numbers of float64, one after the other.
void AddAll(const KernelCall& c) {
  double sum = *In<double>(c, 0);
  for (const TensorRef& x : c.in.subspan(1)) sum += *static_cast<const double*>(x.data);
  *Out<double>(c, 0) = sum;
}

// x, by
template <class T>
void Scale(const KernelCall& c) {
  const T by = static_cast<T>(*In<double>(c, 1));
  const T* x = In<T>(c, 0);
  T* out = Out<T>(c, 0);
  const int64_t n = CountOf(c.in[0]);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * by;
}

template <KernelFn kF64, KernelFn kF32>
void OverRuns(const KernelCall& c) {
  RunContiguous(c, [](const KernelCall& flat) { RunFloating(flat, kF64, kF32); });
}
// For kernels that compute each element from those in its place.
template <KernelFn kF64, KernelFn kF32>
void Updates(const KernelCall& c) {
  RunContiguous(c, [](const KernelCall& flat) {
    IsNarrow(flat.in[0].dtype) ? RunWidenedPieces(flat, kF32) : RunFloating(flat, kF64, kF32);
  });
}

}  // namespace

void RegisterOptim(AddKernelFn add) {
  const auto floating = [add](const char* name, KernelFn fn) {
    add(name, fn, kFloatDTypes, KernelLayout::kStrided);
  };
  floating("sgd_", Updates<Sgd<double>, Sgd<float>>);
  floating("sgd_momentum_", Updates<SgdMomentum<double>, SgdMomentum<float>>);
#define DT_ADAM(name, ...) \
  floating(name, Updates<Adam<double, __VA_ARGS__>, Adam<float, __VA_ARGS__>>)
  DT_ADAM("adam_", false, false);
  DT_ADAM("adam_amsgrad_", true, false);
  DT_ADAM("adamw_", false, true);
  DT_ADAM("adamw_amsgrad_", true, true);
#undef DT_ADAM
  floating("adagrad_", Updates<Adagrad<double>, Adagrad<float>>);
#define DT_RMSPROP(name, ...) \
  floating(name, Updates<Rmsprop<double, __VA_ARGS__>, Rmsprop<float, __VA_ARGS__>>)
  DT_RMSPROP("rmsprop_", false, false);
  DT_RMSPROP("rmsprop_momentum_", true, false);
  DT_RMSPROP("rmsprop_centered_", false, true);
  DT_RMSPROP("rmsprop_centered_momentum_", true, true);
#undef DT_RMSPROP
  floating("power_sum", OverRuns<PowerSum<double>, PowerSum<float>>);
  floating("max_abs", OverRuns<MaxAbs<double>, MaxAbs<float>>);
  add("add_n", AddAll, DTypeBit(DType::kF64), KernelLayout::kStrided);
  floating("scale_", OverRuns<Scale<double>, Scale<float>>);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
