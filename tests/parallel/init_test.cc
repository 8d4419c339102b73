// Initialisers and deferred init: one device's numbers in any placement, and for any subset of a
// model.
#include "dtensor/parallel/module/init.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/tracker.h"
#include "tests/parallel/support.h"

namespace dtensor::init_test {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;

std::vector<std::vector<double>> All(const DeviceMesh& mesh, const Placements& p) {
  ManualSeed(2);
  std::vector<std::vector<double>> results;
  const auto draw = [&](const std::function<void(const DTensor&)>& fill) {
    const DTensor t = empty({12, 7}, {.mesh = mesh, .placements = p});
    fill(t);
    results.push_back(t.ToVector<double>());
  };
  draw([](const DTensor& t) { kaiming_uniform_(t, std::sqrt(5.0)); });
  draw([](const DTensor& t) { kaiming_normal_(t, 0, FanMode::kOut, Gain::kRelu); });
  draw([](const DTensor& t) { xavier_uniform_(t); });
  draw([](const DTensor& t) { xavier_normal_(t, 2); });
  draw([](const DTensor& t) { trunc_normal_(t, 0.5, 2, -1, 1); });
  draw([](const DTensor& t) { orthogonal_(t, 3); });
  results.push_back({static_cast<double>(DefaultGenerator().offset())});
  return results;
}

TEST(Initialisers, AreOneDevicesInAnyPlacement) {
  const auto want = All(DeviceMesh::Self(), {});
  for (const Placement& p : {Replicate(), Shard(0), Shard(1)}) {
    const absl::Status status = RunSpmd(3, [&](RankContext&) {
      EXPECT_EQ(All(DeviceMesh({3}, {"tp"}), {p}), want) << p.ToString();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Initialisers, HaveTheirMoments) {
  ManualSeed(3);
  const DTensor w = empty({200, 300});
  const auto std_of = [&] { return std::sqrt(mean(w * w).Item()); };
  kaiming_uniform_(w, std::sqrt(5.0));  // torch's Linear: bound 1 / sqrt(in)
  EXPECT_NEAR(amax(w).Item(), 1 / std::sqrt(300.0), 1e-4);
  kaiming_normal_(w, 0, FanMode::kOut, Gain::kRelu);
  EXPECT_NEAR(std_of(), std::sqrt(2.0 / 200), 0.001);
  xavier_normal_(w);
  EXPECT_NEAR(std_of(), std::sqrt(2.0 / 500), 0.001);
  trunc_normal_(w, 0, 1, -0.5, 2);
  EXPECT_GE(-amax(-w).Item(), -0.5);
  EXPECT_LE(amax(w).Item(), 2);
  EXPECT_NEAR(mean(to(w, DType::kF64)).Item(), 0.4455,
              0.01);  // (phi(-.5) - phi(2)) / (Phi(2) - Phi(-.5))
  const DTensor q = empty({5, 9}, {.dtype = DType::kF64});
  orthogonal_(q, 2);
  const std::vector<double> gram = matmul(q, transpose(q, 0, 1)).ToVector<double>();
  for (int i = 0; i < 25; ++i) EXPECT_NEAR(gram[i], i % 6 == 0 ? 4 : 0, 1e-12);
  const DTensor nothing = empty({0, 0});  // no range to draw from, and nothing to draw
  xavier_uniform_(nothing);
  kaiming_uniform_(nothing);
  EXPECT_THAT(MessageOf([] { xavier_uniform_(ones({3})); }), HasSubstr("two dims or more"));
  EXPECT_THAT(MessageOf([] { trunc_normal_(ones({3}), 0, 1, 2, 1); }), HasSubstr("a < b"));
}

TEST(DeferredInit, ASubsetHoldsWhatOneDeviceWouldHaveDrawn) {
  const GPTConfig config = {.vocab = 20, .seq = 6, .layers = 2, .hidden = 8, .heads = 2};
  ManualSeed(9);
  GPT whole(config);
  Materialize(whole);
  const uint64_t offset = DefaultGenerator().offset();
  const testing::NamedValues want = testing::Gather(whole);
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    ManualSeed(9);
    GPT part(config);
    // Each rank makes its own half, as pipeline stages do.
    const std::string mine = rank.rank() == 0 ? "blocks.0" : "blocks.1";
    Materialize(part, [&](const std::string& fqn) { return fqn.rfind(mine, 0) == 0; });
    EXPECT_EQ(DefaultGenerator().offset(), offset);
    int64_t made = 0;
    for (const NamedParameter& p : part.NamedParameters()) {
      if (!p.parameter->materialized()) continue;
      ++made;
      for (const auto& [fqn, values] : want) {
        if (fqn != p.fqn) continue;
        EXPECT_EQ(p.parameter->tensor().ToVector<double>(), values) << fqn;
      }
    }
    EXPECT_EQ(made, 16);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of more elements than one sweep draws, float64 takes more of the generator than float32.
TEST(DeferredInit, ASubsetMovesAsItsDTypeWould) {
  struct Pair : Module {
    Parameter& large = AddParameter("large", {900, 1000}, Init::Normal(0, 1));
    Parameter& small = AddParameter("small", {5}, Init::Normal(0, 1));
    Values Forward(const Values& in) override { return in; }
  };
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const MaterializeAs as(dtype);
    ManualSeed(1);
    Pair whole, part;
    Materialize(whole);
    ManualSeed(1);
    Materialize(part, [](const std::string& fqn) { return fqn == "small"; });
    EXPECT_EQ(part.small.tensor().ToVector<double>(), whole.small.tensor().ToVector<double>())
        << std::string(Name(dtype));
    EXPECT_EQ(part.small.dtype(), dtype);
  }
}

TEST(DeferredInit, FunctionsAreSkippedToo) {
  class Orthogonal : public Module {
   public:
    Orthogonal() {
      AddParameter("a", {4, 6}, Init::Call([](const DTensor& t) { orthogonal_(t); }));
      AddParameter("b", {4, 6}, Init::Call([](const DTensor& t) { trunc_normal_(t); }));
      AddParameter("c", {4}, Init::Normal(0, 1));
    }

   protected:
    Values Forward(const Values& in) override { return in; }
  };
  ManualSeed(1);
  Orthogonal whole, part;
  Materialize(whole);
  ManualSeed(1);
  Materialize(part, [](const std::string& fqn) { return fqn == "c"; });
  EXPECT_EQ(part.FindParameter("c")->tensor().ToVector<double>(),
            whole.FindParameter("c")->tensor().ToVector<double>());
}

TEST(Recompute, SavesTheStreamsOfTrackersToo) {
  const auto run = [](bool recompute) {
    ManualSeed(3);
    RngTracker tracker;
    ThrowIfError(tracker.Add("parallel", 77));
    DTensor x = ones({8}).RequiresGrad();
    const auto fn = [&](const Values& in) -> Values {
      RngTracker::Fork fork(tracker, "parallel");
      return {dropout(in[0] * in[0], 0.5)};
    };
    const DTensor a = recompute ? Recompute(fn, {x})[0] : fn({x})[0];
    const DTensor b = recompute ? Recompute(fn, {a})[0] : fn({a})[0];
    sum(b).Backward();
    return std::make_pair(x.grad().ToVector<double>(), tracker.GetStates());
  };
  EXPECT_EQ(run(true), run(false));
}

}  // namespace
}  // namespace dtensor::init_test
