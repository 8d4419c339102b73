// Checkpoints and comparisons of models whose parameters are on several meshes, of which each rank
// updates its own; and ranks that have or have updated different ones where they should not.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/io/checkpoint.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/check_copies.h"
#include "dtensor/tensor/status.h"
#include "tests/common/temp_folder.h"
#include "tests/parallel/support.h"

namespace dtensor::checkpoint_meshes_test {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string Message(const absl::Status& status) { return std::string(status.message()); }

// Parameters of these names, of four elements each.
class Bag : public Module {
 public:
  explicit Bag(const std::vector<std::string>& names, DType dtype = DType::kF32) {
    for (const std::string& name : names) AddParameter(name, {4}, Init::Zeros(), dtype);
  }

 protected:
  Values Forward(const Values& in) override { return in; }
};

// Two stages of two ranks each, something that all four have, and something that nobody updates. In
// a world of one rank all is on Self.
struct Job {
  Bag model;
  std::unique_ptr<AdamW> optimizer;

  Job(DType dtype, const StateLayoutFn& layout, int64_t seed)
      : model({"first", "second", "all", "rest"}, dtype) {
    if (RankContext::Current().world_size() > 1) {
      const auto on = [](const std::vector<int64_t>& ranks) {
        return ValueOrThrow(
            DeviceMesh::FromRanks({static_cast<int64_t>(ranks.size())}, ranks, {"dp"}));
      };
      model.FindParameter("first")->Place(on({0, 1}), {Shard(0)});
      model.FindParameter("second")->Place(on({2, 3}), {Replicate()});
      model.FindParameter("all")->Place(on({0, 1, 2, 3}), {Replicate()});
      model.FindParameter("rest")->Place(on({2, 3}), {Shard(0)});
    }
    Materialize(model);
    for (Parameter* p : model.Parameters()) {
      p->Set(FromVector(testing::Integers(4, ++seed), {4}, {.dtype = dtype}));
    }
    optimizer = std::make_unique<AdamW>(model.NamedParameters(), AdamWOptions{.lr = 0.125}, layout);
  }

  static bool IsHere(const DeviceMesh& mesh) {
    return mesh.is_self() || mesh.Contains(RankContext::Current().rank());
  }
  void Step() {
    for (const char* name : {"first", "second", "all"}) {
      const DTensor& t = model.FindParameter(name)->tensor();
      if (IsHere(t.mesh())) sum(square(t)).Backward();
    }
    optimizer->Step();
    optimizer->ZeroGrad();
  }
  // What this rank has a part of: parameters and states.
  std::map<std::string, std::vector<double>> Values() {
    StateDict all = optimizer->GetStateDict();
    for (const NamedParameter& p : model.NamedParameters()) {
      all.emplace_back(p.fqn, p.parameter->tensor().Detach());
    }
    std::map<std::string, std::vector<double>> values;
    for (const auto& [name, t] : all) {
      // How often an absent one was updated, whoever loaded it knows and others do not.
      const Parameter* of = model.FindParameter(name.substr(0, name.find('/')));
      if (IsHere(t.mesh()) && IsHere(of->mesh())) values[name] = t.ToVector<double>();
    }
    return values;
  }
};

TEST(CheckpointMeshes, EachRankUpdatesItsOwn) {
  for (const bool masters : {false, true}) {
    const testing::TempFolder folder;
    const DType dtype = masters ? DType::kBF16 : DType::kF32;
    const StateLayoutFn layout = masters ? FlatState("dp") : StateLayoutFn(LikeParameter);
    std::vector<std::map<std::string, std::vector<double>>> saved(4);
    const absl::Status status = RunSpmd(4, [&](RankContext& rank) -> absl::Status {
      Job job(dtype, layout, 1);
      DT_RETURN_IF_ERROR(CheckCopies(job.model, *job.optimizer));  // before the first update
      DT_RETURN_IF_ERROR(
          SaveCheckpoint(folder.path(), job.model, *job.optimizer, {.step = 0}).status());
      job.Step();
      job.Step();
      DT_RETURN_IF_ERROR(CheckCopies(job.model, *job.optimizer));
      DT_RETURN_IF_ERROR(
          SaveCheckpoint(folder.path(), job.model, *job.optimizer, {.step = 2}).status());
      saved[rank.rank()] = job.Values();
      Job other(dtype, layout, 5);
      other.Step();
      DT_RETURN_IF_ERROR(LoadCheckpoint(folder.path(), other.model, *other.optimizer).status());
      EXPECT_EQ(other.Values(), saved[rank.rank()]);
      job.Step();
      other.Step();
      EXPECT_EQ(other.Values(), job.Values());
      DT_RETURN_IF_ERROR(CheckCopies(other.model, *other.optimizer));
      // What was loaded is saved again as it was, with what was updated since.
      DT_RETURN_IF_ERROR(
          SaveCheckpoint(folder.path(), other.model, *other.optimizer, {.step = 3}).status());
      DT_RETURN_IF_ERROR(LoadCheckpoint(folder.path(), job.model, *job.optimizer).status());
      EXPECT_EQ(other.Values(), job.Values());
      // Those of the step before it and of this one are kept.
      return LoadCheckpoint(folder.Path("step-00000002"), job.model, *job.optimizer).status();
    });
    EXPECT_TRUE(status.ok()) << status;
    // And on one rank.
    std::map<std::string, std::vector<double>> whole;
    for (const auto& of_rank : saved) whole.insert(of_rank.begin(), of_rank.end());
    Job one(dtype, layout, 7);
    const auto loaded = LoadCheckpoint(folder.Path("step-00000002"), one.model, *one.optimizer);
    EXPECT_TRUE(loaded.ok()) << loaded.status();
    EXPECT_EQ(one.Values(), whole);
    EXPECT_EQ(whole.size(), masters ? 4u + 3 * 4 : 4u + 3 * 3);
  }
}

// On every rank the same error, and the checkpoint before stays.
TEST(CheckpointMeshes, RanksOfOtherModelsAreNamed) {
  const testing::TempFolder folder;
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const auto save = [&](const std::vector<std::string>& names, int64_t step, DType dtype) {
      Bag model(names, dtype);
      Materialize(model);
      SGD optimizer(model.NamedParameters(), {.momentum = 0.5});
      const absl::Status saved =
          SaveCheckpoint(folder.path(), model, optimizer, {.step = step}).status();
      return std::make_pair(saved, CheckCopies(model, optimizer));
    };
    const bool second = rank.rank() == 1;
    EXPECT_TRUE(save({"a"}, 1, DType::kF32).first.ok());
    for (const absl::Status& s : {save({second ? "b" : "a"}, 2, DType::kF32).first,
                                  save({second ? "b" : "a"}, 2, DType::kF32).second}) {
      EXPECT_EQ(s.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(Message(s), HasSubstr("ranks have different tensors: rank 0 has a, rank 1 has b; "
                                        "all need the same model"));
    }
    EXPECT_THAT(
        Message(save(second ? std::vector<std::string>{"a", "b"} : std::vector<std::string>{"a"}, 2,
                     DType::kF32)
                    .second),
        HasSubstr("rank 0 has no more, rank 1 has b"));
    EXPECT_THAT(Message(save({"a"}, 2, second ? DType::kF64 : DType::kF32).first),
                HasSubstr("rank 0 has a (float32[4]), rank 1 has a (float64[4])"));
    // Of lists that the caller makes.
    const DTensor t = ones({2});
    EXPECT_THAT(Message(CheckCopies({{second ? "y" : "x", t}})),
                HasSubstr("[check_copies] ranks have different tensors: rank 0 has x, rank 1"));
    Bag model({"a"});
    Materialize(model);
    SGD optimizer(model.NamedParameters(), {.momentum = 0.5});
    const auto loaded = LoadCheckpoint(folder.path(), model, optimizer);
    DT_RETURN_IF_ERROR(loaded.status());
    EXPECT_EQ(loaded->info.step, 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (const auto& entry : fs::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().filename(), "step-00000001");
  }
}

// One rank alone updates what both have: that is what is told, and by both.
TEST(CheckpointMeshes, UpdatesThatOneRankMadeAloneAreNamed) {
  const testing::TempFolder folder;
  const absl::Status status = RunSpmd(2, [&](RankContext& rank) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    for (const size_t alone : {1, 2, 3}) {
      std::vector<std::string> names = {"p0", "p1", "p2"};
      names.resize(alone);
      names.push_back("both");
      Bag model(names);
      for (Parameter* p : model.Parameters()) p->Place(mesh, {Replicate()});
      Materialize(model);
      SGD optimizer(model.NamedParameters(), {.lr = 0, .momentum = 0.5});
      for (const NamedParameter& p : model.NamedParameters()) {
        if (p.fqn != "both" && rank.rank() == 1) continue;
        DTensor(p.parameter->tensor()).SetGrad(ones({4}, {.mesh = mesh}));
      }
      optimizer.Step();
      const auto told = AllOf(HasSubstr("p0 was updated 1 times on rank 0, and 0 times on rank 1"),
                              HasSubstr("step alike"));
      const absl::Status copies = CheckCopies(model, optimizer);
      EXPECT_THAT(Message(copies), told);
      EXPECT_EQ(copies.code(), absl::StatusCode::kFailedPrecondition);
      const absl::Status saved =
          SaveCheckpoint(folder.path(), model, optimizer, {.step = 1}).status();
      EXPECT_THAT(Message(saved), told);
      EXPECT_EQ(saved.code(), absl::StatusCode::kFailedPrecondition);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

}  // namespace
}  // namespace dtensor::checkpoint_meshes_test
