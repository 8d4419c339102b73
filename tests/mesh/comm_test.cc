// Collectives on 1 to 8 ranks against naive references.
#include "mesh/comm.h"

#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "mesh/launch.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr DType kDTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16,
                             DType::kI64, DType::kI32, DType::kU8,   DType::kBool};

// Value of element i of rank r: small integers, exact in every dtype, also multiplied.
double Value(int64_t r, int64_t i, DType t) {
  return t == DType::kBool ? (r + i) % 3 == 0 : static_cast<double>((r * 7 + i) % 3 + 1);
}

Tensor Input(int64_t r, IntSpan shape, DType t, bool strided = false) {
  std::vector<double> values(Numel(shape));
  for (size_t i = 0; i < values.size(); ++i) values[i] = Value(r, static_cast<int64_t>(i), t);
  Tensor dense = ValueOrThrow(Tensor::FromVector(values, shape, t));
  if (!strided || shape.size() < 2) return dense;
  Shape turned(shape.begin(), shape.end());
  std::swap(turned[0], turned[1]);
  Tensor result = ValueOrThrow(Tensor::Empty(turned, t)).Transpose(0, 1);
  Copy(dense, result);
  return result;
}

double Reference(int64_t n, int64_t i, DType t, ReduceOp op) {
  double acc = Value(0, i, t);
  for (int64_t r = 1; r < n; ++r) {
    double x = Value(r, i, t);
    if (op == ReduceOp::kMax) acc = std::max(acc, x);
    if (op == ReduceOp::kMin) acc = std::min(acc, x);
    if (op == ReduceOp::kProd) acc *= x;
    if (op == ReduceOp::kSum || op == ReduceOp::kAvg) acc += x;
  }
  if (t == DType::kBool) return acc != 0;
  return op == ReduceOp::kAvg ? acc / static_cast<double>(n) : acc;
}

// The references of all elements, rounded to the dtype.
std::vector<double> Rounded(int64_t n, const Shape& shape, DType t, ReduceOp op) {
  std::vector<double> values(Numel(shape));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = Reference(n, static_cast<int64_t>(i), t, op);
  }
  return ValueOrThrow(Tensor::FromVector(values, shape, t)).ToVector<double>();
}

void Spmd(int64_t n, absl::FunctionRef<absl::Status(RankContext&, Comm&)> body) {
  absl::Status status = RunSpmd(n, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
    return body(context, *comm);
  });
  EXPECT_TRUE(status.ok()) << status;
}

class Ranks : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Comm, Ranks, testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Ranks, AllReduce) {
  const int64_t n = GetParam();
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    for (DType t : kDTypes) {
      for (ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin, ReduceOp::kProd, ReduceOp::kAvg}) {
        if (op == ReduceOp::kAvg && !IsFloating(t)) continue;
        for (Shape shape : {Shape{}, Shape{0}, Shape{3, 5}, Shape{37, 131}}) {
          const std::vector<double> expected = Rounded(n, shape, t, op);
          for (int variant = 0; variant < 4; ++variant) {
            Tensor in = Input(context.rank(), shape, t, variant & 1);
            Tensor out = variant & 2 ? in : ValueOrThrow(Tensor::Full(shape, t, 0));
            DT_RETURN_IF_ERROR(comm.AllReduce(in, out, op).Wait());
            EXPECT_EQ(out.ToVector<double>(), expected);
            if (testing::Test::HasFailure()) return absl::InternalError("wrong");
          }
        }
      }
    }
    return absl::OkStatus();
  });
}

// Row counts per rank, uneven, some 0.
std::vector<int64_t> Counts(int64_t n, int64_t scale) {
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < n; ++r) counts.push_back(r % 3 == 1 ? 0 : (r % 2 + 1) * scale);
  return counts;
}

TEST_P(Ranks, AllGatherAndReduceScatter) {
  const int64_t n = GetParam();
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    for (DType t : kDTypes) {
      for (int64_t scale : {0, 2, 60}) {
        for (int variant = 0; variant < 4; ++variant) {
          std::vector<int64_t> counts = Counts(n, scale);
          const int64_t width = 33, mine = counts[context.rank()];
          int64_t rows = 0, start = 0;
          for (int64_t r = 0; r < n; ++r) {
            if (r == context.rank()) start = rows;
            rows += counts[r];
          }
          Tensor whole = Input(0, {rows, width}, t, variant & 1);
          Tensor part = Input(0, {mine, width}, t, variant & 2);
          Tensor gathered = Input(context.rank() + 1, {rows, width}, t, variant & 1);
          if (rows > 0) Copy(whole.Slice(0, start, mine), part);
          DT_RETURN_IF_ERROR(comm.AllGather(part, gathered, counts).Wait());
          EXPECT_EQ(gathered.ToVector<double>(), whole.ToVector<double>());

          Tensor in = Input(context.rank(), {rows, width}, t, variant & 1);
          DT_RETURN_IF_ERROR(comm.ReduceScatter(in, part, counts, ReduceOp::kSum).Wait());
          const std::vector<double> got = part.ToVector<double>();
          for (size_t i = 0; i < got.size(); ++i) {
            const double expected = Reference(n, start * width + i, t, ReduceOp::kSum);
            if (got[i] != expected) ADD_FAILURE() << got[i] << ", not " << expected;
          }
          if (testing::Test::HasFailure()) return absl::InternalError("wrong");
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(Ranks, GatherInPlaceAndTransposed) {
  const int64_t n = GetParam();
  for (int64_t rows : {2, 300}) {
    Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
      const int64_t r = context.rank();
      Tensor out = ValueOrThrow(Tensor::Full({n * rows, 5}, DType::kF32, -1));
      Tensor mine = out.Slice(0, r * rows, rows);
      Fill(mine, static_cast<double>(r));
      DT_RETURN_IF_ERROR(comm.AllGather(mine, out).Wait());
      std::vector<double> got = out.ToVector<double>();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i / 5 / rows);
      // Along dim 1, through a transposed view.
      Tensor wide = ValueOrThrow(Tensor::Full({5, n * rows}, DType::kF32, -1));
      Tensor col = ValueOrThrow(Tensor::Full({5, rows}, DType::kF32, static_cast<double>(r)));
      DT_RETURN_IF_ERROR(comm.AllGather(col.Transpose(0, 1), wide.Transpose(0, 1)).Wait());
      got = wide.ToVector<double>();
      for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], i % (n * rows) / rows);
      return absl::OkStatus();
    });
  }
}

TEST_P(Ranks, BroadcastFromEveryRoot) {
  const int64_t n = GetParam();
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    for (int root = 0; root < n; ++root) {
      for (Shape shape : {Shape{}, Shape{0, 4}, Shape{3, 4}, Shape{70, 80}}) {
        for (bool strided : {false, true}) {
          Tensor x = Input(context.rank(), shape, DType::kF64, strided && context.rank() % 2);
          DT_RETURN_IF_ERROR(comm.Broadcast(x, root).Wait());
          EXPECT_EQ(x.ToVector<double>(), Input(root, shape, DType::kF64).ToVector<double>());
        }
      }
    }
    return comm.Barrier().Wait();
  });
}

// All to all with two pieces per pair: a column and a transposed block; one's own included.
TEST_P(Ranks, ExchangeMovesStridedPieces) {
  const int64_t n = GetParam();
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    const int64_t me = context.rank();
    std::vector<Piece> sends, recvs;
    Tensor from = Input(me, {6, 2 * n}, DType::kI32), to = Input(0, {6, 2 * n}, DType::kI32);
    Fill(to, -1);
    for (int p = 0; p < n; ++p) {
      sends.push_back({p, from.Slice(1, 2 * p, 1)});
      recvs.push_back({p, to.Slice(1, 2 * p, 1)});
      sends.push_back({p, from.Slice(1, 2 * p + 1, 1).Transpose(0, 1)});
      recvs.push_back({p, to.Slice(1, 2 * p + 1, 1).Transpose(0, 1)});
    }
    DT_RETURN_IF_ERROR(comm.Exchange(sends, recvs).Wait());
    std::vector<double> got = to.ToVector<double>();
    for (int64_t row = 0; row < 6; ++row) {
      for (int64_t col = 0; col < 2 * n; ++col) {
        EXPECT_EQ(got[row * 2 * n + col],
                  Value(col / 2, row * 2 * n + 2 * me + col % 2, DType::kI32));
      }
    }
    return comm.Exchange({}, {}).Wait();
  });
}

TEST_P(Ranks, SendRecvRing) {
  const int n = GetParam();
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    const int me = static_cast<int>(context.rank());
    if (n == 1) {  // a rank does not send to itself
      EXPECT_FALSE(comm.Send(Input(0, {2}, DType::kF32), 0).Wait().ok());
      return absl::OkStatus();
    }
    for (int64_t round = 0; round < 50; ++round) {
      Tensor token = ValueOrThrow(Tensor::Full({4, 3}, DType::kF32, 0)).Transpose(0, 1);
      if (me == 0) Fill(token, static_cast<double>(round));
      if (me != 0) DT_RETURN_IF_ERROR(comm.Recv(token, me - 1).Wait());
      DT_RETURN_IF_ERROR(comm.Send(token, (me + 1) % n).Wait());
      if (me == 0) DT_RETURN_IF_ERROR(comm.Recv(token, n - 1).Wait());
      EXPECT_THAT(token.ToVector<double>(), testing::Each(static_cast<double>(round)));
    }
    return absl::OkStatus();
  });
}

// Terms whose float sum depends on the order, with random delays between the ranks.
TEST(Comm, SameBitsEveryTimeAndOnEveryRank) {
  const int64_t n = 5, numel = 5000;
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::vector<std::vector<float>> terms(n, std::vector<float>(numel));
  std::mt19937 random(seed);
  for (auto& term : terms) {
    for (float& x : term)
      x = std::ldexp(static_cast<float>(random()), static_cast<int>(random() % 40) - 60);
  }
  std::vector<float> expected(numel);
  for (int64_t i = 0; i < numel; ++i) {
    for (int64_t r = 0; r < n; ++r) expected[i] = r == 0 ? terms[0][i] : expected[i] + terms[r][i];
  }
  Spmd(n, [&](RankContext& context, Comm& comm) -> absl::Status {
    std::mt19937 delay(seed + static_cast<uint32_t>(context.rank()));
    for (int round = 0; round < 100; ++round) {
      const int64_t count = round % 2 ? numel : 200;  // both protocols
      std::vector<float> mine(terms[context.rank()].begin(), terms[context.rank()].begin() + count);
      Tensor x = ValueOrThrow(Tensor::FromVector(mine, {count}, DType::kF32));
      std::this_thread::sleep_for(std::chrono::microseconds(delay() % 300));
      DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
      EXPECT_EQ(memcmp(x.data(), expected.data(), count * 4), 0);
    }
    return absl::OkStatus();
  });
}

TEST(Comm, HalfPrecisionRoundsOnce) {
  // In bfloat16 256 + 1 is 256; rounding only the whole sum gives 264.
  Spmd(8, [&](RankContext& context, Comm& comm) -> absl::Status {
    Tensor x = ValueOrThrow(Tensor::Full({3}, DType::kBF16, context.rank() == 0 ? 256 : 1));
    DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
    EXPECT_THAT(x.ToVector<double>(), testing::Each(264.0));
    return absl::OkStatus();
  });
}

TEST(Comm, GroupsOfAMesh) {
  DeviceMesh mesh({2, 2}, {"dp", "tp"});
  absl::Status status = RunSpmd(4, [&](RankContext& context) -> absl::Status {
    DT_ASSIGN_OR_RETURN(Comm * tp, context.CommFor(mesh, {1}));
    DT_ASSIGN_OR_RETURN(Comm * dp, context.CommFor(mesh, {0}));
    DT_ASSIGN_OR_RETURN(Comm * both, context.CommFor(mesh, {0, 1}));
    EXPECT_EQ(both->label(), "dp,tp");
    EXPECT_EQ(tp, *context.CommFor(DeviceMesh({2, 2}, {"dp", "tp"}), {1}));
    for (Comm* comm : {tp, dp, both}) {
      double sum = 0;
      for (int64_t r : comm->ranks()) sum += static_cast<double>(r);
      Tensor x = ValueOrThrow(Tensor::Full({2}, DType::kF32, static_cast<double>(context.rank())));
      DT_RETURN_IF_ERROR(comm->AllReduce(x, x, ReduceOp::kSum).Wait());
      EXPECT_THAT(x.ToVector<double>(), testing::Each(sum));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Comm, MetaTensorsMoveNothing) {
  Spmd(2, [&](RankContext& context, Comm& comm) -> absl::Status {
    if (context.rank() == 1) return absl::OkStatus();  // nobody waits
    CommTrace trace;
    Tensor x = ValueOrThrow(Tensor::Empty({8}, DType::kF32, DeviceType::kMeta));
    DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
    EXPECT_EQ(trace.TotalBytes(), 32);
    return absl::OkStatus();
  });
}

TEST(CommTrace, CountsAndBytes) {
  Spmd(4, [&](RankContext& context, Comm& comm) -> absl::Status {
    Tensor big = ValueOrThrow(Tensor::Full({8, 2}, DType::kF32, 1));
    Tensor part = ValueOrThrow(Tensor::Full({2, 2}, DType::kF32, 1));
    const int me = static_cast<int>(context.rank());
    CommTrace outer;
    DT_RETURN_IF_ERROR(comm.AllReduce(big, big, ReduceOp::kSum).Wait());
    EXPECT_EQ(outer.TotalBytes(), 2 * 64 * 3 / 4);
    CommTrace trace;
    ScopedPhase phase(CommPhase::kBackward);
    DT_RETURN_IF_ERROR(comm.AllGather(part, big).Wait());
    EXPECT_EQ(trace.TotalBytes(), 64 - 16);
    DT_RETURN_IF_ERROR(comm.ReduceScatter(big, part, {}, ReduceOp::kSum).Wait());
    EXPECT_EQ(trace.TotalBytes(), 48 + 16 * 3);
    DT_RETURN_IF_ERROR(comm.Exchange({{me, part}, {(me + 1) % 4, part}},
                                     {{me, part}, {(me + 3) % 4, big.Slice(0, 0, 2)}})
                           .Wait());
    EXPECT_EQ(trace.TotalBytes(), 96 + 16);
    DT_RETURN_IF_ERROR(comm.Broadcast(part, 0).Wait());
    EXPECT_EQ(trace.TotalBytes(), 112 + (me == 0 ? 0 : 16));
    EXPECT_EQ(trace.MaxPayloadBytes(), 64);
    EXPECT_EQ(trace.TotalCount(), 4);
    EXPECT_EQ(outer.TotalCount(), 5);
    EXPECT_EQ(outer.Count(CollectiveKind::kAllReduce, CommPhase::kForward), 1);
    EXPECT_EQ(outer.Count(CollectiveKind::kAllGather, CommPhase::kForward), 0);
    EXPECT_EQ(trace.Count(CollectiveKind::kBroadcast), 1);
    EXPECT_EQ(trace.Rows().size(), 4u);
    EXPECT_THAT(trace.ToString(), testing::HasSubstr("all_gather      world      backward"));
    EXPECT_THAT(comm.FlightLog(2), testing::HasSubstr("broadcast(root 0, float32 [2, 2]): OK"));
    trace.Clear();
    EXPECT_EQ(trace.MaxPayloadBytes(), 0);
    return absl::OkStatus();
  });
}

TEST(CommTrace, GroupsOfOneAreSilent) {
  CommTrace trace;
  Comm* comm = ValueOrThrow(RankContext::Current().WorldComm());
  Tensor x = ValueOrThrow(Tensor::Full({2}, DType::kF32, 3));
  Tensor y = ValueOrThrow(Tensor::Full({2}, DType::kF32, 0));
  EXPECT_TRUE(comm->AllReduce(x, y, ReduceOp::kSum).Wait().ok());
  EXPECT_THAT(y.ToVector<double>(), testing::Each(3.0));
  EXPECT_EQ(trace.TotalCount(), 0);
}

}  // namespace
}  // namespace dtensor
