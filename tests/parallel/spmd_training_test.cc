// A model on a mesh against the same model on one rank: bit for bit on whole numbers, and the same
// initial bits everywhere; what a step does in which order.
#include <gtest/gtest.h>

#include "absl/strings/match.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/data/sampler.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::spmd_training_test {
namespace {

// Embedding, MLP with relu around a residual, head: sums, products and relu only.
class IntegerModel : public Module {
 public:
  static constexpr int64_t kVocab = 7, kHidden = 6, kInner = 10, kClasses = 5;
  IntegerModel()
      : tokens_(AddChild<Embedding>("tokens", kVocab, kHidden)),
        up_(AddChild<Linear>("up", kHidden, kInner)),
        down_(AddChild<Linear>("down", kInner, kHidden)),
        head_(AddChild<Linear>("head", kHidden, kClasses, /*bias=*/false)) {}

  static Plan ThePlan() {
    return {{"tokens", RowwiseParallel()},
            {"up", ColwiseParallel()},
            {"down", RowwiseParallel()},
            {"head", ColwiseParallel()}};
  }

 protected:
  Values Forward(const Values& in) override {
    const DTensor x = tokens_(in[0]);
    return {head_(x + down_(relu(up_(x))))};
  }

 private:
  Embedding& tokens_;
  Linear &up_, &down_, &head_;
};

struct Trained {
  double loss = 0;
  testing::NamedValues gradients, parameters;
  friend bool operator==(const Trained&, const Trained&) = default;
};

// One SGD step on rows of whole numbers; batch 5 is uneven for 2, 3 and 4.
Trained TrainIntegers(const DeviceMesh& mesh) {
  IntegerModel model;
  if (!mesh.is_self()) {
    ThrowIfError(ParallelizeModule(model, mesh, IntegerModel::ThePlan()));
  }
  Materialize(model);
  int64_t seed = 1;
  for (const NamedParameter& p : model.NamedParameters()) {
    p.parameter->Set(
        FromVector(testing::Integers(p.parameter->numel(), seed++), p.parameter->shape()));
  }
  const auto distribute = [&](const DTensor& t) {
    return mesh.is_self() ? t : DistributeTensor(t, mesh, {Shard(0), Replicate()});
  };
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 15; ++i) tokens.push_back(i * 3 % IntegerModel::kVocab);
  const DTensor ids = distribute(FromVector(tokens, {5, 3}, {.dtype = DType::kI64}));
  const DTensor weights = distribute(FromVector(testing::Integers(15 * IntegerModel::kClasses, 2),
                                                {5, 3, IntegerModel::kClasses}));
  const DTensor loss = sum(model(ids) * weights);
  loss.Backward();
  Trained t;
  t.loss = loss.Item();
  t.gradients = testing::Gather(model, /*gradients=*/true);
  SGD(model.NamedParameters(), {.lr = 0.5}).Step();
  t.parameters = testing::Gather(model);
  return t;
}

class OnMesh : public ::testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(OnMesh, IntegerModelIsBitEqualToOneRank) {
  const auto [dp, tp] = GetParam();
  const Trained want = TrainIntegers(DeviceMesh::Self());
  ASSERT_NE(want.loss, 0);
  for (const auto& [name, g] : want.gradients) {
    EXPECT_NE(g, std::vector<double>(g.size(), 0)) << name << " has no gradient to compare";
  }
  const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext& rank) {
    const Trained got = TrainIntegers(testing::DpTp(dp, tp));
    EXPECT_EQ(got.loss, want.loss) << "rank " << rank.rank();
    EXPECT_EQ(got.gradients, want.gradients) << "rank " << rank.rank();
    EXPECT_EQ(got.parameters, want.parameters) << "rank " << rank.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

constexpr GPTConfig kGpt = {.vocab = 50, .seq = 9, .layers = 2, .hidden = 24, .heads = 4};

testing::NamedValues InitialWeights(const DeviceMesh& mesh, DType dtype) {
  ManualSeed(42);
  GPT model(kGpt);
  SetDType(model, dtype);
  if (!mesh.is_self()) ThrowIfError(ParallelizeModule(model, mesh, GPTPlan(kGpt)));
  Materialize(model);
  testing::NamedValues values = testing::Gather(model);
  values.emplace_back("generator offset",
                      std::vector<double>{static_cast<double>(DefaultGenerator().offset())});
  return values;
}

TEST_P(OnMesh, InitialWeightsAreTheBitsOfOneRank) {
  const auto [dp, tp] = GetParam();
  for (const DType dtype : {DType::kF32, DType::kF64}) {
    const testing::NamedValues want = InitialWeights(DeviceMesh::Self(), dtype);
    const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext&) {
      EXPECT_EQ(InitialWeights(testing::DpTp(dp, tp), dtype), want);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

INSTANTIATE_TEST_SUITE_P(Meshes, OnMesh, ::testing::ValuesIn(testing::DpTpMeshes()),
                         [](const auto& info) {
                           return "dp" + std::to_string(info.param.first) + "tp" +
                                  std::to_string(info.param.second);
                         });

TEST(NoGradSync, AccumulatesAndReducesOnce) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 1);
    Linear model(3, 2);
    DT_RETURN_IF_ERROR(DistributeModule(model, mesh));
    Materialize(model);
    const DTensor x = FromVector(testing::Integers(12, 2), {4, 3},
                                 {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    CommTrace trace;
    {
      const NoGradSync hold;
      sum(model(x)).Backward();
      sum(model(x)).Backward();
    }
    EXPECT_EQ(trace.TotalCount(), 0);
    SGD(model.NamedParameters(), {.lr = 0.0}).Step();  // asks for both gradients
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce), 1);
    EXPECT_EQ(trace.TotalCount(), 1);
    EXPECT_EQ(model.bias()->tensor().grad().ToVector<double>(), (std::vector<double>{8, 8}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// nanotron's order of a step: sums over dp once, after the last microbatch; then the norm, which
// clips; then the update, and what brings new values back.
TEST(Trainer, AStepReducesClipsUpdatesAndGathersInThisOrder) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 400; ++i) tokens.push_back(i * i % 11);
  for (const bool flat : {false, true}) {
    const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
      const GPTConfig config = {.vocab = 11, .seq = 8, .layers = 1, .hidden = 24, .heads = 3};
      GPT model(config);
      const DeviceMesh mesh = testing::DpTp(2, 2);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(config)));
      Materialize(model);
      const auto state = flat ? FlatState("dp") : StateLayoutFn(LikeParameter);
      AdamW optimizer(model.NamedParameters(), {}, state);
      DT_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Of("here", tokens));
      DT_ASSIGN_OR_RETURN(TokenSampler data, TokenSampler::Create(std::move(file), {.seq = 8}));
      TrainerOptions options = {.steps = 2, .batch = 6, .microbatches = 3, .max_norm = 0.1};
      options.mesh = mesh;
      options.placements = {Shard(0), Replicate()};
      DT_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                          Trainer::Create(model, optimizer, data, std::move(options)));
      CommTrace trace;
      DT_RETURN_IF_ERROR(trainer->Run());
      std::vector<std::string> order;
      for (const CommEvent& e : trace.events()) {
        if (!absl::StrContains(e.mesh_dims, "dp")) continue;
        std::string what =
            absl::StrCat(std::string(Name(e.phase)), " ", std::string(Name(e.kind)), " ", e.op);
        if (order.empty() || order.back() != what) order.push_back(std::move(what));
      }
      std::vector<std::string> step = {"forward all_reduce cross_entropy"};
      if (flat) step.emplace_back("backward reduce_scatter gradient");
      step.emplace_back("backward all_reduce gradient");
      step.emplace_back("optimizer all_reduce get_total_norm");
      step.emplace_back("forward all_reduce redistribute");  // of the loss that is told
      if (flat) step.emplace_back("optimizer all_gather redistribute");
      std::vector<std::string> both = step;
      both.insert(both.end(), step.begin(), step.end());
      EXPECT_EQ(order, both);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// What no optimizer updates counts for the norm: not with the gradients of all steps before.
TEST(Trainer, ForgetsGradientsThatItsOptimizerHasNot) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const GPTConfig config = {.vocab = 5, .seq = 4, .layers = 1, .hidden = 8, .heads = 2};
    const DeviceMesh mesh({2}, {"dp"});
    const auto norms = [&](bool whole) {
      GPT model(config);
      ManualSeed(1);
      ThrowIfError(DistributeModule(model, mesh));
      Materialize(model);
      std::vector<NamedParameter> some = model.NamedParameters();
      if (!whole) some.erase(some.begin(), some.end() - 1);
      SGD optimizer(some, {.lr = 0});
      TokenFile file = ValueOrThrow(TokenFile::Of("here", std::vector<int64_t>(5, 1)));
      TokenSampler data = ValueOrThrow(TokenSampler::Create(std::move(file), {.seq = 4}));
      std::vector<double> norms;
      TrainerOptions options = {.steps = 3, .batch = 2, .mesh = mesh, .placements = {Shard(0)}};
      options.lr.peak = 1e-30;  // every step is the first
      options.after_step = [&](const StepReport& report) {
        norms.push_back(report.grad_norm);
        return absl::OkStatus();
      };
      const auto trainer =
          ValueOrThrow(Trainer::Create(model, optimizer, data, std::move(options)));
      ThrowIfError(trainer->Run());
      for (const Parameter* p : model.Parameters()) EXPECT_FALSE(p->tensor().grad().defined());
      return norms;
    };
    EXPECT_EQ(norms(/*whole=*/false), norms(/*whole=*/true));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Trainer, TakesAMeshOfAllRanks) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    Linear model(2, 2);
    Materialize(model);
    SGD optimizer(model.NamedParameters());
    DT_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Of("here", std::vector<int64_t>(40, 1)));
    DT_ASSIGN_OR_RETURN(TokenSampler data, TokenSampler::Create(std::move(file), {.seq = 8}));
    const auto message = [&](const DeviceMesh& mesh) {
      TrainerOptions options = {.steps = 1, .batch = 2, .mesh = mesh, .placements = {Shard(0)}};
      return std::string(
          Trainer::Create(model, optimizer, data, std::move(options)).status().message());
    };
    EXPECT_EQ(message(DeviceMesh({2}, {"dp"})),
              "[trainer] the batch's mesh dp=2 has 2 ranks, the world has 3: all of them train, so "
              "it must have all");
    EXPECT_EQ(message(DeviceMesh()), "[trainer] the batch's mesh is null");
    EXPECT_EQ(message(DeviceMesh({3}, {"dp"})), "");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::spmd_training_test
