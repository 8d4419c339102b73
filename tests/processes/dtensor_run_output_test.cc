// What dtensor-run prints, where nobody reads it, or not now, or where it cannot be written.
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using testing::Count;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;

// Scripts run in a folder of the test's own, where run is the launcher, rank.sh what ranks do, and
// pipe one that is open and that nobody reads.
class DtensorRunOutput : public ::testing::Test {
 protected:
  Outcome Run(const std::string& rank, const std::string& script) const {
    folder_.Write("rank.sh", rank);
    folder_.Write("script.sh", absl::StrCat("cd ", folder_.path(),
                                            "\nrm -f pipe; mkfifo pipe; exec 3<>pipe\n", script));
    fs::remove(folder_ / "run");
    fs::create_symlink(DT_RUN, folder_ / "run");
    return testing::RunProgram("timeout -k 5 60 sh", folder_.Path("script.sh"));
  }
  std::string Read(const std::string& name) const { return folder_.Read(name); }

  const testing::TempFolder folder_;
};

// More than is kept for it.
TEST_F(DtensorRunOutput, AReaderThatComesLateHasAll) {
  const Outcome o = Run("yes $RANK | head -c 2000000; echo err >&2; exit 3\n",
                        "{ ./run --nproc-per-node 2 -- sh rank.sh 2>&1; echo code $?; } 3<&- | "
                        "{ sleep 0.5; cat > out; }\n");
  const std::string out = Read("out");
  for (const char* line : {"[rank 0] 0\n", "[rank 1] 1\n"}) {
    EXPECT_EQ(Count(out, line), 1000000) << line;
  }
  EXPECT_EQ(Count(out, "] err\n"), 2);
  EXPECT_THAT(out.substr(out.size() - 500),
              AllOf(HasSubstr("failed; first rank "), HasSubstr("code 3\n")));
}

// Of one file: a rank's lines, and those of the launcher after them.
TEST_F(DtensorRunOutput, LinesKeepTheirOrder) {
  const Outcome o =
      Run("seq 30000; exit 3\n", "./run sh rank.sh 2>&1 | { sleep 0.3; cat > out; }\ncat out\n");
  EXPECT_LT(o.text.find("[rank 0] 30000\n"), o.text.find("dtensor-run: attempt 0 failed"));
  EXPECT_EQ(Count(o.text, "[rank 0] "), 30000);
}

TEST_F(DtensorRunOutput, AFailureIsToldWhileNobodyReads) {
  const Outcome o = Run("if [ $RANK = 1 ]; then sleep 0.3; exit 7; fi; yes\n",
                        "./run --nproc-per-node 2 -- sh rank.sh > pipe 2> err &\n"
                        "until grep -q 'failed; first rank 1 .*exit code 7' err; do sleep 0.05; "
                        "done\nkill -TERM $!; wait $!; echo code $?\n");
  EXPECT_THAT(o.text, HasSubstr("code 143\n"));
  EXPECT_THAT(Read("err"), HasSubstr("then rank 0: killed by signal 15"));
}

// Also where a rank, to end in order, prints.
TEST_F(DtensorRunOutput, ASignalEndsItWhileNobodyReads) {
  const absl::Time start = absl::Now();
  const Outcome o =
      Run("trap 'seq 20000; echo > ended; exit 0' TERM\nseq 500000; while :; do sleep 0.05; done\n",
          "./run sh rank.sh > pipe 2>&1 &\nsleep 0.5; kill -TERM $!; wait $!; echo code $?\n");
  EXPECT_THAT(o.text, HasSubstr("code 143\n"));
  EXPECT_TRUE(fs::exists(folder_ / "ended"));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
}

TEST_F(DtensorRunOutput, AConsoleThatCannotBeWrittenIsToldOnce) {
  for (const auto& [where, why] :
       {std::pair<std::string, std::string>{"> /dev/full", "No space left on device"},
        {">&-", "Bad file descriptor"}}) {
    const std::string told = absl::StrCat("dtensor-run: warning: stdout cannot be written: ", why,
                                          "; no more lines go there\n");
    const std::string rank = "for i in 1 2 3; do echo $i; sleep 0.2; done; echo > ended; exit $1\n";
    Outcome o = Run(rank, absl::StrCat("./run sh rank.sh 0 ", where, "; echo code $?\n"));
    EXPECT_EQ(o.text, told + "code 1\n");
    EXPECT_TRUE(fs::remove(folder_ / "ended"));  // the program went on
    o = Run(rank, absl::StrCat("./run sh rank.sh 7 ", where, "; echo code $?\n"));
    EXPECT_EQ(Count(o.text, told), 1) << o.text;
    EXPECT_THAT(o.text, AllOf(HasSubstr("first rank 0 "), HasSubstr("code 7\n")));
  }
}

// As SIGPIPE ends a program: the ranks, which would run for ever, are asked to end.
TEST_F(DtensorRunOutput, ItEndsWhenItsReaderIsGone) {
  const Outcome o =
      Run("trap 'echo > ended$RANK; exit 0' TERM\n"
          "while :; do echo line; sleep 0.05; done\n",
          "{ ./run --nproc-per-node 2 -- sh rank.sh; echo code $? >&2; } | head -n "
          "1\n");
  EXPECT_THAT(o.text, AllOf(HasSubstr("code 141\n"), Not(HasSubstr("failed"))));
  EXPECT_EQ(Count(o.text, "nobody reads stdout any more: the processes are told to end\n"), 1)
      << o.text;
  for (const char* ended : {"ended0", "ended1"}) EXPECT_TRUE(fs::exists(folder_ / ended));
}

}  // namespace
}  // namespace dtensor
