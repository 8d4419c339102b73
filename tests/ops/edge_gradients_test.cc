// Values and gradients of pointwise ops at NaN, infinities and zeros are PyTorch's
// (tests/data/ops/edge_gradients.json, written by scripts/make_edge_gradients.py).
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <optional>

#include "absl/strings/str_join.h"
#include "dtensor/ops/ops.h"
#include "tests/common/torch_samples.h"

namespace dtensor::testing::edge_gradients_test {
namespace {

using Fn = std::function<DTensor(const std::vector<DTensor>&, double number)>;

const std::map<std::string, Fn>& Functions() {
#define DT_UNARY(name) {#name, [](const auto& x, double) { return name(x[0]); }}
#define DT_BINARY(name) {#name, [](const auto& x, double) { return name(x[0], x[1]); }}
  static const std::map<std::string, Fn> kFunctions = {
      DT_UNARY(neg),
      DT_UNARY(abs),
      DT_UNARY(exp),
      DT_UNARY(log),
      DT_UNARY(sqrt),
      DT_UNARY(rsqrt),
      DT_UNARY(tanh),
      DT_UNARY(sigmoid),
      DT_UNARY(relu),
      DT_UNARY(gelu),
      DT_UNARY(silu),
      DT_BINARY(add),
      DT_BINARY(sub),
      DT_BINARY(mul),
      DT_BINARY(div),
      DT_BINARY(pow),
      DT_BINARY(maximum),
      DT_BINARY(minimum),
      {"gelu_tanh", [](const auto& x, double) { return gelu(x[0], true); }},
      {"mul_scalar", [](const auto& x, double s) { return x[0] * s; }},
      {"div_scalar", [](const auto& x, double s) { return x[0] / s; }},
      {"rdiv_scalar", [](const auto& x, double s) { return s / x[0]; }},
      {"pow_scalar", [](const auto& x, double s) { return pow(x[0], s); }},
      {"rpow_scalar", [](const auto& x, double s) { return pow(s, x[0]); }}};
#undef DT_UNARY
#undef DT_BINARY
  return kFunctions;
}

std::vector<double> Numbers(const Json& texts) {
  std::vector<double> v;
  for (const Json& t : texts) v.push_back(std::strtod(t.get<std::string>().c_str(), nullptr));
  return v;
}

bool Same(double got, double want) {
  if (std::isnan(want)) return std::isnan(got);
  return got == want || std::fabs(got - want) <= 1e-12 * std::fabs(want);
}

// The first elements that differ, with the inputs they come from.
std::string Differences(const char* what, const std::vector<double>& got,
                        const std::vector<double>& want,
                        const std::vector<std::vector<double>>& inputs) {
  std::string text;
  for (size_t i = 0; i < want.size() && text.size() < 600; ++i) {
    if (Same(got[i], want[i])) continue;
    absl::StrAppend(&text, what, " is ", got[i], ", must be ", want[i], " at");
    for (const auto& in : inputs) absl::StrAppend(&text, " ", in[i]);
    absl::StrAppend(&text, "; ");
  }
  return text;
}

TEST(EdgeGradients, ArePyTorchs) {
  size_t elements = 0;
  for (const Json& entry : Json::parse(ReadFile(DT_TEST_DATA "/ops/edge_gradients.json"))) {
    const std::string op = entry.at("op");
    const double number =
        entry.contains("number") ? std::stod(entry.at("number").get<std::string>()) : 0;
    std::vector<std::vector<double>> inputs;
    std::vector<DTensor> leaves;
    for (const Json& in : entry.at("inputs")) {
      inputs.push_back(Numbers(in));
      const int64_t n = static_cast<int64_t>(inputs.back().size());
      leaves.push_back(FromVector(inputs.back(), {n}, {.dtype = DType::kF64}).RequiresGrad());
    }
    const DTensor y = Functions().at(op)(leaves, number);
    const std::vector<double> dy = Numbers(entry.at("dy"));
    y.Backward(FromVector(dy, y.shape(), {.dtype = DType::kF64}));
    inputs.push_back(dy);
    const std::string name = op + " " + entry.value("number", "");
    EXPECT_EQ(Differences("value", y.ToVector<double>(), Numbers(entry.at("output")), inputs), "")
        << name;
    for (size_t i = 0; i < leaves.size(); ++i) {
      EXPECT_EQ(Differences("gradient", leaves[i].grad().ToVector<double>(),
                            Numbers(entry.at("gradients")[i]), inputs),
                "")
          << name << ", input " << i;
    }
    elements += dy.size();
  }
  EXPECT_GT(elements, 4000u);
}

using Numbers64 = std::vector<double>;
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// NaN compares equal to itself.
std::string Text(const Numbers64& v) { return absl::StrJoin(v, " "); }

// Of torch 2.15.
TEST(EdgeGradients, OfBoundsThatAreNumbersPassBetweenThem) {
  const auto gradient = [](std::optional<Scalar> lo, std::optional<Scalar> hi) {
    const DTensor x = FromVector(Numbers64{0, 1, kNan, 0.5, -1, -HUGE_VAL}, {6}).RequiresGrad();
    sum(clamp(x, lo, hi)).Backward();
    return x.grad().ToVector<double>();
  };
  EXPECT_EQ(gradient(0, 1), (Numbers64{0, 0, 0, 1, 0, 0}));
  EXPECT_EQ(gradient(0, {}), (Numbers64{0, 1, 0, 1, 0, 0}));
  EXPECT_EQ(gradient({}, 1), (Numbers64{1, 0, 0, 1, 1, 1}));
  EXPECT_EQ(gradient(kNan, 1), Numbers64(6, 0));
  EXPECT_EQ(gradient(2, 1), Numbers64(6, 0));
  const DTensor x = FromVector(Numbers64{kNan, 3, -3}, {3}).RequiresGrad();
  sum(hardsigmoid(x)).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), Numbers64(3, 0));
}

// Of torch 2.15: x, the bound, and what goes to each.
TEST(EdgeGradients, OfABoundThatIsATensorAreShared) {
  const Numbers64 xs = {1, 1, kNan, 1, kNan, 0}, bounds = {1, 0, 1, kNan, kNan, 1};
  const auto expect = [&](DTensor (*fn)(const DTensor&, const DTensor&), const char* to_x,
                          const char* to_bound) {
    const DTensor x = FromVector(xs, {6}).RequiresGrad(),
                  y = FromVector(bounds, {6}).RequiresGrad();
    sum(fn(x, y)).Backward();
    EXPECT_EQ(Text(x.grad().ToVector<double>()), to_x);
    EXPECT_EQ(Text(y.grad().ToVector<double>()), to_bound);
  };
  expect(clamp_min, "0.5 1 1 1 1 0", "0.5 0 1 1 1 1");
  expect(clamp_max, "0.5 0 1 1 1 1", "0.5 1 1 1 1 0");
}

// Of torch 2.15: x, lo and hi, and what goes to each.
TEST(EdgeGradients, OfTwoBoundsThatAreTensorsAreShared) {
  const std::vector<std::array<double, 6>> cases = {
      {0, 0, 0, 1, 0, 0},       {0, 0, 1, 0.5, 0.5, 0},     {0, 0, kNan, 1, 0, 0},
      {0, 1, 0, 0, 0, 1},       {0, 1, 1, 0, 1, 0},         {0, 1, 2, 0, 1, 0},
      {0, 1, kNan, 0, 0, 0},    {0, 2, 1, 0, 0, 1},         {0, kNan, 0, 1, 0, 0},
      {1, 0, 0, 0, 0, 1},       {1, 0, 1, 0.5, 0, 0.5},     {1, 0, 2, 1, 0, 0},
      {1, 2, 1, 0, 0, 1},       {1, kNan, 0, 0, 0, 0},      {2, 0, 1, 0, 0, 1},
      {kNan, 0, 1, 1, 0, 0},    {kNan, 1, 0, 1, 0, 1},      {kNan, 1, kNan, 1, 0, 0},
      {kNan, kNan, 0, 1, 0, 0}, {kNan, kNan, kNan, 1, 0, 0}};
  for (const auto& c : cases) {
    const auto leaf = [](double v) { return FromVector(Numbers64{v}, {1}).RequiresGrad(); };
    const DTensor x = leaf(c[0]), lo = leaf(c[1]), hi = leaf(c[2]);
    sum(clamp(x, lo, hi)).Backward();
    EXPECT_EQ(Text({x.grad().Item(), lo.grad().Item(), hi.grad().Item()}), Text({c[3], c[4], c[5]}))
        << Text({c[0], c[1], c[2]});
  }
}

// 0 at the origin, and where a norm is 0 because its powers are none.
TEST(EdgeGradients, WhereThereIsNoSlope) {
  const TensorOptions f64 = {.dtype = DType::kF64};
  const DTensor y = FromVector(std::vector<double>{0, 1e-200, 3}, {3}, f64).RequiresGrad();
  const DTensor x = FromVector(std::vector<double>{0, 1e-200, 4}, {3}, f64).RequiresGrad();
  sum(atan2(y, x)).Backward();
  const std::vector<double> dy = y.grad().ToVector<double>(), dx = x.grad().ToVector<double>();
  for (const int i : {0, 1}) {
    EXPECT_EQ(dy[i], 0);
    EXPECT_EQ(dx[i], 0);
  }
  EXPECT_DOUBLE_EQ(dy[2], 0.16);
  EXPECT_DOUBLE_EQ(dx[2], -0.12);
  const DTensor tiny =
      FromVector(std::vector<double>{1e-200, 2e-200, 0, 0}, {2, 2}, f64).RequiresGrad();
  sum(normalize(tiny)).Backward();
  for (const double d : tiny.grad().ToVector<double>()) EXPECT_DOUBLE_EQ(d, 1e12);
}

}  // namespace
}  // namespace dtensor::testing::edge_gradients_test
