// The program generate, as a user runs it, with a model of 256 tokens that are bytes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"
#include "tests/common/byte_model.h"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"

namespace dtensor::generate_test {
namespace {

using dtensor::testing::Outcome;
using ::testing::HasSubstr;
using Json = nlohmann::json;
namespace fs = std::filesystem;

std::unique_ptr<testing::TempFolder> MakeModel() { return testing::MakeByteModel(DT_TEST_DATA); }

// What it prints to stdout.
Outcome Stdout(const std::string& args) {
  return testing::RunProgram("sh -c '" DT_GENERATE " \"$@\" 2>/dev/null' sh", args);
}

TEST(Generate, PrintsTheContinuationAloneTheSameOnEveryMesh) {
  const auto model = MakeModel();
  const std::string args =
      absl::StrCat("--model ", model->path(), " --prompt 'dtensor ' --max-new 24");
  const Outcome one = Stdout(args);
  ASSERT_EQ(one.code, 0) << one.text;
  EXPECT_GT(one.text.size(), 10u);
  EXPECT_EQ(one.text.back(), '\n');
  for (const char* mesh : {"--ranks 2", "--ranks 3", "--mesh dp=1,tp=4", "--mesh dp=2,tp=2"}) {
    const Outcome more = Stdout(absl::StrCat(args, " ", mesh));
    EXPECT_EQ(more.text, one.text) << mesh;
  }
  // These change nothing, with a temperature or without.
  EXPECT_EQ(Stdout(args + " --top_k 0 --top_p 1").text, one.text);
  EXPECT_EQ(Stdout(args + " --top_k 1").text, one.text);
  const std::string drawn =
      " --temperature 0.9 --top-k 50 --top_p 0.9 --repetition-penalty 1.1 --seed 3";
  const Outcome once = testing::RunProgram(DT_GENERATE, args + drawn + " --ranks 2");
  EXPECT_EQ(once.code, 0);
  EXPECT_THAT(once.text, HasSubstr("Llama, "));
  EXPECT_THAT(once.text, HasSubstr("decode: 24 tokens"));
}

// The value of a flag may begin with dashes, whether it is the name of another flag or not.
TEST(Generate, APromptMayBeginWithDashes) {
  const auto model = MakeModel();
  const std::string args = absl::StrCat("--model ", model->path(), " --max-new 8 --prompt");
  for (const char* prompt : {"--- a list", "--max-new", "--nothing", "--"}) {
    const Outcome apart = Stdout(absl::StrCat(args, " '", prompt, "'")),
                  joined = Stdout(absl::StrCat(args, "='", prompt, "'"));
    EXPECT_EQ(apart.code, 0) << prompt;
    EXPECT_EQ(apart.text, joined.text) << prompt;
  }
  const Outcome wrong = testing::RunProgram(DT_GENERATE, args + " x --promt --y");
  EXPECT_THAT(wrong.text, HasSubstr("unknown flag --promt; nearest: --prompt"));
}

// As transformers, what the folder says counts where no flag does; a field that is not served is
// named (below).
TEST(Generate, TakesThePenaltyOfTheFolder) {
  const auto model = MakeModel();
  const std::string args = absl::StrCat("--model ", model->path(), " --max-new 24 --prompt aaaa");
  const std::string plain = Stdout(args).text,
                    penalised = Stdout(args + " --repetition-penalty 1.8").text;
  EXPECT_NE(plain, penalised);
  const std::string config =
      "{\"repetition_penalty\": 1.8, \"num_beams\": 1, \"min_length\": 0, "
      "\"suppress_tokens\": [], \"bad_words_ids\": null}";
  model->Write("generation_config.json", config);
  EXPECT_EQ(Stdout(args).text, penalised);
  EXPECT_EQ(Stdout(args + " --repetition-penalty 1").text, plain);
  // Without the file its fields are those of config.json.
  fs::remove(*model / "generation_config.json");
  Json whole = Json::parse(model->Read("config.json"));
  whole["repetition_penalty"] = 1.8;
  model->Write("config.json", whole.dump());
  EXPECT_EQ(Stdout(args).text, penalised);
}

// Who gets less than was asked for is told why, on stderr.
TEST(Generate, SaysThatTheModelHasNoMorePositions) {
  const auto model = MakeModel();
  const std::string args = absl::StrCat("--model ", model->path(), " --prompt 'dtensor '");
  const Outcome o = testing::RunProgram(DT_GENERATE, args + " --max-new 200");
  EXPECT_EQ(o.code, 0);
  EXPECT_THAT(o.text, HasSubstr("ended after 120 of --max-new 200 tokens: the model has 128 "
                                "positions, by max_position_embeddings of "));
  EXPECT_THAT(testing::RunProgram(DT_GENERATE, args + " --max-new 120").text,
              ::testing::Not(HasSubstr("ended after")));
  EXPECT_THAT(Stdout(args + " --max-new 200").text, ::testing::Not(HasSubstr("ended after")));
}

TEST(Generate, ChatFillsTheTemplate) {
  const auto model = MakeModel();
  const std::string args = absl::StrCat("--model ", model->path(), " --max-new 8");
  const auto out = [&](const std::string& more) { return Stdout(args + more).text; };
  EXPECT_EQ(out(" --chat --prompt hi"), out(" --prompt '[user]hi[a]'"));
  EXPECT_EQ(out(" --chat --system s --prompt hi"), out(" --prompt '[system]s[user]hi[a]'"));
  EXPECT_NE(out(" --chat --prompt hi"), out(" --prompt hi"));
}

TEST(Generate, BadInvocationsEndWithAMessage) {
  const auto of_good = MakeModel(), of_broken = MakeModel(), of_plain = MakeModel(),
             of_beams = MakeModel(), of_empty = MakeModel();
  of_beams->Write("generation_config.json", "{\"num_beams\": 4}");
  const std::string good = of_good->path(), broken = of_broken->path(), plain = of_plain->path();
  of_broken->Write("tokenizer.json", "{\"model\": {\"type\": \"Unigram\"}}");
  of_plain->Write("tokenizer_config.json", "{}");
  of_empty->Write("tokenizer_config.json", "{\"chat_template\": \"\"}");
  const std::string ask = absl::StrCat("--model ", good, " --prompt x");
  const std::pair<std::string, std::string> cases[] = {
      {"", "--model is missing"},
      {"--model " + good, "--prompt is empty"},
      {"--model /no/such --prompt x", "/no/such/config.json"},
      {"--model " + broken + " --prompt x", broken + "/tokenizer.json: model.type is \"Unigram\""},
      {"--model " + plain + " --chat --prompt x", "--prompt without --chat works"},
      {absl::StrCat("--model ", of_empty->path(), " --chat --prompt x"),
       absl::StrCat("--chat: the chat template of ", of_empty->path(), " makes a text without")},
      {absl::StrCat("--model ", of_beams->path(), " --prompt x"),
       of_beams->path() + "/generation_config.json: num_beams is the number 4, which changes"},
      {ask + " --promt y", "unknown flag --promt; nearest: --prompt"},
      {ask + " extra", "unexpected argument \"extra\""},
      {ask + " --max-new 0", "--max_new must be from 1"},
      {ask + " --top-p 1.5", "--top_p must be above 0, at most 1, is 1.5"},
      {ask + " --temperature -1", "--temperature must be at least 0"},
      {ask + " --top_k 50",
       "--top_k changes nothing at temperature 0, which takes the most likely"},
      {ask + " --top-p 0.9 --top_k 1", "--top_p changes nothing at temperature 0"},
      {ask + " --temperature 0 --top_k 2", "add --temperature above 0"},
      {ask + " --dtype f64", "--dtype must be float32 or bfloat16, got \"f64\""},
      {ask + " --system s", "--system needs --chat"},
      {ask + " --ranks 0 --mesh tp=2,tp=2", "--mesh tp=2,tp=2"},
      {ask + " --ranks 3 --mesh tp=2", "--ranks 3 contradicts --mesh tp=2"},
      {ask + " --mesh pp=2", "unknown mesh dim \"pp\""},
      {absl::StrCat("--model ", good, " --prompt ", std::string(200, 'x')),
       "prompt 0 has 200 tokens; the model has 128 positions"},
      {absl::StrCat("--model ", good, " --prompt \"$(printf 'a\\377')\""), "not UTF-8 at byte 1"},
  };
  for (const auto& [args, message] : cases) {
    const Outcome o = testing::RunProgram(DT_GENERATE, args);
    EXPECT_EQ(o.code, 1) << args << "\n" << o.text;
    EXPECT_THAT(o.text, HasSubstr(message)) << args;
    EXPECT_THAT(o.text, HasSubstr("error: ")) << args;
  }
}

}  // namespace
}  // namespace dtensor::generate_test
