// Reductions; empty dims = all.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// Sum over dims.
//   Shapes:   x without `dims`, or with size 1 there (keepdim); a 0-d x has dim 0 and -1.
//   Types:    x's; int64 for integers and bool; `dtype` converts x first.
//   Sharding: reduced dims vanish; sharding one gives Partial(sum). Linear in x.
//   Comm:     none.
//   Errors:   OutOfRange for a dim, InvalidArgument for a dim named twice.
DTensor sum(const DTensor& x, DimList dims = {}, bool keepdim = false,
            std::optional<DType> dtype = {});
// sum / number of elements, as a product with 1 / n of global sizes: right for uneven shards, and a
// pending sum stays one. Errors: as sum; InvalidArgument for an integer result.
DTensor mean(const DTensor& x, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
// Largest element over dims; equal ones share the gradient. NaN wins.
//   Shapes:   as sum.
//   Types:    any; the result's is x's.
//   Sharding: sharding a reduced dim gives Partial(max).
//   Errors:   as sum; InvalidArgument for a reduced dim of size 0.
DTensor amax(const DTensor& x, DimList dims = {}, bool keepdim = false);
// Sums leading and size-1 dims away so that the result has `shape` (the gradient of broadcasting).
// Errors: InvalidArgument if x is no broadcast of `shape`.
DTensor sum_to(const DTensor& x, IntSpan shape);

}  // namespace dtensor
