// Where the diagonal of two dims lies.
#pragma once

#include <algorithm>

#include "dtensor/ops/rules.h"

namespace dtensor {

struct DiagonalDims {
  int first, second;
};
// Throws unless they are two dims of a tensor of `ndim` dims.
DiagonalDims CheckedDiagonal(absl::string_view op, int ndim, int64_t dim1, int64_t dim2);

// In a row-major [rows, columns]: element [i][i + offset] lies at start + i * step.
struct DiagonalRange {
  int64_t start, length, step;
};
inline DiagonalRange DiagonalOf(int64_t rows, int64_t columns, int64_t offset) {
  offset = std::clamp(offset, -rows, columns);  // beyond there is nothing
  const int64_t row = offset < 0 ? -offset : 0, column = offset < 0 ? 0 : offset;
  const int64_t length = std::max<int64_t>(0, std::min(rows - row, columns - column));
  return {length > 0 ? row * columns + column : 0, length, columns + 1};
}

// Zeros [..., rows, columns] with x [..., n] on the diagonal, which has n elements; the two dims
// become dim1 and dim2.
DTensor OnDiagonal(const DTensor& x, int64_t rows, int64_t columns, int64_t offset, int64_t dim1,
                   int64_t dim2);

}  // namespace dtensor
