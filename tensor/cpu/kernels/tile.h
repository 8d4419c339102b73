// Register tiles of a matrix product, for the kernels that are compiled once per CPU level: C = A B
// in tiles of a few rows by two vectors. Each element is summed over k in order, with one rounding
// per term where the level has the instruction: its bits depend on its row of A and its column of
// B alone, not on what is computed beside it.
#pragma once

#include <cstdint>

#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
#include <immintrin.h>
#endif

namespace dtensor {
namespace DT_LEVEL_NS {

#define DT_INLINE static inline __attribute__((always_inline))

// A vector of the level, and loads and stores of its first `n` elements only: columns that do not
// fill one need neither a copy nor a loop.
#if defined(DT_LEVEL_V4)
static constexpr int kVectorBytes = 64;
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
static constexpr int kVectorBytes = 32;
alignas(32) static constexpr int32_t kFirst[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
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
static constexpr int kVectorBytes = 16;
#endif

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

// Of all elements of a vector, in a fixed order. The largest is undefined where one is NaN.
#if defined(DT_LEVEL_V3) || defined(DT_LEVEL_V4)
DT_INLINE float SumLanes(__m256 v) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
DT_INLINE double SumLanes(__m256d v) { return (v[0] + v[2]) + (v[1] + v[3]); }
DT_INLINE float MaxLanes(__m256 v) {
  const __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
DT_INLINE double MaxLanes(__m256d v) {
  const double a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
#if defined(DT_LEVEL_V4)
// By shuffles: GCC 12 warns inside its own header of _mm512_castps512_ps256.
DT_INLINE __m256 LowerHalf(__m512 v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7);
}
DT_INLINE __m256d LowerHalf(__m512d v) { return __builtin_shufflevector(v, v, 0, 1, 2, 3); }
DT_INLINE __m256 UpperHalf(__m512 v) {
  return __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
}
DT_INLINE __m256d UpperHalf(__m512d v) { return __builtin_shufflevector(v, v, 4, 5, 6, 7); }
DT_INLINE float SumLanes(__m512 v) { return SumLanes(LowerHalf(v) + UpperHalf(v)); }
DT_INLINE double SumLanes(__m512d v) { return SumLanes(LowerHalf(v) + UpperHalf(v)); }
DT_INLINE float MaxLanes(__m512 v) { return MaxLanes(_mm256_max_ps(LowerHalf(v), UpperHalf(v))); }
DT_INLINE double MaxLanes(__m512d v) { return MaxLanes(_mm256_max_pd(LowerHalf(v), UpperHalf(v))); }
#endif
#else
DT_INLINE float SumLanes(V<float> v) { return (v[0] + v[2]) + (v[1] + v[3]); }
DT_INLINE double SumLanes(V<double> v) { return v[0] + v[1]; }
DT_INLINE float MaxLanes(V<float> v) {
  const float a = v[0] > v[1] ? v[0] : v[1], b = v[2] > v[3] ? v[2] : v[3];
  return a > b ? a : b;
}
DT_INLINE double MaxLanes(V<double> v) { return v[0] > v[1] ? v[0] : v[1]; }
#endif

// The larger of each two elements; of NaN in `a`, that of `b`. (GCC 12 makes two instructions of
// the comparison; of AVX-512's intrinsic it warns inside its own header.)
#if defined(DT_LEVEL_V3)
DT_INLINE __m256 Larger(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
DT_INLINE __m256d Larger(__m256d a, __m256d b) { return _mm256_max_pd(a, b); }
#else
template <class Vec>
DT_INLINE Vec Larger(Vec a, Vec b) {
  return a > b ? a : b;
}
#endif

// a * b + c of every element.
#if defined(DT_LEVEL_V4)
DT_INLINE __m512 TileFma(float a, __m512 b, __m512 c) {
  return _mm512_fmadd_ps(_mm512_set1_ps(a), b, c);
}
DT_INLINE __m512d TileFma(double a, __m512d b, __m512d c) {
  return _mm512_fmadd_pd(_mm512_set1_pd(a), b, c);
}
static constexpr int kTileRows = 12;  // with which the sums of two vectors fill the registers
#elif defined(DT_LEVEL_V3)
DT_INLINE __m256 TileFma(float a, __m256 b, __m256 c) {
  return _mm256_fmadd_ps(_mm256_set1_ps(a), b, c);
}
DT_INLINE __m256d TileFma(double a, __m256d b, __m256d c) {
  return _mm256_fmadd_pd(_mm256_set1_pd(a), b, c);
}
static constexpr int kTileRows = 6;
#else
template <class T>
DT_INLINE V<T> TileFma(T a, V<T> b, V<T> c) {
  return a * b + c;
}
static constexpr int kTileRows = 4;
#endif
// The same of vectors.
DT_INLINE V<float> MultiplyAdd(V<float> a, V<float> b, V<float> c) {
#if defined(DT_LEVEL_V4)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(DT_LEVEL_V3)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}
DT_INLINE float MultiplyAdd(float a, float b, float c) {
#if defined(DT_LEVEL_V4) || defined(DT_LEVEL_V3)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

static constexpr int kTileVectors = 2;  // of columns

template <class T>
static constexpr int64_t kTileCols = kTileVectors * Vector<T>::kWidth;

// C[m, n] = A B, plus C if `accumulate`. Columns of B and C lie side by side.
template <class T>
struct TileCall {
  int64_t m, n, k;
  const T* a;
  int64_t a_row, a_col;
  const T* b;
  int64_t b_row;
  T* c;
  int64_t c_row;
  bool accumulate;
};

// kR rows of C and kN vectors of its columns, the last of which has `last` elements if kPart.
// kARow: a_row where it is known, else 0.
template <int kR, int kN, bool kPart, int64_t kARow, class T>
DT_INLINE void Tile(const TileCall<T>& g, const T* a, const T* b, T* c, int64_t last) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  const int64_t a_row = kARow != 0 ? kARow : g.a_row;
  V<T> sum[kR][kN] = {};
  for (int64_t k = 0; k < g.k; ++k, b += g.b_row, a += g.a_col) {
    V<T> column[kN];
    for (int v = 0; v + 1 < kN; ++v) column[v] = Load<false>(b + v * kWidth, kWidth);
    column[kN - 1] = Load<kPart>(b + (kN - 1) * kWidth, last);
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < kN; ++v) sum[r][v] = TileFma(a[r * a_row], column[v], sum[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r, c += g.c_row) {
#pragma GCC unroll 2
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

template <int kRows, int kN, bool kPart, int64_t kARow, class T>
DT_INLINE void TileColumns(const TileCall<T>& g, const T* b, T* c, int64_t last) {
  const int64_t a_row = kARow != 0 ? kARow : g.a_row;
  const T* a = g.a;
  int64_t rows = g.m;
  for (; rows >= kRows; rows -= kRows, a += kRows * a_row, c += kRows * g.c_row) {
    Tile<kRows, kN, kPart, kARow>(g, a, b, c, last);
  }
  for (; kRows > 4 && rows >= 4; rows -= 4, a += 4 * a_row, c += 4 * g.c_row) {
    Tile<4, kN, kPart, kARow>(g, a, b, c, last);
  }
  if (rows >= 2) {
    Tile<2, kN, kPart, kARow>(g, a, b, c, last);
    rows -= 2, a += 2 * a_row, c += 2 * g.c_row;
  }
  if (rows > 0) Tile<1, kN, kPart, kARow>(g, a, b, c, last);
}

// The columns [0, width) of a call, at most kTileCols.
template <int kRows, int64_t kARow, class T>
DT_INLINE void TilePanel(const TileCall<T>& g, const T* b, T* c, int64_t width) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  if (width == kTileCols<T>) {
    TileColumns<kRows, 2, false, kARow>(g, b, c, kWidth);
  } else if (width > kWidth) {
    TileColumns<kRows, 2, true, kARow>(g, b, c, width - kWidth);
  } else if (width == kWidth) {
    TileColumns<kRows, 1, false, kARow>(g, b, c, kWidth);
  } else {
    TileColumns<kRows, 1, true, kARow>(g, b, c, width);
  }
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
