// Registration of everything that ships, once per process. No static initialisers.
#include <mutex>

#include "dtensor/ops/kernels.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/cpu/level.h"

namespace dtensor {
namespace {

void AddCpu(const char* name, KernelFn fn, uint32_t dtypes, KernelLayout layout) {
  RegisterKernel(name, DeviceType::kCpu, {fn, dtypes, layout});
}

}  // namespace

#define DT_OP_FAMILY(name) void Register##name##Ops();
#include "dtensor/ops/families.inc"

void RegisterOps() {
  static std::once_flag once;
  std::call_once(once, [] {
    const CpuLevel level = ActiveCpuLevel();
#define DT_LEVEL_KERNELS(name) DT_AT_CPU_LEVEL(level, Register##name(AddCpu));
#define DT_CPU_KERNELS(name) Register##name##Kernels(AddCpu);
#define DT_OP_FAMILY(name) Register##name##Ops();
#include "dtensor/ops/families.inc"
  });
}

}  // namespace dtensor
