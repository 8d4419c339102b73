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

// Whether rows that far apart share the sets of a first-level cache (of 64 lines of 64 bytes a way)
// with most others: one column of them does not stay in it.
template <class T>
static inline bool RowsMeet(int64_t row) {
  return row != 0 && row * static_cast<int64_t>(sizeof(T)) % 1024 == 0;
}

DT_AT_EACH_CPU_LEVEL(void SmallGemm(const SmallGemmCall<float>&);
                     void SmallGemm(const SmallGemmCall<double>&);)

}  // namespace dtensor
