// Ops along a sharded dim: what they give is what one rank gives, lowest index first among equal
// elements, and what moves is a stated part of what gathering the dim would.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/ops/ops.h"
#include "dtensor/rehearsal.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::sharded_lines_test {
namespace {

constexpr int64_t kRanks = 4;

// Numbers of which many are equal, and some NaN.
std::vector<double> Mixed(int64_t n, bool nans) {
  std::vector<double> values = Noise(n, 3);
  for (int64_t i = 0; i < n; ++i) {
    if (i % 3 == 0) values[i] = static_cast<double>(i * 7 % 11) - 5;
    if (nans && i % 97 == 50) values[i] = std::nan("");
  }
  return values;
}

struct LineCase {
  const char* name;
  Values (*run)(const DTensor&);
  double most;  // of the bytes that gathering the dim receives
};
const std::vector<LineCase> kLineCases = {
    {"topk of 32", [](const DTensor& x) { return topk(x, 32, 1); }, 0.094},
    {"topk of 5 least", [](const DTensor& x) { return topk(x, 5, 1, false); }, 0.02},
    {"max", [](const DTensor& x) { return max(x, 1); }, 0.005},
    {"min", [](const DTensor& x) { return min(x, 1, true); }, 0.005},
    {"argmax", [](const DTensor& x) -> Values { return {argmax(x, 1)}; }, 0.005},
    {"argmax of all", [](const DTensor& x) -> Values { return {argmax(x)}; }, 0.005},
    {"argmin of all", [](const DTensor& x) -> Values { return {argmin(x, {}, true)}; }, 0.005},
    {"kthvalue", [](const DTensor& x) { return kthvalue(x, 1000, 1); }, 0.05},
    {"median", [](const DTensor& x) { return median(x, 1, true); }, 0.05},
    {"nanmedian", [](const DTensor& x) { return nanmedian(x, 1); }, 0.05},
    {"median of all", [](const DTensor& x) -> Values { return {median(x)}; }, 0.01},
    {"cumsum", [](const DTensor& x) -> Values { return {cumsum(x, 1)}; }, 0.005},
    {"cumprod", [](const DTensor& x) -> Values { return {cumprod(x, 1)}; }, 0.005},
    {"cummax", [](const DTensor& x) { return cummax(x, 1); }, 0.02},
    {"cummin", [](const DTensor& x) { return cummin(x, 1); }, 0.02},
    {"logsumexp", [](const DTensor& x) -> Values { return {logsumexp(x, {1})}; }, 0.005},
    {"norm", [](const DTensor& x) -> Values { return {norm(x, 2, {1})}; }, 0.005},
    {"var", [](const DTensor& x) -> Values { return {var(x, {1})}; }, 0.005},
    {"std", [](const DTensor& x) -> Values { return {std(x, {1})}; }, 0.005},
    {"layer_norm", [](const DTensor& x) -> Values { return {layer_norm(x, {4096})}; }, 0.005},
    {"rms_norm", [](const DTensor& x) -> Values { return {rms_norm(x, {4096})}; }, 0.005},
    {"batch statistics",
     [](const DTensor& x) -> Values { return {batch_norm(t(x), {}, {}, {}, {}, true)}; }, 0.005},
    {"log_softmax", [](const DTensor& x) -> Values { return {log_softmax(x, 1)}; }, 0.005},
    {"softmax", [](const DTensor& x) -> Values { return {softmax(x, 1)}; }, 0.005},
    {"any", [](const DTensor& x) -> Values { return {any(gt(x, 4.5), {1})}; }, 0.005},
    {"count_nonzero", [](const DTensor& x) -> Values { return {count_nonzero(x, {1})}; }, 0.005},
    {"roll by 1", [](const DTensor& x) -> Values { return {roll(x, {1}, {1})}; }, 0.0004},
    {"roll by 100", [](const DTensor& x) -> Values { return {roll(x, {-100}, {1})}; }, 0.033},
    {"roll of all", [](const DTensor& x) -> Values { return {roll(x, {1500}, {1})}; }, 0.334},
    {"flip", [](const DTensor& x) -> Values { return {flip(x, {1})}; }, 0.334},
};

void ExpectSame(const DTensor& got, const DTensor& want, const std::string& what) {
  ASSERT_EQ(got.dtype(), want.dtype()) << what;
  ASSERT_EQ(got.shape(), want.shape()) << what;
  const auto g = got.ToVector<double>(), w = want.ToVector<double>();
  for (size_t i = 0; i < w.size(); ++i) {
    if (std::isnan(w[i]) && std::isnan(g[i])) continue;
    const double most = IsFloating(want.dtype()) ? 1e-5 * std::max(1.0, std::fabs(w[i])) : 0;
    ASSERT_LE(std::fabs(g[i] - w[i]), most) << what << ": element " << i;
  }
}

TEST(ShardedLines, GiveTheSameAndMoveLittle) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext& context) {
    const DeviceMesh mesh({kRanks});
    for (const bool nans : {false, true}) {
      const std::vector<double> values = Mixed(8 * 4096, nans);
      const DTensor whole = FromVector(values, {8, 4096});
      const DTensor x = DistributeTensor(whole, mesh, {Shard(1)});
      const double gathered = 8 * 4096 * 4 * (kRanks - 1) / static_cast<double>(kRanks);
      for (const LineCase& c : kLineCases) {
        CommTrace trace;
        Values y = c.run(x);
        for (DTensor& t : y) t = t.Redistribute(WithoutPending(t.placements()));
        const auto bytes = static_cast<double>(trace.TotalBytes());
        EXPECT_LE(bytes, c.most * gathered) << c.name << "\n" << trace.ToString();
        if (context.rank() == 0 && !nans) {
          std::printf("%-16s moves %6.3f %% of gathering\n", c.name, 100 * bytes / gathered);
        }
        const Values want = c.run(whole);
        for (size_t i = 0; i < y.size(); ++i) ExpectSame(y[i], want[i], c.name);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, SortOfOneLineSendsEveryElementOnce) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext& context) {
    const int64_t n = 1000000;
    const std::vector<double> values = Noise(n, 1);
    for (const DeviceMesh& mesh : {DeviceMesh({kRanks}), DeviceMesh({2, kRanks / 2})}) {
      const Placements cut(mesh.ndim(), Shard(0));
      const DTensor x = FromVector(values, {n}, {DType::kF32, mesh, cut});
      CommTrace trace;
      const Values sorted = sort(x);
      const double all = static_cast<double>(trace.TotalBytes()) * kRanks;
      EXPECT_LE(all, 2.2 * 4 * n) << mesh.ToString() << " " << trace.ToString();
      EXPECT_EQ(sorted[0].placements(), x.placements());
      if (context.rank() == 0) {
        std::printf("sort on %s moves %.2f times the bytes of its values\n",
                    mesh.ToString().c_str(), all / (4.0 * n));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A line that two mesh dims cut one after the other is one of four ranks.
const std::vector<LineCase> kNestedCases = {
    {"sort", [](const DTensor& x) { return sort(x, 0, true); }, 0.55},
    {"kthvalue", [](const DTensor& x) { return kthvalue(x, 17); }, 0.01},
    {"median", [](const DTensor& x) { return median(x, 0); }, 0.01},
    {"quantile", [](const DTensor& x) -> Values { return {quantile(x, 0.3)}; }, 0.55},
    {"unique", [](const DTensor& x) { return unique(x); }, 0.9},
    {"nonzero", [](const DTensor& x) -> Values { return {nonzero(gt(x, 4.9))}; }, 0.1},
    {"masked_select", [](const DTensor& x) -> Values { return {masked_select(x, gt(x, 0.5))}; },
     0.2},
    {"flip", [](const DTensor& x) -> Values { return {flip(x, {0})}; }, 0.34},
    {"roll", [](const DTensor& x) -> Values { return {roll(x, {7}, {0})}; }, 0.001},
};

TEST(ShardedLines, TwoMeshDimsThatCutOneLineCountAsOne) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext& context) {
    const DeviceMesh grid({2, 2}, {"dp", "tp"});
    for (const int64_t n : {16001, 40000}) {
      const DTensor whole = FromVector(Mixed(n, false), {n});
      const DTensor x = DistributeTensor(whole, grid, {Shard(0), Shard(0)});
      for (const LineCase& c : kNestedCases) {
        const CommTrace trace;
        const Values y = c.run(x);
        const double share = static_cast<double>(trace.TotalBytes()) / (4.0 * n * 3 / 4);
        EXPECT_LE(share, c.most) << c.name << "\n" << trace.ToString();
        if (context.rank() == 0 && n == 40000) {
          std::printf("%-16s on 2 x 2 moves %6.3f %% of gathering\n", c.name, 100 * share);
        }
        const Values want = c.run(whole);
        for (size_t i = 0; i < y.size(); ++i) ExpectSame(y[i], want[i], c.name);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The gradient goes where the indices said in the forward.
TEST(ShardedLines, IndicesThatWereChangedInPlaceAreRefused) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const DeviceMesh mesh({kRanks});
    DTensor x = FromVector(Noise(8192, 1), {8192}, {DType::kF64, mesh, {Shard(0)}}).RequiresGrad();
    Values sorted = sort(x);
    add_(sorted[1], 1);
    EXPECT_THAT(MessageOf([&] { sum(sorted[0]).Backward(); }),
                ::testing::HasSubstr("was changed in place after the forward"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What comes to a rank is what its part of the result has that its part of x had not, by listing
// it; the result is placed as x is, and the gradient goes back alike.
void CheckReordered(const OpFn& fn, const std::function<int64_t(int64_t)>& source, int64_t n,
                    int64_t ranks, bool packed) {
  SpmdOptions options;
  if (packed) options.wrap = Packed();
  const absl::Status status = RunSpmd(
      ranks,
      [&](RankContext& context) -> absl::Status {
        const DeviceMesh mesh({ranks});
        const int64_t chunk = (n + ranks - 1) / ranks, me = context.rank();
        int64_t fetched = 0, returned = 0;
        std::vector<double> x_values(n), y_values(n), dx(n), dy(n);
        for (int64_t i = 0; i < n; ++i) {
          const int64_t from = source(i);
          x_values[i] = static_cast<double>(i);
          y_values[i] = static_cast<double>(from);
          dx[from] = dy[i] = static_cast<double>(i * i);
          fetched += i / chunk == me && from / chunk != me;
          returned += i / chunk != me && from / chunk == me;
        }
        const auto on_mesh = [&](const std::vector<double>& values) {
          return FromVector(values, {n}, {DType::kF64, mesh, {Shard(0)}});
        };
        DTensor x = on_mesh(x_values).RequiresGrad();
        const DTensor grad = on_mesh(dy);
        CommTrace trace;
        const DTensor y = fn({x});
        EXPECT_EQ(trace.TotalBytes(), fetched * 8) << trace.ToString();
        EXPECT_EQ(y.placements()[0], Shard(0));
        trace.Clear();
        y.Backward(grad);
        EXPECT_EQ(trace.TotalBytes(), returned * 8) << trace.ToString();
        EXPECT_EQ(y.ToVector<double>(), y_values);
        EXPECT_EQ(x.grad().ToVector<double>(), dx);
        return absl::OkStatus();
      },
      options);
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, RollAndFlipMoveWhatChangesOwner) {
  for (const bool packed : {false, true}) {
    for (const auto& [n, ranks] : {std::pair<int64_t, int64_t>{8, 2}, {10, 4}, {7, 3}, {3, 4}}) {
      SCOPED_TRACE(absl::StrCat(n, " on ", ranks, packed ? " packed" : ""));
      CheckReordered([](const auto& in) { return flip(in[0], {0}); },
                     [n = n](int64_t i) { return n - 1 - i; }, n, ranks, packed);
      for (const int64_t shift : {1, 2, 4, 6, -1, -3}) {
        CheckReordered([=](const auto& in) { return roll(in[0], {shift}, {0}); },
                       [n = n, shift](int64_t i) { return ((i - shift) % n + n) % n; }, n, ranks,
                       packed);
      }
    }
  }
}

// What is there once is found in order, on demand with which of them each element is, and no rank
// gets what all have.
void CheckUnique(const DTensor& whole, const DTensor& x, bool consecutive, bool inverse) {
  const auto find = [&](const DTensor& t) {
    return consecutive ? unique_consecutive(t, inverse, true) : unique(t, true, inverse, true);
  };
  const std::string what = absl::StrCat(static_cast<int>(x.dtype()), " ", x.numel(), consecutive);
  const Values want = find(whole);
  const CommTrace trace;
  const Values got = find(x);
  const auto bytes = static_cast<double>(trace.TotalBytes());
  const double gathered =
      static_cast<double>(SizeOf(x.dtype()) * x.numel() * (kRanks - 1)) / kRanks;
  const bool even = x.ndim() == 1 || x.size(0) % kRanks == 0;  // then blocks of x are blocks of it
  if (!consecutive && even && x.dtype() == DType::kF64) {
    EXPECT_LE(bytes, (inverse ? 1 : 0.75) * gathered) << trace.ToString();
    if (RankContext::Current().rank() == 0) {
      std::printf("unique of %s%s moves %.1f %% of gathering\n", ToString(x.shape()).c_str(),
                  inverse ? " and its inverse" : "", 100 * bytes / gathered);
    }
  }
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    EXPECT_EQ(got[i].placements()[0], Shard(0));
    ExpectSame(got[i], want[i], what);
  }
}

TEST(ShardedLines, UniqueSendsEveryElementOnceAndWhatItFinds) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const DeviceMesh mesh({kRanks});
    for (const DType dtype : {DType::kF32, DType::kF64, DType::kI64, DType::kF16}) {
      for (const Shape& shape : {Shape{4100}, Shape{8192}, Shape{4096, 2}, Shape{1025, 4}}) {
        const DTensor whole = to(FromVector(Mixed(Numel(shape), IsFloating(dtype)), shape), dtype);
        const DTensor x = DistributeTensor(whole, mesh, {Shard(0)});
        for (const bool consecutive : {false, true}) {
          for (const bool inverse : {false, true}) CheckUnique(whole, x, consecutive, inverse);
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, RollAndFlipUnderAllPlacements) {
  const auto rolled = [](const std::vector<DTensor>& in) {
    return roll(in[0], {2, -1}, {0, 1}) * 2 + roll(in[0], {4}, {});
  };
  const auto flipped = [](const std::vector<DTensor>& in) {
    return flip(in[0], {0, 1}) * 2 + flip(in[0], {0});
  };
  for (const OpFn& fn : {OpFn(rolled), OpFn(flipped)}) {
    CheckSharded(fn, {Float({5, 3}, 1)});
    CheckSharded(fn, {Float({2, 4, 2}, 1)});
  }
}

TEST(ShardedLines, SortIsStableForEveryTypeAndCut) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const DeviceMesh mesh({kRanks});
    const DeviceMesh grid({2, 2}, {"dp", "tp"});
    for (const int64_t n : {4097, 6000}) {
      for (int t = 0; t < kNumDTypes; ++t) {
        const auto dtype = static_cast<DType>(t);
        const DTensor whole = to(FromVector(Mixed(n, IsFloating(dtype)), {n}), dtype);
        for (const bool descending : {false, true}) {
          const Values want = sort(whole, 0, descending);
          for (const DTensor& x : {DistributeTensor(whole, mesh, {Shard(0)}),
                                   DistributeTensor(whole, grid, {Replicate(), Shard(0)})}) {
            const Values got = sort(x, -1, descending);
            const std::string what = absl::StrCat(static_cast<int>(dtype), " ", n, descending);
            ExpectSame(got[0], want[0], what);
            ExpectSame(got[1], want[1], what);
          }
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, RanksAreFoundByCounting) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const DeviceMesh mesh({kRanks});
    for (const int64_t n : {4097, 100000}) {
      for (const bool nans : {false, true}) {
        const DTensor whole = FromVector(Mixed(n, nans), {n});
        const DTensor x = DistributeTensor(whole, mesh, {Shard(0)});
        CommTrace trace;
        const std::vector<Values> got = {kthvalue(x, 7),
                                         kthvalue(x, n - 3, 0, true),
                                         median(x, 0),
                                         nanmedian(x, 0),
                                         {median(x)}};
        EXPECT_LE(trace.TotalBytes(), 30000) << trace.ToString();
        const std::vector<Values> want = {kthvalue(whole, 7),
                                          kthvalue(whole, n - 3, 0, true),
                                          median(whole, 0),
                                          nanmedian(whole, 0),
                                          {median(whole)}};
        for (size_t i = 0; i < got.size(); ++i) {
          for (size_t o = 0; o < got[i].size(); ++o) {
            ExpectSame(got[i][o], want[i][o], absl::StrCat(n, " ", i, " ", o));
          }
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of lines along any dim, which other mesh dims may cut elsewhere, of every dtype.
TEST(ShardedLines, RanksOfManyLinesAreFoundByCounting) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const DeviceMesh mesh({kRanks}), grid({2, 2}, {"dp", "tp"});
    for (int t = 0; t < kNumDTypes; ++t) {
      const auto dtype = static_cast<DType>(t);
      for (const int64_t dim : {0, 1, 2}) {
        Shape shape = {3, 2, 2};
        std::swap(shape[0], shape[dim]);
        shape[dim] = 4099;
        const DTensor whole = to(FromVector(Mixed(Numel(shape), IsFloating(dtype)), shape), dtype);
        const int d = static_cast<int>(dim), other = d == 0 ? 1 : 0;
        for (const DTensor& x : {DistributeTensor(whole, mesh, {Shard(d)}),
                                 DistributeTensor(whole, grid, {Shard(d), Shard(d)}),
                                 DistributeTensor(whole, grid, {Shard(other), Shard(d)})}) {
          const CommTrace trace;
          const std::vector<Values> got = {kthvalue(x, 11, dim), median(x, dim, true),
                                           nanmedian(x, dim)};
          EXPECT_LE(trace.TotalBytes(), 12 * 3 * (SizeOf(dtype) * 8 + 10) * 8 * 2);
          const std::vector<Values> want = {kthvalue(whole, 11, dim), median(whole, dim, true),
                                            nanmedian(whole, dim)};
          for (size_t i = 0; i < got.size(); ++i) {
            const std::string what = absl::StrCat(t, " ", dim, " ", i, x.spec().ToString());
            ExpectSame(got[i][0], want[i][0], what);
            ExpectSame(got[i][1], want[i][1], what);
          }
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, ARankThatIsMinusZeroKeepsItsSign) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const std::vector<double> values(5000, -0.0);
    const DTensor x = FromVector(values, {5000}, {DType::kF32, DeviceMesh({kRanks}), {Shard(0)}});
    EXPECT_TRUE(std::signbit(kthvalue(x, 3000)[0].Item()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// One line is one line whatever other dims it has.
TEST(ShardedLines, SortOfOneRowSendsEveryElementOnce) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const int64_t n = 20000;
    const DTensor whole = FromVector(Mixed(n, true), {1, n, 1});
    const DTensor x = DistributeTensor(whole, DeviceMesh({kRanks}), {Shard(1)});
    const CommTrace trace;
    const Values got = sort(x, 1, true);
    EXPECT_LE(static_cast<double>(trace.TotalBytes()) * kRanks, 2.2 * 4 * n) << trace.ToString();
    EXPECT_EQ(got[0].placements()[0], Shard(1));
    const Values want = sort(whole, 1, true);
    ExpectSame(got[0], want[0], "values");
    ExpectSame(got[1], want[1], "indices");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ShardedLines, SortPassesGradientsToWhereElementsWere) {
  const absl::Status status = RunSpmd(kRanks, [](RankContext&) {
    const int64_t n = 5000;
    const DTensor whole = FromVector(Noise(n, 2), {n}, {.dtype = DType::kF64});
    DTensor a = whole.Detach(), b = DistributeTensor(whole, DeviceMesh({kRanks}), {Shard(0)});
    a.RequiresGrad();
    b.RequiresGrad();
    const std::vector<double> weights = Noise(n, 4);
    sort(a)[0].Backward(FromVector(weights, {n}, {.dtype = DType::kF64}));
    const DTensor y = sort(b)[0];
    y.Backward(FromVector(weights, {n}, {DType::kF64, y.mesh(), {Shard(0)}}));
    EXPECT_EQ(b.grad().ToVector<double>(), a.grad().ToVector<double>());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What a call communicates, and how its results lie. Without `bytes` of exchanges.
std::string Done(const LineCase& c, const DTensor& x, bool bytes) {
  const CommTrace trace;
  std::string text;
  for (const DTensor& y : c.run(x)) absl::StrAppend(&text, y.spec().ToString(), "\n");
  for (const CommEvent& e : trace.events()) {
    const bool counted = bytes || e.kind != CollectiveKind::kExchange;
    absl::StrAppend(&text, std::string(Name(e.kind)), " ", e.op, " ", e.mesh_dims, " ",
                    counted ? absl::StrCat(e.bytes) : "some", "\n");
  }
  return text;
}

// A rehearsal has no elements and takes them as dealt out evenly: of such a line it tells every
// byte.
TEST(ShardedLines, ARehearsalGoesTheSameWay) {
  const std::vector<LineCase> cases = {
      {"sort", [](const DTensor& x) { return sort(x, 0); }, 0},
      {"sort down", [](const DTensor& x) { return sort(x, 0, true); }, 0},
      {"sort of a row", [](const DTensor& x) { return sort(unsqueeze(x, 0), 1); }, 0},
      {"kthvalue", [](const DTensor& x) { return kthvalue(x, 17); }, 0},
      {"median", [](const DTensor& x) { return median(x, 0); }, 0},
      {"nanmedian", [](const DTensor& x) { return nanmedian(x, 0, true); }, 0},
  };
  const absl::Status status = RunSpmd(kRanks, [&](RankContext&) {
    for (const DeviceMesh& mesh : {DeviceMesh({kRanks}), DeviceMesh({2, 2})}) {
      const Placements cut(mesh.ndim(), Shard(0));
      for (const int64_t n : {4096, 4099}) {  // the last rank of the latter has fewer
        std::vector<double> dealt(n);
        for (int64_t i = 0; i < n; ++i) {
          dealt[i] = static_cast<double>(i % kRanks * n + i / kRanks);
        }
        const DTensor x = FromVector(dealt, {n}, {DType::kF32, mesh, cut});
        for (const LineCase& c : cases) {
          std::string told;
          {
            const CostModel cost;
            const Rehearsal rehearsal(cost);
            told = Done(c, x, n % kRanks == 0);
          }
          EXPECT_EQ(told, Done(c, x, n % kRanks == 0)) << c.name << " " << mesh.ToString();
        }
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- errors

// As in torch.
TEST(Lines, OfNothingAndOfANumber) {
  for (DTensor (*fn)(const DTensor&) : {static_cast<DTensor (*)(const DTensor&)>(median),
                                        static_cast<DTensor (*)(const DTensor&)>(nanmedian)}) {
    for (const DType t : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
      const DTensor x = zeros({0, 3}, {.dtype = t}).RequiresGrad(), y = fn(x);
      EXPECT_EQ(y.dtype(), t);
      EXPECT_EQ(y.ndim(), 0);
      EXPECT_TRUE(std::isnan(y.Item()));
      y.Backward();
      EXPECT_EQ(x.grad().shape(), x.shape());
    }
    EXPECT_THAT(fn(zeros({0}, {.dtype = DType::kI64})).ToVector<int64_t>(),
                ::testing::ElementsAre(std::numeric_limits<int64_t>::min()));
    EXPECT_EQ(fn(zeros({0}, {.dtype = DType::kI32})).Item(), std::numeric_limits<int32_t>::min());
    EXPECT_EQ(fn(zeros({0}, {.dtype = DType::kU8})).Item(), 0);
    EXPECT_EQ(fn(zeros({0}, {.dtype = DType::kBool})).Item(), 1);
  }
  for (const int64_t k : {0, 1}) {
    const Values top = topk(full({}, 3.0), k);
    EXPECT_EQ(top[0].Item(), 3);
    EXPECT_EQ(top[1].Item(), 0);
    EXPECT_EQ(top[0].ndim(), 0);
  }
  EXPECT_THROW(topk(full({}, 3.0), 2), Error);
}

TEST(Lines, ErrorsSayWhatWouldBeRight) {
  using ::testing::HasSubstr;
  const DTensor x = Float({2, 3}, 1).Make(), none = Float({2, 0}, 1).Make();
  const DTensor ids = Ints({3}, {0, 2, 1}).Make();
  EXPECT_THAT(MessageOf([&] { topk(x, 4); }), HasSubstr("k = 4 is not in [0, 3]"));
  EXPECT_THAT(MessageOf([&] { kthvalue(x, 0); }), HasSubstr("k = 0 is not in [1, 3]"));
  EXPECT_THAT(MessageOf([&] { max(none, 1); }), HasSubstr("dim 1 of x [2, 0] is empty"));
  EXPECT_THAT(MessageOf([&] { argmax(none); }), HasSubstr("is empty"));
  EXPECT_THAT(MessageOf([&] { sort(x, 2); }), ::testing::StartsWith("[sort]"));
  EXPECT_THAT(MessageOf([&] { quantile(x, 1.5); }), HasSubstr("q = 1.5 is not in [0, 1]"));
  EXPECT_THAT(MessageOf([&] { quantile(x, 0.5, 0, false, "cubic"); }), HasSubstr("\"cubic\""));
  EXPECT_THAT(MessageOf([&] { bincount(x); }), HasSubstr("needs integers [n]"));
  EXPECT_THAT(MessageOf([&] { bincount(neg(ids)); }), HasSubstr("x holds -2"));
  EXPECT_THAT(MessageOf([&] { histc(x, 0); }), HasSubstr("bins >= 1"));
  EXPECT_THAT(MessageOf([&] { histc(x, INT64_MAX); }), HasSubstr("9223372036854775807 bins"));
  const DTensor far = full({1}, INT64_MAX, {DType::kI64});
  EXPECT_THAT(MessageOf([&] { bincount(far); }), HasSubstr("x holds 9223372036854775807"));
  EXPECT_THAT(MessageOf([&] { one_hot(far); }), HasSubstr("x holds 9223372036854775807"));
  EXPECT_THAT(MessageOf([&] { bucketize(x, x); }), HasSubstr("boundaries must have one dim"));
  EXPECT_THAT(MessageOf([&] { searchsorted(x, x, false, false, sub(argsort(x), 1)); }),
              HasSubstr("sorter holds -1"));
  EXPECT_THAT(MessageOf([&] { norm(none, -1, {1}); }), HasSubstr("dim 1 is empty"));
  EXPECT_THAT(MessageOf([&] { var(ids); }), HasSubstr("needs a floating tensor"));
  EXPECT_THAT(MessageOf([&] { trace(ids); }), HasSubstr("needs a matrix"));
  EXPECT_THAT(MessageOf([&] { diff(x, -1); }), HasSubstr("n >= 0"));
}

// Below 0 an index was cut to 0, and above 1 some interpolations had the last one.
TEST(Quantile, OfATensorOutsideOfItsRangeIsRefused) {
  const double inf = std::numeric_limits<double>::infinity();
  for (const int64_t n : {1, 4}) {
    const DTensor x = arange(0, static_cast<double>(n), 1, {.dtype = DType::kF64});
    for (const double q : {-1e-9, -0.2, 1.0000001, 2.0, inf, -inf, std::nan("")}) {
      for (const char* how : {"linear", "lower", "higher", "nearest", "midpoint"}) {
        const DTensor all = FromVector<double>({0.5, q}, {2}, {.dtype = DType::kF64});
        EXPECT_THAT(MessageOf([&] { quantile(x, all, {}, false, how).ToVector<double>(); }),
                    ::testing::HasSubstr("is out of range"))
            << q << " " << how << " " << n;
      }
    }
    const DTensor ends = FromVector<double>({0, -0.0, 1}, {3}, {.dtype = DType::kF64});
    EXPECT_EQ(quantile(x, ends).ToVector<double>(),
              (std::vector<double>{0, 0, static_cast<double>(n - 1)}));
  }
}

TEST(Quantile, BesideAnInfinity) {
  const double inf = std::numeric_limits<double>::infinity();
  const auto quantile_of = [](std::vector<double> v, double q) {
    const auto n = static_cast<int64_t>(v.size());
    return quantile(FromVector(v, {n}, {.dtype = DType::kF64}), q).Item();
  };
  EXPECT_EQ(quantile_of({-inf, 0, 1}, 0.25), -inf);
  EXPECT_EQ(quantile_of({-inf, -inf, 1}, 0.75), -inf);
  EXPECT_EQ(quantile_of({0, inf, inf}, 0.75), inf);
  EXPECT_EQ(quantile_of({0, 1, inf}, 0.75), inf);
  EXPECT_EQ(quantile_of({0, 1, inf}, 0.25), 0.5);
  EXPECT_TRUE(std::isnan(quantile_of({-inf, inf}, 0.5)));
}

// (Values of PyTorch.)
TEST(Counts, OfNothingAndOfRoundedNumbers) {
  const DTensor none = Ints({0}, {}).Make();
  EXPECT_EQ(bincount(none, Float({0}, 1).Make(), 3).dtype(), DType::kI64);
  EXPECT_EQ(bincount(none, {}, 3).ToVector<int64_t>(), std::vector<int64_t>(3));
  const DTensor x =
      FromVector(std::vector<double>{4.28125, 2.890625, 4.21875, 3.578125}, {4}, {DType::kBF16});
  EXPECT_EQ(histc(x, 7, 0, 10).ToVector<double>(), (std::vector<double>{0, 0, 3, 1, 0, 0, 0}));
}

TEST(Search, TakesANumber) {
  const DTensor tenths =
      FromVector(std::vector<double>{0.1, 0.2, 0.3}, {3}, {.dtype = DType::kF32});
  EXPECT_EQ(bucketize(0.1, tenths).Item(), 0);  // as a float32
  EXPECT_EQ(searchsorted(tenths, 0.2, false, true).Item(), 2);
  EXPECT_EQ(bucketize(2.5, Ints({3}, {1, 2, 3}).Make(), true).dtype(), DType::kI32);
  EXPECT_EQ(bucketize(2.5, Ints({3}, {1, 2, 3}).Make()).Item(), 2);
}

}  // namespace
}  // namespace dtensor::testing::sharded_lines_test
