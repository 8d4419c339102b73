// Calls of all kinds in one order, some of them overlapping others.
#include <algorithm>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/store.h"
#include "dtensor/tensor/status.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {
namespace {

class Order : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Conformance, Order,
                         ::testing::Combine(::testing::ValuesIn(SettingsWithPeers()),
                                            ::testing::Values(1, 2, 3, 5, 8)),
                         NameOf);

// A call that was started: what it reads, and what must come of it.
struct Issued {
  Work work;
  Tensor source;
  std::function<void()> check;
};

// The calls of one rank; `salt` makes those of one program differ.
class Caller {
 public:
  Caller(RankContext& context, Comm& comm) : context_(context), comm_(comm) {}

  Issued AllReduce(int64_t salt, int64_t size, CommOptions options) {
    const DType t = salt % 2 == 0 ? DType::kF32 : DType::kI64;
    const Tensor in = Of(salt, {size}, t), out = Full({size}, t, 0);
    return {comm_.AllReduce(in, out, ReduceOp::kSum, options), in, [=, n = comm_.size()] {
              ExpectValues(out, [&](int64_t i) {
                double sum = 0;
                for (int64_t r = 0; r < n; ++r) sum += Value(r + salt, i, t);
                return sum;
              });
            }};
  }
  Issued AllGather(int64_t salt, int64_t size, CommOptions options) {
    const int n = comm_.size();
    const Tensor in = Of(salt, {size}, DType::kI32), out = Full({size * n}, DType::kI32, 0);
    return {comm_.AllGather(in, out, {}, options), in, [=] {
              ExpectValues(
                  out, [&](int64_t i) { return Value(i / size + salt, i % size, DType::kI32); });
            }};
  }
  Issued ReduceScatter(int64_t salt, int64_t size, CommOptions options) {
    const int n = comm_.size(), me = comm_.index();
    const Tensor in = Of(salt, {size * n}, DType::kF64), out = Full({size}, DType::kF64, 0);
    return {comm_.ReduceScatter(in, out, {}, ReduceOp::kMax, options), in, [=] {
              ExpectValues(out, [&](int64_t i) {
                double most = 0;
                for (int64_t r = 0; r < n; ++r) {
                  most = std::max(most, Value(r + salt, me * size + i, DType::kF64));
                }
                return most;
              });
            }};
  }
  Issued Exchange(int64_t salt, int64_t size, CommOptions options) {
    const int n = comm_.size(), from = (comm_.index() + n - 1) % n;
    const Tensor in = Of(salt, {size}, DType::kBF16), out = Full({size}, DType::kBF16, 0);
    return {comm_.Exchange({{(comm_.index() + 1) % n, in}}, {{from, out}}, options), in, [=] {
              ExpectValues(out, [&](int64_t i) { return Value(from + salt, i, DType::kBF16); });
            }};
  }
  Issued Broadcast(int64_t salt, int64_t size) {
    const int root = static_cast<int>(salt % comm_.size());
    const Tensor x = Of(salt, {size}, DType::kU8);
    return {comm_.Broadcast(x, root), Tensor(),
            [=] { ExpectValues(x, [&](int64_t i) { return Value(root + salt, i, DType::kU8); }); }};
  }
  // From even ranks to the next ones.
  Issued Message(int64_t salt, int64_t size) {
    const int me = comm_.index(), peer = me ^ 1;
    if (peer >= comm_.size()) return {};
    const Tensor x = Of(salt, {size}, DType::kF32);
    if (me % 2 == 0) return {comm_.Send(x, peer), Tensor(), nullptr};
    return {comm_.Recv(x, peer), Tensor(), [=] {
              ExpectValues(x, [&](int64_t i) { return Value(peer + salt, i, DType::kF32); });
            }};
  }
  absl::Status HostBytes(int64_t salt) {
    const DeviceMesh mesh({comm_.size()}, {"tp"});
    const auto said = [&](int64_t r) { return absl::StrCat("rank ", r, " at ", salt); };
    DT_ASSIGN_OR_RETURN(const auto all, context_.Exchange(mesh, {0}, "order", said(comm_.index())));
    for (int r = 0; r < comm_.size(); ++r) EXPECT_EQ(all[r], said(r));
    return absl::OkStatus();
  }
  Issued Any(int kind, int64_t salt, int64_t size, CommOptions options) {
    switch (kind) {
      case 0:
        return AllReduce(salt, size, options);
      case 1:
        return AllGather(salt, size, options);
      case 2:
        return ReduceScatter(salt, size, options);
      case 3:
        return Exchange(salt, size, options);
      case 4:
        return Broadcast(salt, size);
      case 5:
        return Message(salt, size);
      case 6:
        return {Work(HostBytes(salt)), Tensor(), nullptr};
      default:
        return {comm_.Barrier(), Tensor(), nullptr};
    }
  }

 private:
  Tensor Of(int64_t salt, IntSpan shape, DType t) const {
    return Input(comm_.index() + salt, shape, t);
  }
  RankContext& context_;
  Comm& comm_;
};

absl::Status Finish(Issued& issued) {
  DT_RETURN_IF_ERROR(issued.work.Wait());
  EXPECT_TRUE(issued.work.Done());
  if (issued.check) issued.check();
  return absl::OkStatus();
}

// One program for all, in which each rank waits for what it started when it likes, drops some of
// it, and writes to what it has sent as soon as it has it back.
absl::Status RandomProgram(RankContext& context, Comm& comm, uint32_t seed) {
  std::mt19937 program(seed), own(seed * 31 + static_cast<uint32_t>(comm.index()));
  const auto chance = [&](int percent) { return static_cast<int>(own() % 100) < percent; };
  Caller caller(context, comm);
  std::vector<Issued> pending;
  const auto finish_one = [&]() -> absl::Status {
    std::swap(pending[own() % pending.size()], pending.back());
    Issued issued = std::move(pending.back());
    pending.pop_back();
    return chance(10) ? absl::OkStatus() : Finish(issued);
  };
  for (int step = 0; step < 40; ++step) {
    const int kind = static_cast<int>(program() % 8);
    const int64_t size = program() % 3 == 0 ? 700 : program() % 9;
    const CommOptions options = {.overlap = program() % 2 == 0};
    if (kind == 6 && !comm.caps().deferred_pull) {
      DT_RETURN_IF_ERROR(comm.Barrier().Wait());  // nothing goes on beside World::Exchange
    }
    Issued issued = caller.Any(kind, step, size, options);
    if (issued.work.Done()) {
      DT_RETURN_IF_ERROR(Finish(issued));
      continue;
    }
    EXPECT_TRUE(options.overlap && comm.caps().overlap);
    pending.push_back(std::move(issued));
    if (chance(30)) {
      DT_RETURN_IF_ERROR(context.TakeBack(pending.back().source.buffer()));
      Fill(pending.back().source, 99);
    }
    if (chance(20)) std::this_thread::sleep_for(std::chrono::microseconds(own() % 200));
    while (!pending.empty() && chance(40)) DT_RETURN_IF_ERROR(finish_one());
  }
  while (!pending.empty()) DT_RETURN_IF_ERROR(finish_one());
  return absl::OkStatus();
}

TEST_P(Order, RandomPrograms) {
  const uint32_t first = Seed();
  for (uint32_t seed = first; seed < first + 4 / testing::Thin(4); ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    RunWell([&](RankContext& context, Comm& comm) { return RandomProgram(context, comm, seed); });
    if (HasFailure()) return;
  }
}

// Rank 0 starts everything before any peer starts anything: a start waits for nobody, but for the
// first use of a group.
TEST_P(Order, OverlappedCallsStartWithoutPeers) {
  if (!caps().overlap) return;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    DT_RETURN_IF_ERROR(comm.Barrier().Wait());
    Store& store = context.store();
    if (comm.index() > 0) {
      DT_RETURN_IF_ERROR(store.Get("started", absl::Now() + absl::Seconds(60)).status());
    }
    Caller caller(context, comm);
    std::vector<Issued> pending;
    for (int kind = 0; kind < 4; ++kind) {
      // An all-reduce of floats may be made of two calls, of which the first is waited for.
      const int64_t salt = kind == 0 ? 1 : kind;
      pending.push_back(caller.Any(kind, salt, 600, {.overlap = true}));
      // A thread that works by itself may be done with the last to start as soon as it has.
      if (comm.index() == 0 || caps().deferred_pull) {
        EXPECT_EQ(pending.back().work.Done(), n() == 1);
      }
    }
    if (comm.index() == 0) DT_RETURN_IF_ERROR(store.Set("started", ""));
    std::reverse(pending.begin(), pending.end());
    for (Issued& issued : pending) DT_RETURN_IF_ERROR(Finish(issued));
    return absl::OkStatus();
  });
}

// Who drops its result keeps nobody from theirs.
TEST_P(Order, DroppedWork) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    Caller caller(context, comm);
    for (int kind = 0; kind < 4; ++kind) {
      for (int dropper = 0; dropper < n(); ++dropper) {
        Issued issued = caller.Any(kind, kind, 300, {.overlap = true});
        if (comm.index() == dropper) continue;
        DT_RETURN_IF_ERROR(Finish(issued));
      }
    }
    return absl::OkStatus();  // also if this rank is the first to leave
  });
}

class Groups : public OnRanks {};
INSTANTIATE_TEST_SUITE_P(Conformance, Groups,
                         ::testing::Combine(::testing::ValuesIn(SettingsWithPeers()),
                                            ::testing::Values(4)),
                         NameOf);

// Groups that share ranks go on independently, in whatever order their results are read.
TEST_P(Groups, OfAMesh) {
  RunWell([&](RankContext& context, Comm&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    DT_ASSIGN_OR_RETURN(Comm * tp, context.CommFor(mesh, {1}));
    DT_ASSIGN_OR_RETURN(Comm * dp, context.CommFor(mesh, {0}));
    DT_ASSIGN_OR_RETURN(Comm * both, context.CommFor(mesh, {0, 1}));
    EXPECT_EQ(both->label(), "dp,tp");
    EXPECT_EQ(tp, *context.CommFor(DeviceMesh({2, 2}, {"dp", "tp"}), {1}));
    std::vector<Issued> pending;
    for (Comm* comm : {tp, dp, both, tp}) {
      EXPECT_EQ(comm->ranks()[comm->index()], context.rank());
      pending.push_back(Caller(context, *comm).AllReduce(3, 40, {.overlap = true}));
    }
    if (context.rank() % 2 == 1) std::reverse(pending.begin(), pending.end());
    for (Issued& issued : pending) DT_RETURN_IF_ERROR(Finish(issued));
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace dtensor::conformance
