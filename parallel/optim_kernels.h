// The loops of the optimizers, compiled once per CPU level. Internal to parallel/.
#pragma once

#include <cstdint>

namespace dtensor {

struct SgdStep {
  double lr, momentum, dampening, weight_decay;
  bool nesterov, maximize, first;
};
struct AdamwStep {
  double lr, beta1, beta2, eps, weight_decay, bias1, bias2_root;  // bias2_root: sqrt(1 - beta2^t)
  bool maximize;
};

template <class T>
struct OptimLoops {
  void (*sgd)(T* p, T* momentum_or_null, const T* g, int64_t n, const SgdStep& s);
  void (*adamw)(T* p, T* m, T* v, T* vmax_or_null, const T* g, int64_t n, const AdamwStep& s);
  // Sum of |g|^type, or the largest |g| for infinity.
  double (*norm)(const T* g, int64_t n, double type);
  void (*scale)(T* g, int64_t n, double by);
};
struct OptimKernels {
  OptimLoops<float> f32;
  OptimLoops<double> f64;
};

namespace cpu_baseline {
OptimKernels GetOptimKernels();
}
namespace cpu_v3 {
OptimKernels GetOptimKernels();
}
namespace cpu_v4 {
OptimKernels GetOptimKernels();
}

}  // namespace dtensor
