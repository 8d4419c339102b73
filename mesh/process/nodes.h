// Nodes: how the members of a group of processes lie on nodes, and collectives that send what one
// node has for another once, not once for each of its ranks. Private to mesh/.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/process/move.h"

namespace dtensor {

class Nodes {
 public:
  // Of members of these ranks, of which this process is number `me`.
  Nodes(absl::Span<const int64_t> ranks, int me, int64_t ranks_per_node);

  // Whether the members of every node follow one another, on several nodes, and some node has
  // several: else there is nothing to gain.
  bool apart() const { return apart_; }
  int count() const { return static_cast<int>(begins_.size()) - 1; }
  int size(int node) const { return begins_[node + 1] - begins_[node]; }
  int members() const { return begins_.back(); }
  // Member `local` of a node.
  int At(int node, int local) const { return begins_[node] + local; }
  int node() const { return node_; }  // this process's,
  int local() const { return me_ - begins_[node_]; }
  int NodeOf(int member) const;
  // As many members as every node has: what nodes say to each other goes in so many lanes, of which
  // lane k is between the members k of all nodes.
  int lanes() const { return lanes_; }

 private:
  const int me_;
  std::vector<int> begins_;  // by node its first member; and how many there are
  int node_ = 0, lanes_ = 0;
  bool apart_ = true;
};

// Whether a call on these nodes takes less time by MoveByNodes; alike on all members.
bool PaysByNodes(const CollectiveCall& call, const Nodes& nodes, const CostModel& cost);

// This member's part of a call for which it pays. Sums go from node to node, each of which adds its
// ranks in their order: so they are those of the local backend, bit for bit. Those of 16-bit floats
// are float32 on the way, and averages sums.
absl::Status MoveByNodes(const CollectiveCall& call, const Nodes& nodes, ProcessGroup& group,
                         AwaitData await);

}  // namespace dtensor
