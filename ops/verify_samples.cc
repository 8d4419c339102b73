#include "dtensor/ops/verify_samples.h"

#include <algorithm>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

VerifyInput F(Shape shape) { return {std::move(shape)}; }
VerifyInput I(Shape shape) { return {std::move(shape), DType::kI64}; }
VerifyInput Of(DType dtype, Shape shape) { return {std::move(shape), dtype}; }
// Indices in [0, below), some twice.
VerifyInput Ids(Shape shape, int64_t below) {
  VerifyInput in{std::move(shape), DType::kI64, {}};
  for (int64_t i = 0; i < Numel(in.shape); ++i)
    in.values.push_back(static_cast<double>(i * 5 % below));
  return in;
}

VerifySample Group(int group, VerifySample sample) {
  sample.group = group;
  return sample;
}

const Attr kNo = BoolAttr(false), kYes = BoolAttr(true);

std::vector<VerifyCase> MatmulCases() {
  return {
      {"matmul", {{{F({4, 6}), F({6, 5})}}, {{F({2, 3, 5}), F({5, 4})}}, {{F({3, 1}), F({1, 4})}}}},
      {"matmul_t", {{{F({4, 6}), F({5, 6})}}, {{F({2, 3, 5}), F({7, 5})}}}},
      {"outer_sum", {{{F({3, 4, 5}), F({3, 4, 2})}}, {{F({5, 3}), F({5, 4})}}}},
      {"bmm",
       {{{F({3, 4, 2}), F({3, 2, 5})}},
        {{F({4, 2, 7}), F({4, 7, 3})}},
        {{F({2, 3, 4, 2}), F({3, 2, 5})}},
        {{F({2, 1, 3, 4}), F({2, 3, 4, 2})}}}},
      {"linear",
       {{{F({4, 6}), F({5, 6}), F({5})}},
        {{F({2, 3, 4}), F({7, 4}), F({7})}},
        {{F({0, 4}), F({3, 4}), F({3})}}}},
  };
}

std::vector<VerifyCase> ReductionCases() {
  const std::vector<VerifySample> rows = {{{F({4, 6}), F({4, 6})}, {IntAttr(1)}},
                                          {{F({5, 3, 2}), F({5, 3, 2})}, {IntAttr(0)}}};
  const std::vector<VerifySample> row = {{{F({4, 6})}, {IntAttr(1)}},
                                         {{F({5, 3, 2})}, {IntAttr(0)}}};
  return {
      {"sum",
       {{{F({4, 6})}, {Attr(), kNo}, {0}, 0},
        {{F({3, 4, 5})}, {Attr(), kYes}, {0, 2}, 0},
        {{I({5, 3})}, {Attr(), kNo}, {1}, 0},
        Group(1, {{{{5, 3}, DType::kI32}}, {Attr(), kNo}, {1}, 0}),  // its sums are wider
        Group(1, {{{{3, 2}, DType::kU8}}, {Attr(), kNo}, {0}, 0}),
        Group(1, {{{{3, 2}, DType::kBool}}, {Attr(), kNo}, {0}, 0}),
        {{F({4, 0})}, {Attr(), kNo}, {1}, 0}}},
      {"amax",
       {{{F({4, 6})}, {Attr(), kNo}, {1}, 0},
        {{F({3, 5, 2})}, {Attr(), kYes}, {0, 1}, 0},
        {{I({5, 3})}, {Attr(), kNo}, {0}, 0},
        {{{{3, 2}, DType::kI32}}, {Attr(), kNo}, {0}, 0},
        {{{{3, 2}, DType::kU8}}, {Attr(), kNo}, {0}, 0},
        {{{{3, 2}, DType::kBool}}, {Attr(), kNo}, {0}, 0}}},
      {"amax_backward",
       {{{F({4}), F({4, 6}), F({4})}, {Attr(), kNo}, {1}, 0},
        {{F({1, 5}), F({3, 5}), F({1, 5})}, {Attr(), kYes}, {0}, 0}}},
      {"softmax", row},
      {"log_softmax", row},
      {"softmax_backward", rows},
      {"log_softmax_backward", rows},
      {"layer_norm",
       {{{F({4, 6}), F({6}), F({6})}, {FloatAttr(1e-5)}},
        {{F({3, 2, 5}), F({5}), F({5})}, {FloatAttr(1e-5)}}}},
      {"rms_norm",
       {{{F({4, 6}), F({6})}, {FloatAttr(1e-5)}}, {{F({3, 2, 5}), F({5})}, {FloatAttr(1e-5)}}}},
      {"layer_norm_backward",
       {{{F({4, 6}), F({4, 6}), F({4}), F({4}), F({6})}},
        {{F({3, 2, 5}), F({3, 2, 5}), F({3, 2}), F({3, 2}), F({5})}}}},
      {"rms_norm_backward",
       {{{F({4, 6}), F({4, 6}), F({4}), F({6})}},
        {{F({3, 2, 5}), F({3, 2, 5}), F({3, 2}), F({5})}}}},
  };
}

std::vector<VerifyCase> LookupCases() {
  const Attr ignore = IntAttr(-100);
  return {
      {"embedding",
       {{{F({7, 4}), Ids({3, 5}, 7)}, {IntAttr(-1)}}, {{F({4, 3}), Ids({6}, 4)}, {IntAttr(2)}}}},
      {"embedding_backward",
       {{{F({3, 5, 4}), Ids({3, 5}, 7)}, {IntAttr(7), IntAttr(-1)}},
        {{F({6, 3}), Ids({6}, 4)}, {IntAttr(4), IntAttr(2)}}}},
      {"nll_pick",
       {{{F({5, 7}), Ids({5}, 7)}, {ignore}}, {{F({8, 4}), Ids({8}, 4)}, {IntAttr(1)}}}},
      {"nll_pick_backward",
       {{{F({5}), Ids({5}, 7)}, {IntAttr(7), ignore}},
        {{F({8}), Ids({8}, 4)}, {IntAttr(4), IntAttr(1)}}}},
      {"sum_exp", {{{F({4, 6}), F({4})}}, {{F({5, 3}), F({5})}}}},
      {"cross_entropy_backward",
       {{{F({5}), F({5, 7}), F({5}), Ids({5}, 7)}, {ignore}},
        {{F({8}), F({8, 4}), F({8}), Ids({8}, 4)}, {IntAttr(1)}}}},
  };
}

// 4 query heads on 2 key heads; 3 on 3; 6 on 1.
std::vector<VerifyCase> AttentionCases() {
  const Attrs causal = {FloatAttr(0.5), kYes}, full = {FloatAttr(0.5), kNo};
  const auto sample = [](Shape q, Shape k, int64_t e, const Attrs& attrs, bool backward) {
    const Shape v = {k[0], k[1], k[2], e}, o = {q[0], q[1], q[2], e}, lse = {q[0], q[1], q[2]};
    VerifySample s{{F(q), F(k), F(v)}, attrs};
    s.finite = true;  // of masked keys blocks are multiplied by zero
    if (backward) {
      s.inputs.insert(s.inputs.begin(), F(o));
      s.inputs.push_back(F(o));
      s.inputs.push_back(F(lse));
    }
    return s;
  };
  const auto samples = [&](bool backward) -> std::vector<VerifySample> {
    return {sample({2, 4, 3, 2}, {2, 2, 3, 2}, 2, causal, backward),
            sample({2, 3, 4, 2}, {2, 3, 5, 2}, 3, full, backward),
            sample({1, 6, 2, 3}, {1, 1, 2, 3}, 2, causal, backward)};
  };
  return {{"attention", samples(false)}, {"attention_backward", samples(true)}};
}

std::vector<VerifyCase> ViewCases() {
  return {
      {"clone",
       {{{F({4, 6})}}, {{I({5, 3})}}, {{Of(DType::kI32, {4, 6})}}, {{Of(DType::kU8, {4, 6})}}}},
      {"contiguous", {{{F({4, 6})}}, {{I({5, 3})}}}},
      {"to",
       {Group(1, {{{{4, 6}, DType::kF32}}, {DTypeAttr(DType::kF64)}}),  // a sum survives
        Group(1, {{{{5, 3}, DType::kF32}}, {DTypeAttr(DType::kF64)}}),
        {{F({4, 6})}, {DTypeAttr(DType::kF32)}},
        {{F({5, 3})}, {DTypeAttr(DType::kI64)}},
        {{I({5, 3})}, {DTypeAttr(DType::kF64)}},
        {{F({5, 3})}, {DTypeAttr(DType::kBool)}},
        {{Of(DType::kI64, {5, 3})}, {DTypeAttr(DType::kI32)}},
        {{Of(DType::kI32, {5, 3})}, {DTypeAttr(DType::kU8)}},
        Group(2, {{Of(DType::kI32, {5, 3})}, {DTypeAttr(DType::kI64)}}),  // an order does
        Group(2, {{Of(DType::kU8, {4, 6})}, {DTypeAttr(DType::kI32)}}),
        Group(2, {{Of(DType::kI64, {4, 6})}, {DTypeAttr(DType::kF32)}}),
        Group(2, {{Of(DType::kBool, {5, 3})}, {DTypeAttr(DType::kU8)}}),
        Group(2, {{Of(DType::kBool, {4, 6})}, {DTypeAttr(DType::kF64)}})}},
      {"cat",
       {{{F({4, 6}), F({4, 6})}, {IntAttr(0)}},
        {{Of(DType::kU8, {4, 6}), Of(DType::kU8, {4, 2})}, {IntAttr(1)}},
        {{F({3, 2, 5}), F({3, 4, 5})}, {IntAttr(1)}},
        {{F({3, 0, 5}), F({3, 4, 5})}, {IntAttr(1)}}}},
      {"reshape",
       {{{F({4, 6})}, {Attr()}, {2, 2, 6}, 0},
        {{F({4, 6})}, {Attr()}, {4, 3, 2}, 0},
        {{F({3, 5, 2})}, {Attr()}, {15, 2}, 0},
        {{F({3, 4})}, {Attr()}, {6, 2}, 0},
        {{F({2, 6})}, {Attr()}, {2, 2, 3}, 0},
        {{F({2, 12})}, {Attr()}, {2, 6, 2}, 0}}},
      {"permute",
       {{{F({2, 3, 4})}, {Attr()}, {2, 0, 1}, 0}, {{F({5, 3, 2})}, {Attr()}, {0, 2, 1}, 0}}},
      {"transpose",
       {{{F({4, 6})}, {IntAttr(0), IntAttr(1)}}, {{F({5, 2, 3})}, {IntAttr(0), IntAttr(2)}}}},
      {"unsqueeze", {{{F({4, 6})}, {IntAttr(1)}}, {{F({5, 3})}, {IntAttr(2)}}}},
      {"squeeze", {{{F({4, 1, 6})}, {Attr()}, {1}, 0}, {{F({1, 5, 3})}, {Attr()}, {0}, 0}}},
      {"expand", {{{F({4, 1})}, {Attr()}, {4, 3}, 0}, {{F({5, 3})}, {Attr()}, {2, 5, 3}, 0}}},
      {"slice",
       {{{F({6, 4})}, {IntAttr(0), IntAttr(1), IntAttr(4), IntAttr(1)}},
        {{F({5, 7})}, {IntAttr(1), IntAttr(0), IntAttr(3), IntAttr(2)}},
        {{F({5, 7})}, {IntAttr(1), IntAttr(0), IntAttr(7), IntAttr(1)}}}},
      {"slice_backward",
       {{{F({4, 4})}, {IntAttr(0), IntAttr(1), IntAttr(1), IntAttr(6)}},
        {{F({5, 3})}, {IntAttr(1), IntAttr(0), IntAttr(2), IntAttr(7)}},
        {{F({5, 7})}, {IntAttr(1), IntAttr(0), IntAttr(1), IntAttr(7)}}}},
      {"select",
       {{{F({6, 4})}, {IntAttr(0), IntAttr(2)}}, {{F({5, 3, 2})}, {IntAttr(1), IntAttr(0)}}}},
      {"copy_", {{{F({5, 4}), F({4})}}, {{F({3, 6}), F({3, 6})}}, {{I({5, 3}), I({5, 1})}}}},
  };
}

// In place over operands of one shape; second steps, so that states count.
std::vector<VerifyCase> OptimCases() {
  const auto like = [](size_t operands, const Attrs& attrs) {
    std::vector<VerifySample> samples;
    for (const Shape& shape : {Shape{5, 4}, Shape{7}, Shape{3, 4, 2}}) {
      samples.push_back({std::vector<VerifyInput>(operands, F(shape)), attrs});
    }
    return samples;
  };
  const Attr half = FloatAttr(0.5), quarter = FloatAttr(0.25), step = IntAttr(2);
  const Attrs adamw = {half, half, quarter, quarter, half, kNo, step};
  std::vector<VerifyCase> all = {
      {"sgd_", like(2, {half, quarter, kNo})},
      {"sgd_momentum_", like(3, {half, quarter, half, half, kYes, kNo, step})},
      {"adamw_", like(4, adamw)},
      {"adamw_amsgrad_", like(5, adamw)},
      {"power_sum", like(1, {FloatAttr(2)})},
      {"max_abs", like(1, {})},
      {"scale_", like(1, {})},
      {"truncated_normal_", like(1, {half, quarter, FloatAttr(-1), FloatAttr(1)})}};
  for (VerifySample& s : all[6].samples) s.inputs.push_back(F({}));
  return all;
}

// Numbers that an attribute takes, in turn: 0 and both signs, beside and within (0, 1).
double Number(const std::string& attr, size_t sample) {
  static constexpr double kNumbers[] = {1.5, -0.5, 0.5, 2, -1.5};
  return attr == "value" && sample % 2 == 0 ? 0 : kNumbers[sample % 5];
}

// Broadcast or not, uneven, with sizes 1 and 0; every integer type that the op takes. In place the
// first operand has the shape of the result.
std::vector<VerifySample> PointwiseSamples(const PointwiseCase& c) {
  std::vector<VerifySample> samples;
  const OpDef& op = GetOp(c.name);
  const std::vector<std::vector<Shape>> shapes = {
      {{5, 4}, {4}, {5, 1}}, {{2, 3, 4}, {3, 1}, {2, 3, 4}}, {{6, 1}, {1, 7}, {6, 7}},
      {{0, 3}, {3}, {3}},    {{3, 4, 2}, {2}, {3, 4, 1}},    {{7, 3}, {7, 3}, {7, 3}}};
  const bool conditional =
      std::any_of(op.monotone_forms().begin(), op.monotone_forms().end(),
                  [](const OpDef::MonotoneForm& form) { return form.when != nullptr; });
  const uint32_t kernel_takes = FindHostKernel(c.name)->dtypes;
  const auto add = [&](size_t n, DType dtype) {
    const bool whole = !IsFloating(dtype);
    VerifySample s;
    for (int i = 0; i < c.inputs; ++i) {
      VerifyInput in = {shapes[n][i], i == c.bool_input ? DType::kBool : dtype};
      if (op.in_place() && i == 0 && n == 2) in.shape = {6, 7};
      s.inputs.push_back(in);
    }
    for (const std::string& attr : op.attr_names()) {
      s.attrs.push_back(attr == "approx_tanh" ? BoolAttr(n % 2 == 1)
                        : whole               ? IntAttr(2)
                                              : FloatAttr(Number(attr, n)));
    }
    // What is ordered among numbers is not among integers, which wrap around; a negative factor
    // turns an order round.
    const bool zero = c.name == "masked_fill" && s.attrs[0].d == 0;
    const bool negative = !whole && op.vjp() != nullptr && !s.attrs.empty() && s.attrs[0].d < 0;
    s.group = zero ? 1 : !conditional ? 0 : whole ? 2 : negative ? 3 : 0;
    samples.push_back(std::move(s));
  };
  for (size_t n = 0; n < shapes.size(); ++n) add(n, DType::kF64);
  for (DType t : {DType::kI64, DType::kI32, DType::kU8}) {
    if ((kernel_takes & DTypeBit(t)) != 0) add(shapes.size() - 1, t);
  }
  return samples;
}

}  // namespace

std::vector<VerifyCase> VerifyCases() {
  RegisterOps();
  std::vector<VerifyCase> all;
  for (const auto& family : {MatmulCases(), ReductionCases(), LookupCases(), AttentionCases(),
                             ViewCases(), OptimCases()}) {
    all.insert(all.end(), family.begin(), family.end());
  }
  for (const PointwiseCase& c : PointwiseCases()) all.push_back({c.name, PointwiseSamples(c)});
  return all;
}

}  // namespace dtensor
