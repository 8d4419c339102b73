// The far device: a device in this process that is as unforgiving as one can be, for tests.
//
// Its memory cannot be read by the host: a PROT_NONE range, which kernels see through a second
// mapping. Its streams are lazy: queued work runs when something waits for it, in an order that a
// seed picks among all that the streams and events allow. Its kernels are those of the CPU. Every
// access of queued work is checked against all that came before (vector clocks over byte ranges):
// two that are not ordered, memory that was freed, host memory given to a kernel. So code that
// touches memory itself, or forgets to order or to wait, crashes or is reported at once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dtensor/tensor/device_table.h"

namespace dtensor::testing {

// The table; its devices are named "far".
const DeviceTable* FarDevice();
// RegisterDevice(DeviceType::kCustom, FarDevice()).
void RegisterFarDevice();

// Order of what is unordered. 0: as late as possible, oldest first; else random, and now and then
// early. Default: DTENSOR_FAR_SEED, else 1.
void SeedFarDevice(uint64_t seed);

struct FarStats {
  int64_t queued = 0;    // kernels, copies, fills, reductions and moves
  int64_t kernels = 0;   // of these
  int64_t segments = 0;  // taken so far
  int64_t left = 0;      // queued and not done yet
};
FarStats GetFarStats();

// The n-th segment from now on (0: the next) is refused, once.
void FailFarSegment(int64_t n);

// A report ends the program, unless a FarReports scope collects them.
class FarReports {
 public:
  FarReports();
  ~FarReports();
  FarReports(const FarReports&) = delete;
  // What was reported since; runs all that is queued first.
  std::vector<std::string> Take();
};

}  // namespace dtensor::testing
