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

}  // namespace
}  // namespace dtensor::pointwise_layouts_test
