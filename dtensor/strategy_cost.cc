#include "dtensor/strategy_cost.h"

#include <algorithm>

#include "dtensor/mesh/launch.h"
#include "dtensor/redistribute.h"

namespace dtensor::internal {

const CostModel& WorldCost() {
  static const CostModel* const usual = new CostModel;
  const CostModel* const of_world = RankContext::Current().cost_model();
  return of_world == nullptr ? *usual : *of_world;
}

Cost CostOfMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                absl::Span<const Placement> from, absl::Span<const Placement> to) {
  const MoveCost price = PriceMove(mesh, shape, dtype, from, to, WorldCost());
  return Cost::Of(price.bytes, price.us);
}

InputPrices::InputPrices(const Spec& in, MeshGroups* groups)
    : groups_(groups),
      bytes_(static_cast<double>(SizeOf(in.dtype()))),
      dims_(in.placements().size()),
      rest_(dims_.size() + 1) {
  for (const int64_t s : in.shape()) bytes_ *= static_cast<double>(s);
  for (size_t m = 0; m < dims_.size(); ++m) {
    const int at = static_cast<int>(m);
    const Placement& stays = in.placement(at);
    dims_[m].ranks = in.mesh().size(at);
    dims_[m].options.push_back({&stays, MoveStep(at, dims_[m].ranks, stays, stays)});
  }
}

int InputPrices::AddOption(int m, const Placement* p) {
  auto& options = dims_[m].options;
  const Option* const all = options.data();
  const int count = static_cast<int>(options.size());
  for (int k = 0; k < count; ++k) {
    const Placement& have = *all[k].placement;
    if (have.kind() == p->kind() && have.dim() == p->dim() && have == *p) return k;
  }
  const Placement& stays = *all[kStays].placement;
  options.push_back({p, MoveStep(m, dims_[m].ranks, stays, *p),
                     p->kind() == stays.kind() && p->dim() == stays.dim()});
  return count;
}

int InputPrices::OptionOf(int m, const Placement& p) {
  const size_t before = dims_[m].options.size();
  const int number = AddOption(m, &p);
  if (static_cast<size_t>(number) == before) {
    kept_.push_back(std::make_unique<Placement>(p));
    dims_[m].options.back().placement = kept_.back().get();
  }
  return number;
}

void InputPrices::Seal() {
  for (size_t m = dims_.size(); m-- > 0;) {
    const MeshDim& dim = dims_[m];
    const bool may_be_cut =
        dim.open || std::any_of(dim.options.begin(), dim.options.end(),
                                [](const Option& option) { return option.placement->cuts(); });
    rest_[m] = rest_[m + 1];
    if (!may_be_cut) continue;
    (dim.options[kStays].placement->is_partial() ? rest_[m].pending : rest_[m].cut) *=
        static_cast<double>(dim.ranks);
  }
  nodes_.reserve(dims_.size() == 1 ? 8 : 32);
  nodes_.emplace_back();
}

double InputPrices::targets() const {
  double n = 1;
  for (const MeshDim& dim : dims_) {
    if (!dim.open) n *= static_cast<double>(dim.options.size());
  }
  return n;
}

// Nodes for all options that there are by now. Where there were some before, they are copied: the
// new ones take their place, but who has one of the old may keep it.
void InputPrices::Expand(int m, int node) {
  const MeshDim& dim = dims_[m];
  const Rest& rest = rest_[m + 1];
  const auto first = static_cast<int>(nodes_.size());
  const auto count = static_cast<int>(dim.options.size());
  nodes_.resize(first + count);
  Node& before = nodes_[node];
  Node* const children = &nodes_[first];
  const Option* const options = dim.options.data();
  std::copy_n(&nodes_[before.children], before.options, children);
  for (int option = before.options; option < count; ++option) {
    Node& child = children[option];
    child.pricing = before.pricing;
    child.pricing.Add(options[option].step);
    child.option = option;
    const double bytes = child.pricing.LeastBytes(bytes_, rest.cut, rest.pending);
    child.least_bytes = std::max(0.0, bytes * (1 - 0x1p-30) - Cost::kRoundedTo);
  }
  before.children = first;
  before.options = count;
}

Cost InputPrices::Least(int depth, int node) {
  if (nodes_[node].known) return nodes_[node].least;
  Cost least = Cost::Infinite();
  if (depth == static_cast<int>(dims_.size())) {
    const MoveCost price = nodes_[node].pricing.Of(bytes_, groups_);
    least = Cost::Of(price.bytes, price.us);
  } else if (dims_[depth].open) {
    least = {std::floor(LeastBytes(node)), 0};
  } else {
    // To stay is mostly cheapest, so what comes after it need not be looked at any further.
    for (int option = 0; option < static_cast<int>(dims_[depth].options.size()); ++option) {
      const int child = Extend(depth, node, option);
      if (LeastBytes(child) > least.bytes) continue;
      least = std::min(least, Least(depth + 1, child));
      if (least.zero()) break;
    }
  }
  nodes_[node].known = true;
  nodes_[node].least = least;
  return least;
}

}  // namespace dtensor::internal
