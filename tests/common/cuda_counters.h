// What the stand-in for CUDA (tests/cusim) has counted in this process.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>

#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor::testing {

// As in tests/cusim/runtime.h.
struct CounterVisitor {
  void* to;
  void (*kernel)(void* to, const char* name, uint64_t launches, uint64_t bytes, uint64_t sectors);
  void (*number)(void* to, const char* name, uint64_t value);
};
using CudaCounters = void (*)(const CounterVisitor*);

// Null where CUDA's runtime is another, which does not count, or was not loaded.
inline CudaCounters FindCudaCounters() {
  void* runtime = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  return runtime == nullptr ? nullptr
                            : reinterpret_cast<CudaCounters>(dlsym(runtime, "cusim_counters"));
}

// Everything so far, of all kernels together: "launches", "bytes", "sectors", calls of the runtime
// by name, "uploads", and "waits" of the host.
using Counts = std::map<std::string, int64_t>;

inline Counts CountCuda() {
  RankDevice& device = *ValueOrThrow(RankDevices::Current().Get(DeviceType::kCuda));
  Counts counts;
  counts["waits"] = device.stats().host_waits;
  ThrowIfError(device.Synchronize());  // what is queued runs
  const CudaCounters visit = FindCudaCounters();
  if (visit == nullptr) {
    Throw(absl::FailedPreconditionError("the CUDA runtime of this program does not count"));
  }
  const CounterVisitor visitor = {
      &counts,
      [](void* to, const char*, uint64_t launches, uint64_t bytes, uint64_t sectors) {
        Counts& c = *static_cast<Counts*>(to);
        c["launches"] += static_cast<int64_t>(launches);
        c["bytes"] += static_cast<int64_t>(bytes);
        c["sectors"] += static_cast<int64_t>(sectors);
      },
      [](void* to, const char* name, uint64_t value) {
        (*static_cast<Counts*>(to))[name] += static_cast<int64_t>(value);
      }};
  visit(&visitor);
  return counts;
}

// What `fn` adds. The host waits once while it is counted: not counted.
inline Counts CudaCountsOf(const std::function<void()>& fn) {
  const Counts before = CountCuda();
  fn();
  Counts after = CountCuda();
  for (auto& [name, value] : after) {
    const auto was = before.find(name);
    if (was != before.end()) value -= was->second;
  }
  --after["waits"];
  return after;
}

}  // namespace dtensor::testing
