// What a sharded mask is true of: found where it lies, and sent to its place in row-major order.
// Inside of ops/.
#pragma once

#include <optional>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"

namespace dtensor {

// Of a mask of which one mesh dim alone cuts a dim, in blocks. The finds become rows of a list with
// Shard(0) on that mesh dim and Replicate on others; all ranks know how many there are.
class Found {
 public:
  // x's elements that are not 0. Null where x is not cut so, nobody holds values (a rehearsal), the
  // rank is outside of the mesh, or gathering x as bools would bring fewer bytes than the counts.
  //   Comm: waits for a number per index of the dims before the cut one from each rank.
  static std::optional<Found> In(const DTensor& x);

  // Of this rank: places in its part of the mask, row-major; int64 on Self.
  const DTensor& places() const { return places_; }
  // Of the list and, as the first rows of a tensor [n, ...], of this rank's finds.
  const RowMove& move() const { return move_; }
  // Indices of this rank's finds in the whole mask, int64 [n, dims], on Self.
  DTensor Indices() const;
  Placements ListPlacements() const;
  // A list with `rows` of this rank, one for each of its finds.
  //   Comm: one exchange of those that belong elsewhere.
  DTensor Spread(const Tensor& rows) const;

 private:
  Found(const DTensor& x, int mesh_dim, int dim);
  // Where this rank computes by itself.
  TensorOptions Here() const;
  void Place(const std::vector<std::vector<int64_t>>& counts);

  const SpecRef mask_;
  RowMove move_;
  Shape local_;        // of this rank's part
  int64_t first_ = 0;  // index of its first row of the cut dim
  int cut_;            // that dim
  int64_t count_ = 0;  // of all ranks
  DTensor places_;
};

}  // namespace dtensor
