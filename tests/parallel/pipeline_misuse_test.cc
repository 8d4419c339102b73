// Pipelines whose stages, inputs or modes change between steps, and what programs do wrong with
// them: numbers of one device, or an error on all ranks at once.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/pipeline/pipeline.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "tests/parallel/support.h"

namespace dtensor::pipeline_misuse_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MessageOf;

constexpr int64_t kWidth = 4;

DTensor Input(const DeviceMesh& mesh, int64_t k) {
  std::vector<double> values = testing::Integers(kWidth * kWidth, k);
  return FromVector(values, {kWidth, kWidth},
                    {.dtype = DType::kF64, .mesh = mesh, .placements = Placements(mesh.ndim())});
}

// One linear layer per stage.
struct Layers : Module {
  explicit Layers(int n) {
    for (int i = 0; i < n; ++i) {
      all.push_back(&AddChild<Linear>(absl::StrCat(i), kWidth, kWidth, /*bias=*/false));
    }
    SetDType(*this, DType::kF64);
  }
  Values Forward(const Values& in) override { return in; }
  std::vector<Linear*> all;
};

using StageFn = std::function<Values(Linear& layer, int stage, const Values& in)>;
Values Plain(Linear& layer, int, const Values& in) { return {tanh(layer(in[0]))}; }

// The same functions as a pipeline of one rank per stage, and one after the other on Self.
struct Both {
  Both(int n, const StageFn& fn, int64_t m) : whole(n), model(n), fn(fn), microbatches(m) {
    const DeviceMesh mesh({n}, {"pp"});
    for (int s = 0; s < n; ++s) {
      Linear* const layer = model.all[s];
      stages.push_back({[fn, layer, s](const Values& in) { return fn(*layer, s, in); }, {layer}});
    }
    ThrowIfError(ParallelizeStages(model, mesh, stages));
    for (Layers* m : {&whole, &model}) {
      ManualSeed(5);
      Materialize(*m);
    }
    pipeline = std::make_unique<Pipeline>(mesh, stages, PipelineOptions{m});
    for (int64_t k = 0; k < m; ++k) {
      inputs.push_back({Input(StageMesh(mesh, "pp", 0), k)});
      own.push_back(Input(DeviceMesh::Self(), k));
    }
  }
  static DTensor LossOf(const Values& y) { return sum(square(y[0])); }
  // Each from the same random state; compares losses, gradients and where the generator is.
  void Step() {
    const uint64_t before = DefaultGenerator().offset();
    double expected = 0;
    for (const DTensor& x : own) {
      Values values = {x};
      for (size_t s = 0; s < whole.all.size(); ++s) {
        values = fn(*whole.all[s], static_cast<int>(s), values);
      }
      const DTensor loss = LossOf(values);
      loss.Backward();
      expected += loss.Item();
    }
    const uint64_t after = DefaultGenerator().offset();
    ThrowIfError(DefaultGenerator().SetOffset(before));
    const DTensor loss = pipeline->Step(inputs, [](int64_t, const Values& y) { return LossOf(y); });
    EXPECT_EQ(loss.Item(), expected);
    EXPECT_EQ(DefaultGenerator().offset(), after);
    for (size_t s = 0; s < model.all.size(); ++s) {
      const std::string name = absl::StrCat(s, ".weight");
      const DTensor mine = model.FindParameter(name)->tensor();
      const DTensor grad = mine.grad(), wanted = whole.FindParameter(name)->tensor().grad();
      EXPECT_EQ(grad.defined(), wanted.defined()) << name;
      if (!grad.defined() || !wanted.defined() || !mine.spec().in_mesh()) continue;
      EXPECT_EQ(grad.ToVector<double>(), wanted.ToVector<double>()) << name;
    }
    for (size_t k = 0; k < inputs.size(); ++k) {
      const DTensor& x = inputs[k][0];
      if (!x.spec().in_mesh()) continue;
      const DTensor wanted = own[k].grad();
      EXPECT_EQ(x.grad().defined(), wanted.defined()) << k;
      if (wanted.defined() && x.grad().defined()) {
        EXPECT_EQ(x.grad().ToVector<double>(), wanted.ToVector<double>()) << k;
      }
    }
  }
  void ZeroGrad() {
    whole.ZeroGrad();
    model.ZeroGrad();
  }
  Layers whole, model;
  StageFn fn;
  int64_t microbatches;
  std::vector<PipelineStage> stages;
  std::unique_ptr<Pipeline> pipeline;
  std::vector<Values> inputs;
  std::vector<DTensor> own;
};

void OnTwoRanks(absl::FunctionRef<void(RankContext&)> body) {
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    body(rank);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Between steps parameters are frozen and come back, as in fine-tuning.
TEST(PipelineChanges, ParametersAreFrozenAndComeBack) {
  OnTwoRanks([](RankContext&) {
    Both both(2, Plain, 3);
    for (const auto& [first, second] : std::vector<std::pair<bool, bool>>{
             {true, true}, {false, true}, {true, true}, {true, false}, {true, true}}) {
      both.ZeroGrad();
      for (Layers* m : {&both.whole, &both.model}) {
        m->all[0]->RequiresGrad(first);
        m->all[1]->RequiresGrad(second);
      }
      both.Step();
    }
  });
}

TEST(PipelineChanges, InputsWantGradientsFromTheSecondStepOn) {
  OnTwoRanks([](RankContext&) {
    Both both(2, Plain, 2);
    for (Layers* m : {&both.whole, &both.model}) m->all[0]->RequiresGrad(false);
    both.Step();
    both.ZeroGrad();
    for (int64_t k = 0; k < 2; ++k) {
      both.inputs[k][0].RequiresGrad();
      both.own[k].RequiresGrad();
    }
    both.Step();
  });
}

// A leaf of the program that goes through stages unchanged wants a gradient of steps alone.
TEST(PipelineChanges, InputsThatWantGradientsGoThroughAll) {
  const absl::Status status = RunSpmd(3, [&](RankContext&) -> absl::Status {
    const auto goes_on = [](Linear& layer, int, const Values& in) {
      return Values{tanh(layer(in[0])), in.back()};
    };
    Both both(3, goes_on, 2);
    for (int64_t k = 0; k < 2; ++k) {
      both.inputs[k][0].RequiresGrad();
      both.own[k].RequiresGrad();
    }
    both.pipeline->Evaluate(both.inputs, [](int64_t, const Values& y) { return Both::LossOf(y); });
    both.Step();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PipelineChanges, ModesSayHowManyNumbersAreDrawn) {
  OnTwoRanks([](RankContext&) {
    const auto drops = [](Linear& layer, int, const Values& in) {
      return Values{dropout(layer(in[0]), 0.5, layer.training())};
    };
    Both both(2, drops, 2);
    for (const bool mode : {true, false, true}) {
      both.ZeroGrad();
      both.whole.Train(mode);
      both.model.Train(mode);
      both.Step();
    }
  });
}

// A mask is drawn in the order of memory: it goes along from stage to stage.
TEST(PipelineNumbers, OrdersOfMemoryGoAlong) {
  OnTwoRanks([](RankContext&) {
    const auto turns = [](Linear& layer, int stage, const Values& in) {
      const DTensor x = layer(dropout(in[0], 0.5));
      return Values{stage == 0 ? transpose(x, 0, 1) : x};
    };
    Both(2, turns, 2).Step();
  });
}

TEST(PipelineMisuse, AStepInAStep) {
  OnTwoRanks([](RankContext&) {
    Pipeline* self = nullptr;
    const std::vector<Values>* inputs = nullptr;
    const auto loss = [](int64_t, const Values& y) { return Both::LossOf(y); };
    const auto calls = [&](Linear& layer, int, const Values& in) {
      self->Evaluate(*inputs, loss);
      return Values{layer(in[0])};
    };
    Both both(2, calls, 1);
    self = both.pipeline.get();
    inputs = &both.inputs;
    EXPECT_THAT(MessageOf([&] { both.pipeline->Step(both.inputs, loss); }),
                HasSubstr("a step of this pipeline is going on"));
  });
}

TEST(PipelineMisuse, WithoutGradients) {
  OnTwoRanks([](RankContext&) {
    Both both(2, Plain, 1);
    const auto loss = [](int64_t, const Values& y) { return Both::LossOf(y); };
    {
      const NoGrad no_grad;
      EXPECT_THAT(MessageOf([&] { both.pipeline->Step(both.inputs, loss); }),
                  AllOf(HasSubstr("inside of NoGrad"), HasSubstr("Evaluate")));
    }
    both.Step();
  });
}

TEST(PipelineMisuse, WhatIsNull) {
  OnTwoRanks([](RankContext&) {
    Both both(2, Plain, 1);
    const DeviceMesh mesh({2}, {"pp"});
    std::vector<PipelineStage> stages = both.stages;
    stages[1].borrows = {nullptr};
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, stages); }),
                HasSubstr("a parameter that stage 1 borrows is null"));
    stages = both.stages;
    stages[0].modules.push_back(nullptr);
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, stages); }),
                HasSubstr("a module of stage 0 is null"));
    EXPECT_THAT(ParallelizeStages(both.model, mesh, stages).message(),
                HasSubstr("a module of stage 0 is null"));
    EXPECT_THAT(MessageOf([&] { StageOf({both.model.all[0], nullptr}); }),
                HasSubstr("module 1 is null"));
    both.Step();
  });
}

TEST(PipelineMisuse, NamesThatThereAreNot) {
  OnTwoRanks([](RankContext&) {
    Both both(2, Plain, 1);
    const DeviceMesh mesh({2}, {"pp"});
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, both.stages, {.sync_last = {"dpp"}}); }),
                HasSubstr("dpp"));
    EXPECT_THAT(MessageOf([&] { StageMesh(mesh, "pp", -1); }), HasSubstr("-1"));
  });
}

// What one rank throws ends the step of all at once, whatever its code is, and also where the
// stages are rehearsed.
TEST(PipelineMisuse, ErrorsOfOneRankAreTold) {
  for (const bool rehearsed : {false, true}) {
    const absl::Time begin = absl::Now();
    const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
      const auto fails = [&](Linear& layer, int stage, const Values& in) {
        if (rehearsed && rank.rank() == 1) throw std::runtime_error("out of luck");
        if (!rehearsed && stage == 1 && !rank.rehearses()) {
          Throw(absl::AbortedError("out of luck"));
        }
        return Values{layer(in[0])};
      };
      Both both(2, fails, 2);
      const auto loss = [](int64_t, const Values& y) { return Both::LossOf(y); };
      EXPECT_THAT(MessageOf([&] { both.pipeline->Step(both.inputs, loss); }),
                  HasSubstr("out of luck"));
      // Not even then is it over for a rank that goes on.
      if (rank.rank() == 1) absl::SleepFor(absl::Seconds(1));
      return absl::OkStatus();
    });
    EXPECT_LT(absl::Now() - begin, absl::Seconds(30));
  }
}

// Found by the last stage's ranks, and told to all.
TEST(PipelineMisuse, NoLoss) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    Both both(2, Plain, 1);
    both.pipeline->Step(both.inputs, nullptr);
    return absl::OkStatus();
  });
  EXPECT_THAT(status.ToString(), HasSubstr("the loss has no function"));
}

TEST(PipelineMisuse, ALossWithoutHistory) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    Both both(2, Plain, 1);
    both.pipeline->Step(both.inputs,
                        [](int64_t, const Values& y) { return to(sum(y[0]), DType::kI64); });
    return absl::OkStatus();
  });
  EXPECT_THAT(status.ToString(), HasSubstr("the loss has no gradient history"));
}

// The table of a tied head is in one stage, and the other borrows it.
TEST(PipelineStages, WhatIsTiedIsInOneStage) {
  OnTwoRanks([](RankContext&) {
    Layers model(2);
    Tie(*model.FindParameter("0.weight"), *model.FindParameter("1.weight"));
    EXPECT_THAT(ParallelizeStages(model, DeviceMesh({2}, {"pp"}),
                                  {StageOf({model.all[0]}), StageOf({model.all[1]})})
                    .message(),
                HasSubstr("1.weight is in stage 0 and in stage 1; one of them may borrow it"));
    // Of one stage it may be twice.
    Layers other(3);
    Tie(*other.FindParameter("0.weight"), *other.FindParameter("1.weight"));
    EXPECT_EQ(ParallelizeStages(other, DeviceMesh({2}, {"pp"}),
                                {StageOf({other.all[0], other.all[1]}), StageOf({other.all[2]})}),
              absl::OkStatus());
  });
}

TEST(PipelineMisuse, ALossThatDraws) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    Both both(2, Plain, 1);
    both.pipeline->Step(both.inputs,
                        [](int64_t, const Values& y) { return sum(dropout(y[0], 0.5)); });
    return absl::OkStatus();
  });
  EXPECT_THAT(status.ToString(), HasSubstr("the loss draws random numbers"));
}

// A stage uses a module twice.
TEST(PipelineStages, AModuleMayBeTwiceInAStage) {
  OnTwoRanks([](RankContext&) {
    Layers model(2), whole(2);
    const DeviceMesh mesh({2}, {"pp"});
    const std::vector<PipelineStage> stages = {StageOf({model.all[0], model.all[0]}),
                                               StageOf({model.all[1]})};
    EXPECT_EQ(ParallelizeStages(model, mesh, stages), absl::OkStatus());
  });
}

// Parameters that a stage does not use have no gradient, on no rank.
TEST(PipelineNumbers, WhatIsUnusedIsNotCounted) {
  OnTwoRanks([](RankContext&) {
    const auto skips = [](Linear& layer, int stage, const Values& in) {
      return Values{stage == 1 ? layer(in[0]) : in[0] * 2};
    };
    Both both(2, skips, 2);
    AdamW one(both.whole.NamedParameters()), optimizer(both.model.NamedParameters());
    both.Step();
    one.Step();
    optimizer.Step();
    EXPECT_EQ(optimizer.StepCounts(), one.StepCounts());
  });
}

// A module that takes an optional input by its name.
struct Gated : Module {
  Gated() : layer(AddChild<Linear>("layer", kWidth, kWidth, /*bias=*/false)) {
    SetDType(*this, DType::kF64);
  }
  Values Forward(const Values& in) override {
    const DTensor y = layer(in[0]), gate = in.Named("gate");
    return {gate.defined() ? y * gate : y};
  }
  Linear& layer;
};
struct Gates : Module {
  Gates() {
    for (int i = 0; i < 4; ++i) all.push_back(&AddChild<Gated>(absl::StrCat(i)));
  }
  Values Forward(const Values& in) override { return in; }
  std::vector<Gated*> all;
};

TEST(PipelineNumbers, NamesGoAlong) {
  for (const int64_t ranks : {1, 2}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({ranks}, {"pp"});
      Gates whole, model;
      const std::vector<PipelineStage> stages = {StageOf({model.all[0], model.all[1]}),
                                                 StageOf({model.all[2], model.all[3]})};
      DT_RETURN_IF_ERROR(ParallelizeStages(model, mesh, stages));
      for (Gates* m : {&whole, &model}) {
        ManualSeed(5);
        Materialize(*m);
      }
      const auto inputs = [](const DeviceMesh& on) {
        const Placements placements(on.ndim());
        return Values{Input(on, 0)}.Add(
            "gate",
            FromVector<double>({1, 0, 2, 0}, {kWidth},
                               {.dtype = DType::kF64, .mesh = on, .placements = placements}));
      };
      const Values own = inputs(DeviceMesh::Self());
      DTensor y = own[0];
      for (Gated* gated : whole.all) y = (*gated)(Values{y}.Add("gate", own[1]))[0];
      Pipeline pipeline(mesh, stages, {.schedule = "GPipe"});
      const DTensor loss = pipeline.Step(std::vector<Values>{inputs(StageMesh(mesh, "pp", 0))},
                                         [](int64_t, const Values& out) { return sum(out[0]); });
      EXPECT_EQ(loss.Item(), sum(y).Item());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Gradients that are kept in a wider dtype are added up in it where a stage borrows, too.
TEST(PipelineNumbers, BorrowedGradientsAreKeptAsTheParameterSays) {
  constexpr int64_t kMicrobatches = 9;
  for (const int64_t ranks : {1, 2}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({ranks}, {"pp"});
      Layers model(2);
      SetDType(model, DType::kBF16);
      Parameter* const table = model.FindParameter("0.weight");
      const std::vector<PipelineStage> stages = {
          {[&](const Values& in) -> Values {
             return {in[0] + sum(model.all[0]->weight().tensor()) * 0};
           },
           {model.all[0]}},
          {[&](const Values& in) -> Values {
             return {in[0].Detach() * in[1] + sum(model.all[1]->weight().tensor()) * 0};
           },
           {model.all[1]},
           {table}}};
      DT_RETURN_IF_ERROR(ParallelizeStages(model, mesh, stages));
      Materialize(model);
      DTensor kept = table->tensor();
      kept.SetGradLayout(DType::kF32);
      Pipeline pipeline(mesh, stages, {.microbatches = kMicrobatches, .schedule = "GPipe"});
      std::vector<Values> inputs;
      const DeviceMesh first = StageMesh(mesh, "pp", 0);
      for (int64_t k = 0; k < kMicrobatches; ++k) {
        inputs.push_back({full({kWidth, kWidth}, k == 0 ? 256 : 1,
                               {DType::kBF16, first, Placements(first.ndim())})});
      }
      pipeline.Step(inputs, [](int64_t, const Values& out) { return sum(out[0]); });
      const DTensor tensor = table->tensor();
      if (!tensor.spec().in_mesh()) return absl::OkStatus();
      EXPECT_EQ(tensor.grad().dtype(), DType::kF32);
      EXPECT_EQ(tensor.grad().ToVector<double>(),
                std::vector<double>(kWidth * kWidth, 256 + kMicrobatches - 1));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// What stages send each other has a deadline of its own.
TEST(PipelineMisuse, StagesWaitForEachOtherAsLongAsTheirGroupSays) {
  for (const bool longer : {true, false}) {
    const auto body = [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh({3}, {"pp"});
      Layers model(3);
      std::vector<PipelineStage> stages;
      for (int s = 0; s < 3; ++s) {
        Linear* const layer = model.all[s];
        const auto forward = [layer, s](const Values& in) {
          const bool slow = s == 1 && !RankContext::Current().rehearses();
          if (slow) absl::SleepFor(absl::Milliseconds(1500));
          return Plain(*layer, s, in);
        };
        stages.push_back({forward, {layer}});
      }
      DT_RETURN_IF_ERROR(ParallelizeStages(model, mesh, stages));
      Materialize(model);
      // What follows on all ranks waits for the slow stage, too.
      const GroupOptions group = {.timeout = absl::Seconds(30)};
      DT_RETURN_IF_ERROR(rank.CommFor(mesh, {0}, group).status());
      Pipeline pipeline(mesh, stages, {.group = longer ? group : GroupOptions()});
      pipeline.Step(std::vector<Values>{{Input(StageMesh(mesh, "pp", 0), 0)}},
                    [](int64_t, const Values& y) { return sum(y[0]); });
      return absl::OkStatus();
    };
    const absl::Status status = RunSpmd(3, body, {.timeout = absl::Milliseconds(500)});
    EXPECT_EQ(status.ok(), longer) << status;
    if (!longer) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("within 500ms"));
    }
  }
}

}  // namespace
}  // namespace dtensor::pipeline_misuse_test
