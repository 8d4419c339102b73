#include <cmath>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::loss_test {
namespace {

struct Options {
  int64_t ignore = -100;
  Reduction reduction = Reduction::kMean;
  double smoothing = 0;
};
// Operands: input, target, and the weight if there is one.
OpFn Nll(Options o = {}) {
  return [=](const std::vector<DTensor>& x) {
    return nll_loss(x[0], x[1], x.size() > 2 ? x[2] : DTensor(), o.ignore, o.reduction);
  };
}
OpFn CrossEntropy(Options o = {}) {
  return [=](const std::vector<DTensor>& x) {
    return cross_entropy(x[0], x[1], x.size() > 2 ? x[2] : DTensor(), o.ignore, o.reduction,
                         o.smoothing);
  };
}
Operand Weight(int64_t v) {
  Operand w = Float({v}, 77);
  for (double& x : w.values) x = 1.5 + x;
  w.grad = false;
  return w;
}

// Per row of x [n, v]: the loss as PyTorch defines it, and what the row counts in a mean.
struct Naive {
  std::vector<double> losses;
  double total = 0;
};
Naive NaiveCrossEntropy(const Operand& x, const Operand& t, const std::vector<double>& weight,
                        const Options& o) {
  const int64_t n = x.shape[0], v = x.shape[1];
  Naive out;
  for (int64_t i = 0; i < n; ++i) {
    double sum = 0, spread = 0;
    for (int64_t j = 0; j < v; ++j) sum += std::exp(x.values[i * v + j]);
    const auto logp = [&](int64_t j) { return x.values[i * v + j] - std::log(sum); };
    for (int64_t j = 0; j < v; ++j) spread -= logp(j) * weight[j] / static_cast<double>(v);
    const int64_t target = static_cast<int64_t>(t.values[i]);
    if (target == o.ignore) {
      out.losses.push_back(0);
      continue;
    }
    out.losses.push_back((1 - o.smoothing) * -logp(target) * weight[target] + o.smoothing * spread);
    out.total += weight[target];
  }
  return out;
}

TEST(CrossEntropy, AgreesWithTheDefinition) {
  const Operand x = Float({5, 4}, 1), t = Ints({5}, {0, 3, 2, 1, 3}), w = Weight(4);
  for (double smoothing : {0.0, 0.2}) {
    for (int64_t ignore : {-100, 3}) {
      for (bool weighted : {false, true}) {
        SCOPED_TRACE(
            absl::StrCat("smoothing ", smoothing, " ignore ", ignore, " weighted ", weighted));
        const Options options = {ignore, Reduction::kNone, smoothing};
        const std::vector<double> weight = weighted ? w.values : std::vector<double>(4, 1.0);
        const Naive want = NaiveCrossEntropy(x, t, weight, options);
        std::vector<Operand> operands = {x, t};
        if (weighted) operands.push_back(w);
        ExpectClose(CrossEntropy(options)(MakeAll(operands)).ToVector<double>(), want.losses);
        double sum = 0;
        for (double l : want.losses) sum += l;
        const Options total = {ignore, Reduction::kSum, smoothing};
        EXPECT_NEAR(CrossEntropy(total)(MakeAll(operands)).Item(), sum, 1e-12);
        const Options mean = {ignore, Reduction::kMean, smoothing};
        EXPECT_NEAR(CrossEntropy(mean)(MakeAll(operands)).Item(), sum / want.total, 1e-12);
        CheckGradients(CrossEntropy(mean), operands);
      }
    }
  }
}

TEST(CrossEntropy, ShapesWithMoreAndFewerDims) {
  const Operand x = Float({2, 5, 3}, 1), t = Ints({2, 3}, {0, 4, 2, 1, 3, 3});
  const DTensor y = CrossEntropy({-100, Reduction::kNone})(MakeAll({x, t}));
  EXPECT_EQ(y.shape(), (Shape{2, 3}));
  const DTensor rows = reshape(permute(x.Make(), {0, 2, 1}), {6, 5});
  ExpectClose(
      y.ToVector<double>(),
      cross_entropy(rows, reshape(t.Make(), {6}), {}, -100, Reduction::kNone).ToVector<double>());
  CheckGradients(CrossEntropy(), {x, t});
  CheckGradients(CrossEntropy(), {Float({5}, 1), Ints({}, {2})});
  EXPECT_EQ(Nll({1, Reduction::kNone})(MakeAll({Float({3}, 1), Ints({}, {1}), Weight(3)})).Item(),
            0);
}

// Rows that a rank has whole, and others: what is kept for the gradient is as exact as the loss.
TEST(CrossEntropy, OfLargeLogits) {
  std::vector<double> large;
  for (int64_t i = 0; i < 8; ++i) large.push_back(1e15 + static_cast<double>(i % 4));
  double sum = 0;
  for (int64_t j = 0; j < 4; ++j) sum += std::exp(static_cast<double>(j));
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    for (const Placement& p : {Placement(Replicate()), Placement(Shard(0)), Placement(Shard(1))}) {
      const DTensor x = FromVector(large, {2, 4}, {DType::kF64, mesh, {p}}).RequiresGrad();
      const DTensor t = FromVector(std::vector<int64_t>{0, 2}, {2}, {.mesh = mesh});
      const DTensor loss = cross_entropy(x, t, {}, -100, Reduction::kSum);
      EXPECT_NEAR(loss.Item(), 2 * std::log(sum) - 2, 1e-14);
      loss.Backward();
      const std::vector<double> grad = x.grad().ToVector<double>();
      for (int64_t i = 0; i < 8; ++i) {
        const double of_target = i == 0 || i == 6 ? 1 : 0;
        EXPECT_NEAR(grad[i], std::exp(static_cast<double>(i % 4)) / sum - of_target, 1e-14);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An infinite loss is one, and not the product of what is infinite and the zeros of a sum.
TEST(CrossEntropy, InfiniteLossOfShardedClassesAndWeights) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const auto made = [&](std::vector<double> values, Shape shape, int dim) {
      return FromVector(values, shape, {DType::kF64, mesh, {Shard(dim)}});
    };
    const DTensor x = made({-INFINITY, 2.5, 1, 2}, {2, 2}, 1), weight = made({0.25, 3}, {2}, 0);
    const DTensor t = FromVector(std::vector<int64_t>{0, 1}, {2}, {.mesh = mesh});
    EXPECT_EQ(cross_entropy(x, t, weight).Item(), INFINITY);
    EXPECT_EQ(nll_loss(x, t, weight, -100, Reduction::kSum).Item(), INFINITY);
    // One row, narrow: there it was the losses that were reduced.
    for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF64}) {
      const auto cut = [&](std::vector<double> values) {
        return FromVector(values, {2}, {dtype, mesh, {Shard(0)}});
      };
      const DTensor target = FromVector(std::vector<int64_t>{0}, {}, {.mesh = mesh});
      EXPECT_EQ(cross_entropy(cut({-INFINITY, 2.5}), target, cut({0.25, 3})).Item(), INFINITY);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CrossEntropy, NothingToAverage) {
  const Operand x = Float({2, 3}, 1), ignored = Ints({2}, {-100, -100});
  EXPECT_TRUE(std::isnan(CrossEntropy()(MakeAll({x, ignored})).Item()));
  EXPECT_EQ(CrossEntropy({-100, Reduction::kSum})(MakeAll({x, ignored})).Item(), 0);
  const Operand none = Float({0, 3}, 1), no_target = Ints({0}, {});
  EXPECT_TRUE(std::isnan(CrossEntropy()(MakeAll({none, no_target})).Item()));
  EXPECT_EQ(Nll({-100, Reduction::kSum})(MakeAll({none, no_target})).Item(), 0);
}

TEST(CrossEntropy, Probabilities) {
  Operand p = Float({3, 4}, 9);
  for (double& v : p.values) v = 0.5 + v / 4;
  const Operand x = Float({3, 4}, 1), w = Weight(4);
  const std::vector<double> logp = log_softmax(x.Make(), 1).ToVector<double>();
  double sum = 0;
  for (size_t i = 0; i < logp.size(); ++i) {
    sum -= logp[i] * (p.values[i] * 0.9 + 0.1 / 4) * w.values[i % 4];
  }
  const Options options = {-100, Reduction::kMean, 0.1};
  EXPECT_NEAR(CrossEntropy(options)(MakeAll({x, p, w})).Item(), sum / 3, 1e-12);
  CheckGradients(CrossEntropy(options), {x, p, w});
  CheckSharded(CrossEntropy(options), {x, p});
}

// As in torch, which refuses to do so for class indices.
TEST(CrossEntropy, OfProbabilitiesHasAGradientOfTheWeight) {
  Operand weight = Weight(5);
  weight.grad = true;
  for (const double smoothing : {0.0, 0.1}) {
    for (const Reduction r : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
      const OpFn fn = CrossEntropy({.reduction = r, .smoothing = smoothing});
      CheckGradients(fn, {Float({4, 5}, 1), Float({4, 5}, 2), weight});
      CheckSharded(fn, {Float({4, 5}, 1), Float({4, 5}, 2), weight});
    }
  }
}

TEST(CrossEntropy, Bfloat16AveragesInFloat32) {
  const int64_t n = 600;  // more than bfloat16 counts
  const DTensor x =
      to(FromVector(Noise(n * 3, 1), {n, 3}, {DType::kF64, DeviceMesh::Self(), {}}), DType::kBF16);
  const DTensor t =
      FromVector(std::vector<int64_t>(n, 1), {n}, {DType::kI64, DeviceMesh::Self(), {}});
  const double want = cross_entropy(to(x, DType::kF64), t).Item();
  EXPECT_EQ(cross_entropy(x, t).dtype(), DType::kBF16);
  EXPECT_NEAR(cross_entropy(x, t).Item(), want, want / 100);
}

TEST(Nll, ValuesAndGradients) {
  const Operand x = Float({4, 3}, 1), t = Ints({4}, {0, 2, 1, 2}), w = Weight(3);
  ExpectClose(Nll({1, Reduction::kNone})(MakeAll({x, t})).ToVector<double>(),
              {-x.values[0], -x.values[5], 0, -x.values[11]});
  for (Reduction r : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    CheckGradients(Nll({1, r}), {x, t});
    CheckGradients(Nll({-100, r}), {x, t, w});
  }
}

TEST(Loss, Sharded) {
  const Operand x = Float({5, 4}, 1), t = Ints({5}, {0, 3, 2, 1, 3}), w = Weight(4);
  for (Reduction r : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    CheckSharded(Nll({3, r}), {x, t});
    CheckSharded(CrossEntropy({3, r}), {x, t});
  }
  CheckSharded(Nll({3}), {x, t, w});
  CheckSharded(CrossEntropy({3, Reduction::kMean, 0.1}), {x, t, w});
  CheckSharded(CrossEntropy(), {Float({2, 5, 3}, 1), Ints({2, 3}, {0, 4, 2, 1, 3, 3})});
}

TEST(CrossEntropy, ShardedClassesCommunicateRowsOnly) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const int64_t n = 4, v = 512;
    DTensor x = FromVector(Noise(n * v, 1), {n, v}, {DType::kF64, mesh, {Shard(1)}});
    x.RequiresGrad();
    const DTensor t =
        FromVector(std::vector<int64_t>{1, 300, -100, 511}, {n}, {DType::kI64, mesh, {}});
    CommTrace trace;
    cross_entropy(x, t).Backward();
    EXPECT_EQ(x.grad().placements()[0], Shard(1));
    EXPECT_LE(trace.MaxPayloadBytes(), 2 * n * 8) << trace.ToString();
    EXPECT_EQ(trace.TotalCount(), 2) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CrossEntropy, BatchAndClassesSharded) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const int64_t n = 6, v = 64;
    DTensor x = FromVector(Noise(n * v, 1), {n, v}, {DType::kF64, mesh, {Shard(0), Shard(1)}});
    x.RequiresGrad();
    const DTensor t = FromVector(std::vector<int64_t>{1, 30, -100, 63, 0, 32}, {n},
                                 {DType::kI64, mesh, {Shard(0), Replicate()}});
    CommTrace trace;
    const DTensor loss = cross_entropy(x, t);
    EXPECT_EQ(loss.placements()[0], Partial());  // the caller decides when to add up
    loss.Backward();
    EXPECT_EQ(x.grad().placements()[0], Shard(0));
    EXPECT_EQ(x.grad().placements()[1], Shard(1));
    // The maximum, the two sums, and the number of rows that count.
    EXPECT_EQ(trace.TotalCount(), 3) << trace.ToString();
    EXPECT_LE(trace.MaxPayloadBytes(), n * 8) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What they reduce over the ranks is what they are, not a redistribution that nobody asked for.
TEST(Loss, StrictModeTakesShardedClasses) {
  const Operand logits = Float({8, 32}, 1), weight = Float({32}, 2), likely = Float({8, 32}, 3);
  using Fn = std::function<DTensor(const DTensor&)>;
  ASSERT_TRUE(RunSpmd(2, [&](RankContext&) -> absl::Status {
                const DeviceMesh mesh({2}, {"tp"});
                const auto on = [&](const DTensor& t, Placement p) {
                  return DistributeTensor(t, mesh, {p});
                };
                const DTensor t =
                    on(FromVector<int64_t>({0, 31, 7, 8, 15, 16, 3, 20}, {8}), Replicate());
                const DTensor w = on(square(weight.Make()).Detach(), Replicate());
                const DTensor q = on(softmax(likely.Make(), 1).Detach(), Shard(1));
                const std::map<std::string, Fn> losses = {
                    {"smoothed",
                     [&](const DTensor& x) {
                       return cross_entropy(x, t, {}, -100, Reduction::kMean, 0.1);
                     }},
                    {"weighted", [&](const DTensor& x) { return cross_entropy(x, t, w); }},
                    {"probabilities", [&](const DTensor& x) { return cross_entropy(x, q); }},
                    {"softmax", [](const DTensor& x) { return sum(square(softmax(x, 1))); }},
                };
                for (const auto& [name, loss] : losses) {
                  SCOPED_TRACE(name);
                  const StrictRedistribute strict;
                  DTensor x = on(logits.Make().Detach(), Shard(1)).Detach();
                  x.RequiresGrad();
                  EXPECT_NO_THROW(loss(x).Backward());
                }
                return absl::OkStatus();
              }).ok());
}

// What gradients of smoothed losses are computed from may not change in between.
TEST(CrossEntropy, WeightsThatWereChangedInPlaceAreRefused) {
  DTensor x = Float({2, 3}, 1).Make(), w = square(Float({3}, 2).Make()).Detach();
  x.RequiresGrad();
  const DTensor t = Ints({2}, {0, 1}).Make();
  const DTensor loss = cross_entropy(x, t, w, -100, Reduction::kMean, 0.1);
  mul_(w, 2);
  EXPECT_THAT(MessageOf([&] { loss.Backward(); }),
              ::testing::HasSubstr("was changed in place after the forward"));
}

TEST(Loss, Errors) {
  const DTensor x = Float({2, 3}, 1).Make(), t = Ints({2}, {0, 1}).Make();
  EXPECT_THAT(
      MessageOf([&] { cross_entropy(x, Ints({3}, {0, 1, 2}).Make()); }),
      ::testing::StartsWith("[cross_entropy] target must be [2] for an input of [2, 3], is [3]"));
  EXPECT_THAT(MessageOf([&] { nll_loss(x, x); }),
              ::testing::StartsWith("[nll_loss] target must hold class indices"));
  EXPECT_THAT(MessageOf([&] { nll_loss(x, t, Float({2}, 1).Make()); }),
              ::testing::StartsWith("[nll_loss] weight must be [3], is [2]"));
  EXPECT_THAT(MessageOf([&] { cross_entropy(x, t, {}, -100, Reduction::kMean, 2); }),
              ::testing::HasSubstr("label_smoothing must be in [0, 1], is 2"));
  EXPECT_NE(MessageOf([&] { cross_entropy(x, Ints({2}, {0, 3}).Make()); }), "");
}

// (Values of PyTorch.)
TEST(MarginRankingLoss, OfIntegersWrapsUpToTheMargin) {
  const auto bytes = [](std::vector<double> v) { return to(Ints({2}, v).Make(), DType::kU8); };
  const DTensor y =
      margin_ranking_loss(bytes({5, 2}), bytes({1, 9}), bytes({250, 1}), 0.5, Reduction::kNone);
  EXPECT_EQ(y.dtype(), DType::kF32);
  EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{24.5, 7.5}));
}

// The batch is input's, also where target has more dims or elements. (As PyTorch has it.)
TEST(KlDiv, BatchIsThatOfInput) {
  const auto value = [](const Shape& input, const Shape& target) {
    const DTensor x = zeros(input, {.dtype = DType::kF64});
    const DTensor t = full(target, 0.5, {.dtype = DType::kF64});
    return kl_div(x, t, Reduction::kBatchMean, /*log_target=*/true).Item();
  };
  const double one = std::exp(0.5) * 0.5;
  EXPECT_NEAR(value({1, 4}, {3, 4}), 12 * one, 1e-13);
  EXPECT_NEAR(value({3, 4}, {1, 4}), 4 * one, 1e-13);
  EXPECT_NEAR(value({}, {3}), 3 * one, 1e-13);
}

TEST(BinaryCrossEntropy, SlopeAtItsEndsIsPyTorchs) {
  DTensor x = FromVector(std::vector<double>{0.0, 1.0}, {2}, {.dtype = DType::kF64}).RequiresGrad();
  const DTensor t = full({2}, 0.5, {.dtype = DType::kF64});
  binary_cross_entropy(x, t, {}, Reduction::kSum).Backward();
  EXPECT_NEAR(x.grad().ToVector<double>()[0], -500000001997.9014, 1e-3);
  EXPECT_NEAR(x.grad().ToVector<double>()[1], 500000001997.9014, 1e-3);
}

TEST(BinaryCrossEntropyWithLogits, SlopeIsExactFarOut) {
  DTensor x = FromVector(std::vector<double>{-20, 20, -20, 20}, {4}, {DType::kF32}).RequiresGrad();
  const DTensor t = FromVector(std::vector<double>{0, 1, 1, 0}, {4}, {DType::kF32});
  binary_cross_entropy_with_logits(x, t, {}, Reduction::kSum).Backward();
  const std::vector<double> slope = x.grad().ToVector<double>();
  EXPECT_NEAR(slope[0] / 2.0611537e-9, 1, 1e-6);
  EXPECT_NEAR(slope[1] / -2.0611537e-9, 1, 1e-6);
  EXPECT_EQ(slope[2], -1);
  EXPECT_EQ(slope[3], 1);
}

}  // namespace
}  // namespace dtensor::testing::loss_test
