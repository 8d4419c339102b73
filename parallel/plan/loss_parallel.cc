#include "dtensor/parallel/plan/loss_parallel.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/nn/cross_entropy.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

bool Cuts(const DTensor& x, int64_t dim) {
  return std::any_of(x.placements().begin(), x.placements().end(),
                     [&](const Placement& p) { return p.cuts_dim() && p.dim() == dim; });
}

// softmax or log_softmax, whose only attribute is the dim: from its parts where that is cut, and so
// is its gradient, as one step of the tape.
Values FromParts(InterceptedCall& call) {
  const int64_t dim = call.attrs[0].i;
  if (!Cuts(call.inputs[0], dim)) return call.Proceed();
  const OpDef& op = call.op;
  const OpDef& gradient = GetOp(absl::StrCat(op.name(), "_backward"));
  const DTensor x = call.inputs[0].Detach();
  const auto y = std::make_shared<DTensor>();
  const auto forward = [&]() -> Values {
    const Values made = op.decompose()({x}, call.attrs);
    *y = made[0].Detach();
    return made;
  };
  const auto backward = [y, dim, &gradient](const Values& grads) -> Values {
    return gradient.decompose()({grads[0], *y}, {IntAttr(dim)});
  };
  return CustomFunction(op.name(), {call.inputs[0]}, forward, backward,
                        absl::MakeConstSpan(y.get(), 1));
}

double MegatronSmoothing(double a, int64_t classes) {
  if (classes < 2) ThrowInvalid("token_loss", "label smoothing needs two classes at least");
  const double v = static_cast<double>(classes);
  const double s = a * v / (v - 1);
  if (s > 1) {
    ThrowInvalid("token_loss", absl::StrCat("label_smoothing ", a, " of ", classes, " classes is ",
                                            s, " in Megatron's definition; at most ", (v - 1) / v));
  }
  return s;
}

DTensor TokenLoss(const DTensor& logits, const DTensor& target, const TokenLossOptions& o) {
  if (!(o.z_loss >= 0)) {
    ThrowInvalid("token_loss", absl::StrCat("z_loss must not be negative, is ", o.z_loss));
  }
  if (logits.ndim() == 0) ThrowInvalid("token_loss", "logits need a class dim");
  const int64_t classes = logits.size(-1);
  const Shape rows_of(logits.shape().begin(), logits.shape().end() - 1);
  if (target.shape() != rows_of) {
    ThrowInvalid("token_loss",
                 absl::StrCat("logits ", ToString(logits.shape()), " need a target ",
                              ToString(rows_of), ", it is ", ToString(target.shape())));
  }
  const DTensor x = reshape(logits, {-1, classes}), t = reshape(target, {target.numel()});
  const double smoothing = o.label_smoothing > 0 && o.smoothing == Smoothing::kMegatron
                               ? MegatronSmoothing(o.label_smoothing, classes)
                               : o.label_smoothing;
  const DTensor loss =
      internal::CrossEntropy(x, t, o.weight, o.ignore_index, o.reduction, smoothing, o.z_loss);
  return o.reduction == Reduction::kNone ? reshape(loss, target.shape()) : loss;
}

}  // namespace

LossParallel::LossParallel()
    : log_softmax_("log_softmax", FromParts), softmax_("softmax", FromParts) {}

DTensor token_loss(const DTensor& logits, const DTensor& target, const TokenLossOptions& options) {
  return AsOp("token_loss",
              {{"logits", logits}, {"target", target}, {"weight", options.weight, true}},
              [&] { return TokenLoss(logits, target, options); });
}

}  // namespace dtensor
