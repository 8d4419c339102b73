// Updates of optimizers, norms of gradients and what initialisers compute.
#include "dtensor/ops/optim/optim.h"

#include <cmath>

#include "absl/strings/str_cat.h"
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
  const auto update = [](const char* signature, const char* factors) {
    Op(signature).Factors(factors).Elementwise().InPlace().Check(AllAlike);
  };
  update("sgd_(p, g; lr, weight_decay, maximize)", "..., ... -> ...");
  update(
      "sgd_momentum_(p, m, g; lr, momentum, dampening, weight_decay, nesterov, maximize, step)"
      " -> p_out, m_out",
      "..., ..., ... -> ..., ...");
  update(
      "adamw_(p, m, v, g; lr, beta1, beta2, eps, weight_decay, maximize, step)"
      " -> p_out, m_out, v_out",
      "..., ..., ..., ... -> ..., ..., ...");
  update(
      "adamw_amsgrad_(p, m, v, x, g; lr, beta1, beta2, eps, weight_decay, maximize, step)"
      " -> p_out, m_out, v_out, x_out",
      "..., ..., ..., ..., ... -> ..., ..., ..., ...");
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
  Op("scale_(x, by)").Factors("..., ... -> ...").Elementwise().InPlace().Check(ScaleInputs);
  Op("truncated_normal_(x; mean, std, a, b)")
      .Factors("... -> ...")
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
}

void adamw_(TensorList parameters, TensorList averages, TensorList squares, TensorList max_squares,
            TensorList grads, IntSpan steps, const AdamWOptions& o) {
  static const OpDef &plain = GetOp("adamw_"), &amsgrad = GetOp("adamw_amsgrad_");
  CheckLengths("adamw_", {parameters.size(), averages.size(), squares.size(), grads.size(),
                          steps.size(), o.amsgrad ? max_squares.size() : parameters.size()});
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
  for (const DTensor& x : xs) Call(op, {&x, &by});
}

void truncated_normal_from_uniform_(const DTensor& x, double mean, double std, double a, double b) {
  static const OpDef& op = GetOp("truncated_normal_");
  AsOp("truncated_normal_from_uniform_", {{"x", x}},
       [&] { Call(op, {&x}, {FloatAttr(mean), FloatAttr(std), FloatAttr(a), FloatAttr(b)}); });
}

}  // namespace dtensor
