#include "dtensor/tensor/cpu/kernels/row_gemm.h"

#include <cstring>

#include "dtensor/tensor/cpu/kernels/tile.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

using FloatV = V<float>;
constexpr int64_t kWidth = Vector<float>::kWidth;

// A vector of floats from elements as they are stored.
DT_INLINE FloatV Widen(const float* p) { return Load<false>(p, kWidth); }
#if defined(DT_LEVEL_V4)
DT_INLINE FloatV Widen(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
DT_INLINE FloatV Widen(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
#elif defined(DT_LEVEL_V3)
DT_INLINE FloatV Widen(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
DT_INLINE FloatV Widen(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
#else
template <class S>
DT_INLINE FloatV Widen(const S* p) {
  FloatV v;
  for (int64_t i = 0; i < kWidth; ++i) v[i] = ToFloat(p[i]);
  return v;
}
#endif

constexpr int kChains = 2;        // sums per element, which do not wait for each other
constexpr int64_t kAhead = 9216;  // bytes that memory is asked for before it is read (measured)

// b_row is 1: kR rows of a times a column of b, which lies side by side. One column after the
// other, as memory lies: four of them side by side took two to three times as long on a Zen 4.
template <int kR, class S>
DT_INLINE void DotTile(const RowGemmCall& g, const float* a, const S* b, float* c) {
  constexpr int64_t kStep = kChains * kWidth;
  FloatV sum[kR][kChains] = {};
  int64_t k = 0;
  for (; k + kStep <= g.k; k += kStep) {
    for (int h = 0; h < kChains; ++h) {
      // A line of memory per two vectors of 16 bits, or per one; of one or two rows of float32 the
      // processor's own prefetching keeps up.
      if (sizeof(S) == 4 ? kR == 4 : h == 0) {
        __builtin_prefetch(b + k + h * kWidth + kAhead / sizeof(S), 0, /*locality=*/2);
      }
      const FloatV y = Widen(b + k + h * kWidth);
      for (int r = 0; r < kR; ++r) {
        sum[r][h] = MultiplyAdd(Widen(a + r * g.k + k + h * kWidth), y, sum[r][h]);
      }
    }
  }
  for (; k < g.k; k += kWidth) {  // what is left, filled up with zeros
    const int64_t n = g.k - k < kWidth ? g.k - k : kWidth;
    S y[kWidth] = {};
    memcpy(y, b + k, n * sizeof(S));
    for (int r = 0; r < kR; ++r) {
      float x[kWidth] = {};
      memcpy(x, a + r * g.k + k, n * sizeof(float));
      sum[r][0] = MultiplyAdd(Widen(x), Widen(y), sum[r][0]);
    }
  }
  for (int r = 0; r < kR; ++r) {
    const float total = SumLanes(sum[r][0] + sum[r][1]);
    float* to = c + r * g.n;
    *to = g.accumulate ? *to + total : total;
  }
}

template <class S>
DT_INLINE void ByDots(const RowGemmCall& g) {
  for (int64_t j = 0; j < g.n; ++j) {
    const S* b = static_cast<const S*>(g.b) + j * g.b_col;
    int64_t r = 0;
    for (; r + 4 <= g.m; r += 4) DotTile<4>(g, g.a + r * g.k, b, g.c + r * g.n + j);
    for (; r + 2 <= g.m; r += 2) DotTile<2>(g, g.a + r * g.k, b, g.c + r * g.n + j);
    if (r < g.m) DotTile<1>(g, g.a + r * g.k, b, g.c + r * g.n + j);
  }
}

// b_col is 1: kRows rows of b at a time are added to a block of c that stays in the cache.
constexpr int kRows = 4;
constexpr int64_t kBlock = 8192;  // columns: rows are read in long runs

template <class S>
DT_INLINE void AddRow(const RowGemmCall& g, const S* b, int64_t x, int64_t width, float* c) {
  for (int64_t r = 0; r < g.m; ++r) {
    const float by = g.a[r * g.k + x];
    for (int64_t j = 0; j < width; ++j) {
      float y;
      if constexpr (sizeof(S) == sizeof(float)) {
        y = b[j];
      } else {
        y = ToFloat(b[j]);
      }
      c[r * g.n + j] = MultiplyAdd(by, y, c[r * g.n + j]);
    }
  }
}

template <class S>
DT_INLINE void AddRows(const RowGemmCall& g, const S* b, int64_t x, int64_t width, float* c) {
  const int64_t whole = width / kWidth * kWidth;
  for (int64_t j = 0; j < whole; j += kWidth) {
    FloatV y[kRows];
    for (int i = 0; i < kRows; ++i) y[i] = Widen(b + i * g.b_row + j);
    for (int64_t r = 0; r < g.m; ++r) {
      const float* a = g.a + r * g.k + x;
      FloatV sum = Load<false>(c + r * g.n + j, kWidth);
      for (int i = 0; i < kRows; ++i) sum = TileFma(a[i], y[i], sum);
      Store<false>(c + r * g.n + j, sum, kWidth);
    }
  }
  for (int i = 0; i < kRows && whole < width; ++i) {
    AddRow(g, b + i * g.b_row + whole, x + i, width - whole, c + whole);
  }
}

template <class S>
DT_INLINE void ByRows(const RowGemmCall& g) {
  for (int64_t j = 0; j < g.n; j += kBlock) {
    const int64_t width = g.n - j < kBlock ? g.n - j : kBlock;
    const S* b = static_cast<const S*>(g.b) + j;
    float* c = g.c + j;
    for (int64_t r = 0; r < g.m && !g.accumulate; ++r)
      memset(c + r * g.n, 0, width * sizeof(float));
    int64_t x = 0;
    for (; x + kRows <= g.k; x += kRows) AddRows(g, b + x * g.b_row, x, width, c);
    for (; x < g.k; ++x) AddRow(g, b + x * g.b_row, x, width, c);
  }
}

template <class S>
void Multiply(const RowGemmCall& g) {
  if (g.b_col == 1) {
    ByRows<S>(g);
  } else {
    ByDots<S>(g);
  }
}

}  // namespace

void RowGemm(const RowGemmCall& g) {
  switch (g.dtype) {
    case DType::kBF16:
      return Multiply<BFloat16>(g);
    case DType::kF16:
      return Multiply<Half>(g);
    default:
      return Multiply<float>(g);
  }
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
