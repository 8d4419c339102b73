// Attention in blocks against matmul and softmax of the whole, at sizes on both sides of blocks,
// strips and vectors: masks, dropout, grouped heads, every floating type; its memory; and parts of
// it put together.
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/nn/attention.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/generator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/thin.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::testing::attention_blocks_test {
namespace {

struct Sizes {
  int64_t b, h, g, s, t, d, e;
};
struct How {
  std::string name;
  bool causal = false;
  double dropout = 0;
  Shape mask = {};  // empty: none
  bool boolean = false;
  double scale = 0.3;
};

// q, k, v, the gradient of the result, and the mask if there is one.
struct Inputs {
  DTensor q, k, v, dout, mask;
};

Inputs Make(const Sizes& z, const How& how, DType dtype) {
  const auto make = [&](Shape shape, uint64_t seed, double by) {
    std::vector<double> x = Noise(Numel(shape), seed);
    for (double& value : x) value *= by;
    return FromVector(x, shape, {dtype, DeviceMesh::Self(), {}});
  };
  Inputs in = {make({z.b, z.h, z.s, z.d}, 1, 2), make({z.b, z.g, z.t, z.d}, 2, 2),
               make({z.b, z.g, z.t, z.e}, 3, 1), make({z.b, z.h, z.s, z.e}, 4, 1), DTensor()};
  for (DTensor* x : {&in.q, &in.k, &in.v}) x->RequiresGrad();
  if (how.mask.empty()) return in;
  std::vector<double> m = Noise(Numel(how.mask), 5);
  const double least = -std::numeric_limits<double>::infinity();
  for (double& x : m) x = how.boolean ? (x > -0.4 ? 1 : 0) : x < -0.8 ? least : 2 * x;
  in.mask = FromVector(m, how.mask, {how.boolean ? DType::kBool : dtype, DeviceMesh::Self(), {}});
  return in;
}

// The definition, in float64, on what the inputs hold. Drops what dropout of weights of dtype
// `drawn` drops.
DTensor Whole(const Inputs& in, const Sizes& z, const How& how, DType drawn) {
  const int64_t r = z.h / z.g;
  const auto repeat = [&](const DTensor& x) {
    return reshape(expand(unsqueeze(x, 2), {z.b, z.g, r, x.size(-2), x.size(-1)}),
                   {z.b, z.h, x.size(-2), x.size(-1)});
  };
  DTensor scores = mul(matmul(in.q, transpose(repeat(in.k), -1, -2)), how.scale);
  const double least = -std::numeric_limits<double>::infinity();
  if (how.causal) {
    const DTensor row = unsqueeze(arange(0, z.s), 1), col = arange(0, z.t);
    scores = masked_fill(scores, lt(row, col), least);
  }
  if (in.mask.defined()) {
    scores = how.boolean ? masked_fill(scores, logical_not(in.mask), least)
                         : add(scores, to(in.mask, DType::kF64));
  }
  const DTensor none = eq(amax(scores.Detach(), {-1}, true), least);
  DTensor p = masked_fill(softmax(masked_fill(scores, none, 0), -1), none, 0);
  if (how.dropout > 0) {
    const DTensor keep = dropout_with_mask(ones({z.b, z.h, z.s, z.t}, {drawn}), how.dropout)[1];
    p = mul(mul(p, to(keep, DType::kF64)), 1 / (1 - how.dropout));
  }
  return matmul(p, repeat(in.v));
}

std::vector<std::vector<double>> Results(const Inputs& in, const DTensor& o) {
  o.Backward(to(in.dout, o.dtype()));
  return {o.ToVector<double>(), in.q.grad().ToVector<double>(), in.k.grad().ToVector<double>(),
          in.v.grad().ToVector<double>()};
}

DTensor Attend(const Inputs& in, const How& how) {
  if (how.causal && in.mask.defined()) {
    return causal_attention(in.q, in.k, in.v, in.mask, how.scale, true, how.dropout);
  }
  return scaled_dot_product_attention(in.q, in.k, in.v, in.mask, how.causal, how.scale, true,
                                      how.dropout);
}

void Check(const Sizes& z, const How& how, DType dtype) {
  SCOPED_TRACE(how.name + " " + std::string(Name(dtype)) + " s=" + std::to_string(z.s) + " t=" +
               std::to_string(z.t) + " d=" + std::to_string(z.d) + " e=" + std::to_string(z.e));
  const Inputs in = Make(z, how, dtype);
  ManualSeed(7);
  const auto got = Results(in, Attend(in, how));
  const auto state = DefaultGenerator().offset();
  Inputs wide = in;
  for (DTensor* x : {&wide.q, &wide.k, &wide.v}) *x = to(x->Detach(), DType::kF64).RequiresGrad();
  ManualSeed(7);
  const auto want = Results(wide, Whole(wide, z, how, dtype));
  EXPECT_EQ(DefaultGenerator().offset(), state);
  const double unit = dtype == DType::kF64   ? 1e-12
                      : dtype == DType::kF32 ? 3e-6
                      : dtype == DType::kF16 ? 3e-3
                                             : 3e-2;
  const char* names[] = {"o", "dq", "dk", "dv"};
  for (int i = 0; i < 4; ++i) {
    SCOPED_TRACE(names[i]);
    ExpectClose(got[i], want[i], unit);
  }
}

std::vector<How> Ways(const Sizes& z) {
  return {{"plain"},
          {.name = "causal", .causal = true},
          {.name = "negative scale", .causal = true, .scale = -0.4},
          {.name = "dropout", .dropout = 0.3},
          {.name = "causal dropout", .causal = true, .dropout = 0.6},
          {.name = "padding", .mask = {z.b, 1, 1, z.t}, .boolean = true},
          {.name = "causal padding", .causal = true, .mask = {z.b, 1, 1, z.t}, .boolean = true},
          {.name = "added", .mask = {z.s, z.t}},
          {.name = "causal, added, dropout", .causal = true, .dropout = 0.2, .mask = {z.s, z.t}},
          {.name = "added per head, dropout", .dropout = 0.2, .mask = {z.h, z.s, z.t}},
          {.name = "bool, all dims", .mask = {z.b, z.h, z.s, z.t}, .boolean = true},
          {.name = "per query", .mask = {z.s, 1}, .boolean = true}};
}

TEST(AttentionBlocks, EveryWayAtEverySize) {
  const Sizes sizes[] = {{1, 2, 1, 1, 1, 1, 1},     {2, 2, 2, 1, 300, 5, 7},
                         {1, 3, 1, 1, 37, 64, 64},  {1, 1, 1, 13, 31, 33, 16},
                         {1, 2, 1, 97, 97, 8, 40},  {1, 1, 1, 200, 257, 19, 3},
                         {2, 6, 2, 24, 64, 16, 32}, {1, 1, 1, 5, 520, 4, 33}};
  for (const Sizes& z : sizes) {
    for (const How& how : Ways(z)) {
      for (const DType dtype : {DType::kF64, DType::kF32}) Check(z, how, dtype);
    }
  }
}

TEST(AttentionBlocks, NarrowTypes) {
  const Sizes sizes[] = {{1, 4, 2, 97, 260, 16, 33}, {1, 3, 1, 1, 40, 64, 64}};
  for (const Sizes& z : sizes) {
    for (const How& how : Ways(z)) {
      for (const DType dtype : {DType::kBF16, DType::kF16}) Check(z, how, dtype);
    }
  }
}

// Heads as a model has them, transposed views of [batch, sequence, heads, d], and columns apart.
TEST(AttentionBlocks, StridedInputsGiveTheSameBits) {
  const Sizes z = {2, 4, 2, 30, 30, 8, 8};
  const Inputs in = Make(z, {}, DType::kF32);
  const auto run = [&](const DTensor& q, const DTensor& k, const DTensor& v) {
    const DTensor o = scaled_dot_product_attention(q, k, v, {}, true, {}, true);
    o.Backward(in.dout);
    std::vector<std::vector<float>> all = {o.ToVector<float>()};
    for (DTensor x : {in.q, in.k, in.v}) {
      all.push_back(x.grad().ToVector<float>());
      x.ZeroGrad();
    }
    return all;
  };
  const auto want = run(in.q, in.k, in.v);
  const auto view = [](const DTensor& x, int a, int b) {
    return transpose(contiguous(transpose(x, a, b)), a, b);
  };
  EXPECT_EQ(run(view(in.q, 1, 2), view(in.k, 1, 2), view(in.v, 1, 2)), want);
  EXPECT_EQ(run(view(in.q, 2, 3), view(in.k, 2, 3), view(in.v, 1, 3)), want);
}

// The same bits dropped on any mesh, by batch, groups of heads, heads and queries.
TEST(AttentionBlocks, DropoutIsThatOfOneDeviceUnderAnySharding) {
  struct Layout {
    int64_t groups;
    std::vector<Placements> q, kv;
  };
  const Layout layouts[] = {
      {6, {{Shard(0)}, {Shard(1)}, {Shard(2)}}, {{Shard(0)}, {Shard(1)}, {Replicate()}}},
      {3, {{Shard(0)}, {Shard(1)}, {Shard(2)}}, {{Shard(0)}, {Shard(1)}, {Replicate()}}},
      {1, {{Shard(1)}, {Shard(2)}}, {{Replicate()}, {Replicate()}}}};
  for (const int64_t ranks : {2, 3, 4}) {
    const absl::Status status = RunSpmd(static_cast<int>(ranks), [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({ranks});
      for (const Layout& layout : layouts) {
        const Sizes z = {3, 6, layout.groups, 11, 14, 4, 4};
        for (const bool masked : {false, true}) {
          How how{.name = "", .causal = !masked, .dropout = 0.4};
          if (masked) how.mask = {6, 11, 14};
          const Inputs in = Make(z, how, DType::kF64);
          const auto run = [&](const Inputs& x) {
            ManualSeed(3);
            return Results(x, scaled_dot_product_attention(x.q, x.k, x.v, x.mask, how.causal, 0.3,
                                                           true, how.dropout));
          };
          const auto want = run(in);
          for (size_t i = 0; i < layout.q.size(); ++i) {
            const auto place = [&](const DTensor& x, const Placements& p) {
              return x.defined() ? DistributeTensor(x.Detach().local(), mesh, p) : x;
            };
            const Inputs parts = {place(in.q, layout.q[i]).RequiresGrad(),
                                  place(in.k, layout.kv[i]).RequiresGrad(),
                                  place(in.v, layout.kv[i]).RequiresGrad(),
                                  place(in.dout, {Replicate()}), place(in.mask, {Replicate()})};
            const auto got = run(parts);
            for (int o = 0; o < 4; ++o) ExpectClose(got[o], want[o], 1e-12);
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Attention over two parts of the keys, put together by their log-sum-exp.
TEST(AttentionBlocks, PartsAreJoinedByTheirLogSumExp) {
  const Sizes z = {1, 4, 2, 50, 300, 8, 6};
  const Inputs in = Make(z, {}, DType::kF64);
  const auto part = [&](int64_t from, int64_t to) {
    return scaled_dot_product_attention_lse(in.q, slice(in.k, 2, from, to),
                                            slice(in.v, 2, from, to), {}, false, 0.3, true);
  };
  const Values all = part(0, 300), a = part(0, 123), b = part(123, 300);
  EXPECT_EQ(all[1].shape(), (Shape{1, 4, 50}));
  EXPECT_FALSE(all[1].requires_grad());
  const DTensor lse = logaddexp(a[1], b[1]);
  ExpectClose(lse.ToVector<double>(), all[1].ToVector<double>(), 1e-12);
  const auto weigh = [&](const Values& x) { return mul(x[0], unsqueeze(exp(sub(x[1], lse)), -1)); };
  ExpectClose(add(weigh(a), weigh(b)).ToVector<double>(), all[0].ToVector<double>(), 1e-12);
  const DTensor q = FromVector(Noise(6, 1), {3, 2}), k = FromVector(Noise(10, 2), {5, 2});
  const Values flat = scaled_dot_product_attention_lse(q, k, k);
  EXPECT_EQ(flat[0].shape(), (Shape{3, 2}));
  EXPECT_EQ(flat[1].shape(), (Shape{3}));
}

// Scores of up to 80, whose rounding is 4e-6: a weight is exp(score - lse), so forward and backward
// have to agree on both. Few queries are not packed.
TEST(AttentionBlocks, GradientsOfLargeScoresAreAsExactAsTheScoresAgree) {
  for (const int64_t s : {1, 3, 4, 5, 40}) {
    const Sizes z = {1, 2, 2, s, 70, 8, 8};
    std::vector<double> grads[2];
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      Inputs in = Make(z, {}, DType::kF32);  // values of float32 in both
      for (DTensor* x : {&in.q, &in.k, &in.v}) *x = to(x->Detach(), dtype).RequiresGrad();
      const DTensor large = mul(in.k, 10);
      const DTensor y = scaled_dot_product_attention(in.q, large, in.v);
      y.Backward(to(in.dout, dtype));
      grads[dtype == DType::kF32] = in.v.grad().ToVector<double>();
    }
    double most = 0, error = 0;
    for (size_t i = 0; i < grads[0].size(); ++i) {
      most = std::max(most, std::abs(grads[0][i]));
      error = std::max(error, std::abs(grads[0][i] - grads[1][i]));
    }
    EXPECT_LT(error, 1e-6 * most) << s << " queries";
  }
}

TEST(AttentionBlocks, LogSumExpOfRowsWithoutKeysIsMinusInfinity) {
  const Inputs in = Make({1, 1, 1, 2, 3, 2, 2}, {}, DType::kF32);
  const DTensor mask = FromVector(std::vector<double>{0, 0, 0, 1, 0, 1}, {2, 3}, {DType::kBool});
  const Values y = scaled_dot_product_attention_lse(in.q, in.k, in.v, mask);
  const std::vector<double> lse = y[1].ToVector<double>();
  EXPECT_EQ(lse[0], -std::numeric_limits<double>::infinity());
  EXPECT_TRUE(std::isfinite(lse[1]));
}

TEST(AttentionBlocks, Errors) {
  const DTensor q = ones({1, 2, 3, 4});
  const auto call = [&](const DTensor& mask, double dropout_p) {
    return MessageOf(
        [&] { scaled_dot_product_attention(q, q, q, mask, false, {}, false, dropout_p); });
  };
  EXPECT_THAT(call({}, 1.5), ::testing::HasSubstr("dropout_p must be in [0, 1], got 1.5"));
  EXPECT_THAT(call(ones({3, 5}), 0), ::testing::HasSubstr("mask [1, 1, 3, 5] does not broadcast"));
  EXPECT_THAT(call(ones({3, 3}, {DType::kI64}), 0),
              ::testing::HasSubstr("mask must be bool or floating, is int64"));
  const DTensor learned = ones({3, 3}).RequiresGrad();
  EXPECT_THAT(MessageOf([&] { scaled_dot_product_attention_lse(q, q, q, learned); }),
              ::testing::HasSubstr("no log-sum-exp where the mask wants a gradient"));
}

// Where all weights are made, as for a mask that wants a gradient, the causal mask counts, too.
TEST(AttentionBlocks, BothMasksOfWholeWeights) {
  const Sizes z = {2, 4, 2, 5, 7, 3, 3};
  for (const bool boolean : {false, true}) {
    How how{.name = "", .causal = true, .mask = {2, 1, 1, 7}, .boolean = boolean};
    Inputs in = Make(z, how, DType::kF64);
    const auto want = Results(in, Attend(in, how));
    for (DTensor* x : {&in.q, &in.k, &in.v}) x->ZeroGrad();
    // The weights of every head, the same for both.
    DTensor mask = boolean ? where(in.mask, zeros({2, 1, 1, 7}, {DType::kF64}),
                                   -std::numeric_limits<double>::infinity())
                           : in.mask;
    mask.RequiresGrad();
    in.mask = mask;
    how.boolean = false;
    const auto got = Results(in, Attend(in, how));
    for (int i = 0; i < 4; ++i) ExpectClose(got[i], want[i], 1e-12);
    EXPECT_TRUE(mask.grad().defined());
  }
}

// What is dropped with p = 1 is everything, and nothing is drawn.
TEST(AttentionBlocks, AllDropped) {
  const DTensor q = ones({1, 2, 3, 4}).RequiresGrad();
  ManualSeed(1);
  const DTensor o = scaled_dot_product_attention(q, q, q, {}, false, {}, false, 1.0);
  o.Backward(o.Detach());
  EXPECT_EQ(o.ToVector<double>(), std::vector<double>(24, 0));
  EXPECT_EQ(q.grad().ToVector<double>(), std::vector<double>(24, 0));
  EXPECT_EQ(DefaultGenerator().offset(), 0u);
}

// The most bytes that are alive in forward and backward, of those of q, k, v, o and their
// gradients.
double PeakShare(RankContext& rank, const Sizes& z, const How& how, DType dtype) {
  const Inputs in = Make(z, how, dtype);
  const int64_t before = rank.device_allocator()->stats().in_use_bytes;
  rank.device_allocator()->ResetPeak();
  Attend(in, how).Backward(in.dout);
  // q, k, v and the gradient of o are there already.
  const int64_t there = z.b * (z.h * z.s + z.g * z.t) * (z.d + z.e) * SizeOf(dtype);
  const int64_t peak = rank.device_allocator()->stats().peak_bytes - before + there;
  const double share = static_cast<double>(peak) / static_cast<double>(2 * there);
  std::printf("%s, %d on %d heads, %s: peak %.2f of q, k, v, o and their gradients\n",
              how.name.c_str(), static_cast<int>(z.h), static_cast<int>(z.g),
              std::string(Name(dtype)).c_str(), share);
  return share;
}

TEST(AttentionBlocks, MemoryIsLinearInTheSequence) {
  const int64_t s = Thin(8) == 1 ? 8192 : 2048;
  const How ways[] = {
      {.name = "causal", .causal = true},
      {.name = "dropout", .causal = true, .dropout = 0.1},
      {.name = "padding", .mask = {1, 1, 1, s}, .boolean = true},
      {.name = "causal padding", .causal = true, .mask = {1, 1, 1, s}, .boolean = true}};
  const absl::Status status = RunSpmd(1, [&](RankContext& rank) -> absl::Status {
    for (const How& how : ways) {
      EXPECT_LE(PeakShare(rank, {1, 2, 2, s, s, 16, 16}, how, DType::kF32), 1.3) << how.name;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Few heads are what a rank of tensor parallel has, and nothing divides what is needed once. Of 16
// bits: float32 sums of the gradients would be as many bytes again as those and q, k, v and o.
TEST(AttentionBlocks, MemoryOfFewHeadsOfEveryType) {
  const std::pair<int64_t, int64_t> heads[] = {{1, 1}, {2, 1}, {4, 1}, {2, 2}};
  const How how = {.name = "causal", .causal = true};
  const absl::Status status = RunSpmd(1, [&](RankContext& rank) -> absl::Status {
    for (size_t i = 0; i < std::size(heads); i += static_cast<size_t>(Thin(4))) {
      const auto [h, g] = heads[i];
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        if (dtype == DType::kF16 && h > 1) continue;
        EXPECT_LE(PeakShare(rank, {1, h, g, 8192, 8192, 64, 64}, how, dtype), 1.3)
            << h << " on " << g << " " << Name(dtype);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::testing::attention_blocks_test
