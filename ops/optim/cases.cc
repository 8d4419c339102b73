#include "dtensor/ops/cases.h"

namespace dtensor {
namespace {

// In place and without a history, as a step is.
DTensor Sgd(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor p = a.Written("param"), g = a.T("grad");
  SGDOptions options = {a.Float("lr", 1e-3),     a.Float("momentum"), a.Float("dampening"),
                        a.Float("weight_decay"), a.Bool("nesterov"),  a.Bool("maximize")};
  const std::vector<DTensor> momenta(a.Has("momentum") ? 1 : 0,
                                     a.Has("momentum") ? a.Written("state") : DTensor());
  sgd_({&p, 1}, momenta, {&g, 1}, {a.Int("step", 1)}, options);
  return p;
}

// adam_ or adamw_, which have the same arguments.
template <class Options, class Step>
DTensor AdamStep(CaseArgs& a, Options options, const Step& step) {
  const NoGrad no_grad;
  const DTensor p = a.Written("param"), m = a.Written("average"), v = a.Written("square");
  const DTensor g = a.T("grad");
  options.lr = a.Float("lr", 1e-3);
  options.eps = a.Float("eps", 1e-8);
  options.weight_decay = a.Float("weight_decay", options.weight_decay);
  options.amsgrad = a.IsTensor("max_square");
  options.maximize = a.Bool("maximize");
  const std::vector<DTensor> most(options.amsgrad ? 1 : 0,
                                  options.amsgrad ? a.Written("max_square") : DTensor());
  step({&p, 1}, {&m, 1}, {&v, 1}, most, {&g, 1}, {a.Int("step", 1)}, options);
  return p;
}

DTensor Adam(CaseArgs& a) {
  AdamOptions options;
  options.decoupled_weight_decay = a.Bool("decoupled_weight_decay");
  return AdamStep(a, options, adam_);
}

DTensor Adagrad(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor p = a.Written("param"), s = a.Written("sum"), g = a.T("grad");
  adagrad_({&p, 1}, {&s, 1}, {&g, 1}, {a.Int("step", 1)},
           {.lr = a.Float("lr", 1e-2),
            .lr_decay = a.Float("lr_decay"),
            .weight_decay = a.Float("weight_decay"),
            .maximize = a.Bool("maximize")});
  return p;
}

DTensor Rmsprop(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor p = a.Written("param"), v = a.Written("square"), g = a.T("grad");
  const auto state = [&a](const char* name) {
    return a.IsTensor(name) ? std::vector<DTensor>{a.Written(name)} : std::vector<DTensor>();
  };
  const std::vector<DTensor> momenta = state("momenta"), averages = state("average");
  rmsprop_({&p, 1}, {&v, 1}, momenta, averages, {&g, 1},
           {.lr = a.Float("lr", 1e-2),
            .eps = a.Float("eps", 1e-8),
            .weight_decay = a.Float("weight_decay"),
            .momentum = a.Float("momentum"),
            .centered = !averages.empty(),
            .maximize = a.Bool("maximize")});
  return p;
}

// Gradients that a call may write to.
std::vector<DTensor> WrittenList(CaseArgs& a) {
  std::vector<DTensor> grads;
  for (const DTensor& g : a.List("grads")) grads.push_back(clone(g));
  return grads;
}

Values ClippedByNorm(CaseArgs& a) {
  const NoGrad no_grad;
  const std::vector<DTensor> grads = WrittenList(a);
  Values all = {clip_grad_norm_(grads, a.Float("max_norm"), a.Float("norm_type", 2))};
  all.insert(all.end(), grads.begin(), grads.end());
  return all;
}

Values ClippedByKnownNorm(CaseArgs& a) {
  const NoGrad no_grad;
  const std::vector<DTensor> grads = WrittenList(a);
  clip_grads_with_norm_(grads, a.Float("max_norm"), a.T("total_norm"));
  return Values(grads.begin(), grads.end());
}

Values ClippedByValue(CaseArgs& a) {
  const NoGrad no_grad;
  const std::vector<DTensor> grads = WrittenList(a);
  clip_grad_value_(grads, a.Float("clip_value"));
  return Values(grads.begin(), grads.end());
}

DTensor Scaled(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor x = a.Written("self");
  scale_({&x, 1}, a.T("by"));
  return x;
}

DTensor Truncated(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor x = a.Written("self");
  truncated_normal_from_uniform_(x, a.Float("mean"), a.Float("std", 1), a.Float("a", -1),
                                 a.Float("b", 1));
  return x;
}

}  // namespace

void AddOptimCases(CaseTable* table) {
  // Second steps, so that states count; operands of one shape, of one, two and three dims.
  table->Add({
      DT_CASE(sgd_,
              "param[5,4] grad[5,4] lr=0.5 weight_decay=0.25 step=2 | "
              "param[n] grad[n] state[n] lr=0.5 momentum=0.25 dampening=0.5 weight_decay=0.5 "
              "nesterov=true step=2 | "
              "param[a,b,c] grad[a,b,c] state[a,b,c] lr=0.5 momentum=0.25 step=2 | "
              "param[7] grad[7] lr=0.5 maximize=true",
              Sgd(a)),
      DT_CASE(adamw_,
              "param[a,b] grad[a,b] average[a,b] square[a,b]@0.1..1 lr=0.5 step=2 | "
              "param[n] grad[n] average[n] square[n]@0.1..1 lr=0.5 step=2 maximize=true | "
              "param[a,b] grad[a,b] average[a,b] square[a,b]@0.1..1 max_square[a,b]@0.1..1 "
              "lr=0.5 step=2 | "
              "param[n] grad[n] average[n] square[n]@0.1..1 max_square[n]@0.1..1 lr=0.5 step=2",
              AdamStep(a, AdamWOptions(), adamw_)),
      DT_CASE(adam_,
              "param[a,b] grad[a,b] average[a,b] square[a,b]@0.1..1 lr=0.5 weight_decay=0.25 "
              "step=2 | param[n] grad[n] average[n] square[n]@0.1..1 lr=0.5 step=2 maximize=true | "
              "param[a,b] grad[a,b] average[a,b] square[a,b]@0.1..1 max_square[a,b]@0.1..1 "
              "lr=0.5 step=2 | param[n] grad[n] average[n] square[n]@0.1..1 "
              "max_square[n]@0.1..1 lr=0.5 weight_decay=0.5 step=2 | param[n] grad[n] average[n] "
              "square[n]@0.1..1 weight_decay=0.5 step=2 decoupled_weight_decay=true",
              Adam(a)),
      DT_CASE(adagrad_,
              "param[a,b] grad[a,b] sum[a,b]@0.1..1 lr=0.5 weight_decay=0.25 lr_decay=0.5 step=2 | "
              "param[n] grad[n] sum[n]@0.1..1 lr=0.5 maximize=true",
              Adagrad(a)),
      DT_CASE(rmsprop_,
              "param[a,b] grad[a,b] square[a,b]@0.1..1 lr=0.5 weight_decay=0.25 | "
              "param[n] grad[n] square[n]@0.1..1 lr=0.5 maximize=true | "
              "param[a,b] grad[a,b] square[a,b]@0.1..1 momenta[a,b] lr=0.5 momentum=0.5 "
              "weight_decay=0.5 | "
              "param[n] grad[n] square[n]@0.1..1 momenta[n] lr=0.5 momentum=0.5 | "
              "param[a,b] grad[a,b] square[a,b]@1..2 average[a,b] lr=0.5 weight_decay=0.5 | "
              "param[n] grad[n] square[n]@1..2 average[n] lr=0.5 | "
              "param[a,b] grad[a,b] square[a,b]@1..2 momenta[a,b] average[a,b] lr=0.5 "
              "momentum=0.5 | "
              "param[n] grad[n] square[n]@1..2 momenta[n] average[n] lr=0.5 momentum=0.5",
              Rmsprop(a)),
      DT_CASE_IS(kNoGradient, power_sum,
                 "self[a,b] p=2 | self[n] p=3 | self[a,b] p=inf | self[n] p=inf",
                 power_sum(a.T("self"), a.Float("p"))),
      DT_CASE_IS(kNoGradient, get_total_norm,
                 "grads[a,b];[c] norm_type=3 | grads[a];[];[b,c] | grads[a];[] ",
                 get_total_norm(a.List("grads"), a.Float("norm_type", 2))),
      OpCase{"clip_grad_norm_",
             "grads[a,b];[c] max_norm=0.5 | grads[a];[] max_norm=0.5 norm_type=inf", ClippedByNorm,
             kNoGradient},
      OpCase{"clip_grads_with_norm_", "grads[a,b];[c] total_norm[]@1..2 max_norm=0.5",
             ClippedByKnownNorm, kNoGradient},
      OpCase{"clip_grad_value_", "grads[a,b];[c] clip_value=0.5", ClippedByValue, kNoGradient},
      DT_CASE(scale_, "self[a,b] by[] | self[n] by[] | self[a,b,c] by[]", Scaled(a)),
      DT_CASE(truncated_normal_from_uniform_,
              "self[a,b]@0.1..0.9 mean=0.5 std=0.25 a=-1.0 b=1.0 | self[n]@0.1..0.9", Truncated(a)),
  });
}

}  // namespace dtensor
