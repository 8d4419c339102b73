// Test support: meshes, shapes and layouts drawn from a seed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/spec.h"
#include "tests/common/index_oracle.h"

namespace dtensor::testing {

// Choices drawn from one seed, so that all ranks and repetitions make the same.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  int64_t Between(int64_t low, int64_t high) { return low + Below(high - low + 1); }
  bool Chance(int percent) { return Below(100) < percent; }

 private:
  std::mt19937_64 random_;
};

// Of 2 to `most_ranks` ranks, of every number: one dim, at any place, may be as long as fits.
inline Dims RandomMesh(Dice& dice, int64_t most_ranks) {
  while (true) {
    Dims shape;
    int64_t ranks = 1;
    for (int64_t d = dice.Between(0, 2); d > 0; --d) {
      shape.push_back(dice.Between(1, std::min<int64_t>(4, most_ranks / ranks)));
      ranks *= shape.back();
    }
    const int64_t rest = dice.Between(1, most_ranks / ranks);
    const int64_t at = dice.Between(0, static_cast<int64_t>(shape.size()));
    shape.insert(shape.begin() + at, rest);
    if (ranks * rest > 1) return shape;
  }
}

inline Shape RandomShape(Dice& dice, int64_t least_dims = 0) {
  Shape shape;
  for (int64_t d = dice.Between(least_dims, 3); d > 0; --d) shape.push_back(dice.Between(0, 7));
  return shape;
}

inline Placement RandomPlacement(Dice& dice, const Shape& shape, bool partial) {
  const int64_t kind = dice.Below(partial ? 4 : 3);
  if (kind == 3) return Partial();
  if (kind == 0 || shape.empty()) return Replicate();
  const int dim = static_cast<int>(dice.Below(static_cast<int64_t>(shape.size())));
  return Shard(dim, dice.Chance(20) ? dice.Between(1, 3) : 1);
}

inline Placements RandomPlacements(Dice& dice, const Shape& shape, const Dims& mesh, bool partial) {
  Placements p;
  for (size_t m = 0; m < mesh.size(); ++m) p.push_back(RandomPlacement(dice, shape, partial));
  return p;
}

// `total` as the sum of n numbers, zeros among them.
inline std::vector<int64_t> RandomParts(Dice& dice, int64_t total, int64_t n) {
  std::vector<int64_t> parts;
  for (int64_t i = 1; i < n; ++i) {
    parts.push_back(dice.Chance(25) ? 0 : dice.Between(0, total));
    total -= parts.back();
  }
  parts.push_back(total);
  return parts;
}

inline bool Legal(const Dims& mesh, const Placements& p, const Shape& shape) {
  return SpecInterner(0).Intern(*DeviceMesh::Create(mesh), p, shape, DType::kF32).ok();
}

// A dim of `size` in one to three segments, some with units of their own.
inline Segments RandomSegments(Dice& dice, int64_t size) {
  Segments segments;
  for (const int64_t part : RandomParts(dice, size, dice.Between(1, 3))) {
    segments.push_back({part, dice.Chance(40) ? dice.Between(2, 4) : 1});
  }
  return segments;
}

// All five placements: some dims are cut in segments or flat instead, where that fits. What is
// pending may be a maximum, minimum or product instead of a sum.
inline Placements RandomLayout(Dice& dice, const Shape& shape, const Dims& mesh) {
  Placements p = RandomPlacements(dice, shape, mesh, true);
  const ReduceOp reductions[] = {ReduceOp::kSum, ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin,
                                 ReduceOp::kProd};
  const ReduceOp reduction = reductions[dice.Below(5)];
  for (Placement& one : p) {
    if (one.is_partial()) one = Partial(reduction);
  }
  const Dims origin(mesh.size(), 0);
  for (size_t m = 0; m < mesh.size() && !shape.empty(); ++m) {
    if (!dice.Chance(30)) continue;
    const int dim = static_cast<int>(dice.Below(static_cast<int64_t>(shape.size())));
    Placements before(p.begin(), p.begin() + static_cast<int64_t>(m)), exotic = p;
    before.resize(mesh.size());
    const int64_t left = HeldBy(mesh, before, shape, origin).shape[dim];
    exotic[m] = SegmentedShard(dim, RandomSegments(dice, left));
    if (Legal(mesh, exotic, shape)) p = exotic;
  }
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (!dice.Chance(25)) continue;
    Placements exotic = p;
    exotic[m] = Replicate();
    const int64_t left = Numel(HeldBy(mesh, exotic, shape, origin).shape);
    const bool even = left % mesh[m] == 0 && dice.Chance(50);
    exotic[m] = FlatShard(even ? std::vector<int64_t>(mesh[m], left / mesh[m])
                               : RandomParts(dice, left, mesh[m]));
    if (Legal(mesh, exotic, shape)) p = exotic;
  }
  return p;
}

}  // namespace dtensor::testing
