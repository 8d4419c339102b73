// Values and gradients of pointwise ops at NaN, infinities and zeros are PyTorch's
// (tests/data/ops/edge_gradients.json, written by scripts/make_edge_gradients.py).
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

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

}  // namespace
}  // namespace dtensor::testing::edge_gradients_test
