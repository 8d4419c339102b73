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

InputPrices::InputPrices(const Spec& in, MeshGroups* groups, std::vector<Placements> options,
                         const std::vector<bool>& open)
    : in_(in),
      groups_(groups),
      bytes_(static_cast<double>(SizeOf(in.dtype()))),
      options_(std::move(options)),
      open_(open),
      ranks_after_(options_.size() + 1, 1),
      nodes_(1) {
  nodes_.reserve(8);
  for (const int64_t s : in.shape()) bytes_ *= static_cast<double>(s);
  for (size_t m = options_.size(); m-- > 0;) {
    ranks_after_[m] =
        ranks_after_[m + 1] * static_cast<double>(in.mesh().size(static_cast<int>(m)));
  }
}

double InputPrices::targets() const {
  double n = 1;
  for (size_t m = 0; m < options_.size(); ++m) {
    if (!open_[m]) n *= static_cast<double>(options_[m].size());
  }
  return n;
}

int InputPrices::OptionOf(int m, const Placement& p) {
  Placements& of_dim = options_[m];
  const auto at = std::find(of_dim.begin(), of_dim.end(), p) - of_dim.begin();
  if (at == static_cast<int64_t>(of_dim.size())) of_dim.push_back(p);
  return static_cast<int>(at);
}

int InputPrices::Extend(int node, int option) {
  int* link = &nodes_[node].first_child;
  while (*link >= 0) {
    Node& child = nodes_[*link];
    if (child.option == option) return *link;
    link = &child.next_sibling;
  }
  const int made = static_cast<int>(nodes_.size()), m = nodes_[node].depth;
  *link = made;
  Node longer;
  longer.pricing = nodes_[node].pricing;
  longer.depth = m + 1;
  longer.option = option;
  longer.pricing.Add(m, in_.mesh().size(m), in_.placement(m), options_[m][option]);
  nodes_.push_back(longer);
  return made;
}

double InputPrices::LeastBytes(int node) const {
  return nodes_[node].pricing.LeastBytes(bytes_, ranks_after_[nodes_[node].depth]);
}

Cost InputPrices::Least(int node) {
  if (nodes_[node].known) return nodes_[node].least;
  const auto m = static_cast<size_t>(nodes_[node].depth);
  Cost least;
  if (m == options_.size()) {
    const MoveCost price = nodes_[node].pricing.Of(bytes_, groups_);
    least = Cost::Of(price.bytes, price.us);
  } else if (!open_[m]) {
    least = Cost::Infinite();
    for (int option = 0; option < static_cast<int>(options_[m].size()); ++option) {
      least = std::min(least, Least(Extend(node, option)));
    }
  }
  nodes_[node].known = true;
  nodes_[node].least = least;
  return least;
}

}  // namespace dtensor::internal
