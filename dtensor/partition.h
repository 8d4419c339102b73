// Partition: how one mesh dim cuts the index range of a factor. A row of a strategy shards a
// factor; what travels with it is a partition, and one law says how a tensor dim that holds the
// factor is cut: as the factor is, times what is minor to it, again for every index of what is
// major, on the sizes that earlier mesh dims leave.
#pragma once

#include <optional>

#include "dtensor/factors.h"
#include "dtensor/mesh/placement.h"

namespace dtensor {

// One block in multiples of `unit`, whatever the size; or segments, whose sizes sum to that of the
// range.
struct Partition {
  int64_t unit = 1;
  Segments segments = {};
  bool is_block() const { return segments.empty(); }
  // The segments of a range of `size`.
  Segments Of(int64_t size) const { return is_block() ? Segments{{size, unit}} : segments; }
  friend bool operator==(const Partition&, const Partition&) = default;
};

// Sizes that a factor may have on one rank, over all coordinates of the mesh dims so far.
using SizeSet = absl::InlinedVector<int64_t, 3>;
void AddSize(int64_t size, SizeSet* set);
// The size, if it is the same everywhere; else -1.
int64_t OnlySize(const SizeSet& set);
// What a partition among n leaves of a range of these sizes.
SizeSet CutSizes(const SizeSet& sizes, const Partition& cut, int64_t n);

// The placement on a mesh dim of size n of tensor dim `d`, whose factors are `dim`, where factor
// `f` is cut so. `repeats`: f may be cut again for every index of the factors major to it.
// Nothing where no placement cuts the dim so on every coordinate.
std::optional<Placement> PlaceFactor(const FactorMap& map, const FactorDim& dim, int d, int f,
                                     const Partition& cut, const std::vector<SizeSet>& sizes,
                                     int64_t n, bool repeats);

// The partition of factor `f` that an operand's placement on a mesh dim is, where it cuts f.
std::optional<Partition> PartitionOf(const FactorMap& map, const FactorOperand& operand,
                                     const Spec& spec, int mesh_dim, int f);

// The partition of a joined factor whose parts are cut so, and back: nothing where the parts'
// sizes differ between coordinates. A part that no segments describe is left without a value.
std::optional<Partition> JoinParts(const FactorDim& parts, const std::vector<Partition>& cuts,
                                   const std::vector<SizeSet>& sizes);
std::optional<std::vector<std::optional<Partition>>> SplitParts(const FactorDim& parts,
                                                                const Partition& whole,
                                                                const std::vector<SizeSet>& sizes,
                                                                int64_t n);

}  // namespace dtensor
