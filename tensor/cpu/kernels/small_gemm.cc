#include "dtensor/tensor/cpu/kernels/small_gemm.h"

#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
#include <immintrin.h>
#endif

// One rounding per product and sum where the level has the instruction, as the libraries do it.
#pragma GCC optimize("fp-contract=fast")

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

#define DT_INLINE static inline __attribute__((always_inline))

// A vector of the level, and loads and stores of its first `n` elements only: columns that do not
// fill one need neither a copy nor a loop.
#if defined(DT_LEVEL_V4)
constexpr int kVectorBytes = 64;
DT_INLINE __m512 LoadPart(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
DT_INLINE __m512d LoadPart(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1u << n) - 1), p);
}
DT_INLINE void StorePart(float* p, __m512 v, int64_t n) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << n) - 1), v);
}
DT_INLINE void StorePart(double* p, __m512d v, int64_t n) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1u << n) - 1), v);
}
#elif defined(DT_LEVEL_V3)
constexpr int kVectorBytes = 32;
alignas(32) constexpr int32_t kFirst[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
DT_INLINE __m256i FirstOf(int64_t elements_of_4_bytes) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kFirst + 8 - elements_of_4_bytes));
}
DT_INLINE __m256 LoadPart(const float* p, int64_t n) { return _mm256_maskload_ps(p, FirstOf(n)); }
DT_INLINE __m256d LoadPart(const double* p, int64_t n) {
  return _mm256_maskload_pd(p, FirstOf(2 * n));
}
DT_INLINE void StorePart(float* p, __m256 v, int64_t n) { _mm256_maskstore_ps(p, FirstOf(n), v); }
DT_INLINE void StorePart(double* p, __m256d v, int64_t n) {
  _mm256_maskstore_pd(p, FirstOf(2 * n), v);
}
#else
constexpr int kVectorBytes = 16;
#endif

constexpr int kRows = 4;     // of C at a time
constexpr int kVectors = 2;  // of its columns

template <class T>
struct Vector {
  typedef T type __attribute__((vector_size(kVectorBytes)));
  typedef T unaligned __attribute__((vector_size(kVectorBytes), aligned(sizeof(T)), may_alias));
  static constexpr int64_t kWidth = kVectorBytes / static_cast<int64_t>(sizeof(T));
};
template <class T>
using V = typename Vector<T>::type;

#if !defined(DT_LEVEL_V3) && !defined(DT_LEVEL_V4)
template <class T>
DT_INLINE V<T> LoadPart(const T* p, int64_t n) {
  V<T> v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = p[i];
  return v;
}
template <class T>
DT_INLINE void StorePart(T* p, V<T> v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
#endif

// The first `n` elements, which are all of them where kPart is false.
template <bool kPart, class T>
DT_INLINE V<T> Load(const T* p, int64_t n) {
  if constexpr (kPart) return reinterpret_cast<V<T>>(LoadPart(p, n));
  return *reinterpret_cast<const typename Vector<T>::unaligned*>(p);
}
template <bool kPart, class T>
DT_INLINE void Store(T* p, V<T> v, int64_t n) {
  if constexpr (kPart) {
    StorePart(p, v, n);
  } else {
    *reinterpret_cast<typename Vector<T>::unaligned*>(p) = v;
  }
}

// kR rows of C and kN vectors of its columns, the last of which has `last` elements if kPart.
template <int kR, int kN, bool kPart, class T>
DT_INLINE void Tile(const SmallGemmCall<T>& g, const T* a, const T* b, int64_t ldb, T* c,
                    int64_t last) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  V<T> sum[kR][kN] = {};
  for (int64_t k = 0; k < g.k; ++k, b += ldb, a += g.a_col) {
    V<T> column[kN];
    for (int v = 0; v + 1 < kN; ++v) column[v] = Load<false>(b + v * kWidth, kWidth);
    column[kN - 1] = Load<kPart>(b + (kN - 1) * kWidth, last);
    for (int r = 0; r < kR; ++r) {
      for (int v = 0; v < kN; ++v) sum[r][v] += a[r * g.a_row] * column[v];
    }
  }
  for (int r = 0; r < kR; ++r, c += g.c_row) {
    for (int v = 0; v < kN; ++v) {
      T* out = c + v * kWidth;
      if (v + 1 < kN) {
        if (g.accumulate) sum[r][v] += Load<false>(out, kWidth);
        Store<false>(out, sum[r][v], kWidth);
      } else {
        if (g.accumulate) sum[r][v] += Load<kPart>(out, last);
        Store<kPart>(out, sum[r][v], last);
      }
    }
  }
}

template <int kN, bool kPart, class T>
DT_INLINE void Columns(const SmallGemmCall<T>& g, const T* b, int64_t ldb, T* c, int64_t last) {
  const T* a = g.a;
  int64_t rows = g.m;
  for (; rows >= kRows; rows -= kRows, a += kRows * g.a_row, c += kRows * g.c_row) {
    Tile<kRows, kN, kPart>(g, a, b, ldb, c, last);
  }
  if (rows >= 2) {
    Tile<2, kN, kPart>(g, a, b, ldb, c, last);
    rows -= 2, a += 2 * g.a_row, c += 2 * g.c_row;
  }
  if (rows > 0) Tile<1, kN, kPart>(g, a, b, ldb, c, last);
}

template <class T>
DT_INLINE void Product(const SmallGemmCall<T>& g) {
  constexpr int64_t kWidth = Vector<T>::kWidth, kMost = kVectors * kWidth;
  alignas(64) T turned[kSmallGemmDepth * kMost];  // columns of B that do not lie side by side
  for (int64_t j = 0; j < g.n; j += kMost) {
    const int64_t width = g.n - j < kMost ? g.n - j : kMost;
    const T* b = g.b + j * g.b_col;
    int64_t ldb = g.b_row;
    if (g.b_col != 1) {
      for (int64_t k = 0; k < g.k; ++k) {
        for (int64_t x = 0; x < width; ++x) turned[k * kMost + x] = b[k * g.b_row + x * g.b_col];
      }
      b = turned;
      ldb = kMost;
    }
    T* c = g.c + j;
    if (width == kMost) {
      Columns<2, false>(g, b, ldb, c, kWidth);
    } else if (width > kWidth) {
      Columns<2, true>(g, b, ldb, c, width - kWidth);
    } else if (width == kWidth) {
      Columns<1, false>(g, b, ldb, c, kWidth);
    } else {
      Columns<1, true>(g, b, ldb, c, width);
    }
  }
}

}  // namespace

void SmallGemm(const SmallGemmCall<float>& g) { Product(g); }
void SmallGemm(const SmallGemmCall<double>& g) { Product(g); }

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
