// The kernels of the CUDA plugin, by family (families.inc). A kernel is a KernelFn as on the CPU:
// it queues its launches on call.stream, takes scratch memory from call.workspace, writes what it
// finds wrong with its data into call.device->error (launch.h: Complaint), and never waits.
#pragma once

#include "dtensor/tensor/kernel.h"

namespace dtensor::cuda {

using AddKernelFn = void (*)(const char* op, KernelFn fn, uint32_t dtypes, KernelLayout layout);

#define DT_CUDA_KERNELS(name) void Add##name##Kernels(AddKernelFn add);
#include "dtensor/tensor/cuda/families.inc"
#undef DT_CUDA_KERNELS

}  // namespace dtensor::cuda
