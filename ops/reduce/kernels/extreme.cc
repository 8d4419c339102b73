// The largest or least element along a dim, and where the first of them is.
#include "dtensor/ops/cpu/rows.h"
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// Of n elements in a row: first what it is, then where the first such stands. Vectors do both.
template <class T, class Order>
DT_MATH void ExtremeOfRow(const T* x, int64_t n, T* value, int64_t* index) {
  constexpr int64_t kShort = 64;  // lanes would cost more than they save
  if (n <= kShort) {
    T best = x[0];
    int64_t at = 0;
    for (int64_t k = 1; k < n; ++k) {
      if (!Order::Before(x[k], best)) continue;
      best = x[k];
      at = k;
    }
    *value = best;
    *index = at;
    return;
  }
  const T best = FirstOf<Order, T>(n, [x](int64_t at) { return x[at]; });
  int64_t i = 0;
  constexpr int64_t kStep = 64;
  for (; i + kStep <= n; i += kStep) {
    int32_t here = best != best ? 1 : 0;
    for (int64_t k = 0; k < kStep; ++k) here |= x[i + k] == best ? 1 : 0;
    if (here != 0) break;
  }
  while (Order::Before(best, x[i])) ++i;
  *value = x[i];
  *index = i;
}

// x [outer, n, inner] -> values and indices [outer, inner].
template <class T, class Order>
void Extreme(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int dim = static_cast<int>(c.attrs[0].i);
  const int64_t n = x.sizes[dim], outer = ProductOf(x, 0, dim);
  const int64_t inner = ProductOf(x, dim + 1, x.ndim);
  const T* in = static_cast<const T*>(x.data);
  T* values = static_cast<T*>(c.out[0].data);
  auto* indices = static_cast<int64_t*>(c.out[1].data);
  if (n == 0) return c.workspace->Fail("the dim has no elements");
  if (inner == 1) {
    for (int64_t o = 0; o < outer; ++o) {
      ExtremeOfRow<T, Order>(in + o * n, n, values + o, indices + o);
    }
    return;
  }
  for (int64_t o = 0; o < outer; ++o, values += inner, indices += inner) {
    for (int64_t j = 0; j < inner; ++j) {
      values[j] = in[j];
      indices[j] = 0;
    }
    in += inner;
    for (int64_t i = 1; i < n; ++i, in += inner) {
      for (int64_t j = 0; j < inner; ++j) {
        const bool better = Order::Before(in[j], values[j]);
        values[j] = better ? in[j] : values[j];
        indices[j] = better ? i : indices[j];
      }
    }
  }
}

template <class Order>
void ExtremeKernel(const KernelCall& c) {
  switch (c.in[0].dtype) {
    case DType::kI64:
      return Extreme<int64_t, Order>(c);
    case DType::kI32:
      return Extreme<int32_t, Order>(c);
    case DType::kU8:
    case DType::kBool:
      return Extreme<uint8_t, Order>(c);
    default:
      return RunFloating(c, Extreme<double, Order>, Extreme<float, Order>);
  }
}

}  // namespace

void RegisterExtreme(AddKernelFn add) {
  add("max_dim", ExtremeKernel<LargerFirst>, kAllDTypes, KernelLayout::kContiguous);
  add("min_dim", ExtremeKernel<SmallerFirst>, kAllDTypes, KernelLayout::kContiguous);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
