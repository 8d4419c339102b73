// Plans: what patterns name, what styles place and communicate, and the errors of a plan that is
// wrong.
#include "dtensor/parallel/plan/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/expect_comm.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::plan_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

constexpr GPTConfig kSmall = {.vocab = 16, .seq = 8, .layers = 2, .hidden = 8, .heads = 2};

std::vector<std::string> Matched(Module& root, const std::string& pattern) {
  std::vector<std::string> names;
  for (const NamedModule& m : ValueOrThrow(MatchModules(root, pattern))) names.push_back(m.fqn);
  return names;
}

TEST(Patterns, MatchAtomByAtom) {
  GPT model(kSmall);
  EXPECT_THAT(
      Matched(model, "blocks.*.attn.w[qk]"),
      ElementsAre("blocks.0.attn.wq", "blocks.0.attn.wk", "blocks.1.attn.wq", "blocks.1.attn.wk"));
  EXPECT_THAT(Matched(model, "blocks.1.norm?"), ElementsAre("blocks.1.norm1", "blocks.1.norm2"));
  EXPECT_THAT(Matched(model, "*"),  // no dots
              ElementsAre("tokens", "drop", "blocks", "norm", "head"));
  EXPECT_THAT(Matched(model, ""), ElementsAre(""));
}

// Of RunSpmd(1): the mesh is there, and nothing is parallel.
absl::Status Apply(const Plan& plan, const ParallelizeOptions& options = {}) {
  GPT model(kSmall);
  return ParallelizeModule(model, testing::DpTp(1, 1), plan, options);
}

TEST(PlanErrors, ATypoNamesTheAtomAndTheNearest) {
  EXPECT_THAT(std::string(Apply({{"blocks.*.atn.wq", ColwiseParallel()}}).message()),
              AllOf(HasSubstr("\"blocks.*.atn.wq\" matches nothing"), HasSubstr("blocks.0"),
                    HasSubstr("called \"atn\""), HasSubstr("nearest: attn")));
  EXPECT_THAT(std::string(Apply({{"haed", ColwiseParallel()}}).message()),
              AllOf(HasSubstr("no child of the root"), HasSubstr("nearest: head")));
  EXPECT_THAT(std::string(Apply({{"head.x", ColwiseParallel()}}).message()),
              HasSubstr("it has no children"));
  EXPECT_THAT(std::string(Apply({{"head.weight", ColwiseParallel()}}).message()),
              HasSubstr("that is a parameter of it, patterns name modules"));
}

TEST(PlanErrors, ConflictsNameBothPatterns) {
  const absl::Status status =
      Apply({{"blocks.*.attn.w?", ColwiseParallel()}, {"blocks.1.attn.wo", RowwiseParallel()}});
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("two patterns match module \"blocks.1.attn.wo\""),
                    HasSubstr("\"blocks.*.attn.w?\""), HasSubstr("\"blocks.1.attn.wo\"")));
}

TEST(PlanErrors, StylesSayWhatTheyServe) {
  EXPECT_THAT(std::string(Apply({{"norm", RowwiseParallel()}}).message()),
              AllOf(HasSubstr("module \"norm\""), HasSubstr("not LayerNorm")));
}

TEST(PlanErrors, TheMeshDimMustBeThere) {
  EXPECT_THAT(std::string(Apply({}, {.mesh_dim = "tpp"}).message()),
              AllOf(HasSubstr("tpp"), HasSubstr("tp")));
}

TEST(PlanErrors, NothingChangesWhenAPlanFails) {
  GPT model(kSmall);
  const absl::Status status = ParallelizeModule(
      model, testing::DpTp(1, 1), {{"head", ColwiseParallel()}, {"hed", ColwiseParallel()}});
  EXPECT_FALSE(status.ok());
  EXPECT_TRUE(model.FindParameter("head.weight")->mesh().is_self());
}

TEST(PlanErrors, AMeshDimIsUsedOnce) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    Sequential model;
    model.Append<Linear>(4, 4);
    const DeviceMesh mesh = testing::DpTp(1, 2);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, {{"0", ColwiseParallel()}}));
    return ParallelizeModule(model, mesh, {{"0", RowwiseParallel()}});
  });
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("parameter 0.weight"), HasSubstr("has S(0) on this mesh dim")));
}

TEST(PlanErrors, LocalInputsAreRefused) {
  Linear layer(4, 4);
  ASSERT_TRUE(ParallelizeModule(layer, testing::DpTp(1, 1), {{"", ColwiseParallel()}}).ok());
  Materialize(layer);
  EXPECT_THAT(MessageOf([&] { layer(ones({1, 4})); }),
              AllOf(HasSubstr("input 0"), HasSubstr("DistributeTensor")));
}

TEST(PlanErrors, ALayoutThatDoesNotFitNamesTheValue) {
  Sequential model;
  model.Append<Linear>(4, 4);
  const Plan plan = {{"0", ColwiseParallel({.output = Shard(2)})}};
  const DeviceMesh mesh = testing::DpTp(1, 1);
  ASSERT_TRUE(ParallelizeModule(model, mesh, plan).ok());
  Materialize(model);
  const DTensor x = ones({2, 4}, {DType::kF32, mesh, {Replicate(), Replicate()}});
  EXPECT_THAT(MessageOf([&] { model(x); }),
              AllOf(HasSubstr("the plan's layout of 0: output 0"),
                    HasSubstr("dim 2 is out of range for shape [2, 4]")));
}

TEST(PlanErrors, AParameterThatIsNotThereIsNamed) {
  GPT model(kSmall);
  const Plan plan = {
      {"head", PrepareModule({.parameters = {{model.FindParameter("head.wieght"), Shard(0)}}})}};
  EXPECT_THAT(std::string(ParallelizeModule(model, testing::DpTp(1, 1), plan).message()),
              AllOf(HasSubstr("pattern \"head\" (PrepareModule)"), HasSubstr("module \"head\""),
                    HasSubstr("parameter 0 of its layout is null")));
  EXPECT_THAT(std::string(Apply({{"head", ColwiseParallel({.unit = -1})}}).message()),
              HasSubstr("unit -1 is no number of features"));
}

TEST(PlanErrors, AMeshLargerThanTheWorldChangesNothing) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    Linear layer(4, 4);
    const absl::Status large =
        ParallelizeModule(layer, DeviceMesh({4}, {"tp"}), {{"", ColwiseParallel()}});
    EXPECT_THAT(std::string(large.message()), HasSubstr("needs ranks 0 to 3, the world has 2"));
    EXPECT_TRUE(layer.weight().mesh().is_self());
    Materialize(layer);
    EXPECT_EQ(layer(ones({1, 4})).mesh().is_self(), true);  // without a hook
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Whose values a module has that each rank has made for itself.
TEST(ParallelizeModule, TakesTheValuesOfTheRankThatIsNamed) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const double mine = static_cast<double>(rank.rank() + 1);
    for (const auto& [source, want] : {std::pair<int64_t, double>{0, 1}, {1, 2}, {-1, mine}}) {
      Linear layer(4, 4);
      Materialize(layer);
      layer.weight().Set(full({4, 4}, mine));
      const CommTrace trace;
      DT_RETURN_IF_ERROR(
          ParallelizeModule(layer, mesh, {{"", ColwiseParallel()}}, {.src_data_rank = source}));
      EXPECT_EQ(trace.Count(CollectiveKind::kBroadcast), source < 0 ? 0 : 2) << source;
      const Tensor local = *layer.weight().tensor().Detach().local().ToHost();
      EXPECT_EQ(*local.data_as<float>(), want) << source;
    }
    Linear layer(4, 4);
    EXPECT_THAT(
        std::string(ParallelizeModule(layer, mesh, {{"", ColwiseParallel()}}, {.src_data_rank = 2})
                        .message()),
        HasSubstr("src_data_rank 2: the mesh tp=2 has 2 ranks"));
    EXPECT_TRUE(layer.weight().mesh().is_self());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DistributeModule, LeavesWhatAPlanHasPlaced) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Sequential model;
    model.Append<Linear>(4, 4);
    model.FindParameter("0.weight")->Place(mesh, {Shard(0)});
    DT_RETURN_IF_ERROR(DistributeModule(
        model, mesh, [](const NamedParameter&) { return Placements{Replicate()}; }));
    EXPECT_EQ(model.FindParameter("0.weight")->placements()[0], Shard(0));
    EXPECT_EQ(model.FindParameter("0.bias")->placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DistributeModule, SaysWhereItWouldPlaceNothing) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 1);
    const auto rows = [](const NamedParameter&) { return Placements{Shard(0), Replicate()}; };
    GPT first(kSmall), second(kSmall);
    const Plan plan = {{"head", ColwiseParallel()}};
    DT_RETURN_IF_ERROR(ParallelizeModule(first, mesh, plan));
    const absl::Status late = DistributeModule(first, mesh, rows);
    EXPECT_EQ(late.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(late.message()),
                AllOf(HasSubstr("parameters are placed already"), HasSubstr("before Parallelize")));
    DT_RETURN_IF_ERROR(DistributeModule(first, mesh));  // asks for nothing
    DT_RETURN_IF_ERROR(DistributeModule(second, mesh, rows));
    DT_RETURN_IF_ERROR(ParallelizeModule(second, mesh, plan));
    EXPECT_EQ(second.FindParameter("head.weight")->placements(), (Placements{Shard(0), Shard(0)}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DistributeModule, ReplicatesOrAsksTheFunction) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    Linear a(4, 4), b(4, 4), c(4, 4);
    DT_RETURN_IF_ERROR(DistributeModule(a, mesh));
    EXPECT_EQ(a.weight().placements()[0], Replicate());
    DT_RETURN_IF_ERROR(DistributeModule(b, mesh, [](const NamedParameter& p) {
      return p.fqn == "weight" ? Placements{Shard(1)} : Placements{Replicate()};
    }));
    EXPECT_EQ(b.weight().placements()[0], Shard(1));
    const absl::Status bad =
        DistributeModule(c, mesh, [](const NamedParameter&) { return Placements{Shard(1)}; });
    EXPECT_THAT(std::string(bad.message()), AllOf(HasSubstr("parameter bias"), HasSubstr("dim")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(DistributeModule, MovesValuesThatAreThere) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    ManualSeed(4);
    Linear layer(4, 6);
    Materialize(layer);
    const std::vector<double> before = layer.weight().tensor().ToVector<double>();
    DT_RETURN_IF_ERROR(
        ParallelizeModule(layer, DeviceMesh({2}, {"tp"}), {{"", ColwiseParallel()}}));
    EXPECT_EQ(layer.weight().tensor().local().shape(), Shape({3, 4}));
    EXPECT_EQ(layer.weight().tensor().ToVector<double>(), before);
    EXPECT_TRUE(layer.weight().tensor().requires_grad());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Whatever the ranks have drawn, each for itself.
TEST(DistributeModule, ValuesThatAreThereAreTheFirstRanks) {
  for (const bool planned : {false, true}) {
    const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
      ManualSeed(4);
      Linear first(4, 6);
      Materialize(first);
      ManualSeed(4 + rank.rank());
      Linear layer(4, 6);
      Materialize(layer);
      const DeviceMesh mesh({2}, {"tp"});
      DT_RETURN_IF_ERROR(planned ? ParallelizeModule(layer, mesh, {{"", ColwiseParallel()}})
                                 : DistributeModule(layer, mesh));
      for (const bool weight : {true, false}) {
        const auto of = [&](Linear& l) -> const DTensor& {
          return weight ? l.weight().tensor() : l.bias()->tensor();
        };
        EXPECT_EQ(of(layer).ToVector<double>(), of(first).ToVector<double>());
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// --- what a plan communicates -------------------------------------------------------------------

// One forward and backward of `model` under a plan on tp=2, and nothing implicit.
template <class M>
void ExpectOneAllReduceEachWay(const std::function<std::unique_ptr<M>()>& build, const Plan& plan,
                               const std::string& forward, const std::string& backward) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    std::unique_ptr<M> model = build();
    DT_RETURN_IF_ERROR(ParallelizeModule(*model, mesh, plan));
    Materialize(*model);
    DTensor x = randn({2, 3, 8}, {.mesh = mesh});
    x.RequiresGrad();
    const StrictRedistribute strict;  // the plan says all there is to say
    CommTrace trace;
    const DTensor y = (*model)(x);
    y.Backward(ones(y.shape(), {.mesh = mesh}));
    const int64_t bytes = x.numel() * 4;  // 2B(n-1)/n of two ranks
    EXPECT_COMM(trace,
                {.kind = CollectiveKind::kAllReduce,
                 .phase = CommPhase::kForward,
                 .module = forward,
                 .count = 1,
                 .bytes = bytes},
                {.kind = CollectiveKind::kAllReduce,
                 .phase = CommPhase::kBackward,
                 .module = backward,
                 .count = 1,
                 .bytes = bytes});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PlanTraffic, ColwiseThenRowwiseIsOneAllReduceEachWay) {
  ExpectOneAllReduceEachWay<MLP>([] { return std::make_unique<MLP>(8, 12); },
                                 {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}, "down",
                                 "*");
}

TEST(PlanTraffic, QKVShareOne) {
  ExpectOneAllReduceEachWay<CausalSelfAttention>(
      [] { return std::make_unique<CausalSelfAttention>(8, 2); },
      {{"w[qkv]", ColwiseParallel({.unit = 4})}, {"wo", RowwiseParallel({.unit = 4})}}, "wo", "*");
}

TEST(PlanTraffic, QKVShareOneGatherOfAShardedInput) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    CausalSelfAttention model(8, 2);
    DT_RETURN_IF_ERROR(ParallelizeModule(
        model, mesh,
        {{"w[qkv]", ColwiseParallel({.unit = 4})}, {"wo", RowwiseParallel({.unit = 4})}}));
    Materialize(model);
    DTensor x = randn({2, 4, 8}, {.mesh = mesh, .placements = {Shard(1)}});
    x.RequiresGrad();
    CommTrace trace;
    const DTensor y = model(x);
    y.Backward(ones(y.shape(), {.mesh = mesh}));
    EXPECT_COMM(trace, {.kind = CollectiveKind::kAllGather, .module = "w[qkv]", .count = 1},
                {.kind = CollectiveKind::kAllReduce, .module = "wo", .count = 1},
                {.kind = CollectiveKind::kReduceScatter,
                 .phase = CommPhase::kBackward,
                 .module = "w[qkv]",
                 .count = 1});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Attention weights under dropout are made of matmul, softmax and matmul: heads stay cut through
// all of them.
TEST(PlanTraffic, DropoutMovesNothing) {
  const GPTConfig config = {
      .vocab = 16, .seq = 6, .layers = 2, .hidden = 8, .heads = 4, .dropout = 0.1};
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    for (const DeviceMesh& mesh : {testing::DpTp(1, 4), testing::DpTp(2, 2)}) {
      GPT model(config);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(config)));
      Materialize(model);
      const std::vector<int64_t> v(4 * 6, 3);
      const DTensor ids = FromVector(v, {4, 6}, {DType::kI64, mesh, {Shard(0), Replicate()}});
      const StrictRedistribute strict;
      CommTrace trace;
      const DTensor logits = model(ids);
      EXPECT_COMM(trace, {.kind = CollectiveKind::kAllReduce, .mesh_dims = "tp", .count = 5});
      cross_entropy(reshape(logits, {24, 16}), reshape(ids, {24})).Backward();
      EXPECT_EQ(trace.Count(CollectiveKind::kExchange), 0) << trace.ToString(CommBy::kOp);
      EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), 0) << trace.ToString(CommBy::kOp);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Between blocks a sequence-parallel plan cuts the sequence. Of one token, which is what decoding
// runs on, there is nothing to cut: each sum is reduced once, and nothing is gathered back.
TEST(PlanTraffic, DecodingUnderSequenceParallelReducesOncePerSum) {
  const GPTConfig config = {.vocab = 16, .seq = 8, .layers = 2, .hidden = 8, .heads = 4};
  const ParallelOptions cut = {.output = Shard(1)};
  const ParallelOptions heads = {.unit = 2}, cut_heads = {.unit = 2, .output = Shard(1)};
  const Plan plan = {{"tokens", RowwiseParallel(cut)},
                     {"blocks.*.attn.w[qkv]", ColwiseParallel(heads)},
                     {"blocks.*.attn.wo", RowwiseParallel(cut_heads)},
                     {"blocks.*.mlp.up", ColwiseParallel()},
                     {"blocks.*.mlp.down", RowwiseParallel(cut)},
                     {"head", ColwiseParallel()}};
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    for (const DeviceMesh& mesh : {testing::DpTp(1, 4), testing::DpTp(2, 2)}) {
      GPT model(config), whole(config);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan));
      ManualSeed(5);
      Materialize(model);
      ManualSeed(5);
      Materialize(whole);
      const NoGrad no_grad;
      for (const int64_t tokens : {1, 8}) {
        const std::vector<int64_t> v(2 * tokens, 7);
        const DTensor ids =
            FromVector(v, {2, tokens}, {DType::kI64, mesh, {Shard(0), Replicate()}});
        CommTrace trace;
        const DTensor logits = model(ids);
        if (tokens == 1) {
          EXPECT_COMM(trace, {.kind = CollectiveKind::kAllReduce, .implicit = false, .count = 5});
        } else {
          EXPECT_EQ(trace.Count(CollectiveKind::kReduceScatter), 5) << trace.ToString();
        }
        const std::vector<double> got = logits.ToVector<double>();
        const std::vector<double> want =
            whole(FromVector(v, {2, tokens}, {DType::kI64})).ToVector<double>();
        for (size_t i = 0; i < want.size(); ++i) EXPECT_NEAR(got[i], want[i], 1e-5);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A dim of size 1 that is cut stays on the rank that has it.
TEST(PlanTraffic, WhatThereIsOneOfStaysWhereItIs) {
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const std::pair<DeviceMesh, Placements> layouts[] = {
        {DeviceMesh({4}), {Shard(0)}},
        {DeviceMesh({2, 2}), {Shard(0), Shard(1)}},
        {DeviceMesh({2, 2}), {Shard(0), Shard(0)}}};
    for (const auto& [mesh, placements] : layouts) {
      DTensor x = FromVector<double>({-1, 2, 3, -4}, {1, 4}, {DType::kF64, mesh, placements});
      x.RequiresGrad();
      CommTrace trace;
      const DTensor y = relu(x) * 2 + x;
      EXPECT_EQ(y.placements(), x.placements());
      y.Backward(ones_like(y));
      EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
      EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{-1, 6, 9, -4}));
      EXPECT_EQ(x.grad().ToVector<double>(), (std::vector<double>{1, 3, 3, 1}));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PlanTraffic, ClassShardedCrossEntropyMovesNoLogits) {
  const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({4}, {"tp"});
    const int64_t rows = 6, classes = 64;
    DTensor logits = randn({rows, classes}, {.mesh = mesh, .placements = {Shard(1)}});
    logits.RequiresGrad();
    const DTensor target =
        FromVector<int64_t>({0, 63, 17, 16, 15, 40}, {rows}, {.dtype = DType::kI64, .mesh = mesh});
    CommTrace trace;
    cross_entropy(logits, target).Backward();
    // Numbers per row, no logits: the largest of each, then two sums in one; none in backward.
    EXPECT_LE(trace.MaxPayloadBytes(), rows * 8);
    EXPECT_COMM(trace, {.kind = CollectiveKind::kAllReduce,
                        .phase = CommPhase::kForward,
                        .op = "cross_entropy",
                        .implicit = false,
                        .count = 2,
                        .bytes = 2 * (rows + 2 * rows) * 4 * 3 / 4});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(PlanTraffic, ADataParallelStepReducesAllParametersTogether) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 1);
    GPT model(kSmall);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(kSmall)));
    Materialize(model);
    const TensorOptions options = {
        .dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0), Replicate()}};
    const DTensor ids = FromVector<int64_t>({0, 1, 2, 3, 4, 5, 6, 7}, {2, 4}, options);
    const DTensor loss = cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1));
    CommTrace trace;
    loss.Backward();
    int64_t bytes = 0;
    for (const NamedParameter& p : model.NamedParameters()) {
      const int64_t used = p.fqn == "positions" ? 4 : p.parameter->shape()[0];  // rows
      bytes += p.parameter->tensor().spec().bytes() / p.parameter->shape()[0] * used;
    }
    EXPECT_COMM(trace, {.kind = CollectiveKind::kAllReduce,
                        .mesh_dims = "dp",
                        .phase = CommPhase::kBackward,
                        .count = 1,
                        .bytes = bytes});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One decoded token under a sequence-parallel plan: there is no sequence to share.
TEST(PlanTraffic, AShardOfOneIndexStandsForReplicate) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    MLP model(8, 12);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh,
                                         {{"up", ColwiseParallel({.input = Shard(1)})},
                                          {"down", RowwiseParallel({.output = Shard(1)})}}));
    Materialize(model);
    const DTensor sequence = model(randn({2, 4, 8}, {.mesh = mesh}));
    EXPECT_EQ(sequence.placements()[0], Shard(1));
    const DTensor token = model(randn({2, 1, 8}, {.mesh = mesh}));
    EXPECT_EQ(token.placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::plan_test
