// Small models of many kinds (architectures.h) train under a plan and under random placements of
// parameters and data as on one device, in float64: losses, gradients, values after three steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/recompute.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"
#include "tests/common/thin.h"
#include "tests/parallel/more_architectures.h"

namespace dtensor::architectures_test {
namespace {

using namespace dtensor::testing;  // NOLINT: the models
using ::testing::AnyOf;
using ::testing::HasSubstr;

DTensor Ids(const Shape& shape, int64_t vocab, int64_t seed) {
  std::vector<int64_t> x;
  for (int64_t i = 0; i < Numel(shape); ++i) x.push_back((i * i * 7 + i * 3 + seed) % vocab);
  return FromVector(x, shape);
}
DTensor Reals(const Shape& shape, double seed) {
  std::vector<double> x;
  for (int64_t i = 0; i < Numel(shape); ++i) {
    x.push_back(std::sin(static_cast<double>(i) * 1.7 + seed));
  }
  return FromVector(x, shape, {.dtype = DType::kF64});
}

struct Case {
  std::string name;
  std::function<std::unique_ptr<Task>()> make;
  std::function<Values()> data;  // on Self
  Plan plan;
  std::function<bool(absl::string_view)> learns = [](absl::string_view) { return true; };
};

template <class T>
std::unique_ptr<Task> Make() {
  return std::make_unique<T>();
}
std::function<Values()> Text(int64_t vocab) {
  return [vocab] { return Values{Ids({4, 7}, vocab, 1), Ids({4, 7}, vocab, 5)}; };
}
// Rows of different lengths; a third of the tokens have labels.
Values MaskedText() {
  const TensorOptions whole = {.dtype = DType::kI64};
  const DTensor third = eq(remainder(Ids({4, 9}, 9, 2), full({1}, 3, whole)), 0);
  const DTensor labels = where(third, Ids({4, 9}, 22, 3), full({1}, -100, whole));
  const DTensor lengths = unsqueeze(FromVector<int64_t>({9, 5, 7, 2}, {4}), 1);
  const DTensor mask = lt(expand(unsqueeze(arange(0, 9, 1, whole), 0), {4, 9}), lengths);
  return {Ids({4, 9}, 22, 1), labels, clone(mask), Ids({4, 9}, 2, 0)};
}

Style Cut(std::vector<std::string> names) {
  return {"Cut", [names](Module& m) -> absl::StatusOr<ModuleLayout> {
            ModuleLayout layout;
            for (const std::string& n : names) {
              layout.parameters.push_back({m.FindParameter(n), Shard(0)});
            }
            return layout;
          }};
}
Plan operator+(Plan a, const Plan& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
Plan Attention(const std::string& at, int64_t d) {
  return {{at + ".[qkv]", ColwiseParallel({.unit = d})}, {at + ".o", RowwiseParallel({.unit = d})}};
}
Plan Inner(const std::string& up, const std::string& down) {
  return {{up, ColwiseParallel()}, {down, RowwiseParallel()}};
}

std::vector<Case> Cases() {
  const Plan table = {{"tok", RowwiseParallel()}}, head = {{"head", ColwiseParallel()}};
  const Plan mlp = Inner("mlp.up", "mlp.down");
  const Style filters = Cut({"weight", "bias"});
  return {
      {"mixtral", Make<Mixtral>, Text(24), table + head + Plan{{"experts", Cut({"w1", "w2"})}}},
      {"mixtral_sorted", Make<MixtralSorted>, Text(24), head + Inner("ex.*.up", "ex.*.down")},
      {"deepseek", Make<DeepSeek>, Text(20),
       table + mlp + head +
           Plan{{"attn.qb", ColwiseParallel({.unit = 6})},
                {"attn.kvb", ColwiseParallel({.unit = 7})},
                {"attn.o", RowwiseParallel({.unit = 3})}}},
      {"qwen", Make<Qwen>, Text(20),
       head + Plan{{"tok", RowwiseParallel({.output = Shard(1)})},
                   {"attn.q", ColwiseParallel({.unit = 12})},
                   {"attn.[kv]", ColwiseParallel({.unit = 4})},
                   {"attn.o", RowwiseParallel({.unit = 12, .output = Shard(1)})},
                   {"gate", ColwiseParallel()},
                   {"up", ColwiseParallel()},
                   {"down", RowwiseParallel({.output = Shard(1)})}}},
      {"bert", Make<Bert>, MaskedText, table + mlp + head + Attention("attn", 4)},
      {"vit", Make<ViT>, [] { return Values{Reals({4, 3, 8, 8}, 0.3), Ids({4}, 7, 2)}; },
       Plan{{"patch", filters}} + mlp + head + Attention("attn", 4)},
      {"t5", Make<T5>,
       [] { return Values{Ids({4, 7}, 20, 1), Ids({4, 7}, 20, 4), Reals({4, 5, 12}, 1)}; },
       table + head + Inner("w[01]", "wo") + Attention("self", 3) + Attention("cross", 3) +
           Plan{{"self.bias", ColwiseParallel()}}},
      {"whisper", Make<Whisper>,
       [] { return Values{Ids({4, 7}, 20, 1), Ids({4, 7}, 20, 4), Reals({4, 5, 16}, 1)}; },
       Plan{{"c1", filters}} + mlp + head + Attention("enc", 4) + Attention("dec", 4) +
           Attention("cross", 4)},
      {"unet", Make<UNet>,
       [] { return Values{Reals({4, 4, 6, 6}, 0.3), Reals({4}, 2), Reals({4, 4, 6, 6}, 5)}; },
       Plan{{"c1", filters}, {"mid", filters}} + Inner("t1", "t2") + Attention("attn", 4)},
      {"lora", Make<Lora>, Text(20),
       head + Plan{{"[qv].base", ColwiseParallel({.unit = 4})},
                   {"k", ColwiseParallel({.unit = 4})},
                   {"o", RowwiseParallel({.unit = 4})}},
       [](absl::string_view n) { return absl::EndsWith(n, ".a") || absl::EndsWith(n, ".b"); }},
      {"dpo", Make<Dpo>,
       [] {
         return Values{Ids({4, 7}, 18, 1), Ids({4, 7}, 18, 9),
                       full({4, 7}, 1, {.dtype = DType::kF64})};
       },
       Plan{{"*.tok", RowwiseParallel()}, {"*.head", ColwiseParallel()}} +
           Inner("*.mlp.up", "*.mlp.down") + Attention("*.attn", 4),
       [](absl::string_view n) { return absl::StartsWith(n, "policy"); }},
  };
}

std::vector<Case> MoreCases() {
  const Plan table = {{"tok", RowwiseParallel()}}, head = {{"head", ColwiseParallel()}};
  const Style filters = Cut({"weight", "bias"});
  return {
      {"mamba", Make<Mamba>, Text(20),
       table + head + Plan{{"dt", ColwiseParallel()}, {"out", RowwiseParallel()}}},
      {"lstm", Make<Lstm>, Text(20), table + head},
      {"graph_attention", Make<GraphAttention>,
       [] { return Values{Reals({9, 5}, 1), Ids({9}, 4, 1), Ids({16}, 9, 3), Ids({16}, 8, 2)}; },
       Inner("lin", "head")},
      {"clip", Make<Clip>, [] { return Values{Reals({8, 9}, 1), Reals({8, 7}, 2)}; },
       Inner("image.up", "image.down") + Plan{{"to_*", ColwiseParallel()}}},
      {"vqvae", Make<VqVae>, [] { return Values{Reals({8, 8}, 1)}; },
       Inner("deep.up", "deep.down") + Plan{{"codes", RowwiseParallel()}}},
      {"linear_attention", Make<LinearAttention>, Text(20),
       table + head +
           Plan{{"[qkv]", ColwiseParallel({.unit = 3})}, {"o", RowwiseParallel({.unit = 3})}}},
      {"resnet", Make<ResNet>, [] { return Values{Reals({4, 3, 8, 8}, 0.3), Ids({4}, 5, 2)}; },
       Plan{{"stem", filters}, {"c1", filters}} + head,
       // The mean that is taken out takes these with it: their gradient is rounding.
       [](absl::string_view n) { return n != "stem.bias" && n != "c1.bias"; }},
      {"dlrm", Make<Dlrm>,
       [] {
         return Values{Reals({8, 5}, 1), Ids({8, 2}, 11, 1), Ids({8, 3}, 7, 2),
                       to(Ids({8}, 2, 0), DType::kF64)};
       },
       Inner("bottom.up", "bottom.down") + Plan{{"", Cut({"t1", "t2"})}}},
      {"expert_choice", Make<ExpertChoice>, Text(20), table + head + Plan{{"", Cut({"w1", "w2"})}}},
      {"crf", Make<Crf>, [] { return Values{Ids({4, 7}, 20, 1), Ids({4, 7}, 4, 5)}; },
       table + Plan{{"emit", ColwiseParallel()}}},
  };
}

// How a case is spread: by its plan (seed 0; over "dp" parameters may be cut as well), at random,
// where every second seed runs the model again in backward, or by a plan of random styles.
struct Spread {
  Dims mesh;
  unsigned seed;
  bool cut_parameters = false;
  bool random_plan = false;
};

// A style as somebody may write who tries: most serve the module.
Style RandomStyle(std::mt19937* dice, Module& module, std::string* text) {
  const auto below = [&](unsigned n) { return static_cast<int>((*dice)() % n); };
  std::optional<ValueLayout> output;
  const int where = below(20);
  if (where < 12) output = ValueLayout(Shard(where == 0 ? 2 : where % 2));
  if (where >= 12 && where < 15) output = ValueLayout(Replicate());
  if (where == 15) output = ValueLayout(Partial());
  const std::string to = output.has_value() ? output->placement.ToString() : "-";
  ParallelOptions options = {.unit = below(4), .output = output};
  // Parameters below a module that has children are its children's styles' business.
  const bool leaf = module.children().empty(), wide = module.traits().has_value();
  const int kind = leaf ? below(20) == 0 ? below(4) : wide ? below(8) : 4 + below(4) : 6 + below(2);
  if (kind < 4) {
    absl::StrAppend(text, kind < 2 ? "Colwise" : "Rowwise", "(", options.unit, ", ", to, ") ");
    return kind < 2 ? ColwiseParallel(options) : RowwiseParallel(options);
  }
  if (kind == 4) {
    const int dim = below(2);
    absl::StrAppend(text, "Sequence(", dim, ") ");
    return SequenceParallel(dim);
  }
  if (kind == 5) {
    absl::StrAppend(text, "NoParallel(", to, ") ");
    NoParallelOptions none;
    if (output.has_value()) none.output_layout = output->placement;
    return NoParallel(none);
  }
  absl::StrAppend(text, kind == 6 ? "input " : "output ", to, " ");
  ModuleLayout layout;
  (kind == 6 ? layout.inputs : layout.outputs) = {output};
  return PrepareModule(layout);
}

Placements Random(std::mt19937* dice, const DeviceMesh& mesh, const Shape& shape) {
  Placements p;
  for (int m = 0; m < mesh.ndim(); ++m) {
    const auto d = static_cast<int>((*dice)() % (shape.size() + 1));
    p.push_back(d == static_cast<int>(shape.size()) ? Replicate() : Shard(d));
  }
  return p;
}

// Puts model and data on the mesh; returns where everything is.
std::string Place(const Case& c, const Spread& how, const DeviceMesh& mesh, Module* model,
                  Values* data) {
  std::mt19937 dice(how.seed);
  std::string where;
  const auto random = [&](const std::string& name, const Shape& shape) {
    const Placements p = Random(&dice, mesh, shape);
    absl::StrAppend(&where, name, " ", ToString(p), " ");
    return p;
  };
  Placements by_rows(mesh.ndim(), Replicate());
  if (mesh.ndim() > 1) by_rows[0] = Shard(0);
  const bool by_plan = how.seed == 0 || how.random_plan;
  if (!by_plan || how.cut_parameters) {
    ThrowIfError(DistributeModule(*model, mesh, [&](const NamedParameter& p) {
      return by_plan ? by_rows : random(p.fqn, p.parameter->shape());
    }));
  }
  if (how.random_plan) {
    Plan plan;
    for (const NamedModule& m : model->NamedModules()) {
      if (m.fqn.empty() || dice() % 2 == 0) continue;
      absl::StrAppend(&where, m.fqn, ": ");
      plan.push_back({m.fqn, RandomStyle(&dice, *m.module, &where)});
    }
    ThrowIfError(ParallelizeModule(*model, mesh, plan, {.warn = false}));
  } else if (by_plan) {
    ThrowIfError(ParallelizeModule(*model, mesh, c.plan, {.warn = false}));
  }
  for (DTensor& d : *data) {
    d = DistributeTensor(d, mesh, by_plan ? by_rows : random("data", d.shape()));
  }
  return where;
}

using Numbers = std::map<std::string, std::vector<double>>;

// `how` null: on one device.
Numbers Train(const Case& c, const Spread* how, std::string* where) {
  ManualSeed(7);
  const std::unique_ptr<Task> model = c.make();
  SetDType(*model, DType::kF64);
  Values data = c.data();
  if (how != nullptr) {
    const DeviceMesh mesh = how->mesh.size() == 1
                                ? DeviceMesh({how->mesh[0]}, {"tp"})
                                : DeviceMesh({how->mesh[0], how->mesh[1]}, {"dp", "tp"});
    *where = Place(c, *how, mesh, model.get(), &data);
  }
  Materialize(*model);
  std::vector<NamedParameter> learning;
  for (const NamedParameter& p : model->NamedParameters()) {
    if (c.learns(p.fqn)) {
      learning.push_back(p);
    } else {
      DTensor(p.parameter->tensor()).RequiresGrad(false);
    }
  }
  SGD optim(learning, {.lr = 0.1, .momentum = 0.9});
  const auto run = [&](const Values& v) { return (*model)(v); };
  Numbers out;
  for (int step = 0; step < 3; ++step) {
    const bool again = how != nullptr && how->seed % 2 == 1;
    const DTensor loss = (again ? Recompute(run, data) : run(data))[0];
    out["loss"].push_back(loss.Item());
    loss.Backward();
    for (const NamedParameter& p : learning) {
      const DTensor grad = p.parameter->tensor().grad();
      if (step == 0 && grad.defined()) out["gradient of " + p.fqn] = grad.ToVector<double>();
    }
    optim.Step();
    optim.ZeroGrad();
  }
  for (const NamedParameter& p : model->NamedParameters()) {
    out[p.fqn] = p.parameter->tensor().Detach().ToVector<double>();
  }
  return out;
}

void ExpectEqual(const Numbers& got, const Numbers& wanted) {
  ASSERT_EQ(got.size(), wanted.size());
  for (const auto& [name, values] : wanted) {
    ASSERT_TRUE(got.contains(name)) << name;
    ASSERT_EQ(got.at(name).size(), values.size()) << name;
    double most = 1e-6;
    for (const double v : values) most = std::max(most, std::abs(v));
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(got.at(name)[i], values[i], 1e-10 * most) << name << " at " << i;
    }
  }
}

class Architecture : public ::testing::TestWithParam<Case> {};

TEST_P(Architecture, TrainsOnMeshesAsOnOneDevice) {
  const Case& c = GetParam();
  std::string none;
  const Numbers alone = Train(c, nullptr, &none);
  EXPECT_LT(alone.at("loss")[2], alone.at("loss")[0]);
  std::vector<Spread> spreads = {{{2, 2}, 0, true}};
  for (const Dims& mesh : {Dims{1}, Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}}) {
    for (unsigned seed = 0; seed < 4; ++seed) spreads.push_back({mesh, seed});
  }
  for (size_t i = 0; i < spreads.size(); ++i) {
    if (!InTurn(i, 4)) continue;
    const Spread& how = spreads[i];
    const int64_t world = how.mesh.size() == 1 ? how.mesh[0] : how.mesh[0] * how.mesh[1];
    const absl::Status status = RunSpmd(world, [&](RankContext& rank) -> absl::Status {
      std::string where;
      const Numbers got = Train(c, &how, &where);
      SCOPED_TRACE(
          absl::StrCat("rank ", rank.rank(), " of ", world, ", seed ", how.seed, ": ", where));
      ExpectEqual(got, alone);
      return absl::OkStatus();
    });
    ASSERT_TRUE(status.ok()) << status << " on " << world << " ranks, seed " << how.seed;
  }
}

// Under any plan a model is refused, by an error that names the part of the plan, or learns the
// same. DT_PLANS runs more of them.
TEST_P(Architecture, IsRefusedOrRightUnderRandomPlans) {
  const Case& c = GetParam();
  std::string none;
  const Numbers alone = Train(c, nullptr, &none);
  const char* asked = std::getenv("DT_PLANS");
  const int plans = asked == nullptr ? 8 : std::atoi(asked);
  int right = 0, refused = 0;
  for (const Dims& mesh : {Dims{2}, Dims{3}, Dims{2, 2}}) {
    for (int seed = 1; seed <= plans; ++seed) {
      if (!InTurn(static_cast<size_t>(seed), 4)) continue;
      const Spread how = {mesh, static_cast<unsigned>(seed), false, true};
      const int64_t world = mesh.size() == 1 ? mesh[0] : mesh[0] * mesh[1];
      const absl::Status status = RunSpmd(world, [&](RankContext& rank) -> absl::Status {
        std::string where;
        const Numbers got = Train(c, &how, &where);
        SCOPED_TRACE(absl::StrCat("rank ", rank.rank(), " of ", world, ": ", where));
        ExpectEqual(got, alone);
        return absl::OkStatus();
      });
      (status.ok() ? right : refused) += 1;
      if (status.ok()) continue;
      EXPECT_THAT(status.code(),
                  AnyOf(absl::StatusCode::kInvalidArgument, absl::StatusCode::kUnimplemented))
          << status;
      EXPECT_THAT(std::string(status.message()),
                  AnyOf(HasSubstr("pattern \""), HasSubstr("the plan's layout of")));
    }
  }
  std::printf("%d plans right, %d refused\n", right, refused);
  if (Thin(2) == 1) {  // of a few all may be refused
    EXPECT_GE(3 * right, refused);
  }
}

INSTANTIATE_TEST_SUITE_P(All, Architecture, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return info.param.name; });
INSTANTIATE_TEST_SUITE_P(More, Architecture, ::testing::ValuesIn(MoreCases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace dtensor::architectures_test
