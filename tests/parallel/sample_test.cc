// Sampling from logits that are whole, sharded evenly, unevenly and with empty parts.
#include "dtensor/parallel/generate/sample.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::sample_test {
namespace {

using dtensor::testing::DpTp;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// `values` [rows, vocab] on dp x tp, rows and classes sharded.
DTensor Logits(const std::vector<double>& values, int64_t rows, int64_t dp, int64_t tp,
               DType dtype = DType::kF32) {
  return FromVector(values, {rows, static_cast<int64_t>(values.size()) / rows},
                    {.dtype = dtype, .mesh = DpTp(dp, tp), .placements = {Shard(0), Shard(1)}});
}

// Runs on every mesh of these sizes, under strict mode: nothing moves by itself.
void OnMeshes(absl::FunctionRef<void(int64_t dp, int64_t tp)> body) {
  for (const auto& [dp, tp] : std::vector<std::pair<int64_t, int64_t>>{
           {1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 1}, {2, 2}, {3, 2}}) {
    const absl::Status status = RunSpmd(dp * tp, [&](RankContext&) {
      const StrictRedistribute strict;
      body(dp, tp);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << "dp=" << dp << " tp=" << tp << ": " << status;
  }
}

TEST(Sample, GreedyTakesTheLowestOfEqualTokens) {
  OnMeshes([](int64_t dp, int64_t tp) {
    // Ties inside of parts and across them; 5 classes on 4 ranks leave one without any.
    const std::vector<double> values = {1,  3,  0,  3,  3,   //
                                        -1, -1, -1, -1, -1,  //
                                        0,  0,  0,  0,  2};
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
      const DTensor next = NextTokens(Logits(values, 3, dp, tp, dtype), {});
      EXPECT_THAT(next.ToVector<int64_t>(), ElementsAre(1, 0, 4));
    }
  });
}

TEST(Sample, TopTokensOfMoreThanARankHas) {
  OnMeshes([](int64_t dp, int64_t tp) {
    const std::vector<double> values = {5, 1, 4, 4, 2, 7, -kInfinity, 4, 0, 3, 4};
    for (const int64_t k : {1, 2, 4, 5, 9, 11, 100}) {
      const Values top = TopTokens(Logits(values, 1, dp, tp), k);
      const std::vector<int64_t> all = {5, 0, 2, 3, 7, 10, 9, 4, 1, 8, 6};
      const auto tokens = top[1].ToVector<int64_t>();
      ASSERT_EQ(tokens.size(), std::min<size_t>(k, 11));
      for (size_t i = 0; i < tokens.size(); ++i) EXPECT_EQ(tokens[i], all[i]) << "k " << k;
    }
  });
}

// Probabilities that are left, whole.
std::vector<double> Left(const DTensor& filtered) {
  return softmax(filtered.Redistribute(Placements(2)), 1).ToVector<double>();
}

TEST(Sample, TopPKeepsTheFewestWithTheShare) {
  OnMeshes([](int64_t dp, int64_t tp) {
    std::vector<double> logits;
    for (const double p : {.1, .2, .3, .4, .4, .3, .2, .1}) logits.push_back(std::log(p));
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const DTensor x = Logits(logits, 2, dp, tp, dtype);
      const auto kept = [&](double top_p) {
        std::vector<int> which;
        const std::vector<double> left =
            FilterLogits(x, {.temperature = 1, .top_p = top_p}).ToVector<double>();
        for (const double value : left) which.push_back(value > -kInfinity ? 1 : 0);
        return which;
      };
      EXPECT_THAT(kept(0.5), ElementsAre(0, 0, 1, 1, 1, 1, 0, 0));
      EXPECT_THAT(kept(0.75), ElementsAre(0, 1, 1, 1, 1, 1, 1, 0));
      EXPECT_THAT(kept(1), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
      EXPECT_THAT(kept(1e-30), ElementsAre(0, 0, 0, 1, 1, 0, 0, 0));
      EXPECT_THAT(kept(0.39), ElementsAre(0, 0, 0, 1, 1, 0, 0, 0));
    }
  });
}

TEST(Sample, TopPKeepsSoManyTokensAtLeast) {
  OnMeshes([](int64_t dp, int64_t tp) {
    std::vector<double> logits;
    for (const double p : {.1, .2, .3, .4, .4, .2, .2, .2}) logits.push_back(std::log(p));
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      const DTensor x = Logits(logits, 2, dp, tp, dtype);
      const auto kept = [&](double top_p, int64_t least, int64_t top_k = 0) {
        std::vector<int> which;
        const SamplingOptions o = {
            .temperature = 1, .top_k = top_k, .top_p = top_p, .min_tokens_to_keep = least};
        for (const double value : FilterLogits(x, o).ToVector<double>()) {
          which.push_back(value > -kInfinity ? 1 : 0);
        }
        return which;
      };
      EXPECT_THAT(kept(1e-30, 1), ElementsAre(0, 0, 0, 1, 1, 0, 0, 0));
      // Equal ones stay together.
      EXPECT_THAT(kept(1e-30, 2), ElementsAre(0, 0, 1, 1, 1, 1, 1, 1));
      EXPECT_THAT(kept(0.5, 2), ElementsAre(0, 0, 1, 1, 1, 1, 1, 1));
      EXPECT_THAT(kept(0.75, 2), ElementsAre(0, 1, 1, 1, 1, 1, 1, 1));
      EXPECT_THAT(kept(1e-30, 3), ElementsAre(0, 1, 1, 1, 1, 1, 1, 1));
      EXPECT_THAT(kept(1, 2), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
      for (const int64_t all : {int64_t{4}, int64_t{5}, int64_t{1} << 40}) {
        EXPECT_THAT(kept(1e-30, all), ElementsAre(1, 1, 1, 1, 1, 1, 1, 1));
        // What top_k leaves out stays out.
        EXPECT_THAT(kept(1e-30, all, 2), ElementsAre(0, 0, 1, 1, 1, 1, 0, 0));
      }
    }
  });
}

TEST(Sample, TopKKeepsTheLowestOfEqualTokens) {
  OnMeshes([](int64_t dp, int64_t tp) {
    const DTensor x = Logits({1, 3, 3, 3, 0, 2, 2, 2, 2, 2}, 2, dp, tp);
    EXPECT_THAT(FilterLogits(x, {.temperature = 1, .top_k = 2}).ToVector<double>(),
                ElementsAre(-kInfinity, 3, 3, -kInfinity, -kInfinity,  //
                            2, 2, -kInfinity, -kInfinity, -kInfinity));
  });
}

// Row by row with sorting, in doubles: temperature, then top-k, then top-p, then probabilities.
std::vector<double> Reference(std::vector<double> x, const SamplingOptions& o) {
  std::vector<size_t> order(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    order[i] = i;
    x[i] /= o.temperature;
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return x[a] > x[b]; });
  if (o.top_k > 0) order.resize(std::min<size_t>(order.size(), o.top_k));
  double total = 0, sum = 0;
  for (const size_t i : order) total += std::exp(x[i] - x[order[0]]);
  size_t keep = 0;
  const auto least = static_cast<size_t>(o.min_tokens_to_keep);
  while (keep < order.size() && (keep < least || sum < o.top_p * total)) {
    sum += std::exp(x[order[keep++]] - x[order[0]]);
  }
  std::vector<double> p(x.size());
  for (size_t i = 0; i < keep; ++i) p[order[i]] = std::exp(x[order[i]] - x[order[0]]) / sum;
  return p;
}

TEST(Sample, FiltersAsSortingDoes) {
  OnMeshes([](int64_t dp, int64_t tp) {
    ManualSeed(3);
    const int64_t rows = 5, vocab = 37;
    const DTensor drawn = randn({rows, vocab}, {.dtype = DType::kF64}) * 3.0;
    const std::vector<double> values = drawn.ToVector<double>();
    const DTensor x = Logits(values, rows, dp, tp, DType::kF64);
    for (const SamplingOptions& o : std::vector<SamplingOptions>{
             {.temperature = 0.7},
             {.temperature = 0.7, .top_k = 5},
             {.temperature = 1.3, .top_k = 30},
             {.temperature = 0.7, .top_p = 0.9},
             {.temperature = 2, .top_p = 0.3},
             {.temperature = 0.7, .top_k = 5, .top_p = 0.9},
             {.temperature = 2, .top_p = 0.3, .min_tokens_to_keep = 20},
             {.temperature = 0.7, .top_p = 0.9, .min_tokens_to_keep = 6}}) {
      const std::vector<double> left = Left(FilterLogits(x, o));
      for (int64_t r = 0; r < rows; ++r) {
        const std::vector<double> expected =
            Reference({values.begin() + r * vocab, values.begin() + (r + 1) * vocab}, o);
        for (int64_t v = 0; v < vocab; ++v) {
          ASSERT_NEAR(left[r * vocab + v], expected[v], 1e-12) << "row " << r << " token " << v;
        }
      }
    }
  });
}

TEST(Sample, RepetitionIsPenalisedOnce) {
  OnMeshes([](int64_t dp, int64_t tp) {
    const DTensor x = Logits({2, -2, 4, 1, -1, 3, 2, 2, 2, 2}, 2, dp, tp);
    const DTensor seen = FromVector(std::vector<int64_t>{1, 2, 2, 0, 0, 0}, {2, 3},
                                    {.mesh = x.mesh(), .placements = {Shard(0), Replicate()}});
    EXPECT_THAT(PenaliseRepetition(x, seen, 2).ToVector<double>(),
                ElementsAre(2, -4, 2, 1, -1, 1.5, 2, 2, 2, 2));
    EXPECT_THAT(NextTokens(x, {.repetition_penalty = 2}, seen).ToVector<int64_t>(),
                ElementsAre(0, 1));
  });
}

TEST(Sample, EveryMeshDrawsTheTokensOfOneDevice) {
  std::vector<double> values;
  for (int64_t i = 0; i < 6 * 29; ++i) values.push_back(std::sin(static_cast<double>(i * i)) * 2);
  std::vector<int64_t> expected;
  const auto draw = [&](const DTensor& x) {
    ManualSeed(11);
    std::vector<int64_t> tokens;
    for (int step = 0; step < 8; ++step) {
      const SamplingOptions o = {
          .temperature = 0.8, .top_k = step % 2 == 0 ? 0 : 7, .top_p = step % 3 == 0 ? 0.8 : 1.0};
      for (const int64_t id : NextTokens(x, o).ToVector<int64_t>()) tokens.push_back(id);
    }
    return tokens;
  };
  expected = draw(FromVector(values, {6, 29}));
  OnMeshes([&](int64_t dp, int64_t tp) { EXPECT_EQ(draw(Logits(values, 6, dp, tp)), expected); });
}

// Quotients by tiny temperatures are no floats: the largest logit is drawn, and of several that are
// the largest any.
TEST(Sample, TinyTemperaturesDrawTheLargest) {
  OnMeshes([](int64_t dp, int64_t tp) {
    ManualSeed(2);
    const std::vector<double> one = {1, 2, 30, 4, 29}, below = {-9, -kInfinity, -7, -8, -40};
    std::vector<double> values;
    for (int row = 0; row < 3; ++row) {
      values.insert(values.end(), one.begin(), one.end());
      values.insert(values.end(), below.begin(), below.end());
    }
    std::vector<double> pairs;
    for (int row = 0; row < 60; ++row) pairs.insert(pairs.end(), {7, 3, 7, 6.5});
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
      const DTensor x = Logits(values, 6, dp, tp, dtype), two = Logits(pairs, 60, dp, tp, dtype);
      for (const double temperature : {1e-5, 1e-7, 1e-37, 1e-38, 1e-45, 1e-50, 1e-308, 5e-324}) {
        for (const SamplingOptions& o :
             std::vector<SamplingOptions>{{.temperature = temperature},
                                          {.temperature = temperature, .top_k = 3, .top_p = 0.9}}) {
          EXPECT_THAT(NextTokens(x, o).ToVector<int64_t>(), ElementsAre(2, 2, 2, 2, 2, 2))
              << temperature << " " << Name(dtype);
          int64_t count[4] = {};
          for (const int64_t id : NextTokens(two, o).ToVector<int64_t>()) ++count[id];
          EXPECT_EQ(count[0] + count[2], 60) << temperature << " " << Name(dtype);
          EXPECT_GT(std::min(count[0], count[2]), 10) << temperature << " " << Name(dtype);
        }
      }
    }
  });
}

TEST(Sample, DrawsFollowTheProbabilities) {
  // A row per draw; chi-square of five classes, one of them left out by top-k.
  const int64_t draws = 100'000;
  const std::vector<double> p = {.05, .4, .25, .2, .1};
  std::vector<double> logits;
  for (const double q : p) logits.push_back(std::log(q));
  ManualSeed(5);
  const DTensor x = expand(FromVector(logits, {1, 5}), {draws, 5});
  std::vector<double> count(5);
  for (const int64_t id : NextTokens(x, {.temperature = 1, .top_k = 4}).ToVector<int64_t>())
    ++count[id];
  EXPECT_EQ(count[0], 0);
  double chi = 0;
  for (size_t i = 1; i < 5; ++i) {
    const double expected = p[i] / 0.95 * static_cast<double>(draws);
    chi += (count[i] - expected) * (count[i] - expected) / expected;
  }
  EXPECT_LT(chi, 16.3);  // one in a thousand, for three degrees of freedom
}

TEST(Sample, TheVocabularyIsNeverGathered) {
  static constexpr int64_t kVocab = 4099, kRanks = 2;
  ASSERT_TRUE(
      RunSpmd(kRanks, [](RankContext&) {
        const DTensor x =
            zeros({2, kVocab}, {.mesh = DpTp(1, kRanks), .placements = {Replicate(), Shard(1)}});
        const DTensor seen = zeros({2, 3}, {.dtype = DType::kI64, .mesh = x.mesh()});
        const StrictRedistribute strict;
        const CommTrace trace;
        NextTokens(x, {});
        NextTokens(x, {.temperature = 1, .top_k = 50, .top_p = 0.9, .repetition_penalty = 2}, seen);
        for (const CommRow& row : trace.Rows()) {
          EXPECT_LT(row.bytes / row.count, kVocab) << Name(row.kind);
        }
        EXPECT_FALSE(trace.Rows().empty());
        return absl::OkStatus();
      }).ok());
}

TEST(Sample, RefusesWhatHasNoMeaning) {
  const DTensor x = zeros({1, 4});
  const auto message = [&](const SamplingOptions& o) {
    return dtensor::testing::MessageOf([&] { NextTokens(x, o); });
  };
  EXPECT_THAT(message({.temperature = -1}),
              HasSubstr("temperature must be at least 0 and finite, is -1"));
  EXPECT_THAT(message({.temperature = NAN}), HasSubstr("temperature"));
  EXPECT_THAT(message({.top_k = -2}), HasSubstr("top_k must be at least 0, is -2"));
  EXPECT_THAT(message({.top_p = 0}), HasSubstr("top_p must be above 0, at most 1, is 0"));
  EXPECT_THAT(message({.top_p = 1.5}), HasSubstr("top_p"));
  EXPECT_THAT(message({.min_tokens_to_keep = 0}),
              HasSubstr("min_tokens_to_keep must be at least 1, is 0"));
  EXPECT_THAT(message({.repetition_penalty = 0}),
              HasSubstr("repetition_penalty must be above 0 and finite"));
  EXPECT_THAT(dtensor::testing::MessageOf([&] { NextTokens(zeros({4}), {}); }),
              HasSubstr("logits must be floating [rows, vocab]"));
  EXPECT_THAT(dtensor::testing::MessageOf([&] { NextTokens(full({1, 4}, NAN), {}); }),
              HasSubstr("logits that are no numbers"));
}

}  // namespace
}  // namespace dtensor::sample_test
