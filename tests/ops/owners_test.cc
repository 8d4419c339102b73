// Reading and writing along a sharded dim with an index that is cut alike: ranks ask the owners of
// rows, and what comes has the bits of one rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::testing::owners_test {
namespace {

using ::testing::HasSubstr;

struct Function {
  const char* name;
  bool elements;  // the index has one per pick, else one per slice
  bool writes;    // takes a source
  DTensor (*run)(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source);
};
const Function kFunctions[] = {
    {"gather", true, false,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor&) {
       return gather(x, dim, at);
     }},
    {"index_select", false, false,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor&) {
       return index_select(x, dim, at);
     }},
    {"scatter", true, true,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor& src) {
       return scatter(x, dim, at, src);
     }},
    {"scatter_add", true, true,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor& src) {
       return scatter_add(x, dim, at, src);
     }},
    {"index_copy", false, true,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor& src) {
       return index_copy(x, dim, at, src);
     }},
    {"index_add", false, true,
     [](const DTensor& x, int64_t dim, const DTensor& at, const DTensor& src) {
       return index_add(x, dim, at, src, 3);
     }},
};

// Indices in [0, n), most of them more than once.
std::vector<int64_t> Ids(int64_t count, int64_t n) {
  std::vector<int64_t> ids(count);
  for (int64_t i = 0; i < count; ++i) ids[i] = (i * 61 + i / 7) % n;
  return ids;
}

// What the results of a call and its gradients are: bits, as all are exact in float64.
std::vector<std::vector<double>> ResultsOf(const Function& f, DTensor x, int64_t dim,
                                           const DTensor& index, DTensor source,
                                           const DTensor& dy) {
  x.RequiresGrad();
  if (f.writes) source.RequiresGrad();
  const DTensor y = f.run(x, dim, index, source);
  y.Backward(dy);
  std::vector<std::vector<double>> all = {y.ToVector<double>(), x.grad().ToVector<double>()};
  if (f.writes) all.push_back(source.grad().ToVector<double>());
  return all;
}

struct Layout {
  DeviceMesh mesh;
  Placements x, index;  // index: of slices
};

void CheckBits(const Function& f, DType dtype, int64_t dim, const Layout& layout) {
  const DeviceMesh& mesh = layout.mesh;
  Shape shape = {111, 6}, picked = {50, 6};
  if (dim == 1) {
    std::swap(shape[0], shape[1]);
    std::swap(picked[0], picked[1]);
  }
  const int64_t n = f.elements ? Numel(picked) : 50;
  const DTensor index = 3 * FromVector(Ids(n, 37), f.elements ? picked : Shape{50});
  const auto tensor = [&](const Shape& s, uint64_t seed) {
    return to(FromVector(Noise(Numel(s), seed), s), dtype);
  };
  const DTensor x = tensor(shape, 1), source = tensor(picked, 2);
  const DTensor dy = tensor(f.writes ? shape : picked, 3);
  const auto want = ResultsOf(f, x, dim, index, source, dy);

  const auto placed = [&](const DTensor& t, const Placements& p) {
    return DistributeTensor(t.Detach(), mesh, p);
  };
  const DTensor sharded = placed(x, layout.x), picks = placed(source, layout.x);
  const DTensor at = placed(index, f.elements ? layout.x : layout.index);
  EXPECT_EQ(f.run(sharded, dim, at, picks).spec().placements(), sharded.spec().placements());
  const auto got = ResultsOf(f, sharded, dim, at, picks, placed(dy, layout.x));
  EXPECT_EQ(got, want) << f.name << " " << static_cast<int>(dtype) << " dim " << dim << " "
                       << sharded.spec().ToString();
}

TEST(Owners, GiveTheBitsOfOneRank) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh line({4}), grid({2, 2}, {"dp", "tp"});
    for (const Function& f : kFunctions) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
        for (const int d : {0, 1}) {
          const Placement s = Shard(d), other = Shard(1 - d), ids = Shard(0), all = Replicate();
          CheckBits(f, dtype, d, {line, {s}, {ids}});
          CheckBits(f, dtype, d, {grid, {s, s}, {ids, ids}});
          CheckBits(f, dtype, d, {grid, {s, all}, {ids, all}});
          CheckBits(f, dtype, d, {grid, {other, s}, {all, ids}});
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Where ranks outnumber blocks some have no rows, and no picks.
TEST(Owners, MayHaveNothing) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({4});
    const DTensor whole = FromVector(Noise(15, 1), {5, 3}), ids = FromVector(Ids(40, 5), {40});
    const DTensor x = DistributeTensor(whole, mesh, {Shard(0)});
    const DTensor few = FromVector(std::vector<int64_t>{4, 4}, {2});
    const DTensor wide = FromVector(Noise(5 * 400, 1), {5, 400});
    const DTensor one = index_select(DistributeTensor(wide, mesh, {Shard(0)}), 0,
                                     DistributeTensor(few, mesh, {Shard(0)}));
    EXPECT_EQ(one.placements()[0], Shard(0));
    EXPECT_EQ(one.ToVector<double>(), index_select(wide, 0, few).ToVector<double>());
    // Here gathering the rows brings less: they are asked for eight times.
    const DTensor many = index_select(x, 0, DistributeTensor(ids, mesh, {Shard(0)}));
    EXPECT_EQ(many.ToVector<double>(), index_select(whole, 0, ids).ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A rank gets 4 bytes for each pick that asks it, what it asks for itself, and a number from each
// other rank; and in the backward what goes the other way.
TEST(Owners, GetWhatIsAskedFor) {
  const absl::Status status = RunSpmd(4, [](RankContext& context) {
    constexpr int64_t kRanks = 4, kRows = 4096, kWidth = 16, kBlock = kRows / kRanks;
    const DeviceMesh mesh({kRanks});
    const auto on_mesh = [&](const DTensor& t) { return DistributeTensor(t, mesh, {Shard(0)}); };
    const DTensor x = on_mesh(FromVector(Noise(kRows * kWidth, 1), {kRows, kWidth}));
    for (const Function& f : kFunctions) {
      const int64_t each = f.elements ? kWidth : 1, bytes = 4 * kWidth / each;
      const std::vector<int64_t> ids = Ids(kRows * each, kRows);
      int64_t asked = 0, asks = 0;  // of other ranks
      for (int64_t i = 0; i < kRows * each; ++i) {
        const int64_t from = i / each / kBlock, owner = ids[i] / kBlock;
        asks += from == context.rank() && owner != from;
        asked += owner == context.rank() && owner != from;
      }
      const DTensor at = on_mesh(FromVector(ids, f.elements ? Shape{kRows, kWidth} : Shape{kRows}));
      DTensor a = x.Detach(), b = x.Detach();
      a.RequiresGrad();
      if (f.writes) b.RequiresGrad();
      CommTrace trace;
      const DTensor y = f.run(a, 0, at, b);
      const int64_t forward = 8 * (kRanks - 1) + 4 * asked + bytes * (f.writes ? asked : asks);
      EXPECT_EQ(trace.TotalBytes(), forward) << f.name << "\n" << trace.ToString();
      if (context.rank() == 0) {
        const double gathered = 4.0 * kRows * kWidth * (kRanks - 1) / kRanks;
        std::printf("%-12s moves %5.2f %% of gathering\n", f.name,
                    100 * static_cast<double>(trace.TotalBytes()) / gathered);
      }
      trace.Clear();
      y.Backward(x);
      EXPECT_EQ(trace.TotalBytes(), bytes * (f.writes ? asks : asked)) << trace.ToString();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Owners, RefuseWhatIsOutOfRange) {
  const absl::Status status = RunSpmd(2, [](RankContext& context) {
    const DeviceMesh mesh({2});
    const DTensor x = zeros({40, 8}, {.mesh = mesh, .placements = {Shard(0)}});
    std::vector<int64_t> ids(40, 3);
    ids[35] = 40;
    const DTensor at = FromVector(ids, {40}, {DType::kI64, mesh, {Shard(0)}});
    const std::string why = MessageOf([&] { index_select(x, 0, at); });
    if (context.rank() == 1) {
      EXPECT_THAT(why, HasSubstr("index 40 is out of range for a dim of 40"));
    } else {
      EXPECT_THAT(why, HasSubstr("rank 1"));
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(status.message(), HasSubstr("rank 1: index 40 is out of range for a dim of 40"));
}

}  // namespace
}  // namespace dtensor::testing::owners_test
