#include "dtensor/ops/index/reorder.h"

#include <algorithm>
#include <memory>

#include "absl/functional/function_ref.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/rows.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Rows of x that come to rows `block` of the result, where they are laid down.
using RowsFn = absl::FunctionRef<std::vector<Rows>(const Rows& block)>;

std::optional<RowMove> PlanMove(const DTensor& x, int dim, RowsFn source) {
  const MeshDims cuts = x.mesh().is_self() ? MeshDims() : CutsOf(x.spec(), dim);
  if (cuts.empty()) return {};
  RowMove move = {cuts, dim, BlocksOf(x.spec(), dim, cuts), {}};
  for (const std::vector<Rows>& block : move.have) move.want.push_back(source(block[0]));
  return move;
}

// Rows that move where another dim is cut instead, which dispatch finds; where there is none, all
// ranks get all.
int64_t RowsOtherwise(const DTensor& x, const RowMove& move) {
  const auto ranks = static_cast<int64_t>(move.have.size());
  const int64_t rows = x.size(move.dim) * (ranks - 1);
  for (int d = 0; d < x.ndim(); ++d) {
    const auto cuts = [d](const Placement& p) { return p.cuts_dim() && p.dim() == d; };
    if (x.size(d) >= ranks && std::none_of(x.placements().begin(), x.placements().end(), cuts)) {
      return rows / ranks;
    }
  }
  return rows;
}

// What this rank's rows have become once they are here.
using LocalFn = absl::FunctionRef<Tensor(const Tensor& rows)>;

DTensor ByMove(const char* name, const DTensor& x, const RowMove& move, LocalFn finish,
               CustomBackward backward) {
  const auto part = [&] {
    const Tensor& local = x.local();
    const Tensor rows = ValueOrThrow(Tensor::Empty(local.shape(), local.dtype(), local.device()));
    MoveRows(move, x.mesh(), local, rows);
    return finish(rows);
  };
  const auto forward = [&]() -> Values { return {OfParts(x.spec(), part)}; };
  return CustomFunction(name, {x}, forward, std::move(backward), {}, /*passes_sums=*/true)[0];
}

}  // namespace

DTensor FlipAcross(const DTensor& x, int dim) {
  const int64_t n = x.size(dim);
  const auto source = [n](const Rows& block) -> std::vector<Rows> {
    return {{n - block.end, n - block.end, n - block.begin}};  // reversed once they are here
  };
  const std::optional<RowMove> move = PlanMove(x, dim, source);
  if (!move || move->Fetched() > RowsOtherwise(x, *move)) return {};
  const auto reversed = [dim](const Tensor& rows) { return flip(OnSelf(rows), {dim}).local(); };
  return ByMove("flip", x, *move, reversed,
                [dim](const Values& g) -> Values { return {flip(g[0], {dim})}; });
}

DTensor RollAcross(const DTensor& x, int dim, int64_t shift) {
  const int64_t n = x.size(dim);
  const auto source = [n, shift](const Rows& block) -> std::vector<Rows> {
    const int64_t length = block.end - block.begin, first = (block.begin - shift + n) % n;
    if (first + length <= n) return {{first, first, first + length}};
    return {{first, first, n}, {first - n, 0, first + length - n}};
  };
  const std::optional<RowMove> move = PlanMove(x, dim, source);
  if (!move) return {};
  return ByMove(
      "roll", x, *move, [](const Tensor& rows) { return rows; },
      [dim, shift](const Values& g) -> Values { return {roll(g[0], {-shift}, {dim})}; });
}

}  // namespace dtensor
