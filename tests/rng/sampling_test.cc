// randperm where keys are equal: rare, so searched for, and compared with the definition written
// out plainly (docs/reference/random.md; torch's Randperm.cuh).
#include "dtensor/rng/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "dtensor/mesh/launch.h"
#include "dtensor/rng/check.h"
#include "tests/rng/rng_test_util.h"

namespace dtensor::sampling_test {
namespace {

// Words of one thread, one after the other.
std::vector<uint32_t> Words(uint64_t seed, uint64_t thread, uint64_t offset, int count) {
  std::vector<uint32_t> words;
  for (uint64_t block = offset / 4; static_cast<int>(words.size()) < count; ++block) {
    const PhiloxWords w = CurandBlock(MakePhiloxKeys(seed), block, thread);
    words.insert(words.end(), {w.x, w.y, w.z, w.w});
  }
  return words;
}

TEST(RandomPermutation, EqualKeysAreShuffled) {
  constexpr int64_t n = 3;
  constexpr int kBits = 6;  // that keys of three elements are compared in
  int pairs = 0, triples = 0;
  const SpecRef spec =
      OrDie(RankContext::Current().specs().Intern(DeviceMesh::Self(), {}, {n}, DType::kI32));
  const Tensor keys = OrDie(Tensor::Empty({n}, DType::kI32));
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    Generator generator(seed), again(seed);
    const Tensor permutation = OrDie(RandomPermutation(n, &generator));
    ASSERT_TRUE(FillRandom(keys, *spec, RandomRangeOp(INT32_MIN, INT32_MAX), &again).ok());
    const auto key = [&](int64_t i) { return keys.data_as<int32_t>()[i] & ((1 << kBits) - 1); };
    std::vector<int64_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return key(a) < key(b); });
    for (int64_t first = 0; first < n;) {
      int64_t size = 1;
      while (first + size < n && key(order[first + size]) == key(order[first])) ++size;
      pairs += size == 2;
      triples += size == 3;
      const std::vector<uint32_t> words =
          Words(seed, static_cast<uint64_t>(first), again.offset(), static_cast<int>(size));
      for (int64_t left = size; left > 1; --left) {  // the last of those left changes places
        std::swap(order[first + left - 1], order[first + words[size - left] % left]);
      }
      first += size;
    }
    ASSERT_EQ(
        std::vector<int64_t>(permutation.data_as<int64_t>(), permutation.data_as<int64_t>() + n),
        order)
        << "seed " << seed;
  }
  EXPECT_GT(pairs, 500);
  EXPECT_GT(triples, 1);
}

// From which range on whole numbers take 64-bit words: 2^28, and 2^32 before PyTorch 2.7, there for
// some dtypes only (docs/reference/random.md).
TEST(RandomRange, WordsByRangeAndProfile) {
  Profile now, old;
  old.old_wide_range = true;
  const auto wide = [](int64_t from, int64_t to, DType dtype, const Profile& profile) {
    return OrDie(CheckedRandomOp(RandomRangeOp(from, to), dtype, profile)).kind ==
           RandomKind::kWords64;
  };
  const int64_t small = int64_t{1} << 28, large = int64_t{1} << 32;
  for (int64_t from : {int64_t{0}, int64_t{-1000}, int64_t{1} << 40}) {
    EXPECT_FALSE(wide(from, from + small - 1, DType::kI64, now)) << from;
    EXPECT_TRUE(wide(from, from + small, DType::kI64, now)) << from;
    EXPECT_FALSE(wide(from, from + large - 1, DType::kI64, old)) << from;
    EXPECT_TRUE(wide(from, from + large, DType::kI64, old)) << from;
  }
  EXPECT_TRUE(wide(-small / 2, small / 2, DType::kI32, now));
  EXPECT_FALSE(wide(-small / 2, small / 2, DType::kI32, old));
  EXPECT_TRUE(wide(INT32_MIN, INT32_MAX, DType::kI32, now));
  EXPECT_FALSE(wide(INT32_MIN, INT32_MAX, DType::kI32, old));
}

// As torch: a floating type takes whole numbers up to its largest; what it would round up to the
// bound is left out.
TEST(RandomRange, BoundsAtTheEndsOfFloatingTypes) {
  const Profile now;
  const auto range = [&](int64_t from, int64_t to, DType dtype) {
    const absl::StatusOr<RandomOp> op = CheckedRandomOp(RandomRangeOp(from, to), dtype, now);
    return op.ok() ? std::pair(op->from, op->to) : std::pair<int64_t, int64_t>(0, 0);
  };
  using Bounds = std::pair<int64_t, int64_t>;
  EXPECT_EQ(range(0, 4096, DType::kF16), Bounds(0, 4094));
  EXPECT_EQ(range(0, 512, DType::kBF16), Bounds(0, 510));
  EXPECT_EQ(range(0, 1 << 25, DType::kF32), Bounds(0, (1 << 25) - 2));
  EXPECT_EQ(range(0, 2048, DType::kF16), Bounds(0, 2048));
  EXPECT_EQ(range(-65504, 65505, DType::kF16), Bounds(-65504, 65505));
  EXPECT_EQ(range(-65505, 0, DType::kF16), Bounds(0, 0)) << "does not fit";
  EXPECT_EQ(range(0, 65506, DType::kF16), Bounds(0, 0)) << "does not fit";
}

TEST(RandomRange, ProbabilitiesIncludeTheirEnds) {
  for (const double p : {0.0, 0.5, 1.0}) {
    EXPECT_TRUE(CheckedRandomOp(BernoulliOp(p), DType::kF32, Profile()).ok()) << p;
  }
  for (const double p : {-0.1, 1.1}) {
    EXPECT_FALSE(CheckedRandomOp(BernoulliOp(p), DType::kF32, Profile()).ok()) << p;
  }
}

}  // namespace
}  // namespace dtensor::sampling_test
