#include "ops/verify_samples.h"

#include "ops/ops.h"
#include "ops/rules.h"

namespace dtensor {
namespace {

VerifyInput F(Shape shape) { return {std::move(shape)}; }
VerifyInput Ids(Shape shape, int64_t below) {
  VerifyInput in{std::move(shape), DType::kI64, {}};
  for (int64_t i = 0; i < Numel(in.shape); ++i)
    in.values.push_back(static_cast<double>(i * 5 % below));
  return in;
}
VerifyInput Positive(Shape shape) {
  VerifyInput in{std::move(shape)};
  for (int64_t i = 0; i < Numel(in.shape); ++i)
    in.values.push_back(0.5 + static_cast<double>(i % 7) / 4);
  return in;
}

std::vector<VerifyCase> Cases() {
  const Attr no = BoolAttr(false), yes = BoolAttr(true);
  return {
      {"matmul", {{{F({4, 6}), F({6, 5})}}, {{F({2, 3, 1}), F({1, 4})}}}},
      {"matmul_t", {{{F({4, 6}), F({5, 6})}}}},
      {"outer_sum", {{{F({3, 4, 5}), F({3, 4, 2})}}}},
      {"bmm", {{{F({3, 4, 2}), F({3, 2, 5})}}}},
      {"linear", {{{F({4, 6}), F({5, 6}), F({5})}}, {{F({2, 3, 4}), F({7, 4}), F({7})}}}},
      {"sum", {{{F({4, 6})}, {Attr(), no}, {0}, 0}, {{F({3, 4, 5})}, {Attr(), yes}, {0, 2}, 0}}},
      {"amax", {{{F({4, 6})}, {Attr(), no}, {1}, 0}}},
      {"softmax", {{{F({4, 6})}, {IntAttr(1)}}}},
      {"log_softmax", {{{F({4, 6})}, {IntAttr(0)}}}},
      {"softmax_backward", {{{F({4, 6}), F({4, 6})}, {IntAttr(1)}}}},
      {"log_softmax_backward", {{{F({4, 6}), F({4, 6})}, {IntAttr(1)}}}},
      {"sum_exp", {{{F({4, 6}), F({4})}}}},
      {"layer_norm", {{{F({4, 6}), F({6}), F({6})}, {FloatAttr(1e-5)}}}},
      {"rms_norm", {{{F({4, 6}), F({6})}, {FloatAttr(1e-5)}}}},
      {"layer_norm_backward", {{{F({4, 6}), F({4, 6}), F({4}), Positive({4}), F({6})}}}},
      {"rms_norm_backward", {{{F({4, 6}), F({4, 6}), Positive({4}), F({6})}}}},
      {"embedding", {{{F({7, 4}), Ids({3, 5}, 7)}, {IntAttr(-1)}}}},
      {"embedding_backward", {{{F({3, 5, 4}), Ids({3, 5}, 7)}, {IntAttr(7), IntAttr(-1)}}}},
      {"nll_pick", {{{F({5, 7}), Ids({5}, 7)}, {IntAttr(-100)}}}},
      {"nll_pick_backward", {{{F({5}), Ids({5}, 7)}, {IntAttr(7), IntAttr(-100)}}}},
      {"cross_entropy_backward",
       {{{F({5}), F({5, 7}), Positive({5}), Ids({5}, 7)}, {IntAttr(-100)}}}},
      {"attention",
       {{{F({2, 4, 3, 2}), F({2, 2, 3, 2}), F({2, 2, 3, 2})}, {FloatAttr(0.5), yes}},
        {{F({2, 2, 3, 2}), F({2, 2, 4, 2}), F({2, 2, 4, 5})}, {FloatAttr(0.5), no}}}},
      {"clone", {{{F({4, 6})}}}},
      {"to", {{{F({4, 6})}, {DTypeAttr(DType::kF64)}}}},
      {"cat", {{{F({4, 6}), F({4, 6})}, {IntAttr(0)}}}},
      {"reshape", {{{F({4, 6})}, {Attr()}, {2, 2, 6}, 0}, {{F({4, 6})}, {Attr()}, {4, 3, 2}, 0}}},
      {"permute", {{{F({2, 3, 4})}, {Attr()}, {2, 0, 1}, 0}}},
      {"transpose", {{{F({4, 6})}, {IntAttr(0), IntAttr(1)}}}},
      {"unsqueeze", {{{F({4, 6})}, {IntAttr(1)}}}},
      {"squeeze", {{{F({4, 1, 6})}, {Attr()}, {1}, 0}}},
      {"expand", {{{F({4, 1})}, {Attr()}, {4, 3}, 0}}},
      {"slice", {{{F({6, 4})}, {IntAttr(0), IntAttr(1), IntAttr(4), IntAttr(1)}}}},
      {"select", {{{F({6, 4})}, {IntAttr(0), IntAttr(2)}}}},
  };
}

// Broadcast or not, uneven, with sizes 1 and 0.
std::vector<VerifySample> PointwiseSamples(const PointwiseCase& c) {
  std::vector<VerifySample> samples;
  const std::vector<std::vector<Shape>> shapes = {{{5, 4}, {4}, {5, 1}},
                                                  {{2, 3, 4}, {3, 1}, {2, 3, 4}},
                                                  {{6, 1}, {1, 7}, {6, 7}},
                                                  {{0, 3}, {3}, {3}},
                                                  {{3, 4, 2}, {2}, {3, 4, 1}}};
  for (const std::vector<Shape>& of_inputs : shapes) {
    VerifySample s;
    for (int i = 0; i < c.inputs; ++i) {
      VerifyInput in = Positive(of_inputs[i]);
      if (i == c.bool_input) in = {in.shape, DType::kBool, {}};
      s.inputs.push_back(in);
    }
    for (const std::string& attr : GetOp(c.name).attr_names()) {
      s.attrs.push_back(attr == "approx_tanh" ? BoolAttr(false)
                                              : FloatAttr(attr == "value" ? 0 : 1.5));
    }
    samples.push_back(std::move(s));
  }
  return samples;
}

}  // namespace

std::vector<VerifyCase> VerifyCases() {
  RegisterOps();
  std::vector<VerifyCase> all = Cases();
  for (const PointwiseCase& c : PointwiseCases()) {
    // In place the first operand would be another one after the first run.
    if (!GetOp(c.name).in_place()) all.push_back({c.name, PointwiseSamples(c)});
  }
  return all;
}

}  // namespace dtensor
