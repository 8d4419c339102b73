// Test support: what an exception says.
#pragma once

#include <functional>
#include <string>

#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor::testing {

// The message of the Error that fn throws, or that its work on a device is found to have; "" if
// there is none.
inline std::string MessageOf(const std::function<void()>& fn) {
  try {
    fn();
    ThrowIfError(RankDevices::Current().Synchronize());
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace dtensor::testing
