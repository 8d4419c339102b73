// The device's own work on arrays: the functions copy, fill and reduce of its table.
#pragma once

#include <cuda_runtime.h>

#include "dtensor/tensor/kernel.h"

namespace dtensor::cuda {

// Queued on `stream`, as DeviceTable says; 0, or an error. ReduceArrays takes at most 96 arrays.
int CopyArray(void* stream, const TensorRef* from, const TensorRef* to);
int FillArray(void* stream, const TensorRef* to, const void* value, DType value_dtype);
int ReduceArrays(void* stream, int ins, const TensorRef* in, int outs, const TensorRef* out,
                 int op);

// The first error of this thread's launches since the last call, or `now` where there is none.
int TakeError(cudaError_t now);

}  // namespace dtensor::cuda
