// Recompute: what it says when a function does something else the second time, to whom the
// communication of the second time belongs, and that it draws the same numbers.
#include <memory>

#include "dtensor/autograd.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/message.h"

namespace dtensor::recompute_test {
namespace {

using ::testing::HasSubstr;

// Of a function that runs `first` the first time and `again` when it runs again.
std::string MessageOfBackward(std::function<Values(const Values&)> first,
                              std::function<Values(const Values&)> again) {
  DTensor x = full({3}, 2.0);
  x.RequiresGrad();
  int runs = 0;
  const DTensor y =
      Recompute([&](const Values& in) { return ++runs == 1 ? first(in) : again(in); }, {x})[0];
  return testing::MessageOf([&] { sum(y).Backward(); });
}

TEST(Recompute, OtherOpsTheSecondTimeAreNamed) {
  const auto square = [](const Values& in) -> Values { return {in[0] * in[0]}; };
  const auto nested = [&](const Values& in) { return Recompute(square, in); };
  const auto other = [](const Values& in) -> Values { return {exp(in[0])}; };
  EXPECT_THAT(MessageOfBackward(square, nested),
              HasSubstr("calls Recompute where it did not the first time"));
  EXPECT_THAT(MessageOfBackward(nested, square),
              HasSubstr("runs mul where it ran Recompute the first time"));
  EXPECT_THAT(MessageOfBackward(square, other),
              HasSubstr("runs exp where it ran mul the first time"));
  EXPECT_EQ(MessageOfBackward(square, square), "");
}

// What the backward of a CustomFunction holds is a value of the region as any other.
TEST(Recompute, DropsWhatACustomFunctionHoldsForItsBackward) {
  DTensor x = full({3}, 2.0);
  x.RequiresGrad();
  std::weak_ptr<int> last;
  const auto twice = [&](const Values& in) -> Values {
    const auto held = std::make_shared<int>(2);
    last = held;
    const auto forward = [&]() -> Values { return {in[0] * *held}; };
    return CustomFunction("twice", in, forward,
                          [held](const Values& g) -> Values { return {g[0] * *held}; });
  };
  const DTensor y = Recompute(twice, {x})[0];
  EXPECT_TRUE(last.expired());
  sum(y).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(3, 2));
}

TEST(Recompute, CommunicationOfTheSecondTimeBelongsToTheModule) {
  struct Layout {
    Dims mesh;
    std::vector<std::string> names;
    Placements kept, used;  // what is gathered over tp is kept cut by it
  };
  for (const Layout& layout :
       {Layout{{2}, {"tp"}, {Shard(0)}, {Replicate()}},
        Layout{{2, 2}, {"dp", "tp"}, {Shard(0), Shard(1)}, {Shard(0), Replicate()}},
        Layout{{2, 2}, {"dp", "tp"}, {Shard(0), Shard(0)}, {Shard(0), Replicate()}}}) {
    const absl::Status status = RunSpmd(Numel(layout.mesh), [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh = ValueOrThrow(DeviceMesh::Create(layout.mesh, layout.names));
      DTensor x = ones({4, 4}, {.mesh = mesh, .placements = layout.kept});
      x.RequiresGrad();
      DTensor loss;
      {
        static const std::string kModule = "block";
        const ScopedModule module(rank.trace(), &kModule);
        loss = sum(Recompute(
            [&](const Values& in) -> Values {
              const DTensor whole = in[0].Redistribute(layout.used);
              return {whole * whole};
            },
            {x})[0]);
      }
      CommTrace trace;
      loss.Backward();
      int again = 0;
      for (const CommEvent& e : trace.events()) {
        if (e.kind != CollectiveKind::kAllGather) continue;
        ++again;
        EXPECT_EQ(e.module, "block");
        EXPECT_EQ(e.mesh_dims, "tp");
      }
      EXPECT_EQ(again, 1) << trace.ToString();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(layout.kept) << ": " << status;
  }
}

// Runs `draw`, which drops out what it is given, inside of a Recompute, and expects the mask of the
// forward in the backward.
void ExpectOneMask(const std::function<DTensor(const DTensor&)>& draw) {
  DTensor x = ones({16}, {DType::kF64, DeviceMesh({2}, {"tp"}), {Shard(0)}});
  x.RequiresGrad();
  const DTensor y =
      Recompute([&](const Values& in) -> Values { return {draw(in[0] * in[0])}; }, {x})[0];
  sum(y).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), (y * 2.0).ToVector<double>());
}

TEST(Recompute, DrawsTheSameFromStreamsThatItsFunctionMakes) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    RngTracker tracker;
    ExpectOneMask([&](const DTensor& x) {
      if (!tracker.Has("first")) ThrowIfError(tracker.Add("first", 11));
      const RngTracker::Fork fork(tracker, "first");
      return dropout(x, 0.5);
    });
    MultiDimRandomizer regions = ValueOrThrow(MultiDimRandomizer::Create(mesh, {"tp"}));
    ExpectOneMask([&](const DTensor& x) {
      const RngTracker::Fork fork(regions.tracker(), ValueOrThrow(regions.Region({"tp"})));
      return dropout(x, 0.5);
    });
    RandomStates states({{"key", Generator(5).State()}});
    ExpectOneMask([&](const DTensor& x) {
      const RandomStates::Branch branch(states, "key");
      return dropout(x, 0.5);
    });
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Recompute, DrawsInTheModeOfTheForward) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    ManualSeed(3);
    DTensor x = ones({16}, {DType::kF64, DeviceMesh({2}), {Shard(0)}}), y;
    x.RequiresGrad();
    {
      const ScopedRngMode mode(RngMode::kOffsetBased);
      y = Recompute([](const Values& in) -> Values { return {dropout(in[0] * in[0], 0.5)}; },
                    {x})[0];
    }
    sum(y).Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), (y * 2.0).ToVector<double>());
    EXPECT_EQ(CurrentRngMode(), RngMode::kThreadBased);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::recompute_test
