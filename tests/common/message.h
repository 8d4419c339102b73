// Test support: what an exception says.
#pragma once

#include <functional>
#include <string>

#include "tensor/status.h"

namespace dtensor::testing {

// The message of the Error that fn throws; "" if it throws none.
inline std::string MessageOf(const std::function<void()>& fn) {
  try {
    fn();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace dtensor::testing
