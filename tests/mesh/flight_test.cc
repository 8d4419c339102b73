// Flight recorder and reports: what is kept, what a merged report says, where it can be read.
#include "dtensor/mesh/flight.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/temp_folder.h"

namespace dtensor::flight_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Tensor Make(IntSpan shape) { return ValueOrThrow(Tensor::Full(shape, DType::kF32, 1)); }

FlightCall Call(uint64_t sequence, uint64_t fingerprint, std::string state = "done",
                std::vector<int64_t> waits_for = {}) {
  FlightCall call;
  call.sequence = sequence;
  call.fingerprint = fingerprint;
  call.group = "tp";
  call.call = absl::StrCat("call", fingerprint, "()");
  call.state = std::move(state);
  call.waits_for = std::move(waits_for);
  call.age_ms = 250;
  return call;
}

TEST(FlightRecorder, KeepsTheLast256) {
  FlightRecorder recorder;
  const int label = recorder.AddLabel("tp");
  const Tensor tensor = Make({2, 3});
  CollectiveCall call{.kind = CollectiveKind::kAllReduce, .in = tensor, .out = tensor};
  for (uint64_t i = 1; i <= 1000; ++i) {
    call.sequence = i;
    const size_t place = recorder.Begin(call, label);
    if (i < 1000) recorder.End(place, i % 2 ? absl::StatusCode::kOk : absl::StatusCode::kAborted);
  }
  const std::vector<FlightEntry> all = recorder.Last();
  ASSERT_EQ(all.size(), 256u);
  for (size_t k = 0; k < all.size(); ++k) {
    EXPECT_EQ(all[k].sequence, 745 + k);
    EXPECT_EQ(all[k].done, k + 1 < all.size());
    if (all[k].done) {
      EXPECT_EQ(all[k].code,
                all[k].sequence % 2 ? absl::StatusCode::kOk : absl::StatusCode::kAborted);
    }
  }
  EXPECT_EQ(recorder.Last(3).front().sequence, 998u);
  EXPECT_EQ(CallText(all[0], {}), "all_reduce(sum, float32 [2, 3])");
  EXPECT_EQ(recorder.Label(label), "tp");
}

TEST(FlightRecorder, ItsClockIsTheSystemsSteadyOne) {
  timespec now;
  ASSERT_EQ(clock_gettime(CLOCK_MONOTONIC, &now), 0);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  EXPECT_NEAR(1e-9 * static_cast<double>(CoarseNow()), seconds, 5);
}

TEST(CallText, CountsThePiecesOfAnExchange) {
  const Tensor tensor = Make({2, 3});
  const std::vector<Piece> sends = {{1, tensor}, {2, tensor}}, recvs = {{1, tensor}};
  const Tensor none;
  CollectiveCall call{.kind = CollectiveKind::kExchange, .in = none, .out = none};
  call.sends = sends;
  call.recvs = recvs;
  EXPECT_EQ(Describe(call, {0, 1, 2}), "exchange(2 sends, 1 receives)");
}

// Among many ranks lists are cut where nobody reads on.
constexpr int64_t kMany = 256;
std::vector<int64_t> Everybody() {
  std::vector<int64_t> ranks(kMany);
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

TEST(CallText, NamesSomeOfManyCounts) {
  const std::vector<int64_t> counts(kMany, 3);
  const Tensor in = Make({3, 2}), out = Make({3 * kMany, 2});
  CollectiveCall call{.kind = CollectiveKind::kAllGather, .in = in, .out = out};
  call.counts = counts;
  EXPECT_EQ(Describe(call, Everybody()),
            "all_gather(float32 [3, 2], counts [3, 3, 3, 3, 3, 3, 3, 3 and 248 more])");
}

TEST(FlightReport, NamesSomeOfManyRanksThatAllDoSomethingElse) {
  std::vector<FlightDump> dumps;
  for (uint64_t r = 0; r < kMany; ++r) {
    dumps.push_back({static_cast<int64_t>(r), false, {Call(1, 100 + r, "waiting", Everybody())}});
  }
  const FlightGroup group = MergeDumps("tp", dumps);
  EXPECT_THAT(group.disagreement,
              ::testing::AllOf(HasSubstr("rank 7 issued call107(); and 248 more kinds of calls"),
                               ::testing::Not(HasSubstr("rank 8 issued"))));
  EXPECT_LT(group.disagreement.size(), 500u);
  EXPECT_LT(FlightReport{{group}}.Summary().size(), 4000u);
}

// What a rank of 256 is told where all give other counts, and where its own do not fit.
TEST(FlightReport, ErrorsOfManyRanksStayShort) {
  std::vector<absl::Status> told(kMany);
  const absl::Status all = RunSpmd(kMany, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    const int64_t me = context.rank();
    std::vector<int64_t> counts(kMany, 1);
    const Tensor in = Make({1, 1}), out = Make({kMany, 1});
    counts[me] = 2;
    const absl::Status bad = comm->AllGather(in, out, counts).Wait();
    EXPECT_THAT(std::string(bad.message()), HasSubstr("do not fit rows"));
    EXPECT_LT(bad.message().size(), 300u) << bad;
    // Every rank's own count fits; those of others are all different.
    counts[me] = 1;
    counts[(me + 1) % kMany] = 0, counts[(me + 2) % kMany] = 2;
    told[me] = comm->AllGather(in, out, counts).Wait();
    return told[me];
  });
  EXPECT_FALSE(all.ok());
  for (const absl::Status& status : told) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("collectives differ at call #"));
    EXPECT_LT(status.message().size(), 3000u) << status;
  }
  printf("a message of %d ranks that all differ: %d bytes\n", static_cast<int>(kMany),
         static_cast<int>(told[0].message().size()));
}

TEST(FlightReport, FirstDisagreementIsTheFirst) {
  const FlightGroup group = MergeDumps("tp", {{4, false, {Call(7, 1), Call(8, 2), Call(9, 5)}},
                                              {5, false, {Call(7, 1), Call(8, 3), Call(9, 6)}},
                                              {6, false, {Call(7, 1), Call(8, 2), Call(9, 5)}}});
  EXPECT_EQ(group.disagreement, "call #8: ranks 4, 6 issued call2(); rank 5 issued call3()");
}

TEST(FlightReport, TheVeryFirstCallMayBeTheDisagreement) {
  const FlightGroup group = MergeDumps(
      "tp", {{0, false, {Call(1, 1), Call(2, 3)}}, {1, false, {Call(1, 2), Call(2, 3)}}});
  EXPECT_EQ(group.disagreement, "call #1: rank 0 issued call1(); rank 1 issued call2()");
}

TEST(FlightReport, WhatARankForgotIsNoDisagreement) {
  const FlightGroup group =
      MergeDumps("tp", {{0, false, {Call(8, 2)}}, {1, false, {Call(7, 1), Call(8, 2)}}});
  EXPECT_EQ(group.disagreement, "");
}

TEST(FlightReport, AbsentAndGoneRanks) {
  const FlightGroup group =
      MergeDumps("tp", {{0, false, {Call(1, 1), Call(2, 2, "waiting", {1, 2})}},
                        {1, false, {Call(1, 1)}},
                        {2, true, {Call(1, 1)}}});
  EXPECT_EQ(group.disagreement,
            "call #2: rank 0 issued call2(); rank 1 has not come to it; rank 2 left before it");
  const FlightReport report{{group}};
  EXPECT_THAT(report.Culprits(), ElementsAre(1, 2));
  EXPECT_EQ(report.Summary(),
            "  ranks 1, 2 hold up the others\n"
            "  [tp] first disagreement: call #2: rank 0 issued call2(); rank 1 has not come to it; "
            "rank 2 left before it\n"
            "  [tp] rank 0: waiting for ranks 1, 2 in #2 call2(), since 250 ms\n"
            "  [tp] rank 1: in no call; last #1 call1() done, begun 250 ms ago\n"
            "  [tp] rank 2: left the group");
}

// Of a process that is stopped nobody knows what it did.
TEST(FlightReport, WhoDoesNotAnswerIsNotSaidToHaveDoneNothing) {
  const FlightGroup group = MergeDumps(
      "tp", {{0, false, {Call(1, 1), Call(2, 2, "waiting", {1})}}, {1, false, {}, true}});
  EXPECT_EQ(group.disagreement, "");
  const FlightReport report{{group}};
  EXPECT_THAT(report.Culprits(), ElementsAre(1));
  EXPECT_EQ(report.Summary(),
            "  rank 1 holds up the others\n"
            "  [tp] rank 0: waiting for rank 1 in #2 call2(), since 250 ms\n"
            "  [tp] rank 1: does not answer: its process is stopped, or gone");
}

// Rank 0 waits for 1 in one group, 1 for 2 in another, and 2 computes: 2 is whom all wait for.
TEST(FlightReport, CulpritIsAtTheEndOfTheChain) {
  const FlightReport report{
      {MergeDumps("tp", {{0, false, {Call(1, 1, "waiting", {1})}}, {1, false, {}}}),
       MergeDumps("dp", {{1, false, {Call(1, 1, "waiting", {2})}}, {2, false, {}}})}};
  EXPECT_THAT(report.Culprits(), ElementsAre(2));
}

TEST(FlightReport, CircleOfWaits) {
  const FlightReport report{
      {MergeDumps("a", {{0, false, {Call(0, 1, "waiting", {1})}}, {1, false, {}}}),
       MergeDumps("b", {{1, false, {Call(0, 1, "waiting", {2})}}, {2, false, {}}}),
       MergeDumps("c", {{2, false, {Call(0, 1, "waiting", {1})}}})}};
  EXPECT_THAT(report.Culprits(), ElementsAre(1, 2));
}

TEST(FlightReport, SummaryIsBounded) {
  FlightReport report;
  for (int64_t g = 0; g < 200; ++g) {
    FlightCall call = Call(1, 1, "waiting", {g + 1});
    call.tag = std::string(1000, 'x');
    report.groups.push_back(MergeDumps("tp", {{g, false, {call}}, {g + 1, false, {}}}));
  }
  const std::string whole = report.Summary(1 << 20);
  const auto all = std::count(whole.begin(), whole.end(), '\n') + 1;
  for (size_t limit : {200, 1000, 2048}) {
    const std::string text = report.Summary(limit);
    EXPECT_LE(text.size(), limit);
    const auto shown = std::count(text.begin(), text.end(), '\n');  // the last line counts others
    EXPECT_THAT(text, HasSubstr(absl::StrCat("(", all - shown, " more lines)")));
    EXPECT_THAT(text, ::testing::StartsWith("  rank 200 holds up the others\n"));
  }
  EXPECT_EQ(FlightReport().Summary(), "");
}

// One of three ranks is busy elsewhere when the deadline passes.
FlightReport HangReport(std::vector<absl::Status>* seen) {
  FlightReport report;
  SpmdOptions options{absl::Milliseconds(150)};
  options.flight_report = &report;
  seen->resize(3);
  const absl::Status all = RunSpmd(
      3,
      [&](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
        Tensor x = Make({5});
        DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
        if (context.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(600));
        return (*seen)[context.rank()] = comm->AllReduce(x, x, ReduceOp::kMax).Wait();
      },
      options);
  EXPECT_EQ(all.code(), absl::StatusCode::kDeadlineExceeded);
  return report;
}

TEST(FlightReport, IsLeftWhereTheEnvironmentSays) {
  const testing::TempFolder folder;
  const std::string path = folder.Path("report.json");
  setenv("DTENSOR_FLIGHT_REPORT", path.c_str(), 1);
  EXPECT_FALSE(RunSpmd(2, [](RankContext&) { return absl::InternalError("no wait"); }).ok());
  EXPECT_FALSE(std::filesystem::exists(path));  // nobody waited in vain
  std::vector<absl::Status> seen;
  const FlightReport report = HangReport(&seen);
  EXPECT_EQ(ValueOrThrow(ReadFile(path)), report.ToJson() + "\n");
  // What cannot be written is said, and costs nothing else.
  setenv("DTENSOR_FLIGHT_REPORT", folder.Path("no/such/folder.json").c_str(), 1);
  ::testing::internal::CaptureStderr();
  HangReport(&seen);
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              AllOf(HasSubstr("flight report: "), HasSubstr("No such file")));
  unsetenv("DTENSOR_FLIGHT_REPORT");
}

TEST(FlightReport, OfADeadlineStandsInEveryStatus) {
  std::vector<absl::Status> seen;
  const FlightReport report = HangReport(&seen);
  for (const absl::Status& status : seen) {
    EXPECT_THAT(status.message(), HasSubstr("flight report:\n  rank 1 holds up the others\n"));
    EXPECT_THAT(status.message(),
                HasSubstr("[world] first disagreement: call #2: ranks 0, 2 issued all_reduce(max, "
                          "float32 [5]); rank 1 has not come to it\n"));
    EXPECT_THAT(status.message(), HasSubstr("waiting for rank 1 in #2 all_reduce(max, float32 "));
    EXPECT_THAT(status.message(),
                HasSubstr("rank 1: in no call; last #1 all_reduce(sum, float32 [5]) done, begun"));
  }
  EXPECT_THAT(report.Culprits(), ElementsAre(1));
  ASSERT_EQ(report.groups.size(), 1u);
  const FlightCall& waiting = report.groups[0].dumps[0].calls.back();
  EXPECT_EQ(waiting.state, "waiting");
  EXPECT_GE(waiting.age_ms, 100);
  EXPECT_LE(waiting.age_ms, 600'000);  // since it began, not since the machine did
  EXPECT_THAT(waiting.waits_for, ElementsAre(1));
  EXPECT_THAT(report.ToText(),
              HasSubstr("[world] rank 2:\n  #1 all_reduce(sum, float32 [5]): done"));
  const auto json = nlohmann::json::parse(report.ToJson());
  EXPECT_EQ(json["holding_up"], nlohmann::json({1}));
  const auto& call = json["groups"][0]["ranks"][2]["calls"][1];
  EXPECT_EQ(call["number"], 2);
  EXPECT_EQ(call["call"], "all_reduce(max, float32 [5])");
  EXPECT_EQ(call["state"], "waiting");
  EXPECT_EQ(call["waits_for"], nlohmann::json({1}));
}

TEST(FlightReport, JsonHoldsTheErrorOfACallThatFailed) {
  FlightCall failed = Call(2, 2, "failed");
  failed.error = "rank 1 left";
  const FlightReport report{{MergeDumps("tp", {{0, false, {Call(1, 1), failed}}})}};
  const auto json = nlohmann::json::parse(report.ToJson());
  const auto& calls = json["groups"][0]["ranks"][0]["calls"];
  EXPECT_FALSE(calls[0].contains("error"));
  EXPECT_EQ(calls[1]["error"], "rank 1 left");
}

// Two ranks send to each other and nobody receives.
TEST(FlightReport, OfMessagesInACircle) {
  FlightReport report;
  SpmdOptions options{absl::Milliseconds(150)};
  options.flight_report = &report;
  const absl::Status all = RunSpmd(
      2,
      [](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
        return comm->Send(Make({4}), 1 - static_cast<int>(context.rank())).Wait();
      },
      options);
  EXPECT_EQ(all.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(report.Culprits(), ElementsAre(0, 1));
  EXPECT_THAT(std::string(all.message()),
              HasSubstr("rank 0: waiting for rank 1 in send(to rank 1, float32 [4]), since"));
}

// Ranks 0 and 1 wait in different groups of a 2 x 2 mesh; the report spans both.
TEST(FlightReport, SpansGroups) {
  FlightReport report;
  SpmdOptions options{absl::Milliseconds(300)};
  options.flight_report = &report;
  const absl::Status all = RunSpmd(
      4,
      [](RankContext& context) -> absl::Status {
        DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create({2, 2}, {"dp", "tp"}));
        DT_ASSIGN_OR_RETURN(Comm * dp, context.CommFor(mesh, {0}));
        DT_ASSIGN_OR_RETURN(Comm * tp, context.CommFor(mesh, {1}));
        if (context.rank() == 3) std::this_thread::sleep_for(std::chrono::milliseconds(900));
        if (context.rank() % 2 == 1) return dp->Barrier().Wait();  // 1 waits for 3
        return tp->Barrier().Wait();                               // 0 for 1, 2 for 3
      },
      options);
  EXPECT_FALSE(all.ok());
  EXPECT_THAT(report.Culprits(), ElementsAre(3));
  EXPECT_THAT(std::string(all.message()), HasSubstr("rank 3 holds up the others"));
  EXPECT_THAT(std::string(all.message()), HasSubstr("[dp] rank 1: waiting for rank 3 in #1 barr"));
  EXPECT_THAT(std::string(all.message()), HasSubstr("[tp] rank 0: waiting for rank 1 in #1 barr"));
}

TEST(FlightReport, AskedForAtAnyTime) {
  const absl::Status all = RunSpmd(2, [](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    DT_RETURN_IF_ERROR(comm->Barrier().Wait());
    const FlightReport report = context.TakeFlightReport();
    EXPECT_EQ(report.groups.size(), 1u);
    EXPECT_EQ(report.groups[0].dumps.size(), 2u);
    return comm->Barrier().Wait();
  });
  EXPECT_TRUE(all.ok()) << all;
}

TEST(FlightReport, UntouchedWhereNothingWentWrong) {
  FlightReport report;
  SpmdOptions options;
  options.flight_report = &report;
  EXPECT_TRUE(RunSpmd(2, [](RankContext&) { return absl::OkStatus(); }, options).ok());
  EXPECT_THAT(report.groups, IsEmpty());
}

// The same all-reduce over the same ranks under two names: numbers would silently swap.
TEST(Fingerprint, HoldsTheMeshDims) {
  std::vector<absl::Status> seen(2);
  const absl::Status all = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * world, context.WorldComm());
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create({2}, {"tp"}));
    DT_ASSIGN_OR_RETURN(Comm * tp, context.CommFor(mesh, {0}));
    Tensor x = Make({5});
    Comm* mine = context.rank() == 0 ? world : tp;
    return seen[context.rank()] = mine->AllReduce(x, x, ReduceOp::kSum).Wait();
  });
  EXPECT_FALSE(all.ok());
  for (const absl::Status& status : seen) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(),
                HasSubstr("rank 0 issued all_reduce(sum, float32 [5]) over world; rank 1 issued "
                          "all_reduce(sum, float32 [5]) over tp\n"));
  }
}

}  // namespace
}  // namespace dtensor::flight_test
