// What strategies cost, and how the search compares them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/move_cost.h"

namespace dtensor::internal {

// Bytes come first, then time. Both are rounded to binary fractions, whose sums are exact: ties are
// ties, in whatever order the inputs are added.
struct Cost {
  double bytes = 0, us = 0;

  static Cost Of(double bytes, double us) {
    return {std::round(bytes * 1024) / 1024, std::round(us * (1 << 20)) / (1 << 20)};
  }
  static Cost Infinite() { return {std::numeric_limits<double>::infinity(), 0}; }
  bool zero() const { return bytes == 0 && us == 0; }
  Cost& operator+=(const Cost& o) {
    bytes += o.bytes;
    us += o.us;
    return *this;
  }
  friend bool operator<(const Cost& a, const Cost& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.us < b.us;
  }
};

// Of one redistribution, by the world's cost model. The same on every rank.
Cost CostOfMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                absl::Span<const Placement> from, absl::Span<const Placement> to);

// The cost model of this rank's world. The same on every rank.
const CostModel& WorldCost();

// What it costs to bring one input where a strategy wants it, and the least that it can cost once
// the strategy is known for the first mesh dims: moves are not separable by mesh dim (to cut a
// replica further makes it cheaper), so the least is looked for over all that may follow. The
// placements of the first mesh dims are a node of a tree, the root stands for none; nodes are made
// when they are asked for.
class InputPrices {
 public:
  // `options`: per mesh dim where the input is, and the other placements that any row asks for; an
  // `open` mesh dim gets more when rows are placed.
  InputPrices(const Spec& in, MeshGroups* groups, std::vector<Placements> options,
              const std::vector<bool>& open);

  static constexpr int kRoot = 0, kStays = 0;  // a node; an option
  // How many targets there are.
  double targets() const;
  const Placement& option(int m, int number) const { return options_[m][number]; }
  // Its number; a new one where it is none yet.
  int OptionOf(int m, const Placement& p);
  // The node of one mesh dim more.
  int Extend(int node, int option);
  // At least this much, found out at once.
  double LeastBytes(int node) const;
  Cost Least(int node);

 private:
  struct Node {
    MovePricing pricing;
    int depth = 0, option = 0;
    int first_child = -1, next_sibling = -1;
    bool known = false;
    Cost least = {};
  };

  const Spec& in_;
  MeshGroups* groups_;
  double bytes_;
  std::vector<Placements> options_;
  std::vector<bool> open_;
  absl::InlinedVector<double, 8> ranks_after_;  // by depth: of the mesh dims that follow
  std::vector<Node> nodes_;
};

}  // namespace dtensor::internal
