// Every line of ops/pointwise/elementwise.inc: gradient against central differences, and every
// placement of the inputs against one rank. Values against PyTorch's: torch_samples_test.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "tests/common/message.h"
#include "tests/common/thin.h"
#include "tests/ops/sharded.h"

namespace dtensor::pointwise_test {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;
using testing::Operand;

Attr DefaultAttr(const std::string& name) {
  if (name == "alpha") return FloatAttr(2);
  if (name == "s") return FloatAttr(1.5);
  if (name == "value") return FloatAttr(0);
  if (name == "approx_tanh" || name == "dropped") return BoolAttr(false);
  if (name == "y_type" || name == "z_type") return DTypeAttr(DType::kF64);
  return FloatAttr(0.5);
}

// The op as a function of its operands.
testing::OpFn FunctionOf(const PointwiseCase& c) {
  return [c](const std::vector<DTensor>& in) {
    const OpDef& op = GetOp(c.name.c_str());
    Attrs attrs;
    for (const std::string& attr : op.attr_names()) attrs.push_back(DefaultAttr(attr));
    std::vector<DTensor> values = in;
    // An in-place op gets a copy of its own, with history.
    if (op.in_place()) values[0] = clone(values[0]);
    // self is never redistributed, and a constant added to a pending sum would count n times.
    if (c.name == "add_scalar_")
      values[0] = values[0].Redistribute(WithoutPending(values[0].placements()));
    std::vector<const DTensor*> pointers;
    for (const DTensor& t : values) pointers.push_back(&t);
    return Call1(op, pointers, attrs);
  };
}

std::vector<Operand> OperandsOf(const PointwiseCase& c, const std::vector<Shape>& shapes) {
  std::vector<Operand> operands;
  for (int i = 0; i < c.inputs; ++i) {
    const Shape& shape = shapes[static_cast<size_t>(i) % shapes.size()];
    Operand o{shape, testing::Noise(Numel(shape), static_cast<uint64_t>(i + 7))};
    for (double& v : o.values) v = c.lo + (c.hi - c.lo) * 0.5 * (v + 1);
    if (i == c.bool_input) {
      o.dtype = DType::kBool;
      for (double& v : o.values) v = v > 0.5 * (c.lo + c.hi);
    }
    // mul_ and div_ cannot give the gradient of their second operand: the first is gone.
    const bool whole = c.bool_input != 0 && !(FindHostKernel(c.name)->dtypes & kFloatDTypes);
    if (whole) o.dtype = DType::kI64;
    o.grad = c.differentiable && !((c.name == "mul_" || c.name == "div_") && i == 1);
    operands.push_back(o);
  }
  return operands;
}

class Pointwise : public ::testing::TestWithParam<PointwiseCase> {};

TEST_P(Pointwise, Gradient) {
  if (!GetParam().differentiable) GTEST_SKIP() << "no gradient is declared";
  testing::CheckGradients(FunctionOf(GetParam()), OperandsOf(GetParam(), {{3, 4}}));
}

TEST_P(Pointwise, EveryPlacement) {
  testing::CheckSharded(FunctionOf(GetParam()), OperandsOf(GetParam(), {{5, 4}}));
}

TEST_P(Pointwise, EveryPlacementWhenBroadcast) {
  if (GetParam().inputs == 1) GTEST_SKIP() << "one input: nothing broadcasts";
  testing::CheckSharded(FunctionOf(GetParam()), OperandsOf(GetParam(), {{3, 4}, {4}, {3, 1}}));
}

std::vector<PointwiseCase> Tried() {
  RegisterOps();
  std::vector<PointwiseCase> tried;
  const std::vector<PointwiseCase> all = PointwiseCases();
  for (size_t i = 0; i < all.size(); ++i) {
    if (testing::InTurn(i, 6)) tried.push_back(all[i]);
  }
  return tried;
}
INSTANTIATE_TEST_SUITE_P(All, Pointwise, ::testing::ValuesIn(Tried()),
                         [](const auto& info) { return info.param.name; });

TEST(Promotion, FollowsTorch) {
  const auto make = [](DType t, Shape shape) { return ones(shape, {.dtype = t}); };
  const DTensor f32 = make(DType::kF32, {2}), i64 = make(DType::kI64, {2}),
                b = make(DType::kBool, {2}), f64_scalar = make(DType::kF64, {}),
                bf16 = make(DType::kBF16, {2}), f16 = make(DType::kF16, {2});
  EXPECT_EQ((f32 + i64).dtype(), DType::kF32);
  EXPECT_EQ((f32 + f64_scalar).dtype(), DType::kF32);  // no dims: weaker
  EXPECT_EQ((i64 + f64_scalar).dtype(), DType::kF64);  // but of a higher category
  EXPECT_EQ((bf16 + f16).dtype(), DType::kF32);
  EXPECT_EQ((i64 + 1).dtype(), DType::kI64);
  EXPECT_EQ((i64 + 1.0).dtype(), DType::kF32);
  EXPECT_EQ((b + 1).dtype(), DType::kI64);
  EXPECT_EQ((b + b).dtype(), DType::kBool);
  EXPECT_EQ((i64 / i64).dtype(), DType::kF32);
  EXPECT_EQ(exp(i64).dtype(), DType::kF32);
  EXPECT_EQ(lt(f32, i64).dtype(), DType::kBool);
  EXPECT_EQ((b + b).ToVector<double>(), (std::vector<double>{1, 1}));
}

TEST(PointwiseErrors, SayWhatIsWrong) {
  const DTensor x = ones({4, 2}), y = ones({3, 2}), i = ones({2}, {.dtype = DType::kI64});
  EXPECT_THAT(MessageOf([&] { x + y; }),
              HasSubstr("[add] shapes do not broadcast: x dim 0 is 4, y dim 0 is 3"));
  EXPECT_THAT(MessageOf([&] { add(i, i, 0.5); }), HasSubstr("alpha is a floating number"));
  EXPECT_THAT(MessageOf([&] { masked_fill(x, x, 0); }), HasSubstr("mask must be bool"));
  EXPECT_THAT(MessageOf([&] { masked_fill(i, eq(i, 1), 1e30); }), HasSubstr("does not fit int64"));
  EXPECT_THAT(MessageOf([&] { pow(i, -1); }), HasSubstr("negative integer power"));
  EXPECT_THAT(MessageOf([&] { exp(DTensor()); }), HasSubstr("[exp] an input is null"));
}

TEST(InPlaceMul, GivesBothGradients) {
  DTensor w = FromVector<double>({2, 3}, {2}).RequiresGrad();
  DTensor v = FromVector<double>({5, 7}, {2}).RequiresGrad();
  const DTensor h = w * 2;
  mul_(h, v);
  sum(h).Backward();
  EXPECT_EQ(w.grad().ToVector<double>(), (std::vector<double>{10, 14}));
  EXPECT_EQ(v.grad().ToVector<double>(), (std::vector<double>{4, 6}));
}

// Called as they are the ops may be told any earlier dtype of y and z: gradients are of the inputs.
TEST(AddedProducts, GradientsHaveTheDtypesOfTheInputs) {
  for (const char* name : {"addcmul", "addcdiv"}) {
    for (const DType told : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI32}) {
      for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
        std::vector<DTensor> in;
        for (int i = 0; i < 3; ++i) in.push_back(full({3}, 2.0, {.dtype = dtype}).RequiresGrad());
        const auto type = static_cast<int64_t>(told);
        const DTensor y = Call(GetOp(name), {&in[0], &in[1], &in[2]},
                               {FloatAttr(3), IntAttr(type), IntAttr(type)})[0];
        sum(y).Backward();
        const bool quotient = std::string(name) == "addcdiv";
        EXPECT_EQ(in[1].grad().ToVector<double>(), std::vector<double>(3, quotient ? 1.5 : 6))
            << name;
        EXPECT_EQ(in[2].grad().ToVector<double>(), std::vector<double>(3, quotient ? -1.5 : 6));
        for (const DTensor& t : in) EXPECT_EQ(t.grad().dtype(), dtype);
      }
    }
  }
}

TEST(PointwiseErrors, AConstantIsNotAddedToAPendingSum) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DTensor x = ones({4}, {.mesh = DeviceMesh({2}, {"tp"})}).Redistribute({Partial()});
    add_(x, 1.5);
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("P(sum)"));
}

}  // namespace
}  // namespace dtensor::pointwise_test
