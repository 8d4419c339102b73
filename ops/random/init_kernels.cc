// What initialisers compute, in float64 whatever the dtype.
#include <algorithm>
#include <cmath>
#include <limits>

#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

// Newton's method on erf from a rational first guess (Giles 2012); about the last bit of a double.
double ErfInv(double y) {
  if (!(std::fabs(y) < 1)) return y * std::numeric_limits<double>::infinity();
  const double w = -std::log((1 - y) * (1 + y));
  double x = w < 5 ? y * (1.50140941 + (w - 2.5) * (0.246640727 + (w - 2.5) * -0.00417768164))
                   : y * (2.83297682 + (std::sqrt(w) - 3) * 1.00167406);
  for (int i = 0; i < 6; ++i) {
    x -= (std::erf(x) - y) * std::sqrt(std::acos(-1.0)) / 2 * std::exp(x * x);
  }
  return x;
}

// x; mean, std, a, b
void TruncatedNormal(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const Shape sizes(x.sizes, x.sizes + x.ndim);
  const Strides strides = ContiguousStrides(sizes);
  const int64_t n = Numel(sizes);
  auto* values = static_cast<double*>(c.workspace->Allocate(n * SizeOf(DType::kF64)));
  const TensorRef wide = {values, sizes.data(), strides.data(), x.ndim, DType::kF64};
  CopyRef(x, wide);
  const double mean = c.attrs[0].d, std = c.attrs[1].d, a = c.attrs[2].d, b = c.attrs[3].d;
  for (int64_t i = 0; i < n; ++i) {
    values[i] = std::clamp(ErfInv(values[i]) * std * std::sqrt(2.0) + mean, a, b);
  }
  CopyRef(wide, c.out[0]);
}

}  // namespace

void RegisterInitKernels(AddKernelFn add) {
  add("truncated_normal_", TruncatedNormal, kFloatDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor
