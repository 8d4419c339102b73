// Products too small for a library: what dnnl_sgemm and cblas_dgemm do before they compute costs
// more than the product.
#pragma once

#include <cstdint>

#include "dtensor/tensor/cpu/level.h"

namespace dtensor {

// C[m, n] = A B, plus C if `accumulate`; C has col stride 1. k at most kSmallGemmDepth.
template <class T>
struct SmallGemmCall {
  int64_t m, n, k;
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t b_row, b_col;
  T* c;
  int64_t c_row;
  bool accumulate;
};
inline constexpr int64_t kSmallGemmDepth = 256;

DT_AT_EACH_CPU_LEVEL(void SmallGemm(const SmallGemmCall<float>&);
                     void SmallGemm(const SmallGemmCall<double>&);)

}  // namespace dtensor
