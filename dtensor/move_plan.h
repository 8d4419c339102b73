// MovePlan: what one rank does to redistribute, decided from the two specs alone. redistribute.cc
// runs it. Internal to dtensor/.
//
// At most one reducing collective and one that moves:
//   nothing pending: what I lack of my target comes from its owners by one exchange (an all-gather
//     where everybody wants everything); what I hold never moves.
//   pending terms, nothing else to move: one all-reduce of what I want.
//   else: a reduce-scatter of shares, so chosen that an element is reduced on a rank that wants it
//     if one holds its terms, and evenly; then one exchange, unless the shares are the target.
// Between two meshes it is reduce-scatter on the source's and an exchange among the ranks of both.
//
// A plan takes time and memory for the pieces that its rank sends and receives, whatever the size
// of the world: peers are found from the elements (dtensor/parts.h), never by asking every rank.
#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/mesh/region.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/parts.h"

namespace dtensor::internal {

// A collective's whole tensor as rows of dim `dim`, rank r having counts[r] of them in rank order.
struct RankRows {
  int dim = -1;  // -1: the parts are not rows of one box
  Box whole;
  std::vector<int64_t> counts;
};

struct MovePlan {
  enum class Reduce : uint8_t { kNone, kAllReduce, kReduceScatter };
  enum class Move : uint8_t { kNone, kAllGather, kExchange };
  struct PeerBox {
    int64_t peer;  // world rank; its index in the group once that is there
    Box box;
  };

  // What I hold and want: from the source's memory to the target's. The whole target where nothing
  // moves and nothing is scattered.
  std::vector<BoxPair> own;

  Reduce reduce = Reduce::kNone;
  absl::InlinedVector<int, 4> reduce_dims;  // mesh dims of the source's mesh
  ReduceOp op = ReduceOp::kSum;
  // Reduce-scatter: my source as rows that are the shares, where it is such a view.
  RankRows share_rows;

  Move move = Move::kNone;
  absl::InlinedVector<int, 4> move_dims;  // mesh dims of the source's mesh
  bool between = false;                   // two meshes: the exchange is among the ranks of both
  // Exchange. The source's memory is the packed share after a reduce-scatter, else the local
  // tensor. Boxes of one peer follow each other.
  std::vector<PeerBox> sends, recvs;
  RankRows gather_rows;  // all-gather: of the target

  int64_t received_numel = 0;  // elements, as CommEvent counts bytes

  // --- filled in by AddCounts, as long as a group: what collectives want to be told ---
  // Reduce-scatter: elements by group index, and where they are not rows (or `packed`) my source in
  // their order; b lies in one packed array.
  std::vector<int64_t> share_counts;
  std::vector<BoxPair> pack;
  // All-gather, packed: elements by group index; a lies in the array of all of them, one after the
  // other.
  std::vector<int64_t> gather_counts;
  std::vector<BoxPair> unpack;
};

// What `rank`, of either mesh, does. Both specs of one rank; same shape and dtype.
MovePlan PlanMove(const Spec& from, const Spec& to, int64_t rank);
// Completes a plan for its collectives. `packed`: they take contiguous tensors only.
void AddCounts(const Spec& from, const Spec& to, int64_t rank, bool packed, MovePlan* plan);

// Whether the target is a part of what every rank holds, once nothing is pending: the cuts of each
// tensor dim only grew, at their end.
bool OnlyCuts(const DeviceMesh& mesh, absl::Span<const Placement> from,
              absl::Span<const Placement> to);

}  // namespace dtensor::internal
