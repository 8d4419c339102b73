// Worlds without peers: what is recorded, what values come out, and the cost model behind the
// times.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"

namespace dtensor::fake_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tensor Row(std::vector<double> v) {
  return Tensor::FromVector(v, {static_cast<int64_t>(v.size())}, DType::kF32).value();
}

TEST(RunFake, OneRankOfMany) {
  const absl::Status status =
      RunFake({.world = 16384, .rank = 5000}, [](RankContext& context) -> absl::Status {
        EXPECT_EQ(context.rank(), 5000);
        EXPECT_EQ(context.world_size(), 16384);
        const DeviceMesh mesh({8, 128, 16}, {"pp", "dp", "tp"});
        const int tp = *mesh.DimIndex("tp");
        CommTrace trace;
        DT_ASSIGN_OR_RETURN(Comm * comm, context.CommFor(mesh, {tp}));
        EXPECT_EQ(comm->size(), 16);
        EXPECT_EQ(comm->index(), 5000 % 16);
        const Tensor x = Row({1, 2}), y = Row({0, 0});
        DT_RETURN_IF_ERROR(comm->AllReduce(x, y, ReduceOp::kSum).Wait());
        EXPECT_THAT(y.ToVector<double>(), ElementsAre(1, 2));  // nobody adds anything
        const Tensor all = Tensor::Full({32}, DType::kF32, 9).value();
        DT_RETURN_IF_ERROR(comm->AllGather(x, all).Wait());
        const std::vector<double> got = all.ToVector<double>();
        const int at = 2 * comm->index();
        EXPECT_EQ(got[at], 1);
        EXPECT_EQ(got[at + 1], 2);
        EXPECT_EQ(got[(at + 2) % 32], 0);
        EXPECT_EQ(trace.TotalCount(), 2);
        EXPECT_EQ(trace.TotalBytes(), 2 * 8 * 15 / 16 + 32 * 4 - 8);
        EXPECT_GT(trace.ModelledUs(), 0);
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RunFake, ErrorsAndExceptions) {
  EXPECT_EQ(RunFake({.world = 4, .rank = 4}, [](RankContext&) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status status =
      RunFake({.world = 1 << 20, .rank = 3},
              [](RankContext&) -> absl::Status { throw std::runtime_error("boom"); });
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 3: boom"));
}

TEST(CostModel, SlowestLinkAndSteps) {
  CostModel m;
  m.ranks_per_node = 4;
  m.intra_node = {{1, 100}};
  m.inter_node = {{10, 10}};
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllGather, 200, {0, 1, 2}), 2 * 1 + 2);
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllReduce, 200, {0, 4}), 2 * 10 + 20);
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllReduce, 200, {3}), 0);
}

TEST(CostModel, WhatWasMeasuredCountsBeforeTheLink) {
  CostModel m;
  m.intra_node = {{1, 100}, 50};
  const std::vector<int64_t> ranks = {0, 1, 2};
  // Half of an all-reduce's bytes are added up, all of a reduce-scatter's.
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllReduce, 200, ranks), 4 + 2 + 100 / 50.);
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kReduceScatter, 200, ranks), 2 + 2 + 200 / 50.);
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kSend, 200, ranks), 1 + 2);
  m.intra_node.measured[CollectiveKind::kAllReduce] = {3, 20};
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllReduce, 200, ranks), 12 + 10);
  EXPECT_DOUBLE_EQ(m.CollectiveUs(CollectiveKind::kAllGather, 200, ranks), 2 + 2);
}

TEST(CostModel, JsonGoesThereAndBack) {
  CostModel m;
  m.inter_node.latency_us = 7.25;
  m.ranks_per_node = 3;
  m.intra_node.reduce_bytes_per_us = 1 / 3.0;
  m.inter_node.measured[CollectiveKind::kExchange] = {0.1, 12345.678};
  const CostModel back = CostModel::FromJson(m.ToJson()).value();
  EXPECT_EQ(back.inter_node.latency_us, 7.25);
  EXPECT_EQ(back.ranks_per_node, 3);
  EXPECT_EQ(back.intra_node.reduce_bytes_per_us, 1 / 3.0);
  EXPECT_EQ(back.inter_node.reduce_bytes_per_us, 0);
  EXPECT_EQ(back.inter_node.measured.size(), 1u);
  EXPECT_EQ(back.inter_node.measured.at(CollectiveKind::kExchange).bytes_per_us, 12345.678);
  EXPECT_EQ(back.ToJson(), m.ToJson());
  const auto message = [](const char* text) {
    return std::string(CostModel::FromJson(text).status().message());
  };
  EXPECT_THAT(message("{\"ranks_per_node\": 8}"), HasSubstr("intra_node.latency_us is missing"));
  EXPECT_THAT(message("{\"ranks_per_node\": -1}"), HasSubstr("positive"));
  EXPECT_THAT(message("12"), HasSubstr("JSON object"));
  std::string pairless = m.ToJson();
  pairless.replace(pairless.find("inter_node.exchange.latency_us"), 19, "intra_node.exchange");
  EXPECT_THAT(message(pairless.c_str()), HasSubstr("intra_node.exchange.bytes_per_us is missing"));
  std::string unknown = m.ToJson();
  unknown.replace(unknown.find("exchange.latency"), 8, "exchangf");
  EXPECT_FALSE(CostModel::FromJson(unknown).ok());
  EXPECT_THAT(std::string(CostModel::FromFile("/nowhere").status().message()),
              HasSubstr("/nowhere cannot be read"));
}

}  // namespace
}  // namespace dtensor::fake_test
