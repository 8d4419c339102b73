// Products too small for a library: what dnnl_sgemm and cblas_dgemm do before they compute costs
// more than the product.
#pragma once

#include <cstdint>

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

#define DT_DECLARE_LEVEL(ns)                    \
  namespace ns {                                \
  void SmallGemm(const SmallGemmCall<float>&);  \
  void SmallGemm(const SmallGemmCall<double>&); \
  }
DT_DECLARE_LEVEL(cpu_baseline)
DT_DECLARE_LEVEL(cpu_v3)
DT_DECLARE_LEVEL(cpu_v4)
#undef DT_DECLARE_LEVEL

}  // namespace dtensor
