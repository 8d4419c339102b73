// Products of matrices as the kernels of matmul.cu and NVIDIA's library take them.
#pragma once

#include <optional>

#include "dtensor/ops/matmul/activation.h"
#include "dtensor/tensor/cuda/launch.h"

namespace dtensor::cuda {

struct Matrix {
  void* data;
  int64_t rows, cols, row_stride, col_stride;
};

// c = a b (+ bias, to every row), for every element of a stack. Rows of c lie behind each other.
// With an activation, of one product: c is that of it, and the product itself goes to `kept`,
// unless that is null.
struct Products {
  Matrix a, b;
  void* c;
  const void* bias = nullptr;
  int64_t bias_stride = 0;
  DType dtype;
  std::optional<Activation> activation = {};
  void* kept = nullptr;
};

// By cuBLASLt, without copies, where it has these types and layouts: floats of which a row or a
// column is a run. `stack` is of c, a and b, whose first elements are `data`. Sums are in f32
// for f32 and narrower floats, in f64 for f64; DTENSOR_CUDA_TF32=1 lets it round factors of f32 to
// tf32. Of activations it has gelu by tanh, which keeps the product only if its rows are 8 elements
// or a multiple, and relu, which does not; no f64. False where it cannot, or is not there, or
// DTENSOR_CUDA_BLAS is "own": nothing was queued then.
bool MultiplyByLibrary(const KernelCall& call, const Products& p, const Strided<3>& stack,
                       char* const* data);

// The plugin's kernel of an op that has one (device.cu), for a kernel that ends with it.
KernelFn KernelOf(const char* op);

}  // namespace dtensor::cuda
