// Looking up, joining, copying and making; with what the headers below declare the whole family.
#pragma once

#include <string>

#include "dtensor/ops/family.h"
#include "dtensor/ops/index/advanced.h"
#include "dtensor/ops/index/arrange.h"
#include "dtensor/ops/index/gather.h"

namespace dtensor {

// Rows of a table.
//   Shapes:   ids of any shape, weight [v, d] -> [..., d]
//   Types:    ids int64 or int32; the result's is weight's.
//   Sharding: "v d, ... -> ... d", linear in weight. A rank looks up the rows it has; sharding
//             v gives Partial(sum), and the gradient comes in weight's own placement.
//   Comm:     none of its own.
//   Errors:   InvalidArgument for an id outside of [0, v), and for padding_idx >= v. The row
//             padding_idx gets no gradient; padding_idx < 0: none. scale_grad_by_freq divides the
//             gradient of a row by how often ids names it.
DTensor embedding(const DTensor& ids, const DTensor& weight, int64_t padding_idx = -1,
                  bool scale_grad_by_freq = false);
// Sums, means or maxima of rows of a table: one bag for each row of ids [b, n], or with offsets [b]
// one for ids [n] from each offset to the next (include_last_offset: the last one ends the last
// bag). Rows named padding_idx count in no bag; per_sample_weights (of ids' shape, mode sum) scale
// the rows. An empty bag gives zeros. Of rows that are equally large the first has the gradient.
//   Shapes:   [b, d].
//   Sharding: as embedding's; offsets are read, which waits.
DTensor embedding_bag(const DTensor& ids, const DTensor& weight, const DTensor& offsets = {},
                      const std::string& mode = "mean", bool scale_grad_by_freq = false,
                      const DTensor& per_sample_weights = {}, int64_t padding_idx = -1,
                      bool include_last_offset = false);
// int64 [..., classes] with a 1 where the class is; num_classes < 0: the largest and one more,
// which waits.
//   Errors:   InvalidArgument for a class outside of [0, num_classes).
DTensor one_hot(const DTensor& classes, int64_t num_classes = -1);

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
// Of x's shape, in x's placement; Replicate where x is Partial. Of x's dtype unless another is
// given.
DTensor zeros_like(const DTensor& x, std::optional<DType> dtype = {});
DTensor ones_like(const DTensor& x, std::optional<DType> dtype = {});
// Errors: InvalidArgument for a value that an integer dtype cannot hold (fractions are cut).
DTensor full_like(const DTensor& x, Scalar value, std::optional<DType> dtype = {});
// Of x's dtype and mesh unless others are given; Replicate unless options name placements.
DTensor new_zeros(const DTensor& x, IntSpan shape, TensorOptions options = {});
DTensor new_ones(const DTensor& x, IntSpan shape, TensorOptions options = {});
DTensor new_full(const DTensor& x, IntSpan shape, Scalar value, TensorOptions options = {});
// `steps` numbers from start to end, both included, in float32 unless options say another dtype
// (of integers start and end are truncated first, and so are the numbers between). logspace: base
// to the power of those.
//   Errors: InvalidArgument for a negative number of steps.
DTensor linspace(Scalar start, Scalar end, int64_t steps, TensorOptions options = {});
DTensor logspace(Scalar start, Scalar end, int64_t steps, double base = 10,
                 TensorOptions options = {});
// Ones on the diagonal of zeros [n, m]; m = n unless given.
DTensor eye(int64_t n, std::optional<int64_t> m = {}, TensorOptions options = {});

}  // namespace dtensor
