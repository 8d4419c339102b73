// The program train_llama, run as a user runs it: settings, what it prints first, training on
// meshes, saving and going on; and what is left when it is killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "dtensor/parallel/data/token_file.h"
#include "dtensor/parallel/text/tokenizer.h"
#include "dtensor/tensor/file.h"
#include "nlohmann/json.hpp"
#include "tests/common/run_program.h"
#include "tests/common/temp_folder.h"
#include "tests/common/thin.h"

namespace dtensor::train_llama_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::Outcome;

class TrainLlama : public ::testing::Test {
 protected:
  TrainLlama() { folder_.Write("text", testing::LearnableText()); }

  std::string Path(const std::string& name) const { return folder_.Path(name); }
  Outcome Train(const std::string& args) const {
    return testing::RunProgram(DT_TRAIN_LLAMA,
                               absl::StrCat("--data.path=", Path("text"),
                                            " --model.hidden=48 --model.inner=96 --data.seq=16"
                                            " --training.batch=4 --optimizer.lr=3e-3 ",
                                            args));
  }
  // On a pretrained model.
  Outcome Go(const std::string& args, const std::string& data = "text") const {
    return testing::RunProgram(
        DT_TRAIN_LLAMA,
        absl::StrCat("--data.path=", Path(data), " --data.seq=16 --training.batch=4 ", args));
  }
  std::vector<double> Losses(const std::string& log) const {
    std::vector<double> losses;
    std::ifstream in(Path(log));
    for (std::string line; std::getline(in, line);) {
      const auto json = nlohmann::json::parse(line);
      if (json.contains("loss")) losses.push_back(json.at("loss"));
    }
    return losses;
  }

  const testing::TempFolder folder_;
};

TEST_F(TrainLlama, PrintsSettingsPlanAndParametersThenLearns) {
  std::ofstream(Path("s.toml")) << "[training]\nsteps = 30\n[parallel]\ndp = 2\ntp = 2\n"
                                   "sequence = true\nstrict = true\n[metrics]\nlog = \""
                                << Path("log") << "\"\n";
  const Outcome o = Train(Path("s.toml") + " --training.steps 25 --data.eval_path=" + Path("text"));
  ASSERT_EQ(o.code, 0) << o.text;
  for (const char* words :
       {"[training]\nsteps = 25\n", "sequence = true\n", "least_lr = 0.0\n",  // resolved
        "  model: LlamaModel\n", "    embed_tokens: Embedding, RowwiseParallel\n",
        "      0 .. 1: LlamaBlock\n", "q_proj: Linear, ColwiseParallel\n",
        "model.layers.1.mlp.gate_proj.weight", "  [96, 48]  [R, S(0)]  [48, 48]  float32\n",
        "parameters, ", "B of them on this rank\n", "train step 1/25  loss 5.", "FLOP/s  peak ",
        "train step 25/25  loss ", "train eval 25/25  loss "}) {
    EXPECT_THAT(o.text, HasSubstr(words));
  }
  EXPECT_THAT(o.text, Not(HasSubstr("\r")));
  const std::vector<double> losses = Losses("log");
  ASSERT_EQ(losses.size(), 25u);
  EXPECT_LT(losses.back(), losses.front() - 1.5);
}

TEST_F(TrainLlama, SameLossesOnEveryMeshAndWithEveryWay) {
  const auto losses = [&](const std::string& args) {
    fs::remove(Path("log"));
    const Outcome o = Train(
        "--training.steps=6 --training.dtype=float64 --metrics.log=" + Path("log") + " " + args);
    EXPECT_EQ(o.code, 0) << o.text;
    return Losses("log");
  };
  const std::vector<double> one = losses("");
  ASSERT_EQ(one.size(), 6u);
  for (const char* args :
       {"--parallel.tp=2", "--parallel.tp=4 --parallel.sequence=true",
        "--parallel.dp=2 --parallel.tp=2 --optimizer.state=flat-over-dp "
        "--training.recompute=model.layers.*",
        "--parallel.dp=2 --training.microbatches=2", "--parallel.tp=3 --parallel.loss=false"}) {
    const std::vector<double> got = losses(args);
    ASSERT_EQ(got.size(), 6u) << args;
    for (size_t i = 0; i < 6; ++i) EXPECT_NEAR(got[i], one[i], 1e-9) << args;
  }
}

TEST_F(TrainLlama, Bfloat16WithMastersGoesOnWhereItWas) {
  const std::string args =
      "--training.dtype=bfloat16 --optimizer.state=flat-over-dp --parallel.dp=2 --parallel.tp=2 "
      "--training.steps=8 ";
  const Outcome whole = Train(args + "--metrics.log=" + Path("whole"));
  ASSERT_EQ(whole.code, 0) << whole.text;
  const std::string save = "--checkpoint.save=" + Path("save") + " --checkpoint.every=3 ";
  ASSERT_EQ(Train(args + save + "--checkpoint.keep=9").code, 0);
  const Outcome rest = Train(args + "--checkpoint.resume=" + Path("save/step-00000003") +
                             " --metrics.log=" + Path("rest"));
  ASSERT_EQ(rest.code, 0) << rest.text;
  EXPECT_THAT(rest.text, HasSubstr("going on from " + Path("save/step-00000003")));
  const std::vector<double> all = Losses("whole");
  ASSERT_EQ(all.size(), 8u);
  EXPECT_EQ(Losses("rest"), std::vector<double>(all.begin() + 3, all.end()));
  EXPECT_LT(all.back(), all.front());
}

TEST_F(TrainLlama, TheSettingsThatComeWithItTrain) {
  const Outcome o = testing::RunProgram(
      DT_TRAIN_LLAMA, absl::StrCat(DT_SOURCE "/examples/train_llama.toml",
                                   " --training.steps=12 --data.path=", Path("text"),
                                   " --metrics.log=", Path("log")));
  ASSERT_EQ(o.code, 0) << o.text;
  const std::vector<double> losses = Losses("log");
  ASSERT_EQ(losses.size(), 12u);
  EXPECT_LT(losses.back(), losses.front() - 1);
}

// What it exports is a folder that it begins with as well: to the bit, on another mesh.
TEST_F(TrainLlama, AnExportedFolderIsAPretrainedOne) {
  const Outcome one = Train("--training.steps=3 --parallel.tp=2 --checkpoint.export=" + Path("hf"));
  ASSERT_EQ(one.code, 0) << one.text;
  const Outcome two = Go("--training.steps=3 --parallel.dp=2 --model.pretrained=" + Path("hf") +
                         " --optimizer.lr=1e-30 --checkpoint.export=" + Path("again"));
  ASSERT_EQ(two.code, 0) << two.text;
  for (const char* file : {"/model.safetensors", "/config.json"}) {
    EXPECT_TRUE(*ReadFile(Path("hf") + file) == *ReadFile(Path("again") + file)) << file;
  }
  // The model is what its folder says: the print has no other, and no setting contradicts it.
  EXPECT_THAT(two.text, Not(HasSubstr("layers = 2")));
  EXPECT_THAT(two.text, HasSubstr("hf/config.json:\n{\n"));
  const Outcome both = Go("--model.pretrained=" + Path("hf") + " --model.layers=5");
  EXPECT_EQ(both.code, 1);
  EXPECT_THAT(both.text, HasSubstr("model.layers is given beside model.pretrained"));
  // An argument replaces a file's [model]; within a file there is one or the other.
  const Outcome replaced = Go(DT_SOURCE
                              "/examples/train_llama.toml --optimizer.warmup=0 "
                              "--training.steps=1 --training.dtype=float32 --model.pretrained=" +
                              Path("hf"));
  EXPECT_EQ(replaced.code, 0) << replaced.text;
  EXPECT_THAT(replaced.text, HasSubstr("hf/config.json:\n{\n"));
  std::ofstream(Path("both.toml"))
      << "[model]\nlayers = 2\npretrained = \"" << Path("hf") << "\"\n";
  EXPECT_THAT(Go(Path("both.toml")).text,
              HasSubstr("model.layers is given beside model.pretrained"));
}

// A model of bytes has a tokenizer of bytes, and what lies in the folder must not be taken for its.
TEST_F(TrainLlama, AnExportedModelOfBytesGenerates) {
  const std::string hf = Path("hf"), args = "--training.steps=1 --checkpoint.export=" + hf;
  ASSERT_EQ(Train(args).code, 0);
  const Tokenizer tokenizer = *Tokenizer::Read(hf);
  std::string text = "It's \n 1 é";
  for (char c = 0; c < 127; ++c) text += c;
  const std::vector<int64_t> ids = *tokenizer.Encode(text);
  ASSERT_EQ(ids.size(), text.size());
  for (size_t i = 0; i < ids.size(); ++i) EXPECT_EQ(ids[i], static_cast<uint8_t>(text[i])) << i;
  const Outcome more = testing::RunProgram(DT_GENERATE, "--prompt line --max-new 3 --model " + hf);
  EXPECT_EQ(more.code, 0) << more.text;
  EXPECT_THAT(more.text, HasSubstr("decode: 3 tokens"));
  ASSERT_EQ(Train(args).code, 0);  // over its own
  for (const char* file : {"generation_config.json", "tokenizer_config.json"}) {
    std::ofstream(hf + "/" + file) << "{}";
    const Outcome o = Train(args);
    EXPECT_EQ(o.code, 1) << o.text;
    EXPECT_THAT(o.text, AllOf(HasSubstr("checkpoint.export: " + hf + " has a " + file),
                              HasSubstr("choose another folder"), Not(HasSubstr("step 1/"))));
    EXPECT_EQ(*ReadFile(hf + "/" + file), "{}");
    fs::remove(hf + "/" + file);
  }
}

// A text becomes what the pretrained model's tokenizer makes of it, never its bytes unasked.
TEST_F(TrainLlama, APretrainedModelReadsTextWithItsTokenizer) {
  const std::string hf = Path("hf"), text = Path("text");
  ASSERT_EQ(Train("--model.vocab=700 --training.steps=1 --checkpoint.export=" + hf).code, 0);
  const std::string tune = "--training.steps=2 --model.pretrained=" + hf + " ";
  const Outcome none = Go(tune);
  EXPECT_EQ(none.code, 1);
  EXPECT_THAT(none.text,
              HasSubstr("text is no token file, and there is no " + hf + "/tokenizer.json"));
  const Outcome bytes = Go(tune + "--data.bytes=true");
  EXPECT_EQ(bytes.code, 0) << bytes.text;
  EXPECT_THAT(bytes.text, HasSubstr(" bytes\n"));
  const auto all = nlohmann::json::parse(*ReadFile(DT_TEST_DATA "/text/tokenizer_gpt2.json"));
  std::ofstream(hf + "/tokenizer.json") << all.at("tokenizer").dump();
  std::ofstream(hf + "/tokenizer_config.json") << "{}";
  const Outcome tokens =
      Go(tune + "--checkpoint.export=" + Path("again") + " --metrics.log=" + Path("of_text"));
  EXPECT_EQ(tokens.code, 0) << tokens.text;
  EXPECT_THAT(tokens.text, HasSubstr("K tokens\n"));
  // The same as from the file that the program tokenize makes of it, which has the tokenizer's ids.
  const Outcome made = testing::RunProgram(
      DT_TOKENIZE, absl::StrCat("--model ", hf, " --text ", text, " --out ", Path("t.bin")));
  ASSERT_EQ(made.code, 0) << made.text;
  const Tokenizer tokenizer = *Tokenizer::Read(hf);
  const std::vector<int64_t> ids = *tokenizer.Encode(*ReadFile(text));
  std::vector<int64_t> written(ids.size());
  const TokenFile file = *TokenFile::Open(Path("t.bin"));
  ASSERT_EQ(file.size(), std::ssize(ids));
  ASSERT_TRUE(file.Read(0, absl::MakeSpan(written)).ok());
  EXPECT_EQ(written, ids);
  const Outcome again = Go(tune + "--metrics.log=" + Path("of_tokens"), "t.bin");
  ASSERT_EQ(again.code, 0) << again.text;
  EXPECT_EQ(Losses("of_text"), Losses("of_tokens"));
  // What was exported generates: the tokenizer's files came along.
  for (const char* name : {"/tokenizer.json", "/tokenizer_config.json"}) {
    EXPECT_TRUE(*ReadFile(hf + name) == *ReadFile(Path("again") + name)) << name;
  }
  std::ofstream(Path("raw.bin")) << std::string(1000, '\1');
  EXPECT_THAT(Go(tune, "raw.bin").text, HasSubstr("does not begin with the head"));
}

// Whatever it would write is asked about before the first step, and is nothing that it reads.
TEST_F(TrainLlama, OutputsAreCheckedBeforeTheWork) {
  const std::string before = *ReadFile(Path("text"));
  const auto refused = [&](const std::string& args, const std::vector<std::string>& words) {
    const Outcome o = Train(args);
    EXPECT_EQ(o.code, 1) << args << o.text;
    for (const std::string& w : words) EXPECT_THAT(o.text, HasSubstr(w)) << args;
    EXPECT_THAT(o.text, Not(HasSubstr("step 1/"))) << args;
  };
  refused("--metrics.log=" + Path("text"),
          {"metrics.log and data.path name the same file, " + Path("text")});
  refused("--checkpoint.export=" + Path("text/x"), {"checkpoint.export", "cannot be written"});
  refused("--checkpoint.save=" + Path("text"), {"checkpoint.save and data.path"});
  refused("--metrics.tensorboard=/proc/x", {"metrics.tensorboard", "cannot be written"});
  refused("--checkpoint.export=" + Path("a") + " --checkpoint.save=" + Path("./a/"),
          {"checkpoint.export and checkpoint.save name the same file"});
  EXPECT_EQ(*ReadFile(Path("text")), before);
}

TEST_F(TrainLlama, AResumeWithAnotherModelIsRefusedAndOtherSettingsAreTold) {
  const std::string save = "--checkpoint.save=" + Path("save") + " --training.steps=1";
  ASSERT_EQ(Train(save + " --model.heads=4 --model.kv_heads=2").code, 0);
  const std::string resume = "--checkpoint.resume=" + Path("save") + " --training.steps=2 ";
  const Outcome other = Train(resume + "--model.heads=8 --model.kv_heads=4");
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.text, HasSubstr("it is of another model: head_dim was 12, is 6; "
                                    "num_attention_heads was 4, is 8"));
  const Outcome theta = Train(resume + "--model.rope_theta=500");
  EXPECT_EQ(theta.code, 1);
  EXPECT_THAT(theta.text, HasSubstr("rope"));
  const Outcome seq = Train(resume + "--data.seq=8");
  EXPECT_EQ(seq.code, 1);
  EXPECT_THAT(seq.text, AllOf(HasSubstr("sequences of length 16, here it is 8"),
                              Not(HasSubstr("another model"))));
  const Outcome beta = Train(resume + "--optimizer.beta2=0.5");
  EXPECT_EQ(beta.code, 0) << beta.text;
  EXPECT_THAT(beta.text, HasSubstr("optimizer.beta2 was 0.95, is 0.5"));
  EXPECT_THAT(beta.text, HasSubstr("training.steps was 1, is 2"));
}

// What it prints first is a file of settings that is the same run.
TEST_F(TrainLlama, ThePrintedSettingsAreThoseOfTheRun) {
  const std::string odd =
      " --optimizer.lr=0.00012345678901234 --model.rope_theta=1234567 --training.steps=3 ";
  const Outcome one = Train(odd + "--metrics.log=" + Path("one"));
  ASSERT_EQ(one.code, 0) << one.text;
  EXPECT_THAT(one.text, HasSubstr("lr = 0.00012345678901234\n"));
  std::string toml = one.text.substr(0, one.text.find("\n\ndata.path: "));
  toml.replace(toml.find(Path("one")), Path("one").size(), Path("two"));
  std::ofstream(Path("printed.toml")) << toml;
  const Outcome two = testing::RunProgram(DT_TRAIN_LLAMA, Path("printed.toml"));
  ASSERT_EQ(two.code, 0) << two.text;
  EXPECT_EQ(Losses("one"), Losses("two"));
}

// A log that cannot be written is told once, and left.
TEST_F(TrainLlama, AFullDiskForLogsEndsNoTraining) {
  const Outcome o = Train("--training.steps=3 --metrics.log=/dev/full");
  EXPECT_EQ(o.code, 0) << o.text;
  const size_t at = o.text.find("warning: /dev/full cannot be written: No space left");
  ASSERT_NE(at, std::string::npos) << o.text;
  EXPECT_EQ(o.text.find("warning:", at + 1), std::string::npos);
  EXPECT_THAT(o.text, HasSubstr("train step 3/3"));
}

// No byte can be written to any file: TensorBoard's is told once, and left.
TEST_F(TrainLlama, AFullDiskForTensorBoardEndsNoTraining) {
  if (!testing::SurvivesThreadSanitizer("a full disk", testing::kFileLimit)) {
    GTEST_SKIP() << testing::kFileLimit;
  }
  const Outcome o = testing::RunProgram(
      "sh -c 'trap \"\" XFSZ; ulimit -f 0; exec " DT_TRAIN_LLAMA " \"$@\"' sh",
      absl::StrCat("--data.path=", Path("text"),
                   " --model.hidden=48 --model.inner=96"
                   " --data.seq=16 --training.batch=4 --training.steps=3 --metrics.tensorboard=",
                   Path("events")));
  EXPECT_EQ(o.code, 0) << o.text;
  const size_t at = o.text.find("cannot be written: File too large");
  ASSERT_NE(at, std::string::npos) << o.text;
  EXPECT_EQ(o.text.find("warning:", at), std::string::npos);
  EXPECT_THAT(o.text, HasSubstr("train step 3/3"));
}

TEST_F(TrainLlama, ReadsTokenFiles) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < 2000; ++i) tokens.push_back(i % 700);
  ASSERT_TRUE(WriteTokens(Path("tokens.bin"), tokens).ok());
  const std::string data = "--data.path=" + Path("tokens.bin") + " --training.steps=2 ";
  EXPECT_EQ(Train(data + "--model.vocab=700").code, 0);
  const Outcome small = Train(data + "--model.vocab=699");
  EXPECT_EQ(small.code, 1);
  EXPECT_THAT(small.text, HasSubstr("has token 699, the model's vocabulary is 699"));
}

// Whatever is wrong: what, where, and what would be right, before anything is trained.
TEST_F(TrainLlama, WrongSettingsAreNamed) {
  const auto refused = [&](const std::string& args, const std::vector<std::string>& words) {
    const Outcome o = Train(args);
    EXPECT_EQ(o.code, 1) << args << o.text;
    for (const std::string& w : words) EXPECT_THAT(o.text, HasSubstr(w)) << args;
    EXPECT_THAT(o.text, Not(HasSubstr("step 1/"))) << args;
  };
  const auto toml = [&](const std::string& text, const std::vector<std::string>& words) {
    std::ofstream(Path("bad.toml")) << text;
    refused(Path("bad.toml"), words);
  };
  refused("--training.stepz=3", {"unknown setting training.stepz; nearest: training.steps"});
  refused("--parallel.pp=3", {"unknown setting parallel.pp; nearest: parallel."});
  refused("--training.steps=many", {"training.steps must be a whole number, got \"many\""});
  refused("--training.steps=0", {"training.steps must be from 1 to"});
  refused("--training.steps=99999999999999999999", {"must be a whole number"});
  refused("--training.steps", {"needs a value"});
  refused("--training.batch=0", {"training.batch must be from 1 to 16777216, got 0"});
  refused("--training.seed=-1", {"training.seed must be from 0 or above, got -1"});
  refused("--optimizer.lr=nan", {"optimizer.lr must be from 0"});
  refused("--optimizer.lr=0", {"optimizer.lr must be positive"});
  refused("--optimizer.beta1=1", {"optimizer.beta1 must be below 1, got 1"});
  refused("--optimizer.beta2=1", {"optimizer.beta2 must be below 1, got 1"});
  refused("--optimizer.eps=0", {"optimizer.eps must be positive, got 0"});
  refused("--model.vocab=128", {"is taken as bytes", "at least 256 are needed"});
  refused("--parallel.device=meta", {"parallel.device meta: its tensors have no values"});
  refused("--training.max_norm=0",
          {"training.max_norm must be positive, got 0; inf does not clip"});
  refused("--training.max_norm=nan", {"training.max_norm must be from 0 or above, or inf"});
  refused("--training.dtype=float16",
          {"training.dtype must be one of float32, bfloat16, float64, got \"float16\""});
  refused("--model.tied=maybe", {"model.tied must be true or false"});
  refused("--model.heads=5", {"model.heads 5 does not divide model.hidden 48"});
  refused("--model.heads=6 --model.kv_heads=4", {"kv_heads"});
  refused("--training.microbatches=3", {"microbatches 3 does not divide training.batch 4"});
  refused("--optimizer.warmup=99", {"optimizer.warmup 99 is beyond training.steps"});
  refused("--parallel.dp=64 --parallel.tp=64", {"above 256 ranks"});
  refused("--data.path=/no/where", {"data.path: /no/where cannot be read"});
  refused("--data.path=", {"data.path is needed"});
  refused("--checkpoint.every=3", {"checkpoint.every needs checkpoint.save"});
  refused("--metrics.eval_every=3", {"metrics.eval_every needs data.eval_path"});
  refused("--data.seq=100000", {"needs at least 100001"});
  refused("--checkpoint.resume=/no/where", {"/no/where is no folder of checkpoints"});
  refused("--metrics.log=/no/where/log", {"/no/where/log cannot be written"});
  EXPECT_THAT(Go("--model.pretrained=/no/where").text, HasSubstr("error: /no/where/config.json"));
  refused("--training.recompute=model.layer.*", {"model.layer", "layers"});
  refused("--training.recompute=model.layers.*,model.nrom", {"model.nrom", "nearest: norm"});
  refused("/no/where.toml", {"/no/where.toml cannot be read"});
  toml("[training]\nstep = 3\n",
       {"bad.toml:2: unknown setting training.step; nearest: training.steps"});
  toml("[trainig]\nsteps = 3\n", {"bad.toml:1: unknown section [trainig]; nearest: training"});
  toml("[nonsense]\n", {"bad.toml:1: unknown section [nonsense]"});
  toml("[training.inner]\n", {"bad.toml:1: unknown section [training.inner]"});
  toml("[training]\nsteps = \"3\"\n", {"bad.toml:2: training.steps must be a whole number"});
  toml("[training]\nsteps = 3.0\n", {"must be a whole number"});
  toml("[training]\nsteps = [3]\n", {"must be a whole number"});
  toml("[optimizer]\nlr = true\n", {"optimizer.lr must be a number"});
  toml("[training\n", {"bad.toml:1: "});
  toml("[training]\nsteps = 3\nsteps = 4\n", {"bad.toml:3: "});
  toml("[training]\nsteps = 1\n[parallel]\ndp = 99999\n",
       {"bad.toml:4: parallel.dp must be from 1"});
  std::ofstream(Path("good.toml")) << "[training]\nsteps = 1\n";
  refused(Path("good.toml") + " " + Path("good.toml"), {"a second file"});
}

// Killed at twelve moments, in saves and between them: what is there loads, and a training that
// went on from it ends where one that was never killed does.
TEST_F(TrainLlama, KilledAtAnyTimeItGoesOnFromTheLastCheckpoint) {
  const std::string args = "--training.steps=40 --parallel.dp=2 ";
  const std::string save = args + "--checkpoint.save=" + Path("save") + " --checkpoint.every=1 ";
  const Outcome whole = Train(args + "--checkpoint.save=" + Path("whole"));
  ASSERT_EQ(whole.code, 0) << whole.text;
  std::string resume;
  int killed = 0;
  for (int i = 0; i < 12; ++i) {
    const Outcome o = testing::RunProgram(
        absl::StrCat("timeout -s KILL ", 0.15 + 0.037 * i, " ", DT_TRAIN_LLAMA),
        absl::StrCat("--data.path=", Path("text"),
                     " --model.hidden=48 --model.inner=96 --data.seq=16 --training.batch=4"
                     " --optimizer.lr=3e-3 ",
                     save, resume));
    killed += o.code != 0;
    ASSERT_EQ(o.text.find("error:"), std::string::npos) << o.text;
    if (fs::exists(Path("save")) && !fs::is_empty(Path("save"))) {
      for (const auto& entry : fs::directory_iterator(Path("save"))) {
        const bool whole_one = entry.path().extension() != ".partial";
        if (whole_one && fs::exists(entry.path() / "checkpoint.json")) {
          resume = "--checkpoint.resume=" + Path("save");
        }
      }
    }
  }
  EXPECT_GT(killed, 0);
  const Outcome last = Train(save + resume);
  ASSERT_EQ(last.code, 0) << last.text;
  for (const char* file : {"model.safetensors", "optimizer.safetensors", "checkpoint.json"}) {
    const std::string path = absl::StrCat("/step-00000040/", file);
    EXPECT_TRUE(*ReadFile(Path("save") + path) == *ReadFile(Path("whole") + path)) << file;
  }
}

// One command begins and goes on, as a launcher's restarts need it.
TEST_F(TrainLlama, ResumingFromTheFolderToSaveInBeginsWhereItIsEmpty) {
  const std::string both = "--checkpoint.save=" + Path("save") +
                           " --checkpoint.resume=" + Path("save/") + " --training.steps=";
  const Outcome one = Train(both + "2");
  ASSERT_EQ(one.code, 0) << one.text;
  EXPECT_THAT(one.text, HasSubstr("beginning: nothing in " + Path("save") + "/ yet\n"));
  const Outcome two = Train(both + "3");
  ASSERT_EQ(two.code, 0) << two.text;
  EXPECT_THAT(two.text, AllOf(HasSubstr("going on from " + Path("save/step-00000002")),
                              HasSubstr("train step 3/3"), Not(HasSubstr("train step 2/3"))));
  const Outcome other =
      Train("--checkpoint.save=" + Path("other") + " --checkpoint.resume=" + Path("none"));
  EXPECT_EQ(other.code, 1);
  EXPECT_THAT(other.text, HasSubstr(Path("none") + " is no folder of checkpoints"));
}

// Nothing is left to train; the other folder has the step all the same, and its own is not written
// again.
TEST_F(TrainLlama, ATrainingThatWasDoneIsSavedInAnotherFolder) {
  const std::string args = "--training.steps=2 --parallel.dp=2 --checkpoint.save=";
  ASSERT_EQ(Train(args + Path("one")).code, 0);
  const std::string resume = " --checkpoint.resume=" + Path("one");
  const auto written = fs::last_write_time(Path("one/step-00000002"));
  for (const std::string to : {"other", "one"}) {
    const Outcome o = Train(args + Path(to) + resume);
    ASSERT_EQ(o.code, 0) << o.text;
    EXPECT_THAT(o.text, Not(HasSubstr("train step"))) << to;
  }
  for (const std::string file : {"model.safetensors", "optimizer.safetensors", "checkpoint.json"}) {
    EXPECT_TRUE(*ReadFile(Path("one/step-00000002/" + file)) ==
                *ReadFile(Path("other/step-00000002/" + file)))
        << file;
  }
  EXPECT_EQ(fs::last_write_time(Path("one/step-00000002")), written);
}

// On a terminal a step's line is written over the one before, with the time that is left.
TEST_F(TrainLlama, ATerminalShowsTheTimeThatIsLeft) {
  const auto on_columns = [this](int columns) {
    const Outcome o = testing::RunProgram(
        absl::StrCat("script -qec 'stty cols ", columns,
                     "; " DT_TRAIN_LLAMA " --data.path=", Path("text"),
                     " --model.hidden=48 --model.inner=96 --data.seq=16 --training.batch=4",
                     " --training.steps=3 --data.eval_path=", Path("text"), "' ", Path("terminal")),
        "</dev/null");
    EXPECT_EQ(o.code, 0) << o.text;
    return o.text;
  };
  const std::string line = "\r\033\\[Ktrain step ", left = "/3  ETA [0-9]+ s  loss [^\r\n]*",
                    rest = "  lr [0-9.e-]+", end = "/3  loss [^\n]*  lr [0-9.e-]+\r\n";
  EXPECT_THAT(on_columns(200),
              ContainsRegex(absl::StrCat(line, 1, left, rest, line, 2, left, rest, line, 3, end,
                                         "\r\033\\[Ktrain eval 3/3")));
  // What is rewritten fits into a line; what stays is whole.
  const std::string narrow = on_columns(60);
  EXPECT_THAT(narrow, ContainsRegex(absl::StrCat(line, 1, left, line, 2, left, line, 3, end)));
  const size_t from = narrow.find("train step 1"), to = narrow.find('\r', from);
  EXPECT_EQ(to - from, 59u) << narrow.substr(from, to - from);
}

TEST_F(TrainLlama, HelpIsPrintedBesideOtherArguments) {
  for (const char* args : {"--help", "--help --training.steps=3"}) {
    const Outcome o = Train(args);
    EXPECT_EQ(o.code, 0) << o.text;
    EXPECT_THAT(o.text, AllOf(HasSubstr("train_llama [SETTINGS.toml]"), HasSubstr("[training]\n"),
                              Not(HasSubstr("train step"))));
  }
}

// SIGTERM: the step is finished and saved, and the program ends well.
TEST_F(TrainLlama, ASignalSavesAndEnds) {
  const std::string command =
      absl::StrCat(DT_TRAIN_LLAMA, " --data.path=", Path("text"),
                   " --model.hidden=48 --model.inner=96 --data.seq=16 --training.batch=4"
                   " --training.steps=1000000 --parallel.dp=2 --checkpoint.save=",
                   Path("save"), " --metrics.log=", Path("log"));
  const Outcome o = testing::RunProgram(
      absl::StrCat("sh -c '", command, " & pid=$!; while kill -0 $pid && [ ! -s ", Path("log"),
                   " ]; do sleep 0.02; done; kill -TERM $pid; wait $pid; echo exit code $?'"),
      "");
  EXPECT_THAT(o.text, HasSubstr("exit code 0\n"));
  EXPECT_THAT(o.text, HasSubstr("stopped after step "));
  ASSERT_FALSE(fs::is_empty(Path("save")));
  EXPECT_TRUE(fs::exists(fs::directory_iterator(Path("save"))->path() / "checkpoint.json"));
}

}  // namespace
}  // namespace dtensor::train_llama_test
