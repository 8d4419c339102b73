// What start:end:step takes of a dim.
#pragma once

#include <algorithm>
#include <cstdint>

namespace dtensor {

struct SliceRange {
  int64_t start, length, step;
};

// As Python clamps it; step >= 1. A step beyond the end takes one element, as any such step does;
// products of it stay small.
inline SliceRange ClampSlice(int64_t size, int64_t start, int64_t end, int64_t step) {
  const auto clamp = [size](int64_t i) {
    return std::clamp<int64_t>(i < 0 ? i + size : i, 0, size);
  };
  const int64_t first = clamp(start), last = clamp(end);
  const int64_t length = last > first ? (last - first - 1) / step + 1 : 0;
  return {first, length, std::min(step, std::max<int64_t>(size, 1))};
}

}  // namespace dtensor
