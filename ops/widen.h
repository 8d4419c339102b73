// Narrow types through the kernels of wide ones. 16-bit floats go through f32: inputs are converted
// to f32 in workspace memory and results rounded once, so kernels are written for f32 and f64 only.
#pragma once

#include "tensor/kernel.h"

namespace dtensor {

void RunWidened(const KernelCall& call, KernelFn f32);
// The same for integers and bools through an int64 kernel (bool results: != 0).
void RunAsInt64(const KernelCall& call, KernelFn i64);

// Static: level files must not share inline code. Runs the kernel of the floating type of in[0] (or
// of `which`).
static inline void RunFloating(const KernelCall& call, KernelFn f64, KernelFn f32, int which = 0) {
  switch (call.in[which].dtype) {
    case DType::kF64:
      return f64(call);
    case DType::kF32:
      return f32(call);
    default:
      return RunWidened(call, f32);
  }
}

}  // namespace dtensor
