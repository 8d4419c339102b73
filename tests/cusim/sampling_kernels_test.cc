// grid_sample, resample and unique_rows of the CUDA plugin against the CPU's kernels: the same
// bits.
#include <gtest/gtest.h>

#include <limits>

#include "dtensor/ops/conv/resample.h"
#include "tests/cusim/family_kernels.h"

namespace dtensor::testing {
namespace {

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
constexpr DType kEvery[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16,
                            DType::kI64, DType::kI32, DType::kU8,   DType::kBool};

// Forward, and both gradients.
void CompareGrid(const Shape& x, const Shape& grid, DType t, double reach,
                 const std::vector<Attr>& attrs) {
  Shape y = {x[0], x[1]};
  y.insert(y.end(), grid.begin() + 1, grid.end() - 1);
  const Operand points = {grid, t, -reach, reach};
  Compare({.op = "grid_sample", .in = {{x, t}, points}, .out = {{y, t}}, .attrs = attrs});
  Compare({.op = "grid_sample_backward",
           .in = {{y, t}, {x, t}, points},
           .out = {{x, t}, {grid, t}},
           .attrs = attrs});
}
TEST(GridSample, EveryModeAndPadding) {
  for (const int64_t mode : {0, 1}) {
    for (const int64_t padding : {0, 1, 2}) {
      for (const int64_t corners : {0, 1}) {
        const std::vector<Attr> attrs = {Int(mode), Int(padding), Int(corners)};
        CompareGrid({2, 3, 4, 5}, {2, 3, 4, 2}, DType::kF32, 1.6, attrs);
        CompareGrid({1, 2, 3, 2, 4}, {1, 2, 2, 3, 3}, DType::kF64, 2.7, attrs);
        CompareGrid({1, 2, 1, 1}, {1, 2, 3, 2}, DType::kF32, 1.2, attrs);
        CompareGrid({1, 1, 3, 3}, {1, 2, 3, 2}, DType::kF32, 1e30, attrs);  // far outside
      }
    }
  }
}
TEST(GridSample, OtherTypesAndSizes) {
  const std::vector<Attr> attrs = {Int(0), Int(0), Int(0)};
  for (const DType t : kFloats) CompareGrid({2, 5, 3, 4}, {2, 3, 7, 2}, t, 1.2, attrs);
  CompareGrid({1, 2, 5, 5}, {1, 17, 19, 2}, DType::kF32, 1, attrs);  // more than a tile of a sort
  CompareGrid({0, 2, 3, 3}, {0, 2, 2, 2}, DType::kF32, 1, attrs);
  CompareGrid({2, 0, 3, 3}, {2, 2, 2, 2}, DType::kF32, 1, attrs);
  CompareGrid({2, 2, 3, 3}, {2, 0, 2, 2}, DType::kF32, 1, attrs);
}

struct Resampling {
  Resample mode;
  std::vector<int64_t> window;  // in, out, kernel, stride, dilation, before of each dim
  double scale = 0;
};
void CompareResample(const Resampling& r, DType t, int64_t planes) {
  Shape x = {planes}, y = {planes};
  for (size_t d = 0; d < r.window.size(); d += 6) {
    x.push_back(r.window[d]);
    y.push_back(r.window[d + 1]);
  }
  const std::vector<Attr> attrs = {Ints(r.window), Int(static_cast<int64_t>(r.mode)),
                                   Number(r.scale), Number(r.scale), Number(r.scale)};
  Compare({.op = "resample", .in = {{x, t}}, .out = {{y, t}}, .attrs = attrs});
  Compare({.op = "resample_backward", .in = {{y, t}}, .out = {{x, t}}, .attrs = attrs});
}
TEST(Resample, PoolsOfEveryKind) {
  const Resampling pools[] = {
      {Resample::kMean, {7, 3, 0, 1, 1, 0}},                    // adaptive
      {Resample::kMean, {5, 7, 0, 1, 1, 0, 4, 4, 0, 1, 1, 0}},  // adaptive, one dim as it is
      {Resample::kMean, {9, 4, 3, 2, 1, 0, 5, 5, 3, 1, 1, 1}},  // padded, not counted
      {Resample::kMeanWithin, {9, 5, 3, 2, 1, 1, 4, 2, 2, 2, 1, 0}},
      {Resample::kMeanWithin, {6, 4, 3, 2, 1, 1}},  // a window that leaves x
      {Resample::kSum, {4, 2, 2, 2, 1, 0, 3, 2, 2, 1, 1, 0, 5, 2, 3, 2, 1, 0}, 0.25},
      {Resample::kMean, {0, 2, 2, 1, 1, 1}},  // of nothing
  };
  for (const Resampling& r : pools) CompareResample(r, DType::kF32, 3);
  for (const DType t : kFloats) CompareResample(pools[2], t, 2);
}
TEST(Resample, InterpolationOfEveryKind) {
  for (int64_t mode = static_cast<int64_t>(Resample::kNearest); mode < kNumResamples; ++mode) {
    for (const double scale : {0., 1.3, 0.7}) {
      const auto kind = static_cast<Resample>(mode);
      CompareResample({kind, {5, 8, 0, 1, 1, 0}, scale}, DType::kF32, 3);
      CompareResample({kind, {7, 3, 0, 1, 1, 0, 4, 4, 0, 1, 1, 0}, scale}, DType::kF64, 2);
      CompareResample({kind, {1, 4, 0, 1, 1, 0, 3, 1, 0, 1, 1, 0, 2, 5, 0, 1, 1, 0}, scale},
                      DType::kF32, 2);
    }
  }
  for (const DType t : kFloats) {
    CompareResample({Resample::kCubic, {5, 8, 0, 1, 1, 0, 6, 4, 0, 1, 1, 0}}, t, 2);
    CompareResample({Resample::kLinear, {6, 6, 0, 1, 1, 0, 6, 6, 0, 1, 1, 0}}, t, 2);  // a copy
    CompareResample({Resample::kLinear, {300, 700, 0, 1, 1, 0}}, t, 1);
  }
}

void CompareUnique(int64_t n, int64_t m, const Operand& x) {
  for (const int64_t consecutive : {0, 1}) {
    Operand rows = x;
    rows.sizes = {n, m};
    Compare({.op = "unique_rows",
             .in = {rows},
             .out = {{{n, m}, x.dtype}, {{n}, DType::kI64}, {{n}, DType::kI64}, {{1}, DType::kI64}},
             .attrs = {Int(consecutive)}});
  }
}
TEST(Unique, RowsOfEveryType) {
  for (const DType t : kEvery) {
    const bool truth = t == DType::kBool;
    CompareUnique(40, 2, {{}, t, truth || t == DType::kU8 ? 0. : -1., truth ? 1. : 3.});
  }
  for (const DType t : {DType::kBF16, DType::kF16}) CompareUnique(300, 1, {{}, t, 1, 1.04});
  for (const DType t : kFloats) {  // infinity - infinity: nothing but NaN, each its own
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    CompareUnique(9, 2, {{}, t, kInfinity, kInfinity});
  }
}
TEST(Unique, Sizes) {
  for (const int64_t n : {0, 1, 257, 1025, 6000}) {  // up to several tiles of a sort
    CompareUnique(n, 1, {{}, DType::kI32, 0, 40});
  }
  CompareUnique(260, 3, {{}, DType::kI64, 0, 1});
  CompareUnique(3000, 2, {{}, DType::kF16, -3, 3});
  CompareUnique(5, 0, {{}, DType::kF32});
  CompareUnique(0, 3, {{}, DType::kF32});
}

}  // namespace
}  // namespace dtensor::testing
