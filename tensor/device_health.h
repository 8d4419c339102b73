// What a rank that waits for a device asks besides the device.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace dtensor {

// An error: what the rank queued will not be done any more.
using DeviceHealth = std::function<absl::Status()>;

// From now on it is asked where the rank whose code runs waits for a device (RankDevice::Wait), and
// its error ends the wait, or is its result; as long as somebody holds it.
void WatchHealth(const std::shared_ptr<const DeviceHealth>& health);

// The first error of what the rank whose code runs watches.
absl::Status CheckHealth();

}  // namespace dtensor
