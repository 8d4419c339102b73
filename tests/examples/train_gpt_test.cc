// The program train_gpt, run as a user runs it: equal to one rank on every mesh, and clear when its
// arguments are wrong.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>

#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/torch_samples.h"

namespace dtensor::train_gpt_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Json;
using testing::Outcome;

Outcome Train(const std::string& args) { return testing::RunProgram(DT_TRAIN_GPT, args); }

// A file of its own for each test.
std::string Path(const std::string& name) {
  const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
  std::string test = info->name();
  for (char& c : test) c = c == '/' ? '_' : c;
  return (std::filesystem::temp_directory_path() /
          absl::StrCat("dtensor_", getpid(), "_", test, "_", name))
      .string();
}
std::string TextFile() {
  const std::string path = Path("text");
  std::ofstream(path) << testing::LearnableText();
  return path;
}

const char* const kSmall = " --hidden 48 --heads 4 --seq 24 --batch 6 ";

class Meshes : public ::testing::TestWithParam<std::tuple<std::string, std::string>> {};

TEST_P(Meshes, FiftyStepsAgreeWithOneRank) {
  const auto& [mesh, dtype] = GetParam();
  const std::string text = TextFile(), summary = Path("summary.json");
  const Outcome o = Train("--data " + text + kSmall + "--steps 50 --verify --mesh " + mesh +
                          " --dtype " + dtype + " --summary " + summary);
  ASSERT_EQ(o.code, 0) << o.text;
  EXPECT_THAT(o.text, AllOf(HasSubstr("mesh step 50/50  loss"), HasSubstr("grad norm"),
                            HasSubstr("tokens/s"), HasSubstr("peak bytes per rank"),
                            HasSubstr("attn.wk.bias is left out")));
  const Json s = Json::parse(testing::ReadFile(summary));
  const double tolerance = dtype == "float64" ? 1e-10 : 1e-4;
  EXPECT_LE(s.at("loss_rel_diff").get<double>(), tolerance);
  EXPECT_LE(s.at("param_rel_diff").get<double>(), tolerance);
  const auto losses = s.at("losses").get<std::vector<double>>();
  ASSERT_EQ(losses.size(), 50u);
  EXPECT_GT(losses.front(), 5);
  EXPECT_LT(losses.back(), 3.5);
  EXPECT_GT(s.at("tokens_per_s").get<double>(), 0);
  for (const Json& peak : s.at("peak_bytes")) EXPECT_GT(peak.get<int64_t>(), 10000);
  EXPECT_EQ(s.at("collectives").empty(), mesh == "dp=1,tp=1");
  for (const Json& row : s.at("collectives")) {
    EXPECT_EQ(row.at("kind"), "all_reduce");  // the plan needs nothing else
    EXPECT_GT(row.at("count").get<int64_t>(), 0);
    EXPECT_GT(row.at("bytes").get<int64_t>(), 0);
  }
  std::filesystem::remove(text);
  std::filesystem::remove(summary);
}

INSTANTIATE_TEST_SUITE_P(TrainGpt, Meshes,
                         ::testing::Combine(::testing::Values("dp=1,tp=1", "dp=2,tp=1", "dp=1,tp=2",
                                                              "dp=2,tp=2", "dp=4,tp=2", "dp=2,tp=4",
                                                              "dp=3,tp=1", "dp=1,tp=3"),
                                            ::testing::Values("float32", "float64")),
                         [](const auto& info) {
                           std::string name = std::get<0>(info.param) + std::get<1>(info.param);
                           std::erase_if(name, [](char c) { return c == '=' || c == ','; });
                           return name;
                         });

// Exit code 1 and a message; nothing was trained.
void ExpectError(const std::string& args, const std::vector<std::string>& words) {
  const Outcome o = Train(args);
  EXPECT_EQ(o.code, 1) << args << "\n" << o.text;
  for (const std::string& w : words) EXPECT_THAT(o.text, HasSubstr(w)) << args;
  EXPECT_EQ(o.text.find("step 1/"), std::string::npos) << args;
}

TEST(TrainGptErrors, Flags) {
  ExpectError("--stepz 3", {"stepz", "steps"});
  ExpectError("--steps many", {"steps", "many"});
  ExpectError("extra", {"unexpected argument \"extra\""});
  ExpectError("--ranks 3 --mesh dp=2,tp=2", {"--ranks 3 contradicts --mesh dp=2,tp=2", "4 ranks"});
  ExpectError("--mesh dp=2,pp=2", {"unknown mesh dim \"pp\"", "dp and tp"});
  ExpectError("--mesh dp:2", {"dp:2"});
  ExpectError("--mesh dp=0", {"dp"});
  ExpectError("--hidden 10 --heads 4", {"--heads 4 does not divide --hidden 10"});
  ExpectError("--steps 0", {"--steps must be from 1 to"});
  ExpectError("--batch -2", {"--batch must be from 1 to"});
  ExpectError("--lr 0", {"--lr must be positive"});
  ExpectError("--mesh dp=99999999999", {"99999999999 ranks", "at most 256"});
  ExpectError("--ranks 100000", {"--ranks must be from 1 to 256"});
  ExpectError("--seq 9223372036854775807", {"--seq must be from 1 to"});
  ExpectError("--layers 9999999999", {"--layers must be from 1 to"});
  ExpectError("--dropout 1", {"--dropout must be in [0, 1), got 1"});
  ExpectError("--dtype int8", {"float32 or float64", "int8"});
  ExpectError("--trace /nowhere/at/all.json", {"/nowhere/at/all.json", "cannot be written"});
  ExpectError("--summary /nowhere/at/all.json", {"/nowhere/at/all.json", "cannot be written"});
}

TEST(TrainGptErrors, Data) {
  const std::string text = Path("text");
  ExpectError("--data " + text, {text, "cannot be read"});
  ExpectError("--data /tmp", {"--data /tmp", "cannot be read"});
  std::ofstream(text).close();
  ExpectError("--data " + text, {text, "has 0 bytes", "needs at least 65"});
  std::ofstream(text) << "short";
  ExpectError("--data " + text + " --seq 8", {"has 5 bytes", "needs at least 9"});
  std::filesystem::remove(text);
}

std::vector<std::string> LinesWith(const std::string& text, const std::string& start) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(start, 0) == 0) lines.push_back(line);
  }
  return lines;
}

TEST(TrainGptDropout, SameMasksAndLossesOnEveryMesh) {
  const std::string text = TextFile();
  const std::string args =
      "--data " + text + kSmall + "--steps 50 --dropout 0.1 --mask_hashes --verify --mesh ";
  std::vector<std::string> masks;
  for (const char* mesh : {"dp=1", "dp=2", "tp=2", "dp=2,tp=2", "tp=2,dp=2"}) {
    const Outcome o = Train(args + mesh);
    ASSERT_EQ(o.code, 0) << o.text;  // --verify compares losses and parameters with one rank
    const std::vector<std::string> lines = LinesWith(o.text, "mask step");
    ASSERT_EQ(lines.size(), 2 * 50 * 5u);  // on the mesh, then on one rank
    if (masks.empty()) masks = lines;
    EXPECT_EQ(lines, masks) << mesh;
    if (std::string(mesh) == "tp=2,dp=2") {
      EXPECT_THAT(o.text, HasSubstr("training on mesh tp=2 dp=2"));
    }
  }
  std::filesystem::remove(text);
}

TEST(TrainGptDropout, RecomputeIsBitEqualAndHoldsLess) {
  const std::string text = TextFile();
  std::vector<Json> summaries;
  for (const char* flag : {"", "--recompute"}) {
    const std::string summary = Path("summary.json");
    const Outcome o =
        Train("--data " + text + kSmall + "--layers 6 --steps 5 --dropout 0.1 --mesh " +
              "dp=2,tp=2 --summary " + summary + " " + flag);
    ASSERT_EQ(o.code, 0) << o.text;
    summaries.push_back(Json::parse(testing::ReadFile(summary)));
    std::filesystem::remove(summary);
  }
  EXPECT_EQ(summaries[0]["losses"], summaries[1]["losses"]);
  EXPECT_LT(summaries[1]["peak_bytes"][0].get<int64_t>(),
            summaries[0]["peak_bytes"][0].get<int64_t>());
  std::filesystem::remove(text);
}

TEST(TrainGpt, NeedsNoImplicitRedistribution) {
  const std::string text = TextFile();
  setenv("DTENSOR_STRICT", "1", 1);
  for (const std::string mesh : {"dp=2,tp=2", "tp=2,dp=2"}) {
    const Outcome o = Train("--data " + text + kSmall + "--steps 2 --mesh " + mesh);
    EXPECT_EQ(o.code, 0) << o.text;
  }
  unsetenv("DTENSOR_STRICT");
  std::filesystem::remove(text);
}

// A training that is told to stop has other steps than one rank would have.
TEST(TrainGpt, StoppedItIsNotCompared) {
  const std::string text = TextFile(), save = Path("save"), log = Path("log");
  const std::string command =
      absl::StrCat(DT_TRAIN_GPT " --data ", text, kSmall,
                   "--steps 1000000 --verify --mesh dp=2 --save ", save, " --log ", log);
  const Outcome o = testing::RunProgram(
      absl::StrCat("sh -c '", command, " & pid=$!; while kill -0 $pid && [ ! -s ", log,
                   " ]; do sleep 0.02; done; kill -TERM $pid; wait $pid; echo exit code $?'"),
      "");
  EXPECT_THAT(o.text, AllOf(HasSubstr("stopped after step "), HasSubstr("is not compared"),
                            HasSubstr("exit code 0\n")));
  EXPECT_FALSE(std::filesystem::is_empty(save));
  for (const std::string& path : {text, save, log}) std::filesystem::remove_all(path);
}

// tests/parallel/timeline_test.cc has the rules of such files.
TEST(TrainGpt, TracesOneStepOfAllRanks) {
  const std::string text = TextFile(), trace = Path("trace.json");
  const Outcome o =
      Train("--data " + text + kSmall + "--steps 3 --mesh dp=2,tp=2 --verify --trace " + trace);
  ASSERT_EQ(o.code, 0) << o.text;
  std::map<int64_t, int64_t> steps, modules, collectives;
  const Json file = Json::parse(testing::ReadFile(trace));
  for (const Json& e : file.at("traceEvents")) {
    if (e.at("ph") != "B") continue;
    const int64_t rank = e.at("pid").get<int64_t>();
    steps[rank] += e.at("name") == "step 2";
    modules[rank] += e.at("name") == "blocks.1.mlp.down";
    collectives[rank] += e.at("cat") == "collective";
  }
  const std::map<int64_t, int64_t> once = {{0, 1}, {1, 1}, {2, 1}, {3, 1}};
  EXPECT_EQ(steps, once);
  EXPECT_EQ(modules, once);
  // Tensor parallel forward and backward of two blocks, head and loss, and a bucket of gradients.
  for (const auto& [rank, count] : collectives) EXPECT_GT(count, 8) << rank;
  std::filesystem::remove(text);
  std::filesystem::remove(trace);
}

TEST(TrainGpt, TheReadmeHasEveryFlag) {
  const std::string readme = testing::ReadFile(DT_SOURCE "/README.md");
  int flags = 0;
  for (const std::string& line : LinesWith(Train("--help").text, "    --")) {
    const std::string flag = line.substr(4, line.find(' ', 4) - 4);
    EXPECT_THAT(readme, ::testing::ContainsRegex(flag + "[` ]")) << flag;
    ++flags;
  }
  EXPECT_GT(flags, 20);
}

// ./dev train, whose numbers the README tells.
TEST(TrainGpt, TheReadmeHasTheLosses) {
  const std::string readme = testing::ReadFile(DT_SOURCE "/README.md"), summary = Path("summary");
  const Outcome o = Train("--mesh dp=2,tp=2 --steps 200 --summary " + summary);
  ASSERT_EQ(o.code, 0) << o.text;
  const auto losses = Json::parse(testing::ReadFile(summary)).at("losses");
  const std::string told = "takes the loss from ";
  const size_t at = readme.find(told);
  ASSERT_NE(at, std::string::npos);
  double first = 0, last = 0;
  ASSERT_EQ(std::sscanf(readme.c_str() + at + told.size(), "%lf to %lf", &first, &last), 2);
  EXPECT_NEAR(losses.front().get<double>(), first, 0.001);
  EXPECT_NEAR(losses.back().get<double>(), last, 0.001);  // rounding differs between processors
}

TEST(TrainGpt, PlainLinesInALogAndTheSameNumbersTwice) {
  const std::string text = TextFile();
  const std::string args = "--data " + text + kSmall + "--steps 3 --ranks 2";
  const Outcome a = Train(args), b = Train(args + " --mesh dp=2");
  ASSERT_EQ(a.code, 0) << a.text;
  EXPECT_EQ(a.text.find('\r'), std::string::npos);
  const auto losses = [](const std::string& all) {
    std::vector<std::string> found;
    for (size_t at = 0; (at = all.find("  loss ", at)) != std::string::npos; ++at) {
      found.push_back(all.substr(at, 16));
    }
    return found;
  };
  EXPECT_EQ(losses(a.text).size(), 3u);
  EXPECT_EQ(losses(a.text), losses(b.text));
  std::filesystem::remove(text);
}

}  // namespace
}  // namespace dtensor::train_gpt_test
