// Test support: calls with a tensor of another rank or world, a case for every public function and
// every tensor that it takes. For ownership_test.cc alone.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "dtensor/explain.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/nn/attention.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/pipeline/pipeline.h"
#include "dtensor/parallel/plan/explain.h"

namespace dtensor {
namespace {

// Whole tensors: what a case made of one first would be refused there.
struct Tensors {
  DTensor x;        // [4, 4] float32, a leaf with a gradient
  DTensor v, i, m;  // [4] float32, [4] int64, [4, 4] bool
  DTensor h;        // [4, 4] with a history
  DTensor s, n, w;  // [], of float32, int64 and float64
  DTensor b, q;     // [1, 4, 4] and [1, 1, 4, 4] float32
  DTensor ids, r;   // [1, 4] int64 and bool
  DTensor d;        // [4, 4] float32, replicated on EveryRank()
};

// On the last an error that one rank has would end the others' calls, too.
DeviceMesh ThisRank() {
  return ValueOrThrow(DeviceMesh::FromRanks({1}, {RankContext::Current().rank()}, {"w"}));
}
DeviceMesh EveryRank() { return DeviceMesh({RankContext::Current().world_size()}, {"w"}); }

Tensors Make() {
  Tensors t;
  t.x = full({4, 4}, 0.5);
  t.x.RequiresGrad();
  t.h = t.x * 2.0;
  t.v = full({4}, 0.25);
  t.i = zeros({4}, {DType::kI64});
  t.m = full({4, 4}, 1, {DType::kBool});
  t.s = full({}, 0.5), t.n = zeros({}, {DType::kI64}), t.w = full({}, 0.5, {DType::kF64});
  t.b = full({1, 4, 4}, 0.5), t.q = full({1, 1, 4, 4}, 0.5);
  t.ids = zeros({1, 4}, {DType::kI64}), t.r = full({1, 4}, 1, {DType::kBool});
  t.d = full({4, 4}, 0.5, {.mesh = EveryRank()});
  sum(t.x * t.x).Backward();
  return t;
}

// `f`: of another world; `o`: the caller's own.
using Call2 = absl::Status (*)(const Tensors& f, const Tensors& o);
struct Case {
  const char* function;
  Call2 call;
};
using Cases = std::vector<Case>;

// A case that passes when `...` throws or returns the refusal.
#define CASE(signature, ...)                           \
  {signature, [](const Tensors& f, const Tensors& o) { \
     (void)f, (void)o;                                 \
     __VA_ARGS__;                                      \
     return absl::OkStatus();                          \
   }}
#define UNARY(op) CASE(#op "(const DTensor&)", op(f.x))
#define BINARY(op)                                            \
  CASE(#op "(const DTensor&, const DTensor&)", op(f.x, o.x)), \
      CASE(#op "(const DTensor&, const DTensor&)", op(o.x, f.x))
#define BINARY_INT(op)                                        \
  CASE(#op "(const DTensor&, const DTensor&)", op(f.i, o.i)), \
      CASE(#op "(const DTensor&, const DTensor&)", op(o.i, f.i))
#define TERNARY(signature, call)                                              \
  CASE(signature, call(f.x, o.x, o.x)), CASE(signature, call(o.x, f.x, o.x)), \
      CASE(signature, call(o.x, o.x, f.x))
#define SCALED(op)                                                        \
  CASE(#op "(const DTensor&, const DTensor&, Scalar)", op(f.x, o.x)),     \
      CASE(#op "(const DTensor&, const DTensor&, Scalar)", op(o.x, f.x)), \
      CASE(#op "(const DTensor&, Scalar, Scalar)", op(f.x, 2))
#define WITH_NUMBER(op) CASE(#op "(const DTensor&, Scalar)", op(f.x, 2))
#define OF_NUMBER(op) CASE(#op "(Scalar, const DTensor&)", op(2, f.x))
#define COMPARE(op) BINARY(op), WITH_NUMBER(op)
#define OPERATOR(sign)                                                         \
  CASE("operator" #sign "(const DTensor&, const DTensor&)", f.x sign o.x),     \
      CASE("operator" #sign "(const DTensor&, const DTensor&)", o.x sign f.x), \
      CASE("operator" #sign "(const DTensor&, Scalar)", f.x sign 2),           \
      CASE("operator" #sign "(Scalar, const DTensor&)", 2 sign f.x)

DTensor Mutable(const DTensor& t) { return t; }
const DeviceMesh& Self() { return DeviceMesh::Self(); }
Values Same(const Values& in) { return in; }

// What the lines of elementwise.inc declare.
Cases ElementwiseCases() {
#define CASES_Hidden(op)
#define CASES_Real(op) UNARY(op),
#define CASES_Same(op) UNARY(op),
#define CASES_NotBool(op) UNARY(op),
#define CASES_Two(op) BINARY(op),
#define CASES_Compared(op) COMPARE(op),
#define CASES_TwoReal(op) BINARY(op),
#define CASES_TwoInt(op) BINARY_INT(op),
#define CASES_Backward(op) BINARY(op),
#define CASES_Mixed(op) COMPARE(op), OF_NUMBER(op),
#define CASES_MixedReal(op) COMPARE(op), OF_NUMBER(op),
#define CASES_MixedInt(op)                                          \
  BINARY_INT(op), CASE(#op "(const DTensor&, Scalar)", op(f.i, 2)), \
      CASE(#op "(Scalar, const DTensor&)", op(2, f.i)),
#define DT_POINTWISE(kind, user, name, ...) CASES_##user(name)
  return {
#include "dtensor/ops/pointwise/elementwise.inc"
  };
}

Cases PointwiseCases() {
  return {
      SCALED(add),
      SCALED(sub),
      OF_NUMBER(sub),
      BINARY(mul),
      WITH_NUMBER(mul),
      BINARY(div),
      WITH_NUMBER(div),
      OF_NUMBER(div),
      BINARY(pow),
      WITH_NUMBER(pow),
      OF_NUMBER(pow),
      CASE("gelu(const DTensor&, bool)", gelu(f.x)),
      CASE("div(const DTensor&, const DTensor&, absl::string_view)", div(f.x, o.x, "floor")),
      CASE("div(const DTensor&, const DTensor&, absl::string_view)", div(o.x, f.x, "trunc")),
      CASE("div(const DTensor&, Scalar, absl::string_view)", div(f.x, 2, "trunc")),
      BINARY(float_power),
      WITH_NUMBER(float_power),
      OF_NUMBER(float_power),
      BINARY(ldexp),
      UNARY(square),
      UNARY(positive),
      UNARY(sgn),
      UNARY(deg2rad),
      UNARY(rad2deg),
      CASE("bitwise_not(const DTensor&)", bitwise_not(f.i)),
      CASE("round(const DTensor&, int64_t)", round(f.x)),
      BINARY(heaviside),
      BINARY(nextafter),
      CASE("isclose(const DTensor&, const DTensor&, double, double, bool)", isclose(f.x, o.x)),
      CASE("isclose(const DTensor&, const DTensor&, double, double, bool)", isclose(o.x, f.x)),
      CASE("clamp(const DTensor&, std::optional<Scalar>, std::optional<Scalar>)", clamp(f.x, 0, 1)),
      TERNARY("clamp(const DTensor&, const DTensor&, const DTensor&)", clamp),
      WITH_NUMBER(clamp_min),
      BINARY(clamp_min),
      WITH_NUMBER(clamp_max),
      BINARY(clamp_max),
      CASE("nan_to_num(const DTensor&, std::optional<double>, std::optional<double>, "
           "std::optional<double>)",
           nan_to_num(f.x)),
      TERNARY("lerp(const DTensor&, const DTensor&, const DTensor&)", lerp),
      CASE("lerp(const DTensor&, const DTensor&, double)", lerp(f.x, o.x, 0.5)),
      CASE("lerp(const DTensor&, const DTensor&, double)", lerp(o.x, f.x, 0.5)),
      TERNARY("addcmul(const DTensor&, const DTensor&, const DTensor&, Scalar)", addcmul),
      TERNARY("addcdiv(const DTensor&, const DTensor&, const DTensor&, Scalar)", addcdiv),
      WITH_NUMBER(fill),
      CASE("fill(const DTensor&, const DTensor&)", fill(f.x, o.s)),
      CASE("fill(const DTensor&, const DTensor&)", fill(o.x, f.s)),
      CASE("logit(const DTensor&, std::optional<double>)", logit(f.x)),
      CASE("polygamma(int64_t, const DTensor&)", polygamma(1, f.x)),
      CASE("softplus(const DTensor&, double, double)", softplus(f.x)),
      CASE("leaky_relu(const DTensor&, double)", leaky_relu(f.x)),
      CASE("elu(const DTensor&, double)", elu(f.x)),
      UNARY(selu),
      CASE("celu(const DTensor&, double)", celu(f.x)),
      CASE("hardtanh(const DTensor&, Scalar, Scalar)", hardtanh(f.x)),
      UNARY(relu6),
      CASE("softshrink(const DTensor&, double)", softshrink(f.x)),
      CASE("hardshrink(const DTensor&, double)", hardshrink(f.x)),
      CASE("threshold(const DTensor&, Scalar, Scalar)", threshold(f.x, 0, 1)),
      CASE("prelu(const DTensor&, const DTensor&)", prelu(f.x, o.v)),
      CASE("prelu(const DTensor&, const DTensor&)", prelu(o.x, f.v)),
      CASE("glu(const DTensor&, int64_t)", glu(f.x)),
      CASE("where(const DTensor&, Scalar, Scalar)", where(f.m, 1, 0)),
      CASE("where(const DTensor&, const DTensor&, const DTensor&)", where(f.m, o.x, o.x)),
      CASE("where(const DTensor&, const DTensor&, const DTensor&)", where(o.m, f.x, o.x)),
      CASE("where(const DTensor&, const DTensor&, const DTensor&)", where(o.m, o.x, f.x)),
      CASE("where(const DTensor&, const DTensor&, Scalar)", where(f.m, o.x, 1)),
      CASE("where(const DTensor&, const DTensor&, Scalar)", where(o.m, f.x, 1)),
      CASE("where(const DTensor&, Scalar, const DTensor&)", where(f.m, 1, o.x)),
      CASE("where(const DTensor&, Scalar, const DTensor&)", where(o.m, 1, f.x)),
      CASE("masked_fill(const DTensor&, const DTensor&, Scalar)", masked_fill(f.x, o.m, 1)),
      CASE("masked_fill(const DTensor&, const DTensor&, Scalar)", masked_fill(o.x, f.m, 1)),
      CASE("masked_fill(const DTensor&, const DTensor&, const DTensor&)",
           masked_fill(f.x, o.m, o.s)),
      CASE("masked_fill(const DTensor&, const DTensor&, const DTensor&)",
           masked_fill(o.x, f.m, o.s)),
      CASE("masked_fill(const DTensor&, const DTensor&, const DTensor&)",
           masked_fill(o.x, o.m, f.s)),
      CASE("gelu_backward(const DTensor&, const DTensor&, bool)", gelu_backward(f.x, o.x, false)),
      CASE("gelu_backward(const DTensor&, const DTensor&, bool)", gelu_backward(o.x, f.x, false)),
      CASE("dropout_apply(const DTensor&, const DTensor&, double)", dropout_apply(f.x, o.m, 2)),
      CASE("dropout_apply(const DTensor&, const DTensor&, double)", dropout_apply(o.x, f.m, 2)),
      CASE("maximum_backward(const DTensor&, const DTensor&, const DTensor&)",
           maximum_backward(f.x, o.x, o.x)),
      CASE("maximum_backward(const DTensor&, const DTensor&, const DTensor&)",
           maximum_backward(o.x, f.x, o.x)),
      CASE("maximum_backward(const DTensor&, const DTensor&, const DTensor&)",
           maximum_backward(o.x, o.x, f.x)),
      OPERATOR(+),
      OPERATOR(-),
      OPERATOR(*),
      OPERATOR(/),
      CASE("operator-(const DTensor&)", -f.x),
  };
}

Cases MathCases() {
  return {
      BINARY(matmul),
      CASE("bmm(const DTensor&, const DTensor&)", bmm(f.b, o.b)),
      CASE("bmm(const DTensor&, const DTensor&)", bmm(o.b, f.b)),
      CASE("linear(const DTensor&, const DTensor&, const DTensor&)", linear(f.x, o.x, o.v)),
      CASE("linear(const DTensor&, const DTensor&, const DTensor&)", linear(o.x, f.x, o.v)),
      CASE("linear(const DTensor&, const DTensor&, const DTensor&)", linear(o.x, o.x, f.v)),
      CASE("sum(const DTensor&, DimList, bool, std::optional<DType>)", sum(f.x)),
      CASE("mean(const DTensor&, DimList, bool, std::optional<DType>)", mean(f.x)),
      CASE("amax(const DTensor&, DimList, bool)", amax(f.x)),
      CASE("sum_to(const DTensor&, IntSpan)", sum_to(f.x, {4, 4})),
      CASE("softmax(const DTensor&, int64_t, std::optional<DType>)", softmax(f.x, 0)),
      CASE("log_softmax(const DTensor&, int64_t, std::optional<DType>)", log_softmax(f.x, 0)),
#define LAYER_NORM "layer_norm(const DTensor&, IntSpan, const DTensor&, const DTensor&, double)"
      CASE(LAYER_NORM, layer_norm(f.x, {4}, o.v, o.v)),
      CASE(LAYER_NORM, layer_norm(o.x, {4}, f.v, o.v)),
      CASE(LAYER_NORM, layer_norm(o.x, {4}, o.v, f.v)),
      CASE("rms_norm(const DTensor&, IntSpan, const DTensor&, double)", rms_norm(f.x, {4}, o.v)),
      CASE("rms_norm(const DTensor&, IntSpan, const DTensor&, double)", rms_norm(o.x, {4}, f.v)),
#define NLL "nll_loss(const DTensor&, const DTensor&, const DTensor&, int64_t, Reduction)"
      CASE(NLL, nll_loss(f.x, o.i, o.v)),
      CASE(NLL, nll_loss(o.x, f.i, o.v)),
      CASE(NLL, nll_loss(o.x, o.i, f.v)),
#define CROSS \
  "cross_entropy(const DTensor&, const DTensor&, const DTensor&, int64_t, Reduction, double)"
      CASE(CROSS, cross_entropy(f.x, o.i, o.v)),
      CASE(CROSS, cross_entropy(o.x, f.i, o.v)),
      CASE(CROSS, cross_entropy(o.x, o.i, f.v)),
#define ATTENTION                                                                       \
  "scaled_dot_product_attention(const DTensor&, const DTensor&, const DTensor&, const " \
  "DTensor&, bool, std::optional<double>, bool, double)"
      CASE(ATTENTION, scaled_dot_product_attention(f.x, o.x, o.x, o.m)),
      CASE(ATTENTION, scaled_dot_product_attention(o.x, f.x, o.x, o.m)),
      CASE(ATTENTION, scaled_dot_product_attention(o.x, o.x, f.x, o.m)),
      CASE(ATTENTION, scaled_dot_product_attention(o.x, o.x, o.x, f.m)),
#define ATTENTION_LSE                                                                       \
  "scaled_dot_product_attention_lse(const DTensor&, const DTensor&, const DTensor&, const " \
  "DTensor&, bool, std::optional<double>, bool, double)"
      CASE(ATTENTION_LSE, scaled_dot_product_attention_lse(f.x, o.x, o.x, o.m)[0]),
      CASE(ATTENTION_LSE, scaled_dot_product_attention_lse(o.x, f.x, o.x, o.m)[0]),
      CASE(ATTENTION_LSE, scaled_dot_product_attention_lse(o.x, o.x, f.x, o.m)[0]),
      CASE(ATTENTION_LSE, scaled_dot_product_attention_lse(o.x, o.x, o.x, f.m)[0]),
  };
}

Cases ViewCases() {
  return {
      CASE("view(const DTensor&, IntSpan)", view(f.x, {4, 4})),
      CASE("reshape(const DTensor&, IntSpan)", reshape(f.x, {4, 4})),
      CASE("flatten(const DTensor&, int64_t, int64_t)", flatten(f.v)),
      CASE("unflatten(const DTensor&, int64_t, IntSpan)", unflatten(f.x, 0, {4})),
      CASE("transpose(const DTensor&, int64_t, int64_t)", transpose(f.x, 0, 0)),
      CASE("permute(const DTensor&, IntSpan)", permute(f.x, {0, 1})),
      CASE("squeeze(const DTensor&)", squeeze(f.x)),
      CASE("squeeze(const DTensor&, DimList)", squeeze(f.x, DimList{})),
      CASE("unsqueeze(const DTensor&, int64_t)", unsqueeze(f.x, 0)),
      CASE("expand(const DTensor&, IntSpan)", expand(f.x, {4, 4})),
      CASE("slice(const DTensor&, int64_t, int64_t, int64_t, int64_t)", slice(f.x, 0, 0, 4)),
      CASE("select(const DTensor&, int64_t, int64_t)", select(f.x, 0, 0)),
      CASE("split(const DTensor&, int64_t, int64_t)", split(f.x, 4)),
      CASE("split(const DTensor&, DimList, int64_t)", split(f.x, DimList{4})),
      CASE("split(const DTensor&, std::initializer_list<int64_t>, int64_t)", split(f.x, {4})),
      CASE("cat(absl::Span<const DTensor>, int64_t)", cat(std::vector<DTensor>{f.x})),
      CASE("stack(absl::Span<const DTensor>, int64_t)", stack(std::vector<DTensor>{o.x, f.x})),
      CASE("to(const DTensor&, DType)", to(f.x, DType::kF32)),
      UNARY(clone),
      UNARY(detach),
      UNARY(contiguous),
      CASE("Recompute(const std::function<Values(const Values&)>&, const Values&)",
           Recompute(Same, {f.x})),
      BINARY(copy_),
      CASE("add_(const DTensor&, const DTensor&, Scalar)", add_(f.v, o.v)),
      CASE("add_(const DTensor&, const DTensor&, Scalar)", add_(o.v, f.v)),
      CASE("add_(const DTensor&, Scalar)", add_(f.v, 1)),
      CASE("sub_(const DTensor&, const DTensor&, Scalar)", sub_(f.v, o.v)),
      CASE("sub_(const DTensor&, const DTensor&, Scalar)", sub_(o.v, f.v)),
      CASE("sub_(const DTensor&, Scalar)", sub_(f.v, 1)),
      CASE("div_(const DTensor&, const DTensor&)", div_(f.v, o.v)),
      CASE("div_(const DTensor&, const DTensor&)", div_(o.v, f.v)),
      CASE("div_(const DTensor&, Scalar)", div_(f.v, 1)),
      CASE("operator+=(const DTensor&, const DTensor&)", f.v += o.v),
      CASE("operator+=(const DTensor&, const DTensor&)", o.v += f.v),
      CASE("operator+=(const DTensor&, Scalar)", f.v += 1),
      CASE("operator-=(const DTensor&, const DTensor&)", f.v -= o.v),
      CASE("operator-=(const DTensor&, const DTensor&)", o.v -= f.v),
      CASE("operator-=(const DTensor&, Scalar)", f.v -= 1),
      CASE("operator*=(const DTensor&, const DTensor&)", f.v *= o.v),
      CASE("operator*=(const DTensor&, const DTensor&)", o.v *= f.v),
      CASE("operator*=(const DTensor&, Scalar)", f.v *= 1),
      CASE("operator/=(const DTensor&, const DTensor&)", f.v /= o.v),
      CASE("operator/=(const DTensor&, const DTensor&)", o.v /= f.v),
      CASE("operator/=(const DTensor&, Scalar)", f.v /= 1),
      CASE("index(const DTensor&, absl::Span<const Index>)", index(f.v, {0})),
      CASE("mul_(const DTensor&, const DTensor&)", mul_(f.v, o.v)),
      CASE("mul_(const DTensor&, const DTensor&)", mul_(o.v, f.v)),
      CASE("mul_(const DTensor&, Scalar)", mul_(f.v, 1)),
  };
}

Cases RandomCases() {
  return {
      CASE("random_fill_(const DTensor&, const RandomOp&)", random_fill_(f.v, UniformOp())),
      CASE("random_fill_(const char*, const DTensor&, FillFn, absl::Span<const NamedInput>)",
           random_fill_("draw_", f.v, [](const DTensor&) { return absl::OkStatus(); })),
      CASE("random_fill_(const char*, const DTensor&, FillFn, absl::Span<const NamedInput>)",
           random_fill_("draw_", o.v, [](const DTensor&) { return absl::OkStatus(); },
                        {{"p", f.v}})),
      CASE("uniform_(const DTensor&, double, double)", uniform_(f.v)),
      CASE("normal_(const DTensor&, double, double)", normal_(f.v)),
      CASE("random_(const DTensor&, int64_t, int64_t)", random_(f.v, 0, 9)),
      CASE("random_(const DTensor&)", random_(f.v)),
      CASE("bernoulli_(const DTensor&, double)", bernoulli_(f.v)),
      CASE("bernoulli_(const DTensor&, const DTensor&)", bernoulli_(f.v, o.v)),
      CASE("bernoulli_(const DTensor&, const DTensor&)", bernoulli_(o.v, f.v)),
      CASE("exponential_(const DTensor&, double)", exponential_(f.v)),
      CASE("cauchy_(const DTensor&, double, double)", cauchy_(f.v)),
      CASE("log_normal_(const DTensor&, double, double)", log_normal_(f.v)),
      CASE("geometric_(const DTensor&, double)", geometric_(f.v, 0.5)),
      UNARY(rand_like),
      UNARY(randn_like),
      UNARY(bernoulli),
      CASE("randint_like(const DTensor&, int64_t, int64_t)", randint_like(f.x, 0, 9)),
      CASE("multinomial(const DTensor&, int64_t, bool)", multinomial(f.v, 1)),
      CASE("dropout(const DTensor&, double, bool)", dropout(f.x, 0)),
      CASE("dropout_with_mask(const DTensor&, double)", dropout_with_mask(f.x, 0.5)),
      CASE("dropout_(const DTensor&, double, bool)", dropout_(f.v, 0)),
      CASE("feature_dropout(const DTensor&, double, bool)", feature_dropout(f.x, 0)),
      CASE("alpha_dropout(const DTensor&, double, bool)", alpha_dropout(f.x, 0)),
      CASE("kaiming_uniform_(const DTensor&, double, FanMode, Gain)", kaiming_uniform_(f.x)),
      CASE("kaiming_normal_(const DTensor&, double, FanMode, Gain)", kaiming_normal_(f.x)),
      CASE("xavier_uniform_(const DTensor&, double)", xavier_uniform_(f.x)),
      CASE("xavier_normal_(const DTensor&, double)", xavier_normal_(f.x)),
      CASE("trunc_normal_(const DTensor&, double, double, double, double)", trunc_normal_(f.x)),
      CASE("orthogonal_(const DTensor&, double)", orthogonal_(f.x)),
  };
}

Cases TensorCases() {
  return {
      CASE("DTensor::local()", f.x.local()),
      CASE("DTensor::Item()", f.s.Item()),
      CASE("DTensor::ToVector()", f.x.ToVector<float>()),
      CASE("DTensor::ToString()", f.x.ToString()),
      CASE("DTensor::Redistribute(absl::Span<const Placement>, RedistributeOptions)",
           f.x.Redistribute(Placements{})),
      CASE("DTensor::Redistribute(absl::Span<const Placement>, RedistributeOptions)",
           f.x.Redistribute(Placements{}, {.async = true})),
      CASE("DTensor::Redistribute(absl::Span<const Placement>, RedistributeOptions)",
           f.x.Redistribute(Placements{}, {.shared = true})),
      CASE("DTensor::Redistribute(std::initializer_list<Placement>, RedistributeOptions)",
           f.x.Redistribute({})),
      CASE("DTensor::Redistribute(const DeviceMesh&, absl::Span<const Placement>, "
           "RedistributeOptions)",
           f.x.Redistribute(Self(), Placements{})),
      CASE("DTensor::Redistribute(const DeviceMesh&, std::initializer_list<Placement>, "
           "RedistributeOptions)",
           f.x.Redistribute(Self(), {})),
      CASE("DTensor::operator[](const Index&)", f.v[0]),
      CASE("DTensor::operator[](std::initializer_list<Index>)", f.v[{Slice(0, 1)}]),
      CASE("DTensor::ToLocal(absl::Span<const Placement>)", f.x.ToLocal()),
      CASE("DTensor::FullTensor()", f.x.FullTensor()),
      CASE("DTensor::requires_grad()", f.x.requires_grad()),
      CASE("DTensor::RequiresGrad(bool)", Mutable(f.x).RequiresGrad(false)),
      CASE("DTensor::is_leaf()", f.x.is_leaf()),
      CASE("DTensor::has_values()", f.x.has_values()),
      CASE("DTensor::grad()", f.x.grad()),
      CASE("DTensor::SetGrad(DTensor)", Mutable(f.x).SetGrad(full({4, 4}, 1.0))),
      CASE("DTensor::SetGrad(DTensor)", Mutable(o.x).SetGrad(f.x)),
      CASE("DTensor::SetGradLayout(DType, absl::Span<const Placement>)",
           Mutable(f.x).SetGradLayout(DType::kF32)),
      CASE("DTensor::ZeroGrad()", Mutable(f.x).ZeroGrad()),
      CASE("DTensor::Detach()", f.x.Detach()),
      CASE("SyncGradients(absl::Span<const DTensor>)", SyncGradients({o.x, f.x})),
      CASE("DTensor::Backward()", f.h.Backward()),
      CASE("DTensor::Backward(const DTensor&)", f.h.Backward(o.x)),
      CASE("DTensor::Backward(const DTensor&)", (o.x * 1.0).Backward(f.x)),
      CASE("DistributeTensor(const DTensor&, const DeviceMesh&, PlacementSpan)",
           DistributeTensor(f.x, Self(), {})),
      CASE("FromLocal(const DTensor&, const DeviceMesh&, PlacementSpan, const FromLocalOptions&)",
           FromLocal(f.x, Self(), {})),
      CASE("empty_like(const DTensor&, std::optional<DType>)", empty_like(f.x)),
      CASE("MemoryStrides(const DTensor&)", MemoryStrides(f.x)),
  };
}

Cases EngineCases() {
#define CUSTOM                                                                                 \
  "CustomFunction(absl::string_view, absl::Span<const DTensor>, absl::FunctionRef<Values()>, " \
  "CustomBackward, absl::Span<const DTensor>, bool)"
#define DISPATCH(name) \
  #name "(const OpDef&, Inputs, absl::Span<const Attr>, const DispatchOptions&)"
  const auto neg = [] { return *OpRegistry::Find("neg"); };
  static const OpDef& op = *neg();
  return {
      CASE(CUSTOM, CustomFunction(
                       "f", {f.x}, [&] { return Values{o.x}; }, Same)),
      CASE(CUSTOM, CustomFunction("f", {o.x}, [&] { return Values{o.h}; }, Same, {f.x})),
      CASE("VjpCall::set(int, DTensor)", CustomFunction(
                                             "f", {o.x}, [&] { return Values{o.x * 1.0}; },
                                             [&](const Values&) { return Values{f.x}; })[0]
                                             .Backward(o.v * 1.0 + o.x)),
      {DISPATCH(Dispatch),
       [](const Tensors& f, const Tensors&) {
         const DTensor* in[] = {&f.x};
         return Dispatch(op, in).status();
       }},
      {DISPATCH(Call),
       [](const Tensors& f, const Tensors&) {
         const DTensor* in[] = {&f.x};
         Call(op, in);
         return absl::OkStatus();
       }},
      {DISPATCH(Call1),
       [](const Tensors& f, const Tensors&) {
         const DTensor* in[] = {&f.x};
         Call1(op, in);
         return absl::OkStatus();
       }},
      {"Explain(const OpDef&, Inputs, absl::Span<const Attr>, const std::optional<CostModel>&)",
       [](const Tensors& f, const Tensors&) {
         const DTensor* in[] = {&f.x};
         return Explain(op, in).status();
       }},
      {"CheckOwn(const DTensor&)", [](const Tensors& f, const Tensors&) { return CheckOwn(f.x); }},
  };
}

struct Layer {
  Linear linear{4, 4};
  Layer() { Materialize(linear); }
};

Pipeline OneStage() {
  return Pipeline(ThisRank(), {PipelineStage{Same, {}}}, PipelineOptions{.mesh_dim = "w"});
}
DTensor Sum(int64_t, const Values& results) { return sum(results[0]); }

Cases ModuleCases() {
  return {
      CASE("Parameter::Set(const DTensor&)", Layer().linear.FindParameter("weight")->Set(f.x)),
      CASE("Parameter::Take(DTensor)", Layer().linear.FindParameter("weight")->Take(f.x)),
      CASE("Init::Copy(const DTensor&)",
           Parameter("p", {4, 4}, Init::Copy(f.x), DType::kF32).Materialize()),
      CASE("power_sum(const DTensor&, double)", power_sum(f.x, 2)),
      CASE("scale_(TensorList, const DTensor&)", scale_({f.v}, o.w)),
      CASE("scale_(TensorList, const DTensor&)", scale_({o.v}, f.w)),
      CASE("truncated_normal_from_uniform_(const DTensor&, double, double, double, double)",
           truncated_normal_from_uniform_(f.x, 0, 1, -1, 1)),
      CASE("Module::operator()(const Values&)", Layer().linear(Values{f.x})),
      CASE("Module::Recomputed(const Values&)", Layer().linear.Recomputed(Values{f.x})),
      CASE("Module::operator()(std::initializer_list<DTensor>)",
           Layer().linear(std::initializer_list<DTensor>{f.x})),
      CASE("Module::operator()(const DTensor&, const T&... rest)", Layer().linear(f.x)),
      CASE("Module::LoadStateDict(const StateDict&)",
           Layer().linear.LoadStateDict({{"weight", f.x}, {"bias", f.v}})),
      {"Optimizer::LoadStateDict(const StateDict&)",
       [](const Tensors& f, const Tensors&) {
         Layer layer;
         SGD sgd(layer.linear.NamedParameters(), {.momentum = 0.5});
         sgd.LoadStateDict({{"weight/momentum_buffer", f.x}, {"weight/step", sum(zeros({1}))}});
         return absl::OkStatus();
       }},
      CASE("Pipeline::Step(absl::Span<const Values>, const Loss&)",
           OneStage().Step({Values{f.x}}, Sum)),
      CASE("Pipeline::Evaluate(absl::Span<const Values>, const Loss&)",
           OneStage().Evaluate({Values{f.x}}, Sum)),
      {"Explain(absl::FunctionRef<Values(const Values&)>, const Values&, const ExplainOptions&)",
       [](const Tensors& f, const Tensors&) {
         return Explain([](const Values& in) { return Values{relu(in[0])}; }, {f.x}).status();
       }},
      {"Explain(Module&, const Values&, const ExplainOptions&)",
       [](const Tensors& f, const Tensors&) {
         Layer layer;
         return Explain(layer.linear, {f.x}).status();
       }},
  };
}

}  // namespace
}  // namespace dtensor
