// Explain and Describe say what then happens, also for worlds of 16,384 ranks.
#include "dtensor/explain.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor::explain_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Explain, ChoosesWhatDispatchDoes) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor x = ones({8, 6}, {.mesh = mesh, .placements = {Shard(0), Shard(1)}});
    const DTensor w = ones({6, 4}, {.mesh = mesh, .placements = {Replicate(), Shard(1)}});
    const DTensor* inputs[] = {&x, &w};
    CommTrace trace;
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("matmul"), inputs));
    EXPECT_EQ(trace.TotalCount(), 0);
    const DTensor y = matmul(x, w);
    EXPECT_EQ(Placements(y.placements().begin(), y.placements().end()), e.chosen.outputs[0]);
    EXPECT_GT(e.chosen.bytes, 0);
    EXPECT_GT(e.chosen.modelled_us, 0);
    EXPECT_GT(e.alternatives.size(), 5u);
    EXPECT_EQ(e.alternatives[0].bytes, e.chosen.bytes);
    for (const Alternative& a : e.alternatives) EXPECT_GE(a.bytes, e.chosen.bytes);
    EXPECT_THAT(e.ToString(), AllOf(HasSubstr("[matmul] x = float32 [8, 6]"), HasSubstr("chosen:"),
                                    HasSubstr("moves the fewest bytes")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Explain, PricesTheCollectivesThatRun) {
  CostModel cost = {.intra_node = {{1, 100}}, .inter_node = {{5, 10}}, .ranks_per_node = 2};
  cost.intra_node.measured[CollectiveKind::kAllReduce] = {7, 3};
  cost.intra_node.measured[CollectiveKind::kExchange] = {2, 11};
  const absl::Status status =
      RunFake({.world = 4, .rank = 3, .cost = cost}, [&](RankContext&) -> absl::Status {
        const DeviceMesh mesh({2, 2}, {"dp", "tp"});
        const Placements kPlacements[] = {{Shard(0), Shard(1)},
                                          {Partial(), Shard(0)},
                                          {Shard(1), Replicate()},
                                          {Partial(), Partial()}};
        for (const Placements& px : kPlacements) {
          for (const Placements& pw : kPlacements) {
            const DTensor x = ones({8, 6}, {.mesh = mesh, .placements = px});
            const DTensor w = ones({6, 4}, {.mesh = mesh, .placements = pw});
            const DTensor* inputs[] = {&x, &w};
            CommTrace trace;
            DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("matmul"), inputs, {}, cost));
            DT_ASSIGN_OR_RETURN(const Explanation by_the_worlds, Explain(GetOp("matmul"), inputs));
            EXPECT_EQ(by_the_worlds.chosen.modelled_us, e.chosen.modelled_us);
            EXPECT_EQ(trace.TotalCount(), 0);
            const DTensor y = matmul(x, w);
            EXPECT_DOUBLE_EQ(e.chosen.modelled_us, trace.ModelledUs())
                << ToString(px) << " " << ToString(pw);
          }
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Explain, MatchedInputsAndErrors) {
  const absl::Status status =
      RunFake({.world = 16384, .rank = 77}, [](RankContext&) -> absl::Status {
        const DeviceMesh mesh =
            *DeviceMesh::Create({8, 128, 16}, {"pp", "dp", "tp"}, DeviceType::kMeta);
        const DTensor x =
            empty({4096, 512}, {.mesh = mesh, .placements = {Replicate(), Shard(0), Replicate()}});
        const DTensor* inputs[] = {&x, &x};
        DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("add"), inputs, {IntAttr(1)}));
        EXPECT_EQ(e.chosen.bytes, 0);
        EXPECT_THAT(e.why, HasSubstr("match it as they are"));
        const DTensor null;
        const DTensor* bad[] = {&x, &null};
        EXPECT_THAT(std::string(Explain(GetOp("add"), bad, {IntAttr(1)}).status().message()),
                    HasSubstr("input y is null"));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Describe, SaysWhoOwnsWhat) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor x =
        ones({5, 6}, {.mesh = mesh, .placements = {Shard(0), SegmentedShard(1, {4, 2})}});
    EXPECT_THAT(Describe(x), AllOf(HasSubstr("rank 1 (dp=0 tp=1): [0:3, 2:4+5:6]"),
                                   HasSubstr("rank 2 (dp=1 tp=0): [3:5, 0:2+4:5]")));
    const DTensor p = x.Redistribute({Partial(), Shard(0)});
    EXPECT_THAT(Describe(p), HasSubstr("rank 3 (dp=1 tp=1): [3:5, 0:6] a term"));
    DT_ASSIGN_OR_RETURN(const std::string svg, DescribeSvg(x.spec()));
    EXPECT_THAT(svg, AllOf(HasSubstr("<svg"), HasSubstr("ranks 0"), HasSubstr("</svg>")));
    // Rank 3's columns 2 and 3 of 6, rows 3 and 4 of 5, on a side of 400.
    EXPECT_THAT(svg, HasSubstr("x=\"133.3\" y=\"240.0\" width=\"133.3\" height=\"160.0\""));
    EXPECT_FALSE(DescribeSvg(ones({2, 2, 2}).spec()).ok());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// To the letter, cut off where asked.
TEST(Explain, TextsAreCutWhereAsked) {
  const absl::Status status = RunFake({.world = 4, .rank = 0}, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor flat =
        zeros({2, 3}, {.mesh = mesh, .placements = {Replicate(), FlatShard({4, 2})}});
    EXPECT_EQ(Describe(flat.spec(), 2),
              "float32 [2, 3] on dp=2 tp=2 [R, Flat([4, 2])]\n"
              "rank 0 (dp=0 tp=0): [0:2, 0:3] Flat([4, 2]) piece 0\n"
              "rank 1 (dp=0 tp=1): [0:2, 0:3] Flat([4, 2]) piece 1\n"
              "and 2 ranks more\n");
    const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = {Shard(0), Shard(1)}});
    const DTensor* inputs[] = {&x, &x};
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("matmul"), inputs));
    const auto lines = [&](int most) {
      const std::string text = e.ToString(most);
      return std::count(text.begin(), text.end(), '\n');
    };
    EXPECT_EQ(lines(2), 3 + 2 + 1);
    EXPECT_EQ(lines(1000), 3 + static_cast<int64_t>(e.alternatives.size()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An op that runs as others costs what they move, not what it would take to gather its input.
TEST(Explain, ADecompositionIsPricedAsItRuns) {
  const absl::Status status = RunFake({.world = 2, .rank = 0}, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    const DTensor x = ones({4, 1000}, {.mesh = mesh, .placements = {Shard(1)}});
    const DTensor* inputs[] = {&x};
    DT_ASSIGN_OR_RETURN(const Explanation e, Explain(GetOp("log_softmax"), inputs, {IntAttr(1)}));
    EXPECT_FALSE(e.made_of.empty());
    EXPECT_GT(e.chosen.bytes, 0);
    EXPECT_LT(e.chosen.bytes, 4 * 4 * 10) << "some numbers a row, not the row";
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::explain_test
