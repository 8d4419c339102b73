// A plugin of another version of the device's table.
#include "dtensor/tensor/device_table.h"

extern "C" const dtensor::DeviceTable* dtensor_cuda_table() {
  static const dtensor::DeviceTable table = {.struct_size = sizeof(dtensor::DeviceTable),
                                             .abi = dtensor::kDeviceTableAbi + 6};
  return &table;
}
