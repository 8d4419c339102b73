// What a comparison of 100,000 drawn calls with torch found: numbers at the ends of their types,
// and calls that torch refuses.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "tests/common/message.h"

namespace dtensor::edge_values_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::MessageOf;

DTensor Longs(std::vector<int64_t> values, Shape shape) {
  return FromVector(values, shape, {.dtype = DType::kI64});
}
DTensor Bools(std::vector<uint8_t> values) {
  const auto n = static_cast<int64_t>(values.size());
  return FromVector(values, {n}, {.dtype = DType::kBool});
}

TEST(EdgeValues, MeansOfLongIntegersAreExact) {
  const int64_t odd = (int64_t{1} << 53) + 1, most = std::numeric_limits<int64_t>::max();
  const DTensor x = Longs({0, 3}, {2}), at = Longs({0}, {1}), both = Longs({0, 0}, {2});
  for (const int64_t value : {odd, most - 1, -odd, std::numeric_limits<int64_t>::min()}) {
    EXPECT_THAT(scatter_reduce(x, 0, at, Longs({value}, {1}), "mean", false).ToVector<int64_t>(),
                ElementsAre(value, 3));
  }
  const DTensor big = Longs({(int64_t{1} << 62) + 1, 3}, {2}), small = Longs({5, 7}, {2});
  EXPECT_THAT(scatter_reduce(big, 0, both, small, "mean", true).ToVector<int64_t>(),
              ElementsAre(1537228672809129305, 3));
  // Down, not towards 0.
  EXPECT_THAT(index_reduce(Longs({-8, 3}, {2}), 0, both, small, "mean").ToVector<int64_t>(),
              ElementsAre(1, 3));
  EXPECT_THAT(index_reduce(Longs({-14, 3}, {2}), 0, both, small, "mean").ToVector<int64_t>(),
              ElementsAre(-1, 3));
}

TEST(EdgeValues, APadCropsNoMoreThanThereIs) {
  const DTensor x = ones({2, 1});
  for (const DimList& pad_of : {DimList{-2, 1}, {1, -2}, {-1, -1}}) {
    EXPECT_THAT(MessageOf([&] { constant_pad_nd(x, pad_of); }), HasSubstr("dim 1 of 1 cannot "));
  }
  EXPECT_THAT(MessageOf([&] { pad(ones({1, 2}), {-3, 2}); }),
              HasSubstr("dim 1 of 2 cannot lose 3"));
  EXPECT_EQ(constant_pad_nd(x, {-1, 2}).shape(), (Shape{2, 2}));
}

TEST(EdgeValues, TypesOfSums) {
  // A tensor without dims does not widen the others.
  const DTensor wide = full({}, 2.5, {.dtype = DType::kF64});
  EXPECT_EQ(block_diag({wide, ones({1, 2}, {.dtype = DType::kBF16})}).dtype(), DType::kBF16);
  EXPECT_EQ(block_diag({wide, ones({1, 2}, {.dtype = DType::kI64})}).dtype(), DType::kF64);
  // Products are of the type of the sum.
  const DTensor near_one = full({1}, 1.0078125, {.dtype = DType::kBF16});
  EXPECT_EQ(addr(zeros({1, 1}), near_one, near_one).Item(),
            static_cast<float>(1.0078125 * 1.0078125));
  const DTensor yes = full({1, 1}, 1, {.dtype = DType::kBool});
  const DTensor none = zeros({0, 1, 4}, {.dtype = DType::kBool});
  const DTensor sum = addbmm(yes, none, transpose(none, 1, 2), 0.0, 0);
  EXPECT_EQ(sum.dtype(), DType::kBool);
  EXPECT_EQ(sum.Item(), 0);
}

TEST(EdgeValues, BoolsHaveNoDifference) {
  const DTensor a = Bools({1, 0, 1}), b = Bools({1, 1, 0});
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { sub(a, true); }, [&] { rsub(a, true); }, [&] { sub(Scalar(true), a); },
           [&] { sub_(a, b); }, [&] { sub_(a, true); }, [&] { sub(a, b); }}) {
    EXPECT_THAT(MessageOf(call), HasSubstr("is not defined for bool"));
  }
  EXPECT_THAT(a.ToVector<int64_t>(), ElementsAre(1, 0, 1));
  EXPECT_THAT(sub(a, 1).ToVector<int64_t>(), ElementsAre(0, -1, 0));
}

TEST(EdgeValues, IntegersHaveNoFloatingFactor) {
  const DTensor x = Longs({1, 2}, {2});
  EXPECT_THAT(MessageOf([&] { add(x, 2, 0.5); }), HasSubstr("[add] alpha is a floating number"));
  EXPECT_THAT(MessageOf([&] { sub(x, 2, 0.5); }), HasSubstr("[sub] alpha is a floating number"));
  EXPECT_THAT(add(x, 1.5, 0.5).ToVector<double>(), ElementsAre(1.75, 2.75));
  EXPECT_THAT(sub(x, 2, 3).ToVector<int64_t>(), ElementsAre(-5, -4));
}

// The product with alpha is of the type that the sum has, and to subtract 0 changes no zero.
TEST(EdgeValues, NumbersWithTensorsAsInTorch) {
  const DTensor bytes = full({1}, 200, {.dtype = DType::kU8});
  EXPECT_EQ(rsub(bytes, 0.5, 2).Item(), -399.5);
  EXPECT_EQ(rsub(full({1}, 1 << 30, {.dtype = DType::kI32}), 0.5, 4).Item(), -4294967296.0);
  EXPECT_EQ(rsub(bytes, 1, 2).ToVector<uint8_t>()[0], 113);  // 1 - 400, mod 256
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    const DTensor zero = full({1}, -0.0, {.dtype = dtype});
    EXPECT_TRUE(std::signbit(sub(zero, 0).Item()));
    EXPECT_TRUE(std::signbit(sub(zero, 0, 3).Item()));
    EXPECT_FALSE(std::signbit(add(zero, 0).Item()));
    EXPECT_TRUE(std::signbit(sub_(clone(zero), 0).Item()));
  }
  const DTensor one = ones({1}, {.dtype = DType::kF64});
  EXPECT_EQ(sub(one, std::numeric_limits<int64_t>::min()).Item(), 0x1p63);
  EXPECT_EQ(sub_(clone(one), std::numeric_limits<int64_t>::min()).Item(), 0x1p63);
  EXPECT_EQ(add(one, int64_t{1} << 62, 4).Item(), 0x1p64);
  for (const int alpha : {2, -1}) {
    const DTensor sum = add(Bools({1, 0}), true, alpha);
    EXPECT_EQ(sum.dtype(), DType::kBool);
    EXPECT_THAT(sum.ToVector<uint8_t>(), ElementsAre(1, 1));
  }
  EXPECT_THAT(add(Bools({1, 0}), true, 0).ToVector<uint8_t>(), ElementsAre(1, 0));
}

TEST(EdgeValues, AHuberLossHasTheInputsDType) {
  const DTensor narrow = ones({2}), wide = ones({2}, {.dtype = DType::kF64});
  for (const Reduction how : {Reduction::kNone, Reduction::kMean, Reduction::kSum}) {
    EXPECT_EQ(huber_loss(narrow, wide, how).dtype(), DType::kF32);
    EXPECT_EQ(huber_loss(wide, narrow, how).dtype(), DType::kF64);
    EXPECT_EQ(smooth_l1_loss(narrow, wide, how).dtype(), DType::kF64);
  }
}

TEST(EdgeValues, MeansAndVariancesThatAreNone) {
  EXPECT_THAT(MessageOf([&] { nanmean(ones({3}), {}, false, DType::kI64); }),
              HasSubstr("[nanmean] has no int64 result"));
  EXPECT_THAT(MessageOf([&] { group_norm(ones({1, 2}), 2); }),
              HasSubstr("one value has no variance"));
  EXPECT_EQ(group_norm(ones({2, 2}), 2).shape(), (Shape{2, 2}));
}

TEST(EdgeValues, WhatIsPaddingIsNotMultiplied) {
  DTensor table = ones({4, 1}).RequiresGrad();
  DTensor weights = FromVector<float>({2, NAN}, {1, 2}).RequiresGrad();
  const DTensor y =
      embedding_bag(Longs({1, 0}, {1, 2}), table, {}, "sum", false, weights, /*padding_idx=*/0);
  EXPECT_EQ(y.Item(), 2);
  sum(y).Backward();
  EXPECT_THAT(table.grad().ToVector<double>(), ElementsAre(0, 2, 0, 0));
  EXPECT_THAT(weights.grad().ToVector<double>(), ElementsAre(1, 0));
}

}  // namespace
}  // namespace dtensor::edge_values_test
