#include <limits>
#include <vector>

#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/message.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::index_test {
namespace {

OpFn Cat(int64_t dim) {
  return [=](const std::vector<DTensor>& x) { return cat(x, dim); };
}
OpFn Stack(int64_t dim) {
  return [=](const std::vector<DTensor>& x) { return stack(x, dim); };
}

TEST(Cat, JoinsInOrder) {
  const DTensor a = Ints({1, 2}, {1, 2}).Make(), b = Ints({2, 2}, {3, 4, 5, 6}).Make();
  EXPECT_EQ(cat({a, b}, 0).ToVector<int64_t>(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(cat({b, b}, -1).ToVector<int64_t>(), (std::vector<int64_t>{3, 4, 3, 4, 5, 6, 5, 6}));
  EXPECT_EQ(cat({a}, 1).ToVector<int64_t>(), (std::vector<int64_t>{1, 2}));
}

TEST(Cat, PromotesAndSkipsEmpty) {
  const DTensor ints = Ints({2}, {1, 2}).Make(), floats = Float({3}, 1).Make();
  EXPECT_EQ(cat({ints, floats}).dtype(), DType::kF64);
  const DTensor none = Float({0}, 1).Make(), x = Float({2, 3}, 2).Make();
  EXPECT_EQ(cat({none, x}, 1).shape(), (Shape{2, 3}));
  EXPECT_EQ(cat({none, none}).shape(), Shape{0});
  EXPECT_EQ(cat({Float({0, 3}, 1).Make(), x}).shape(), (Shape{2, 3}));
}

TEST(Stack, AddsADim) {
  const DTensor a = Ints({2}, {1, 2}).Make(), b = Ints({2}, {3, 4}).Make();
  EXPECT_EQ(stack({a, b}).ToVector<int64_t>(), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(stack({a, b}, -1).ToVector<int64_t>(), (std::vector<int64_t>{1, 3, 2, 4}));
  const DTensor scalar = Float({}, 1).Make();
  EXPECT_EQ(stack({scalar, scalar}).shape(), Shape{2});
}

TEST(Cat, GradientsAndSharding) {
  const std::vector<Operand> xs = {Float({2, 3}, 1), Float({2, 1}, 2), Float({2, 2}, 3)};
  CheckGradients(Cat(1), xs);
  CheckGradients(Stack(-1), {Float({2, 3}, 1), Float({2, 3}, 2)});
  CheckSharded(Cat(1), xs);
  CheckSharded(Cat(0), {Float({3, 2}, 1), Float({2, 2}, 2)});
  CheckSharded(Stack(1), {Float({3, 2}, 1), Float({3, 2}, 2)});
}

TEST(To, DTypesAndGradients) {
  const DTensor x = Float({3}, 1).Make();
  EXPECT_EQ(to(x, DType::kF64).impl(), x.impl());
  const DTensor y = to(x, DType::kF32);
  EXPECT_EQ(y.dtype(), DType::kF32);
  sum(y).Backward();
  EXPECT_EQ(x.grad().dtype(), DType::kF64);
  EXPECT_EQ(x.grad().ToVector<double>(), (std::vector<double>{1, 1, 1}));
  EXPECT_EQ(to(Ints({2}, {0, 3}).Make(), DType::kBool).ToVector<int64_t>(),
            (std::vector<int64_t>{0, 1}));
}

TEST(To, OnlyExactCastsKeepAPendingSum) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor wide = zeros({2}, {DType::kF32, mesh, {Partial()}});
    EXPECT_EQ(to(wide, DType::kF64).placements()[0], Partial());
    EXPECT_FALSE(to(wide, DType::kBF16).placements()[0].is_partial());
    EXPECT_FALSE(to(wide, DType::kI64).placements()[0].is_partial());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Copies, CloneContiguousDetachAndLikes) {
  const DTensor x = Float({2, 3}, 1).Make();
  const DTensor y = clone(x);
  EXPECT_FALSE(y.local().buffer().SharesWith(x.local().buffer()));
  EXPECT_EQ(y.ToVector<double>(), x.ToVector<double>());
  const DTensor t = contiguous(transpose(x, 0, 1));
  EXPECT_TRUE(t.local().is_contiguous());
  EXPECT_EQ(t.ToVector<double>(), transpose(x, 0, 1).ToVector<double>());
  EXPECT_FALSE(detach(x).requires_grad());
  EXPECT_EQ(zeros_like(x).ToVector<double>(), std::vector<double>(6, 0));
  EXPECT_EQ(ones_like(x).ToVector<double>(), std::vector<double>(6, 1));
  const OpFn copies = [](const std::vector<DTensor>& v) {
    return contiguous(transpose(clone(v[0]), 0, 1));
  };
  CheckGradients(copies, {Float({2, 3}, 1)});
  CheckSharded(copies, {Float({2, 3}, 1)});
}

TEST(Copies, LikesKeepThePlacement) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    EXPECT_EQ(zeros_like(zeros({4}, {DType::kF32, mesh, {Shard(0)}})).placements()[0], Shard(0));
    EXPECT_EQ(ones_like(zeros({4}, {DType::kF32, mesh, {Partial()}})).placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Copies, WhereNothingMovesAreNewTensors) {
  const DTensor x = full({}, 3.0), row = full({1}, 3.0);
  for (const DTensor& y : {flip(x, {0}), flip(row, {}), roll(row, {0}, {0}), diff(row, 0),
                           rot90(full({1, 1}, 3.0), 4), repeat(row, {1})}) {
    add_(y, 1);
    EXPECT_EQ(y.Item(), 4);
  }
  EXPECT_EQ(x.Item(), 3);
  EXPECT_EQ(row.Item(), 3);
}

TEST(InPlace, ChangesSelf) {
  const DTensor x = Ints({2, 2}, {1, 2, 3, 4}).Make();
  copy_(x, Float({1}, 1).Make());
  EXPECT_EQ(x.ToVector<int64_t>(), std::vector<int64_t>(4, static_cast<int64_t>(Noise(1, 1)[0])));
  const DTensor y =
      FromVector(std::vector<double>{1, 2, 3, 4}, {2, 2}, {DType::kF64, DeviceMesh::Self(), {}});
  const DTensor row =
      FromVector(std::vector<double>{10, 20}, {2}, {DType::kF64, DeviceMesh::Self(), {}});
  EXPECT_EQ(add_(y, row, 2).ToVector<double>(), (std::vector<double>{21, 42, 23, 44}));
  EXPECT_EQ(mul_(y, row).ToVector<double>(), (std::vector<double>{210, 840, 230, 880}));
  EXPECT_EQ(add_(y, 1).ToVector<double>(), (std::vector<double>{211, 841, 231, 881}));
  EXPECT_EQ(mul_(y, 2).ToVector<double>(), (std::vector<double>{422, 1682, 462, 1762}));
  EXPECT_EQ(copy_(y, row).ToVector<double>(), (std::vector<double>{10, 20, 10, 20}));
}

TEST(InPlace, BackwardRefusesAChangedValue) {
  const DTensor x = Float({2}, 1).Make();
  const DTensor y = mul(x, 2.0), z = mul(y, y);
  mul_(y, 3);
  EXPECT_THAT(MessageOf([&] { sum(z).Backward(); }), ::testing::HasSubstr("changed in place"));
}

TEST(InPlace, KeepsThePlacementOfSelf) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor x = zeros({4}, {DType::kF64, mesh, {Shard(0)}});
    add_(x, ones({4}, {DType::kF64, mesh, {Partial()}}));
    EXPECT_EQ(x.placements()[0], Shard(0));
    EXPECT_EQ(x.ToVector<double>(), std::vector<double>(4, 1));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Index, Errors) {
  const DTensor x = Float({2, 3}, 1).Make(), row = Float({3}, 1).Make();
  EXPECT_THAT(MessageOf([&] { cat({}); }),
              ::testing::StartsWith("[cat] needs at least one tensor"));
  EXPECT_THAT(MessageOf([&] { cat({x, row}); }),
              ::testing::StartsWith("[cat] numbers of dims differ: xs0 [2, 3], xs1 [3]"));
  EXPECT_THAT(MessageOf([&] { cat({x, transpose(x, 0, 1)}); }), ::testing::StartsWith("[cat]"));
  EXPECT_THAT(MessageOf([&] { cat({sum(x)}); }), ::testing::HasSubstr("tensor 0 has no dims"));
  EXPECT_THAT(MessageOf([&] { stack({x, row}); }),
              ::testing::StartsWith("[stack] shapes differ: tensor 0 is [2, 3], tensor 1 is [3]"));
  EXPECT_THAT(MessageOf([&] { add_(Ints({2}, {1, 2}).Make(), 0.5); }),
              ::testing::StartsWith("[add_] self is int64 and cannot hold the float32 result"));
  EXPECT_THAT(MessageOf([&] { add_(row, x); }), ::testing::StartsWith("[add_]"));
}

TEST(Logspace, OfIntegersHasABaseThatNeedNotBeOne) {
  EXPECT_THAT(logspace(0, -3, 2, 1.1, {.dtype = DType::kI64}).ToVector<int64_t>(),
              ::testing::ElementsAre(1, 0));
  EXPECT_THAT(logspace(-1.5, -2, 1, 0.5, {.dtype = DType::kU8}).ToVector<double>(),
              ::testing::ElementsAre(2));
  EXPECT_THAT(logspace(0.9, 4.7, 4, 2.5, {.dtype = DType::kI32}).ToVector<double>(),
              ::testing::ElementsAre(1, 3, 11, 39));
}

TEST(TriangleIndices, AreTheCellsOnEitherSide) {
  const int64_t far = std::numeric_limits<int64_t>::max();
  for (const int64_t rows : {0, 1, 3, 4}) {
    for (const int64_t columns : {0, 1, 2, 5}) {
      for (const int64_t offset : {-far - 1, int64_t{-6}, int64_t{-2}, int64_t{-1}, int64_t{0},
                                   int64_t{1}, int64_t{3}, int64_t{7}, far}) {
        for (const bool upper : {false, true}) {
          std::vector<int64_t> row, column;
          for (int64_t r = 0; r < rows; ++r) {
            for (int64_t k = 0; k < columns; ++k) {
              if (upper ? k - r < offset : k - r > offset) continue;
              row.push_back(r);
              column.push_back(k);
            }
          }
          const DTensor got =
              upper ? triu_indices(rows, columns, offset) : tril_indices(rows, columns, offset);
          const auto n = static_cast<int64_t>(row.size());
          row.insert(row.end(), column.begin(), column.end());
          EXPECT_EQ(got.shape(), (Shape{2, n}));
          EXPECT_EQ(got.ToVector<int64_t>(), row) << rows << " " << columns << " " << offset;
        }
      }
    }
  }
  // Refused before anything is made; found by calls with random arguments.
  const int64_t large = int64_t{1} << 48;
  EXPECT_THAT(MessageOf([&] { tril_indices(4, large, far); }),
              ::testing::HasSubstr("takes more than 2^48"));
  EXPECT_EQ(triu_indices(large, 4, 0).shape(), (Shape{2, 10}));
}

TEST(Linspace, OfOneNumberIsThatNumber) {
  const int64_t odd = (int64_t{1} << 53) + 1;  // no double
  EXPECT_EQ(linspace(odd, odd + 2, 1, {.dtype = DType::kI64}).ToVector<int64_t>(),
            std::vector<int64_t>{odd});
  EXPECT_EQ(linspace(2, 5, 1).dtype(), DType::kF32);
}

}  // namespace
}  // namespace dtensor::testing::index_test
