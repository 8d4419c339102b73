#include "dtensor/tensor/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/tensor/convert.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/cpu/level.h"

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

// As the instructions of x86 do, and PyTorch with them.
TEST(Convert, OutOfRangeIsTheLeastInteger) {
  const auto whole = [](double v) {
    int32_t narrow;
    int64_t wide;
    FromNumber(v, &narrow);
    FromNumber(static_cast<float>(v), &wide);
    return std::pair<int32_t, int64_t>(narrow, wide);
  };
  for (const double v : {std::nan(""), HUGE_VAL, -HUGE_VAL, 1e20, -1e20}) {
    EXPECT_EQ(whole(v), std::pair(INT32_MIN, INT64_MIN)) << v;
  }
  EXPECT_EQ(whole(3e9), std::pair(INT32_MIN, int64_t{3000000000}));
  EXPECT_EQ(whole(2147483647.5).first, INT32_MAX);
  EXPECT_EQ(whole(-2147483648.5).first, INT32_MIN);
  uint8_t byte;
  FromNumber(300.7, &byte);
  EXPECT_EQ(byte, 44);
}

// At every level: strided or not, with and without NaN, of any length.
TEST(Convert, RunsGiveWhatElementsGive) {
  std::vector<const RunTable*> levels = {&cpu_baseline::TensorRuns()};
  if (ActiveCpuLevel() >= CpuLevel::kV3) levels.push_back(&cpu_v3::TensorRuns());
  if (ActiveCpuLevel() >= CpuLevel::kV4) levels.push_back(&cpu_v4::TensorRuns());
  constexpr int64_t kMost = 200;
  const int64_t lengths[] = {0, 1, 15, 16, 17, 63, 64, 65, 100, 129, kMost};
  const std::pair<int64_t, int64_t> strides[] = {{1, 1}, {1, 3}, {2, 1}, {3, 2}};
  for (int s = 0; s < kNumDTypes; ++s) {
    VisitDType(static_cast<DType>(s), [&](auto from) {
      using S = typename decltype(from)::type;
      for (const bool rare : {false, true}) {
        std::vector<S> in(3 * kMost);
        const double special[] = {NAN, -NAN, HUGE_VAL, -HUGE_VAL, 3e9, -1e20, 1e-42, -0.0};
        for (size_t i = 0; i < in.size(); ++i) {
          const double v = static_cast<double>(i % 37) * 1.37 - 20;
          FromNumber(rare && i % 3 == 0 ? special[i / 3 % 8] : v, &in[i]);
          // NaNs of every kind, which no arithmetic makes.
          if (sizeof(S) == 2 && rare && i % 7 == 0) {
            const auto bits = static_cast<uint16_t>(0x7C01 + 8191 * i);
            std::memcpy(&in[i], &bits, 2);
          }
        }
        for (int d = 0; d < kNumDTypes; ++d) {
          VisitDType(static_cast<DType>(d), [&](auto to) {
            using D = typename decltype(to)::type;
            if (s == d && s != static_cast<int>(DType::kBool)) return;  // copies
            for (const auto& [dst, src] : strides) {
              for (const int64_t n : lengths) {
                std::vector<D> want(3 * kMost + 1);
                std::memset(want.data(), 0x5A, want.size() * sizeof(D));
                std::vector<D> blank = want;
                for (int64_t i = 0; i < n; ++i) {
                  FromNumber(AsNumber(in[static_cast<size_t>(i * src)]),
                             &want[static_cast<size_t>(i * dst)]);
                }
                for (const RunTable* runs : levels) {
                  std::vector<D> got = blank;
                  runs->copy[s][d](got.data(), dst, in.data(), src, n);
                  ASSERT_EQ(std::memcmp(got.data(), want.data(), want.size() * sizeof(D)), 0)
                      << Name(static_cast<DType>(s)) << " to " << Name(static_cast<DType>(d))
                      << ", " << n << " elements, strides " << dst << " and " << src;
                }
              }
            }
          });
        }
      }
    });
  }
}

}  // namespace
}  // namespace dtensor::dtype_test
