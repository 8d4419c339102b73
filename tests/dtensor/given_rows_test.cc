// Rows by hand where mesh dims, flat pieces and shared dims meet; what a call's key and dtypes are.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>
#include <vector>

#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/op.h"
#include "dtensor/redistribute.h"

namespace dtensor::given_rows_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

void Double(const KernelCall& call) {
  const auto* x = static_cast<const double*>(call.in[0].data);
  auto* y = static_cast<double*>(call.out[0].data);
  int64_t n = 1;
  for (int d = 0; d < call.out[0].ndim; ++d) n *= call.out[0].sizes[d];
  for (int64_t i = 0; i < n; ++i) y[i] = 2 * x[i];
}

OpDef& Declare(const std::string& name, const std::string& signature) {
  RegisterKernel(name, DeviceType::kCpu,
                 {Double, DTypeBit(DType::kF64), KernelLayout::kContiguous});
  return Op(name + signature);
}

// Of op(x) on the mesh, of x = 0, 1, 2 ...: how it is placed, or the error. Doubled, or a failure.
std::string Placed(OpDef& op, const Shape& mesh, const Placements& placements, const Shape& shape,
                   const std::vector<double>& want) {
  std::string text;
  const absl::Status status = RunSpmd(Numel(mesh), [&](RankContext& rank) -> absl::Status {
    std::vector<double> values(static_cast<size_t>(Numel(shape)));
    std::iota(values.begin(), values.end(), 0.0);
    const DTensor whole = FromVector<double>(values, shape, {.dtype = DType::kF64});
    const DTensor x = DistributeTensor(whole.local(), *DeviceMesh::Create(mesh), placements);
    const DTensor y = Call1(op, {&x});
    EXPECT_EQ(y.ToVector<double>(), want) << y.spec().ToString();
    if (rank.rank() == 0) text = ToString(y.placements());
    return absl::OkStatus();
  });
  return status.ok() ? text : "error: " + std::string(status.message());
}

const std::vector<double> kSixDoubled = {0, 2, 4, 6, 8, 10};

TEST(GivenRows, SegmentsAreOfWhatOtherMeshDimsLeave) {
  const Placement cut = SegmentedShard(0, Segments{4, 2});
  OpDef& op = Declare("gr_segments", "(x)")
                  .Factors("n -> n")
                  .Strategies({{{cut}, {cut}}, {{Replicate()}, {Replicate()}}});
  for (const Placements& p : {Placements{Replicate(), Shard(0)}, Placements{Shard(0), Shard(0)},
                              Placements{Replicate(), Replicate()}, Placements{cut, Replicate()}}) {
    EXPECT_THAT(Placed(op, {2, 2}, p, {6}, kSixDoubled),
                AllOf(HasSubstr("R"), Not(HasSubstr("error"))))
        << ToString(p);
  }
  EXPECT_EQ(Placed(op, {2}, {Shard(0)}, {6}, kSixDoubled), "[Segmented(0, [4, 2])]");
}

TEST(GivenRows, FlatPiecesAreOfWhatOtherMeshDimsLeave) {
  const Placement cut = FlatShard({4, 2});
  OpDef& op = Declare("gr_flat", "(x)")
                  .Factors("n -> n")
                  .Strategies({{{cut}, {cut}}, {{Replicate()}, {Replicate()}}});
  for (const Placements& p : {Placements{Replicate(), Shard(0)}, Placements{Shard(0), Shard(0)},
                              Placements{Replicate(), Replicate()}}) {
    EXPECT_THAT(Placed(op, {2, 2}, p, {6}, kSixDoubled),
                AllOf(HasSubstr("R"), Not(HasSubstr("error"))))
        << ToString(p);
  }
  OpDef& none = Declare("gr_flat_alone", "(x)").Factors("n -> n").Strategies({{{cut}, {cut}}});
  EXPECT_THAT(Placed(none, {2, 2}, {Replicate(), Replicate()}, {6}, kSixDoubled),
              HasSubstr("no row of placements"));
}

TEST(GivenRows, OtherElementsInOneTensorAreRefused) {
  const auto refused = [](const std::string& name, const Placement& in, const Placement& out) {
    OpDef& op = Declare(name, "(x)").Factors("n m -> n m").Strategies({{{in}, {out}}});
    return Placed(op, {2}, {Replicate()}, {3, 2}, kSixDoubled);
  };
  EXPECT_THAT(refused("gr_other_flat", FlatShard({4, 2}), FlatShard({3, 3})),
              AllOf(HasSubstr("other elements of x (Flat([4, 2]))"), HasSubstr("Flat([3, 3])")));
  EXPECT_THAT(refused("gr_flat_whole", FlatShard({4, 2}), Replicate()),
              HasSubstr("other elements of x (Flat([4, 2]))"));
  EXPECT_EQ(refused("gr_same_flat", FlatShard({4, 2}), FlatShard({4, 2})), "[Flat([4, 2])]");
}

TEST(GivenRows, ADimOfSeveralFactorsIsCutInAsManyIndicesEverywhere) {
  const auto split = [](const OpCall&) -> absl::StatusOr<FactorText> {
    return FactorText{"(g r) -> g r", {{"g", 2}}};
  };
  OpDef& wrong =
      Declare("gr_split_wrong", "(x)").Factors(split).Strategies({{{Shard(0)}, {Replicate()}}});
  EXPECT_THAT(Placed(wrong, {2}, {Shard(0)}, {6}, kSixDoubled),
              AllOf(HasSubstr("3 indices of (g r) in x (S(0))"), HasSubstr("6 in")));
  OpDef& right =
      Declare("gr_split_right", "(x)").Factors(split).Strategies({{{Shard(0)}, {Shard(0)}}});
  EXPECT_EQ(Placed(right, {2}, {Shard(0)}, {6}, kSixDoubled), "[S(0)]");
}

TEST(GivenRows, AttributesThatAreReadTogetherAreInTheKey) {
  OpDef& op = Declare("gr_take", "(x; k)")
                  .Shapes([](const OpCall& c) { return std::vector<Shape>{{c.attrs()[0].i}}; })
                  .Strategies({{{Replicate()}, {Replicate()}}});
  const absl::Status status = RunSpmd(1, [&](RankContext&) -> absl::Status {
    const DTensor x = ones({6}, {.dtype = DType::kF64});
    for (const int64_t k : {2, 5, 3}) EXPECT_EQ(Call1(op, {&x}, {IntAttr(k)}).numel(), k);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(GivenRows, FloatsOfTwoTypesNeedACheck) {
  OpDef& op = Declare("gr_two", "(x, y)").Factors("n, n -> n").Linear("x + y").Elementwise();
  OpDef& checked =
      Declare("gr_two_checked", "(x, y)").Factors("n, n -> n").Check([](const OpCall&) {
        return absl::OkStatus();
      });
  const absl::Status status = RunSpmd(1, [&](RankContext&) -> absl::Status {
    const DTensor x = ones({4}, {.dtype = DType::kF64}), y = ones({4}, {.dtype = DType::kF32});
    const DTensor mask = ones({4}, {.dtype = DType::kI64});
    Call1(op, {&x, &mask});
    Call1(checked, {&x, &y});
    Call1(op, {&x, &y});
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("x is float64 and y float32"));
}

}  // namespace
}  // namespace dtensor::given_rows_test
