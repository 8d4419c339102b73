#include "dtensor/ops/conv/halo.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"

namespace dtensor {
namespace {

// How one dim of x is handled: the rows that ranks of a mesh dim have, and those that the windows
// of their blocks of the result read.
struct HaloPlan {
  RowMove move;
  int64_t blocks;  // ranks of the mesh dim
  WindowDim window;
  WindowDim inside;  // of a block: of the rows that the largest one reads
  double fill;
};

HaloPlan MakePlan(const DTensor& x, int dim, int mesh_dim, const WindowDim& w, double fill) {
  const int64_t ranks = x.mesh().size(mesh_dim);
  HaloPlan plan = {{{mesh_dim}, dim, BlocksOf(x.spec(), dim, {mesh_dim}), {}}, ranks, w, w, fill};
  const int64_t most = (w.out + ranks - 1) / ranks, reach = (w.kernel - 1) * w.dilation + 1;
  plan.inside.in = (most - 1) * w.stride + reach;
  plan.inside.out = most;
  plan.inside.before = 0;
  for (int64_t r = 0; r < ranks; ++r) {
    const Interval out = ShardInterval(w.out, 1, ranks, r);
    const int64_t first = out.start * w.stride - w.before;
    const int64_t begin = std::clamp<int64_t>(first, 0, w.in);
    const int64_t end =
        std::clamp<int64_t>(first + (out.length() - 1) * w.stride + reach, begin, w.in);
    plan.move.want.push_back({{first, begin, out.length() == 0 ? begin : end}});
  }
  return plan;
}

std::optional<HaloPlan> PlanHalo(const DTensor& x, const WindowDims& windows, double fill,
                                 std::initializer_list<DTensor> others) {
  if (x.mesh().is_self() || x.spec().has_partial()) return {};
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
    if (plan.move.Fetched() < (plan.blocks - 1) * w.in) return plan;
  }
  return {};
}

// Those of a tensor with `by` more dims in front (or fewer).
Placements WithDimsMoved(absl::Span<const Placement> placements, int by) {
  Placements moved(placements.begin(), placements.end());
  for (Placement& p : moved) {
    if (p.cuts_dim()) p = p.WithDim(p.dim() + by);
  }
  return moved;
}

SpecRef SpecOf(const DeviceMesh& mesh, const Placements& placements, const Shape& shape,
               DType dtype) {
  return ValueOrThrow(RankContext::Current().specs().Intern(mesh, placements, shape, dtype));
}

// Of a max pool whose window has nothing above the fill, the gradient is at its first place; where
// that is fill it belongs to the first row of the window that x has. This rank's block with that.
Tensor GivenToRows(const HaloPlan& plan, const Spec& spec, const Tensor& dy) {
  const Rows& want = plan.move.want[spec.coordinate()[plan.move.mesh_dims[0]]][0];
  const int64_t above = want.begin - want.origin, rows = want.end - want.origin;
  if (above <= 0) return dy;
  const int64_t step = plan.window.dilation;
  const Tensor given = ValueOrThrow(dy.Clone());
  for (int64_t row = 0; row < above; ++row) {
    const int64_t first = row + (above - row + step - 1) / step * step;
    if (first >= rows) continue;
    AddInPlace(given.Slice(plan.move.dim, first, 1), dy.Slice(plan.move.dim, row, 1));
  }
  return given;
}

// x [.., in, ..] as [blocks, .., rows of a block, ..], one block per rank.
DTensor Blocks(const DTensor& x, const HaloPlan& plan) {
  const auto shared = std::make_shared<const HaloPlan>(plan);
  const SpecRef spec = x.spec_ref();
  Placements placements = WithDimsMoved(x.placements(), 1);
  placements[plan.move.mesh_dims[0]] = Shard(0);
  Shape shape = x.shape();
  shape[plan.move.dim] = plan.inside.in;
  shape.insert(shape.begin(), plan.blocks);
  const auto forward = [&]() -> Values {
    const auto block_here = [&] {
      const Tensor& local = x.local();
      Shape rows = local.shape();
      rows[plan.move.dim] = plan.inside.in;
      const Tensor block = ValueOrThrow(Tensor::Empty(rows, local.dtype(), local.device()));
      Fill(block, plan.fill);
      MoveRows(plan.move, x.mesh(), local, block);
      return block.Unsqueeze(0);
    };
    return {OfParts(*SpecOf(x.mesh(), placements, shape, x.dtype()), block_here)};
  };
  const auto backward = [shared, spec, placements](const Values& grads) -> Values {
    const DTensor blocks = grads[0].Redistribute(placements);
    const auto rows_here = [&] {
      Tensor block = blocks.local().Select(0, 0);
      if (std::isinf(shared->fill)) block = GivenToRows(*shared, *spec, block);
      const Tensor dx =
          ValueOrThrow(Tensor::Empty(spec->local_shape(), block.dtype(), block.device()));
      Fill(dx, 0);
      AddRowsBack(shared->move, spec->mesh(), block, dx);
      return dx;
    };
    return {OfParts(*spec, rows_here)};
  };
  return CustomFunction("halo", {x}, forward, backward)[0];
}

// The inverse for results: [blocks, .., rows of the largest block, ..] as [.., out, ..].
DTensor Joined(const DTensor& y, const HaloPlan& plan) {
  Placements placements(y.placements().begin(), y.placements().end());
  for (Placement& p : placements) {
    if (p.is_flat() || (p.cuts_dim() && p.dim() == 0)) p = Replicate();
  }
  placements[plan.move.mesh_dims[0]] = Shard(0);
  const DTensor blocks = y.Redistribute(placements);
  placements[plan.move.mesh_dims[0]] = Replicate();
  placements = WithDimsMoved(placements, -1);
  placements[plan.move.mesh_dims[0]] = Shard(plan.move.dim);
  Shape shape(y.shape().begin() + 1, y.shape().end());
  shape[plan.move.dim] = plan.window.out;
  const SpecRef from = blocks.spec_ref(), to = SpecOf(y.mesh(), placements, shape, y.dtype());
  const int dim = plan.move.dim;
  const auto forward = [&]() -> Values {
    return {OfParts(
        *to, [&] { return blocks.local().Select(0, 0).Slice(dim, 0, to->local_shape()[dim]); })};
  };
  const auto backward = [from, to, dim](const Values& grads) -> Values {
    const DTensor dy = grads[0].Redistribute(to->placements());
    return {OfParts(*from, [&] {
      const Tensor& rows = dy.local();
      const Tensor block =
          ValueOrThrow(Tensor::Empty(from->local_shape(), rows.dtype(), rows.device()));
      Fill(block, 0);
      Copy(rows, block.Select(0, 0).Slice(dim, 0, rows.shape()[dim]));
      return block;
    })};
  };
  return CustomFunction("halo", {blocks}, forward, backward)[0];
}

}  // namespace

DTensor OverHalos(const DTensor& x, const WindowDims& windows, double fill,
                  std::initializer_list<DTensor> others, WindowCall call) {
  const std::optional<HaloPlan> plan = PlanHalo(x, windows, fill, others);
  if (!plan) return call(x, windows);
  WindowDims inside = windows;
  inside[plan->move.dim - (x.ndim() - static_cast<int>(windows.size()))] = plan->inside;
  return Joined(OverHalos(Blocks(x, *plan), inside, fill, others, call), *plan);
}

}  // namespace dtensor
