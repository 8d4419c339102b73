// Ranks that are processes with a GPU each, by NCCL: on the stand-ins for NVIDIA's libraries
// (tests/cusim). A training has the losses of the CPU's threads, and who dies is named.
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "gmock/gmock.h"
#include "tests/common/run_program.h"

namespace dtensor {
namespace {

using ::testing::DoubleNear;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;
using ::testing::Pointwise;

// Every process sees `gpus` GPUs, which are the same for all.
Outcome Launch(int ranks, const std::string& command, int gpus) {
  return testing::RunProgram(
      absl::StrCat("DTENSOR_DEVICE=cuda DTENSOR_LOG=comm DT_CUSIM_DEVICES=", gpus,
                   " timeout -k 5 300 " DT_RUN " --nproc-per-node ", ranks),
      "-- " + command);
}
Outcome Fault(const std::string& how) { return Launch(2, DT_PROGRAM " '" + how + "'", 2); }

// As rank 0 printed them: "losses 5.54468 5.40991".
std::vector<double> LossesIn(const std::string& text) {
  std::vector<double> losses;
  const size_t at = text.find("losses ");
  if (at == std::string::npos) return losses;
  const std::string line = text.substr(at, text.find('\n', at) - at);
  for (const std::string& word : std::vector<std::string>(absl::StrSplit(line, ' '))) {
    double loss;
    if (absl::SimpleAtod(word, &loss)) losses.push_back(loss);
  }
  return losses;
}

TEST(CudaProcesses, ATrainingHasTheLossesOfTheCpu) {
  const std::string training = DT_TRAINING " none 1 dp=2,tp=2";
  const Outcome cpu = testing::RunProgram("DTENSOR_DEVICE=cpu " + training, "--ranks=4");
  const Outcome cuda = Launch(4, training, 4);
  EXPECT_EQ(cuda.code, 0);
  const std::vector<double> losses = LossesIn(cpu.text);
  EXPECT_EQ(losses.size(), 5u) << cpu.text;
  // They have six digits, and are of float32.
  EXPECT_THAT(LossesIn(cuda.text), Pointwise(DoubleNear(1.1e-5), losses)) << cuda.text;
  EXPECT_THAT(cuda.text, HasSubstr("comm: ranks 0, 1 as tp: nccl"));
  EXPECT_THAT(cuda.text, HasSubstr("comm: ranks 0, 2 as dp: nccl"));
  EXPECT_THAT(cuda.text, Not(HasSubstr("cusim: ")));
}

// Every process sees one GPU, another one each, as launchers may have it.
TEST(CudaProcesses, StepsAreGraphsWithTheirCollectives) {
  const Outcome o = Launch(2, DT_GRAPHED " dp=1,tp=2", 2);
  EXPECT_EQ(o.code, 0) << o.text;
  for (const char* const rank : {"rank 0: ", "rank 1: "}) {
    const size_t at = o.text.find(rank);
    ASSERT_NE(at, std::string::npos) << o.text;
    EXPECT_THAT(o.text.substr(at, o.text.find('\n', at) - at), HasSubstr("as a graph too"));
  }
  EXPECT_THAT(o.text, HasSubstr("comm: ranks 0, 1 as tp: nccl"));
  EXPECT_THAT(o.text, Not(HasSubstr("cusim: ")));
}

// Where calls are compared before they are queued, and where the devices alone wait. It may be
// NCCL that sees it first, which does not know whose process it was.
TEST(CudaProcesses, AKilledRankIsNamed) {
  for (const char* const how : {"kill", "kill late"}) {
    const Outcome o = Fault(how);
    EXPECT_THAT(o.text, HasSubstr("failed; first rank 1 ")) << how;
    EXPECT_THAT(o.text, HasSubstr("[rank 0] error: rank 1: its process is gone")) << how;
    EXPECT_THAT(o.text, Not(HasSubstr("cusim: "))) << how;
  }
}

TEST(CudaProcesses, TwoOnOneGpuAreRefused) {
  const Outcome o = Launch(2, DT_PROGRAM " none", 1);
  EXPECT_NE(o.code, 0);
  EXPECT_THAT(o.text, HasSubstr("Duplicate GPU detected: ranks 0 and 1 both on device 0"));
}

}  // namespace
}  // namespace dtensor
