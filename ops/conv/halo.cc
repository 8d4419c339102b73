#include "dtensor/ops/conv/halo.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/mesh/comm.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

// Rows [begin, end) of the whole, of which a rank has row i at i - origin.
struct Rows {
  int64_t origin, begin, end;
};

// How one dim of x is handled: the rows that ranks of a mesh dim have, and those that the windows
// of their blocks of the result read.
struct HaloPlan {
  int dim, mesh_dim;
  int64_t blocks;  // ranks of the mesh dim
  WindowDim window;
  WindowDim inside;  // of a block: of the rows that the largest one reads
  std::vector<Rows> own, need;
  double fill;
};

HaloPlan MakePlan(const DTensor& x, int dim, int mesh_dim, const WindowDim& w, double fill) {
  const int64_t ranks = x.mesh().size(mesh_dim);
  HaloPlan plan = {dim, mesh_dim, ranks, w, w, {}, {}, fill};
  const int64_t most = (w.out + ranks - 1) / ranks, reach = (w.kernel - 1) * w.dilation + 1;
  plan.inside.in = (most - 1) * w.stride + reach;
  plan.inside.out = most;
  plan.inside.before = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const Interval own = ShardInterval(w.in, x.placements()[mesh_dim].unit(), ranks, r);
    plan.own.push_back({own.start, own.start, own.end});
    const Interval out = ShardInterval(w.out, 1, ranks, r);
    const int64_t first = out.start * w.stride - w.before;
    const int64_t begin = std::clamp<int64_t>(first, 0, w.in);
    const int64_t end =
        std::clamp<int64_t>(first + (out.length() - 1) * w.stride + reach, begin, w.in);
    plan.need.push_back({first, begin, out.length() == 0 ? begin : end});
  }
  return plan;
}

Interval Common(const Rows& a, const Rows& b) {
  const int64_t start = std::max(a.begin, b.begin);
  return {start, std::max(start, std::min(a.end, b.end))};
}

// Rows that come from other ranks, over all ranks.
int64_t Fetched(const HaloPlan& plan) {
  int64_t rows = 0;
  for (int64_t r = 0; r < plan.blocks; ++r) {
    rows += plan.need[r].end - plan.need[r].begin - Common(plan.need[r], plan.own[r]).length();
  }
  return rows;
}

// The mesh dim over which alone `dim` of x is cut, into blocks; -1: there is none.
int OnlyCut(const DTensor& x, int dim) {
  int found = -1;
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    const Placement& p = x.placements()[m];
    if (p.is_flat() || p.is_partial()) return -1;
    if (!p.cuts_dim() || p.dim() != dim) continue;
    if (found >= 0 || !p.is_shard()) return -1;
    found = m;
  }
  return found;
}

std::optional<HaloPlan> PlanHalo(const DTensor& x, const WindowDims& windows, double fill,
                                 std::initializer_list<DTensor> others) {
  if (x.mesh().is_self() || !x.spec().in_mesh()) return {};
  for (size_t d = 0; d < windows.size(); ++d) {
    const WindowDim& w = windows[d];
    const int dim = x.ndim() - static_cast<int>(windows.size() - d);
    const int m = OnlyCut(x, dim);
    if (m < 0 || w.kernel == 0 || w.out == 0) continue;
    const bool others_fit = std::all_of(others.begin(), others.end(), [&](const DTensor& o) {
      return !o.defined() || (o.mesh() == x.mesh() && o.placements()[m].is_replicate());
    });
    if (!others_fit) continue;
    HaloPlan plan = MakePlan(x, dim, m, w, fill);
    if (Fetched(plan) < (plan.blocks - 1) * w.in) return plan;
  }
  return {};
}

Tensor RowsOf(const Tensor& t, int dim, const Rows& held, const Interval& rows) {
  return t.Slice(dim, rows.start - held.origin, rows.length());
}

Tensor EmptyLike(const Tensor& t) {
  return ValueOrThrow(Tensor::Empty(t.shape(), t.dtype(), t.device()));
}

// Every row that `to` has and `from`, on some rank, too: this rank's tensors, and what all hold.
// With `add` several ranks may have it, and it is added to what is there.
void MoveRows(const HaloPlan& plan, const DeviceMesh& mesh, const Tensor& from,
              const std::vector<Rows>& have, const Tensor& to, const std::vector<Rows>& want,
              bool add) {
  const int dims[] = {plan.mesh_dim};
  Comm& comm = *ValueOrThrow(RankContext::Current().CommFor(mesh, dims));
  const int me = comm.index();
  const bool strided = comm.caps().strided;
  std::vector<Piece> sends, recvs;
  std::vector<std::pair<Tensor, Tensor>> arrived;  // what came apart, and where it belongs
  for (int peer = 0; peer < comm.size(); ++peer) {
    const Interval out = Common(have[me], want[peer]), in = Common(have[peer], want[me]);
    if (out.length() > 0 && peer != me) {
      const Tensor rows = RowsOf(from, plan.dim, have[me], out);
      sends.push_back({peer, strided ? rows : ValueOrThrow(rows.Contiguous())});
    }
    if (in.length() == 0) continue;
    const Tensor place = RowsOf(to, plan.dim, want[me], in);
    if (peer == me) {
      const Tensor rows = RowsOf(from, plan.dim, have[me], in);
      add ? AddInPlace(place, rows) : Copy(rows, place);
    } else if (add || !strided) {
      arrived.emplace_back(EmptyLike(place), place);
      recvs.push_back({peer, arrived.back().first});
    } else {
      recvs.push_back({peer, place});
    }
  }
  if (Fetched(plan) > 0) {
    ThrowIfError(TellPeers(mesh, comm.Exchange(std::move(sends), std::move(recvs)).Wait()));
  }
  for (const auto& [rows, place] : arrived) add ? AddInPlace(place, rows) : Copy(rows, place);
}

// Those of a tensor with `by` more dims in front (or fewer).
Placements Moved(absl::Span<const Placement> placements, int by) {
  Placements moved(placements.begin(), placements.end());
  for (Placement& p : moved) {
    if (p.cuts_dim()) p = p.WithDim(p.dim() + by);
  }
  return moved;
}

DTensor OfParts(const Tensor& local, const DeviceMesh& mesh, PlacementSpan placements,
                Shape shape) {
  FromLocalOptions options;
  options.shape = std::move(shape);
  return FromLocal(OnSelf(local), mesh, placements, options);
}

// x [.., in, ..] as [blocks, .., rows of a block, ..], one block per rank.
DTensor Blocks(const DTensor& x, const HaloPlan& plan) {
  const auto shared = std::make_shared<const HaloPlan>(plan);
  const SpecRef spec = x.spec_ref();
  Placements placements = Moved(x.placements(), 1);
  placements[plan.mesh_dim] = Shard(0);
  Shape shape = x.shape();
  shape[plan.dim] = plan.inside.in;
  shape.insert(shape.begin(), plan.blocks);
  const auto forward = [&]() -> Values {
    const Tensor& local = x.local();
    Shape rows = local.shape();
    rows[plan.dim] = plan.inside.in;
    const Tensor block = ValueOrThrow(Tensor::Empty(rows, local.dtype(), local.device()));
    Fill(block, plan.fill);
    MoveRows(plan, x.mesh(), local, plan.own, block, plan.need, false);
    return {OfParts(block.Unsqueeze(0), x.mesh(), placements, shape)};
  };
  const auto backward = [shared, spec, placements](const Values& grads) -> Values {
    const Tensor block = grads[0].Redistribute(placements).local().Select(0, 0);
    const Tensor dx =
        ValueOrThrow(Tensor::Empty(spec->local_shape(), block.dtype(), block.device()));
    Fill(dx, 0);
    MoveRows(*shared, spec->mesh(), block, shared->need, dx, shared->own, true);
    return {OfParts(dx, spec->mesh(), spec->placements(), spec->shape())};
  };
  return CustomFunction("halo", {x}, forward, backward)[0];
}

// The inverse for results: [blocks, .., rows of the largest block, ..] as [.., out, ..].
DTensor Joined(const DTensor& y, const HaloPlan& plan) {
  Placements blocks(y.placements().begin(), y.placements().end());
  for (Placement& p : blocks) {
    if (p.is_flat() || (p.cuts_dim() && p.dim() == 0)) p = Replicate();
  }
  blocks[plan.mesh_dim] = Shard(0);
  Placements placements = blocks;
  placements[plan.mesh_dim] = Replicate();
  placements = Moved(placements, -1);
  placements[plan.mesh_dim] = Shard(plan.dim);
  FromLocalOptions options;
  options.shape = y.shape();
  options.shape.erase(options.shape.begin());
  options.shape[plan.dim] = plan.window.out;
  Dims coordinate;
  y.mesh().Coordinate(RankContext::Current().rank(), &coordinate);
  const Interval out = ShardInterval(plan.window.out, 1, plan.blocks, coordinate[plan.mesh_dim]);
  const DTensor block = select(y.Redistribute(blocks).ToLocal(), 0, 0);
  return FromLocal(slice(block, plan.dim, 0, out.length()), y.mesh(), placements, options);
}

}  // namespace

DTensor OverHalos(const DTensor& x, const WindowDims& windows, double fill,
                  std::initializer_list<DTensor> others, WindowCall call) {
  const std::optional<HaloPlan> plan = PlanHalo(x, windows, fill, others);
  if (!plan) return call(x, windows);
  WindowDims inside = windows;
  inside[plan->dim - (x.ndim() - static_cast<int>(windows.size()))] = plan->inside;
  return Joined(OverHalos(Blocks(x, *plan), inside, fill, others, call), *plan);
}

}  // namespace dtensor
