#include "dtensor/tensor/cpu/bf16_gemm.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/cpu/onednn.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

using dnnl::memory;

struct Product {
  dnnl::matmul primitive;
  memory::desc a, b, c, scratchpad;
};

memory::desc Matrix(int64_t rows, int64_t cols, int64_t row, int64_t col) {
  return {{rows, cols}, memory::data_type::bf16, memory::dims{row, col}};
}

// Whether rows (or columns) lie one after the other: not those of an expanded tensor, or of
// windows.
bool IsApart(int64_t rows, int64_t cols, int64_t row, int64_t col) {
  return (col == 1 && (row >= cols || rows == 1)) || (row == 1 && (col >= rows || cols == 1));
}

// Strides that fit a matrix of one row or column, where any would do. Of an IsApart one.
memory::desc OperandDesc(int64_t rows, int64_t cols, int64_t row, int64_t col) {
  if (col == 1 && (row >= cols || rows == 1)) {
    return Matrix(rows, cols, std::max(row, cols), 1);
  }
  return Matrix(rows, cols, 1, std::max(col, rows));
}

// Null where oneDNN has nothing but its reference loops.
std::unique_ptr<Product> Prepare(const GemmCall& g) {
  auto p = std::make_unique<Product>();
  p->a = OperandDesc(g.m, g.k, g.a_row, g.a_col);
  p->b = OperandDesc(g.k, g.n, g.b_row, g.b_col);
  p->c = Matrix(g.m, g.n, std::max(g.c_row, g.n), 1);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (g.accumulate) {
    dnnl::post_ops ops;
    ops.append_sum(1.0f);
    attributes.set_post_ops(ops);
  }
  try {
    const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(p->a, p->b, p->c), attributes,
                                          OneDnnEngine());
    if (std::strstr(pd.impl_info_str(), "ref") != nullptr) return nullptr;
    p->scratchpad = pd.scratchpad_desc();
    p->primitive = dnnl::matmul(pd);
  } catch (const dnnl::error&) {
    return nullptr;
  }
  return p;
}

const Product* ProductFor(const GemmCall& g) {
  using Key = std::array<int64_t, 9>;
  static thread_local absl::flat_hash_map<Key, std::unique_ptr<Product>> cache;
  const Key key = {g.m, g.n, g.k, g.a_row, g.a_col, g.b_row, g.b_col, g.c_row, g.accumulate};
  const auto found = cache.find(key);
  if (found != cache.end()) return found->second.get();
  if (cache.size() >= 512) cache.clear();
  return (cache[key] = Prepare(g)).get();
}

memory At(const memory::desc& desc, const void* data) {
  return {desc, OneDnnEngine(), const_cast<void*>(data)};
}

}  // namespace

bool HasBf16Units() {
  static const bool has = [] {
    SetUpMathLibraries();
    constexpr auto kBf16 = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
    const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
    return ActiveCpuLevel() == CpuLevel::kV4 && (isa & kBf16) == kBf16;
  }();
  return has;
}

bool TryBf16Gemm(const GemmCall& g) {
  constexpr int64_t kSmall = 32 * 32 * 32;  // not worth the call
  if (g.dtype != DType::kBF16 || g.m * g.n <= kSmall / g.k || !HasBf16Units()) return false;
  if (!IsApart(g.m, g.k, g.a_row, g.a_col) || !IsApart(g.k, g.n, g.b_row, g.b_col)) return false;
  SetUpMathLibraries();
  const Product* p = ProductFor(g);
  if (p == nullptr) return false;
  const Buffer scratch = ValueOrThrow(
      Buffer::Allocate(CurrentAllocator(), static_cast<int64_t>(p->scratchpad.get_size())));
  dnnl::stream stream(OneDnnEngine());
  p->primitive.execute(stream, {{DNNL_ARG_SRC, At(p->a, g.a)},
                                {DNNL_ARG_WEIGHTS, At(p->b, g.b)},
                                {DNNL_ARG_DST, At(p->c, g.c)},
                                {DNNL_ARG_SCRATCHPAD, At(p->scratchpad, scratch.data())}});
  stream.wait();
  return true;
}

}  // namespace dtensor
