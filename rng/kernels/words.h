// Philox over many threads at once. Included by the per-level kernel files only: everything has
// internal linkage.
#pragma once

// g++ 12 warns about the deliberately undefined operands inside this header (GCC bug 105593).
#pragma GCC diagnostic push
#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop

#include "dtensor/rng/draw.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

constexpr int kTile = 256;  // lanes worked on at a time: four words of them stay in the L1 cache

// Independent chains of rounds that hide the latency of the multiplications, as many as the
// registers of the level hold.
#if defined(__AVX512F__)
constexpr int kWide = 8, kChains = 4;
#elif defined(__AVX2__)
constexpr int kWide = 4, kChains = 2;
#else
constexpr int kWide = 2, kChains = 2;
#endif
// 64-bit lanes that hold 32-bit words. The widening multiply reads the low half only, so the low
// half of a product needs no masking; g++'s own vectorisation over 32-bit lanes is half as fast.
typedef uint64_t Wide __attribute__((vector_size(kWide * 8)));
typedef uint32_t WordVector __attribute__((vector_size(kWide * 8)));
typedef float FloatVector __attribute__((vector_size(kWide * 8)));
constexpr int kVector = 2 * kWide;            // words in one
constexpr int kStep = kChains / 2 * kVector;  // lanes per turn of the loop; divides kTile

static inline Wide MultiplyLow(Wide a, uint32_t m) {
#if defined(__AVX512F__)
  return (Wide)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(m));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(m));
#else
  return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(m));
#endif
}

static inline Wide Splat(uint64_t v) { return Wide{} + v; }

// The low halves of two vectors of lanes, in turn.
static inline WordVector Interleave(Wide even, Wide odd) {
#if defined(__AVX512F__)
  return (WordVector)_mm512_mask_shuffle_epi32((__m512i)even, 0xAAAA, (__m512i)odd, _MM_PERM_CCAA);
#else
  return (WordVector)((even & 0xFFFFFFFFull) | (odd << 32));
#endif
}

// The ten rounds of kChains vectors of counters.
static inline __attribute__((always_inline)) void Rounds(const PhiloxKeys& keys, Wide (*c)[4]) {
#pragma GCC unroll 10
  for (int r = 0; r < 10; ++r) {
#pragma GCC unroll 4
    for (int h = 0; h < kChains; ++h) {
      const Wide a = MultiplyLow(c[h][0], kPhiloxM0), b = MultiplyLow(c[h][2], kPhiloxM1);
      c[h][0] = (b >> 32) ^ c[h][1] ^ static_cast<uint64_t>(keys.k0[r]);
      c[h][2] = (a >> 32) ^ c[h][3] ^ static_cast<uint64_t>(keys.k1[r]);
      c[h][1] = b;
      c[h][3] = a;
    }
  }
}

// The words of lanes [start, start + n), n <= kTile, of the call: take(w, i, v) gets word w of
// lanes start + i to start + i + kVector, each i once. n is rounded up to a multiple of kStep; what
// comes beyond belongs to nothing. Even and odd lanes have chains of their own.
template <class Take>
static inline __attribute__((always_inline)) void PhiloxLanes(const DrawCall& call, int64_t start,
                                                              int n, const Take& take) {
  Wide iota{};
  for (int j = 0; j < kWide; ++j) iota[j] = 2 * j;
  alignas(64) uint32_t threads[kTile];
  if (call.threads) {
    memcpy(threads, call.threads + start, n * sizeof(uint32_t));
    for (int i = n; i < kTile && i % kStep != 0; ++i) threads[i] = 0;
  }
  static_assert(kRunUnit % kVector == 0);
  const int64_t run = call.run != 0 ? call.run : INT64_MAX;
  int64_t left = run - start % run;  // lanes of the present run
  uint32_t thread = call.first_thread + static_cast<uint32_t>(start / run) * call.run_step +
                    static_cast<uint32_t>(start % run);
  const Wide low = Splat(static_cast<uint32_t>(call.block)), high = Splat(call.block >> 32);
  for (int i = 0; i < n; i += kStep) {
    Wide c[kChains][4];
#pragma GCC unroll 4
    for (int h = 0; h < kChains; ++h) {
      c[h][0] = low;
      c[h][1] = high;
      c[h][3] = Splat(0);
    }
#pragma GCC unroll 2
    for (int h = 0; h < kChains; h += 2) {
      const int lane = i + h / 2 * kVector;
      if (call.threads) {
        Wide both;
        memcpy(&both, threads + lane, sizeof(both));
        c[h][2] = both & 0xFFFFFFFFull;
        c[h + 1][2] = both >> 32;
      } else {
        c[h][2] = iota + static_cast<uint64_t>(thread);
        c[h + 1][2] = c[h][2] + 1;
        thread += kVector;
        if ((left -= kVector) == 0) {
          thread += call.run_step - static_cast<uint32_t>(run);
          left = run;
        }
      }
    }
    Rounds(call.keys, c);
#pragma GCC unroll 2
    for (int h = 0; h < kChains; h += 2) {
#pragma GCC unroll 4
      for (int w = 0; w < 4; ++w) take(w, i + h / 2 * kVector, Interleave(c[h][w], c[h + 1][w]));
    }
  }
}

// The same as four arrays.
static inline void PhiloxTile(const DrawCall& call, int64_t start, int n,
                              uint32_t (*words)[kTile]) {
  PhiloxLanes(call, start, n,
              [=](int w, int i, WordVector v) { memcpy(words[w] + i, &v, sizeof(v)); });
}

#if defined(__AVX512F__)
constexpr bool kVectorFma = true;
static inline FloatVector FmaVector(FloatVector a, FloatVector b, FloatVector c) {
  return (FloatVector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#elif defined(__FMA__)
constexpr bool kVectorFma = true;
static inline FloatVector FmaVector(FloatVector a, FloatVector b, FloatVector c) {
  return (FloatVector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
constexpr bool kVectorFma = false;  // only where the fma is a product
static inline FloatVector FmaVector(FloatVector a, FloatVector b, FloatVector) { return a * b; }
#endif

// UniformFloat of rng/philox.h, the same bits.
static inline FloatVector UniformVector(WordVector x) {
#if defined(__AVX512F__)
  const FloatVector f = (FloatVector)_mm512_cvtepu32_ps((__m512i)x);
#else
  typedef int32_t IntVector __attribute__((vector_size(kWide * 8)));
  const FloatVector f = __builtin_convertvector((IntVector)(x >> 16), FloatVector) * 65536.0f +
                        __builtin_convertvector((IntVector)(x & 0xFFFFu), FloatVector);
#endif
  return f * 0x1p-32f + 0x1p-33f;
}

}  // namespace
}  // namespace DT_LEVEL_NS
}  // namespace dtensor
