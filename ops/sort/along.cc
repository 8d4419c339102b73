#include "dtensor/ops/sort/along.h"

#include <array>
#include <memory>

#include "absl/strings/str_cat.h"

namespace dtensor {
namespace {

// Dims of a tensor of n dims in which `dim` has a name of its own.
DimTexts WithDim(int n, int64_t dim, absl::string_view name) {
  DimTexts dims = DimNames(n);
  dims[dim] = std::string(name);
  return dims;
}

// x, index -> like index
absl::StatusOr<FactorText> TakeFactors(const OpCall& call) {
  const int n = call.in(0).ndim();
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, n));
  const DimTexts x = WithDim(n, dim, "n"), taken = WithDim(n, dim, "k");
  return FactorText{FactorString({x, taken}, {taken}), {}};
}
// y, index -> `size` along dim
absl::StatusOr<FactorText> PutFactors(const OpCall& call) {
  const int n = call.in(0).ndim();
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, n));
  const DimTexts put = WithDim(n, dim, "k"), out = WithDim(n, dim, "n");
  return FactorText{FactorString({put, put}, {out}), {{"n", call.Int("size")}}};
}

absl::Status Int64Index(const OpCall& call) {
  if (call.dtype(1) == DType::kI64) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("indices must be int64, are ", TypeName(call.dtype(1))));
}

void TakeVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  c.set(0, PutAlong(c.grad(), c.in(1), dim, c.in_spec(0).shape()[dim]));
}
void PutVjp(VjpCall& c) { c.set(0, TakeAlong(c.grad(), c.in(1), c.Int("dim"))); }

}  // namespace

void RegisterAlongOps() {
  Op("take_along(x, index; dim)")
      .Factors(TakeFactors)
      .Linear("x(index)")
      .Monotone("x")
      .NeedsOffset("n")
      .Check(Int64Index)
      .Vjp(TakeVjp, "index");
  Op("put_along(y, index; dim, size)")
      .Factors(PutFactors)
      .Linear("y(index)")
      .NeedsOffset("n")
      .Check(Int64Index)
      .Vjp(PutVjp, "index");
}

DTensor TakeAlong(const DTensor& x, const DTensor& index, int64_t dim) {
  static const OpDef& op = GetOp("take_along");
  return Call1(op, {&x, &index}, {IntAttr(dim)});
}

DTensor PutAlong(const DTensor& y, const DTensor& index, int64_t dim, int64_t size) {
  static const OpDef& op = GetOp("put_along");
  return Call1(op, {&y, &index}, {IntAttr(dim), IntAttr(size)});
}

absl::StatusOr<FactorText> PickFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  DimTexts x = DimNames(call.in(0).ndim()), y = x;
  x[dim] = Whole(x[dim]);
  if (call.Bool("keepdim")) {
    y[dim] = "1";
  } else {
    y.erase(y.begin() + dim);
  }
  return FactorText{FactorString({x}, {y, y}), {}};
}

absl::StatusOr<FactorText> LineFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  DimTexts x = DimNames(call.in(0).ndim());
  x[dim] = Whole(x[dim]);
  return FactorText{FactorString(std::vector<DimTexts>(call.num_inputs(), x),
                                 std::vector<DimTexts>(call.op().num_outputs(), x)),
                    {}};
}

absl::StatusOr<DType> ValuesAndIndices(const OpCall& call, int output) {
  return output == 0 ? call.dtype(0) : DType::kI64;
}

absl::Status NonEmptyDim(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  if (call.shape(0)[dim] != 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("dim ", dim, " of x ", ToString(call.shape(0)),
                                                 " is empty: there is no element to take"));
}

void PickVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim"), size = c.in_spec(0).shape()[dim];
  if (c.Bool("keepdim")) return c.set(0, PutAlong(c.grad(), c.out(1), dim, size));
  c.set(0, PutAlong(unsqueeze(c.grad(), dim), unsqueeze(c.out(1), dim), dim, size));
}

void LinesVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  c.set(0, PutAlong(c.grad(), c.out(1), dim, c.in_spec(0).shape()[dim]));
}

Values CallOnLines(const OpDef& op, const DTensor& x, absl::Span<const Attr> attrs) {
  if (x.ndim() > 0) return Call(op, {&x}, attrs);
  const DTensor line = unsqueeze(x, 0);
  Values all;
  for (const DTensor& y : Call(op, {&line}, attrs)) all.push_back(reshape(y, {}));
  return all;
}

DTensor SharedAmong(const char* name, const DTensor& x, absl::FunctionRef<DTensor()> value) {
  return AsOp(name, {{"x", x}}, [&] {
    if (!x.requires_grad() || !GradEnabled()) return value();
    const auto saved = std::make_shared<std::array<DTensor, 2>>();  // x and the result
    const auto forward = [&]() -> Values {
      const DTensor y = value();
      *saved = {x.Detach(), y.Detach()};
      return {y};
    };
    const auto backward = [saved](const Values& grads) -> Values {
      const auto& [in, y] = *saved;
      const DTensor nan = mul(ne(in, in), ne(y, y));
      const DTensor hit = to(masked_fill(eq(in, y), nan, true), ComputeType(in.dtype()));
      return {to(mul(hit, div(grads[0], sum(hit))), in.dtype())};
    };
    return CustomFunction(name, {x}, forward, backward, *saved)[0];
  });
}

Line LineOf(const DTensor& x, std::optional<int64_t> dim) {
  if (dim) return {x, *dim};
  return {reshape(x, {x.numel()}), 0};
}

}  // namespace dtensor
