// The device that a test compares with the CPU: the far device, or the one that DT_TEST_DEVICE
// names.
#pragma once

#include <cstdlib>

#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor::testing {

inline DeviceType RemoteDevice() {
  const char* name = std::getenv("DT_TEST_DEVICE");
  return name == nullptr ? DeviceType::kCustom : ValueOrThrow(ParseDevice(name));
}
// Whether it runs the CPU's kernels, so that all bits are the CPU's.
inline bool HasCpuBits(DeviceType device) { return device == DeviceType::kCustom; }

}  // namespace dtensor::testing
