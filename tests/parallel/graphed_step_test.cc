// Training by a graph that is launched again and again: the numbers of the plain program, to the
// last bit; what cannot be captured is refused by name and leaves nothing behind. On a device
// without graphs (the far one, the CPU) it is said that there are none.
#include "dtensor/parallel/train/graphed_step.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/tracker.h"
#include "tests/common/message.h"
#include "tests/common/remote_device.h"
#include "tests/parallel/support.h"

namespace dtensor::graphed_step_test {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;

DeviceType Far() { return testing::RemoteDevice(); }
bool HasGraphs() { return Far() == DeviceType::kCuda; }

constexpr GPTConfig kConfig = {
    .vocab = 16, .seq = 4, .layers = 1, .hidden = 8, .heads = 2, .dropout = 0.2};
constexpr int64_t kRows = 2 * kConfig.seq;

absl::Status Status(const std::function<void()>& fn, int64_t ranks, absl::Duration timeout) {
  return RunSpmd(ranks,
                 [&](RankContext&) -> absl::Status {
                   fn();
                   return absl::OkStatus();
                 },
                 {.timeout = timeout, .device = Far()});
}
void OnFar(const std::function<void()>& fn, int64_t ranks = 1) {
  const absl::Status status = Status(fn, ranks, absl::Seconds(60));
  EXPECT_TRUE(status.ok()) << status;
}

// Of the process; ranks share one, or have one each.
int Devices() {
  OnFar([] { ThrowIfError(RankDevices::Current().Get(Far()).status()); });
  int number = 0;
  char why[256];
  EXPECT_EQ(FindDevice(Far())->count(&number, why, sizeof(why)), 0) << why;
  return number;
}

// A model, its optimizer, and the tensors that a step reads.
struct Training {
  GPT model;
  std::unique_ptr<AdamW> optimizer;
  DeviceMesh mesh;
  DTensor ids, targets;

  explicit Training(const DeviceMesh& on = DeviceMesh::Self()) : model(kConfig), mesh(on) {
    ManualSeed(7);
    if (!mesh.is_self()) {
      ThrowIfError(ParallelizeModule(model, mesh, GPTPlan(kConfig)));
      ThrowIfError(DistributeModule(model, mesh));
    }
    Materialize(model);
    optimizer = std::make_unique<AdamW>(model.NamedParameters(), AdamWOptions{.lr = 0.01});
    ids = Placed(std::vector<int64_t>(kRows));
    targets = Placed(std::vector<int64_t>(kRows));
  }
  DTensor Placed(const std::vector<int64_t>& numbers) const {
    const DTensor t = FromVector(numbers, {2, kConfig.seq}, {.dtype = DType::kI64});
    return mesh.is_self() ? t : DistributeTensor(t, mesh, {Shard(0), Replicate()});
  }
  void Load(int64_t step) {
    const NoGrad no_grad;
    std::vector<int64_t> tokens, next;
    for (int64_t i = 0; i < kRows; ++i) {
      tokens.push_back((i * 5 + step) % kConfig.vocab);
      next.push_back((i * 7 + step) % kConfig.vocab);
    }
    copy_(ids, Placed(tokens));
    copy_(targets, Placed(next));
    optimizer->set_lr(0.01 / static_cast<double>(step + 1));
  }
  DTensor Loss() {
    return cross_entropy(reshape(model(ids), {kRows, kConfig.vocab}), reshape(targets, {kRows}));
  }
  DTensor Step() {
    const DTensor loss = Loss();
    optimizer->ZeroGrad();
    loss.Backward();
    ClipGradients(model.NamedParameters(), 0.5);
    optimizer->Step();
    return loss;
  }
};

struct Trained {
  std::vector<double> losses;
  testing::NamedValues parameters, gradients;  // after the last step
};

// Steps by `step`, with an evaluation between them that draws numbers too, and takes memory that
// stays taken.
Trained Train(Training& t, const std::function<DTensor()>& step, int64_t steps = 6) {
  Trained trained;
  std::vector<DTensor> kept;
  for (int64_t i = 0; i < steps; ++i) {
    t.Load(i);
    trained.losses.push_back(step().Item());
    if (i % 2 == 1) {
      const NoGrad no_grad;
      kept.push_back(t.Loss());
      trained.losses.push_back(kept.back().Item());
    }
  }
  for (const DTensor& loss : kept) trained.losses.push_back(loss.Item());
  trained.parameters = testing::Gather(t.model);
  trained.gradients = testing::Gather(t.model, true);
  return trained;
}

Trained Plain(int64_t steps = 6) {
  Trained trained;
  OnFar([&] {
    Training t;
    trained = Train(t, [&] { return t.Step(); }, steps);
  });
  return trained;
}

TEST(GraphedStep, GivesTheNumbersOfThePlainProgram) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  const Trained plain = Plain();
  ASSERT_EQ(plain.losses.size(), 12u);
  EXPECT_NE(plain.losses[0], plain.losses[1]);
  OnFar([&] {
    Training t;
    GraphedStep step(*t.optimizer, [&] { return t.Step(); });
    const Trained graphed = Train(t, [&] { return step(); });
    EXPECT_TRUE(step.captured());
    EXPECT_EQ(graphed.losses, plain.losses);
    EXPECT_EQ(graphed.parameters, plain.parameters);
    EXPECT_EQ(graphed.gradients, plain.gradients);
    // The program may go on without it.
    t.Load(6);
    const double next = t.Step().Item();
    t.Load(7);
    EXPECT_NE(step().Item(), next);
  });
}

// Other optimizers, whose numbers change too.
TEST(GraphedStep, TakesAnyOptimizer) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  OnFar([&] {
    const auto run = [](int which, bool graphed) {
      ManualSeed(3);
      auto layer = std::make_unique<Linear>(6, 5);
      Materialize(*layer);
      const std::vector<NamedParameter> parameters = layer->NamedParameters();
      std::unique_ptr<Optimizer> o;
      if (which == 0) o = std::make_unique<SGD>(parameters, SGDOptions{.lr = 0.1, .momentum = 0.5});
      if (which == 1) o = std::make_unique<Adagrad>(parameters, AdagradOptions{.lr_decay = 0.5});
      if (which == 2) o = std::make_unique<Adam>(parameters, AdamOptions{.amsgrad = true});
      if (which == 3) o = std::make_unique<RMSprop>(parameters, RMSpropOptions{.centered = true});
      const DTensor x = ones({3, 6});
      const auto once = [&] {
        const DTensor loss = mean((*layer)(x) * (*layer)(x));
        o->ZeroGrad();
        loss.Backward();
        o->Step();
        return loss;
      };
      GraphedStep step(*o, once);
      std::vector<double> losses;
      for (int i = 0; i < 5; ++i) {
        o->set_lr(0.1 / (i + 1));
        losses.push_back((graphed ? step() : once()).Item());
      }
      return losses;
    };
    for (const int which : {0, 1, 2, 3}) EXPECT_EQ(run(which, true), run(which, false)) << which;
  });
}

// Four steps that reduce `loss_of()`, plainly or as a graph.
std::vector<double> Losses(Optimizer& o, const std::function<DTensor()>& loss_of, bool graphed) {
  const auto once = [&] {
    const DTensor loss = loss_of();
    o.ZeroGrad();
    loss.Backward();
    o.Step();
    return loss;
  };
  GraphedStep step(o, once);
  std::vector<double> losses;
  for (int i = 0; i < 4; ++i) losses.push_back((graphed ? step() : once()).Item());
  EXPECT_EQ(step.captured(), graphed);
  return losses;
}
void ExpectPlainLosses(const std::function<std::vector<double>(bool graphed)>& run) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  OnFar([&] {
    ManualSeed(3);
    const std::vector<double> plain = run(false);
    EXPECT_NE(plain[2], plain[3]);
    ManualSeed(3);
    EXPECT_EQ(run(true), plain);
  });
}

// Sorts of more than one launch, by NVIDIA's library on CUDA: of where gradients go, and of values.
TEST(GraphedStep, TakesLongSorts) {
  ExpectPlainLosses([](bool graphed) {
    Embedding table(3000, 2);
    Materialize(table);
    SGD o(table.NamedParameters(), {.lr = 100});
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < 6000; ++i) numbers.push_back(i * i % 2999);
    const DTensor ids = FromVector(numbers, {6000}, {.dtype = DType::kI64});
    const DTensor weights = arange(0, 6000, 1, {.dtype = DType::kF32});
    const auto loss = [&] {
      const DTensor y = flatten(table(ids), 0, 1), sorted = sort(flatten(table.weight(), 0, 1))[0];
      return mean(y * y) + mean(sorted * weights);
    };
    return Losses(o, loss, graphed);
  });
}

// Fills of runs read the launch's shift of the generator (GPTs draw masks).
TEST(GraphedStep, DrawsOn) {
  ExpectPlainLosses([](bool graphed) {
    Linear layer(1, 1, false);
    Materialize(layer);
    SGD o(layer.NamedParameters(), {.lr = 0.1});
    const auto loss = [&] {
      const DTensor noise = rand({3000}) + randn({3000}) + bernoulli(rand({3000}));
      return mean(noise * layer.weight());
    };
    return Losses(o, loss, graphed);
  });
}

// Frozen, unused, and updated more often than others before: each goes on by its own count, which
// the bias corrections of Adam are made of.
TEST(GraphedStep, LeavesAloneWhatIsNotUpdated) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  struct Net : Module {
    Linear &frozen = AddChild<Linear>("frozen", 6, 5), &early = AddChild<Linear>("early", 5, 5),
           &late = AddChild<Linear>("late", 5, 5), &unused = AddChild<Linear>("unused", 5, 5);
    bool with_late = false;
    Values Forward(const Values& in) override {
      const DTensor y = early(frozen(in[0]));
      return {with_late ? late(y) : y};
    }
  };
  OnFar([] {
    const auto run = [](bool graphed) {
      ManualSeed(3);
      Net net;
      Materialize(net);
      net.frozen.weight().RequiresGrad(false);
      AdamW o(net.NamedParameters(), {.lr = 0.1});
      const DTensor x = ones({3, 6});
      const auto once = [&] {
        const DTensor y = net(Values{x})[0], loss = mean(y * y);
        o.ZeroGrad();
        loss.Backward();
        o.Step();
        return loss;
      };
      for (int i = 0; i < 2; ++i) once();
      net.with_late = true;
      GraphedStep step(o, once);
      std::vector<double> losses;
      for (int i = 0; i < 5; ++i) losses.push_back((graphed ? step() : once()).Item());
      EXPECT_EQ(step.captured(), graphed);
      EXPECT_EQ(o.StepCounts(), (std::vector<int64_t>{0, 7, 7, 7, 5, 5, 0, 0}));
      return losses;
    };
    EXPECT_EQ(run(true), run(false));
  });
}

// The numbers of a launch are one for all updates.
TEST(GraphedStep, RefusesToUpdateOneParameterMoreOften) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  OnFar([] {
    Linear layer(6, 5);
    Materialize(layer);
    SGD o(layer.NamedParameters(), {.lr = 0.1});
    const DTensor x = ones({3, 6});
    GraphedStep step(o, [&] {
      const DTensor loss = mean(layer(x));
      loss.Backward();
      o.Step();
      DTensor(layer.bias()->tensor()).ZeroGrad();
      o.Step();
      return loss;
    });
    step();
    EXPECT_THAT(MessageOf([&] { step(); }), HasSubstr("some parameters 1 times and others 2"));
    EXPECT_EQ(o.StepCounts(), (std::vector<int64_t>{2, 1}));
  });
}

// What a step must not do, and what is said.
TEST(GraphedStep, RefusesByNameAndLeavesNothingBehind) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  const Trained plain = Plain(3);
  const struct {
    const char* said;
    std::function<void(Training&)> does;
  } cases[] = {
      {"the host reads a value", [](Training& t) { t.Loss().Item(); }},
      {"[nonzero] in graph: device cuda cannot capture this: the host reads a value",
       [](Training& t) { nonzero(t.ids); }},
      {"values of the host are brought to it",
       [](Training&) { FromVector<double>({1, 2, 3}, {3}); }},
      {" draws from another stream of random numbers",
       [](Training& t) {
         RngTracker tracker;
         ThrowIfError(tracker.Add("mine", 9));
         const RngTracker::Fork fork(tracker, "mine");
         dropout(to(t.ids, DType::kF32), 0.5);
       }},
      {"adamw_ has the learning rate 0.25, the optimizer whose step is captured 0.005",
       [](Training&) {
         const NoGrad no_grad;
         const DTensor p = ones({3});
         adamw_({p}, {zeros({3})}, {zeros({3})}, {}, {ones({3})}, {1}, {.lr = 0.25});
       }},
  };
  for (const auto& c : cases) {
    OnFar([&] {
      Training t;
      const Generator before = DefaultGenerator();
      bool harmful = false;
      GraphedStep step(*t.optimizer, [&] {
        if (harmful) c.does(t);
        return t.Step();
      });
      Trained trained;
      t.Load(0);
      trained.losses.push_back(step().Item());
      harmful = true;
      t.Load(1);
      const std::string message = MessageOf([&] { step(); });
      EXPECT_THAT(message, HasSubstr("[graphed step]"));
      EXPECT_THAT(message, HasSubstr(c.said));
      EXPECT_FALSE(step.captured());
      EXPECT_NE(before.offset(), DefaultGenerator().offset());
      // As if it had not been tried.
      trained.losses.push_back(t.Step().Item());
      EXPECT_EQ(trained.losses[0], plain.losses[0]) << c.said;
      EXPECT_EQ(trained.losses[1], plain.losses[1]) << c.said;
    });
  }
}

// Their collectives are a part of it, of gradients (dp) and of activations (tp): by graphs of their
// own where each rank has a device, by one of all where they share it.
void ExpectThePlainNumbers(int64_t dp, int64_t tp) {
  Trained plain, graphed;
  for (Trained* const trained : {&plain, &graphed}) {
    OnFar(
        [&] {
          Training t(DeviceMesh({dp, tp}, {"dp", "tp"}));
          GraphedStep step(*t.optimizer, [&] { return t.Step(); });
          const Trained got = Train(t, [&] { return trained == &graphed ? step() : t.Step(); });
          EXPECT_EQ(step.captured(), trained == &graphed);
          if (RankContext::Current().rank() == 0) *trained = got;
        },
        dp * tp);
  }
  ASSERT_EQ(plain.losses.size(), 12u);
  EXPECT_EQ(graphed.losses, plain.losses) << dp << " x " << tp;
  EXPECT_EQ(graphed.parameters, plain.parameters) << dp << " x " << tp;
  EXPECT_EQ(graphed.gradients, plain.gradients) << dp << " x " << tp;
}
TEST(GraphedStep, HoldsTheCollectivesOfRanksWithADeviceEach) {
  if (!HasGraphs() || Devices() < 2) GTEST_SKIP() << "ranks share a device";
  ExpectThePlainNumbers(2, 1);
  ExpectThePlainNumbers(1, 2);
  if (Devices() >= 4) ExpectThePlainNumbers(2, 2);
}
TEST(GraphedStep, IsOneGraphOfRanksThatShareADevice) {
  if (!HasGraphs() || Devices() > 1) GTEST_SKIP() << "see HoldsTheCollectives";
  ExpectThePlainNumbers(2, 1);
  ExpectThePlainNumbers(1, 2);
  ExpectThePlainNumbers(2, 2);
}

// A launch is watched as a collective is.
TEST(GraphedStep, NamesTheRankThatDoesNotLaunch) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  const bool shared = Devices() < 2;
  std::string message;
  // Both ranks end by themselves: whether the world has failed by then is not said.
  Status(
      [&] {
        Training t(DeviceMesh({2, 1}, {"dp", "tp"}));
        GraphedStep step(*t.optimizer, [&] { return t.Step(); });
        for (int i = 0; i < 3; ++i) step().Item();
        if (RankContext::Current().rank() == 1) {
          Comm* const dp = ValueOrThrow(RankContext::Current().CommFor(t.mesh, {0}));
          const absl::Time end = absl::Now() + absl::Seconds(shared ? 7 : 60);
          while (dp->Health().ok() && absl::Now() < end) absl::SleepFor(absl::Milliseconds(1));
          return;
        }
        message = MessageOf([&] {
          step();
          t.optimizer->Written()[0].ToVector<double>();
        });
      },
      2, absl::Seconds(5))
      .IgnoreError();
  EXPECT_THAT(message, HasSubstr("rank 1 (last at "));
  EXPECT_THAT(message,
              HasSubstr(shared ? "did not arrive within 5s" : "did not queue it within 5s"));
}

// What all ranks refuse, what one alone does, and a rank that captures nothing: the others hear of
// it, and the program goes on where it can.
struct SmallStep {
  explicit SmallStep(const DeviceMesh& on) : mesh(on), layer(4, 2) {
    ThrowIfError(DistributeModule(layer, mesh));
    Materialize(layer);
    optimizer = std::make_unique<SGD>(layer.NamedParameters(), SGDOptions{.lr = 0.5});
    x = ones({4, 4}, {.mesh = mesh, .placements = {Shard(0)}});
  }
  DTensor operator()() {
    const DTensor loss = mean(layer(x));
    optimizer->ZeroGrad();
    loss.Backward();
    optimizer->Step();
    return loss;
  }
  DeviceMesh mesh;
  Linear layer;
  std::unique_ptr<SGD> optimizer;
  DTensor x;
};

TEST(GraphedStep, WhatItCannotHoldIsRefusedOnAllRanksThatShareADevice) {
  if (!HasGraphs() || Devices() > 1) GTEST_SKIP() << "see IsOneGraph";
  OnFar(
      [] {
        SmallStep once(DeviceMesh({2}, {"dp"}));
        bool harmful = false;
        GraphedStep step(*once.optimizer, [&] {
          const DTensor loss = once();
          if (harmful) loss.Item();
          return loss;
        });
        step();
        harmful = true;
        EXPECT_THAT(MessageOf([&] { step(); }), HasSubstr("the host reads a value"));
        harmful = false;
        const double next = once().Item();
        step();  // plainly, as the first of another graph
        step();
        EXPECT_TRUE(step.captured());
        EXPECT_LT(step().Item(), next);
      },
      2);
}
TEST(GraphedStep, RefusesToTalkToRanksOutsideOfTheGraph) {
  if (!HasGraphs() || Devices() > 1) GTEST_SKIP() << "see IsOneGraph";
  OnFar(
      [] {
        const DeviceMesh all({3}, {"all"}), two({2}, {"dp"});
        const DTensor outside = ones({3}, {.mesh = all, .placements = {Shard(0)}});
        if (RankContext::Current().rank() == 2) {
          outside.Redistribute({Replicate()});
          return;
        }
        SmallStep once(two);
        GraphedStep step(*once.optimizer, [&] {
          outside.Redistribute({Replicate()});
          return once();
        });
        step();
        EXPECT_THAT(MessageOf([&] { step(); }),
                    HasSubstr("rank 2 takes part in it, and has no part in the graph"));
      },
      3);
}
// One rank's error ends the step of the others as it would plainly, in time.
TEST(GraphedStep, ARankThatFailsAloneIsToldToTheOthers) {
  if (!HasGraphs() || Devices() > 1) GTEST_SKIP() << "see IsOneGraph";
  for (const int64_t culprit : {0, 1}) {
    for (const int when : {1, 3}) {  // while it captures; while it launches
      const absl::Status status = Status(
          [&] {
            SmallStep once(DeviceMesh({2}, {"dp"}));
            int calls = 0;
            const auto fail = [&](int now) {
              if (now == when && RankContext::Current().rank() == culprit) {
                throw std::runtime_error("out of luck");
              }
            };
            GraphedStep step(*once.optimizer, [&] {
              fail(calls);
              return once();
            });
            for (; calls < 5; ++calls) {
              if (calls > 1) fail(calls);
              step();
            }
          },
          2, absl::Seconds(20));
      EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("rank ", culprit, ": ")))
          << when;
      EXPECT_THAT(std::string(status.message()), HasSubstr("out of luck")) << when;
    }
  }
}

// Memory that a captured kernel works on is not given back while the rest is captured, however much
// of it there is.
TEST(GraphedStep, KeepsTheMemoryOfItsKernels) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  OnFar([] {
    Linear layer(1, 1);
    Materialize(layer);
    SGD optimizer(layer.NamedParameters(), {.lr = 0.5});
    const auto once = [&] {
      const auto part = [](int64_t elements) {
        return sum(slice(zeros({elements}), 0, elements - 2, elements) + 1);
      };
      return part(2500000) + part(3500000) * 2 + part(2500000);
    };
    GraphedStep step(optimizer, once);
    for (int i = 0; i < 3; ++i) EXPECT_EQ(step().Item(), 8);
    EXPECT_TRUE(step.captured());
  });
}

TEST(GraphedStep, SaysWhenItDoesNotFitAnyMore) {
  if (!HasGraphs()) GTEST_SKIP() << "see OnADeviceWithoutGraphs";
  OnFar([] {
    Training t;
    GraphedStep step(*t.optimizer, [&] { return t.Step(); });
    t.Load(0);
    step();
    step();
    const double third = step().Item();
    const uint64_t offset = DefaultGenerator().offset();
    ManualSeed(8);
    EXPECT_THAT(MessageOf([&] { step(); }), HasSubstr("another seed"));
    ManualSeed(7);
    ThrowIfError(DefaultGenerator().SetOffset(offset));
    EXPECT_NE(step().Item(), third);
    t.optimizer->LoadStateDict(t.optimizer->GetStateDict());
    EXPECT_THAT(MessageOf([&] { step(); }), HasSubstr("LoadStateDict"));
  });
}

TEST(GraphedStep, OnADeviceWithoutGraphs) {
  if (HasGraphs()) GTEST_SKIP() << "it has them";
  OnFar([] {
    Training t;
    GraphedStep step(*t.optimizer, [&] { return t.Step(); });
    EXPECT_THAT(MessageOf([&] { step(); }), HasSubstr("device far has no graphs"));
    EXPECT_EQ(t.optimizer->StepCounts()[0], 0);
  });
}

}  // namespace
}  // namespace dtensor::graphed_step_test
