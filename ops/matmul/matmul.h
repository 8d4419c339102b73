// Products of matrices.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// Matrix product over the last dim of x and the second last of w (the only one of a vector).
//   Shapes:   x [..., m, k], w [k, n] -> [..., m, n]; x [..., m, k], w [..., k, n] with broadcast
//             leading dims; a vector on either side is a row or a column that the result drops.
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, k n -> ... n" or "b m k, b k n -> b m n", linear in x and in w. Sharding k
//             gives Partial(sum).
//   Comm:     none of its own; inputs may be redistributed first (see Explain).
//   Errors:   InvalidArgument if inner sizes, batch dims or dtypes differ. Same on every rank.
//   Source:   torch.matmul
DTensor matmul(const DTensor& x, const DTensor& w);
// A matrix product per batch element.
//   Shapes:   x [b, m, k], w [b, k, n] -> [b, m, n]
//   Types, Sharding, Comm, Errors: as matmul.
DTensor bmm(const DTensor& x, const DTensor& w);
// x w^T + b.
//   Shapes:   x [..., k], w [n, k], b [n] or null -> [..., n]; w [k] without b -> [...]
//   Types:    the same dtype; accumulates in float32 or wider.
//   Sharding: "... k, n k, n -> ... n", linear: "x * w + b". With k sharded b must be Partial too,
//             and becomes so without communication.
//   Comm:     none of its own.
//   Errors:   InvalidArgument if sizes or dtypes differ.
//   Source:   torch.nn.functional.linear
DTensor linear(const DTensor& x, const DTensor& w, const DTensor& b = {});

}  // namespace dtensor
