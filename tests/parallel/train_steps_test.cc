// Steps of a training that fail, and what a step makes of the options.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <vector>

#include "dtensor/autograd.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/data/sampler.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "tests/parallel/support.h"

namespace dtensor::train_steps_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Running statistics, counters, and a large buffer that no step changes.
class Net : public Module {
 public:
  Net()
      : head_(AddChild<Linear>("head", 4, 8)),
        count_(AddBuffer("count", {}, Init::Zeros(), DType::kI64)),
        table_(AddChild<Embedding>("table", 8, 4)),
        mean_(AddBuffer("mean", {4}, Init::Zeros())),
        var_(AddBuffer("var", {4}, Init::Ones())),
        late_(AddBuffer("late", {3}, Init::Zeros())) {
    AddBuffer("constant", {kConstant}, Init::Ones());
  }
  static constexpr int64_t kConstant = 1 << 18;
  Linear& head_;
  Parameter& count_;

 protected:
  Values Forward(const Values& in) override {
    RunOnce([&] {
      const NoGrad no_grad;
      add_(count_, 1);
      if (++forwards_ > 2) add_(late_, 0.5);  // not in the first step
    });
    const DTensor x = transpose(table_(in[0]), 1, 2);
    return {head_(transpose(batch_norm(x, mean_, var_, {}, {}, training()), 1, 2))};
  }

 private:
  Embedding& table_;
  Parameter &mean_, &var_, &late_;
  int forwards_ = 0;
};

struct Training {
  Net net;
  std::unique_ptr<AdamW> optimizer;
  std::unique_ptr<TokenSampler> data;
  std::unique_ptr<Trainer> trainer;

  Training(const DeviceMesh& mesh, TrainerOptions o) {
    ManualSeed(3);
    if (!mesh.is_self()) ThrowIfError(DistributeModule(net, mesh));
    Materialize(net);
    optimizer = std::make_unique<AdamW>(net.NamedParameters());
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < 200; ++i) tokens.push_back(i * i % 8);
    data = std::make_unique<TokenSampler>(ValueOrThrow(
        TokenSampler::Create(ValueOrThrow(TokenFile::Of("memory", tokens)), {.seq = 4})));
    o.mesh = mesh;
    o.placements = Placements(mesh.ndim(), Shard(0));
    trainer = ValueOrThrow(Trainer::Create(net, *optimizer, *data, std::move(o)));
  }

  testing::NamedValues All() const {
    testing::NamedValues all;
    for (const NamedParameter& p : net.NamedTensors()) {
      all.emplace_back(p.fqn, p.parameter->tensor().Detach().ToVector<double>());
    }
    return all;
  }
};

// With an error in the second half of the third step: a loss that throws, one that is infinite, and
// a gradient that is no number, for which the forward is run once more.
enum class Fault { kThrows, kLoss, kGradient };

TrainerOptions Failing(Fault fault) {
  TrainerOptions o = {.steps = 4, .batch = 4, .microbatches = 2};
  o.loss = [fault, calls = 0](Module& m, const TokenBatch& b) mutable {
    const DTensor loss = NextTokenLoss(m(b.ids), b.targets);
    ++calls;
    if (calls != 6 && (fault != Fault::kGradient || calls != 8)) return loss;
    if (fault == Fault::kThrows) Throw(absl::UnavailableError("a bad token"));
    if (fault == Fault::kLoss) return loss * INFINITY;
    // The square root's gradient at 0 is infinite, times 0.
    return loss + sqrt(sum(static_cast<Net&>(m).head_.weight().tensor() * 0.0)) * 0.0;
  };
  return o;
}

TEST(TrainSteps, OneThatFailsChangesNoBuffer) {
  const auto body = [](const DeviceMesh& mesh) {
    Training two(mesh, {.steps = 2, .batch = 4, .microbatches = 2});
    ThrowIfError(two.trainer->Run());
    Training four(mesh, {.steps = 4, .batch = 4, .microbatches = 2});
    ThrowIfError(four.trainer->Run());
    EXPECT_EQ(four.net.count_.tensor().Item(), 8);
    for (const Fault fault : {Fault::kThrows, Fault::kLoss, Fault::kGradient}) {
      Training run(mesh, Failing(fault));
      if (fault == Fault::kThrows) {
        EXPECT_THAT(testing::MessageOf([&] { run.trainer->Run().IgnoreError(); }),
                    HasSubstr("a bad token"));
      } else {
        const absl::Status failed = run.trainer->Run();
        EXPECT_THAT(std::string(failed.message()),
                    AllOf(HasSubstr(fault == Fault::kLoss ? "the loss is"
                                                          : "the gradient of head.weight is not"),
                          HasSubstr("at step 3")));
      }
      EXPECT_EQ(run.trainer->step(), 2);
      EXPECT_EQ(run.All(), two.All()) << static_cast<int>(fault);
      ThrowIfError(run.trainer->Run());
      EXPECT_EQ(run.All(), four.All()) << static_cast<int>(fault);
    }
  };
  body(DeviceMesh::Self());
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    body(DeviceMesh({2}, {"dp"}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Also in the first step, when it is not known yet which buffers steps change.
TEST(TrainSteps, TheFirstOneThatFailsChangesNoBuffer) {
  Training fresh(DeviceMesh::Self(), {.steps = 0});
  TrainerOptions o = {.steps = 1, .batch = 4};
  o.loss = [calls = 0](Module& m, const TokenBatch& b) mutable {
    const DTensor loss = NextTokenLoss(m(b.ids), b.targets);
    return ++calls <= 2 ? loss * NAN : loss;
  };
  Training run(DeviceMesh::Self(), std::move(o));
  for (int i = 0; i < 2; ++i) {
    EXPECT_FALSE(run.trainer->Run().ok());
    EXPECT_EQ(run.All(), fresh.All());
  }
  ThrowIfError(run.trainer->Run());
  EXPECT_EQ(run.net.count_.tensor().Item(), 1);
}

TEST(TrainSteps, BuffersThatNeverChangeTakeNoMemoryAfterTheFirst) {
  const auto& allocator = RankContext::Current().device_allocator();
  int64_t before = 0;
  std::vector<int64_t> grown;
  TrainerOptions o = {.steps = 3, .batch = 4};
  o.after_step = [&](const StepReport&) -> absl::Status {
    grown.push_back(allocator->stats().peak_bytes - before);
    allocator->ResetPeak();
    before = allocator->stats().in_use_bytes;
    return absl::OkStatus();
  };
  Training run(DeviceMesh::Self(), std::move(o));
  allocator->ResetPeak();
  before = allocator->stats().in_use_bytes;
  ThrowIfError(run.trainer->Run());
  const int64_t constant = Net::kConstant * 4;
  EXPECT_GE(grown.at(0), constant);
  EXPECT_LT(grown.at(1), constant);
  EXPECT_LT(grown.at(2), constant);
}

TEST(TrainSteps, AScheduleWithoutStepsHasThoseOfTheTraining) {
  for (const auto decay : {LearningRate::Decay::kLinear, LearningRate::Decay::kCosine}) {
    const LearningRate want = {.peak = 0.05, .decay = decay, .warmup = 2, .steps = 5};
    TrainerOptions o = {.steps = 5, .batch = 4};
    o.lr = want;
    o.lr.steps = 0;
    std::vector<double> rates;
    o.after_step = [&](const StepReport& r) -> absl::Status {
      rates.push_back(r.lr);
      return absl::OkStatus();
    };
    Training run(DeviceMesh::Self(), std::move(o));
    ThrowIfError(run.trainer->Run());
    ASSERT_EQ(rates.size(), 5u);
    for (int64_t i = 0; i < 5; ++i) EXPECT_EQ(rates[i], want.At(i)) << i;
    EXPECT_GT(rates[3], 0);
  }
}

TEST(TrainSteps, WhatNoStepCouldDoIsRefusedBeforeTheFirst) {
  Training some(DeviceMesh::Self(), {.steps = 1});
  const auto message = [&](const TrainerOptions& o) {
    return std::string(
        Trainer::Create(some.net, *some.optimizer, *some.data, o).status().message());
  };
  EXPECT_THAT(message({.steps = 1, .max_norm = -1}),
              HasSubstr("[trainer] max_norm must not be negative, is -1"));
  EXPECT_THAT(message({.steps = 1, .max_norm = NAN}), HasSubstr("max_norm must not be negative"));
  EXPECT_EQ(message({.steps = 1, .max_norm = INFINITY}), "");
  EXPECT_EQ(message({.steps = 1, .max_norm = 0}), "");
  EXPECT_THAT(message({.steps = 4, .lr = {.warmup = 5}}), HasSubstr("from 0 to the 4 steps"));
}

}  // namespace
}  // namespace dtensor::train_steps_test
