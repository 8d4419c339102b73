#include "dtensor/tensor/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>

namespace dtensor::dtype_test {
namespace {

TEST(DType, NamesGoThereAndBack) {
  for (int t = 0; t < kNumDTypes; ++t) {
    const auto type = static_cast<DType>(t);
    DType back;
    ASSERT_TRUE(ParseDType(Name(type), &back));
    EXPECT_EQ(back, type);
  }
  DType t;
  EXPECT_TRUE(ParseDType("bf16", &t) && t == DType::kBF16);
  EXPECT_FALSE(ParseDType("complex64", &t));
  EXPECT_FALSE(ParseDType("", &t));
}

TEST(DType, Promotion) {
  EXPECT_EQ(PromoteTypes(DType::kBF16, DType::kF16), DType::kF32);
  EXPECT_EQ(PromoteTypes(DType::kF16, DType::kI64), DType::kF16);
  EXPECT_EQ(PromoteTypes(DType::kU8, DType::kI32), DType::kI32);
  EXPECT_EQ(PromoteTypes(DType::kBool, DType::kU8), DType::kU8);
  for (int a = 0; a < kNumDTypes; ++a) {
    for (int b = 0; b < kNumDTypes; ++b) {
      EXPECT_EQ(PromoteTypes(static_cast<DType>(a), static_cast<DType>(b)),
                PromoteTypes(static_cast<DType>(b), static_cast<DType>(a)));
    }
  }
}

// All 65,536 patterns: to float and back is the identity, and halves are rounded to the even one.
TEST(DType, SixteenBitFloatsRoundToNearestEven) {
  for (uint32_t u = 0; u < 0x10000; ++u) {
    const auto bits = static_cast<uint16_t>(u);
    const float h = ToFloat(Half{bits}), b = ToFloat(BFloat16{bits});
    if (std::isnan(h)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToHalf(h))));
    } else {
      EXPECT_EQ(ToHalf(h).bits, bits);
    }
    if (std::isnan(b)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToBFloat16(b))));
    } else {
      EXPECT_EQ(ToBFloat16(b).bits, bits);
    }
    if (!(std::fabs(h) < 60000) || (bits & 0x8000)) continue;
    const float next = ToFloat(Half{static_cast<uint16_t>(bits + 1)});
    const float middle = h + (next - h) / 2;  // exact in float
    EXPECT_EQ(ToHalf(middle).bits, bits + (bits & 1)) << h;
    EXPECT_EQ(ToHalf(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(ToHalf(std::nextafter(middle, 1e9f)).bits, bits + 1);
  }
  EXPECT_EQ(ToHalf(65520.0f).bits, 0x7C00);  // rounds to infinity
  EXPECT_EQ(ToHalf(65519.0f).bits, 0x7BFF);
  EXPECT_EQ(ToBFloat16(1.00390625f).bits, 0x3F80);  // halfway, to even
  EXPECT_EQ(ToBFloat16(1.01171875f).bits, 0x3F82);
}

}  // namespace
}  // namespace dtensor::dtype_test
