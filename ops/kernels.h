// The CPU kernels of ops/, by family (ops/families.inc).
#pragma once

#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

using AddKernelFn = void (*)(const char* name, KernelFn fn, uint32_t dtypes, KernelLayout layout);

#define DT_LEVEL_KERNELS(name) DT_AT_EACH_CPU_LEVEL(void Register##name(AddKernelFn);)
#define DT_CPU_KERNELS(name) void Register##name##Kernels(AddKernelFn);
#include "dtensor/ops/families.inc"

}  // namespace dtensor
