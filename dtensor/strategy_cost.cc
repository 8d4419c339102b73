#include "dtensor/strategy_cost.h"

#include <algorithm>
#include <utility>

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
      rest_(dims_.size() + 1),
      nodes_(1) {
  for (const int64_t s : in.shape()) bytes_ *= static_cast<double>(s);
  for (size_t m = 0; m < dims_.size(); ++m) {
    dims_[m].options.push_back(&in.placement(static_cast<int>(m)));
    dims_[m].ranks = in.mesh().size(static_cast<int>(m));
  }
}

int InputPrices::AddOption(int m, const Placement* p) {
  auto& options = dims_[m].options;
  const int count = static_cast<int>(options.size());
  for (int k = 0; k < count; ++k) {
    const Placement& have = *options[k];
    if (have.kind() == p->kind() && have.dim() == p->dim() && have == *p) return k;
  }
  options.push_back(p);
  return count;
}

int InputPrices::OptionOf(int m, const Placement& p) {
  const size_t before = dims_[m].options.size();
  const int number = AddOption(m, &p);
  if (static_cast<size_t>(number) == before) {
    kept_.push_back(std::make_unique<Placement>(p));
    dims_[m].options.back() = kept_.back().get();
  }
  return number;
}

void InputPrices::Seal() {
  for (size_t m = dims_.size(); m-- > 0;) {
    const MeshDim& dim = dims_[m];
    const bool may_be_cut = dim.open || std::any_of(dim.options.begin(), dim.options.end(),
                                                    [](const Placement* p) { return p->cuts(); });
    rest_[m] = rest_[m + 1];
    if (!may_be_cut) continue;
    (dim.options[kStays]->is_partial() ? rest_[m].pending : rest_[m].cut) *=
        static_cast<double>(dim.ranks);
  }
  nodes_.reserve(dims_.size() == 1 ? 8 : 32);
}

double InputPrices::targets() const {
  double n = 1;
  for (const MeshDim& dim : dims_) {
    if (!dim.open) n *= static_cast<double>(dim.options.size());
  }
  return n;
}

int InputPrices::Extend(int m, int node, int option) {
  int last = nodes_[node].first_child;
  while (last >= 0 && nodes_[last].option != option) last = nodes_[last].next_sibling;
  if (last >= 0) return last;
  const int made = static_cast<int>(nodes_.size());
  nodes_.push_back(nodes_[node]);
  Node& child = nodes_.back();
  const MeshDim& dim = dims_[m];
  child.pricing.Add(m, dim.ranks, *dim.options[kStays], *dim.options[option]);
  child.option = option;
  child.first_child = -1;
  child.next_sibling = std::exchange(nodes_[node].first_child, made);
  child.known = false;
  return made;
}

Cost InputPrices::Least(int depth, int node) {
  if (nodes_[node].known) return nodes_[node].least;
  Cost least = Cost::Infinite();
  if (depth == static_cast<int>(dims_.size())) {
    const MoveCost price = nodes_[node].pricing.Of(bytes_, groups_);
    least = Cost::Of(price.bytes, price.us);
  } else if (dims_[depth].open) {
    least = {std::floor(LeastBytes(depth, node)), 0};
  } else {
    // To stay is mostly cheapest, so what comes after it need not be looked at any further.
    for (int option = 0; option < static_cast<int>(dims_[depth].options.size()); ++option) {
      const int child = Extend(depth, node, option);
      if (LeastBytes(depth + 1, child) > least.bytes) continue;
      least = std::min(least, Least(depth + 1, child));
      if (least.zero()) break;
    }
  }
  nodes_[node].known = true;
  nodes_[node].least = least;
  return least;
}

}  // namespace dtensor::internal
