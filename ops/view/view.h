// Views: no communication but for a sharded dim that is cut or tangled.
//
// They share memory with x where they would on one device. Where x has to be moved first the result
// is a copy: writing to it, and reading it after x was written to, are errors (FailedPrecondition).
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// Row-major with another shape, one -1 allowed. A sharded dim stays sharded where both shapes share
// a factor ("(a b) -> a b"): heads of a sharded projection stay on their ranks. A copy where the
// strides of the one-device tensor do not allow a view. Errors: InvalidArgument if the number of
// elements differs.
DTensor view(const DTensor& x, IntSpan shape);
DTensor reshape(const DTensor& x, IntSpan shape);
DTensor flatten(const DTensor& x, int64_t start_dim = 0, int64_t end_dim = -1);
DTensor unflatten(const DTensor& x, int64_t dim, IntSpan sizes);
DTensor transpose(const DTensor& x, int64_t a, int64_t b);
DTensor permute(const DTensor& x, IntSpan dims);
DTensor squeeze(const DTensor& x);                // all dims of (global) size 1
DTensor squeeze(const DTensor& x, DimList dims);  // those of size 1 among dims; none for {}
DTensor unsqueeze(const DTensor& x, int64_t dim);
DTensor expand(const DTensor& x, IntSpan shape);  // -1 keeps a size
// x[start:end:step] as Python clamps it; step > 0. A dim of which all is taken may stay sharded.
DTensor slice(const DTensor& x, int64_t dim, int64_t start, int64_t end, int64_t step = 1);
DTensor select(const DTensor& x, int64_t dim, int64_t index);
// x[at...] of Python for numbers, slices, an ellipsis and new dims, made of select, slice and
// unsqueeze: DTensor's operator[]. Dims without an index are taken whole.
//   Errors: InvalidArgument for more indices than dims and two ellipses; those of select and slice.
DTensor index(const DTensor& x, absl::Span<const Index> at);
// Pieces of `size` (the last may be smaller), or of the sizes given. Gradients are joined once.
Values split(const DTensor& x, int64_t size, int64_t dim = 0);
Values split(const DTensor& x, DimList sizes, int64_t dim = 0);

}  // namespace dtensor
