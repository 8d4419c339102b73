// Parts: which coordinates of a mesh hold elements of a region, found from the region: a plan of
// one rank looks at those it talks to and at no others. Internal to dtensor/.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/mesh/region.h"
#include "dtensor/mesh/spec.h"

namespace dtensor::internal {

// The coordinates from lo to hi, both inside, of every mesh dim.
struct CoordinateBox {
  Dims lo, hi;

  int64_t size() const;
  bool Contains(const Dims& coordinate) const;
  // Row-major numbers of the coordinates inside.
  int64_t IndexOf(const Dims& coordinate) const;
  Dims At(int64_t index) const;
  void Pin(int mesh_dim, int64_t value) { lo[mesh_dim] = hi[mesh_dim] = value; }
  friend bool operator==(const CoordinateBox&, const CoordinateBox&) = default;
};
// Row-major.
void ForEach(const CoordinateBox& box, absl::FunctionRef<void(const Dims&)> visit);

// One side of a redistribution. The spec must outlive it.
class Parts {
 public:
  explicit Parts(const Spec& spec);

  const Spec& spec() const { return spec_; }
  // Whether the mesh dim's coordinate decides what is held.
  bool cuts(int mesh_dim) const {
    return spec_.placement(mesh_dim).cuts() && spec_.mesh().size(mesh_dim) > 1;
  }
  bool has_flat() const { return !flats_.empty(); }
  CoordinateBox All() const;
  Region At(const Dims& coordinate) const { return RegionOf(spec_, coordinate); }

  // The coordinates of `among` that hold elements of `region`: disjoint boxes. Mesh dims that cut
  // nothing have their range of `among`.
  std::vector<CoordinateBox> Holding(const Region& region, const CoordinateBox& among) const;
  // A box around all of them, found in no time.
  CoordinateBox Around(const Region& region, const CoordinateBox& among) const;
  // The box in pieces that are one coordinate wide on the mesh dims that cut.
  void ForEachPart(const CoordinateBox& box,
                   absl::FunctionRef<void(const CoordinateBox&)> visit) const;

  // If `mesh_dims` cut one tensor dim into plain shards and nothing cuts inside of them: that dim,
  // else -1; and the indices that the cuts outside of them leave of it at `coordinate`. The
  // coordinates of `mesh_dims` hold those one after the other, in row-major order.
  int RowsOver(absl::Span<const int> mesh_dims, const Dims& coordinate,
               std::vector<Interval>* left) const;
  // How many of `length` such indices a coordinate holds.
  int64_t RowsOf(absl::Span<const int> mesh_dims, int64_t length, const Dims& coordinate) const;

 private:
  struct Held {  // of one tensor dim
    std::vector<Interval> index;
    int64_t length;
  };
  Held Uncut(int dim) const;
  Held AfterCut(const Held& held, int mesh_dim, int64_t coordinate) const;
  void Descend(int dim, size_t level, const Held& held, const std::vector<Interval>& wanted,
               CoordinateBox* box, const CoordinateBox& among,
               std::vector<CoordinateBox>* found) const;
  std::vector<CoordinateBox> HoldingBlock(const Block& block, const CoordinateBox& among) const;
  void FindFlat(const Block& block, const CoordinateBox& part, const CoordinateBox& among,
                std::vector<CoordinateBox>* found) const;
  Block WithoutFlat(const Dims& coordinate) const;

  const Spec& spec_;
  // Mesh dims, outermost first: by tensor dim those that cut it; those of flat pieces.
  std::vector<std::vector<int>> chains_;
  std::vector<int> flats_;
};

}  // namespace dtensor::internal
