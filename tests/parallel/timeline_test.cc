// Timelines as a viewer reads them: begins match ends and nest, every rank is there, waiting stands
// apart from moving; and nothing is recorded where nobody asked.
#include "dtensor/timeline.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "nlohmann/json.hpp"
#include "tests/parallel/support.h"

namespace dtensor::timeline_test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using Json = nlohmann::json;

// One closed span: where it lies, and what it lies in.
struct Closed {
  std::string category, name, detail;
  std::vector<std::string> inside;  // categories, outermost first
  double start, end;
};

// By rank. Fails the test where ends do not match begins or time runs backwards.
std::map<int64_t, std::vector<Closed>> Read(const std::string& text) {
  std::map<int64_t, std::vector<Closed>> closed;
  std::map<int64_t, std::vector<Closed>> open;
  std::map<int64_t, double> last;
  const Json file = Json::parse(text);
  for (const Json& e : file.at("traceEvents")) {
    const int64_t rank = e.at("pid").get<int64_t>();
    EXPECT_EQ(e.at("tid"), 0);
    if (e.at("ph") == "M") continue;
    const double ts = e.at("ts").get<double>();
    EXPECT_GE(ts, last[rank]);
    last[rank] = ts;
    std::vector<Closed>& stack = open[rank];
    if (e.at("ph") == "B") {
      Closed span = {e.at("cat"), e.at("name"), e.contains("args") ? e["args"]["detail"] : Json(""),
                     {},          ts,           0};
      for (const Closed& outer : stack) span.inside.push_back(outer.category);
      stack.push_back(span);
      continue;
    }
    EXPECT_EQ(e.at("ph"), "E");
    if (stack.empty()) {
      ADD_FAILURE() << "an end without a begin";
      continue;
    }
    stack.back().end = ts;
    closed[rank].push_back(stack.back());
    stack.pop_back();
  }
  for (const auto& [rank, stack] : open) EXPECT_TRUE(stack.empty()) << "rank " << rank;
  return closed;
}

// The timeline of a training step on dp=2 tp=2, and how many collectives each rank had in it.
std::string Step(int64_t* collectives) {
  Timeline timeline;
  const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh = testing::DpTp(2, 2);
    const GPTConfig config = {.vocab = 16, .seq = 8, .layers = 2, .hidden = 8, .heads = 2};
    GPT model(config);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(config)));
    Materialize(model);
    const DTensor ids = FromVector<int64_t>(
        {0, 1, 2, 3, 4, 5, 6, 7}, {2, 4},
        {.dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0), Replicate()}});
    const auto step = [&] {
      cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1)).Backward();
    };
    step();  // not recorded
    {
      const RecordTimeline record(timeline);
      const Span span(SpanKind::kStep, "step \"2\"");
      const CommTrace trace;
      step();
      if (rank.rank() == 0) *collectives = trace.TotalCount();
    }
    step();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return timeline.ToJson();
}

TEST(Timeline, AStepOnAllRanks) {
  int64_t collectives = 0;
  const auto ranks = Read(Step(&collectives));
  ASSERT_EQ(ranks.size(), 4u);
  int64_t waits = 0;
  for (const auto& [rank, spans] : ranks) {
    std::map<std::string, int64_t> count;
    std::set<std::string> modules;
    for (const Closed& s : spans) {
      ++count[s.category];
      if (s.category == "module") modules.insert(s.name);
      if (s.category == "step") {
        EXPECT_EQ(s.name, "step \"2\"");
        EXPECT_TRUE(s.inside.empty());
      } else {
        ASSERT_FALSE(s.inside.empty()) << s.name;
        EXPECT_EQ(s.inside[0], "step");
      }
      if (s.category == "wait" || s.category == "move") {
        EXPECT_EQ(s.inside.back(), "collective");
      } else if (s.category == "backward") {
        EXPECT_THAT(s.inside, Contains("phase"));
      } else if (s.category == "collective") {
        EXPECT_THAT(s.detail, HasSubstr("bytes received"));
      }
    }
    EXPECT_EQ(count["step"], 1);
    EXPECT_EQ(count["phase"], 1);  // backward
    EXPECT_THAT(modules, Contains("blocks.1.mlp.down"));
    EXPECT_THAT(modules, Contains("GPT"));
    EXPECT_EQ(count["module"], 31);
    EXPECT_GT(count["op"], 100);
    EXPECT_EQ(count["collective"], collectives);
    EXPECT_GE(count["move"], count["collective"]);
    waits += count["wait"];
  }
  EXPECT_GT(waits, 0);
}

TEST(Timeline, OpsAreRecordedOnTheCachedPathToo) {
  Timeline timeline;
  const DTensor x = ones({2});
  const DTensor y = x + x;  // the call is cached now
  {
    const RecordTimeline record(timeline);
    const DTensor z = x + x;
  }
  const DTensor after = x + x;
  const auto ranks = Read(timeline.ToJson());
  ASSERT_EQ(ranks.count(0), 1u);
  ASSERT_EQ(ranks.at(0).size(), 1u);
  EXPECT_EQ(ranks.at(0)[0].name, "add");
}

TEST(Timeline, WhatThrowsIsClosed) {
  Timeline timeline;
  try {
    const RecordTimeline record(timeline);
    ones({2, 3}) + ones({4});
    ADD_FAILURE() << "no error";
  } catch (const Error&) {
  }
  Read(timeline.ToJson());
  EXPECT_TRUE(Read(Timeline().ToJson()).empty());
  EXPECT_EQ(TimelineTrack::Current(), nullptr);
}

TEST(Timeline, AFileThatCannotBeWritten) {
  EXPECT_THAT(std::string(Timeline().Write("/nowhere/at/all").message()),
              HasSubstr("/nowhere/at/all"));
}

}  // namespace
}  // namespace dtensor::timeline_test
