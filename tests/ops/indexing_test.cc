// operator[] and += -= *= /= of DTensor: the elements that Python's indexing takes, on one rank and
// however the tensor is sharded, and what is written through them.
#include <type_traits>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/common/message.h"

namespace dtensor::indexing_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

static_assert(!std::is_assignable_v<decltype(std::declval<DTensor>()[0]), DTensor>,
              "x[0] = y would change nothing");

// 0 to 23 as [2, 3, 4], placed as `placement` says on every mesh, the last of two ranks.
void OnEveryPlacement(const std::function<void(const DTensor& x)>& body) {
  body(view(arange(0, 24.0), {2, 3, 4}));
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh({2}, {"tp"});
    for (const Placement& p : {Replicate(), Shard(0), Shard(1), Shard(2), Partial()}) {
      body(DistributeTensor(view(arange(0, 24.0), {2, 3, 4}), mesh, {Replicate()})
               .Redistribute({p}));
    }
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

TEST(Indexing, TakesWhatPythonTakes) {
  OnEveryPlacement([](const DTensor& x) {
    EXPECT_THAT(x[1][0].ToVector<double>(), ElementsAre(12, 13, 14, 15));
    EXPECT_THAT(x[-1][-1].ToVector<double>(), ElementsAre(20, 21, 22, 23));
    EXPECT_THAT((x[{1, 2, 3}].ToVector<double>()), ElementsAre(23));
    EXPECT_EQ((x[{1, 2, 3}].ndim()), 0);
    EXPECT_THAT((x[{0, Slice(1), 0}].ToVector<double>()), ElementsAre(4, 8));
    EXPECT_THAT((x[{kEllipsis, 0}].ToVector<double>()), ElementsAre(0, 4, 8, 12, 16, 20));
    EXPECT_THAT((x[{0, kEllipsis, Slice({}, {}, 3)}].ToVector<double>()),
                ElementsAre(0, 3, 4, 7, 8, 11));
    EXPECT_THAT((x[{0, 0, Slice(-3, -1)}].ToVector<double>()), ElementsAre(1, 2));
    EXPECT_EQ((x[{Slice(), kNewDim, 1, kEllipsis, kNewDim}].shape()), (Shape{2, 1, 4, 1}));
    EXPECT_EQ(x[Slice(5)].shape(), (Shape{0, 3, 4}));
    EXPECT_EQ(x[kEllipsis].shape(), x.shape());
  });
}

// A tensor without dims is a number: it is taken first, so it is no neighbour that others lack.
TEST(Indexing, TensorsWithoutDimsAreNumbers) {
  OnEveryPlacement([](const DTensor& x) {
    const DTensor one = full({}, 1, {DType::kI64, x.mesh()});
    const DTensor ids = FromVector<int64_t>({3, 0}, {2}, {.mesh = x.mesh()});
    const auto expect = [&](std::initializer_list<TensorIndex> got,
                            std::initializer_list<TensorIndex> want) {
      const DTensor y = getitem(x, got), z = getitem(x, want);
      EXPECT_EQ(y.shape(), z.shape());
      EXPECT_EQ(y.ToVector<double>(), z.ToVector<double>());
    };
    expect({one, Slice(), ids}, {1, Slice(), ids});
    expect({one, Slice(), one}, {1, Slice(), 1});
    expect({Slice(), one, ids}, {Slice(), 1, ids});
    EXPECT_EQ(getitem(x, {one, Slice(), ids}).shape(), (Shape{3, 2}));
    const DTensor put = index_put(x, {one, DTensor(), ids}, full({3, 2}, -1.0, {.mesh = x.mesh()}));
    EXPECT_EQ(getitem(put, {1, Slice(), ids}).ToVector<double>(), std::vector<double>(6, -1.0));
    EXPECT_EQ(sum(eq(put, -1.0)).Item(), 6);
  });
}

// One that stands beside other tensors is indices of a new dim: 0, or none (shapes are torch's).
TEST(Indexing, TruthValuesWithoutDimsMakeADim) {
  OnEveryPlacement([](const DTensor& x) {
    const auto truth = [&](bool b) { return full({}, b ? 1 : 0, {DType::kBool, x.mesh()}); };
    const DTensor yes = truth(true), no = truth(false);
    const DTensor one = full({}, 1, {DType::kI64, x.mesh()});
    const DTensor ids = FromVector<int64_t>({1, 0}, {2}, {.mesh = x.mesh()});
    const auto expect = [&](std::initializer_list<TensorIndex> at, const Shape& shape,
                            std::initializer_list<TensorIndex> same) {
      const DTensor y = getitem(x, at);
      EXPECT_EQ(y.shape(), shape);
      EXPECT_EQ(y.ToVector<double>(), getitem(x, same).ToVector<double>());
    };
    expect({yes}, {1, 2, 3, 4}, {kNewDim});
    expect({yes, yes}, {1, 2, 3, 4}, {kNewDim});
    expect({Slice(), yes}, {2, 1, 3, 4}, {Slice(), kNewDim});
    expect({1, yes}, {1, 3, 4}, {1});
    expect({one, yes}, {1, 3, 4}, {1});
    expect({Slice(), one, yes}, {2, 1, 4}, {Slice(), 1});
    expect({yes, ids}, {2, 3, 4}, {ids});
    expect({ids, yes}, {2, 3, 4}, {ids});
    expect({ids, yes, ids}, {2, 4}, {ids, ids});
    expect({Slice(), yes, ids}, {2, 2, 4}, {Slice(), ids});
    expect({lt(x, 5), yes}, {5}, {lt(x, 5)});
    // No neighbours: their dim comes first.
    const DTensor apart = getitem(x, {yes, Slice(), ids});
    EXPECT_EQ(apart.ToVector<double>(),
              transpose(getitem(x, {Slice(), ids}), 0, 1).ToVector<double>());
    EXPECT_EQ(getitem(x, {no}).shape(), (Shape{0, 2, 3, 4}));
    EXPECT_EQ(getitem(x, {yes, no}).shape(), (Shape{0, 2, 3, 4}));
    EXPECT_EQ(getitem(x, {one, no}).shape(), (Shape{0, 3, 4}));
    EXPECT_THAT(testing::MessageOf([&] { (void)getitem(x, {no, ids}); }),
                HasSubstr("indices do not broadcast"));
  });
}

TEST(Indexing, RefusesByName) {
  const DTensor x = view(arange(0, 24.0), {2, 3, 4});
  EXPECT_THAT(testing::MessageOf([&] { (void)x[{0, 0, 0, 0}]; }),
              HasSubstr("4 indices for 3 dims"));
  EXPECT_THAT(testing::MessageOf([&] { (void)x[{kEllipsis, kEllipsis}]; }),
              HasSubstr("more than one ellipsis"));
  EXPECT_THAT(testing::MessageOf([&] { (void)x[2]; }), HasSubstr("index 2 is outside of dim 0"));
  EXPECT_THAT(testing::MessageOf([&] { (void)x[Slice(0, 2, 0)]; }),
              HasSubstr("step must be positive"));
  EXPECT_THAT(testing::MessageOf([&] { (void)DTensor()[0]; }), HasSubstr("null"));
}

TEST(Indexing, GradientsComeBack) {
  OnEveryPlacement([](const DTensor& given) {
    DTensor x = given.Detach();
    x.RequiresGrad();
    sum(x[{1, Slice(0, 3, 2), kEllipsis}] * 2).Backward();
    std::vector<double> expected(24, 0);
    for (int i : {12, 13, 14, 15, 20, 21, 22, 23}) expected[i] = 2;
    EXPECT_EQ(x.grad().ToVector<double>(), expected);
  });
}

TEST(Indexing, WritesGoThrough) {
  OnEveryPlacement([](const DTensor& given) {
    if (given.spec().has_partial()) return;  // a number added to a pending sum counts n times
    DTensor x = clone(given);
    const DTensor whole = x;
    x += 1.0;
    x *= 2.0;
    x -= x / 2.0;
    x /= 0.5;
    EXPECT_THAT(whole[0][0].ToVector<double>(), ElementsAre(2, 4, 6, 8));
    if (!(given.mesh().is_self() || given.placements()[0].is_replicate())) return;
    x[1] += x[0];  // a view where nothing has to move
    x[{0, Slice(0, 1)}] -= 2.0;
    EXPECT_THAT(whole[1][0].ToVector<double>(), ElementsAre(28, 32, 36, 40));
    EXPECT_THAT(whole[0][0].ToVector<double>(), ElementsAre(0, 2, 4, 6));
    copy_(x[0], zeros_like(x[0]));
    EXPECT_EQ(sum(whole[0]).Item(), 0);
  });
}

TEST(Indexing, QuotientsNeedFloats) {
  const DTensor n = arange(0, 4, 1, {DType::kI64});
  EXPECT_THAT(testing::MessageOf([&] { n /= 2; }), HasSubstr("cannot hold the quotient"));
  EXPECT_THAT(testing::MessageOf([&] { n -= 0.5; }), HasSubstr("cannot hold the float32 result"));
  n -= 1;
  EXPECT_THAT(n.ToVector<int64_t>(), ElementsAre(-1, 0, 1, 2));
}

TEST(Indexing, QuotientsWithGradients) {
  DTensor x = full({3}, 6.0), y = full({3}, 2.0);
  x.RequiresGrad();
  y.RequiresGrad();
  DTensor z = clone(x);
  z /= y;
  z -= y;
  sum(z).Backward();
  EXPECT_THAT(x.grad().ToVector<double>(), ElementsAre(0.5, 0.5, 0.5));
  EXPECT_THAT(y.grad().ToVector<double>(), ElementsAre(-2.5, -2.5, -2.5));
}

}  // namespace
}  // namespace dtensor::indexing_test
