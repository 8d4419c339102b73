// A training step on the CUDA device of which any one allocation fails: an error that says what
// could not be had, on every rank, nothing left behind, and the next step works.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/device.h"
#include "tests/common/thin.h"

namespace dtensor {
namespace {

using ::testing::HasSubstr;

constexpr GPTConfig kConfig = {
    .vocab = 12, .seq = 4, .layers = 1, .hidden = 8, .heads = 2, .dropout = 0.1};
constexpr int kOutOfMemory = 2;  // cudaErrorMemoryAllocation

// As in tests/cusim/runtime.h. Null where CUDA's runtime is another.
using Fail = void (*)(const char* call, uint64_t n, int error);
Fail FindFail() {
  void* runtime = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  return runtime == nullptr ? nullptr : reinterpret_cast<Fail>(dlsym(runtime, "cusim_fail"));
}

// Asks the device for every block by itself, so that each can be refused. Can refuse one too.
class EachByItself final : public Allocator {
 public:
  explicit EachByItself(std::shared_ptr<PhysicalDevice> device)
      : Allocator(/*caches=*/false), device_(std::move(device)) {}
  void RefuseAt(int64_t number) { refuse_at_ = number; }

 protected:
  MemoryBlock* Make(int size_class) override {
    void* memory = nullptr;
    if (++made_ == refuse_at_) return nullptr;
    if (device_->table().segment(device_->handle(), SizeClassBytes(size_class), &memory) != 0) {
      return nullptr;
    }
    auto* const block = new MemoryBlock;
    block->data = memory;
    return block;
  }
  void Unmake(MemoryBlock* block) override {
    EXPECT_EQ(device_->table().segment_free(device_->handle(), block->data), 0);
    delete block;
  }
  absl::string_view where() const override { return " on cuda"; }

 private:
  const std::shared_ptr<PhysicalDevice> device_;
  int64_t made_ = 0, refuse_at_ = -1;
};

// For a scope the rank's memory comes from one such.
class FromTheDevice {
 public:
  FromTheDevice()
      : device_(*ValueOrThrow(RankDevices::Current().Get(DeviceType::kCuda))),
        allocator_(std::make_shared<EachByItself>(device_.device())),
        outer_(device_.ExchangeMemory(allocator_)) {}
  ~FromTheDevice() { device_.ExchangeMemory(outer_); }
  EachByItself& operator*() const { return *allocator_; }
  EachByItself* operator->() const { return allocator_.get(); }

 private:
  RankDevice& device_;
  const std::shared_ptr<EachByItself> allocator_;
  const std::shared_ptr<Allocator> outer_;
};

struct Training {
  GPT model;
  std::unique_ptr<AdamW> optimizer;
  DTensor ids;

  explicit Training(const DeviceMesh& mesh = DeviceMesh::Self()) : model(kConfig) {
    ManualSeed(7);
    if (!mesh.is_self()) ThrowIfError(ParallelizeModule(model, mesh, GPTPlan(kConfig)));
    Materialize(model);
    optimizer = std::make_unique<AdamW>(model.NamedParameters(), AdamWOptions{.lr = 0.01});
    ids = mesh.is_self() ? zeros({2, kConfig.seq}, {.dtype = DType::kI64})
                         : zeros({2, kConfig.seq}, {DType::kI64, mesh, {Shard(0), Replicate()}});
  }
  double Step() {
    optimizer->ZeroGrad();
    const DTensor logits = model(ids);
    const int64_t rows = 2 * kConfig.seq;
    const DTensor loss = cross_entropy(reshape(logits, {rows, kConfig.vocab}), flatten(ids, 0, 1));
    loss.Backward();
    ClipGradients(model.NamedParameters(), 1.0);
    optimizer->Step();
    return loss.Item();
  }
};

absl::Status OnCuda(int64_t ranks, const std::function<void(RankContext&)>& fn) {
  return RunSpmd(ranks,
                 [&](RankContext& rank) -> absl::Status {
                   fn(rank);
                   return absl::OkStatus();
                 },
                 {.timeout = absl::Seconds(60), .device = DeviceType::kCuda});
}

TEST(CudaAllocations, AnyOfAStepMayFailAndTheNextStepWorks) {
  const absl::Status status = OnCuda(1, [](RankContext&) {
    const FromTheDevice memory;
    const Fail fail = FindFail();
    if (fail == nullptr) GTEST_SKIP() << "only the stand-in fails when it is told to";
    Training training;
    training.Step();
    const int64_t kept = memory->stats().in_use_bytes, before = memory->stats().allocations;
    training.Step();
    const int64_t allocations = memory->stats().allocations - before;
    EXPECT_GT(allocations, 100);
    EXPECT_EQ(memory->stats().in_use_bytes, kept);
    for (int64_t n = 1; n <= allocations; ++n) {
      if (!testing::InTurn(static_cast<size_t>(n), 8)) continue;
      SCOPED_TRACE(absl::StrCat("allocation ", n, " of ", allocations));
      fail("cudaMalloc", static_cast<uint64_t>(n), kOutOfMemory);
      try {
        training.Step();
        ADD_FAILURE() << "the step took less memory";
      } catch (const Error& e) {
        EXPECT_EQ(e.status().code(), absl::StatusCode::kResourceExhausted) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("cannot allocate "));
        EXPECT_THAT(e.what(), HasSubstr(" bytes on cuda: the device has no more"));
      }
      fail("cudaMalloc", 0, 0);
      EXPECT_TRUE(std::isfinite(training.Step()));
      EXPECT_EQ(memory->stats().in_use_bytes, kept);
    }
    fail("cudaMalloc", static_cast<uint64_t>(allocations) + 1, kOutOfMemory);
    EXPECT_TRUE(std::isfinite(training.Step()));
    fail("cudaMalloc", 0, 0);
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What is left of a world in which allocation `number` of a step of the last rank was refused; -1:
// none.
struct Outcome {
  absl::Status status;
  std::vector<absl::Status> ranks;
  int64_t allocations = 0;  // of the last rank in the step
};
Outcome StepOf(int64_t ranks, int64_t number) {
  Outcome outcome;
  outcome.ranks.resize(static_cast<size_t>(ranks));
  outcome.status = OnCuda(ranks, [&](RankContext& rank) {
    const FromTheDevice memory;
    absl::Status& mine = outcome.ranks[static_cast<size_t>(rank.rank())];
    try {
      const DeviceMesh mesh({1, ranks}, {"dp", "tp"});
      Training training(mesh);
      const int64_t before = memory->stats().allocations;
      const bool last = rank.rank() == ranks - 1;
      if (last && number >= 0) memory->RefuseAt(before + 1 + number);
      training.Step();
      if (last) outcome.allocations = memory->stats().allocations - before;
      // Where a peer that has nothing more to wait for learns of a failure.
      full({ranks}, 1.0, {.mesh = mesh, .placements = {Replicate(), Shard(0)}}).FullTensor();
    } catch (const Error& e) {
      mine = e.status();
      throw;
    }
  });
  return outcome;
}

TEST(CudaAllocations, OfOneRankFailAllRanksAndTheNextWorldWorks) {
  const Outcome good = StepOf(2, -1);
  ASSERT_TRUE(good.status.ok()) << good.status;
  EXPECT_GT(good.allocations, 100);
  for (int64_t n = 0; n < good.allocations; ++n) {
    if (!testing::InTurn(static_cast<size_t>(n), 16)) continue;
    SCOPED_TRACE(absl::StrCat("allocation ", n, " of ", good.allocations));
    const Outcome bad = StepOf(2, n);
    for (const absl::Status& rank : bad.ranks) EXPECT_FALSE(rank.ok());
    EXPECT_EQ(bad.ranks[1].code(), absl::StatusCode::kResourceExhausted) << bad.ranks[1];
    EXPECT_THAT(std::string(bad.status.message()), HasSubstr("rank 1"));
    EXPECT_THAT(std::string(bad.status.message()), HasSubstr("the device has no more"));
  }
  const Outcome after = StepOf(2, -1);
  EXPECT_TRUE(after.status.ok()) << after.status;
}

}  // namespace
}  // namespace dtensor
