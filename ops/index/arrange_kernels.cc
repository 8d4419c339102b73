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

template <class T>
void ReverseRow(const void* from, int64_t n, void* to) {
  const T* x = static_cast<const T*>(from) + n - 1;
  T* y = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) y[i] = x[-i];
}
using ReverseFn = void (*)(const void* from, int64_t n, void* to);
ReverseFn ReverseOf(int64_t element_size) {
  switch (element_size) {
    case 8:
      return ReverseRow<uint64_t>;
    case 4:
      return ReverseRow<uint32_t>;
    case 2:
      return ReverseRow<uint16_t>;
    default:
      return ReverseRow<uint8_t>;
  }
}

// Rows along the last dim turned round, those of other dims as strides say. `from`, `to`: the first
// elements in memory from dim d on.
void ReverseRows(const TensorRef& x, const TensorRef& out, int d, const char* from, char* to,
                 ReverseFn reverse) {
  if (d == x.ndim - 1) return reverse(from, x.sizes[d], to);
  const int64_t size = SizeOf(x.dtype);
  for (int64_t i = 0; i < x.sizes[d]; ++i) {
    ReverseRows(x, out, d + 1, from + i * x.strides[d] * size, to + i * out.strides[d] * size,
                reverse);
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
  const int last = x.ndim - 1;
  if (last < 0 || strides[last] != -1 || c.out[0].strides[last] != 1) return CopyRef(x, c.out[0]);
  const char* row = first - (x.sizes[last] - 1) * SizeOf(x.dtype);
  ReverseRows(x, c.out[0], 0, row, static_cast<char*>(c.out[0].data), ReverseOf(SizeOf(x.dtype)));
}

}  // namespace

void RegisterArrangeKernels(AddKernelFn add) {
  add("tril", TrilKernel, kStoredDTypes, KernelLayout::kContiguous);
  add("flip", FlipKernel, kStoredDTypes, KernelLayout::kStrided);
}

}  // namespace dtensor
