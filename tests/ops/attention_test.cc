#include <cmath>
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/rng/generator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::attention_test {
namespace {

struct Options {
  bool causal = false;
  bool gqa = false;
};
// Operands: q, k, v, and the mask if there is one.
OpFn Attention(Options o = {}) {
  return [=](const std::vector<DTensor>& x) {
    return scaled_dot_product_attention(x[0], x[1], x[2], x.size() > 3 ? x[3] : DTensor(), o.causal,
                                        {}, o.gqa);
  };
}

// q [h, s, d], k [g, t, d], v [g, t, e], one batch element; mask [s, t] or empty.
std::vector<double> Naive(const Operand& q, const Operand& k, const Operand& v, bool causal,
                          const std::vector<double>& mask = {}) {
  const int64_t h = q.shape[1], s = q.shape[2], d = q.shape[3];
  const int64_t g = k.shape[1], t = k.shape[2], e = v.shape[3];
  std::vector<double> out;
  for (int64_t head = 0; head < h; ++head) {
    const int64_t group = head / (h / g);
    for (int64_t i = 0; i < s; ++i) {
      std::vector<double> p(t, 0);
      double total = 0;
      for (int64_t j = 0; j < t; ++j) {
        if (causal && j > i) continue;
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) {
          dot += q.values[(head * s + i) * d + c] * k.values[(group * t + j) * d + c];
        }
        dot /= std::sqrt(static_cast<double>(d));
        p[j] = std::exp(dot + (mask.empty() ? 0 : mask[i * t + j]));
        total += p[j];
      }
      for (int64_t c = 0; c < e; ++c) {
        double o = 0;
        for (int64_t j = 0; j < t; ++j) o += p[j] * v.values[(group * t + j) * e + c];
        out.push_back(total == 0 ? 0 : o / total);
      }
    }
  }
  return out;
}

TEST(Attention, Values) {
  const Operand q = Float({1, 4, 3, 2}, 1), k = Float({1, 2, 5, 2}, 2), v = Float({1, 2, 5, 3}, 3);
  for (bool causal : {false, true}) {
    const DTensor y = Attention({causal, true})(MakeAll({q, k, v}));
    EXPECT_EQ(y.shape(), (Shape{1, 4, 3, 3}));
    ExpectClose(y.ToVector<double>(), Naive(q, k, v, causal));
  }
  Operand mask = Float({3, 5}, 4);
  ExpectClose(Attention({false, true})(MakeAll({q, k, v, mask})).ToVector<double>(),
              Naive(q, k, v, false, mask.values));
}

TEST(Attention, RowsWithoutAnyKeyGiveZero) {
  const Operand q = Float({1, 1, 2, 2}, 1), k = Float({1, 1, 3, 2}, 2), v = Float({1, 1, 3, 2}, 3);
  const Operand mask = {{2, 3}, {0, 0, 0, 1, 0, 1}, DType::kBool, false};
  const std::vector<DTensor> inputs = MakeAll({q, k, v, mask});
  const std::vector<double> y = Attention()(inputs).ToVector<double>();
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 0);
  EXPECT_NE(y[2], 0);
  CheckGradients(Attention(), {q, k, v, mask});
}

TEST(Attention, OtherNumbersOfDims) {
  EXPECT_EQ(Attention()(MakeAll({Float({3, 4}, 1), Float({5, 4}, 2), Float({5, 2}, 3)})).shape(),
            (Shape{3, 2}));
  const Operand q = Float({4, 3, 2}, 1), k = Float({4, 5, 2}, 2), v = Float({4, 5, 2}, 3);
  EXPECT_EQ(Attention()(MakeAll({q, k, v})).shape(), (Shape{4, 3, 2}));
  CheckGradients(Attention({true, false}), {q, k, v});
  const DTensor five = Attention()(
      MakeAll({Float({2, 2, 1, 3, 2}, 1), Float({1, 2, 1, 4, 2}, 2), Float({2, 1, 1, 4, 2}, 3)}));
  EXPECT_EQ(five.shape(), (Shape{2, 2, 1, 3, 2}));
  const Operand empty = Float({0, 2, 3, 4}, 1);
  EXPECT_EQ(Attention()(MakeAll({empty, empty, empty})).shape(), (Shape{0, 2, 3, 4}));
}

TEST(Attention, Gradients) {
  const Operand q = Float({1, 4, 3, 2}, 1), k = Float({1, 2, 4, 2}, 2), v = Float({1, 2, 4, 3}, 3);
  CheckGradients(Attention({false, true}), {q, k, v});
  CheckGradients(Attention({true, true}), {q, k, v});
  CheckGradients(Attention({false, true}), {q, k, v, Float({1, 4, 3, 4}, 5)});
  CheckGradients(Attention({false, true}), {q, k, v, Float({3, 4}, 5)});
  Operand fixed = Float({4, 3, 4}, 5);
  fixed.grad = false;
  CheckGradients(Attention({false, true}), {q, k, v, fixed});
}

TEST(Attention, Sharded) {
  // As many key heads as ranks, fewer, and one.
  for (int64_t groups : {4, 2, 1}) {
    CheckSharded(Attention({true, true}), {Float({2, 4, 3, 2}, 1), Float({2, groups, 3, 2}, 2),
                                           Float({2, groups, 3, 2}, 3)});
  }
  CheckSharded(Attention({false, false}),
               {Float({1, 3, 5, 2}, 1), Float({1, 3, 4, 2}, 2), Float({1, 3, 4, 3}, 3)});
}

TEST(Attention, HeadsStayWhereTheyAre) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const auto make = [&](Shape shape, const Placement& p, uint64_t seed) {
      DTensor t = FromVector(Noise(Numel(shape), seed), shape, {DType::kF64, mesh, {p}});
      return t.RequiresGrad();
    };
    const auto run = [&](const DTensor& q, const DTensor& k, const DTensor& v) {
      const DTensor o = scaled_dot_product_attention(q, k, v, {}, true, {}, true);
      o.Backward(o.Detach());
      return o.placements()[0];
    };
    CommTrace trace;
    EXPECT_EQ(run(make({1, 4, 6, 2}, Shard(1), 1), make({1, 2, 6, 2}, Shard(1), 2),
                  make({1, 2, 6, 2}, Shard(1), 3)),
              Shard(1));
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    // Key heads on every rank: their gradients are the only thing to reduce, together.
    EXPECT_EQ(run(make({1, 4, 6, 2}, Shard(1), 1), make({1, 1, 6, 2}, Replicate(), 2),
                  make({1, 1, 6, 2}, Replicate(), 3)),
              Shard(1));
    EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();
    trace.Clear();
    EXPECT_EQ(run(make({1, 4, 6, 2}, Shard(2), 1), make({1, 4, 6, 2}, Replicate(), 2),
                  make({1, 4, 6, 2}, Replicate(), 3)),
              Shard(2));
    EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// With a mask or dropout heads stay where they are, too, with any number of sequences, forward and
// backward.
TEST(Attention, HeadsStayWhereTheyAreUnderMaskAndDropout) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    struct Layout {
      DeviceMesh mesh;
      Placements placements;
    };
    const Layout layouts[] = {{DeviceMesh({4}, {"tp"}), {Shard(1)}},
                              {DeviceMesh({2, 2}, {"dp", "tp"}), {Shard(0), Shard(1)}}};
    for (const auto& [mesh, placements] : layouts) {
      const auto make = [&, &mesh = mesh, &placements = placements](Shape shape, uint64_t seed) {
        DTensor t = FromVector(Noise(Numel(shape), seed), shape, {DType::kF64, mesh, placements});
        return t.RequiresGrad();
      };
      const DTensor mask = FromVector(Noise(25, 9), {5, 5}, {DType::kF64, mesh, {}});
      for (const int64_t groups : {8, 4}) {
        for (const double p : {0.0, 0.3}) {
          for (const bool causal : {false, true}) {
            const DTensor q = make({3, 8, 5, 2}, 1), k = make({3, groups, 5, 2}, 2),
                          v = make({3, groups, 5, 2}, 3);
            CommTrace trace;
            const DTensor o = scaled_dot_product_attention(q, k, v, causal ? DTensor() : mask,
                                                           causal, {}, true, p);
            o.Backward(o.Detach());
            EXPECT_EQ(o.placements(), q.placements());
            EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
          }
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Attention, ShardedWithMask) {
  CheckSharded(Attention({false, true}), {Float({2, 2, 3, 2}, 1), Float({2, 1, 4, 2}, 2),
                                          Float({2, 1, 4, 2}, 3), Float({3, 4}, 4)});
  Operand fixed = Float({2, 1, 3, 1}, 4);
  fixed.grad = false;
  CheckSharded(Attention({false, true}),
               {Float({2, 4, 3, 2}, 1), Float({2, 2, 4, 2}, 2), Float({2, 2, 4, 2}, 3), fixed});
}

TEST(Attention, Errors) {
  const DTensor q = Float({1, 4, 3, 2}, 1).Make(), k = Float({1, 2, 3, 2}, 2).Make();
  EXPECT_THAT(MessageOf([&] { scaled_dot_product_attention(q, k, k); }),
              ::testing::HasSubstr("head counts do not fit: q [1, 4, 3, 2], k [1, 2, 3, 2]"));
  EXPECT_THAT(MessageOf([&] { scaled_dot_product_attention(q, q, q, sum(q), true); }),
              ::testing::HasSubstr("takes a mask or is_causal, not both"));
  EXPECT_THAT(MessageOf([&] { scaled_dot_product_attention(q, sum(q), q); }),
              ::testing::HasSubstr("needs two dims or more, got []"));
  EXPECT_THAT(MessageOf([&] { scaled_dot_product_attention(q, Float({1, 4, 3, 5}, 1).Make(), q); }),
              ::testing::HasSubstr("factor d differs"));
}

// Without features all keys weigh the same, however many queries there are.
TEST(Attention, OfNoFeaturesIsTheMean) {
  for (const int64_t s : {2, 5, 13}) {
    const DTensor q = zeros({1, 1, s, 0}, {.dtype = DType::kF64});
    const DTensor k = zeros({1, 1, 3, 0}, {.dtype = DType::kF64});
    DTensor v = Float({1, 1, 3, 2}, 3).Make();
    const DTensor y = scaled_dot_product_attention(q, k, v);
    EXPECT_EQ(Differs(y.ToVector<double>(),
                      expand(mean(v, {2}, true), {1, 1, s, 2}).ToVector<double>(), 1e-12),
              "");
    sum(y).Backward();
    EXPECT_EQ(Differs(v.grad().ToVector<double>(),
                      std::vector<double>(6, static_cast<double>(s) / 3), 1e-12),
              "");
  }
}

TEST(Attention, ARefusedCallMovesNoGenerator) {
  const DTensor q = Float({1, 2, 3, 4}, 1).Make();
  const auto drawn_after = [&](const std::function<void()>& call) {
    ManualSeed(3);
    EXPECT_NE(MessageOf(call), "");
    return rand({4}).ToVector<double>();
  };
  ManualSeed(3);
  const std::vector<double> first = rand({4}).ToVector<double>();
  const auto attend = [&](const DTensor& k, const DTensor& v, const DTensor& mask) {
    scaled_dot_product_attention(q, k, v, mask, false, {}, false, 0.5);
  };
  EXPECT_EQ(drawn_after([&] { attend(q, q, ones({5, 5})); }), first);
  EXPECT_EQ(drawn_after([&] { attend(q, q, ones({3, 3}, {.dtype = DType::kI64})); }), first);
  EXPECT_EQ(drawn_after([&] { attend(q, Float({1, 2, 6, 4}, 2).Make(), {}); }), first);
}

}  // namespace
}  // namespace dtensor::testing::attention_test
