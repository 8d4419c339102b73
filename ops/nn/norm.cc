// layer_norm and rms_norm. The ops work on the last dim; op functions flatten several dims into it.
// Over a sharded last dim they decompose into small reductions.
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/common.h"
#include "dtensor/ops/nn/statistics.h"

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

// Of a backward op: dy, x and g have one floating dtype, the statistics (no trailing dim) that in
// which it is computed.
absl::Status BackwardInputs(const OpCall& call, std::initializer_list<int> trailing) {
  const DType dtype = call.dtype(0);
  if (!IsFloating(dtype)) {
    return absl::InvalidArgumentError(
        absl::StrCat("needs floating tensors, got ", TypeName(dtype)));
  }
  int i = 0;
  for (const int dims : trailing) {
    const DType want = dims == 0 ? ComputeType(dtype) : dtype;
    if (call.dtype(i) != want) {
      return absl::InvalidArgumentError(
          absl::StrCat(call.op().InputName(i), " must be ", TypeName(want), " where dy is ",
                       TypeName(dtype), ", is ", TypeName(call.dtype(i))));
    }
    ++i;
  }
  return SameLeading(call, trailing);
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

// --- with the normalized dim sharded: reductions of a number or two per row

using Given = absl::Span<const DTensor>;

DTensor Narrow(const DTensor& x, const DTensor& like) { return to(x, like.dtype()); }

// x, g, b; eps -> y, mean, rstd
Values LayerNormParts(Given in, absl::Span<const Attr> attrs) {
  const DTensor x = Wide(in[0]);
  const Statistics s = StatisticsOf(x, {x.ndim() - 1});
  const DTensor rstd = rsqrt(add(s.variance, attrs[0].d));
  const DTensor unit = mul(sub(x, s.mean), rstd);
  return {Narrow(add(mul(unit, Wide(in[1])), Wide(in[2])), in[0]), squeeze(s.mean, {-1}),
          squeeze(rstd, {-1})};
}

// dy, x, mean, rstd, g -> dx, dg, db
Values LayerNormBackwardParts(Given in, absl::Span<const Attr>) {
  const DTensor dy = Wide(in[0]), rstd = unsqueeze(in[3], -1);
  const DTensor unit = mul(sub(Wide(in[1]), unsqueeze(in[2], -1)), rstd);
  const DTensor dx = StandardizedGradient(mul(dy, Wide(in[4])), unit, rstd, {in[1].ndim() - 1});
  const Shape& shape = in[4].shape();
  return {Narrow(dx, in[0]), Narrow(sum_to(mul(dy, unit), shape), in[0]),
          Narrow(sum_to(dy, shape), in[0])};
}

// x, g; eps -> y, rstd
Values RmsNormParts(Given in, absl::Span<const Attr> attrs) {
  const DTensor x = Wide(in[0]);
  const DTensor of_squares = Settled(mean(square(x), {-1}, true));
  const DTensor rstd = rsqrt(add(of_squares, attrs[0].d));
  return {Narrow(mul(mul(x, rstd), Wide(in[1])), in[0]), squeeze(rstd, {-1})};
}

// dy, x, rstd, g -> dx, dg
Values RmsNormBackwardParts(Given in, absl::Span<const Attr>) {
  const DTensor dy = Wide(in[0]), rstd = unsqueeze(in[2], -1), unit = mul(Wide(in[1]), rstd);
  const DTensor scaled = mul(dy, Wide(in[3]));
  const DTensor along = Settled(mean(mul(scaled, unit), {-1}, true));
  return {Narrow(mul(sub(scaled, mul(unit, along)), rstd), in[0]),
          Narrow(sum_to(mul(dy, unit), in[3].shape()), in[0])};
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
      .Decompose(LayerNormParts)
      .Vjp(LayerNormVjp, "x, g, mean, rstd");
  Op("layer_norm_backward(dy, x, mean, rstd, g) -> dx, dg, db")
      .Factors("... [c], ... [c], ..., ..., [c] -> ... [c], [c], [c]")
      .Linear({"dx: dy * g(x, mean, rstd)", "dg: dy(x, mean, rstd)", "db: dy"})
      .Check([](const OpCall& c) { return BackwardInputs(c, {1, 1, 0, 0, -1}); })
      .Decompose(LayerNormBackwardParts);
  Op("rms_norm(x, g; eps) -> y, rstd")
      .Factors("... [c], [c] -> ... [c], ...")
      .Linear({"y: g(x)", "rstd: (x)"})
      .Check(FloatingX)
      .OutDType(NormDType)
      .Decompose(RmsNormParts)
      .Vjp(RmsNormVjp, "x, g, rstd");
  Op("rms_norm_backward(dy, x, rstd, g) -> dx, dg")
      .Factors("... [c], ... [c], ..., [c] -> ... [c], [c]")
      .Linear({"dx: dy * g(x, rstd)", "dg: dy(x, rstd)"})
      .Check([](const OpCall& c) { return BackwardInputs(c, {1, 1, 0, -1}); })
      .Decompose(RmsNormBackwardParts);
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
    const auto statistic = [&](const DTensor& t) {
      return reshape(to(t.Detach(), x.dtype()), kept);
    };
    return Values{reshape(all[0], x.shape()), statistic(all[1]), statistic(all[2])};
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
    RequireFloating("rms_norm", x);
    // A weight of another dtype: both in the wider of the types that they are computed in.
    const DType of_g = weight.defined() ? weight.dtype() : x.dtype();
    const DType type =
        of_g == x.dtype() ? of_g : PromoteTypes(ComputeType(x.dtype()), ComputeType(of_g));
    const DTensor flat = to(FlattenLast(x, normalized_shape.size()), type);
    const DTensor g = to(Parameter(weight, x, normalized_shape, 1), type);
    return to(reshape(Call(op, {&flat, &g}, {FloatAttr(eps)})[0], x.shape()), x.dtype());
  });
}

}  // namespace dtensor
