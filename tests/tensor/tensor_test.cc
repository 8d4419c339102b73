// Views, copies, fills and reductions over any strides, against element-by-element answers.
#include "dtensor/tensor/tensor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "dtensor/tensor/status.h"

namespace dtensor::tensor_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Tensor Iota(Shape shape, DType dtype = DType::kF32) {
  std::vector<double> v(static_cast<size_t>(Numel(shape)));
  std::iota(v.begin(), v.end(), 0);
  return Tensor::FromVector(v, shape, dtype).value();
}

TEST(Tensor, ViewsShareMemory) {
  const Tensor t = Iota({2, 3});
  EXPECT_THAT(t.Transpose(0, 1).ToVector<double>(), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(t.Slice(1, 0, 2, 2).ToVector<double>(), ElementsAre(0, 2, 3, 5));
  EXPECT_THAT(t.Select(0, 1).ToVector<double>(), ElementsAre(3, 4, 5));
  EXPECT_THAT(t.Select(1, 1).Unsqueeze(0).Expand({2, 2}).ToVector<double>(),
              ElementsAre(1, 4, 1, 4));
  EXPECT_THAT(t.Permute({1, 0}).ToVector<double>(), ElementsAre(0, 3, 1, 4, 2, 5));
  Fill(t.Slice(1, 1, 1), 9);
  EXPECT_THAT(t.ToVector<double>(), ElementsAre(0, 9, 2, 3, 9, 5));
}

TEST(Tensor, ViewAndReshape) {
  const Tensor t = Iota({2, 3, 4});
  EXPECT_EQ(t.View({6, 4})->strides(), Strides({4, 1}));
  const Tensor swapped = t.Transpose(0, 2);
  EXPECT_FALSE(swapped.View({24}).ok());
  EXPECT_EQ(t.Transpose(0, 1).View({3, 2, 2, 2})->ToVector<double>(),
            t.Transpose(0, 1).ToVector<double>());  // only the last dim is cut
  EXPECT_EQ(swapped.Reshape({24})->ToVector<double>(), swapped.ToVector<double>());
  EXPECT_TRUE(Iota({0, 3}).View({3, 0}).ok());
  EXPECT_FALSE(t.View({5, 5}).ok());
  EXPECT_FALSE(t.View({-4, -6}).ok());
  EXPECT_FALSE(Iota({1}).View({-1, -1}).ok());
}

// What local() is on a rank outside of the mesh.
TEST(Tensor, NullHasNoValuesAndIsCopiedAsNull) {
  const Tensor null;
  EXPECT_THAT([&] { (void)null.ToVector<float>(); },
              ::testing::ThrowsMessage<Error>(HasSubstr("the tensor is null")));
  EXPECT_FALSE(null.Clone()->defined());
  EXPECT_FALSE(null.To(DType::kF64)->defined());
  EXPECT_FALSE(null.To(DeviceType::kMeta)->defined());
  EXPECT_FALSE(null.ToHost()->defined());
  EXPECT_EQ(null.ToString(), "null");
}

TEST(Tensor, ErrorsNameSizes) {
  EXPECT_THAT(std::string(Tensor::Empty({-2}, DType::kF32).status().message()), HasSubstr("-2"));
  EXPECT_THAT(
      std::string(
          Tensor::FromVector(std::vector<double>{1, 2}, {3}, DType::kF32).status().message()),
      ::testing::AllOf(HasSubstr("2"), HasSubstr("[3]")));
}

TEST(Tensor, MetaHasShapeAndNoMemory) {
  const Tensor t = Tensor::Empty({1 << 20, 1 << 20}, DType::kF32, DeviceType::kMeta).value();
  EXPECT_EQ(t.data(), nullptr);
  EXPECT_EQ(t.Slice(0, 5, 10).shape(), Shape({10, 1 << 20}));
  Fill(t, 1);
  Copy(t, t.Transpose(0, 1));
}

// Every dtype into every other, over strided source and destination.
TEST(Move, CopyConvertsAnyTypeOverAnyStrides) {
  const std::vector<double> values = {0, 1, -1, 2.5, -2.5, 100.7, 3, 127};
  for (int s = 0; s < kNumDTypes; ++s) {
    for (int d = 0; d < kNumDTypes; ++d) {
      const auto from = static_cast<DType>(s), to = static_cast<DType>(d);
      if (from != DType::kBool && to == DType::kU8) continue;  // negative to unsigned: undefined
      const Tensor src = Tensor::FromVector(values, {2, 4}, from).value().Transpose(0, 1);
      const Tensor dst = Tensor::Full({4, 4}, to, 0).value().Slice(1, 0, 2, 2);
      Copy(src, dst);
      const std::vector<double> have = src.ToVector<double>(), got = dst.ToVector<double>();
      for (size_t i = 0; i < have.size(); ++i) {
        double want = have[i];
        if (to == DType::kBool) want = want != 0;
        if (IsIntegral(to) && to != DType::kBool) want = std::trunc(want);
        if (to == DType::kBF16) want = ToFloat(ToBFloat16(static_cast<float>(want)));
        if (to == DType::kF16) want = ToFloat(ToHalf(static_cast<float>(want)));
        if (to == DType::kF32) want = static_cast<float>(want);
        EXPECT_EQ(got[i], want) << std::string(Name(from)) << " to " << std::string(Name(to));
      }
    }
  }
}

// Of every size of an element; more than whole tiles in some orders, less than one in others.
TEST(Move, BigTransposedCopies) {
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kI32, DType::kF64}) {
    const auto size = static_cast<size_t>(SizeOf(dtype));
    for (const Shape& shape : {Shape{67, 130, 9}, Shape{3, 140, 150}}) {
      const Tensor src = Tensor::Empty(shape, dtype).value();
      auto* bytes = static_cast<unsigned char*>(src.data());
      for (size_t i = 0; i < static_cast<size_t>(src.numel()) * size; ++i) {
        bytes[i] = static_cast<unsigned char>(i * 37 + (i >> 8));
      }
      for (const auto& order : {std::array<int, 3>{2, 1, 0}, {1, 0, 2}, {0, 2, 1}, {2, 0, 1}}) {
        const Tensor p = src.Permute(order);
        const Tensor c = p.Clone().value();
        ASSERT_TRUE(c.is_contiguous());
        int64_t wrong = 0;
        const auto* data = static_cast<const unsigned char*>(c.data());
        for (int64_t i = 0; i < p.size(0); ++i) {
          for (int64_t j = 0; j < p.size(1); ++j) {
            for (int64_t k = 0; k < p.size(2); ++k, data += size) {
              const int64_t at = i * p.strides()[0] + j * p.strides()[1] + k * p.strides()[2];
              wrong += std::memcmp(data, bytes + static_cast<size_t>(at) * size, size) != 0;
            }
          }
        }
        EXPECT_EQ(wrong, 0) << std::string(Name(dtype));
      }
    }
  }
}

// Runs of every length beside whole blocks, of every size of an element: what lies around stays.
// From 8 MiB on copies go past the caches, by whole lines: to any byte of a line, and no further.
TEST(Move, CopiesPastTheCachesEndWhereTheyShould) {
  constexpr int64_t kLeast = 8 << 20;
  const Tensor src = Tensor::Empty({kLeast + 200}, DType::kU8).value();
  auto* from = static_cast<uint8_t*>(src.data());
  for (int64_t i = 0; i < src.numel(); ++i) from[i] = static_cast<uint8_t>(i * 31 + i / 256);
  const Tensor dst = Tensor::Empty({kLeast + 400}, DType::kU8).value();
  auto* to = static_cast<uint8_t*>(dst.data());
  for (const auto& [at, start, more] : {std::array<int64_t, 3>{0, 0, 0},
                                        {1, 3, 0},
                                        {63, 0, 1},
                                        {64, 7, 63},
                                        {100, 64, 65},
                                        {130, 1, 127}}) {
    const int64_t n = kLeast + more;
    std::memset(to, 7, static_cast<size_t>(dst.numel()));
    Copy(src.Slice(0, start, n), dst.Slice(0, at, n));
    EXPECT_EQ(std::memcmp(to + at, from + start, static_cast<size_t>(n)), 0) << at;
    EXPECT_TRUE(std::all_of(to, to + at, [](uint8_t x) { return x == 7; })) << at;
    EXPECT_TRUE(std::all_of(to + at + n, to + dst.numel(), [](uint8_t x) { return x == 7; })) << at;
  }
}

TEST(Move, RunsOfEveryLength) {
  for (const DType dtype : {DType::kU8, DType::kBF16, DType::kI32, DType::kF64}) {
    const Tensor src = Iota({200}, dtype);
    for (int64_t n = 1; n <= 150; ++n) {
      const int64_t start = n % 7;
      const Tensor dst = Tensor::Full({200}, dtype, 255).value();
      Copy(src.Slice(0, start, n), dst.Slice(0, 5, n));
      const std::vector<double> from = src.ToVector<double>(), got = dst.ToVector<double>();
      int64_t wrong = 0;
      for (int64_t i = 0; i < 200; ++i) {
        const bool inside = i >= 5 && i < 5 + n;
        const double want = inside ? from[static_cast<size_t>(i - 5 + start)] : 255;
        wrong += got[static_cast<size_t>(i)] != want;
      }
      EXPECT_EQ(wrong, 0) << n << " of " << std::string(Name(dtype));
    }
  }
}

// What lies side by side is converted in blocks, a short way where no element of them is rare: with
// the bits that each element gets alone. Blocks of usual numbers, with a rare one somewhere, and of
// any bits at all.
TEST(Move, BlocksConvertAsTheirElementsDo) {
  constexpr int64_t kN = 64 * 40 + 13;
  const double rare[] = {std::nan(""), INFINITY, -INFINITY, 0x1p31, -0x1p31,       0x1p31 - 1,
                         -0x1p31 - 1,  0x1p63,   1e300,     65504,  65520,         -65519.996,
                         0x1p-24,      0x1p-25,  1e-40,     -0.0,   0x1.018000p+0, 0x1.008000p+0};
  uint64_t state = 1;
  for (int s = 0; s < kNumDTypes; ++s) {
    const auto from = static_cast<DType>(s);
    const auto size = static_cast<size_t>(SizeOf(from));
    std::vector<double> values;
    for (int64_t i = 0; i < kN; ++i) values.push_back(static_cast<double>(i % 997) * 0.37 - 150);
    for (size_t i = 0; i < std::size(rare); ++i) values[i * 67] = rare[i];
    const Tensor src = Tensor::FromVector(values, {kN}, from).value();
    auto* bytes = static_cast<unsigned char*>(src.data());
    const bool any_bits = IsFloating(from);
    for (size_t i = 64 * 30 * size; any_bits && i < static_cast<size_t>(kN) * size; ++i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      bytes[i] = static_cast<unsigned char>(state >> 56);
    }
    const Tensor apart = Tensor::Full({kN, 2}, from, 0).value().Slice(1, 0, 1);
    for (int64_t i = 0; i < kN; ++i) {
      std::memcpy(static_cast<char*>(apart.data()) + 2 * static_cast<size_t>(i) * size,
                  bytes + static_cast<size_t>(i) * size, size);
    }
    for (int d = 0; d < kNumDTypes; ++d) {
      const auto to = static_cast<DType>(d);
      const Tensor got = Tensor::Empty({kN}, to).value();
      const Tensor want = Tensor::Empty({kN}, to).value();
      Copy(src, got);
      Copy(apart.Select(1, 0), want);
      EXPECT_EQ(std::memcmp(got.data(), want.data(), static_cast<size_t>(kN * SizeOf(to))), 0)
          << std::string(Name(from)) << " to " << std::string(Name(to));
    }
  }
}

TEST(Move, FillIntIsExact) {
  const Tensor t = Tensor::Empty({3}, DType::kI64).value();
  FillInt(t, (int64_t{1} << 60) + 1);
  EXPECT_EQ(t.ToVector<int64_t>()[2], (int64_t{1} << 60) + 1);
}

TEST(Move, Reductions) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16, DType::kI64,
                            DType::kI32, DType::kU8}) {
    const auto make = [&](std::vector<double> v) {
      return Tensor::FromVector(v, {4}, dtype).value();
    };
    const Tensor x = make({1, 5, 3, 2});
    const auto apply = [&](ReduceOp op) {
      const Tensor acc = make({2, 2, 2, 2});
      ReduceInPlace(acc, x, op);
      return acc.ToVector<double>();
    };
    EXPECT_THAT(apply(ReduceOp::kSum), ElementsAre(3, 7, 5, 4));
    EXPECT_THAT(apply(ReduceOp::kMax), ElementsAre(2, 5, 3, 2));
    EXPECT_THAT(apply(ReduceOp::kMin), ElementsAre(1, 2, 2, 2));
    EXPECT_THAT(apply(ReduceOp::kProd), ElementsAre(2, 10, 6, 4));
  }
  const Tensor nan = Tensor::Full({1}, DType::kF32, std::nan("")).value();
  const Tensor one = Tensor::Full({1}, DType::kF32, 1).value();
  ReduceInPlace(one, nan, ReduceOp::kMax);
  EXPECT_TRUE(std::isnan(one.ToVector<double>()[0]));
}

TEST(Move, AddInPlaceOverStrides) {
  const Tensor acc = Iota({3, 4}), x = Iota({4, 3}).Transpose(0, 1);
  AddInPlace(acc, x);
  EXPECT_THAT(acc.ToVector<double>(), ElementsAre(0, 4, 8, 12, 5, 9, 13, 17, 10, 14, 18, 22));
}

}  // namespace
}  // namespace dtensor::tensor_test
