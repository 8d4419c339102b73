#include "dtensor/tensor/device_health.h"

#include <vector>

#include "dtensor/tensor/rank_state.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

void WatchHealth(const std::shared_ptr<const DeviceHealth>& health) {
  auto& watched = RankState::Current().watched;
  std::erase_if(watched, [](const auto& one) { return one.expired(); });
  watched.push_back(health);
}

absl::Status CheckHealth() {
  const RankState* state = RankState::IfAny();
  if (state == nullptr) return absl::OkStatus();  // who has no state watches nothing
  for (const auto& one : state->watched) {
    if (const auto health = one.lock()) DT_RETURN_IF_ERROR((*health)());
  }
  return absl::OkStatus();
}

}  // namespace dtensor
