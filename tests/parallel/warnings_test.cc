// What is said about a plan that does not fit its module: moves that an op makes by itself, and
// ranks without work. A plan that fits says nothing.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/expect_comm.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/support.h"

namespace dtensor::warnings_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

// Attention of `heads` query heads and `groups` heads of keys and values, each of size 8.
class GroupedAttention : public Module {
 public:
  GroupedAttention(int64_t heads, int64_t groups)
      : wq_(AddChild<Linear>("wq", 16, 8 * heads)),
        wk_(AddChild<Linear>("wk", 16, 8 * groups)),
        wv_(AddChild<Linear>("wv", 16, 8 * groups)),
        wo_(AddChild<Linear>("wo", 8 * heads, 16)) {}
  std::string type_name() const override { return "GroupedAttention"; }

 protected:
  Values Forward(const Values& in) override {
    const auto heads = [&](Linear& w) {
      return transpose(unflatten(w(in[0]), -1, {-1, 8}), 1, 2);  // [b, heads, s, 8]
    };
    const DTensor y = scaled_dot_product_attention(heads(wq_), heads(wk_), heads(wv_),
                                                   /*mask=*/{}, /*is_causal=*/true, /*scale=*/{},
                                                   /*enable_gqa=*/true);
    return {wo_(flatten(transpose(y, 1, 2), 2, 3))};
  }

 private:
  Linear &wq_, &wk_, &wv_, &wo_;
};

Plan Units(int64_t q, int64_t kv) {
  return {{"wq", ColwiseParallel({.unit = q})},
          {"w[kv]", ColwiseParallel({.unit = kv})},
          {"wo", RowwiseParallel({.unit = q})}};
}

// Of so many ranks in tp: alone, and beside a dp dim over which the batch is cut.
DeviceMesh MeshOf(int64_t dp, int64_t tp) {
  return dp == 1 ? DeviceMesh({tp}, {"tp"}) : testing::DpTp(dp, tp);
}
TensorOptions Batch(const DeviceMesh& mesh, DType dtype = DType::kF32) {
  Placements placements(static_cast<size_t>(mesh.ndim()), Replicate());
  if (mesh.ndim() == 2) placements[0] = Shard(0);
  return {dtype, mesh, placements};
}

// What a plan says on stderr when it is applied to a model, and when two steps are run.
struct Said {
  std::string plan, run;
};
template <class M, class... A>
Said Warnings(int64_t dp, int64_t tp, const Plan& plan, const ParallelizeOptions& options,
              A... args) {
  Said said;
  ::testing::internal::CaptureStderr();
  absl::Status status = RunSpmd(dp * tp, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = MeshOf(dp, tp);
    M model(args...);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan, options));
    DT_ASSIGN_OR_RETURN(Comm * world, rank.WorldComm());
    DT_RETURN_IF_ERROR(world->Barrier().Wait());
    if (rank.rank() == 0) {
      said.plan = ::testing::internal::GetCapturedStderr();
      ::testing::internal::CaptureStderr();
    }
    Materialize(model);
    const DTensor x = ones({2, 6, 16}, Batch(mesh));
    for (int step = 0; step < 2; ++step) sum(model(x)).Backward();
    return absl::OkStatus();
  });
  said.run = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(status.ok()) << status;
  return said;
}
Said Grouped(int64_t dp, int64_t tp, const Plan& plan, bool warn = true) {
  return Warnings<GroupedAttention>(dp, tp, plan, {.warn = warn}, 6, 2);
}

// By how many ranks of dp there are: what is said does not depend on it.
class PlanWarnings : public ::testing::TestWithParam<int64_t> {
 protected:
  const int64_t dp = GetParam();
};
INSTANTIATE_TEST_SUITE_P(Dp, PlanWarnings, ::testing::Values(1, 2));

size_t Lines(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST_P(PlanWarnings, UnitsOfGroupedHeads) {
  // Cuts of whole groups: q 3 heads, k and v 1, on each of 2 ranks.
  const Said fits = Grouped(dp, 2, Units(8 * 6 / 2, 8));
  EXPECT_THAT(fits.plan, IsEmpty());
  EXPECT_THAT(fits.run, IsEmpty());
  // Any feature is a cut: 16 features of 2 heads on 2 ranks, but q's 48 on 3 are no whole heads.
  const Said single = Grouped(dp, 3, Units(8, 8));
  EXPECT_THAT(single.run, AllOf(HasSubstr("warning: GroupedAttention: scaled_dot_product_attention "
                                          "moves its input"),
                                HasSubstr(" over tp, "), HasSubstr(" bytes to a rank"),
                                HasSubstr("docs/guide/models.md"),
                                HasSubstr("ParallelizeOptions::warn = false")));
  EXPECT_EQ(Lines(single.run), 1u) << single.run;  // once, not for each step, input and rank
}

TEST_P(PlanWarnings, RanksWithoutWork) {
  const Said idle = Grouped(dp, 4, Units(8 * 6 / 2, 8));
  EXPECT_THAT(idle.plan, AllOf(HasSubstr("wq.weight and 2 more parameters: 2 units of 24 on 4 "
                                         "ranks: 2 hold them all, the rest idles"),
                               HasSubstr("wk.weight and 3 more parameters: 2 units of 8 on 4 "
                                         "ranks: 2 hold them all")));
  EXPECT_EQ(Lines(idle.plan), 2u) << idle.plan;
  EXPECT_THAT(idle.run, IsEmpty());
  const Plan fused = {{"", ColwiseParallel({.segments = {{48, 24}, {16, 8}, {16, 8}}})}};
  EXPECT_THAT(Warnings<Linear>(dp, 4, fused, {}, 16, 80).plan,
              HasSubstr("weight and 1 more parameters: 2 units of 24 on 4 ranks: 2 hold them all"));
  // Keys and values on every rank instead: all ranks work, nothing is moved.
  const Plan whole = {{"wq", ColwiseParallel({.unit = 8})}, {"wo", RowwiseParallel({.unit = 8})}};
  const Said busy = Warnings<GroupedAttention>(dp, 3, whole, {}, 6, 1);
  EXPECT_THAT(busy.plan, IsEmpty());
  EXPECT_THAT(busy.run, IsEmpty());
}

TEST_P(PlanWarnings, CanBeTurnedOff) {
  EXPECT_THAT(Grouped(dp, 3, Units(8, 8), /*warn=*/false).run, IsEmpty());
  EXPECT_THAT(Grouped(dp, 4, Units(24, 8), /*warn=*/false).plan, IsEmpty());
}

TEST_P(PlanWarnings, OutsideOfAPlanNothingIsSaid) {
  ::testing::internal::CaptureStderr();
  const absl::Status status = RunSpmd(dp * 2, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = MeshOf(dp, 2);
    TensorOptions columns = Batch(mesh);
    columns.placements.back() = Shard(1);
    LayerNorm norm(4);
    DT_RETURN_IF_ERROR(DistributeModule(norm, mesh));
    Materialize(norm);
    CommTrace trace;
    norm(ones({4, 4}, columns));
    EXPECT_GT(trace.TotalCount(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(::testing::internal::GetCapturedStderr(), IsEmpty());
}

// A layout by a name that no call has: told once where a name without a layout is almost that.
TEST_P(PlanWarnings, MisspeltNames) {
  struct Masked : Module {
    Values Forward(const Values& in) override { return {in[0] * in.Named("mask")}; }
  };
  const auto said = [&](const std::string& planned, const std::string& given, bool warn) {
    ::testing::internal::CaptureStderr();
    const absl::Status status = RunSpmd(dp * 2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = MeshOf(dp, 2);
      Masked model;
      DT_RETURN_IF_ERROR(ParallelizeModule(
          model, mesh, PrepareModule({.kwargs = {{planned, Replicate()}}}), {.warn = warn}));
      const DTensor x = ones({2, 4}, Batch(mesh));
      for (int step = 0; step < 2; ++step) model(Values{x}.Add("mask", x).Add(given, x));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string told = said("msak", "positions", true);
  EXPECT_THAT(told,
              HasSubstr("the plan has a layout of the root: input \"msak\", the call has none "
                        "of that name but \"mask\", which has no layout"));
  EXPECT_EQ(Lines(told), 1u) << told;
  EXPECT_THAT(said("msak", "positions", false), IsEmpty());
  EXPECT_THAT(said("mask", "positions", true), IsEmpty());
  EXPECT_THAT(said("bias", "positions", true), IsEmpty());  // this call has none, and may
}

// The plan of docs/guide/models.md: the residual stream sharded by sequence.
TEST_P(PlanWarnings, SequenceParallelMovesNothingByItself) {
  const GPTConfig config = {.vocab = 16, .seq = 8, .layers = 2, .hidden = 16, .heads = 4};
  const int64_t d = 4;
  const Plan plan = {
      {"tokens", RowwiseParallel({.output = Shard(1)})},
      {"blocks.*.attn.w[qkv]", ColwiseParallel({.unit = d, .input = Replicate()})},
      {"blocks.*.attn.wo", RowwiseParallel({.unit = d, .output = Shard(1)})},
      {"blocks.*.mlp.up", ColwiseParallel()},
      {"blocks.*.mlp.down", RowwiseParallel({.output = Shard(1)})},
      {"head", ColwiseParallel()},
  };
  for (const int64_t tp : {2, 3, 4}) {
    const absl::Status status = RunSpmd(dp * tp, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = MeshOf(dp, tp);
      ManualSeed(1);
      GPT model(config);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, plan));
      Materialize(model);
      std::vector<double> ids;
      for (int i = 0; i < 16; ++i) ids.push_back(i * 5 % 16);
      const DTensor x = FromVector(ids, {2, 8}, Batch(mesh, DType::kI64));
      const StrictRedistribute strict;
      CommTrace trace;
      const DTensor logits = model(x);
      for (const CommEvent& e : trace.events()) EXPECT_EQ(e.mesh_dims, "tp");
      EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce), 0);
      EXPECT_EQ(trace.Count(CollectiveKind::kReduceScatter), 5);  // tokens, wo and down
      EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), 5);      // qkv together, up; head
      cross_entropy(flatten(logits, 0, 1), flatten(x, 0, 1)).Backward();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace dtensor::warnings_test
