// Views: no communication but for a sharded dim that is cut or tangled.
//
// They share memory with x where they would on one device. Where x has to be moved first the result
// is a copy: writing to it, and reading it after x was written to, are errors (FailedPrecondition).
#pragma once

#include <initializer_list>
#include <string>

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
inline Values split(const DTensor& x, std::initializer_list<int64_t> sizes, int64_t dim = 0) {
  return split(x, DimList(sizes), dim);  // {4} is a list of one size, no size of all pieces
}
Values split_with_sizes(const DTensor& x, DimList sizes, int64_t dim = 0);

// --- other names and shapes; each is made of those above ---

DTensor alias(const DTensor& x);  // all of x, as a tensor of its own that shares x's memory
// At most two dims, the two changed. T: all dims in reverse; mT: the last two changed.
DTensor t(const DTensor& x);
DTensor T(const DTensor& x);
DTensor mT(const DTensor& x);
DTensor swapaxes(const DTensor& x, int64_t a, int64_t b);
DTensor movedim(const DTensor& x, DimList source, DimList destination);
DTensor broadcast_to(const DTensor& x, IntSpan shape);
DTensor expand_as(const DTensor& x, const DTensor& other);
DTensor view_as(const DTensor& x, const DTensor& other);
DTensor reshape_as(const DTensor& x, const DTensor& other);
DTensor ravel(const DTensor& x);
DTensor narrow(const DTensor& x, int64_t dim, int64_t start, int64_t length);
// start, an integer tensor of one element, is waited for.
DTensor narrow(const DTensor& x, int64_t dim, const DTensor& start, int64_t length);
DTensor atleast_1d(const DTensor& x);
DTensor atleast_2d(const DTensor& x);
DTensor atleast_3d(const DTensor& x);
// Each in the common shape that all broadcast to.
Values broadcast_tensors(absl::Span<const DTensor> xs);
// Of tensors with one dim or none: result i varies along dim i only; indexing "xy" changes the
// first two dims.
Values meshgrid(absl::Span<const DTensor> xs, const std::string& indexing = "ij");
// Pieces of equal size, ceil(size / chunks); there may be fewer, and the last is smaller.
Values chunk(const DTensor& x, int64_t chunks, int64_t dim = 0);
// So many pieces, the first ones larger by one; or cut before the indices given, as slices are.
Values tensor_split(const DTensor& x, int64_t sections, int64_t dim = 0);
Values tensor_split(const DTensor& x, DimList indices, int64_t dim = 0);
inline Values tensor_split(const DTensor& x, std::initializer_list<int64_t> indices,
                           int64_t dim = 0) {
  return tensor_split(x, DimList(indices), dim);  // {3} is one index, not three sections
}
// x[0], x[1], ... along a dim.
Values unbind(const DTensor& x, int64_t dim = 0);
// x repeated in whole, repeats[d] times along dim d, a copy; more repeats than dims make new
// leading dims. tile: fewer are for the last dims.
//   Comm: none; a sharded dim stays sharded, every repetition of it.
DTensor repeat(const DTensor& x, DimList repeats);
DTensor tile(const DTensor& x, DimList repeats);

// --- views of other strides (strided.cc); the dims that they look into are read whole ---

// x[..., i, ..., i + offset, ...] along a new last dim.
DTensor diagonal(const DTensor& x, int64_t offset = 0, int64_t dim1 = 0, int64_t dim2 = 1);
// Windows of `size` along dim, one each `step`, in a new last dim. The gradient adds up. Those that
// overlap (step < size) cannot be changed in place, here and below: InvalidArgument.
DTensor unfold(const DTensor& x, int64_t dim, int64_t size, int64_t step);
// Element i of the result is x's element offset + sum(i * stride), x row-major. Where x is not (a
// transposed one) it is copied first. Errors: InvalidArgument for elements that x does not have.
DTensor as_strided(const DTensor& x, IntSpan size, IntSpan stride, int64_t offset = 0);

}  // namespace dtensor
