// What the judge draws, and the terms of pending values that it makes of it.
#include "dtensor/verify/draws.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"

namespace dtensor::internal::draws_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::Ge;
using ::testing::Le;
using ::testing::Not;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Draw kExtremes[] = {Draw::kExtreme, Draw::kExtremeAgain};

bool HasNan(const WholeValues& v) {
  return std::any_of(v.begin(), v.end(), [](double x) { return std::isnan(x); });
}

TEST(Draws, BothInfinitiesAreCertain) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      const int64_t n = 3 + static_cast<int64_t>(seed % 30);
      for (const Draw draw : kExtremes) {
        const WholeValues v = Drawn({{n}, dtype}, seed, draw);
        EXPECT_THAT(v, Contains(kInfinity)) << n;
        EXPECT_THAT(v, Contains(-kInfinity)) << n;
        if (n < 9) continue;
        EXPECT_TRUE(HasNan(v)) << n;
        for (const bool sign : {false, true}) {
          EXPECT_TRUE(std::any_of(v.begin(), v.end(), [sign](double x) {
            return x == 0 && std::signbit(x) == sign;
          })) << n;
        }
      }
      const double one = Drawn({{}, dtype}, seed, Draw::kExtreme)[0];
      const double again = Drawn({{}, dtype}, seed, Draw::kExtremeAgain)[0];
      const double next = Drawn({{}, dtype}, seed + 1, Draw::kExtreme)[0];
      EXPECT_NE(std::isinf(one), std::isinf(again)) << seed;
      EXPECT_NE(std::isinf(one), std::isinf(next)) << seed;
      EXPECT_THAT(Drawn({{n}, dtype}, seed, Draw::kSigned),
                  Each(Not(AnyOf(kInfinity, -kInfinity))));
    }
  }
}

TEST(Draws, IntegersHaveBothEndsAndOneBoolDiffers) {
  for (const Draw draw : kExtremes) {
    EXPECT_THAT(Drawn({{7}, DType::kI32}, 1, draw), Contains(-0x1p31));
    EXPECT_THAT(Drawn({{7}, DType::kI32}, 1, draw), Contains(0x1p31 - 1));
    EXPECT_THAT(Drawn({{7}, DType::kU8}, 1, draw), Contains(255));
    const WholeValues wide = Drawn({{7}, DType::kI64}, 1, draw);
    EXPECT_THAT(wide, Contains(-0x1p63));
    EXPECT_THAT(wide, Contains(0x1p63 - 0x1p11));
    for (const double x : wide) EXPECT_EQ(std::fmod(x, 0x1p11), 0) << x;
    const WholeValues truths = Drawn({{7}, DType::kBool}, 1, draw);
    const auto trues = std::count(truths.begin(), truths.end(), 1);
    EXPECT_EQ(trues, draw == Draw::kExtreme ? 6 : 1);
  }
  const WholeValues given = {3, 1};
  EXPECT_EQ(Drawn({{2}, DType::kI64, given}, 1, Draw::kExtreme), given);
}

double Reduced(ReduceOp op, DType dtype, double a, double b) {
  if (op == ReduceOp::kSum) return Wrapped(a + b, dtype);
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  return op == ReduceOp::kMax ? std::max(a, b) : std::min(a, b);
}

// Of a sum that is not finite only that is compared.
TEST(Draws, TermsReduceToTheWhole) {
  for (const DType dtype : {DType::kF64, DType::kI64, DType::kI32, DType::kU8, DType::kBool}) {
    const VerifyInput in = {{17}, dtype};
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
      for (const Draw draw : kDraws) {
        for (int64_t terms = 2; terms <= 4; ++terms) {
          const WholeValues whole = Drawn(in, 5, draw);
          WholeValues got = Term(whole, in, op, 0, terms, 5, draw);
          for (int64_t t = 1; t < terms; ++t) {
            const WholeValues term = Term(whole, in, op, t, terms, 5, draw);
            for (size_t k = 0; k < got.size(); ++k) got[k] = Reduced(op, dtype, got[k], term[k]);
          }
          for (size_t k = 0; k < got.size(); ++k) {
            const double sum = got[k];
            const bool same = sum == whole[k] || (std::isnan(sum) && std::isnan(whole[k]));
            const bool infinite = op == ReduceOp::kSum && !std::isfinite(whole[k]);
            EXPECT_TRUE(same || (infinite && !std::isfinite(sum)))
                << Name(dtype) << " " << static_cast<int>(op) << " of " << terms << ": " << sum
                << ", must be " << whole[k];
          }
        }
      }
    }
  }
}

// On two ranks already: whoever does not hold an element of a maximum has nothing in one of the
// drawings, and in the other the far infinity beside NaN.
TEST(Draws, EveryElementMeetsARankWithNothing) {
  const VerifyInput in = {{12}};
  for (const ReduceOp op : {ReduceOp::kMax, ReduceOp::kMin}) {
    const double nothing = op == ReduceOp::kMax ? -kInfinity : kInfinity;
    for (size_t k = 0; k < 12; ++k) {
      bool met = false;
      for (const Draw draw : kExtremes) {
        const WholeValues whole(12, 1.5);
        for (int64_t t = 0; t < 2; ++t) {
          met |= Term(whole, in, op, t, 2, 5, draw)[k] == nothing;
        }
      }
      EXPECT_TRUE(met) << k;
    }
    const WholeValues nans(12, std::numeric_limits<double>::quiet_NaN());
    WholeValues all;
    for (int64_t t = 0; t < 2; ++t) {
      const WholeValues term = Term(nans, in, op, t, 2, 5, Draw::kExtremeAgain);
      all.insert(all.end(), term.begin(), term.end());
    }
    EXPECT_THAT(all, Contains(-nothing));
  }
}

// A NaN may be the sum of infinities, which are numbers to a function like isnan.
TEST(Draws, ANanIsASumOfInfinities) {
  const WholeValues nans(4, std::numeric_limits<double>::quiet_NaN());
  const VerifyInput in = {{4}};
  EXPECT_THAT(Term(nans, in, ReduceOp::kSum, 0, 3, 5, Draw::kExtreme), Contains(kInfinity));
  EXPECT_THAT(Term(nans, in, ReduceOp::kSum, 1, 3, 5, Draw::kExtreme), Contains(-kInfinity));
  EXPECT_FALSE(std::isnan(Term(nans, in, ReduceOp::kSum, 2, 3, 5, Draw::kExtreme)[0]));
}

}  // namespace
}  // namespace dtensor::internal::draws_test
