#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::reduce_test {
namespace {

OpFn Sum(DimList dims, bool keepdim) {
  return [=](const std::vector<DTensor>& x) { return sum(x[0], dims, keepdim); };
}
OpFn Mean(DimList dims, bool keepdim) {
  return [=](const std::vector<DTensor>& x) { return mean(x[0], dims, keepdim); };
}
OpFn Amax(DimList dims, bool keepdim) {
  return [=](const std::vector<DTensor>& x) { return amax(x[0], dims, keepdim); };
}

TEST(Sum, DimsAndKeepdim) {
  const Operand x = Float({2, 3, 4}, 1);
  const DTensor t = x.Make();
  EXPECT_EQ(sum(t).shape(), Shape{});
  EXPECT_EQ(sum(t, {-1}).shape(), (Shape{2, 3}));
  EXPECT_EQ(sum(t, {-3, 1}, true).shape(), (Shape{1, 1, 4}));
  std::vector<double> want(4, 0);
  for (int64_t i = 0; i < 24; ++i) want[i % 4] += x.values[i];
  ExpectClose(sum(t, {0, 1}).ToVector<double>(), want);
  ExpectClose(mean(t, {0, 1}).ToVector<double>(),
              {want[0] / 6, want[1] / 6, want[2] / 6, want[3] / 6});
}

TEST(Sum, DTypes) {
  const DTensor bools = to(Ints({3}, {1, 0, 5}).Make(), DType::kBool);
  EXPECT_EQ(sum(bools).dtype(), DType::kI64);
  EXPECT_EQ(sum(bools).Item(), 2);
  const DTensor ints = Ints({2, 2}, {1, 2, 3, 4}).Make();
  EXPECT_EQ(sum(ints, {}, false, DType::kF64).dtype(), DType::kF64);
  EXPECT_EQ(sum(ints, {0}).ToVector<int64_t>(), (std::vector<int64_t>{4, 6}));
  EXPECT_EQ(mean(ints, {}, false, DType::kF64).Item(), 2.5);
}

TEST(Sum, ScalarsAndEmptyTensors) {
  const DTensor scalar = Float({}, 1).Make(), none = Float({0}, 1).Make();
  EXPECT_EQ(sum(scalar, {0}).shape(), Shape{});
  EXPECT_EQ(sum(scalar, {-1}).Item(), scalar.Item());
  EXPECT_EQ(sum(none).Item(), 0);
  EXPECT_TRUE(std::isnan(mean(none).Item()));
  EXPECT_EQ(amax(scalar).Item(), scalar.Item());
  EXPECT_EQ(amax(Float({0, 3}, 1).Make(), {1}).shape(), Shape{0});
}

// Wherever in a row, of any length, the one element is that is not 1.
TEST(Prod, TakesEveryElementOfARow) {
  for (const DType type : {DType::kF32, DType::kF64, DType::kBF16, DType::kI64}) {
    for (const int64_t n : {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100}) {
      std::vector<double> x(static_cast<size_t>(n * n), 1);
      for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i * n + i)] = 3;
      const DTensor rows = to(FromVector(x, {n, n}), type);
      EXPECT_EQ(prod(rows, {1}).ToVector<double>(), std::vector<double>(n, 3)) << n;
    }
  }
}
TEST(Prod, OfLongRowsMayBeSubnormal) {
  for (const int n : {120, 126, 127, 140, 149, 150, 1000}) {
    const DTensor halves = ones({2, n}) * 0.5;
    EXPECT_EQ(prod(halves, {1}).ToVector<double>(),
              std::vector<double>(2, n > 149 ? 0 : std::ldexp(1, -n)))
        << n;
  }
}

// 300 times 300 is no float16, times 0 elsewhere it is 0; found by calls with random arguments.
TEST(Prod, OfPartsThatOverflowFloat16) {
  const Operand x = {{4, 1}, {300, 300, 0, 2}, DType::kF16, false};
  for (const bool runs : {false, true}) {
    const OpFn fn = [runs](const std::vector<DTensor>& v) {
      return runs ? cumprod(v[0], 0) : prod(v[0], {0});
    };
    EXPECT_EQ(fn({x.Make()}).ToVector<double>().back(), 0);
    CheckSharded(fn, {x});
  }
}

TEST(Sum, Gradients) {
  for (bool keepdim : {false, true}) {
    CheckGradients(Sum({1}, keepdim), {Float({2, 3, 2}, 1)});
    CheckGradients(Sum({0, -1}, keepdim), {Float({2, 3, 2}, 1)});
    CheckGradients(Mean({}, keepdim), {Float({2, 3}, 1)});
    CheckGradients(Amax({1}, keepdim), {Float({2, 3, 2}, 1)});
    CheckGradients(Amax({}, keepdim), {Float({2, 3}, 1)});
  }
  CheckGradients(Sum({}, false), {Float({}, 1)});
}

TEST(Amax, TiesShareTheGradient) {
  const Operand x = {{4}, {1, 3, 3, 2}};
  const DTensor t = x.Make();
  amax(t).Backward();
  EXPECT_EQ(t.grad().ToVector<double>(), (std::vector<double>{0, 0.5, 0.5, 0}));
  CheckSharded(Amax({0}, false), {x});
}

// Rows of every length beside whole vectors; NaN wins wherever it stands.
TEST(Amax, OfRowsOfEveryLength) {
  for (const int64_t n : {1, 5, 15, 16, 31, 33, 64, 100}) {
    std::vector<double> values = Noise(n * n, static_cast<uint64_t>(n));
    const DTensor x = to(FromVector(values, {n, n}), DType::kF32);
    const auto all = x.ToVector<double>();
    const auto most = amax(x, {1}).ToVector<double>(), least = amin(x, {1}).ToVector<double>();
    for (int64_t r = 0; r < n; ++r) {
      const auto row = all.begin() + r * n;
      EXPECT_EQ(most[r], *std::max_element(row, row + n)) << n;
      EXPECT_EQ(least[r], *std::min_element(row, row + n)) << n;
    }
    for (int64_t r = 0; r < n; ++r) values[r * n + r] = std::nan("");
    const DTensor with_nan = to(FromVector(values, {n, n}), DType::kF32);
    for (const double v : amax(with_nan, {1}).ToVector<double>()) EXPECT_TRUE(std::isnan(v)) << n;
  }
}

// The sum of such a row is NaN although none of its elements is.
TEST(Amax, InfinitiesOfBothSignsAreNoNan) {
  const double inf = std::numeric_limits<double>::infinity(), large = 3e38;
  for (const int64_t n : {6, 32, 70}) {
    std::vector<double> both = Noise(n, 1), sums = both;
    both[0] = inf, both[n - 1] = -inf;
    sums[0] = sums[1] = sums[2] = large, sums[3] = sums[4] = -inf;
    if (n > 32) sums[32] = large;  // in a lane with the first
    both.insert(both.end(), sums.begin(), sums.end());
    const DTensor x = to(FromVector(both, {2, n}), DType::kF32);
    const auto expect = [n](const DTensor& got, double first, double second) {
      const auto values = got.ToVector<double>();
      EXPECT_EQ(values[0], first) << n;
      EXPECT_FLOAT_EQ(static_cast<float>(values[1]), static_cast<float>(second)) << n;
    };
    expect(amax(x, {1}), inf, large);
    expect(amin(x, {1}), -inf, -inf);
    both[n / 2] = both[n + 5] = std::nan("");
    const DTensor with_nan = to(FromVector(both, {2, n}), DType::kF32);
    for (const double v : amax(with_nan, {1}).ToVector<double>()) EXPECT_TRUE(std::isnan(v)) << n;
  }
}

TEST(Reduce, Sharded) {
  for (const DimList& dims : {DimList{}, DimList{1}, DimList{0, 2}}) {
    for (bool keepdim : {false, true}) {
      CheckSharded(Sum(dims, keepdim), {Float({5, 2, 3}, 1)});
      CheckSharded(Mean(dims, keepdim), {Float({5, 2, 3}, 1)});
      CheckSharded(Amax(dims, keepdim), {Float({5, 2, 3}, 1)});
    }
  }
}

TEST(Reduce, ShardedDimsStayPending) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor x = FromVector(Noise(12, 1), {4, 3}, {DType::kF64, mesh, {Shard(0)}});
    CommTrace trace;
    EXPECT_EQ(sum(x, {0}).placements()[0], Partial());
    EXPECT_EQ(mean(x, {0}).placements()[0], Partial());
    EXPECT_EQ(amax(x, {0}).placements()[0], Partial(ReduceOp::kMax));
    EXPECT_EQ(sum(x, {1}).placements()[0], Shard(0));
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SumTo, UndoesBroadcasting) {
  const DTensor x = Float({2, 3, 4}, 1).Make();
  for (const Shape& shape : {Shape{2, 3, 4}, Shape{3, 4}, Shape{1, 4}, Shape{2, 1, 4}, Shape{}}) {
    EXPECT_EQ(sum_to(x, shape).shape(), shape);
  }
  EXPECT_THAT(MessageOf([&] { sum_to(x, {2, 4}); }), ::testing::StartsWith("[sum_to] x [2, 3, 4]"));
}

// The value of a pending sum of integers is what is left of it in their type.
// In bfloat16 256 + 1 is 256: rounded between the two sums, these would be 256.
TEST(SumTo, RoundsOnce) {
  const DTensor x = to(FromVector<double>({256, 1, 1, 0, 0, 0}, {3, 2}), DType::kBF16);
  EXPECT_EQ(sum_to(x, {1}).Item(), 258);
  const DTensor leaf = ones({2, 1}, {.dtype = DType::kBF16}).RequiresGrad();
  const std::vector<double> dy = {256, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0};
  expand(leaf, {3, 2, 2}).Backward(to(FromVector<double>(dy, {3, 2, 2}), DType::kBF16));
  EXPECT_THAT(leaf.grad().ToVector<double>(), ::testing::ElementsAre(258, 3));
}

TEST(Equal, ComparesInThePromotedType) {
  const DTensor whole = FromVector<int64_t>({1, 2}, {2});
  EXPECT_TRUE(equal(whole, FromVector<double>({1, 2}, {2})));
  EXPECT_FALSE(equal(whole, FromVector<double>({1, 2.5}, {2})));
  EXPECT_FALSE(equal(whole, FromVector<double>({1, 2}, {1, 2})));
  const DTensor tenth = full({1}, 0.1);
  EXPECT_FALSE(equal(tenth, full({1}, 0.1, {.dtype = DType::kF64})));
  EXPECT_FALSE(equal(tenth, to(tenth, DType::kBF16)));
}

TEST(Reduce, PendingNarrowIntegersWrapBeforeTheyAreSummed) {
  struct Case {
    DType dtype;
    int64_t terms[2], sum;
  };
  const absl::Status status = RunSpmd(2, [](RankContext& context) {
    for (const Case& c : {Case{DType::kU8, {200, 100}, 44}, Case{DType::kBool, {1, 1}, 1},
                          Case{DType::kI32, {1 << 30, 1 << 30}, -(int64_t{1} << 31)},
                          Case{DType::kI64, {200, 100}, 300}}) {
      const std::vector<int64_t> mine(3, c.terms[context.rank()]);
      const DTensor x =
          FromLocal(OnSelf(*Tensor::FromVector(mine, {3}, c.dtype)), DeviceMesh({2}), {Partial()});
      EXPECT_EQ(sum(x).ToVector<int64_t>()[0], 3 * c.sum) << static_cast<int>(c.dtype);
      EXPECT_EQ(sum(x, {0}).dtype(), DType::kI64);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What is summed in int64 is not first written down in it: eight times the memory.
TEST(Sum, OfNarrowIntegersMakesNoCopyOfThem) {
  constexpr int64_t kRows = 1 << 10, kColumns = 1 << 16;  // 64 MiB
  const absl::Status status = RunSpmd(2, [](RankContext& context) {
    const DeviceMesh mesh({2});
    const auto added = [&](const std::function<DTensor()>& call) {
      Allocator& allocator = *context.device_allocator();
      const int64_t before = allocator.stats().in_use_bytes;
      allocator.ResetPeak();
      EXPECT_EQ(call().ToVector<int64_t>()[0] % kRows, 0);
      return allocator.stats().peak_bytes - before;
    };
    for (const DType dtype : {DType::kU8, DType::kBool}) {
      const DTensor x = full({kRows, kColumns}, 1, {dtype, mesh, {Shard(0)}});
      constexpr int64_t kScalar = 1 << 16, kRow = 8 * kColumns;
      EXPECT_LE(added([&] { return sum(x); }), kScalar);
      EXPECT_LE(added([&] { return sum(x, {1}); }), kScalar);
      EXPECT_LE(added([&] { return sum(x, {0}); }), 3 * kRow + kScalar);  // and its reduction
      EXPECT_LE(added([&] { return sum(x, {}, false, DType::kI64); }), kScalar);
      EXPECT_LE(added([&] { return prod(x, {}, false, DType::kI64) * kRows; }), kScalar);
      // What is not contiguous is copied, in its own type.
      const int64_t own = x.local().nbytes() + kScalar;
      EXPECT_LE(added([&] { return sum(transpose(x, 0, 1)); }), own);
      EXPECT_LE(added([&] { return sum(slice(x, 1, 0, kColumns, 2)); }), own);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Reduce, Errors) {
  const DTensor x = Float({2, 3}, 1).Make();
  EXPECT_THAT(MessageOf([&] { sum(x, {2}); }), ::testing::StartsWith("[sum]"));
  EXPECT_THAT(MessageOf([&] { sum(x, {1, -1}); }), ::testing::HasSubstr("dim 1 is named twice"));
  EXPECT_THAT(MessageOf([&] { mean(Ints({2}, {1, 2}).Make()); }),
              ::testing::StartsWith("[mean] has no int64 result"));
  EXPECT_THAT(MessageOf([&] { amax(Float({0, 3}, 1).Make(), {0}); }),
              ::testing::StartsWith("[amax] dim 0 of x [0, 3] is empty"));
}

// A product with 1 / n is a unit beside it for many n; a bfloat16 sum of 257 ones is 256.
TEST(Mean, OfEqualNumbersIsTheNumber) {
  for (const DType t : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (int64_t n = 1; n < 300; ++n) {
      EXPECT_EQ(mean(full({n}, 1, {.dtype = t})).Item(), 1) << Name(t) << n;
    }
  }
  EXPECT_EQ(std(full({60}, -193.0)).Item(), 0);
}

TEST(Var, OfNothingIsNan) { EXPECT_TRUE(std::isnan(var(Float({0}, 1).Make(), {}, -1).Item())); }

}  // namespace
}  // namespace dtensor::testing::reduce_test
