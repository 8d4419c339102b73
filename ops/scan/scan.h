// Running sums, products and extremes along a dim. Shapes: like x; a 0-d x has dim 0 and -1.
//   Sharding: other dims. Where a sharded `dim` divides evenly each rank runs over its own part and
//             only what the parts come to is gathered.
//   Errors:   OutOfRange for a dim.
#pragma once

#include "dtensor/ops/family.h"

namespace dtensor {

// x[0], x[0] + x[1], ...
//   Types:    x's; int64 for integers and bool; `dtype` converts x first. Linear in x.
DTensor cumsum(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});
// Types: as cumsum. The gradient is right for zeros, too. Sharding: as prod (ops/reduce/reduce.h).
DTensor cumprod(const DTensor& x, int64_t dim, std::optional<DType> dtype = {});
// In place; the dtype stays, so integers run over in it. Each returns its first argument.
DTensor cumsum_(const DTensor& self, int64_t dim);
DTensor cumprod_(const DTensor& self, int64_t dim);
// log(cumsum(exp(x))) without overflow. Types: floating.
DTensor logcumsumexp(const DTensor& x, int64_t dim);
// The largest element up to each, and its index: the last one of equal ones. NaN wins.
//   Types:    any; indices int64.
Values cummax(const DTensor& x, int64_t dim);
Values cummin(const DTensor& x, int64_t dim);

}  // namespace dtensor
