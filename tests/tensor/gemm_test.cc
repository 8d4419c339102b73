// Gemm against three loops in float64: every dtype, both orders of both inputs, accumulating or
// not.
#include "dtensor/tensor/cpu/gemm.h"

#include <gtest/gtest.h>

#include <cmath>

#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::gemm_test {
namespace {

std::vector<double> Numbers(int64_t n, int64_t seed) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>((i * 37 + seed * 11) % 13) - 6);
  return v;
}

// Small whole numbers: exact in every dtype but the unsigned ones.
void Check(DType dtype, int64_t m, int64_t n, int64_t k, bool a_transposed, bool b_transposed,
           bool accumulate) {
  const auto make = [&](int64_t rows, int64_t cols, int64_t seed, bool transposed) {
    if (!transposed) {
      return Tensor::FromVector(Numbers(rows * cols, seed), {rows, cols}, dtype).value();
    }
    return Tensor::FromVector(Numbers(rows * cols, seed), {cols, rows}, dtype)
        .value()
        .Transpose(0, 1);
  };
  const Tensor a = make(m, k, 1, a_transposed), b = make(k, n, 2, b_transposed);
  const Tensor c = Tensor::Full({m, n + 3}, dtype, 2).value().Slice(1, 0, n);
  std::vector<double> want = c.ToVector<double>();
  const std::vector<double> va = a.ToVector<double>(), vb = b.ToVector<double>();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? want[i * n + j] : 0;
      for (int64_t x = 0; x < k; ++x) sum += va[i * k + x] * vb[x * n + j];
      want[i * n + j] = sum;
    }
  }
  Gemm({m, n, k, a.data(), a.strides()[0], a.strides()[1], b.data(), b.strides()[0], b.strides()[1],
        c.data(), c.strides()[0], dtype, accumulate});
  const std::vector<double> got = c.ToVector<double>();
  const double unit = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0;
  for (size_t i = 0; i < want.size(); ++i) {
    ASSERT_NEAR(got[i], want[i], unit * std::fabs(want[i]))
        << std::string(Name(dtype)) << " " << m << "x" << n << "x" << k << " element " << i
        << (a_transposed ? " a^T" : "") << (b_transposed ? " b^T" : "");
  }
}

TEST(Gemm, EveryTypeAndOrder) {
  for (const DType dtype :
       {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI64, DType::kI32}) {
    for (int flags = 0; flags < 8; ++flags) {
      for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{1, 1, 1},
                                                                       {3, 5, 7},
                                                                       {1, 17, 33},
                                                                       {20, 1, 9},
                                                                       {33, 18, 40},
                                                                       {0, 4, 3},
                                                                       {4, 0, 3},
                                                                       {4, 3, 0}}) {
        Check(dtype, m, n, k, flags & 1, flags & 2, flags & 4);
      }
    }
  }
}

// On both sides of what counts as small, and of vectors and row blocks.
TEST(Gemm, SmallAndLarge) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    for (int flags = 0; flags < 8; ++flags) {
      for (const int64_t n : {2, 4, 6, 7, 8, 9, 15, 16, 31, 32, 34, 65}) {
        Check(dtype, 7, n, 12, flags & 1, flags & 2, flags & 4);
        Check(dtype, n, 10, 5, flags & 1, flags & 2, flags & 4);
      }
      Check(dtype, 2, 3, 256, flags & 1, flags & 2, flags & 4);
      Check(dtype, 2, 3, 257, flags & 1, flags & 2, flags & 4);
      Check(dtype, 40, 40, 40, flags & 1, flags & 2, flags & 4);
    }
  }
}

// Rows of B a multiple of a kilobyte apart, which are copied first: depths and heights to both
// sides of what that is done for, and a last panel that is not whole.
TEST(Gemm, RowsOfBThatMeetInTheCache) {
  for (const int64_t n : {256, 509, 1021}) {
    for (const auto& [m, k] : std::vector<std::array<int64_t, 2>>{
             {3, 7}, {9, 31}, {64, 32}, {255, 17}, {257, 16}, {20, 256}, {20, 257}}) {
      for (const bool accumulate : {false, true}) {
        const Tensor wide =
            Tensor::FromVector(Numbers(k * 1024, 3), {k, 1024}, DType::kF32).value();
        const Tensor a = Tensor::FromVector(Numbers(m * k, 1), {m, k}, DType::kF32).value();
        const Tensor c = Tensor::Full({m, n}, DType::kF32, 2).value();
        Gemm({m, n, k, a.data(), k, 1, wide.data(), 1024, 1, c.data(), n, DType::kF32, accumulate});
        const auto *va = a.data_as<float>(), *vb = wide.data_as<float>();
        int64_t wrong = 0;
        for (int64_t i = 0; i < m; ++i) {
          for (int64_t j = 0; j < n; ++j) {
            float sum = accumulate ? 2 : 0;  // whole numbers: exact
            for (int64_t x = 0; x < k; ++x) sum += va[i * k + x] * vb[x * 1024 + j];
            wrong += c.data_as<float>()[i * n + j] != sum;
          }
        }
        EXPECT_EQ(wrong, 0) << m << "x" << n << "x" << k;
      }
    }
  }
}

// What is not stored is not touched, and neighbours of B are not read into the sums.
TEST(Gemm, SmallProductsStayInTheirColumns) {
  for (int64_t n = 1; n <= 33; ++n) {
    const Tensor a = Tensor::Full({5, 3}, DType::kF32, 1).value();
    const Tensor b = Tensor::Full({3, n + 1}, DType::kF32, std::nan("")).value();
    Fill(b.Slice(1, 0, n), 2);
    const Tensor c = Tensor::Full({5, n + 1}, DType::kF32, 7).value();
    Gemm({5, n, 3, a.data(), 3, 1, b.data(), n + 1, 1, c.data(), n + 1, DType::kF32, false});
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t j = 0; j <= n; ++j) {
        EXPECT_EQ(c.data_as<float>()[i * (n + 1) + j], j < n ? 6 : 7) << n << " columns";
      }
    }
  }
}

// Expanded operands and windows that overlap: elements of which several rows or columns share.
TEST(Gemm, OperandsThatOverlap) {
  using Strides = std::array<int64_t, 2>;
  constexpr int64_t kMost = 2048;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    const Tensor x = Tensor::FromVector(Numbers(kMost, 1), {kMost}, dtype).value();
    const std::vector<double> v = x.ToVector<double>();
    const double unit = dtype == DType::kBF16 ? 0x1p-8 : dtype == DType::kF16 ? 0x1p-11 : 0;
    const auto check = [&](int64_t m, int64_t n, int64_t k, Strides a, Strides b) {
      const Tensor c = Tensor::Full({m, n}, dtype, 1).value();
      Gemm({m, n, k, x.data(), a[0], a[1], x.data(), b[0], b[1], c.data(), n, dtype, false});
      const std::vector<double> got = c.ToVector<double>();
      for (int64_t i = 0; i < m; ++i) {
        for (int64_t j = 0; j < n; ++j) {
          double want = 0;
          for (int64_t l = 0; l < k; ++l) want += v[i * a[0] + l * a[1]] * v[l * b[0] + j * b[1]];
          ASSERT_NEAR(got[i * n + j], want, unit * std::fabs(want))
              << std::string(Name(dtype)) << " " << m << "x" << n << "x" << k << " strides " << a[0]
              << "," << a[1] << " " << b[0] << "," << b[1] << " at " << i << "," << j;
        }
      }
    };
    for (const int64_t m : {1, 9, 64}) {
      for (const int64_t n : {1, 4, 64}) {
        for (const int64_t k : {15, 16, 300}) {
          for (const Strides s : {Strides{1, 1}, {0, 1}, {1, 0}, {0, 0}, {3, 1}, {1, 3}}) {
            check(m, n, k, s, {1, 2});
            check(m, n, k, s, s);
            check(m, n, k, {2, 1}, s);
          }
        }
      }
    }
  }
}

// 16-bit floats in blocks: rows, columns and depth beyond one block, sums in f32, rounded once.
TEST(Gemm, BlocksOfNarrowFloats) {
  Check(DType::kBF16, 520, 3, 7, false, false, false);
  Check(DType::kBF16, 3, 515, 7, true, false, true);
  Check(DType::kF16, 2, 3, 1030, false, true, true);
  Check(DType::kBF16, 2, 3, 2049, true, true, false);
}

// Few rows, or one column, times a matrix by rows and by columns.
TEST(Gemm, FewRowsTimesALargeMatrix) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int flags = 0; flags < 8; ++flags) {
      const bool at = flags & 1, bt = flags & 2, accumulate = flags & 4;
      for (const int64_t m : {1, 2, 3, 8, 9}) Check(dtype, m, 130, 301, at, bt, accumulate);
      Check(dtype, 1, 2100, 20, at, bt, accumulate);
      Check(dtype, 4, 5, 2003, at, bt, accumulate);
      Check(dtype, 700, 1, 65, at, bt, accumulate);
    }
  }
}

// Generation in a batch gives each sequence the bits that it has alone.
TEST(Gemm, RowsHaveTheBitsThatTheyHaveAlone) {
  constexpr int64_t kRows = 8;
  const auto uneven = [](int64_t n, int64_t seed) {
    std::vector<double> v;
    for (int64_t i = 0; i < n; ++i) v.push_back(std::sin(static_cast<double>(i * 7 + seed)));
    return v;
  };
  const auto check = [&](DType dtype, int64_t n, int64_t k) {
    const Tensor a = Tensor::FromVector(uneven(kRows * k, 1), {kRows, k}, dtype).value();
    const Tensor w = Tensor::FromVector(uneven(n * k, 2), {n, k}, dtype).value();
    for (const bool transposed : {false, true}) {
      const int64_t row = transposed ? 1 : n, col = transposed ? k : 1;
      const auto multiply = [&](int64_t first, int64_t rows) {
        const Tensor c = Tensor::Full({rows, n}, dtype, 0).value();
        Gemm({rows, n, k, a.Slice(0, first, rows).data(), k, 1, w.data(), row, col, c.data(), n,
              dtype, false});
        return c.ToVector<double>();
      };
      const std::vector<double> all = multiply(0, kRows);
      for (int64_t r = 0; r < kRows; ++r) {
        const std::vector<double> alone = multiply(r, 1);
        EXPECT_TRUE(std::equal(alone.begin(), alone.end(), all.begin() + r * n))
            << Name(dtype) << " " << n << " x " << k << " row " << r;
      }
    }
  };
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    check(dtype, 515, 777);
    check(dtype, 64, 250);
    check(dtype, 16, 40);
  }
}

// Through the units for them where the CPU has any: large products, sums in f32, rounded once.
TEST(Gemm, LargeProductsOfBFloat16) {
  for (int flags = 0; flags < 8; ++flags) {
    Check(DType::kBF16, 65, 130, 257, flags & 1, flags & 2, flags & 4);
  }
  const Tensor a = Tensor::Full({64, 4096}, DType::kBF16, 1).value();
  const Tensor c = Tensor::Full({64, 64}, DType::kBF16, 0).value();
  Gemm({64, 64, 4096, a.data(), 4096, 1, a.data(), 1, 4096, c.data(), 64, DType::kBF16, false});
  EXPECT_EQ(c.data_as<BFloat16>()[0].bits, ToBFloat16(4096).bits);  // in bf16 it stops at 256
}

TEST(Gemm, ScratchMemoryIsCountedAndBounded) {
  const auto allocator = Allocator::Create();
  const ScopedAllocator scope(allocator);
  constexpr int64_t kN = 1500;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor x = Tensor::Full({kN, kN}, dtype, 1).value();
    const Tensor y = Tensor::Full({kN, kN}, dtype, 0).value();
    allocator->ResetPeak();
    const int64_t now = allocator->stats().in_use_bytes;
    Gemm({kN, kN, kN, x.data(), kN, 1, x.data(), kN, 1, y.data(), kN, dtype, false});
    EXPECT_LE(allocator->stats().peak_bytes, now + (6 << 20)) << std::string(Name(dtype));
  }
  const Tensor a = Tensor::Full({kN, kN}, DType::kF16, 1).value();
  const Tensor c = Tensor::Full({kN, kN}, DType::kF16, 0).value();
  allocator->ResetPeak();
  const int64_t before = allocator->stats().in_use_bytes;
  const auto multiply = [&] {
    Gemm({kN, kN, kN, a.data(), kN, 1, a.data(), kN, 1, c.data(), kN, DType::kF16, false});
  };
  multiply();
  EXPECT_EQ(c.data_as<Half>()[7].bits, ToHalf(kN).bits);
  EXPECT_GT(allocator->stats().peak_bytes, before + (1 << 20));
  EXPECT_LE(allocator->stats().peak_bytes, before + (6 << 20));
  allocator->SetLimit(before + (1 << 20));
  EXPECT_THROW(multiply(), Error);
  EXPECT_EQ(allocator->stats().in_use_bytes, before);
}

}  // namespace
}  // namespace dtensor::gemm_test
