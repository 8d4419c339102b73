// What a training looks at before it saves.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "absl/strings/str_cat.h"
#include "dtensor/dtensor.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/tensor/status.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::train_checks_test {
namespace {

namespace fs = std::filesystem;

// Changes a bit of a rank's own part, behind everybody's back.
void FlipBit(const DTensor& tensor) {
  const Tensor local = tensor.Detach().local();
  const Tensor host = *(*local.ToHost()).Clone();  // a device's memory is not the host's
  static_cast<uint32_t*>(host.data())[3] ^= 1;
  const NoGrad no_grad;
  copy_(OnSelf(local), OnSelf(host));
}

// Rank 1 changes a bit of its copy of what `change` names, after step 2 of 3; saved after every
// step. `other`: what rank 1 has other options by. What Run returned.
absl::Status Train(const std::string& folder, int64_t dp, int64_t tp, const std::string& change,
                   const std::function<void(TrainerOptions*)>& other = nullptr) {
  const std::string text = folder + "/text";
  if (RankContext::Current().rank() == 0) {
    std::ofstream out(text + ".new");
    for (int i = 0; i < 60; ++i) out << "line " << i * i << " of a text\n";
    out.close();
    fs::rename(text + ".new", text);
  }
  DT_ASSIGN_OR_RETURN(Comm * world, RankContext::Current().WorldComm());
  DT_RETURN_IF_ERROR(world->Barrier().Wait());
  const GPTConfig config = {.vocab = 256, .seq = 8, .layers = 1, .hidden = 24, .heads = 4};
  GPT model(config);
  TrainerOptions o = {.steps = 3, .batch = 4, .mesh = testing::DpTp(dp, tp)};
  o.placements = {Shard(0), Replicate()};
  DT_RETURN_IF_ERROR(ParallelizeModule(model, o.mesh, GPTPlan(config)));
  Materialize(model);
  AdamW optimizer(model.NamedParameters(), AdamWOptions{});
  DT_ASSIGN_OR_RETURN(TokenFile file, TokenFile::Open(text));
  DT_ASSIGN_OR_RETURN(TokenSampler data, TokenSampler::Create(std::move(file), {.seq = 8}));
  if (other != nullptr && RankContext::Current().rank() == 1) other(&o);
  o.save = folder + "/save";
  o.save_every = 1;
  o.after_step = [&](const StepReport& report) -> absl::Status {
    if (report.step != 2 || RankContext::Current().rank() != 1) return absl::OkStatus();
    for (const auto& [name, value] : optimizer.GetStateDict()) {
      if (name == change) FlipBit(value);
    }
    if (Parameter* p = model.FindParameter(change)) FlipBit(p->tensor());
    return absl::OkStatus();
  };
  DT_ASSIGN_OR_RETURN(const std::unique_ptr<Trainer> trainer,
                      Trainer::Create(model, optimizer, data, std::move(o)));
  return trainer->Run();
}

TEST(TrainChecks, CopiesThatDifferAreNotSaved) {
  // A bias that all have; a weight of which tp has parts; a state of the optimizer.
  const std::pair<const char*, const char*> kChanges[] = {
      {"blocks.0.mlp.down.bias", "rank 1 is not that of rank 0"},
      {"blocks.0.mlp.up.weight", "rank 1 is not that of rank 0"},
      {"blocks.0.mlp.down.bias/exp_avg", "rank 1 is not that of rank 0"},
  };
  for (const auto& [name, ranks] : kChanges) {
    const testing::TempFolder folder;
    ::testing::internal::CaptureStderr();
    const absl::Status status =
        RunSpmd(2, [&, name = name](RankContext&) { return Train(folder.Path("."), 2, 1, name); });
    ::testing::internal::GetCapturedStderr();
    EXPECT_THAT(std::string(status.message()),
                ::testing::AllOf(::testing::HasSubstr("step 3 is not saved: copies differ: "),
                                 ::testing::HasSubstr(absl::StrCat(name, " on ", ranks))));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    // What was right is there, and nothing else.
    int checkpoints = 0;
    for (const auto& entry : fs::directory_iterator(folder.Path("save"))) {
      checkpoints += entry.is_directory();
      EXPECT_THAT(entry.path().filename().string(), ::testing::Not(::testing::HasSubstr("2")));
    }
    EXPECT_EQ(checkpoints, 1);
  }
}

// Before the first step: what they would train is no model.
TEST(TrainChecks, RanksOfOtherSettingsAreRefused) {
  const struct {
    const char* said;
    std::function<void(TrainerOptions*)> other;
  } kCases[] = {
      {"rank 1 has batch 8, rank 0 has 4", [](TrainerOptions* o) { o->batch = 8; }},
      {"rank 1 has lr 0.5, rank 0 has 0.001", [](TrainerOptions* o) { o->lr.peak = 0.5; }},
      {"rank 1 has steps 4, rank 0 has 3", [](TrainerOptions* o) { o->steps = 4; }},
      {"rank 1 has beta1 0.7, rank 0 has none",
       [](TrainerOptions* o) { o->settings["beta1"] = "0.7"; }},
      {"rank 1 has random seed 7, rank 0 has 0", [](TrainerOptions*) { ManualSeed(7); }},
  };
  for (const auto& c : kCases) {
    const testing::TempFolder folder;
    const absl::Status status = RunSpmd(2, [&](RankContext&) {
      ManualSeed(0);
      return Train(folder.path(), 2, 1, "", c.other);
    });
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(c.said));
    EXPECT_FALSE(fs::exists(folder.path() + "/save/step-00000001")) << c.said;
  }
}

TEST(TrainChecks, CopiesThatAgreeAre) {
  const testing::TempFolder folder;
  const absl::Status status =
      RunSpmd(4, [&](RankContext&) { return Train(folder.Path("."), 2, 2, "nothing"); });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_FALSE(fs::is_empty(folder.Path("save")));
}

}  // namespace
}  // namespace dtensor::train_checks_test
