#include "ops/kernels.h"

#include "tensor/level.h"

namespace dtensor {
namespace {

void AddCpu(const char* name, KernelFn fn, uint32_t dtypes, KernelLayout layout) {
  RegisterKernel(name, DeviceType::kCpu, {fn, dtypes, layout});
}

#define DT_REGISTER_LEVEL(ns)    \
  ns::RegisterPointwise(AddCpu); \
  ns::RegisterReduce(AddCpu);    \
  ns::RegisterSoftmax(AddCpu);   \
  ns::RegisterNorm(AddCpu);      \
  ns::RegisterLoss(AddCpu);      \
  ns::RegisterAttention(AddCpu); \
  ns::RegisterOptim(AddCpu);

}  // namespace

void RegisterKernels() {
  switch (ActiveCpuLevel()) {
    case CpuLevel::kV4:
      DT_REGISTER_LEVEL(cpu_v4) break;
    case CpuLevel::kV3:
      DT_REGISTER_LEVEL(cpu_v3) break;
    case CpuLevel::kBaseline:
      DT_REGISTER_LEVEL(cpu_baseline) break;
  }
  RegisterGemmKernels(AddCpu);
  RegisterCopyKernels(AddCpu);
  RegisterEmbeddingKernels(AddCpu);
  RegisterInitKernels(AddCpu);
}

}  // namespace dtensor
