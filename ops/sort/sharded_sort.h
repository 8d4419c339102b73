// Sorting lines along a sharded dim where they are.
#pragma once

#include "absl/functional/function_ref.h"
#include "dtensor/ops/ops.h"

namespace dtensor {

// Whether the lines of x along dim are long, and in blocks over one or several mesh dims; and
// whether x is one such line alone, and sorting it, and sending `more` bytes for each element,
// moves less than gathering it.
bool AreLinesInBlocks(const DTensor& x, int dim);
bool SortsInBlocks(const DTensor& x, int64_t more = 0);

// Values and int64 indices of the line in order, placed as x is.
//   Comm:   finds the bounds between blocks by counting (bisection of their bits: some hundred
//           bytes), then sends every element once, with its index in 4 bytes. Waits for the counts.
//           In a rehearsal, which has no elements, all ranks get as much of each.
Values SortInBlocks(const DTensor& x, bool descending);

// Integers below 2^31 of a line in blocks, each at its place of the line; `places`, int64 and
// placed as they are, has every place once. Without gradient.
//   Comm:   ranks^2 numbers, then every element once with its place, in 4 bytes each.
constexpr int64_t kPutBytes = 8;  // of an element
DTensor PutInBlocks(const DTensor& line, const DTensor& places);

// Of each line along dim, which are in blocks, the element of a rank from 1 up and its index, both
// in x's dims with size 1 there and whole where it was cut. `numbers`: how many elements of the
// line are not NaN.
//   Comm:   a number of 8 bytes per line and bit of the elements from each rank, added up by
//           all-reduces. Waits for each.
Values RankInBlocks(const char* name, const DTensor& x, int dim,
                    absl::FunctionRef<int64_t(int64_t numbers)> rank);

}  // namespace dtensor
