// Optimizer states in layouts of their own: float32 masters of bfloat16 parameters, in flat pieces
// over dp, on other meshes; what is added up in which dtype; what it communicates.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::optim_state_test {
namespace {

using ::testing::HasSubstr;
using testing::MessageOf;
using ::testing::Not;

// Odd sizes: neither 2, 3 nor 4 pieces are even. Gradients do not depend on parameters: they stay
// whole numbers.
class Net : public Module {
 public:
  Net() : in_(AddChild<Linear>("in", 5, 3)), out_(AddChild<Linear>("out", 5, 1)) {}

 protected:
  Values Forward(const Values& in) override { return {in_(in[0]) + out_(in[0])}; }

 private:
  Linear &in_, &out_;
};

// On a mesh named dp, or on Self, with whole numbers in all parameters.
std::unique_ptr<Net> Make(const DeviceMesh& mesh, DType dtype) {
  auto net = std::make_unique<Net>();
  SetDType(*net, dtype);
  if (!mesh.is_self()) ThrowIfError(DistributeModule(*net, mesh));
  Materialize(*net);
  int64_t seed = 0;
  for (Parameter* p : net->Parameters()) {
    p->Set(FromVector(testing::Integers(p->numel(), ++seed), p->shape(), {.dtype = dtype}));
  }
  return net;
}

// Gradients of whole numbers, on a mesh as sums over the ranks' rows.
void Backward(Net& net, const DeviceMesh& mesh, DType dtype, int64_t seed) {
  const DTensor x = FromVector(testing::Integers(12 * 5, seed), {12, 5}, {.dtype = dtype});
  const Placements rows(mesh.ndim(), Shard(0));
  sum(net(mesh.is_self() ? x : DistributeTensor(x, mesh, rows))).Backward();
}

StateLayout MasterOnSelf(const Parameter& p) { return {DType::kF32, p.mesh(), p.placements()}; }

using Trajectory = std::vector<testing::NamedValues>;

testing::NamedValues Values64(const StateDict& state) {
  testing::NamedValues all;
  for (const auto& [name, value] : state) all.emplace_back(name, value.ToVector<double>());
  return all;
}

// Parameters and states after each of three steps.
template <class O, class Options>
Trajectory Train(const DeviceMesh& mesh, const Options& options, const StateLayoutFn& layout) {
  const DType dtype = DType::kBF16;
  const std::unique_ptr<Net> net = Make(mesh, dtype);
  O optim(net->NamedParameters(), options, layout);
  Trajectory all;
  for (int64_t step = 0; step < 3; ++step) {
    for (int64_t micro = 0; micro < 2; ++micro) Backward(*net, mesh, dtype, 7 * step + micro);
    optim.Step();
    optim.ZeroGrad();
    all.push_back(testing::Gather(*net));
    all.push_back(Values64(optim.GetStateDict()));
  }
  return all;
}

TEST(OptimizerState, FlatMastersGiveTheBitsOfTheUnshardedComputation) {
  const AdamWOptions adamw = {.lr = 0.01, .amsgrad = true};
  const SGDOptions sgd = {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1};
  const Trajectory one = Train<AdamW>(DeviceMesh::Self(), adamw, MasterOnSelf);
  const Trajectory one_sgd = Train<SGD>(DeviceMesh::Self(), sgd, MasterOnSelf);
  EXPECT_EQ(one[1][3].first, "in.weight/master");
  EXPECT_NE(one[1][3].second, one[0][0].second);  // the parameter is a rounding of it
  for (const int64_t ranks : {1, 2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({ranks}, {"dp"});
      EXPECT_TRUE(Train<AdamW>(mesh, adamw, FlatState("dp")) == one) << ranks;
      EXPECT_TRUE(Train<SGD>(mesh, sgd, FlatState("dp")) == one_sgd) << ranks;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Of equal gradients: whatever the parameters are rounded to, masters go the way of float32 ones.
TEST(OptimizerState, MastersAreWhatFloat32ParametersWouldBe) {
  const DeviceMesh self = DeviceMesh::Self();
  const auto narrow = Make(self, DType::kBF16), wide = Make(self, DType::kF32);
  AdamW with_masters(narrow->NamedParameters(), {.lr = 0.01}, MasterOnSelf);
  AdamW plain(wide->NamedParameters(), {.lr = 0.01});
  for (int64_t step = 0; step < 3; ++step) {
    Backward(*narrow, self, DType::kBF16, step);
    Backward(*wide, self, DType::kF32, step);
    with_masters.Step();
    plain.Step();
  }
  const testing::NamedValues states = Values64(with_masters.GetStateDict());
  for (const auto& [name, values] : testing::Gather(*wide)) {
    const auto is_master = [&](const auto& s) { return s.first == name + "/master"; };
    const auto master = std::find_if(states.begin(), states.end(), is_master);
    ASSERT_NE(master, states.end());
    EXPECT_EQ(master->second, values) << name;
  }
}

TEST(OptimizerState, APieceIsWhatARankHoldsAndMoves) {
  const absl::Status status = RunSpmd(4, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({4}, {"dp"});
    const std::unique_ptr<Net> net = Make(mesh, DType::kBF16);
    AdamW optim(net->NamedParameters(), {}, FlatState("dp"));
    const DTensor x = zeros({12, 5}, {DType::kBF16, mesh, {Shard(0)}});
    const absl::StatusOr<ModuleExplanation> told = Explain(*net, {x});
    CommTrace trace;
    Backward(*net, mesh, DType::kBF16, 1);
    EXPECT_EQ(told->totals.size(), trace.Rows().size());
    for (size_t i = 0; i < told->totals.size(); ++i) {
      EXPECT_EQ(told->totals[i].bytes, trace.Rows()[i].bytes);
    }
    int64_t held = 0;
    for (const Parameter* p : net->Parameters()) held += 4 * p->tensor().grad().local().numel();
    EXPECT_EQ(told->gradient_bytes, held);
    const DTensor grad = net->FindParameter("in.weight")->tensor().grad();
    EXPECT_EQ(grad.dtype(), DType::kF32);
    EXPECT_EQ(grad.placements()[0], FlatShard({4, 4, 4, 3}));
    optim.Step();
    for (const CommRow& row : trace.Rows()) {
      EXPECT_NE(row.kind, CollectiveKind::kAllReduce);  // terms are summed where they are kept
    }
    const StateDict state = optim.GetStateDict();
    EXPECT_EQ(state[0].first, "in.weight/exp_avg");
    EXPECT_EQ(state[0].second.local().numel(), rank.rank() < 3 ? 4 : 3);
    EXPECT_EQ(state[0].second.dtype(), DType::kF32);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of many parameters a step has so many new values on their way, and not a second model.
TEST(OptimizerState, NewValuesComeAFewAtATime) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    constexpr int64_t kCount = 600, kSize = 64, kBytes = kSize * kSize * 4;
    const DeviceMesh mesh({2}, {"dp"});
    Sequential layers;
    for (int i = 0; i < kCount; ++i) layers.Append<Linear>(kSize, kSize, false, Init::Ones());
    DT_RETURN_IF_ERROR(DistributeModule(layers, mesh));
    Materialize(layers);
    SGD optim(layers.NamedParameters(), {.lr = 1}, FlatState("dp"));
    DTensor loss;
    for (Parameter* p : layers.Parameters()) {
      const DTensor term = sum(p->tensor());
      loss = loss.defined() ? loss + term : term;
    }
    loss.Backward();
    const int64_t before = rank.device_allocator()->stats().in_use_bytes;
    rank.device_allocator()->ResetPeak();
    optim.Step();
    // What is updated, and what peers have not come for yet.
    const int64_t pieces = kCount * kBytes / 2, waiting = 250 * kBytes;
    EXPECT_LE(rank.device_allocator()->stats().peak_bytes - before, pieces + waiting);
    for (Parameter* p : layers.Parameters()) {
      EXPECT_EQ(p->tensor().ToVector<double>(), std::vector<double>(kSize * kSize, 0));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// 1 + 64 * 2^-9: bfloat16 forgets every term but the first.
TEST(OptimizerState, MicrobatchesAndRanksAreAddedUpInTheStatesType) {
  const auto gradient = [](const DeviceMesh& mesh, std::optional<DType> reduce) {
    Net net;
    SetDType(net, DType::kBF16);
    if (!mesh.is_self()) ThrowIfError(DistributeModule(net, mesh));
    Materialize(net);
    AdamW optim(net.NamedParameters(), {}, [&](const Parameter& p) {
      return StateLayout{DType::kF32, p.mesh(), p.placements(), reduce};
    });
    const DTensor& bias = net.FindParameter("out.bias")->tensor();
    for (int i = 0; i < 65; ++i) {
      const double by = i == 0 ? 1 : 0x1p-9;
      const DTensor c = FromVector<double>({by, 0, 0, 0}, {4}, {.dtype = DType::kBF16});
      const Placements cut(mesh.ndim(), Shard(0));
      sum((mesh.is_self() ? c : DistributeTensor(c, mesh, cut)) * bias).Backward();
    }
    EXPECT_EQ(bias.grad().dtype(), reduce.value_or(DType::kF32));
    return bias.grad().Item();
  };
  EXPECT_EQ(gradient(DeviceMesh::Self(), {}), 1.125);
  EXPECT_EQ(gradient(DeviceMesh::Self(), DType::kBF16), 1);
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    EXPECT_EQ(gradient(DeviceMesh({2}, {"dp"}), {}), 1.125);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A parameter gets other leaves after the optimizer was made, and was frozen when it was: its
// gradients are added up in float32, in the rank's flat piece, all the same.
TEST(OptimizerState, GradientsHaveItsLayoutWhateverLeafThereIs) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    const std::vector<std::pair<const char*, std::function<void(Parameter&)>>> changes = {
        {"none", [](Parameter&) {}},
        {"other values", [](Parameter& p) { p.Take(clone(p.tensor().Detach())); }},
        {"frozen for a while",
         [](Parameter& p) {
           p.RequiresGrad(false);
           p.RequiresGrad(true);
         }},
        {"elsewhere and back", [&](Parameter& p) {
           p.Place(mesh, {Shard(0)});
           p.Place(mesh, {Replicate()});
         }}};
    for (const auto& [name, change] : changes) {
      for (const bool frozen : {false, true}) {
        const std::unique_ptr<Net> net = Make(mesh, DType::kBF16);
        Parameter& weight = *net->FindParameter("in.weight");
        weight.RequiresGrad(!frozen);
        SGD optim(net->NamedParameters(), {.lr = 1}, FlatState("dp"));
        weight.RequiresGrad(true);
        change(weight);
        for (int i = 0; i < 65; ++i) {
          const DTensor by = full({15}, i == 0 ? 256 : 0.5, {.dtype = DType::kBF16, .mesh = mesh});
          sum(reshape(weight.tensor(), {15}) * by).Backward();
        }
        const DTensor grad = weight.tensor().grad();
        EXPECT_EQ(grad.dtype(), DType::kF32) << name;
        EXPECT_TRUE(grad.placements()[0].is_flat()) << name;
        EXPECT_EQ(grad.ToVector<double>(), std::vector<double>(15, 256 + 32)) << name;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An optimizer that is gone does not say any more how gradients are added up, also of a parameter
// that was frozen when the next one was made; what the program itself has said stays.
TEST(OptimizerState, TheLastOptimizerSaysHowGradientsAreKept) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    for (const bool frozen : {false, true}) {
      const std::unique_ptr<Net> net = Make(mesh, DType::kBF16);
      Parameter& weight = *net->FindParameter("in.weight");
      {
        SGD gone(net->NamedParameters(), {.lr = 1}, FlatState("dp"));
      }
      Backward(*net, mesh, DType::kBF16, 1);
      EXPECT_TRUE(weight.tensor().grad().placements()[0].is_flat());
      weight.RequiresGrad(!frozen);
      SGD optim(net->NamedParameters(), {.lr = 1});
      weight.RequiresGrad(true);
      Backward(*net, mesh, DType::kBF16, 2);
      for (const Parameter* p : net->Parameters()) {
        EXPECT_EQ(p->tensor().grad().spec_ref(), p->tensor().spec_ref()) << p->fqn();
      }
      CommTrace trace;
      optim.Step();
      EXPECT_EQ(trace.TotalCount(), 0);
      DTensor(weight.tensor()).SetGradLayout(DType::kF32);
      SGD next(net->NamedParameters(), {.lr = 1});
      EXPECT_EQ(weight.tensor().grad().dtype(), DType::kF32);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// 300 times one: bfloat16 sums end at 256.
TEST(OptimizerState, ATypeOfSumsGoesWithItsOptimizer) {
  Linear layer(1, 1, /*bias=*/false);
  Materialize(layer);
  layer.weight().Set(zeros({1, 1}));
  const auto narrow = [](const Parameter& p) {
    StateLayout layout = LikeParameter(p);
    layout.reduce_dtype = DType::kBF16;
    return layout;
  };
  {
    SGD gone(layer.NamedParameters(), {.lr = 1}, narrow);
  }
  SGD optim(layer.NamedParameters(), {.lr = 1});
  for (int i = 0; i < 300; ++i) sum(layer.weight().tensor()).Backward();
  optim.Step();
  EXPECT_EQ(layer.weight().tensor().Item(), -300);
}

TEST(OptimizerState, FlatStatesHaveNoFewerBitsThanParameters) {
  const double value = 1 + 0x1p-40;
  const auto after = [&](DType dtype, const StateLayoutFn& layout, DType state) {
    Linear layer(1, 1, /*bias=*/false);
    SetDType(layer, dtype);
    Materialize(layer);
    layer.weight().Set(full({1, 1}, value, {.dtype = dtype}));
    AdamW optim(layer.NamedParameters(), {.lr = 0}, layout);
    sum(layer.weight().tensor()).Backward();
    optim.Step();
    EXPECT_EQ(optim.GetStateDict()[0].second.dtype(), state);
    return layer.weight().tensor().Item();
  };
  EXPECT_EQ(after(DType::kF64, FlatState(), DType::kF64), value);
  EXPECT_EQ(after(DType::kF32, FlatState(), DType::kF32), 1);
  EXPECT_EQ(after(DType::kBF16, FlatState(), DType::kF32), 1);
  EXPECT_EQ(after(DType::kF64, FlatState("dp", DType::kF32), DType::kF32), 1);  // as is asked for
}

// A column-parallel layer on dp x tp: dp pieces of what tp leaves; and states on one mesh of all.
TEST(OptimizerState, BesideTensorParallelAndOnAnotherMesh) {
  const auto train = [](const DeviceMesh& mesh, const StateLayoutFn& layout) -> Trajectory {
    Linear layer(5, 4);
    if (!mesh.is_self()) {
      EXPECT_TRUE(ParallelizeModule(layer, mesh, {{"", ColwiseParallel()}}).ok());
    }
    Materialize(layer);
    layer.weight().Set(FromVector(testing::Integers(20, 1), {4, 5}));
    layer.bias()->Set(FromVector(testing::Integers(4, 2), {4}));
    AdamW optim(layer.NamedParameters(), {.lr = 0.1}, layout);
    Trajectory all;
    for (int64_t step = 0; step < 2; ++step) {
      const DTensor x = FromVector(testing::Integers(20, step), {4, 5});
      const Placements rows = {Shard(0), Replicate()};
      sum(layer(mesh.is_self() ? x : DistributeTensor(x, mesh, rows))).Backward();
      optim.Step();
      optim.ZeroGrad();
      all.push_back(testing::Gather(layer));
    }
    return all;
  };
  const Trajectory one = train(DeviceMesh::Self(), LikeParameter);
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2), flat({4}, {"all"});
    EXPECT_EQ(train(mesh, FlatState("dp")), one);
    EXPECT_EQ(
        train(mesh, [&](const Parameter&) { return StateLayout{DType::kF32, flat, {Shard(0)}}; }),
        one);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Parts of 2 and 1 rows have no common lengths.
TEST(OptimizerState, PartsOfUnlikeSizeStayWhole) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    Linear layer(2, 3);
    DT_RETURN_IF_ERROR(
        ParallelizeModule(layer, testing::DpTp(2, 2), {{"", ColwiseParallel()}}, {.warn = false}));
    Materialize(layer);
    const StateLayout state = FlatState("dp")(layer.weight());
    EXPECT_EQ(state.placements[0], Replicate());
    EXPECT_EQ(state.placements[1], Shard(0));
    EXPECT_EQ(FlatState("pp")(layer.weight()).placements[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OptimizerState, MastersGoThroughStateDicts) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({3}, {"dp"});
    const DType dtype = DType::kBF16;
    const auto a = Make(mesh, dtype), b = Make(mesh, dtype);
    AdamW first(a->NamedParameters(), {.lr = 0.01}, FlatState("dp"));
    Backward(*a, mesh, dtype, 1);
    first.Step();
    // Another layout there.
    AdamW second(b->NamedParameters(), {.lr = 0.01}, MasterOnSelf);
    b->LoadStateDict(a->GetStateDict());
    second.LoadStateDict(first.GetStateDict());
    for (Optimizer* o : std::initializer_list<Optimizer*>{&first, &second}) o->ZeroGrad();
    Backward(*a, mesh, dtype, 2);
    Backward(*b, mesh, dtype, 2);
    first.Step();
    second.Step();
    EXPECT_EQ(testing::Gather(*a), testing::Gather(*b));
    EXPECT_EQ(Values64(first.GetStateDict()), Values64(second.GetStateDict()));
    StateDict lacking = first.GetStateDict();
    lacking.erase(lacking.begin() + 2);
    EXPECT_THAT(MessageOf([&] { second.LoadStateDict(lacking); }),
                HasSubstr("in.weight needs both step and master"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OptimizerState, StepsThatAreNoneAndStatesGivenTwiceAreNamed) {
  const auto net = Make(DeviceMesh::Self(), DType::kF32);
  AdamW optim(net->NamedParameters(), {.lr = 0.01});
  SGD plain(net->NamedParameters());  // its only state is the step
  Backward(*net, DeviceMesh::Self(), DType::kF32, 1);
  optim.Step();
  plain.Step();
  const StateDict good = optim.GetStateDict();
  const auto message = [&](const DTensor& step) {
    StateDict state = good;
    for (auto& [name, value] : state) {
      if (name == "in.weight/step") value = step;
    }
    return MessageOf([&] { optim.LoadStateDict(state); });
  };
  const TensorOptions f64 = {.dtype = DType::kF64};
  for (const double no_step : {2.5, -3.0, std::nan(""), 1e30}) {
    EXPECT_THAT(message(full({}, no_step, f64)),
                HasSubstr(absl::StrCat("nothing was loaded: in.weight/step is ", no_step,
                                       ", must be one whole number, 0 or more")));
  }
  EXPECT_THAT(message(ones({2})), HasSubstr("in.weight/step is [2], must be one whole number"));
  EXPECT_THAT(message(DTensor()), HasSubstr("in.weight/step is null"));
  EXPECT_THAT(MessageOf([&] { plain.LoadStateDict({{"in.weight/step", full({}, -3.0, f64)}}); }),
              HasSubstr("in.weight/step is -3"));
  StateDict twice = good;
  twice.emplace_back("in.weight/exp_avg", good[0].second);
  twice.emplace_back("in.weight/step", full({}, 9.0, f64));
  EXPECT_THAT(
      MessageOf([&] { optim.LoadStateDict(twice); }),
      HasSubstr("nothing was loaded: in.weight/exp_avg is there twice; in.weight/step is there"));
  // What is wrong with one state is all that is wrong with its parameter.
  StateDict misshapen = good;
  misshapen[0].second = ones({1});
  EXPECT_THAT(MessageOf([&] { optim.LoadStateDict(misshapen); }),
              Not(HasSubstr("in.weight needs both")));
  EXPECT_EQ(Values64(optim.GetStateDict()), Values64(good));
  EXPECT_EQ(plain.StepCounts()[0], 1);
}

// States are kept and loaded by name: of two models with one name a state would go astray.
TEST(OptimizerState, TwoParametersOfOneNameAreRefused) {
  const auto a = Make(DeviceMesh::Self(), DType::kF32), b = Make(DeviceMesh::Self(), DType::kF32);
  std::vector<NamedParameter> both = a->NamedParameters();
  for (const NamedParameter& p : a->NamedParameters()) both.push_back(p);  // the same ones
  AdamW once(both);
  for (const NamedParameter& p : b->NamedParameters()) both.push_back(p);
  EXPECT_THAT(MessageOf([&] { AdamW{both}; }),
              HasSubstr("two parameters are called \"in.weight\""));
  for (size_t i = both.size() - b->NamedParameters().size(); i < both.size(); ++i) {
    both[i].fqn = "b." + both[i].fqn;
  }
  AdamW{both};
}

TEST(OptimizerState, AParameterBroughtToAMeshAfterwardsIsNamed) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const auto net = Make(DeviceMesh::Self(), DType::kF32);
    SGD optim(net->NamedParameters());
    const DeviceMesh mesh({2}, {"dp"});
    DT_RETURN_IF_ERROR(DistributeModule(*net, mesh));
    Backward(*net, mesh, DType::kF32, 1);
    EXPECT_THAT(MessageOf([&] { optim.Step(); }),
                HasSubstr("[optimizer] in.weight is on mesh dp=2, its state on self: make the "
                          "optimizer after ParallelizeModule or DistributeModule"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An update that throws is none: bias corrections of the next one are those of the first.
TEST(OptimizerState, AnUpdateThatFailsIsNotCounted) {
  struct Failing : Optimizer {
    explicit Failing(const std::vector<NamedParameter>& p)
        : Optimizer(p, 1, {"m"}, LikeParameter) {}
    void Update(const Batch& batch) override {
      steps.insert(steps.end(), batch.steps.begin(), batch.steps.end());
      if (fails) Throw(absl::InternalError("no update"));
    }
    bool fails = true;
    std::vector<int64_t> steps;
  };
  const auto net = Make(DeviceMesh::Self(), DType::kF32);
  Failing optim(net->NamedParameters());
  Backward(*net, DeviceMesh::Self(), DType::kF32, 1);
  EXPECT_THAT(MessageOf([&] { optim.Step(); }), HasSubstr("no update"));
  EXPECT_EQ(optim.StepCounts(), std::vector<int64_t>(optim.StepCounts().size(), 0));
  optim.fails = false;
  optim.Step();
  for (const int64_t step : optim.steps) EXPECT_EQ(step, 1);
  EXPECT_EQ(optim.StepCounts(), std::vector<int64_t>(optim.StepCounts().size(), 1));
}

TEST(OptimizerState, LayoutsThatDoNotFitAreNamed) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const auto net = Make(DeviceMesh({2}, {"dp"}), DType::kF32);
    const auto message = [&](DType dtype, const Placement& placement) {
      return MessageOf([&] {
        SGD(net->NamedParameters(), {},
            [&](const Parameter& p) { return StateLayout{dtype, p.mesh(), {placement}}; });
      });
    };
    EXPECT_THAT(message(DType::kF32, Shard(3)), HasSubstr("the state layout of in.weight"));
    EXPECT_THAT(message(DType::kF32, Partial()), HasSubstr("a state is not a pending sum"));
    EXPECT_THAT(message(DType::kI64, Replicate()), HasSubstr("a state is floating"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(GradLayout, WhatIsThereMovesAndErrorsAreNamed) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor leaf = ones({3}, {.dtype = DType::kBF16, .mesh = mesh});
    EXPECT_THAT(MessageOf([&] { leaf.SetGradLayout(DType::kF32); }), HasSubstr("only a leaf"));
    leaf.RequiresGrad();
    sum(leaf * 2).Backward();
    leaf.SetGradLayout(DType::kF32, {Shard(0)});
    sum(leaf * 3).Backward();
    EXPECT_EQ(leaf.grad().dtype(), DType::kF32);
    EXPECT_EQ(leaf.grad().placements()[0], Shard(0));
    EXPECT_EQ(leaf.grad().ToVector<double>(), std::vector<double>(3, 5));
    EXPECT_THAT(MessageOf([&] { leaf.SetGradLayout(DType::kI64); }), HasSubstr("floating"));
    EXPECT_THAT(MessageOf([&] { leaf.SetGradLayout(DType::kF32, {Partial()}); }),
                HasSubstr("pending sum"));
    EXPECT_THAT(MessageOf([&] { leaf.SetGradLayout(DType::kF32, {Shard(1)}); }), HasSubstr("dim"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ClipGradients, WaitsForNothingAndLeavesSmallGradientsAsTheyAre) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({3}, {"dp"});
    const auto net = Make(mesh, DType::kBF16);
    AdamW optim(net->NamedParameters(), {}, FlatState("dp"));
    Backward(*net, mesh, DType::kBF16, 1);
    const testing::NamedValues before = testing::Gather(*net, /*gradients=*/true);
    double squares = 0;
    for (const auto& [name, values] : before) {
      for (const double v : values) squares += v * v;
    }
    CommTrace trace;
    const DTensor norm = ClipGradients(net->NamedParameters(), 1e9);
    EXPECT_EQ(trace.TotalCount(), 1);
    EXPECT_EQ(norm.Item(), std::sqrt(squares));  // each piece once
    EXPECT_EQ(testing::Gather(*net, true), before);
    ClipGradients(net->NamedParameters(), std::sqrt(squares) / 2);
    EXPECT_NEAR(ClipGradNorm(net->NamedParameters(), 1e9), std::sqrt(squares) / 2, 1e-4);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::optim_state_test
