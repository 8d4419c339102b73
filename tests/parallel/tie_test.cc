// Tied parameters: one logical tensor under several names, in trees, plans, optimizers and state
// dicts; trained on meshes as on one device.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>

#include "absl/algorithm/container.h"
#include "dtensor/autograd.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/explain.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::tie_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

constexpr int64_t kVocab = 6, kSize = 4;

class Model : public Module {
 public:
  explicit Model(bool tied = true)
      : tokens_(AddChild<Embedding>("tokens", kVocab, kSize)),
        head_(AddChild<Linear>("head", kSize, kVocab, /*bias=*/false)) {
    if (tied) TieNow();
  }
  void TieNow() { Tie(tokens_.weight(), head_.weight()); }
  Embedding& tokens() { return tokens_; }
  Linear& head() { return head_; }
  std::string type_name() const override { return "Model"; }

 protected:
  Values Forward(const Values& in) override { return {head_(tokens_(in[0]))}; }

 private:
  Embedding& tokens_;
  Linear& head_;
};

DTensor Table(int64_t seed) {
  return FromVector(testing::Integers(kVocab * kSize, seed), {kVocab, kSize});
}

DTensor Ids() {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 4 * 4; ++i) ids.push_back(i * 5 % kVocab);
  return FromVector(ids, {4, 4});
}

// A sum of products of whole numbers: the same bits in every order.
void Backward(Model& model, const DeviceMesh& mesh) {
  const DTensor weights = FromVector(testing::Integers(4 * 4 * kVocab, 3), {4, 4, kVocab});
  const bool one = mesh.is_self();
  const Placements rows = {Shard(0), Replicate()};
  const DTensor logits = model(one ? Ids() : DistributeTensor(Ids(), mesh, rows));
  sum(logits * (one ? weights : DistributeTensor(weights, mesh, rows))).Backward();
}

TEST(Tie, IsOneParameterWithTwoNames) {
  Model model;
  const std::vector<NamedParameter> named = model.NamedParameters();
  ASSERT_EQ(named.size(), 1u);
  EXPECT_EQ(named[0].fqn, "tokens.weight");
  EXPECT_THAT(named[0].aliases, ElementsAre("head.weight"));
  EXPECT_EQ(model.NumElements(), kVocab * kSize);
  EXPECT_EQ(model.FindParameter("head.weight")->fqn(), "head.weight");
  SetDType(model, DType::kF64);
  EXPECT_EQ(model.head().weight().dtype(), DType::kF64);
  // Drawn once, as the first.
  ManualSeed(3);
  Materialize(model);
  ManualSeed(3);
  const DTensor drawn = randn({kVocab, kSize}, {.dtype = DType::kF64});
  EXPECT_EQ(model.head().weight().tensor().ToVector<double>(), drawn.ToVector<double>());
  EXPECT_EQ(model.head().weight().tensor().impl(), model.tokens().weight().tensor().impl());
  const int64_t after = rand({1}).ToVector<double>()[0] * 1e6;
  // Passed over once, too.
  Model other;
  SetDType(other, DType::kF64);
  ManualSeed(3);
  Materialize(other, [](const std::string&) { return false; });
  EXPECT_FALSE(other.head().weight().materialized());
  EXPECT_EQ(static_cast<int64_t>(rand({1}).ToVector<double>()[0] * 1e6), after);
  Materialize(other, [](const std::string& fqn) { return fqn == "head.weight"; });
  EXPECT_TRUE(other.tokens().weight().materialized());
}

TEST(Tie, ExplainCountsItOnce) {
  Model model;
  const absl::StatusOr<ModuleExplanation> explained = Explain(model, {Ids()});
  ASSERT_TRUE(explained.ok()) << explained.status();
  EXPECT_EQ(explained->parameter_bytes, kVocab * kSize * 4);
  EXPECT_EQ(explained->gradient_bytes, kVocab * kSize * 4);
  EXPECT_FALSE(model.head().weight().materialized());
}

TEST(Tie, AfterMaterializeTheFirstStays) {
  Model model(/*tied=*/false);
  Materialize(model);
  model.tokens().weight().Set(Table(1));
  model.head().weight().Set(Table(2));
  model.TieNow();
  model.TieNow();  // is nothing
  EXPECT_EQ(model.head().weight().tensor().ToVector<double>(), Table(1).ToVector<double>());
  model.head().weight().Set(Table(2));
  EXPECT_EQ(model.tokens().weight().tensor().ToVector<double>(), Table(2).ToVector<double>());
}

// An optimizer that has two states of it would update it twice.
TEST(Tie, AfterTheOptimizerIsRefusedByItsStep) {
  Model model(/*tied=*/false);
  Materialize(model);
  SGD before(model.NamedParameters(), {.lr = 1.0});
  before.Step();
  model.TieNow();
  EXPECT_THAT(MessageOf([&] { before.Step(); }),
              HasSubstr("after the optimizer was made; make it after Tie"));
  SGD(model.NamedParameters(), {.lr = 1.0}).Step();
}

TEST(Tie, OutlivesItsFirstName) {
  Linear kept(kSize, kVocab, false);
  {
    Embedding gone(kVocab, kSize);
    Tie(gone.weight(), kept.weight());
    Materialize(gone);
    gone.weight().Set(Table(1));
  }
  EXPECT_EQ(kept.weight().tensor().ToVector<double>(), Table(1).ToVector<double>());
  EXPECT_EQ(kept.NamedParameters()[0].fqn, "weight");
}

TEST(Tie, WhatDiffersIsRefused) {
  Model model(/*tied=*/false);
  Linear wide(kSize, kVocab + 1);
  EXPECT_THAT(MessageOf([&] { Tie(model.tokens().weight(), wide.weight()); }),
              AllOf(HasSubstr("[tie] tokens.weight and weight"), HasSubstr("[6, 4] and [7, 4]")));
  model.head().weight().SetDType(DType::kF64);
  EXPECT_THAT(MessageOf([&] { model.TieNow(); }), HasSubstr("different dtypes"));
  model.head().weight().SetDType(DType::kF32);
  model.head().weight().Materialize();
  EXPECT_THAT(MessageOf([&] { model.TieNow(); }), HasSubstr("one a recipe, one materialised"));
  model.tokens().weight().Place(testing::DpTp(1, 1), {});
  EXPECT_THAT(MessageOf([&] { model.TieNow(); }), HasSubstr("placed differently"));
}

TEST(Tie, StylesThatDisagreeAreNamed) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    Model model;
    const absl::Status refused = ParallelizeModule(
        model, testing::DpTp(1, 2), {{"tokens", ColwiseParallel()}, {"head", ColwiseParallel()}});
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("parameter head.weight: would be [R, S(0)]"),
                      HasSubstr("tied to tokens.weight"), HasSubstr("makes [R, S(1)]")));
    EXPECT_TRUE(model.tokens().weight().mesh().is_self());  // nothing has changed
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Tie, StateDictsKnowBothNames) {
  Model from, to;
  Materialize(from);
  Materialize(to);
  const StateDict state = from.GetStateDict();
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].first, "tokens.weight");
  EXPECT_EQ(state[1].first, "head.weight");
  for (const StateDict& part : {state, StateDict{state[0]}, StateDict{state[1]}}) {
    to.tokens().weight().Set(Table(1));
    to.LoadStateDict(part);
    EXPECT_EQ(testing::Gather(to), testing::Gather(from));
  }
  EXPECT_THAT(
      MessageOf(
          [&] { to.LoadStateDict({{"tokens.weight", Table(1)}, {"head.weight", Table(2)}}); }),
      HasSubstr("tokens.weight and head.weight are one parameter, but their values differ"));
  EXPECT_EQ(testing::Gather(to), testing::Gather(from));
  EXPECT_THAT(MessageOf([&] { to.LoadStateDict({}); }), HasSubstr("missing tokens.weight"));
}

// The same model with its parts in another order has another first name.
TEST(Tie, CheckpointsKnowBothNames) {
  struct Reordered : Module {
    Linear& head = AddChild<Linear>("head", kSize, kVocab, /*bias=*/false);
    Embedding& tokens = AddChild<Embedding>("tokens", kVocab, kSize);
    Reordered() { Tie(tokens.weight(), head.weight()); }
    Values Forward(const Values& in) override { return {head(tokens(in[0]))}; }
  };
  const testing::TempFolder folder;
  Model model;
  Materialize(model);
  AdamW optimizer(model.NamedParameters());
  Backward(model, DeviceMesh::Self());
  optimizer.Step();
  ASSERT_TRUE(SaveCheckpoint(folder.path(), model, optimizer, {.step = 1}).ok());
  Reordered other;
  Materialize(other);
  AdamW its(other.NamedParameters());
  const auto loaded = LoadCheckpoint(folder.path(), other, its);
  EXPECT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(other.head.weight().tensor().ToVector<double>(),
            model.tokens().weight().tensor().ToVector<double>());
  const StateDict want = optimizer.GetStateDict(), got = its.GetStateDict();
  ASSERT_EQ(got.size(), want.size());
  EXPECT_EQ(got[0].first, "head.weight/exp_avg");
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].second.ToVector<double>(), want[i].second.ToVector<double>());
  }
  // Of an optimizer that knows the tensor by a later name.
  std::vector<NamedParameter> later = model.NamedParameters();
  std::swap(later[0].fqn, later[0].aliases[0]);
  AdamW named(later);
  Backward(model, DeviceMesh::Self());
  named.Step();
  ASSERT_TRUE(SaveCheckpoint(folder.path(), model, named, {.step = 2}).ok());
  EXPECT_TRUE(LoadCheckpoint(folder.path(), model, named).ok());
  EXPECT_TRUE(LoadCheckpoint(folder.path(), model, optimizer).ok());
}

TEST(Tie, StateDictsWithoutNumbersGoThereAndBack) {
  Model model;
  Materialize(model);
  std::vector<double> values(kVocab * kSize, std::nan(""));
  values[3] = 2;
  model.tokens().weight().Set(FromVector(values, {kVocab, kSize}));
  model.LoadStateDict(model.GetStateDict());
  EXPECT_EQ(model.head().weight().tensor().ToVector<double>()[3], 2);
  const StateDict differ = {{"tokens.weight", model.tokens().weight().tensor()},
                            {"head.weight", Table(1)}};
  EXPECT_THAT(MessageOf([&] { model.LoadStateDict(differ); }), HasSubstr("their values differ"));
}

// A read that went wrong on one rank: all hear of it, and none loads.
TEST(Tie, OneRanksCopyThatDiffersIsRefusedByAll) {
  struct Pair : Module {
    Model &a = AddChild<Model>("a"), &b = AddChild<Model>("b");
    Values Forward(const Values& in) override { return {b(a(in[0]))}; }
  };
  const absl::Status status = RunSpmd(3, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    Pair pair;
    for (Parameter* p : pair.Parameters()) p->Place(mesh, {Shard(0)});
    Materialize(pair);
    const auto before = testing::Gather(pair);
    const DTensor placed = DistributeTensor(Table(1), mesh, {Shard(1)});
    const DTensor other = DistributeTensor(Table(1), mesh, {Shard(0)});
    const DTensor mine = Table(rank.rank() == 1 ? 2 : 1);
    const StateDict state = {{"a.tokens.weight", Table(1)},
                             {"a.head.weight", mine},
                             {"b.tokens.weight", placed},
                             {"b.head.weight", other}};
    EXPECT_THAT(MessageOf([&] { pair.LoadStateDict(state); }),
                HasSubstr("a.tokens.weight and a.head.weight are one parameter"));
    EXPECT_EQ(testing::Gather(pair), before);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- training ------------------------------------------------------------------------------------

struct Trained {
  std::vector<double> gradient, value, moment;
  friend bool operator==(const Trained&, const Trained&) = default;
};

Trained TrainOn(const DeviceMesh& mesh, const Plan& plan) {
  Model model;
  if (!mesh.is_self()) ThrowIfError(ParallelizeModule(model, mesh, plan));
  Materialize(model);
  model.tokens().weight().Set(Table(1));
  // The lists overlap: one state all the same.
  std::vector<NamedParameter> all = model.NamedParameters();
  all.push_back({"head.weight", &model.head().weight()});
  SGD optim(all, {.lr = 0.5, .momentum = 0.5});
  Trained trained;
  for (int step = 0; step < 2; ++step) {
    optim.ZeroGrad();
    Backward(model, mesh);
    trained.gradient = model.head().weight().tensor().grad().ToVector<double>();
    optim.Step();
  }
  const StateDict state = optim.GetStateDict();
  EXPECT_EQ(state.size(), 2u);
  EXPECT_EQ(state[0].first, "tokens.weight/momentum_buffer");
  trained.moment = state[0].second.ToVector<double>();
  trained.value = model.tokens().weight().tensor().ToVector<double>();
  StateDict renamed = state;
  for (auto& [name, value] : renamed) name = "head." + name.substr(name.find('.') + 1);
  optim.LoadStateDict(renamed);
  EXPECT_EQ(optim.GetStateDict()[0].second.ToVector<double>(), trained.moment);
  // Both names are in the model's, too, and either alone gives the value back.
  const StateDict both = model.GetStateDict();
  EXPECT_EQ(both.size(), 2u);
  for (const auto& [name, value] : both) {
    EXPECT_EQ(value.ToVector<double>(), trained.value) << name;
    const DTensor kept = clone(value);
    model.head().weight().Set(Table(2));
    EXPECT_NE(model.tokens().weight().tensor().ToVector<double>(), trained.value);
    model.LoadStateDict({{name, kept}});
    EXPECT_EQ(model.tokens().weight().tensor().ToVector<double>(), trained.value) << name;
  }
  return trained;
}

TEST(Tie, TheGradientIsTheSumOfItsUses) {
  Model tied, apart(/*tied=*/false);
  for (Model* m : {&tied, &apart}) {
    Materialize(*m);
    m->tokens().weight().Set(Table(1));
    m->head().weight().Set(Table(1));
    Backward(*m, DeviceMesh::Self());
  }
  const DTensor both =
      apart.tokens().weight().tensor().grad() + apart.head().weight().tensor().grad();
  EXPECT_EQ(tied.tokens().weight().tensor().grad().ToVector<double>(), both.ToVector<double>());
  EXPECT_NE(tied.tokens().weight().tensor().grad().ToVector<double>(),
            apart.head().weight().tensor().grad().ToVector<double>());
}

TEST(Tie, TrainsOnMeshesAsOnOneDevice) {
  const Trained one = TrainOn(DeviceMesh::Self(), {});
  const Plan tensor = {{"tokens", RowwiseParallel()}, {"head", ColwiseParallel()}};
  const Plan by_one_name = {{"tokens", RowwiseParallel()}};
  const Plan sequence = {{"tokens", RowwiseParallel({.output = Shard(1)})},
                         {"head", ColwiseParallel()}};
  for (const auto& [dp, tp] : {std::pair<int64_t, int64_t>{1, 1}, {1, 2}, {2, 2}, {1, 3}}) {
    const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext&) {
      for (const Plan& plan : {tensor, by_one_name, sequence}) {
        EXPECT_EQ(TrainOn(testing::DpTp(dp, tp), plan), one) << dp << " x " << tp;
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Two ties on each of three groups of ranks that overlap: each group has one reduction, in the same
// order on all ranks, so none waits for another.
//   Source: nanotron, sync_tied_weights_gradients
TEST(Tie, OverOverlappingRanksIsReducedOncePerGroup) {
  const std::vector<std::vector<int64_t>> groups = {{2, 3}, {0, 1, 2}, {0, 3}};
  const auto rows = [](int64_t seed) {
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 12; ++i) ids.push_back((i * 5 + seed) % kVocab);
    return FromVector(ids, {12});
  };
  const auto train = [&](Model& model, int64_t seed, const DeviceMesh& mesh) {
    const auto placed = [&](const DTensor& x) {
      return mesh.is_self() ? x : DistributeTensor(x, mesh, {Shard(0)});
    };
    const DTensor weights = FromVector(testing::Integers(12 * kVocab, seed), {12, kVocab});
    sum(model(placed(rows(seed))) * placed(weights)).Backward();
  };
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    std::vector<std::unique_ptr<Model>> models;
    std::vector<DTensor> tables;
    for (size_t i = 0; i < 2 * groups.size(); ++i) {
      const std::vector<int64_t>& ranks = groups[i % groups.size()];
      DT_ASSIGN_OR_RETURN(
          const DeviceMesh mesh,
          DeviceMesh::FromRanks({static_cast<int64_t>(ranks.size())}, ranks, {"tied"}));
      Model& model = *models.emplace_back(std::make_unique<Model>());
      Materialize(model);
      model.tokens().weight().Set(Table(static_cast<int64_t>(i)));
      model.tokens().weight().Place(mesh, {Replicate()});
      const NoGradSync wait;
      train(model, static_cast<int64_t>(i), mesh);
      tables.push_back(model.head().weight().tensor());
    }
    CommTrace trace;
    SyncGradients(tables);
    int64_t mine = 0, bytes = 0;  // a ring's, of both tables
    for (const auto& ranks : groups) {
      if (!absl::c_linear_search(ranks, rank.rank())) continue;
      const auto n = static_cast<int64_t>(ranks.size());
      ++mine;
      bytes += 2 * (n - 1) * 2 * kVocab * kSize * 4 / n;
    }
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce), mine) << trace.ToString(CommBy::kOp);
    EXPECT_EQ(trace.TotalBytes(), bytes);
    for (size_t i = 0; i < models.size(); ++i) {
      if (!tables[i].spec().in_mesh()) continue;
      Model one;
      Materialize(one);
      one.tokens().weight().Set(Table(static_cast<int64_t>(i)));
      train(one, static_cast<int64_t>(i), DeviceMesh::Self());
      EXPECT_EQ(tables[i].grad().local().ToVector<double>(),
                one.head().weight().tensor().grad().ToVector<double>())
          << i;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::tie_test
