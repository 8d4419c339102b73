// The families of kernels of the CUDA plugin against the CPU's kernels of the same names, called as
// dispatch calls them, over dtypes, shapes and layouts. Kernels that round in another order than
// the CPU's are within the units of the last place that their case states.
#include "tests/cusim/family_kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "dtensor/rng/dropout.h"
#include "dtensor/rng/fill_task.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::testing {
namespace {

using ::testing::HasSubstr;

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16};
constexpr DType kWholes[] = {DType::kI64, DType::kI32, DType::kU8, DType::kBool};
constexpr DType kEvery[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kF16,
                            DType::kI64, DType::kI32, DType::kU8,   DType::kBool};
DType ComputedIn(DType t) { return IsNarrow(t) ? DType::kF32 : t; }
DType SumTypeOf(DType t) { return IsFloating(t) ? t : DType::kI64; }

struct Reduction {
  Shape sizes;
  std::vector<int64_t> axes;
  Shape out;
  Shape strides = {};
};
const Reduction kReductions[] = {
    {{}, {}, {}},
    {{7}, {0}, {}},
    {{0}, {0}, {}},
    {{3, 0}, {1}, {3}},
    {{5, 70}, {1}, {5}},
    {{5, 70}, {0}, {70}},
    {{3, 4, 6}, {0, 2}, {4}},
    {{3, 4, 6}, {1}, {3, 6}},
    {{3, 4, 6}, {}, {3, 4, 6}},
    {{6, 9}, {1}, {6}, {1, 7}},
    {{6, 9}, {0, 1}, {}, {20, 2}},
    {{4, 2, 9}, {0}, {2, 9}, {0, 9, 1}},
    {{9001}, {0}, {}},
};

TEST(Reduce, SumsProductsAndExtremes) {
  for (const Reduction& r : kReductions) {
    for (const char* op : {"sum", "prod", "amax", "amin"}) {
      const bool sums = std::string(op) == "sum" || std::string(op) == "prod";
      for (const DType t : kFloats) {
        const bool products = std::string(op) == "prod";
        if ((products || Numel(r.sizes) > 300) && t != DType::kF32) continue;
        Compare({.op = op,
                 .in = {{r.sizes, t, products ? 0.999 : -2, products ? 1.001 : 2, r.strides}},
                 .out = {{r.out, t}},
                 .attrs = {Ints(r.axes), Int(0)},
                 .ulps = products ? 2000.
                         : sums   ? 40.
                                  : 0.});
      }
      for (const DType t : kWholes) {
        if (Numel(r.sizes) > 300) continue;
        Compare({.op = op,
                 .in = {{r.sizes, t, t == DType::kU8 ? 0. : -3., 3, r.strides}},
                 .out = {{r.out, sums ? SumTypeOf(t) : t}},
                 .attrs = {Ints(r.axes), Int(0)}});
      }
    }
  }
}
TEST(Reduce, OthersOfThem) {
  for (const Reduction& r : kReductions) {
    Compare({.op = "sum_squares",
             .in = {{r.sizes, DType::kBF16, -2, 2, r.strides}},
             .out = {{r.out, DType::kBF16}},
             .attrs = {Ints(r.axes), Int(0)},
             .ulps = 1});
    if (Numel(r.sizes) > 300) continue;
    for (const char* op : {"any", "all"}) {
      Compare({.op = op,
               .in = {{r.sizes, DType::kBool, 0, 1, r.strides}},
               .out = {{r.out, DType::kBool}},
               .attrs = {Ints(r.axes), Int(0)}});
    }
    if (!r.strides.empty()) continue;
    for (const DType t : kFloats) {  // few values: ties
      Compare({.op = "amax_backward",
               .in = {{r.out, t}, {r.sizes, t, 0, 0}, {r.out, t, 0, 0}},
               .out = {{r.sizes, t}},
               .attrs = {Ints(r.axes), Int(0)}});
    }
  }
}
TEST(Reduce, PlacesOfExtremes) {
  for (const char* op : {"max_dim", "min_dim"}) {
    for (const DType t : {DType::kF64, DType::kF32, DType::kF16, DType::kI64, DType::kU8}) {
      for (const int64_t dim : {0, 1, 2}) {
        const Shape sizes = {4, 50, 3};
        Shape out;
        for (int64_t d = 0; d < 3; ++d) {
          if (d != dim) out.push_back(sizes[static_cast<size_t>(d)]);
        }
        Compare({.op = op,
                 .in = {{sizes, t, 0, 9}},
                 .out = {{out, t}, {out, DType::kI64}},
                 .attrs = {Int(dim), Int(0)}});
      }
    }
    Compare({.op = op,  // ties over several chunks: the first wins
             .in = {{{9000}, DType::kI32, 0, 3}},
             .out = {{{}, DType::kI32}, {{}, DType::kI64}},
             .attrs = {Int(0), Int(0)}});
    EXPECT_THAT(Compare({.op = op,
                         .in = {{{3, 0}}},
                         .out = {{{3}}, {{3}, DType::kI64}},
                         .attrs = {Int(1), Int(0)}}),
                HasSubstr("no elements"));
  }
}

TEST(Fill, RunsToTheirEndsAndStrides) {
  for (const DType t : {DType::kF64, DType::kF32, DType::kI64, DType::kBF16, DType::kU8}) {
    for (const int64_t n : {0, 1, 3, 16, 17, 31, 5000}) CompareFill({{n}, t}, 3);
    CompareFill({{}, t}, 2);
    CompareFill({{3, 5}, t, -2, 2, {7, 1}}, 3);
  }
  CompareFill({{20}, DType::kBool, 0, 1}, 7);
}

TEST(Softmax, ForwardAndBackwardAlongAnyDim) {
  struct {
    Shape sizes;
    int64_t dim;
  } const shapes[] = {{{}, 0},        {{5, 1}, 1},     {{3, 40}, 1}, {{2, 300}, 1}, {{2, 5000}, 1},
                      {{1, 9000}, 1}, {{2, 7, 35}, 1}, {{80, 3}, 0}, {{0, 4}, 1},   {{4, 0}, 1}};
  for (const auto& s : shapes) {
    for (const DType t : kFloats) {
      if (Numel(s.sizes) > 1000 && t != DType::kF32) continue;
      for (const char* op : {"softmax", "log_softmax"}) {
        Compare({.op = op,
                 .in = {{s.sizes, t, -4, 4}},
                 .out = {{s.sizes, t}},
                 .attrs = {Int(s.dim)},
                 .ulps = 8});
      }
      for (const char* op : {"softmax_backward", "log_softmax_backward"}) {
        Compare({.op = op,
                 .in = {{s.sizes, t}, {s.sizes, t, -8, 0}},
                 .out = {{s.sizes, t}},
                 .attrs = {Int(s.dim)},
                 .ulps = Numel(s.sizes) > 1000 ? 200. : 16.});  // sums that nearly cancel
      }
    }
  }
}

TEST(Norm, ForwardAndBackward) {
  for (const Shape& sizes :
       {Shape{5, 1}, Shape{40, 20}, Shape{3, 2, 300}, Shape{2, 8200}, Shape{0, 6}, Shape{700, 4}}) {
    const Shape rows(sizes.begin(), sizes.end() - 1), row = {sizes.back()};
    for (const DType t : kFloats) {
      if (Numel(sizes) > 3000 && t != DType::kF32) continue;
      for (const DType g : {t, ComputedIn(t)}) {
        const DType s = ComputedIn(t);
        const double ulps = 30;
        Compare({.op = "layer_norm",
                 .in = {{sizes, t}, {row, g}, {row, g}},
                 .out = {{sizes, t}, {rows, s}, {rows, s}},
                 .attrs = {Number(1e-5)},
                 .ulps = ulps});
        Compare({.op = "rms_norm",
                 .in = {{sizes, t}, {row, g}},
                 .out = {{sizes, t}, {rows, s}},
                 .attrs = {Number(1e-5)},
                 .ulps = ulps});
        Compare({.op = "layer_norm_backward",
                 .in = {{sizes, t}, {sizes, t}, {rows, s}, {rows, s, 0.5, 2}, {row, g}},
                 .out = {{sizes, t}, {row, g}, {row, g}},
                 .ulps = ulps});
        Compare({.op = "rms_norm_backward",
                 .in = {{sizes, t}, {sizes, t}, {rows, s, 0.5, 2}, {row, g}},
                 .out = {{sizes, t}, {row, g}},
                 .ulps = ulps});
      }
    }
  }
}

TEST(Loss, PicksAndGradientsOnClassShards) {
  // So many rows that every class comes, those next to the shard's too.
  for (const FactorRange v : {FactorRange{0, 9, 9}, FactorRange{3, 5, 11}}) {
    for (const DType t : kFloats) {
      for (const DType index : {DType::kI64, DType::kI32}) {
        const Shape x = {80, v.local}, rows = {80};
        const double last = static_cast<double>(v.global - 1);
        Compare({.op = "nll_pick",
                 .in = {{x, t}, {rows, index, 0, last}},
                 .out = {{rows, t}},
                 .attrs = {Int(3)},
                 .factors = {v}});
        Compare({.op = "nll_pick_backward",
                 .in = {{rows, t}, {rows, index, 0, last}},
                 .out = {{x, t}},
                 .attrs = {Int(v.global), Int(-100)},
                 .factors = {v}});
        Compare(
            {.op = "cross_entropy_backward",
             .in = {{rows, t}, {x, t}, {rows, t, 1, 2}, {rows, t, 1, 2}, {rows, index, 0, last}},
             .out = {{x, t}},
             .attrs = {Int(5)},
             .factors = {v},
             .ulps = 4});
      }
      Compare({.op = "sum_exp",
               .in = {{{7, v.local}, t}, {{7}, t, 1, 2}},
               .out = {{{7}, ComputedIn(t)}},
               .ulps = 16});
      Operand least = {{7, v.local}, t}, most = {{7}, t};  // rows of nothing else sum to 0
      least.values = most.values = {-INFINITY};
      Compare({.op = "sum_exp", .in = {least, most}, .out = {{{7}, ComputedIn(t)}}});
    }
  }
}

TEST(Loss, RowsAreReadOnce) {
  // Lines that a warp, a block and nobody holds.
  for (const int64_t n : {9, 700, 5000}) {
    for (const DType t : kFloats) {
      for (const DType index : {DType::kI64, DType::kI32}) {
        Compare({.op = "cross_entropy_rows",
                 .in = {{{3, n}, t, -4, 4}, {{3}, index, 0, 5}},
                 .out = {{{3}, ComputedIn(t)}, {{3}, ComputedIn(t)}, {{3}, ComputedIn(t)}},
                 .attrs = {Int(3)},
                 .ulps = 64});
      }
    }
  }
  EXPECT_THAT(Compare({.op = "cross_entropy_rows",
                       .in = {{{2, 5}}, {{2}, DType::kI64, 7, 7}},
                       .out = {{{2}}, {{2}}, {{2}}},
                       .attrs = {Int(-100)}}),
              HasSubstr("cross_entropy_rows: target 7 at position"));
  EXPECT_THAT(Compare({.op = "nll_pick",
                       .in = {{{2, 5}}, {{2}, DType::kI64, 7, 7}},
                       .out = {{{2}}},
                       .attrs = {Int(-100)}}),
              HasSubstr("nll_pick: target 7 at position"));
}

TEST(Embedding, RowsAndTheirGradients) {
  for (const FactorRange rows : {FactorRange{0, 11, 11}, FactorRange{4, 11, 20}}) {
    for (const int64_t width : {1, 4, 33}) {
      for (const DType index : {DType::kI64, DType::kI32}) {
        const Operand ids = {{3, 50}, index, 0, static_cast<double>(rows.global - 1)};
        for (const DType t : kFloats) {
          if (width == 33 && t != DType::kF32) continue;
          Compare({.op = "embedding",
                   .in = {{{rows.local, width}, t}, ids},
                   .out = {{{3, 50, width}, t}},
                   .factors = {rows}});
          Compare({.op = "embedding_backward",  // in the CPU's order: the same bits
                   .in = {{{3, 50, width}, t}, ids},
                   .out = {{{rows.local, width}, t}},
                   .attrs = {Int(rows.global), Int(2)},
                   .factors = {rows}});
        }
      }
    }
  }
  for (const int64_t n : {2500, 20000}) {  // the library sorts them in one launch, and in several
    Compare({.op = "embedding_backward",
             .in = {{{n, 2}}, {{n}, DType::kI32, 0, 699}},
             .out = {{{700, 2}}},
             .attrs = {Int(700), Int(-1)}});
  }
  Compare({.op = "embedding_backward",
           .in = {{{0, 2}}, {{0}, DType::kI32, 0, 5}},
           .out = {{{7, 2}}},
           .attrs = {Int(7), Int(-1)}});
  EXPECT_THAT(
      Compare({.op = "embedding", .in = {{{5, 2}}, {{1}, DType::kI64, -3, -3}}, .out = {{{1, 2}}}}),
      HasSubstr("embedding: index -3 is out of range for 5 rows (position 0)"));
}

// Operands around dim 1 of [3, rows, 4]; 9 picks, some of them the same.
TEST(Gather, ReadsAndWritesInTheCpusOrder) {
  for (const FactorRange rows : {FactorRange{0, 6, 6}, FactorRange{4, 6, 15}}) {
    const double last = static_cast<double>(rows.global - 1);
    for (const bool by_row : {true, false}) {
      const Shape x = {3, rows.local, 4}, y = {3, 9, 4}, picks = by_row ? Shape{9} : y;
      for (const DType index : {DType::kI64, DType::kI32}) {
        const Operand at = {picks, index, 0, last};
        for (const DType t : kEvery) {
          if ((index == DType::kI32 || rows.start > 0) && t != DType::kF32) continue;
          const double low = t == DType::kU8 ? 0 : -3;
          const std::vector<FactorRange> cut = {rows};
          Compare({"gather", {{x, t, low, 3}, at}, {{y, t}}, {Int(1)}, cut});
          Compare({"gather_backward", {{y, t, low, 3}, at}, {{x, t}}, {Int(1), Int(6)}, cut});
          const std::vector<Operand> three = {{x, t, low, 3}, at, {y, t, low, 3}};
          Compare({"scatter", three, {{x, t}}, {Int(1)}, cut});
          Compare({"scatter_add", three, {{x, t}}, {Int(1)}, cut});
          for (const char* op : {"scatter_prod", "scatter_amax", "scatter_amin"}) {
            if (by_row || rows.start > 0) continue;
            Compare({op, three, {{x, t}}, {Int(1)}, cut});
          }
          if (index == DType::kI64 && !by_row) {
            Compare({"take_along", {{x, t, low, 3}, at}, {{y, t}}, {Int(1)}, cut});
          }
        }
        Operand strided = {x, DType::kF32, -2, 2, {4, 13, 1}};
        for (const char* op : {"scatter_", "scatter_add_"}) {
          Compare({.op = op,
                   .in = {strided, at, {y}},
                   .out = {},
                   .attrs = {Int(1)},
                   .factors = {rows},
                   .writes = 1});
        }
      }
    }
  }
  EXPECT_THAT(Compare({"gather", {{{3, 2}}, {{1}, DType::kI64, 3, 3}}, {{{1, 2}}}, {Int(0)}}),
              HasSubstr("index 3 is out of range for a dim of 3 (position 0)"));
}
TEST(Gather, IndicesAndTriangles) {
  Compare({"check_index", {{{40}, DType::kI32, -7, 6}}, {{{40}, DType::kI64}}, {Int(7), Int(1)}});
  EXPECT_THAT(
      Compare(
          {"check_index", {{{4}, DType::kI64, -7, -7}}, {{{4}, DType::kI64}}, {Int(7), Int(0)}}),
      HasSubstr("index -7 is not in [0, 7)"));
  for (const int64_t diagonal : {int64_t{-2}, int64_t{0}, int64_t{3}, INT64_MAX, INT64_MIN}) {
    for (const int64_t upper : {0, 1}) {
      Compare({"tril",
               {{{2, 5, 7}, DType::kF16}},
               {{{2, 5, 7}, DType::kF16}},
               {Int(diagonal), Int(upper)},
               {{3, 5, 9}, {1, 7, 8}}});
    }
  }
}

TEST(Scan, RunningSumsProductsAndExtremes) {
  const Shape sizes[] = {{40}, {3, 300}, {4, 9, 5}, {2, 0}, {0, 3}};
  for (const Shape& x : sizes) {
    const int64_t dim = x.size() == 1 ? 0 : 1;
    for (const int64_t mode : {0, 1, 2, 3}) {  // reverse, exclusive
      const std::vector<Attr> attrs = {Int(dim), Int(mode & 1), Int(mode >> 1)};
      for (const DType t : {DType::kF64, DType::kF32, DType::kBF16, DType::kI64}) {
        if (mode > 0 && t == DType::kBF16) continue;
        Compare({"cumsum", {{x, t}}, {{x, t}}, attrs, {}, IsFloating(t) ? 16. : 0.});
        Compare({"cumprod", {{x, t, 1, 1.1}}, {{x, t}}, attrs, {}, IsFloating(t) ? 64. : 0.});
        if (IsFloating(t)) Compare({"logcumsumexp", {{x, t}}, {{x, t}}, attrs, {}, 16});
      }
    }
    for (const DType t : {DType::kF64, DType::kF16}) {
      Compare({"cumprod_backward", {{x, t}, {x, t, 0.5, 1}}, {{x, t}}, {Int(dim)}, {}, 4});
    }
    for (const DType t : kEvery) {
      for (const char* op : {"cummax", "cummin"}) {
        Compare({op, {{x, t, 0, 5}}, {{x, t}, {x, DType::kI64}}, {Int(dim)}});
      }
    }
  }
}

// Parts of a line that leave the range of float64 while the running sums and products stay, or
// leave it where the parts do not: zeros and infinities stay from there on.
TEST(Scan, WhatRunsStaysWhereItsPartsLeave) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::vector<double> doubles[] = {
      {1e-200, 1e200, 1e200, 1e-200},         // parts overflow, and underflow
      {1e200, 1e-200, 1e-200, 1e200},         // the other way round
      {1e-100, 1e-100, 1e-100, 1e300, 7},     // long below, and then above
      {3, 1e160, 1e160, 1e-200, 1e-200},      // overflows at the third
      {1e-200, 1e-200, 1e200, 1e200},         // is 0 from the second on
      {1e-160, 1.1e-150, 1.3, 1e10, 1e290},   // loses digits on its way
      {1e200, 0, 1e200, 1e200},               // 0, and then what is infinite
      {-1e200, 1e-200, 1e-200, 1e200, kInf},  // and what is NaN
  };
  const std::vector<double> floats[] = {
      {1e-30, 1e30, 1e30, 1e-30}, {1e38, 1e38, 1e-38, 1e-38}, {1e-38, 1e-38, 1e38, 1e38}};
  const auto compare = [](const char* op, const Shape& x, DType t, const std::vector<double>& v,
                          const std::vector<Attr>& attrs) {
    Compare({.op = op,
             .in = {{x, t, 0, 0, {}, v}},
             .out = {{x, t}},
             .attrs = attrs,
             .ulps = 512,  // of that many roundings
             .each = true});
  };
  for (const Shape& x : {Shape{1200}, Shape{3, 40}, Shape{300, 2}}) {
    for (const int64_t reverse : {0, 1}) {
      for (const int64_t exclusive : {0, 1}) {
        const std::vector<Attr> attrs = {Int(x.back() == 40 ? 1 : 0), Int(reverse), Int(exclusive)};
        for (const std::vector<double>& v : doubles) {
          compare("cumprod", x, DType::kF64, v, attrs);
        }
        for (const std::vector<double>& v : floats) {
          compare("cumprod", x, DType::kF32, v, attrs);
        }
        const std::vector<double> sums[] = {
            {-1e308, 1e308, 1e308, -1e308}, {1e308, 1e308, -1e308, -1e308}, {kInf, 1, -kInf, 2}};
        for (const std::vector<double>& v : sums) {
          for (const char* op : {"cumsum", "logcumsumexp"}) {
            compare(op, x, DType::kF64, v, attrs);
          }
        }
      }
    }
  }
  // Runs that stay within hundreds of powers of ten, of many tiles each.
  std::vector<double> down_and_up(600, 0.5);
  down_and_up.insert(down_and_up.end(), 600, 2.0);
  for (const DType t : {DType::kF64, DType::kF32, DType::kBF16}) {
    compare("cumprod", {2400}, t, down_and_up, {Int(0), Int(0), Int(0)});
  }
}

TEST(Sort, LinesTheirFirstAndTheirMiddle) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const Shape sizes[] = {{7}, {3, 40}, {2, 9, 5}, {1, 1500}};
  for (const Shape& x : sizes) {
    const int64_t dim = x.size() == 1 ? 0 : 1;
    for (const DType t : kEvery) {
      const bool large = Numel(x) > 1000;
      if (large && t != DType::kF32) continue;
      const Operand values = {x, t, IsFloating(t) ? -2. : 0., 5};  // integers: many are equal
      for (const int64_t up : {0, 1}) {
        if (large && up == 0) continue;
        Compare({"sort", {values}, {{x, t}, {x, DType::kI64}}, {Int(dim), Int(up)}});
        Shape first = x;
        first[static_cast<size_t>(dim)] = 3;
        Compare(
            {"topk", {values}, {{first, t}, {first, DType::kI64}}, {Int(3), Int(dim), Int(up)}});
      }
      Shape one = x;
      one.erase(one.begin() + dim);
      for (const char* op : {"kthvalue", "median", "nanmedian", "mode"}) {
        if (large) continue;
        Compare({op,
                 {values},
                 {{one, t}, {one, DType::kI64}},
                 {Int(dim), Int(0), Int(std::string(op) == "kthvalue" ? 2 : 0)}});
      }
    }
  }
  // Longer than a block holds, several at once, and longer than the library sorts in one launch.
  const std::vector<double> marks = {kNan, -0.0, 1.5, kInf, 0.0, -kInf, -2, 1.5};
  for (const Shape& x : {Shape{3, 1100, 1}, Shape{1, 1030, 2}, Shape{1, 9000, 1}}) {
    for (const DType t : kEvery) {
      if (x[1] == 9000 && t != DType::kF64) continue;
      for (const bool marked : {false, true}) {
        if (marked && (!IsFloating(t) || x[0] == 1)) continue;
        Operand values = {x, t, t == DType::kU8 || t == DType::kBool ? 0. : -40., 40};
        if (marked) values.values = marks;
        for (const int64_t down : {0, 1}) {
          Compare({"sort", {values}, {{x, t}, {x, DType::kI64}}, {Int(1), Int(down)}});
        }
        const Shape one = {x[0], x[2]}, first = {x[0], 30, x[2]};
        Compare({"topk", {values}, {{first, t}, {first, DType::kI64}}, {Int(30), Int(1), Int(1)}});
        for (const char* op : {"kthvalue", "median", "nanmedian", "mode"}) {
          Compare({op,
                   {values},
                   {{one, t}, {one, DType::kI64}},
                   {Int(1), Int(0), Int(std::string(op) == "kthvalue" ? 700 : 0)}});
        }
      }
    }
  }
  EXPECT_THAT(Compare({"topk", {{{4}}}, {{{5}}, {{5}, DType::kI64}}, {Int(5), Int(0), Int(1)}}),
              HasSubstr("k is larger than the dim"));
}
TEST(Sort, BinarySearch) {
  for (const DType t : {DType::kF32, DType::kBF16, DType::kI32}) {
    for (const int64_t right : {0, 1}) {
      // One value in every line of the sequence is in order whatever it is.
      Compare({"searchsorted",
               {{{5, 1}, t, -3, 3}, {{5, 7}, t, -3, 3}},
               {{{5, 7}, DType::kI64}},
               {Int(right), Int(0)}});
      Compare({"searchsorted_by",
               {{{9}, t, 2, 2}, {{7}, t, 1, 3}, {{9}, DType::kI64, 0, 8}},
               {{{7}, DType::kI32}},
               {Int(right), Int(1)}});
    }
  }
  EXPECT_THAT(Compare({"searchsorted_by",
                       {{{9}}, {{7}}, {{9}, DType::kI64, 9, 9}},
                       {{{7}, DType::kI64}},
                       {Int(0), Int(0)}}),
              HasSubstr("sorter holds 9, which is no index of 9 elements"));
}

struct Heads {
  int64_t b, h, g, s, t, d, e;
  bool causal;
  std::vector<FactorRange> factors = {};
};

// q, k, v as views of [b, s, h, d]: heads lie between each other.
Operand Split(int64_t b, int64_t h, int64_t s, int64_t d, DType t) {
  return {{b, h, s, d}, t, -1, 1, {s * h * d, d, h * d, 1}};
}
double AttentionUlps(DType t) { return IsNarrow(t) ? 2 : 60; }

void CompareAttention(const Heads& z, DType t, const std::vector<Operand>& mask,
                      const std::vector<int64_t>& words) {
  std::vector<Attr> attrs = {Number(0.3), Int(z.causal ? 1 : 0)};
  if (!mask.empty()) attrs.insert(attrs.end(), {Number(1.25), Ints(words)});
  const std::vector<Operand> qkv = {Split(z.b, z.h, z.s, z.d, t), Split(z.b, z.g, z.t, z.d, t),
                                    Split(z.b, z.g, z.t, z.e, t)};
  const DType of_lse = t == DType::kF32 ? DType::kF64 : ComputedIn(t);
  const Operand lse = {{z.b, z.h, z.s}, of_lse, 2, 3};
  KernelCase forward = {mask.empty() ? "attention" : "masked_attention",
                        qkv,
                        {{{z.b, z.h, z.s, z.e}, t}, lse},
                        attrs,
                        z.factors,
                        AttentionUlps(t)};
  forward.in.insert(forward.in.end(), mask.begin(), mask.end());
  Compare(forward);
  KernelCase backward = {
      mask.empty() ? "attention_backward" : "masked_attention_backward",
      {Split(z.b, z.h, z.s, z.e, t)},
      {{{z.b, z.h, z.s, z.d}, t}, {{z.b, z.g, z.t, z.d}, t}, {{z.b, z.g, z.t, z.e}, t}},
      attrs,
      z.factors,
      2 * AttentionUlps(t)};
  backward.in.insert(backward.in.end(), qkv.begin(), qkv.end());
  backward.in.push_back({{z.b, z.h, z.s, z.e}, t});
  backward.in.push_back(lse);
  backward.in.insert(backward.in.end(), mask.begin(), mask.end());
  Compare(backward);
}

TEST(Attention, ForwardAndBackward) {
  const Heads cases[] = {
      {1, 2, 2, 5, 5, 8, 8, false},
      {1, 1, 1, 66, 66, 20, 12, true},
      {2, 1, 1, 3, 67, 4, 70, false},
      {1, 1, 1, 1, 9, 40, 5, true, {{8, 1, 9}, {0, 1, 1}}},
      {1, 2, 1, 4, 8, 4, 4, true, {{4, 4, 8}, {2, 2, 4}}},
      {1, 1, 1, 2, 3, 3, 140, false},
      {1, 1, 1, 3, 0, 4, 4, false},
  };
  for (const Heads& z : cases) CompareAttention(z, DType::kF32, {}, {});
  CompareAttention(cases[0], DType::kF64, {}, {});
  // By tensor cores: rows that are not runs of 16 bytes, and rows that are.
  for (const DType t : {DType::kBF16, DType::kF16}) {
    for (const Heads& z : cases) CompareAttention(z, t, {}, {});
    CompareAttention({1, 2, 1, 70, 130, 72, 136, true}, t, {}, {});
    CompareAttention({2, 4, 2, 65, 64, 16, 64, false}, t, {}, {});
    CompareAttention({1, 4, 2, 70, 130, 72, 128, true, {{3, 70, 80}, {0, 4, 4}}}, t, {}, {});
    CompareAttention({1, 1, 1, 130, 70, 64, 104, true}, t, {}, {});
  }
}
TEST(Attention, MasksAndDropout) {
  const Heads z = {2, 2, 1, 5, 34, 4, 4, false};
  for (const Operand& mask :
       {Operand{{2, 1, 5, 34}, DType::kBool, 0, 1}, Operand{{1, 1, 1, 34}, DType::kF32},
        Operand{{2, 2, 5, 34}, DType::kBF16}}) {
    for (const DType t : {DType::kF32, DType::kBF16}) CompareAttention(z, t, {mask}, {});
  }
  const Heads part = {1, 2, 2, 4, 8, 4, 4, true, {{4, 4, 8}, {2, 2, 4}, {1, 1, 2}, {0, 2, 2}}};
  for (const DType t : kFloats) {  // whose groups in the mask have 2, 4 and 8 elements
    const auto words = ReserveDropout({2, 4, 8, 8}, t, 0.2, nullptr);
    ASSERT_TRUE(words.ok());
    CompareAttention(part, t, {{{1, 1, 4, 8}, DType::kBool, 1, 1}}, *words);
  }
  const auto odd = ReserveDropout({2, 2, 5, 33}, DType::kF32, 0.2, nullptr);  // groups of one
  ASSERT_TRUE(odd.ok());
  CompareAttention({2, 2, 1, 5, 33, 4, 4, false}, DType::kF32, {{{1, 1, 1, 1}, DType::kF32}}, *odd);
}

// p, state and g of one shape; each is read and written in place, strided or not.
TEST(Optim, UpdatesHaveTheCpusBits) {
  const Attr lr = Number(0.1);
  const std::vector<Attr> adam = {lr,           Number(0.9), Number(0.99), Number(1e-8),
                                  Number(0.01), Int(0),      Int(3)};
  const std::vector<Attr> rmsprop = {lr,           Number(0.9), Number(1e-8),
                                     Number(0.01), Number(0.5), Int(1)};
  const struct {
    const char* op;
    int operands;
    std::vector<Attr> attrs;
  } updates[] = {
      {"sgd_", 2, {lr, Number(0.01), Int(1)}},
      {"sgd_momentum_", 3, {lr, Number(0.9), Number(0.1), Number(0.01), Int(1), Int(0), Int(2)}},
      {"sgd_momentum_", 3, {lr, Number(0.9), Number(0.1), Number(0.01), Int(0), Int(1), Int(1)}},
      {"adam_", 4, adam},
      {"adam_amsgrad_", 5, adam},
      {"adamw_", 4, adam},
      {"adamw_amsgrad_", 5, adam},
      {"adagrad_", 3, {lr, Number(0.1), Number(1e-8), Number(0.01), Int(0), Int(4)}},
      {"rmsprop_", 3, rmsprop},
      {"rmsprop_momentum_", 4, rmsprop},
      {"rmsprop_centered_", 4, rmsprop},
      {"rmsprop_centered_momentum_", 5, rmsprop},
  };
  for (const auto& u : updates) {
    for (const DType t : kFloats) {
      for (const bool strided : {false, true}) {
        KernelCase call = {.op = u.op, .in = {}, .out = {}, .attrs = u.attrs};
        for (int i = 0; i < u.operands; ++i) {
          call.in.push_back({{13, 21}, t, 0.5, 2});
          if (i % 2 == 0 && strided) call.in.back().strides = {1, 14};
        }
        call.in[1].low = u.operands > 2 ? -1 : 0.5;  // averages lie below the root of squares
        call.in[1].high = u.operands > 2 ? 0.5 : 2;
        if (std::string(u.op).find("a") == 0 || u.operands < 3) call.in[1].low = 0.1;
        if (u.op[0] == 'r') call.in[1] = call.in[2];
        if (u.op[0] == 'r') call.in[1].low = 2, call.in[1].high = 3;
        if (u.op[0] == 'r' && u.operands > 3) call.in[3].high = 1;
        call.writes = u.operands - 1;
        Compare(call);
      }
    }
  }
}
TEST(Optim, NormsAndScaling) {
  for (const DType t : kFloats) {
    for (const Operand& x : {Operand{{7, 9}, t}, Operand{{7, 9}, t, -2, 2, {1, 8}}, Operand{{}, t},
                             Operand{{0, 3}, t}, Operand{{70, 90}, t}}) {
      Compare({.op = "power_sum",
               .in = {x},
               .out = {{{}, DType::kF64}},
               .attrs = {Number(2)},
               .ulps = 100});
      Compare({.op = "power_sum",
               .in = {x},
               .out = {{{}, DType::kF64}},
               .attrs = {Number(3.5)},
               .ulps = 100});
      Compare({.op = "max_abs", .in = {x}, .out = {{{}, DType::kF64}}});
      Compare({.op = "scale_", .in = {x, {{}, DType::kF64}}, .out = {}, .writes = 1});
      Compare({.op = "truncated_normal_",
               .in = {{x.sizes, t, -0.9, 0.9, x.strides}},
               .out = {},
               .attrs = {Number(1), Number(2), Number(-1), Number(3)},
               .ulps = 4,
               .writes = 1});
    }
  }
}

// The CPU has it as a function of tensors.
void FillOnHost(const KernelCall& c) {
  const TensorRef& out = c.out[0];
  const auto bytes = static_cast<size_t>(out.sizes[0] * SizeOf(out.dtype));
  const Tensor to = *Tensor::Empty({out.sizes[0]}, out.dtype, DeviceType::kCpu);
  std::memcpy(to.data(), out.data, bytes);
  Tensor chances;
  if (!c.in.empty()) {
    chances = *Tensor::Empty({c.in[0].sizes[0]}, DType::kF64, DeviceType::kCpu);
    std::memcpy(chances.data(), c.in[0].data, static_cast<size_t>(c.in[0].sizes[0]) * 8);
  }
  const FillTask task = FillTask::FromWords({c.attrs[0].ints, static_cast<size_t>(c.attrs[0].n)});
  if (!task.Run(to, chances).ok()) c.workspace->Fail("refused");
  std::memcpy(out.data, to.data(), bytes);
}

// The mask drawn, then applied.
void DropoutOnHost(const KernelCall& c) {
  const TensorRef& x = c.in[0];
  const Tensor mask = *Tensor::Empty({x.sizes[0]}, DType::kBool, DeviceType::kCpu);
  std::memcpy(mask.data(), c.out[1].data, static_cast<size_t>(x.sizes[0]));
  ASSERT_TRUE(
      FillTask::FromWords({c.attrs[0].ints, static_cast<size_t>(c.attrs[0].n)}).Run(mask).ok());
  std::memcpy(c.out[1].data, mask.data(), static_cast<size_t>(x.sizes[0]));
  const TensorRef in[] = {x, mask.ref()};
  FindHostKernel("dropout_apply")
      ->fn({in, c.out.first(1), &c.attrs[1], {}, nullptr, c.workspace, nullptr});
}

TEST(Random, EveryKindHasTheCpusBits) {
  const struct {
    RandomKind kind;
    std::vector<DType> dtypes;
    DrawParams params;
  } kinds[] = {
      {RandomKind::kUniform, {kFloats[0], kFloats[1], kFloats[2], kFloats[3]}, {-0.3, 0.7}},
      {RandomKind::kNormal, {kFloats[0], kFloats[1], kFloats[2]}, {1, 2}},
      {RandomKind::kLogNormal, {kFloats[0], kFloats[3]}, {}},
      {RandomKind::kExponential, {kFloats[0], kFloats[1]}, {2}},
      {RandomKind::kCauchy, {kFloats[0], kFloats[1]}, {1, 3}},
      {RandomKind::kBernoulli, {kFloats[1], DType::kBool}, {0.3}},
      {RandomKind::kGeometric, {kFloats[1], DType::kI64}, {-0.2231435513142097}},
      {RandomKind::kWords32, {DType::kI32, DType::kU8}, {0, 1, 100, -5}},
      {RandomKind::kWords64, {DType::kI64}, {0, 1, 1000000007}},
  };
  for (const auto& k : kinds) {
    for (const DType t : k.dtypes) {
      FillTask task;
      task.op = k.kind;
      task.dtype = t;
      task.params = k.params;
      task.seed = 77;
      const auto plan = PlanRandom(k.kind, {30, 40}, t, DefaultGenerator().profile(), 8);
      ASSERT_TRUE(plan.ok());
      task.plan = *plan;
      for (RandomSegment& s : task.plan.segments) s.threads = 256;  // several calls of a thread
      for (const bool run : {true, false}) {
        RunBox box{.first_g = run ? 17 : 45, .local_offset = 3, .dims = {}};
        if (!run) box.dims.push_back({20, 40, 9});
        box.dims.push_back({run ? 1100 : 8, 1, 1});
        task.boxes = {box};
        const std::vector<int64_t> words = task.ToWords();
        Compare({.op = "random_fill",
                 .in = {},
                 .out = {{{1200}, t}},
                 .attrs = {Ints(words)},
                 .host = &FillOnHost});
      }
    }
  }
}
TEST(Random, MasksAndChances) {
  for (const int vec : {1, 2, 4, 8}) {
    FillTask task;
    task.kind = FillTask::Kind::kMask;
    task.vec = vec;
    task.params.a = 0.7;
    task.seed = 5;
    task.plan = {vec > 1 ? 1 : kMaxUnroll, vec == 8 ? 2 : 1, 0, {{0, 1200 / vec, 4, 256}}};
    for (const bool run : {true, false}) {
      RunBox box{.first_g = run ? 13 : 40, .local_offset = 3, .dims = {}};
      if (!run) box.dims.push_back({20, 40, 9});
      box.dims.push_back({run ? 1100 : 7, 1, 1});
      task.boxes = {box};
      const std::vector<int64_t> words = task.ToWords();
      Compare({.op = "random_fill",
               .in = {},
               .out = {{{1200}, DType::kBool}},
               .attrs = {Ints(words)},
               .host = &FillOnHost});
    }
  }
  for (const DType t : kFloats) {
    for (const int vec : {1, 2, 4, 8}) {
      if (vec * SizeOf(t) > 16) continue;
      FillTask task;
      task.kind = FillTask::Kind::kMask;
      task.vec = vec;
      task.params.a = 0.7;
      task.seed = 5;
      task.plan = {vec > 1 ? 1 : kMaxUnroll, vec == 8 ? 2 : 1, 0, {{0, 1600 / vec, 4, 256}}};
      // Runs of whole groups that lie well; that begin and end inside of a group; and rows.
      const RunBox boxes[] = {
          {.first_g = 16, .local_offset = 0, .dims = {{1200, 1, 1}}},
          {.first_g = 13, .local_offset = 0, .dims = {{1200, 1, 1}}},
          {.first_g = 40, .local_offset = 0, .dims = {{30, 50, 40}, {40, 1, 1}}}};
      for (const RunBox& box : boxes) {
        task.boxes = {box};
        const std::vector<int64_t> words = task.ToWords();
        Compare({.op = "random_dropout",
                 .in = {{{1200}, t, -2, 2}},
                 .out = {{{1200}, t}, {{1200}, DType::kBool}},
                 .attrs = {Ints(words), Number(1 / 0.7)},
                 .host = &DropoutOnHost});
      }
    }
  }
  FillTask task;
  task.kind = FillTask::Kind::kChance;
  task.vec = 4;
  task.plan = {1, 1, 0, {{0, 300, 12, 300}}};
  RunBox box{.first_g = 13, .local_offset = 0, .dims = {{100, 1, 1}}};
  task.boxes = {box};
  const std::vector<int64_t> words = task.ToWords();
  Compare({.op = "random_fill",
           .in = {{{100}, DType::kF64, 0, 1}},
           .out = {{{100}, DType::kBool}},
           .attrs = {Ints(words)},
           .host = &FillOnHost});
  EXPECT_THAT(Compare({.op = "random_fill",
                       .in = {{{100}, DType::kF64, 1, 2}},
                       .out = {{{100}, DType::kBool}},
                       .attrs = {Ints(words)},
                       .host = &FillOnHost}),
              HasSubstr("a probability is outside of [0, 1]"));
}

}  // namespace
}  // namespace dtensor::testing
