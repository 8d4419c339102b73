// Pipelines against one device that runs the microbatches one after the other: losses, gradients,
// random numbers, optimizers; what is sent; errors.
#include "dtensor/parallel/pipeline/pipeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/explain.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/pipeline/model_stages.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::pipeline_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MessageOf;

constexpr int64_t kWidth = 6, kRows = 4;

// x + down(dropout(gelu(up(x)))), times a mask that goes on unchanged.
struct Block : Module {
  explicit Block(double dropout)
      : p(dropout),
        up(AddChild<Linear>("up", kWidth, 2 * kWidth)),
        down(AddChild<Linear>("down", 2 * kWidth, kWidth)) {}
  Values Forward(const Values& in) override {
    const DTensor h = p > 0 ? dropout(gelu(up(in[0])), p) : gelu(up(in[0]));
    return {in[0] + down(h) * in[1]};
  }
  const double p;
  Linear &up, &down;
};

struct Model : Module {
  Model(int blocks, double dropout) {
    for (int i = 0; i < blocks; ++i) all.push_back(&AddChild<Block>(absl::StrCat(i), dropout));
  }
  Values Forward(const Values& in) override {
    DTensor x = in[0];
    for (Block* block : all) x = (*block)({x, in[1]})[0];
    return {x};
  }
  std::vector<Block*> all;
};

DTensor On(const DeviceMesh& mesh, const std::vector<double>& values, IntSpan shape) {
  return FromVector(values, shape,
                    {.dtype = DType::kF64, .mesh = mesh, .placements = Placements(mesh.ndim())});
}
std::vector<double> Numbers(int64_t n, int64_t seed) {
  std::vector<double> all = testing::Integers(n, seed);
  for (double& x : all) x /= 4;
  return all;
}
DTensor Input(const DeviceMesh& mesh, int64_t k) {
  return On(mesh, Numbers(kRows * kWidth, k), {kRows, kWidth});
}
DTensor Mask(const DeviceMesh& mesh, int64_t k) {
  return On(mesh, {1, 0.5, static_cast<double>(k % 2), 1}, {kRows, 1});
}
DTensor LossOf(const DTensor& y, int64_t k) {
  const DTensor target = On(y.mesh(), Numbers(kRows * kWidth, 3 * k + 1), {kRows, kWidth});
  return sum(square(y - target));
}

// Values and gradients of what this rank has.
struct Result {
  double loss = 0;
  std::map<std::string, std::vector<double>> grads, values;
  uint64_t offset = 0;
  friend bool operator==(const Result&, const Result&) = default;
};
void Collect(const Module& model, Result* result) {
  for (const NamedParameter& p : model.NamedParameters()) {
    const DTensor tensor = p.parameter->tensor();
    if (!tensor.spec().in_mesh()) continue;
    result->values[p.fqn] = tensor.Detach().ToVector<double>();
    if (tensor.grad().defined()) result->grads[p.fqn] = tensor.grad().ToVector<double>();
  }
}

struct Case {
  const char* schedule;
  int ranks, per_rank;
  int64_t microbatches;
};

constexpr int kSteps = 2;

// The whole model on this rank: gradients of each step before the optimizer, values after it.
std::vector<Result> OneDevice(int blocks, double dropout, int64_t microbatches) {
  const DeviceMesh& mesh = DeviceMesh::Self();
  Model model(blocks, dropout);
  SetDType(model, DType::kF64);
  ManualSeed(5);
  Materialize(model);
  SGD optimizer(model.NamedParameters(), {.lr = 0.125, .momentum = 0.5});
  std::vector<Result> results;
  for (int step = 0; step < kSteps; ++step) {
    Result result;
    for (int64_t k = 0; k < microbatches; ++k) {
      const DTensor loss = LossOf(model({Input(mesh, k), Mask(mesh, k)})[0], k);
      loss.Backward();
      result.loss += loss.Item();
    }
    Collect(model, &result);
    result.offset = DefaultGenerator().offset();
    optimizer.Step();
    optimizer.ZeroGrad();
    results.push_back(result);
  }
  return results;
}

std::vector<Result> Piped(const Case& c, int blocks, double dropout, const DeviceMesh& mesh) {
  Model model(blocks, dropout);
  SetDType(model, DType::kF64);
  const int stages = c.ranks * c.per_rank;
  std::vector<PipelineStage> parts;
  for (int s = 0; s < stages; ++s) {
    std::vector<Module*> modules;
    for (int b = s * blocks / stages; b < (s + 1) * blocks / stages; ++b) {
      modules.push_back(model.all[b]);
      ThrowIfError(DistributeModule(*model.all[b], StageMesh(mesh, "pp", s)));
    }
    parts.push_back(StageOf(modules));
  }
  ManualSeed(5);
  Materialize(model);
  Pipeline pipeline(mesh, parts, {.microbatches = c.microbatches, .schedule = c.schedule});
  const DeviceMesh first = StageMesh(mesh, "pp", 0);
  SGD optimizer(model.NamedParameters(), {.lr = 0.125, .momentum = 0.5});
  std::vector<Result> results;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<Values> inputs;
    for (int64_t k = 0; k < c.microbatches; ++k) {
      inputs.push_back({Input(first, k), Mask(first, k)});
    }
    Result result;
    result.loss =
        pipeline.Step(inputs, [](int64_t k, const Values& y) { return LossOf(y[0], k); }).Item();
    Collect(model, &result);
    result.offset = DefaultGenerator().offset();
    optimizer.Step();
    optimizer.ZeroGrad();
    results.push_back(result);
  }
  return results;
}

// What a rank has of the whole.
void ExpectPart(const std::vector<Result>& part, const std::vector<Result>& whole) {
  for (size_t step = 0; step < whole.size(); ++step) {
    SCOPED_TRACE(step);
    EXPECT_EQ(part[step].loss, whole[step].loss);
    EXPECT_EQ(part[step].offset, whole[step].offset);
    EXPECT_EQ(part[step].grads.size(), part[step].values.size());
    EXPECT_FALSE(part[step].values.empty());
    for (const auto& [name, grad] : part[step].grads) {
      EXPECT_EQ(grad, whole[step].grads.at(name)) << name;
    }
    for (const auto& [name, value] : part[step].values) {
      EXPECT_EQ(value, whole[step].values.at(name)) << name;
    }
  }
}

// To the bit, with dropout: each forward draws what it would draw on one device.
TEST(Pipeline, IsOneDeviceToTheBit) {
  for (const Case& c : std::vector<Case>{{"GPipe", 1, 1, 3},
                                         {"GPipe", 2, 1, 4},
                                         {"GPipe", 2, 2, 3},
                                         {"1F1B", 1, 1, 2},
                                         {"1F1B", 2, 1, 1},
                                         {"1F1B", 2, 1, 5},
                                         {"1F1B", 3, 1, 2},
                                         {"1F1B", 4, 1, 6},
                                         {"Interleaved1F1B", 1, 2, 3},
                                         {"Interleaved1F1B", 2, 2, 4},
                                         {"Interleaved1F1B", 3, 2, 3},
                                         {"Interleaved1F1B", 2, 3, 2}}) {
    SCOPED_TRACE(absl::StrCat(c.schedule, " ", c.ranks, " ranks, ", c.per_rank, " stages each, ",
                              c.microbatches, " microbatches"));
    const absl::Status status = RunSpmd(c.ranks, [&](RankContext&) -> absl::Status {
      const int blocks = 2 * c.ranks * c.per_rank - 1;
      const std::vector<Result> whole = OneDevice(blocks, 0.25, c.microbatches);
      ExpectPart(Piped(c, blocks, 0.25, DeviceMesh({c.ranks}, {"pp"})), whole);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Stages that are meshes themselves: rows of a microbatch over dp, columns of the layers over tp.
struct Spread {
  int64_t pp, dp, tp;
  DeviceMesh Mesh() const { return DeviceMesh({pp, dp, tp}, {"pp", "dp", "tp"}); }
};

struct SpreadResult {
  double loss;
  std::map<std::string, std::vector<double>> grads;
};

// One step of whole numbers, which any order adds up to the same sums.
SpreadResult StepOn(const DeviceMesh& mesh, int64_t microbatches,
                    std::vector<CommEvent>* events = nullptr) {
  const int64_t pp = mesh.size(0);
  struct Layer : Module {
    Layer() : up(AddChild<Linear>("up", 4, 8)), down(AddChild<Linear>("down", 8, 4)) {}
    Values Forward(const Values& in) override { return {in[0] + down(relu(up(in[0])))}; }
    Linear &up, &down;
  };
  struct Layers : Module {
    explicit Layers(int64_t n) {
      for (int64_t i = 0; i < n; ++i) all.push_back(&AddChild<Layer>(absl::StrCat(i)));
    }
    Values Forward(const Values& in) override { return in; }
    std::vector<Layer*> all;
  };
  constexpr int64_t kLayers = 4;
  Layers model(kLayers);
  SetDType(model, DType::kF64);
  std::vector<PipelineStage> stages;
  for (int s = 0; s < pp; ++s) {
    std::vector<Module*> modules;
    for (int64_t i = s * kLayers / pp; i < (s + 1) * kLayers / pp; ++i) {
      ThrowIfError(ParallelizeModule(*model.all[i], StageMesh(mesh, "pp", s),
                                     {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}},
                                     {.mesh_dim = "tp"}));
      modules.push_back(model.all[i]);
    }
    stages.push_back(StageOf(modules));
  }
  Materialize(model);
  int64_t seed = 0;
  for (const NamedParameter& p : model.NamedParameters()) {
    const NoGrad no_grad;
    const DTensor t = p.parameter->tensor();
    copy_(t, FromVector(testing::Integers(t.numel(), seed++), t.shape(),
                        {.dtype = DType::kF64,
                         .mesh = t.mesh(),
                         .placements = Placements(t.placements().begin(), t.placements().end())}));
  }
  const DeviceMesh first = StageMesh(mesh, "pp", 0);
  std::vector<Values> inputs;
  for (int64_t k = 0; k < microbatches; ++k) {
    inputs.push_back(
        {FromVector(testing::Integers(5 * 4, k), {5, 4},
                    {.dtype = DType::kF64, .mesh = first, .placements = {Shard(0), Replicate()}})});
  }
  Pipeline pipeline(mesh, stages, {.microbatches = microbatches});
  const auto loss = [](int64_t k, const Values& y) {
    return sum(y[0]) * static_cast<double>(k + 1);
  };
  SpreadResult result = {};
  {
    const CommTrace trace;
    result.loss = pipeline.Step(inputs, loss).Item();
    if (events != nullptr) *events = trace.events();
  }
  for (const NamedParameter& p : model.NamedParameters()) {
    const DTensor grad = p.parameter->tensor().grad();
    EXPECT_TRUE(grad.defined()) << p.fqn;  // absent where the stage is elsewhere
    if (grad.spec().in_mesh()) result.grads[p.fqn] = grad.ToVector<double>();
  }
  return result;
}

TEST(Pipeline, StagesAreMeshes) {
  for (const Spread& at :
       std::vector<Spread>{{2, 2, 1}, {2, 1, 2}, {2, 2, 2}, {4, 1, 2}, {2, 1, 3}}) {
    SCOPED_TRACE(absl::StrCat(at.pp, " x ", at.dp, " x ", at.tp));
    const auto ranks = static_cast<int>(at.pp * at.dp * at.tp);
    const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) -> absl::Status {
      const SpreadResult whole =
          StepOn(*DeviceMesh::FromRanks({1, 1, 1}, {rank.rank()}, {"pp", "dp", "tp"}), 3);
      EXPECT_EQ(whole.grads.size(), 16U);
      const SpreadResult part = StepOn(at.Mesh(), 3);
      EXPECT_EQ(part.loss, whole.loss);
      EXPECT_EQ(part.grads.size(), 16U / static_cast<size_t>(at.pp));
      for (const auto& [name, grad] : part.grads) EXPECT_EQ(grad, whole.grads.at(name)) << name;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Per microbatch and edge one message each way, of what a rank holds; the stage's gradients are
// reduced over dp once, with its last microbatch.
TEST(Pipeline, SendsWhatItMust) {
  const int64_t microbatches = 4;
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    std::vector<CommEvent> events;
    StepOn(Spread{2, 2, 1}.Mesh(), microbatches, &events);
    std::map<std::string, int64_t> counts, bytes;
    for (const CommEvent& e : events) {
      const std::string what = absl::StrCat(std::string(Name(e.kind)), " ", e.op, " ", e.mesh_dims);
      ++counts[what];
      bytes[what] += e.bytes;
    }
    const int64_t rows = rank.rank() % 2 == 0 ? 3 : 2, sent = rows * 4 * 8 * microbatches;
    EXPECT_EQ(counts["exchange pipeline stage 0 to 1"], microbatches);
    EXPECT_EQ(counts["exchange pipeline stage 1 to 0"], microbatches);
    EXPECT_EQ(bytes["exchange pipeline stage 0 to 1"], rank.rank() < 2 ? 0 : sent);
    EXPECT_EQ(bytes["exchange pipeline stage 1 to 0"], rank.rank() < 2 ? sent : 0);
    int64_t reduced = 0;
    for (const auto& [what, count] : counts) {
      if (absl::StrContains(what, "dp") && absl::StrContains(what, "reduce")) reduced += count;
    }
    EXPECT_EQ(reduced, rank.rank() < 2 ? 1 : 2);  // one bucket; the loss
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// No gradients, the same losses, and random numbers go on as if it had been one device.
TEST(Pipeline, Evaluates) {
  for (const int per_rank : {1, 2}) {
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({2}, {"pp"});
      Model model(4, 0.5), whole(4, 0.5);
      std::vector<PipelineStage> stages;
      for (int s = 0; s < 2 * per_rank; ++s) {
        std::vector<Module*> modules;
        for (int b = s * 2 / per_rank; b < (s + 1) * 2 / per_rank; ++b) {
          modules.push_back(model.all[b]);
          DT_RETURN_IF_ERROR(DistributeModule(*model.all[b], StageMesh(mesh, "pp", s)));
        }
        stages.push_back(StageOf(modules));
      }
      for (Model* m : {&model, &whole}) {
        SetDType(*m, DType::kF64);
        ManualSeed(7);
        Materialize(*m);
      }
      Pipeline pipeline(
          mesh, stages,
          {.microbatches = 4, .schedule = per_rank == 1 ? "1F1B" : "Interleaved1F1B"});
      std::vector<Values> inputs;
      const DeviceMesh first = StageMesh(mesh, "pp", 0);
      for (int64_t k = 0; k < 4; ++k) inputs.push_back({Input(first, k), Mask(first, k)});
      const auto loss = [](int64_t k, const Values& y) { return LossOf(y[0], k); };
      ManualSeed(9);
      const double piped = pipeline.Evaluate(inputs, loss).Item();
      const uint64_t offset = DefaultGenerator().offset();
      ManualSeed(9);
      double expected = 0;
      const DeviceMesh& self = DeviceMesh::Self();
      for (int64_t k = 0; k < 4; ++k) {
        expected += LossOf(whole({Input(self, k), Mask(self, k)})[0], k).Item();
      }
      EXPECT_EQ(piped, expected);
      EXPECT_EQ(offset, DefaultGenerator().offset());
      for (Parameter* p : model.Parameters()) EXPECT_FALSE(p->tensor().grad().defined());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A model of four blocks, two per stage, and its pipeline.
struct Two {
  explicit Two(const DeviceMesh& mesh, int64_t microbatches = 2) : model(4, 0) {
    SetDType(model, DType::kF64);
    std::vector<PipelineStage> stages;
    for (int s = 0; s < 2; ++s) {
      for (int b : {2 * s, 2 * s + 1}) {
        ThrowIfError(DistributeModule(*model.all[b], StageMesh(mesh, "pp", s)));
      }
      stages.push_back(StageOf({model.all[2 * s], model.all[2 * s + 1]}));
    }
    ManualSeed(11);
    Materialize(model);
    pipeline = std::make_unique<Pipeline>(mesh, stages, PipelineOptions{microbatches});
    first = StageMesh(mesh, "pp", 0);
    for (int64_t k = 0; k < microbatches; ++k) {
      inputs.push_back({Input(first, k), Mask(first, k)});
    }
  }
  double Step() {
    return pipeline->Step(inputs, [](int64_t k, const Values& y) { return LossOf(y[0], k); })
        .Item();
  }
  Model model;
  std::unique_ptr<Pipeline> pipeline;
  DeviceMesh first;
  std::vector<Values> inputs;
};

// Clipping, optimizers and checkpoints take stages on several meshes together: saved by two ranks,
// a training goes on on one.
TEST(Pipeline, TrainsAsAWhole) {
  const testing::TempFolder folder;
  constexpr double kMaxNorm = 3;
  const auto clipped_step = [&](const Module& model, Optimizer& optimizer) {
    const double norm = ClipGradNorm(model.NamedParameters(), kMaxNorm);
    optimizer.Step();
    optimizer.ZeroGrad();
    return norm;
  };
  std::vector<double> losses, norms;
  const absl::Status saved = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    Two two(DeviceMesh({2}, {"pp"}));
    AdamW optimizer(two.model.NamedParameters(), {.lr = 0.125});
    for (int step = 0; step < 4; ++step) {
      const double loss = two.Step(), norm = clipped_step(two.model, optimizer);
      if (rank.rank() == 0) losses.push_back(loss), norms.push_back(norm);
      for (const int64_t count : optimizer.StepCounts()) EXPECT_EQ(count, step + 1);
      if (step == 1) {
        // The first process's folder.
        DT_ASSIGN_OR_RETURN(const std::vector<std::string> paths,
                            rank.Exchange(DeviceMesh({2}), {0}, "folder", folder.path()));
        DT_RETURN_IF_ERROR(SaveCheckpoint(paths[0], two.model, optimizer, {.step = 2}).status());
      }
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(saved.ok()) << saved;
  for (const bool again : {false, true}) {
    const absl::Status status = RunSpmd(1, [&](RankContext&) -> absl::Status {
      Model model(4, 0);
      SetDType(model, DType::kF64);
      ManualSeed(11);
      Materialize(model);
      AdamW optimizer(model.NamedParameters(), {.lr = 0.125});
      if (again) DT_RETURN_IF_ERROR(LoadCheckpoint(folder.path(), model, optimizer).status());
      const DeviceMesh& mesh = DeviceMesh::Self();
      for (size_t step = again ? 2 : 0; step < losses.size(); ++step) {
        double total = 0;
        for (int64_t k = 0; k < 2; ++k) {
          const DTensor loss = LossOf(model({Input(mesh, k), Mask(mesh, k)})[0], k);
          loss.Backward();
          total += loss.Item();
        }
        EXPECT_NEAR(total, losses[step], 1e-12 * total);
        EXPECT_NEAR(clipped_step(model, optimizer), norms[step], 1e-12 * norms[step]);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Pipeline, Errors) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"pp"});
    Two two(mesh);
    const auto loss = [](int64_t, const Values& y) { return sum(y[0]); };
    const auto step = [&](const std::vector<Values>& inputs) {
      return MessageOf([&] { two.pipeline->Step(inputs, loss); });
    };
    EXPECT_THAT(step({two.inputs[0]}), HasSubstr("has 2 microbatches, got inputs of 1"));
    EXPECT_THAT(step({two.inputs[0], {Input(mesh, 0)}}),
                AllOf(HasSubstr("inputs are on the mesh of stage 0"), HasSubstr("pp=2")));
    EXPECT_THAT(step({two.inputs[0], {DTensor()}}), HasSubstr("an input is null"));
    const PipelineStage stage = StageOf({two.model.all[0]});
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, stage, stage}); }),
                HasSubstr("3 stages on the 2 ranks of mesh dim pp"));
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, PipelineStage()}); }),
                HasSubstr("stage 1 has no function"));
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, stage}, {.schedule = "2F2B"}); }),
                HasSubstr("there is no \"2F2B\""));
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, stage}, {.mesh_dim = "tp"}); }),
                HasSubstr("pp"));
    PipelineStage borrower = stage;
    borrower.borrows = {two.model.FindParameter("3.up.weight")};
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, borrower}); }),
                HasSubstr("borrows a parameter that no stage has"));
    PipelineOptions other;
    other.own_schedule = ValueOrThrow(MakePipelineSchedule("1F1B", 3, 2));
    EXPECT_THAT(MessageOf([&] { Pipeline(mesh, {stage, stage}, other); }),
                HasSubstr("the schedule is of 3 stages on 3 ranks, the pipeline has 2 on 2"));
    // Nothing of all that stands in the way of a step.
    EXPECT_GT(two.Step(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What stages give is rehearsed, so a wrong mesh is told before anything runs, on all ranks alike.
TEST(Pipeline, AStageThatLeavesItsMeshIsRefused) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"pp"});
    const DeviceMesh first = StageMesh(mesh, "pp", 0), second = StageMesh(mesh, "pp", 1);
    const PipelineStage stays = {[](const Values& in) { return in; }, {}};
    const PipelineStage leaves = {
        [&](const Values& in) { return Values{in[0].Redistribute(second, {Replicate()})}; }, {}};
    Pipeline pipeline(mesh, {leaves, stays});
    pipeline.Step({{Input(first, 0)}}, [](int64_t, const Values& y) { return sum(y[0]); });
    return absl::OkStatus();
  });
  EXPECT_THAT(status.ToString(), HasSubstr("result 0 of stage 0 is on mesh stage=1"));
}

// What all ranks refuse alike leaves the pipeline as it was.
TEST(Pipeline, StagesThatDoNotFitAreToldToAllAlike) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    Two two(DeviceMesh({2}, {"pp"}));
    std::vector<Values> wide = two.inputs;
    wide[1] = {On(two.first, Numbers(kRows * 5, 0), {kRows, 5}), two.inputs[1][1]};
    EXPECT_THAT(MessageOf([&] {
                  two.pipeline->Step(wide, [](int64_t, const Values& y) { return sum(y[0]); });
                }),
                HasSubstr("[linear]"));
    EXPECT_GT(two.Step(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One rank's error ends the step of all, with its place.
TEST(Pipeline, AnErrorIsToldToAllRanks) {
  for (const int bad : {0, 1, 2}) {
    const absl::Status status = RunSpmd(3, [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh({3}, {"pp"});
      int calls = 0;
      const auto stage = [&](int s) {
        return PipelineStage{[&, s](const Values& in) {
                               const bool rehearsed = rank.rehearses();
                               if (s == bad && !rehearsed && ++calls == 2) {
                                 throw std::runtime_error("out of luck");
                               }
                               return Values{in[0] * 2};
                             },
                             {}};
      };
      Pipeline pipeline(mesh, {stage(0), stage(1), stage(2)}, {.microbatches = 4});
      const DeviceMesh first = StageMesh(mesh, "pp", 0);
      const std::vector<Values> inputs(4, Values{Input(first, 0)});
      const std::string message = MessageOf(
          [&] { pipeline.Step(inputs, [](int64_t, const Values& y) { return sum(y[0]); }); });
      EXPECT_THAT(message,
                  AllOf(HasSubstr("out of luck"),
                        HasSubstr(absl::StrCat("forward of microbatch 1 in stage ", bad))));
      return absl::InternalError(message);
    });
    EXPECT_FALSE(status.ok());
  }
}

// Shipped models by their shipped plans: pipelines of tensor-parallel stages, whose heads have
// tables of their own or borrow the embedding's.
struct OfModel {
  int64_t pp, tp;
  int stages;
  bool sequence, tied;
};

DTensor TokensOn(const DeviceMesh& mesh, int64_t k, int64_t shift) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 2 * 8; ++i) tokens.push_back((i * i + 3 * i + k + shift) % 32);
  return FromVector(tokens, {2, 8}, {.dtype = DType::kI64, .mesh = mesh});
}

template <class M>
void ExpectPipedModel(const OfModel& c, M& whole, M& model,
                      absl::StatusOr<std::vector<PipelineStage>> made, const Plan& plan) {
  const std::vector<PipelineStage> stages = ValueOrThrow(std::move(made));
  const DeviceMesh mesh({c.pp, c.tp}, {"pp", "tp"});
  ThrowIfError(ParallelizeStages(model, mesh, stages, plan, {.warn = false}));
  for (M* m : {&whole, &model}) {
    SetDType(*m, DType::kF64);
    ManualSeed(3);
    Materialize(*m);
  }
  const auto loss_of = [&](const DTensor& logits, int64_t k) {
    const DTensor labels = reshape(TokensOn(logits.mesh(), k, 1), {16});
    return cross_entropy(reshape(logits, {16, 32}), labels) * 0.25;
  };
  double expected = 0;
  ManualSeed(4);
  for (int64_t k = 0; k < 4; ++k) {
    const DTensor loss = loss_of(whole(TokensOn(DeviceMesh::Self(), k, 0)), k);
    loss.Backward();
    expected += loss.Item();
  }
  Pipeline pipeline(mesh, stages,
                    {.microbatches = 4, .schedule = c.stages == c.pp ? "1F1B" : "Interleaved1F1B"});
  std::vector<Values> inputs;
  for (int64_t k = 0; k < 4; ++k) inputs.push_back({TokensOn(StageMesh(mesh, "pp", 0), k, 0)});
  const auto loss = [&](int64_t k, const Values& y) { return loss_of(y[0], k); };
  ManualSeed(4);
  EXPECT_NEAR(pipeline.Evaluate(inputs, loss).Item(), expected, 1e-12);
  ManualSeed(4);
  EXPECT_NEAR(pipeline.Step(inputs, loss).Item(), expected, 1e-12);
  std::vector<Values> more = inputs;  // a mask is no part of it
  more[0].Add("mask", TokensOn(StageMesh(mesh, "pp", 0), 0, 0));
  EXPECT_THAT(testing::MessageOf([&] { pipeline.Evaluate(more, loss); }),
              HasSubstr("a model takes ids alone through a pipeline"));
  int64_t compared = 0;
  for (const NamedParameter& p : model.NamedParameters()) {
    const DTensor grad = p.parameter->tensor().grad();
    if (!grad.spec().in_mesh()) continue;
    const std::vector<double> got = grad.template ToVector<double>();
    const std::vector<double> want =
        whole.FindParameter(p.fqn)->tensor().grad().template ToVector<double>();
    for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-12) << p.fqn;
    ++compared;
  }
  EXPECT_GT(compared, 9);
  EXPECT_NEAR(ClipGradNorm(model.NamedParameters(), 1), ClipGradNorm(whole.NamedParameters(), 1),
              1e-12);
}

TEST(Pipeline, RunsShippedModels) {
  for (const OfModel& c : std::vector<OfModel>{{1, 2, 2, false, true},
                                               {2, 1, 2, false, true},
                                               {2, 2, 2, true, false},
                                               {2, 2, 4, false, true},
                                               {2, 2, 2, true, true},
                                               {3, 1, 3, false, true}}) {
    SCOPED_TRACE(absl::StrCat(c.pp, " x ", c.tp, ", ", c.stages, " stages"));
    const absl::Status status = RunSpmd(c.pp * c.tp, [&](RankContext&) -> absl::Status {
      LlamaConfig llama;
      llama.layers = 5;
      llama.vocab = 32;
      llama.hidden = 32;
      llama.inner = 48;
      llama.heads = 4;
      llama.kv_heads = 2;
      llama.tied = c.tied;
      const ModelPlanOptions how = {.sequence_parallel = c.sequence};
      Llama whole(llama), model(llama);
      ExpectPipedModel(c, whole, model, LlamaStages(model, c.stages), LlamaPlan(llama, how));
      GPT2Config gpt2;
      gpt2.layers = 4;
      gpt2.hidden = 32;
      gpt2.inner = 48;
      gpt2.heads = 4;
      gpt2.vocab = 32;
      gpt2.max_positions = 8;
      gpt2.tied = c.tied;
      gpt2.embedding_dropout = gpt2.attention_dropout = gpt2.residual_dropout = 0.1;
      GPT2 whole2(gpt2), model2(gpt2);
      ExpectPipedModel(c, whole2, model2, GPT2Stages(model2, c.stages), GPT2Plan(gpt2, how));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// What goes between ranks cannot be rehearsed by one of them; the pipeline works afterwards.
TEST(Pipeline, ExplainSaysThatThereAreNoPeers) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    Two two(DeviceMesh({2}, {"pp"}));
    const auto step = [&](const Values& in) {
      return Values{
          two.pipeline->Step({in, in}, [](int64_t, const Values& y) { return sum(y[0]); })};
    };
    EXPECT_THAT(Explain(step, two.inputs[0]).status().ToString(),
                HasSubstr("in a rehearsal (Explain) there are no peers"));
    EXPECT_GT(two.Step(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Pipeline, EveryParameterIsInOneStage) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"pp"});
    Model model(2, 0);
    const auto error = [&](const std::vector<PipelineStage>& stages, const Plan& plan = {}) {
      return std::string(ParallelizeStages(model, mesh, stages, plan).message());
    };
    const PipelineStage first = StageOf({model.all[0]}), second = StageOf({model.all[1]});
    EXPECT_THAT(error({first, first}),
                HasSubstr("0.up.weight is in stage 0 and in stage 1; one of them may borrow it"));
    EXPECT_THAT(error({first}), HasSubstr("1.up.weight is in no stage"));
    EXPECT_THAT(error({first, second}, {{"", NoParallel()}}),
                HasSubstr("a style for the model, which is no stage's"));
    EXPECT_THAT(error({first, second}, {{"2.up", NoParallel()}}), HasSubstr("2.up"));
    EXPECT_EQ(error({first, second}), "");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::pipeline_test
