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

  static constexpr double kRoundedTo = 0x1p-10;  // bytes
  static Cost Of(double bytes, double us) {
    return {std::round(bytes * 1024) / 1024, std::round(us * (1 << 20)) / (1 << 20)};
  }
  static Cost Infinite() { return {std::numeric_limits<double>::infinity(), 0}; }
  bool zero() const { return bytes == 0 && us == 0; }
  Cost Times(double n) const { return {bytes * n, us * n}; }
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
// replica further makes it cheaper), so the least is looked for over what may follow. The
// placements of the first mesh dims are a node of a tree, the root stands for none; nodes are made
// when they are asked for.
//
// A price knows of a placement only whether it is what is there, whether it cuts, and which tensor
// dim if that is cut on a later mesh dim, too: that is an option. So units and segments need not be
// known.
class InputPrices {
 public:
  InputPrices(const Spec& in, MeshGroups* groups);

  static constexpr int kRoot = 0, kStays = 0;  // a node; an option: to stay as it is
  // What a strategy may ask for on mesh dim m, and the number of that. `resolves`: it may cut the
  // tensor dim otherwise than p does, and just as it is cut now. Sets `unsure` if it may turn out
  // to stay, as p is of the same kind and tensor dim as what is there, and may cut at the same
  // places; what it is then follows from OptionOf.
  int Ask(int m, const Placement& p, bool resolves, bool* unsure);
  // All has been asked for.
  void Seal();
  // The number of what was asked for.
  int OptionOf(int m, const Placement& p) const;

  // How many targets there are, of mesh dims where it is known what the options are.
  double targets() const;
  // The node of mesh dim m, after one of the mesh dim before.
  int Extend(int m, int node, int option) {
    int child = nodes_[node].first_child;
    while (child != kRoot && nodes_[child].option != option) child = nodes_[child].next;
    return child != kRoot ? child : Add(m, node, option);
  }
  bool Stays(int node) const { return nodes_[node].option == kStays; }
  // Finds what each option of mesh dim m after a node, and all that follows it, costs at least, by
  // what is seen at once.
  void LookAhead(int m, int node) {
    if (nodes_[node].ahead < 0) FindAhead(m, node);
  }
  // That, by option; until LookAhead, Extend or Least is called again.
  const double* LeastBytes(int node) const { return &ahead_[nodes_[node].ahead]; }
  // No more than the least, once the first `depth` mesh dims are known; just that for the last.
  const Cost& Least(int depth, int node);

 private:
  struct Node {
    MovePricing moves = {};
    int option = 0;
    int first_child = kRoot, next = kRoot;  // kRoot: there is none
    int ahead = -1;                         // where in ahead_; -1: nobody looked
    bool known = false;
    Cost least = {};
  };
  struct Option {
    MoveStep step;
    bool cuts;
    bool asked = true;
  };
  struct MeshDim {
    absl::InlinedVector<Option, 4> options;  // the first: kStays
    absl::InlinedVector<int8_t, 8> numbers;  // by KindOf: the option that is not to stay; 0: none
    uint64_t matter = 0;                     // tensor dims that are cut on later mesh dims
    const Placement* here;
    int64_t ranks = 1;
    bool open = false;  // some row says what it asks for once it is placed
  };
  // Of the mesh dims that follow: see MovePricing::LeastBytes.
  struct Rest {
    double cut = 1, pending = 1;
  };

  static size_t KindOf(const MeshDim& dim, const Placement& p);
  int Add(int m, int node, int option);
  // After these moves, of the option and all that may follow it. Lower by what rounding may take
  // from a cost.
  double LeastBytes(const MovePricing& before, const Rest& rest, const Option& option) const {
    const double bytes = before.LeastBytes(option.step, bytes_, rest.cut, rest.pending);
    return std::max(0.0, bytes * (1 - 0x1p-30) - Cost::kRoundedTo);
  }
  Cost CostOf(const MovePricing& moves) const;
  void FindAhead(int m, int node);
  Cost FindLeast(int depth, int node);

  MeshGroups* groups_;
  double bytes_;
  absl::InlinedVector<MeshDim, 3> dims_;
  absl::InlinedVector<Rest, 4> rest_;  // by depth
  std::vector<Node> nodes_;
  std::vector<double> ahead_;  // see LookAhead
};

}  // namespace dtensor::internal
