// Region: which elements of a global tensor some memory holds, and where in it. The geometry behind
// redistribution: what I lack, who has it, and the boxes that it takes.
#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/mesh/placement.h"
#include "dtensor/mesh/spec.h"

namespace dtensor {

// A product of index lists. Counting the listed indices of every dim from 0 gives positions;
// position (p0, p1, ...) lies offset + sum p_d * strides[d] elements into the memory.
struct Block {
  std::vector<std::vector<Interval>> index;  // per tensor dim, ascending global indices
  Shape shape;                               // number of positions per dim
  Strides strides;
  int64_t offset = 0;
  int64_t numel() const { return Numel(shape); }
};

// Disjoint blocks, none empty. The order of elements is that of the blocks, row-major inside.
using Region = std::vector<Block>;
int64_t RegionNumel(const Region& region);

// What the rank at `coordinate` holds of a tensor; strides and offsets of a contiguous local
// tensor. Partial dims count as replicated.
Region RegionOf(const Spec& spec, IntSpan coordinate);

// The same without its flat cuts, empty or not; and `length` elements from `start` on of that, in
// memory of their own.
Block BlockOf(const Spec& spec, IntSpan coordinate);
Region FlatRange(const Block& block, int64_t start, int64_t length);

// Elements [start, end) of the block in its row-major order, as blocks of the same memory.
void AppendRange(const Block& block, int64_t start, int64_t end, Region* out);

// The elements in both, in the order of `b`'s blocks; packed: memory without gaps in that order.
Region PackedOverlap(const Region& a, const Region& b);
// Elements [start, end) of a region, packed from `offset` on.
Region PackedRange(const Region& region, int64_t start, int64_t end, int64_t offset);

// A strided piece of memory.
struct Box {
  Shape shape;
  Strides strides;
  int64_t offset = 0;
  int64_t numel() const { return Numel(shape); }
};
// The same elements in two regions' memory.
struct BoxPair {
  Box a, b;
};
// The boxes in both regions. Their number, order and shapes depend on the index lists alone, so two
// ranks that hold one side each agree on them.
std::vector<BoxPair> Overlap(const Region& a, const Region& b);
bool Overlaps(const Region& a, const Region& b);

}  // namespace dtensor
