#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::softmax_test {
namespace {

OpFn Softmax(int64_t dim) {
  return [=](const std::vector<DTensor>& x) { return softmax(x[0], dim); };
}
OpFn LogSoftmax(int64_t dim) {
  return [=](const std::vector<DTensor>& x) { return log_softmax(x[0], dim); };
}

TEST(Softmax, Values) {
  const Operand x = Float({2, 3, 4}, 1);
  const std::vector<double> y = softmax(x.Make(), 1).ToVector<double>();
  const std::vector<double> l = log_softmax(x.Make(), -2).ToVector<double>();
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t c = 0; c < 4; ++c) {
      double total = 0;
      for (int64_t b = 0; b < 3; ++b) total += std::exp(x.values[a * 12 + b * 4 + c]);
      for (int64_t b = 0; b < 3; ++b) {
        const int64_t i = a * 12 + b * 4 + c;
        EXPECT_NEAR(y[i], std::exp(x.values[i]) / total, 1e-14);
        EXPECT_NEAR(l[i], x.values[i] - std::log(total), 1e-14);
      }
    }
  }
}

TEST(Softmax, EdgeShapesAndDTypes) {
  EXPECT_EQ(softmax(Float({}, 1).Make(), 0).Item(), 1);
  EXPECT_EQ(log_softmax(Float({}, 1).Make(), -1).Item(), 0);
  EXPECT_EQ(softmax(Float({5, 0, 0}, 1).Make(), -1).shape(), (Shape{5, 0, 0}));
  EXPECT_EQ(softmax(Float({3, 0}, 1).Make(), 1).shape(), (Shape{3, 0}));
  const DTensor f32 = to(Float({2, 3}, 1).Make(), DType::kF32);
  EXPECT_EQ(softmax(f32, 1, DType::kF64).dtype(), DType::kF64);
  EXPECT_EQ(softmax(Ints({2}, {1, 2}).Make(), 0, DType::kF32).dtype(), DType::kF32);
}

TEST(Softmax, InfinityIsAsInOneRow) {
  const double inf = std::numeric_limits<double>::infinity();
  const Operand x = {{2, 3}, {1, -inf, 2, 0, -inf, -inf}, DType::kF64, false};
  const std::vector<double> y = softmax(x.Make(), 1).ToVector<double>();
  EXPECT_EQ(y[1], 0);
  EXPECT_EQ(y[3], 1);
  CheckSharded(Softmax(1), {x});
}

// What large numbers leave of the logarithm is not lost in their sum: for rows and for lines
// beside each other.
TEST(Softmax, OfLargeNumbers) {
  for (const auto& [dtype, large, unit] : std::vector<std::tuple<DType, double, double>>{
           {DType::kF64, 1e15, 1e-14}, {DType::kF32, 1e7, 1e-6}, {DType::kF32, -1e7, 1e-6}}) {
    Operand x = {{2, 4}, {}, dtype, false};
    for (int64_t i = 0; i < 8; ++i) x.values.push_back(large + static_cast<double>(i % 4));
    const double log_sum = std::log(1 + std::exp(1) + std::exp(2) + std::exp(3));
    const std::vector<double> rows = log_softmax(x.Make(), 1).ToVector<double>();
    const std::vector<double> lines = log_softmax(permute(x.Make(), {1, 0}), 0).ToVector<double>();
    for (int64_t i = 0; i < 8; ++i) {
      EXPECT_NEAR(rows[i], static_cast<double>(i % 4) - log_sum, unit) << large;
      EXPECT_NEAR(lines[i], static_cast<double>(i / 2) - log_sum, unit) << large;
    }
  }
}

// A line has the same bits wherever its elements lie: ranks may have one of those that lie beside
// each other, or more than are computed at once.
TEST(Softmax, LinesBesideEachOtherHaveTheBitsOfRows) {
  const auto check = [](int64_t n, int64_t width, bool log) {
    std::vector<double> values = Noise(2 * n * width, static_cast<uint64_t>(n + width));
    for (double& v : values) v *= 20;
    values[0] = std::nan("");
    values[1] = -std::numeric_limits<double>::infinity();
    const auto run = [&](DTensor x, int64_t dim, const DTensor& dy) {
      x.RequiresGrad();
      const DTensor y = log ? log_softmax(x, dim) : softmax(x, dim);
      y.Backward(dy);
      return std::vector<DTensor>{y.Detach(), x.grad()};
    };
    const DTensor x = to(FromVector(values, {2, n, width}), DType::kF32);
    const DTensor dy = to(FromVector(Noise(2 * n * width, 3), {2, n, width}), DType::kF32);
    const auto rows = run(contiguous(transpose(x, 1, 2)), 2, contiguous(transpose(dy, 1, 2)));
    const auto columns = run(clone(x), 1, dy);
    for (size_t i = 0; i < 2; ++i) {
      const auto want = transpose(rows[i], 1, 2).ToVector<float>();
      const auto got = columns[i].ToVector<float>();
      int64_t numbers = 0, wrong = 0;
      for (size_t at = 0; at < want.size(); ++at) {
        numbers += !std::isnan(want[at]);
        wrong += std::isnan(want[at]) ? !std::isnan(got[at]) : got[at] != want[at];
      }
      EXPECT_EQ(wrong, 0) << n << " x " << width << (log ? " log" : "") << " result " << i;
      // All but the line with NaN and one of nothing but -inf.
      EXPECT_EQ(numbers, (2 * width - (n == 1 ? 2 : 1)) * n);
    }
  };
  for (const bool log : {false, true}) {
    for (const int64_t n : {1, 7, 16, 37}) {
      for (const int64_t width : {2, 16, 255, 300}) check(n, width, log);
    }
  }
}

TEST(Softmax, Gradients) {
  for (int64_t dim : {0, 1, -1}) {
    CheckGradients(Softmax(dim), {Float({2, 3, 2}, 1)});
    CheckGradients(LogSoftmax(dim), {Float({2, 3, 2}, 1)});
  }
  CheckGradients(Softmax(0), {Float({}, 1)});
}

TEST(Softmax, Sharded) {
  for (int64_t dim : {0, 1}) {
    CheckSharded(Softmax(dim), {Float({4, 5}, 1)});
    CheckSharded(LogSoftmax(dim), {Float({4, 5}, 1)});
    CheckSharded(Softmax(dim), {Float({40, 50}, 1)});  // decomposed over the sharded dim
    CheckSharded(LogSoftmax(dim), {Float({40, 50}, 1)});
  }
}

TEST(Softmax, ShardedClassesAreNotGathered) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const int64_t n = 4, v = 512;
    DTensor x = FromVector(Noise(n * v, 1), {n, v}, {DType::kF64, mesh, {Shard(1)}});
    x.RequiresGrad();
    CommTrace trace;
    const DTensor y = log_softmax(x, 1);
    EXPECT_EQ(y.placements()[0], Shard(1));
    y.Backward(y.Detach());
    EXPECT_LE(trace.MaxPayloadBytes(), n * 8) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Softmax, Errors) {
  EXPECT_THAT(MessageOf([&] { softmax(Float({2}, 1).Make(), 1); }),
              ::testing::StartsWith("[softmax]"));
  EXPECT_THAT(MessageOf([&] { log_softmax(Ints({2}, {1, 2}).Make(), 0); }),
              ::testing::StartsWith("[log_softmax] needs a floating tensor, got int64"));
}

}  // namespace
}  // namespace dtensor::testing::softmax_test
