// The CPU kernels of ops/: families compiled once per CPU level (ops/kernels/*.cc), and those built
// on GEMM and copies, which need no level.
#pragma once

#include "tensor/kernel.h"

namespace dtensor {

using AddKernelFn = void (*)(const char* name, KernelFn fn, uint32_t dtypes, KernelLayout layout);

#define DT_LEVEL_KERNELS(ns)           \
  namespace ns {                       \
  void RegisterPointwise(AddKernelFn); \
  void RegisterReduce(AddKernelFn);    \
  void RegisterSoftmax(AddKernelFn);   \
  void RegisterNorm(AddKernelFn);      \
  void RegisterLoss(AddKernelFn);      \
  void RegisterAttention(AddKernelFn); \
  void RegisterOptim(AddKernelFn);     \
  }
DT_LEVEL_KERNELS(cpu_baseline)
DT_LEVEL_KERNELS(cpu_v3)
DT_LEVEL_KERNELS(cpu_v4)
#undef DT_LEVEL_KERNELS
void RegisterGemmKernels(AddKernelFn);
void RegisterCopyKernels(AddKernelFn);
void RegisterEmbeddingKernels(AddKernelFn);
void RegisterInitKernels(AddKernelFn);

// Registers all of them for the CPU, at the active level. Called once, by RegisterOps.
void RegisterKernels();

}  // namespace dtensor
