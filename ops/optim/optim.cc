// Updates of optimizers, norms of gradients and what initialisers compute.
#include "dtensor/ops/optim/optim.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/call_list.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

absl::Status Floating(const OpCall& call) {
  if (IsFloating(call.dtype(0))) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("needs floating tensors, got ", TypeName(call.dtype(0))));
}

// Nothing is broadcast: all operands are like the first.
absl::Status AllAlike(const OpCall& call) {
  DT_RETURN_IF_ERROR(Floating(call));
  for (int i = 1; i < call.num_inputs(); ++i) {
    if (call.shape(i) == call.shape(0)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(call.op().InputName(i), " ", ToString(call.shape(i)), " must have the shape ",
                     ToString(call.shape(0)), " of ", call.op().InputName(0)));
  }
  return SameDTypes(call);
}

absl::Status ScaleInputs(const OpCall& call) {
  DT_RETURN_IF_ERROR(Floating(call));
  if (call.in(1).ndim() == 0 && call.dtype(1) == DType::kF64) return absl::OkStatus();
  return absl::InvalidArgumentError("`by` must be a float64 tensor without dims");
}

absl::Status Numbers(const OpCall& call) {
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (call.in(i).ndim() == 0 && call.dtype(i) == DType::kF64) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(call.op().InputName(i), " must be a float64 tensor without dims"));
  }
  return absl::OkStatus();
}

// ", , ->"
absl::StatusOr<FactorText> NoDims(const OpCall& call) {
  return FactorText{FactorString(std::vector<DimTexts>(call.num_inputs()), {{}}), {}};
}

// "d0 d1 ->"
absl::StatusOr<FactorText> AllVanish(const OpCall& call) {
  return FactorText{FactorString({DimNames(call.in(0).ndim())}, {{}}), {}};
}

void CheckLengths(absl::string_view op, std::initializer_list<size_t> lengths) {
  for (const size_t n : lengths) {
    if (n == *lengths.begin()) continue;
    ThrowInvalid(op, absl::StrCat("lists of different lengths: ", *lengths.begin(), " and ", n));
  }
}

}  // namespace

void RegisterOptimOps() {
  const auto update = [](const char* signature, const char* factors) -> OpDef& {
    return Op(signature).Factors(factors).Elementwise().InPlace().Check(AllAlike);
  };
  update("sgd_(p, g; lr, weight_decay, maximize)", "..., ... -> ...").Linear("p + g");
  update(
      "sgd_momentum_(p, m, g; lr, momentum, dampening, weight_decay, nesterov, maximize, step)"
      " -> p_out, m_out",
      "..., ..., ... -> ..., ...")
      .Linear({"p_out: p + m + g", "m_out: p + m + g"});
  update("adagrad_(p, s, g; lr, lr_decay, eps, weight_decay, maximize, step) -> p_out, s_out",
         "..., ..., ... -> ..., ...");
  const char* const with_two = "..., ..., ..., ... -> ..., ..., ...";
  const char* const with_three = "..., ..., ..., ..., ... -> ..., ..., ..., ...";
#define DT_ADAM "; lr, beta1, beta2, eps, weight_decay, maximize, step) -> p_out, m_out, v_out"
  update("adam_(p, m, v, g" DT_ADAM, with_two);
  update("adam_amsgrad_(p, m, v, x, g" DT_ADAM ", x_out", with_three);
  update("adamw_(p, m, v, g" DT_ADAM, with_two);
  update("adamw_amsgrad_(p, m, v, x, g" DT_ADAM ", x_out", with_three);
#undef DT_ADAM
#define DT_RMSPROP "; lr, alpha, eps, weight_decay, momentum, maximize) -> p_out, v_out"
  update("rmsprop_(p, v, g" DT_RMSPROP, "..., ..., ... -> ..., ...");
  update("rmsprop_momentum_(p, v, b, g" DT_RMSPROP ", b_out", with_two);
  update("rmsprop_centered_(p, v, a, g" DT_RMSPROP ", a_out", with_two);
  update("rmsprop_centered_momentum_(p, v, b, a, g" DT_RMSPROP ", b_out, a_out", with_three);
#undef DT_RMSPROP
  Op("power_sum(x; p)")
      .Factors(AllVanish)
      .Elementwise()
      .Reduces(ReduceOp::kSum)
      .Check(Floating)
      .OutDType(DType::kF64);
  Op("max_abs(x)")
      .Factors(AllVanish)
      .Elementwise()
      .Reduces(ReduceOp::kMax)
      .Check(Floating)
      .OutDType(DType::kF64);
  // One after the other, so that the order of the list decides the bits.
  Op("add_n(xs...)").Factors(NoDims).Linear("xs").Check(Numbers);
  Op("scale_(x, by)")
      .Factors("..., ... -> ...")
      .Linear("x(by)")
      .Elementwise()
      .InPlace()
      .Check(ScaleInputs);
  Op("truncated_normal_(x; mean, std, a, b)")
      .Factors("... -> ...")
      .Monotone("x")
      .Elementwise()
      .InPlace()
      .Check(Floating);
}

void sgd_(TensorList parameters, TensorList momenta, TensorList grads, IntSpan steps,
          const SGDOptions& o) {
  static const OpDef &plain = GetOp("sgd_"), &with_momentum = GetOp("sgd_momentum_");
  const bool moves = o.momentum != 0;
  CheckLengths("sgd_", {parameters.size(), grads.size(), steps.size(),
                        moves ? momenta.size() : parameters.size()});
  CallList list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!moves) {
      Call(plain, {&parameters[i], &grads[i]},
           {FloatAttr(o.lr), FloatAttr(o.weight_decay), BoolAttr(o.maximize)});
      continue;
    }
    Call(with_momentum, {&parameters[i], &momenta[i], &grads[i]},
         {FloatAttr(o.lr), FloatAttr(o.momentum), FloatAttr(o.dampening), FloatAttr(o.weight_decay),
          BoolAttr(o.nesterov), BoolAttr(o.maximize), IntAttr(steps[i])});
  }
  list.Run();
}

namespace {

void Adam(absl::string_view name, const OpDef& plain, const OpDef& amsgrad, TensorList parameters,
          TensorList averages, TensorList squares, TensorList max_squares, TensorList grads,
          IntSpan steps, const AdamOptions& o) {
  CheckLengths(name, {parameters.size(), averages.size(), squares.size(), grads.size(),
                      steps.size(), o.amsgrad ? max_squares.size() : parameters.size()});
  CallList list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const Attr attrs[] = {FloatAttr(o.lr),  FloatAttr(o.beta1),        FloatAttr(o.beta2),
                          FloatAttr(o.eps), FloatAttr(o.weight_decay), BoolAttr(o.maximize),
                          IntAttr(steps[i])};
    const DTensor &p = parameters[i], &m = averages[i], &v = squares[i], &g = grads[i];
    if (o.amsgrad) {
      Call(amsgrad, {&p, &m, &v, &max_squares[i], &g}, attrs);
    } else {
      Call(plain, {&p, &m, &v, &g}, attrs);
    }
  }
  list.Run();
}

}  // namespace

void adamw_(TensorList parameters, TensorList averages, TensorList squares, TensorList max_squares,
            TensorList grads, IntSpan steps, const AdamWOptions& o) {
  static const OpDef &plain = GetOp("adamw_"), &amsgrad = GetOp("adamw_amsgrad_");
  Adam("adamw_", plain, amsgrad, parameters, averages, squares, max_squares, grads, steps,
       {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.amsgrad, o.maximize});
}

void adam_(TensorList parameters, TensorList averages, TensorList squares, TensorList max_squares,
           TensorList grads, IntSpan steps, const AdamOptions& o) {
  if (o.decoupled_weight_decay) {
    return adamw_(parameters, averages, squares, max_squares, grads, steps,
                  {o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, o.amsgrad, o.maximize});
  }
  static const OpDef &plain = GetOp("adam_"), &amsgrad = GetOp("adam_amsgrad_");
  Adam("adam_", plain, amsgrad, parameters, averages, squares, max_squares, grads, steps, o);
}

void adagrad_(TensorList parameters, TensorList sums, TensorList grads, IntSpan steps,
              const AdagradOptions& o) {
  static const OpDef& op = GetOp("adagrad_");
  CheckLengths("adagrad_", {parameters.size(), sums.size(), grads.size(), steps.size()});
  CallList list;
  for (size_t i = 0; i < parameters.size(); ++i) {
    Call(op, {&parameters[i], &sums[i], &grads[i]},
         {FloatAttr(o.lr), FloatAttr(o.lr_decay), FloatAttr(o.eps), FloatAttr(o.weight_decay),
          BoolAttr(o.maximize), IntAttr(steps[i])});
  }
  list.Run();
}

void rmsprop_(TensorList parameters, TensorList squares, TensorList momenta, TensorList averages,
              TensorList grads, const RMSpropOptions& o) {
  static const OpDef* const ops[2][2] = {
      {&GetOp("rmsprop_"), &GetOp("rmsprop_centered_")},
      {&GetOp("rmsprop_momentum_"), &GetOp("rmsprop_centered_momentum_")}};
  const bool moves = o.momentum != 0;
  const size_t n = parameters.size();
  CheckLengths("rmsprop_", {n, squares.size(), grads.size(), moves ? momenta.size() : n,
                            o.centered ? averages.size() : n});
  CallList list;
  for (size_t i = 0; i < n; ++i) {
    absl::InlinedVector<const DTensor*, 5> inputs = {&parameters[i], &squares[i]};
    if (moves) inputs.push_back(&momenta[i]);
    if (o.centered) inputs.push_back(&averages[i]);
    inputs.push_back(&grads[i]);
    Call(*ops[moves][o.centered], inputs,
         {FloatAttr(o.lr), FloatAttr(o.alpha), FloatAttr(o.eps), FloatAttr(o.weight_decay),
          FloatAttr(o.momentum), BoolAttr(o.maximize)});
  }
  list.Run();
}

DTensor power_sum(const DTensor& x, double p) {
  static const OpDef &sum = GetOp("power_sum"), &max = GetOp("max_abs");
  return AsOp("power_sum", {{"x", x}}, [&] {
    if (!(p > 0)) {
      ThrowInvalid("power_sum", absl::StrCat("p must be positive or infinity, got ", p));
    }
    return std::isinf(p) ? Call1(max, {&x}) : Call1(sum, {&x}, {FloatAttr(p)});
  });
}

void scale_(TensorList xs, const DTensor& by) {
  static const OpDef& op = GetOp("scale_");
  RequireDefined("scale_", {{"by", by}});
  RequireOwn("scale_", {{"by", by}});  // of no tensors no op looks at it
  CallList list;
  for (const DTensor& x : xs) Call(op, {&x, &by});
  list.Run();
}

void truncated_normal_from_uniform_(const DTensor& x, double mean, double std, double a, double b) {
  static const OpDef& op = GetOp("truncated_normal_");
  AsOp("truncated_normal_from_uniform_", {{"x", x}},
       [&] { Call(op, {&x}, {FloatAttr(mean), FloatAttr(std), FloatAttr(a), FloatAttr(b)}); });
}

}  // namespace dtensor
