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
