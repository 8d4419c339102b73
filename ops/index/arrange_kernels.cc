// Triangles and reversed copies: memory-bound, so one build serves every CPU level.
#include <algorithm>
#include <cstring>

#include "dtensor/ops/kernels.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

int64_t StartOf(const KernelCall& c, size_t factor) {
  return c.factors.empty() || c.factors[factor].global < 0 ? 0 : c.factors[factor].start;
}

// x [..., rows, columns]; attrs: diagonal, upper; factors: rows, columns
void TrilKernel(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const int64_t rows = x.sizes[x.ndim - 2], columns = x.sizes[x.ndim - 1], size = SizeOf(x.dtype);
  const int64_t matrix = rows * columns;
  const bool upper = c.attrs[1].i != 0;
  // The diagonal of row 0 here, as a column here; no further away than the columns are.
  const __int128 first = static_cast<__int128>(c.attrs[0].i) + StartOf(c, 0) - StartOf(c, 1);
  int64_t matrices = matrix == 0 ? 0 : 1;
  for (int d = 0; d < x.ndim - 2; ++d) matrices *= x.sizes[d];
  for (int64_t m = 0; m < matrices; ++m) {
    for (int64_t r = 0; r < rows; ++r) {
      const __int128 end = first + r + (upper ? 0 : 1);
      const auto cut = static_cast<int64_t>(std::clamp<__int128>(end, 0, columns));
      const int64_t from = upper ? cut : 0, to = upper ? columns : cut;
      const int64_t at = m * matrix + r * columns;
      const auto* in = static_cast<const char*>(x.data) + at * size;
      auto* out = static_cast<char*>(c.out[0].data) + at * size;
      std::memset(out, 0, static_cast<size_t>(from * size));
      std::memcpy(out + from * size, in + from * size, static_cast<size_t>((to - from) * size));
      std::memset(out + to * size, 0, static_cast<size_t>((columns - to) * size));
    }
  }
}

// attrs: dims
void FlipKernel(const KernelCall& c) {
  TensorRef x = c.in[0];
  Strides strides(x.strides, x.strides + x.ndim);
  auto* first = static_cast<char*>(x.data);
  for (int64_t i = 0; i < c.attrs[0].n; ++i) {
    const auto d = static_cast<size_t>(c.attrs[0].ints[i]);
    if (x.sizes[d] == 0) return;
    first += (x.sizes[d] - 1) * strides[d] * SizeOf(x.dtype);
    strides[d] = -strides[d];
  }
  x.data = first;
  x.strides = strides.data();
  CopyRef(x, c.out[0]);
}

}  // namespace

void RegisterArrangeKernels(AddKernelFn add) {
  add("tril", TrilKernel, kStoredDTypes, KernelLayout::kContiguous);
  add("flip", FlipKernel, kStoredDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor
