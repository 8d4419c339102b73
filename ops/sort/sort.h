// Sorting, ranks, searching and counting. NaN is larger than every number; of equal elements those
// with lower indices come first, sorted, taken and named first. A 0-d tensor has dim 0 and -1.
//   Gradient: goes to the elements that were taken.
//   Errors:   OutOfRange for a dim.
#pragma once

#include <string>

#include "dtensor/ops/family.h"

namespace dtensor {

// The elements along a dim in order, and their indices.
//   Shapes:   values and int64 indices, both like x. Always stable.
//   Types:    any.
//   Sharding: other dims. A sharded `dim` is gathered; of one line alone of 4,096 elements or more
//             every element is sent once, with its index in 4 bytes, where that moves less.
Values sort(const DTensor& x, int64_t dim = -1, bool descending = false, bool stable = false);
DTensor argsort(const DTensor& x, int64_t dim = -1, bool descending = false, bool stable = false);
DTensor msort(const DTensor& x);  // along dim 0

// The k largest (or least) elements along a dim in order, and their indices; always sorted.
//   Shapes:   x with `k` elements along dim; a 0-d x as it is, for k = 0 and 1.
//   Sharding: other dims. Where a sharded `dim` divides evenly each rank picks k of its own, and
//             only these are gathered.
//   Errors:   InvalidArgument for a k that is negative or larger than the dim.
Values topk(const DTensor& x, int64_t k, int64_t dim = -1, bool largest = true, bool sorted = true);

// The k-th least element along a dim (k = 1: the least) and its index.
//   Sharding: other dims. Where a sharded `dim` has 4,096 elements or more the element of each line
//             is found by counting: 8 bytes per line and bit of the elements. Waits. So of the
//             medians, and of all elements where ranks have equally many (of zeros of both signs it
//             is either one).
//   Shapes:   x without dim, or with size 1 there.
//   Errors:   InvalidArgument for a k outside of [1, size], and for an empty dim.
Values kthvalue(const DTensor& x, int64_t k, int64_t dim = -1, bool keepdim = false);
// The median along a dim, of two in the middle the lower one, and its index; NaN if there is one.
Values median(const DTensor& x, int64_t dim, bool keepdim = false);
DTensor median(const DTensor& x);  // of all elements; equal ones share the gradient; of none NaN
// The same among those that are not NaN.
Values nanmedian(const DTensor& x, int64_t dim, bool keepdim = false);
DTensor nanmedian(const DTensor& x);
// The element that is there most often along a dim, of several the least, and its first index.
Values mode(const DTensor& x, int64_t dim = -1, bool keepdim = false);

// Quantiles of x along a dim, or (absent) of all elements; NaN where there is a NaN.
//   Shapes:   q [] or [k]: [k] comes first. x without dim, or with size 1 there.
//   Types:    floating; a tensor q has x's dtype, and takes a gradient where it is interpolated.
//   Sharding: as sort.
//   interpolation: "linear", "lower", "higher", "nearest" (to even), "midpoint".
//   Errors:   InvalidArgument for q with more dims or another dtype, a number outside of [0, 1]
//             (in a tensor: an index out of range), an empty x, an unknown interpolation.
DTensor quantile(const DTensor& x, const DTensor& q, std::optional<int64_t> dim = {},
                 bool keepdim = false, const std::string& interpolation = "linear");
DTensor quantile(const DTensor& x, double q, std::optional<int64_t> dim = {}, bool keepdim = false,
                 const std::string& interpolation = "linear");

// Where the elements of x could be put into a sorted sequence: before those equal to them, or
// (right) after them; NaN comes last.
//   Shapes:   sequence [n] and any x, or sequence [..., n] and x [..., m]; like x.
//   Types:    x and the sequence in their common dtype; int64, or int32.
//   sorter:   where the elements of an unsorted sequence stand in order, as argsort gives it.
//   Sharding: dims of x, but for the sequence's own.
//   Errors:   InvalidArgument for leading dims that differ, and a sorter of another shape or with
//             other than indices.
DTensor searchsorted(const DTensor& sequence, const DTensor& x, bool out_int32 = false,
                     bool right = false, const DTensor& sorter = {});
// Of one number, for a sequence [n].
DTensor searchsorted(const DTensor& sequence, Scalar x, bool out_int32 = false, bool right = false,
                     const DTensor& sorter = {});
// searchsorted with one sequence [n]. Errors: InvalidArgument for boundaries of other dims.
DTensor bucketize(const DTensor& x, const DTensor& boundaries, bool out_int32 = false,
                  bool right = false);
DTensor bucketize(Scalar x, const DTensor& boundaries, bool out_int32 = false, bool right = false);
// Whether each element is one of those of `test`. NaN is in nothing. Comm: gathers `test`.
DTensor isin(const DTensor& elements, const DTensor& test, bool assume_unique = false,
             bool invert = false);
DTensor isin(const DTensor& elements, Scalar test, bool assume_unique = false, bool invert = false);

// How often each number from 0 up is there, or the sum of its weights.
//   Shapes:   x [n] of integers that are not negative -> [max(x) + 1], at least `minlength`.
//   Types:    int64; with weights float64, or float32 if they are. Of no elements int64.
//   Comm:     waits for the largest element; sharding x gives Partial(sum).
//   Errors:   InvalidArgument for other shapes, floating x, negative elements.
DTensor bincount(const DTensor& x, const DTensor& weights = {}, int64_t minlength = 0);
// How many elements fall into each of `bins` equal parts of [min, max]; of that of the elements, if
// both are equal (then it waits for them). Elements outside count nowhere.
//   Types:    floating, the result's too; of bfloat16 the parts are found in bfloat16. Sharding: x
//             sharded gives Partial(sum).
//   Errors:   InvalidArgument for bins < 1, min > max, or a range that is not finite.
DTensor histc(const DTensor& x, int64_t bins = 100, Scalar min = 0, Scalar max = 0);

// The elements (or, with a dim, the slices along it) that differ, ascending; and on demand, in this
// order: for each element (slice) which of them it is, and how often each is there. A NaN differs
// from everything.
//   Comm:     waits: how many there are depends on the data. x sharded by its first dim alone is
//             sorted and found where it is (of "which of them" two numbers of 4 bytes go back to
//             each element), else, and where that moves less, gathered; results: sharded by theirs
//             if x was.
//   Gradient: none.
Values unique(const DTensor& x, bool sorted = true, bool return_inverse = false,
              bool return_counts = false, std::optional<int64_t> dim = {});
// The same of runs of equal elements (slices), in the order of x.
Values unique_consecutive(const DTensor& x, bool return_inverse = false, bool return_counts = false,
                          std::optional<int64_t> dim = {});

}  // namespace dtensor
