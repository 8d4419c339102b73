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

using ::testing::AllOf;
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

// x += f(x) where no backward passes: nothing of it is left when x is gone.
TEST(Recompute, LetsGoOfAnInputThatItsResultIsAddedTo) {
  DTensor w = full({1000}, 2.0);
  w.RequiresGrad();
  const auto block = [](const Values& in) -> Values { return {exp(in[0] * in[0])}; };
  const auto nested = [&](const Values& in) { return Recompute(block, {Recompute(block, in)[0]}); };
  const int64_t before = CurrentAllocator()->stats().in_use_bytes;
  for (const auto& fn : std::vector<std::function<Values(const Values&)>>{block, nested}) {
    const DTensor x = w * 3.0;
    const DTensor h = Recompute(fn, {x})[0];
    add_(x, h);
  }
  EXPECT_EQ(CurrentAllocator()->stats().in_use_bytes, before);
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

using Fn = std::function<DTensor(const DTensor& x, const DTensor& w)>;

// The message of the backward of fn(x, w) where w, which is captured, is changed in between.
std::string MessageIfChanged(const Fn& fn, const TensorOptions& of = {}, bool learns = true) {
  DTensor x = full({4, 4}, 2.0, of), w = full({4, 4}, 3.0, of);
  x.RequiresGrad();
  if (learns) w.RequiresGrad();
  const DTensor y = Recompute([&](const Values& in) -> Values { return {fn(in[0], w)}; }, {x})[0];
  {
    const NoGrad no_grad;
    mul_(w, 10.0);
  }
  return testing::MessageOf([&] { sum(y).Backward(); });
}

// Also where what reads it saves or records nothing: what is made of it is made again.
TEST(Recompute, RefusesACapturedTensorThatWasChanged) {
  const auto square = [](const DTensor& t) { return t * t; };
  const Fn nested = [&](const DTensor& x, const DTensor& w) {
    const auto inner = [&](const Values& in) -> Values { return {square(in[0] + w)}; };
    return square(Recompute(inner, {square(x)})[0]);
  };
  const Fn custom = [](const DTensor& x, const DTensor& w) {
    return CustomFunction(
        "own", {x}, [&] { return Values{x.Detach()}; },
        [w](const Values& g) { return Values{g[0] * w}; }, {w})[0];
  };
  const std::vector<std::pair<std::string, Fn>> cases = {
      {"input y of mul", [](const DTensor& x, const DTensor& w) { return x * w; }},
      {"input w of matmul_t", [](const DTensor& x, const DTensor& w) { return linear(x, w); }},
      {"input x of add", [&](const DTensor& x, const DTensor& w) { return square(w + x); }},
      {"input x of to", [](const DTensor& x, const DTensor& w) { return x * to(w, DType::kF64); }},
      {"input x of transpose",
       [](const DTensor& x, const DTensor& w) { return x * transpose(w, 0, 1); }},
      {"input x of add_scalar",
       [&](const DTensor& x, const DTensor& w) { return x * square(w.Detach() + 1); }},
      {"input y of add", nested},
      {"saved tensor #0 of a CustomFunction", custom}};
  for (const auto& [what, fn] : cases) {
    for (const bool learns : {true, false}) {
      EXPECT_THAT(MessageIfChanged(fn, {}, learns),
                  AllOf(HasSubstr("[backward of "), HasSubstr(what + " (float32 [4, 4]"),
                        HasSubstr("was changed in place after the forward")));
    }
  }
}

// What is gathered for its use has a memory of its own: the source's version counts.
TEST(Recompute, RefusesAShardedTensorThatWasChanged) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2}, {"dp"});
    const TensorOptions of = {.mesh = mesh, .placements = {Shard(0)}};
    EXPECT_THAT(
        MessageIfChanged([](const DTensor& x, const DTensor& w) { return linear(x, w); }, of),
        HasSubstr("input w of matmul_t (float32 [4, 4] on dp=2 [S(0)]) was changed in place"));
    const Fn moved = [](const DTensor& x, const DTensor& w) {
      return linear(x, w.Redistribute({Replicate()}));
    };
    EXPECT_THAT(MessageIfChanged(moved, of), HasSubstr("a tensor that is redistributed (float32"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Running statistics, also of a function inside; what both runs read is not the function's value.
TEST(Recompute, TensorsThatTheFunctionWritesToItselfAreItsBusiness) {
  DTensor x = full({3}, 2.0), w = full({3}, 3.0), seen = zeros({3}), drawn = zeros({3});
  x.RequiresGrad();
  w.RequiresGrad();
  const auto remember = [&] {
    const NoGrad no_grad;
    mul_(seen, 0.5);
    add_(seen, x.Detach());
    normal_(drawn);
  };
  const auto fn = [&](const Values& in) -> Values {
    remember();
    const auto inner = [&](const Values& of) -> Values {
      const DTensor y = of[0] * w;
      remember();
      return {y * y + seen * 0.0 + drawn * 0.0};
    };
    return {Recompute(inner, {in[0] * in[0]})[0] * (seen * 0.0 + drawn * 0.0 + 1.0)};
  };
  const DTensor first = Recompute(fn, {x})[0], second = Recompute(fn, {x})[0];
  sum(first + second).Backward();
  EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(3, 2 * 4 * 8 * 9));
}

// Running statistics and a counter, in a function, in one inside of it, and without any.
TEST(Recompute, WhatHappensOncePerCallDoesNotHappenAgain) {
  const auto train = [](int depth) {
    DTensor x = reshape(arange(0.0, 12.0), {4, 3}), w = full({3, 3}, 0.5);
    x.RequiresGrad();
    w.RequiresGrad();
    DTensor mean_of = zeros({3}), var_of = ones({3}), average = zeros({3});
    int64_t calls = 0;
    const auto block = [&](const Values& in) -> Values {
      const DTensor y = batch_norm(matmul(in[0], w), mean_of, var_of, {}, {}, /*training=*/true);
      RunOnce([&] {
        EXPECT_FALSE(GradEnabled());
        lerp_(average, mean(y, {0}) + mean_of, 0.25);
        ++calls;
      });
      return {tanh(y) * (average + 1.0)};  // what it wrote, read in both runs
    };
    std::function<Values(const Values&)> fn = block;
    for (int d = 0; d < depth; ++d) {
      fn = [fn](const Values& in) { return Recompute(fn, {in[0] * 1.0}); };
    }
    const DTensor first = fn({x})[0];
    sum(square(first)).Backward();
    std::vector<double> all = {static_cast<double>(calls)};
    for (const DTensor& t : {mean_of, var_of, average, x.grad(), w.grad()}) {
      for (const double v : t.ToVector<double>()) all.push_back(v);
    }
    return all;
  };
  const std::vector<double> kept = train(0);
  EXPECT_EQ(kept[0], 1);
  EXPECT_EQ(train(1), kept);
  EXPECT_EQ(train(2), kept);
  EXPECT_EQ(train(3), kept);
}

// Also of how the second run is ended, where all has been made that backward reads.
TEST(Recompute, AFunctionMayCatchEverything) {
  DTensor x = full({3}, 0.5), w = full({3}, 2.0);
  x.RequiresGrad();
  const auto fn = [&](const Values& in) -> Values {
    const DTensor h = in[0] * w;
    try {
      return {tanh(h)};
    } catch (...) {
      return {h};
    }
  };
  for (int step = 0; step < 2; ++step) {
    sum(Recompute(fn, {x})[0]).Backward();
    DTensor plain = full({3}, 0.5);
    plain.RequiresGrad();
    sum(fn({plain})[0]).Backward();
    EXPECT_EQ(x.grad().ToVector<float>(), plain.grad().ToVector<float>());
    x.ZeroGrad();
  }
}

TEST(Recompute, RefusesNothingThatItsBackwardDoesNotReadAgain) {
  DTensor x = full({3}, 2.0), w = full({3}, 3.0), table;
  x.RequiresGrad();
  w.RequiresGrad();
  int runs = 0;
  const auto fn = [&](const Values& in) -> Values {
    const NoGrad no_grad;
    if (!table.defined()) {  // kept after the first time
      table = zeros({3});
      add_(table, 1.0);
      mul_(table, 1.0);
    }
    const EnableGrad grad;
    ++runs;
    const DTensor made = in[0] * w;
    add_(made, 1.0);
    const DTensor y = exp(made * 0.0) * made * table;
    return {y, made + w};  // saves nothing, comes last: not made again
  };
  for (int step = 0; step < 2; ++step) {
    const Values y = Recompute(fn, {x});
    const DTensor loss = sum(y[0]) + sum(y[1]);
    {
      const NoGrad no_grad;
      mul_(y[0], 5.0);  // made by the function: made again
      mul_(y[1], 5.0);
    }
    loss.Backward();
    const NoGrad no_grad;
    mul_(w, 2.0);  // as an optimizer
  }
  EXPECT_EQ(runs, 4);
  EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(3, 2 * (2 + 2 + 1)));
}

}  // namespace
}  // namespace dtensor::recompute_test
