// The ten rounds alone, for bench/rng: what the samplers are measured against.
#include "dtensor/rng/kernels/words.h"

namespace dtensor {
namespace DT_LEVEL_NS {

uint64_t BarePhilox(const PhiloxKeys& keys, int64_t blocks) {
  Wide counters[kChains] = {};
  Wide sum{};
  for (int h = 0; h < kChains; ++h) {
    for (int j = 0; j < kWide; ++j) counters[h][j] = static_cast<uint64_t>(h * kWide + j);
  }
  for (int64_t i = 0; i < blocks; i += kChains * kWide) {
    Wide c[kChains][4];
#pragma GCC unroll 4
    for (int h = 0; h < kChains; ++h) {
      c[h][0] = c[h][1] = c[h][3] = Splat(0);
      c[h][2] = counters[h];
      counters[h] += static_cast<uint64_t>(kChains * kWide);
    }
    Rounds(keys, c);
#pragma GCC unroll 4
    for (int h = 0; h < kChains; ++h) sum ^= c[h][0] ^ c[h][1] ^ c[h][2] ^ c[h][3];
  }
  uint64_t total = 0;
  for (int j = 0; j < kWide; ++j) total ^= sum[j];
  return total;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
