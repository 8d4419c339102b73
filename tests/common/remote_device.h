// The device that a test compares with the CPU: the one that DTENSOR_DEVICE names, where the host
// cannot read its memory, else the far device.
#pragma once

#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor::testing {

inline DeviceType RemoteDevice() {
  const DeviceType asked = ValueOrThrow(DefaultDevice());
  return IsRemote(asked) ? asked : DeviceType::kCustom;
}
// Whether it runs the CPU's kernels, so that all bits are the CPU's.
inline bool HasCpuBits(DeviceType device) { return device == DeviceType::kCustom; }

}  // namespace dtensor::testing
