// Scripts that stand beside the programs, with stand-ins for what they would download and measure.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"

namespace dtensor::scripts_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;
using ::testing::Pair;

std::string Program(const testing::TempFolder& folder, const std::string& name,
                    const std::string& text) {
  const std::string path = folder.Write(name, text);
  fs::permissions(path, fs::perms::owner_all);
  return path;
}

// scripts/make_smollm2 with a Python that makes a model of two small files.
class MakeSmollm2 : public ::testing::Test {
 protected:
  MakeSmollm2() { fs::create_directory(Path()); }

  std::string Path(const std::string& name = "") const { return folder_.Path("home/" + name); }
  Outcome Make(const std::string& dir, const std::string& python) const {
    return testing::RunProgram(
        absl::StrCat("cd ", Path(), " && PYTHON=", python, " " DT_SOURCE "/scripts/make_smollm2"),
        dir);
  }
  Outcome Make(const std::string& dir) const { return Make(dir, python_); }
  // Every file and its text; folders without files with a "/".
  std::map<std::string, std::string> Contents() const {
    std::map<std::string, std::string> all;
    for (const fs::directory_entry& e : fs::recursive_directory_iterator(Path())) {
      const std::string name = fs::relative(e.path(), Path());
      if (e.is_regular_file()) all[name] = folder_.Read("home/" + name);
      if (e.is_directory() && fs::is_empty(e.path())) all[name + "/"] = "";
    }
    return all;
  }

  const testing::TempFolder folder_;
  const std::string python_ = Program(folder_, "python",
                                      "#!/usr/bin/env bash\n"
                                      "if [[ \"$1\" == -m ]]; then exit 0; fi\n"  // pip
                                      "cat >/dev/null\n"
                                      "mkdir -p \"$3\"\n"
                                      "printf weights >\"$3/model.safetensors\"\n"
                                      "printf tokens >\"$3/tokenizer.json\"\n");
};

TEST_F(MakeSmollm2, MakesTheFolderHoweverItIsWritten) {
  for (const char* dir :
       {"new", "new/", "./new/.", "deep/../new//", "there", "there/", "'a b/c'"}) {
    fs::remove_all(Path());
    fs::create_directories(Path("there"));
    const Outcome o = Make(dir);
    EXPECT_EQ(o.code, 0) << dir << o.text;
    const std::string name = dir[0] == 't' ? "there" : dir[0] == '\'' ? "a b/c" : "new";
    std::map<std::string, std::string> want = {{name + "/model.safetensors", "weights"},
                                               {name + "/tokenizer.json", "tokens"}};
    if (name != "there") want["there/"] = "";
    EXPECT_EQ(Contents(), want) << dir;
  }
  fs::remove_all(Path());
  fs::create_directory(Path());
  ASSERT_EQ(Make(".").code, 0);
  EXPECT_THAT(Contents(),
              ElementsAre(Pair("model.safetensors", "weights"), Pair("tokenizer.json", "tokens")));
}

TEST_F(MakeSmollm2, LeavesWhatIsThere) {
  fs::create_directories(Path("mine/sub"));
  fs::create_directories(Path("new.partial"));
  folder_.Write("home/mine/sub/notes", "of a user");
  folder_.Write("home/mine/model.safetensors", "of a user");
  folder_.Write("home/new.partial/notes", "of a user");
  folder_.Write("home/file", "of a user");
  const auto before = Contents();
  for (const char* dir :
       {"mine", "mine/", "mine/.", ".", "./", "mine/sub", "file", "new.partial/"}) {
    const Outcome o = Make(dir);
    EXPECT_EQ(o.code, 1) << dir << o.text;
    EXPECT_THAT(o.text, HasSubstr("is there and is no empty folder")) << dir;
    ASSERT_EQ(Contents(), before) << dir;
  }
  // A model that cannot be made leaves nothing of it, and one that is there is not made again.
  EXPECT_NE(Make("new", Program(folder_, "broken", "#!/bin/sh\nexit 3\n")).code, 0);
  EXPECT_EQ(Contents(), before);
  ASSERT_EQ(Make("new").code, 0);
  EXPECT_EQ(folder_.Read("home/new.partial/notes"), "of a user");
  folder_.Write("home/new/model.safetensors", "better ones");
  const Outcome again = Make("new");
  EXPECT_EQ(again.code, 0) << again.text;
  EXPECT_THAT(again.text, HasSubstr("new has a model already"));
  EXPECT_EQ(folder_.Read("home/new/model.safetensors"), "better ones");
  for (const char* wrong : {"", "''", "--help", "a b"}) {
    const Outcome o = Make(wrong);
    EXPECT_EQ(o.code, 2) << wrong;
    EXPECT_THAT(o.text, HasSubstr("scripts/make_smollm2 DIR")) << wrong;
  }
}

// Before anything is built or made.
TEST(Dev, Smollm2TakesOnlyItsArgument) {
  for (const char* wrong : {"--modle=x", "x", "--model", "--model=", "--model ''", "--model x y"}) {
    const Outcome o = testing::RunProgram(DT_SOURCE "/dev smollm2", wrong);
    EXPECT_EQ(o.code, 2) << wrong << o.text;
    EXPECT_THAT(o.text, HasSubstr("takes --model DIR and nothing else")) << wrong;
  }
}

// The model of transformers takes a twentieth of a second per token; ours says what it takes.
TEST(CompareGeneration, PrintsGoalsAndWhetherTheyWereMet) {
  const testing::TempFolder folder;
  folder.Write("torch.py",
               "import contextlib\n"
               "float32, bfloat16 = 'float32', 'bfloat16'\n"
               "inference_mode = contextlib.nullcontext\n"
               "def set_num_threads(n): pass\n");
  folder.Write(
      "transformers.py",
      "import time\n"
      "class Ids:\n"
      "    shape = (1, 10)\n"
      "class AutoTokenizer:\n"
      "    from_pretrained = staticmethod(lambda model: lambda text, **kw: {'input_ids': Ids()})\n"
      "class Model:\n"
      "    def eval(self): return self\n"
      "    def generate(self, ids, max_new_tokens, do_sample, streamer):\n"
      "        streamer.put(ids)\n"
      "        for _ in range(max_new_tokens):\n"
      "            time.sleep(0.05)\n"
      "            streamer.put(0)\n"
      "        streamer.end()\n"
      "class AutoModelForCausalLM:\n"
      "    from_pretrained = staticmethod(lambda model, dtype: Model())\n");
  const auto compare = [&](double f32, double bf16) {
    const std::string line = "echo \"prompt: 10 tokens, 900.0 tokens/s; decode: 3 tokens, ";
    const std::string generate =
        Program(folder, "generate",
                absl::StrCat("#!/bin/sh\ncase \"$*\" in\n*--dtype=f32*) ", line, f32,
                             "\" >&2 ;;\n*) ", line, bf16, "\" >&2 ;;\nesac\n"));
    return testing::RunProgram(absl::StrCat("PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=", folder.path(),
                                            " python3 " DT_SOURCE "/bench/compare_generation"),
                               absl::StrCat("--model x --new 3 --rounds 1 --generate ", generate));
  };
  const Outcome good = compare(1000, 1600);
  EXPECT_EQ(good.code, 0) << good.text;
  EXPECT_THAT(good.text, AllOf(ContainsRegex("f32 prompt +[0-9.]+ +900.000 +[0-9.]+ +1 PASS\n"),
                               ContainsRegex("f32 decode +[0-9.]+ +1000.000 +[0-9.]+ +1 PASS\n"),
                               ContainsRegex("bf16 prompt +[0-9.]+ +900.000 +[0-9.]+ +- *\n"),
                               ContainsRegex("bf16 decode +[0-9.]+ +1600.000 +[0-9.]+ +1 PASS\n"),
                               ContainsRegex("decode +1000.000 +1600.000 +1.60 +1.5 PASS\n")));
  EXPECT_THAT(good.text, Not(HasSubstr("miss")));
  const Outcome bad = compare(1000, 1400);
  EXPECT_EQ(bad.code, 1) << bad.text;
  EXPECT_THAT(bad.text, ContainsRegex("decode +1000.000 +1400.000 +1.40 +1.5 miss\n"));
  EXPECT_THAT(compare(2, 1600).text,
              ContainsRegex("f32 decode +[0-9.]+ +2.000 +0.[0-9]+ +1 miss\n"));
}

}  // namespace
}  // namespace dtensor::scripts_test
