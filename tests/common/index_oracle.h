// Test support: which elements of a tensor a rank holds, found element by element, without the
// interval code that it is to check.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "dtensor/mesh/placement.h"
#include "dtensor/tensor/shape.h"

namespace dtensor::testing {

// Local shape and, in row-major order, the global row-major numbers of the local elements.
struct Held {
  Shape shape;
  std::vector<int64_t> ids;
};

// torch.chunk: the coordinate that position `at` of `size` falls to.
inline int64_t ChunkOf(int64_t at, int64_t size, int64_t unit, int64_t n) {
  const int64_t units = (size + unit - 1) / unit, chunk = (units + n - 1) / n;
  return at / unit / chunk;
}

inline int64_t OwnerOf(const Placement& p, int64_t at, int64_t size, int64_t n) {
  if (p.is_shard()) return ChunkOf(at, size, p.unit(), n);
  int64_t start = 0;
  for (const Segment& segment : p.segments()) {
    if (at < start + segment.size) return ChunkOf(at - start, segment.size, segment.unit, n);
    start += segment.size;
  }
  return -1;
}

// Placements are applied left to right; flat ones cut what all the others leave. Dims of placements
// are not negative.
inline Held HeldBy(IntSpan mesh_shape, absl::Span<const Placement> placements, IntSpan shape,
                   IntSpan coordinate) {
  Held held{{shape.begin(), shape.end()}, std::vector<int64_t>(Numel(shape))};
  std::iota(held.ids.begin(), held.ids.end(), 0);
  for (size_t m = 0; m < placements.size(); ++m) {
    const Placement& p = placements[m];
    if (!p.is_shard() && !p.is_segmented()) continue;
    int64_t inner = 1;
    for (size_t d = p.dim() + 1; d < held.shape.size(); ++d) inner *= held.shape[d];
    const int64_t size = held.shape[p.dim()];
    int64_t kept = 0;
    for (int64_t at = 0; at < size; ++at) {
      kept += OwnerOf(p, at, size, mesh_shape[m]) == coordinate[m] ? 1 : 0;
    }
    std::vector<int64_t> ids;
    for (size_t i = 0; i < held.ids.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) / inner % size;
      if (OwnerOf(p, at, size, mesh_shape[m]) == coordinate[m]) ids.push_back(held.ids[i]);
    }
    held.ids = std::move(ids);
    held.shape[p.dim()] = kept;
  }
  for (size_t m = 0; m < placements.size(); ++m) {
    const Placement& p = placements[m];
    if (!p.is_flat()) continue;
    int64_t start = 0;
    for (int64_t c = 0; c < coordinate[m]; ++c) start += p.lengths()[c];
    const auto first = held.ids.begin() + start;
    held.ids = std::vector<int64_t>(first, first + p.lengths()[coordinate[m]]);
    held.shape = {static_cast<int64_t>(held.ids.size())};
  }
  return held;
}

}  // namespace dtensor::testing
