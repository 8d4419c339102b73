#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/ops/view/reshape_factors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::view_test {
namespace {

OpFn Reshape(Shape shape) {
  return [=](const std::vector<DTensor>& x) { return reshape(x[0], shape); };
}
OpFn Permute(Dims dims) {
  return [=](const std::vector<DTensor>& x) { return permute(x[0], dims); };
}
OpFn Expand(Shape shape) {
  return [=](const std::vector<DTensor>& x) { return expand(x[0], shape); };
}
OpFn Slice(int64_t dim, int64_t start, int64_t end, int64_t step) {
  return [=](const std::vector<DTensor>& x) { return slice(x[0], dim, start, end, step); };
}
OpFn Select(int64_t dim, int64_t index) {
  return [=](const std::vector<DTensor>& x) { return select(x[0], dim, index); };
}
// Both pieces of a split, weighted unlike.
DTensor SplitAndJoin(const std::vector<DTensor>& x) {
  const Values parts = split(x[0], DimList{1, 3}, 1);
  return add(sum(parts[0], {1}), mul(sum(parts[1], {1}), 3.0));
}

Operand Iota(Shape shape) {
  std::vector<double> v(Numel(shape));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(i);
  return {std::move(shape), std::move(v)};
}

TEST(ReshapeFactors, CommonRefinement) {
  const auto text = [](const Shape& in, const Shape& out) { return ReshapeFactors(in, out).text; };
  EXPECT_EQ(text({6, 4}, {24}), "f0 f1 -> (f0 f1)");
  EXPECT_EQ(text({24}, {6, 4}), "(f0 f1) -> f0 f1");
  EXPECT_EQ(text({6, 1}, {1, 6, 1}), "f0 1 -> 1 f0 1");
  EXPECT_EQ(text({2, 3, 4}, {6, 4}), "f0 f1 f2 -> (f0 f1) f2");
  EXPECT_EQ(text({2, 12, 5}, {2, 3, 4, 5}), "f0 (f1 f2) f3 -> f0 f1 f2 f3");
  EXPECT_EQ(text({6, 4}, {4, 6}), "(f0 [w1]) [w4] -> (f0 [w2]) [w3]");
  EXPECT_EQ(text({3, 4}, {4, 3}), "[w0] [w2] -> [w1] [w3]");
  EXPECT_EQ(text({2, 3, 4}, {2, 4, 3}), "f0 [w1] [w3] -> f0 [w2] [w4]");
  EXPECT_EQ(text({}, {1, 1}), " -> 1 1");
  EXPECT_EQ(text({0, 3}, {3, 0}), "[a0] [a1] -> [b0] [b1]");
}

TEST(Reshape, KeepsRowMajorOrder) {
  const DTensor x = Iota({2, 6}).Make();
  for (const Shape& shape : {Shape{12}, Shape{-1}, Shape{3, 4}, Shape{2, -1, 3}, Shape{2, 6}}) {
    EXPECT_EQ(reshape(x, shape).ToVector<double>(), Iota({12}).values);
  }
  EXPECT_EQ(reshape(x, {2, -1, 3}).shape(), (Shape{2, 2, 3}));
  EXPECT_EQ(view(transpose(x, 0, 1), {12}).ToVector<double>()[1], 6);
  EXPECT_EQ(reshape(Float({}, 1).Make(), {-1}).shape(), Shape{1});
  EXPECT_EQ(reshape(Float({1}, 1).Make(), {}).shape(), Shape{});
  EXPECT_EQ(reshape(Float({0, 3}, 1).Make(), {3, 0}).shape(), (Shape{3, 0}));
}

TEST(Reshape, FlattenAndUnflatten) {
  const DTensor x = Iota({2, 3, 4}).Make();
  EXPECT_EQ(flatten(x).shape(), Shape{24});
  EXPECT_EQ(flatten(x, 1).shape(), (Shape{2, 12}));
  EXPECT_EQ(flatten(x, 0, -2).shape(), (Shape{6, 4}));
  EXPECT_EQ(flatten(Float({}, 1).Make()).shape(), Shape{1});
  EXPECT_EQ(unflatten(x, -1, {-1, 2}).shape(), (Shape{2, 3, 2, 2}));
  EXPECT_EQ(unflatten(Float({4, 0}, 1).Make(), 0, {2, 2}).shape(), (Shape{2, 2, 0}));
}

TEST(Permute, MovesElements) {
  const DTensor x = Iota({2, 3}).Make();
  EXPECT_EQ(transpose(x, 0, -1).ToVector<double>(), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(permute(x, {-1, 0}).ToVector<double>(), (std::vector<double>{0, 3, 1, 4, 2, 5}));
  EXPECT_EQ(transpose(Float({}, 1).Make(), 0, 0).shape(), Shape{});
  EXPECT_EQ(permute(Float({}, 1).Make(), {}).shape(), Shape{});
}

TEST(Squeeze, GlobalSizesOfOne) {
  const DTensor x = Float({3, 1, 2, 1}, 1).Make();
  EXPECT_EQ(squeeze(x).shape(), (Shape{3, 2}));
  EXPECT_EQ(squeeze(x, {-1}).shape(), (Shape{3, 1, 2}));
  EXPECT_EQ(squeeze(x, {0, 1}).shape(), (Shape{3, 2, 1}));
  EXPECT_EQ(squeeze(x, DimList{}).shape(), x.shape());
  EXPECT_EQ(unsqueeze(x, -1).shape(), (Shape{3, 1, 2, 1, 1}));
  EXPECT_EQ(unsqueeze(Float({}, 1).Make(), 0).shape(), Shape{1});
}

TEST(Expand, RepeatsWithoutCopies) {
  const DTensor x = Iota({3, 1}).Make(), y = expand(x, {2, -1, 2});
  EXPECT_EQ(y.ToVector<double>(), (std::vector<double>{0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2}));
  EXPECT_TRUE(y.local().buffer().SharesWith(x.local().buffer()));
  EXPECT_EQ(expand(Float({1, 3}, 1).Make(), {0, 3}).shape(), (Shape{0, 3}));
}

TEST(Slice, AsPythonClampsIt) {
  const DTensor x = Iota({6}).Make();
  EXPECT_EQ(slice(x, 0, 1, 5, 3).ToVector<double>(), (std::vector<double>{1, 4}));
  EXPECT_EQ(slice(x, 0, -2, 100).ToVector<double>(), (std::vector<double>{4, 5}));
  EXPECT_EQ(slice(x, 0, 4, 2).shape(), Shape{0});
  EXPECT_EQ(slice(x, 0, 6, 9).shape(), Shape{0});
  EXPECT_EQ(select(x, 0, -1).Item(), 5);
  EXPECT_EQ(select(Float({0, 3}, 1).Make(), 1, 0).shape(), Shape{0});
}

TEST(Split, SizesAndSections) {
  const DTensor x = Iota({7, 2}).Make();
  const Values even = split(x, 3), own = split(x, DimList{2, 0, 5});
  ASSERT_EQ(even.size(), 3u);
  EXPECT_EQ(even[2].ToVector<double>(), (std::vector<double>{12, 13}));
  ASSERT_EQ(own.size(), 3u);
  EXPECT_EQ(own[1].shape(), (Shape{0, 2}));
  EXPECT_EQ(own[2].shape(), (Shape{5, 2}));
  EXPECT_EQ(split(Float({0}, 1).Make(), 0).size(), 1u);
  // Braces are a list, of one number too.
  EXPECT_EQ(tensor_split(x, {3}).size(), 2u);
  EXPECT_EQ(tensor_split(x, 3).size(), 3u);
  EXPECT_EQ(split(x, {7}).size(), 1u);
  EXPECT_THROW(split(x, {4}), Error);
}

TEST(Views, Gradients) {
  const Operand x = Float({2, 4, 3}, 1);
  CheckGradients(Reshape({8, 3}), {x});
  CheckGradients(Reshape({3, 8}), {x});
  CheckGradients(Permute({2, 0, 1}), {x});
  CheckGradients(Expand({2, 2, 3}), {Float({2, 1, 3}, 1)});
  CheckGradients(Expand({5, 2, 3}), {Float({2, 3}, 1)});
  CheckGradients(Slice(1, 1, 4, 2), {x});
  CheckGradients(Slice(0, 4, 9, 1), {x});
  CheckGradients(Slice(0, 0, 9, 1), {x});
  CheckGradients(Select(1, -1), {x});
  CheckGradients(SplitAndJoin, {x});
  const OpFn squeezed = [](const std::vector<DTensor>& v) {
    return transpose(unsqueeze(squeeze(v[0]), 1), 0, 2);
  };
  CheckGradients(squeezed, {Float({1, 3, 1, 2}, 1)});
}

TEST(Views, Sharded) {
  const Operand x = Float({4, 6, 2}, 1);
  for (const Shape& shape : {Shape{24, 2}, Shape{4, 12}, Shape{48}, Shape{2, 2, 6, 2},
                             Shape{6, 4, 2}, Shape{4, 3, 2, 2}, Shape{8, 6}, Shape{1, 4, 6, 2}}) {
    CheckSharded(Reshape(shape), {x});
  }
  CheckSharded(Reshape({5, 3}), {Float({15}, 1)});
  CheckSharded(Reshape({15}), {Float({5, 3}, 1)});
  CheckSharded(Permute({2, 0, 1}), {x});
  CheckSharded(Expand({3, 4, 5}), {Float({4, 1}, 1)});
  CheckSharded(Slice(1, 1, 5, 2), {x});
  CheckSharded(Slice(1, 0, 6, 1), {x});
  CheckSharded(Select(0, 2), {x});
  CheckSharded(SplitAndJoin, {Float({3, 4}, 1)});
  const OpFn squeezed = [](const std::vector<DTensor>& v) {
    return transpose(unsqueeze(squeeze(v[0]), 1), 0, 2);
  };
  CheckSharded(squeezed, {Float({1, 3, 1, 2}, 1)});
}

TEST(Views, HeadsOfAShardedProjectionStay) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor x = FromVector(Noise(48, 1), {2, 3, 8}, {DType::kF64, mesh, {Shard(2)}});
    CommTrace trace;
    const DTensor heads = transpose(view(x, {2, 3, 4, 2}), 1, 2);  // [b, h, s, d]
    EXPECT_EQ(heads.placements()[0], Shard(1));
    const DTensor back = reshape(transpose(heads, 1, 2), {2, 3, 8});
    EXPECT_TRUE(back.placements()[0].is_shard());
    EXPECT_EQ(back.placements()[0].dim(), 2);
    EXPECT_EQ(slice(x, 1, 0, 2).placements()[0].dim(), 2);
    EXPECT_EQ(slice(x, 2, 0, 8).placements()[0].dim(), 2);  // all of it: nothing to gather
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Views, Errors) {
  const DTensor x = Float({2, 3}, 1).Make();
  EXPECT_THAT(MessageOf([&] { reshape(x, {4}); }),
              ::testing::StartsWith("[reshape] shape [4] does not fit the 6 elements of [2, 3]"));
  EXPECT_THAT(MessageOf([&] { reshape(x, {-1, -1}); }), ::testing::HasSubstr("one may be -1"));
  EXPECT_THAT(MessageOf([&] { permute(x, {0, 0}); }), ::testing::StartsWith("[permute]"));
  EXPECT_THAT(MessageOf([&] { permute(x, {0}); }),
              ::testing::HasSubstr("must list each of the 2 dims of x once"));
  EXPECT_THAT(MessageOf([&] { expand(x, {2, 4}); }),
              ::testing::StartsWith("[expand] x [2, 3] does not expand to [2, 4]"));
  EXPECT_THAT(MessageOf([&] { slice(x, 0, 0, 1, 0); }),
              ::testing::StartsWith("[slice] step must be positive, is 0"));
  EXPECT_THAT(MessageOf([&] { select(x, 0, 2); }),
              ::testing::StartsWith("[select] index 2 is outside of dim 0 of x [2, 3]"));
  EXPECT_THAT(MessageOf([&] { split(x, DimList{1, 2}); }),
              ::testing::StartsWith("[split] sizes [1, 2] do not sum to dim 0"));
  EXPECT_THAT(MessageOf([&] { flatten(x, 1, 0); }), ::testing::StartsWith("[flatten]"));
  EXPECT_THAT(MessageOf([&] { transpose(x, 0, 2); }), ::testing::StartsWith("[transpose]"));
}

}  // namespace
}  // namespace dtensor::testing::view_test
