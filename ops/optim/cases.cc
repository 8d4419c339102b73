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

DTensor AdamW(CaseArgs& a) {
  const NoGrad no_grad;
  const DTensor p = a.Written("param"), m = a.Written("average"), v = a.Written("square");
  const DTensor g = a.T("grad");
  AdamWOptions options;
  options.lr = a.Float("lr", 1e-3);
  options.eps = a.Float("eps", 1e-8);
  options.weight_decay = a.Float("weight_decay", 1e-2);
  options.amsgrad = a.IsTensor("max_square");
  options.maximize = a.Bool("maximize");
  const std::vector<DTensor> most(options.amsgrad ? 1 : 0,
                                  options.amsgrad ? a.Written("max_square") : DTensor());
  adamw_({&p, 1}, {&m, 1}, {&v, 1}, most, {&g, 1}, {a.Int("step", 1)}, options);
  return p;
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
              AdamW(a)),
      DT_CASE_IS(kNoGradient, power_sum,
                 "self[a,b] p=2 | self[n] p=3 | self[a,b] p=inf | self[n] p=inf",
                 power_sum(a.T("self"), a.Float("p"))),
      DT_CASE(scale_, "self[a,b] by[] | self[n] by[] | self[a,b,c] by[]", Scaled(a)),
      DT_CASE(truncated_normal_from_uniform_,
              "self[a,b]@0.1..0.9 mean=0.5 std=0.25 a=-1.0 b=1.0 | self[n]@0.1..0.9", Truncated(a)),
  });
}

}  // namespace dtensor
