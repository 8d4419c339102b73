// Optimizers and clipping against torch's samples, whole and in shards; their errors.
#include "dtensor/parallel/optim/optim.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/plan.h"
#include "tests/common/torch_samples.h"
#include "tests/parallel/support.h"

namespace dtensor::optim_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Json;
using testing::MessageOf;
using testing::TorchSamples;

Tensor Stored(const Json& key) { return TorchSamples::All().Get(key.get<std::string>()); }
const Json& Samples(const std::string& call) {
  for (const Json& op : TorchSamples::All().ops()) {
    if (op.at("call").get<std::string>() == call) return op.at("samples");
  }
  throw std::runtime_error("no samples of " + call);
}

// A mesh, and by mesh dim the dim of a parameter that is cut there (-1: none).
struct Layout {
  Dims mesh, cuts;

  // Of tensors without that dim: whole.
  Placements Of(const Tensor& t) const {
    Placements placements;
    for (const int64_t d : cuts) {
      placements.push_back(d >= 0 && d < t.ndim() ? Shard(static_cast<int>(d)) : Replicate());
    }
    return placements;
  }
};
// Sizes are 5, 4 x 2, 3 x 4, 1 x 3, 0 x 2 and none: most do not divide, and ranks have nothing.
const std::vector<Layout>& Layouts() {
  static const auto& all = *new std::vector<Layout>{
      {{2}, {0}},       {{3}, {0}},       {{3}, {1}},        {{2}, {-1}},      {{2, 2}, {0, 1}},
      {{2, 2}, {0, 0}}, {{2, 2}, {1, 0}}, {{2, 2}, {-1, 0}}, {{2, 2}, {1, -1}}};
  return all;
}

// run(mesh, layout) on one rank, and on the ranks of every layout.
template <class Run>
void OnAllLayouts(const Run& run) {
  run(DeviceMesh::Self(), Layout());
  for (const Layout& layout : Layouts()) {
    SCOPED_TRACE(absl::StrCat("mesh ", ToString(layout.mesh), ", cuts ", ToString(layout.cuts)));
    const absl::Status status = RunSpmd(Numel(layout.mesh), [&](RankContext&) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(layout.mesh));
      run(mesh, layout);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Parameters p0, p1, ... with the values of tensors.
class Bag : public Module {
 public:
  Bag(const std::vector<Tensor>& values, const DeviceMesh& mesh, const Layout& layout = {}) {
    for (size_t i = 0; i < values.size(); ++i) {
      Parameter& p =
          AddParameter(absl::StrCat("p", i), values[i].shape(), Init::Zeros(), values[i].dtype());
      p.Place(mesh, layout.Of(values[i]));
      p.Materialize();
      p.Set(OnSelf(values[i]));
    }
  }

 protected:
  Values Forward(const Values& in) override { return in; }
};

std::vector<Tensor> Tensors(const Json& keys) {
  std::vector<Tensor> all;
  for (const Json& key : keys) {
    all.push_back(key.is_null() ? Tensor() : Stored(key));
  }
  return all;
}

void SetGrads(Bag& bag, const std::vector<Tensor>& grads) {
  const auto named = bag.NamedParameters();
  for (size_t i = 0; i < grads.size(); ++i) {
    DTensor leaf = named[i].parameter->tensor();
    if (!grads[i].defined()) {
      leaf.ZeroGrad();
    } else {
      leaf.SetGrad(DistributeTensor(grads[i], leaf.mesh(), leaf.placements()));
    }
  }
}

void ExpectMatch(const DTensor& got, const std::string& key, const Json& f64,
                 const std::string& what) {
  testing::MatchRule rule;
  if (f64.is_string()) rule.f64 = Stored(f64);
  EXPECT_EQ(testing::Differs(got.FullTensor().local(), Stored(key), rule), "") << what;
}

std::unique_ptr<Optimizer> Make(const std::string& call, const Bag& bag, const Json& h) {
  if (call == "torch.optim.SGD") {
    return std::make_unique<SGD>(bag.NamedParameters(),
                                 SGDOptions{.lr = h.at("lr"),
                                            .momentum = h.at("momentum"),
                                            .dampening = h.at("dampening"),
                                            .weight_decay = h.at("weight_decay"),
                                            .nesterov = h.at("nesterov"),
                                            .maximize = h.at("maximize")});
  }
  if (call == "torch.optim.Adagrad") {
    return std::make_unique<Adagrad>(
        bag.NamedParameters(),
        AdagradOptions{.lr = h.at("lr"),
                       .lr_decay = h.at("lr_decay"),
                       .weight_decay = h.at("weight_decay"),
                       .initial_accumulator_value = h.at("initial_accumulator_value"),
                       .eps = h.at("eps"),
                       .maximize = h.at("maximize")});
  }
  if (call == "torch.optim.RMSprop") {
    return std::make_unique<RMSprop>(bag.NamedParameters(),
                                     RMSpropOptions{.lr = h.at("lr"),
                                                    .alpha = h.at("alpha"),
                                                    .eps = h.at("eps"),
                                                    .weight_decay = h.at("weight_decay"),
                                                    .momentum = h.at("momentum"),
                                                    .centered = h.at("centered"),
                                                    .maximize = h.at("maximize")});
  }
  const AdamWOptions w = {.lr = h.at("lr"),
                          .beta1 = h.at("betas")[0],
                          .beta2 = h.at("betas")[1],
                          .eps = h.at("eps"),
                          .weight_decay = h.at("weight_decay"),
                          .amsgrad = h.at("amsgrad"),
                          .maximize = h.at("maximize")};
  if (call == "torch.optim.AdamW") return std::make_unique<AdamW>(bag.NamedParameters(), w);
  return std::make_unique<Adam>(
      bag.NamedParameters(), AdamOptions{w.lr, w.beta1, w.beta2, w.eps, w.weight_decay, w.amsgrad,
                                         w.maximize, h.value("decoupled_weight_decay", false)});
}

void LoadState(Optimizer& optim, const Json& states) {
  StateDict state;
  for (size_t p = 0; p < states.size(); ++p) {
    bool has_step = false;
    for (const auto& [name, key] : states[p].items()) {
      const std::string full_name = absl::StrCat("p", p, "/", name);
      if (name == "step") {
        has_step = true;
        const double step = key.is_string() ? Stored(key).ToVector<double>()[0] : key.get<double>();
        state.emplace_back(full_name, full({}, step, {.dtype = DType::kF64}));
      } else {
        state.emplace_back(full_name, OnSelf(Stored(key)));
      }
    }
    if (!has_step)
      state.emplace_back(absl::StrCat("p", p, "/step"), full({}, 1.0, {.dtype = DType::kF64}));
  }
  optim.LoadStateDict(state);
}

// The number of updates that a state of torch's says.
double StepOf(const Json& state) {
  const Json step = state.value("step", Json());
  return step.is_string()   ? Stored(step).ToVector<double>()[0]
         : step.is_number() ? step.get<double>()
                            : -1;
}

void RunSample(const std::string& call, const Json& s, const DeviceMesh& mesh,
               const Layout& layout) {
  const std::string id = s.at("id").get<std::string>();
  Bag bag(Tensors(s.at("params")), mesh, layout);
  std::unique_ptr<Optimizer> optim = Make(call, bag, s.at("hyper"));
  if (s.contains("state_in") && !s["state_in"].is_null()) LoadState(*optim, s["state_in"]);
  const auto named = bag.NamedParameters();
  for (size_t step = 0; step < s.at("steps").size(); ++step) {
    SetGrads(bag, Tensors(s.at("grads_in")[step]));
    optim->Step();
    const Json& want = s["steps"][step];
    const Json f64 = s.contains("steps_f64") ? s["steps_f64"][step] : Json();
    std::map<std::string, DTensor> state;
    for (const auto& [name, value] : optim->GetStateDict()) state[name] = value;
    for (size_t p = 0; p < named.size(); ++p) {
      const std::string what = absl::StrCat(id, " step ", step, " parameter ", p);
      ExpectMatch(named[p].parameter->tensor(), want.at("params")[p].get<std::string>(),
                  f64.is_null() ? Json() : f64.at("params")[p], what);
      for (const auto& [name, key] : want.at("state")[p].items()) {
        if (name == "step" || !key.is_string()) continue;
        const auto found = state.find(absl::StrCat("p", p, "/", name));
        if (found == state.end()) {  // begins with the first update; torch's may be there before
          EXPECT_EQ(StepOf(want.at("state")[p]), 0) << what << " has no " << name;
          continue;
        }
        ExpectMatch(found->second, key.get<std::string>(), Json(), what + " " + name);
      }
    }
  }
}

TEST(Optimizers, MatchTorch) {
  int64_t samples = 0;
  for (const char* call : {"torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW",
                           "torch.optim.Adagrad", "torch.optim.RMSprop"}) {
    for (const Json& s : Samples(call)) {
      OnAllLayouts(
          [&](const DeviceMesh& mesh, const Layout& layout) { RunSample(call, s, mesh, layout); });
      ++samples;
    }
  }
  std::printf("%lld samples of 3 steps each, on one rank and in %zu layouts\n",
              static_cast<long long>(samples), Layouts().size());
  EXPECT_GE(samples, 34);
}

TEST(ClipGradNorm, MatchesTorch) {
  int64_t samples = 0;
  for (const Json& s : Samples("torch.nn.utils.clip_grad_norm_")) {
    std::vector<std::string> keys;
    for (const Json& t : s.at("args")[0]) keys.push_back(t.at("tensor").get<std::string>());
    const double max_norm = s.at("args")[1];
    const Json kind = s.at("kwargs").value("norm_type", Json(2.0));
    const double norm_type = kind.is_string() ? HUGE_VAL : kind.get<double>();
    OnAllLayouts([&](const DeviceMesh& mesh, const Layout& layout) {
      std::vector<Tensor> grads = Tensors(Json(keys));
      Bag bag(grads, mesh, layout);
      SetGrads(bag, grads);
      const double norm = ClipGradNorm(bag.NamedParameters(), max_norm, norm_type);
      const Tensor want = Stored(s.at("outputs")[0]);
      const Tensor got = ValueOrThrow(Tensor::Full({}, want.dtype(), norm));
      EXPECT_EQ(testing::Differs(got, want, {}), "") << s.at("id") << " norm";
      for (size_t i = 0; i < grads.size(); ++i) {
        ExpectMatch(bag.NamedParameters()[i].parameter->tensor().grad(),
                    s.at("outputs")[i + 1].get<std::string>(), Json(),
                    absl::StrCat(s.at("id").get<std::string>(), " gradient ", i));
      }
    });
    ++samples;
  }
  EXPECT_GE(samples, 6);
}

TEST(ClipGradNorm, IsOneAllReduceAndCountsEachElementOnce) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    Linear layer(2, 3, /*bias=*/true);
    layer.weight().Place(mesh, {Replicate(), Shard(0)});
    layer.bias()->Place(mesh, {Replicate(), Replicate()});
    Materialize(layer);
    for (const NamedParameter& p : layer.NamedParameters()) {
      DTensor leaf = p.parameter->tensor();
      leaf.SetGrad(DistributeTensor(ones(leaf.shape()).local(), mesh, leaf.placements()));
    }
    CommTrace trace;
    EXPECT_DOUBLE_EQ(ClipGradNorm(layer.NamedParameters(), 100), 3);  // sqrt(6 + 3)
    EXPECT_EQ(trace.TotalCount(), 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Optimizers, HalfPrecisionStepsInFloat32) {
  const Tensor start = ValueOrThrow(Tensor::Full({3}, DType::kBF16, 1.0));
  Bag bag({start}, DeviceMesh::Self());
  SetGrads(bag, {ValueOrThrow(Tensor::Full({3}, DType::kBF16, 0.5))});
  SGD(bag.NamedParameters(), {.lr = 0.5}).Step();
  EXPECT_EQ(bag.NamedParameters()[0].parameter->tensor().ToVector<double>(),
            (std::vector<double>{0.75, 0.75, 0.75}));
}

// The decay of Adam may be that of AdamW.
TEST(Optimizers, AdamMayDecayAsAdamWDoes) {
  std::vector<std::vector<double>> results;
  for (const bool adam : {false, true}) {
    const Tensor start = ValueOrThrow(Tensor::Full({3}, DType::kF64, 1.0));
    Bag bag({start}, DeviceMesh::Self());
    SetGrads(bag, {ValueOrThrow(Tensor::Full({3}, DType::kF64, 0.5))});
    if (adam) {
      Adam(bag.NamedParameters(), {.weight_decay = 0.25, .decoupled_weight_decay = true}).Step();
    } else {
      AdamW(bag.NamedParameters(), {.weight_decay = 0.25}).Step();
    }
    results.push_back(bag.NamedParameters()[0].parameter->tensor().ToVector<double>());
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST(ClipGradValues, KeepsEveryElementWithin) {
  OnAllLayouts([](const DeviceMesh& mesh, const Layout& layout) {
    const Tensor grad = ValueOrThrow(
        Tensor::FromVector(std::vector<double>{-3, -0.5, 0, 0.25, 7, HUGE_VAL}, {6}, DType::kF64));
    Bag bag({grad}, mesh, layout);
    SetGrads(bag, {grad});
    ClipGradValues(bag.NamedParameters(), 0.5);
    EXPECT_EQ(bag.NamedParameters()[0].parameter->tensor().grad().ToVector<double>(),
              (std::vector<double>{-0.5, -0.5, 0, 0.25, 0.5, 0.5}));
  });
}

// What GetStateDict gives on a mesh goes into another optimizer there, as a copy.
TEST(Optimizers, StateDictsGoThereAndBackOnAMesh) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Linear a(4, 4), b(4, 4);
    for (Linear* linear : {&a, &b}) {
      DT_RETURN_IF_ERROR(ParallelizeModule(*linear, mesh, {{"", ColwiseParallel()}}));
      ManualSeed(3);
      Materialize(*linear);
    }
    AdamW first(a.NamedParameters()), second(b.NamedParameters());
    const auto step = [](Linear& linear, AdamW& optimizer) {
      optimizer.ZeroGrad();
      sum(linear(ones({2, 4}, {.mesh = linear.weight().mesh()}))).Backward();
      optimizer.Step();
    };
    step(a, first);
    const StateDict state = first.GetStateDict();
    b.LoadStateDict(a.GetStateDict());
    second.LoadStateDict(state);
    const std::vector<double> before = state[0].second.ToVector<double>();
    step(b, second);
    EXPECT_EQ(state[0].second.ToVector<double>(), before);
    step(a, first);
    EXPECT_EQ(testing::Gather(a), testing::Gather(b));
    // In other placements.
    StateDict whole = first.GetStateDict();
    for (auto& [name, value] : whole) {
      if (value.mesh() == mesh) value = value.Redistribute({Replicate()});
    }
    second.LoadStateDict(whole);
    step(a, first);
    step(b, second);
    EXPECT_EQ(testing::Gather(a), testing::Gather(b));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A group's numbers are its parameters' only: as two optimizers would do it, on any mesh.
TEST(Optimizers, GroupsHaveNumbersOfTheirOwn) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const auto is_bias = [](const NamedParameter& p) { return p.fqn == "bias"; };
    Linear a(4, 4), b(4, 4);
    for (Linear* linear : {&a, &b}) {
      DT_RETURN_IF_ERROR(ParallelizeModule(*linear, mesh, {{"", ColwiseParallel()}}));
      ManualSeed(3);
      Materialize(*linear);
    }
    std::vector<NamedParameter> bias, rest;
    for (const NamedParameter& p : b.NamedParameters()) (is_bias(p) ? bias : rest).push_back(p);
    AdamWOptions options = {.lr = 0.25, .weight_decay = 0.5};
    const StateLayoutFn layout = FlatState("tp");
    AdamW grouped(a.NamedParameters(), options, layout,
                  {{is_bias, /*weight_decay=*/0.125, /*lr_scale=*/0.5}, VectorsDoNotDecay()});
    AdamW of_rest(rest, options, layout);
    options.weight_decay = 0.125;
    AdamW of_bias(bias, options, layout);
    const DTensor x = reshape(
        arange(0, 8, 1, {.dtype = DType::kF32, .mesh = mesh, .placements = {Replicate()}}), {2, 4});
    for (const double lr : {0.25, 0.0625}) {
      grouped.set_lr(lr);
      of_rest.set_lr(lr);
      of_bias.set_lr(lr / 2);
      for (Linear* linear : {&a, &b}) sum(square((*linear)(x))).Backward();
      for (Optimizer* optimizer :
           {static_cast<Optimizer*>(&grouped), static_cast<Optimizer*>(&of_rest),
            static_cast<Optimizer*>(&of_bias)}) {
        optimizer->Step();
        optimizer->ZeroGrad();
      }
    }
    EXPECT_EQ(testing::Gather(a), testing::Gather(b));
    EXPECT_EQ(grouped.StepCounts(), (std::vector<int64_t>{2, 2}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Optimizers, VectorsNeedNotDecay) {
  Linear linear(2, 2);
  Materialize(linear);
  const std::vector<double> bias = linear.bias()->tensor().ToVector<double>();
  const std::vector<double> weight = linear.weight().tensor().ToVector<double>();
  SGD optimizer(linear.NamedParameters(), {.lr = 0.5, .weight_decay = 0.5}, LikeParameter,
                {VectorsDoNotDecay()});
  mul(sum(linear(zeros({1, 2}))), 0).Backward();
  optimizer.Step();
  EXPECT_EQ(linear.bias()->tensor().ToVector<double>(), bias);
  const std::vector<double> decayed = linear.weight().tensor().ToVector<double>();
  for (size_t i = 0; i < weight.size(); ++i) EXPECT_EQ(decayed[i], 0.75F * float(weight[i]));
}

// Between forward and backward a parameter is frozen: its gradient comes, and nobody takes it.
TEST(Optimizers, LeaveWhatWasFrozenMeanwhile) {
  const auto body = [](const DeviceMesh& mesh) {
    Linear layer(3, 2);
    if (!mesh.is_self()) ThrowIfError(DistributeModule(layer, mesh));
    Materialize(layer);
    const DTensor weight = layer.weight().tensor(), bias = layer.bias()->tensor();
    const std::vector<double> before = weight.ToVector<double>();
    const DTensor loss = sum(weight * 5) + sum(bias * 2);
    AdamW optimizer(layer.NamedParameters(), {.weight_decay = 0.5});
    layer.weight().RequiresGrad(false);
    loss.Backward();
    EXPECT_NEAR(ClipGradNorm(layer.NamedParameters(), 100), std::sqrt(8), 1e-12);
    ClipGradValues(layer.NamedParameters(), 1);
    if (const DTensor grad = weight.grad(); grad.defined()) {
      EXPECT_EQ(grad.ToVector<double>(), std::vector<double>(6, 5));
    }
    EXPECT_EQ(bias.grad().ToVector<double>(), std::vector<double>(2, 1));
    optimizer.Step();
    EXPECT_EQ(weight.ToVector<double>(), before);
    EXPECT_EQ(optimizer.StepCounts(), (std::vector<int64_t>{0, 1}));
    EXPECT_EQ(optimizer.GetStateDict().size(), 3u);
  };
  body(DeviceMesh::Self());
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    body(DeviceMesh({2}, {"dp"}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Quantised weights, say: they have no gradient, and need no state.
TEST(Optimizers, PassOverIntegers) {
  struct Quantised : Module {
    Parameter& levels = AddParameter("levels", {2, 2}, Init::Ones(), DType::kI64);
    Linear& layer = AddChild<Linear>("layer", 2, 2);
    Values Forward(const Values& in) override {
      return {layer(matmul(in[0], to(levels.tensor(), DType::kF32)))};
    }
  };
  for (const StateLayoutFn& layout : {StateLayoutFn(LikeParameter), FlatState("dp")}) {
    Quantised net;
    Materialize(net);
    AdamW optimizer(net.NamedParameters(), {}, layout);
    sum(net(ones({2, 2}))).Backward();
    EXPECT_GT(ClipGradNorm(net.NamedParameters(), 1), 0);
    optimizer.Step();
    optimizer.ZeroGrad();
    EXPECT_EQ(net.levels.tensor().ToVector<double>(), std::vector<double>(4, 1));
    EXPECT_EQ(optimizer.StepCounts(), (std::vector<int64_t>{1, 1}));
    optimizer.LoadStateDict(optimizer.GetStateDict());
  }
}

TEST(Optimizers, Errors) {
  Linear recipe(2, 2);
  EXPECT_THAT(MessageOf([&] { SGD(recipe.NamedParameters()); }), HasSubstr("is a recipe"));
  Materialize(recipe);
  const auto p = recipe.NamedParameters();
  EXPECT_THAT(MessageOf([&] { SGD(p, {.lr = -1}); }), HasSubstr("[SGD] lr must not be negative"));
  EXPECT_THAT(MessageOf([&] { SGD(p, {.nesterov = true}); }), HasSubstr("needs a momentum"));
  for (const double bad : {std::nan(""), HUGE_VAL}) {
    EXPECT_THAT(MessageOf([&] { SGD(p, {.momentum = 0.5, .dampening = bad}); }),
                HasSubstr("[SGD] dampening must be finite, got "));
    EXPECT_THAT(MessageOf([&] { ClipGradValues(p, -bad); }),
                HasSubstr("clip_value must not be negative, got"));
  }
  EXPECT_THAT(MessageOf([&] { AdamW(p, {.beta2 = 1.0}); }), HasSubstr("beta2 must be in [0, 1)"));
  EXPECT_THAT(MessageOf([&] { Adam(p, {.beta1 = -1}); }), HasSubstr("[Adam] beta1 must be in"));
  EXPECT_THAT(MessageOf([&] { Adagrad(p, {.lr_decay = -1}); }), HasSubstr("[Adagrad] lr_decay"));
  EXPECT_THAT(MessageOf([&] { RMSprop(p, {.momentum = -1}); }), HasSubstr("[RMSprop] momentum"));
  EXPECT_THAT(MessageOf([&] { AdamW(p, {.weight_decay = HUGE_VAL}); }),
              HasSubstr("[AdamW] weight_decay must be finite, got inf"));
  EXPECT_THAT(MessageOf([&] { ClipGradNorm(p, -1); }), HasSubstr("max_norm"));
  EXPECT_THAT(MessageOf([&] { ClipGradNorm(p, 1, 0); }), HasSubstr("norm_type"));
  EXPECT_THAT(MessageOf([&] { AdamW(p, {}, LikeParameter, {{}}); }), HasSubstr("needs `has`"));
  ParameterGroup group = VectorsDoNotDecay();
  group.lr_scale = -1;
  EXPECT_THAT(MessageOf([&] { AdamW(p, {}, LikeParameter, {group}); }),
              HasSubstr("lr_scale of a group must not be negative, got -1"));
  AdamW optim(p);
  EXPECT_THAT(MessageOf([&] { optim.set_lr(NAN); }), HasSubstr("lr must not be negative, got nan"));
  EXPECT_THAT(MessageOf([&] { optim.LoadStateDict({{"weight/exp_avg", ones({2, 2})}}); }),
              HasSubstr("weight needs both step and exp_avg"));
  EXPECT_THAT(MessageOf([&] { optim.LoadStateDict({{"wait/exp_avg", ones({2, 2})}}); }),
              HasSubstr("unexpected wait/exp_avg"));
}

}  // namespace
}  // namespace dtensor::optim_test
