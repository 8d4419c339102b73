#include "dtensor/strategy_cost.h"

#include <algorithm>

#include "dtensor/mesh/launch.h"
#include "dtensor/redistribute.h"

namespace dtensor::internal {

Cost CostOfMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                absl::Span<const Placement> from, absl::Span<const Placement> to) {
  static const CostModel* const usual = new CostModel;
  const CostModel* const of_world = RankContext::Current().cost_model();
  const MoveCost price =
      PriceMove(mesh, shape, dtype, from, to, of_world == nullptr ? *usual : *of_world);
  return Cost::Of(price.bytes, price.us);
}

Cost InputPrices::Least(const Placements& chosen) {
  const size_t m = chosen.size();
  const auto known = least_.find(chosen);
  if (known != least_.end()) return known->second;
  if (m == options_.size()) {
    return least_[chosen] =
               CostOfMove(in_.mesh(), in_.shape(), in_.dtype(), in_.placements(), chosen);
  }
  if (options_[m].empty()) return least_[chosen] = Cost();
  Cost least = Cost::Infinite();
  Placements longer = chosen;
  longer.emplace_back();
  for (const Placement& p : options_[m]) {
    longer.back() = p;
    least = std::min(least, Least(longer));
  }
  return least_[chosen] = least;
}

}  // namespace dtensor::internal
