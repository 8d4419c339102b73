// MovePlan: what one rank does to redistribute, decided from the two specs alone. redistribute.cc
// runs it. Internal to dtensor/.
//
// At most one reducing collective and one that moves:
//   nothing pending: what I lack of my target comes from its owners by one exchange (an all-gather
//     where everybody wants everything); what I hold never moves.
//   pending terms, nothing else to move: one all-reduce of what I want.
//   else: a reduce-scatter of shares, so chosen that an element is reduced on a rank that wants it
//     if one holds its terms, and evenly; then one exchange, unless the shares are the target.
#pragma once

#include <cstdint>
#include <vector>

#include "mesh/region.h"
#include "mesh/spec.h"

namespace dtensor::internal {

// A collective's whole tensor as rows of dim `dim`, rank r having counts[r] of them in rank order.
struct Rows {
  int dim = -1;  // -1: the parts are not rows of one box
  Box whole;
  std::vector<int64_t> counts;
};

struct MovePlan {
  enum class Reduce : uint8_t { kNone, kAllReduce, kReduceScatter };
  enum class Move : uint8_t { kNone, kAllGather, kExchange };
  struct PeerBox {
    int peer;  // in the group of move_dims
    Box box;
  };

  // What I hold and want: from the source's memory to the target's. The whole target where nothing
  // moves and nothing is scattered.
  std::vector<BoxPair> own;

  Reduce reduce = Reduce::kNone;
  absl::InlinedVector<int, 4> reduce_dims;  // mesh dims of the source's mesh
  ReduceOp op = ReduceOp::kSum;
  // Reduce-scatter: this rank's source in the order of the shares; b lies in one packed array.
  std::vector<BoxPair> pack;
  std::vector<int64_t> share_counts;  // elements, by group index
  Rows share_rows;                    // the same as a view of the source, where there is one

  Move move = Move::kNone;
  absl::InlinedVector<int, 4> move_dims;
  // Exchange. The source's memory is the packed share after a reduce-scatter, else the local
  // tensor.
  std::vector<PeerBox> sends, recvs;
  // All-gather: elements by group index; a lies in the array of all of them, one after the other.
  std::vector<int64_t> gather_counts;
  std::vector<BoxPair> unpack;
  Rows gather_rows;  // of the target

  int64_t received_numel = 0;  // elements, as CommEvent counts bytes
};

// Both specs of one rank, inside its mesh; same shape, dtype and ranks.
MovePlan PlanMove(const Spec& from, const Spec& to, int64_t rank);

// Whether the target is a part of what every rank holds, once nothing is pending: the cuts of each
// tensor dim only grew, at their end.
bool OnlyCuts(const DeviceMesh& mesh, absl::Span<const Placement> from,
              absl::Span<const Placement> to);

inline bool CutsTensor(const Placement& p) {
  return p.is_shard() || p.is_segmented() || p.is_flat();
}

}  // namespace dtensor::internal
