// Planner: which Philox block and component each element of a random op reads. A pure function of
// global facts, so that all ranks agree without communication.
//
// Element g (position in memory order of the one-device tensor) of a segment with V threads and U
// results per block: q = (g - first) / V; thread (g - first) % V, call q / U, component q % U; the
// block has counter words x, y = offset / 4 + call.  Source: rng.md sections 3.1 to 3.4.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "rng/draw.h"
#include "rng/profile.h"
#include "tensor/shape.h"

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

// Results per block of a kind: 4, or 2 where one result takes 64 bits.
int RandomUnroll(RandomKind kind, DType dtype);

// `offset` is the generator's before the op. `strides` are those of the one-device tensor; none
// means contiguous. A dense tensor is filled in memory order, so only density matters here.
//   Errors: InvalidArgument for a bad shape, strides that are not those of a dense tensor, or a
//   layout_version that is not known.
absl::StatusOr<RandomPlan> PlanRandom(RandomKind kind, IntSpan shape, DType dtype,
                                      const Profile& profile, uint64_t offset,
                                      IntSpan strides = {});

}  // namespace dtensor
