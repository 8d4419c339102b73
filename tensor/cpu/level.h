// CPU levels: kernel files are compiled once per instruction-set level, each in a namespace of its
// own (DT_LEVEL_NS), and one level is chosen at start.
#pragma once

namespace dtensor {

enum class CpuLevel { kBaseline = 0, kV3 = 1, kV4 = 2 };  // x86-64; AVX2+FMA; AVX-512 (F,BW,DQ,VL)

// The widest level that this CPU and DTENSOR_CPU_LEVEL (baseline | v3 | v4) allow. Fixed at the
// first call. An unknown value of the variable is an error on stderr and ends the process.
CpuLevel ActiveCpuLevel();
const char* Name(CpuLevel level);

}  // namespace dtensor

// A declaration of something that kernel files define once per level.
#define DT_AT_EACH_CPU_LEVEL(...) \
  namespace cpu_baseline {        \
  __VA_ARGS__                     \
  }                               \
  namespace cpu_v3 {              \
  __VA_ARGS__                     \
  }                               \
  namespace cpu_v4 {              \
  __VA_ARGS__                     \
  }
// A call of a function that was declared so, or a name: DT_AT_CPU_LEVEL(level, ReduceRanks(call)).
#define DT_AT_CPU_LEVEL(level, ...)                            \
  ((level) == ::dtensor::CpuLevel::kV4   ? cpu_v4::__VA_ARGS__ \
   : (level) == ::dtensor::CpuLevel::kV3 ? cpu_v3::__VA_ARGS__ \
                                         : cpu_baseline::__VA_ARGS__)
