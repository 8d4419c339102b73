#include "dtensor/tensor/device_health.h"

#include <vector>

#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

thread_local std::vector<std::weak_ptr<const DeviceHealth>> t_watched;

}  // namespace

void WatchHealth(const std::shared_ptr<const DeviceHealth>& health) {
  std::erase_if(t_watched, [](const auto& watched) { return watched.expired(); });
  t_watched.push_back(health);
}

absl::Status CheckHealth() {
  for (const auto& watched : t_watched) {
    if (const auto health = watched.lock()) DT_RETURN_IF_ERROR((*health)());
  }
  return absl::OkStatus();
}

}  // namespace dtensor
