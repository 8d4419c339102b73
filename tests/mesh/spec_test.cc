#include "dtensor/mesh/spec.h"

#include "dtensor/tensor/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace dtensor::spec_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

const DeviceMesh& Mesh() {
  static const DeviceMesh mesh({2, 4}, {"dp", "tp"});
  return mesh;
}

SpecRef Make(SpecInterner& specs, Placements placements, Shape shape) {
  return ValueOrThrow(specs.Intern(Mesh(), placements, shape, DType::kF32));
}

TEST(Spec, EqualSpecsAreOnePointer) {
  SpecInterner specs(5);
  SpecRef a = Make(specs, {Shard(0), Replicate()}, {4, 6});
  EXPECT_EQ(a, Make(specs, {Shard(0), Replicate()}, {4, 6}));
  EXPECT_EQ(a, Make(specs, {Shard(-2), Replicate()}, {4, 6}));
  EXPECT_EQ(a, ValueOrThrow(specs.Intern(DeviceMesh({2, 4}, {"dp", "tp"}), {Shard(0), Replicate()},
                                         {4, 6}, DType::kF32)));
  EXPECT_FALSE(a == Make(specs, {Shard(1), Replicate()}, {4, 6}));
  EXPECT_FALSE(a == Make(specs, {Shard(0), Replicate()}, {4, 7}));
  EXPECT_EQ(a->ToString(), "float32 [4, 6] on dp=2 tp=4 [S(0), R]");
  EXPECT_THAT(a->local_shape(), ElementsAre(2, 6));
  EXPECT_THAT(a->local_start(), ElementsAre(2, 0));
  EXPECT_THAT(a->coordinate(), ElementsAre(1, 1));
  EXPECT_EQ(a->local_bytes(), 48);
}

TEST(Spec, UnitsThatChangeNothingVanish) {
  SpecInterner specs(0);
  EXPECT_EQ(Make(specs, {Shard(0, 4), Replicate()}, {8}),
            Make(specs, {Shard(0), Replicate()}, {8}));
  SpecRef real = Make(specs, {Shard(0, 4), Replicate()}, {12});
  EXPECT_EQ(real->placement(0).unit(), 4);
  EXPECT_EQ(real, Make(specs, {Shard(0, 4), Replicate()}, {12}));
  // What a nested cut finds differs between coordinates: 8 on the first, 2 on the second.
  EXPECT_EQ(Make(specs, {Shard(0, 8), Shard(0, 2)}, {10})->placement(1).unit(), 2);
}

TEST(Spec, HashesAgreeBetweenRanks) {
  SpecInterner a(0), b(7);
  for (int64_t size : {0, 5, 8}) {
    EXPECT_EQ(Make(a, {Shard(0), Partial()}, {size})->hash(),
              Make(b, {Shard(0), Partial()}, {size})->hash());
  }
}

TEST(Spec, UnusedSpecsAreSwept) {
  SpecInterner specs(0);
  SpecRef kept = Make(specs, {Shard(0), Replicate()}, {1});
  for (int64_t i = 0; i < 100000; ++i) Make(specs, {Shard(0), Replicate()}, {i});
  EXPECT_LE(specs.size(), 1024);
  EXPECT_EQ(kept, Make(specs, {Shard(0), Replicate()}, {1}));
}

TEST(Spec, SpecsOutliveTheTable) {
  SpecRef kept;
  {
    SpecInterner specs(0);
    kept = Make(specs, {Shard(0), Replicate()}, {4});
  }
  EXPECT_THAT(kept->shape(), ElementsAre(4));
}

TEST(Spec, RanksOutsideTheMeshHoldNothing) {
  SpecInterner specs(8);
  SpecRef spec = Make(specs, {Shard(0), Replicate()}, {4, 6});
  EXPECT_FALSE(spec->in_mesh());
  EXPECT_EQ(spec->local_bytes(), 0);
}

TEST(Spec, SegmentsAreWrittenInTheirSimplestForm) {
  SpecInterner specs(0);
  const SpecRef plain = Make(specs, {SegmentedShard(0, {8, 4}), Replicate()}, {12});
  EXPECT_EQ(Make(specs, {SegmentedShard(-1, {{8, 4}, {0, 3}, {4, 2}}), Replicate()}, {12}), plain);
  EXPECT_NE(Make(specs, {SegmentedShard(0, {{8, 8}, {4, 2}}), Replicate()}, {12}), plain);
  EXPECT_EQ(Make(specs, {SegmentedShard(0, {{12, 8}}), Shard(0)}, {12}),
            Make(specs, {Shard(0, 8), Shard(0)}, {12}));
  // Nested: what the segments leave is cut on.
  const SpecRef nested = Make(specs, {SegmentedShard(0, {{6, 4}, {2, 1}}), Shard(0)}, {8});
  EXPECT_THAT(LocalIndex(*nested, {1, 1})[0], ElementsAre(Interval{5, 6}));
}

// One rank has all segments, also of what another mesh dim has cut before it.
TEST(Spec, SegmentsOnAMeshDimOfOneRankCutNothing) {
  SpecInterner specs(0);
  const DeviceMesh mesh({2, 1}, {"dp", "tp"});
  const auto of = [&](Placements placements) {
    return ValueOrThrow(specs.Intern(mesh, placements, {6, 4}, DType::kF32));
  };
  const SpecRef cut = of({Shard(0), SegmentedShard(0, {2, 2, 2})});
  EXPECT_EQ(cut, of({Shard(0), Shard(0)}));
  EXPECT_THAT(cut->local_shape(), ElementsAre(3, 4));
  EXPECT_EQ(specs.Intern(mesh, {Shard(0), SegmentedShard(0, {2, 2})}, {6, 4}, DType::kF32)
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(Spec, FlatCutsWhatTheOthersLeft) {
  SpecInterner specs(7);
  SpecRef spec = Make(specs, {FlatShard({2, 1}), Shard(1)}, {3, 4});
  EXPECT_THAT(spec->local_shape(), ElementsAre(1));
  SpecRef twice = Make(specs, {FlatShard({4, 4}), FlatShard({1, 1, 2, 0})}, {8});
  EXPECT_THAT(twice->local_shape(), ElementsAre(0));
}

TEST(Spec, ZeroDimTensors) {
  SpecInterner specs(0);
  SpecRef spec = Make(specs, {Replicate(), Partial()}, {});
  EXPECT_EQ(spec->local_bytes(), 4);
  EXPECT_TRUE(spec->has_partial());
  SpecRef self = ValueOrThrow(specs.Intern(DeviceMesh::Self(), {}, {3}, DType::kBF16));
  EXPECT_TRUE(self->is_replicated());
  EXPECT_THAT(self->local_shape(), ElementsAre(3));
}

TEST(Spec, ErrorsSayWhatIsWrong) {
  SpecInterner specs(0);
  auto message = [&](Placements placements, Shape shape) {
    auto spec = specs.Intern(Mesh(), placements, shape, DType::kF32);
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(spec.status().message());
  };
  EXPECT_THAT(message({Shard(0)}, {4}), HasSubstr("1 placements [S(0)] for mesh dp=2 tp=4 of 2"));
  EXPECT_THAT(message({Replicate(), Shard(2)}, {4, 6}),
              HasSubstr("placement S(2) of mesh dim tp: dim 2 is out of range for shape [4, 6]: "
                        "legal are -2 to 1"));
  EXPECT_THAT(message({Replicate(), Shard(0)}, {}), HasSubstr("a tensor without dims"));
  EXPECT_THAT(message({Shard(0, 0), Replicate()}, {4}), HasSubstr("unit 0 is less than 1"));
  EXPECT_THAT(message({SegmentedShard(0, {2, 3}), Replicate()}, {4}),
              AllOf(HasSubstr("the segments sum to 5, but dim 0 of shape [4] has 4 there"),
                    Not(HasSubstr("come first"))));
  EXPECT_THAT(message({Shard(0), SegmentedShard(0, {2, 2})}, {4}),
              AllOf(HasSubstr("the segments sum to 4, but dim 0 of shape [4] has 2 there"),
                    HasSubstr("let this mesh dim come first")));
  EXPECT_THAT(message({SegmentedShard(0, {-1, 5}), Replicate()}, {4}),
              HasSubstr("segment size -1 is negative"));
  EXPECT_THAT(message({SegmentedShard(0, {{4, 0}, {0, 1}}), Replicate()}, {4}),
              HasSubstr("unit 0 is less than 1"));
  constexpr int64_t kMost = INT64_MAX;  // twice that and 10 is 8, counted carelessly
  EXPECT_THAT(message({SegmentedShard(0, {kMost, kMost, 10}), Replicate()}, {8}),
              HasSubstr("but dim 0 of shape [8] has 8"));
  EXPECT_THAT(message({Replicate(), FlatShard({kMost, kMost, 10, 0})}, {8}),
              HasSubstr("but the local tensor has 8 elements"));
  EXPECT_THAT(message({FlatShard({2, 3}), Replicate()}, {4}),
              HasSubstr("the lengths sum to 5, but the local tensor has 4 elements"));
  EXPECT_THAT(message({FlatShard({4}), Replicate()}, {4}),
              HasSubstr("1 lengths for 2 coordinates"));
  EXPECT_THAT(message({Partial(ReduceOp::kSum), Partial(ReduceOp::kMax)}, {4}),
              HasSubstr("P(max) of mesh dim tp: it cannot stand beside P(sum)"));
  EXPECT_FALSE(specs.Intern(Mesh(), {Replicate(), Replicate()}, {-1}, DType::kF32).ok());
  EXPECT_FALSE(specs.Intern(DeviceMesh(), {}, {1}, DType::kF32).ok());
  const Placements average = {Replicate(), Partial(ReduceOp::kAvg)};
  EXPECT_TRUE(specs.Intern(Mesh(), average, {4}, DType::kF16).ok());
  EXPECT_THAT(std::string(specs.Intern(Mesh(), average, {4}, DType::kI64).status().message()),
              HasSubstr("P(avg) of mesh dim tp: an average is of floating numbers, not of int64"));
}

}  // namespace
}  // namespace dtensor::spec_test
