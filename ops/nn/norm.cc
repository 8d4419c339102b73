// layer_norm and rms_norm. The ops work on the last dim; op functions flatten several dims into it.
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// Output 0 is like x; the statistics are in the computing type.
absl::StatusOr<DType> NormDType(const OpCall& call, int output) {
  return output == 0 ? call.dtype(0) : ComputeType(call.dtype(0));
}

// Gradients have the dtype of dy, which is x's.
absl::Status FloatingX(const OpCall& call) {
  if (!IsFloating(call.dtype(0))) {
    return absl::InvalidArgumentError(
        absl::StrCat("needs a floating tensor, got ", TypeName(call.dtype(0))));
  }
  return SameDTypes(call);
}

void LayerNormVjp(VjpCall& c) {
  static const OpDef& op = GetOp("layer_norm_backward");
  const DTensor &dy = c.grad(), &x = c.in(0), &g = c.in(1), &mean = c.out(1), &rstd = c.out(2);
  const Values grads = Call(op, {&dy, &x, &mean, &rstd, &g});
  for (int i = 0; i < 3; ++i) {
    if (c.needs(i)) c.set(i, grads[i]);
  }
}

void RmsNormVjp(VjpCall& c) {
  static const OpDef& op = GetOp("rms_norm_backward");
  const DTensor &dy = c.grad(), &x = c.in(0), &g = c.in(1), &rstd = c.out(1);
  const Values grads = Call(op, {&dy, &x, &rstd, &g});
  for (int i = 0; i < 2; ++i) {
    if (c.needs(i)) c.set(i, grads[i]);
  }
}

void CheckNormShapes(absl::string_view op, const DTensor& x, IntSpan normalized,
                     const DTensor& weight, const DTensor& bias) {
  const IntSpan shape = x.shape();
  if (normalized.empty() || normalized.size() > shape.size() ||
      shape.last(normalized.size()) != normalized) {
    ThrowInvalid(op, absl::StrCat("normalized_shape ", ToString(normalized),
                                  " must be the last dims of x ", ToString(shape)));
  }
  if (weight.defined() && IntSpan(weight.shape()) != normalized) {
    ThrowInvalid(op, absl::StrCat("weight ", ToString(weight.shape()),
                                  " must have normalized_shape ", ToString(normalized)));
  }
  if (bias.defined() && IntSpan(bias.shape()) != normalized) {
    ThrowInvalid(op, absl::StrCat("bias ", ToString(bias.shape()), " must have normalized_shape ",
                                  ToString(normalized)));
  }
}

// x with the normalized dims as one.
DTensor FlattenLast(const DTensor& x, size_t dims) {
  return dims == 1 ? x : flatten(x, -static_cast<int64_t>(dims), -1);
}

// `parameter` as one dim, or `value` everywhere where there is none.
DTensor Parameter(const DTensor& parameter, const DTensor& x, IntSpan normalized, double value) {
  if (parameter.defined()) return FlattenLast(parameter, normalized.size());
  return full({Numel(normalized)}, value, {x.dtype(), x.mesh(), {}});
}

// y, mean, 1 / deviation; with the normalized dims as one, or without them.
Values LayerNorm(absl::string_view name, const DTensor& x, IntSpan normalized,
                 const DTensor& weight, const DTensor& bias, double eps) {
  static const OpDef& op = GetOp("layer_norm");
  CheckNormShapes(name, x, normalized, weight, bias);
  const DTensor flat = FlattenLast(x, normalized.size());
  const DTensor g = Parameter(weight, x, normalized, 1), b = Parameter(bias, x, normalized, 0);
  return Call(op, {&flat, &g, &b}, {FloatAttr(eps)});
}

}  // namespace

void RegisterNormOps() {
  Op("layer_norm(x, g, b; eps) -> y, mean, rstd")
      .Factors("... [c], [c], [c] -> ... [c], ..., ...")
      .Linear({"y: g(x) + b", "mean: x", "rstd: (x)"})
      .Check(FloatingX)
      .OutDType(NormDType)
      .Vjp(LayerNormVjp, "x, g, mean, rstd");
  Op("layer_norm_backward(dy, x, mean, rstd, g) -> dx, dg, db")
      .Factors("... [c], ... [c], ..., ..., [c] -> ... [c], [c], [c]")
      .Linear({"dx: dy * g(x, mean, rstd)", "dg: dy(x, mean, rstd)", "db: dy"})
      .Check([](const OpCall& c) { return SameLeading(c, {1, 1, 0, 0, -1}); });
  Op("rms_norm(x, g; eps) -> y, rstd")
      .Factors("... [c], [c] -> ... [c], ...")
      .Linear({"y: g(x)", "rstd: (x)"})
      .Check(FloatingX)
      .OutDType(NormDType)
      .Vjp(RmsNormVjp, "x, g, rstd");
  Op("rms_norm_backward(dy, x, rstd, g) -> dx, dg")
      .Factors("... [c], ... [c], ..., [c] -> ... [c], [c]")
      .Linear({"dx: dy * g(x, rstd)", "dg: dy(x, rstd)"})
      .Check([](const OpCall& c) { return SameLeading(c, {1, 1, 0, -1}); });
}

DTensor layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight,
                   const DTensor& bias, double eps) {
  return AsOp("layer_norm", {{"x", x}, {"weight", weight, true}, {"bias", bias, true}}, [&] {
    return reshape(LayerNorm("layer_norm", x, normalized_shape, weight, bias, eps)[0], x.shape());
  });
}

Values native_layer_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight,
                         const DTensor& bias, double eps) {
  return AsOp("native_layer_norm", {{"x", x}, {"weight", weight, true}, {"bias", bias, true}}, [&] {
    const Values all = LayerNorm("native_layer_norm", x, normalized_shape, weight, bias, eps);
    Shape kept = x.shape();
    for (size_t d = kept.size() - normalized_shape.size(); d < kept.size(); ++d) kept[d] = 1;
    return Values{reshape(all[0], x.shape()), reshape(all[1].Detach(), kept),
                  reshape(all[2].Detach(), kept)};
  });
}

DTensor rms_norm(const DTensor& x, IntSpan normalized_shape, const DTensor& weight, double eps) {
  static const OpDef& op = GetOp("rms_norm");
  return AsOp("rms_norm", {{"x", x}, {"weight", weight, true}}, [&] {
    CheckNormShapes("rms_norm", x, normalized_shape, weight, {});
    if (eps == -1) {
      eps = x.dtype() == DType::kF64 ? std::numeric_limits<double>::epsilon()
                                     : std::numeric_limits<float>::epsilon();
    }
    const DTensor flat = FlattenLast(x, normalized_shape.size());
    const DTensor g = Parameter(weight, x, normalized_shape, 1);
    return reshape(Call(op, {&flat, &g}, {FloatAttr(eps)})[0], x.shape());
  });
}

}  // namespace dtensor
