// Indexing with tensors, as x[...] of Python, and what has as many elements as its data says.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// One index of getitem: a number, a slice, an ellipsis, a new dim, or a tensor: of indices (int64
// or int32; from the end too), or of truth values (bool), which stands for the indices of those
// that are true and takes as many dims of x as it has.
struct TensorIndex {
  TensorIndex(const Index& at) : index(at) {}         // NOLINT: x[1], x[Slice()] are indices
  TensorIndex(int64_t number) : index(number) {}      // NOLINT
  TensorIndex(int number) : index(number) {}          // NOLINT
  TensorIndex(const Slice& slice) : index(slice) {}   // NOLINT
  TensorIndex(DTensor at) : tensor(std::move(at)) {}  // NOLINT
  Index index = kEllipsis;
  DTensor tensor;  // not null: this is the index
};

// x[at...]. Tensors broadcast with each other; what they pick stands where the first of them does
// if they are for neighbouring dims, else in front. Without tensors a view (`index`); with one a
// copy.
//   Sharding: as index_select's of the indexed dims, made one.
//   Comm:     waits for the values of truth values, else none of its own.
//   Errors:   those of index; InvalidArgument for tensors that do not broadcast and for indices out
//             of range.
DTensor getitem(const DTensor& x, absl::Span<const TensorIndex> at);
// x with values (broadcast to what getitem gives) written, or added, where x[indices] reads. A null
// tensor takes all of its dim. Of equal indices the last one writes.
DTensor index_put(const DTensor& x, absl::Span<const DTensor> indices, const DTensor& values,
                  bool accumulate = false);
DTensor index_put_(const DTensor& self, absl::Span<const DTensor> indices, const DTensor& values,
                   bool accumulate = false);

// --- These wait: how many elements there are is asked of all ranks.
//   Comm: sharded in one dim: counts, then what is found goes to its place; else the mask's bytes.
//   Placement of the result: Shard(0) over the mesh dims that x (the mask) is sharded over, else
//   Replicate.

// The indices of elements that are not 0 (NaN is not), row-major: int64 [n, dims of x].
DTensor nonzero(const DTensor& x);
Values nonzero_tuple(const DTensor& x);  // its columns; a 0-d x counts as [1]
DTensor argwhere(const DTensor& x);
// The elements where mask (bool) is true, [n], after both have been broadcast.
DTensor masked_select(const DTensor& x, const DTensor& mask);
// x with the elements of source, in order, where mask is true; mask broadcasts to x. Placed as x,
// where x and the mask are sharded alike: then elements of source go to their places, and of a
// source that all ranks hold none. Errors: InvalidArgument if source has too few.
DTensor masked_scatter(const DTensor& x, const DTensor& mask, const DTensor& source);
DTensor masked_scatter_(const DTensor& self, const DTensor& mask, const DTensor& source);
// Each index of a dim (of x flattened) as often as repeats says: one number for all, or a tensor
// with one dim, which is waited for. With repeats alone: the indices, so often.
DTensor repeat_interleave(const DTensor& x, int64_t repeats, std::optional<int64_t> dim = {});
DTensor repeat_interleave(const DTensor& x, const DTensor& repeats, std::optional<int64_t> dim = {},
                          std::optional<int64_t> output_size = {});
DTensor repeat_interleave(const DTensor& repeats, std::optional<int64_t> output_size = {});

}  // namespace dtensor
