// Explain(module, inputs) says what a run then does: the same collectives, byte for byte.
#include "dtensor/parallel/plan/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/expect_comm.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/rng/generator.h"
#include "dtensor/rng/tracker.h"
#include "tests/parallel/support.h"

namespace dtensor::explain_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// Everything of an event but its time, which only a model knows.
std::vector<std::string> Lines(const std::vector<CommEvent>& events) {
  std::vector<std::string> lines;
  for (const CommEvent& e : events) {
    lines.push_back(absl::StrCat(absl::string_view(Name(e.kind).data(), Name(e.kind).size()), " ",
                                 e.mesh_dims, " phase ", static_cast<int>(e.phase), " ",
                                 e.implicit ? "implicit" : "explicit", " ", e.bytes, " of ",
                                 e.payload_bytes, " ", e.module, " ", e.op));
  }
  return lines;
}

struct Case {
  std::function<std::unique_ptr<Module>()> model;
  Plan plan;
  std::function<DTensor(const DeviceMesh&)> input;
  std::function<DTensor(const Values&, const DTensor&)> loss;
};

Case GPTCase(double dropout, bool recompute) {
  const GPTConfig config = {.vocab = 18,
                            .seq = 6,
                            .layers = 2,
                            .hidden = 12,
                            .heads = 3,
                            .dropout = dropout,
                            .recompute = recompute};
  Case c;
  c.model = [config] { return std::make_unique<GPT>(config); };
  c.plan = GPTPlan(config);
  c.input = [](const DeviceMesh& mesh) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 3 * 6; ++i) ids.push_back(i);
    return FromVector<int64_t>(
        ids, {3, 6}, {.dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0), Replicate()}});
  };
  c.loss = [](const Values& out, const DTensor& ids) {
    return cross_entropy(flatten(out[0], 0, 1), flatten(ids, 0, 1));
  };
  return c;
}

// Only half of what it needs is planned: the rest is redistributed implicitly.
Case MLPCase() {
  Case c;
  c.model = [] {
    auto model = std::make_unique<Sequential>();
    model->Append<MLP>(10, 14);
    model->Append<LayerNorm>(10);
    return model;
  };
  c.plan = {{"0.up", ColwiseParallel()}, {"0.down", RowwiseParallel({.output = Shard(-1)})}};
  c.input = [](const DeviceMesh& mesh) {
    DTensor x = ones({5, 10}, {.mesh = mesh, .placements = {Shard(0), Shard(0)}});
    x.RequiresGrad();
    return x;
  };
  c.loss = [](const Values& out, const DTensor&) { return mean(out[0] * out[0]); };
  return c;
}

// q, k and v share one gather, and in backward one reduce-scatter.
Case AttentionCase() {
  Case c;
  c.model = [] { return std::make_unique<CausalSelfAttention>(64, 4); };
  c.plan = {{"w[qkv]", ColwiseParallel({.unit = 16})}, {"wo", RowwiseParallel({.unit = 16})}};
  c.input = [](const DeviceMesh& mesh) {
    DTensor x = ones({4, 32, 64}, {.mesh = mesh, .placements = {Shard(0), Shard(1)}});
    x.RequiresGrad();
    return x;
  };
  c.loss = [](const Values& out, const DTensor&) { return mean(out[0] * out[0]); };
  return c;
}

void ExpectExplainedAsRun(const Case& c) {
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    std::unique_ptr<Module> model = c.model();
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, mesh, c.plan));
    const DTensor x = c.input(mesh);
    ExplainOptions options;
    options.loss = [&](const Values& out) { return c.loss(out, x); };
    CommTrace quiet;
    DT_ASSIGN_OR_RETURN(const ModuleExplanation recipe, Explain(*model, {x}, options));
    EXPECT_FALSE(model->Parameters()[0]->materialized());
    Materialize(*model);
    quiet.Clear();  // of the rehearsal's
    const int64_t before = rank.device_allocator()->stats().in_use_bytes;
    DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}, options));
    EXPECT_EQ(rank.device_allocator()->stats().in_use_bytes, before);
    CommTrace trace;
    rank.device_allocator()->ResetPeak();
    const int64_t base = before - e.parameter_bytes;
    c.loss((*model)(Values{x}), x).Backward();
    EXPECT_EQ(Lines(e.events), Lines(trace.events()));
    EXPECT_EQ(Lines(recipe.events), Lines(trace.events()));
    EXPECT_GT(trace.TotalCount(), 2);
    int64_t gradients = 0, count = 0;
    for (const Parameter* p : model->Parameters())
      gradients += p->tensor().grad().spec().local_bytes();
    EXPECT_EQ(e.gradient_bytes, gradients);
    for (const ModuleCall& call : e.calls) {
      for (const CommRow& row : call.comm) count += row.count;
    }
    EXPECT_EQ(count, trace.TotalCount());
    // Scratch memory of kernels, which is no more than some blocks of attention, and copies made
    // for them are not foreseen.
    constexpr double kScratch = 64 << 10;
    const auto peak = static_cast<double>(rank.device_allocator()->stats().peak_bytes - base);
    EXPECT_LE(static_cast<double>(e.peak_bytes), 1.2 * peak);
    EXPECT_GE(1.2 * static_cast<double>(e.peak_bytes) + kScratch, peak);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ExplainModule, GPT) { ExpectExplainedAsRun(GPTCase(0, false)); }
TEST(ExplainModule, GPTWithDropoutAndRecompute) { ExpectExplainedAsRun(GPTCase(0.1, true)); }
TEST(ExplainModule, AttentionThatSharesAGather) { ExpectExplainedAsRun(AttentionCase()); }
TEST(ExplainModule, MLPWithImplicitRedistributions) { ExpectExplainedAsRun(MLPCase()); }

TEST(ExplainModule, OneRankAloneAndWithoutASideEffect) {
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    const Case c = GPTCase(0.1, false);
    std::unique_ptr<Module> model = c.model();
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, mesh, c.plan));
    Materialize(*model);
    const DTensor x = c.input(mesh);
    const testing::NamedValues values = testing::Gather(*model);
    ManualSeed(5);
    if (rank.rank() == 2) {
      DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(*model, {x}));
      EXPECT_THAT(e.ToString(), AllOf(HasSubstr("blocks.1.mlp.down  redistribute  forward"),
                                      HasSubstr("all_reduce      tp"), HasSubstr("all of backward"),
                                      Not(HasSubstr("linear_act"))));
      EXPECT_THAT(e.ToString(/*all=*/true),
                  HasSubstr("linear_act_kept: x [S(0), R], w [R, S(0)], b [R, S(0)] -> "
                            "[S(0), S(2)], [S(0), S(2)]"));
      for (const CommEvent& event : e.events) EXPECT_GT(event.modelled_us, 0);
    }
    EXPECT_EQ(DefaultGenerator().offset(), 0u);
    EXPECT_EQ(testing::Gather(*model), values);
    for (const Parameter* p : model->Parameters()) EXPECT_FALSE(p->tensor().grad().defined());
    EXPECT_GT(sum(ones({2})).Item(), 1);  // ops run again
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Sizes of gradients are told without bringing to its place what waits in a run.
TEST(ExplainModule, GradientsThatWaitAreNotReduced) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    for (const Placement& kept : {Replicate(), Shard(0)}) {
      Sequential model;
      Linear &first = model.Append<Linear>(4, 4), &second = model.Append<Linear>(4, 4);
      DT_RETURN_IF_ERROR(
          DistributeModule(model, mesh, [&](const NamedParameter&) { return Placements{kept}; }));
      Materialize(model);
      const DTensor x = ones({40, 4}, {.mesh = mesh, .placements = {Shard(0)}});
      const auto loss = [](const Values& o) { return mean(o[0] * o[0]); };
      const ExplainOptions options = {.loss = loss};
      {
        const NoGradSync hold;
        DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(model, {x}, options));
        CommTrace trace;
        loss({model(x)}).Backward();
        EXPECT_EQ(Lines(e.events), Lines(trace.events()));
        EXPECT_EQ(e.gradient_bytes, e.parameter_bytes);
      }
      // What waits for a module that is not called goes on waiting.
      DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(second, {x}, options));
      CommTrace trace;
      loss({second(x)}).Backward();
      EXPECT_EQ(Lines(e.events), Lines(trace.events()));
      DT_ASSIGN_OR_RETURN(
          const ModuleExplanation unread,
          Explain(model, {x}, {.loss = [&](const Values&) { return loss({second(x)}); }}));
      trace.Clear();
      model(x);
      loss({second(x)}).Backward();
      EXPECT_EQ(Lines(unread.events), Lines(trace.events()));
      trace.Clear();
      EXPECT_TRUE(first.weight().tensor().grad().defined());
      EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Outside of a module's call nothing ends a memo of a parameter, so each reader gathers it; so does
// what is recomputed.
TEST(ExplainModule, ParametersThatAreReadOutsideOfAModuleCall) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    Embedding model(8, 6);
    DT_RETURN_IF_ERROR(
        DistributeModule(model, mesh, [](const NamedParameter&) { return Placements{Shard(0)}; }));
    Materialize(model);
    const DTensor ids = zeros({64}, {.dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0)}});
    const auto tied = [&](const Values& in) -> Values {
      return {mean(linear(tanh(in[0]), model.weight()) * linear(in[0], model.weight()))};
    };
    for (const bool again : {false, true}) {
      const auto loss = [&](const Values& o) { return (again ? Recompute(tied, o) : tied(o))[0]; };
      DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(model, {ids}, {.loss = loss}));
      const CommTrace trace;
      loss({model(ids)}).Backward();
      EXPECT_EQ(Lines(e.events), Lines(trace.events()));
      EXPECT_GE(trace.TotalCount(), 6);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

class ReadsAValue : public Module {
 public:
  ReadsAValue() { AddParameter("w", {2}, Init::Ones()); }

 protected:
  Values Forward(const Values& in) override {
    return {in[0] * (in[0] * FindParameter("w")->tensor()).Redistribute({}).size(0) +
            sum(in[0]).Item()};
  }
};

TEST(ExplainModule, WhatCannotBeRehearsedEndsItAndLeavesTheModelAlone) {
  ReadsAValue model;
  Materialize(model);
  const ModuleExplanation e = ValueOrThrow(Explain(model, {ones({2})}));
  EXPECT_THAT(e.ended, AllOf(HasSubstr("in a rehearsal (Explain) has no values"),
                             HasSubstr("asked for after sum: ")));
  EXPECT_EQ(model(ones({2})).ToVector<double>(), std::vector<double>({4, 4}));
}

// An op whose sizes depend on values says so by its name.
TEST(ExplainModule, TheOpThatAsksForValuesIsNamed) {
  const auto ended = [](DTensor (*op)(const DTensor&)) {
    const auto program = [&](const Values& in) { return Values{op(in[0] * 2.0)}; };
    return ValueOrThrow(Explain(program, {ones({4, 4})})).ended;
  };
  EXPECT_THAT(ended(+[](const DTensor& x) { return nonzero(x); }), HasSubstr("[nonzero]"));
  EXPECT_THAT(ended(+[](const DTensor& x) { return masked_select(x, gt(x, 0)); }),
              HasSubstr("[masked_select]"));
  EXPECT_THAT(ended(+[](const DTensor& x) { return bincount(to(flatten(x), DType::kI64)); }),
              HasSubstr("[bincount]"));
}

TEST(ExplainModule, AMeshLargerThanTheWorld) {
  const GPTConfig config = {.vocab = 50000, .seq = 2048, .layers = 1, .hidden = 8192, .heads = 64};
  GPTBlock block(config);
  const DeviceMesh mesh = *DeviceMesh::Create({1024, 16}, {"dp", "tp"}, DeviceType::kMeta);
  ASSERT_TRUE(ParallelizeModule(block, mesh,
                                {{"attn.w[qkv]", ColwiseParallel({.unit = 128})},
                                 {"attn.wo", RowwiseParallel({.unit = 128})},
                                 {"mlp.up", ColwiseParallel()},
                                 {"mlp.down", RowwiseParallel()}})
                  .ok());
  const DTensor x = empty({2048, 2048, 8192}, {.mesh = mesh, .placements = {Shard(0), Replicate()}})
                        .RequiresGrad();
  const ModuleExplanation e = ValueOrThrow(Explain(block, {x}));
  int64_t tp = 0, dp = 0;
  for (const CommRow& row : e.totals) (row.mesh_dims == "tp" ? tp : dp) += row.count;
  EXPECT_EQ(tp, 4);
  EXPECT_GE(dp, 1);  // buckets of 16 parameters
  EXPECT_LE(dp, 3);
  EXPECT_GT(e.peak_bytes, e.parameter_bytes + e.gradient_bytes);
  EXPECT_NEAR(static_cast<double>(e.parameter_bytes), 12.0 * 8192 * 8192 * 4 / 16, 1e6);
}

// Streams that an explained function makes are made again by the run.
TEST(ExplainFunction, LeavesNoStream) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    RngTracker tracker;
    RandomStates states({{"key", Generator(5).State()}});
    const auto run = [&](const Values& in) -> Values {
      ThrowIfError(tracker.Add("first", 11));
      const RandomStates::Branch branch(states, "key");
      return {dropout(in[0], 0.5)};
    };
    const DTensor x = ones({8}, {DType::kF64, DeviceMesh({2}), {Shard(0)}});
    const auto explained = Explain(run, Values{x});
    EXPECT_TRUE(explained.ok()) << explained.status();
    EXPECT_FALSE(tracker.Has("first"));
    EXPECT_EQ(*states.Get("key"), Generator(5).State());
    EXPECT_EQ(run({x}).size(), 1u);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A step that runs its backward and gives its loss back; the rest of what it gives has one still.
TEST(ExplainFunction, AStepMayRunItsOwnBackward) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    DTensor w = ones({4, 4}, {DType::kF64, mesh, {Shard(0)}});
    w.RequiresGrad();
    const DTensor x = ones({4, 4}, {DType::kF64, mesh, {Replicate()}});
    const auto backwards = [&](bool returns_loss) {
      const auto explained = Explain(
          [&](const Values& in) -> Values {
            DTensor loss = mean(matmul(in[0], w));
            loss.Backward();
            return {returns_loss ? loss : loss.Detach()};
          },
          {x});
      EXPECT_TRUE(explained.ok()) << explained.status();
      return explained.ok() ? explained->ToString() : "";
    };
    EXPECT_EQ(backwards(true), backwards(false));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A step with all that an optimizer does: the first, which makes states, and a later one.
TEST(ExplainFunction, AStepOfAnOptimizerIsTold) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const bool flat : {false, true}) {
        for (const bool norms_elsewhere : {false, true}) {
          MLP model(8, 16);
          SetDType(model, dtype);
          DT_RETURN_IF_ERROR(DistributeModule(model, mesh, [](const NamedParameter&) {
            return Placements{Replicate(), Shard(0)};
          }));
          Materialize(model);
          Linear elsewhere(4, 4);
          SetDType(elsewhere, dtype);
          DT_RETURN_IF_ERROR(DistributeModule(
              elsewhere, mesh["dp"], [](const NamedParameter&) { return Placements{Shard(0)}; }));
          Materialize(elsewhere);
          std::vector<NamedParameter> parameters = model.NamedParameters();
          for (NamedParameter p : elsewhere.NamedParameters()) {
            p.fqn = absl::StrCat("elsewhere.", p.fqn);
            if (norms_elsewhere) parameters.push_back(p);
          }
          AdamW optimizer(parameters, AdamWOptions{},
                          flat ? FlatState("dp") : StateLayoutFn(LikeParameter));
          const DTensor x = ones({8, 8}, {dtype, mesh, {Shard(0), Replicate()}});
          const auto step = [&](const Values& in) -> Values {
            const DTensor loss = mean(model(in)[0]);
            loss.Backward();
            sum(elsewhere(ones({2, 4}, {dtype, mesh["dp"], {Replicate()}}))).Backward();
            ClipGradients(parameters, 1.0);
            optimizer.Step();
            optimizer.ZeroGrad();
            return {loss.Detach()};
          };
          for (int k = 0; k < 2; ++k) {
            SCOPED_TRACE(absl::StrCat(std::string(Name(dtype)), flat ? " flat" : "",
                                      norms_elsewhere ? " two meshes" : "", " step ", k));
            DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(step, {x}));
            const CommTrace trace;
            step({x});
            EXPECT_EQ(Lines(e.events), Lines(trace.events()));
          }
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What was moved for a reader before is there for the next: a leaf's, too, with its way back.
TEST(ExplainFunction, WhatWasMovedBeforeIsNotToldAgain) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    for (const bool leaf : {true, false}) {
      DTensor w = ones({8, 8}, {DType::kF64, mesh, {Shard(0)}});
      w.RequiresGrad();
      const DTensor b = leaf ? w : w * 2.0;
      const DTensor x = ones({4, 8}, {DType::kF64, mesh, {Replicate()}});
      const auto reader = [&](const Values& in) -> Values {
        return {sum(in[0] * b.Redistribute({Replicate()}, {.shared = true})[0])};
      };
      for (int k = 0; k < 3; ++k) {
        DT_ASSIGN_OR_RETURN(const ModuleExplanation e, Explain(reader, {x}));
        const CommTrace trace;
        const DTensor y = reader({x})[0];
        y.Backward();
        EXPECT_EQ(Lines(e.events), Lines(trace.events())) << "call " << k;
        if (!leaf) break;  // its history has passed
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::explain_test
