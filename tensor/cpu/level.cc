#include "dtensor/tensor/cpu/level.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

namespace dtensor {
namespace {

CpuLevel Supported() {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("f16c");
  if (!v3) return CpuLevel::kBaseline;
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return v4 ? CpuLevel::kV4 : CpuLevel::kV3;
}

CpuLevel Choose() {
  const CpuLevel supported = Supported();
  const char* wish = std::getenv("DTENSOR_CPU_LEVEL");
  if (wish == nullptr || *wish == '\0') return supported;
  for (CpuLevel level : {CpuLevel::kBaseline, CpuLevel::kV3, CpuLevel::kV4}) {
    if (std::strcmp(wish, Name(level)) == 0) return level < supported ? level : supported;
  }
  std::fprintf(stderr, "DTENSOR_CPU_LEVEL=%s is unknown; use baseline, v3 or v4\n", wish);
  std::exit(2);
}

}  // namespace

CpuLevel ActiveCpuLevel() {
  static const CpuLevel level = Choose();
  return level;
}

const char* Name(CpuLevel level) {
  constexpr const char* kNames[] = {"baseline", "v3", "v4"};
  return kNames[static_cast<int>(level)];
}

}  // namespace dtensor
