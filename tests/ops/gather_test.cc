// What PyTorch's samples do not show of gather, scatter and their kin: errors, writing in place and
// through views, and what moves where the indexed dim is sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::gather_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

DTensor Doubles(const std::vector<double>& values, const Shape& shape) {
  return FromVector(values, shape, {.dtype = DType::kF64});
}
DTensor Indices(const std::vector<int64_t>& values, const Shape& shape) {
  return FromVector(values, shape);
}

TEST(Scatter, OfEqualIndicesTheLastOneWritesAndAllAdd) {
  const DTensor x = Doubles({0, 0, 0}, {3}), at = Indices({1, 1, 2}, {3});
  const DTensor src = Doubles({5, 7, 9}, {3});
  EXPECT_THAT(scatter(x, 0, at, src).ToVector<double>(), ElementsAre(0, 7, 9));
  EXPECT_THAT(scatter_add(x, 0, at, src).ToVector<double>(), ElementsAre(0, 12, 9));
  EXPECT_THAT(scatter_reduce(x, 0, at, src, "amax").ToVector<double>(), ElementsAre(0, 7, 9));
  EXPECT_THAT(scatter_reduce(x, 0, at, src, "mean", false).ToVector<double>(),
              ElementsAre(0, 6, 9));
}

TEST(Scatter, NaNWinsAndIntegersWrapAround) {
  const DTensor at = Indices({0, 0}, {2});
  const DTensor x = scatter_reduce(Doubles({1}, {1}), 0, at, Doubles({NAN, 3}, {2}), "amax");
  EXPECT_TRUE(std::isnan(x.Item()));
  const DTensor bytes = to(Indices({200}, {1}), DType::kU8);
  const DTensor more = to(Indices({100, 3}, {2}), DType::kU8);
  EXPECT_EQ(scatter_add(bytes, 0, at, more).Item(), 47);
  EXPECT_EQ(scatter_reduce(bytes, 0, at, more, "prod").Item(), 200 * 100 * 3 % 256);
  const DTensor down = Indices({-7}, {1});  // means are rounded down
  EXPECT_EQ(scatter_reduce(down, 0, at, Indices({0, 0}, {2}), "mean").Item(), -3);
}

// Each rank combines what it has: only the result is to be reduced, and not before it is read.
TEST(Scatter, ExtremesOfCutPicksArePending) {
  const std::vector<int64_t> places = {0, 4, 2, 2, 1, 1, 3, 2, 0, 4, 4, 1};
  const Shape rows = {5, 4}, picks = {3, 4};
  for (const char* reduce : {"amax", "amin"}) {
    DTensor x = Doubles(Noise(20, 4), rows).RequiresGrad();
    DTensor src = Doubles(Noise(12, 6), picks).RequiresGrad();
    const DTensor whole = scatter_reduce(x, 0, Indices(places, picks), src, reduce);
    whole.Backward(Doubles(Noise(20, 5), rows));
    const auto want = whole.ToVector<double>(), dx = x.grad().ToVector<double>(),
               ds = src.grad().ToVector<double>();
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({2});
      DTensor a = FromVector(Noise(20, 4), rows, {DType::kF64, mesh, {}}).RequiresGrad();
      DTensor b = FromVector(Noise(12, 6), picks, {DType::kF64, mesh, {Shard(0)}}).RequiresGrad();
      const DTensor at = FromVector(places, picks, {DType::kI64, mesh, {Shard(0)}});
      const CommTrace trace;
      const DTensor y = scatter_reduce(a, 0, at, b, reduce);
      EXPECT_EQ(trace.events().size(), 0) << trace.ToString();
      const ReduceOp kind = reduce == std::string("amax") ? ReduceOp::kMax : ReduceOp::kMin;
      EXPECT_EQ(y.placements()[0], Partial(kind));
      const DTensor more = scatter_reduce(y.Detach(), 0, at, b.Detach(), reduce);
      EXPECT_EQ(trace.events().size(), 0) << trace.ToString();
      EXPECT_EQ(more.placements()[0], Partial(kind));
      EXPECT_EQ(more.ToVector<double>(), want);  // the same again
      y.Backward(FromVector(Noise(20, 5), rows, {DType::kF64, mesh, {}}));
      EXPECT_EQ(y.ToVector<double>(), want);
      EXPECT_EQ(a.grad().ToVector<double>(), dx);
      EXPECT_EQ(b.grad().ToVector<double>(), ds);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Scatter, InPlaceWritesToTheMemoryThatViewsSee) {
  const DTensor x = zeros({2, 3}, {.dtype = DType::kF64});
  const DTensor columns = transpose(x, 0, 1);  // not row-major
  index_copy_(columns, 0, Indices({2}, {1}), Doubles({4, 5}, {1, 2}));
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(0, 0, 4, 0, 0, 5));
  scatter_add_(x, 1, Indices({0}, {1, 1}), Doubles({1}, {1, 1}));  // of the first row only
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(1, 0, 4, 0, 0, 5));
  index_put_(x, {Indices({0, 1}, {2}), Indices({1, -1}, {2})}, Doubles({8, 9}, {2}));
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(1, 8, 4, 0, 0, 9));
  add_(diagonal(x), 10);
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(11, 8, 4, 0, 10, 9));
  add_(unbind(x, 1)[2], 1);
  EXPECT_THAT(x.ToVector<double>(), ElementsAre(11, 8, 5, 0, 10, 10));
}

// An index of a part of self, and a 0-d self: what covers a part would write to views.
TEST(Scatter, InPlaceIsTheFunctionWhateverTheIndexCovers) {
  struct Form {
    const char* name;
    OpFn plain, in_place;
  };
#define FORM(name, value)                                                           \
  {#name, [](const std::vector<DTensor>& v) { return name(v[0], 0, v[1], value); }, \
   [](const std::vector<DTensor>& v) {                                              \
     const DTensor x = mul(v[0], 1.0);                                              \
     return name##_(x, 0, v[1], value), x;                                          \
   }}
  const Form scatters[] = {FORM(scatter, v[2]), FORM(scatter, 7), FORM(scatter_add, v[2])};
  const Form slices[] = {FORM(index_add, v[2]), FORM(index_copy, v[2]), FORM(index_fill, 7)};
#undef FORM
  const auto check = [](const Form& form, const std::vector<Operand>& operands) {
    ExpectClose(form.in_place(MakeAll(operands)).ToVector<double>(),
                form.plain(MakeAll(operands)).ToVector<double>(), 0);
    if (form.plain(MakeAll(operands)).requires_grad()) {
      const auto got = Gradients(form.in_place, MakeAll(operands));
      EXPECT_EQ(got, Gradients(form.plain, MakeAll(operands))) << form.name;
    }
    const ShardedCheck sharded(form.in_place, operands, {.may_refuse = true});
    for (const Dims& mesh : {Dims{2}, Dims{3}, Dims{2, 2}}) {
      EXPECT_EQ(absl::StrJoin(sharded.Run(mesh), "\n"), "") << form.name << ToString(mesh);
    }
  };
  for (const Form& form : scatters) {
    check(form, {Float({4, 5}, 1), Ints({2, 2}, {3, 0, 1, 1}), Float({2, 2}, 2)});
    check(form, {Float({4, 5}, 1), Ints({2, 5}, {3, 0, 1, 1, 2, 0, 2, 2, 3, 3}), Float({3, 6}, 2)});
    check(form, {Float({}, 1), Ints({}, {0}), Float({}, 2)});
  }
  for (const Form& form : slices) check(form, {Float({}, 1), Ints({}, {0}), Float({}, 2)});
}

TEST(Scatter, KeepsAGradientWhereItWrites) {
  DTensor x = ones({3}, {.dtype = DType::kF64}), v = ones({2}, {.dtype = DType::kF64});
  x.RequiresGrad();
  v.RequiresGrad();
  const DTensor y = mul(x, 2.0);
  index_copy_(y, 0, Indices({2, 0}, {2}), v);
  sum(mul(y, Doubles({3, 5, 7}, {3}))).Backward();
  EXPECT_THAT(x.grad().ToVector<double>(), ElementsAre(0, 10, 0));
  EXPECT_THAT(v.grad().ToVector<double>(), ElementsAre(7, 3));
}

TEST(GetItem, TensorsApartComeFirst) {
  const DTensor x = reshape(arange(0, 24), {2, 3, 4});
  const DTensor one = Indices({1}, {1}), two = Indices({2, 0}, {2});
  EXPECT_EQ(getitem(x, {one, Slice(), two}).shape(), (Shape{2, 3}));
  EXPECT_EQ(getitem(x, {Slice(), one, two}).shape(), (Shape{2, 2}));
  EXPECT_EQ(getitem(x, {kNewDim, one, kEllipsis, two}).shape(), (Shape{2, 1, 3}));
  EXPECT_THAT(getitem(x, {one, Slice(), two}).ToVector<int64_t>(),
              ElementsAre(14, 18, 22, 12, 16, 20));
  const DTensor yes = to(Indices({1}, {}), DType::kBool), no = logical_not(yes);
  EXPECT_EQ(getitem(x, {yes}).shape(), (Shape{1, 2, 3, 4}));
  EXPECT_EQ(getitem(x, {no, 1}).shape(), (Shape{0, 3, 4}));
}

TEST(Gather, SaysWhatIsWrong) {
  const DTensor x = Doubles({1, 2, 3, 4}, {2, 2}), row = Indices({0, 1}, {2});
  EXPECT_THAT(MessageOf([&] { gather(x, 0, row); }),
              HasSubstr("index [2] must have the dims of x"));
  EXPECT_THAT(MessageOf([&] { gather(x, 0, Indices({5}, {1, 1})).ToVector<double>(); }),
              HasSubstr("index 5 is out of range for a dim of 2"));
  EXPECT_THAT(MessageOf([&] { gather(x, 0, x); }), HasSubstr("index must be int64 or int32"));
  EXPECT_THAT(MessageOf([&] { index_add(x, 0, row, ones({2, 2})); }),
              HasSubstr("x is float64 and source float32"));
  EXPECT_THAT(MessageOf([&] { index_copy(x, 0, row, Doubles({1, 2}, {1, 2})); }),
              HasSubstr("source must be [2, 2]"));
  EXPECT_THAT(MessageOf([&] { take(x, Indices({-5}, {1})).ToVector<double>(); }),
              HasSubstr("index -5 is not in"));
  EXPECT_THAT(MessageOf([&] { getitem(x, {row, Indices({0, 1, 0}, {3})}); }),
              HasSubstr("indices do not broadcast"));
  EXPECT_THAT(MessageOf([&] { masked_select(x, row); }), HasSubstr("mask must be bool"));
  EXPECT_THAT(MessageOf([&] { scatter_reduce(x, 0, Indices({0}, {1, 1}), x, "most"); }),
              HasSubstr("reduce must be sum, prod, mean, amax or amin"));
  EXPECT_THAT(MessageOf([&] { pad(x, {2, 0}, "reflect"); }), HasSubstr("[pad]"));
  EXPECT_THAT(MessageOf([&] { as_strided(x, {3}, {2}); }), HasSubstr("not within the 4 elements"));
  EXPECT_THAT(MessageOf([&] { as_strided(x, {INT64_MIN}, {1}); }),  // 1 less is no int64
              HasSubstr("size [-9223372036854775808] with strides [1] from 0 on is not within"));
  EXPECT_THAT(MessageOf([&] { unfold(x, 0, 3, 1); }), HasSubstr("no windows of 3"));
}

// A table of rows over the ranks: reading gives a pending sum of rows that are picked where they
// are, writing changes them where they are, and nothing moves.
TEST(Gather, NothingMovesWhereTheIndexedDimIsSharded) {
  const absl::Status status = RunSpmd(4, [](RankContext&) {
    const DeviceMesh mesh({4});
    DTensor x = FromVector(Noise(64, 1), {32, 2}, {DType::kF64, mesh, {Shard(0)}});
    x.RequiresGrad();
    const DTensor at = FromVector(std::vector<int64_t>{1, 30, 7}, {3}, {DType::kI64, mesh, {}});
    const DTensor rows = ones({3, 2}, {DType::kF64, mesh, {}});
    const CommTrace trace;
    const DTensor y = index_select(x, 0, at);
    EXPECT_EQ(y.placements()[0], Partial());
    y.Backward(rows);
    EXPECT_EQ(x.grad().placements()[0], Shard(0));
    for (const DTensor& z : {index_add(x, 0, at, rows), index_copy(x, 0, at, rows),
                             index_reduce(x, 0, at, rows, "amax")}) {
      EXPECT_EQ(z.placements()[0], Shard(0));
    }
    const NoGrad no_grad;
    index_add_(x.Detach(), 0, at, rows);
    EXPECT_EQ(tril(x).placements()[0], Shard(0));
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of a sharded dim counts are exchanged, and then each find that belongs to another rank, once; the
// list is one rank's, cut evenly, and gradients go back to where the elements were.
void CheckFound(const Shape& shape, int dim, int64_t ranks, bool beside) {
  const int64_t n = Numel(shape);
  std::vector<double> values = Noise(n, 4);
  for (int64_t i = 0; i < n; ++i) values[i] = i % 7 < 3 || i < n / 3 ? 0 : values[i];
  DTensor whole = Doubles(values, shape).RequiresGrad();
  const DTensor picked = masked_select(whole, gt(whole.Detach(), 0));
  const std::vector<double> weights = Noise(picked.numel(), 5);
  picked.Backward(Doubles(weights, picked.shape()));
  const std::vector<int64_t> found = nonzero(whole.Detach()).ToVector<int64_t>();
  const auto want = picked.ToVector<double>(), grad = whole.grad().ToVector<double>();
  const absl::Status status = RunSpmd(ranks * (beside ? 2 : 1), [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh = beside ? DeviceMesh({2, ranks}) : DeviceMesh({ranks});
    Placements cut(mesh.ndim());
    cut.back() = Shard(dim);
    DTensor x = FromVector(values, shape, {DType::kF64, mesh, cut}).RequiresGrad();
    Placements list(mesh.ndim());
    list.back() = Shard(0);
    CommTrace trace;
    const DTensor at = nonzero(x);
    EXPECT_EQ(ToString(at.placements()), ToString(list));
    for (const CommEvent& e : trace.events()) {
      EXPECT_TRUE(e.kind == CollectiveKind::kHostExchange || e.kind == CollectiveKind::kExchange);
      const int64_t rows = at.local().shape()[0], row = 8 * static_cast<int64_t>(shape.size());
      EXPECT_TRUE(e.kind != CollectiveKind::kExchange || e.bytes <= rows * row);
    }
    EXPECT_EQ(trace.Count(CollectiveKind::kHostExchange), 1);
    EXPECT_EQ(at.ToVector<int64_t>(), found);
    for (const bool mask_is_whole : {false, true}) {
      x.ZeroGrad();
      DTensor mask = gt(x.Detach(), 0);
      if (mask_is_whole) mask = mask.Redistribute(Placements(mesh.ndim()));
      trace.Clear();
      const DTensor y = masked_select(x, mask);
      EXPECT_EQ(trace.Count(CollectiveKind::kHostExchange), 1) << trace.ToString();
      EXPECT_EQ(ToString(y.placements()), ToString(list));
      EXPECT_EQ(y.ToVector<double>(), want);
      y.Backward(FromVector(weights, y.shape(), {DType::kF64, mesh, list}));
      EXPECT_EQ(x.grad().ToVector<double>(), grad);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(NonZero, OfAShardedDimMovesWhatItFinds) {
  for (const bool beside : {false, true}) {
    for (const int64_t ranks : {2, 3}) {
      CheckFound({97}, 0, ranks, beside);
      CheckFound({41, 5}, 0, ranks, beside);
      CheckFound({3, 50, 2}, 1, ranks, beside);
      CheckFound({4, 67}, 1, ranks, beside);
    }
  }
}

// The same places the other way: elements of the source go to where the mask is true, none of x or
// the mask goes anywhere.
void CheckScattered(const Shape& shape, int dim, int64_t ranks) {
  const int64_t n = Numel(shape);
  const std::vector<double> weights = Noise(n, 5);
  const auto mask_of = [n](const DTensor& x) { return gt(x.Detach(), n % 2 == 0 ? 0.0 : 0.3); };
  DTensor x = Doubles(Noise(n, 4), shape).RequiresGrad();
  DTensor source = Doubles(Noise(n, 6), {n}).RequiresGrad();
  const DTensor whole = masked_scatter(x, mask_of(x), source);
  whole.Backward(Doubles(weights, shape));
  const auto want = whole.ToVector<double>(), dx = x.grad().ToVector<double>(),
             ds = source.grad().ToVector<double>();
  const int64_t found = nonzero(mask_of(x)).size(0);
  const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({ranks});
    for (const bool source_is_whole : {false, true}) {
      const Placement of_source = source_is_whole ? Replicate() : Shard(0);
      DTensor a = FromVector(Noise(n, 4), shape, {DType::kF64, mesh, {Shard(dim)}}).RequiresGrad();
      DTensor b = FromVector(Noise(n, 6), {n}, {DType::kF64, mesh, {of_source}}).RequiresGrad();
      const DTensor mask = mask_of(a);
      CommTrace trace;
      const DTensor y = masked_scatter(a, mask, b);
      EXPECT_EQ(trace.Count(CollectiveKind::kHostExchange), 1) << trace.ToString();
      int64_t bytes = 0;
      for (const CommEvent& e : trace.events()) {
        if (e.kind != CollectiveKind::kHostExchange) bytes += e.bytes;
      }
      // The list to its blocks, and from there to the ranks that hold its places.
      EXPECT_LE(bytes, source_is_whole ? 0 : 2 * 8 * found) << trace.ToString();
      EXPECT_EQ(y.placements()[0], Shard(dim));
      y.Backward(FromVector(weights, shape, {DType::kF64, mesh, {Shard(dim)}}));
      EXPECT_EQ(y.ToVector<double>(), want);
      EXPECT_EQ(a.grad().ToVector<double>(), dx);
      EXPECT_EQ(b.grad().ToVector<double>(), ds);
    }
    EXPECT_THAT(MessageOf([&] {
                  const DTensor few = ones({1}, {DType::kF64, mesh});
                  const DTensor here = ones(shape, {DType::kF64, mesh, {Shard(dim)}});
                  masked_scatter(here, gt(here, 0), few);
                }),
                HasSubstr("source has 1 elements for the"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(MaskedScatter, OfAShardedDimMovesWhatItPlaces) {
  for (const int64_t ranks : {2, 3}) {
    CheckScattered({97}, 0, ranks);
    CheckScattered({41, 5}, 0, ranks);
    CheckScattered({3, 50, 2}, 1, ranks);
    CheckScattered({4, 67}, 1, ranks);
  }
}

TEST(NonZero, OfNothing) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({3});
    const DTensor x = zeros({40}, {.mesh = mesh, .placements = {Shard(0)}});
    EXPECT_EQ(nonzero(x).shape(), (Shape{0, 1}));
    EXPECT_EQ(masked_select(x, gt(x, 0)).shape(), Shape{0});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// What is found is spread over the ranks that x was spread over.
TEST(NonZero, IsShardedAsXWas) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const std::vector<int64_t> v = {0, 3, 0, 4, 5, 0};
    const DTensor x = FromVector(v, {3, 2}, {DType::kI64, mesh, {Shard(1)}});
    const DTensor found = nonzero(x);
    EXPECT_EQ(found.placements()[0], Shard(0));
    EXPECT_THAT(found.ToVector<int64_t>(), ElementsAre(0, 1, 1, 1, 2, 0));
    EXPECT_EQ(nonzero(x.Redistribute({Replicate()})).placements()[0], Replicate());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::testing::gather_test
