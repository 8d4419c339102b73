#include "dtensor/tensor/cpu/kernels/small_gemm.h"

#include "dtensor/tensor/cpu/kernels/tile.h"
#include "dtensor/tensor/cpu/kernels/turn.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

constexpr int kRows = 4;  // of C at a time: more do not pay where there are few

template <class T>
DT_INLINE void Product(const SmallGemmCall<T>& g) {
  constexpr int64_t kMost = kTileCols<T>;
  alignas(64) T packed[kSmallGemmDepth * kMost];
  TileCall<T> tile = {g.m,     g.n,     g.k,     g.a,     g.a_row,     g.a_col,
                      nullptr, g.b_row, nullptr, g.c_row, g.accumulate};
  // Columns of B that do not lie side by side are copied, and rows that meet in few lines of the
  // cache.
  const bool pack = g.b_col != 1 || (g.m > kRows && RowsMeet<T>(g.b_row));
  if (pack) tile.b_row = kMost;
  for (int64_t j = 0; j < g.n; j += kMost) {
    const int64_t width = g.n - j < kMost ? g.n - j : kMost;
    const T* b = g.b + j * g.b_col;
    if (pack && g.b_col == 1 && width == kMost) {
      for (int64_t k = 0; k < g.k; ++k) {
        __builtin_memcpy(packed + k * kMost, b + k * g.b_row, kMost * sizeof(T));
      }
      b = packed;
    } else if (pack && g.b_row == 1) {
      Turn(b, g.b_col, width, g.k, packed, kMost);
      b = packed;
    } else if (pack) {
      for (int64_t k = 0; k < g.k; ++k) {
        for (int64_t x = 0; x < width; ++x) packed[k * kMost + x] = b[k * g.b_row + x * g.b_col];
      }
      b = packed;
    }
    TilePanel<kRows, 0>(tile, b, g.c + j, width);
  }
}

}  // namespace

void SmallGemm(const SmallGemmCall<float>& g) { Product(g); }
void SmallGemm(const SmallGemmCall<double>& g) { Product(g); }

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
