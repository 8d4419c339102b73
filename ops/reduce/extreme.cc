// The largest and least elements with their places.
#include "dtensor/ops/ops.h"
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

DTensor Place(const OpDef& op, const char* name, const DTensor& x, std::optional<int64_t> dim,
              bool keepdim) {
  return AsOp(name, {{"x", x}}, [&] {
    const NoGrad no_grad;
    const Line line = LineOf(x, dim);
    const DTensor at = AlongDim(op, name, line.x, line.dim, keepdim && dim.has_value())[1];
    return keepdim && !dim ? reshape(at, Shape(x.ndim(), 1)) : at;
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
