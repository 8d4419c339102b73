// Every way to start the example programs wrongly ends with a message and a code other than 0, and
// leaves the files that were there as they were.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/thin.h"
#include "tests/common/torch_samples.h"

namespace dtensor::programs_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::Json;
using testing::Outcome;

// One way to start a program. `before`: what the shell does first (environment, limits).
struct Bad {
  std::string program, args, word;  // a word of the message
  std::string before = {}, after = {};
  int signal = 0;
};

// A folder with inputs and old outputs. Commands run in it.
class Folder {
 public:
  Folder() {
    fs::create_directories(path_ / "folder");
    std::string text;
    for (int i = 0; i < 40; ++i) text += "line " + std::to_string(i * i) + "\n";
    Put("text", text);
    Put("short", "short");
    Put("empty", "");
    Put("old.json", "old\n");
    fs::create_symlink("old.json", path_ / "link.json");
    mkfifo((path_ / "pipe").c_str(), 0600);
  }

  void Put(const std::string& name, const std::string& text) {
    std::ofstream(path_ / name) << text;
  }
  std::string Get(const std::string& name) const { return testing::ReadFile(path_ / name); }
  // With a signal: sent a moment after the program can answer it, when its ranks run. Its threads
  // tell nothing: OpenBLAS starts some before main does.
  Outcome Run(const Bad& b) const {
    const std::string program = std::string(DT_EXAMPLES "/") + b.program + " " + b.args;
    const std::string start = "{ cd " + path_.string() + " && " + b.before;
    if (b.signal == 0) return testing::RunProgram(start + " exec " + program, b.after + "; }");
    return testing::RunProgram(
        start + " env --default-signal=HUP,INT,TERM " + program + " & pid=$!;",
        "bit=$((1 << (" + std::to_string(b.signal) +
            " - 1))); for i in $(seq 1000); do caught=$(sed -n 's/^SigCgt:[[:space:]]*//p' "
            "/proc/$pid/status); [ $((0x0$caught & bit)) -ne 0 ] && break; sleep 0.01; "
            "done; sleep 0.2; kill -" +
            std::to_string(b.signal) + " $pid; wait $pid; }");
  }
  // Regular files and links by name.
  std::map<std::string, std::string> Contents() const {
    std::map<std::string, std::string> files;
    for (const fs::directory_entry& e : fs::directory_iterator(path_)) {
      const std::string name = e.path().filename();
      if (e.is_symlink())
        files[name] = fs::read_symlink(e.path());
      else if (e.is_regular_file())
        files[name] = testing::ReadFile(e.path());
    }
    return files;
  }

 private:
  const testing::TempFolder folder_;
  const fs::path path_ = folder_.path();
};

// Each ends as `word` says, and the folder is as before.
void ExpectErrors(Folder& folder, const std::vector<Bad>& table) {
  const std::map<std::string, std::string> before = folder.Contents();
  for (const Bad& b : table) {
    const std::string name = b.before + " " + b.program + " " + b.args.substr(0, 200) + b.after;
    const Outcome o = folder.Run(b);
    EXPECT_GT(o.code, 0) << name << "\n" << o.text;  // -1: ended by a signal, without a word
    EXPECT_THAT(o.text, ::testing::ContainsRegex("error: |ERROR: |DTENSOR_CPU_LEVEL")) << name;
    EXPECT_THAT(o.text, HasSubstr(b.word)) << name;
    EXPECT_THAT(o.text, ::testing::Not(HasSubstr("terminate called"))) << name;
    ASSERT_TRUE(folder.Contents() == before) << name << " changed a file";
  }
}

const char* const kTiny = "--data text --hidden 16 --heads 2 --seq 8 --batch 2 --steps 1 ";
const char* const kQuick = "--repeats 1 --most_bytes 64 ";
const char* const kRankPrograms[] = {"train_gpt", "calibrate", "quickstart", "torch_rand",
                                     "observe"};

std::string Working(const std::string& program) {
  if (program == "train_gpt") return kTiny;
  if (program == "calibrate") return std::string(kQuick) + "--out /dev/null";
  if (program == "dtensor-verify") return "--op neg";
  if (program == "rng_check") return DT_TEST_DATA "/rng-vectors.json";
  return "";
}

std::vector<Bad> TrainFlags() {
  std::vector<Bad> table;
  for (const std::string flag : {"steps", "layers", "hidden", "heads", "seq", "batch", "ranks"}) {
    for (const std::string value :
         {"0", "-1", "9223372036854775807", "99999999999999999999", "x", "''", "1.5"}) {
      if (flag == "ranks" && value == "0") continue;  // as many as the mesh has
      table.push_back({"train_gpt", kTiny + ("--" + flag) + "=" + value, flag});
    }
  }
  const std::map<std::string, std::vector<std::string>> others = {
      {"lr", {"0", "-1", "nan", "inf", "x"}},
      {"dropout", {"-0.1", "1", "nan", "x"}},
      {"seed", {"x", "''"}},
      {"dtype", {"int8", "''", "float16"}},
      {"verify", {"maybe"}},
      {"recompute", {"2"}},
      {"mask_hashes", {"x"}},
      {"mesh",
       {"dp=0", "dp=-1", "dp", "=2", "dp=2,dp=2", "dp=2,,tp=2", "dp=x", "pp=2", "dp=999999999999",
        "dp=16,tp=17", "dp=9223372036854775807,tp=2", "'dp=2 tp=2'", "dp=2,tp=2,"}}};
  for (const auto& [flag, values] : others) {
    for (const std::string& value : values) {
      table.push_back({"train_gpt", kTiny + ("--" + flag) + "=" + value, flag});
    }
  }
  for (const auto& [args, word] : std::vector<std::pair<std::string, std::string>>{
           {"--stepz 3", "nearest: --steps"},
           {"--nosteps", "steps"},
           {"--device tpu", "--device: device \"tpu\": known are cpu, cuda"},
           {"extra", "unexpected argument \"extra\""},
           {"--ranks 3 --mesh dp=2", "--ranks 3 contradicts --mesh dp=2"},
           {"--hidden 10 --heads 4", "--heads 4 does not divide --hidden 10"},
           {"--layers 1000 --hidden 65536 --heads 16", "this model takes"},
           {"--steps", "steps"}}) {
    table.push_back({"train_gpt", kTiny + args, word});
  }
  const char* const large = "--batch 1048576 --seq 64 --ranks 200";
  if (testing::SurvivesThreadSanitizer(large, "its shadow takes twice what the program may take")) {
    table.push_back({"train_gpt", kTiny + std::string(large), "limit"});
  }
  return table;
}

std::vector<Bad> CalibrateFlags() {
  std::vector<Bad> table = {{"calibrate", kQuick, "--out FILE.json is missing"},
                            {"calibrate", "extra --out new.json", "unexpected argument"},
                            {"calibrate", "--outt new.json", "outt"}};
  const std::map<std::string, std::vector<std::string>> flags = {
      {"ranks", {"1", "0", "-1", "257", "x"}},
      {"repeats", {"0", "-1", "1000000000000", "x"}},
      {"most_bytes", {"63", "0", "-1", "1000000000000000000", "x"}},
      {"base", {"nowhere", "folder", "text", "empty", "/dev/zero", "pipe"}}};
  for (const auto& [flag, values] : flags) {
    for (const std::string& value : values) {
      const bool file = flag == "base";
      table.push_back(
          {"calibrate", kQuick + ("--out new.json --" + flag) + "=" + value, file ? value : flag});
    }
  }
  return table;
}

std::vector<Bad> Files() {
  std::vector<Bad> table;
  const std::string too_long(5000, 'n');
  for (const std::string place : {"nowhere/new.json", "folder", "folder/", "/dev/full",
                                  "/proc/new.json", "text/new.json", too_long.c_str()}) {
    table.push_back({"train_gpt", kTiny + ("--trace " + place), place});
    table.push_back({"train_gpt", kTiny + ("--summary " + place), place});
    table.push_back({"calibrate", kQuick + ("--out " + place), place});
  }
  for (const std::string& place :
       {std::string("nowhere"), std::string("folder"), std::string("/dev/zero"),
        std::string("/dev/null"), std::string("empty"), std::string("short"), std::string("pipe"),
        std::string("text/x"), too_long}) {
    table.push_back({"train_gpt", kTiny + ("--data " + place), place});
  }
  table.push_back({"train_gpt", kTiny + std::string("--data ''"), "--data"});
  for (const std::string twice :
       {"--trace old.json --summary old.json", "--trace ./old.json --summary folder/../old.json",
        "--trace new.json --summary ./new.json", "--summary old.json --trace link.json",
        "--summary text", "--trace ./text"}) {
    table.push_back({"train_gpt", kTiny + twice, "name the same file"});
  }
  return table;
}

std::vector<Bad> Environments() {
  std::vector<Bad> table;
  for (const std::string program : {"train_gpt", "calibrate", "quickstart", "torch_rand", "observe",
                                    "rng_check", "dtensor-verify"}) {
    const std::string args = Working(program);
    // Where messages could go by gloo, it lacks the place to meet.
    table.push_back({program, args, "by torchrun", "export RANK=0 WORLD_SIZE=2;"});
    for (const std::string env :
         {"OMPI_COMM_WORLD_SIZE=2", "PMI_SIZE=4", "SLURM_STEP_NUM_TASKS=2"}) {
      table.push_back({program, args, "use a launcher, which sets both", "export " + env + ";"});
    }
    table.push_back({program, args, "WORLD_SIZE is \"x\"", "export RANK=1 WORLD_SIZE=x;"});
    table.push_back({program, args, "the output cannot be written", "", "> /dev/full"});
  }
  for (const std::string program : kRankPrograms) {
    const std::string args = Working(program);
    table.push_back({program, args, "DTENSOR_TIMEOUT_S is \"x\"", "export DTENSOR_TIMEOUT_S=x;"});
    table.push_back({program, args, "DTENSOR_TIMEOUT_S", "export DTENSOR_TIMEOUT_S=-1;"});
    if (program != "calibrate") {  // it runs no op
      table.push_back({program, args, "v9 is unknown", "export DTENSOR_CPU_LEVEL=v9;"});
      table.push_back({program, args, "DTENSOR_STRICT is \"yes\"", "export DTENSOR_STRICT=yes;"});
    }
  }
  return table;
}

std::vector<Bad> FullDisksAndSignals() {
  std::vector<Bad> table;
  for (const std::string out : {"old.json", "link.json", "new.json"}) {
    if (!testing::SurvivesThreadSanitizer(out.c_str(), testing::kFileLimit)) continue;
    table.push_back({"train_gpt", kTiny + ("--trace " + out), out, "ulimit -f 1;"});
    table.push_back({"calibrate", kQuick + ("--out " + out), out, "ulimit -f 1;"});
    table.push_back({"train_gpt", kTiny + ("--summary " + out), out, "ulimit -f 0;"});
  }
  for (const auto& [name, number] :
       std::map<std::string, int>{{"INT", SIGINT}, {"TERM", SIGTERM}, {"HUP", SIGHUP}}) {
    table.push_back({"train_gpt", kTiny + std::string("--steps 1000000 --ranks 2 --trace old.json"),
                     "ended by SIG" + name, "", "", number});
    table.push_back(
        {"calibrate", "--repeats 1000000 --out old.json", "ended by SIG" + name, "", "", number});
  }
  return table;
}

// The vectors of tests/data with one thing changed.
std::vector<Bad> Vectors(Folder& folder) {
  const Json good = Json::parse(testing::ReadFile(DT_TEST_DATA "/rng-vectors.json"));
  Json one = Json::object();
  one["vectors"] = Json::array({good["vectors"][0]});
  std::vector<Bad> table = {{"rng_check", "", "usage"},
                            {"rng_check", "folder", "folder"},
                            {"rng_check", "nowhere", "nowhere"},
                            {"rng_check", "/dev/zero", "/dev/zero"},
                            {"rng_check", "pipe", "pipe"}};
  const auto add = [&](const std::string& text, const std::string& word) {
    const std::string name = "vectors" + std::to_string(table.size()) + ".json";
    folder.Put(name, text);
    table.push_back({"rng_check", name, word});
  };
  for (const std::string text : {"", "[]", "{}", "3", "{\"vectors\": []}", "{\"vectors\": 3}",
                                 "{\"vectors\": {}}", "{\"vectors\": [", "{\"vectors\": null}"}) {
    add(text, "is no file of vectors");
  }
  add(std::string(100000, '['), "is no file of vectors");
  const auto change = [&](const char* key, const Json& value, const std::string& word) {
    Json changed = one;
    changed["vectors"][0][key] = value;
    add(changed.dump(), word);
  };
  change("op", "no_op", "no_op");
  change("dtype", "float3", "float3");
  change("profile", "rtx0", "rtx0");
  change("shape", {9}, "numel");
  change("shape", "x", "u01");
  change("seed", "x", "u01");
  change("indices", Json::array(), "0 indices and 8 values");
  change("indices", {0, 1, 2, 3, 4, 5, 6, 8}, "index 8 is outside");
  change("indices", {0, 1, 2, 3, 4, 5, 6, -1}, "index -1 is outside");
  change("values", {1, 2}, "8 indices and 2 values");
  change("bits", {"0x3ecc4fd2"}, "u01");
  change("offset_after", 8, "offset afterwards: expected 8, got 4");
  for (const char* key : {"op", "dtype", "shape", "numel", "seed", "offset", "offset_after",
                          "params", "indices", "values", "exact"}) {
    Json changed = one;
    changed["vectors"][0].erase(key);
    add(changed.dump(), key == std::string("params") ? "u01" : key);
  }
  const auto list = [&](const char* name, const Json& value) {
    Json changed = one;
    changed[name] = value;
    add(changed.dump(), "error");
  };
  list("philox_kat", {{{"counter", 3}}});
  list("curand_init_words", {{{"seed", 3}}});
  list("sharded", {{{"dtype", "float32"}}});
  return table;
}

TEST(Programs, BadInvocationsEndWithAMessage) {
  Folder folder;
  const std::vector<std::vector<Bad>> tables = {
      TrainFlags(),
      CalibrateFlags(),
      Files(),
      Environments(),
      FullDisksAndSignals(),
      Vectors(folder),
      {{"dtensor-verify", "", "usage"},
       {"dtensor-verify", "--op", "usage"},
       {"dtensor-verify", "--op=", "no op \"\""},
       {"dtensor-verify", "--bogus", "usage"},
       {"dtensor-verify", "--op neg --all", "usage"},
       {"dtensor-verify", "--op nge", "nearest: ne"},
       {"dtensor-verify", "--op neg --op nosuch", "no op \"nosuch\""}}};
  size_t cases = 0;
  for (const std::vector<Bad>& table : tables) {
    ExpectErrors(folder, table);
    cases += table.size();
  }
  EXPECT_GE(cases, 200u);
}

TEST(Programs, OutputsReplaceOldOnesWhole) {
  Folder folder;

  Outcome o =
      folder.Run({"train_gpt", kTiny + std::string("--summary link.json --trace new.json"), ""});
  ASSERT_EQ(o.code, 0) << o.text;
  EXPECT_EQ(Json::parse(folder.Get("old.json")).at("losses").size(), 1u);  // through the link
  EXPECT_EQ(folder.Contents().at("link.json"), "old.json");
  EXPECT_FALSE(Json::parse(folder.Get("new.json")).at("traceEvents").empty());
  o = folder.Run({"calibrate", kQuick + std::string("--out new.json --base new.json"), ""});
  EXPECT_EQ(o.code, 1) << "a trace is no cost model";
  o = folder.Run({"calibrate", kQuick + std::string("--out new.json"), ""});
  ASSERT_EQ(o.code, 0) << o.text;
  o = folder.Run({"calibrate", kQuick + std::string("--out new.json --base new.json"), ""});
  EXPECT_EQ(o.code, 0) << o.text;
  std::set<std::string> names;
  for (const auto& [name, text] : folder.Contents()) names.insert(name);
  EXPECT_THAT(
      names, ::testing::ElementsAre("empty", "link.json", "new.json", "old.json", "short", "text"));
}

TEST(Programs, AutoTakesADeviceAndSaysWhich) {
  Folder folder;
  const std::string tiny = kTiny, quick = std::string(kQuick) + "--out c.json ";
  for (const Bad& good : std::vector<Bad>{{"train_gpt", tiny + "--device auto", ""},
                                          {"calibrate", quick + "--device=auto", ""},
                                          {"train_gpt", tiny, "", "export DTENSOR_DEVICE=auto;"}}) {
    const Outcome o = folder.Run(good);
    EXPECT_EQ(o.code, 0) << o.text;
    EXPECT_THAT(o.text,
                AnyOf(HasSubstr("device: cuda\n"), HasSubstr("device: cpu (device cuda: ")));
  }
}

TEST(Programs, VerifyTakesSeveralOps) {
  Folder folder;
  const Outcome o = folder.Run({"dtensor-verify", "--op neg --op=abs", ""});
  EXPECT_EQ(o.code, 0) << o.text;
  EXPECT_THAT(o.text,
              AllOf(HasSubstr("neg:"), HasSubstr("abs:"), HasSubstr("2 ops and functions:")));
}

// Booleans may be written as such; params.vec says how wide the dropout of that PyTorch was: before
// 2.7 four for every dtype, so bfloat16 has the mask of float32.
TEST(RngCheck, BooleansAndDropoutVectors) {
  Folder folder;
  const Json good = Json::parse(testing::ReadFile(DT_TEST_DATA "/rng-vectors.json"));
  int changed = 0;
  Json file = Json::object();
  file["vectors"] = Json::array();
  for (Json v : good["vectors"]) {
    if (v["op"] != "native_dropout_mask" || v["params"]["vec"] != 4) continue;
    for (Json& value : v["values"]) value = value.get<double>() != 0;
    v["dtype"] = "bfloat16";
    file["vectors"].push_back(v);
    ++changed;
  }
  ASSERT_GE(changed, 3);
  folder.Put("old_dropout.json", file.dump());
  Outcome o = folder.Run({"rng_check", "old_dropout.json", ""});
  EXPECT_EQ(o.code, 0) << o.text;
  for (Json& v : file["vectors"]) v["params"]["vec"] = 8;
  folder.Put("new_dropout.json", file.dump());
  EXPECT_EQ(folder.Run({"rng_check", "new_dropout.json", ""}).code, 1);  // other masks
  file["vectors"][0]["params"]["vec"] = 3;
  folder.Put("no_dropout.json", file.dump());
  EXPECT_THAT(folder.Run({"rng_check", "no_dropout.json", ""}).text, HasSubstr("vec 3"));
}

}  // namespace
}  // namespace dtensor::programs_test
