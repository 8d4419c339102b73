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
// sum / number of elements, of global sizes: right for uneven shards, and a pending sum stays one.
// Rounded once. Errors: as sum; InvalidArgument for an integer result.
DTensor mean(const DTensor& x, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
// Product over dims; the gradient is right for zeros, too. Shapes, types, errors: as sum.
//   Sharding: sharding a reduced dim gives Partial(prod), of each rank's part: one that overflows
//             gives NaN with a zero in another (of 16-bit floats none does).
DTensor prod(const DTensor& x, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
// sum and mean of what is not NaN. Types, errors: as sum and mean.
DTensor nansum(const DTensor& x, DimList dims = {}, bool keepdim = false,
               std::optional<DType> dtype = {});
DTensor nanmean(const DTensor& x, DimList dims = {}, bool keepdim = false,
                std::optional<DType> dtype = {});
// How many elements are not 0 (NaN is not), as int64. Sharding, errors: as sum.
DTensor count_nonzero(const DTensor& x, DimList dims = {});
// Whether any element, or every one, is not 0 (NaN is not).
//   Shapes:   as sum; over nothing: false and true.
//   Types:    bool; uint8 of uint8.
//   Sharding: sharding a reduced dim gives Partial(max), Partial(min).
//   Errors:   as sum.
DTensor any(const DTensor& x, DimList dims = {}, bool keepdim = false);
DTensor all(const DTensor& x, DimList dims = {}, bool keepdim = false);
// Sum of the diagonal of a matrix, whichever dims are sharded. Errors: InvalidArgument for others.
DTensor trace(const DTensor& x);
// Differences of neighbours along a dim, n times, of x between `prepend` and `append` (null: none);
// of bools whether they differ.
//   Shapes:   x without n of the elements along dim, at least 0.
//   Errors:   InvalidArgument for n < 0 and a 0-d x; those of cat.
DTensor diff(const DTensor& x, int64_t n = 1, int64_t dim = -1, const DTensor& prepend = {},
             const DTensor& append = {});

// Largest and least element over dims; equal ones share the gradient. NaN wins; 0 is above -0.
//   Shapes:   as sum.
//   Types:    any; the result's is x's.
//   Sharding: sharding a reduced dim gives Partial(max), Partial(min).
//   Errors:   as sum; InvalidArgument for a reduced dim of size 0.
DTensor amax(const DTensor& x, DimList dims = {}, bool keepdim = false);
DTensor amin(const DTensor& x, DimList dims = {}, bool keepdim = false);
// Both: over one dim, or all.
Values aminmax(const DTensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);
// The largest, or least, element along a dim and the int64 index of the first of them, to which the
// gradient goes.
//   Sharding: other dims. Where a sharded `dim` divides evenly each rank finds its own and only
//             these are gathered.
//   Errors:   OutOfRange for a dim, InvalidArgument for one of size 0.
Values max(const DTensor& x, int64_t dim, bool keepdim = false);
Values min(const DTensor& x, int64_t dim, bool keepdim = false);
// amax and amin over all dims; maximum and minimum of two tensors.
DTensor max(const DTensor& x);
DTensor min(const DTensor& x);
DTensor max(const DTensor& x, const DTensor& other);
DTensor min(const DTensor& x, const DTensor& other);
// The index alone; without a dim that in the flattened tensor.
DTensor argmax(const DTensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);
DTensor argmin(const DTensor& x, std::optional<int64_t> dim = {}, bool keepdim = false);

// Sum of squared distances from the mean over dims, by the number of elements less `correction`;
// and its root. In two passes, so that nothing cancels.
//   Shapes:   as sum. NaN of nothing and where the number is 0; an infinity where only what it is
//             divided by is.
//   Types:    floating; narrower than float64 in float32, in whose range the squares are to be
//             (torch has them in float64 on a CPU).
//   Sharding: any dim; a sharded reduced one takes two small reductions.
//   Errors:   as sum; InvalidArgument for x of integers.
DTensor var(const DTensor& x, DimList dims = {}, Scalar correction = 1, bool keepdim = false);
DTensor std(const DTensor& x, DimList dims = {}, Scalar correction = 1, bool keepdim = false);
Values var_mean(const DTensor& x, DimList dims = {}, Scalar correction = 1, bool keepdim = false);
Values std_mean(const DTensor& x, DimList dims = {}, Scalar correction = 1, bool keepdim = false);
// (sum |x|^ord)^(1 / ord) over dims; ord 0 counts what is not 0, infinities take the largest or
// least. The gradient at 0 is 0.
//   Types:    floating; `dtype` converts x first.
//   Sharding: any dim; a sharded reduced one takes one small reduction.
//   Source:   torch.linalg.vector_norm, torch.norm, whose p = "fro" is 2 here ("nuc", which takes
//             singular values, is not).
//   Errors:   as sum; InvalidArgument for integers, and for an ord that is negative or infinite
//             over nothing.
DTensor linalg_vector_norm(const DTensor& x, Scalar ord = 2, DimList dims = {},
                           bool keepdim = false, std::optional<DType> dtype = {});
DTensor norm(const DTensor& x, Scalar p = 2, DimList dims = {}, bool keepdim = false,
             std::optional<DType> dtype = {});
// norm(x - other) of all elements; both broadcast.
DTensor dist(const DTensor& x, const DTensor& other, Scalar p = 2);
// log(sum(exp(x))) over dims without overflow; -infinity of nothing.
//   Types:    floating; integers give float32.
//   Sharding: any dim; a sharded reduced one takes two small reductions.
//   Errors:   as sum.
DTensor logsumexp(const DTensor& x, DimList dims = {}, bool keepdim = false);

// Whether shapes and all elements are equal (NaN is not), in the promoted dtype; the same on every
// rank. Waits.
bool equal(const DTensor& x, const DTensor& other);
// Whether |x - other| <= atol + rtol |other| everywhere, or both are equal; with equal_nan also
// where both are NaN. Broadcasts. Waits.
bool allclose(const DTensor& x, const DTensor& other, double rtol = 1e-5, double atol = 1e-8,
              bool equal_nan = false);

// Sums leading and size-1 dims away so that the result has `shape` (the gradient of broadcasting).
// Errors: InvalidArgument if x is no broadcast of `shape`.
DTensor sum_to(const DTensor& x, IntSpan shape);

}  // namespace dtensor
