#include "dtensor/strategy_cost.h"

#include <algorithm>

#include "dtensor/mesh/launch.h"
#include "dtensor/redistribute.h"

namespace dtensor::internal {

const CostModel& WorldCost() { return RankContext::Current().cost_model(); }

Cost CostOfMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                absl::Span<const Placement> from, absl::Span<const Placement> to) {
  const MoveCost price = PriceMove(mesh, shape, dtype, from, to, WorldCost());
  return Cost::Of(price.bytes, price.us);
}

namespace {
// Kinds of placements.
constexpr size_t kWhole = 0, kFlat = 1, kCut = 2, kDims = 3;
}  // namespace

InputPrices::InputPrices(const Spec& in, MeshGroups* groups)
    : groups_(groups),
      bytes_(static_cast<double>(SizeOf(in.dtype()))),
      dims_(in.placements().size()),
      rest_(dims_.size() + 1) {
  for (const int64_t s : in.shape()) bytes_ *= static_cast<double>(s);
  uint64_t matter = 0;
  for (int m = static_cast<int>(dims_.size()) - 1; m >= 0; --m) {
    MeshDim& dim = dims_[m];
    const Placement& here = in.placement(m);
    dim.here = &here;
    dim.ranks = in.mesh().size(m);
    dim.matter = matter;
    dim.numbers.resize(kDims + in.shape().size());
    const MoveStep stays(m, dim.ranks, here, here, /*same=*/true);
    dim.options.push_back({stays, here.cuts(), /*asked=*/false});
    if (here.cuts_dim()) matter |= uint64_t{1} << here.dim();
  }
}

// One of the kinds above or, from kDims on, the cut of a tensor dim.
inline size_t InputPrices::KindOf(const MeshDim& dim, const Placement& p) {
  if (!p.cuts_dim()) return p.is_flat() ? kFlat : kWhole;
  return ((dim.matter >> p.dim()) & 1) != 0 ? kDims + static_cast<size_t>(p.dim()) : kCut;
}

int InputPrices::OptionOf(int m, const Placement& p) const {
  const MeshDim& dim = dims_[m];
  return p == *dim.here ? kStays : dim.numbers[KindOf(dim, p)];
}

int InputPrices::Ask(int m, const Placement& p, bool resolves, bool* unsure) {
  MeshDim& dim = dims_[m];
  const Placement& here = *dim.here;
  const bool same_dim = p.dim() == here.dim();
  dim.open |= resolves;
  if (same_dim && (resolves || p.kind() == here.kind())) {
    dim.options[kStays].asked = true;
    if (!resolves && p == here) return kStays;
    *unsure = true;
  }
  int8_t& number = dim.numbers[KindOf(dim, p)];
  if (number == 0) {
    number = static_cast<int8_t>(dim.options.size());
    dim.options.push_back({MoveStep(m, dim.ranks, here, p, /*same=*/false), p.cuts()});
  }
  return number;
}

void InputPrices::Seal() {
  for (size_t m = dims_.size(); m-- > 0;) {
    const MeshDim& dim = dims_[m];
    rest_[m] = rest_[m + 1];
    const bool may_be_cut = std::any_of(dim.options.begin(), dim.options.end(),
                                        [](const Option& option) { return option.cuts; });
    if (!may_be_cut) continue;
    (dim.here->is_partial() ? rest_[m].pending : rest_[m].cut) *= static_cast<double>(dim.ranks);
  }
  nodes_.reserve(dims_.size() == 1 ? 8 : 32);
  ahead_.reserve(64);
  nodes_.emplace_back();
}

double InputPrices::targets() const {
  double n = 1;
  for (const MeshDim& dim : dims_) {
    if (!dim.open) n *= static_cast<double>(dim.options.size());
  }
  return n;
}

int InputPrices::Add(int m, int node, int option) {
  const auto child = static_cast<int>(nodes_.size());
  Node& added = nodes_.emplace_back();
  Node& before = nodes_[node];
  added.moves = before.moves;
  added.moves.Add(dims_[m].options[option].step);
  added.option = option;
  added.next = before.first_child;
  before.first_child = child;
  return child;
}

void InputPrices::FindAhead(int m, int node) {
  const MovePricing& before = nodes_[node].moves;
  const Rest& rest = rest_[m + 1];
  nodes_[node].ahead = static_cast<int>(ahead_.size());
  for (const Option& option : dims_[m].options) ahead_.push_back(LeastBytes(before, rest, option));
}

Cost InputPrices::CostOf(const MovePricing& moves) const {
  const MoveCost price = moves.Of(bytes_, groups_);
  return Cost::Of(price.bytes, price.us);
}

const Cost& InputPrices::Least(int depth, int node) {
  if (!nodes_[node].known) {
    const bool whole = depth == static_cast<int>(dims_.size());
    nodes_[node].least = whole ? CostOf(nodes_[node].moves) : FindLeast(depth, node);
    nodes_[node].known = true;
  }
  return nodes_[node].least;
}

// The least of what may follow the moves of a node, which are those of the first mesh dims: of one
// more exactly where it is the last, else by what is seen at once.
Cost InputPrices::FindLeast(int depth, int node) {
  LookAhead(depth, node);
  const double* const ahead = LeastBytes(node);
  const MeshDim& dim = dims_[depth];
  const bool last = depth + 1 == static_cast<int>(dims_.size());
  const auto count = static_cast<int>(dim.options.size());
  Cost least = Cost::Infinite();
  // To stay is mostly cheapest, and to be whole dearest: that is mostly asked for first.
  for (int k = 0; k < count && !least.zero(); ++k) {
    const int at = k == 0 ? kStays : count - k;
    if (!dim.options[at].asked || ahead[at] > least.bytes) continue;
    if (last) {
      MovePricing moves = nodes_[node].moves;
      moves.Add(dim.options[at].step);
      least = std::min(least, CostOf(moves));
    } else {
      least = {ahead[at], 0};
    }
  }
  return least;
}

}  // namespace dtensor::internal
