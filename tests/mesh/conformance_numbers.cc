// Every collective, dtype and reduce op, on 1 to 8 ranks, against naive references.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/tensor/status.h"
#include "tests/mesh/conformance.h"

namespace dtensor::conformance {
namespace {

// What a call may be besides its kind.
struct Variant {
  bool strided_in, strided_out, overlap;
};

class Numbers : public OnRanks {
 protected:
  // Those that the communicator does.
  std::vector<Variant> Variants() const {
    std::vector<Variant> variants;
    for (int v = 0; v < 8; ++v) {
      const Variant variant = {(v & 1) != 0, (v & 2) != 0, (v & 4) != 0};
      const bool strided = variant.strided_in || variant.strided_out;
      if ((caps().strided || !strided) && (caps().overlap || !variant.overlap)) {
        variants.push_back(variant);
      }
    }
    return variants;
  }
  // Three of them, others every time: over its cases a test comes to all.
  class Turns {
   public:
    explicit Turns(std::vector<Variant> all) : all_(std::move(all)) {}
    std::vector<Variant> operator()() {
      std::vector<Variant> some;
      for (size_t k = 0; k < std::min<size_t>(3, all_.size()); ++k) {
        some.push_back(all_[next_++ % all_.size()]);
      }
      return some;
    }

   private:
    const std::vector<Variant> all_;
    size_t next_ = 0;
  };
};
INSTANTIATE_TEST_SUITE_P(Conformance, Numbers,
                         ::testing::Combine(::testing::ValuesIn(SettingsWithPeers()),
                                            ::testing::Values(1, 2, 3, 4, 5, 8)),
                         NameOf);

TEST_P(Numbers, AllReduce) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    Sample sample(4);
    Turns turns(Variants());
    for (const DType t : kDTypes) {
      for (const ReduceOp op : kOps) {
        if ((op == ReduceOp::kAvg && !IsFloating(t)) || !sample()) continue;
        for (const Shape& shape : {Shape{}, Shape{0}, Shape{3, 5}, Shape{9, 70}}) {
          for (const Variant& v : turns()) {
            const Tensor in = Input(context.rank(), shape, t, v.strided_in);
            const Tensor out = v.strided_in == v.strided_out
                                   ? in
                                   : Make(shape, t, [](int64_t) { return 0; }, v.strided_out);
            DT_RETURN_IF_ERROR(comm.AllReduce(in, out, op, {.overlap = v.overlap}).Wait());
            ExpectValues(out, [&](int64_t i) { return Reduced(n(), i, t, op); });
          }
        }
      }
      if (HasFailure()) break;
    }
    return absl::OkStatus();
  });
}

TEST_P(Numbers, LargeAllReduceIntoAnotherTensor) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    Sample sample(3);
    for (const Variant& v : Variants()) {
      if (!sample()) continue;
      const Tensor in = Input(context.rank(), {71, 89}, DType::kF32, v.strided_in);
      const Tensor out = Make({71, 89}, DType::kF32, [](int64_t) { return 9; }, v.strided_out);
      DT_RETURN_IF_ERROR(comm.AllReduce(in, out, ReduceOp::kSum, {.overlap = v.overlap}).Wait());
      ExpectValues(out, [&](int64_t i) { return Reduced(n(), i, DType::kF32, ReduceOp::kSum); });
      ExpectValues(in, [&](int64_t i) { return Value(context.rank(), i, DType::kF32); });
    }
    return absl::OkStatus();
  });
}

TEST_P(Numbers, AllGather) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    Sample sample(4);
    Turns turns(Variants());
    for (const DType t : kDTypes) {
      if (!sample()) continue;
      for (const int64_t scale : {0, 2, 30}) {
        const std::vector<int64_t> counts = UnevenCounts(n(), scale);
        const int64_t mine = counts[context.rank()], rows = RowsBefore(counts, n());
        for (const Variant& v : turns()) {
          const Tensor part = Input(context.rank(), {mine, 7}, t, v.strided_in);
          const Tensor out = Make({rows, 7}, t, [](int64_t) { return 9; }, v.strided_out);
          DT_RETURN_IF_ERROR(comm.AllGather(part, out, counts, {.overlap = v.overlap}).Wait());
          ExpectValues(out, [&](int64_t i) {
            int64_t r = 0;
            while (i / 7 >= RowsBefore(counts, r + 1)) ++r;
            return Value(r, i - 7 * RowsBefore(counts, r), t);
          });
        }
      }
    }
    return absl::OkStatus();
  });
}

TEST_P(Numbers, ReduceScatter) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    Sample sample(4);
    Turns turns(Variants());
    for (const DType t : kDTypes) {
      for (const ReduceOp op : kOps) {
        if ((op == ReduceOp::kAvg && !IsFloating(t)) || !sample()) continue;
        for (const int64_t scale : {0, 2, 30}) {
          const std::vector<int64_t> counts = UnevenCounts(n(), scale);
          const int64_t mine = counts[context.rank()], rows = RowsBefore(counts, n());
          const int64_t start = RowsBefore(counts, context.rank());
          for (const Variant& v : turns()) {
            const Tensor in = Input(context.rank(), {rows, 7}, t, v.strided_in);
            const Tensor part = Make({mine, 7}, t, [](int64_t) { return 0; }, v.strided_out);
            DT_RETURN_IF_ERROR(
                comm.ReduceScatter(in, part, counts, op, {.overlap = v.overlap}).Wait());
            ExpectValues(part, [&](int64_t i) { return Reduced(n(), 7 * start + i, t, op); });
          }
        }
      }
    }
    return absl::OkStatus();
  });
}

// Even counts need not be given, and one's rows may lie where they are gathered to.
TEST_P(Numbers, GatherInPlace) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    for (const int64_t rows : {2, 300}) {
      const Tensor out = Full({n() * rows, 5}, DType::kF32, -1);
      const Tensor mine = out.Slice(0, context.rank() * rows, rows);
      Fill(mine, static_cast<double>(context.rank()));
      DT_RETURN_IF_ERROR(comm.AllGather(mine, out).Wait());
      ExpectValues(out, [&](int64_t i) { return static_cast<double>(i / 5 / rows); });
    }
    return absl::OkStatus();
  });
}

TEST_P(Numbers, GatherAlongAnotherDim) {
  if (!caps().strided) return;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    for (const int64_t rows : {2, 300}) {
      const Tensor wide = Full({5, n() * rows}, DType::kF32, -1);
      const Tensor col = Full({5, rows}, DType::kF32, static_cast<double>(context.rank()));
      DT_RETURN_IF_ERROR(comm.AllGather(col.Transpose(0, 1), wide.Transpose(0, 1)).Wait());
      ExpectValues(wide, [&](int64_t i) { return static_cast<double>(i % (n() * rows) / rows); });
    }
    return absl::OkStatus();
  });
}

TEST_P(Numbers, BroadcastFromEveryRoot) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    for (int root = 0; root < n(); ++root) {
      for (const Shape& shape : {Shape{}, Shape{0, 4}, Shape{3, 4}, Shape{70, 80}}) {
        for (const bool strided : {false, true}) {
          if (strided && !caps().strided) continue;
          const Tensor x = Input(context.rank(), shape, DType::kF64, strided && context.rank() % 2);
          DT_RETURN_IF_ERROR(comm.Broadcast(x, root).Wait());
          ExpectValues(x, [&](int64_t i) { return Value(root, i, DType::kF64); });
        }
      }
    }
    return comm.Barrier().Wait();
  });
}

// Everybody to everybody, itself included, other sizes for every pair, some nothing.
TEST_P(Numbers, ExchangeOfOnePieceEach) {
  const auto size = [](int64_t from, int64_t to) { return (from * 5 + to * 3) % 7 * 40; };
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const int64_t me = context.rank();
    for (const DType t : kDTypes) {
      for (const bool overlap : {false, true}) {
        std::vector<Piece> sends, recvs;
        for (int p = 0; p < n(); ++p) {
          sends.push_back({p, Input(me + p, {size(me, p)}, t)});
          recvs.push_back({p, Full({size(p, me)}, t, 0)});
        }
        DT_RETURN_IF_ERROR(comm.Exchange(sends, recvs, {.overlap = overlap}).Wait());
        for (int p = 0; p < n(); ++p) {
          ExpectValues(recvs[p].view, [&](int64_t i) { return Value(p + me, i, t); });
        }
      }
    }
    return comm.Exchange({}, {}).Wait();
  });
}

// Two pieces per pair, in two dtypes: the k-th sent meets the k-th received, whoever is named
// first.
TEST_P(Numbers, ExchangeOfManyPieces) {
  if (!caps().many_pieces) return;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const int64_t me = context.rank();
    std::vector<Piece> sends, recvs;
    for (int k = 0; k < 2; ++k) {
      const DType t = k == 0 ? DType::kI32 : DType::kF64;
      for (int i = 0; i < n(); ++i) {
        const int p = n() - 1 - i;
        sends.push_back({i, Input(10 * k + me + i, {20 + k}, t)});
        recvs.push_back({p, Full({20 + k}, t, 0)});
      }
    }
    DT_RETURN_IF_ERROR(comm.Exchange(sends, recvs).Wait());
    for (int at = 0; at < 2 * n(); ++at) {
      const int64_t r = 10 * (at / n()) + recvs[at].peer + me;
      ExpectValues(recvs[at].view, [&](int64_t i) { return Value(r, i, DType::kI32); });
    }
    return absl::OkStatus();
  });
}

// A column to each, and of two pieces the second transposed.
TEST_P(Numbers, ExchangeOfStridedPieces) {
  if (!caps().strided) return;
  const int k = caps().many_pieces ? 2 : 1;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const int64_t me = context.rank(), width = k * n();
    std::vector<Piece> sends, recvs;
    const Tensor from = Input(me, {6, width}, DType::kI32), to = Full({6, width}, DType::kI32, -1);
    for (int64_t at = 0; at < width; ++at) {
      const auto piece = [&](const Tensor& t) {
        const Tensor column = t.Slice(1, at, 1);
        return k == 2 && at % 2 == 1 ? column.Transpose(0, 1) : column;
      };
      sends.push_back({static_cast<int>(at) / k, piece(from)});
      recvs.push_back({static_cast<int>(at) / k, piece(to)});
    }
    DT_RETURN_IF_ERROR(comm.Exchange(sends, recvs).Wait());
    ExpectValues(to, [&](int64_t i) {
      const int64_t row = i / width, col = i % width;
      return Value(col / k, row * width + k * me + col % k, DType::kI32);
    });
    return absl::OkStatus();
  });
}

TEST_P(Numbers, MessagesAroundARing) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const int me = static_cast<int>(context.rank());
    if (n() == 1) {  // a rank does not send to itself
      EXPECT_FALSE(comm.Send(Input(0, {2}, DType::kF32), 0).Wait().ok());
      return absl::OkStatus();
    }
    for (int64_t round = 0; round < 30; ++round) {
      const Tensor dense = Full({4, round % 3}, DType::kF32, 0);
      const Tensor token = caps().strided ? dense.Transpose(0, 1) : dense;
      if (me == 0) Fill(token, static_cast<double>(round));
      if (me != 0) DT_RETURN_IF_ERROR(comm.Recv(token, me - 1).Wait());
      DT_RETURN_IF_ERROR(comm.Send(token, (me + 1) % n()).Wait());
      if (me == 0) DT_RETURN_IF_ERROR(comm.Recv(token, n() - 1).Wait());
      ExpectValues(token, [&](int64_t) { return static_cast<double>(round); });
    }
    return absl::OkStatus();
  });
}

// Terms whose float sum depends on the order, with random delays between the ranks. Every rank gets
// the same bits; those of rank order where that is promised.
TEST_P(Numbers, SameBitsOnEveryRank) {
  const uint32_t seed = Seed();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  constexpr int64_t kMost = 3000;
  const auto term = [&](int64_t r, int64_t i) {
    const uint64_t random = HashMix(seed, static_cast<uint64_t>(r * kMost + i));
    return std::ldexp(static_cast<float>(random >> 32), static_cast<int>(random % 40) - 60);
  };
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    std::mt19937 delay(seed + static_cast<uint32_t>(context.rank()));
    for (int round = 0; round < 10 / testing::Thin(4); ++round) {
      const int64_t numel = round % 2 == 1 ? kMost : 100;
      const Tensor x = Make({numel}, DType::kF32, [&](int64_t i) { return term(comm.index(), i); });
      std::this_thread::sleep_for(std::chrono::microseconds(delay() % 300));
      DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
      const Tensor first = ValueOrThrow(x.Clone());
      DT_RETURN_IF_ERROR(comm.Broadcast(first, 0).Wait());
      const std::vector<float> mine = x.ToVector<float>(), firsts = first.ToVector<float>();
      EXPECT_EQ(std::memcmp(mine.data(), firsts.data(), mine.size() * sizeof(float)), 0);
      if (!caps().rank_order) continue;
      ExpectValues(x, [&](int64_t i) {
        float sum = term(0, i);
        for (int r = 1; r < n(); ++r) sum += term(r, i);
        return sum;
      });
    }
    return absl::OkStatus();
  });
}

// In bfloat16 256 + 1 is 256: rounded after each term the sum would stay there.
TEST_P(Numbers, HalfPrecisionRoundsOnce) {
  if (!caps().rank_order) return;
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const Tensor x = Full({3}, DType::kBF16, context.rank() == 0 ? 256 : 1);
    DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kSum).Wait());
    ExpectValues(x, [&](int64_t) { return 255 + n(); });
    return absl::OkStatus();
  });
}

TEST_P(Numbers, NanAndOverflow) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const Tensor x = Full({3}, DType::kF32, comm.index() == n() - 1 ? nan : 1);
    DT_RETURN_IF_ERROR(comm.AllReduce(x, x, ReduceOp::kMax).Wait());
    for (const double v : x.ToVector<double>()) EXPECT_TRUE(std::isnan(v));
    const Tensor bytes = Full({3}, DType::kU8, 200);
    DT_RETURN_IF_ERROR(comm.AllReduce(bytes, bytes, ReduceOp::kSum).Wait());
    ExpectValues(bytes, [&](int64_t) { return 200 * n() % 256; });
    EXPECT_EQ(context.rank(), comm.index());
    return absl::OkStatus();
  });
}

// What is no tensor goes through the world, in step with the collectives.
TEST_P(Numbers, HostBytes) {
  RunWell([&](RankContext& context, Comm& comm) -> absl::Status {
    const DeviceMesh mesh({n()}, {"tp"});
    for (int round = 0; round < 20; ++round) {
      const auto said = [&](int64_t r) { return std::string((r + round) % 4 * 1000, 'a' + r); };
      DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                          context.Exchange(mesh, {0}, "numbers", said(context.rank())));
      EXPECT_EQ(all.size(), static_cast<size_t>(n()));
      for (int r = 0; r < n(); ++r) EXPECT_EQ(all[r], said(r));
      if (round % 3 == 0) DT_RETURN_IF_ERROR(AllReduce(comm, 10));
    }
    return absl::OkStatus();
  });
}

// More than a turn of any backend moves at once, no whole number of turns, in place and not: every
// element is where it belongs.
TEST_P(Numbers, LargeOnesInManyTurns) {
  RunWell([&](RankContext&, Comm& comm) -> absl::Status {
    constexpr int64_t kSize = 700001;
    const int64_t ranks = comm.size(), me = comm.index();
    const auto value = [](int64_t i, int64_t rank) { return i % 1009 + 1009 * rank; };
    DT_ASSIGN_OR_RETURN(const Tensor in, Tensor::Empty({kSize}, DType::kI32));
    DT_ASSIGN_OR_RETURN(const Tensor sum, Tensor::Empty({kSize}, DType::kI32));
    DT_ASSIGN_OR_RETURN(const Tensor all, Tensor::Empty({ranks * kSize}, DType::kI32));
    for (int64_t i = 0; i < kSize; ++i) {
      static_cast<int32_t*>(in.data())[i] = static_cast<int32_t>(value(i, me));
    }
    DT_RETURN_IF_ERROR(comm.AllReduce(in, sum, ReduceOp::kSum).Wait());
    DT_RETURN_IF_ERROR(comm.AllGather(in, all).Wait());
    DT_RETURN_IF_ERROR(comm.AllReduce(in, in, ReduceOp::kSum).Wait());
    int64_t wrong = 0;
    for (int64_t i = 0; i < kSize; ++i) {
      const int64_t want = ranks * (i % 1009) + 1009 * (ranks * (ranks - 1) / 2);
      wrong += static_cast<const int32_t*>(sum.data())[i] != want;
      wrong += static_cast<const int32_t*>(in.data())[i] != want;
      for (int64_t r = 0; r < ranks; ++r) {
        wrong += static_cast<const int32_t*>(all.data())[r * kSize + i] != value(i, r);
      }
    }
    EXPECT_EQ(wrong, 0);
    return absl::OkStatus();
  });
}

}  // namespace
}  // namespace dtensor::conformance
