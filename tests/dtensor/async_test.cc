// Redistribute with async: who waits for whom, shown by order, not by time. Ranks may be processes:
// what they tell each other goes by the world's store, and each looks at what it has itself.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <thread>

#include "absl/time/clock.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/mesh/program.h"
#include "dtensor/mesh/store.h"
#include "dtensor/redistribute.h"
#include "dtensor/tensor/device.h"
#include "test_ops.h"
#include "tests/mesh/progress_backend.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using testing::Apply;
using ::testing::HasSubstr;
using testing::Ints;
using testing::MessageOf;

// Steps that one rank takes and others wait for, beside their collectives.
void Take(RankContext& context, const std::string& step) {
  ThrowIfError(context.store().Set(step, ""));
}
void Await(RankContext& context, const std::string& step) {
  ValueOrThrow(context.store().Get(step, absl::Now() + absl::Seconds(20)));
}

// Whether the ranks of a world of so many are processes of this launch, which hear of each other's
// calls by messages; threads see them.
bool AreProcesses(int64_t ranks) { return LaunchedProcesses() >= ranks && ranks > 1; }

SpmdOptions Impatient(WrapBackend wrap = nullptr) {
  SpmdOptions options;
  options.timeout = absl::Seconds(20);
  options.wrap = std::move(wrap);
  return options;
}

// The local backend, one that takes contiguous tensors only, and one with a thread of its own. That
// thread is no rank and has no streams: it serves the host only.
std::vector<WrapBackend> Backends() {
  std::vector<WrapBackend> all = {nullptr, Packed()};
  if (IsHost(ValueOrThrow(DefaultDevice()))) all.push_back(WithProgress());
  return all;
}

std::vector<double> Values(const Tensor& t) { return t.ToVector<double>(); }

const std::vector<std::pair<Placement, Placement>>& Kinds() {
  static const std::vector<std::pair<Placement, Placement>> kinds = {
      {Shard(0), Replicate()},
      {Shard(0), Shard(1)},
      {Partial(), Replicate()},
      {Partial(), Shard(1)},
      {Shard(1), Replicate()},
      {Shard(1), Shard(0)},
      {FlatShard({5, 9, 10}), SegmentedShard(0, {3, 1})},
      {Replicate(), Shard(0)},
      {Partial(), FlatShard({24, 0, 0})}};
  return kinds;
}

// Rank 0 starts all kinds and computes before any peer starts one; all are then read in the other
// order. A start that waited would never end.
TEST(AsyncRedistribute, StartsWithoutPeersAndManyAtATime) {
  testing::RegisterTestOps();
  for (const WrapBackend& wrap : Backends()) {
    const absl::Status status = RunSpmd(
        3,
        [&](RankContext& context) {
          const DeviceMesh mesh({3}, {"tp"});
          const Tensor full = Ints({4, 6}, 1);
          std::vector<DTensor> sources, results;
          for (const auto& [from, to] : Kinds()) {
            sources.push_back(DistributeTensor(full, mesh, {from}));
          }
          if (context.rank() != 0) Await(context, "started");
          for (size_t k = 0; k < sources.size(); ++k) {
            results.push_back(sources[k].Redistribute({Kinds()[k].second}, {.async = true}));
          }
          const DTensor meanwhile = Apply("t_scale", {sources[0]}, {FloatAttr(2)});
          if (context.rank() == 0) {
            EXPECT_EQ(Values(meanwhile.local())[0], 2 * Values(full)[0]);
          }
          if (context.rank() == 0) Take(context, "started");
          for (size_t k = sources.size(); k-- > 0;) {
            const DTensor expected = DistributeTensor(full, mesh, {Kinds()[k].second});
            EXPECT_EQ(Values(results[k].local()), Values(expected.local())) << "kind " << k;
          }
          return absl::OkStatus();
        },
        Impatient(wrap));
    EXPECT_TRUE(status.ok()) << status;
  }
}

// With a thread of its own a communicator ends what was started although nobody reads it: its
// ranks compute. A backend whose readers pull never would.
TEST(AsyncRedistribute, GoesOnByItselfWhereAThreadWorks) {
  const absl::Status status = RunSpmd(
      3,
      [&](RankContext&) -> absl::Status {
        const DeviceMesh mesh = *DeviceMesh::Create({3}, {"tp"}, DeviceType::kCpu);
        for (const auto& [from, to] : Kinds()) {
          if (from.is_replicate()) continue;  // nothing moves
          const DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {from});
          const DTensor expected = DistributeTensor(Ints({4, 6}, 1), mesh, {to});
          DT_ASSIGN_OR_RETURN(std::unique_ptr<PendingMove> pending,
                              StartRedistribution(x.local(), x.spec(), expected.spec()));
          const absl::Time limit = absl::Now() + absl::Seconds(20);
          while (!pending->Done() && absl::Now() < limit) std::this_thread::yield();
          EXPECT_TRUE(pending->Done());
          DT_ASSIGN_OR_RETURN(const Tensor moved, pending->Finish());
          EXPECT_EQ(Values(moved), Values(expected.local()));
        }
        return absl::OkStatus();
      },
      Impatient(WithProgress()));
  EXPECT_TRUE(status.ok()) << status;
}

// The source is overwritten and dropped before the peer takes what it was.
TEST(AsyncRedistribute, SourceMayChangeAndGo) {
  testing::RegisterTestOps();
  const absl::Status status = RunSpmd(
      2,
      [&](RankContext& context) {
        const DeviceMesh mesh({2}, {"tp"});
        std::vector<DTensor> results;
        for (const auto& [from, to] :
             std::vector<std::pair<Placement, Placement>>{{Shard(0), Replicate()},
                                                          {Shard(0), Shard(1)},
                                                          {Partial(), Replicate()},
                                                          {Partial(), Shard(0)}}) {
          DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {from});
          results.push_back(x.Redistribute({to}, {.async = true}));
          if (context.rank() == 0) {
            Apply("t_add_", {x, x});       // by an op
            Fill(x.Detach().local(), 77);  // through the array
            x = DTensor();                 // and its memory is used again
            const DTensor other = full({4, 6}, 99, {.dtype = DType::kF64});
            EXPECT_EQ(other.local().ToVector<double>()[0], 99);
          }
        }
        if (context.rank() == 0) Take(context, "changed");
        if (context.rank() == 1) Await(context, "changed");
        for (const DTensor& y : results) EXPECT_EQ(y.ToVector<double>(), Values(Ints({4, 6}, 1)));
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

// What everybody has read may be changed without a copy for those who have not.
TEST(AsyncRedistribute, WhatWasReadIsNotCopied) {
  testing::RegisterTestOps();
  const absl::Status status = RunSpmd(
      2,
      [&](RankContext& context) {
        const DeviceMesh mesh({2}, {"tp"});
        for (const bool read : {true, false}) {
          const DTensor x = DistributeTensor(Ints({40, 60}, 1), mesh, {Shard(0)});
          const DTensor y = x.Redistribute({Shard(1)}, {.async = true});
          if (read) y.local();
          ThrowIfError(ValueOrThrow(context.WorldComm())->Barrier().Wait());
          const AllocatorStats before = CurrentAllocator()->stats();
          Apply("t_add_", {x, x});
          const bool copied = CurrentAllocator()->stats().in_use_bytes > before.in_use_bytes;
          // What has not been read is copied, but by a device, which reads in its order. Between
          // processes it may have left as a message before it was asked for.
          if (read || IsRemote(mesh.device())) {
            EXPECT_FALSE(copied);
          } else if (!AreProcesses(2)) {
            EXPECT_TRUE(copied);
          }
          EXPECT_EQ(y.ToVector<double>(), Values(Ints({40, 60}, 1)));
        }
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

// Nobody has to read: who does gets the whole result, whatever the others do.
TEST(AsyncRedistribute, OneReaderIsEnough) {
  const absl::Status status = RunSpmd(
      4,
      [&](RankContext& context) {
        const DeviceMesh mesh({4}, {"tp"});
        for (const auto& [from, to] :
             {std::pair(Partial(), Replicate()), std::pair(Shard(0), Replicate())}) {
          DTensor x = DistributeTensor(Ints({40, 60}, 1), mesh, {from});
          for (int64_t reader = 0; reader < 4; ++reader) {
            const DTensor y = x.Redistribute({to}, {.async = true});
            if (context.rank() != reader) continue;
            EXPECT_EQ(Values(y.local()), Values(Ints({40, 60}, 1)));
          }
        }
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

TEST(AsyncRedistribute, EveryReaderWaits) {
  testing::RegisterTestOps();
  const absl::Status status = RunSpmd(
      2,
      [&](RankContext&) {
        const DeviceMesh mesh({2}, {"tp"}), other({2}, {"x"});
        const Tensor full = Ints({4, 6}, 1);
        const auto pending = [&] {
          return DistributeTensor(full, mesh, {Shard(0)})
              .Redistribute({Replicate()}, {.async = true});
        };
        EXPECT_EQ(Values(pending().ToLocal().local()), Values(full));
        EXPECT_EQ(Values(pending().Detach().local()), Values(full));
        EXPECT_EQ(Values(pending().Redistribute({Shard(1)}).FullTensor().local()), Values(full));
        EXPECT_EQ(pending().Redistribute({Shard(1)}, {.async = true}).ToVector<double>(),
                  Values(full));
        EXPECT_EQ(pending().Redistribute(other, {Shard(1)}).ToVector<double>(), Values(full));
        EXPECT_EQ(pending().ToVector<double>(), Values(full));
        EXPECT_THAT(pending().ToString(), HasSubstr("{"));
        DTensor y = pending();
        Apply("t_add_", {y, y});
        EXPECT_EQ(Values(y.local())[1], 2 * Values(full)[1]);
        DTensor x = DistributeTensor(full, mesh, {Partial()});
        x.RequiresGrad();
        Apply("t_sum", {x.Redistribute({Shard(0)}, {.async = true})}).Backward();
        EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(24, 1));
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

// A failed peer: the reader is told who it was, at every read.
TEST(AsyncRedistribute, ErrorsComeAtTheRead) {
  testing::RegisterTestOps();
  const absl::Status status = RunSpmd(
      3,
      [&](RankContext& context) -> absl::Status {
        const DeviceMesh mesh({3}, {"tp"});
        const DTensor x = DistributeTensor(Ints({6, 6}, 1), mesh, {Shard(0)});
        if (context.rank() == 1) {
          Await(context, "posted");
          return absl::DataLossError("disk on fire");
        }
        const DTensor y = x.Redistribute({Replicate()}, {.async = true});
        if (context.rank() == 0) {
          Take(context, "posted");
          EXPECT_THAT(MessageOf([&] { Apply("t_scale", {y}, {FloatAttr(2)}); }),
                      HasSubstr("[t_scale] input x: rank 1 failed: disk on fire"));
          const std::string first = MessageOf([&] { y.local(); });
          EXPECT_THAT(first, HasSubstr("rank 1 failed: disk on fire"));
          EXPECT_EQ(MessageOf([&] { y.local(); }), first);
        }
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_THAT(std::string(status.message()), HasSubstr("disk on fire"));
}

TEST(AsyncRedistribute, DifferingAndMissingCallsAreNamed) {
  const absl::Status differ = RunSpmd(
      2,
      [&](RankContext& context) {
        const DeviceMesh mesh({2}, {"tp"});
        const Shape shape = {context.rank() == 0 ? 4 : 6, 2};
        const DTensor y = DistributeTensor(Ints(shape, 1), mesh, {Shard(0)})
                              .Redistribute({Replicate()}, {.async = true});
        EXPECT_THAT(
            MessageOf([&] { y.local(); }),
            AllOf(HasSubstr("rank 0 issued deferred all_gather(float64 [2, 2], counts [2, 2]) "
                            "for float64 [4, 2] on tp=2 [S(0)] to float64 [4, 2] on tp=2 [R]"),
                  HasSubstr("rank 1 issued deferred all_gather(float64 [3, 2], counts [3, 3])")));
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(differ.ok()) << differ;
  const absl::Status left = RunSpmd(
      2,
      [&](RankContext& context) {
        const DeviceMesh mesh({2}, {"tp"});
        const DTensor x = DistributeTensor(Ints({4, 2}, 1), mesh, {Shard(0)});
        if (context.rank() == 0) x.Redistribute({Replicate()}, {.async = true}).local();
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_THAT(std::string(left.message()), HasSubstr("rank 1 left the group before "));
}

// A rank's own read counts: nobody may change what it has not read itself. One rank reads, then the
// other changes the source, then reads.
TEST(AsyncRedistribute, SourceMayChangeBeforeItsOwnerReads) {
  testing::RegisterTestOps();
  for (const auto& [from, to] : Kinds()) {
    SCOPED_TRACE(from.ToString() + " to " + to.ToString());
    if (from.is_flat() || to.is_flat()) continue;  // of three ranks
    for (const bool by_op : {false, true}) {
      const absl::Status status = RunSpmd(
          2,
          [&](RankContext& context) {
            const DeviceMesh mesh({2}, {"tp"});
            DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {from});
            const std::vector<double> expected = Values(x.Redistribute({to}).local());
            const DTensor y = x.Redistribute({to}, {.async = true});
            if (context.rank() == 1) {
              y.local();
              Take(context, "read");
            } else {
              Await(context, "read");
              if (by_op) {
                Apply("t_add_", {x, x});
              } else {
                Fill(x.local(), 100);
              }
            }
            EXPECT_EQ(Values(y.local()), expected) << "on rank " << context.rank();
            return absl::OkStatus();
          },
          Impatient());
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// What is wrong with calls that nobody waits in is said as of others: both sides, what for, and
// what all ranks were doing.
using RankBody = std::function<void(RankContext& context, const DTensor& x)>;
struct Fault {
  std::vector<std::string> messages;  // by rank; of a process its own alone
  FlightReport report;
  absl::Duration took;
  // Of rank 0 or 1, if this process runs it.
  std::optional<std::string> Of(size_t rank) const {
    if (AreProcesses(2) && ThisProcess() != static_cast<int64_t>(rank)) return std::nullopt;
    return messages[rank];
  }
  void ExpectOf(size_t rank, const ::testing::Matcher<std::string>& matcher) const {
    const auto message = Of(rank);
    if (message) {
      EXPECT_THAT(*message, matcher);
    }
  }
  void ExpectOfAll(const ::testing::Matcher<std::string>& matcher) const {
    for (const size_t rank : {0, 1}) ExpectOf(rank, matcher);
  }
  // Of processes the one has it that wrote it down; here that is rank 0.
  bool has_report() const {
    return !report.groups.empty() || (AreProcesses(2) && ThisProcess() != 0);
  }
};
Fault Provoke(const RankBody& first, const RankBody& second,
              absl::Duration timeout = absl::Seconds(20), Placement of_second = Shard(0)) {
  Fault fault;
  fault.messages.resize(2);
  SpmdOptions options;
  options.timeout = timeout;
  options.flight_report = &fault.report;
  const absl::Time start = absl::Now();
  RunSpmd(
      2,
      [&](RankContext& context) {
        const int64_t me = context.rank();
        const DTensor x = DistributeTensor(Ints({4, 4}, 1), DeviceMesh({2}, {"tp"}),
                                           {me == 0 ? Shard(0) : of_second});
        fault.messages[me] = MessageOf([&] { me == 0 ? first(context, x) : second(context, x); });
        return absl::OkStatus();
      },
      options)
      .IgnoreError();
  fault.took = absl::Now() - start;
  return fault;
}

void ReadAsync(RankContext&, const DTensor& x) {
  x.Redistribute({Replicate()}, {.async = true}).local();
}
void ReadPlain(RankContext&, const DTensor& x) { x.Redistribute({Replicate()}); }

TEST(AsyncRedistribute, DifferencesNameWhatFor) {
  const Fault fault = Provoke(ReadAsync, ReadAsync, absl::Seconds(20), Shard(1));
  fault.ExpectOfAll(AllOf(
      HasSubstr("rank 0 issued deferred all_gather"),
      HasSubstr("on tp=2 [S(0)] to float64 [4, 4] on tp=2 [R]"), HasSubstr("rank 1 issued"),
      HasSubstr("on tp=2 [S(1)] to float64 [4, 4] on tp=2 [R]"), HasSubstr("flight report:")));
  EXPECT_TRUE(fault.has_report());
}

TEST(AsyncRedistribute, TimeoutsLeaveAReport) {
  const Fault fault = Provoke(
      [&](RankContext& context, const DTensor& x) {
        try {
          ReadAsync(context, x);
        } catch (...) {
          Take(context, "over");
          throw;
        }
      },
      [&](RankContext& context, const DTensor&) { Await(context, "over"); },
      absl::Milliseconds(200));
  fault.ExpectOf(
      0,
      AllOf(HasSubstr("deferred all_gather"),
            HasSubstr(AreProcesses(2) ? "rank 1 (not seen yet) did not arrive within 200ms"
                                      : "rank 1 (not seen yet) did not start it within 200ms"),
            HasSubstr("rank 1 holds up the others"), HasSubstr("rank 0: waiting for rank 1 in ")));
  EXPECT_TRUE(fault.has_report());
  if (!fault.report.groups.empty()) {
    EXPECT_EQ(fault.report.Culprits(), std::vector<int64_t>{1});
  }
}

// A deferred call on one rank beside a plain one on the other: each would wait for the other.
// Threads see it at once; processes, whose deferred calls go their own way, at the deadline.
TEST(AsyncRedistribute, BesidePlainCallsIsADifference) {
  const bool processes = AreProcesses(2);
  const absl::Duration timeout = processes ? absl::Seconds(1) : absl::Seconds(20);
  for (const bool async_first : {false, true}) {
    const Fault fault = async_first ? Provoke(ReadAsync, ReadPlain, timeout)
                                    : Provoke(ReadPlain, ReadAsync, timeout);
    EXPECT_LT(fault.took, absl::Seconds(10));
    fault.ExpectOfAll(HasSubstr("flight report:"));
    if (processes) {  // whoever comes to the deadline first has the report
      fault.ExpectOfAll(HasSubstr("did not arrive within 1s"));
      continue;
    }
    EXPECT_TRUE(fault.has_report());
    fault.ExpectOfAll(
        AllOf(HasSubstr("collectives differ at call #1"),
              HasSubstr(absl::StrCat("rank ", async_first ? 0 : 1, " issued deferred all_gather")),
              HasSubstr("the others all_gather")));
  }
  // One that is never read is found at the next call.
  const Fault unread = Provoke(
      [&](RankContext&, const DTensor& x) {
        const DTensor y = x.Redistribute({Replicate()}, {.async = true});
        x.Redistribute({Replicate()});
      },
      ReadPlain, timeout);
  unread.ExpectOfAll(HasSubstr("differ"));
  // The same calls in another order.
  const Fault turned = Provoke(
      [&](RankContext&, const DTensor& x) {
        const DTensor y = x.Redistribute({Replicate()}, {.async = true});
        x.Redistribute({Replicate()});
        y.local();
      },
      [&](RankContext& context, const DTensor& x) {
        x.Redistribute({Replicate()});
        ReadAsync(context, x);
      },
      timeout);
  turned.ExpectOfAll(HasSubstr("differ"));
}

// Deferred and plain collectives on one group do not get into each other's way.
TEST(AsyncRedistribute, MixesWithOthers) {
  const absl::Status status = RunSpmd(
      4,
      [&](RankContext&) {
        const DeviceMesh mesh({2, 2}, {"dp", "tp"});
        const std::vector<double> values = Values(Ints({8, 6}, 3));
        const DTensor x = DistributeTensor(Ints({8, 6}, 3), mesh, {Shard(0), Partial()});
        std::vector<DTensor> pending;
        for (int i = 0; i < 50; ++i) {
          pending.push_back(
              x.Redistribute({Shard(0), i % 2 ? Shard(1) : Replicate()}, {.async = true}));
          pending.push_back(x.Redistribute({Replicate(), Shard(0)}, {.async = true}));
          EXPECT_EQ(x.ToVector<double>(), values);
          if (i % 3 != 0) continue;
          EXPECT_EQ(pending[i].ToVector<double>(), values);
        }
        for (const DTensor& y : pending) EXPECT_EQ(y.ToVector<double>(), values);
        return absl::OkStatus();
      },
      Impatient());
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor
