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

TEST(Processes, AnAddressThatRankZeroCannotServeIsToldToAll) {
  for (const std::string address : {"nowhere", "0.0.0.0", "192.0.2.1"}) {
    const absl::Time start = absl::Now();
    const Outcome o = Mpirun(3, "DTENSOR_ADDRESS=" + address, DT_PROGRAM " none");
    Ends(o, start, absl::Seconds(8));
    EXPECT_EQ(Count(o.text, "error: rank 0: store: "), 3) << o.text;
    EXPECT_GE(Count(o.text, address), 3) << o.text;
  }
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
