#include "dtensor/ops/sort/blocks.h"

#include "dtensor/ops/sort/along.h"

namespace dtensor {

std::optional<Blocks> BlocksOf(const DTensor& x, int64_t dim) {
  int64_t count = 1;
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    const Placement& p = x.placements()[m];
    if (p.is_flat() || (p.cuts_dim() && p.dim() == dim && (!p.is_shard() || p.unit() != 1))) {
      return {};
    }
    if (p.cuts_dim() && p.dim() == dim) count *= x.mesh().size(m);
  }
  const int64_t size = x.shape()[dim];
  if (count == 1 || size == 0 || size % count != 0) return {};
  Shape shape = x.shape();
  shape[dim] = size / count;
  shape.insert(shape.begin() + dim, count);
  return Blocks{reshape(x, shape), count, size / count};
}

DTensor Gathered(const DTensor& x, int64_t dim) {
  Placements placements(x.placements().begin(), x.placements().end());
  for (Placement& p : placements) {
    if (p.is_flat() || p.is_partial() || (p.cuts_dim() && p.dim() == dim)) p = Replicate();
  }
  return x.Redistribute(placements);
}

DTensor BlockStarts(const Blocks& blocks, int64_t dim) {
  const DeviceMesh& mesh = blocks.x.mesh();
  Shape shape(blocks.x.ndim() - dim, 1);
  shape[0] = blocks.count;
  const TensorOptions options = {DType::kI64, mesh, Placements(mesh.ndim())};
  return reshape(arange(0, blocks.count * blocks.size, blocks.size, options), shape);
}

DTensor Joined(const DTensor& y, int64_t dim) { return flatten(y, dim, dim + 1); }

DTensor IndexOfPlaces(const DTensor& indices, const DTensor& places, int64_t dim) {
  return Settled(TakeAlong(indices, places, dim));
}

}  // namespace dtensor
