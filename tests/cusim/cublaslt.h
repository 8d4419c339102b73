// What stands behind the opaque descriptors of the cuBLASLt stand-in, and the product itself.
#pragma once

#include <cublasLt.h>

#include <cstdint>
#include <vector>

#include "tests/cusim/runtime.h"

namespace cusim::lt {

// The descriptors may lie in memory of the caller's: they are plain, and know what they are.
struct Layout {
  static constexpr uint32_t kMagic = 0x4c41594f;
  uint32_t magic;
  int32_t type, order, batch;
  uint64_t rows, cols;
  int64_t ld, stride;

  // Vectors that lie in one piece each, and how long they are.
  uint64_t lines() const { return order == CUBLASLT_ORDER_COL ? cols : rows; }
  uint64_t length() const { return order == CUBLASLT_ORDER_COL ? rows : cols; }
  // Where an element lies, in elements.
  int64_t at(uint64_t row, uint64_t col) const {
    return order == CUBLASLT_ORDER_COL ? static_cast<int64_t>(col) * ld + static_cast<int64_t>(row)
                                       : static_cast<int64_t>(row) * ld + static_cast<int64_t>(col);
  }
  bool operator==(const Layout&) const = default;
};
struct Product {
  static constexpr uint32_t kMagic = 0x50524f44;
  uint32_t magic;
  int32_t compute, scale, pointer_mode;
  int32_t trans_a, trans_b, trans_c, fill;
  uint32_t epilogue;
  int32_t bias_type, aux_type, sm_count;
  const void* bias;
  int64_t bias_stride;
  void* aux;
  int64_t aux_ld, aux_stride;
};
struct Preference {
  static constexpr uint32_t kMagic = 0x50524546;
  uint32_t magic;
  uint32_t search, reduction, align_a, align_b, align_c, align_d;
  float waves;
  uint64_t workspace, implementations;
};
struct Algo {
  static constexpr uint32_t kMagic = 0x414c474f;
  uint32_t magic;
  uint32_t align_a, align_b, align_c, align_d;
  uint32_t align_bias, align_aux;
  uint64_t workspace;
};
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t));
static_assert(sizeof(Product) <= sizeof(cublasLtMatmulDescOpaque_t));
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t));
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t));

uint64_t SizeOf(int32_t type);  // bytes; 0: no type that is known here

// D = act(alpha op(A) op(B) + beta C + bias), as it is queued.
struct Call {
  Product what;
  Layout a, b, c, d;
  const void *pa, *pb, *pc;
  void* pd;
  double alpha, beta;  // of the host's pointer mode
  const void *device_alpha, *device_beta;
  void* workspace;
  uint64_t workspace_bytes;
  uint64_t m, n, k;
  int device;
};
// Runs it, every access checked.
void Run(Runtime& r, const Call& call, std::vector<Range>* ranges);

}  // namespace cusim::lt
