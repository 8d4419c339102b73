// Scramble, HashMix: 64-bit hashing that is the same in every process, unlike absl::Hash, because
// hashes of meshes, specs and calls are compared between ranks.
#pragma once

#include <cstdint>
#include <string_view>

namespace dtensor {

// A bijection that looks random (SplitMix64's finalizer).
inline uint64_t Scramble(uint64_t v) {
  v = (v ^ (v >> 30)) * 0xBF58476D1CE4E5B9ull;
  v = (v ^ (v >> 27)) * 0x94D049BB133111EBull;
  return v ^ (v >> 31);
}

// Not symmetric: HashMix(1, 0) differs from HashMix(0, 1), so lists of small numbers differ too.
inline uint64_t HashMix(uint64_t h, uint64_t v) {
  return Scramble((h * 0x9E3779B97F4A7C15ull ^ v) + 0x9E3779B97F4A7C15ull);
}

template <class Range>
uint64_t HashRange(uint64_t h, const Range& values) {
  for (auto v : values) h = HashMix(h, static_cast<uint64_t>(v));
  return HashMix(h, values.size());
}

}  // namespace dtensor
