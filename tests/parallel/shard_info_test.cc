// What ranks hold of parameters, as pairs of slices; copies that are none are found by name.
#include "dtensor/parallel/module/shard_info.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/check_copies.h"
#include "tests/parallel/support.h"

namespace dtensor::shard_info_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

// A fused q, k, v of unequal parts: put together by its pairs, all ranks' parts are the whole once.
TEST(ShardedInfo, PairsPutTheWholeTogether) {
  constexpr int64_t kRows = 16, kColumns = 4;
  std::vector<double> whole(kRows * kColumns, -1);
  std::vector<std::string> texts(2);
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor full = view(arange(0, kRows * kColumns), {kRows, kColumns});
    const Placements cut = {SegmentedShard(0, Segments{8, 4, 4})};
    const DTensor t = DistributeTensor(full, mesh, cut);
    DT_ASSIGN_OR_RETURN(const ShardedInfo info, ShardedInfoOf(t.spec()));
    EXPECT_THAT(info.global_ranks, ElementsAre(0, 1));
    EXPECT_EQ(info.unsharded_shape, Shape({kRows, kColumns}));
    texts[rank.rank()] = info.ToText();
    DT_ASSIGN_OR_RETURN(const std::vector<SlicesPair> parsed, ParseSlicesPairs(info.ToText()));
    EXPECT_EQ(parsed, info.local_global_slices);
    const std::vector<double> mine = t.local().ToVector<double>();
    for (const SlicesPair& pair : parsed) {
      for (int64_t i = 0; i < pair.local[0].length(); ++i) {
        for (int64_t k = 0; k < pair.local[1].length(); ++k) {
          double& at = whole[(pair.global[0].start + i) * kColumns + pair.global[1].start + k];
          EXPECT_EQ(at, -1);  // once
          at = mine[(pair.local[0].start + i) * kColumns + pair.local[1].start + k];
        }
      }
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (int64_t i = 0; i < kRows * kColumns; ++i) EXPECT_EQ(whole[i], static_cast<double>(i));
  EXPECT_EQ(texts[1],
            "0,4,1|0,4,1#4,8,1|0,4,1;4,6,1|0,4,1#10,12,1|0,4,1;6,8,1|0,4,1#14,16,1|0,4,1");
}

TEST(ShardedInfo, RefusesTextsThatDoNotRead) {
  const auto why = [](absl::string_view text) {
    return std::string(ParseSlicesPairs(text).status().message());
  };
  EXPECT_THAT(why("0,4,1"), HasSubstr("local#global"));
  EXPECT_THAT(why("0,4,1#0,4"), HasSubstr("\"0,4\" is no slice"));
  EXPECT_THAT(why("0,4,2#0,4,2"), HasSubstr("no slice"));
  EXPECT_THAT(why("4,0,1#0,4,1"), HasSubstr("no slice"));
  EXPECT_THAT(why("0,4,1#0,4,1|0,2,1"), HasSubstr("numbers of dims"));
}

struct Tied : Module {
  Embedding& tokens = AddChild<Embedding>("tokens", 12, 4);
  LayerNorm& norm = AddChild<LayerNorm>("norm", 4);
  Linear& head = AddChild<Linear>("head", 4, 12, false);
  Tied() { Tie(tokens.weight(), head.weight()); }
  Values Forward(const Values& ids) override { return {head(norm(tokens(ids[0])))}; }
};

TEST(CheckCopies, NamesWhatDiffersAndTheRanks) {
  const absl::Status status = RunSpmd(4, [](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    Tied model;
    DT_RETURN_IF_ERROR(ParallelizeModule(
        model, mesh, {{"tokens", RowwiseParallel()}, {"head", ColwiseParallel()}}));
    Materialize(model);
    const NamedParameter table = model.NamedParameters()[0];
    DT_ASSIGN_OR_RETURN(const TiedInfo tied, TiedInfoOf(table));
    EXPECT_THAT(tied.names, ElementsAre("tokens.weight", "head.weight"));
    EXPECT_TRUE(tied.is_tied());
    EXPECT_THAT(tied.global_ranks, ElementsAre(rank.rank() % 2, rank.rank() % 2 + 2));
    AdamW optim(model.NamedParameters(), {});
    const DTensor ids =
        FromVector<int64_t>({1, 5, 7, 11}, {2, 2}, {DType::kI64, mesh, {Shard(0), Replicate()}});
    cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1)).Backward();
    optim.Step();
    EXPECT_TRUE(CheckCopies(model.GetStateDict()).ok());
    EXPECT_TRUE(CheckCopies(optim.GetStateDict()).ok());
    // One rank's copy of a norm, and another's of a state, are corrupted behind everybody's back.
    const auto corrupt = [&](const DTensor& t, int64_t who) {
      if (rank.rank() == who) add_(OnSelf(t.local()), ones(t.spec().local_shape()));
    };
    {
      const NoGrad no_grad;
      corrupt(model.FindParameter("norm.bias")->tensor(), 2);
    }
    const absl::Status parameters = CheckCopies(model.GetStateDict());
    EXPECT_EQ(parameters.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(parameters.message()),
                AllOf(HasSubstr("norm.bias on rank 2 is not that of rank 0"),
                      Not(HasSubstr("norm.weight"))));
    const NoGrad no_grad;
    for (const auto& [name, state] : optim.GetStateDict()) {
      if (name == "tokens.weight/exp_avg") corrupt(state, 3);
    }
    EXPECT_THAT(std::string(CheckCopies(optim.GetStateDict()).message()),
                HasSubstr("tokens.weight/exp_avg on rank 3 is not that of rank 1"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::shard_info_test
