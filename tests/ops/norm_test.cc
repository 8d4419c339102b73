#include <cmath>
#include <vector>

#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::norm_test {
namespace {

OpFn LayerNorm(Shape shape, double eps = 1e-5) {
  return [=](const std::vector<DTensor>& x) {
    return layer_norm(x[0], shape, x.size() > 1 ? x[1] : DTensor(), x.size() > 2 ? x[2] : DTensor(),
                      eps);
  };
}
OpFn RmsNorm(Shape shape, double eps = -1) {
  return [=](const std::vector<DTensor>& x) {
    return rms_norm(x[0], shape, x.size() > 1 ? x[1] : DTensor(), eps);
  };
}

TEST(LayerNorm, Values) {
  const Operand x = Float({3, 5}, 1), g = Float({5}, 2), b = Float({5}, 3);
  const std::vector<double> y = LayerNorm({5})(MakeAll({x, g, b})).ToVector<double>();
  for (int64_t i = 0; i < 3; ++i) {
    double mean = 0, var = 0;
    for (int64_t j = 0; j < 5; ++j) mean += x.values[i * 5 + j] / 5;
    for (int64_t j = 0; j < 5; ++j) var += std::pow(x.values[i * 5 + j] - mean, 2) / 5;
    for (int64_t j = 0; j < 5; ++j) {
      const double unit = (x.values[i * 5 + j] - mean) / std::sqrt(var + 1e-5);
      EXPECT_NEAR(y[i * 5 + j], unit * g.values[j] + b.values[j], 1e-12);
    }
  }
}

TEST(RmsNorm, Values) {
  const Operand x = Float({3, 5}, 1), g = Float({5}, 2);
  const std::vector<double> y = RmsNorm({5}, 0.1)(MakeAll({x, g})).ToVector<double>();
  for (int64_t i = 0; i < 3; ++i) {
    double square = 0;
    for (int64_t j = 0; j < 5; ++j) square += std::pow(x.values[i * 5 + j], 2) / 5;
    for (int64_t j = 0; j < 5; ++j) {
      EXPECT_NEAR(y[i * 5 + j], x.values[i * 5 + j] / std::sqrt(square + 0.1) * g.values[j], 1e-12);
    }
  }
}

TEST(Norm, SeveralDimsAndMissingParameters) {
  const Operand x = Float({2, 2, 3}, 1);
  const DTensor flat = reshape(x.Make(), {2, 6});
  ExpectClose(layer_norm(x.Make(), {2, 3}).ToVector<double>(),
              layer_norm(flat, {6}).ToVector<double>());
  ExpectClose(rms_norm(x.Make(), {2, 3}).ToVector<double>(),
              rms_norm(flat, {6}).ToVector<double>());
  EXPECT_EQ(layer_norm(Float({0, 6}, 1).Make(), {6}).shape(), (Shape{0, 6}));
  const DTensor b = Float({3}, 2).Make();
  ExpectClose(layer_norm(x.Make(), {3}, {}, b).ToVector<double>(),
              layer_norm(x.Make(), {3}, ones({3}, {DType::kF64, DeviceMesh::Self(), {}}), b)
                  .ToVector<double>());
}

TEST(Norm, StatisticsHaveTheDtypeOfTheInput) {
  for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    const Values all = native_layer_norm(to(Float({3, 5}, 1).Make(), t), {5}, {}, {}, 1e-5);
    for (const DTensor& one : all) EXPECT_EQ(one.dtype(), t);
    EXPECT_EQ(all[1].shape(), (Shape{3, 1}));
  }
}

TEST(Norm, Gradients) {
  CheckGradients(LayerNorm({4}), {Float({3, 4}, 1), Float({4}, 2), Float({4}, 3)}, 1e-5);
  CheckGradients(LayerNorm({2, 3}), {Float({2, 2, 3}, 1), Float({2, 3}, 2), Float({2, 3}, 3)},
                 1e-5);
  CheckGradients(LayerNorm({4}), {Float({3, 4}, 1)}, 1e-5);
  CheckGradients(LayerNorm({6}), {Float({6}, 1), Float({6}, 2), Float({6}, 3)}, 1e-5);
  CheckGradients(RmsNorm({4}), {Float({3, 4}, 1), Float({4}, 2)}, 1e-5);
  CheckGradients(RmsNorm({2, 3}, 0.5), {Float({2, 2, 3}, 1), Float({2, 3}, 2)}, 1e-5);
}

TEST(Norm, Sharded) {
  CheckSharded(LayerNorm({4}), {Float({2, 3, 4}, 1), Float({4}, 2), Float({4}, 3)});
  CheckSharded(LayerNorm({3, 4}), {Float({5, 3, 4}, 1), Float({3, 4}, 2)});
  CheckSharded(RmsNorm({4}), {Float({2, 3, 4}, 1), Float({4}, 2)});
}

TEST(Norm, SequenceShardedNeedsNoCommunication) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    DTensor x = FromVector(Noise(24, 1), {1, 6, 4}, {DType::kF64, mesh, {Shard(1)}});
    DTensor g = FromVector(Noise(4, 2), {4}, {DType::kF64, mesh, {}});
    x.RequiresGrad();
    g.RequiresGrad();
    CommTrace trace;
    const DTensor y = layer_norm(x, {4}, g);
    EXPECT_EQ(y.placements()[0], Shard(1));
    y.Backward(y.Detach());
    EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();  // the gradient of g
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Norm, Errors) {
  const DTensor x = Float({2, 4}, 1).Make();
  EXPECT_THAT(MessageOf([&] { layer_norm(x, {3}); }),
              ::testing::StartsWith("[layer_norm] normalized_shape [3] must be the last dims"));
  EXPECT_THAT(MessageOf([&] { layer_norm(x, {4}, Float({3}, 1).Make()); }),
              ::testing::HasSubstr("weight [3] must have normalized_shape [4]"));
  EXPECT_THAT(MessageOf([&] { rms_norm(Ints({2}, {1, 2}).Make(), {2}); }),
              ::testing::StartsWith("[rms_norm] needs a floating tensor, got int64"));
}

// In the wider of the two computing types; the result has x's dtype, each gradient its own.
TEST(RmsNorm, TakesAWeightOfAnotherDType) {
  const DTensor x =
      FromVector(std::vector<double>{1.0, 2.0, 3.0}, {3}, {DType::kBF16}).RequiresGrad();
  const DTensor w =
      FromVector(std::vector<double>{1.0, 0.3, 2.0}, {3}, {DType::kF32}).RequiresGrad();
  const DTensor y = rms_norm(x, {3}, w);
  EXPECT_EQ(y.dtype(), DType::kBF16);
  EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{0.462890625, 0.27734375, 2.78125}));
  sum(y).Backward();
  EXPECT_EQ(x.grad().dtype(), DType::kBF16);
  EXPECT_EQ(w.grad().dtype(), DType::kF32);
  EXPECT_NEAR(w.grad().ToVector<double>()[1], 0.9258201, 1e-6);
}

}  // namespace
}  // namespace dtensor::testing::norm_test
