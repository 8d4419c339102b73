// Collectives between nodes: the local backend's bits, and what nodes send to each other.
#include "dtensor/mesh/process/nodes.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "gtest/gtest.h"
#include "tests/common/thin.h"
#include "tests/mesh/network.h"

namespace dtensor::nodes_test {
namespace {

using testing::Network;

// So many ranks on each node, one after another.
struct Layout {
  std::vector<int> sizes;
  int ranks() const {
    int n = 0;
    for (const int size : sizes) n += size;
    return n;
  }
  int NodeOf(int64_t rank) const {
    int node = 0;
    for (int end = sizes[0]; rank >= end; end += sizes[static_cast<size_t>(++node)]) {
    }
    return node;
  }
};

void PrintTo(const Layout& layout, std::ostream* out) { *out << absl::StrJoin(layout.sizes, "_"); }

std::string NameOf(const ::testing::TestParamInfo<Layout>& info) {
  return "Of" + absl::StrJoin(info.param.sizes, "_");
}

class BetweenNodes : public ::testing::TestWithParam<Layout> {
 protected:
  using Body = absl::FunctionRef<absl::Status(RankContext&, Comm&)>;
  int n() const { return GetParam().ranks(); }
  int nodes() const { return static_cast<int>(GetParam().sizes.size()); }
  int largest() const {
    return *std::max_element(GetParam().sizes.begin(), GetParam().sizes.end());
  }
  // Links between nodes cost so much that all is worth sending once. Returns the most bytes that a
  // node sent to others.
  int64_t Run(Body body) {
    const Layout& layout = GetParam();
    testing::ThreadProcesses processes(
        n(), [&](int64_t r) { return absl::StrCat("node ", layout.NodeOf(r)); });
    std::vector<int64_t> sent(static_cast<size_t>(nodes()));
    processes.network.passes = [&](const Network::Message& m) {
      const int from = layout.NodeOf(m.from);
      if (from != layout.NodeOf(m.to)) {
        sent[static_cast<size_t>(from)] += static_cast<int64_t>(m.bytes.size());
      }
      return true;
    };
    const auto of_world = [&](RankContext& context) -> absl::Status {
      DT_ASSIGN_OR_RETURN(Comm * comm, context.WorldComm());
      return body(context, *comm);
    };
    for (const absl::Status& told : processes.Run(of_world, [](int64_t) {
           SpmdOptions options{absl::Seconds(60)};
           options.device = DeviceType();
           options.cost = CostModel();
           options.cost->inter_node = {{1e-3, 1e-3}};
           return options;
         })) {
      EXPECT_TRUE(told.ok()) << told;
    }
    return *std::max_element(sent.begin(), sent.end());
  }
};

INSTANTIATE_TEST_SUITE_P(Layouts, BetweenNodes,
                         ::testing::Values(Layout{{2, 2}}, Layout{{3, 2}}, Layout{{2, 2, 2}},
                                           Layout{{6, 6}}, Layout{{3, 3, 2}}),
                         NameOf);

// Of any rank; sums of them are rounded.
float Value(int64_t rank, int64_t i) {
  uint64_t bits = static_cast<uint64_t>(rank * 1000003 + i) * 0x9e3779b97f4a7c15ull;
  bits ^= bits >> 29;
  return static_cast<float>(bits % 2000003) / 777.0f - 1000.0f;
}

absl::StatusOr<Tensor> Input(int64_t rank, int64_t rows, int64_t cols) {
  DT_ASSIGN_OR_RETURN(const Tensor t, Tensor::Empty({rows, cols}, DType::kF32));
  auto* at = static_cast<float*>(t.data());
  for (int64_t i = 0; i < rows * cols; ++i) at[i] = Value(rank, i);
  return t;
}

// As the local backend adds up: in rank order.
float Sum(int64_t ranks, int64_t i, ReduceOp op = ReduceOp::kSum) {
  float sum = Value(0, i);
  for (int64_t r = 1; r < ranks; ++r) {
    sum = op == ReduceOp::kMax ? std::max(sum, Value(r, i)) : sum + Value(r, i);
  }
  return sum;
}

// Of elements [0, n), and what all ranks have of a gather: once, not by every rank.
std::vector<float> Sums(int64_t ranks, int64_t n, ReduceOp op = ReduceOp::kSum) {
  std::vector<float> sums;
  for (int64_t i = 0; i < n; ++i) sums.push_back(Sum(ranks, i, op));
  return sums;
}
std::vector<float> Gathered(const std::vector<int64_t>& counts, int64_t cols) {
  std::vector<float> all;
  for (size_t r = 0; r < counts.size(); ++r) {
    for (int64_t i = 0; i < counts[r] * cols; ++i) {
      all.push_back(Value(static_cast<int64_t>(r), i));
    }
  }
  return all;
}

// Where `t` has something else than `want` from `start` on.
absl::Status Compare(const Tensor& t, const std::vector<float>& want, int64_t start = 0) {
  const auto* at = static_cast<const float*>(t.data());
  const float* other = want.data() + start;
  if (std::memcmp(at, other, static_cast<size_t>(t.nbytes())) == 0) return absl::OkStatus();
  const auto [wrong, right] = std::mismatch(at, at + t.numel(), other);
  return absl::DataLossError(
      absl::StrCat("element ", wrong - at, " is ", *wrong, ", not ", *right));
}

std::vector<int64_t> CountsOf(int64_t ranks, bool uneven) {
  std::vector<int64_t> counts;
  for (int64_t r = 0; r < ranks; ++r) {
    const int64_t rows = 4000 / testing::Thin(4);
    counts.push_back(!uneven ? rows : r % 3 == 1 ? 0 : rows + 13 * r);
  }
  return counts;
}

int64_t Before(const std::vector<int64_t>& counts, int64_t rank) {
  int64_t rows = 0;
  for (int64_t r = 0; r < rank; ++r) rows += counts[static_cast<size_t>(r)];
  return rows;
}

TEST_P(BetweenNodes, SumsAreThoseOfTheLocalBackend) {
  for (const int64_t rows : {40000, 300007}) {  // the latter ends in the middle of a turn
    for (const bool in_place : {true, false}) {
      const ReduceOp op = in_place || rows < 100000 ? ReduceOp::kSum : ReduceOp::kMax;
      const std::vector<float> want = Sums(n(), rows, op);
      Run([&](RankContext& context, Comm& comm) -> absl::Status {
        DT_ASSIGN_OR_RETURN(const Tensor in, Input(context.rank(), rows, 1));
        DT_ASSIGN_OR_RETURN(const Tensor other, Tensor::Empty({rows, 1}, DType::kF32));
        const Tensor& out = in_place ? in : other;
        DT_RETURN_IF_ERROR(comm.AllReduce(in, out, op).Wait());
        return Compare(out, want);
      });
    }
  }
}

TEST_P(BetweenNodes, ReduceScatter) {
  constexpr int64_t kCols = 37;
  for (const bool uneven : {false, true}) {
    const std::vector<int64_t> counts = CountsOf(n(), uneven);
    const std::vector<float> want = Sums(n(), Before(counts, n()) * kCols);
    Run([&](RankContext& context, Comm& comm) -> absl::Status {
      const int64_t mine = counts[static_cast<size_t>(context.rank())];
      DT_ASSIGN_OR_RETURN(const Tensor in, Input(context.rank(), Before(counts, n()), kCols));
      DT_ASSIGN_OR_RETURN(const Tensor out, Tensor::Empty({mine, kCols}, DType::kF32));
      DT_RETURN_IF_ERROR(comm.ReduceScatter(in, out, counts, ReduceOp::kSum).Wait());
      return Compare(out, want, Before(counts, context.rank()) * kCols);
    });
  }
}

TEST_P(BetweenNodes, AllGather) {
  constexpr int64_t kCols = 37;
  for (const bool uneven : {false, true}) {
    const std::vector<int64_t> counts = CountsOf(n(), uneven);
    const std::vector<float> want = Gathered(counts, kCols);
    Run([&](RankContext& context, Comm& comm) -> absl::Status {
      const int64_t mine = counts[static_cast<size_t>(context.rank())];
      DT_ASSIGN_OR_RETURN(const Tensor in, Input(context.rank(), mine, kCols));
      DT_ASSIGN_OR_RETURN(const Tensor out,
                          Tensor::Empty({Before(counts, n()), kCols}, DType::kF32));
      DT_RETURN_IF_ERROR(comm.AllGather(in, out, counts).Wait());
      return Compare(out, want);
    });
  }
}

TEST_P(BetweenNodes, BroadcastFromEveryRoot) {
  constexpr int64_t kSize = 50021;
  Run([&](RankContext& context, Comm& comm) -> absl::Status {
    for (int root = 0; root < n(); ++root) {
      DT_ASSIGN_OR_RETURN(const Tensor t, Input(context.rank(), kSize, 1));
      DT_ASSIGN_OR_RETURN(const Tensor want, Input(root, kSize, 1));
      DT_RETURN_IF_ERROR(comm.Broadcast(t, root).Wait());
      if (std::memcmp(t.data(), want.data(), static_cast<size_t>(t.nbytes())) != 0) {
        return absl::DataLossError(absl::StrCat("not what rank ", root, " has"));
      }
    }
    return absl::OkStatus();
  });
}

// Sums, products and averages of 16-bit floats are: 256 + 1 + 1 is not 256 in bfloat16, whoever
// adds up first. And a product of one 1.0078 of each rank is not one of rounded products.
TEST_P(BetweenNodes, WhatIsRoundedOnceStaysSo) {
  const int64_t many = (n() > 8 ? 36000 : 8000) * n();  // for two nodes of 6 it pays
  Run([&](RankContext& context, Comm& comm) -> absl::Status {
    for (const auto& [dtype, op] :
         {std::pair(DType::kBF16, ReduceOp::kSum), std::pair(DType::kF16, ReduceOp::kSum),
          std::pair(DType::kF32, ReduceOp::kAvg), std::pair(DType::kF64, ReduceOp::kAvg),
          std::pair(DType::kBF16, ReduceOp::kAvg), std::pair(DType::kBF16, ReduceOp::kMax),
          std::pair(DType::kBF16, ReduceOp::kProd), std::pair(DType::kI32, ReduceOp::kProd)}) {
      if (op != ReduceOp::kSum && testing::Thin(2) > 1) continue;
      double large = dtype == DType::kF16 ? 2048 : 256, other = 1;
      double result = large + n() - 1;
      if (op == ReduceOp::kMax) result = large;
      if (op == ReduceOp::kAvg) {
        result = dtype == DType::kF64 ? result / n()
                                      : static_cast<float>(result) / static_cast<float>(n());
      }
      if (op == ReduceOp::kProd) {
        if (dtype == DType::kBF16) large = other = 1 + 1.0 / 128;
        auto product = static_cast<float>(large);
        for (int r = 1; r < n(); ++r) product *= static_cast<float>(other);
        result = product;
      }
      for (const int64_t rows : {int64_t{350} * n(), many}) {
        const std::vector<int64_t> counts(static_cast<size_t>(n()), rows / n());
        DT_ASSIGN_OR_RETURN(const Tensor want, Tensor::Full({rows}, dtype, result));
        DT_ASSIGN_OR_RETURN(const Tensor in,
                            Tensor::Full({rows}, dtype, context.rank() == 1 ? large : other));
        DT_ASSIGN_OR_RETURN(const Tensor part, Tensor::Empty({rows / n()}, dtype));
        DT_RETURN_IF_ERROR(comm.ReduceScatter(in, part, counts, op).Wait());
        DT_RETURN_IF_ERROR(comm.AllReduce(in, in, op).Wait());
        for (const Tensor* t : {&in, &part}) {
          if (std::memcmp(t->data(), want.data(), static_cast<size_t>(t->nbytes())) == 0) continue;
          return absl::DataLossError(absl::StrCat(std::string(Name(dtype)), ": ",
                                                  t->ToVector<double>()[0], ", not ",
                                                  want.ToVector<double>()[0]));
        }
      }
    }
    return absl::OkStatus();
  });
}

// Overlapped ones beside plain ones, of all kinds.
TEST_P(BetweenNodes, CallsThatOverlap) {
  const std::vector<int64_t> counts = CountsOf(n(), /*uneven=*/true);
  const std::vector<float> sums_of_a = Sums(n(), 200003), sums_of_c = Sums(n(), 70001);
  const std::vector<float> of_b = Gathered(counts, 90);
  Run([&](RankContext& context, Comm& comm) -> absl::Status {
    const int64_t mine = counts[static_cast<size_t>(context.rank())];
    DT_ASSIGN_OR_RETURN(const Tensor a, Input(context.rank(), 200003, 1));
    DT_ASSIGN_OR_RETURN(const Tensor b, Input(context.rank(), mine, 90));
    DT_ASSIGN_OR_RETURN(const Tensor all, Tensor::Empty({Before(counts, n()), 90}, DType::kF32));
    Work sums = comm.AllReduce(a, a, ReduceOp::kSum, {.overlap = true});
    Work gathered = comm.AllGather(b, all, counts, {.overlap = true});
    DT_ASSIGN_OR_RETURN(const Tensor c, Input(context.rank(), 70001, 1));
    DT_RETURN_IF_ERROR(comm.AllReduce(c, c, ReduceOp::kSum).Wait());
    DT_RETURN_IF_ERROR(gathered.Wait());
    DT_RETURN_IF_ERROR(sums.Wait());
    DT_RETURN_IF_ERROR(Compare(a, sums_of_a));
    DT_RETURN_IF_ERROR(Compare(c, sums_of_c));
    return Compare(all, of_b);
  });
}

// A node sends what it has once: however many ranks it has.
TEST_P(BetweenNodes, WhatGoesBetweenThemGoesOnce) {
  if (n() > 4 && testing::Thin(2) > 1) GTEST_SKIP() << "no sanitizer changes what is counted";
  constexpr int64_t kElements = 3000000, kBytes = kElements * 4;
  const int64_t k = nodes();
  const auto calls = [&](auto call) {
    return Run([&](RankContext& context, Comm& comm) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const Tensor whole, Tensor::Full({kElements}, DType::kF32, 1));
      const int64_t mine = kElements / n() + (context.rank() < kElements % n() ? 1 : 0);
      DT_ASSIGN_OR_RETURN(const Tensor part, Tensor::Full({mine}, DType::kF32, 1));
      std::vector<int64_t> counts;
      for (int64_t r = 0; r < n(); ++r) {
        counts.push_back(kElements / n() + (r < kElements % n() ? 1 : 0));
      }
      return call(comm, whole, part, counts);
    });
  };
  // Who comes to the world and to the calls, and says so.
  const int64_t around = calls([](auto&&...) { return absl::OkStatus(); }) + 8192;
  const int64_t all_reduce = calls([](Comm& comm, const Tensor& whole, const Tensor&, auto&) {
    return comm.AllReduce(whole, whole, ReduceOp::kSum).Wait();
  });
  EXPECT_LE(all_reduce - around, k == 2 ? kBytes : 2 * kBytes);
  const int64_t gather =
      calls([](Comm& comm, const Tensor& whole, const Tensor& part, auto& counts) {
        return comm.AllGather(part, whole, counts).Wait();
      });
  EXPECT_LE(gather - around, kBytes * largest() / n() * (k - 1) + 64 * n());
  const int64_t scatter =
      calls([](Comm& comm, const Tensor& whole, const Tensor& part, auto& counts) {
        return comm.ReduceScatter(whole, part, counts, ReduceOp::kSum).Wait();
      });
  EXPECT_LE(scatter - around, kBytes);
  const int64_t broadcast = calls(
      [](Comm& comm, const Tensor& whole, auto&&...) { return comm.Broadcast(whole, 0).Wait(); });
  EXPECT_LE(broadcast - around, kBytes * (k == 2 ? 1 : 2));
  EXPECT_GT(all_reduce, kBytes / 2);  // it is counted at all
}

TEST(Nodes, WhatIsWorthSendingOnce) {
  const std::vector<int64_t> ranks = {0, 1, 2, 3, 4, 5, 6, 7};
  const Nodes nodes(ranks, 0, 4);
  const CostModel cost;
  const auto pays = [&](CollectiveKind kind, int64_t elements, DType dtype = DType::kF32,
                        ReduceOp op = ReduceOp::kSum) {
    const Tensor t = ValueOrThrow(Tensor::Empty({elements}, dtype));
    return PaysByNodes({.kind = kind, .in = t, .out = t, .op = op}, nodes, cost);
  };
  constexpr int64_t kMany = 4 << 20, kFew = 2000;
  for (const CollectiveKind kind : {CollectiveKind::kAllReduce, CollectiveKind::kReduceScatter,
                                    CollectiveKind::kAllGather, CollectiveKind::kBroadcast}) {
    EXPECT_TRUE(pays(kind, kMany)) << Name(kind);
    EXPECT_FALSE(pays(kind, kFew)) << Name(kind);
    EXPECT_FALSE(pays(kind, 0)) << Name(kind);
  }
  EXPECT_FALSE(pays(CollectiveKind::kExchange, kMany));
  EXPECT_FALSE(pays(CollectiveKind::kBarrier, kMany));
  EXPECT_TRUE(pays(CollectiveKind::kAllReduce, kMany, DType::kBF16));
  EXPECT_TRUE(pays(CollectiveKind::kAllReduce, kMany, DType::kBF16, ReduceOp::kProd));
  EXPECT_TRUE(pays(CollectiveKind::kAllReduce, kMany, DType::kBF16, ReduceOp::kAvg));
  EXPECT_TRUE(pays(CollectiveKind::kAllReduce, kMany, DType::kBF16, ReduceOp::kMax));
  EXPECT_TRUE(pays(CollectiveKind::kAllGather, kMany, DType::kBF16));
  EXPECT_TRUE(pays(CollectiveKind::kAllReduce, kMany, DType::kF64, ReduceOp::kAvg));
}

TEST(Nodes, HowMembersLieOnThem) {
  const std::vector<int64_t> ranks = {4, 5, 0, 1, 2, 9};
  const Nodes nodes(ranks, 4, 4);
  EXPECT_TRUE(nodes.apart());
  EXPECT_EQ(nodes.count(), 3);
  EXPECT_EQ(nodes.node(), 1);
  EXPECT_EQ(nodes.local(), 2);
  EXPECT_EQ(nodes.lanes(), 1);
  EXPECT_EQ(nodes.At(1, 2), 4);
  for (int member = 0; member < 6; ++member) {
    EXPECT_EQ(nodes.NodeOf(member), member < 2 ? 0 : member < 5 ? 1 : 2);
  }
  EXPECT_FALSE(Nodes(std::vector<int64_t>{0, 4, 1, 5}, 0, 4).apart());  // to and fro
  EXPECT_FALSE(Nodes(std::vector<int64_t>{0, 1, 2, 3}, 0, 4).apart());  // one node
  EXPECT_FALSE(Nodes(std::vector<int64_t>{0, 4, 8}, 0, 4).apart());     // one rank of each
}

}  // namespace
}  // namespace dtensor::nodes_test
