// Programs whose ranks are processes, run as a user runs them: faults end all of them, with an
// error that names the rank, and a training has the losses that threads have, bit by bit.
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/thin.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using testing::Count;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;

// Others are not ended by mpirun when one is: they have to end by themselves. Its exit code says
// nothing then.
Outcome Mpirun(int ranks, const std::string& environment, const std::string& command,
               const std::string& flags = "--enable-recovery") {
  return testing::RunProgram(
      absl::StrCat(environment, " timeout -k 5 60 " DT_MPIRUN " ", flags, " -n ", ranks), command);
}

Outcome Fault(const std::string& how, int ranks = 3, const std::string& environment = "") {
  return Mpirun(ranks, environment, absl::StrCat(DT_PROGRAM " ", how));
}

// All have ended, and within `limit`.
void Ends(const Outcome& o, absl::Time start, absl::Duration limit) {
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_LT(absl::Now() - start, limit) << o.text;
}

TEST(Processes, MeetAndEnd) {
  for (const int ranks : {2, 4}) {
    const Outcome o = Fault("none", ranks);
    EXPECT_EQ(o.code, 0) << o.text;
    EXPECT_EQ(Count(o.text, "is done\n"), ranks) << o.text;
    EXPECT_EQ(Count(o.text, "processes: rank 0 of"), 1) << o.text;
  }
}

TEST(Processes, OneProcessHasThreads) {
  const Outcome o = Mpirun(1, "", DT_PROGRAM " none");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "rank 0 of 1 is done\n"), 1) << o.text;
}

// Files and processes: sockets go with these. DT_THOROUGH: after a thousand of them, else
// DT_STARTS.
TEST(Processes, StartsAndEndsLeaveNothingBehind) {
  const Outcome worlds = Fault("worlds", 4);  // in one launch: its open files
  EXPECT_EQ(worlds.code, 0) << worlds.text;
  EXPECT_EQ(Count(worlds.text, "is done\n"), 120) << worlds.text;
  const std::string name = absl::StrCat("dtensor_starts_", getpid());
  const testing::TempFolder folder;
  const std::string environment = absl::StrCat(
      "TMPDIR=", folder.path(), " OMPI_MCA_btl_vader_backing_directory=", folder.path());
  const char* asked = std::getenv("DT_STARTS");
  const int starts = asked != nullptr ? atoi(asked) : testing::Thorough() ? 1000 : 1;
  for (int i = 0; i < starts; ++i) {
    const std::string how = i % 10 == 9 ? "error" : "none";
    const Outcome o = Fault(absl::StrCat(how, " 1 ", name), 4, environment);
    ASSERT_EQ(Count(o.text, how == "none" ? "is done\n" : "error: rank 1: disk on fire"), 4)
        << o.text;
  }
  EXPECT_EQ(testing::RunProgram("find", folder.path() + " -type f").text, "");
  EXPECT_EQ(testing::RunProgram("ps", "-eo args | grep 'processes_program.*" + name +
                                          "' | "
                                          "grep -v grep")
                .text,
            "");
}

// What the others print when rank 1 goes wrong.
struct Wrong {
  std::string how, told;
  friend std::ostream& operator<<(std::ostream& out, const Wrong& w) { return out << w.how; }
};
class Faults : public ::testing::TestWithParam<Wrong> {};

TEST_P(Faults, EndAllAndNameTheRank) {
  const absl::Time start = absl::Now();
  const Outcome o = Fault(GetParam().how);
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_LT(absl::Now() - start, absl::Seconds(20)) << o.text;
  EXPECT_GE(Count(o.text, GetParam().told), 2) << o.text;
}
INSTANTIATE_TEST_SUITE_P(
    Processes, Faults,
    ::testing::Values(
        Wrong{"kill", "rank 1: its process is gone"}, Wrong{"abort", "rank 1: its process is gone"},
        Wrong{"memory", "error: rank 1: cannot allocate 4294967296 bytes"},
        Wrong{"after", "given up"}, Wrong{"barrier", "rank 1 issued barrier"},
        Wrong{"exit", "rank 1: its process is gone"}, Wrong{"_exit", "rank 1: its process is gone"},
        Wrong{"throw", "error: rank 1: boom"}, Wrong{"error", "error: rank 1: disk on fire"},
        Wrong{"leave", "rank 1 left the group before call #11 (all_reduce)"},
        Wrong{"other", "rank 1 issued all_reduce(sum, float32 [1000])"}),
    [](const auto& info) { return info.param.how == "_exit" ? "exit_at_once" : info.param.how; });

TEST(Processes, TheRankThatServesTheStoreIsNamedToo) {
  const Outcome o = Fault("kill 0");
  EXPECT_EQ(Count(o.text, "error: rank 0: its process, which serves the store, is gone"), 2)
      << o.text;
}

TEST(Processes, EveryRankThatLivesEndsByItself) {
  const Outcome o = Fault("kill", 4);
  EXPECT_EQ(Count(o.text, "error: rank 1: its process is gone"), 3) << o.text;
}

// The stopped process is ended after a few seconds, before which the others have ended by
// themselves, else they would say that it is gone.
TEST(Processes, AStoppedRankIsNamedAtTheDeadline) {
  const Outcome o = Fault("stop", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("rank 1 (last at call #10) did not arrive within 1s"),
                            HasSubstr("rank 1 holds up the others"),
                            Not(HasSubstr("rank 1: its process is gone"))));
}

// With it stops what tells the others; each finds it by itself.
TEST(Processes, AStoppedRankThatServesTheStoreIsNamedByAll) {
  const Outcome o = Fault("stop 0", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_THAT(o.text, Not(HasSubstr("is gone")));
  EXPECT_EQ(
      Count(o.text, "rank 0 (last at call #10) did not arrive within 1s") +
          Count(o.text, "error: rank 0: its process, which serves the store, does not answer"),
      2)
      << o.text;
}

// Nobody waits for its data, but all wait for its end.
TEST(Processes, AStoppedRankOutsideOfCallsIsNamed) {
  const Outcome o = Fault("'stop at the end'", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_EQ(Count(o.text,
                  "error: rank 1: nothing was heard of its process for 2.5s: it is stopped, "
                  "or its machine cannot be reached"),
            2)
      << o.text;
  EXPECT_EQ(Count(o.text, "processes: rank 0 is through and waits for rank 1\n"), 1) << o.text;
}

// Nobody can go on, and the report shows why.
TEST(Processes, SwappedCallsOfTwoGroupsAreShown) {
  const Outcome o = Fault("swap", 3, "DTENSOR_TIMEOUT_S=1");
  EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
  EXPECT_GE(Count(o.text, "did not arrive within 1s"), 3) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("[pair] rank 0: waiting for rank 1 in #1 all_reduce"),
                            HasSubstr("[world] first disagreement: call #21: ranks 1, 2 issued")));
}

// The number after the last `told` in a text; -1: it is not there.
double NumberAfter(const std::string& text, const std::string& told) {
  const size_t at = text.rfind(told);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + told.size());
}

// A rank that does not end, in code of its own; a shell ends it after a while. From its last call
// on the others take the timeout and a second; this allows two, for others use the cores too.
TEST(Processes, ARankThatLoopsIsNamedAtTheDeadline) {
  for (const int who : {1, 0}) {
    const Outcome o = Mpirun(3, "DTENSOR_TIMEOUT_S=1",
                             absl::StrCat("sh -c 'timeout 6 " DT_PROGRAM " loop ", who,
                                          "; echo rank $OMPI_COMM_WORLD_RANK has ended at "
                                          "$(date +%s.%N)'"));
    EXPECT_NE(o.code, 124) << "it hangs: " << o.text;
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("rank ", who,
                                               " (last at call #10) did not arrive "
                                               "within 1s")));
    const double wrong = NumberAfter(o.text, "goes wrong at ");
    for (const int rank : {0, 1, 2}) {
      if (rank == who) continue;
      const double end = NumberAfter(o.text, absl::StrCat("rank ", rank, " has ended at "));
      EXPECT_GT(end, wrong + 1) << o.text;
      EXPECT_LT(end, wrong + 3) << o.text;
    }
  }
}

// One of them cannot load its plugin, or ends before it comes to the runtime at all, while the
// others are inside of MPI's start, which nobody can call off.
TEST(Processes, WhoFailsBeforeTheOthersHaveMetEndsThem) {
  struct Early {
    std::string who, told;
  };
  for (const Early& early : {
           Early{"-x DTENSOR_MPI_PLUGIN=/nowhere/plugin.so " DT_PROGRAM " none",
                 "error: started as one of 3 processes"},
           Early{"true", ""},
           Early{"sh -c 'kill -9 $$'", ""},
       }) {
    const absl::Time start = absl::Now();
    const Outcome o = Mpirun(2, "", absl::StrCat(DT_PROGRAM " none : -n 1 ", early.who));
    Ends(o, start, absl::Seconds(8));
    EXPECT_EQ(Count(o.text, ": MPI cannot start: "), 2) << o.text;
    EXPECT_EQ(Count(o.text, " of the 3 processes of this machine ended before it\n"), 2) << o.text;
    EXPECT_THAT(o.text, HasSubstr(early.told));
  }
}

// Outside of a world there is no store yet; the others are told all the same, at once.
TEST(Processes, ARankThatFailsBeforeTheWorldIsNamedByAll) {
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
    const Outcome o = Fault(early.how);
    Ends(o, start, absl::Seconds(8));
    EXPECT_EQ(Count(o.text, early.told), early.times) << early.how << "\n" << o.text;
  }
}

TEST(Processes, AnAddressThatRankZeroCannotServeIsToldToAll) {
  for (const std::string address : {"nowhere", "0.0.0.0", "192.0.2.1"}) {
    const absl::Time start = absl::Now();
    const Outcome o = Mpirun(3, "DTENSOR_ADDRESS=" + address, DT_PROGRAM " none");
    Ends(o, start, absl::Seconds(8));
    EXPECT_EQ(Count(o.text, "error: rank 0: store: "), 3) << o.text;
    EXPECT_GE(Count(o.text, address), 3) << o.text;
  }
}

// A program may wait for ever.
TEST(Processes, AnInfiniteDeadlineIsNone) {
  const Outcome o = Fault("none", 2, "DTENSOR_TIMEOUT_S=inf");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "is done\n"), 2) << o.text;
}

// A rank may take longer to clean up than the others; a store call that fails ends nothing, nor
// does a child of a rank.
TEST(Processes, WhatIsNoFault) {
  for (const std::string how : {"slow", "much", "clock", "fork"}) {
    const Outcome o = Fault(how, 3, how == "clock" ? "DTENSOR_TIMEOUT_S=5" : "DTENSOR_TIMEOUT_S=2");
    EXPECT_EQ(o.code, 0) << how << "\n" << o.text;
    EXPECT_EQ(Count(o.text, "is done\n"), 3) << how << "\n" << o.text;
  }
}

// A copy whose build id is another one.
TEST(Processes, AnotherBuildOfTheProgramIsRefusedByAll) {
  std::ifstream file(DT_PROGRAM, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t note = bytes.find(std::string("\x14\0\0\0\3\0\0\0GNU\0", 12));
  ASSERT_NE(note, std::string::npos) << "the program has no build id";
  bytes[note + 12] = static_cast<char>(bytes[note + 12] ^ 1);
  const std::filesystem::path other =
      absl::StrCat(DT_PROGRAM, ".other");  // where plugins are found
  std::ofstream(other, std::ios::binary) << bytes;
  std::filesystem::permissions(other, std::filesystem::perms::owner_all);
  const absl::Time start = absl::Now();
  const Outcome o =
      Mpirun(2, "", absl::StrCat(DT_PROGRAM " none : -n 1 ", other.string(), " none"));
  std::filesystem::remove(other);
  Ends(o, start, absl::Seconds(8));
  EXPECT_EQ(Count(o.text, " runs another build of the program than rank "), 3) << o.text;
}

// The groups of Megatron-LM's example of 16 ranks on threads; on processes those of 4 ranks, and
// those of 16 where all is tried.
TEST(Processes, GroupsOfManyNames) {
  const std::string sixteen =
      "rank 13: tp=12,13 cp=13 dp=13,15 pp=1,5,9,13 dp_cp=13,15 tp_cp=12,13 tp_dp=12,13,14,15 "
      "tp_dp_cp=12,13,14,15 mp=0,1,4,5,8,9,12,13";
  const Outcome threads = testing::RunProgram("", DT_PROGRAM " groups --ranks=16");
  EXPECT_THAT(threads.text, AllOf(HasSubstr(sixteen), HasSubstr("embedding=1,13\n")));
  const Outcome four = Mpirun(4, "", DT_PROGRAM " groups", "");
  EXPECT_EQ(four.code, 0) << four.text;
  EXPECT_THAT(four.text, HasSubstr("rank 3: tp=2,3 cp=3 dp=3 pp=1,3 dp_cp=3 tp_cp=2,3 tp_dp=2,3 "
                                   "tp_dp_cp=2,3 mp=0,1,2,3 world=0,1,2,3"));
  EXPECT_THAT(four.text, HasSubstr("embedding=1,3 ends=0,3\n"));
  if (!testing::Thorough()) return;
  const Outcome processes = Mpirun(16, "", DT_PROGRAM " groups", "");
  EXPECT_EQ(processes.code, 0) << processes.text;
  EXPECT_THAT(processes.text, HasSubstr(sixteen));
}

TEST(Processes, AnotherNumberOfRanksIsRefused) {
  const Outcome o = Mpirun(2, "", DT_PROGRAM " --ranks=3", "");
  EXPECT_NE(o.code, 0);
  EXPECT_THAT(o.text, HasSubstr("RunSpmd of 3 ranks in a program that was started as 2 processes"));
}

TEST(Processes, ThePluginThatIsNotThereIsNamed) {
  const Outcome o = Mpirun(2, "DTENSOR_MPI_PLUGIN=/nowhere/plugin.so", DT_PROGRAM, "");
  EXPECT_NE(o.code, 0);
  EXPECT_THAT(o.text, AllOf(HasSubstr("needs the MPI plugin"), HasSubstr("/nowhere/plugin.so")));
}

// Before it is opened, which each process would be alone in.
TEST(Processes, ThePluginOfAnotherMpiIsRefusedByName) {
  const Outcome o = Mpirun(2, "DTENSOR_MPI_PLUGIN=" DT_FOREIGN, DT_PROGRAM, "");
  EXPECT_NE(o.code, 0);
  EXPECT_THAT(o.text, AllOf(HasSubstr("by Open MPI (OMPI_COMM_WORLD_SIZE); but the plugin is of "
                                      "MPICH Version: 4.0.2: start it by"),
                            Not(HasSubstr("it was opened"))));
}

#ifdef DT_TRAIN_GPT
TEST(Processes, TrainingHasTheLossesOfThreads) {
  const testing::TempFolder folder;
  const std::string text = folder.Write("text", testing::LearnableText());
  const auto losses = [&](const std::string& name, const Outcome& o) {
    EXPECT_EQ(o.code, 0) << o.text;
    std::ifstream file(folder / name);
    return nlohmann::json::parse(file).at("losses").get<std::vector<double>>();
  };
  for (const auto& [ranks, mesh] : {std::pair<int, std::string>{2, "tp=2"}, {4, "dp=2,tp=2"}}) {
    const auto arguments = [&](const std::string& name) {
      return absl::StrCat(" --data ", text,
                          " --hidden 48 --heads 4 --seq 24 --batch 4 --steps 10 --mesh ", mesh,
                          " --summary ", folder.Path(name));
    };
    const auto threads = losses("threads", testing::RunProgram(DT_TRAIN_GPT, arguments("threads")));
    const auto processes =
        losses("processes", Mpirun(ranks, "", DT_TRAIN_GPT + arguments("processes")));
    ASSERT_EQ(threads.size(), 10u);
    EXPECT_EQ(threads, processes) << mesh;
    // What each process knows of itself comes to the one that writes.
    std::ifstream file(folder / "processes");
    const auto peaks = nlohmann::json::parse(file).at("peak_bytes").get<std::vector<int64_t>>();
    ASSERT_EQ(peaks.size(), static_cast<size_t>(ranks));
    for (const int64_t peak : peaks) EXPECT_GT(peak, 10000);
  }
#ifdef DT_TRAIN_LLAMA
  const Outcome llama =
      Mpirun(2, "",
             absl::StrCat(DT_TRAIN_LLAMA, " --data.path=", text,
                          " --model.hidden=48 --model.inner=96 --data.seq=16 --training.batch=4"
                          " --training.steps=2 --parallel.tp=2"));
  EXPECT_EQ(llama.code, 0) << llama.text;
  for (const char* once : {"[training]", "parameters, ", "train step 2/2"}) {
    EXPECT_EQ(Count(llama.text, once), 1) << once;
  }
#endif
}
#endif

}  // namespace
}  // namespace dtensor
