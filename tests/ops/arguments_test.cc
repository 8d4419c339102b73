// Null tensors, null meshes and extreme numbers: an Error that says so, never a crash, an overflow
// or memory without end. (The undefined-behaviour sanitizer runs this too.)
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/message.h"

namespace dtensor::arguments_test {
namespace {

using ::dtensor::testing::MessageOf;
using Named = std::pair<const char*, std::function<void()>>;

constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
constexpr int64_t k62 = int64_t{1} << 62;

TEST(Arguments, NullTensorsAreNamed) {
  const DTensor n, x = ones({2, 2}).RequiresGrad();
  const std::vector<DTensor> nulls = {n, n};
  const std::vector<Named> calls = {
      {"relu", [&] { relu(n); }},
      {"add", [&] { n + n; }},
      {"add to x", [&] { x + n; }},
      {"ToVector", [&] { n.ToVector<float>(); }},
      {"Backward", [&] { n.Backward(); }},
      {"Backward from null", [&] { (x * 1.0).Backward(n); }},
      {"RequiresGrad", [&] { DTensor(n).RequiresGrad(); }},
      {"requires_grad", [&] { n.requires_grad(); }},
      {"is_leaf", [&] { n.is_leaf(); }},
      {"has_values", [&] { n.has_values(); }},
      {"grad", [&] { n.grad(); }},
      {"ZeroGrad", [&] { DTensor(n).ZeroGrad(); }},
      {"Redistribute", [&] { n.Redistribute({Replicate()}); }},
      {"SetGrad", [&] { DTensor(n).SetGrad(n); }},
      {"ToLocal", [&] { n.ToLocal(); }},
      {"cat", [&] { cat(nulls); }},
      {"cat of nothing", [] { cat({}); }},
      {"stack", [&] { stack(nulls); }},
      {"stack of nothing", [] { stack({}); }},
      {"Detach", [&] { n.Detach(); }},
      {"mean", [&] { mean(n); }},
      {"matmul", [&] { matmul(n, n); }},
      {"uniform_", [&] { uniform_(n); }},
      {"random_", [&] { random_(n); }},
      {"bernoulli_", [&] { bernoulli_(x, n); }},
      {"dropout", [&] { dropout(n); }},
      {"FromLocal", [&] { FromLocal(n, DeviceMesh({1}), {Replicate()}); }},
      {"DistributeTensor of a Tensor",
       [&] { DistributeTensor(Tensor(), DeviceMesh({1}), {Replicate()}); }},
      {"DistributeTensor", [&] { DistributeTensor(n, DeviceMesh({1}), {Replicate()}); }},
      {"Local", [] { OnSelf(Tensor()); }},
      {"expand", [&] { expand(n, {2}); }},
      {"cross_entropy", [&] { cross_entropy(n, n); }},
      {"embedding", [&] { embedding(n, n); }},
      {"attention", [&] { scaled_dot_product_attention(n, n, n); }},
      {"multinomial", [&] { multinomial(n, 1); }},
      {"split", [&] { split(n, 1); }},
      {"copy_", [&] { copy_(n, n); }},
      {"zeros_like", [&] { zeros_like(n); }},
      {"ones_like", [&] { ones_like(n); }},
      {"empty_like", [&] { empty_like(n); }},
      {"rand_like", [&] { rand_like(n); }},
      {"MemoryStrides", [&] { MemoryStrides(n); }},
      {"to", [&] { to(n, DType::kF32); }},
      {"squeeze", [&] { squeeze(n); }},
      {"reshape", [&] { reshape(n, {1}); }},
      {"flatten", [&] { flatten(n); }},
      {"softmax", [&] { softmax(n, 0); }},
      {"layer_norm", [&] { layer_norm(n, {1}); }},
      {"bernoulli", [&] { bernoulli(n); }},
      {"linear", [&] { linear(n, n); }},
      {"size", [&] { n.size(0); }},
      {"local", [&] { n.local(); }},
      {"Recompute", [&] { Recompute([](const Values& v) { return Values{relu(v[0])}; }, {n}); }},
      {"CustomFunction that saves null",
       [&] {
         CustomFunction(
             "mine", {x}, [&] { return Values{x * 1.0}; }, [](const Values& g) { return g; }, {n});
       }},
      {"CustomFunction that returns null",
       [&] {
         CustomFunction("mine", {x}, [&] { return Values{n}; }, [](const Values& g) { return g; });
       }},
  };
  for (const auto& [name, call] : calls) {
    const std::string message = MessageOf(call);
    EXPECT_FALSE(message.empty()) << name;
    const bool nothing = absl::StrContains(name, "nothing");
    EXPECT_TRUE(nothing || absl::StrContains(message, "null")) << name << ": " << message;
  }
  EXPECT_EQ(n.ToString(), "null");
}

TEST(Arguments, NullMeshesAreNamed) {
  const TensorOptions none = {.mesh = DeviceMesh()};
  const std::vector<Named> calls = {
      {"full", [&] { full({2}, 1, none); }},
      {"zeros", [&] { zeros({2}, none); }},
      {"empty", [&] { empty({2}, none); }},
      {"rand", [&] { rand({2}, none); }},
      {"randn", [&] { randn({2}, none); }},
      {"arange", [&] { arange(0, 4, 1, none); }},
      {"randint", [&] { randint(0, 4, {2}, none); }},
      {"randperm", [&] { randperm(4, none); }},
      {"FromVector", [&] { FromVector(std::vector<float>{1, 2}, {2}, none); }},
      {"DistributeTensor",
       [] { DistributeTensor(Tensor::Full({2}, DType::kF32, 1).value(), DeviceMesh(), {}); }},
      {"DistributeTensor of a local", [] { DistributeTensor(ones({2}), DeviceMesh(), {}); }},
      {"FromLocal", [] { FromLocal(ones({2}), DeviceMesh(), {}); }},
      {"Redistribute", [] { ones({2}).Redistribute(DeviceMesh(), {Replicate()}); }},
      {"operator[]", [] { DeviceMesh()["dp"]; }},
  };
  for (const auto& [name, call] : calls) {
    const std::string message = MessageOf(call);
    EXPECT_TRUE(absl::StrContains(message, "null")) << name << ": " << message;
  }
}

// Refused: what no memory holds, and sizes whose strides overflow though one of them is 0.
TEST(Arguments, SizesThatOverflowAreRefused) {
  const std::vector<Named> calls = {
      {"2^62 x 4", [] { full({k62, 4}, 1); }},
      {"2^63 - 1 bytes", [] { full({kMost}, 1, {DType::kU8}); }},
      {"2^61 floats", [] { full({k62 / 2}, 1); }},
      {"0 x 2^62 x 4", [] { full({0, k62, 4}, 1); }},
      {"2^62 x 4 x 0", [] { sum(full({k62, 4, 0}, 1)); }},
      {"0 x 2^62 floats", [] { full({0, k62}, 1); }},
      {"expand", [] { expand(full({1}, 1), {k62}); }},
      {"expand of 0", [] { expand(full({1, 1, 0}, 1), {k62, 4, 0}); }},
      {"reshape of 0", [] { reshape(full({0}, 1), {k62, 4, 0}); }},
      {"reshape that wraps", [] { reshape(full({4}, 1), {k62 + 1, 4}); }},
      {"unflatten that wraps", [] { unflatten(full({4}, 1), 0, {k62 + 1, 4}); }},
      {"cat", [] { cat(std::vector<DTensor>(9, expand(full({1}, 1), {int64_t{1} << 45}))); }},
      {"stack", [] { stack(std::vector<DTensor>(9, expand(full({1}, 1), {int64_t{1} << 45}))); }},
      {"split", [] { split(arange(0, 10), DimList{kMost, kMost, 12}); }},
      {"negative", [] { full({-4}, 1); }},
      {"multinomial", [] { multinomial(full({4}, 1.0), int64_t{1} << 60, true); }},
      {"multinomial -1", [] { multinomial(full({4}, 1.0), -1, true); }},
      {"randperm", [] { randperm(-1); }},
  };
  for (const auto& [name, call] : calls) EXPECT_FALSE(MessageOf(call).empty()) << name;
}

TEST(Arguments, ExtremeRanges) {
  for (const Named& wrong : std::vector<Named>{
           {"2^64 steps", [] { arange(kLeast, kMost, 1); }},
           {"10^300 steps", [] { arange(0.0, 1.0, 1e-300); }},
           {"step 0", [] { arange(0, 1, 0); }},
           {"nan", [] { arange(0.0, std::nan(""), 1.0); }},
           {"inf", [] { arange(0.0, std::numeric_limits<double>::infinity(), 1.0); }},
           {"the other way", [] { arange(0, 4, -1); }},
       }) {
    EXPECT_TRUE(absl::StrContains(MessageOf(wrong.second), "[arange]")) << wrong.first;
  }
  const TensorOptions ints = {DType::kI64};
  EXPECT_EQ(arange(kLeast, kMost, kMost, ints).ToVector<int64_t>(),
            (std::vector<int64_t>{kLeast, -1, kMost - 1}));
  EXPECT_EQ(arange(kMost - 2, kMost, 1, ints).ToVector<int64_t>(),
            (std::vector<int64_t>{kMost - 2, kMost - 1}));
  EXPECT_EQ(arange(kMost, kLeast, kLeast, ints).ToVector<int64_t>(),
            (std::vector<int64_t>{kMost, -1}));
  EXPECT_EQ(arange(0.0, 3.0, 0.5, ints).numel(), 6);  // start and step are truncated
}

TEST(Arguments, ExtremeDimsAndSlices) {
  const DTensor x = arange(0, 10, 1, {DType::kI64});
  EXPECT_EQ(slice(x, 0, kLeast, kMost, kMost).ToVector<int64_t>(), (std::vector<int64_t>{0}));
  EXPECT_EQ(slice(x, 0, -3, kMost, 2).ToVector<int64_t>(), (std::vector<int64_t>{7, 9}));
  EXPECT_EQ(slice(x, 0, kMost, kLeast).numel(), 0);
  EXPECT_EQ(split(x, kMost).size(), 1u);
  for (const Named& wrong : std::vector<Named>{
           {"select", [&] { select(x, 0, kLeast); }},
           {"sum", [&] { sum(x, {kLeast}); }},
           {"transpose", [&] { transpose(x, kLeast, 0); }},
           {"unsqueeze", [&] { unsqueeze(x, kMost); }},
           {"split", [&] { split(x, 0); }},
       }) {
    EXPECT_FALSE(MessageOf(wrong.second).empty()) << wrong.first;
  }
}

// Integers stay what they are: a float32 has no 16777217.
TEST(Arguments, FromVectorKeepsIntegers) {
  const std::vector<int64_t> large = {16777217, -9007199254740993};
  const DTensor x = FromVector(large, {2});
  EXPECT_EQ(x.dtype(), DType::kI64);
  EXPECT_EQ(x.ToVector<int64_t>(), large);
  EXPECT_EQ(FromVector(std::vector<int32_t>{1}, {1}).dtype(), DType::kI32);
  EXPECT_EQ(FromVector(std::vector<uint8_t>{1}, {1}).dtype(), DType::kU8);
  EXPECT_EQ(FromVector(std::vector<double>{1}, {1}).dtype(), DType::kF32);
  EXPECT_EQ(FromVector(large, {2}, {DType::kF64}).dtype(), DType::kF64);
  EXPECT_EQ(ones({1}).dtype(), DType::kF32);
  EXPECT_EQ(randint(0, 9, {4}).dtype(), DType::kI64);
}

// Nobody reads a thousand inputs.
TEST(Arguments, MessagesOfManyInputsAreShort) {
  std::vector<DTensor> many(1000, full({2, 3}, 1));
  many.push_back(full({9, 9}, 1));
  const std::string message = MessageOf([&] { cat(many, 0); });
  EXPECT_TRUE(absl::StrContains(message, "and 993 more")) << message.substr(0, 2000);
  EXPECT_LT(message.size(), 1500u);
}

// A number that an integer dtype cannot hold is refused where it would be written, not wrapped.
TEST(Arguments, ANumberFitsWhereItIsWritten) {
  const DTensor x = full({2}, 1, {DType::kU8}), at = full({1}, 0, {DType::kI64});
  const DTensor yes = full({2}, true), n = full({2}, 1, {DType::kI32});
  const std::vector<Named> calls = {
      {"full", [&] { full({2}, 300, {DType::kU8}); }},
      {"full_like", [&] { full_like(x, 300); }},
      {"new_full", [&] { new_full(n, {2}, 300, {DType::kU8}); }},
      {"fill", [&] { fill(x, 300); }},
      {"masked_fill", [&] { masked_fill(x, yes, 300); }},
      {"masked_fill_", [&] { masked_fill_(x, yes, 300); }},
      {"where", [&] { where(yes, x, 300); }},
      {"where", [&] { where(yes, 300, x); }},
      {"scatter", [&] { scatter(x, 0, at, 300); }},
      {"scatter_", [&] { scatter_(x, 0, at, 300); }},
      {"index_fill", [&] { index_fill(x, 0, at, 300); }},
      {"index_fill_", [&] { index_fill_(x, 0, at, 300); }},
      {"pad", [&] { pad(x, {0, 1}, "constant", 300); }},
      {"threshold", [&] { threshold(x, 5, 300); }},
  };
  for (const auto& [name, call] : calls) {
    EXPECT_THAT(MessageOf(call), ::testing::HasSubstr("value 300 does not fit uint8")) << name;
  }
  EXPECT_THAT(MessageOf([&] { full_like(n, int64_t{1} << 31); }),
              ::testing::HasSubstr("value 2147483648 does not fit int32, which holds -2147483648"));
  EXPECT_THAT(MessageOf([&] { full_like(n, std::nan("")); }), ::testing::HasSubstr("value nan"));
  EXPECT_THAT(MessageOf([&] { full_like(x, -0.5); }), ::testing::HasSubstr("value -0.5"));
  EXPECT_THAT(MessageOf([&] { full_like(at, 1e30); }), ::testing::HasSubstr("fit int64"));
  EXPECT_EQ(MessageOf([&] { pad(x, {0, -1}, "constant", 300); }), "");  // nothing is written
  // As in PyTorch.
  EXPECT_EQ(masked_fill(n, yes, -2.5).ToVector<double>()[0], -2);
  EXPECT_EQ(masked_fill(logical_not(yes), yes, 0.5).ToVector<double>()[0], 1);
  EXPECT_EQ(full_like(x, -1).ToVector<double>()[0], 255);
  EXPECT_EQ(full_like(x, 255.5).ToVector<double>()[0], 255);
  EXPECT_EQ(full_like(yes, 1e30).ToVector<double>()[0], 1);
  EXPECT_EQ(add(x, 300).ToVector<double>()[0], 45);
  EXPECT_EQ(FromVector(std::vector<bool>{true, false}, {2}).ToString(),
            "bool [2] on self [] bool [2] {1, 0}");
}

}  // namespace
}  // namespace dtensor::arguments_test
