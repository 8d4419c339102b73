// Faults: what every rank is told, and that nobody hangs.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "mesh/comm.h"
#include "mesh/launch.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

using absl::StatusCode;
using ::testing::HasSubstr;

struct Outcome {
  absl::Status all;                 // of RunSpmd
  std::vector<absl::Status> ranks;  // of the call under test
};

// Runs `body` on n ranks; what it returns is recorded, and also returned by the rank.
Outcome RunCall(int64_t n, absl::FunctionRef<absl::Status(int64_t, Comm&)> body,
                absl::Duration timeout = absl::Seconds(30)) {
  Outcome outcome;
  outcome.ranks.resize(n);
  auto start = std::chrono::steady_clock::now();
  outcome.all = RunSpmd(n,
                        [&](RankContext& context) -> absl::Status {
                          DT_ASSIGN_OR_RETURN(
                              Comm * comm, context.CommFor(*DeviceMesh::Create({n}, {"tp"}), {0}));
                          return outcome.ranks[context.rank()] = body(context.rank(), *comm);
                        },
                        {timeout});
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << "hang";
  return outcome;
}

Tensor Make(IntSpan shape, DType t = DType::kF32) {
  return ValueOrThrow(Tensor::Full(shape, t, 1));
}

absl::Status Reduce(Comm& comm, int64_t size, DType t = DType::kF32, ReduceOp op = ReduceOp::kSum) {
  Tensor x = Make({size}, t);
  return comm.AllReduce(x, x, op).Wait();
}

void ExpectMismatch(const Outcome& outcome, const std::string& message) {
  for (size_t r = 0; r < outcome.ranks.size(); ++r) {
    EXPECT_EQ(outcome.ranks[r].code(), StatusCode::kFailedPrecondition) << outcome.ranks[r];
    const std::string text(outcome.ranks[r].message());
    EXPECT_EQ(text.substr(0, text.find('\n')), message) << "rank " << r;
    EXPECT_EQ(text, std::string(outcome.ranks[0].message())) << "rank " << r;
  }
  EXPECT_EQ(outcome.all.code(), StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(outcome.all.message()), testing::StartsWith("rank "));
}

TEST(CommMismatch, OtherCollective) {
  for (int64_t size : {10, 100000}) {
    Outcome outcome = RunCall(3, [&](int64_t rank, Comm& comm) -> absl::Status {
      for (int i = 0; i < 11; ++i) DT_RETURN_IF_ERROR(comm.Barrier().Wait());
      if (rank == 2) return comm.AllGather(Make({4}), Make({12})).Wait();
      return Reduce(comm, size);
    });
    ExpectMismatch(outcome,
                   absl::StrCat("[comm tp] collectives differ at call #12: ranks 0, 1 issued "
                                "all_reduce(sum, float32 [",
                                size,
                                "]); rank 2 issued all_gather(float32 [4], "
                                "counts [4, 4, 4])"));
  }
}

TEST(CommMismatch, OtherDtypeSizeOpOrRoot) {
  ExpectMismatch(
      RunCall(2, [](int64_t r, Comm& c) { return Reduce(c, 10, r ? DType::kI32 : DType::kF32); }),
      "[comm tp] collectives differ at call #1: rank 0 issued all_reduce(sum, float32 [10]); "
      "rank 1 issued all_reduce(sum, int32 [10])");
  ExpectMismatch(
      RunCall(2, [](int64_t r, Comm& c) { return Reduce(c, r ? 10 : 100000); }),
      "[comm tp] collectives differ at call #1: rank 0 issued all_reduce(sum, float32 [100000]); "
      "rank 1 issued all_reduce(sum, float32 [10])");
  ExpectMismatch(
      RunCall(2,
              [](int64_t r, Comm& c) {
                return Reduce(c, 9, DType::kF32, r ? ReduceOp::kMax : ReduceOp::kSum);
              }),
      "[comm tp] collectives differ at call #1: rank 0 issued all_reduce(sum, float32 [9]); "
      "rank 1 issued all_reduce(max, float32 [9])");
  ExpectMismatch(
      RunCall(
          2, [](int64_t r, Comm& c) { return c.Broadcast(Make({9}), static_cast<int>(r)).Wait(); }),
      "[comm tp] collectives differ at call #1: rank 0 issued broadcast(root 0, float32 [9]); "
      "rank 1 issued broadcast(root 1, float32 [9])");
}

TEST(CommMismatch, OtherCounts) {
  ExpectMismatch(
      RunCall(2,
              [](int64_t r, Comm& c) {
                std::vector<int64_t> counts =
                    r ? std::vector<int64_t>{3, 2} : std::vector<int64_t>{2, 3};
                return c.AllGather(Make({2}), Make({5}), counts).Wait();
              }),
      "[comm tp] collectives differ at call #1: rank 0 issued all_gather(float32 [2], counts [2, "
      "3]); rank 1 issued all_gather(float32 [2], counts [3, 2])");
}

TEST(CommMismatch, ExchangePieces) {
  Outcome outcome = RunCall(3, [](int64_t rank, Comm& comm) {
    std::vector<Piece> sends, recvs;
    if (rank == 0) sends = {{1, Make({2})}, {1, Make({3})}};
    if (rank == 1) recvs = {{0, Make({2})}, {0, Make({4})}};
    return comm.Exchange(sends, recvs).Wait();
  });
  ExpectMismatch(
      outcome,
      "[comm tp] collectives differ at call #1: exchange, piece 1 from rank 0 to rank 1: "
      "rank 0 sends float32 [3], rank 1 expects float32 [4]");
  outcome = RunCall(2, [](int64_t rank, Comm& comm) {
    return comm.Exchange({}, rank ? std::vector<Piece>{{0, Make({2})}} : std::vector<Piece>{})
        .Wait();
  });
  ExpectMismatch(
      outcome,
      "[comm tp] collectives differ at call #1: exchange, piece 0 from rank 0 to rank 1: "
      "rank 0 sends nothing, rank 1 expects float32 [2]");
}

TEST(CommMismatch, GroupStaysInStep) {
  Outcome outcome = RunCall(2, [](int64_t rank, Comm& comm) {
    EXPECT_FALSE(Reduce(comm, rank + 1).ok());
    EXPECT_TRUE(comm.Health().ok());
    return Reduce(comm, 3);
  });
  EXPECT_TRUE(outcome.all.ok()) << outcome.all;
}

TEST(CommMismatch, Messages) {
  Outcome outcome = RunCall(2, [](int64_t rank, Comm& comm) {
    return rank == 0 ? comm.Send(Make({4}), 1).Wait() : comm.Recv(Make({5}), 0).Wait();
  });
  ExpectMismatch(outcome,
                 "[comm tp] message 1 differs: rank 0 issued send(to rank 1, float32 [4]), rank 1 "
                 "issued recv(from rank 0, float32 [5])");
}

TEST(CommFault, ThrowingRankAbortsAll) {
  for (int64_t size : {10, 100000}) {
    Outcome outcome = RunCall(4, [&](int64_t rank, Comm& comm) -> absl::Status {
      DT_RETURN_IF_ERROR(Reduce(comm, size));
      if (rank == 2) throw std::runtime_error("boom");
      return Reduce(comm, size);
    });
    for (int r : {0, 1, 3}) {
      EXPECT_EQ(outcome.ranks[r].code(), StatusCode::kAborted);
      EXPECT_EQ(outcome.ranks[r].message(), "rank 2 failed: boom");
    }
    EXPECT_EQ(outcome.all.code(), StatusCode::kInternal);
    EXPECT_EQ(outcome.all.message(), "rank 2: boom");
  }
}

TEST(CommFault, ErrorsKeepTheirStatus) {
  Outcome outcome = RunCall(2, [](int64_t rank, Comm& comm) -> absl::Status {
    if (rank == 1) throw Error(absl::ResourceExhaustedError("no memory"));
    return comm.Recv(Make({3}), 1).Wait();
  });
  EXPECT_EQ(outcome.ranks[0].message(), "rank 1 failed: no memory");
  EXPECT_EQ(outcome.all.code(), StatusCode::kResourceExhausted);
  outcome = RunCall(2, [](int64_t rank, Comm& comm) -> absl::Status {
    if (rank == 1) throw 42;
    return comm.Barrier().Wait();
  });
  EXPECT_EQ(outcome.all.message(), "rank 1: unknown exception");
}

TEST(CommFault, GroupsMadeAfterAFailureAreAborted) {
  absl::Status seen;
  absl::Status all = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    if (context.rank() == 1) return absl::DataLossError("gone");
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    return seen = comm->Barrier().Wait();
  });
  EXPECT_EQ(seen.message(), "rank 1 failed: gone");
  EXPECT_EQ(all.code(), StatusCode::kDataLoss);
}

TEST(CommFault, EarlyLeaverIsNamed) {
  Outcome outcome = RunCall(3, [](int64_t rank, Comm& comm) -> absl::Status {
    for (int i = 0; i < 4; ++i) DT_RETURN_IF_ERROR(Reduce(comm, 5));
    return rank == 1 ? absl::OkStatus() : Reduce(comm, 5);
  });
  for (int r : {0, 2}) {
    EXPECT_EQ(outcome.ranks[r].code(), StatusCode::kAborted);
    EXPECT_THAT(outcome.ranks[r].message(),
                HasSubstr("rank 1 left the group before call #5 (all_reduce)"));
  }
  EXPECT_EQ(outcome.all.code(), StatusCode::kAborted);
  outcome = RunCall(2, [](int64_t rank, Comm& comm) {
    return rank == 1 ? absl::OkStatus() : comm.Send(Make({3}), 1).Wait();
  });
  EXPECT_THAT(outcome.ranks[0].message(),
              HasSubstr("send(to rank 1, float32 [3]) (message 1): rank 1 left the group"));
}

TEST(CommFault, LateRankIsNamedAtTheDeadline) {
  for (int64_t size : {10, 100000}) {
    Outcome outcome = RunCall(
        3,
        [&](int64_t rank, Comm& comm) -> absl::Status {
          DT_RETURN_IF_ERROR(Reduce(comm, size));
          if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(700));
          return Reduce(comm, size);
        },
        absl::Milliseconds(200));
    const std::string message = absl::StrCat("[comm tp] call #2 all_reduce(sum, float32 [", size,
                                             "]): rank 1 (last at call #1) did not arrive within "
                                             "200ms");
    for (int r : {0, 2}) {
      // Whoever gives up first aborts the group, and then its body returns: the other one sees
      // either of the two.
      EXPECT_THAT(outcome.ranks[r].message(), HasSubstr(message));
      EXPECT_THAT(outcome.ranks[r].code(),
                  testing::AnyOf(StatusCode::kDeadlineExceeded, StatusCode::kAborted));
    }
    EXPECT_EQ(outcome.ranks[1].code(), StatusCode::kAborted);
    EXPECT_THAT(outcome.ranks[1].message(), HasSubstr(message));
    EXPECT_EQ(outcome.all.code(), StatusCode::kDeadlineExceeded);
  }
}

TEST(CommFault, MessageDeadline) {
  Outcome outcome = RunCall(
      2,
      [](int64_t rank, Comm& comm) -> absl::Status {
        if (rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(400));
        return rank == 0 ? comm.Send(Make({3}), 1).Wait() : comm.Recv(Make({3}), 0).Wait();
      },
      absl::Milliseconds(100));
  EXPECT_EQ(outcome.ranks[0].code(), StatusCode::kDeadlineExceeded);
  EXPECT_THAT(outcome.ranks[0].message(), HasSubstr("rank 1 did not come within 100ms"));
  EXPECT_EQ(outcome.ranks[1].code(), StatusCode::kAborted);
}

TEST(CommFault, AbortEndsPresentAndLaterCalls) {
  Outcome outcome = RunCall(3, [](int64_t rank, Comm& comm) -> absl::Status {
    if (rank == 1) comm.Abort(absl::InternalError("enough"));
    absl::Status first = comm.Barrier().Wait();
    EXPECT_EQ(comm.Health().message(), "rank 1 failed: enough");
    EXPECT_EQ(comm.Barrier().Wait().message(), first.message());
    return first;
  });
  for (const absl::Status& status : outcome.ranks) {
    EXPECT_EQ(status.code(), StatusCode::kAborted);
    EXPECT_EQ(status.message(), "rank 1 failed: enough");
  }
}

// Ranks abort at random places while others copy; sanitizers see memory that is freed too early.
TEST(CommFault, RandomAbortsDuringTransfers) {
  for (int round = 0; round < 60; ++round) {
    Outcome outcome = RunCall(4, [&](int64_t rank, Comm& comm) -> absl::Status {
      for (int i = 0;; ++i) {
        Tensor x = Make({20000});
        DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
        DT_RETURN_IF_ERROR(comm.Exchange({{static_cast<int>(rank + 1) % 4, Make({9000})}},
                                         {{static_cast<int>(rank + 3) % 4, Make({9000})}})
                               .Wait());
        if (rank == round % 4 && i == round % 7) {
          if (round % 2) comm.Abort(absl::InternalError("stop"));
          return absl::InternalError("stop");
        }
      }
    });
    for (int r = 0; r < 4; ++r) EXPECT_FALSE(outcome.ranks[r].ok());
    EXPECT_THAT(outcome.all.message(), HasSubstr("stop"));
  }
}

TEST(CommValidation, EveryMessage) {
  Outcome outcome = RunCall(2, [](int64_t, Comm& comm) -> absl::Status {
    auto message = [](Work work) {
      absl::Status status = work.Wait();
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      return std::string(status.message());
    };
    EXPECT_EQ(message(comm.AllReduce(Make({2}), Make({3}), ReduceOp::kSum)),
              "[comm tp] all_reduce: shapes differ: in float32 [2], out float32 [3]");
    EXPECT_THAT(message(comm.AllReduce(Make({2}), Make({2}, DType::kI32), ReduceOp::kSum)),
                HasSubstr("dtypes differ"));
    EXPECT_THAT(
        message(comm.AllReduce(Make({2}, DType::kI32), Make({2}, DType::kI32), ReduceOp::kAvg)),
        HasSubstr("avg needs a floating dtype, got int32 [2]"));
    EXPECT_THAT(message(comm.AllReduce(Tensor(), Make({2}), ReduceOp::kSum)),
                HasSubstr("null tensor"));
    EXPECT_THAT(message(comm.AllGather(Make({2}), Make({5}))), HasSubstr("5 rows do not divide"));
    EXPECT_THAT(message(comm.AllGather(Make({2}), Make({4}), {1, 1, 2})),
                HasSubstr("3 counts for 2 ranks"));
    EXPECT_THAT(message(comm.AllGather(Make({2}), Make({4}), {-1, 5})), HasSubstr("negative"));
    EXPECT_THAT(message(comm.AllGather(Make({2}), Make({4}), {1, 3})),
                HasSubstr("counts [1, 3] do not fit rows 2 of 4"));
    EXPECT_THAT(message(comm.AllGather(Make({2, 3}), Make({4, 2}))),
                HasSubstr("must agree but for the size of dim 0"));
    EXPECT_THAT(message(comm.Broadcast(Make({2}), 2)), HasSubstr("root 2"));
    EXPECT_THAT(message(comm.Send(Make({2}), comm.index())), HasSubstr("not another member"));
    EXPECT_THAT(message(comm.Exchange({{7, Make({2})}}, {})), HasSubstr("peer 7 is not in"));
    EXPECT_THAT(message(comm.Exchange({{0, Tensor()}}, {})), HasSubstr("null tensor"));
    return comm.Barrier().Wait();
  });
  EXPECT_TRUE(outcome.all.ok()) << outcome.all;
}

// Rank 0 is done and waits for rank 1, which still reads rank 0's memory, slowly, when the group is
// aborted. The call may return on rank 0 only when rank 1 has stopped reading.
TEST(CommAbort, NobodyReadsWhatACallThatFailedHasGivenBack) {
  std::atomic<int> inside{0};
  RunCall(2, [&](int64_t rank, Comm& comm) -> absl::Status {
    const Tensor in = Make({1024, 4096}), base = Make({4096, 2048});
    const Tensor out = rank == 0 ? Make({2048, 4096}) : base.Transpose(0, 1);
    std::thread aborter;
    if (rank == 0) {
      aborter = std::thread([&] {
        while (inside.load() < 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        comm.Abort(absl::AbortedError("on purpose"));
      });
    }
    ++inside;
    const absl::Status status = comm.AllGather(in, out).Wait();
    Fill(in, 7);  // the caller's again
    if (rank == 0) aborter.join();
    const std::vector<float> got = out.ToVector<float>();
    EXPECT_EQ(std::count(got.begin(), got.end(), 7.0f), 0) << "rank " << rank << " " << status;
    return status;
  });
}

}  // namespace
}  // namespace dtensor
