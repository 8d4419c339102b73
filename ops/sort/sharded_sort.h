// Sorting one line that is sharded, where it is.
#pragma once

#include "absl/functional/function_ref.h"
#include "dtensor/ops/ops.h"

namespace dtensor {

// Whether x is one line in blocks over one mesh dim; and whether then sorting it, and sending
// `more` bytes for each element, moves less than gathering it.
bool IsLineInBlocks(const DTensor& x);
bool SortsInBlocks(const DTensor& x, int64_t more = 0);

// Values and int64 indices of the line in order, each rank holding the block that Shard(0) gives
// it.
//   Comm:   finds the bounds between blocks by counting (bisection of their bits: some hundred
//           bytes), then sends every element once, with its index in 4 bytes. Waits for the counts.
Values SortInBlocks(const DTensor& x, bool descending);

// Integers below 2^31 of a line that IsLineInBlocks, each at its place of the line; `places`, int64
// and placed as they are, has every place once. Without gradient.
//   Comm:   ranks^2 numbers, then every element once with its place, in 4 bytes each.
constexpr int64_t kPutBytes = 8;  // of an element
DTensor PutInBlocks(const DTensor& line, const DTensor& places);

// The element of a rank from 1 up, [1], and its index, by counting alone. `rank` may ask how many
// elements are not NaN.
Values RankInBlocks(const char* name, const DTensor& x,
                    absl::FunctionRef<int64_t(absl::FunctionRef<int64_t()> numbers)> rank);

}  // namespace dtensor
