// softmax and log_softmax. Over a sharded dim they decompose into two small reductions.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// Every operand has the same dims, of which `dim` is read whole.
absl::StatusOr<FactorText> SoftmaxFactors(const OpCall& call) {
  DimTexts x = DimNames(call.in(0).ndim());
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  x[dim] = Whole(x[dim]);
  return FactorText{FactorString(std::vector<DimTexts>(call.num_inputs(), x), {x}), {}};
}

// x - max(x) over dim, and the sum of its exponentials, in the computing type. What goes over the
// ranks here and below is what the op is, so strict mode has nothing against it.
struct Shifted {
  DTensor x, sum;
};
Shifted Shift(const DTensor& x, int64_t dim) {
  const DTensor wide = to(x, ComputeType(x.dtype()));
  const DTensor shifted = sub(wide, Settled(amax(wide, {dim}, true)));
  return {shifted, Settled(sum(exp(shifted), {dim}, true))};
}

Values SoftmaxParts(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  const Shifted s = Shift(in[0], attrs[0].i);
  return {to(div(exp(s.x), s.sum), in[0].dtype())};
}

Values LogSoftmaxParts(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  const Shifted s = Shift(in[0], attrs[0].i);
  return {to(sub(s.x, log(s.sum)), in[0].dtype())};
}

Values SoftmaxBackwardParts(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  const DType type = ComputeType(in[0].dtype());
  const DTensor dy = to(in[0], type), y = to(in[1], type);
  const DTensor inner = Settled(sum(mul(dy, y), {attrs[0].i}, true));
  return {to(mul(sub(dy, inner), y), in[0].dtype())};
}

Values LogSoftmaxBackwardParts(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  const DType type = ComputeType(in[0].dtype());
  const DTensor dy = to(in[0], type), y = to(in[1], type);
  return {to(sub(dy, mul(exp(y), Settled(sum(dy, {attrs[0].i}, true)))), in[0].dtype())};
}

void SoftmaxVjp(VjpCall& c) {
  static const OpDef& op = GetOp("softmax_backward");
  const DTensor &dy = c.grad(), &y = c.out();
  c.set(0, Call1(op, {&dy, &y}, c.attrs()));
}

void LogSoftmaxVjp(VjpCall& c) {
  static const OpDef& op = GetOp("log_softmax_backward");
  const DTensor &dy = c.grad(), &y = c.out();
  c.set(0, Call1(op, {&dy, &y}, c.attrs()));
}

DTensor RunAlong(const OpDef& op, const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  const int d = CheckedDim(op.name(), dim, x.ndim());
  const DTensor in = dtype ? to(x, *dtype) : x;
  RequireFloating(op.name(), in);
  if (x.ndim() == 0) return squeeze(RunAlong(op, unsqueeze(in, 0), 0, {}), {0});
  return Call1(op, {&in}, {IntAttr(d)});
}

}  // namespace

void RegisterSoftmaxOps() {
  Op("softmax(x; dim)").Factors(SoftmaxFactors).Decompose(SoftmaxParts).Vjp(SoftmaxVjp, "out");
  Op("log_softmax(x; dim)")
      .Factors(SoftmaxFactors)
      .Decompose(LogSoftmaxParts)
      .Vjp(LogSoftmaxVjp, "out");
  Op("softmax_backward(dy, y; dim)")
      .Factors(SoftmaxFactors)
      .Linear("dy(y)")
      .Check(SameDTypes)
      .Decompose(SoftmaxBackwardParts);
  Op("log_softmax_backward(dy, y; dim)")
      .Factors(SoftmaxFactors)
      .Linear("dy(y)")
      .Check(SameDTypes)
      .Decompose(LogSoftmaxBackwardParts);
}

DTensor softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  static const OpDef& op = GetOp("softmax");
  return AsOp("softmax", {{"x", x}}, [&] { return RunAlong(op, x, dim, dtype); });
}

DTensor softmin(const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  return AsOp("softmin", {{"x", x}}, [&] { return softmax(neg(x), dim, dtype); });
}

DTensor log_softmax(const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  static const OpDef& op = GetOp("log_softmax");
  return AsOp("log_softmax", {{"x", x}}, [&] { return RunAlong(op, x, dim, dtype); });
}

}  // namespace dtensor
