// The promise: every rank's part of any placement has the bits of the tensor of one device.
#include <numeric>
#include <random>

#include "dtensor/rng/dropout.h"
#include "tests/common/thin.h"
#include "tests/rng/rng_test_util.h"

namespace dtensor::sharding_test {
namespace {

using ::testing::HasSubstr;

constexpr DType kFloating[] = {DType::kF32, DType::kF64, DType::kBF16, DType::kF16};

// Global row-major positions of the coordinate's local elements, one by one.
std::vector<int64_t> GlobalPositions(const Spec& spec) {
  const auto index = LocalIndex(spec, spec.coordinate());
  const Strides strides = ContiguousStrides(spec.shape());
  std::vector<int64_t> positions = {0};
  for (size_t d = 0; d < index.size(); ++d) {
    std::vector<int64_t> next;
    for (int64_t p : positions) {
      for (const Interval& i : index[d]) {
        for (int64_t j = i.start; j < i.end; ++j) next.push_back(p + j * strides[d]);
      }
    }
    positions = std::move(next);
  }
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).is_flat()) continue;
    const IntSpan sizes = spec.placement(m).lengths();
    const int64_t coord = spec.coordinate()[m];
    const int64_t start = std::accumulate(sizes.begin(), sizes.begin() + coord, int64_t{0});
    positions =
        std::vector<int64_t>(positions.begin() + start, positions.begin() + start + sizes[coord]);
  }
  return positions;
}

struct Case {
  std::vector<int64_t> mesh;
  Placements placements;
  Shape shape;
};
std::string Print(const Case& c, DType dtype) {
  return ToString(c.placements) + " " + ToString(c.shape) + " " + std::string(Name(dtype));
}

// Fills every rank's part and compares it with the slice of the whole; the parts together are the
// whole, so that none is compared with nothing.
void CheckCase(const Case& c, DType dtype, const RandomOp& op, const Profile& profile) {
  Generator start(0x5EED00000007ull, profile);
  ASSERT_TRUE(start.SetOffset(8).ok());
  Generator whole_generator = start;
  const std::vector<uint64_t> whole = WholeBits(op, c.shape, dtype, &whole_generator);
  std::vector<bool> covered(whole.size());
  const DeviceMesh mesh = OrDie(DeviceMesh::Create(c.mesh));
  for (int64_t r = 0; r < mesh.size(); ++r) {
    FakeRank rank(r, start);
    const SpecRef spec = rank.Intern(mesh, c.placements, c.shape, dtype);
    const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), dtype));
    const absl::Status status = FillRandom(t, *spec, op, &rank.generator);
    ASSERT_TRUE(status.ok()) << status;
    std::vector<uint64_t> expected;
    for (int64_t p : GlobalPositions(*spec)) {
      expected.push_back(whole[p]);
      covered[p] = true;
    }
    ASSERT_EQ(BitsOfTensor(t), expected) << Print(c, dtype) << " rank " << r;
    ASSERT_EQ(rank.generator.offset(), whole_generator.offset());
  }
  ASSERT_THAT(covered, ::testing::Each(true)) << Print(c, dtype);
}

// Dropout's mask and bernoulli with a tensor of probabilities, part by part.
void CheckMasks(const Case& c, DType dtype, const Profile& profile) {
  const Generator start(0x5EED00000007ull, profile);
  const DeviceMesh mesh = OrDie(DeviceMesh::Create(c.mesh));
  FakeRank one(0, start);
  const SpecRef whole_spec = one.Intern(DeviceMesh::Self(), {}, c.shape, dtype);
  const Tensor whole = OrDie(Tensor::Empty(c.shape, DType::kBool));
  const Tensor draws = OrDie(Tensor::Empty(c.shape, DType::kBool));
  std::vector<double> chances;
  for (int64_t i = 0; i < Numel(c.shape); ++i) chances.push_back(static_cast<double>(i % 11) / 10);
  const Tensor p = OrDie(Tensor::FromVector(chances, c.shape, DType::kF32));
  ASSERT_TRUE(FillDropoutMask(whole, *whole_spec, 0.3, &one.generator).ok());
  ASSERT_TRUE(FillBernoulli(draws, p, *whole_spec, &one.generator).ok());
  const std::vector<uint64_t> mask_bits = BitsOfTensor(whole), draw_bits = BitsOfTensor(draws);
  for (int64_t r = 0; r < mesh.size(); ++r) {
    FakeRank rank(r, start);
    const SpecRef spec = rank.Intern(mesh, c.placements, c.shape, dtype);
    const Tensor mask = OrDie(Tensor::Empty(spec->local_shape(), DType::kBool));
    const Tensor drawn = OrDie(Tensor::Empty(spec->local_shape(), DType::kBool));
    std::vector<uint64_t> want_mask, want_draws;
    std::vector<double> local_chances;
    for (int64_t at : GlobalPositions(*spec)) {
      want_mask.push_back(mask_bits[at]);
      want_draws.push_back(draw_bits[at]);
      local_chances.push_back(chances[at]);
    }
    const Tensor local_p =
        OrDie(Tensor::FromVector(local_chances, spec->local_shape(), DType::kF32));
    ASSERT_TRUE(FillDropoutMask(mask, *spec, 0.3, &rank.generator).ok());
    ASSERT_TRUE(FillBernoulli(drawn, local_p, *spec, &rank.generator).ok());
    ASSERT_EQ(BitsOfTensor(mask), want_mask) << Print(c, dtype) << " rank " << r;
    ASSERT_EQ(BitsOfTensor(drawn), want_draws) << Print(c, dtype) << " rank " << r;
    ASSERT_EQ(rank.generator.offset(), one.generator.offset());
  }
}

void CheckAll(const Case& c, const Profile& profile) {
  for (DType dtype : kFloating) {
    CheckCase(c, dtype, UniformOp(-0.3, 0.7), profile);
    CheckCase(c, dtype, NormalOp(1, 2), profile);
    CheckCase(c, dtype, ExponentialOp(2), profile);
    CheckCase(c, dtype, CauchyOp(), profile);
    CheckCase(c, dtype, LogNormalOp(0, 1), profile);
  }
  for (int t = 0; t < kNumDTypes; ++t) {
    const auto dtype = static_cast<DType>(t);
    CheckCase(c, dtype, RandomRangeOp(0, 2), profile);
    CheckCase(c, dtype, RandomFullOp(), profile);
    CheckCase(c, dtype, BernoulliOp(0.3), profile);
    if (dtype != DType::kBool) CheckCase(c, dtype, GeometricOp(0.2), profile);
  }
  CheckCase(c, DType::kI64, RandomRangeOp(-5, int64_t{1} << 40), profile);
  for (DType dtype : kFloating) CheckMasks(c, dtype, profile);
}

TEST(ShardingTest, WholeTensorEqualsTheModel) {
  for (const Profile& profile : {SmallProfile(), SmallProfile(3, 512), Profile()}) {
    for (const Shape& shape : {Shape{1}, Shape{257}, Shape{3, 1000}, Shape{7, 11, 13}, Shape{}}) {
      for (DType dtype : kFloating) {
        for (const RandomOp& op : {UniformOp(), UniformOp(-0.3, 0.7), NormalOp(), NormalOp(5, 3)}) {
          Generator g(99, profile);
          ASSERT_TRUE(g.SetOffset(16).ok());
          const RandomPlan plan = OrDie(PlanRandom(op.kind, shape, dtype, profile, 16));
          const std::vector<uint64_t> whole = WholeBits(op, shape, dtype, &g);
          for (size_t i = 0; i < whole.size(); ++i) {
            ASSERT_EQ(whole[i], ModelBits(op, dtype, plan, 99, i)) << i << " " << Name(dtype);
          }
        }
      }
    }
  }
}

TEST(ShardingTest, OneDimensionalMeshes) {
  const Profile small = SmallProfile();
  for (int64_t n = 1; n <= 8; n += testing::Thin(6)) {
    for (const Shape& shape : {Shape{10}, Shape{2000}, Shape{5, 7}, Shape{64, 48}, Shape{40, 32, 3},
                               Shape{3, 1, 900}, Shape{0, 4}, Shape{1}}) {
      for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
        CheckAll({{n}, {Shard(d)}, shape}, small);
        CheckAll({{n}, {Shard(d, 4)}, shape}, SmallProfile(2, 512));
      }
      CheckAll({{n}, {Replicate()}, shape}, small);
    }
  }
}

TEST(ShardingTest, TwoDimensionalMeshes) {
  const std::vector<Placement> kinds = {Replicate(), Shard(0), Shard(1), Shard(2), Shard(0, 3)};
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{2, 2}, {2, 3}}) {
    for (const Placement& a : kinds) {
      for (const Placement& b : kinds) {
        CheckAll({mesh, {a, b}, {7, 9, 40}}, SmallProfile());
        CheckAll({mesh, {a, b}, {5, 3, 2}}, SmallProfile());
      }
    }
  }
}

// Few threads and many rows, so that patterns of pieces repeat, whole and cut off.
TEST(ShardingTest, RandomInnerShards) {
  std::mt19937 random(20261121);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  constexpr int64_t kWidths[] = {16, 32, 64, 128, 256, 512, 1024, 24, 40, 96, 7, 50, 200};
  for (int64_t i = 0; i < 300 / testing::Thin(10); ++i) {
    const int64_t width = kWidths[below(std::size(kWidths))];
    Shape shape = {1 + below(40), width};
    if (below(2)) shape.insert(shape.begin(), 1 + below(12));
    const int ndim = static_cast<int>(shape.size());
    Case c{{1 + below(4), 1 + below(3)}, {Shard(ndim - 1), Replicate()}, shape};
    if (below(3)) c.placements[1] = Shard(static_cast<int>(below(ndim)));
    if (below(4) == 0) c.placements[0] = Shard(static_cast<int>(below(ndim)), 1 + below(9));
    const Profile profile = SmallProfile(1 + below(5), 1024);
    CheckCase(c, DType::kF32, UniformOp(-0.3, 0.7), profile);
    CheckCase(c, DType::kF64, NormalOp(), profile);
    CheckCase(c, DType::kF16, below(2) ? UniformOp() : NormalOp(), profile);
    CheckMasks(c, kFloating[below(4)], profile);
  }
}

TEST(ShardingTest, SegmentedAndFlat) {
  const Profile small = SmallProfile();
  CheckAll({{2}, {SegmentedShard(1, {12, 5, 7})}, {50, 24}}, small);
  CheckAll({{4}, {SegmentedShard(0, {9, 0, 3})}, {12, 100}}, small);
  CheckAll({{3}, {SegmentedShard(1, {{15, 5}, {5, 1}, {4, 3}})}, {50, 24}}, small);
  CheckAll({{2, 2}, {SegmentedShard(0, {8, 4}), Shard(0)}, {12, 100}}, small);
  CheckAll({{2, 3}, {Shard(1), SegmentedShard(0, {8, 5})}, {13, 99}}, small);
  CheckAll({{3}, {FlatShard({1000, 0, 1500})}, {2500}}, small);
  CheckAll({{4}, {FlatShard({1, 1198, 0, 1})}, {10, 12, 10}}, small);
  CheckAll({{3}, {FlatShard({77, 1111, 12})}, {10, 12, 10}}, small);
  CheckAll({{2, 2}, {Shard(1), FlatShard({71, 529})}, {10, 12, 10}}, small);
  CheckAll({{2, 2}, {FlatShard({71, 529}), SegmentedShard(1, {8, 4})}, {10, 12, 10}}, small);
  CheckAll({{2}, {FlatShard({0, 1})}, {}}, small);
}

// Long pieces (no batch), windows of one run in several calls, and the real geometry of a device.
TEST(ShardingTest, LargerThanOneSweep) {
  const Profile t4 = OrDie(FindProfile("t4"));
  for (const Placement& p : {Shard(0), Shard(1), SegmentedShard(1, {1024, 511})}) {
    CheckCase({{3}, {p}, {333, 1535}}, DType::kF32, NormalOp(), t4);
    CheckCase({{3}, {p}, {333, 1535}}, DType::kF64, UniformOp(), t4);
    CheckCase({{5}, {p}, {333, 1535}}, DType::kF16, UniformOp(), t4);
  }
  CheckCase({{2}, {Shard(1)}, {600, 2048}}, DType::kBF16, NormalOp(), t4);  // rows divide V
  CheckCase({{3}, {Shard(0)}, {1200, 1001}}, DType::kF32, UniformOp(), Profile());
}

TEST(ShardingTest, Partial) {
  for (ReduceOp reduce : {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kMax, ReduceOp::kMin}) {
    const DeviceMesh mesh({2, 2});
    std::vector<uint64_t> whole;
    for (int64_t r = 0; r < 4; ++r) {
      FakeRank rank(r);
      const SpecRef spec = rank.Intern(mesh, {Partial(reduce), Shard(0)}, {6, 5});
      const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), DType::kF32));
      ASSERT_TRUE(FillRandom(t, *spec, UniformOp(), &rank.generator).ok());
      EXPECT_EQ(rank.generator.offset(), 4u);
      Generator g;
      whole = WholeBits(UniformOp(), {6, 5}, DType::kF32, &g);
      std::vector<uint64_t> expected(whole.begin() + (r % 2) * 15,
                                     whole.begin() + (r % 2) * 15 + 15);
      if (r >= 2 && reduce == ReduceOp::kSum) expected.assign(15, BitsOf(0.0f));
      if (r >= 2 && reduce == ReduceOp::kProd) expected.assign(15, BitsOf(1.0f));
      EXPECT_EQ(BitsOfTensor(t), expected) << r;
    }
  }
}

TEST(ShardingTest, OutsideTheMeshAndEmptyTensors) {
  FakeRank rank(5);
  const SpecRef outside = rank.Intern(DeviceMesh({2}), {Shard(0)}, {8});
  EXPECT_TRUE(FillRandom(Tensor(), *outside, NormalOp(), &rank.generator).ok());
  EXPECT_EQ(rank.generator.offset(), 4u);
  const SpecRef empty = rank.Intern(DeviceMesh::Self(), {}, {0, 3});
  const Tensor t = OrDie(Tensor::Empty({0, 3}, DType::kF32));
  EXPECT_TRUE(FillRandom(t, *empty, NormalOp(), &rank.generator).ok());
  EXPECT_EQ(rank.generator.offset(), 4u);
  const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, {2, 3});
  const Tensor meta = OrDie(Tensor::Empty({2, 3}, DType::kF32, DeviceType::kMeta));
  EXPECT_TRUE(FillRandom(meta, *spec, NormalOp(), &rank.generator).ok());
  EXPECT_EQ(rank.generator.offset(), 8u);
}

TEST(ShardingTest, StridedLocalTensor) {
  for (DType dtype : kFloating) {
    Generator g(4, SmallProfile()), h = g;
    const std::vector<uint64_t> whole = WholeBits(NormalOp(), {30, 40}, dtype, &g);
    FakeRank rank(0, h);
    const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, {30, 40}, dtype);
    const Tensor big = OrDie(Tensor::Full({80, 33}, dtype, 7));
    const Tensor view = big.Slice(0, 0, 40, 2).Slice(1, 2, 30).Transpose(0, 1);
    ASSERT_TRUE(FillRandom(view, *spec, NormalOp(), &rank.generator).ok());
    EXPECT_EQ(BitsOfTensor(view), whole);
    for (double v : big.Slice(0, 1, 40, 2).ToVector<double>()) ASSERT_EQ(v, 7);
  }
}

// Runs longer than a batch, written with a stride.
TEST(ShardingTest, StridedLongRuns) {
  Generator g(4, SmallProfile(8, 2048)), h = g;
  const std::vector<uint64_t> whole = WholeBits(UniformOp(), {50000}, DType::kF32, &g);
  for (const Placement& p : {Shard(0), FlatShard({25000, 25000})}) {
    FakeRank rank(1, h);
    const SpecRef spec = rank.Intern(DeviceMesh({2}), {p}, {50000});
    const Tensor view = OrDie(Tensor::Full({25000, 3}, DType::kF32, 7)).Slice(1, 1, 1).Squeeze(1);
    ASSERT_TRUE(FillRandom(view, *spec, UniformOp(), &rank.generator).ok());
    EXPECT_EQ(BitsOfTensor(view), std::vector<uint64_t>(whole.begin() + 25000, whole.end()));
  }
}

// A dense permuted tensor of one device is filled in memory order.
TEST(ShardingTest, PermutedGlobalTensor) {
  Generator g(4, SmallProfile()), h = g;
  const std::vector<uint64_t> memory = WholeBits(NormalOp(), {40, 30}, DType::kF32, &g);
  for (int64_t r = 0; r < 3; ++r) {
    FakeRank rank(r, h);
    const SpecRef spec = rank.Intern(DeviceMesh({3}), {Shard(0)}, {30, 40});
    const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), DType::kF32));
    ASSERT_TRUE(FillRandom(t, *spec, NormalOp(), &rank.generator, {1, 30}).ok());
    const std::vector<uint64_t> bits = BitsOfTensor(t);
    for (int64_t i = 0; i < 400; ++i) {
      ASSERT_EQ(bits[i], memory[i % 40 * 30 + i / 40 + r * 10]) << i;
    }
  }
}

// Every third column of a larger matrix, transposed: only what there is counts, in memory order.
TEST(ShardingTest, ViewOfALargerGlobalTensor) {
  Generator g(4, SmallProfile()), h = g;
  const std::vector<uint64_t> memory = WholeBits(UniformOp(), {40, 30}, DType::kF32, &g);
  for (int64_t r = 0; r < 3; ++r) {
    FakeRank rank(r, h);
    const SpecRef spec = rank.Intern(DeviceMesh({3}), {Shard(0)}, {30, 40});
    const Tensor t = OrDie(Tensor::Empty(spec->local_shape(), DType::kF32));
    ASSERT_TRUE(FillRandom(t, *spec, UniformOp(), &rank.generator, {3, 200}).ok());
    const std::vector<uint64_t> bits = BitsOfTensor(t);
    for (int64_t i = 0; i < 400; ++i) {
      ASSERT_EQ(bits[i], memory[i % 40 * 30 + i / 40 + r * 10]) << i;
    }
  }
}

// PyTorch before 2023 turned a raw 1 into 0; now `to` itself never comes out.
TEST(ShardingTest, UpperBoundNeverComesOut) {
  Generator g(3);
  const std::vector<uint64_t> half = WholeBits(UniformOp(), {300000}, DType::kF16, &g);
  Profile old;
  old.flip_raw_uniform = true;
  Generator h(3, old);
  const std::vector<uint64_t> raw = WholeBits(UniformOp(), {300000}, DType::kF16, &h);
  int ones = 0;
  for (size_t i = 0; i < half.size(); ++i) {
    ASSERT_LT(ValueOfBits(half[i], DType::kF16), 1.0);
    const bool one = ValueOfBits(raw[i], DType::kF16) == 1.0;
    ones += one;
    ASSERT_EQ(half[i], one ? 0 : raw[i]);
  }
  EXPECT_GT(ones, 0);
  // In float64 a raw 1 is one of 2^53: the same numbers in both.
  EXPECT_EQ(WholeBits(UniformOp(2, 3), {1000}, DType::kF64, &g),
            WholeBits(UniformOp(2, 3), {1000}, DType::kF64, &h));
}

TEST(ShardingTest, Errors) {
  FakeRank rank(0);
  const auto fill = [&](DType dtype, const RandomOp& op) {
    const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, {4}, dtype);
    return FillRandom(OrDie(Tensor::Empty({4}, dtype)), *spec, op, &rank.generator);
  };
  EXPECT_THAT(fill(DType::kI64, UniformOp()).message(),
              HasSubstr("[uniform_] needs a floating dtype, not int64"));
  EXPECT_THAT(fill(DType::kF32, UniformOp(2, 1)).message(),
              HasSubstr("from (2) must not be above to (1)"));
  EXPECT_THAT(fill(DType::kF32, UniformOp(std::nan(""), 1)).message(), HasSubstr("from (nan)"));
  EXPECT_THAT(fill(DType::kF16, UniformOp(0, 70000)).message(),
              HasSubstr("the range from 0 to 70000 does not fit in float16"));
  EXPECT_THAT(fill(DType::kF64, NormalOp(0, -1)).message(), HasSubstr("std must be >= 0, got -1"));
  const SpecRef spec = rank.Intern(DeviceMesh::Self(), {}, {4});
  const Tensor wrong = OrDie(Tensor::Empty({5}, DType::kF32));
  EXPECT_THAT(FillRandom(wrong, *spec, UniformOp(), &rank.generator).message(),
              HasSubstr("float32 [5] does not fit"));
  EXPECT_EQ(rank.generator.offset(), 0u);
}

}  // namespace
}  // namespace dtensor::sharding_test
