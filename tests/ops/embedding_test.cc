#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::embedding_test {
namespace {

std::vector<double> Integers(int64_t n) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>((i * 7 + 3) % 5 - 2));
  return v;
}

DTensor Matrix(const Shape& shape, const std::vector<double>& values) {
  return FromVector(values, shape, {.dtype = DType::kF64});
}
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

// Terms of a row are added up in float32, in the order of the ids, and rounded once.
TEST(Embedding, SixteenBitGradientsAreRoundedOnce) {
  constexpr int64_t kRows = 50, kIds = 90, kPadding = 11;
  std::vector<double> ids;
  for (int64_t i = 0; i < kIds; ++i) ids.push_back(static_cast<double>(i * i % 37));
  for (const auto& [dtype, size] :
       {std::pair(DType::kBF16, 7), {DType::kF16, 7}, {DType::kBF16, 70}, {DType::kF16, 70}}) {
    const DTensor dy = to(Float({kIds, size}, 3).Make(), dtype).Detach();
    const auto gradient = [&](DType t) {
      const DTensor w = to(Float({kRows, size}, 1).Make(), t).Detach().RequiresGrad();
      embedding(Ints({kIds}, ids).Make(), w, kPadding).Backward(to(dy, t));
      return w.grad();
    };
    EXPECT_EQ(gradient(dtype).ToVector<double>(),
              to(gradient(DType::kF32), dtype).ToVector<double>());
  }
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

// On meshes of several dims the ids are cut, too: the gradient is a pending sum over those and
// stays cut by the vocabulary. Also where the weight is the head's.
TEST(Embedding, VocabularyShardedGradientStaysSoOnLargerMeshes) {
  struct Case {
    Dims mesh;
    Placements weight, ids;
  };
  const Case cases[] = {
      {{2, 2}, {Replicate(), Shard(0)}, {Shard(0), Replicate()}},
      {{2, 2, 2}, {Replicate(), Replicate(), Shard(0)}, {Shard(0), Shard(0), Replicate()}},
      {{2, 2, 2}, {Replicate(), Shard(0), Shard(0)}, {Shard(0), Replicate(), Replicate()}},
      {{2, 2, 2}, {Replicate(), Shard(0), Replicate()}, {Shard(0), Replicate(), Shard(1)}}};
  for (const Case& c : cases) {
    for (const bool tied : {false, true}) {
      const absl::Status status = RunSpmd(Numel(c.mesh), [&](RankContext&) -> absl::Status {
        const auto run = [&](const DeviceMesh& mesh, Placements weight, Placements id) {
          DTensor w = FromVector(Integers(32), {16, 2}, {DType::kF64, mesh, weight});
          w.RequiresGrad();
          const std::vector<int64_t> v = {1, 15, 7, 1, 0, 3, 3, 8};
          const DTensor ids = FromVector(v, {4, 2}, {DType::kI64, mesh, id});
          DTensor y = embedding(ids, w);
          if (tied) y = matmul(y, transpose(w, 0, 1));
          const CommTrace trace;
          sum(mul(y, y)).Backward();
          int64_t largest = 0;  // nobody sends or gets a whole table
          for (const CommEvent& e : trace.events()) largest = std::max(largest, e.payload_bytes);
          if (!mesh.is_self() && !tied) {
            EXPECT_LE(largest, 16 * 2 * 8 / 2) << trace.ToString();
          }
          EXPECT_EQ(w.grad().placements(), w.placements());
          return w.grad().ToVector<double>();
        };
        EXPECT_EQ(run(*DeviceMesh::Create(c.mesh), c.weight, c.ids),
                  run(DeviceMesh::Self(), {}, {}));
        // The gradient itself, as autograd asks for it.
        const DeviceMesh mesh = *DeviceMesh::Create(c.mesh);
        const DTensor w = FromVector(Integers(32), {16, 2}, {DType::kF64, mesh, c.weight});
        const DTensor ids = FromVector(std::vector<int64_t>{1, 15, 7, 1, 0, 3, 3, 8}, {4, 2},
                                       {DType::kI64, mesh, c.ids});
        const DTensor dy = FromVector(Integers(16), {4, 2, 2}, {DType::kF64, mesh, c.ids});
        const DTensor* inputs[] = {&dy, &ids};
        DispatchOptions like;
        like.like = &w.spec();
        const DTensor g = Call1(**OpRegistry::Find("embedding_backward"), inputs,
                                {IntAttr(16), IntAttr(-1)}, like);
        for (int m = 0; m < mesh.ndim(); ++m) {
          EXPECT_EQ(g.placements()[m], c.ids[m].is_shard()      ? Partial()
                                       : c.weight[m].is_shard() ? c.weight[m]
                                                                : Replicate())
              << g.spec().ToString();
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
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

// The last offset may end the last bag before the ids end. (Values of PyTorch.)
TEST(EmbeddingBag, EndsWhereItsLastOffsetSays) {
  const DTensor w = Matrix({3, 1}, {1, 10, 100}).RequiresGrad();
  const DTensor ids = Ints({6}, {0, 1, 2, 0, 1, 2}).Make(), offsets = Ints({3}, {0, 2, 4}).Make();
  const DTensor y = embedding_bag(ids, w, offsets, "sum", false, {}, -1, true);
  EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{11, 101}));
  sum(y).Backward();
  EXPECT_EQ(w.grad().ToVector<double>(), (std::vector<double>{2, 1, 1}));
  const DTensor weights = Matrix({6}, {1, 2, 3, 4, 5, 6});
  EXPECT_EQ(embedding_bag(ids, w, offsets, "sum", false, weights, -1, true).ToVector<double>(),
            (std::vector<double>{21, 304}));
  const DTensor none = embedding_bag(ids, w, Ints({1}, {0}).Make(), "mean", false, {}, -1, true);
  EXPECT_EQ(none.shape(), (Shape{0, 1}));
}

// An infinity is no empty bag.
TEST(EmbeddingBag, LargestMayBeMinusInfinity) {
  const double inf = std::numeric_limits<double>::infinity();
  const DTensor w = Matrix({3, 1}, {-inf, 10, 100});
  const DTensor ids = Ints({3, 2}, {0, 0, 2, 2, 0, 2}).Make();
  EXPECT_EQ(embedding_bag(ids, w, {}, "max").ToVector<double>(),
            (std::vector<double>{-inf, 100, 100}));
  EXPECT_EQ(embedding_bag(ids, w, {}, "max", false, {}, 2).ToVector<double>(),
            (std::vector<double>{-inf, 0, -inf}));
}

// Of equal rows the first has the gradient, as in PyTorch; an empty bag has none.
TEST(EmbeddingBag, LargestOfEqualRowsIsTheFirst) {
  const DTensor w = Matrix({4, 2}, {1, 2, 1, 2, 0, 3, 9, 9}).RequiresGrad();
  const DTensor y = embedding_bag(Ints({4}, {3, 0, 1, 2}).Make(), w, Ints({3}, {0, 1, 1}).Make(),
                                  "max", false, {}, 3);
  EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{0, 0, 0, 0, 1, 3}));
  sum(y).Backward();
  EXPECT_EQ(w.grad().ToVector<double>(), (std::vector<double>{1, 0, 0, 0, 0, 1, 0, 0}));
  const DTensor none = embedding_bag(Ints({0}, {}).Make(), w, Ints({1}, {0}).Make(), "max");
  EXPECT_EQ(none.ToVector<double>(), (std::vector<double>{0, 0}));
}

}  // namespace
}  // namespace dtensor::testing::embedding_test
