// What goes wrong in a training's numbers and logs, on threads, under mpirun and under dtensor-run:
// rows 13, 14 and 33 of the table in docs/guide/launch.md.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/processes/ways.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;

class TrainingFaults : public ::testing::TestWithParam<testing::Way> {
 protected:
  static Outcome Train(const std::string& arguments) {
    const std::string command = absl::StrCat(DT_TRAINING " ", arguments, " --ranks=3");
    return testing::RunProgram("timeout -k 5 60", GetParam().Command(3, command));
  }
  // The line "losses ..." that a training ends with.
  static std::string Losses(const Outcome& o) {
    const size_t at = o.text.find("losses ");
    return at == std::string::npos ? "" : o.text.substr(at, o.text.find('\n', at) - at);
  }
};
INSTANTIATE_TEST_SUITE_P(Ways, TrainingFaults, ::testing::ValuesIn(testing::Ways(/*threads=*/true)),
                         testing::NameOfWay);

// Row 13.
TEST_P(TrainingFaults, ALossThatIsNoNumberNamesStepAndRank) {
  const Outcome o = Train("nan 1");
  EXPECT_EQ(o.code, 1) << o.text;
  EXPECT_THAT(o.text, HasSubstr("the loss is nan at step 3, by the part of rank 1; "));
  EXPECT_EQ(Losses(o), "");
}

// Row 14: at the next comparison, which is that of the step.
TEST_P(TrainingFaults, AFlippedBitIsFoundAndItsRankNamed) {
  const Outcome o = Train("flip 2");
  EXPECT_EQ(o.code, 1) << o.text;
  EXPECT_THAT(o.text, HasSubstr("copies differ: blocks.0.mlp.down.weight on rank 2 is not that of "
                                "rank 0"));
  EXPECT_EQ(Losses(o), "");
}

// Row 33: a device that is always full.
TEST_P(TrainingFaults, ALogThatCannotBeWrittenIsToldOnceAndTheTrainingGoesOn) {
  const Outcome well = Train("none"), full = Train("log /dev/full");
  EXPECT_EQ(well.code, 0) << well.text;
  EXPECT_EQ(full.code, 0) << full.text;
  EXPECT_NE(Losses(well), "") << well.text;
  EXPECT_EQ(Losses(full), Losses(well)) << full.text;
  const size_t told =
      full.text.find("warning: /dev/full cannot be written: No space left on device");
  ASSERT_NE(told, std::string::npos) << full.text;
  EXPECT_EQ(full.text.find("warning: ", told + 1), std::string::npos) << full.text;
}

#ifdef DT_RUN
// The same of what the launcher writes: one rank's file is full, the other's is whole.
TEST(DtensorRunLogs, AFileThatCannotBeWrittenIsToldOnceAndTheProgramGoesOn) {
  const testing::TempFolder folder;
  const fs::path logs = folder / "attempt_0";
  for (const char* rank : {"0", "1"}) fs::create_directories(logs / rank);
  fs::create_symlink("/dev/full", logs / "0" / "stdout.log");
  const Outcome o = testing::RunProgram(
      DT_RUN, absl::StrCat("--nproc-per-node 2 --redirects 1 --log-dir ", folder.path(),
                           " -- sh -c 'for i in 1 2 3; do echo line $i; sleep 0.3; done'"));
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(o.text,
            absl::StrCat("dtensor-run: warning: ", (logs / "0" / "stdout.log").string(),
                         " cannot be written: No space left on device; no more lines go there\n"));
  std::ifstream whole(logs / "1" / "stdout.log");
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(whole), {}), "line 1\nline 2\nline 3\n");
}
#endif

}  // namespace
}  // namespace dtensor
