// Looking up, joining and copying.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// Rows of a table.
//   Shapes:   ids of any shape, weight [v, d] -> [..., d]
//   Types:    ids int64 or int32; the result's is weight's.
//   Sharding: "v d, ... -> ... d", linear in weight. A rank looks up the rows it has; sharding
//             v gives Partial(sum), and the gradient comes in weight's own placement.
//   Comm:     none of its own.
//   Errors:   InvalidArgument for an id outside of [0, v), and for padding_idx >= v. The row
//             padding_idx gets no gradient; padding_idx < 0: none.
DTensor embedding(const DTensor& ids, const DTensor& weight, int64_t padding_idx = -1);

// Joined along an existing dim, in the promoted dtype; tensors [0] may be among others of any
// shape, as in torch. A Partial(sum) of all of them stays one. Errors: InvalidArgument for other
// dims that differ.
DTensor cat(absl::Span<const DTensor> xs, int64_t dim = 0);
DTensor stack(absl::Span<const DTensor> xs, int64_t dim = 0);
// x itself if it has the dtype. A pending sum survives a cast to a wider floating type only.
DTensor to(const DTensor& x, DType dtype);
DTensor clone(const DTensor& x);
DTensor detach(const DTensor& x);
// x itself where the one-device tensor is row-major, else a copy that is.
DTensor contiguous(const DTensor& x);
// In x's placement; Replicate where x is Partial.
DTensor zeros_like(const DTensor& x);
DTensor ones_like(const DTensor& x);

}  // namespace dtensor
