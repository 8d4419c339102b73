// Plans: launch geometry, advance, and the split of tensors beyond 32-bit indexing.
#include "dtensor/rng/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/rng/rng_test_util.h"

namespace dtensor::planner_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

RandomPlan Plan(IntSpan shape, DType dtype, uint64_t offset = 0, const Profile& profile = {}) {
  return OrDie(PlanRandom(RandomKind::kUniform, shape, dtype, profile, offset));
}

TEST(PlannerTest, SmallAndSweeps) {
  RandomPlan p = Plan({8}, DType::kF32, 12);
  EXPECT_EQ(p.unroll, 4);
  EXPECT_EQ(p.advance, 4u);
  EXPECT_THAT(p.segments, ElementsAre(RandomSegment{0, 8, 12, 256}));
  p = Plan({1081344}, DType::kF32);  // one full sweep on h100
  EXPECT_EQ(p.advance, 4u);
  EXPECT_EQ(p.segments[0].threads, 270336);
  EXPECT_EQ(Plan({1081345}, DType::kF32).advance, 8u);
  p = Plan({1081345}, DType::kF64);
  EXPECT_EQ(p.unroll, 2);
  EXPECT_EQ(p.advance, 12u);
  EXPECT_EQ(Plan({}, DType::kF32).segments[0].count, 1);
}

TEST(PlannerTest, EmptyReservesNothing) {
  const RandomPlan p = Plan({4, 0, 3}, DType::kF32);
  EXPECT_EQ(p.advance, 0u);
  EXPECT_TRUE(p.segments.empty());
}

TEST(PlannerTest, OldAdvanceOfWideDraws) {
  Profile old;
  old.old_wide_advance = true;
  EXPECT_EQ(Plan({1081344}, DType::kF64, 0, old).advance, 4u);
  EXPECT_EQ(Plan({1081344}, DType::kF64).advance, 8u);
}

TEST(PlannerTest, SplitsBeyond32Bits) {
  // Vector u13.
  const RandomPlan p = Plan({536870914}, DType::kF32);
  EXPECT_EQ(p.advance, 3980u);
  EXPECT_THAT(p.segments, ElementsAre(RandomSegment{0, 268435457, 1988, 270336},
                                      RandomSegment{268435457, 268435457, 2984, 270336}));
  // The largest that one launch can take, by element size: 32-bit byte offsets.
  for (const auto& [dtype, most] : {std::pair(DType::kF32, int64_t{1} << 29),
                                    {DType::kBF16, int64_t{1} << 30},
                                    {DType::kF64, int64_t{1} << 28}}) {
    EXPECT_EQ(Plan({most}, dtype).segments.size(), 1u);
    EXPECT_EQ(Plan({most + 1}, dtype).segments.size(), 2u);
    EXPECT_EQ(Plan({2 * most + 1}, dtype).segments.size(), 3u);  // most, and most + 1 halved
  }
  // An embedding of 152064 x 8192: segments are gapless and their offsets follow each other.
  const RandomPlan e = Plan({152064, 8192}, DType::kF32, 40);
  int64_t next = 0;
  for (const RandomSegment& s : e.segments) {
    EXPECT_EQ(s.first, next);
    next += s.count;
  }
  EXPECT_EQ(next, int64_t{152064} * 8192);
  EXPECT_EQ(e.segments.size(), 4u);
}

TEST(PlannerTest, Strides) {
  const auto plan = [](IntSpan shape, IntSpan strides) {
    return PlanRandom(RandomKind::kUniform, shape, DType::kF32, Profile(), 0, strides);
  };
  EXPECT_TRUE(plan({2, 3}, {1, 2}).ok());
  EXPECT_TRUE(plan({2, 1, 3}, {3, 77, 1}).ok());
  EXPECT_TRUE(plan({2, 3}, {4, 1}).ok());
  EXPECT_THAT(plan({2, 3}, {2, 1}).status().message(), HasSubstr("would overlap"));
  EXPECT_THAT(plan({2, 3}, {0, 1}).status().message(), HasSubstr("strides [0, 1]: elements"));
  EXPECT_FALSE(plan({2, 3}, {1}).ok());
}

TEST(PlannerTest, IterationStrides) {
  const auto strides = [](IntSpan shape, IntSpan strides) {
    return OrDie(IterationStrides(shape, strides));
  };
  EXPECT_THAT(strides({2, 3}, {3, 1}), ElementsAre(3, 1));
  EXPECT_THAT(strides({2, 3}, {1, 2}), ElementsAre(1, 2));
  EXPECT_THAT(strides({2, 3}, {100, 7}), ElementsAre(3, 1));         // a slice with a step
  EXPECT_THAT(strides({4, 2, 3}, {2, 1, 9}), ElementsAre(2, 1, 8));  // permuted, gaps outside
  EXPECT_THAT(strides({2, 1, 3}, {1, 0, 50}), ElementsAre(1, 1, 2));
}

// A slice of a larger matrix: fewer elements than 2^31 bytes hold, but spread beyond.
TEST(PlannerTest, SplitsSpreadElements) {
  const auto plan = [](IntSpan shape, IntSpan strides) {
    return OrDie(PlanRandom(RandomKind::kUniform, shape, DType::kF32, Profile(), 0, strides));
  };
  const int64_t advance = 4;  // a million elements are one sweep on h100, also half of them
  RandomPlan p = plan({1000, 1000}, {1000000, 1});
  EXPECT_THAT(p.segments, ElementsAre(RandomSegment{0, 500000, advance, 270336},
                                      RandomSegment{500000, 500000, 2 * advance, 270336}));
  EXPECT_EQ(p.advance, 3 * advance);
  EXPECT_EQ(plan({1000, 1000}, {1, 1000000}).segments, p.segments);  // the same, transposed
  EXPECT_EQ(plan({1000, 1000}, {500000, 1}).segments.size(), 1u);
  // One row of the outer dim is too long still: it is halved first, then the inner one.
  p = plan({2, 1000, 4}, {int64_t{1} << 30, 1000000, 1});
  EXPECT_THAT(
      p.segments,
      ElementsAre(RandomSegment{0, 2000, 4, 2048}, RandomSegment{2000, 2000, 8, 2048},
                  RandomSegment{4000, 2000, 12, 2048}, RandomSegment{6000, 2000, 16, 2048}));
}

TEST(PlannerTest, Errors) {
  Profile p;
  p.layout_version = 2;
  EXPECT_THAT(PlanRandom(RandomKind::kUniform, {2}, DType::kF32, p, 0).status().message(),
              HasSubstr("unknown layout_version 2"));
  EXPECT_FALSE(PlanRandom(RandomKind::kUniform, {-2}, DType::kF32, Profile(), 0).ok());
}

}  // namespace
}  // namespace dtensor::planner_test
