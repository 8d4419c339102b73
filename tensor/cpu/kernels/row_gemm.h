// Few rows times a large matrix: the matrix is read once, where it is, in the order of its memory,
// and widened in registers. What a step of generation is made of.
#pragma once

#include <cstdint>

#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

// c[m, n] = a[m, k] b, plus c if `accumulate`; a and c are float32 and row-major. b[x, j] is at
// b + x * b_row + j * b_col in elements of `dtype` (kF32, kBF16, kF16); b_row or b_col is 1.
// Nothing is empty.
//   Bits: those of a row do not depend on m, those of an element not on n.
struct RowGemmCall {
  int64_t m, n, k;
  const float* a;
  const void* b;
  int64_t b_row, b_col;
  DType dtype;
  float* c;
  bool accumulate;
};

DT_AT_EACH_CPU_LEVEL(void RowGemm(const RowGemmCall&);)

}  // namespace dtensor
