// Rank layouts against the vectors of the systems they come from.
#include "dtensor/mesh/rank_generator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "absl/time/clock.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/parallel_groups.h"
#include "dtensor/tensor/status.h"

namespace dtensor::rank_generator_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Groups = std::vector<std::vector<int64_t>>;

RankGenerator Make(AxisSizes sizes, const std::string& order) {
  return RankGenerator::Create(sizes, order).value();
}

TEST(RankGenerator, TheSixteenGpuExample) {
  const AxisSizes sizes = {{"tp", 2}, {"cp", 1}, {"ep", 1}, {"dp", 2}, {"pp", 4}};
  const RankGenerator g = Make(sizes, "tp-cp-ep-dp-pp");
  EXPECT_EQ(g.world(), 16);
  EXPECT_EQ(*g.Groups("dp"),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(*g.Groups("tp"),
            (Groups{{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}, {12, 13}, {14, 15}}));
  EXPECT_EQ(*g.Groups("pp"),
            (Groups{{0, 4, 8, 12}, {1, 5, 9, 13}, {2, 6, 10, 14}, {3, 7, 11, 15}}));
  EXPECT_EQ(*g.Groups("tp-pp"), (Groups{{0, 1, 4, 5, 8, 9, 12, 13}, {2, 3, 6, 7, 10, 11, 14, 15}}));
  EXPECT_EQ(*g.EmbeddingGroups(), (Groups{{0, 12}, {1, 13}, {2, 14}, {3, 15}}));
  const RankGenerator swapped = Make(sizes, "tp-pp-dp");
  EXPECT_EQ(*swapped.Groups("dp"),
            (Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  EXPECT_EQ(*swapped.Groups("pp"),
            (Groups{{0, 2, 4, 6}, {1, 3, 5, 7}, {8, 10, 12, 14}, {9, 11, 13, 15}}));
}

TEST(RankGenerator, ContextParallel) {
  EXPECT_EQ(*Make({{"tp", 4}, {"cp", 2}}, "tp-cp").Groups("cp"),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}}));
  const RankGenerator g = Make({{"tp", 2}, {"cp", 2}, {"dp", 2}, {"pp", 2}}, "tp-cp-dp-pp");
  EXPECT_EQ(*g.Groups("dp"),
            (Groups{{0, 4}, {1, 5}, {2, 6}, {3, 7}, {8, 12}, {9, 13}, {10, 14}, {11, 15}}));
  EXPECT_EQ((*g.Groups("dp-cp"))[0], (std::vector<int64_t>{0, 2, 4, 6}));
  EXPECT_EQ((*g.Groups("tp-cp"))[0], (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(RankGenerator, ATorchListsTheInnermostFirst) {
  const RankGenerator g =
      RankGenerator::FromList({{"tensor", 4}, {"pipeline", 2}, {"data", 2}}).value();
  EXPECT_EQ(*g.Groups("tensor"),
            (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ((*g.Groups("pipeline"))[4], (std::vector<int64_t>{8, 12}));
  EXPECT_EQ((*g.Groups("data"))[7], (std::vector<int64_t>{7, 15}));
  const DeviceMesh mesh = g.Mesh().value();
  EXPECT_EQ(mesh.ToString(), "data=2 pipeline=2 tensor=4");
  EXPECT_EQ(mesh.SubMesh({"pipeline"}, 8)->Ranks(), (std::vector<int64_t>{8, 12}));
}

TEST(RankGenerator, GroupsPartitionTheWorldAndDisjointAxesMeetOnce) {
  for (const std::string order : {"tp-cp-dp-pp", "pp-dp-cp-tp", "dp-tp-pp-cp"}) {
    const RankGenerator g =
        RankGenerator::Create({{"tp", 2}, {"cp", 3}, {"dp", 2}, {"pp", 2}}, order, 5).value();
    for (const std::string token : {"tp", "cp-dp", "tp-pp", "tp-cp-dp-pp"}) {
      std::set<int64_t> seen;
      const Groups groups = *g.Groups(token);
      for (const auto& group : groups) seen.insert(group.begin(), group.end());
      EXPECT_EQ(static_cast<int64_t>(seen.size()), g.world());
      EXPECT_EQ(*seen.begin(), 5);
      EXPECT_EQ(*seen.rbegin(), 5 + g.world() - 1);
    }
    const Groups left = *g.Groups("tp-cp"), right = *g.Groups("dp-pp");
    for (const auto& a : left) {
      for (const auto& b : right) {
        std::vector<int64_t> both;
        for (int64_t r : a) {
          if (std::find(b.begin(), b.end(), r) != b.end()) both.push_back(r);
        }
        EXPECT_EQ(both.size(), 1u);
      }
    }
  }
}

TEST(RankGenerator, Errors) {
  const auto message = [](const AxisSizes& sizes, const std::string& order) {
    return std::string(RankGenerator::Create(sizes, order).status().message());
  };
  EXPECT_THAT(message({{"tp", 2}, {"dp", 2}}, "tp"), AllOf(HasSubstr("leaves out dp")));
  EXPECT_THAT(message({{"tp", 2}}, "tp-xx"), AllOf(HasSubstr("\"xx\""), HasSubstr("axes are tp")));
  EXPECT_THAT(message({{"tp", 2}}, "tp-tp"), HasSubstr("twice"));
  EXPECT_THAT(message({{"tp", 0}}, "tp"), HasSubstr("size 0"));
  EXPECT_THAT(message({{"ep", 2}, {"cp", 2}}, "ep-cp"), HasSubstr("cp=1"));
  EXPECT_THAT(std::string(Make({{"tp", 2}}, "TP").Groups("pp").status().message()),
              HasSubstr("\"pp\""));
}

TEST(ParallelContext, QueriesAreInverse) {
  const ParallelContext c =
      ParallelContext::Create({.tp = 2, .pp = 2, .dp = 2, .cp = 2}, 16).value();
  for (int64_t r = 0; r < 16; ++r) {
    EXPECT_EQ(*c.GlobalRank(*c.LocalRanks(r)), r);
    for (const char* name : {"tp", "cp", "dp", "pp", "mp", "dp_cp", "world"}) {
      EXPECT_THAT(*c.Group(name, r), ::testing::Contains(r));
    }
  }
  EXPECT_EQ(*c.Group("mp", 3), (std::vector<int64_t>{2, 3, 10, 11}));
  EXPECT_EQ(*c.Group("dp_cp", 1), (std::vector<int64_t>{1, 3, 5, 7}));
  const auto small = ParallelContext::Create({.tp = 2, .pp = 2, .dp = 2}, 8).value();
  EXPECT_EQ(*small.Group("pp", 1), (std::vector<int64_t>{1, 5}));
}

// All groups of a name, in the order of their first ranks; ranks that are in none are left out.
Groups All(const ParallelGroups& groups, const std::string& name) {
  std::set<std::vector<int64_t>> all;
  for (int64_t r = 0; r < groups.world(); ++r) {
    const absl::StatusOr<DeviceMesh> group = groups.Group(name, r);
    if (group.ok()) all.insert(group->Ranks());
  }
  return Groups(all.begin(), all.end());
}

TEST(ParallelGroups, TheSixteenGpuExample) {
  const ParallelGroups g = ParallelGroups::Create({.tp = 2, .pp = 4}, 16).value();
  const RankGenerator generator =
      Make({{"tp", 2}, {"cp", 1}, {"ep", 1}, {"dp", 2}, {"pp", 4}}, "tp-cp-ep-dp-pp");
  for (const auto& [name, token] :
       std::map<std::string, std::string>{{"tp", "tp"},
                                          {"dp", "dp"},
                                          {"pp", "pp"},
                                          {"mp", "tp-pp"},
                                          {"tp_dp", "tp-dp"},
                                          {"tp_dp_cp", "tp-cp-dp"},
                                          {"dp_cp", "cp-dp"},
                                          {"world", "tp-cp-ep-dp-pp"}}) {
    EXPECT_EQ(All(g, name), *generator.Groups(token)) << name;
  }
  EXPECT_EQ(All(g, "dp"),
            (Groups{{0, 2}, {1, 3}, {4, 6}, {5, 7}, {8, 10}, {9, 11}, {12, 14}, {13, 15}}));
  EXPECT_EQ(All(g, "embedding"), (Groups{{0, 12}, {1, 13}, {2, 14}, {3, 15}}));
  EXPECT_EQ(All(g, "position_embedding"), (Groups{{0}, {1}, {2}, {3}}));
  // world_rank_matrix, and back.
  EXPECT_EQ(g.dense().ToString(), "pp=4 dp=2 cp=1 tp=2");
  for (int64_t r = 0; r < 16; ++r) {
    Dims coordinate;
    ASSERT_TRUE(g.dense().Coordinate(r, &coordinate));
    EXPECT_EQ(g.dense().RankAt(coordinate), r);
  }
}

TEST(ParallelGroups, SplitPipelinesOtherOrdersAndOneStage) {
  const ParallelGroups g =
      ParallelGroups::Create({.tp = 2, .pp = 4, .pipeline_split_rank = 2}, 16).value();
  EXPECT_EQ(All(g, "embedding")[1], (std::vector<int64_t>{1, 9, 13}));
  EXPECT_EQ(All(g, "position_embedding")[1], (std::vector<int64_t>{1, 9}));
  const ParallelGroups last =
      ParallelGroups::Create({.pp = 2, .pipeline_split_rank = 1}, 2).value();
  EXPECT_EQ(All(last, "embedding"), (Groups{{0, 1}}));
  const ParallelGroups swapped =
      ParallelGroups::Create({.tp = 2, .pp = 4, .order = "tp-pp-dp"}, 16).value();
  EXPECT_EQ(All(swapped, "dp"),
            (Groups{{0, 8}, {1, 9}, {2, 10}, {3, 11}, {4, 12}, {5, 13}, {6, 14}, {7, 15}}));
  const ParallelGroups flat = ParallelGroups::Create({.tp = 2}, 4).value();
  EXPECT_EQ(All(flat, "embedding"), (Groups{{0}, {1}, {2}, {3}}));
}

// Experts of their own cut, over what is tp x cp x dp for the dense layers.
TEST(ParallelGroups, Experts) {
  const ParallelGroups g =
      ParallelGroups::Create({.tp = 2, .pp = 2, .cp = 2, .ep = 4, .expert_tp = 1}, 16).value();
  EXPECT_EQ(g.dense().ToString(), "pp=2 dp=2 cp=2 tp=2");
  EXPECT_EQ(g.experts().ToString(), "pp=2 dp=2 ep=4 tp=1");
  EXPECT_EQ(All(g, "ep"), (Groups{{0, 1, 2, 3}, {4, 5, 6, 7}, {8, 9, 10, 11}, {12, 13, 14, 15}}));
  EXPECT_EQ(All(g, "expert_dp")[1], (std::vector<int64_t>{1, 5}));
  EXPECT_EQ(All(g, "tp_ep_pp")[0], (std::vector<int64_t>{0, 1, 2, 3, 8, 9, 10, 11}));
  EXPECT_EQ(All(g, "tp_cp")[0], (std::vector<int64_t>{0, 1, 2, 3}));
}

TEST(ParallelGroups, StoredOnesAndErrors) {
  ParallelGroups g = ParallelGroups::Create({.tp = 2, .pp = 2}, 8).value();
  EXPECT_TRUE(g.Store("tied", {{7, 0}, {1, 6, 3}}).ok());
  EXPECT_EQ(All(g, "tied"), (Groups{{0, 7}, {1, 3, 6}}));
  EXPECT_EQ(*g.Group("tied", 0), *g.Group("tied", 7));
  const auto message = [](const absl::Status& s) { return std::string(s.message()); };
  EXPECT_EQ(g.Group("tied", 2).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(g.Store("tied", {{1}}).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(g.Store("mp", {{1}}).code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(message(g.Store("", {{1}})), HasSubstr("needs a name"));
  EXPECT_THAT(message(g.Store("x", {{1, 8}})), HasSubstr("rank 8 of \"x\" is not in [0, 8)"));
  EXPECT_THAT(message(g.Store("x", {{1, 2}, {1}})), HasSubstr("rank 1 is in \"x\" twice"));
  EXPECT_THAT(message(g.Group("x", 1).status()),
              AllOf(HasSubstr("no group \"x\""), HasSubstr("position_embedding tied")));
  EXPECT_EQ(g.Group("tp", 8).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(message(ParallelGroups::Create({.tp = 3}, 8).status()),
              HasSubstr("tp 3 x cp 1 x pp 1 does not divide the world of 8 ranks"));
  EXPECT_THAT(message(ParallelGroups::Create({.ep = 3}, 8).status()), HasSubstr("ep 3"));
  EXPECT_THAT(message(ParallelGroups::Create({.pp = 4, .pipeline_split_rank = 4}, 8).status()),
              HasSubstr("not a later stage of 4"));
  EXPECT_THAT(message(ParallelGroups::Create({.tp = 2, .order = "tp-dp-xx-pp"}, 8).status()),
              HasSubstr("\"xx\""));
  const absl::Status other =
      ParallelGroups::Create({.tp = 2, .pp = 2, .expert_tp = 1, .order = "tp-cp-ep-pp-dp"}, 16)
          .status();
  EXPECT_THAT(message(other), HasSubstr("gives experts other pipelines"));
}

TEST(ParallelGroups, OptionsAreOfAName) {
  const auto two = [] { return ParallelGroups::Create({.tp = 2, .pp = 2}, 4).value(); };
  ParallelGroups g = two();
  EXPECT_THAT(std::string(g.SetOptions("x", {}).message()), HasSubstr("no group \"x\"; there are"));
  EXPECT_THAT(std::string(g.SetOptions("pp", {absl::Seconds(-1)}).message()),
              HasSubstr("the timeout of \"pp\" is -1s: give one above 0"));
  // Ranks 0 and 2 are a pipeline: 2 does not come.
  const absl::Status status = RunSpmd(4, [&](RankContext& context) -> absl::Status {
    ParallelGroups groups = two();
    DT_RETURN_IF_ERROR(groups.SetOptions("pp", {absl::Milliseconds(100)}));
    DT_ASSIGN_OR_RETURN(Comm * tp, groups.CommOf("tp", context));
    DT_RETURN_IF_ERROR(tp->Barrier().Wait());
    DT_ASSIGN_OR_RETURN(Comm * pp, groups.CommOf("pp", context));
    EXPECT_EQ(pp->label(), "pp");
    if (context.rank() == 0) return pp->Barrier().Wait();
    while (context.rank() == 2 && pp->Health().ok()) absl::SleepFor(absl::Milliseconds(1));
    return absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("[comm pp] "), HasSubstr("did not arrive within 100ms")));
}

TEST(ParallelContext, OneIdPerSetAndErrors) {
  ParallelContext c = ParallelContext::Create({.tp = 2}, 2).value();
  EXPECT_EQ(c.GroupId({3, 1}), c.GroupId({1, 3}));
  EXPECT_NE(c.GroupId({1, 3}), c.GroupId({1, 2}));
  EXPECT_THAT(std::string(ParallelContext::Create({.tp = 2}, 3).status().message()),
              AllOf(HasSubstr("= 2"), HasSubstr("3 ranks")));
  EXPECT_FALSE(c.LocalRanks(2).ok());
  EXPECT_THAT(std::string(c.GlobalRank({{"tp", 0}}).status().message()), HasSubstr("for cp"));
  EXPECT_FALSE(c.GlobalRank({{"tp", 5}, {"cp", 0}, {"dp", 0}, {"pp", 0}}).ok());
  EXPECT_THAT(std::string(c.Group("ep", 0).status().message()), HasSubstr("dp_cp"));
}

}  // namespace
}  // namespace dtensor::rank_generator_test
