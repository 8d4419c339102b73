// What a sharded mask is true of: found where it lies, and sent to its place in row-major order.
// Inside of ops/.
#pragma once

#include <optional>
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"

namespace dtensor {

// Row-major places of what is not 0 in x, whole on every rank: int64 [n], on the host. Waits.
Tensor PlacesIn(const DTensor& x);
// The indices of such places in a shape: int64 [n, dims], on the host.
Tensor IndicesOf(const Tensor& places, IntSpan shape);

// Of a mask of which one dim is cut, in blocks. The finds become rows of a list with Shard(0) on
// the mesh dims that cut it and Replicate on others; all ranks know how many there are.
class Found {
 public:
  // x's elements that are not 0. Null where x is not cut so, nobody holds values (a rehearsal), the
  // rank is outside of the mesh, or gathering x as bools would bring fewer bytes than the counts.
  //   Comm: waits for a number per index of the dims before the cut one from each rank.
  static std::optional<Found> In(const DTensor& x);

  int64_t count() const { return count_; }  // of all ranks
  // Indices of this rank's finds in the whole mask, int64 [n, dims], on Self.
  DTensor Indices() const;
  Placements ListPlacements() const;
  Placements MaskPlacements() const {
    return {mask_->placements().begin(), mask_->placements().end()};
  }
  // A list with `rows` of this rank, one for each of its finds.
  //   Comm: one exchange of those that belong elsewhere.
  DTensor Spread(const Tensor& rows) const;

  // Without gradients, each the other's. The list of x's elements at the finds; x lies as the mask.
  //   Comm: that of Spread.
  DTensor Select(const DTensor& x) const;
  // Zeros as the mask lies, with the elements of a list at the finds. Every rank has the whole
  // list, or it has ListPlacements().
  //   Comm: of a whole list none, else one exchange.
  DTensor Put(const DTensor& list) const;

 private:
  Found(const DTensor& x, const MeshDims& mesh_dims, int dim);
  // Where this rank computes by itself.
  TensorOptions Here(DType dtype = DType::kI64) const;
  // Of this rank's finds the elements of a list.
  DTensor RowsOf(const DTensor& list) const;
  void Place(const std::vector<std::vector<int64_t>>& counts);
  SpecRef ListSpec(const Shape& shape, DType dtype) const;

  const SpecRef mask_;
  RowMove move_;       // to the list from, as the first rows of a tensor [n, ...], the finds
  Shape local_;        // of this rank's part
  int64_t first_ = 0;  // index of its first row of the cut dim
  int cut_;            // that dim
  int me_ = 0;         // index of this rank among those that cut it
  int64_t count_ = 0;  // of all ranks
  DTensor places_;     // of this rank's finds in its part, row-major; int64 on Self
};

}  // namespace dtensor
