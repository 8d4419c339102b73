// Planner: which Philox block and component each element of a random op reads. A pure function of
// global facts, so that all ranks agree without communication. docs/reference/random.md has it all.
//
// Element g (position in memory order of the one-device tensor) of a segment with V threads and U
// results per block: q = (g - first) / V; thread (g - first) % V, call q / U, component q % U; the
// block has counter words x, y = offset / 4 + call (torch: DistributionTemplates.h).
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/rng/draw.h"
#include "dtensor/rng/profile.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

// One launch: elements [first, first + count).
struct RandomSegment {
  int64_t first, count;
  uint64_t offset;  // of the generator
  int64_t threads;  // V
  friend bool operator==(const RandomSegment&, const RandomSegment&) = default;
};

struct RandomPlan {
  int unroll = kMaxUnroll;              // U
  int blocks = 1;                       // Philox blocks of a call
  uint64_t advance = 0;                 // what the whole op moves the generator by
  std::vector<RandomSegment> segments;  // ascending, gapless; none for an empty tensor
};

// g of the element at (i, j, ...) is the dot product with these strides: memory order, that is dims
// by increasing stride, counting only elements that there are. `strides` are those of the
// one-device tensor, dense or a view.
//   Errors: InvalidArgument for strides under which elements overlap.
//   Source: torch's TensorIterator, which sorts dims by stride and merges them.
absl::StatusOr<Strides> IterationStrides(IntSpan shape, IntSpan strides);

// Results per block of a kind: 4, or 2 where one result takes 64 bits.
int RandomUnroll(RandomKind kind, DType dtype);

// `offset` is the generator's before the op. `strides` are those of the one-device tensor; none
// means contiguous. They matter where the tensor is too large for 32-bit offsets.
//   Errors: InvalidArgument for a bad shape, strides that overlap, or a layout_version that is not
//   known.
absl::StatusOr<RandomPlan> PlanRandom(RandomKind kind, IntSpan shape, DType dtype,
                                      const Profile& profile, uint64_t offset,
                                      IntSpan strides = {});

}  // namespace dtensor
