// Pipeline schedules: orders, times and what is kept, against formulas and published tables; cuts
// of layers; what is wrong with a schedule by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "dtensor/parallel/pipeline/schedule.h"
#include "dtensor/tensor/status.h"

namespace dtensor::pipeline_schedule_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Kind = PipelineAction::Kind;

PipelineSchedule Make(const char* name, int p, int64_t m, int v = 1) {
  return ValueOrThrow(MakePipelineSchedule(name, p, m, v));
}
std::string Message(const absl::Status& status) { return std::string(status.message()); }

TEST(PipelineSchedule, OrdersAreThePublishedOnes) {
  EXPECT_EQ(ToString(Make("1F1B", 4, 8)),
            "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7\n"
            "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7\n"
            "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7\n"
            "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7\n");
  EXPECT_EQ(ToString(Make("GPipe", 2, 3)), "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2\n");
  EXPECT_EQ(ToString(Make("Interleaved1F1B", 2, 4, 2)),
            "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
            "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3\n");
}

// With a forward of 1 and a backward of 2 everybody waits (p - 1) / v times 3, however few
// microbatches there are.
TEST(PipelineSchedule, TimesAndWhatIsKeptAreTheFormulas) {
  for (const int p : {1, 2, 3, 4, 8}) {
    for (const int64_t m : {1, 2, 3, 4, 5, 8, 16, 33}) {
      for (const char* name : {"GPipe", "1F1B"}) {
        SCOPED_TRACE(absl::StrCat(name, " ", p, " ", m));
        const PipelineTimes times = ValueOrThrow(SimulatePipeline(Make(name, p, m)));
        EXPECT_EQ(times.makespan, 3.0 * static_cast<double>(m + p - 1));
        for (int r = 0; r < p; ++r) {
          EXPECT_EQ(times.busy[r], 3.0 * static_cast<double>(m));
          EXPECT_EQ(times.peak[r], name[0] == 'G' ? m : std::min<int64_t>(p - r, m));
        }
      }
    }
  }
  // Of a rank's stages, which take 1 / v each.
  const PipelineTimes two = ValueOrThrow(SimulatePipeline(Make("Interleaved1F1B", 4, 8, 2)));
  EXPECT_EQ(two.makespan, 57);
  EXPECT_THAT(two.peak, ElementsAre(11, 9, 7, 5));
  const PipelineTimes four = ValueOrThrow(SimulatePipeline(Make("Interleaved1F1B", 4, 8, 4)));
  EXPECT_EQ(four.makespan, 105);
  EXPECT_THAT(four.peak, ElementsAre(19, 17, 15, 13));
  EXPECT_EQ(ValueOrThrow(SimulatePipeline(Make("Interleaved1F1B", 8, 32, 2))).makespan, 213);
  EXPECT_EQ(ValueOrThrow(SimulatePipeline(Make("Interleaved1F1B", 8, 32, 4))).makespan, 405);
  EXPECT_THAT(ValueOrThrow(SimulatePipeline(Make("Interleaved1F1B", 4, 4, 2))).peak,
              ElementsAre(8, 8, 7, 5));
}

// Each transfer is posted by both sides, what a rank needs before it needs it, and in one order
// that all ranks keep: then nobody waits in a ring, even where each rank carries out what it posted
// one after the other.
TEST(PipelineSchedule, TransfersHaveOneOrder) {
  for (const char* name : {"GPipe", "1F1B", "Interleaved1F1B"}) {
    for (const int p : {2, 3, 4}) {
      for (const int64_t m : {3, 4, 12}) {
        const int v = name[0] == 'I' ? 2 : 1;
        if (v == 2 && m % p != 0) continue;
        SCOPED_TRACE(absl::StrCat(name, " ", p, " ", m));
        const PipelineSchedule schedule = Make(name, p, m, v);
        const auto all = ValueOrThrow(WithTransfers(schedule));
        // Every rank's head of line, blocking: a transfer happens when both sides are there.
        std::vector<size_t> at(all.size(), 0);
        std::map<std::pair<int, int64_t>, int> forwards, backwards;
        const auto other = [](const PipelineAction& a) -> PipelineAction {
          switch (a.kind) {
            case Kind::kSendForward:
              return {Kind::kRecvForward, a.stage + 1, a.microbatch};
            case Kind::kSendBackward:
              return {Kind::kRecvBackward, a.stage - 1, a.microbatch};
            default:
              return a;
          }
        };
        size_t done = 0, total = 0;
        for (const auto& actions : all) total += actions.size();
        for (bool moved = true; moved;) {
          moved = false;
          for (size_t r = 0; r < all.size(); ++r) {
            if (at[r] == all[r].size()) continue;
            const PipelineAction& a = all[r][at[r]];
            if (a.kind == Kind::kForward || a.kind == Kind::kBackward) {
              ++at[r], ++done, moved = true;
              continue;
            }
            const PipelineAction peer = other(a);
            if (peer == a) continue;  // a receive waits for its sender
            const auto to = static_cast<size_t>(schedule.RankOf(peer.stage));
            if (at[to] == all[to].size() || !(all[to][at[to]] == peer)) continue;
            ++at[r], ++at[to], done += 2, moved = true;
          }
        }
        EXPECT_EQ(done, total);
        const auto n = static_cast<size_t>(schedule.stages) * static_cast<size_t>(m);
        EXPECT_EQ(total, 2 * n + 4 * (n - static_cast<size_t>(m)));
      }
    }
  }
}

TEST(PipelineSchedule, ByHand) {
  const std::string text = "# two ranks\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1  # the second\n";
  const PipelineSchedule own = ValueOrThrow(ParsePipelineSchedule(text));
  EXPECT_EQ(own.stages, 2);
  EXPECT_EQ(own.microbatches, 2);
  const PipelineSchedule made = Make("Interleaved1F1B", 2, 4, 2);
  EXPECT_EQ(ValueOrThrow(ParsePipelineSchedule(ToString(made))).ranks, made.ranks);
  const auto error = [](const char* text) { return Message(ParsePipelineSchedule(text).status()); };
  EXPECT_THAT(error("0F0 0X0"), HasSubstr("line 1: \"0X0\" is no action"));
  EXPECT_THAT(error("0F0 0B0 0B0"), HasSubstr("0B0 is there twice"));
  EXPECT_THAT(error("0B0 0F0"), HasSubstr("0B0 comes before its forward"));
  EXPECT_THAT(error("0F0 0B0 0F1"), HasSubstr("0B1 is missing"));
  EXPECT_THAT(error("0F0 0B0\n0F1 1F0 1B0"), HasSubstr("0F1 is on rank 1, stage 0 on rank 0"));
  EXPECT_THAT(error("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"),
              HasSubstr("rank 0 waits for ever: its 0B0 needs 1B0, which rank 1 does not come to"));
  EXPECT_THAT(error("0F0 1048575B1048575"), HasSubstr("1048575B1048575 comes before its forward"));
  EXPECT_THAT(error("1048575F1048575 1048575B1048575"), HasSubstr("0F0 is missing"));
  EXPECT_THAT(error(""), HasSubstr("needs ranks, stages and microbatches"));
}

TEST(PipelineSchedule, Errors) {
  const auto error = [](const char* name, int p, int64_t m, int v) {
    return Message(MakePipelineSchedule(name, p, m, v).status());
  };
  EXPECT_THAT(error("1f1b", 2, 2, 1), HasSubstr("there is no \"1f1b\"; there are GPipe, 1F1B"));
  EXPECT_THAT(error("1F1B", 2, 2, 2), HasSubstr("1F1B has one stage per rank, got 2"));
  EXPECT_THAT(error("Interleaved1F1B", 2, 2, 1), HasSubstr("has several stages per rank, got 1"));
  EXPECT_THAT(error("GPipe", 2, 0, 1), HasSubstr("must be positive, got 2, 0, 1"));
  EXPECT_THAT(error("GPipe", 2, int64_t{1} << 60, 1), HasSubstr("are more than 67108864"));
  EXPECT_THAT(Message(SimulatePipeline(Make("GPipe", 2, 2), -1, 2).status()),
              HasSubstr("times must not be negative, got -1 and 2"));
}

// Every number of microbatches either works or is refused with one that does.
TEST(PipelineSchedule, InterleavedMicrobatches) {
  for (const int p : {2, 3, 4}) {
    for (int64_t m = 1; m <= 3 * p; ++m) {
      for (const int v : {2, 3}) {
        const auto made = MakePipelineSchedule("Interleaved1F1B", p, m, v);
        if (m % p == 0) {
          EXPECT_TRUE(made.ok()) << p << " " << m << " " << v << " " << made.status();
        } else if (!made.ok()) {
          EXPECT_THAT(Message(made.status()), HasSubstr("a number of microbatches that"));
        }
      }
    }
  }
}

TEST(CutEvenly, CutsLateWhereSeveralAreBest) {
  const auto cut = [](std::vector<double> weights, int64_t parts) {
    return ValueOrThrow(CutEvenly(weights, parts));
  };
  // Three entries without weight, n layers, two without.
  const auto model = [](int64_t layers) {
    std::vector<double> weights(3, 0);
    weights.insert(weights.end(), static_cast<size_t>(layers), 1);
    weights.insert(weights.end(), 2, 0);
    return weights;
  };
  EXPECT_THAT(cut(model(3), 2), ElementsAre(0, 5, 8));
  EXPECT_THAT(cut(model(4), 2), ElementsAre(0, 5, 9));
  EXPECT_THAT(cut(model(12), 4), ElementsAre(0, 6, 9, 12, 17));
  EXPECT_THAT(cut(model(12), 5), ElementsAre(0, 6, 9, 11, 13, 17));
  EXPECT_THAT(cut(model(10), 4), ElementsAre(0, 6, 9, 11, 15));
  EXPECT_THAT(cut({10, 1, 1, 1, 1, 10}, 3), ElementsAre(0, 1, 5, 6));
  EXPECT_THAT(cut(std::vector<double>(8, 1), 3), ElementsAre(0, 3, 6, 8));
  EXPECT_THAT(cut({2, 1, 1, 1, 2}, 2), ElementsAre(0, 3, 5));
  EXPECT_THAT(cut({5}, 1), ElementsAre(0, 1));
  EXPECT_THAT(Message(CutEvenly({1, 2}, 3).status()), HasSubstr("2 layers cannot be cut into 3"));
  EXPECT_THAT(Message(CutEvenly({1, -2}, 1).status()), HasSubstr("not negative, got -2"));
}

}  // namespace
}  // namespace dtensor::pipeline_schedule_test
