#include "dtensor/mesh/placement.h"

#include <random>

#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dtensor::placement_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<int64_t> Lengths(const Placement& p, int64_t size, int64_t n) {
  std::vector<int64_t> lengths;
  std::vector<Interval> held;
  for (int64_t c = 0; c < n; ++c) {
    LocalIntervals(p, size, n, c, &held);
    int64_t length = 0;
    for (const Interval& piece : held) length += piece.length();
    lengths.push_back(length);
  }
  return lengths;
}

TEST(Placement, ShardIsTorchChunk) {
  EXPECT_THAT(Lengths(Shard(0), 5, 4), ElementsAre(2, 2, 1, 0));
  EXPECT_THAT(Lengths(Shard(0), 4, 3), ElementsAre(2, 2, 0));
  EXPECT_THAT(Lengths(Shard(0), 0, 3), ElementsAre(0, 0, 0));
  EXPECT_EQ(ShardInterval(5, 1, 4, 3), (Interval{5, 5}));
}

TEST(Placement, NestedShardsCutTheLocalSize) {
  SpecInterner specs(0);
  DeviceMesh mesh({2, 4});
  SpecRef spec = ValueOrThrow(specs.Intern(mesh, {Shard(0), Shard(0)}, {10}, DType::kF32));
  std::vector<int64_t> lengths;
  for (int64_t a = 0; a < 2; ++a) {
    for (int64_t b = 0; b < 4; ++b) lengths.push_back(LocalShape(*spec, {a, b})[0]);
  }
  EXPECT_THAT(lengths, ElementsAre(2, 2, 1, 0, 2, 2, 1, 0));
}

TEST(Placement, UnitsAndHugeCoordinates) {
  EXPECT_THAT(Lengths(Shard(0, 4), 20, 3), ElementsAre(8, 8, 4));
  EXPECT_THAT(Lengths(Shard(0, 4), 10, 4), ElementsAre(4, 4, 2, 0));
  EXPECT_THAT(Lengths(Shard(0, 100), 10, 2), ElementsAre(10, 0));
  int64_t huge = int64_t{1} << 62;
  EXPECT_EQ(ShardInterval(huge, huge, 16384, 16383), (Interval{huge, huge}));
  EXPECT_EQ(ShardInterval(huge, 1, 2, 1).length(), huge / 2);
}

TEST(Placement, SegmentsAreShardedOneByOneAndMerged) {
  std::vector<Interval> held;
  LocalIntervals(SegmentedShard(0, {4, 2}), 6, 2, 1, &held);
  EXPECT_THAT(held, ElementsAre(Interval{2, 4}, Interval{5, 6}));
  LocalIntervals(SegmentedShard(0, {2, 2}), 4, 1, 0, &held);
  EXPECT_THAT(held, ElementsAre(Interval{0, 4}));
  EXPECT_EQ(*InterleavedShard(1, 3, 12), SegmentedShard(1, {4, 4, 4}));
  EXPECT_THAT(InterleavedShard(0, 3, 10).status().message(),
              HasSubstr("3 pieces do not divide size 10"));
}

TEST(Placement, ReadsAsWritten) {
  std::vector<Placement> all = {
      Replicate(),         Shard(0), Shard(0, 4), Partial(), SegmentedShard(0, {4, 2}),
      FlatShard({3, 3, 0})};
  EXPECT_EQ(ToString(all),
            "[R, S(0), S(0, unit=4), P(sum), Segmented(0, [4, 2]), Flat([3, 3, 0])]");
  for (size_t i = 0; i < all.size(); ++i) {
    for (size_t j = 0; j < all.size(); ++j) EXPECT_EQ(all[i] == all[j], i == j);
  }
}

TEST(Placement, ComposeTakesPositions) {
  EXPECT_THAT(ComposeIntervals({{2, 4}, {10, 13}}, {{1, 3}, {4, 5}}),
              ElementsAre(Interval{3, 4}, Interval{10, 11}, Interval{12, 13}));
}

// Every placement that shards a dim, alone or nested, gives every index to exactly one coordinate.
TEST(Placement, ShardsPartitionTheIndexSet) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  auto pick = [&](int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random);
  };
  SpecInterner specs(0);
  for (int round = 0; round < 2000; ++round) {
    const int64_t size = pick(0, 40), a = pick(1, 5), b = pick(1, 5);
    Placement first = Shard(0, pick(1, 5));
    if (pick(0, 1)) {
      int64_t cut = pick(0, size), cut2 = pick(cut, size);
      first = SegmentedShard(
          0, {{cut, pick(1, 4)}, {cut2 - cut, pick(1, 4)}, {size - cut2, pick(1, 4)}});
    }
    DeviceMesh mesh({a, b});
    Placement second = Shard(-1, pick(1, 4));
    SpecRef spec = ValueOrThrow(specs.Intern(mesh, {first, second}, {size}, DType::kF32));
    std::vector<int> owners(size);
    for (int64_t i = 0; i < a; ++i) {
      for (int64_t j = 0; j < b; ++j) {
        int64_t count = 0;
        const auto index = LocalIndex(*spec, {i, j});
        for (const Interval& piece : index[0]) {
          for (int64_t k = piece.start; k < piece.end; ++k) ++owners[k], ++count;
        }
        EXPECT_EQ(LocalShape(*spec, {i, j})[0], count);
      }
    }
    EXPECT_THAT(owners, ::testing::Each(1)) << spec->ToString();
  }
}

// 8 query heads on 2 key heads, of size 3: groups stay together, a third rank has none.
TEST(Placement, SegmentsHaveUnits) {
  const Placement qkv = SegmentedShard(0, {{24, 12}, {6, 3}, {6, 3}});
  EXPECT_EQ(qkv.ToString(), "Segmented(0, [24:12, 6:3, 6:3])");
  EXPECT_THAT(Lengths(qkv, 36, 3), ElementsAre(18, 18, 0));
  std::vector<Interval> held;
  LocalIntervals(qkv, 36, 3, 1, &held);
  EXPECT_THAT(held, ElementsAre(Interval{12, 24}, Interval{27, 30}, Interval{33, 36}));
  EXPECT_NE(qkv, SegmentedShard(0, {24, 6, 6}));
  EXPECT_EQ(SegmentedShard(0, {{24, 1}, {6, 1}}), SegmentedShard(0, {24, 6}));
  // Sizes and units do not change places unnoticed.
  EXPECT_NE(SegmentedShard(0, {{4, 2}, {3, 5}}), SegmentedShard(0, {{4, 3}, {2, 5}}));
  EXPECT_NE(SegmentedShard(0, {4, 2, 3, 5}), SegmentedShard(0, {{4, 3}, {2, 5}}));
}

TEST(Placement, TheSimplestSegments) {
  EXPECT_EQ(SimplestSegmented(1, {{24, 12}, {0, 1}, {6, 3}}, 2), SegmentedShard(1, {24, 6}));
  EXPECT_EQ(SimplestSegmented(1, {{24, 12}, {6, 3}}, 3), SegmentedShard(1, {{24, 12}, {6, 3}}));
  EXPECT_EQ(SimplestSegmented(1, {{0, 1}, {24, 12}}, 3), Shard(1, 12));
  EXPECT_EQ(SimplestSegmented(1, {{4, 1}, {4, 1}}, 1), Shard(1));
  EXPECT_EQ(SimplestSegmented(0, {}, 2), Shard(0));
}

// What is left of a cut range, index by index: where segments are given they cut so, and a block is
// only refused where coordinate 0 would be passed over or the next one would hold more.
TEST(Placement, RestrictedSegmentsCutWhatIsLeftAlike) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  auto pick = [&](int64_t lo, int64_t hi) {
    return std::uniform_int_distribution<int64_t>(lo, hi)(random);
  };
  int given = 0;
  for (int round = 0; round < 3000; ++round) {
    Segments segments;
    int64_t size = 0;
    for (int64_t k = pick(1, 3); k > 0; --k) {
      segments.push_back({pick(0, 9), pick(1, 4)});
      size += segments.back().size;
    }
    const int64_t n = pick(1, 4), start = pick(0, size), end = pick(start, size);
    std::vector<std::vector<Interval>> held(n);
    for (int64_t c = 0; c < n; ++c) {
      LocalIntervals(SegmentedShard(0, segments), size, n, c, &held[c]);
    }
    const auto parts = RestrictSegments(segments, n, start, end);
    if (!parts) {
      EXPECT_GT(end, start);
      continue;
    }
    ++given;
    for (int64_t c = 0; c < n; ++c) {
      std::vector<int64_t> want, got;
      for (const Interval& i : held[c]) {
        for (int64_t k = std::max(i.start, start); k < std::min(i.end, end); ++k) {
          want.push_back(k - start);
        }
      }
      std::vector<Interval> part;
      LocalIntervals(SegmentedShard(0, *parts), end - start, n, c, &part);
      for (const Interval& i : part) {
        for (int64_t k = i.start; k < i.end; ++k) got.push_back(k);
      }
      EXPECT_EQ(got, want) << SegmentedShard(0, segments).ToString() << " [" << start << ", " << end
                           << ") coordinate " << c << " of " << n;
    }
  }
  EXPECT_GT(given, 1000);
  EXPECT_EQ(RestrictSegments({{8, 1}}, 2, 0, 3), (Segments{{3, 3}}));  // all on the first
  EXPECT_EQ(RestrictSegments({{8, 1}}, 2, 2, 6), (Segments{{4, 2}}));
  EXPECT_EQ(RestrictSegments({{8, 1}}, 2, 4, 8), std::nullopt);  // all on the second
  EXPECT_EQ(RestrictSegments({{8, 1}}, 2, 3, 8), std::nullopt);
  EXPECT_EQ(RestrictSegments({{8, 4}, {2, 1}, {2, 1}}, 2, 8, 12), (Segments{{2, 1}, {2, 1}}));
}

TEST(Placement, FlatPartitionsAndOthersHoldAll) {
  EXPECT_THAT(Lengths(FlatShard({3, 0, 4}), 7, 3), ElementsAre(3, 0, 4));
  std::vector<Interval> held;
  LocalIntervals(FlatShard({3, 0, 4}), 7, 3, 2, &held);
  EXPECT_THAT(held, ElementsAre(Interval{3, 7}));
  EXPECT_THAT(Lengths(Replicate(), 7, 2), ElementsAre(7, 7));
  EXPECT_THAT(Lengths(Partial(), 7, 2), ElementsAre(7, 7));
}

TEST(Placement, TheCodeOfEachIsItself) {
  EXPECT_EQ(Replicate().ToCode(), "Replicate()");
  EXPECT_EQ(Shard(1, 4).ToCode(), "Shard(1, 4)");
  EXPECT_EQ(Partial().ToCode(), "Partial()");
  EXPECT_EQ(Partial(ReduceOp::kMax).ToCode(), "Partial(ReduceOp::kMax)");
  EXPECT_EQ(Partial(ReduceOp::kAvg).ToCode(), "Partial(ReduceOp::kAvg)");
}

}  // namespace
}  // namespace dtensor::placement_test
