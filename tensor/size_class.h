// Sizes in which allocators hand out memory: multiples of 64 up to 4 KiB, then 8 per doubling (at
// most 1/8 wasted).
#pragma once

#include <algorithm>
#include <cstdint>

namespace dtensor {

inline constexpr int kNumSizeClasses = 512;

constexpr int SizeClassOf(int64_t bytes) {
  if (bytes <= 4096) [[likely]]
    return static_cast<int>(static_cast<uint64_t>(bytes + 63) / 64);
  const int log = 63 - __builtin_clzll(static_cast<uint64_t>(bytes - 1));  // 2^log < bytes
  const int eighth = static_cast<int>((bytes - 1) >> (log - 3)) - 8;       // 0..7
  return 65 + (log - 12) * 8 + eighth;
}
constexpr int64_t SizeClassBytes(int size_class) {
  if (size_class <= 64) return std::max<int64_t>(1, size_class) * 64;
  const int log = 12 + (size_class - 65) / 8, eighth = (size_class - 65) % 8;
  return (int64_t{8} + eighth + 1) << (log - 3);
}

}  // namespace dtensor
