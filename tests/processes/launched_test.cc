// Programs on two processes, by mpirun and by dtensor-run: they overlap, draw, print and end in
// good order as on threads.
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "nlohmann/json.hpp"
#include "tests/common/byte_model.h"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/processes/ways.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::Contains;
using testing::Count;
using ::testing::HasSubstr;
using testing::Outcome;

class Launched : public ::testing::TestWithParam<testing::Way> {
 protected:
  static std::string Command(const std::string& program) {
    return "timeout -k 5 60 " + GetParam().Command(2, program);
  }
  static Outcome Run(const std::string& program, const std::string& environment = "") {
    return testing::RunProgram(environment + " " + Command(program), "");
  }
  // Without what dtensor-run begins lines with.
  static std::string Plain(const std::string& text) {
    return absl::StrReplaceAll(text, {{"[rank 0] ", ""}, {"[rank 1] ", ""}});
  }
  std::string Path(const std::string& name) const { return folder_.Path(name); }

  const testing::TempFolder folder_;
};
INSTANTIATE_TEST_SUITE_P(Ways, Launched, ::testing::ValuesIn(testing::Ways(/*threads=*/false)),
                         testing::NameOfWay);

// The number after the last `told` in a text; -1: it is not there.
double NumberAfter(const std::string& text, const std::string& told) {
  const size_t at = text.rfind(told);
  return at == std::string::npos ? -1 : std::atof(text.c_str() + at + told.size());
}

TEST_P(Launched, CallsGoOnWhileTheirRankSleeps) {
  const Outcome o = Run(DT_PROGRAM " overlap");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "reading takes 0.0"), 2) << o.text;
}

// On one machine MPI's own ports, at which a stranger could hold up the start, are not open: only
// the store's is, which drops him (process_store_test).
TEST_P(Launched, StrangersFindOneStoreToTalkTo) {
  const Outcome o = Run(DT_PROGRAM " ports");
  EXPECT_EQ(o.code, 0) << o.text;
  const bool mpi = GetParam().name == "mpi";  // gloo's own connections are over TCP
  for (const int rank : {0, 1}) {
    const double ports = NumberAfter(o.text, absl::StrCat("rank ", rank, " listens at "));
    EXPECT_GE(ports, 1 - rank) << o.text;
    EXPECT_LE(ports, (mpi ? 1 : 2) - rank) << o.text;
  }
}

#ifdef DT_OWN_MPI
TEST(OwnMpi, ProgramsMayStartAndEndIt) {
  const std::string command = "timeout -k 5 60 " DT_MPIRUN " -n 2 " DT_OWN_MPI;
  const Outcome around = testing::RunProgram(command, "around");
  EXPECT_EQ(around.code, 0) << around.text;
  EXPECT_EQ(Count(around.text, ": 2\n"), 4) << around.text;
  const Outcome between = testing::RunProgram(command, "between");
  EXPECT_NE(between.code, 0) << between.text;
  EXPECT_EQ(Count(between.text, ": 2\n"), 2) << between.text;
  EXPECT_THAT(between.text, HasSubstr("the program has called MPI_Finalize"));
}
#endif

TEST_P(Launched, CallsMoveMoreThanTwoGigabytes) {
  std::ifstream file("/proc/meminfo");
  const std::string meminfo{std::istreambuf_iterator<char>(file), {}};
  const double available = NumberAfter(meminfo, "MemAvailable:");
  if (available < 6 << 20) {
    GTEST_SKIP() << "it wants 6 GiB of memory; " << available << " KiB are available";
  }
  const Outcome o = Run("sh -c '" DT_PROGRAM " \"much data\"'");
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Count(o.text, "moved 2147487747 bytes"), 2) << o.text;
}

// What the thread does has a row of its own, and lies where the rank slept.
TEST_P(Launched, CallsThatOverlapAreOnTheTimeline) {
  const Outcome o = Run(DT_PROGRAM " timeline", "DT_TIMELINE=" + Path("timeline"));
  ASSERT_EQ(o.code, 0) << o.text;
  for (const char* rank : {"0", "1"}) {
    std::ifstream file(Path("timeline") + rank);
    struct Times {
      double begin = 0, end = 0;
    } sleep, call;
    std::string row, detail;
    std::vector<std::string> open[2], inside;  // by row
    const nlohmann::json timeline = nlohmann::json::parse(file);
    for (const auto& e : timeline.at("traceEvents")) {
      const std::string name = e.value("name", "");
      if (name == "thread_name") row = e.at("args").at("name").get<std::string>();
      if (e.at("ph") == "M") continue;
      const bool beside = e.at("tid") == 1;
      std::vector<std::string>& stack = open[beside ? 1 : 0];
      const double at = e.at("ts").get<double>();
      if (e.at("ph") == "B") {
        if (name == "sleep") sleep.begin = at;
        if (beside && stack.empty()) {
          call.begin = at;
          detail = e.at("args").at("detail").get<std::string>();
        }
        if (beside && !stack.empty()) inside.push_back(e.at("cat").get<std::string>());
        stack.push_back(name);
        continue;
      }
      ASSERT_FALSE(stack.empty());
      if (stack.back() == "sleep") sleep.end = at;
      if (beside && stack.size() == 1) {
        EXPECT_EQ(stack[0], "all_reduce");
        call.end = at;
      }
      stack.pop_back();
    }
    EXPECT_EQ(row, "calls that overlap");
    EXPECT_EQ(detail, "world");
    EXPECT_THAT(inside, AllOf(Contains("move"), Contains("wait")));
    EXPECT_LT(0, call.begin);
    EXPECT_LT(call.begin, call.end);
    EXPECT_LT(call.end, sleep.end);
  }
}

// As many times of 64 processes as of 4.
TEST_P(Launched, EachAsksStoresAFewTimesToStart) {
  for (const int ranks : {4, 64}) {
    const Outcome o = testing::RunProgram("DTENSOR_LOG=comm timeout -k 5 100",
                                          GetParam().Command(ranks, DT_PROGRAM " fine"));
    ASSERT_EQ(o.code, 0) << o.text;
    int counted = 0;
    for (const absl::string_view line : absl::StrSplit(o.text, '\n')) {
      const size_t at = line.find(" times before world #1 began");
      if (at == absl::string_view::npos) continue;
      const absl::string_view before = line.substr(0, at);
      const int requests = std::atoi(std::string(before.substr(before.rfind(' '))).c_str());
      EXPECT_GE(requests, 3) << line;
      EXPECT_LE(requests, 24) << line;
      ++counted;
    }
    EXPECT_EQ(counted, ranks) << o.text;
  }
}

// Measured from outside, from where a rank goes wrong to where the others have ended; on two cores
// with 14 processes that compute it took at most 0.3 s.
TEST_P(Launched, TheOthersEndSoonAfterARankIsKilledOrThrows) {
  for (const auto& [how, limit] : {std::pair<std::string, double>{"kill", 3}, {"throw", 1}}) {
    const std::string program =
        absl::StrCat("sh -c '" DT_PROGRAM " ", how,
                     "; echo rank ${RANK:-$OMPI_COMM_WORLD_RANK} has ended at $(date +%s.%N)'");
    // Else mpirun ends the others.
    const Outcome o = testing::RunProgram("OMPI_MCA_orte_enable_recovery=1 timeout -k 5 60",
                                          GetParam().Command(3, program));
    const double wrong = NumberAfter(o.text, "goes wrong at ");
    ASSERT_GT(wrong, 0) << o.text;
    for (const char* rank : {"0", "2"}) {
      const double end = NumberAfter(o.text, absl::StrCat("rank ", rank, " has ended at "));
      EXPECT_GT(end, wrong) << o.text;
      EXPECT_LT(end, wrong + limit) << o.text;
    }
  }
}

#ifdef DT_TRAIN_GPT
class LaunchedTraining : public Launched {
 protected:
  void SetUp() override { folder_.Write("text", testing::LearnableText()); }
  std::string Train(const std::string& more) const {
    return absl::StrCat(DT_TRAIN_GPT " --data ", Path("text"),
                        " --hidden 16 --heads 2 --seq 12 --batch 4 ", more);
  }
  std::vector<double> Losses(const std::string& name, const Outcome& o) const {
    EXPECT_EQ(o.code, 0) << o.text;
    const auto summary = nlohmann::json::parse(folder_.Read(name), nullptr, false);
    return summary.is_object() ? summary.at("losses").get<std::vector<double>>()
                               : std::vector<double>();
  }
  // Whether the process that wrote its pid into the file has ended, or does so soon.
  bool Ends(const std::string& name) const {
    const std::string pid(absl::StripAsciiWhitespace(folder_.Read(name)));
    for (int i = 0; i < 100; ++i) {
      std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
      const std::string stat{std::istreambuf_iterator<char>(file), {}};
      const size_t name_end = stat.rfind(')');  // then its state
      if (name_end == std::string::npos || stat.substr(name_end, 3) == ") Z") return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }
  // A training without end that saves, to whose launcher (or whose rank 1) a signal is sent after
  // the first step. What it printed, and the exit code.
  Outcome SendTo(const std::string& whom, const std::string& signal) const {
    folder_.Write("rank.sh",
                  absl::StrCat("echo $$ > ", Path("pid"), "${RANK:-$OMPI_COMM_WORLD_RANK}\nexec ",
                               Train("--mesh dp=2 --steps 1000000000"), " --save ", Path("saved"),
                               " --log ", Path("log"), "\n"));
    const std::string pid = whom == "launcher" ? "$!" : absl::StrCat("$(cat ", Path("pid1"), ")");
    folder_.Write("send.sh",
                  absl::StrCat("exec 2>&1\n", GetParam().Command(2, "sh " + Path("rank.sh")),
                               " &\nuntil [ -s ", Path("log"),
                               " ]; do kill -0 $! || exit 9; sleep 0.02; done\nkill -", signal, " ",
                               pid, "\nwait $!\n"));
    return testing::RunProgram("timeout -k 5 60 sh", Path("send.sh"));
  }
  void ExpectSavedAfterTheLastStep(const Outcome& o) const {
    const std::string log = folder_.Read("log");
    const int steps = Count(log, "\n");
    EXPECT_THAT(o.text, HasSubstr(absl::StrCat("stopped after step ", steps)));
    const std::string name = absl::StrCat("saved/step-", absl::Dec(steps, absl::kZeroPad8));
    EXPECT_TRUE(fs::exists(Path(name + "/checkpoint.json"))) << name << "\n" << o.text;
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, LaunchedTraining,
                         ::testing::ValuesIn(testing::Ways(/*threads=*/false)), testing::NameOfWay);

// With what was drawn for dropout: a hash of every mask.
TEST_P(LaunchedTraining, DropoutAndItsMasksAreThoseOfThreads) {
  const auto command = [&](const std::string& name) {
    return Train("--steps 5 --dropout 0.1 --mask_hashes --mesh tp=2 --summary " + Path(name));
  };
  const auto masks = [](const std::string& text) {
    std::vector<std::string> found;
    for (const absl::string_view line : absl::StrSplit(text, '\n')) {
      const size_t at = line.find("mask step");  // after a line that a terminal writes over
      if (at != absl::string_view::npos) found.emplace_back(line.substr(at, line.find('\r') - at));
    }
    return found;
  };
  const Outcome threads = testing::RunProgram(command("threads"), "");
  const Outcome processes = Run(command("processes"));
  const std::vector<double> losses = Losses("threads", threads);
  EXPECT_EQ(losses.size(), 5u);
  EXPECT_EQ(Losses("processes", processes), losses);
  EXPECT_EQ(masks(threads.text).size(), 25u);  // of 5 layers
  EXPECT_EQ(masks(Plain(processes.text)), masks(threads.text));
}

// Row 32.
TEST_P(LaunchedTraining, ASignalToOneProcessSavesAndEndsAll) {
  const Outcome o = SendTo("rank 1", "TERM");
  EXPECT_EQ(o.code, 0) << o.text;
  ExpectSavedAfterTheLastStep(o);
}

// dtensor-run passes SIGTERM on and leaves time. mpirun does so with SIGUSR1; after SIGTERM it
// kills soon: the training is saved or not, but nothing is left of it.
TEST_P(LaunchedTraining, ASignalToTheLauncherSavesAndEndsAll) {
  const bool mpi = GetParam().name == "mpi";
  const Outcome o = SendTo("launcher", mpi ? "USR1" : "TERM");
  EXPECT_EQ(o.code, mpi ? 0 : 128 + SIGTERM) << o.text;
  ExpectSavedAfterTheLastStep(o);
  if (!mpi) return;
  for (const char* old : {"log", "saved"}) fs::remove_all(Path(old));
  EXPECT_EQ(SendTo("launcher", "TERM").code, 1);
  EXPECT_TRUE(Ends("pid0"));
  EXPECT_TRUE(Ends("pid1"));
}
#endif

#ifdef DT_GENERATE
TEST_P(Launched, AModelGeneratesTheTextOfThreads) {
  const auto model = testing::MakeByteModel(DT_TEST_DATA);
  const std::string generate =
      absl::StrCat("sh -c '" DT_GENERATE " --model ", model->path(),
                   " --mesh tp=2 --max-new 24 --prompt dtensor \"$@\" 2>/dev/null' sh");
  for (const char* how : {"", " --temperature 0.9 --seed 3"}) {
    const Outcome threads = testing::RunProgram(generate, how), processes = Run(generate + how);
    EXPECT_EQ(threads.code, 0);
    EXPECT_EQ(processes.code, 0);
    EXPECT_GT(threads.text.size(), 10u);
    EXPECT_EQ(Plain(processes.text), threads.text) << how;
  }
}
#endif

}  // namespace
}  // namespace dtensor
