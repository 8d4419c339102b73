// Losses over class-sharded logits: known numbers, one rank's numbers on n-D meshes, and nothing of
// the size of the logits communicated.
#include "dtensor/parallel/plan/loss_parallel.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dtensor/mesh/expect_comm.h"
#include "tests/parallel/support.h"

namespace dtensor::loss_parallel_test {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;

struct LossAndGrad {
  double loss;
  std::vector<double> grad;
};

LossAndGrad Of(const std::vector<double>& logits, const DeviceMesh& mesh,
               const TokenLossOptions& options = {}) {
  const int64_t n = static_cast<int64_t>(logits.size());
  Placements classes(mesh.ndim(), Shard(1));
  DTensor x = FromVector(logits, {1, n}, {DType::kF64, mesh, classes});
  x.RequiresGrad();
  const DTensor target = FromVector<int64_t>({2}, {1}, {DType::kI64, mesh, {}});
  const DTensor loss = token_loss(x, target, options);
  const double value = loss.Item();
  loss.Backward();
  return {value, x.grad().ToVector<double>()};
}

void OnMeshes(const std::function<void(const DeviceMesh&)>& body) {
  body(DeviceMesh::Self());
  for (const int64_t ranks : {2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
      body(DeviceMesh({ranks}, {"tp"}));
      if (ranks == 4) body(DeviceMesh({2, 2}, {"dp", "tp"}));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(TokenLoss, KnownNumbers) {
  const std::vector<double> grad = {.0320586033, .0871443187, -.7631171818, .6439142599};
  OnMeshes([&](const DeviceMesh& mesh) {
    SCOPED_TRACE(mesh.ToString());
    for (const double shift : {0., 1000., -1000.}) {
      const LossAndGrad got = Of({1 + shift, 2 + shift, 3 + shift, 4 + shift}, mesh);
      EXPECT_NEAR(got.loss, 1.4401896985611957, 5e-16);
      for (int i = 0; i < 4; ++i) EXPECT_NEAR(got.grad[i], grad[i], 2e-10);
    }
    // Two definitions of label smoothing, both of the whole vocabulary.
    const std::vector<double> x = {1, 2, 3, 4};
    EXPECT_NEAR(Of(x, mesh, {.label_smoothing = 0.1}).loss, 1.4901896985612, 1e-12);
    EXPECT_NEAR(Of(x, mesh, {.label_smoothing = 0.1, .smoothing = Smoothing::kMegatron}).loss,
                1.4401896985611957 + 0.5 * 0.1 * 4 / 3, 1e-12);
    // A shard without any mass.
    const double none = -std::numeric_limits<double>::infinity();
    const LossAndGrad half = Of({none, none, 3, 4}, mesh);
    EXPECT_NEAR(half.loss, std::log1p(std::exp(1.0)), 1e-15);
    EXPECT_NEAR(half.grad[2], -1 / (1 + std::exp(-1.0)), 1e-12);
    EXPECT_EQ(half.grad[0], 0);
    // z-loss: z log(Z)^2, whose gradient is 2 z log(Z) softmax.
    const double log_z = 4.4401896985611957;
    const LossAndGrad z = Of(x, mesh, {.z_loss = 0.25});
    EXPECT_NEAR(z.loss, 1.4401896985611957 + 0.25 * log_z * log_z, 1e-14);
    for (int i = 0; i < 4; ++i) {
      const double p = std::exp(x[i] - log_z);
      EXPECT_NEAR(z.grad[i], grad[i] + 0.5 * log_z * p, 1e-9);
    }
  });
}

constexpr int64_t kRows = 10, kClasses = 24;

struct Rows {
  std::vector<double> logits, weight;
  std::vector<int64_t> target;
};
Rows SomeRows(int64_t ignored_from) {
  Rows r;
  for (int64_t i = 0; i < kRows * kClasses; ++i) {
    r.logits.push_back(std::sin(static_cast<double>(i * i)) * 3);
  }
  for (int64_t v = 0; v < kClasses; ++v) r.weight.push_back(0.5 + static_cast<double>(v % 5));
  for (int64_t i = 0; i < kRows; ++i) {
    r.target.push_back(i >= ignored_from ? -1 : (i * 7) % kClasses);
  }
  return r;
}

struct Form {
  bool weighted = false, composed = false;
  TokenLossOptions options = {};
};

// The loss and its gradient, whole. Rows over the first mesh dim of two, classes over the last.
std::vector<double> LossOf(const Form& form, const Rows& rows, const DeviceMesh& mesh,
                           Placements x_placements, CommTrace* trace) {
  Placements t_placements = x_placements;
  for (Placement& p : t_placements) {
    if (p.is_shard() && p.dim() == 1) p = Replicate();
  }
  DTensor x = FromVector(rows.logits, {kRows, kClasses}, {DType::kF64, mesh, x_placements});
  x.RequiresGrad();
  const DTensor t = FromVector(rows.target, {kRows}, {DType::kI64, mesh, t_placements});
  TokenLossOptions o = form.options;
  o.ignore_index = -1;
  if (form.weighted) o.weight = FromVector(rows.weight, {kClasses}, {DType::kF64, mesh, {}});
  const LossParallel scope;
  if (trace != nullptr) trace->Clear();
  const DTensor loss = form.composed
                           ? nll_loss(log_softmax(x, 1), t, o.weight, o.ignore_index, o.reduction)
                           : token_loss(x, t, o);
  (loss.ndim() == 0 ? loss : sum(loss * loss)).Backward();
  if (trace != nullptr) {
    // Numbers per row: at most three of them together, and never what has classes.
    EXPECT_LE(trace->MaxPayloadBytes(), kRows * 3 * 8) << trace->ToString(CommBy::kOp);
    int64_t forward = 0, backward = 0;
    for (const CommEvent& e : trace->events()) {
      (e.phase == CommPhase::kBackward ? backward : forward) += 1;
    }
    // The largest of each row, then the sums; a log_softmax does not know what is made of it.
    if (!form.composed) {
      EXPECT_EQ(backward, 0) << trace->ToString(CommBy::kOp);
      if (mesh.ndim() == 1) {
        EXPECT_EQ(forward, 2) << trace->ToString(CommBy::kOp);
      }
    }
    trace->Clear();
  }
  std::vector<double> all = loss.ToVector<double>();
  const std::vector<double> grad = x.grad().ToVector<double>();
  all.insert(all.end(), grad.begin(), grad.end());
  return all;
}

std::vector<Form> Forms() {
  std::vector<Form> forms;
  for (const Reduction r : {Reduction::kMean, Reduction::kSum, Reduction::kNone}) {
    forms.push_back({.options = {.reduction = r}});
    forms.push_back({.weighted = true, .options = {.reduction = r}});
    forms.push_back({.weighted = true, .composed = true, .options = {.reduction = r}});
    forms.push_back({.weighted = true, .options = {.reduction = r, .label_smoothing = 0.1}});
    forms.push_back({.options = {.reduction = r,
                                 .label_smoothing = 0.1,
                                 .smoothing = Smoothing::kMegatron,
                                 .z_loss = 0.01}});
  }
  return forms;
}

// Ignored rows at the end: over dp the token counts are unequal, 5 to 2 of two ranks.
TEST(TokenLoss, IsOneRanksOnEveryMeshAndMovesNumbersPerRow) {
  const Rows rows = SomeRows(7);
  std::vector<std::vector<double>> expected;
  for (const Form& form : Forms()) {
    expected.push_back(LossOf(form, rows, DeviceMesh::Self(), {}, nullptr));
  }
  const absl::Status status = RunSpmd(4, [&](RankContext&) {
    const std::pair<DeviceMesh, Placements> layouts[] = {
        {DeviceMesh({4}, {"tp"}), {Shard(1)}},
        {DeviceMesh({2, 2}, {"dp", "tp"}), {Shard(0), Shard(1)}},
        {DeviceMesh({2, 2}, {"a", "b"}), {Shard(1), Shard(1)}},
        {DeviceMesh({4, 1}, {"dp", "tp"}), {Shard(0), Shard(1)}}};
    for (const auto& [mesh, placements] : layouts) {
      for (size_t f = 0; f < expected.size(); ++f) {
        SCOPED_TRACE(absl::StrCat("form ", f, " on ", mesh.ToString()));
        CommTrace trace;
        const std::vector<double> got = LossOf(Forms()[f], rows, mesh, placements, &trace);
        EXPECT_EQ(got.size(), expected[f].size());
        for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[f][i], 1e-13);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(TokenLoss, OfNoTokens) {
  const Rows rows = SomeRows(0);
  OnMeshes([&](const DeviceMesh& mesh) {
    const Placements classes(mesh.ndim(), Shard(1));
    EXPECT_TRUE(std::isnan(LossOf({}, rows, mesh, classes, nullptr)[0]));
    const auto total =
        LossOf({.options = {.reduction = Reduction::kSum}}, rows, mesh, classes, nullptr);
    EXPECT_EQ(total, std::vector<double>(1 + kRows * kClasses, 0.0));
  });
}

TEST(TokenLoss, RefusesWhatMeansNothing) {
  const DTensor x = ones({2, 3}), t = FromVector<int64_t>({0, 1}, {2});
  EXPECT_THAT(MessageOf([&] { token_loss(x, t, {.z_loss = -1}); }), HasSubstr("z_loss"));
  EXPECT_THAT(MessageOf([&] {
                token_loss(x, t, {.label_smoothing = 0.9, .smoothing = Smoothing::kMegatron});
              }),
              HasSubstr("at most 0.666"));
  EXPECT_THAT(MessageOf([&] { token_loss(x, t, {.label_smoothing = 2}); }),
              HasSubstr("label_smoothing must be in [0, 1]"));
  // Of as many tokens, but not of these.
  EXPECT_THAT(
      MessageOf([&] { token_loss(ones({2, 3, 4}), zeros({3, 2}, {.dtype = DType::kI64})); }),
      HasSubstr("need a target [2, 3], it is [3, 2]"));
}

// An ignored row may hold anything: nothing of it reaches a gradient, z-loss or not.
TEST(TokenLoss, IgnoredRowsOfNoNumbersHaveNoGradient) {
  const double inf = std::numeric_limits<double>::infinity();
  OnMeshes([&](const DeviceMesh& mesh) {
    for (const double bad : {-inf, inf, std::nan("")}) {
      std::vector<double> values = {bad, bad, bad, bad, 1, 2, 3, 4};
      DTensor x =
          FromVector(values, {2, 4}, {DType::kF64, mesh, Placements(mesh.ndim(), Shard(1))});
      x.RequiresGrad();
      const DTensor target = FromVector<int64_t>({-100, 2}, {2}, {DType::kI64, mesh, {}});
      const DTensor loss = token_loss(x, target, {.z_loss = 0.25});
      const double log_z = 4.4401896985611957;
      EXPECT_NEAR(loss.Item(), 1.4401896985611957 + 0.25 * log_z * log_z, 1e-14);
      loss.Backward();
      const std::vector<double> grad = x.grad().ToVector<double>();
      for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(grad[i], 0);
        const double p = std::exp(values[4 + i] - log_z);
        EXPECT_NEAR(grad[4 + i], p - (i == 2 ? 1 : 0) + 0.5 * log_z * p, 1e-12);
      }
    }
  });
}

// What the gradient is computed from may not change in between, in parts as without the scope.
TEST(LossParallel, AResultThatWasChangedInPlaceIsRefused) {
  OnMeshes([](const DeviceMesh& mesh) {
    const LossParallel scope;
    for (const auto& fn : {log_softmax, softmax}) {
      DTensor x = FromVector(std::vector<double>{1, 2, 3, 4, 5, 6, 7, 8}, {2, 4},
                             {DType::kF64, mesh, Placements(mesh.ndim(), Shard(1))});
      x.RequiresGrad();
      DTensor p = fn(x, 1, {});
      mul_(p, 2);
      const DTensor loss = sum(mul(p, p.Detach()));
      EXPECT_THAT(MessageOf([&] { loss.Backward(); }),
                  HasSubstr("was changed in place after the forward"));
    }
  });
}

TEST(LossParallel, MustBeOpenWhereRecomputeRunsTheLossAgain) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    const Rows rows = SomeRows(kRows);
    const DTensor t = FromVector(rows.target, {kRows}, {DType::kI64, mesh, {}});
    const auto leaf = [&] {
      return FromVector(rows.logits, {kRows, kClasses}, {DType::kF64, mesh, {Shard(1)}})
          .RequiresGrad();
    };
    const auto fn = [&](const Values& v) -> Values { return {nll_loss(log_softmax(v[0], -1), t)}; };
    DTensor closed = leaf(), open = leaf(), plain = leaf();
    {
      const LossParallel scope;
      closed = Recompute(fn, {closed})[0];
    }
    EXPECT_THAT(MessageOf([&] { closed.Backward(); }),
                HasSubstr("runs log_softmax where it ran the CustomFunction log_softmax the first "
                          "time; a scope that answers the call"));
    const LossParallel scope;
    Recompute(fn, {open})[0].Backward();
    fn({plain})[0].Backward();
    EXPECT_EQ(open.grad().ToVector<double>(), plain.grad().ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::loss_parallel_test
