// What one rank alone meets: its peers learn its name at their next communication, long before the
// deadline, also where the program of that rank catches the error and goes on. Uniform errors end
// nothing.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/tensor/status.h"
#include "gtest/gtest.h"
#include "tests/common/watchdog.h"

namespace dtensor::rank_local_test {
namespace {

constexpr int64_t kCulprit = 1;
const absl::Duration kDeadline = absl::Seconds(30);

// One mesh dim of three ranks, or 2 x 2, where half of the ranks share no tp group with the
// culprit. Changed between worlds.
bool two_dims = false;
void OnBothMeshes(const std::function<void()>& test) {
  for (const bool both : {false, true}) {
    two_dims = both;
    SCOPED_TRACE(both ? "2 x 2" : "one mesh dim");
    test();
  }
  two_dims = false;
}
int64_t Ranks() { return two_dims ? 4 : 3; }
int64_t Rows() { return 2 * Ranks(); }
DeviceMesh Mesh() {
  return two_dims ? DeviceMesh({2, 2}, {"dp", "tp"}) : DeviceMesh({Ranks()}, {"tp"});
}
Comm* CommOfAll(RankContext& context) {
  std::vector<int> dims;
  for (int d = 0; d < Mesh().ndim(); ++d) dims.push_back(d);
  return ValueOrThrow(context.CommFor(Mesh(), dims));
}
Placements On(const Placement& p) {  // over every mesh dim
  return Placements(static_cast<size_t>(Mesh().ndim()), p);
}
TensorOptions Options(const Placement& p) { return {DType::kF32, Mesh(), On(p)}; }
DTensor Sharded(double value = 0.5) { return full({Rows(), 4}, value, Options(Shard(0))); }

DTensor Leaf() { return Sharded().RequiresGrad(); }
// The culprit's part has an index that is none.
DTensor Ids(bool culprit, const Placement& placement = Shard(0)) {
  const std::vector<int64_t> ids = {culprit ? 99 : 1, 2};
  return FromLocal(FromVector(ids, {2}), Mesh(), On(placement));
}

void Throws(const KernelCall&) { throw std::runtime_error("the kernel threw"); }
void ThrowsNumber(const KernelCall&) { throw 7; }
void HasNoMemory(const KernelCall&) { throw std::bad_alloc(); }
void Fails(const KernelCall& call) { call.workspace->Fail("the kernel said no"); }
void WantsMemory(const KernelCall& call) { call.workspace->Allocate(int64_t{1} << 46); }
void Copies(const KernelCall& call) { CopyRef(call.in[0], call.out[0]); }

// Ops whose kernel or gradient fails on the culprit only.
const OpDef& Faulty(const std::string& name, KernelFn kernel, VjpFn vjp = nullptr) {
  const auto found = OpRegistry::Find(name);
  if (found.ok()) return **found;
  RegisterKernel(name, DeviceType::kCpu, {kernel, kFloatDTypes, KernelLayout::kStrided});
  OpDef& op = Op(absl::StrCat(name, "(x)")).Factors("... -> ...");
  if (vjp != nullptr) op.Vjp(vjp);
  return **OpRegistry::Find(name);
}
bool IsCulprit() { return RankContext::Current().rank() == kCulprit; }
template <KernelFn kFault>
void OnCulprit(const KernelCall& call) {
  Copies(call);
  if (IsCulprit()) kFault(call);
}
void FaultyVjp(VjpCall& c) {
  if (IsCulprit()) throw std::runtime_error("the gradient threw");
  c.set(0, c.grad());
}

DTensor Run(const OpDef& op, const DTensor& x) {
  const DTensor* in[] = {&x};
  return Call1(op, in);
}

class Hooked : public Module {
 public:
  Hooked() { AddChild<Linear>("linear", 4, 4); }

 protected:
  Values Forward(const Values& in) override { return (*children()[0].second)(in); }
};

void OutOfMemory() {
  Allocator& allocator = *RankContext::Current().allocator();
  allocator.ReleaseCached();
  allocator.SetLimit(allocator.stats().in_use_bytes + 1);
}

struct Fault {
  std::string name;
  // What every rank does; the culprit fails in it. What all share is made before.
  std::function<void(bool culprit)> run;
  std::string words;         // of the culprit's error
  bool leaves_body = false;  // not an error of the library: it tells peers when the body ends
};

std::vector<Fault> Faults() {
  const OpDef& throws = Faulty("faulty_throws", OnCulprit<Throws>);
  const OpDef& number = Faulty("faulty_number", OnCulprit<ThrowsNumber>);
  const OpDef& fails = Faulty("faulty_fails", OnCulprit<Fails>);
  const OpDef& scratch = Faulty("faulty_scratch", OnCulprit<WantsMemory>);
  Faulty("faulty_memory", OnCulprit<HasNoMemory>);
  const OpDef& gradient = Faulty("faulty_gradient", Copies, FaultyVjp);
  return {
      {"BadId", [](bool c) { embedding(Ids(c), Sharded().Redistribute(On(Replicate()))); },
       "[embedding] "},
      {"BadIdOfAShardedTable", [](bool c) { embedding(Ids(c, Replicate()), Sharded()); },
       "[embedding] "},
      {"BadTarget", [](bool c) { nll_loss(Sharded(-1), Ids(c)); }, "target 99"},
      {"BadProbability",
       [](bool c) {
         const DTensor p = FromLocal(full({2}, c ? 7 : 0.5), Mesh(), On(Shard(0)));
         bernoulli(p);
       },
       "[bernoulli_] "},
      {"OutputMemory",
       [](bool c) {
         if (c) OutOfMemory();
         Sharded() * 2.0;
       },
       "cannot allocate"},
      {"FactoryMemory",
       [](bool c) {
         if (c) OutOfMemory();
         zeros({Rows(), 4}, Options(Shard(0)));
       },
       "[zeros] cannot allocate"},
      {"MemoryOfARedistribution",
       [](bool c) {
         const DTensor x = Sharded();
         if (c) OutOfMemory();
         x.Redistribute(On(Replicate()));
       },
       "[redistribute] cannot allocate"},
      {"MemoryOfAnImplicitMove",
       [](bool c) {
         const DTensor x = Sharded();
         if (c) OutOfMemory();
         softmax(x, 0);
       },
       "cannot allocate"},
      {"ScratchMemory", [op = &scratch](bool) { Run(*op, Sharded()); }, "[faulty_scratch] "},
      {"GradientMemory",
       [](bool c) {
         const DTensor w = Leaf();
         const DTensor loss = sum(w * w);
         if (c) OutOfMemory();
         loss.Backward();
       },
       "[backward"},
      {"KernelSaysNo", [op = &fails](bool) { Run(*op, Sharded()); },
       "[faulty_fails] the kernel said no"},
      {"KernelThrows", [op = &throws](bool) { Run(*op, Sharded()); },
       "[faulty_throws] the kernel threw"},
      {"KernelThrowsANumber", [op = &number](bool) { Run(*op, Sharded()); },
       "[faulty_number] unknown exception"},
      {"GradientThrows", [op = &gradient](bool) { sum(Run(*op, Leaf())).Backward(); },
       "[backward of faulty_gradient] the gradient threw"},
      {"CustomGradientThrows",
       [](bool c) {
         const DTensor x = Leaf();
         const Values y = CustomFunction(
             "mine", {x}, [&] { return Values{x * 1.0}; },
             [c](const Values& g) {
               if (c) throw std::bad_alloc();
               return g;
             });
         sum(y[0]).Backward();
       },
       "[backward of mine] out of memory"},
      {"BadLocalPart",
       [](bool c) {
         FromLocal(full({c ? 3 : 2, 4}, 1.0), Mesh(), On(Shard(0)), {.shape = {Rows(), 4}});
       },
       "[from_local] local shape [3, 4] on rank 1"},
      {"HookThrows",
       [](bool c) {
         Hooked module;
         Materialize(module);
         module.AddPostHook([c](Module&, const Values&, const Values& out) {
           if (c) throw std::runtime_error("the hook threw");
           return out;
         });
         module(full({2, 4}, 1.0));
       },
       "the hook threw", true},
      {"FileIsMissing",
       [](bool c) {
         if (!c) return;
         ThrowIfError(CostModel::FromFile("/nowhere/cost.json").status());
       },
       "/nowhere/cost.json", true},
      {"ProgramThrows",
       [](bool c) {
         if (c) throw std::runtime_error("boom");
       },
       "boom", true},
      {"ProgramGivesUp",
       [](bool c) {
         if (c) RankContext::Current().AbortAll(absl::DataLossError("bits rot"));
         if (c) Throw(absl::DataLossError("bits rot"));
       },
       "bits rot"},
      {"InPlaceMemory",
       [](bool c) {
         const DTensor x = Sharded(), y = full({Rows(), 4}, 1, Options(Shard(1)));
         if (c) OutOfMemory();
         add_(x, y);
       },
       "cannot allocate"},
      {"AnotherWorldsTensor",
       [foreign =
            full({Rows(), 4}, 1, {DType::kF32, DeviceMesh({1}, {"one"}), {Shard(0)}})](bool c) {
         if (c) Sharded() + foreign;
       },
       "belongs to another rank"},
      {"AnotherWorldsTensorIsRead",  // no op looks at it
       [foreign =
            full({Rows(), 4}, 1, {DType::kF32, DeviceMesh({1}, {"one"}), {Shard(0)}})](bool c) {
         if (c) static_cast<void>(foreign.Detach());
       },
       "belongs to another rank"},
  };
}

struct Seen {
  absl::Status own;    // of what ran
  absl::Status next;   // of the next communication
  double seconds = 0;  // from the culprit's call to the answer
};

using Clock = std::chrono::steady_clock;

// The culprit catches its error and stays: nothing but the library tells its peers.
void ExpectPeersToldAtOnce(const Fault& fault) {
  SCOPED_TRACE(fault.name);
  const Watchdog watchdog(fault.name, std::chrono::seconds(100));
  std::vector<Seen> seen(Ranks());
  std::atomic<Clock::rep> failed{0};  // when the culprit began
  const auto body = [&](RankContext& context) -> absl::Status {
    Seen& mine = seen[context.rank()];
    const bool culprit = context.rank() == kCulprit;
    Comm* const comm = CommOfAll(context);
    DT_RETURN_IF_ERROR(comm->Barrier().Wait());
    if (culprit) failed = Clock::now().time_since_epoch().count();
    try {
      fault.run(culprit);
    } catch (...) {
      mine.own = CurrentException();
      if (culprit && fault.leaves_body) throw;
    }
    if (culprit) {  // it neither communicates nor leaves
      while (comm->Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return absl::OkStatus();
    }
    mine.next = comm->Barrier().Wait();
    const auto now = Clock::now().time_since_epoch();
    mine.seconds = std::chrono::duration<double>(now - Clock::duration(failed.load())).count();
    return mine.next;
  };
  const absl::Status all = RunSpmd(Ranks(), body, {.timeout = kDeadline});
  EXPECT_EQ(CulpritOf(all), kCulprit) << all;
  EXPECT_TRUE(absl::StrContains(all.message(), fault.words)) << all;
  EXPECT_TRUE(absl::StrContains(seen[kCulprit].own.message(), fault.words)) << seen[kCulprit].own;
  // What peers are told is what the program was told.
  EXPECT_TRUE(absl::StrContains(all.message(), seen[kCulprit].own.message())) << all << "\n"
                                                                              << seen[kCulprit].own;
  for (int64_t r = 0; r < Ranks(); ++r) {
    if (r == kCulprit) continue;
    EXPECT_EQ(seen[r].next.code(), absl::StatusCode::kAborted) << seen[r].next;
    EXPECT_EQ(CulpritOf(seen[r].next), kCulprit) << seen[r].next;
    EXPECT_TRUE(absl::StrContains(seen[r].next.message(), absl::StrCat("rank ", kCulprit)));
    // Long before the deadline on any machine; how long exactly is asked of a quiet one.
    EXPECT_LT(seen[r].seconds, std::getenv("DT_QUIET_MACHINE") != nullptr ? 0.2 : 10.0);
    std::printf("%-24s rank %d knows after %.4f s\n", fault.name.c_str(), static_cast<int>(r),
                seen[r].seconds);
  }
}

TEST(RankLocalErrors, PeersLearnTheCulpritAtOnce) {
  OnBothMeshes([] {
    const std::vector<Fault> faults = Faults();
    EXPECT_GE(faults.size(), 20u);
    for (const Fault& fault : faults) ExpectPeersToldAtOnce(fault);
  });
}

// Uniform errors: every rank gets the same words and goes on with the same world.
TEST(UniformErrors, LeaveTheWorldUsable) {
  const std::vector<std::function<void()>> wrong = {
      [] { Sharded() + full({5, 4}, 1, Options(Shard(0))); },
      [] { zeros({Rows(), 4}, Options(Shard(7))); },
      [] { Sharded().Redistribute({Shard(0), Shard(1), Shard(0)}); },
      [] { Sharded().Backward(); },
      [] { select(Sharded(), 0, 99); },
      [] { sum(Sharded(), {5}); },
      [] { softmax(to(Sharded(), DType::kI64), 0); },
      [] {
        const StrictRedistribute strict;
        softmax(Sharded(), 0);
      },
      [] { add_(Leaf(), 1); },
      [] { Sharded() + full({Rows(), 4}, 1.0); },
      [] { uniform_(to(Sharded(), DType::kI64)); },
  };
  OnBothMeshes([&] {
    std::vector<std::vector<std::string>> words(Ranks());
    const absl::Status all = RunSpmd(Ranks(), [&](RankContext& context) {
      for (const auto& call : wrong) {
        absl::Status status;
        try {
          call();
        } catch (const Error& error) {
          status = error.status();
        }
        EXPECT_FALSE(status.ok());
        EXPECT_FALSE(IsRankLocal(status)) << status;
        std::string text(status.message());
        if (const size_t at = text.find(absl::StrCat("(rank ", context.rank())); at < text.size()) {
          text.resize(at);
        }
        words[context.rank()].push_back(text);
        EXPECT_EQ(sum(Sharded(1)).Item(), Rows() * 4);
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(all.ok()) << all;
    for (int64_t r = 1; r < Ranks(); ++r) EXPECT_EQ(words[r], words[0]);
  });
}

// An op on tensors that only this rank has is its own affair.
TEST(RankLocalErrors, OfLocalTensorsStayLocalWhileTheyAreCaught) {
  OnBothMeshes([] {
    const absl::Status all = RunSpmd(Ranks(), [&](RankContext& context) {
      if (context.rank() == kCulprit) {
        try {
          embedding(FromVector(std::vector<int64_t>{9}, {1}), full({2, 3}, 1.0));
          ADD_FAILURE() << "an index was not checked";
        } catch (const Error& error) {
          EXPECT_TRUE(IsRankLocal(error.status()));
        }
      }
      EXPECT_EQ(sum(Sharded(1)).Item(), Rows() * 4);
      return absl::OkStatus();
    });
    EXPECT_TRUE(all.ok()) << all;
  });
}

// The non-throwing form never throws, whatever a kernel does.
TEST(RankLocalErrors, DispatchReturnsThem) {
  const std::vector<Fault> registered = Faults();
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    const DTensor mine = full({2, 3}, 1.0);
    const DTensor* inputs[] = {&mine};
    for (const char* name :
         {"faulty_throws", "faulty_number", "faulty_fails", "faulty_scratch", "faulty_memory"}) {
      absl::Status one;
      EXPECT_NO_THROW(one = Dispatch(**OpRegistry::Find(name), inputs).status()) << name;
      EXPECT_EQ(one.ok(), context.rank() != kCulprit) << one;
      if (one.ok()) continue;
      EXPECT_TRUE(IsRankLocal(one)) << one;
      EXPECT_TRUE(absl::StrContains(one.message(), absl::StrCat("[", name, "] "))) << one;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::rank_local_test
