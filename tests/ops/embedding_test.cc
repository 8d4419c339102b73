#include <cmath>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "ops/ops.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing {
namespace {

OpFn Embedding(int64_t padding_idx = -1) {
  return [=](const std::vector<DTensor>& x) { return embedding(x[1], x[0], padding_idx); };
}

TEST(Embedding, PicksRows) {
  const Operand w = Float({5, 2}, 1);
  const DTensor y = embedding(Ints({2, 2}, {4, 0, 0, 3}).Make(), w.Make());
  EXPECT_EQ(y.shape(), (Shape{2, 2, 2}));
  const std::vector<double> v = y.ToVector<double>();
  EXPECT_EQ(v[0], w.values[8]);
  EXPECT_EQ(v[3], w.values[1]);
  EXPECT_EQ(v[7], w.values[7]);
  EXPECT_EQ(embedding(Ints({}, {2}).Make(), w.Make()).shape(), Shape{2});
  EXPECT_EQ(embedding(Ints({0}, {}).Make(), w.Make()).shape(), (Shape{0, 2}));
  EXPECT_EQ(embedding(to(Ints({1}, {2}).Make(), DType::kI32), w.Make()).shape(), (Shape{1, 2}));
}

TEST(Embedding, Gradients) {
  CheckGradients(Embedding(), {Float({5, 2}, 1), Ints({2, 3}, {4, 0, 0, 3, 0, 1})});
  const DTensor w = Float({3, 1}, 1).Make();
  sum(embedding(Ints({4}, {0, 1, 1, 2}).Make(), w, 1)).Backward();
  EXPECT_EQ(w.grad().ToVector<double>(), (std::vector<double>{1, 0, 1}));
}

TEST(Embedding, Sharded) {
  CheckSharded(Embedding(), {Float({7, 3}, 1), Ints({2, 3}, {6, 0, 0, 3, 5, 1})});
  CheckSharded(Embedding(3), {Float({7, 3}, 1), Ints({5}, {6, 3, 0, 3, 5})});
}

TEST(Embedding, VocabularyShardedGradientIsMadeInPlace) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    DTensor w = FromVector(Noise(64, 1), {32, 2}, {DType::kF64, mesh, {Shard(0)}});
    w.RequiresGrad();
    const DTensor ids = FromVector(std::vector<int64_t>{1, 30, 7}, {3}, {DType::kI64, mesh, {}});
    CommTrace trace;
    const DTensor y = embedding(ids, w);
    EXPECT_EQ(y.placements()[0], Partial());
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    y.Backward(ones({3, 2}, {DType::kF64, mesh, {}}));
    EXPECT_EQ(w.grad().placements()[0], Shard(0));
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Embedding, Errors) {
  const DTensor w = Float({3, 2}, 1).Make(), ids = Ints({1}, {3}).Make();
  EXPECT_THAT(MessageOf([&] { embedding(ids, w); }), ::testing::StartsWith("[embedding]"));
  EXPECT_THAT(MessageOf([&] { embedding(w, w); }),
              ::testing::StartsWith("[embedding] ids must be int64 or int32, are float64"));
  EXPECT_THAT(MessageOf([&] { embedding(ids, sum(w, {0})); }),
              ::testing::StartsWith("[embedding] weight must be [rows, width], is [2]"));
  EXPECT_THAT(MessageOf([&] { embedding(ids, w, 3); }),
              ::testing::HasSubstr("padding_idx 3 is outside of 3 rows"));
}

}  // namespace
}  // namespace dtensor::testing
