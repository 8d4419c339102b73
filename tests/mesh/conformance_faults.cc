// What every rank is told when calls differ, a rank does not come, fails or leaves; and that nobody
// hangs and no memory is touched that was given back.
#include <algorithm>
#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/store.h"
#include "dtensor/mesh/world.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {
namespace {

using absl::StatusCode;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;

Tensor Ones(IntSpan shape, DType t = DType::kI32) { return Full(shape, t, 1); }

// Small calls and large ones may take different ways. Integers: one call on any backend.
constexpr int64_t kSizes[] = {10, 20000};

class Mismatch : public OnRanks {
 protected:
  using Call = absl::FunctionRef<absl::Status(int, Comm&)>;
  // The group of n ranks makes three calls that agree and then one that differs: all are told alike
  // what the ranks issued. What comes after agrees again.
  void Expect(Call call, const std::vector<std::string>& told) const {
    RunWell([&](RankContext&, Comm& comm) -> absl::Status {
      for (int i = 0; i < 3; ++i) DT_RETURN_IF_ERROR(comm.Barrier().Wait());
      const absl::Status status = call(comm.index(), comm);
      EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
      for (const std::string& text : told) {
        EXPECT_THAT(std::string(status.message()), HasSubstr(text));
      }
      EXPECT_THAT(std::string(status.message()), HasSubstr("flight report:"));
      EXPECT_TRUE(comm.Health().ok());
      return AllReduce(comm, 5);
    });
  }
  // The last rank is another than the others.
  bool Last(int index) const { return index == n() - 1; }
  std::string LastIssued(const std::string& call) const {
    return absl::StrCat("rank ", n() - 1, " issued ", call);
  }
  const std::string at_ = "[comm tp] collectives differ at call #4: rank";
};
INSTANTIATE_TEST_SUITE_P(Conformance, Mismatch,
                         ::testing::Combine(::testing::ValuesIn(SettingsWithPeers()),
                                            ::testing::Values(2, 3, 5)),
                         NameOf);

TEST_P(Mismatch, OtherCollective) {
  for (const int64_t size : kSizes) {
    Expect(
        [&](int index, Comm& comm) {
          if (!Last(index)) return AllReduce(comm, size);
          return comm.AllGather(Ones({4}), Ones({4 * n()})).Wait();
        },
        {at_, absl::StrCat("issued all_reduce(sum, int32 [", size, "])"),
         LastIssued("all_gather(int32 [4], counts [4, ")});
  }
}

TEST_P(Mismatch, OtherDtypeSizeOpOrRoot) {
  for (const int64_t size : kSizes) {
    Expect([&](int i, Comm& c) { return AllReduce(c, size, Last(i) ? DType::kI64 : DType::kI32); },
           {at_, LastIssued(absl::StrCat("all_reduce(sum, int64 [", size, "])"))});
    Expect([&](int i, Comm& c) { return AllReduce(c, size + Last(i)); },
           {at_, LastIssued(absl::StrCat("all_reduce(sum, int32 [", size + 1, "])"))});
    Expect(
        [&](int i, Comm& c) {
          return AllReduce(c, size, DType::kI32, Last(i) ? ReduceOp::kMax : ReduceOp::kSum);
        },
        {at_, LastIssued(absl::StrCat("all_reduce(max, int32 [", size, "])"))});
    Expect([&](int i, Comm& c) { return c.Broadcast(Ones({size}), Last(i) ? 1 : 0).Wait(); },
           {at_, absl::StrCat("issued broadcast(root 0, int32 [", size, "])"),
            LastIssued(absl::StrCat("broadcast(root 1, int32 [", size, "])"))});
  }
}

TEST_P(Mismatch, OtherCounts) {
  Expect(
      [&](int index, Comm& comm) {
        std::vector<int64_t> counts(n(), 2);
        if (Last(index)) counts[0] = 3, counts[1] = 1;
        return comm.AllGather(Ones({counts[index]}), Ones({2 * n()}), counts).Wait();
      },
      {at_, "counts [2, 2", LastIssued("all_gather(int32 ["), "counts [3, 1"});
}

TEST_P(Mismatch, OtherPieces) {
  for (const int64_t size : {3, 5000}) {
    Expect(
        [&](int index, Comm& comm) {
          std::vector<Piece> sends, recvs;
          if (index == 0) sends = {{1, Ones({size})}};
          if (index == 1) recvs = {{0, Ones({size + 1})}};
          return comm.Exchange(sends, recvs).Wait();
        },
        {"[comm tp] collectives differ at call #4: exchange, ", "from rank 0 to rank 1: ",
         absl::StrCat("rank 0 sends int32 [", size, "], rank 1 expects int32 [", size + 1, "]")});
  }
  Expect(
      [&](int index, Comm& comm) {
        std::vector<Piece> recvs;
        if (index == 1) recvs = {{0, Ones({2})}};
        return comm.Exchange({}, recvs).Wait();
      },
      {"rank 0 sends nothing, rank 1 expects int32 [2]"});
}

TEST_P(Mismatch, HostBytesBesideACollective) {
  const DeviceMesh mesh({n()}, {"tp"});
  Expect(
      [&](int index, Comm& comm) {
        if (!Last(index)) return AllReduce(comm, 10);
        return RankContext::Current().Exchange(mesh, {0}, "check", "x").status();
      },
      {at_, "issued all_reduce(sum, int32 [10])", LastIssued("host_exchange() for check")});
  Expect(
      [&](int index, Comm&) {
        return RankContext::Current()
            .Exchange(mesh, {0}, Last(index) ? "seeds" : "check", "x")
            .status();
      },
      {at_, "issued host_exchange() for check", LastIssued("host_exchange() for seeds")});
}

// Overlapped calls are compared when they are read.
TEST_P(Mismatch, OfOverlappedCalls) {
  if (!caps().overlap) return;
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    const Tensor in = Ones({20 + Last(comm.index())}), out = Ones({20 + Last(comm.index())});
    Work work = comm.AllReduce(in, out, ReduceOp::kSum, {.overlap = true});
    Work next = comm.AllReduce(in, in, ReduceOp::kMax, {.overlap = true});
    const absl::Status status = work.Wait();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("all_reduce(sum, int32 [20])"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("all_reduce(sum, int32 [21])"));
    EXPECT_EQ(next.Wait().code(), StatusCode::kFailedPrecondition);
    return AllReduce(comm, 5);
  });
}

TEST_P(Mismatch, PiecesOfOverlappedCalls) {
  if (!caps().overlap) return;
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    std::vector<Piece> sends, recvs;
    if (comm.index() == 0) sends = {{1, Ones({3})}};
    if (comm.index() == 1) recvs = {{0, Ones({4})}};
    const absl::Status status = comm.Exchange(sends, recvs, {.overlap = true}).Wait();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("rank 0 sends int32 [3], rank 1 expects int32 [4]"));
    return AllReduce(comm, 5);
  });
}

// One rank goes on where the others wait: each would wait for the other.
TEST_P(Mismatch, AnOverlappedCallBesideAPlainOne) {
  if (!caps().overlap) return;
  const absl::Status all = Run(
      [&](RankContext&, Comm& comm) -> absl::Status {
        const Tensor x = Ones({20});
        const bool overlap = Last(comm.index());
        const absl::Status status =
            comm.AllReduce(x, x, ReduceOp::kSum, {.overlap = overlap}).Wait();
        EXPECT_FALSE(status.ok());
        EXPECT_THAT(std::string(status.message()), HasSubstr("all_reduce(sum, int32 [20])"));
        return status;
      },
      // Who does not pull waits for the other sort of call until the deadline.
      caps().deferred_pull ? absl::Seconds(60) : absl::Seconds(2));
  EXPECT_FALSE(all.ok());
}

TEST_P(Mismatch, Messages) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    if (comm.index() > 1) return absl::OkStatus();
    const absl::Status status =
        comm.index() == 0 ? comm.Send(Ones({4}), 1).Wait() : comm.Recv(Ones({5}), 0).Wait();
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition);
    EXPECT_EQ(status.message(),
              "[comm tp] message 1 differs: rank 0 issued send(to rank 1, int32 [4]), rank 1 "
              "issued recv(from rank 0, int32 [5])");
    const Tensor x = Ones({3});
    return comm.index() == 0 ? comm.Send(x, 1).Wait() : comm.Recv(x, 0).Wait();
  });
}

class Fault : public OnRanks {
 protected:
  // Rank 1 does `fault` after one call that goes well, the others make `call`, which must fail and
  // say all of `told`.
  absl::Status Inject(absl::FunctionRef<absl::Status(RankContext&, Comm&)> fault,
                      absl::FunctionRef<absl::Status(Comm&)> call,
                      const std::vector<std::string>& told,
                      absl::Duration timeout = absl::Seconds(60)) const {
    return Run(
        [&](RankContext& context, Comm& comm) -> absl::Status {
          DT_RETURN_IF_ERROR(AllReduce(comm, 10));
          if (comm.index() == 1) return fault(context, comm);
          absl::Status status = call(comm);
          EXPECT_THAT(status.code(), AnyOf(StatusCode::kAborted, StatusCode::kDeadlineExceeded));
          EXPECT_EQ(CulpritOf(status), 1) << status;
          for (const std::string& text : told) {
            EXPECT_THAT(std::string(status.message()), HasSubstr(text));
          }
          return status;
        },
        timeout);
  }
  // A large enough exchange of every rank with its neighbours.
  static absl::Status Ring(Comm& comm) {
    const int size = comm.size(), me = comm.index();
    return comm
        .Exchange({{(me + 1) % size, Ones({3000})}}, {{(me + size - 1) % size, Ones({3000})}})
        .Wait();
  }
  static absl::Status Overlapped(Comm& comm) {
    const Tensor in = Ones({30}), out = Ones({30 * comm.size()});
    return comm.AllGather(in, out, {}, {.overlap = true}).Wait();
  }
  static absl::Status Host(Comm& comm) {
    const DeviceMesh mesh({comm.size()}, {"tp"});
    return RankContext::Current().Exchange(mesh, {0}, "wait", "x").status();
  }
  // Every way to wait for others.
  static std::vector<std::function<absl::Status(Comm&)>> Waits() {
    return {[](Comm& c) { return AllReduce(c, kSizes[0]); },
            [](Comm& c) { return AllReduce(c, kSizes[1]); },
            [](Comm& c) { return AllReduce(c, 100, DType::kF32); },
            [](Comm& c) { return c.Barrier().Wait(); },
            [](Comm& c) { return c.Recv(Ones({3}), 1).Wait(); },
            Ring,
            Overlapped,
            Host};
  }
};
INSTANTIATE_TEST_SUITE_P(Conformance, Fault,
                         ::testing::Combine(::testing::ValuesIn(SettingsWithPeers()),
                                            ::testing::Values(2, 3, 5)),
                         NameOf);

TEST_P(Fault, AThrowingRankAbortsAll) {
  for (const auto& wait : Waits()) {
    const absl::Status all =
        Inject([](RankContext&, Comm&) -> absl::Status { throw std::runtime_error("boom"); }, wait,
               {"rank 1 failed: boom"});
    EXPECT_EQ(all.code(), StatusCode::kInternal);
    EXPECT_EQ(all.message(), "rank 1: boom");
  }
}

TEST_P(Fault, ARankThatLeavesIsNamed) {
  for (const auto& wait : Waits()) {
    const absl::Status all = Inject([](RankContext&, Comm&) { return absl::OkStatus(); }, wait,
                                    {"rank 1 left the group before"});
    EXPECT_EQ(all.code(), StatusCode::kAborted);
  }
}

TEST_P(Fault, AnAbsentRankIsNamedAtTheDeadline) {
  if (n() != 3) return;
  // Of every wait: what comes before the absence must not miss it, either.
  const absl::Duration limit = absl::Milliseconds(testing::kSanitized ? 400 : 150);
  const std::string within = "within " + absl::FormatDuration(limit);
  const std::vector<std::function<absl::Status(Comm&)>> waits = {
      [](Comm& c) { return AllReduce(c, kSizes[1]); },
      [](Comm& c) { return c.Recv(Ones({3}), 1).Wait(); }, Overlapped, Host};
  for (const auto& wait : waits) {
    const absl::Status all = Inject(
        [&](RankContext&, Comm& comm) -> absl::Status {
          while (comm.Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          EXPECT_THAT(std::string(comm.Health().message()), HasSubstr(within));
          return absl::OkStatus();
        },
        wait, {"rank 1", within, "flight report:", "rank 1 holds up the others"}, limit);
    EXPECT_EQ(all.code(), StatusCode::kDeadlineExceeded) << all;
  }
}

// The world's ranks would wait for longer; a message and a call that overlaps are the group's, too.
TEST_P(Fault, AGroupMayHaveATimeoutOfItsOwn) {
  if (n() != 3) return;
  const absl::Duration limit = absl::Milliseconds(testing::kSanitized ? 400 : 150);
  const std::string within = "within " + absl::FormatDuration(limit);
  const std::vector<std::function<absl::Status(Comm&)>> waits = {
      [](Comm& c) { return AllReduce(c, kSizes[1]); },
      [](Comm& c) { return c.Recv(Ones({3}), 1).Wait(); }, Overlapped};
  for (const auto& wait : waits) {
    const absl::Status all = Run([&](RankContext& context, Comm&) -> absl::Status {
      if (context.rank() == 2) return absl::OkStatus();
      const DeviceMesh pair = *DeviceMesh::FromRanks({2}, {0, 1}, {"pair"});
      DT_ASSIGN_OR_RETURN(Comm * comm, context.CommFor(pair, {0}));
      DT_RETURN_IF_ERROR(AllReduce(*comm, 10));
      DT_RETURN_IF_ERROR(context.CommFor(pair, {0}, GroupOptions{.timeout = limit}).status());
      if (comm->index() == 0) return wait(*comm);
      while (comm->Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      EXPECT_THAT(std::string(comm->Health().message()), HasSubstr(within));
      return absl::OkStatus();
    });
    EXPECT_EQ(all.code(), StatusCode::kDeadlineExceeded) << all;
    EXPECT_THAT(std::string(all.message()), AllOf(HasSubstr("[comm pair]"), HasSubstr(within)));
  }
}

TEST_P(Fault, AnAbortEndsPresentAndLaterCalls) {
  for (const auto& wait : Waits()) {
    const absl::Status all = Inject(
        [](RankContext&, Comm& comm) {
          comm.Abort(absl::InternalError("enough"));
          const absl::Status first = comm.Barrier().Wait();
          EXPECT_EQ(comm.Health().message(), "rank 1 failed: enough");
          EXPECT_EQ(comm.Barrier().Wait().message(), first.message());
          return first;
        },
        wait, {"rank 1 failed: enough"});
    EXPECT_EQ(all.code(), StatusCode::kAborted);
    EXPECT_EQ(CulpritOf(all), 1);
  }
}

TEST_P(Fault, ErrorsKeepTheirStatus) {
  EXPECT_EQ(
      Inject([](RankContext&,
                Comm&) -> absl::Status { throw Error(absl::ResourceExhaustedError("no memory")); },
             Ring, {"rank 1 failed: no memory"})
          .code(),
      StatusCode::kResourceExhausted);
  EXPECT_EQ(Inject([](RankContext&, Comm&) -> absl::Status { throw 42; }, Host,
                   {"rank 1 failed: unknown exception"})
                .message(),
            "rank 1: unknown exception");
}

// Its ranks hear of it at their end, where calls go on by themselves: not where they are carried
// out when they are waited for, nor on a device that ranks share, where peers read what is queued.
TEST_P(Fault, ACallThatNobodyWaitsFor) {
  if (!caps().overlap || caps().deferred_pull || setting().name.starts_with("Far")) return;
  for (const bool fails_first : {false, true}) {
    const absl::Status all = Run(
        [&](RankContext&, Comm& comm) -> absl::Status {
          DT_RETURN_IF_ERROR(AllReduce(comm, 10));
          if (comm.index() == 1) return absl::OkStatus();
          const Tensor in = Ones({30}), out = Ones({30 * comm.size()});
          Work dropped = comm.AllGather(in, out, {}, {.overlap = true});
          const absl::Time end = absl::Now() + absl::Milliseconds(100);
          while (fails_first && !dropped.Done() && absl::Now() < end) std::this_thread::yield();
          dropped = Work();
          return absl::OkStatus();
        },
        absl::Seconds(3));
    EXPECT_THAT(all.code(), AnyOf(StatusCode::kAborted, StatusCode::kDeadlineExceeded)) << all;
    EXPECT_THAT(std::string(all.message()), HasSubstr("rank 1"));
  }
}

TEST_P(Fault, GroupsMadeAfterAFailureAreAborted) {
  const absl::Status all = Run([&](RankContext& context, Comm& comm) -> absl::Status {
    if (comm.index() == 1) return absl::DataLossError("gone");
    while (comm.Health().ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::vector<int64_t> ranks = {context.rank()};
    if (context.rank() == 0) ranks = {1, 0};
    const DeviceMesh mesh = *DeviceMesh::FromRanks({static_cast<int64_t>(ranks.size())}, ranks);
    DT_ASSIGN_OR_RETURN(Comm * late, context.CommFor(mesh, {0}));
    const absl::Status status = late->Barrier().Wait();
    if (context.rank() != 0) return status;  // alone: nobody has failed there
    EXPECT_EQ(status.message(), "rank 1 failed: gone");
    return absl::OkStatus();
  });
  EXPECT_EQ(all.code(), StatusCode::kDataLoss);
}

// Ranks abort at random places while others copy; sanitizers see memory that is freed too early.
TEST_P(Fault, AbortsDuringTransfers) {
  for (int round = 0; round < 8 / testing::Thin(2); ++round) {
    const absl::Status all = Run([&](RankContext&, Comm& comm) -> absl::Status {
      for (int i = 0;; ++i) {
        DT_RETURN_IF_ERROR(AllReduce(comm, 20000, DType::kF32));
        DT_RETURN_IF_ERROR(Ring(comm));
        const Tensor in = Ones({5000}), out = Ones({5000 * n()});
        Work work = comm.AllGather(in, out, {}, {.overlap = true});
        if (comm.index() == round % n() && i == round % 7) {
          if (round % 2 == 1) comm.Abort(absl::InternalError("stop"));
          return absl::InternalError("stop");
        }
        if (round % 3 != 0) DT_RETURN_IF_ERROR(work.Wait());
      }
    });
    EXPECT_THAT(std::string(all.message()), HasSubstr("stop"));
  }
}

// Rank 0 is done and waits for rank 1, which still reads rank 0's memory, slowly, when the group is
// aborted. The call may return on rank 0 only when rank 1 has stopped reading.
TEST_P(Fault, NobodyReadsWhatACallThatFailedHasGivenBack) {
  if (n() != 2) return;
  (void)Run([&](RankContext& context, Comm& comm) -> absl::Status {
    Store& store = context.store();
    const bool first = comm.index() == 0;
    const int64_t rows = testing::kSanitized ? 128 : 512;
    const Tensor in = Ones({rows, 4096}, DType::kF32), base = Ones({4096, 2 * rows}, DType::kF32);
    const Tensor out =
        first || !caps().strided ? Ones({2 * rows, 4096}, DType::kF32) : base.Transpose(0, 1);
    std::thread aborter;
    if (first) {
      aborter = std::thread([&] {
        while (*store.Add("inside", 0) < 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        comm.Abort(absl::AbortedError("on purpose"));
      });
    }
    DT_RETURN_IF_ERROR(store.Add("inside", 1).status());
    const absl::Status status = comm.AllGather(in, out).Wait();
    Fill(in, 7);  // the caller's again
    if (first) aborter.join();
    const std::vector<float> got = out.ToVector<float>();
    EXPECT_EQ(std::count(got.begin(), got.end(), 7.0f), 0) << comm.index() << " " << status;
    return status;
  });
}

}  // namespace
}  // namespace dtensor::conformance
