// Trainings that are saved, ended and resumed go on bit for bit; what is wrong with a checkpoint is
// named and changes nothing; what interrupts a save leaves the one before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "absl/strings/str_format.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/io/checkpoint_file.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/train/check_copies.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/file.h"
#include "nlohmann/json.hpp"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::train_resume_test {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

class TrainResume : public ::testing::Test {
 protected:
  TrainResume() {
    std::ofstream text(Dir("text"));
    for (int i = 0; i < 60; ++i) text << "line " << i * i << " of a text\n";
  }
  std::string Dir(const std::string& name) const { return folder_.Path(name); }

  const testing::TempFolder folder_;
};

struct Setting {
  int64_t dp = 1, tp = 1;
  DType dtype = DType::kF32;
  bool flat_state = false;
  double dropout = 0.1;
  int64_t hidden = 24;
  uint64_t seed = 5;
};

// A training as a program has it, on one rank.
struct Training {
  std::unique_ptr<GPT> model;
  std::unique_ptr<AdamW> optimizer;
  std::unique_ptr<TokenSampler> data;
  std::unique_ptr<Trainer> trainer;
  std::vector<double> losses;

  Training(const std::string& text, const Setting& s, TrainerOptions o) {
    ManualSeed(s.seed);
    const GPTConfig config = {
        .vocab = 256, .seq = 8, .layers = 2, .hidden = s.hidden, .heads = 3, .dropout = s.dropout};
    model = std::make_unique<GPT>(config);
    SetDType(*model, s.dtype);
    o.batch = 6;
    if (s.dp * s.tp > 1) {
      const DeviceMesh mesh = testing::DpTp(s.dp, s.tp);
      ThrowIfError(ParallelizeModule(*model, mesh, GPTPlan(config)));
      o.mesh = mesh;
      o.placements = {Shard(0), Replicate()};
    }
    Materialize(*model);
    const auto state = s.flat_state ? FlatState("dp") : StateLayoutFn(LikeParameter);
    optimizer = std::make_unique<AdamW>(model->NamedParameters(), AdamWOptions{}, state);
    data = std::make_unique<TokenSampler>(ValueOrThrow(
        TokenSampler::Create(ValueOrThrow(TokenFile::Open(text)), {.seq = 8, .seed = s.seed})));
    o.lr = {.peak = 1e-2, .decay = LearningRate::Decay::kCosine, .warmup = 1, .steps = o.steps};
    o.after_step = [this](const StepReport& r) -> absl::Status {
      losses.push_back(r.loss);
      return absl::OkStatus();
    };
    trainer = ValueOrThrow(Trainer::Create(*model, *optimizer, *data, std::move(o)));
  }

  // Parameters and states, gathered.
  testing::NamedValues All() const {
    testing::NamedValues all = testing::Gather(*model);
    for (const auto& [name, value] : optimizer->GetStateDict()) {
      all.emplace_back(name, value.ToVector<double>());
    }
    return all;
  }
};

absl::Status OnRanks(const Setting& s, const std::function<absl::Status()>& body) {
  return RunSpmd(s.dp * s.tp, [&](RankContext&) { return body(); });
}

TEST_F(TrainResume, GoesOnBitForBitOnEveryMesh) {
  const std::vector<Setting> settings = {
      {},
      {.dp = 2},
      {.tp = 2},
      {.dp = 2, .tp = 2},
      {.dp = 3},  // uneven parts
      {.dp = 2, .tp = 2, .dtype = DType::kBF16, .flat_state = true},
  };
  int number = 0;
  for (const Setting& s : settings) {
    const std::string save = Dir(absl::StrCat("save", ++number));
    const absl::Status status = OnRanks(s, [&]() -> absl::Status {
      Training whole(Dir("text"), s, {.steps = 6, .microbatches = 2});
      DT_RETURN_IF_ERROR(whole.trainer->Run());
      {
        Training begun(Dir("text"), s,
                       {.steps = 6, .microbatches = 2, .save = save, .save_every = 3, .keep = 9});
        DT_RETURN_IF_ERROR(begun.trainer->Run());
        EXPECT_EQ(begun.losses, whole.losses);
      }
      Setting other = s;
      other.seed = 77;  // nothing of what a program begins with is needed
      Training resumed(Dir("text"), other, {.steps = 6, .microbatches = 2});
      *resumed.data = *Training(Dir("text"), s, {.steps = 6}).data;
      DT_RETURN_IF_ERROR(resumed.trainer->Resume(save + "/step-00000003"));
      EXPECT_EQ(resumed.trainer->step(), 3);
      DT_RETURN_IF_ERROR(resumed.trainer->Run());
      EXPECT_EQ(resumed.losses, std::vector<double>(whole.losses.begin() + 3, whole.losses.end()));
      EXPECT_TRUE(resumed.All() == whole.All()) << s.dp << " x " << s.tp;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// Files hold logical tensors: any mesh reads what another one wrote, and writes the same bytes.
TEST_F(TrainResume, AnotherMeshReadsItAndWritesTheSameBytes) {
  const std::vector<Setting> settings = {{}, {.dp = 2}, {.tp = 2}, {.dp = 2, .tp = 2}, {.tp = 4}};
  const absl::Status first = OnRanks(settings[3], [&]() -> absl::Status {
    Training run(Dir("text"), settings[3], {.steps = 2, .save = Dir("first")});
    return run.trainer->Run();
  });
  ASSERT_TRUE(first.ok()) << first;
  for (const Setting& s : settings) {
    const std::string copy = Dir(absl::StrCat("copy", s.dp, s.tp));
    const absl::Status status = OnRanks(s, [&]() -> absl::Status {
      Training run(Dir("text"), s, {.steps = 2, .save = copy});
      DT_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                          LoadCheckpoint(Dir("first"), *run.model, *run.optimizer));
      EXPECT_EQ(loaded.info.step, 2);
      return SaveCheckpoint(copy, *run.model, *run.optimizer, loaded.info).status();
    });
    ASSERT_TRUE(status.ok()) << status;
    for (const char* file : {"model.safetensors", "optimizer.safetensors", "checkpoint.json"}) {
      const std::string path = absl::StrCat("/step-00000002/", file);
      EXPECT_EQ(*ReadFile(copy + path) == *ReadFile(Dir("first") + path), true)
          << s.dp << s.tp << file;
    }
  }
}

// A safetensors file, by its specification: eight bytes, a JSON head, tensors without gaps.
TEST_F(TrainResume, FilesAreSafetensorsWithThePlainValues) {
  const Setting s = {.dp = 2, .tp = 2};
  testing::NamedValues want;
  const absl::Status status = OnRanks(s, [&]() -> absl::Status {
    Training run(Dir("text"), s, {.steps = 1, .save = Dir("save")});
    DT_RETURN_IF_ERROR(run.trainer->Run());
    const testing::NamedValues all = testing::Gather(*run.model);
    if (RankContext::Current().rank() == 0) want = all;
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  const std::string bytes = *ReadFile(Dir("save/step-00000001/model.safetensors"));
  uint64_t length;
  std::memcpy(&length, bytes.data(), 8);
  const auto head = nlohmann::json::parse(bytes.substr(8, length));
  EXPECT_EQ(head.size(), want.size());
  size_t total = 8 + length;
  for (const auto& [name, values] : want) {
    const auto& entry = head.at(name);
    EXPECT_EQ(entry.at("dtype"), "F32");
    const auto begin = entry.at("data_offsets")[0].get<size_t>(),
               end = entry.at("data_offsets")[1].get<size_t>();
    ASSERT_EQ(end - begin, values.size() * 4) << name;
    std::vector<float> got(values.size());
    std::memcpy(got.data(), bytes.data() + 8 + length + begin, end - begin);
    EXPECT_EQ(std::vector<double>(got.begin(), got.end()), values) << name;
    total += end - begin;
  }
  EXPECT_EQ(total, bytes.size());
}

// --- what is refused ---

TEST_F(TrainResume, DamageIsNamedAndNothingIsLoaded) {
  const Setting s = {.dp = 2};
  const std::string step = Dir("save/step-00000002");
  const auto train = [&](const std::string& save, uint64_t seed, int64_t steps) {
    Setting mine = s;
    mine.seed = seed;
    const absl::Status status = OnRanks(mine, [&]() -> absl::Status {
      Training run(Dir("text"), mine, {.steps = steps, .save = save});
      return run.trainer->Run();
    });
    ASSERT_TRUE(status.ok()) << status;
  };
  train(Dir("save"), 5, 2);
  train(Dir("other"), 6, 2);
  const auto refused = [&](absl::StatusCode code, const std::vector<std::string>& words) {
    absl::Status why;
    const absl::Status status = OnRanks(s, [&]() -> absl::Status {
      Training run(Dir("text"), s, {.steps = 4});
      DT_RETURN_IF_ERROR(run.trainer->Run());
      const testing::NamedValues before = run.All();
      const auto generator = DefaultGenerator().State();
      const TokenSampler::State data = run.data->state();
      const absl::Status mine = run.trainer->Resume(Dir("save"));
      EXPECT_TRUE(run.All() == before);
      EXPECT_EQ(DefaultGenerator().State(), generator);
      EXPECT_EQ(run.data->state().samples, data.samples);
      EXPECT_EQ(run.trainer->step(), 4);
      EXPECT_EQ(mine.code(), code) << mine;
      for (const std::string& w : words) EXPECT_THAT(std::string(mine.message()), HasSubstr(w));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  };
  const auto with = [&](const std::string& file, const std::function<void(std::string*)>& change,
                        const std::vector<std::string>& words,
                        absl::StatusCode code = absl::StatusCode::kDataLoss) {
    const std::string path = step + "/" + file, good = *ReadFile(path);
    std::string bytes = good;
    change(&bytes);
    ASSERT_TRUE(WriteFile(path, bytes).ok());
    SCOPED_TRACE(file);
    refused(code, words);
    ASSERT_TRUE(WriteFile(path, good).ok());
  };
  const std::string model = "model.safetensors", optimizer = "optimizer.safetensors";
  with(model, [](std::string* b) { b->resize(b->size() - 1); }, {step + "/" + model, "bytes"});
  with(model, [](std::string* b) { b->clear(); }, {model, "has 0 bytes"});
  with(model, [](std::string* b) { b->push_back(0); }, {model, "bytes, the checkpoint says"});
  with(model, [](std::string* b) { (*b)[20] ^= 1; }, {model, "has another head"});
  with(model, [](std::string* b) { b->back() ^= 1; },
       {step + "/" + model, "was changed", "checksum"});
  with(optimizer, [](std::string* b) { (*b)[b->size() / 2] ^= 64; }, {optimizer, "was changed"});
  // A whole file of another training of the same model.
  with(optimizer, [&](std::string* b) { *b = *ReadFile(Dir("other/step-00000002/") + optimizer); },
       {optimizer, "was changed"});
  with("checkpoint.json", [](std::string* b) { (*b)[b->find("\"step\": 2") + 8] = '3'; },
       {step + "/checkpoint.json", "not as it was written"});
  with("checkpoint.json", [](std::string* b) { *b = "{}"; }, {"no manifest"});
  with("checkpoint.json", [](std::string* b) { *b = "\x80["; }, {"no manifest"});
  with("checkpoint.json", [](std::string* b) { b->resize(b->size() / 2); }, {"no manifest"});
  // Whoever writes a manifest that fits its own checksum cannot name other files, or sizes.
  const auto forged = [&](const std::function<void(nlohmann::json*)>& change,
                          const std::string& why) {
    const auto forge = [&](std::string* b) {
      auto all = nlohmann::json::parse(*b);
      change(&all["dtensor_checkpoint"]);
      const std::string body = all["dtensor_checkpoint"].dump();
      all["sum"] =
          absl::StrFormat("%016x", internal::ElementSum(body.data(), 0, std::ssize(body), 1));
      *b = all.dump();
    };
    with("checkpoint.json", forge, {why});
  };
  using nlohmann::json;
  forged([](json* b) { (*b)["files"][0]["file"] = "../../text"; }, "must be model.safetensors and");
  forged([](json* b) { (*b)["files"][0]["bytes"] = 7; }, "does not fit its tensors");
  forged([](json* b) { (*b)["files"].erase(1); }, "must be model.safetensors and");
  forged([](json* b) { (*b)["version"] = 2; }, "version 2, this program reads 1");
  forged([](json* b) { (*b)["step"] = -1; }, "no manifest");
  forged([](json* b) { (*b)["step"] = "x"; }, "no manifest");
  forged([](json* b) { b->erase("files"); }, "no manifest");
  forged([](json* b) { (*b)["files"][0]["tensors"][0]["dtype"] = "int3"; }, "described wrongly");
  fs::rename(step + "/" + optimizer, Dir("away"));
  refused(absl::StatusCode::kUnavailable, {step + "/" + optimizer, "No such file"});
  fs::rename(Dir("away"), step + "/" + optimizer);
  fs::remove(step + "/checkpoint.json");
  refused(absl::StatusCode::kNotFound, {Dir("save"), "no checkpoint", "step-00000002"});
}

TEST_F(TrainResume, AnotherModelIsToldTensorByTensor) {
  const auto save = OnRanks({}, [&]() -> absl::Status {
    Training run(Dir("text"), {}, {.steps = 1, .save = Dir("save")});
    return run.trainer->Run();
  });
  ASSERT_TRUE(save.ok()) << save;
  const auto refused = [&](const Setting& s, const std::vector<std::string>& words) {
    Training run(Dir("text"), s, {.steps = 1});
    const testing::NamedValues before = run.All();
    const absl::Status status = run.trainer->Resume(Dir("save"));
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    for (const std::string& w : words) EXPECT_THAT(std::string(status.message()), HasSubstr(w));
    EXPECT_TRUE(run.All() == before);
  };
  refused({.hidden = 48}, {"nothing was loaded", "tokens.weight is float32 [256, 24]",
                           "must be float32 [256, 48]", "blocks.1.mlp.up.bias/exp_avg is"});
  refused({.dtype = DType::kF64}, {"must be float64 [256, 24]"});
  refused({.seed = 6}, {"the seed 5, here it is 6"});  // of the data
  // Names that are not there, on either side.
  Linear one(3, 2), two(3, 2, false);
  Materialize(one);
  Materialize(two);
  AdamW o1(one.NamedParameters()), o2(two.NamedParameters());
  ASSERT_TRUE(SaveCheckpoint(Dir("one"), one, o1, {}).ok());
  ASSERT_TRUE(SaveCheckpoint(Dir("two"), two, o2, {}).ok());
  EXPECT_THAT(std::string(LoadCheckpoint(Dir("one"), two, o2).status().message()),
              HasSubstr("unexpected bias"));
  EXPECT_THAT(std::string(LoadCheckpoint(Dir("two"), one, o1).status().message()),
              HasSubstr("missing bias"));
  EXPECT_EQ(LoadCheckpoint(Dir("none"), one, o1).status().code(), absl::StatusCode::kNotFound);
}

// Any bit of any file: refused, or (white space of the manifest) nothing that is loaded changed.
TEST_F(TrainResume, NoFlippedBitAndNoCutIsLoaded) {
  Linear model(3, 2);
  Materialize(model);
  AdamW optimizer(model.NamedParameters());
  sum(model(full({1, 3}, 1.0))).Backward();
  optimizer.Step();
  ASSERT_TRUE(SaveCheckpoint(Dir("s"), model, optimizer, {.step = 1, .notes = {{"a", "b"}}}).ok());
  const auto values = [&] { return model.weight().tensor().ToVector<double>(); };
  const std::vector<double> good_values = values();
  uint64_t random = 12345;
  int refused = 0, tried = 0;
  for (const char* file : {"checkpoint.json", "model.safetensors", "optimizer.safetensors"}) {
    const std::string path = Dir("s/step-00000001/") + file, good = *ReadFile(path);
    for (int i = 0; i < 150; ++i) {
      random = random * 6364136223846793005 + 1442695040888963407;
      const size_t at = (random >> 33) % good.size();
      std::string bad = good;
      bad[at] ^= static_cast<char>(1 << (random >> 60 & 7));
      if (i % 5 == 0) bad.resize(at);
      std::ofstream(path, std::ios::binary | std::ios::trunc) << bad;
      const absl::StatusOr<LoadedCheckpoint> loaded = LoadCheckpoint(Dir("s"), model, optimizer);
      ++tried;
      refused += !loaded.ok();
      EXPECT_EQ(values(), good_values) << file << " " << at;
      if (!loaded.ok()) {
        EXPECT_THAT(std::string(loaded.status().message()), HasSubstr(file));
        continue;
      }
      EXPECT_STREQ(file, "checkpoint.json");
      EXPECT_EQ(loaded->info.step, 1);
      EXPECT_EQ(loaded->info.notes.at("a"), "b");
    }
    std::ofstream(path, std::ios::binary | std::ios::trunc) << good;
    EXPECT_TRUE(LoadCheckpoint(Dir("s"), model, optimizer).ok());
  }
  EXPECT_GT(refused, tried * 3 / 4);
}

// --- what interrupts a save ---

TEST_F(TrainResume, ADiskThatIsFullLeavesTheLastGoodOneAndTrainingGoesOn) {
  const Setting s = {.dp = 2};
  std::signal(SIGXFSZ, SIG_IGN);
  struct rlimit old;
  getrlimit(RLIMIT_FSIZE, &old);
  testing::NamedValues saved;
  const absl::Status status = OnRanks(s, [&]() -> absl::Status {
    const bool first = RankContext::Current().rank() == 0;
    Training run(Dir("text"), s, {.steps = 4, .save = Dir("other"), .save_every = 2});
    run.losses.reserve(4);
    Training short_one(Dir("text"), s, {.steps = 2, .save = Dir("save")});
    DT_RETURN_IF_ERROR(short_one.trainer->Run());
    if (first) saved = short_one.All();
    if (!first) short_one.All();
    // 20 KB: the head fits, the tensors do not.
    if (first) {
      const struct rlimit full = {20000, old.rlim_max};
      setrlimit(RLIMIT_FSIZE, &full);
    }
    const absl::StatusOr<std::string> failed =
        SaveCheckpoint(Dir("save"), *run.model, *run.optimizer, {.step = 3});
    EXPECT_EQ(failed.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(failed.status().message()), HasSubstr("rank 0: "));
    EXPECT_THAT(std::string(failed.status().message()), HasSubstr("File too large"));
    const absl::Status ended = run.trainer->Run();
    EXPECT_EQ(run.losses.size(), 4u);  // a save that fails ends no training
    EXPECT_THAT(std::string(ended.message()), HasSubstr("File too large"));
    return absl::OkStatus();
  });
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, SIG_DFL);
  ASSERT_TRUE(status.ok()) << status;
  size_t entries = 0;
  for (const auto& entry : fs::directory_iterator(Dir("save"))) {
    EXPECT_EQ(entry.path().filename(), "step-00000002");
    ++entries;
  }
  EXPECT_EQ(entries, 1u);
  const absl::Status again = OnRanks(s, [&]() -> absl::Status {
    Training run(Dir("text"), s, {.steps = 2});
    DT_RETURN_IF_ERROR(run.trainer->Resume(Dir("save")));
    EXPECT_TRUE(run.All() == saved);
    return absl::OkStatus();
  });
  EXPECT_TRUE(again.ok()) << again;
}

// What a job leaves that was ended anywhere in a save: the folder's copy, cut at every file.
TEST_F(TrainResume, WhatAKilledJobLeftIsIgnoredToldAndRemoved) {
  Training run(Dir("text"), {}, {.steps = 2, .save = Dir("save")});
  ASSERT_TRUE(run.trainer->Run().ok());
  fs::copy(Dir("save/step-00000002"), Dir("save/step-00000003.partial"));
  fs::resize_file(Dir("save/step-00000003.partial/optimizer.safetensors"), 100);
  fs::create_directory(Dir("save/step-00000004"));  // half removed
  std::ofstream(Dir("save/notes.txt")) << "mine";
  const absl::StatusOr<LoadedCheckpoint> loaded =
      LoadCheckpoint(Dir("save"), *run.model, *run.optimizer);
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->info.step, 2);
  EXPECT_EQ(loaded->ignored, (std::vector<std::string>{"step-00000003.partial", "step-00000004"}));
  ASSERT_TRUE(SaveCheckpoint(Dir("save"), *run.model, *run.optimizer, {.step = 5}).ok());
  EXPECT_FALSE(fs::exists(Dir("save/step-00000003.partial")));
  EXPECT_TRUE(fs::exists(Dir("save/notes.txt")));
}

TEST_F(TrainResume, KeepsTheNewestAndReplacesTheSameStep) {
  Linear model(2, 2);
  Materialize(model);
  AdamW optimizer(model.NamedParameters());
  for (int64_t step = 1; step <= 4; ++step) {
    ASSERT_TRUE(SaveCheckpoint(Dir("s"), model, optimizer, {.step = step}, {.keep = 3}).ok());
  }
  const DTensor ones = full({2, 2}, 1.0);
  model.weight().Set(ones);
  const absl::StatusOr<std::string> path =
      SaveCheckpoint(Dir("s"), model, optimizer, {.step = 4, .notes = {{"a", "b"}}}, {.keep = 2});
  ASSERT_TRUE(path.ok()) << path.status();
  EXPECT_EQ(*path, Dir("s/step-00000004"));
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(Dir("s")))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step-00000003", "step-00000004"));
  model.weight().Set(full({2, 2}, 7.0));
  const absl::StatusOr<LoadedCheckpoint> loaded = LoadCheckpoint(Dir("s"), model, optimizer);
  EXPECT_EQ(loaded->info.notes.at("a"), "b");
  EXPECT_EQ(model.weight().tensor().ToVector<double>(), std::vector<double>(4, 1));
}

// A folder has the checkpoints of one training: what would be taken for another's is not written.
TEST_F(TrainResume, AFolderOfAnotherTrainingIsRefusedBeforeTheFirstStep) {
  const auto run = [&](int64_t steps, const std::string& save, const std::string& resume) {
    Training t(Dir("text"), {}, {.steps = steps, .save = save, .save_every = 2, .keep = 9});
    absl::Status status = resume.empty() ? absl::OkStatus() : t.trainer->Resume(resume);
    if (status.ok()) status = t.trainer->Run();
    EXPECT_TRUE(status.ok() || t.losses.empty());
    return status;
  };
  ASSERT_TRUE(run(4, Dir("save"), "").ok());
  const auto refused = [&](const absl::Status& status, const std::vector<std::string>& words) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    for (const std::string& w : words) EXPECT_THAT(std::string(status.message()), HasSubstr(w));
  };
  // Back to step 2, and on into the folder that has step 4.
  refused(run(6, Dir("save"), Dir("save/step-00000002")),
          {Dir("save") + " has step-00000004", "beyond step 2"});
  refused(run(6, Dir("save"), ""), {"step-00000004, a checkpoint of another training"});
  ASSERT_TRUE(run(2, Dir("third"), "").ok());
  refused(run(6, Dir("third"), Dir("save")), {"another training"});
  EXPECT_TRUE(run(6, Dir("new"), Dir("save/step-00000002/")).ok());
  EXPECT_TRUE(fs::exists(Dir("new/step-00000004")));
  EXPECT_TRUE(run(6, Dir("./save"), Dir("save")).ok());
  EXPECT_TRUE(fs::exists(Dir("save/step-00000006")));
  const absl::Status beyond = run(5, Dir("new2"), Dir("save"));
  EXPECT_THAT(std::string(beyond.message()), HasSubstr("it is of step 6, beyond the 5 steps"));
}

// Later steps of other trainings stay, and one that is saved again later is the same training.
TEST_F(TrainResume, SavingDropsOnlyStepsBelowAndATrainerRunsTwice) {
  Linear model(2, 2);
  Materialize(model);
  AdamW optimizer(model.NamedParameters());
  for (const int64_t step : {1, 2, 9, 3}) {
    ASSERT_TRUE(SaveCheckpoint(Dir("s"), model, optimizer, {.step = step}, {.keep = 2}).ok());
  }
  std::vector<std::string> names;
  for (const auto& e : fs::directory_iterator(Dir("s"))) names.push_back(e.path().filename());
  EXPECT_THAT(names,
              ::testing::UnorderedElementsAre("step-00000002", "step-00000003", "step-00000009"));
  bool fails = true;
  TrainerOptions o = {.steps = 4, .save = Dir("twice"), .save_every = 1};
  o.loss = [&](Module& m, const TokenBatch& b) {
    if (b.ids.numel() > 0 && fails && fs::exists(Dir("twice/step-00000002"))) {
      Throw(absl::UnavailableError("not now"));
    }
    return NextTokenLoss(m(b.ids), b.targets);
  };
  Training t(Dir("text"), {}, std::move(o));
  EXPECT_THAT(testing::MessageOf([&] { t.trainer->Run().IgnoreError(); }), HasSubstr("not now"));
  fails = false;
  EXPECT_TRUE(t.trainer->Run().ok());
  EXPECT_EQ(t.losses.size(), 4u);
}

// Streams besides the default one, each rank its own, go on as well, and a step that fails or an
// evaluation moves none.
TEST_F(TrainResume, NamedStreamsGoOnWhereTheyWere) {
  const Setting s = {.dp = 2};
  const absl::Status status = OnRanks(s, [&]() -> absl::Status {
    const int64_t rank = RankContext::Current().rank();
    const auto options = [&](RngTracker* tracker, int64_t steps) {
      TrainerOptions o = {.steps = steps, .save = Dir("save"), .streams = tracker};
      o.loss = [tracker](Module& m, const TokenBatch& b) {
        const RngTracker::Fork fork(*tracker, "own");
        return NextTokenLoss(m(b.ids), b.targets) * (1 + rand({1}).Item());
      };
      return o;
    };
    RngTracker whole_streams, begun_streams, rest_streams, others;
    for (RngTracker* t : {&whole_streams, &begun_streams}) {
      DT_RETURN_IF_ERROR(t->Add("own", 100));
      DT_RETURN_IF_ERROR(t->Add("unused", 200 + rank));
    }
    for (RngTracker* t : {&rest_streams}) {
      DT_RETURN_IF_ERROR(t->Add("own", 7));
      DT_RETURN_IF_ERROR(t->Add("unused", 8));
    }
    DT_RETURN_IF_ERROR(others.Add("own", 7));
    TrainerOptions unsaved = options(&whole_streams, 4);
    unsaved.save = "";
    Training whole(Dir("text"), s, std::move(unsaved));
    DT_RETURN_IF_ERROR(whole.trainer->Run());
    TrainerOptions half = options(&begun_streams, 4);
    std::atomic<bool> stop{false};
    half.stop = &stop;
    Training begun(Dir("text"), s, std::move(half));
    stop = true;  // after the first step
    DT_RETURN_IF_ERROR(begun.trainer->Run());
    Training wrong(Dir("text"), s, options(&others, 4));
    EXPECT_THAT(std::string(wrong.trainer->Resume(Dir("save")).message()), HasSubstr("unused"));
    Training rest(Dir("text"), s, options(&rest_streams, 4));
    DT_RETURN_IF_ERROR(rest.trainer->Resume(Dir("save")));
    EXPECT_EQ(rest_streams.GetStates(), begun_streams.GetStates());
    DT_RETURN_IF_ERROR(rest.trainer->Run());
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 1, whole.losses.end()));
    EXPECT_EQ(rest_streams.GetStates(), whole_streams.GetStates());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// All weights have the same shapes with another number of heads: only the notes tell.
TEST_F(TrainResume, AnotherModelOfTheSameShapesIsRefusedAndOtherSettingsAreTold) {
  Training saved(Dir("text"), {},
                 {.steps = 2,
                  .save = Dir("save"),
                  .model = {{"heads", "3"}, {"layers", "2"}},
                  .settings = {{"lr", "0.01"}, {"batch", "6"}}});
  ASSERT_TRUE(saved.trainer->Run().ok());
  Training other(Dir("text"), {}, {.steps = 4, .model = {{"heads", "6"}, {"layers", "2"}}});
  const testing::NamedValues before = other.All();
  const absl::Status refused = other.trainer->Resume(Dir("save"));
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("it is of another model: heads was 3, is 6"));
  EXPECT_TRUE(other.All() == before);
  Training same(Dir("text"), {},
                {.steps = 4, .model = {{"heads", "3"}}, .settings = {{"lr", "1"}, {"batch", "6"}}});
  ASSERT_TRUE(same.trainer->Resume(Dir("save")).ok());
  EXPECT_EQ(same.trainer->resumed_from(),
            Dir("save/step-00000002") + ", with other settings: lr was 0.01, is 1");
}

// What rank 0 alone cannot do is everybody's error, and nobody waits.
TEST_F(TrainResume, NotesThatAreNoTextAreRefusedOnAllRanks) {
  const absl::Status status = OnRanks({.dp = 2}, [&]() -> absl::Status {
    Linear model(2, 2);
    Materialize(model);
    AdamW optimizer(model.NamedParameters());
    const CheckpointInfo info = {.step = 1, .notes = {{"config", "path = /data/caf\xE9"}}};
    const absl::Status saved = SaveCheckpoint(Dir("s"), model, optimizer, info).status();
    EXPECT_EQ(saved.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(saved.message()), HasSubstr("the note \"config\" is not UTF-8"));
    std::vector<NamedParameter> named = model.NamedParameters();
    named[0].fqn = "caf\xE9";
    SGD sgd(named, {.momentum = 0.9});
    sum(model(ones({1, 2}))).Backward();
    sgd.Step();
    EXPECT_THAT(
        SaveCheckpoint(Dir("s"), model, sgd, {.step = 1}).status().ToString(),
        ::testing::AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("caf\\xe9"), HasSubstr("UTF-8")));
    return SaveCheckpoint(Dir("s"), model, optimizer, {.step = 2}).status();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(fs::exists(Dir("s/step-00000001.partial")));
  EXPECT_TRUE(fs::exists(Dir("s/step-00000002/checkpoint.json")));
}

TEST_F(TrainResume, AFolderIsReplacedAlsoWhereNamesCannotBeExchanged) {
  for (const bool exchange : {true, false}) {
    for (const char* name : {"new", "old"}) {
      fs::create_directory(Dir(name));
      std::ofstream(Dir(name) + "/file") << name;
    }
    ASSERT_TRUE(internal::PutFolder(Dir("new"), Dir("old"), exchange).ok());
    EXPECT_EQ(*ReadFile(Dir("old/file")), "new");
    EXPECT_FALSE(fs::exists(Dir("old.old.partial")));
    EXPECT_EQ(fs::exists(Dir("new")), exchange);
    EXPECT_FALSE(internal::PutFolder(Dir("nothing"), Dir("old"), exchange).ok());
    EXPECT_EQ(*ReadFile(Dir("old/file")), "new");
    fs::remove_all(Dir("old"));
    fs::remove_all(Dir("new"));
  }
}

// --- the loop itself ---

// Data, random numbers and gradients are those before the step, so the next Run begins with it.
TEST_F(TrainResume, AStepThatFailsIsUndone) {
  Training plain(Dir("text"), {}, {.steps = 3, .microbatches = 2});
  ManualSeed(1);
  ASSERT_TRUE(plain.trainer->Run().ok());
  for (const bool throws : {true, false}) {
    int calls = 0;
    TrainerOptions o = {.steps = 3, .microbatches = 2};
    o.loss = [&](Module& m, const TokenBatch& b) {
      const DTensor loss = NextTokenLoss(m(b.ids), b.targets);
      if (++calls != 4) return loss;  // the second half of the second step
      if (throws) Throw(absl::UnavailableError("a bad token"));
      return loss * NAN;
    };
    Training run(Dir("text"), {}, std::move(o));
    ManualSeed(1);
    if (throws) {
      EXPECT_THAT(testing::MessageOf([&] { run.trainer->Run().IgnoreError(); }),
                  HasSubstr("a bad token"));
    } else {
      EXPECT_THAT(std::string(run.trainer->Run().message()), HasSubstr("nan at step 2"));
    }
    for (Parameter* p : run.model->Parameters()) EXPECT_FALSE(p->tensor().grad().defined());
    ASSERT_TRUE(run.trainer->Run().ok());
    EXPECT_EQ(run.losses, plain.losses);
    EXPECT_TRUE(run.All() == plain.All());
  }
}

TEST_F(TrainResume, EvaluatingTakesNoMoreMemoryThanAStepAndLeavesModesAlone) {
  TrainerOptions o = {.steps = 1, .microbatches = 6, .eval_batches = 2};
  Training source(Dir("text"), {}, {.steps = 1});
  o.eval = std::make_shared<const TokenSampler>(*source.data);
  bool throws = false;
  o.loss = [&](Module& m, const TokenBatch& b) {
    const DTensor loss = NextTokenLoss(m(b.ids), b.targets);
    if (throws) Throw(absl::UnavailableError("no loss"));
    return loss;
  };
  Training run(Dir("text"), {}, std::move(o));
  const auto& allocator = RankContext::Current().device_allocator();
  const auto peak_of = [&](const auto& what) {
    allocator->ResetPeak();
    const int64_t before = allocator->stats().in_use_bytes;
    what();
    return allocator->stats().peak_bytes - before;
  };
  // One sequence at a time takes less than six together.
  const int64_t parts = peak_of([&] { ASSERT_TRUE(run.trainer->Evaluate().ok()); });
  TrainerOptions whole_options = {.steps = 1, .eval_batches = 2};
  whole_options.eval = std::make_shared<const TokenSampler>(*source.data);
  Training whole(Dir("text"), {}, std::move(whole_options));
  const int64_t together = peak_of([&] { ASSERT_TRUE(whole.trainer->Evaluate().ok()); });
  EXPECT_LT(2 * parts, together);
  // One module was frozen by the user, and stays so; others train on.
  Module* const frozen = run.model->FindModule("blocks.0");
  frozen->Train(false);
  const Generator random = DefaultGenerator();
  ASSERT_TRUE(run.trainer->Evaluate().ok());
  throws = true;
  EXPECT_THAT(testing::MessageOf([&] { run.trainer->Evaluate().IgnoreError(); }),
              HasSubstr("no loss"));
  for (const NamedModule& m : run.model->NamedModules()) {
    const bool below = m.fqn == "blocks.0" || m.fqn.rfind("blocks.0.", 0) == 0;
    EXPECT_EQ(m.module->training(), !below) << m.fqn;
  }
  EXPECT_EQ(DefaultGenerator().State(), random.State());
  for (const TrainerOptions& bad : {TrainerOptions{.eval_batches = 0}, {.steps = -1}})
    EXPECT_EQ(Trainer::Create(*run.model, *run.optimizer, *run.data, bad).status().code(),
              absl::StatusCode::kInvalidArgument);
}

TEST_F(TrainResume, MicrobatchesAreOneBatch) {
  const auto losses = [&](int64_t microbatches) {
    std::vector<double> all;
    const Setting s = {.dp = 3, .tp = 1, .dtype = DType::kF64, .dropout = 0};
    const absl::Status status = OnRanks(s, [&]() -> absl::Status {
      Training run(Dir("text"), s, {.steps = 4, .microbatches = microbatches});
      DT_RETURN_IF_ERROR(run.trainer->Run());
      if (RankContext::Current().rank() == 0) all = run.losses;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    return all;
  };
  const std::vector<double> one = losses(1), two = losses(2);
  ASSERT_EQ(one.size(), 4u);
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(one[i], two.at(i), 1e-10);
  EXPECT_LT(one.back(), one.front());
}

TEST_F(TrainResume, EvaluatingChangesNothingAndIsOfAllData) {
  Training plain(Dir("text"), {}, {.steps = 4}), evaluated(Dir("text"), {}, {.steps = 4});
  ManualSeed(1);
  ASSERT_TRUE(plain.trainer->Run().ok());
  TrainerOptions o = {.steps = 4, .eval_every = 1, .eval_batches = 3, .log = Dir("log")};
  o.eval = std::make_shared<const TokenSampler>(*evaluated.data);
  Training with(Dir("text"), {}, std::move(o));
  ManualSeed(1);
  ASSERT_TRUE(with.trainer->Run().ok());
  EXPECT_EQ(with.losses, plain.losses);
  EXPECT_TRUE(with.model->training());
  // The mean over the same batches without dropout, by hand.
  const double got = *with.trainer->Evaluate();
  TokenSampler data = *evaluated.data;
  with.model->Train(false);
  double sum = 0;
  for (int i = 0; i < 3; ++i) {
    const TokenBatch b = *data.Next(6, DeviceMesh::Self(), {});
    sum += NextTokenLoss((*with.model)(b.ids), b.targets).Item();
  }
  EXPECT_DOUBLE_EQ(got, sum / 3);
  std::ifstream log(Dir("log"));
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(log, line);) lines.push_back(nlohmann::json::parse(line));
  ASSERT_EQ(lines.size(), 8u);
  EXPECT_EQ(lines[0].at("step"), 1);
  EXPECT_EQ(lines[0].at("loss"), with.losses[0]);
  for (const char* key : {"grad_norm", "lr", "tokens_per_s", "flops_per_s", "peak_bytes",
                          "comm_share", "skew_seconds"}) {
    EXPECT_TRUE(lines[0].at(key).is_number()) << key;
  }
  EXPECT_EQ(lines[7].at("eval_loss"), got);
}

TEST_F(TrainResume, StopsSavesAndGoesOn) {
  std::atomic<bool> stop{false};
  const Setting s = {.dp = 2};
  const absl::Status status = OnRanks(s, [&]() -> absl::Status {
    Training whole(Dir("text"), s, {.steps = 5});
    DT_RETURN_IF_ERROR(whole.trainer->Run());
    stop = true;
    Training run(Dir("text"), s, {.steps = 5, .save = Dir("save"), .stop = &stop});
    DT_RETURN_IF_ERROR(run.trainer->Run());
    EXPECT_TRUE(run.trainer->stopped());
    EXPECT_EQ(run.trainer->step(), 1);
    Training rest(Dir("text"), s, {.steps = 5});
    DT_RETURN_IF_ERROR(rest.trainer->Resume(Dir("save")));
    DT_RETURN_IF_ERROR(rest.trainer->Run());
    EXPECT_TRUE(rest.All() == whole.All());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(TrainResume, CopiesThatDifferAreNamedWithTheirRanks) {
  const Setting s = {.dp = 4};
  const absl::Status status = OnRanks(s, [&]() -> absl::Status {
    Training run(Dir("text"), s, {.steps = 2, .check_every = 1});
    DT_RETURN_IF_ERROR(run.trainer->Run());
    const int64_t rank = RankContext::Current().rank();
    Parameter* bias = run.model->FindParameter("blocks.1.mlp.down.bias");
    const DTensor mine = full(bias->shape(), rank == 2 ? 1 : 0, {.dtype = DType::kF32});
    bias->Set(FromLocal(mine, bias->mesh(), bias->placements(), {.shape = bias->shape()}));
    const absl::Status found = CheckCopies(*run.model, *run.optimizer);
    EXPECT_EQ(found.message(),
              "copies differ: blocks.1.mlp.down.bias on rank 2 is not that of rank 0");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(TrainResume, NumbersThatAreNoneNameStepAndParameter) {
  Training run(Dir("text"), {}, {.steps = 3, .max_norm = std::numeric_limits<double>::infinity()});
  const DTensor& w = run.model->FindParameter("blocks.1.mlp.down.weight")->tensor();
  run.model->FindParameter("blocks.1.mlp.down.weight")->Set(full(w.shape(), NAN));
  EXPECT_THAT(std::string(run.trainer->Run().message()), HasSubstr("the loss is nan at step 1"));
  TrainerOptions o = {.steps = 3};
  Module* seen = nullptr;
  o.loss = [&](Module& m, const TokenBatch& b) {
    seen = &m;
    const DTensor& bias = m.FindParameter("norm.bias")->tensor();
    // d/db sqrt(b^2) at b = 0 is 0/0, while the value is 0.
    return NextTokenLoss(m(b.ids), b.targets) + sum(sqrt(bias * bias));
  };
  Training other(Dir("text"), {}, std::move(o));
  EXPECT_THAT(std::string(other.trainer->Run().message()),
              HasSubstr("the gradient of norm.bias is not finite at step 1"));
  EXPECT_NE(seen, nullptr);
}

}  // namespace
}  // namespace dtensor::train_resume_test
