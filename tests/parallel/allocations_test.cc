// Memory: what grows with the data comes from the rank's allocator, where limits and reports see
// it; and a step in which any one allocation fails ends in an error on every rank, with nothing
// left behind.
#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/thin.h"

namespace {

// The largest single piece of memory that the thread took from operator new since it was reset, and
// all of them.
thread_local size_t largest_new = 0, total_new = 0;
void Count(size_t bytes) {
  largest_new = std::max(largest_new, bytes);
  total_new += bytes;
}

void* Take(size_t bytes, size_t alignment) {
  Count(bytes);
  void* p = alignment <= alignof(std::max_align_t)
                ? std::malloc(bytes)
                : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

void* operator new(size_t bytes) { return Take(bytes, 0); }
void* operator new[](size_t bytes) { return Take(bytes, 0); }
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  Count(bytes);
  return std::malloc(bytes);
}
void* operator new(size_t bytes, std::align_val_t a) { return Take(bytes, static_cast<size_t>(a)); }
// g++ sees one half of a pair inlined.
#pragma GCC diagnostic ignored "-Wmismatched-new-delete"
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete[](void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, const std::nothrow_t&) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace dtensor {
namespace {

// --- what grows with the data --------------------------------------------------------------------

// Matrices of side x side: every case is run at both sizes.
constexpr int64_t kSide = 256, kSmallSide = 128;
thread_local int64_t side = kSide;
constexpr size_t kAllowed = kSide * kSide * 4 / 16;  // bytes: a sixteenth of a float32 matrix

struct Case {
  std::string name;
  std::function<void()> run;
};

DTensor Matrix(DType dtype, const DeviceMesh& mesh, const Placements& placements) {
  DTensor x = full({side, side}, 1, {dtype, mesh, placements});
  if (IsFloating(dtype)) uniform_(x, 0.1, 1);
  return x;
}

DTensor Leaf(DTensor x) {
  if (IsFloating(x.dtype())) x.RequiresGrad();
  return x;
}

void BackwardOf(const DTensor& y) {
  if (y.requires_grad()) sum(to(y, DType::kF32)).Backward();
}

// Ops that take what is not contiguous, narrow or of another type, where copies are tempting.
std::vector<Case> OpCases(const DeviceMesh& mesh, const Placements& p) {
  std::vector<Case> cases;
  for (const DType t : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16, DType::kI64,
                        DType::kI32, DType::kU8, DType::kBool}) {
    const auto name = [t](const char* op) {
      return absl::StrCat(op, " ", absl::string_view(Name(t).data(), Name(t).size()));
    };
    const auto x = [=] { return Leaf(Matrix(t, mesh, p)); };
    const auto add = [&](const char* op, std::function<DTensor(const DTensor&)> fn) {
      cases.push_back({name(op), [=] { BackwardOf(fn(x())); }});
    };
    add("add", [](const DTensor& a) { return a + transpose(a, 0, 1); });
    add("sum", [](const DTensor& a) { return sum(a, {0}); });
    add("amax", [](const DTensor& a) { return amax(a, {1}); });
    add("cat", [](const DTensor& a) { return cat({a, a}, 0); });
    add("reshape", [](const DTensor& a) { return reshape(transpose(a, 0, 1), {side * side}); });
    add("to", [](const DTensor& a) { return to(a, DType::kF64); });

    add("einsum", [](const DTensor& a) {
      const DTensor operands[] = {a, reshape(a, {side, 4, side / 4})};
      return einsum("ij,jkl->lik", operands);
    });
    const auto ids = [](const DTensor& a) {  // of rows, every one once
      return remainder(mul(arange(0, side, 1, {DType::kI64, a.mesh(), {}}), 7), side);
    };
    const auto places = [ids](const DTensor& a) {  // of every element
      return expand(unsqueeze(ids(a), 0), {side, side});
    };
    add("gather", [=](const DTensor& a) { return gather(a, 1, places(a)); });
    add("index_select", [=](const DTensor& a) { return index_select(a, 0, ids(a)); });
    // Elements that are cut by columns too are, flat, segments of every row, which placements list.
    if (mesh.ndim() < 2) add("take", [=](const DTensor& a) { return take(a, places(a)); });
    add("scatter", [=](const DTensor& a) { return scatter(a, 1, places(a), a); });
    add("scatter_add", [=](const DTensor& a) { return scatter_add(a, 0, places(a), a); });
    add("index_add", [=](const DTensor& a) { return index_add(a, 0, ids(a), a); });
    // The index is cut as the dim is: ranks ask each other for what they name.
    const auto cut = [](const DTensor& index, const DTensor& a) {
      return index.Redistribute(Placements(a.placements().begin(), a.placements().end()));
    };
    const auto rows = [=](const DTensor& a) {
      Placements placements(a.placements().begin(), a.placements().end());
      for (size_t m = 1; m < placements.size(); ++m) placements[m] = Replicate();
      return ids(a).Redistribute(placements);
    };
    add("gather by owners", [=](const DTensor& a) { return gather(a, 0, cut(places(a), a)); });
    add("index_select by owners", [=](const DTensor& a) { return index_select(a, 0, rows(a)); });
    add("scatter by owners", [=](const DTensor& a) { return scatter(a, 0, cut(places(a), a), a); });
    add("index_add by owners", [=](const DTensor& a) { return index_add(a, 0, rows(a), a); });
    if (mesh.ndim() < 2) {
      add("repeat_interleave", [=](const DTensor& a) {
        const DTensor once = ones({side * side}, {.dtype = DType::kI64, .mesh = a.mesh()});
        return repeat_interleave(flatten(a), once, 0);
      });
      add("circular pad",
          [](const DTensor& a) { return pad(flatten(a), {side, side}, "circular"); });
      add("unfold", [](const DTensor& a) { return unfold(flatten(a), 0, 4, 2); });
    }
    add("kthvalue of columns", [](const DTensor& a) { return kthvalue(a, 3, 0)[0]; });
    add("median of columns", [](const DTensor& a) { return median(a, 0)[0]; });
    add("sort", [](const DTensor& a) { return sort(a, 1)[0]; });
    add("sort of columns", [](const DTensor& a) { return sort(a, 0)[0]; });
    add("topk", [](const DTensor& a) { return topk(a, 16, 0)[0]; });
    add("median", [](const DTensor& a) { return median(a, 1)[0]; });
    if (t != DType::kBool) {
      add("cumsum", [](const DTensor& a) { return cumsum(a, 0); });
      add("cumprod", [](const DTensor& a) { return cumprod(a, 1); });
      add("cummax", [](const DTensor& a) { return cummax(a, 1)[0]; });
      add("scatter_reduce",
          [=](const DTensor& a) { return scatter_reduce(a, 1, places(a), a, "amax"); });
    }
    add("matmul", [](const DTensor& a) { return matmul(a, transpose(a, 0, 1)); });
    add("matmul of slices", [](const DTensor& a) {
      const DTensor half = slice(transpose(a, 0, 1), 0, 0, side, 2);
      return matmul(half, slice(a, 1, 0, side, 2));
    });
    if (!IsFloating(t)) continue;
    const auto images = [](const DTensor& a) { return reshape(a, {4, 4, side / 4, side / 4}); };
    add("conv", [=](const DTensor& a) {
      const DTensor w = reshape(slice(select(a, 0, 0), 0, 0, 36), {1, 4, 3, 3});
      return conv2d(images(a), expand(w, {4, 4, 3, 3}), {}, {1}, 1);
    });
    add("conv of steps", [=](const DTensor& a) {
      const DTensor w = reshape(slice(select(a, 0, 0), 0, 0, 72), {4, 2, 3, 3});
      return conv2d(images(a), w, {}, {2}, 1, {2}, 2);
    });
    add("conv_transpose", [=](const DTensor& a) {
      const DTensor w = reshape(slice(select(a, 0, 0), 0, 0, 64), {4, 4, 2, 2});
      return conv_transpose2d(images(a), w, {}, {2});
    });
    add("max_pool", [=](const DTensor& a) { return max_pool2d(images(a), {3}, {2}, {1}); });
    add("avg_pool", [=](const DTensor& a) { return avg_pool2d(images(a), {2}); });
    add("interpolate", [=](const DTensor& a) {
      return interpolate(images(a), {side / 2, side / 2}, {}, "bilinear", false);
    });
    add("logcumsumexp", [](const DTensor& a) { return logcumsumexp(a, 0); });
    add("logsumexp", [](const DTensor& a) { return logsumexp(a, {1}); });
    add("exp", [](const DTensor& a) { return exp(a); });
    add("gelu", [](const DTensor& a) { return gelu(a); });
    add("softmax", [](const DTensor& a) { return softmax(a, 1); });
    add("log_softmax", [](const DTensor& a) { return log_softmax(a, 1); });
    add("layer_norm", [](const DTensor& a) { return layer_norm(a, {side}); });
    add("rms_norm", [](const DTensor& a) { return rms_norm(a, {side}); });
    add("linear", [](const DTensor& a) { return linear(a, a, select(a, 0, 0)); });
    add("bmm", [](const DTensor& a) {
      const DTensor b = reshape(a, {4, side / 4, side});
      return bmm(b, transpose(b, 1, 2));
    });
    add("attention", [](const DTensor& a) {
      const DTensor q = reshape(a, {1, 4, side, side / 4});
      return scaled_dot_product_attention(q, q, q, {}, true);
    });
    add("cross_entropy", [](const DTensor& a) {
      return cross_entropy(a, zeros({side}, {.dtype = DType::kI64, .mesh = a.mesh()}));
    });
    add("embedding", [](const DTensor& a) {
      return embedding(zeros({4 * side}, {.dtype = DType::kI64, .mesh = a.mesh()}), a);
    });
    add("dropout", [](const DTensor& a) { return dropout(a, 0.5); });
    add("multinomial", [](const DTensor& a) { return multinomial(a.Detach(), 4); });
    add("multinomial with replacement",
        [](const DTensor& a) { return multinomial(a.Detach(), side, true); });
    add("normal_", [](const DTensor& a) {
      const DTensor turned = transpose(a.Detach(), 0, 1);
      normal_(turned);
      return turned;
    });
    add("bernoulli_", [](const DTensor& a) {
      bernoulli_(a.Detach(), a.Detach());
      return a;
    });
  }
  const Placements rows(static_cast<size_t>(mesh.ndim()), Shard(0));
  cases.push_back({"randperm", [=] { randperm(side * side, {DType::kI64, mesh, rows}); }});
  for (const DType t : {DType::kI64, DType::kF32}) {
    cases.push_back({"arange", [=] { arange(0, side * side, 1, {t, mesh, rows}); }});
    cases.push_back({"linspace", [=] { linspace(0, 9, side * side, {t, mesh, rows}); }});
  }
  return cases;
}

std::vector<Case> MoveCases(const DeviceMesh& mesh) {
  using Placing = std::function<Placements()>;  // of the side of the moment
  const auto segments = [] { return SegmentedShard(0, {side / 4, side / 2, side / 4}); };
  const auto flat = [](int64_t ranks) {  // of what each of so many has
    const int64_t half = side * side / ranks / 2;
    return FlatShard({half + 100, half - 100});
  };
  std::vector<Placing> all;
  const auto fixed = [&](const Placements& p) { all.push_back([p] { return p; }); };
  if (mesh.ndim() == 1) {
    for (const Placement& p :
         {Replicate(), Shard(0), Shard(1), Partial(), Partial(ReduceOp::kMax)}) {
      fixed({p});
    }
    all.push_back([=] { return Placements{segments()}; });
    all.push_back([=] { return Placements{flat(1)}; });
  } else {
    fixed({Replicate(), Replicate()});
    fixed({Shard(0), Replicate()});
    fixed({Shard(0), Shard(1)});
    fixed({Shard(0), Shard(0)});
    fixed({Shard(1), Shard(0)});
    fixed({Shard(0), Partial()});
    fixed({Partial(), Partial()});
    all.push_back([=] { return Placements{Shard(1), segments()}; });
    all.push_back([=] { return Placements{Shard(0), flat(2)}; });
  }
  std::vector<Case> cases;
  for (const DType t : {DType::kF32, DType::kBF16, DType::kU8}) {
    for (const Placing& from : all) {
      for (const Placing& to : all) {
        const std::string name = absl::StrCat(ToString(from()), " to ", ToString(to()));
        const auto x = [=] { return full({side, side}, 1, {t, mesh, {}}).Redistribute(from()); };
        cases.push_back({name, [=] { x().Redistribute(to()); }});
        cases.push_back(
            {name + ", async", [=] { x().Redistribute(to(), {.async = true}).local(); }});
        cases.push_back(
            {name + ", of a transposed one", [=] { transpose(x(), 0, 1).Redistribute(to()); }});
      }
    }
  }
  cases.push_back({"FromLocal with a check", [=] {
                     FromLocalOptions check;
                     check.run_check = true;
                     FromLocal(full({side, side}, 1.0, {}), mesh,
                               Placements(mesh.ndim(), Replicate()), check);
                   }});
  return cases;
}

std::vector<Case> StepCases(const DeviceMesh& mesh) {
  struct Net : Module {
    Linear &a, &b;
    Net() : a(AddChild<Linear>("a", side, side)), b(AddChild<Linear>("b", side, side)) {}
    Values Forward(const Values& in) override { return {b(relu(a(in[0])))}; }
  };
  Placements batch(static_cast<size_t>(mesh.ndim()), Replicate());
  if (mesh.ndim() == 2) batch[0] = Shard(0);
  std::vector<Case> cases;
  for (const bool adam : {false, true}) {
    cases.push_back({adam ? "AdamW" : "SGD", [=] {
                       Net net;
                       ThrowIfError(ParallelizeModule(
                           net, mesh, {{"a", ColwiseParallel()}, {"b", RowwiseParallel()}}));
                       Materialize(net);
                       std::unique_ptr<Optimizer> optimizer;
                       if (adam) {
                         optimizer = std::make_unique<AdamW>(net.NamedParameters());
                       } else {
                         optimizer = std::make_unique<SGD>(net.NamedParameters(),
                                                           SGDOptions{.momentum = 0.9});
                       }
                       for (int step = 0; step < 2; ++step) {
                         const DTensor x = Matrix(DType::kF32, mesh, batch);
                         mean(net(x)).Backward();
                         ClipGradNorm(net.NamedParameters(), 1.0);
                         optimizer->Step();
                         optimizer->ZeroGrad();
                       }
                     }});
  }
  return cases;
}

// Bytes in all for four times as much data, of twice as many rows: less than 64 for each more.
constexpr size_t kGrowth = 64 * (kSide - kSmallSide);

void RunCases(const std::vector<Case>& cases) {
  for (size_t i = 0; i < cases.size(); i += testing::Thin(5)) {
    const Case& c = cases[i];
    const auto total = [&](int64_t size) {
      side = size;
      c.run();  // tables and plans are made
      largest_new = total_new = 0;
      c.run();
      return total_new;
    };
    const size_t small = total(kSmallSide), largest_of_small = largest_new, large = total(kSide);
    // A piece of one size for any data may be larger (einsum in float64: 20 KiB).
    EXPECT_TRUE(largest_new < kAllowed || largest_new == largest_of_small)
        << c.name << ": " << largest_new << " bytes, " << largest_of_small << " of a quarter";
    EXPECT_LT(large, small + kGrowth) << c.name;
  }
}

TEST(OutsideTheAllocator, NothingGrowsWithTheDataOnOneRank) {
  RunCases(OpCases(DeviceMesh::Self(), {}));
}

TEST(OutsideTheAllocator, NothingGrowsWithTheDataOnTwoRanks) {
  for (const bool packed : {false, true}) {
    SpmdOptions options;
    if (packed) options.wrap = Packed();
    const absl::Status status = RunSpmd(
        2,
        [](RankContext&) {
          const DeviceMesh mesh({2}, {"tp"});
          RunCases(OpCases(mesh, {Shard(0)}));
          RunCases(MoveCases(mesh));
          RunCases(StepCases(mesh));
          return absl::OkStatus();
        },
        options);
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(OutsideTheAllocator, NothingGrowsWithTheDataOnTwoTimesTwoRanks) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    RunCases(OpCases(mesh, {Shard(0), Shard(1)}));
    RunCases(MoveCases(mesh));
    RunCases(StepCases(mesh));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(OutsideTheAllocator, AHugeProductIsAnErrorOfTheLimit) {
  const DTensor a = expand(full({1, 1}, 1.0, {}), {1 << 15, 1 << 14});
  const DTensor b = full({1 << 14, 1}, 1.0, {});
  CurrentAllocator()->SetLimit(CurrentAllocator()->stats().in_use_bytes + (1 << 24));
  const DTensor* inputs[] = {&a, &b};
  const absl::Status status = Dispatch(**OpRegistry::Find("matmul"), inputs).status();
  CurrentAllocator()->SetLimit(0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
}

// --- a failing allocation ------------------------------------------------------------------------

// Fails the allocation with a given number, once.
class FailingAllocator final : public Allocator {
 public:
  FailingAllocator() : Allocator(/*caches=*/false) {}
  void FailAt(int64_t number) { fail_at_ = number; }

 protected:
  MemoryBlock* Make(int size_class) override {
    if (++count_ == fail_at_) return nullptr;
    auto* const block = new MemoryBlock;
    block->data = std::aligned_alloc(64, static_cast<size_t>(SizeClassBytes(size_class)));
    return block;
  }
  void Unmake(MemoryBlock* block) override {
    std::free(block->data);
    delete block;
  }

 private:
  int64_t count_ = 0, fail_at_ = -1;
};

struct Outcome {
  absl::Status status;
  std::vector<absl::Status> ranks;
  int64_t first = 0, last = 0;  // allocations of the culprit before and after the step
  int64_t left = 0;             // bytes in use at the end, of all ranks
};

// A step of a small GPT on dp x 2 ranks, the batch cut over dp; allocation `number` of rank
// `culprit` fails.
Outcome Step(int64_t dp, int64_t culprit, int64_t number) {
  const int64_t ranks = 2 * dp;
  Outcome outcome;
  outcome.ranks.resize(ranks);
  std::vector<std::shared_ptr<FailingAllocator>> allocators(ranks);
  SpmdOptions options;
  options.timeout = absl::Seconds(60);
  outcome.status = RunSpmd(
      ranks,
      [&](RankContext& context) -> absl::Status {
        const int64_t rank = context.rank();
        const auto allocator = std::make_shared<FailingAllocator>();
        allocators[rank] = allocator;
        const ScopedAllocator scope(allocator);
        try {
          const DeviceMesh mesh({dp, 2}, {"dp", "tp"});
          GPT model({.vocab = 12, .seq = 4, .layers = 1, .hidden = 8, .heads = 2, .dropout = 0.1});
          DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(model.config())));
          Materialize(model);
          AdamW optimizer(model.NamedParameters());
          if (rank == culprit) {
            outcome.first = allocator->stats().allocations;
            if (number >= 0) allocator->FailAt(outcome.first + 1 + number);
          }
          const DTensor ids = zeros({2, 4}, {DType::kI64, mesh, {Shard(0), Replicate()}});
          const DTensor logits = model(ids);
          const DTensor pending = logits.Redistribute({Replicate(), Replicate()}, {.async = true});
          cross_entropy(reshape(logits, {8, 12}), reshape(ids, {8})).Backward();
          ClipGradNorm(model.NamedParameters(), 1.0);
          optimizer.Step();
          optimizer.ZeroGrad();
          pending.local();
          if (rank == culprit) outcome.last = allocator->stats().allocations;
          // A loss to read: where a peer that has nothing more to wait for learns of a failure.
          full({ranks}, 1.0, {.mesh = mesh, .placements = {Shard(0), Shard(0)}}).FullTensor();
        } catch (const Error& error) {
          outcome.ranks[rank] = error.status();
        }
        return outcome.ranks[rank];
      },
      options);
  for (const auto& allocator : allocators) outcome.left += allocator->stats().in_use_bytes;
  return outcome;
}

TEST(FailingAllocations, OfAStepEndInAnErrorOnEveryRank) {
  for (const int64_t dp : {1, 2}) {
    const int64_t ranks = 2 * dp;
    for (int64_t culprit = 0; culprit < ranks; culprit += ranks - 1) {
      const Outcome good = Step(dp, culprit, -1);
      ASSERT_TRUE(good.status.ok()) << good.status;
      EXPECT_EQ(good.left, 0);
      const int64_t allocations = good.last - good.first;
      EXPECT_GT(allocations, 100);
      for (int64_t number = 0; number < allocations; number += testing::Thin(7)) {
        SCOPED_TRACE(absl::StrCat("allocation ", number, " of rank ", culprit, " of ", ranks));
        const Outcome bad = Step(dp, culprit, number);
        EXPECT_FALSE(bad.status.ok());
        for (int64_t r = 0; r < ranks; ++r) EXPECT_FALSE(bad.ranks[r].ok()) << "rank " << r;
        EXPECT_EQ(bad.ranks[culprit].code(), absl::StatusCode::kResourceExhausted)
            << bad.ranks[culprit];
        EXPECT_EQ(bad.left, 0);
      }
    }
  }
}

}  // namespace
}  // namespace dtensor
