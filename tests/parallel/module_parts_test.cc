// What modules have besides parameters: buffers, names of values, traits, layouts with local parts,
// build hooks, and the scopes over Materialize.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::module_parts_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

// y = gain x table + shift, of which only gain learns.
class Scaled : public Module {
 public:
  Scaled()
      : table_(AddBuffer("table", FromVector<double>({1, 2, 3, 4}, {4}), /*persistent=*/false)),
        gain_(AddParameter("gain", {4}, Init::Ones())),
        shift_(AddBuffer("shift", {4}, Init::Uniform(0, 1))) {}
  Parameter& table() { return table_; }
  Parameter& gain() { return gain_; }
  Parameter& shift() { return shift_; }

 protected:
  Values Forward(const Values& in) override { return {in[0] * gain_ * table_ + shift_}; }

 private:
  Parameter &table_, &gain_, &shift_;
};

TEST(Buffers, AreTensorsWithoutGradient) {
  ManualSeed(3);
  Scaled module;
  ASSERT_EQ(module.NamedParameters().size(), 1u);
  EXPECT_EQ(module.NamedBuffers()[0].fqn, "table");
  EXPECT_EQ(module.NamedBuffers()[1].fqn, "shift");
  EXPECT_EQ(module.NumElements(), 4);
  SetDType(module, DType::kBF16);
  EXPECT_EQ(module.table().dtype(), DType::kF32);  // tables keep their precision
  EXPECT_EQ(module.gain().dtype(), DType::kBF16);
  module.gain().SetDType(DType::kF32);
  Materialize(module);
  ManualSeed(3);
  EXPECT_EQ(module.shift().tensor().ToVector<double>(), rand({4}).ToVector<double>());
  sum(module(ones({2, 4}))).Backward();
  EXPECT_EQ(module.gain().tensor().grad().ToVector<double>(), (std::vector<double>{2, 4, 6, 8}));
  EXPECT_FALSE(module.shift().tensor().requires_grad());
  EXPECT_THAT(MessageOf([] {
                struct Twice : Scaled {
                  Twice() { AddBuffer("shift", {1}, {}); }
                } twice;
              }),
              HasSubstr("\"shift\" is a buffer already"));
}

TEST(Buffers, PersistentOnesAreInStateDicts) {
  Scaled from, to;
  Materialize(from);
  Materialize(to);
  const StateDict state = from.GetStateDict();
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].first, "gain");
  EXPECT_EQ(state[1].first, "shift");
  to.LoadStateDict(state);
  EXPECT_EQ(to.shift().tensor().ToVector<double>(), from.shift().tensor().ToVector<double>());
  EXPECT_THAT(MessageOf([&] { to.LoadStateDict({state[0]}); }), HasSubstr("missing shift"));
}

TEST(Buffers, PlansReplicateThemUnlessAStyleSaysOtherwise) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const Style cut = {"Cut", [](Module& m) -> absl::StatusOr<ModuleLayout> {
                         return ModuleLayout{.parameters = {{m.FindParameter("table"), Shard(0)},
                                                            {m.FindParameter("gain"), Shard(0)}}};
                       }};
    for (const bool styled : {false, true}) {
      ManualSeed(3);
      Scaled module;
      DT_RETURN_IF_ERROR(ParallelizeModule(module, mesh, styled ? Plan{{"", cut}} : Plan()));
      const absl::StatusOr<ModuleExplanation> told =
          Explain(module, {ones({2, 4}, {.mesh = mesh})});
      EXPECT_EQ(told->parameter_bytes, styled ? 8 : 16) << told.status();
      Materialize(module);
      EXPECT_EQ(module.table().placements()[0], styled ? Shard(0) : Replicate());
      EXPECT_EQ(module.shift().placements()[0], Replicate());
      const DTensor y = module(ones({1, 4}, {.mesh = mesh})) - module.shift().tensor();
      EXPECT_EQ(module.table().tensor().ToVector<double>(), (std::vector<double>{1, 2, 3, 4}));
      EXPECT_NEAR(y.ToVector<double>()[3], 4, 1e-6);
    }
    Scaled asked;  // a partition is asked for parameters only
    DT_RETURN_IF_ERROR(
        DistributeModule(asked, mesh, [](const NamedParameter&) { return Placements{Shard(0)}; }));
    EXPECT_EQ(asked.gain().placements()[0], Shard(0));
    EXPECT_EQ(asked.table().placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- values with names ---------------------------------------------------------------------------

// A frozen Linear with a low-rank one beside it.
struct LoraLinear : Module {
  Linear& base = AddChild<Linear>("base", 4, 6);
  Parameter& a = AddParameter("a", {2, 4}, Init::Normal(0, 1));
  Parameter& b = AddParameter("b", {6, 2}, Init::Normal(0, 1));
  Values Forward(const Values& x) override { return {base(x[0]) + linear(linear(x[0], a), b)}; }
};

// Frozen as recipes, parameters stay so through a plan, Materialize and Place; nothing of theirs is
// computed, moved or updated, and what is left is that of a model that learns whole.
TEST(Freezing, WhatIsFrozenHasNoGradientAndStays) {
  for (const bool frozen : {false, true}) {
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({2}, {"dp"});
      ManualSeed(5);
      LoraLinear model;
      if (frozen) model.base.RequiresGrad(false);
      EXPECT_EQ(model.base.weight().requires_grad(), !frozen);
      DT_RETURN_IF_ERROR(DistributeModule(model, mesh));
      Materialize(model);
      model.base.weight().Place(mesh, {Shard(0)});
      model.base.weight().Place(mesh, {Replicate()});
      AdamW optim(model.NamedParameters(), {.lr = 0.1});
      const testing::NamedValues before = testing::Gather(model);
      const DTensor x = DistributeTensor(view(arange(0, 16) * 0.1, {4, 4}), mesh, {Shard(0)});
      sum(model(x) * model(x)).Backward();
      const testing::NamedValues gradients = testing::Gather(model, /*gradients=*/true);
      EXPECT_EQ(gradients[0].first, "a");
      EXPECT_EQ(gradients[2].first, "base.weight");
      for (size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].second.empty(), frozen && i >= 2) << gradients[i].first;
      }
      optim.Step();
      const testing::NamedValues after = testing::Gather(model);
      for (size_t i = 0; i < after.size(); ++i) {
        EXPECT_EQ(after[i].second == before[i].second, frozen && i >= 2) << after[i].first;
      }
      model.RequiresGrad();  // with values, too
      sum(model(x)).Backward();
      EXPECT_TRUE(model.base.weight().tensor().grad().defined());
      model.base.RequiresGrad(false);
      EXPECT_FALSE(model.base.weight().tensor().grad().defined());
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
  Scaled module;
  module.shift().RequiresGrad(false);
  EXPECT_EQ(MessageOf([&] { module.shift().RequiresGrad(); }),
            "[requires_grad] shift is a buffer; only floating parameters take gradients");
}

// x masked, and how much was kept, named "kept".
class Masked : public Module {
 protected:
  Values Forward(const Values& in) override {
    const DTensor mask = in.Named("mask", 1);
    if (!mask.defined()) return {in[0]};
    return Values{in[0] * mask}.Add("kept", sum(mask));
  }
};

TEST(NamedValues, PositionsAndNames) {
  const DTensor x = ones({2}), m = zeros({2});
  const Values values = Values{x}.Add("mask", m);
  EXPECT_EQ(values.size(), 2u);
  EXPECT_EQ(values.name(0), "");
  EXPECT_EQ(values.name(1), "mask");
  EXPECT_EQ(values.Named("mask").impl(), m.impl());
  EXPECT_EQ(values.Named("other", 0).impl(), x.impl());
  EXPECT_FALSE(values.Named("other", 1).defined());  // that one has another name
  EXPECT_FALSE(values.Named("other", 2).defined());
  Masked masked;
  EXPECT_EQ(masked(Values{x}).size(), 1u);
  EXPECT_EQ(masked({x, m})[0].ToVector<double>(), (std::vector<double>{0, 0}));
  EXPECT_EQ(masked(values).Named("kept").Item(), 0);
}

TEST(NamedValues, AreThereWhenAModuleRunsAgain) {
  class Squared : public Module {
    Values Forward(const Values& in) override {
      const DTensor x = in.Named("x");
      return {exp(x) * x};  // needs a value that is not kept
    }
  };
  Squared module;
  DTensor x = ones({2});
  x.RequiresGrad();
  const auto run = [&](const Values& in) { return module(in); };
  sum(Recompute(run, Values().Add("x", x))[0]).Backward();
  EXPECT_NEAR(x.grad().ToVector<double>()[1], 2 * std::exp(1.0), 1e-5);
}

TEST(NamedValues, PlansAddressThem) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Masked masked;
    const Plan plan = {{"", PrepareModule({.inputs = {Shard(0), Replicate()},
                                           .kwargs = {{"mask", Shard(0)}},
                                           .named_outputs = {{"kept", Replicate()}}})}};
    DT_RETURN_IF_ERROR(ParallelizeModule(masked, mesh, plan));
    const DTensor x = ones({4}, {.mesh = mesh});
    masked.AddPreHook([](Module&, const Values& in) {
      EXPECT_EQ(in[0].placements()[0], Shard(0));
      EXPECT_EQ(in.Named("mask").placements()[0], Shard(0));
      return in;
    });
    const Values out = masked(Values{x}.Add("mask", x));
    EXPECT_EQ(out[0].placements()[0], Shard(0));
    EXPECT_EQ(out.Named("kept").placements()[0], Replicate());
    EXPECT_EQ(out.Named("kept").Item(), 4);
    EXPECT_THAT(MessageOf([&] { masked(Values{x}.Add("mask", ones({4}))); }),
                HasSubstr("input mask is"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- traits --------------------------------------------------------------------------------------

// A layer with names and an order of its own: y = x kernel + offset, kernel [in, out].
class Conv1D : public Module {
 public:
  Conv1D(int64_t in, int64_t out, int64_t out_units = 0, int64_t in_units = 0)
      : kernel_(AddParameter("kernel", {in, out}, Init::Uniform(-1, 1))),
        offset_(AddParameter("offset", {out}, Init::Uniform(-1, 1))),
        out_units_(out_units),
        in_units_(in_units) {}
  std::string type_name() const override { return "Conv1D"; }
  std::optional<ModuleTraits> traits() override {
    return ModuleTraits{.weight = &kernel_,
                        .bias = &offset_,
                        .out_dim = 1,
                        .in_dim = 0,
                        .out_units = out_units_,
                        .in_units = in_units_};
  }
  Parameter& kernel() { return kernel_; }

 protected:
  Values Forward(const Values& in) override { return {matmul(in[0], kernel_) + offset_}; }

 private:
  Parameter &kernel_, &offset_;
  const int64_t out_units_, in_units_;
};

TEST(Traits, StylesServeAUsersOwnLayers) {
  const auto run = [](const DeviceMesh& mesh, CommTrace* trace) {
    ManualSeed(3);
    Sequential model;
    Conv1D& up = model.Append<Conv1D>(4, 6, /*out_units=*/3);
    Conv1D& down = model.Append<Conv1D>(6, 4, 0, /*in_units=*/3);
    if (!mesh.is_self()) {
      EXPECT_TRUE(
          ParallelizeModule(model, mesh, {{"0", ColwiseParallel()}, {"1", RowwiseParallel()}})
              .ok());
      // 3 units of 2 features on 2 ranks: 4 and 2, not 3 and 3.
      EXPECT_EQ(up.kernel().placements()[0], Shard(1, 2));
      EXPECT_EQ(down.kernel().placements()[0], Shard(0, 2));
    }
    Materialize(model);
    const StrictRedistribute strict;
    const DTensor y = model(ones({2, 4}, {.dtype = DType::kF32, .mesh = mesh}));
    if (trace != nullptr) {
      EXPECT_EQ(trace->TotalCount(), 1);
    }
    return y.ToVector<double>();
  };
  const std::vector<double> one = run(DeviceMesh::Self(), nullptr);
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    CommTrace trace;
    const std::vector<double> two = run(DeviceMesh({2}, {"tp"}), &trace);
    for (size_t i = 0; i < one.size(); ++i) EXPECT_NEAR(one[i], two[i], 1e-5);
    Conv1D odd(4, 6, /*out_units=*/4);
    EXPECT_THAT(
        std::string(
            ParallelizeModule(odd, DeviceMesh({2}, {"tp"}), {{"", ColwiseParallel()}}).message()),
        HasSubstr("4 units of features, which do not divide 6"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Under RowwiseParallel the sum over ranks comes before the activation.
TEST(Linear, WithAnActivationUnderEitherStyle) {
  const auto run = [](const DeviceMesh& mesh, const Plan& plan, Activation activation) {
    ManualSeed(3);
    Linear layer(4, 6, true, {}, activation);
    if (!mesh.is_self()) {
      EXPECT_TRUE(ParallelizeModule(layer, mesh, plan).ok());
    }
    Materialize(layer);
    const DTensor x = FromVector(testing::Integers(8, 1), {2, 4}, {DType::kF64, mesh, {}});
    DTensor in = to(x, DType::kF32).RequiresGrad();
    const StrictRedistribute strict;
    const DTensor y = layer(in);
    (y * y).Backward(ones_like(y));
    std::vector<double> all = y.ToVector<double>();
    for (const DTensor& t : {in, layer.weight().tensor(), layer.bias()->tensor()}) {
      const std::vector<double> g = t.grad().ToVector<double>();
      all.insert(all.end(), g.begin(), g.end());
    }
    return all;
  };
  for (const Activation a : {Activation::kRelu, Activation::kGelu, Activation::kSilu}) {
    const std::vector<double> one = run(DeviceMesh::Self(), {}, a);
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      for (const Plan& plan : {Plan{{"", ColwiseParallel()}}, Plan{{"", RowwiseParallel()}}}) {
        EXPECT_THAT(run(DeviceMesh({2}, {"tp"}), plan, a),
                    ::testing::Pointwise(::testing::DoubleNear(1e-5), one));
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// --- local parts ---------------------------------------------------------------------------------

TEST(LocalLayouts, PartsComeInAndGoOut) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    ManualSeed(3);
    Linear layer(4, 6);
    const ParallelOptions parts = {.input = ValueLayout(Shard(-1), /*local=*/true),
                                   .use_local_output = true};
    DT_RETURN_IF_ERROR(
        ParallelizeModule(layer, mesh, {{"", ColwiseParallel(parts)}}, {.warn = false}));
    Materialize(layer);
    const DTensor whole = FromVector(testing::Integers(8, 1), {2, 4});
    DTensor mine = clone(slice(whole, 1, 2 * rank.rank(), 2 * rank.rank() + 2));
    mine.RequiresGrad();
    const DTensor y = layer(mine);
    EXPECT_TRUE(y.mesh().is_self());
    EXPECT_EQ(y.shape(), Shape({2, 3}));
    const DTensor expected = linear(whole, layer.weight().tensor().Detach().FullTensor(),
                                    layer.bias()->tensor().Detach().FullTensor());
    EXPECT_EQ(y.ToVector<double>(),
              slice(expected, 1, 3 * rank.rank(), 3 * rank.rank() + 3).ToVector<double>());
    sum(y).Backward();
    EXPECT_EQ(mine.grad().shape(), Shape({2, 2}));  // its part of the whole's gradient
    EXPECT_EQ(layer(DistributeTensor(whole, mesh, {Replicate()})).ToVector<double>(),
              y.ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Two Linears with local values between them.
struct Pair : Module {
  Linear& up = AddChild<Linear>("up", 8, 10);
  Linear& down = AddChild<Linear>("down", 10, 6);
  Values Forward(const Values& in) override { return {down(up(in[0]))}; }
};
Plan LocalBetween() {
  return {{"up", ColwiseParallel({.use_local_output = true})},
          {"down", RowwiseParallel({.input = ValueLayout(Shard(-1), /*local=*/true)})}};
}
void FillWithIntegers(Module& model) {
  StateDict state;
  for (const NamedParameter& p : model.NamedParameters()) {
    state.emplace_back(
        p.fqn, FromVector(testing::Integers(p.parameter->numel(), 2), p.parameter->shape()));
  }
  model.LoadStateDict(state);
}
DTensor PairInput() { return FromVector(testing::Integers(4 * 8, 3), {4, 8}); }
// Output and gradients of sum(y * y), whole.
std::vector<std::vector<double>> TrainedOnce(Pair& model, const DTensor& x) {
  Materialize(model);
  FillWithIntegers(model);
  const DTensor y = model(x);
  sum(y * y).Backward();
  std::vector<std::vector<double>> all = {y.ToVector<double>()};
  for (const auto& [name, values] : testing::Gather(model, /*gradients=*/true)) {
    all.push_back(values);
  }
  return all;
}

TEST(LocalLayouts, AreSaidOfOtherMeshDimsOrRefused) {
  Pair alone;
  const auto expected = TrainedOnce(alone, PairInput());
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    const DTensor x = DistributeTensor(PairInput(), mesh, {Shard(0), Replicate()});
    const auto why = [&](const NamedLayouts& layouts) {
      Pair model;
      return std::string(
          ParallelizeModule(model, mesh, LocalBetween(), {.local_layouts = layouts}).message());
    };
    EXPECT_THAT(why({{"tp", Shard(0)}}), HasSubstr("styles say what local values are"));
    EXPECT_THAT(why({{"dq", Shard(0)}}), HasSubstr("dq"));
    {
      Pair model;
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, LocalBetween()));
      Materialize(model);
      EXPECT_THAT(testing::MessageOf([&] { model(x); }),
                  AllOf(HasSubstr("down: input 0 is a local tensor"),
                        HasSubstr("nothing says what it is over dp"),
                        HasSubstr("local_layouts = {{\"dp\", Shard(0)}}")));
    }
    // Where all of dp is to hold the same, up's output is brought there before it leaves.
    for (const Placement& on_dp : {Shard(0), Replicate()}) {
      Pair model;
      DT_RETURN_IF_ERROR(
          ParallelizeModule(model, mesh, LocalBetween(), {.local_layouts = {{"dp", on_dp}}}));
      EXPECT_EQ(TrainedOnce(model, x), expected) << on_dp.ToString();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// 10 features on 4 ranks are 3, 3, 3, 1; 7 of a sequence on 2 are 4 and 3.
TEST(LocalLayouts, UnevenPartsAreAsLongAsTogether) {
  Pair alone;
  const auto expected = TrainedOnce(alone, PairInput());
  absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({4}, {"tp"});
    Pair model;
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, LocalBetween()));
    EXPECT_EQ(TrainedOnce(model, DistributeTensor(PairInput(), mesh)), expected);
    // 6 rows on 4 ranks are 2, 2, 2, 0.
    Linear layer(2, 3);
    DT_RETURN_IF_ERROR(ParallelizeModule(
        layer, mesh,
        PrepareModuleInput({.input_layouts = {Shard(0)}, .desired_input_layouts = {Replicate()}})));
    Materialize(layer);
    const DTensor rows = DistributeTensor(ones({6, 2}), mesh, {Shard(0)});
    EXPECT_EQ(layer(rows.ToLocal()).ToVector<double>(), layer(rows).ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    RMSNorm norm(2);
    DT_RETURN_IF_ERROR(ParallelizeModule(norm, mesh, SequenceParallel()));
    Materialize(norm);
    const DTensor x = FromVector(testing::Integers(14, 1), {1, 7, 2});
    const DTensor y = norm(DistributeTensor(x, mesh, {Shard(1)}).ToLocal());
    EXPECT_EQ(y.shape(), Shape({1, 7, 2}));
    EXPECT_EQ(y.ToVector<double>(), norm(DistributeTensor(x, mesh)).ToVector<double>());
    // The larger part last is no Shard: every rank says so.
    const int64_t mine = rank.rank() == 0 ? 3 : 4;
    EXPECT_THAT(testing::MessageOf([&] { norm(ones({1, mine, 2})); }),
                AllOf(HasSubstr("[parallelize_module] the root: input 0, a local tensor: rank 0"),
                      HasSubstr("has a part of shape [1, 3, 2]"), HasSubstr("gives it [1, 4, 2]")));
    EXPECT_EQ(norm(ones({1, 2, 2})).shape(), Shape({1, 4, 2}));  // all goes on
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One token has nothing to share, but sizes tell what a local part is.
TEST(LocalLayouts, OneIndexIsTheFirstRanks) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Linear layer(4, 6);
    const ParallelOptions parts = {.output = ValueLayout(Shard(1), /*local=*/true)};
    DT_RETURN_IF_ERROR(ParallelizeModule(layer, mesh, RowwiseParallel(parts)));
    RMSNorm next(6);
    DT_RETURN_IF_ERROR(ParallelizeModule(next, mesh, SequenceParallel()));
    Materialize(layer);
    Materialize(next);
    const DTensor y = layer(DistributeTensor(ones({2, 1, 4}), mesh, {Shard(2)}));
    EXPECT_EQ(y.shape(), Shape({2, 1 - rank.rank(), 6}));
    const DTensor z = next(y);
    EXPECT_EQ(z.shape(), Shape({2, 1, 6}));
    EXPECT_EQ(z.placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Styles, RefuseWhatTheyWouldIgnore) {
  const DeviceMesh mesh({1}, {"tp"});
  Linear layer(4, 4), other(4, 4);
  Embedding table(4, 4);
  EXPECT_THAT(
      std::string(ParallelizeModule(table, mesh, RowwiseParallel({.segments = {2, 2}})).message()),
      HasSubstr("a vocabulary has none"));
  const ModuleLayout foreign = {.parameters = {{&other.weight(), Shard(0)}}};
  EXPECT_THAT(std::string(ParallelizeModule(layer, mesh, PrepareModule(foreign)).message()),
              HasSubstr("parameter 0 of its layout is weight of another model"));
  EXPECT_TRUE(other.weight().mesh().is_self());
  EXPECT_TRUE(layer.weight().mesh().is_self());
}

// Two column-parallel halves side by side, as a U-Net has them: no move but the sum.
TEST(Styles, RowwiseTakesAConcatenation) {
  struct Joined : Module {
    Linear& a = AddChild<Linear>("a", 4, 6);
    Linear& b = AddChild<Linear>("b", 4, 4);
    Linear& down = AddChild<Linear>("down", 10, 3);
    Values Forward(const Values& x) override { return {down(cat({a(x[0]), b(x[0])}, 1))}; }
  };
  const auto run = [](const DeviceMesh& mesh) {
    Joined model;
    if (!mesh.is_self()) {
      ThrowIfError(ParallelizeModule(
          model, mesh,
          {{"[ab]", ColwiseParallel()}, {"down", RowwiseParallel({.segments = {6, 4}})}}));
    }
    SetDType(model, DType::kF64);
    Materialize(model);
    for (const NamedParameter& p : model.NamedParameters()) {
      p.parameter->Set(FromVector(testing::Integers(p.parameter->numel(), 3), p.parameter->shape(),
                                  {.dtype = DType::kF64}));
    }
    const DTensor x = FromVector(testing::Integers(20, 1), {5, 4}, {.dtype = DType::kF64});
    const StrictRedistribute strict;
    CommTrace trace;
    const DTensor y = model(mesh.is_self() ? x : DistributeTensor(x, mesh, {Replicate()}));
    std::vector<double> all = y.ToVector<double>();
    sum(y * y).Backward();
    if (!mesh.is_self()) {
      EXPECT_EQ(trace.TotalCount(), 1) << trace.ToString();
    }
    for (const NamedParameter& p : model.NamedParameters()) {
      for (const double v : p.parameter->tensor().grad().ToVector<double>()) all.push_back(v);
    }
    return all;
  };
  const std::vector<double> one = run(DeviceMesh::Self());
  for (const int64_t ranks : {2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) {
      EXPECT_EQ(run(DeviceMesh({ranks}, {"tp"})), one) << ranks;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// --- hooks and scopes ----------------------------------------------------------------------------

TEST(BuildHooks, RunOnceAroundWhatTheyBuild) {
  Sequential model;
  Linear& layer = model.Append<Linear>(2, 2);
  std::string order;
  model.AddBuildHook([&](Module&) { order += "a"; });
  layer.AddBuildHook([&](Module& m) {
    EXPECT_FALSE(layer.weight().materialized());
    SetDType(m, DType::kF64);
    order += "b";
  });
  layer.AddBuiltHook([&](Module&) {
    EXPECT_TRUE(layer.bias()->materialized());
    order += "c";
  });
  layer.AddBuiltHook([&](Module&) { order += "d"; });
  model.AddBuiltHook([&](Module&) { order += "e"; });
  Materialize(model);
  Materialize(model);
  EXPECT_EQ(order, "abcde");
  EXPECT_EQ(layer.weight().tensor().dtype(), DType::kF64);
}

TEST(BuildHooks, WhatTheyAddIsMaterialised) {
  struct Grown : Module {
    Grown() {
      AddBuildHook([](Module& m) {
        static_cast<Grown&>(m).AddParameter("scale", {2}, Init::Normal(0, 1));
        for (int i = 0; i < 40; ++i) m.AddBuildHook([](Module&) {});  // where this one lay
      });
      AddBuiltHook([](Module& m) { static_cast<Grown&>(m).AddChild<Linear>("late", 2, 2); });
    }
    Values Forward(const Values& in) override { return in; }
  };
  Sequential all, some;
  for (Sequential* model : {&all, &some}) {
    model->Append<Grown>();
    model->Append<Linear>(2, 2);
  }
  ManualSeed(1);
  Materialize(all);
  EXPECT_EQ(all.Parameters().size(), 5u);
  for (const Parameter* p : all.Parameters()) EXPECT_TRUE(p->materialized()) << p->fqn();
  // One that is passed over counts for the numbers.
  ManualSeed(1);
  Materialize(some, [](const std::string& fqn) { return fqn != "0.scale"; });
  EXPECT_FALSE(some.FindParameter("0.scale")->materialized());
  for (const char* name : {"0.late.weight", "1.weight"}) {
    EXPECT_EQ(some.FindParameter(name)->tensor().ToVector<double>(),
              all.FindParameter(name)->tensor().ToVector<double>());
  }
}

TEST(Hooks, MayAddHooksWhichRunFromTheNextCallOn) {
  Linear layer(2, 2);
  Materialize(layer);
  int before = 0, after = 0;
  layer.AddPreHook([&before, mine = std::string(100, 'x')](Module& m, const Values& in) {
    for (int i = 0; i < 40 && before == 0; ++i) {
      m.AddPreHook([&before](Module&, const Values& values) {
        ++before;
        return values;
      });
    }
    EXPECT_EQ(mine, std::string(100, 'x'));
    return in;
  });
  layer.AddPostHook([&after](Module& m, const Values&, const Values& out) {
    m.AddPostHook([&after](Module&, const Values&, const Values& values) {
      ++after;
      return values;
    });
    return out;
  });
  const DTensor x = ones({1, 2});
  layer(x);
  EXPECT_EQ(before + after, 0);
  layer(x);
  EXPECT_EQ(before, 40);
  EXPECT_EQ(after, 1);
}

TEST(Scopes, DeferredInitLeavesRecipes) {
  struct Eager : Linear {
    Eager() : Linear(2, 2) { Materialize(*this); }
  };
  EXPECT_TRUE(Eager().weight().materialized());
  const auto build = [] {
    const DeferredInit deferred;
    EXPECT_FALSE(Eager().weight().materialized());
    throw std::runtime_error("in the scope");
  };
  EXPECT_THROW(build(), std::runtime_error);
  EXPECT_TRUE(Eager().weight().materialized());  // the scope ended with the exception
}

TEST(Scopes, MaterializeAsSaysDTypeAndDevice) {
  Scaled bf16, meta;
  {
    const MaterializeAs outer(DType::kBF16);
    {
      const MaterializeAs inner({}, DeviceType::kMeta);
      Materialize(meta);
    }
    Materialize(bf16);
  }
  EXPECT_EQ(bf16.gain().tensor().dtype(), DType::kBF16);
  EXPECT_EQ(bf16.table().tensor().dtype(), DType::kF32);
  EXPECT_TRUE(bf16.gain().tensor().mesh().is_self());
  EXPECT_EQ(meta.gain().tensor().dtype(), DType::kBF16);
  EXPECT_EQ(meta.gain().tensor().mesh().device(), DeviceType::kMeta);
  EXPECT_EQ(meta(ones({3, 4}, {.mesh = meta.gain().mesh()})).shape(), Shape({3, 4}));
  Scaled later;
  Materialize(later);
  EXPECT_EQ(later.gain().tensor().dtype(), DType::kF32);
  EXPECT_THAT(MessageOf([] { MaterializeAs(DType::kI64); }), HasSubstr("floating"));
}

// Nothing of it is placed, not even what has values.
TEST(Scopes, WhatIsOnMetaIsNamedWhereValuesAreWanted) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    Sequential model;
    Linear& real = model.Append<Linear>(2, 2);
    Linear& meta = model.Append<Linear>(2, 2, /*bias=*/false);
    Materialize(real);
    {
      const MaterializeAs scope({}, DeviceType::kMeta);
      Materialize(meta);
    }
    EXPECT_THAT(DistributeModule(model, DeviceMesh({2}, {"dp"})).ToString(),
                AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("parameter 1.weight: was "),
                      HasSubstr("has no values for dp=2; place it before Materialize")));
    EXPECT_TRUE(real.weight().mesh().is_self());
    EXPECT_THAT(testing::MessageOf([&] { meta.weight().Set(ones({2, 2})); }),
                HasSubstr("parameter 1.weight was materialised on meta and holds no values"));
    const SGD optimizer(model.NamedParameters());
    EXPECT_THAT(SaveCheckpoint("nowhere", model, optimizer, {}).status().ToString(),
                AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("1.weight is on meta")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ModuleErrors, SayInWhichModule) {
  Sequential model;
  Sequential& inner = model.Append<Sequential>();
  inner.Append<Linear>(3, 4);
  inner.Append<Linear>(5, 2);
  Materialize(model);
  EXPECT_THAT(testing::MessageOf([&] { model(ones({2, 3})); }),
              AllOf(HasSubstr("[linear]"), HasSubstr("(rank 0 of 1, in module 0.1)")));
  EXPECT_THAT(testing::MessageOf([] { matmul(ones({2, 3}), ones({2, 3})); }),
              HasSubstr("(rank 0 of 1)"));
}

}  // namespace
}  // namespace dtensor::module_parts_test
