// The ten rounds alone, for bench/rng: what the samplers are measured against.
#include "rng/kernels/words.h"

namespace dtensor {
namespace DT_LEVEL_NS {

uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks) {
  // Four independent chains hide the latency of the multiplications.
  Wide c[4][4] = {};
  Wide sum{};
  for (int h = 0; h < 4; ++h) {
    for (int j = 0; j < kWide; ++j) c[h][2][j] = static_cast<uint64_t>(h * kWide + j);
  }
  for (int64_t i = 0; i < blocks; i += 4 * kWide) {
    Wide s[4][4];
    for (int h = 0; h < 4; ++h) {
      for (int w = 0; w < 4; ++w) s[h][w] = c[h][w];
      c[h][2] += static_cast<uint64_t>(4 * kWide);
    }
#pragma GCC unroll 10
    for (int r = 0; r < 10; ++r) {
      for (int h = 0; h < 4; ++h) {
        const Wide a = MultiplyLow(s[h][0], kPhiloxM0), b = MultiplyLow(s[h][2], kPhiloxM1);
        s[h][0] = (b >> 32) ^ s[h][1] ^ static_cast<uint64_t>(keys.k0[r]);
        s[h][2] = (a >> 32) ^ s[h][3] ^ static_cast<uint64_t>(keys.k1[r]);
        s[h][1] = b;
        s[h][3] = a;
      }
    }
    for (int h = 0; h < 4; ++h) sum ^= s[h][0] ^ s[h][1] ^ s[h][2] ^ s[h][3];
  }
  uint64_t total = 0;
  for (int j = 0; j < kWide; ++j) total ^= sum[j];
  return total;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
