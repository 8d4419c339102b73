#include "dtensor/dispatch.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/explain.h"
#include "dtensor/sharding.h"
#include "test_ops.h"
#include "tests/common/thin.h"

namespace dtensor::dispatch_test {
namespace {

using ::testing::HasSubstr;
using namespace testing;  // NOLINT: the test ops

class DispatchTest : public ::testing::Test {
 protected:
  void SetUp() override { RegisterTestOps(); }
};

TEST_F(DispatchTest, CachesByWhatTheRuleRead) {
  ClearDispatchCache();
  DTensor x = ones({4}, {.dtype = DType::kF64});
  const DispatchStats before = GetDispatchStats();
  for (int i = 0; i < 10; ++i) Apply("t_scale", {x}, {FloatAttr(i)});  // no rule reads s
  DispatchStats after = GetDispatchStats();
  EXPECT_EQ(after.misses - before.misses, 1);
  EXPECT_EQ(after.hits - before.hits, 9);
  DTensor one = ones({}, {.dtype = DType::kF64});
  for (int64_t n : {2, 3, 2}) {  // the factor function reads shape
    const Shape shape = {n};
    EXPECT_EQ(Apply("t_spread", {one}, {IntsAttr(shape)}).shape(), shape);
  }
  EXPECT_EQ(GetDispatchStats().misses - after.misses, 2);
}

TEST_F(DispatchTest, CacheIsBounded) {
  ClearDispatchCache();
  for (int64_t n = 0; n < 20000; ++n) {
    DTensor x = empty({n % 3, n}, {.dtype = DType::kF64});
    if (x.numel() == 0) Apply("t_relu", {x});
  }
  EXPECT_LE(GetDispatchStats().entries, 16384);
  for (int64_t n = 0; n < 20000; ++n) Apply("t_relu", {zeros({n, 0}, {.dtype = DType::kF64})});
  EXPECT_LE(GetDispatchStats().entries, 16384);
  EXPECT_GT(GetDispatchStats().evictions, 0);
  EXPECT_LE(RankContext::Current().specs().size(), 3 * 16384);
}

TEST_F(DispatchTest, InputsAreCounted) {
  const DTensor x = ones({2}, {.dtype = DType::kF64});
  EXPECT_THAT(MessageOf([&] { Apply("t_add", {x}); }), HasSubstr("[t_add] takes 2 inputs, got 1"));
  EXPECT_THAT(MessageOf([&] { Apply("t_add", {x, x, x}); }),
              ::testing::AllOf(HasSubstr("[t_add] takes 2 inputs, got 3"),
                               HasSubstr("#2 = float64 [2] on self []")));
  const DTensor* const inputs[] = {&x, &x};
  const Attr one[] = {IntAttr(1)};
  EXPECT_THAT(Dispatch(**OpRegistry::Find("t_add"), inputs, one).status().message(),
              HasSubstr("takes 0 attributes, got 1"));
  EXPECT_DEATH(Op("of_nothing()"), "it needs one: of_nothing");
  EXPECT_DEATH(Op("backwards)x("), "op signature needs");
}

TEST_F(DispatchTest, FromVectorTakesAPlacementPerMeshDim) {
  const DeviceMesh mesh({1, 1}, {"dp", "tp"});
  const auto spec = [&](const Placements& p) {
    return FromVector<float>({1, 2}, {2}, {.mesh = mesh, .placements = p}).spec().ToString();
  };
  EXPECT_EQ(spec({}), "float32 [2] on dp=1 tp=1 [R, R]");
  EXPECT_EQ(spec({Replicate(), Shard(0)}), "float32 [2] on dp=1 tp=1 [R, S(0)]");
  EXPECT_THAT(MessageOf([&] { spec({Shard(0)}); }), HasSubstr("1 placements [S(0)] for mesh"));
  EXPECT_THAT(MessageOf([&] { spec({Shard(0), Replicate(), Replicate()}); }),
              HasSubstr("3 placements"));
}

TEST_F(DispatchTest, PicturesShowFlatPieces) {
  const absl::Status status = RunFake({.world = 2}, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"a<b"});
    const DTensor x = empty({2, 4}, {.mesh = mesh, .placements = {FlatShard({6, 2})}});
    DT_ASSIGN_OR_RETURN(const std::string svg, DescribeSvg(x.spec()));
    EXPECT_THAT(svg, HasSubstr("on a&lt;b=2 [Flat([6, 2])]"));
    EXPECT_THAT(svg, HasSubstr("x=\"200.0\" y=\"200.0\" width=\"200.0\" height=\"200.0\""));
    EXPECT_THAT(svg, HasSubstr("<title>ranks 1</title>"));
    EXPECT_THAT(svg, ::testing::Not(HasSubstr("<title>ranks 0 1</title>")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, ErrorsNameOpSpecsAndRank) {
  absl::Status status = RunSpmd(2, [&](RankContext& context) {
    const DeviceMesh mesh({2}, {"tp"}), other({2}, {"dp"});
    DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {Shard(0)});
    DTensor w = DistributeTensor(Ints({5, 8}, 1), mesh, {Replicate()});
    EXPECT_THAT(
        MessageOf([&] { Matmul(x, w); }),
        ::testing::AllOf(HasSubstr("[t_matmul] factor k differs: x dim 1 is 6, w dim 0 is 5"),
                         HasSubstr("x = float64 [4, 6] on tp=2 [S(0)]"),
                         HasSubstr(absl::StrCat("(rank ", context.rank(), " of 2)"))));
    DTensor elsewhere = DistributeTensor(Ints({4, 6}, 1), other, {Shard(0)});
    EXPECT_THAT(
        MessageOf([&] { Apply("t_add", {x, elsewhere}); }),
        HasSubstr("inputs live on different meshes (tp=2 of ranks 0, 1 and dp=2 of ranks 0, "
                  "1); bring one to the other's first: Redistribute(mesh, {...})"));
    DTensor local = OnSelf(Ints({4, 6}, 1));
    EXPECT_THAT(MessageOf([&] { Apply("t_add", {x, local}); }),
                HasSubstr("input y is a local tensor, another is distributed"));
    {
      ImplicitReplication scope;
      EXPECT_EQ(Apply("t_add", {x, local}).shape(), Shape({4, 6}));
    }
    EXPECT_THAT(MessageOf([&] { Apply("t_add", {x, DTensor()}); }), HasSubstr("input y is null"));
    EXPECT_THAT(MessageOf([&] { Apply("t_undeclared", {x}); }),
                HasSubstr("has no sharding declaration"));
    EXPECT_EQ(Apply("t_add", {x, x}).shape(), Shape({4, 6}));  // nothing of this ends the world
    // A kernel that fails does: the data that it saw is this rank's.
    EXPECT_THAT(MessageOf([&] { Apply("t_fail", {x}); }), HasSubstr("no luck today"));
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("[t_fail] no luck today; inputs: x = "));
  EXPECT_TRUE(IsRankLocal(status));
  EXPECT_THAT(OpRegistry::Find("t_matmull").status().message(), HasSubstr("t_matmul"));
}

TEST_F(DispatchTest, DTensorOfAnotherWorldIsRefused) {
  DTensor outside = ones({2}, {.dtype = DType::kF64});
  absl::Status status = RunSpmd(1, [&](RankContext&) {
    DTensor mine = ones({2}, {.dtype = DType::kF64});
    EXPECT_THAT(
        MessageOf([&] {
          const DTensor* inputs[] = {&mine, &outside};
          Call1(**OpRegistry::Find("t_add"), inputs);
        }),
        HasSubstr("input y: the tensor float64 [2] on self [] belongs to another rank or world"));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, StrictModeNamesTheCollective) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {Partial()});
    StrictRedistribute strict;
    EXPECT_THAT(MessageOf([&] { Apply("t_relu", {x}); }),
                ::testing::AllOf(HasSubstr("[t_relu] input x: strict mode"), HasSubstr("over tp")));
    DTensor r = DistributeTensor(Ints({4, 6}, 2), mesh, {Replicate()});
    DTensor s = DistributeTensor(Ints({4, 6}, 3), mesh, {Shard(0)});
    Apply("t_add", {r, s});  // cutting a replica moves nothing
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, SearchTakesTheCheapestRow) {
  absl::Status status = RunSpmd(4, [&](RankContext&) {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    DTensor x = DistributeTensor(Ints({8, 6}, 1), mesh, {Shard(0), Replicate()});
    DTensor w = DistributeTensor(Ints({6, 4}, 1), mesh, {Replicate(), Shard(1)});
    CommTrace trace;
    DTensor y = Matmul(x, w);
    EXPECT_EQ(trace.TotalCount(), 0);
    EXPECT_EQ(ToString(y.placements()), "[S(0), S(1)]");
    // A pending sum plus a replica: the sum stays pending, nothing moves.
    DTensor p = DistributeTensor(Ints({8, 6}, 1), mesh, {Partial(), Replicate()});
    DTensor r = DistributeTensor(Ints({8, 6}, 1), mesh, {Replicate(), Replicate()});
    DTensor z = Apply("t_add", {p, r});
    EXPECT_EQ(trace.TotalCount(), 0);
    EXPECT_EQ(ToString(z.placements()), "[P(sum), R]");
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, StrategyRows) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {Shard(1)});
    DTensor y = Apply("t_rows", {x});  // cheapest of its two rows: S(0), an exchange of half
    EXPECT_EQ(ToString(y.placements()), "[S(0)]");
    EXPECT_EQ(y.ToVector<double>(), Apply("t_rows", {OnSelf(Ints({4, 6}, 1))}).ToVector<double>());
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, InPlaceKeepsSelfWhereItIs) {
  absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = DistributeTensor(Ints({4, 6}, 1), mesh, {Shard(0)});
    DTensor y = DistributeTensor(Ints({4, 6}, 2), mesh, {Shard(1)});
    const std::vector<double> sum = Apply("t_add", {x, y}).ToVector<double>();
    DTensor same = Apply("t_add_", {x, y});
    EXPECT_EQ(same.impl(), x.impl());
    EXPECT_EQ(x.ToVector<double>(), sum);
    DTensor p = DistributeTensor(Ints({4, 6}, 1), mesh, {Partial(ReduceOp::kMax)});
    EXPECT_THAT(MessageOf([&] { Apply("t_add_", {p, p}); }),
                HasSubstr("self is never redistributed"));
    DTensor wide = Apply("t_add", {x, x});
    EXPECT_THAT(MessageOf([&] {
                  Apply("t_add_", {DistributeTensor(Ints({6}, 1), mesh, {Replicate()}), wide});
                }),
                HasSubstr("cannot hold in place"));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST_F(DispatchTest, TheCacheIsBounded) {
  const int64_t shapes = 40000 / testing::Thin(2);
  const absl::Status status = RunFake({.world = 2}, [&](RankContext& context) -> absl::Status {
    const OpDef& op = *OpRegistry::Find("t_add").value();
    for (int64_t i = 0; i < shapes; ++i) {  // each once
      const DTensor x =
          empty({2, 1 + i}, {.dtype = DType::kF64,
                             .mesh = *DeviceMesh::Create({2}, {"tp"}, DeviceType::kMeta),
                             .placements = {Shard(0)}});
      const DTensor* inputs[] = {&x, &x};
      Call1(op, inputs);
    }
    const DispatchStats stats = GetDispatchStats();
    EXPECT_LE(stats.entries, 16384);
    EXPECT_GE(stats.misses, shapes);
    EXPECT_GT(stats.evictions, shapes - 20000);
    EXPECT_LT(context.specs().size(), 70000);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What integer tensors take of a number: nothing undefined where there is no such integer.
TEST(Scalars, HoldTheIntegerOfANumberOrZero) {
  EXPECT_EQ(Scalar(-3.7).i, -3);
  EXPECT_EQ(Scalar(4611686018427387904.0).i, int64_t{1} << 62);
  const double infinite = std::numeric_limits<double>::infinity();
  for (const double none : {1e300, -1e300, 9.3e18, infinite, -infinite, std::nan("")}) {
    EXPECT_EQ(Scalar(none).i, 0) << none;
  }
}

}  // namespace
}  // namespace dtensor::dispatch_test
