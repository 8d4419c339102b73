// The comparison behind --verify: it can fail, and leaves out what it says and no more.
#include "examples/verify.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace dtensor::verify_test {
namespace {

TrainResult Result(std::vector<double> losses, double weight, double key_bias) {
  TrainResult r;
  r.losses = std::move(losses);
  r.parameters = {{"head.weight", {weight, -4}}, {"blocks.0.attn.wk.bias", {key_bias}}};
  return r;
}

TEST(Verify, MeasuresTheLargestDifferences) {
  const Comparison diff = Compare(Result({2, 1.5}, 1.001, 7), Result({2, 1}, 1, -7));
  EXPECT_DOUBLE_EQ(diff.loss_rel_diff, 0.5);
  EXPECT_NEAR(diff.param_rel_diff, 0.001 / 4, 1e-12);  // the key bias differs by 14
  EXPECT_EQ(diff.worst, "head.weight");
}

TEST(Verify, LossesOfZeroAreEqual) {
  EXPECT_EQ(Compare(Result({2, 0}, 1, 0), Result({2, 0}, 1, 0)).loss_rel_diff, 0);
  EXPECT_FALSE(Judge(Compare(Result({1e-9}, 1, 0), Result({0}, 1, 0)), DType::kF32).ok());
}

TEST(Verify, FailsAboveTheTolerance) {
  const TrainResult reference = Result({2}, 1, 0);
  EXPECT_TRUE(Judge(Compare(reference, reference), DType::kF64).ok());
  const Comparison loss = Compare(Result({2.0004}, 1, 0), reference);
  EXPECT_FALSE(Judge(loss, DType::kF32).ok());
  const Comparison parameters = Compare(Result({2}, 1.001, 0), reference);
  EXPECT_FALSE(Judge(parameters, DType::kF32).ok());
  const Comparison small = Compare(Result({2.000001}, 1, 0), reference);
  EXPECT_TRUE(Judge(small, DType::kF32).ok());
  EXPECT_FALSE(Judge(small, DType::kF64).ok());
}

TEST(Verify, NotANumberIsNotEqual) {
  const Comparison diff = Compare(Result({2}, std::nan(""), 0), Result({2}, 1, 0));
  EXPECT_FALSE(Judge(diff, DType::kF32).ok());
}

}  // namespace
}  // namespace dtensor::verify_test
