// Gemm: C = A * B (+ C), the door to oneDNN (f32) and OpenBLAS (f64, fallback).
#pragma once

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// Strides in elements, any for A and B. C must have col stride 1. `accumulate` adds to C.
// Single-threaded. f32 by oneDNN, f64 by OpenBLAS, bf16 by oneDNN where the CPU has units for it,
// else like f16 through f32 blocks; integers by plain loops. By kernels of ours: small products (m
// n k up to 32768 in f32, 1728 in f64, k up to 256), and up to 8 rows times a matrix of f32, bf16
// or f16, which is read once, as it is. m, n, k may be 0 (k = 0 writes zeros unless `accumulate`).
//   Bits:   the same for the same call on the same CPU level. Other sizes, strides or levels may
//           add in another order: small products go through k in order, with one rounding per term
//           at v3 and v4. One of up to 8 rows has the bits that it has alone. 16-bit floats are
//           summed in f32 and rounded once.
//   Memory: at most 6 MiB for f16, for bf16 what oneDNN reorders its operands in; an operand none
//   of whose strides is 1 is copied. From
//           CurrentAllocator.
//   Errors: throws Error (ResourceExhausted) without memory.
struct GemmCall {
  int64_t m, n, k;
  const void* a;
  int64_t a_row, a_col;
  const void* b;
  int64_t b_row, b_col;
  void* c;
  int64_t c_row;
  DType dtype;
  bool accumulate = false;
};
void Gemm(const GemmCall& call);

// Both libraries have thread pools of their own; a rank is one thread. Before every call of either.
void SetUpMathLibraries();

// oneDNN compiles its kernels of float32 at the first product of a process, which takes 28 ms:
// here, on a thread that has nothing else to do.
void WarmUpGemm();

// Which libraries serve GEMM here, in one line, for start-up messages.
const char* GemmBackend();

}  // namespace dtensor
