// Products of matrices as the kernels of matmul.cu and NVIDIA's library take them.
#pragma once

#include "dtensor/tensor/cuda/launch.h"

namespace dtensor::cuda {

struct Matrix {
  void* data;
  int64_t rows, cols, row_stride, col_stride;
};

// c = a b (+ bias, to every row), for every element of a stack. Rows of c lie behind each other.
struct Products {
  Matrix a, b;
  void* c;
  const void* bias = nullptr;
  int64_t bias_stride = 0;
  DType dtype;
};

// By cuBLASLt, without copies, where it has these types and layouts: floats of which a row or a
// column is a run. `stack` is of c, a and b, whose first elements are `data`. Sums are in f32
// for f32 and narrower floats, in f64 for f64; DTENSOR_CUDA_TF32=1 lets it round factors of f32 to
// tf32. False where it cannot, or is not there, or DTENSOR_CUDA_BLAS is "own": nothing was queued
// then.
bool MultiplyByLibrary(const KernelCall& call, const Products& p, const Strided<3>& stack,
                       char* const* data);

}  // namespace dtensor::cuda
