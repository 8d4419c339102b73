// Losses of elements: a number per element of input and target, then their mean or sum. 16-bit
// floats are computed in float32 and rounded once, at the end.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/common.h"

namespace dtensor {
namespace {

// Input and target in the computing type, and the dtype of the loss.
struct Elements {
  DTensor x, t;
  DType dtype;
};

// `integers`: whether two of them count as float32.
Elements ElementsOf(absl::string_view op, const DTensor& input, const DTensor& target,
                    bool integers = false) {
  const DType dtype = PromoteTypes(input.dtype(), target.dtype());
  if (integers && !IsFloating(dtype)) {
    return {to(input, DType::kF32), to(target, DType::kF32), DType::kF32};
  }
  Elements e = {Wide(input), Wide(target), dtype};
  if (!IsFloating(e.dtype)) {
    ThrowInvalid(op, absl::StrCat("needs floating tensors, got ", TypeName(input.dtype()), " and ",
                                  TypeName(target.dtype())));
  }
  return e;
}

void RequireSameShape(absl::string_view op, const DTensor& input, const DTensor& target) {
  if (input.shape() == target.shape()) return;
  ThrowInvalid(op, absl::StrCat("target must have the shape of input, ", ToString(input.shape()),
                                ", is ", ToString(target.shape())));
}

DTensor Reduced(const DTensor& losses, DType dtype, Reduction reduction) {
  RequireReduction(reduction);
  if (reduction == Reduction::kNone) return to(losses, dtype);
  return to(reduction == Reduction::kSum ? sum(losses) : mean(losses), dtype);
}

// d^2 / 2 up to |d| = delta, from there on the line that goes on: c * (d - c / 2) for the d that is
// nearest to 0 within delta. Its gradient is c.
DTensor Huber(const DTensor& d, double delta) {
  const DTensor c = clamp(d, -delta, delta);
  return mul(c, sub(d, mul(c, 0.5)));
}

// -(t log x + (1 - t) log(1 - x)), logarithms from -100 up.
DTensor CrossEntropyOfProbabilities(const DTensor& input, const DTensor& target) {
  const DTensor x = input.Detach(), t = target.Detach();
  const auto forward = [&]() -> Values {
    const DTensor no = clamp_min(log1p(neg(x)), -100), yes = clamp_min(log(x), -100);
    return {sub(mul(sub(t, 1), no), mul(t, yes))};
  };
  // Of the logarithms as they are, but for the product in the denominator, which stays positive.
  const auto backward = [x, t](const Values& grads) -> Values {
    const DTensor slope = clamp_min(mul(sub(1, x), x), double{1e-12f});
    return {mul(grads[0], div(sub(x, t), slope)), mul(grads[0], sub(log1p(neg(x)), log(x)))};
  };
  return CustomFunction("binary_cross_entropy", {input, target}, forward, backward, {x, t})[0];
}

}  // namespace

DTensor mse_loss(const DTensor& input, const DTensor& target, Reduction reduction) {
  return AsOp("mse_loss", {{"input", input}, {"target", target}}, [&] {
    const Elements e = ElementsOf("mse_loss", input, target);
    return Reduced(square(sub(e.x, e.t)), e.dtype, reduction);
  });
}

DTensor l1_loss(const DTensor& input, const DTensor& target, Reduction reduction) {
  return AsOp("l1_loss", {{"input", input}, {"target", target}}, [&] {
    const Elements e = ElementsOf("l1_loss", input, target);
    return Reduced(abs(sub(e.x, e.t)), e.dtype, reduction);
  });
}

DTensor smooth_l1_loss(const DTensor& input, const DTensor& target, Reduction reduction,
                       double beta) {
  return AsOp("smooth_l1_loss", {{"input", input}, {"target", target}}, [&] {
    if (!(beta >= 0)) {
      ThrowInvalid("smooth_l1_loss", absl::StrCat("beta must not be negative, is ", beta));
    }
    const Elements e = ElementsOf("smooth_l1_loss", input, target);
    const DTensor d = sub(e.x, e.t);
    return Reduced(beta == 0 ? abs(d) : div(Huber(d, beta), beta), e.dtype, reduction);
  });
}

DTensor huber_loss(const DTensor& input, const DTensor& target, Reduction reduction, double delta) {
  return AsOp("huber_loss", {{"input", input}, {"target", target}}, [&] {
    if (!(delta > 0)) {
      ThrowInvalid("huber_loss", absl::StrCat("delta must be positive, is ", delta));
    }
    const Elements e = ElementsOf("huber_loss", input, target);
    return Reduced(Huber(sub(e.x, e.t), delta), input.dtype(), reduction);
  });
}

DTensor binary_cross_entropy(const DTensor& input, const DTensor& target, const DTensor& weight,
                             Reduction reduction) {
  return AsOp("binary_cross_entropy",
              {{"input", input}, {"target", target}, {"weight", weight, true}}, [&] {
                RequireSameShape("binary_cross_entropy", input, target);
                const Elements e = ElementsOf("binary_cross_entropy", input, target);
                DTensor losses = CrossEntropyOfProbabilities(e.x, to(e.t, e.x.dtype()));
                if (weight.defined()) losses = mul(losses, Wide(weight));
                return Reduced(losses, e.dtype, reduction);
              });
}

DTensor binary_cross_entropy_with_logits(const DTensor& input, const DTensor& target,
                                         const DTensor& weight, Reduction reduction,
                                         const DTensor& pos_weight) {
  constexpr const char* kName = "binary_cross_entropy_with_logits";
  return AsOp(kName,
              {{"input", input},
               {"target", target},
               {"weight", weight, true},
               {"pos_weight", pos_weight, true}},
              [&] {
                RequireSameShape(kName, input, target);
                const Elements e = ElementsOf(kName, input, target);
                // Of two logarithms: the gradient, (1 - t) sigmoid(x) - t sigmoid(-x), is exact.
                DTensor yes = logsigmoid(e.x);
                if (pos_weight.defined()) yes = mul(yes, Wide(pos_weight));
                DTensor losses = neg(add(mul(sub(1, e.t), logsigmoid(neg(e.x))), mul(e.t, yes)));
                if (weight.defined()) losses = mul(losses, Wide(weight));
                return Reduced(losses, e.dtype, reduction);
              });
}

DTensor kl_div(const DTensor& input, const DTensor& target, Reduction reduction, bool log_target) {
  return AsOp("kl_div", {{"input", input}, {"target", target}}, [&] {
    const Elements e = ElementsOf("kl_div", input, target);
    const DTensor losses =
        log_target ? mul(exp(e.t), sub(e.t, e.x)) : sub(xlogy(e.t, e.t), mul(e.t, e.x));
    if (reduction != Reduction::kBatchMean) return Reduced(losses, e.dtype, reduction);
    return to(div(sum(losses), input.ndim() == 0 ? 1 : input.size(0)), e.dtype);
  });
}

DTensor poisson_nll_loss(const DTensor& input, const DTensor& target, bool log_input, bool full,
                         double eps, Reduction reduction) {
  return AsOp("poisson_nll_loss", {{"input", input}, {"target", target}}, [&] {
    const Elements e = ElementsOf("poisson_nll_loss", input, target, /*integers=*/true);
    DTensor losses =
        log_input ? sub(exp(e.x), mul(e.t, e.x)) : sub(e.x, mul(e.t, log(add(e.x, eps))));
    if (full) {  // log(t!) by Stirling, from t = 2 on
      const DTensor log_factorial =
          add(sub(mul(e.t, log(e.t)), e.t), mul(log(mul(e.t, 2 * M_PI)), 0.5));
      losses = add(losses, masked_fill(log_factorial, le(e.t, 1), 0));
    }
    return Reduced(losses, e.dtype, reduction);
  });
}

DTensor margin_ranking_loss(const DTensor& input1, const DTensor& input2, const DTensor& target,
                            double margin, Reduction reduction) {
  constexpr const char* kName = "margin_ranking_loss";
  return AsOp(kName, {{"input1", input1}, {"input2", input2}, {"target", target}}, [&] {
    if (input1.ndim() != input2.ndim() || input1.ndim() != target.ndim()) {
      ThrowInvalid(kName, absl::StrCat("inputs and target must have as many dims, got ",
                                       input1.ndim(), ", ", input2.ndim(), " and ", target.ndim()));
    }
    // Integers stay some, and wrap, up to the margin, which makes float32 of them.
    const DType inputs = PromoteTypes(input1.dtype(), input2.dtype());
    const DType both = PromoteTypes(inputs, target.dtype());
    const auto in = [](const DTensor& x) { return IsFloating(x.dtype()) ? Wide(x) : x; };
    const DTensor short_of = add(mul(neg(in(target)), sub(in(input1), in(input2))), margin);
    return Reduced(clamp_min(short_of, 0), IsFloating(both) ? both : DType::kF32, reduction);
  });
}

}  // namespace dtensor
