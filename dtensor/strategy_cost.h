// What strategies cost, and how the search compares them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
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

  static constexpr double kRoundedTo = 0x1p-10;  // bytes
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
  // On every mesh dim the input may stay where it is; other options are told by AddOption.
  InputPrices(const Spec& in, MeshGroups* groups);

  static constexpr int kRoot = 0, kStays = 0;  // a node; an option
  // The number of a placement on mesh dim m; a new one where it is none yet. It must stay there.
  int AddOption(int m, const Placement* p);
  // More options come while nodes are made, by OptionOf.
  void Open(int m) { dims_[m].open = true; }
  // Once all options are known, but those of open mesh dims.
  void Seal();
  int OptionOf(int m, const Placement& p);

  // How many targets there are, of mesh dims that are not open.
  double targets() const;
  const Placement& option(int m, int number) const { return *dims_[m].options[number].placement; }
  // Whether an option is of the kind and tensor dim of what is there: it may cut at the same
  // places.
  bool MayStay(int m, int number) const { return dims_[m].options[number].alike; }
  // The node of mesh dim m, after one of the mesh dim before.
  int Extend(int m, int node, int option) {
    if (option >= nodes_[node].options) Expand(m, node);
    return nodes_[node].children + option;
  }
  int last_option(int node) const { return nodes_[node].option; }
  // What follows a node costs at least this much, which is known at once. Lower by what rounding
  // may take from a cost.
  double LeastBytes(int node) const { return nodes_[node].least_bytes; }
  // The least, once the first `depth` mesh dims are known; where mesh dims that are open follow, no
  // more than it.
  Cost Least(int depth, int node);

 private:
  struct Node {
    MovePricing pricing = {};
    double least_bytes = 0;
    int option = 0;
    int children = 0, options = 0;  // nodes for so many options, one after the other, from there on
    bool known = false;
    Cost least = {};
  };
  struct Option {
    const Placement* placement;
    MoveStep step;
    bool alike = true;  // see MayStay
  };
  struct MeshDim {
    absl::InlinedVector<Option, 4> options;
    int64_t ranks = 1;
    bool open = false;
  };
  // Of the mesh dims that follow: see MovePricing::LeastBytes.
  struct Rest {
    double cut = 1, pending = 1;
  };

  void Expand(int m, int node);

  MeshGroups* groups_;
  double bytes_;
  absl::InlinedVector<MeshDim, 3> dims_;
  absl::InlinedVector<Rest, 4> rest_;                   // by depth
  std::vector<std::unique_ptr<const Placement>> kept_;  // options of open mesh dims
  std::vector<Node> nodes_;
};

}  // namespace dtensor::internal
