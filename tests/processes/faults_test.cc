// Faults of ranks that are processes, under every launcher and library of messages that is here:
// all ranks end, with an error that names who it was, and what is no fault ends nobody.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <ostream>
#include <string>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/common/run_program.h"
#include "tests/processes/ways.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using testing::Count;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;
using testing::Way;

// Others are not ended by mpirun when one is: they have to end by themselves. (dtensor-run ends
// them after three seconds.)
Outcome Start(const Way& way, int ranks, const std::string& program,
              const std::string& environment = "") {
  return testing::RunProgram(
      absl::StrCat(environment, " OMPI_MCA_orte_enable_recovery=1 timeout -k 5 60"),
      way.Command(ranks, program));
}

Outcome Fault(const Way& way, const std::string& how, int ranks = 3,
              const std::string& environment = "") {
  return Start(way, ranks, absl::StrCat(DT_PROGRAM " ", how), environment);
}

// All have ended, and within `limit`.
void Ends(const Outcome& o, absl::Time start, absl::Duration limit) {
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_LT(absl::Now() - start, limit) << o.text;
}

// What the others print when rank 1 goes wrong.
struct Wrong {
  std::string how, told;
  friend std::ostream& operator<<(std::ostream& out, const Wrong& w) { return out << w.how; }
};
class Faults : public ::testing::TestWithParam<std::tuple<Way, Wrong>> {};

TEST_P(Faults, EndAllAndNameTheRank) {
  const auto& [way, wrong] = GetParam();
  const absl::Time start = absl::Now();
  const Outcome o = Fault(way, wrong.how);
  Ends(o, start, absl::Seconds(20));
  EXPECT_GE(Count(o.text, wrong.told), 2) << o.text;
}
std::string NameOfFault(const ::testing::TestParamInfo<Faults::ParamType>& info) {
  const auto& [way, wrong] = info.param;
  return absl::StrCat(way.name, "_", wrong.how == "_exit" ? "exit_at_once" : wrong.how);
}
INSTANTIATE_TEST_SUITE_P(
    Ways, Faults,
    ::testing::Combine(
        ::testing::ValuesIn(testing::Ways(/*threads=*/false)),
        ::testing::Values(Wrong{"kill", "rank 1: its process is gone"},
                          Wrong{"abort", "rank 1: its process is gone"},
                          Wrong{"memory", "error: rank 1: cannot allocate 4294967296 bytes"},
                          Wrong{"after", "given up"}, Wrong{"barrier", "rank 1 issued barrier"},
                          Wrong{"exit", "rank 1: its process is gone"},
                          Wrong{"_exit", "rank 1: its process is gone"},
                          Wrong{"throw", "error: rank 1: boom"},
                          Wrong{"error", "error: rank 1: disk on fire"},
                          Wrong{"leave", "rank 1 left the group before call #11 (all_reduce)"},
                          Wrong{"other", "rank 1 issued all_reduce(sum, float32 [1000])"})),
    NameOfFault);

class AnyWay : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, AnyWay, ::testing::ValuesIn(testing::Ways(/*threads=*/false)),
                         testing::NameOfWay);

TEST_P(AnyWay, TheRankThatServesTheStoreIsNamedToo) {
  const Outcome o = Fault(GetParam(), "kill 0");
  EXPECT_EQ(Count(o.text, "] error: rank 0: its process, which serves the store, is gone") +
                Count(o.text, "\nerror: rank 0: its process, which serves the store, is gone"),
            2)
      << o.text;
}

TEST_P(AnyWay, EveryRankThatLivesEndsByItself) {
  const Outcome o = Fault(GetParam(), "kill", 4);
  EXPECT_GE(Count(o.text, "error: rank 1: its process is gone"), 3) << o.text;
}

// The stopped process is ended after a few seconds, before which the others have ended by
// themselves, else they would say that it is gone.
TEST_P(AnyWay, AStoppedRankIsNamedAtTheDeadline) {
  const Outcome o = Fault(GetParam(), "stop", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("rank 1 (last at call #10) did not arrive within 1s"),
                            HasSubstr("rank 1 holds up the others"),
                            Not(HasSubstr("rank 1: its process is gone"))));
}

// With it stops what tells the others; each finds it by itself.
TEST_P(AnyWay, AStoppedRankThatServesTheStoreIsNamedByAll) {
  const Outcome o = Fault(GetParam(), "stop 0", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_THAT(o.text, Not(HasSubstr("is gone")));
  EXPECT_GE(
      Count(o.text, "rank 0 (last at call #10) did not arrive within 1s") +
          Count(o.text, "error: rank 0: its process, which serves the store, does not answer"),
      2)
      << o.text;
}

// Nobody waits for its data, but all wait for its end.
TEST_P(AnyWay, AStoppedRankOutsideOfCallsIsNamed) {
  const Outcome o = Fault(GetParam(), "'stop at the end'", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_GE(Count(o.text,
                  "error: rank 1: nothing was heard of its process for 2.5s: it is stopped, "
                  "or its machine cannot be reached"),
            2)
      << o.text;
  EXPECT_EQ(Count(o.text, "processes: rank 0 is through and waits for rank 1\n"), 1) << o.text;
}

// Nobody can go on, and the report shows why.
TEST_P(AnyWay, SwappedCallsOfTwoGroupsAreShown) {
  const Outcome o = Fault(GetParam(), "swap", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_GE(Count(o.text, "did not arrive within 1s"), 3) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("[pair] rank 0: waiting for rank 1 in #1 all_reduce"),
                            HasSubstr("[world] first disagreement: call #21: ranks 1, 2 issued")));
}

// Outside of a world there is no store yet; the others are told all the same, at once.
TEST_P(AnyWay, ARankThatFailsBeforeTheWorldIsNamedByAll) {
  struct Early {
    std::string how, told;
    int times;
  };
  for (const Early& early : {
           Early{"'early error'", "error: rank 1: there is no such file", 2},
           Early{"'early error' 0", "error: rank 0: there is no such file", 2},
           Early{"'early end'", "rank 1 comes to the end of the program, rank 0 to world #1", 2},
           Early{"'early exit'", "rank 1 comes to the end of the program, rank 0 to world #1", 2},
           Early{"'another world'",
                 "rank 1 comes to world #2 of the program, of 3 ranks, rank 0 to "
                 "the end of the program",
                 1},
           Early{"'late error'", "error: nowhere to write to", 1},
       }) {
    const absl::Time start = absl::Now();
    const Outcome o = Fault(GetParam(), early.how);
    Ends(o, start, absl::Seconds(8));
    EXPECT_GE(Count(o.text, early.told), early.times) << early.how << "\n" << o.text;
  }
}

// A program may wait for ever.
TEST_P(AnyWay, AnInfiniteDeadlineIsNone) {
  const Outcome o = Fault(GetParam(), "none", 2, "DTENSOR_TIMEOUT_S=inf");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "is done\n"), 2) << o.text;
}

// A rank may take longer to clean up than the others; a store call that fails ends nothing, nor
// does a child of a rank, nor a key of the program's that begins as the library's.
TEST_P(AnyWay, WhatIsNoFault) {
  for (const std::string how : {"slow", "much", "clock", "fork", "keys"}) {
    const Outcome o =
        Fault(GetParam(), how, 3, how == "clock" ? "DTENSOR_TIMEOUT_S=5" : "DTENSOR_TIMEOUT_S=2");
    EXPECT_EQ(o.code, 0) << how << "\n" << o.text;
    EXPECT_EQ(Count(o.text, "is done\n"), 3) << how << "\n" << o.text;
  }
}

// Which of another process's worlds belongs to which of this one's nobody could say.
TEST_P(AnyWay, WorldsOfTwoThreadsAreRefused) {
  const Outcome o = Start(GetParam(), 3, "sh -c '" DT_PROGRAM " \"two worlds\"'");
  EXPECT_GE(Count(o.text, "error: "), 3) << o.text;  // mpirun may lose their exit codes
  EXPECT_THAT(o.text, HasSubstr("two threads of this process called RunSpmd at a time"));
}

#ifdef DT_HANGS
// Rank 2 hangs in the library of messages while processes connect.
TEST(Faults, ARankThatHangsWhileGlooConnectsIsNamed) {
  const Outcome o =
      testing::RunProgram("DTENSOR_TIMEOUT_S=2 timeout -k 5 60 " DT_RUN
                          " --nproc-per-node 3 -- env LD_PRELOAD=" DT_HANGS " " DT_PROGRAM " none",
                          "");
  EXPECT_EQ(o.code, 143) << o.text;  // of rank 2, which is told to end
  EXPECT_THAT(o.text, HasSubstr("gloo cannot start: rank 2 did not meet the others"));
  EXPECT_THAT(o.text, HasSubstr("first rank 2"));
}
#endif

// A copy whose build id is another one, as rank 2.
TEST_P(AnyWay, AnotherBuildOfTheProgramIsRefusedByAll) {
  std::ifstream file(DT_PROGRAM, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t note = bytes.find(std::string("\x14\0\0\0\3\0\0\0GNU\0", 12));
  ASSERT_NE(note, std::string::npos) << "the program has no build id";
  bytes[note + 12] = static_cast<char>(bytes[note + 12] ^ 1);
  const std::filesystem::path other =
      absl::StrCat(DT_PROGRAM, ".other.", GetParam().name);  // where plugins are found
  std::ofstream(other, std::ios::binary) << bytes;
  std::filesystem::permissions(other, std::filesystem::perms::owner_all);
  const absl::Time start = absl::Now();
  const Outcome o =
      Start(GetParam(), 3,
            absl::StrCat("sh -c 'if [ ${RANK:-$OMPI_COMM_WORLD_RANK} = 2 ]; then exec ",
                         other.string(), " none; else exec " DT_PROGRAM " none; fi'"));
  std::filesystem::remove(other);
  Ends(o, start, absl::Seconds(8));
  EXPECT_GE(Count(o.text, " runs another build of the program than rank "), 3) << o.text;
}

// The groups of Megatron-LM's example of 16 ranks, on threads and on processes.
TEST_P(AnyWay, GroupsOfManyNames) {
  const std::string sixteen =
      "rank 13: tp=12,13 cp=13 dp=13,15 pp=1,5,9,13 dp_cp=13,15 tp_cp=12,13 tp_dp=12,13,14,15 "
      "tp_dp_cp=12,13,14,15 mp=0,1,4,5,8,9,12,13";
  const Outcome threads = testing::RunProgram("", DT_PROGRAM " groups --ranks=16");
  EXPECT_THAT(threads.text, AllOf(HasSubstr(sixteen), HasSubstr("embedding=1,13\n")));
  const Outcome four = Start(GetParam(), 4, DT_PROGRAM " groups");
  EXPECT_EQ(four.code, 0) << four.text;
  EXPECT_THAT(four.text, HasSubstr("rank 3: tp=2,3 cp=3 dp=3 pp=1,3 dp_cp=3 tp_cp=2,3 tp_dp=2,3 "
                                   "tp_dp_cp=2,3 mp=0,1,2,3 world=0,1,2,3"));
  EXPECT_THAT(four.text, HasSubstr("embedding=1,3 ends=0,3\n"));
  const Outcome processes = Start(GetParam(), 16, DT_PROGRAM " groups");
  EXPECT_EQ(processes.code, 0) << processes.text;
  EXPECT_THAT(processes.text, AllOf(HasSubstr(sixteen), HasSubstr("embedding=1,13\n")));
}

}  // namespace
}  // namespace dtensor
