// Draw: the CPU kernels that turn Philox blocks into the values of a random op, one set per CPU
// level. No Abseil: included by the per-level kernel files.
#pragma once

#include "dtensor/rng/philox.h"
#include "dtensor/rng/values.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

// Random ops of the generic sampler (rng/planner.h). A new kind needs its sampler in values.h,
// a case of FindDraw in rng/kernels/draw.cc, a case of RandomUnroll in planner.cc and its checks in
// check.cc.
enum class RandomKind : uint8_t {
  kUniform,
  kNormal,
  kWords32,    // from + word mod range
  kWords64,    // the same of 64-bit words; range 0 stands for 2^64
  kBernoulli,  // 1 where u < a
  kExponential,
  kCauchy,
  kLogNormal,
  kGeometric,
};

inline constexpr int kMaxUnroll = 4;
inline constexpr int kRunUnit = 16;

// Consecutive (or listed) threads of one op at one call of its sampler. Component c of the block of
// lane i is written to out[c][i]; components with a null out[c] are skipped.
struct DrawCall : DrawParams {
  PhiloxKeys keys;
  uint64_t block = 0;                 // counter words x, y: offset / 4 + call number
  uint32_t first_thread = 0;          // lane i is thread first_thread + i,
  const uint32_t* threads = nullptr;  // or threads[i] where this is not null,
  int64_t run = 0;                    // or, where this is not 0 but a multiple of kRunUnit, thread
  uint32_t run_step = 0;              // first_thread + i / run * run_step + i % run
  int64_t n = 0;
  void* out[kMaxUnroll] = {};
};
using DrawFn = void (*)(const DrawCall&);

// The kernel of the given level. Null if the kind has none for the dtype.
DrawFn FindDraw(RandomKind kind, DType dtype, CpuLevel level);

// Samplers whose neighbours share a block: lane i writes a group of them to out[0] (rng/dropout.h).
enum class GroupKind : uint8_t {
  kMask2,     // bools u < a of the words x, y,
  kMask4,     // of all four,
  kMask8,     // of those of `block` and of the block after it
  kUniform4,  // u of all four, float32
};
DrawFn FindGroupDraw(GroupKind kind, CpuLevel level);

// For benchmarks: the rounds of about `blocks` Philox blocks with the widest vectors of the level,
// nothing stored. The result depends on all of them.
uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks, CpuLevel level);

}  // namespace dtensor
