// Shared by ops that take elements along a dim and say which: extremes, ranks, sorting, running
// extremes. Their gradients go to the elements that were taken.
#pragma once

#include "absl/functional/function_ref.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

// The elements of x at `index` along `dim`; index has x's shape but for that dim. Sharding the dim
// of x gives Partial(sum): a rank gives what it has.
DTensor TakeAlong(const DTensor& x, const DTensor& index, int64_t dim);
// Zeros of `size` elements along `dim`, y added at `index` (of y's shape). Sharding y along the dim
// gives Partial(sum).
DTensor PutAlong(const DTensor& y, const DTensor& index, int64_t dim, int64_t size);

// "d0 [d1] d2 -> d0 d2, d0 d2": one element of each line and its index; attributes dim, keepdim.
absl::StatusOr<FactorText> PickFactors(const OpCall& call);
// "d0 [d1] d2 -> d0 [d1] d2, ...": every operand has x's dims; attribute dim.
absl::StatusOr<FactorText> LineFactors(const OpCall& call);
// Of ops (x; dim, ...) -> values, indices.
absl::StatusOr<DType> ValuesAndIndices(const OpCall& call, int output);
absl::Status NonEmptyDim(const OpCall& call);  // attribute dim
void PickVjp(VjpCall& c);                      // where the dim may be gone; saves "indices"
void LinesVjp(VjpCall& c);                     // where it is still there; saves "indices"

// op(x; attrs), of a 0-d x as if it had one dim: `attrs` has the checked dim where it belongs.
Values CallOnLines(const OpDef& op, const DTensor& x, absl::Span<const Attr> attrs);

// value(), one element of x (or NaN); the gradient is shared among the elements equal to it.
DTensor SharedAmong(const char* name, const DTensor& x, absl::FunctionRef<DTensor()> value);

// x as one line, and the dim of it; or x and the dim given.
struct Line {
  DTensor x;
  int64_t dim;
};
Line LineOf(const DTensor& x, std::optional<int64_t> dim);

}  // namespace dtensor
