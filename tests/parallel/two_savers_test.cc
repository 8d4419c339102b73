// Folders of checkpoints that are not ours alone: two programs save to one at a time, and who loses
// its unfinished checkpoint is told why; links out of it; files in the way.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/tensor/status.h"
#include "tests/common/temp_folder.h"

namespace dtensor::two_savers_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

// Rank 0 makes the folder and waits for rank 1, which first has a note to look through that takes
// it a tenth of a second. By then `meanwhile` was done to the folder.
absl::Status Save(const testing::TempFolder& dir,
                  const std::function<void(const fs::path&)>& meanwhile) {
  return RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    Linear model(8, 8);
    DT_RETURN_IF_ERROR(DistributeModule(model, mesh));
    Materialize(model);
    AdamW optimizer(model.NamedParameters());
    CheckpointInfo info = {.step = 3};
    if (rank.rank() == 0) return SaveCheckpoint(dir.path(), model, optimizer, info).status();
    info.notes["long"] = std::string(size_t{64} << 20, 'x');  // rank 0's notes are saved
    std::atomic<bool> ended{false};
    std::thread other([&] {
      const fs::path partial = dir / "step-00000003.partial";
      while (!fs::exists(partial / "optimizer.safetensors") && !ended) std::this_thread::yield();
      if (!ended) meanwhile(partial);
    });
    const absl::Status saved = SaveCheckpoint(dir.path(), model, optimizer, info).status();
    ended = true;
    other.join();
    return saved;
  });
}

// Ranks of one program that give other folders or steps.
TEST(TwoSavers, RanksThatSaveElsewhereAreNamed) {
  const testing::TempFolder dir;
  const auto save = [&](const std::string& below, int64_t step) {
    return std::string(RunSpmd(2, [&](RankContext& rank) -> absl::Status {
                         Linear model(8, 8);
                         DT_RETURN_IF_ERROR(DistributeModule(model, DeviceMesh({2}, {"dp"})));
                         Materialize(model);
                         AdamW optimizer(model.NamedParameters());
                         const bool first = rank.rank() == 0;
                         return SaveCheckpoint(dir.Path(first ? "a" : below), model, optimizer,
                                               {.step = first ? 3 : step})
                             .status();
                       }).message());
  };
  EXPECT_THAT(save("a", 4), HasSubstr("rank 1: "));
  EXPECT_THAT(save("a", 4),
              HasSubstr("this rank saves to " + dir.Path("a/step-00000004") + ", rank 0 to " +
                        dir.Path("a/step-00000003") + ": all ranks give one folder and one step"));
  EXPECT_THAT(save("b", 3), HasSubstr("this rank saves to " + dir.Path("b/step-00000003")));
  EXPECT_FALSE(fs::exists(dir.Path("a/step-00000003")));
}

TEST(TwoSavers, AreToldOfEachOther) {
  const testing::TempFolder dir;
  const auto told =
      AllOf(HasSubstr("cannot be written"), HasSubstr("another program saves to " + dir.path()));
  // As another one's Prepare does.
  EXPECT_THAT(std::string(Save(dir, [](const fs::path& p) { fs::remove_all(p); }).message()), told);
  // It saves the same step: the files are there, and they are not ours to name or to remove.
  const auto replace = [](const fs::path& p) {
    fs::copy(p, p.string() + ".copy");
    fs::remove_all(p);
    fs::rename(p.string() + ".copy", p);
  };
  EXPECT_THAT(std::string(Save(dir, replace).message()), told);
  EXPECT_TRUE(fs::exists(dir / "step-00000003.partial/optimizer.safetensors"));
  EXPECT_FALSE(fs::exists(dir / "step-00000003"));
  fs::remove_all(dir / "step-00000003.partial");
  EXPECT_TRUE(Save(dir, [](const fs::path&) {}).ok());
  EXPECT_TRUE(fs::exists(dir / "step-00000003/checkpoint.json"));
  EXPECT_FALSE(fs::exists(dir / "step-00000003.partial"));
}

absl::Status SaveAlone(const std::string& dir, int64_t step) {
  Linear model(2, 2);
  Materialize(model);
  SGD optimizer(model.NamedParameters());
  return SaveCheckpoint(dir, model, optimizer, {.step = step}).status();
}

// Somebody moves one to a larger disk and leaves a link, which later saves remove in its turn.
TEST(SavedFolders, WhatALinkLeadsToStays) {
  const testing::TempFolder dir, archive;
  ThrowIfError(SaveAlone(dir.path(), 10));
  fs::copy(dir / "step-00000010", archive / "ten", fs::copy_options::recursive);
  fs::remove_all(dir / "step-00000010");
  fs::create_directory_symlink(archive / "ten", dir / "step-00000010");
  for (const int64_t step : {20, 30, 40}) ThrowIfError(SaveAlone(dir.path(), step));
  EXPECT_FALSE(fs::exists(fs::symlink_status(dir / "step-00000010")));
  EXPECT_TRUE(fs::exists(archive / "ten/checkpoint.json"));
  Linear model(2, 2);
  Materialize(model);
  SGD optimizer(model.NamedParameters());
  EXPECT_EQ(ValueOrThrow(LoadCheckpoint((archive / "ten").string(), model, optimizer)).info.step,
            10);
}

TEST(SavedFolders, AFileWithTheNameOfAStepIsNotRemoved) {
  const testing::TempFolder dir;
  std::ofstream(dir / "step-00000008") << "mine";
  EXPECT_THAT(std::string(SaveAlone(dir.path(), 8).message()),
              AllOf(HasSubstr("step-00000008"), HasSubstr("Not a directory")));
  EXPECT_EQ(fs::file_size(dir / "step-00000008"), 4u);
}

TEST(SavedFolders, TheRankThatCannotWriteIsTheCulprit) {
  const testing::TempFolder dir;
  std::ofstream(dir / "file") << "x";
  const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    const absl::Status saved = SaveAlone(dir / "file/below", 1);
    EXPECT_EQ(CulpritOf(saved), 0) << saved;
    return saved;
  });
  EXPECT_EQ(CulpritOf(status), 0) << status;
}

}  // namespace
}  // namespace dtensor::two_savers_test
