// The largest and least elements with their places.
#include <algorithm>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/blocks.h"

namespace dtensor {
namespace {

// The extreme of every block, and of these the first one.
template <const char* kName>
Values ExtremeOfBlocks(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp(kName);
  const int64_t dim = attrs[0].i;
  const std::optional<Blocks> blocks = BlocksOf(in[0], dim);
  if (!blocks) {
    const DTensor x = Gathered(in[0], dim);
    return Call(op, {&x}, attrs);
  }
  const Values best = Call(op, {&blocks->x}, {IntAttr(dim + 1), BoolAttr(true)});
  const DTensor values = Gathered(Joined(best[0], dim), dim);
  const Values taken = Call(op, {&values}, {IntAttr(dim), BoolAttr(true)});
  const DTensor indices = Joined(add(best[1], BlockStarts(*blocks, dim)), dim);
  const Values kept = {taken[0], IndexOfPlaces(indices, taken[1], dim)};
  if (attrs[1].i != 0) return kept;
  return {squeeze(kept[0], {dim}), squeeze(kept[1], {dim})};
}

constexpr char kMaxDim[] = "max_dim", kMinDim[] = "min_dim";

Values AlongDim(const OpDef& op, const char* name, const DTensor& x, int64_t dim, bool keepdim) {
  return AsOp(name, {{"x", x}}, [&] {
    return CallOnLines(op, x, {IntAttr(CheckedDim(name, dim, x.ndim())), BoolAttr(keepdim)});
  });
}

// The row-major place of the extreme of all elements, found dim after dim, the last one first: of
// equal elements the first one stays. [1, ..., 1]
DTensor PlaceOfAll(const OpDef& op, const char* name, const DTensor& x) {
  DTensor best = x, place;
  int64_t width = 1;  // of what is behind dim d
  for (int d = x.ndim() - 1; d >= 0; --d) {
    const Values found = AlongDim(op, name, best, d, /*keepdim=*/true);
    best = found[0];
    const DTensor ahead = mul(found[1], width);
    place = place.defined() ? add(Settled(TakeAlong(place, found[1], d)), ahead) : ahead;
    width *= x.size(d);
  }
  return place;
}

// Whether a dim behind the first one is cut: its elements are no blocks of the line of all.
bool CutsBehindFirst(const DTensor& x) {
  return std::any_of(x.placements().begin(), x.placements().end(),
                     [](const Placement& p) { return p.cuts_dim() && p.dim() > 0; });
}

DTensor Place(const OpDef& op, const char* name, const DTensor& x, std::optional<int64_t> dim,
              bool keepdim) {
  return AsOp(name, {{"x", x}}, [&] {
    const NoGrad no_grad;
    if (!dim && CutsBehindFirst(x)) {
      const DTensor place = PlaceOfAll(op, name, x);
      return keepdim ? place : Owned(reshape(place, {}));
    }
    const Line line = LineOf(x, dim);
    const DTensor at = AlongDim(op, name, line.x, line.dim, keepdim && dim.has_value())[1];
    return keepdim && !dim ? Owned(reshape(at, Shape(x.ndim(), 1))) : at;
  });
}

}  // namespace

void RegisterExtremeOps() {
  const auto extreme = [](const char* signature, DecomposeFn of_blocks) {
    Op(signature)
        .Factors(PickFactors)
        .OutDType(ValuesAndIndices)
        .Check(NonEmptyDim)
        .Decompose(of_blocks)
        .Vjp(PickVjp, "indices");
  };
  extreme("max_dim(x; dim, keepdim) -> values, indices", ExtremeOfBlocks<kMaxDim>);
  extreme("min_dim(x; dim, keepdim) -> values, indices", ExtremeOfBlocks<kMinDim>);
}

#define DT_OP(name) static const OpDef& op = GetOp(#name)

Values max(const DTensor& x, int64_t dim, bool keepdim) {
  DT_OP(max_dim);
  return AlongDim(op, "max", x, dim, keepdim);
}
Values min(const DTensor& x, int64_t dim, bool keepdim) {
  DT_OP(min_dim);
  return AlongDim(op, "min", x, dim, keepdim);
}
DTensor argmax(const DTensor& x, std::optional<int64_t> dim, bool keepdim) {
  DT_OP(max_dim);
  return Place(op, "argmax", x, dim, keepdim);
}
DTensor argmin(const DTensor& x, std::optional<int64_t> dim, bool keepdim) {
  DT_OP(min_dim);
  return Place(op, "argmin", x, dim, keepdim);
}

DTensor max(const DTensor& x) {
  return SharedAmong("max", x, [&] { return amax(x); });
}
DTensor min(const DTensor& x) {
  return SharedAmong("min", x, [&] { return amin(x); });
}
DTensor max(const DTensor& x, const DTensor& other) { return maximum(x, other); }
DTensor min(const DTensor& x, const DTensor& other) { return minimum(x, other); }

Values aminmax(const DTensor& x, std::optional<int64_t> dim, bool keepdim) {
  return AsOp("aminmax", {{"x", x}}, [&] {
    const DimList dims = dim ? DimList{*dim} : DimList();
    return Values{amin(x, dims, keepdim), amax(x, dims, keepdim)};
  });
}

}  // namespace dtensor
