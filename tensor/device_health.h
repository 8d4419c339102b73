// What a thread that waits for a device asks besides the device.
#pragma once

#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace dtensor {

// An error: what was queued by the rank whose thread this is will not be done any more.
using DeviceHealth = std::function<absl::Status()>;

// From now on it is asked where this thread waits for a device (RankDevice::Wait), and its error
// ends the wait, or is its result; as long as somebody holds it.
void WatchHealth(const std::shared_ptr<const DeviceHealth>& health);

// The first error of what this thread watches.
absl::Status CheckHealth();

}  // namespace dtensor
