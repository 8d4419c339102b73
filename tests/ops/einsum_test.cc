// einsum: what stays where it is, the order of products, equations that are refused. Its values:
// torch's samples, and products that are written out here.
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/watch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/ops/gradcheck.h"
#include "tests/ops/sharded.h"

namespace dtensor::testing::einsum_test {
namespace {

using ::testing::HasSubstr;

OpFn Einsum(const std::string& equation) {
  return [=](const std::vector<DTensor>& x) { return einsum(equation, x); };
}

DTensor Of(Shape shape, uint64_t seed) { return Float(std::move(shape), seed).Make(); }

TEST(Einsum, SaysWhatOtherOpsDo) {
  const DTensor a = Of({3, 4}, 1), b = Of({4, 5}, 2), c = Of({3, 4}, 3), s = Of({4, 4}, 4);
  const auto same = [](const DTensor& got, const DTensor& want) {
    EXPECT_EQ(got.shape(), want.shape());
    ExpectClose(got.ToVector<double>(), want.ToVector<double>());
  };
  same(einsum("ik,kj->ij", {a, b}), matmul(a, b));
  same(einsum("ik,kj", {a, b}), matmul(a, b));
  same(einsum("ik , kj -> ji", {a, b}), transpose(matmul(a, b), 0, 1));
  same(einsum("ij,ij->ij", {a, c}), mul(a, c));
  same(einsum("ij,ij->", {a, c}), sum(mul(a, c)));
  same(einsum("ij->ji", {a}), transpose(a, 0, 1));
  same(einsum("ba", {a}), transpose(a, 0, 1));  // letters in order
  same(einsum("ij->", {a}), sum(a));
  same(einsum("...j->...", {a}), sum(a, {1}));
  same(einsum("...j->j", {a}), sum(a, {0}));
  same(einsum("ii->i", {s}), stack({s[{0, 0}], s[{1, 1}], s[{2, 2}], s[{3, 3}]}));
  same(einsum("ii", {s}), einsum("ii->", {s}));
  same(einsum(",ij->ij", {Of({}, 5), a}), mul(a, Of({}, 5)));
  same(einsum("aab,bc->ac", {Of({4, 4, 3}, 6), a}),
       einsum("ab,bc->ac", {einsum("aab->ab", {Of({4, 4, 3}, 6)}), a}));
}

TEST(Einsum, SumsOfIntegersAreInt64) {
  const DTensor bytes = FromVector(std::vector<int64_t>{200, 100, 50, 7}, {2, 2}, {DType::kU8});
  const DTensor rows = einsum("ij->i", {bytes});
  EXPECT_EQ(rows.dtype(), DType::kI64);
  EXPECT_EQ(rows.ToVector<int64_t>(), (std::vector<int64_t>{300, 57}));
  const DTensor y = einsum("ij,k->ik", {bytes, bytes[{0}]});
  EXPECT_EQ(y.dtype(), DType::kI64);
  EXPECT_EQ(y.ToVector<int64_t>(), (std::vector<int64_t>{60000, 30000, 11400, 5700}));
  EXPECT_EQ(einsum("ij->ji", {bytes}).dtype(), DType::kU8);
  EXPECT_EQ(einsum("ij,jk->ik", {bytes, bytes}).dtype(), DType::kU8);
}

TEST(Einsum, SizesOfOneBroadcast) {
  const DTensor a = Of({3, 1}, 1), b = Of({3, 4}, 2), row = Of({1, 4}, 3);
  ExpectClose(einsum("ij,ij->ij", {a, b}).ToVector<double>(), mul(a, b).ToVector<double>());
  ExpectClose(einsum("ij,ij->i", {a, b}).ToVector<double>(),
              sum(mul(a, b), {1}).ToVector<double>());
  ExpectClose(einsum("ij,ij->ij", {a, row}).ToVector<double>(), mul(a, row).ToVector<double>());
}

TEST(Einsum, TakesIntegersAndEmptyTensors) {
  const DTensor a = Ints({2, 2}, {1, 2, 3, 4}).Make(), b = Ints({2, 2}, {5, 6, 7, 8}).Make();
  EXPECT_EQ(einsum("ij,jk->ik", {a, b}).ToVector<int64_t>(),
            (std::vector<int64_t>{19, 22, 43, 50}));
  const DTensor none = einsum("ij,jk->ik", {Of({3, 0}, 1), Of({0, 2}, 2)});
  EXPECT_EQ(none.ToVector<double>(), std::vector<double>(6, 0.0));
  EXPECT_EQ(einsum("bij,bjk->bik", {Of({0, 3, 2}, 1), Of({0, 2, 4}, 2)}).shape(), (Shape{0, 3, 4}));
}

TEST(Einsum, Gradients) {
  CheckGradients(Einsum("bij,bkj->bik"), {Float({2, 3, 4}, 1), Float({2, 2, 4}, 2)});
  CheckGradients(Einsum("aij,jka->ki"), {Float({2, 3, 4}, 1), Float({4, 2, 2}, 2)});
  CheckGradients(Einsum("iji->j"), {Float({3, 2, 3}, 1)});
  CheckGradients(Einsum("bn,anm,bm->ba"),
                 {Float({2, 3}, 1), Float({4, 3, 2}, 2), Float({2, 2}, 3)});
}

TEST(Einsum, Sharded) {
  CheckSharded(Einsum("bij,bkj->bik"), {Float({2, 3, 4}, 1), Float({2, 2, 4}, 2)});
  CheckSharded(Einsum("aij,jka->ki"), {Float({2, 3, 4}, 1), Float({4, 3, 2}, 2)});
  CheckSharded(Einsum("iji->j"), {Float({3, 4, 3}, 1)});
}

// Every letter is a factor: what is sharded stays where it is, a summed letter leaves a pending
// sum.
TEST(Einsum, LettersStaySharded) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const auto placed = [&](Shape shape, int dim) {
      return DistributeTensor(Of(std::move(shape), 1), mesh, {Shard(dim)});
    };
    CommTrace trace;
    // Heads of attention scores, the second of two dims that both have.
    const DTensor scores =
        einsum("bhid,bhjd->bhij", {placed({3, 4, 5, 6}, 1), placed({3, 4, 2, 6}, 1)});
    EXPECT_EQ(scores.placements()[0], Shard(1));
    const DTensor summed = einsum("ijk,kjl->il", {placed({3, 4, 5}, 1), placed({5, 4, 2}, 1)});
    EXPECT_EQ(summed.placements()[0], Partial());
    const DTensor own = einsum("ij,jkl->lik", {DistributeTensor(Of({3, 4}, 1), mesh, {Replicate()}),
                                               placed({4, 5, 6}, 2)});
    EXPECT_EQ(own.placements()[0], Shard(0));
    EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Of three factors two are multiplied first: those that take the fewest products, unless that
// moves more bytes.
TEST(Einsum, TheOrderOfProductsFollowsCost) {
  const auto ops = [](const std::vector<DTensor>& x) {
    std::vector<Shape> shapes;
    const WatchCalls watch([&](const OpDef& op, Inputs inputs, absl::Span<const Attr>) {
      if (op.name() == "contract") shapes.push_back(inputs[0]->shape());
    });
    einsum("ij,jk,kl->il", x);
    return shapes;
  };
  // 2 x 50 times 50 x 3 times 3 x 40: from the left; turned round from the right.
  const std::vector<Shape> left = ops({Of({2, 50}, 1), Of({50, 3}, 2), Of({3, 40}, 3)});
  ASSERT_GE(left.size(), 2u);
  const std::vector<Shape> last(left.end() - 2, left.end());
  EXPECT_EQ(last[0], (Shape{2, 50}));
  const std::vector<Shape> right = ops({Of({40, 3}, 1), Of({3, 50}, 2), Of({50, 2}, 3)});
  EXPECT_EQ(right[right.size() - 2], (Shape{3, 50}));
}

TEST(Einsum, Errors) {
  const DTensor a = Of({3, 4}, 1), b = Of({4, 5}, 2);
  EXPECT_THAT(MessageOf([&] { einsum("ij,jk->ik", {a}); }),
              HasSubstr("[einsum] \"ij,jk->ik\" has subscripts of 2 tensors, got 1"));
  EXPECT_THAT(MessageOf([&] { einsum("ijk->i", {a}); }),
              HasSubstr("\"ijk\" does not fit operand 0 of shape [3, 4]"));
  EXPECT_THAT(MessageOf([&] { einsum("ij,ij->i", {a, b}); }),
              HasSubstr("different sizes, 3 and 4 (i)"));
  EXPECT_THAT(MessageOf([&] { einsum("ij->k", {a}); }), HasSubstr("has k, which no tensor has"));
  EXPECT_THAT(MessageOf([&] { einsum("ij->ii", {a}); }), HasSubstr("has i twice"));
  EXPECT_THAT(MessageOf([&] { einsum("i1->i", {a}); }), HasSubstr("a subscript is a letter"));
  EXPECT_THAT(MessageOf([&] { einsum("...i...->i", {a}); }), HasSubstr("more than one ellipsis"));
  EXPECT_THAT(MessageOf([&] { einsum("ii->i", {a}); }), HasSubstr("different sizes, 3 and 4 (i)"));
  EXPECT_THAT(MessageOf([&] { einsum("ii->i", {Of({1, 4}, 1)}); }),
              HasSubstr("a diagonal needs equal sizes"));
  EXPECT_THAT(MessageOf([&] { einsum("ij,jk->ik", {a, to(b, DType::kF32)}); }),
              HasSubstr("different dtypes"));
  EXPECT_THAT(MessageOf([&] { tensordot(a, b, DimList{1}, DimList{0, 1}); }),
              HasSubstr("[tensordot] as many dims of a as of b"));
  EXPECT_THAT(MessageOf([&] { tensordot(a, a, DimList{1, 1}, DimList{1, 0}); }),
              HasSubstr("named twice"));
}

TEST(Products, BetaZeroReadsNothing) {
  const DTensor nan = full({2, 2}, std::nan(""), {.dtype = DType::kF64}), x = Of({2, 2}, 1);
  for (const DTensor& y :
       {addmm(nan, x, x, 0), addr(nan, Of({2}, 2), Of({2}, 3), 0),
        addmv(full({2}, std::nan(""), {.dtype = DType::kF64}), x, Of({2}, 2), 0)}) {
    for (const double v : y.ToVector<double>()) EXPECT_FALSE(std::isnan(v));
  }
  // Numbers for integers are cut.
  const DTensor n = Ints({2, 2}, {1, 2, 3, 4}).Make();
  EXPECT_EQ(addmm(n, n, n, 0.9, 1.9).ToVector<int64_t>(), matmul(n, n).ToVector<int64_t>());
  EXPECT_THAT(MessageOf([&] { addr(n, Ints({2}, {1, 2}).Make(), Ints({2}, {1, 2}).Make(), 0.5); }),
              HasSubstr("[addr] of integers alpha and beta"));
  EXPECT_THAT(MessageOf([&] { addmm(Of({3}, 1), x, x); }),
              HasSubstr("self [3] does not broadcast to [2, 2]"));
  EXPECT_THAT(MessageOf([&] { mv(x, x); }), HasSubstr("[mv] vec must have 1 dim"));
}

// Integers become int64 where einsum sums over more than one of one operand alone, and never in
// tensordot. (PyTorch's dtypes.)
TEST(Einsum, DTypesOfIntegers) {
  const auto made = [](Shape shape) { return ones(shape, {.dtype = DType::kI32}); };
  EXPECT_EQ(einsum("acb,ab->ba", {made({1, 1, 2}), made({1, 2})}).dtype(), DType::kI32);
  EXPECT_EQ(einsum("acb,ab->ba", {made({1, 2, 2}), made({1, 2})}).dtype(), DType::kI64);
  EXPECT_EQ(einsum("ab->b", {made({1, 2})}).dtype(), DType::kI64);
  const DTensor y = tensordot(made({1, 1, 1}), made({2, 1, 2}), {0, 1}, {2, 0});
  EXPECT_EQ(y.dtype(), DType::kI32);
  EXPECT_EQ(y.ToVector<int64_t>(), std::vector<int64_t>{4});
}

TEST(Products, OfVectorsAreRoundedOnce) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    // 256 + 1 is 256 in bfloat16.
    const DTensor x =
        FromVector(std::vector<double>{256.0, 1.0, -256.0}, {3}, {DType::kBF16, mesh, {Shard(0)}});
    const DTensor one = ones({3}, {DType::kBF16, mesh, {}});
    EXPECT_EQ(inner(x, one).Item(), 1);
    EXPECT_EQ(linalg_vecdot(x, one).Item(), 1);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_EQ(linalg_vecdot(full({}, 2.0), full({}, 3.0), 0).Item(), 6);
  EXPECT_EQ(inner(full({}, 2.5), Ints({1}, {2}).Make()).Item(), 5);  // a number, of any dtype
}

}  // namespace
}  // namespace dtensor::testing::einsum_test
