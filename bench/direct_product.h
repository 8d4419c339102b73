// oneDNN's product called by itself: what products through dispatch are measured against.
#pragma once

#include <dnnl.h>

#include <memory>

#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/onednn.h"

namespace dtensor {

// One call of f32 or bf16, prepared once. Of each operand one stride is 1; its memory outlives
// this.
class DirectProduct {
 public:
  explicit DirectProduct(const GemmCall& call) : g_(call) {
    SetUpMathLibraries();
    if (g_.dtype == DType::kBF16) bf16_ = std::make_unique<Bf16>(g_);
  }
  void operator()() {
    if (bf16_ != nullptr) return bf16_->Run();
    dnnl_sgemm(g_.a_col == 1 ? 'N' : 'T', g_.b_col == 1 ? 'N' : 'T', g_.m, g_.n, g_.k, 1.0f,
               static_cast<const float*>(g_.a), Apart(g_.a_row, g_.a_col),
               static_cast<const float*>(g_.b), Apart(g_.b_row, g_.b_col), 0.0f,
               static_cast<float*>(g_.c), g_.c_row);
  }

 private:
  static int64_t Apart(int64_t row, int64_t col) { return col == 1 ? row : col; }

  struct Bf16 {
    using memory = dnnl::memory;
    explicit Bf16(const GemmCall& g)
        : a({g.m, g.k}, memory::data_type::bf16, memory::dims{g.a_row, g.a_col}),
          b({g.k, g.n}, memory::data_type::bf16, memory::dims{g.b_row, g.b_col}),
          c({g.m, g.n}, memory::data_type::bf16, memory::dims{g.c_row, 1}),
          product(dnnl::matmul::primitive_desc(dnnl::matmul::desc(a, b, c), OneDnnEngine())),
          x(a, OneDnnEngine(), const_cast<void*>(g.a)),
          w(b, OneDnnEngine(), const_cast<void*>(g.b)),
          y(c, OneDnnEngine(), g.c) {}
    void Run() {
      product.execute(stream, {{DNNL_ARG_SRC, x}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, y}});
      stream.wait();
    }
    memory::desc a, b, c;
    dnnl::matmul product;
    memory x, w, y;
    dnnl::stream stream{OneDnnEngine()};
  };

  const GemmCall g_;
  std::unique_ptr<Bf16> bf16_;
};

}  // namespace dtensor
