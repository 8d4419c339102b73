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

#include "rng/draw.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

constexpr int kTile = 256;  // lanes worked on at a time: four words of them stay in the L1 cache

#if defined(__AVX512F__)
constexpr int kWide = 8;
#elif defined(__AVX2__)
constexpr int kWide = 4;
#else
constexpr int kWide = 2;
#endif
// 64-bit lanes that hold 32-bit words. The widening multiply reads the low half only, so the low
// half of a product needs no masking; g++'s own vectorisation over 32-bit lanes is half as fast.
typedef uint64_t Wide __attribute__((vector_size(kWide * 8)));

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

// Words of lanes [start, start + n) of the call, as four arrays; up to 2 * kWide - 1 lanes more are
// written. Even and odd lanes are kept in vectors of their own and interleaved at the end.
static inline void PhiloxTile(const DrawCall& call, int64_t start, int n,
                              uint32_t (*words)[kTile]) {
  Wide iota{};
  for (int j = 0; j < kWide; ++j) iota[j] = 2 * j;
  alignas(64) uint32_t threads[kTile] = {};
  if (call.threads) memcpy(threads, call.threads + start, n * sizeof(uint32_t));
  const uint32_t first = call.first_thread + static_cast<uint32_t>(start);
  for (int i = 0; i < n; i += 2 * kWide) {
    Wide c[2][4];
    if (call.threads) {
      Wide both;
      memcpy(&both, threads + i, sizeof(both));
      c[0][2] = both & 0xFFFFFFFFull;
      c[1][2] = both >> 32;
    } else {
      c[0][2] = iota + static_cast<uint64_t>(first + i);
      c[1][2] = c[0][2] + 1;
    }
    for (int h = 0; h < 2; ++h) {
      c[h][0] = Splat(static_cast<uint32_t>(call.block));
      c[h][1] = Splat(call.block >> 32);
      c[h][3] = Splat(0);
    }
#pragma GCC unroll 10
    for (int r = 0; r < 10; ++r) {
      for (int h = 0; h < 2; ++h) {
        const Wide a = MultiplyLow(c[h][0], kPhiloxM0), b = MultiplyLow(c[h][2], kPhiloxM1);
        c[h][0] = (b >> 32) ^ c[h][1] ^ static_cast<uint64_t>(call.keys.k0[r]);
        c[h][2] = (a >> 32) ^ c[h][3] ^ static_cast<uint64_t>(call.keys.k1[r]);
        c[h][1] = b;
        c[h][3] = a;
      }
    }
    for (int w = 0; w < 4; ++w) {
      const Wide both = (c[0][w] & 0xFFFFFFFFull) | (c[1][w] << 32);
      memcpy(words[w] + i, &both, sizeof(both));
    }
  }
}

}  // namespace
}  // namespace DT_LEVEL_NS
}  // namespace dtensor
