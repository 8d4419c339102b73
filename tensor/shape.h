// Shape: sizes and strides, and the checked products of sizes that every allocation goes through.
#pragma once

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

using Dims = absl::InlinedVector<int64_t, 6>;
using Shape = Dims;
using Strides = Dims;
using IntSpan = absl::Span<const int64_t>;

// Product of sizes. Errors: InvalidArgument if a size is negative or the product of those that are
// not 0 overflows int64 (strides are made of them).
absl::StatusOr<int64_t> CheckedNumel(IntSpan shape);
// CheckedNumel times the element size. Errors: as CheckedNumel, above kMaxDims dims, and above 2^48
// bytes.
absl::StatusOr<int64_t> CheckedBytes(IntSpan shape, DType dtype);
// a / b rounded up, for a >= 0 and b > 0; a may be as large as int64 holds.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Product of sizes already checked.
inline int64_t Numel(IntSpan shape) {
  int64_t n = 1;
  for (const int64_t size : shape) n *= size;
  return n;
}

Strides ContiguousStrides(IntSpan shape);
// True if `strides` enumerate `shape` row-major without gaps (size-1 and empty dims ignored).
bool IsContiguous(IntSpan shape, IntSpan strides);
// False if no two elements lie in one place. True if two do, as in an expanded tensor or windows
// that overlap; also for a few layouts by hand, like sizes [3, 2] with strides [2, 3], where they
// do not. Dims of one element or none do not count, so that parts of a tensor are told alike.
bool MayRepeat(IntSpan shape, IntSpan strides);
// Right-aligned broadcasting. Errors: InvalidArgument naming both shapes.
absl::StatusOr<Shape> BroadcastShapes(IntSpan a, IntSpan b);
// Maps a dim in [-ndim, ndim) to [0, ndim). Errors: OutOfRange naming the legal range.
absl::StatusOr<int> NormalizeDim(int64_t dim, int ndim);
// True if start, start + step, ... (length of them, at least 1) all lie in [0, size); step >= 1.
bool SliceFits(int64_t start, int64_t length, int64_t step, int64_t size);
// "[4, 6]"
std::string ToString(IntSpan shape);

}  // namespace dtensor
