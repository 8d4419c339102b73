// Triangles, diagonals, reversing, rolling and stacking.
#include "dtensor/ops/index/arrange.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/reorder.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/view/diagonal.h"

namespace dtensor {
namespace {

void TrilVjp(VjpCall& c) {
  static const OpDef& op = GetOp("tril");
  c.set(0, Call1(op, {&c.grad()}, c.attrs()));
}

absl::StatusOr<FactorText> FlipFactors(const OpCall& call) {
  DimTexts x = DimNames(call.in(0).ndim());
  DT_RETURN_IF_ERROR(RequireDims("dims", call.Ints("dims"), call.in(0).ndim()));
  for (const int64_t d : call.Ints("dims")) x[d] = Whole(x[d]);
  return FactorText{FactorString({x}, {x}), {}};
}

void FlipVjp(VjpCall& c) {
  static const OpDef& op = GetOp("flip");
  c.set(0, Call1(op, {&c.grad()}, c.attrs()));
}

DTensor Triangle(const char* name, const DTensor& x, int64_t diagonal, bool upper) {
  static const OpDef& op = GetOp("tril");
  return AsOp(name, {{"x", x}}, [&] {
    if (x.ndim() < 2) ThrowInvalid(name, "needs two dims or more");
    return Call1(op, {&x}, {IntAttr(diagonal), BoolAttr(upper)});
  });
}

// Cells of [rows, columns] up to diagonal `shift`, which is at most as far as the rim: none in the
// rows before `first`, one more in each then, all from `full` on.
int64_t CellsBelow(int64_t rows, int64_t columns, int64_t shift) {
  const int64_t first = std::clamp<int64_t>(-shift, 0, rows);
  const int64_t full = std::clamp(columns - shift, first, rows);
  return (full - first) * (first + full + 1 + 2 * shift) / 2 + (rows - full) * columns;
}

DTensor TriangleIndices(const char* name, int64_t rows, int64_t columns, int64_t offset, bool upper,
                        const TensorOptions& options) {
  if (rows < 0 || columns < 0) {
    ThrowInvalid(name, absl::StrCat("sizes [", rows, ", ", columns, "] must be 0 or more"));
  }
  ThrowIfError(CheckedNumel({2, rows, columns}).status());
  // The diagonal before the first column that is taken, or the last one that is.
  const int64_t shift = std::clamp(offset, -rows, columns) - (upper ? 1 : 0);
  const int64_t below = CellsBelow(rows, columns, shift);
  const int64_t n = upper ? rows * columns - below : below;
  Tensor cells = ValueOrThrow(Tensor::Empty({2, n}, DType::kI64));
  auto* row = cells.data_as<int64_t>();
  int64_t* column = row + n;
  for (int64_t r = upper ? 0 : std::clamp<int64_t>(-shift, 0, rows), i = 0; i < n; ++r) {
    const int64_t cut = std::clamp<int64_t>(r + shift + 1, 0, columns);
    for (int64_t k = upper ? cut : 0; k < (upper ? columns : cut); ++k, ++i) {
      row[i] = r;
      column[i] = k;
    }
  }
  if (options.dtype.has_value()) cells = ValueOrThrow(cells.To(*options.dtype));
  Placements p = options.placements;
  if (options.mesh.defined()) p.resize(options.mesh.ndim());
  return DistributeTensor(cells, options.mesh, p);
}

// Applies `prepare` to each of them.
std::vector<DTensor> Each(const char* op, absl::Span<const DTensor> xs,
                          DTensor (*prepare)(const DTensor&)) {
  if (xs.empty()) ThrowInvalid(op, "needs at least one tensor");
  std::vector<DTensor> all;
  for (const DTensor& x : xs) all.push_back(prepare(x));
  return all;
}

DTensor AsColumn(const DTensor& x) { return x.ndim() < 2 ? reshape(x, {x.numel(), 1}) : x; }

}  // namespace

void RegisterArrangeOps() {
  Op("tril(x; diagonal, upper)")
      .Factors("... r c -> ... r c")
      .Linear("x")
      .Monotone("x")
      .NeedsOffset("r")
      .NeedsOffset("c")
      .Vjp(TrilVjp);
  Op("flip(x; dims)").Factors(FlipFactors).Linear("x").Monotone("x").Vjp(FlipVjp);
}

DTensor tril(const DTensor& x, int64_t diagonal) { return Triangle("tril", x, diagonal, false); }
DTensor triu(const DTensor& x, int64_t diagonal) { return Triangle("triu", x, diagonal, true); }
DTensor tril_(const DTensor& self, int64_t diagonal) {
  return AsOp("tril_", {{"self", self}}, [&] { return copy_(self, tril(self, diagonal)); });
}
DTensor triu_(const DTensor& self, int64_t diagonal) {
  return AsOp("triu_", {{"self", self}}, [&] { return copy_(self, triu(self, diagonal)); });
}
DTensor tril_indices(int64_t row, int64_t col, int64_t offset, TensorOptions options) {
  return TriangleIndices("tril_indices", row, col, offset, false, options);
}
DTensor triu_indices(int64_t row, int64_t col, int64_t offset, TensorOptions options) {
  return TriangleIndices("triu_indices", row, col, offset, true, options);
}

DTensor diag(const DTensor& x, int64_t k) {
  return AsOp("diag", {{"x", x}}, [&] {
    if (x.ndim() != 1 && x.ndim() != 2) ThrowInvalid("diag", "needs one or two dims");
    return x.ndim() == 1 ? diag_embed(x, k) : clone(diagonal(x, k));
  });
}
DTensor diagflat(const DTensor& x, int64_t offset) {
  return AsOp("diagflat", {{"x", x}}, [&] { return diag_embed(flatten(x), offset); });
}
DTensor diag_embed(const DTensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  return AsOp("diag_embed", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("diag_embed", "x has no dims");
    const DiagonalDims dims = CheckedDiagonal("diag_embed", x.ndim() + 1, dim1, dim2);
    constexpr int64_t kFar = int64_t{1} << 40;
    if (offset < -kFar || offset > kFar) {
      ThrowInvalid("diag_embed", absl::StrCat("offset ", offset, " is too far"));
    }
    const int64_t n = x.size(-1) + std::abs(offset);
    ThrowIfError(CheckedNumel({n, n}).status());
    return OnDiagonal(x, n, n, offset, dims.first, dims.second);
  });
}

DTensor block_diag(absl::Span<const DTensor> xs) {
  std::vector<DTensor> blocks = Each("block_diag", xs, atleast_2d);
  // Of torch.result_type, which asks for dims: as matrices all would count alike.
  std::vector<const DTensor*> given;
  for (const DTensor& x : xs) given.push_back(&x);
  const DType type = pointwise::AllTypes("block_diag", given);
  for (DTensor& x : blocks) x = pointwise::Cast(x, type);
  int64_t columns = 0, before = 0;
  for (const DTensor& x : blocks) {
    if (x.ndim() > 2) ThrowInvalid("block_diag", "needs tensors of at most two dims");
    columns += x.size(1);
  }
  std::vector<DTensor> rows;
  for (const DTensor& x : blocks) {
    rows.push_back(constant_pad_nd(x, {before, columns - before - x.size(1)}));
    before += x.size(1);
  }
  return cat(rows, 0);
}

DTensor flip(const DTensor& x, DimList dims) {
  static const OpDef& op = GetOp("flip");
  return AsOp("flip", {{"x", x}}, [&] {
    if (dims.empty()) return clone(x);
    DTensor y = x;
    DimList here;  // those that no exchange reverses
    for (const int64_t d : CheckedDims("flip", dims, x.ndim())) {
      const DTensor moved = FlipAcross(y, static_cast<int>(d));
      if (!moved.defined()) here.push_back(d);
      if (moved.defined()) y = moved;
    }
    // Of a tensor without dims nothing was reversed, and x is no result.
    if (here.empty()) return y.impl() == x.impl() ? clone(x) : y;
    return Call1(op, {&y}, {IntsAttr(here)});
  });
}
DTensor fliplr(const DTensor& x) {
  return AsOp("fliplr", {{"x", x}}, [&] {
    if (x.ndim() < 2) ThrowInvalid("fliplr", "needs two dims or more");
    return flip(x, {1});
  });
}
DTensor flipud(const DTensor& x) {
  return AsOp("flipud", {{"x", x}}, [&] {
    if (x.ndim() < 1) ThrowInvalid("flipud", "needs one dim or more");
    return flip(x, {0});
  });
}

DTensor rot90(const DTensor& x, int64_t k, DimList dims) {
  return AsOp("rot90", {{"x", x}}, [&] {
    if (dims.size() != 2 || x.ndim() < 2) {
      ThrowInvalid("rot90", absl::StrCat("dims ", ToString(dims), " must be two of x's"));
    }
    const DiagonalDims plane = CheckedDiagonal("rot90", x.ndim(), dims[0], dims[1]);
    const int64_t a = plane.first, b = plane.second;
    switch (k & 3) {  // of negative numbers, too
      case 1:
        return transpose(flip(x, {b}), a, b);
      case 2:
        return flip(x, {a, b});
      case 3:
        return transpose(flip(x, {a}), a, b);
      default:
        return clone(x);
    }
  });
}

DTensor roll(const DTensor& x, DimList shifts, DimList dims) {
  return AsOp("roll", {{"x", x}}, [&] {
    if (dims.empty() && shifts.size() == 1) {
      return reshape(roll(flatten(x), shifts, {0}), x.shape());
    }
    if (dims.size() != shifts.size() || x.ndim() == 0) {
      ThrowInvalid("roll", absl::StrCat("shifts ", ToString(shifts), " and dims ", ToString(dims),
                                        " must be equally many"));
    }
    DTensor y = x;
    for (size_t i = 0; i < dims.size(); ++i) {
      const int d = CheckedDim("roll", dims[i], x.ndim());
      const int64_t size = x.size(d);
      const int64_t shift = size == 0 ? 0 : (shifts[i] % size + size) % size;
      if (shift == 0) continue;
      const DTensor moved = RollAcross(y, d, shift);
      y = moved.defined() ? moved
                          : cat({slice(y, d, size - shift, size), slice(y, d, 0, size - shift)}, d);
    }
    return y.impl() == x.impl() ? clone(x) : y;
  });
}

DTensor hstack(absl::Span<const DTensor> xs) {
  const std::vector<DTensor> all = Each("hstack", xs, atleast_1d);
  return cat(all, all[0].ndim() == 1 ? 0 : 1);
}
DTensor vstack(absl::Span<const DTensor> xs) { return cat(Each("vstack", xs, atleast_2d), 0); }
DTensor dstack(absl::Span<const DTensor> xs) { return cat(Each("dstack", xs, atleast_3d), 2); }
DTensor column_stack(absl::Span<const DTensor> xs) {
  return cat(Each("column_stack", xs, AsColumn), 1);
}

}  // namespace dtensor
