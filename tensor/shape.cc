#include "dtensor/tensor/shape.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 48;

// The product of the sizes that are not 0, of which strides are made, and whether one is 0.
struct Product {
  int64_t value = 1;
  bool empty = false;
};
absl::StatusOr<Product> CheckedProduct(IntSpan shape) {
  Product product;
  for (const int64_t size : shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ToString(shape), " has a negative size"));
    }
    product.empty |= size == 0;
    if (size != 0 && __builtin_mul_overflow(product.value, size, &product.value)) {
      return absl::InvalidArgumentError(
          absl::StrCat("shape ", ToString(shape), " has more than 2^63 - 1 elements"));
    }
  }
  return product;
}

}  // namespace

absl::StatusOr<int64_t> CheckedNumel(IntSpan shape) {
  DT_ASSIGN_OR_RETURN(const Product product, CheckedProduct(shape));
  return product.empty ? 0 : product.value;
}

absl::StatusOr<int64_t> CheckedBytes(IntSpan shape, DType dtype) {
  if (shape.size() > kMaxDims) {
    return absl::InvalidArgumentError(absl::StrCat("shape ", ToString(shape), " has ", shape.size(),
                                                   " dims, more than ", kMaxDims));
  }
  DT_ASSIGN_OR_RETURN(const Product product, CheckedProduct(shape));
  int64_t bytes = 0;
  if (__builtin_mul_overflow(product.value, SizeOf(dtype), &bytes) ||
      (bytes > kMaxBytes && !product.empty)) {
    const std::string_view name = Name(dtype);
    return absl::InvalidArgumentError(absl::StrCat("shape ", ToString(shape), " of ",
                                                   absl::string_view(name.data(), name.size()),
                                                   " takes more than 2^48 bytes"));
  }
  return product.empty ? 0 : bytes;
}

bool SliceFits(int64_t start, int64_t length, int64_t step, int64_t size) {
  return start >= 0 && start < size && step >= 1 && (length - 1) <= (size - 1 - start) / step;
}

Strides ContiguousStrides(IntSpan shape) {
  Strides strides(shape.size());
  int64_t stride = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(shape[d], 1);
  }
  return strides;
}

bool IsContiguous(IntSpan shape, IntSpan strides) {
  int64_t expected = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    if (shape[d] == 0) return true;
    if (shape[d] == 1) continue;
    if (strides[d] != expected) return Numel(shape) == 0;
    expected *= shape[d];
  }
  return true;
}

bool MayRepeat(IntSpan shape, IntSpan strides) {
  absl::InlinedVector<std::pair<int64_t, int64_t>, 8> dims;  // stride, size
  for (size_t d = 0; d < shape.size(); ++d) {
    if (shape[d] > 1) dims.emplace_back(strides[d], shape[d]);
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // of the dims with smaller strides, over which each must step
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += (size - 1) * stride;
  }
  return false;
}

absl::StatusOr<Shape> BroadcastShapes(IntSpan a, IntSpan b) {
  Shape out(std::max(a.size(), b.size()), 1);
  for (size_t k = 1; k <= out.size(); ++k) {
    const int64_t x = k <= a.size() ? a[a.size() - k] : 1;
    const int64_t y = k <= b.size() ? b[b.size() - k] : 1;
    if (x != y && x != 1 && y != 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("shapes ", ToString(a), " and ", ToString(b), " do not broadcast"));
    }
    out[out.size() - k] = x == 1 ? y : x;
  }
  return out;
}

absl::StatusOr<int> NormalizeDim(int64_t dim, int ndim) {
  if (dim >= -ndim && dim < ndim) return static_cast<int>(dim < 0 ? dim + ndim : dim);
  if (ndim == 0) {
    return absl::OutOfRangeError(absl::StrCat("dim ", dim, " of a tensor without dims"));
  }
  return absl::OutOfRangeError(
      absl::StrCat("dim ", dim, " is out of range [", -ndim, ", ", ndim - 1, "]"));
}

std::string ToString(IntSpan shape) { return absl::StrCat("[", absl::StrJoin(shape, ", "), "]"); }

}  // namespace dtensor
