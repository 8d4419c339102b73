// flip over a sharded dim: a rank's part of the result lies, turned round, on one or two others,
// which send it. The dim is not gathered.
#include "dtensor/ops/index/flip_across.h"

#include <algorithm>

#include "dtensor/autograd.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// What a rank of the mesh dim has of a dim of `size`.
Interval BlockOf(const Placement& p, int64_t size, int64_t ranks, int64_t rank) {
  std::vector<Interval> runs;
  LocalIntervals(p, size, ranks, rank, &runs);
  return runs.empty() ? Interval{0, 0} : runs[0];
}

// The pieces of `rows` (whose dim 0 holds `mine`) that ranks with these blocks share with it.
std::vector<Piece> Shared(const Tensor& rows, Interval mine, const std::vector<Interval>& blocks) {
  std::vector<Piece> pieces;
  for (size_t r = 0; r < blocks.size(); ++r) {
    const int64_t start = std::max(mine.start, blocks[r].start);
    const int64_t end = std::min(mine.end, blocks[r].end);
    if (start >= end) continue;
    pieces.push_back({static_cast<int>(r), rows.Slice(0, start - mine.start, end - start)});
  }
  return pieces;
}

// The local part of the result. `turned`: that of x, reversed by itself.
Tensor Moved(const DTensor& x, const Tensor& turned, int dim, int mesh_dim) {
  const DeviceMesh& mesh = x.mesh();
  const Placement& p = x.placements()[mesh_dim];
  const int64_t size = x.size(dim), ranks = mesh.size(mesh_dim);
  const int dims[] = {mesh_dim};
  Comm& comm = *ValueOrThrow(RankContext::Current().CommFor(mesh, dims));
  std::vector<Interval> blocks, from;  // of the result: what ranks are to have, and what they have
  for (int64_t r = 0; r < ranks; ++r) {
    blocks.push_back(BlockOf(p, size, ranks, r));
    from.push_back({size - blocks.back().end, size - blocks.back().start});
  }
  const Tensor have = ValueOrThrow(turned.Transpose(0, dim).Contiguous());
  const Tensor rows = ValueOrThrow(Tensor::Empty(have.shape(), x.dtype(), have.device()));
  const int me = comm.index();
  ThrowIfError(
      comm.Exchange(Shared(have, from[me], blocks), Shared(rows, blocks[me], from)).Wait());
  return ValueOrThrow(rows.Transpose(0, dim).Contiguous());
}

}  // namespace

int CutInBlocksBy(const DTensor& x, int dim) {
  int found = -1;
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    const Placement& p = x.placements()[m];
    if (p.is_flat() || (p.cuts_dim() && p.dim() == dim && (found >= 0 || !p.is_shard()))) return -1;
    if (p.cuts_dim() && p.dim() == dim) found = m;
  }
  return found >= 0 && x.mesh().size(found) > 1 ? found : -1;
}

DTensor FlipAcross(const DTensor& x, int dim, int mesh_dim) {
  const auto forward = [&]() -> Values {
    FromLocalOptions options;
    options.shape = x.shape();
    const DTensor turned = flip(x.ToLocal(), {dim});
    return {FromLocal(OnSelf(Moved(x, turned.local(), dim, mesh_dim)), x.mesh(), x.placements(),
                      options)};
  };
  const auto backward = [dim](const Values& g) -> Values { return {flip(g[0], {dim})}; };
  return CustomFunction("flip", {x}, forward, backward, {}, /*passes_sums=*/true)[0];
}

}  // namespace dtensor
