// Gemm: C = A * B (+ C), the one door to oneDNN (f32, bf16) and OpenBLAS (f64, fallback).
#pragma once

#include "tensor/kernel.h"

namespace dtensor {

// Strides in elements; any of the two strides of A, B may be the unit one. C must have
// col stride 1. `accumulate` adds to C. Single-threaded. f32 by oneDNN, f64 by OpenBLAS; bf16 and
// f16 through f32 blocks; integers by plain loops.
//   Errors: none; m, n, k may be 0 (k = 0 writes zeros unless `accumulate`).
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

// Which libraries serve GEMM here, in one line, for start-up messages.
const char* GemmBackend();

}  // namespace dtensor
