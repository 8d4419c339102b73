#include "dtensor/tensor/shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace dtensor::shape_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Shape, ProductsAreChecked) {
  EXPECT_EQ(*CheckedNumel({}), 1);
  EXPECT_EQ(*CheckedNumel({3, 0, 5}), 0);
  EXPECT_EQ(*CheckedNumel({1 << 20, 1 << 20}), int64_t{1} << 40);
  const int64_t half = int64_t{1} << 32;
  EXPECT_THAT(std::string(CheckedNumel({half, half}).status().message()), HasSubstr("2^63 - 1"));
  EXPECT_THAT(std::string(CheckedNumel({2, -1}).status().message()),
              AllOf(HasSubstr("-1"), HasSubstr("[2, -1]")));
  // A zero does not hide an overflow that strides would see, nor makes one where there is none.
  EXPECT_EQ(CheckedNumel({0, half}).value(), 0);
  EXPECT_EQ(*CheckedBytes({1 << 10}, DType::kF64), 8 << 10);
  EXPECT_FALSE(CheckedBytes({int64_t{1} << 47}, DType::kF64).ok());
}

TEST(Shape, Contiguity) {
  EXPECT_EQ(ContiguousStrides({2, 3, 4}), Strides({12, 4, 1}));
  EXPECT_TRUE(IsContiguous({2, 3}, {3, 1}));
  EXPECT_FALSE(IsContiguous({2, 3}, {1, 2}));
  EXPECT_TRUE(IsContiguous({1, 3}, {77, 1}));  // a stride nobody uses
  EXPECT_TRUE(IsContiguous({0, 3}, {5, 9}));   // nothing to enumerate
  EXPECT_FALSE(IsContiguous({2, 3}, {0, 1}));  // expanded
}

TEST(Shape, MayRepeat) {
  EXPECT_FALSE(MayRepeat({2, 3}, {3, 1}));
  EXPECT_FALSE(MayRepeat({3, 2}, {1, 3}));
  EXPECT_FALSE(MayRepeat({2, 1, 3}, {8, 0, 2}));  // every other one; a stride nobody uses
  EXPECT_FALSE(MayRepeat({}, {}));
  EXPECT_FALSE(MayRepeat({3, 0, 3}, {3, 0, 1}));
  EXPECT_TRUE(MayRepeat({2, 3}, {0, 1}));  // expanded
  EXPECT_TRUE(MayRepeat({3, 3}, {2, 1}));  // windows of 3, one each 2
  EXPECT_FALSE(MayRepeat({3, 2}, {2, 1}));
  EXPECT_TRUE(MayRepeat({2, 2}, {1, 1}));
  // Which also would, where an outer dim has no elements here.
  EXPECT_TRUE(MayRepeat({0, 3, 3}, {7, 2, 1}));
}

TEST(Shape, Broadcasting) {
  EXPECT_EQ(*BroadcastShapes({4, 1}, {3}), Shape({4, 3}));
  EXPECT_EQ(*BroadcastShapes({}, {2, 0}), Shape({2, 0}));
  EXPECT_EQ(*BroadcastShapes({1}, {0}), Shape({0}));
  EXPECT_THAT(std::string(BroadcastShapes({4, 2}, {3, 2}).status().message()),
              AllOf(HasSubstr("[4, 2]"), HasSubstr("[3, 2]")));
}

TEST(Shape, DimsCountFromTheEndToo) {
  EXPECT_EQ(*NormalizeDim(-1, 3), 2);
  EXPECT_EQ(*NormalizeDim(0, 3), 0);
  EXPECT_THAT(std::string(NormalizeDim(3, 3).status().message()),
              AllOf(HasSubstr("-3"), HasSubstr("2")));
  EXPECT_FALSE(NormalizeDim(-4, 3).ok());
}

// Strides are products of the sizes that are not 0: they must not overflow either.
TEST(Shape, AnEmptyTensorHasStrides) {
  constexpr int64_t kBig = int64_t{1} << 40;
  for (const Shape& shape : {Shape{0, kBig, kBig}, Shape{kBig, kBig, 0}, Shape{kBig, 0, kBig}}) {
    EXPECT_FALSE(CheckedNumel(shape).ok()) << ToString(shape);
    EXPECT_FALSE(CheckedBytes(shape, DType::kU8).ok());
  }
  EXPECT_EQ(CheckedNumel({kBig, 0, 1 << 20}).value(), 0);
  EXPECT_EQ(CheckedBytes({kBig, 0, 1 << 20}, DType::kF32).value(), 0);
  EXPECT_FALSE(CheckedBytes({0, int64_t{1} << 62}, DType::kF32).ok());
}

}  // namespace
}  // namespace dtensor::shape_test
