// Test support: placements of all kinds for any mesh and shape.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "dtensor/mesh/spec.h"
#include "tests/common/index_oracle.h"

namespace dtensor::testing {

// The kinds of placement of one mesh dim; sizes of segments and flat cuts come from what is left.
enum LayoutKind {
  kR,
  kS0,
  kS1,
  kS0Units,
  kS1Units,
  kSum,
  kMax,
  kMin,
  kProd,
  kSegmented0,
  kSegmented1,
  kSegmented0Units,
  kSegmented1Units,
  kFlat,
  kKinds
};

// Of the kinds with units.
struct Units {
  int64_t shard = 2;
  int64_t segments[3] = {2, 1, 3};
};

struct Layout {
  Dims mesh;
  Placements placements;
};

inline std::vector<int64_t> FlatLengths(int64_t numel, int64_t n, bool even) {
  if (even) return std::vector<int64_t>(n, numel / n);
  std::vector<int64_t> lengths(n, 0);  // half, nothing, and the rest in between
  lengths[0] = numel / 2;
  lengths[n - 1] = numel - lengths[0];
  for (int64_t i = 2; i + 1 < n; ++i) {
    lengths[i] = std::min<int64_t>(3, lengths[n - 1]);
    lengths[n - 1] -= lengths[i];
  }
  return lengths;
}

// The layout that the kinds describe; null where they are none for this mesh and shape.
inline std::optional<Layout> MakeLayout(const Dims& mesh, const Shape& shape,
                                        const std::vector<int>& kinds, const Units& units = {}) {
  Layout layout{mesh, Placements(mesh.size())};
  Placements& p = layout.placements;
  const Dims origin(mesh.size(), 0);
  for (size_t m = 0; m < mesh.size(); ++m) {
    const int k = kinds[m];
    const bool of0 = k == kS0 || k == kS0Units || k == kSegmented0 || k == kSegmented0Units;
    const bool of1 = k == kS1 || k == kS1Units || k == kSegmented1 || k == kSegmented1Units;
    if ((of0 && shape.empty()) || (of1 && shape.size() < 2)) return std::nullopt;
    const auto left = [&](int d) { return HeldBy(mesh, p, shape, origin).shape[d]; };
    if (kinds[m] == kS0) p[m] = Shard(0);
    if (kinds[m] == kS1) p[m] = Shard(1);
    if (kinds[m] == kS0Units) p[m] = Shard(0, units.shard);
    if (kinds[m] == kS1Units) p[m] = Shard(1, units.shard);
    if (kinds[m] == kSum) p[m] = Partial();
    if (kinds[m] == kMax) p[m] = Partial(ReduceOp::kMax);
    if (kinds[m] == kMin) p[m] = Partial(ReduceOp::kMin);
    if (kinds[m] == kProd) p[m] = Partial(ReduceOp::kProd);
    if (kinds[m] == kSegmented0 || kinds[m] == kSegmented1) {
      const int d = kinds[m] == kSegmented0 ? 0 : 1;
      const int64_t a = (2 * left(d) + 2) / 3;
      p[m] = SegmentedShard(d, {a, left(d) - a});
    }
    if (kinds[m] == kSegmented0Units || kinds[m] == kSegmented1Units) {
      const int d = kinds[m] == kSegmented0Units ? 0 : 1;
      const int64_t a = (left(d) + 1) / 2, b = (left(d) - a + 1) / 2;
      p[m] = SegmentedShard(
          d,
          {{a, units.segments[0]}, {b, units.segments[1]}, {left(d) - a - b, units.segments[2]}});
    }
  }
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (kinds[m] != kFlat) continue;
    const bool last =
        std::count(kinds.begin() + static_cast<int64_t>(m) + 1, kinds.end(), kFlat) == 0;
    const int64_t numel = Numel(HeldBy(mesh, p, shape, origin).shape);
    if (!last && numel % mesh[m] != 0) return std::nullopt;
    p[m] = FlatShard(FlatLengths(numel, mesh[m], !last));
  }
  SpecInterner specs(0);
  if (!specs.Intern(*DeviceMesh::Create(mesh), p, shape, DType::kI64).ok()) return std::nullopt;
  return layout;
}

// A layout of random kinds and units.
inline Layout RandomLayout(const Dims& mesh, const Shape& shape, std::mt19937_64& random) {
  while (true) {
    std::vector<int> kinds;
    for (size_t m = 0; m < mesh.size(); ++m) kinds.push_back(static_cast<int>(random() % kKinds));
    Units units;
    units.shard = static_cast<int64_t>(2 + random() % 3);
    for (int64_t& unit : units.segments) unit = static_cast<int64_t>(1 + random() % 4);
    if (auto layout = MakeLayout(mesh, shape, kinds, units)) return *layout;
  }
}

// The reduction of a layout's pending dims, of which all have the same; a sum where none is.
inline ReduceOp ReductionOf(const Layout& layout) {
  for (const Placement& p : layout.placements) {
    if (p.is_partial()) return p.reduce_op();
  }
  return ReduceOp::kSum;
}

// Of two terms: a sum, maximum, minimum or product.
template <typename T>
T Reduced(ReduceOp op, T a, T b) {
  if (op == ReduceOp::kMax) return std::max(a, b);
  if (op == ReduceOp::kMin) return std::min(a, b);
  return op == ReduceOp::kProd ? a * b : a + b;
}

// Where a sum or a product becomes pending, ranks off coordinate 0 hold what changes no other term;
// null for maxima and minima, whose ranks all hold the value.
inline std::optional<int64_t> NewTerm(const Placement& p) {
  if (p == Partial()) return 0;
  return p == Partial(ReduceOp::kProd) ? std::optional<int64_t>(1) : std::nullopt;
}

// `size` as a product of one to three factors, in any order.
inline Dims RandomMesh(int64_t size, std::mt19937_64& random) {
  Dims mesh;
  for (int m = 0; m < 2; ++m) {
    const auto factor = static_cast<int64_t>(1 + random() % size);
    if (size % factor != 0 || random() % 2 == 0) continue;
    mesh.push_back(factor);
    size /= factor;
  }
  mesh.push_back(size);
  return mesh;
}

// Row-major.
inline Dims CoordinateOf(const Dims& mesh, int64_t rank) {
  Dims coordinate(mesh.size());
  for (int m = static_cast<int>(mesh.size()) - 1; m >= 0; --m) {
    coordinate[m] = rank % mesh[m];
    rank /= mesh[m];
  }
  return coordinate;
}

}  // namespace dtensor::testing
