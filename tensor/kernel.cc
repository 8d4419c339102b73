#include "dtensor/tensor/kernel.h"

#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "dtensor/tensor/device.h"

namespace dtensor {
namespace {

// Entries are never removed, and std::map does not move them, so pointers stay good; a kernel that
// is replaced keeps its address.
struct KernelTable {
  std::mutex mutex;
  std::map<std::pair<std::string, DeviceType>, Kernel> kernels;
};
KernelTable& TheTable() {
  static KernelTable* table = new KernelTable;
  return *table;
}

}  // namespace

void RegisterKernel(std::string_view op, DeviceType device, Kernel kernel) {
  KernelTable& table = TheTable();
  std::lock_guard<std::mutex> lock(table.mutex);
  table.kernels[{std::string(op), device}] = kernel;
}

const Kernel* FindKernel(std::string_view op, DeviceType device) {
  KernelTable& table = TheTable();
  const std::pair<std::string, DeviceType> key = {std::string(op), device};
  {
    std::lock_guard<std::mutex> lock(table.mutex);
    auto it = table.kernels.find(key);
    if (it != table.kernels.end()) return &it->second;
  }
  const DeviceTable* own = FindDevice(device);  // may ask for a kernel of another device
  Kernel kernel;
  if (own == nullptr || own->kernel(key.first.c_str(), &kernel) != 0 || kernel.fn == nullptr) {
    return nullptr;
  }
  std::lock_guard<std::mutex> lock(table.mutex);
  return &table.kernels.try_emplace(key, kernel).first->second;
}

const Kernel* FindHostKernel(std::string_view op) { return FindKernel(op, DeviceType::kCpu); }

}  // namespace dtensor
