// Algorithms along a sharded dim: each rank works on its own block, and little of what comes out is
// gathered. As .Decompose: taken where less moves than by gathering the dim.
#pragma once

#include <optional>

#include "dtensor/ops/ops.h"

namespace dtensor {

// x with a dim that is sharded into `count` equal blocks of `size` as two, [..., count, size, ...]:
// every block is whole on its rank.
struct Blocks {
  DTensor x;
  int64_t count, size;
};
// Nothing where the dim is not sharded so.
std::optional<Blocks> BlocksOf(const DTensor& x, int64_t dim);
// x with `dim` whole on every rank, and nothing pending: an op that reads it runs as it is.
DTensor Gathered(const DTensor& x, int64_t dim);
// Of `blocks` the first global index of each along dim, in a shape that broadcasts to [..., count,
// size, ...].
DTensor BlockStarts(const Blocks& blocks, int64_t dim);
// The reverse of BlocksOf: dims `dim` and dim + 1 as one.
DTensor Joined(const DTensor& y, int64_t dim);

// Elements of candidates (their values and indices in the whole dim) at places along dim.
DTensor IndexOfPlaces(const DTensor& indices, const DTensor& places, int64_t dim);

}  // namespace dtensor
