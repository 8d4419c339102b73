// Norms over the batch and over groups: statistics over sharded dims are those of one rank and move
// a number per channel; running statistics; errors.
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::batch_norm_test {
namespace {

using ::testing::HasSubstr;

OpFn Trained() {
  return [](const std::vector<DTensor>& x) {
    return batch_norm(x[0], {}, {}, x[1], x[2], /*training=*/true);
  };
}

TEST(BatchNorm, Gradients) {
  CheckGradients(Trained(), {Float({4, 2, 3}, 1), Float({2}, 2), Float({2}, 3)}, 1e-5);
  CheckGradients([](const std::vector<DTensor>& x) { return group_norm(x[0], 2, x[1], x[2], 0.1); },
                 {Float({2, 4, 3}, 1), Float({4}, 2), Float({4}, 3)}, 1e-5);
  CheckGradients([](const std::vector<DTensor>& x) { return instance_norm(x[0]); },
                 {Float({2, 2, 3}, 1)}, 1e-5);
}

TEST(BatchNorm, Sharded) {
  CheckSharded(Trained(), {Float({5, 4, 3}, 1), Float({4}, 2), Float({4}, 3)});
  CheckSharded([](const std::vector<DTensor>& x) { return group_norm(x[0], 2, x[1]); },
               {Float({3, 4, 5}, 1), Float({4}, 2)});
}

// Where the batch is large against the mean, squares less the square of the mean would cancel.
TEST(BatchNorm, DoesNotCancel) {
  const DTensor x = add(Float({64, 1}, 1).Make(), 1e9);
  const DTensor centred = sub(x, 1e9);
  const DTensor y = batch_norm(x, {}, {}, {}, {}, true),
                want = batch_norm(centred, {}, {}, {}, {}, true);
  ExpectClose(y.ToVector<double>(), want.ToVector<double>(), 1e-5);
}

TEST(BatchNorm, StatisticsOverAShardedBatchMoveANumberPerChannel) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({4});
    const int64_t channels = 8;
    DTensor x =
        FromVector(Noise(64 * channels * 9, 1), {64, channels, 9}, {DType::kF64, mesh, {Shard(0)}});
    x.RequiresGrad();
    const DTensor mean = zeros({channels}, {.dtype = DType::kF64, .mesh = mesh});
    const DTensor var = ones({channels}, {.dtype = DType::kF64, .mesh = mesh});
    CommTrace trace;
    const DTensor y = batch_norm(x, mean, var, {}, {}, /*training=*/true);
    EXPECT_EQ(y.placements()[0], Shard(0));
    EXPECT_EQ(trace.TotalCount(), 2) << trace.ToString();
    y.Backward(y.Detach());
    EXPECT_EQ(trace.TotalCount(), 3) << trace.ToString();
    EXPECT_LE(trace.MaxPayloadBytes(), 2 * channels * 8) << trace.ToString();
    // The same numbers as on one rank.
    const DTensor alone = OnSelf(x.Detach().FullTensor().local());
    const DTensor own_mean = zeros({channels}, {.dtype = DType::kF64});
    const DTensor own_var = ones({channels}, {.dtype = DType::kF64});
    ExpectClose(y.ToVector<double>(),
                batch_norm(alone, own_mean, own_var, {}, {}, true).ToVector<double>());
    ExpectClose(mean.ToVector<double>(), own_mean.ToVector<double>());
    ExpectClose(var.ToVector<double>(), own_var.ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BatchNorm, RunningStatisticsAreWrittenWhereTheyAre) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor x = FromVector(Noise(6 * 4, 1), {6, 4}, {DType::kF64, mesh, {Shard(0)}});
    const DTensor mean = zeros({4}, {.dtype = DType::kF64, .mesh = mesh, .placements = {Shard(0)}});
    batch_norm(x, mean, {}, {}, {}, /*training=*/true, /*momentum=*/1);
    EXPECT_EQ(mean.placements()[0], Shard(0));
    ExpectClose(mean.ToVector<double>(), dtensor::mean(x, {0}).ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LayerNorm, OverAShardedDimMovesNumbersPerRow) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const int64_t rows = 4, width = 512;
    const auto make = [&](Shape shape, int dim) {
      DTensor t = FromVector(Noise(Numel(shape), 1), shape, {DType::kF64, mesh, {Shard(dim)}});
      return t.RequiresGrad();
    };
    for (const bool rms : {false, true}) {
      const DTensor x = make({rows, width}, 1), g = make({width}, 0);
      CommTrace trace;
      const DTensor y = rms ? rms_norm(x, {width}, g) : layer_norm(x, {width}, g);
      EXPECT_EQ(y.placements()[0], Shard(1));
      y.Backward(y.Detach());
      EXPECT_LE(trace.MaxPayloadBytes(), 2 * rows * 8) << trace.ToString();
      const DTensor alone = OnSelf(x.Detach().FullTensor().local()).RequiresGrad();
      const DTensor own_g = OnSelf(g.Detach().FullTensor().local()).RequiresGrad();
      const DTensor want =
          rms ? rms_norm(alone, {width}, own_g) : layer_norm(alone, {width}, own_g);
      want.Backward(want.Detach());
      ExpectClose(y.ToVector<double>(), want.ToVector<double>());
      ExpectClose(x.grad().ToVector<double>(), alone.grad().ToVector<double>());
      ExpectClose(g.grad().ToVector<double>(), own_g.grad().ToVector<double>());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BatchNorm, Errors) {
  const DTensor x = Float({3, 4}, 1).Make(), c = Float({3}, 2).Make();
  EXPECT_THAT(MessageOf([&] { batch_norm(x, {}, {}); }),
              HasSubstr("[batch_norm] input running_mean is null"));
  EXPECT_THAT(MessageOf([&] { batch_norm(x, c, c); }),
              HasSubstr("running_mean must be [4], a value per channel, is [3]"));
  EXPECT_THAT(MessageOf([&] { batch_norm(Float({1, 4}, 1).Make(), {}, {}, {}, {}, true); }),
              HasSubstr("one value has no variance"));
  EXPECT_THAT(MessageOf([&] { batch_norm(c, {}, {}, {}, {}, true); }),
              HasSubstr("input needs dims [n, c, ...]"));
  EXPECT_THAT(MessageOf([&] { group_norm(x, 3); }), HasSubstr("4 channels do not divide into 3"));
  EXPECT_THAT(MessageOf([&] { instance_norm(Float({2, 2, 1}, 1).Make()); }),
              HasSubstr("has one per instance"));
  EXPECT_THAT(MessageOf([&] { local_response_norm(x, 2); }), HasSubstr("three or more"));
  EXPECT_THAT(MessageOf([&] { group_norm(Ints({2, 2}, {1, 2, 3, 4}).Make(), 1); }),
              HasSubstr("needs a floating tensor"));
}

// Kernels read what the declaration lets through: no integers as floats.
TEST(LayerNorm, BackwardTakesOneDType) {
  const DTensor dy = Float({4}, 1).Make(), x = Ints({4}, {1, 2, 3, 4}).Make();
  const DTensor rstd = Float({}, 2).Make();
  EXPECT_THAT(MessageOf([&] { Call(GetOp("rms_norm_backward"), {&dy, &x, &rstd, &dy}); }),
              HasSubstr("x must be float64 where dy is float64, is int64"));
}

TEST(ElementLosses, Errors) {
  const DTensor x = Float({3}, 1).Make(), n = Ints({3}, {1, 2, 3}).Make();
  EXPECT_THAT(MessageOf([&] { mse_loss(n, n); }),
              HasSubstr("[mse_loss] needs floating tensors, got int64 and int64"));
  EXPECT_THAT(MessageOf([&] { mse_loss(x, x, Reduction::kBatchMean); }),
              HasSubstr("kl_div alone has a mean over the batch"));
  EXPECT_THAT(MessageOf([&] { huber_loss(x, x, Reduction::kMean, 0); }),
              HasSubstr("delta must be positive"));
  EXPECT_THAT(MessageOf([&] { smooth_l1_loss(x, x, Reduction::kMean, -1); }),
              HasSubstr("beta must not be negative"));
  EXPECT_THAT(MessageOf([&] { binary_cross_entropy(x, Float({3, 3}, 1).Make()); }),
              HasSubstr("target must have the shape of input, [3], is [3, 3]"));
}

// Infinite distances have finite gradients.
TEST(ElementLosses, FarAwayGradientsAreFinite) {
  const double inf = HUGE_VAL;
  DTensor x = FromVector(std::vector<double>{inf, -inf, 1e200, 0.25}, {4}, {.dtype = DType::kF64});
  x.RequiresGrad();
  huber_loss(x, zeros({4}, {.dtype = DType::kF64}), Reduction::kSum, 0.5).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), (std::vector<double>{0.5, -0.5, 0.5, 0.25}));
}

}  // namespace
}  // namespace dtensor::testing::batch_norm_test
