// Pointwise kernels read and write arrays as they lie: transposed, cut, expanded. What comes out is
// what comes of copies that are row by row, to the bit.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/ops/ops.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::pointwise_layouts_test {
namespace {

DTensor Values(const Shape& shape, DType dtype, uint64_t seed) {
  std::vector<double> v = testing::Noise(Numel(shape), seed);
  for (double& x : v) x = std::trunc(100 * x) / (IsFloating(dtype) ? 8 : 1);
  if (dtype == DType::kBool) {
    for (double& x : v) x = x > 0;
  }
  return FromVector(v, shape, {.dtype = dtype});
}

// Makes a tensor of a shape that lies in its own way.
struct Layout {
  const char* name;
  std::function<DTensor(const Shape&, DType, uint64_t)> make;
};

Shape WithoutDim(Shape shape, size_t dim) {
  shape[dim] = 1;
  return shape;
}

const std::vector<Layout>& Layouts() {
  static const std::vector<Layout> all = {
      {"by rows", Values},
      {"transposed",
       [](const Shape& s, DType t, uint64_t seed) {
         Shape turned = s;
         std::swap(turned[s.size() - 1], turned[s.size() - 2]);
         return transpose(Values(turned, t, seed), -1, -2);
       }},
      {"first and last dim exchanged",
       [](const Shape& s, DType t, uint64_t seed) {
         Shape turned = s;
         std::swap(turned.front(), turned.back());
         return transpose(Values(turned, t, seed), 0, -1);
       }},
      {"every other column",
       [](const Shape& s, DType t, uint64_t seed) {
         Shape wide = s;
         wide.back() *= 2;
         return slice(Values(wide, t, seed), -1, 1, wide.back(), 2);
       }},
      {"every other row of a transposed one",
       [](const Shape& s, DType t, uint64_t seed) {
         Shape turned = s;
         std::swap(turned[s.size() - 1], turned[s.size() - 2]);
         turned.back() *= 2;
         return slice(transpose(Values(turned, t, seed), -1, -2), -2, 0, turned.back(), 2);
       }},
      {"one row, expanded",
       [](const Shape& s, DType t, uint64_t seed) {
         return expand(Values(WithoutDim(s, s.size() - 2), t, seed), s);
       }},
      {"one column, expanded",
       [](const Shape& s, DType t, uint64_t seed) {
         return expand(Values(WithoutDim(s, s.size() - 1), t, seed), s);
       }},
  };
  return all;
}

std::string BytesOf(const DTensor& x) {
  const Tensor local = ValueOrThrow(ValueOrThrow(x.local().Contiguous()).ToHost());
  return std::string(static_cast<const char*>(local.data()),
                     static_cast<size_t>(local.numel() * SizeOf(local.dtype())));
}

class PointwiseLayouts : public ::testing::TestWithParam<Shape> {};

TEST_P(PointwiseLayouts, GiveTheSameBits) {
  int64_t compared = 0;
  for (int type = 0; type < kNumDTypes; ++type) {
    const auto dtype = static_cast<DType>(type);
    for (const Layout& of_a : Layouts()) {
      for (const Layout& of_b : Layouts()) {
        SCOPED_TRACE(std::string(Name(dtype)) + " a " + of_a.name + ", b " + of_b.name);
        const DTensor a = of_a.make(GetParam(), dtype, 1), b = of_b.make(GetParam(), dtype, 2);
        const DTensor rows_a = clone(a), rows_b = clone(b);
        ASSERT_EQ(BytesOf(a), BytesOf(rows_a));
        EXPECT_EQ(BytesOf(maximum(a, b)), BytesOf(maximum(rows_a, rows_b)));
        EXPECT_EQ(BytesOf(lt(a, b)), BytesOf(lt(rows_a, rows_b)));
        EXPECT_EQ(BytesOf(where(lt(a, b), b, a)),
                  BytesOf(where(lt(rows_a, rows_b), rows_b, rows_a)));
        EXPECT_EQ(BytesOf(to(a, DType::kF16)), BytesOf(to(rows_a, DType::kF16)));
        EXPECT_EQ(BytesOf(logical_not(a)), BytesOf(logical_not(rows_a)));
        compared += 5;
        if (dtype == DType::kBool) continue;
        EXPECT_EQ(BytesOf(addcmul(a, b, a)), BytesOf(addcmul(rows_a, rows_b, rows_a)));
        EXPECT_EQ(BytesOf(add(b, a, 2)), BytesOf(add(rows_b, rows_a, 2)));
        // Written as it lies.
        const DTensor rows_sum = add(rows_a, rows_b);
        DTensor self = of_a.make(GetParam(), dtype, 1);
        if (std::string(of_a.name).find("expanded") != std::string::npos) continue;
        add_(self, b);
        EXPECT_EQ(BytesOf(self), BytesOf(rows_sum));
        copy_(self, b);
        EXPECT_EQ(BytesOf(self), BytesOf(rows_b));
        compared += 4;
      }
    }
  }
  EXPECT_GT(compared, 2000);
}

// Below, at and above the sizes of blocks, which none divides.
INSTANTIATE_TEST_SUITE_P(Shapes, PointwiseLayouts,
                         ::testing::Values(Shape{70, 130}, Shape{64, 64}, Shape{15, 200},
                                           Shape{200, 16}, Shape{3, 65, 33}, Shape{40, 2, 70},
                                           Shape{17, 1, 129}),
                         [](const auto& info) {
                           std::string name = "of";
                           for (const int64_t size : info.param) name += "_" + std::to_string(size);
                           return name;
                         });

// Of truth values alone: every function against what it says, in long rows, one value for a row,
// and where the output is the first input. Bytes other than 0 and 1 are true.
TEST(PointwiseTruths, AreWhatTheFunctionsSay) {
  using Two = DTensor (*)(const DTensor&, const DTensor&);
  const std::vector<std::pair<Two, std::function<bool(bool, bool)>>> functions = {
      {logical_and, [](bool x, bool y) { return x && y; }},
      {logical_or, [](bool x, bool y) { return x || y; }},
      {logical_xor, [](bool x, bool y) { return x != y; }},
      {bitwise_and, [](bool x, bool y) { return x && y; }},
      {bitwise_or, [](bool x, bool y) { return x || y; }},
      {bitwise_xor, [](bool x, bool y) { return x != y; }},
      {eq, [](bool x, bool y) { return x == y; }},
      {ne, [](bool x, bool y) { return x != y; }},
      {lt, [](bool x, bool y) { return !x && y; }},
      {le, [](bool x, bool y) { return !x || y; }},
      {gt, [](bool x, bool y) { return x && !y; }},
      {ge, [](bool x, bool y) { return x || !y; }},
      {maximum, [](bool x, bool y) { return x || y; }},
      {minimum, [](bool x, bool y) { return x && y; }},
      {mul, [](bool x, bool y) { return x && y; }},
      {[](const DTensor& x, const DTensor& y) { return add(x, y); },
       [](bool x, bool y) { return x || y; }},
      {[](const DTensor& x, const DTensor&) { return logical_not(x); },
       [](bool x, bool) { return !x; }},
      {[](const DTensor& x, const DTensor&) { return bitwise_not(x); },
       [](bool x, bool) { return !x; }},
      {[](const DTensor& x, const DTensor&) { return ne(x, 0); }, [](bool x, bool) { return x; }},
      {[](const DTensor& x, const DTensor&) { return lt(x, 1); }, [](bool x, bool) { return !x; }},
      {[](const DTensor& x, const DTensor& y) { return masked_fill(x, y, true); },
       [](bool x, bool y) { return x || y; }},
      {[](const DTensor& x, const DTensor& y) { return masked_fill(x, y, false); },
       [](bool x, bool y) { return x && !y; }},
      {[](const DTensor& x, const DTensor& y) { return where(x, logical_not(y), x); },
       [](bool x, bool y) { return x && !y; }},
      {[](const DTensor& x, const DTensor& y) { return where(y, x, logical_not(x)); },
       [](bool x, bool y) { return x == y; }},
      {[](const DTensor& x, const DTensor& y) {
         const DTensor self = clone(x);
         mul_(self, y);
         return self;
       },
       [](bool x, bool y) { return x && y; }},
  };
  constexpr int64_t kRows = 3, kColumns = 1000;
  const DTensor a = Values({kRows, kColumns}, DType::kBool, 3);
  const DTensor b = Values({kRows, kColumns}, DType::kBool, 4);
  const DTensor one = Values({kRows, 1}, DType::kBool, 5);
  // As a program that has such bytes hands them over.
  Tensor truths = ValueOrThrow(Tensor::Empty({100}, DType::kBool));
  for (int i = 0; i < 100; ++i) static_cast<uint8_t*>(truths.data())[i] = i % 3 == 0 ? 0 : 2 + i;
  const DTensor bytes = OnSelf(truths);
  for (size_t f = 0; f < functions.size(); ++f) {
    for (const auto& [x, y] : std::vector<std::pair<DTensor, DTensor>>{
             {a, b}, {a, expand(one, a.shape())}, {expand(one, a.shape()), b}, {bytes, bytes}}) {
      const std::vector<uint8_t> got = functions[f].first(x, y).ToVector<uint8_t>();
      const std::vector<uint8_t> p = x.ToVector<uint8_t>(), q = y.ToVector<uint8_t>();
      ASSERT_EQ(got.size(), p.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], functions[f].second(p[i] != 0, q[i] != 0))
            << "function " << f << " at " << i;
      }
    }
  }
}

}  // namespace
}  // namespace dtensor::pointwise_layouts_test
