// Optimizer updates and norms over flat arrays, one source per CPU level.
#include <cmath>

#include "ops/kernels/math.h"
#include "parallel/optim_kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

template <class T>
void Sgd(T* p, T* buf, const T* g, int64_t n, const SgdStep& s) {
  const T lr = static_cast<T>(s.lr), decay = static_cast<T>(s.weight_decay),
          momentum = static_cast<T>(s.momentum), keep = static_cast<T>(1 - s.dampening),
          sign = s.maximize ? T(-1) : T(1);
  if (buf == nullptr) {
    for (int64_t i = 0; i < n; ++i) p[i] -= lr * (sign * g[i] + decay * p[i]);
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = sign * g[i] + decay * p[i];
    const T b = s.first ? d : momentum * buf[i] + keep * d;
    buf[i] = b;
    p[i] -= lr * (s.nesterov ? d + momentum * b : b);
  }
}

template <class T>
void Adamw(T* p, T* m, T* v, T* vmax, const T* g, int64_t n, const AdamwStep& s) {
  const T shrink = static_cast<T>(1 - s.lr * s.weight_decay), w1 = static_cast<T>(1 - s.beta1),
          b2 = static_cast<T>(s.beta2), w2 = static_cast<T>(1 - s.beta2),
          size = static_cast<T>(s.lr / s.bias1), root = static_cast<T>(1 / s.bias2_root),
          eps = static_cast<T>(s.eps), sign = s.maximize ? T(-1) : T(1);
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    const T d = sign * g[i];
    m[i] += w1 * (d - m[i]);
    v[i] = b2 * v[i] + w2 * d * d;
    T second = v[i];
    if (vmax != nullptr) second = vmax[i] = vmax[i] > second ? vmax[i] : second;
    p[i] = p[i] * shrink - size * (m[i] / (Sqrt(second) * root + eps));
  }
}

// Eight running sums, so that the loop is as wide as the machine and the order is fixed.
template <class T>
double Norm(const T* g, int64_t n, double type) {
  double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  if (type == 2) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
      for (int k = 0; k < 8; ++k) {
        const double x = static_cast<double>(g[i + k]);
        sums[k] += x * x;
      }
    }
    for (; i < n; ++i) sums[0] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  } else if (type == HUGE_VAL) {
    for (int64_t i = 0; i < n; ++i) {
      const double x = std::fabs(static_cast<double>(g[i]));
      if (!(sums[0] >= x)) sums[0] = sums[0] != sums[0] ? sums[0] : x;  // NaN stays
    }
    return sums[0];
  } else {
    for (int64_t i = 0; i < n; ++i) sums[0] += std::pow(std::fabs(static_cast<double>(g[i])), type);
  }
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

template <class T>
void Scale(T* g, int64_t n, double by) {
  const T f = static_cast<T>(by);
  for (int64_t i = 0; i < n; ++i) g[i] *= f;
}

}  // namespace

OptimKernels GetOptimKernels() {
  return {{Sgd<float>, Adamw<float>, Norm<float>, Scale<float>},
          {Sgd<double>, Adamw<double>, Norm<double>, Scale<double>}};
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
