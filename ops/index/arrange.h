// Triangles, diagonals, and elements in another order or with a rim.
#pragma once

#include <string>

#include "dtensor/ops/family.h"

namespace dtensor {

// The lower (upper) triangle of the last two dims, up to (from) diagonal number `diagonal`; zeros
// elsewhere.
//   Sharding: any dim; a rank knows its rows and columns. Linear in x.
//   Comm:     none.
//   Errors:   InvalidArgument for less than two dims.
DTensor tril(const DTensor& x, int64_t diagonal = 0);
DTensor triu(const DTensor& x, int64_t diagonal = 0);
DTensor tril_(const DTensor& self, int64_t diagonal = 0);
DTensor triu_(const DTensor& self, int64_t diagonal = 0);
// int64 [2, n]: rows and columns of the triangle of a [row, col], row-major.
DTensor tril_indices(int64_t row, int64_t col, int64_t offset = 0, TensorOptions options = {});
DTensor triu_indices(int64_t row, int64_t col, int64_t offset = 0, TensorOptions options = {});

// A matrix with x [n] on a diagonal; of a matrix (a copy of) its diagonal.
DTensor diag(const DTensor& x, int64_t diagonal = 0);
DTensor diagflat(const DTensor& x, int64_t offset = 0);  // of x flattened
// Matrices with x's last dim on their diagonal, in new dims dim1 and dim2 of the result.
DTensor diag_embed(const DTensor& x, int64_t offset = 0, int64_t dim1 = -2, int64_t dim2 = -1);
// Matrices (rows, numbers: as [1, n]) along the diagonal of one, zeros elsewhere.
DTensor block_diag(absl::Span<const DTensor> xs);

// Reversed over dims, a copy.
//   Sharding: any dim. Linear in x.
//   Comm:     of a sharded dim what changes owner, in one exchange (reorder.h), or less.
DTensor flip(const DTensor& x, DimList dims);
DTensor fliplr(const DTensor& x);  // dim 1
DTensor flipud(const DTensor& x);  // dim 0
// Turned by k quarters in the plane of two dims, from the first to the second.
DTensor rot90(const DTensor& x, int64_t k = 1, DimList dims = {0, 1});
// Shifted over dims; what leaves at the end comes back at the start. Without dims x is flattened.
//   Comm: of a sharded dim what changes owner: |shift| rows per rank, up to its block.
DTensor roll(const DTensor& x, DimList shifts, DimList dims = {});

// Joined along dim 1 (rows: 0), 0 and 2, after atleast_1d, atleast_2d and atleast_3d; columns are
// tensors of one dim or none, made [n, 1].
DTensor hstack(absl::Span<const DTensor> xs);
DTensor vstack(absl::Span<const DTensor> xs);
DTensor dstack(absl::Span<const DTensor> xs);
DTensor column_stack(absl::Span<const DTensor> xs);

// A rim around x: pad lists (before, after) of the last dim, of the one before it, ...; negative
// ones crop. constant_pad_nd fills with `value`. Modes: constant, reflect (without the edge),
// replicate (the edge), circular.
//   Errors: InvalidArgument for an odd number of sizes, more than x has dims, a result of negative
//           size, and a rim that the mode cannot fill.
DTensor constant_pad_nd(const DTensor& x, DimList pad, Scalar value = 0);
DTensor pad(const DTensor& x, DimList pad, const std::string& mode = "constant", Scalar value = 0);

}  // namespace dtensor
