// Arrays that are runs of elements: what pointwise kernels take whole.
#pragma once

#include <cstdint>
#include <span>

#include "dtensor/tensor/kernel.h"

namespace dtensor {

// How many elements arrays of equal sizes have, if each of them is a row-major run; else -1.
inline int64_t CommonRun(const TensorRef& array, std::span<const TensorRef> others) {
  int64_t n = 1;
  for (int d = array.ndim - 1; d >= 0; --d) {
    if (array.sizes[d] == 1) continue;
    if (array.strides[d] != n) return -1;
    for (const TensorRef& other : others) {
      if (other.strides[d] != n) return -1;
    }
    n *= array.sizes[d];
  }
  return n;
}

}  // namespace dtensor
