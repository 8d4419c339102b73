// Kernels for less than what comes: 16-bit floats through f32 kernels, strided arrays through
// contiguous ones.
//
// 16-bit floats: inputs are converted to f32 in workspace memory and results
// rounded once, so kernels are written for f32 and f64 only.
#pragma once

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// Operands that a kernel converts by itself, a few rows at a time (wide_rows.h): bit i is number i.
struct RowOperands {
  uint32_t in = 0, out = 0;
};
void RunWidened(const KernelCall& call, KernelFn f32, RowOperands left = {});
// The same for kernels of runs of elements, whose row-major operands all have one number of them:
// in pieces that stay in the cache. Outputs may be inputs.
void RunWidenedPieces(const KernelCall& call, KernelFn f32);
// Elements [start, start + n) of a row-major array of 16-bit floats as f32, and back (rounded).
void Widen(const TensorRef& from, int64_t start, int64_t n, float* to);
void Narrow(const float* from, int64_t n, const TensorRef& to, int64_t start);
// Strided operands go through contiguous copies in workspace memory, outputs and back.
void RunContiguous(const KernelCall& call, KernelFn contiguous);

// Static: level files must not share inline code. Runs the kernel of the floating type of in[0] (or
// of `which`).
static inline void RunFloating(const KernelCall& call, KernelFn f64, KernelFn f32, int which = 0,
                               RowOperands left = {}) {
  switch (call.in[which].dtype) {
    case DType::kF64:
      return f64(call);
    case DType::kF32:
      return f32(call);
    default:
      return RunWidened(call, f32, left);
  }
}

}  // namespace dtensor
