#include "dtensor/factors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/forms.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "test_ops.h"

namespace dtensor::factors_test {
namespace {

using ::testing::HasSubstr;

class FactorsTest : public ::testing::Test {
 protected:
  SpecRef SpecOf(IntSpan shape, Placements placements) {
    return *RankContext::Current().specs().Intern(mesh_, placements, shape, DType::kF64);
  }
  // Binds `text` to inputs of these shapes (all Replicate).
  absl::StatusOr<FactorMap> Bind(const std::string& text, std::vector<Shape> shapes) {
    const OpDef op("probe(x, y, z)");
    std::vector<SpecRef> refs;
    std::vector<const Spec*> specs;
    for (const Shape& s : shapes) {
      refs.push_back(SpecOf(s, {Replicate()}));
      specs.push_back(refs.back().get());
    }
    OpCall call(op, specs, {});
    absl::StatusOr<ParsedFactors> parsed = ParseFactors(text);
    if (!parsed.ok()) return parsed.status();
    return BindFactors(call, *parsed, {});
  }
  DeviceMesh mesh_ = DeviceMesh({1}, {"tp"});
};

TEST_F(FactorsTest, InfersMatmul) {
  auto map = Bind("... m k, k n -> ... m n", {{2, 3, 4}, {4, 5}});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->OutputShape(0), Shape({2, 3, 5}));
}

TEST_F(FactorsTest, BroadcastsUnderEllipsisOnly) {
  auto map = Bind("..., ... -> ...", {{4, 1, 3}, {5, 3}});
  ASSERT_TRUE(map.ok());
  EXPECT_EQ(map->OutputShape(0), Shape({4, 5, 3}));
  EXPECT_TRUE((*map)->inputs[0][1].empty());  // size 1 counts as absent
  EXPECT_THAT(Bind("m k, k n -> m n", {{2, 1}, {4, 5}}).status().message(),
              HasSubstr("factor k differs: x dim 1 is 1, y dim 0 is 4: x [2, 1], y [4, 5]"));
}

TEST_F(FactorsTest, SolvesComposites) {
  auto map = Bind("b (g r), b g -> b r", {{2, 12}, {2, 4}});
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->OutputShape(0), Shape({2, 3}));
  EXPECT_THAT(Bind("b (g r), b g -> b r", {{2, 10}, {2, 4}}).status().message(),
              HasSubstr("x dim 1 is 10, not a multiple of 4"));
}

TEST_F(FactorsTest, ErrorsNameThePlace) {
  EXPECT_THAT(Bind("..., ... -> ...", {{4, 2}, {3, 2}}).status().message(),
              HasSubstr("shapes do not broadcast: x dim 0 is 4, y dim 0 is 3"));
  EXPECT_THAT(Bind("m k, k n -> m n", {{2}, {4, 5}}).status().message(),
              HasSubstr("x must have 2 dims, has 1"));
  EXPECT_THAT(ParseFactors("a (b -> a").status().message(), HasSubstr("expected a name"));
  EXPECT_THAT(ParseFactors("a b").status().message(), HasSubstr("expected ->"));
}

TEST_F(FactorsTest, LinearForms) {
  const std::vector<std::string> names = {"x", "w", "b"};
  auto sum = ParseLinear("x * w + b(x)", names);
  ASSERT_TRUE(sum.ok());
  ASSERT_EQ(sum->size(), 2u);
  EXPECT_EQ((*sum)[0].linear, (std::vector<int>{0, 1}));
  EXPECT_EQ((*sum)[1].params, (std::vector<int>{0}));
  EXPECT_FALSE(ParseLinear("x * q", names).ok());
  EXPECT_FALSE(ParseLinear("x *", names).ok());
}

// Rows as "[in, in] -> [out]".
std::vector<std::string> RowsOf(const OpDef& op, std::vector<SpecRef> inputs) {
  std::vector<const Spec*> specs;
  for (const SpecRef& s : inputs) specs.push_back(s.get());
  std::vector<Attr> attrs(op.attr_names().size());
  OpCall call(op, specs, attrs);
  auto maps = FactorMapsOf(call);
  EXPECT_TRUE(maps.ok()) << maps.status();
  std::vector<std::string> rows;
  for (const ShardingRow& row : DeriveRows(call, (*maps)[0], 0)) {
    rows.push_back(ToString(row.inputs) + " -> " + ToString(row.outputs));
  }
  return rows;
}

TEST_F(FactorsTest, MatmulRows) {
  OpDef op("mm(x, w)");
  op.Factors("m k, k n -> m n").Linear("x * w");
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Replicate()}), SpecOf({6, 8}, {Replicate()})}),
              ::testing::ElementsAre("[R, R] -> [R]", "[S(0), R] -> [S(0)]",
                                     "[S(1), S(0)] -> [P(sum)]", "[R, S(1)] -> [S(1)]"));
  // A pending sum passes where one comes; none is made of a replicated factor, which may hold
  // infinities.
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Partial()}), SpecOf({6, 8}, {Replicate()})}),
              ::testing::Contains("[P(sum), R] -> [P(sum)]"));
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Replicate()}), SpecOf({6, 8}, {Partial()})}),
              ::testing::Contains("[R, P(sum)] -> [P(sum)]"));
}

TEST_F(FactorsTest, BiasRidesOnAPendingSum) {
  OpDef op("lin(x, w, b)");
  op.Factors("m k, n k, n -> m n").Linear("x * w + b");
  EXPECT_THAT(
      RowsOf(op, {SpecOf({4, 6}, {Replicate()}), SpecOf({8, 6}, {Replicate()}),
                  SpecOf({8}, {Replicate()})}),
      ::testing::ElementsAre("[R, R, R] -> [R]", "[S(0), R, R] -> [S(0)]",
                             "[R, S(0), S(0)] -> [S(1)]", "[S(1), S(1), P(sum)] -> [P(sum)]"));
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Partial()}), SpecOf({8, 6}, {Replicate()}),
                          SpecOf({8}, {Replicate()})}),
              ::testing::Contains("[P(sum), R, P(sum)] -> [P(sum)]"));
}

TEST_F(FactorsTest, NonlinearKeepsNoPartial) {
  OpDef op("f(x)");
  op.Factors("... -> ...");
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 1}, {Replicate()})}),
              ::testing::ElementsAre("[R] -> [R]", "[S(0)] -> [S(0)]"));
}

TEST_F(FactorsTest, SquareNeverTakesAPartial) {
  OpDef op("f(x)");
  op.Factors("... -> ...").Linear("x * x");
  EXPECT_THAT(RowsOf(op, {SpecOf({4}, {Replicate()})}),
              ::testing::ElementsAre("[R] -> [R]", "[S(0)] -> [S(0)]"));
}

TEST_F(FactorsTest, MultiOutputForms) {
  OpDef op("ln(x, g, b) -> y, m");
  op.Factors("... [c], [c], [c] -> ... [c], ...").Linear({"y: g(x) + b", "m: x"});
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Replicate()}), SpecOf({6}, {Replicate()}),
                          SpecOf({6}, {Replicate()})}),
              ::testing::ElementsAre("[R, R, R] -> [R, R]", "[S(0), R, R] -> [S(0), S(0)]"));
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Replicate()}), SpecOf({6}, {Partial()}),
                          SpecOf({6}, {Partial()})}),
              ::testing::Contains("[R, P(sum), P(sum)] -> [P(sum), R]"));
}

TEST_F(FactorsTest, ReducesGivesItsOwnPartial) {
  OpDef op("amax(x)");
  op.Factors("m n -> m").Reduces(ReduceOp::kMax);
  EXPECT_THAT(RowsOf(op, {SpecOf({4, 6}, {Replicate()})}),
              ::testing::ElementsAre("[R] -> [R]", "[S(0)] -> [S(0)]", "[S(1)] -> [P(max)]"));
}

TEST_F(FactorsTest, CompositeUnits) {
  OpDef op("heads(x)");
  op.Factors([](const OpCall&) -> absl::StatusOr<FactorText> {
    return FactorText{"s (h d) -> s h d", {{"d", 4}}};
  });
  EXPECT_THAT(RowsOf(op, {SpecOf({2, 12}, {Replicate()})}),
              ::testing::ElementsAre("[R] -> [R]", "[S(0)] -> [S(0)]", "[S(1, unit=4)] -> [S(1)]",
                                     "[S(1)] -> [S(2)]"));
}

TEST(SameCut, ComparesBoundaries) {
  EXPECT_TRUE(SameCut(256, 64, 1, 2));   // 128 + 128 either way
  EXPECT_FALSE(SameCut(256, 64, 1, 3));  // 128, 128, 0 against 86, 86, 84
  EXPECT_TRUE(SameCut(3, 4, 3, 2));      // all on the first rank
}

}  // namespace
}  // namespace dtensor::factors_test
