// The floor on CUDA: copies and fills, what orders streams and memory, errors of kernels, devices.
// The stand-in reports what nothing orders.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

constexpr DeviceType kCuda = DeviceType::kCuda;

RankDevice& Cuda() { return *RankDevices::Current().Get(kCuda).value(); }

Tensor NumbersOnCuda(int64_t n) {
  std::vector<float> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(static_cast<float>(i));
  return Tensor::FromVector(values, {n}).value().To(kCuda).value();
}

// Vectors are moved only where both sides begin at one.
TEST(CudaFloor, CopiesConvertsAndFillsFromAnyElementOn) {
  constexpr DType kTypes[] = {DType::kF64, DType::kF32, DType::kBF16, DType::kI32, DType::kU8};
  const Tensor numbers = NumbersOnCuda(64);
  for (const DType from : kTypes) {
    const Tensor source = numbers.To(from).value();
    for (const DType to : kTypes) {
      for (const auto& [at, put] : {std::pair{0, 0}, {1, 0}, {0, 1}, {1, 1}, {3, 7}, {8, 4}}) {
        const Tensor target = Tensor::Empty({64}, to, kCuda).value();
        Fill(target, 99);
        Copy(source.Slice(0, at, 48), target.Slice(0, put, 48));
        Fill(target.Slice(0, put + 46, 1), 77);
        std::vector<int64_t> expected(64, 99);
        for (int i = 0; i < 48; ++i) expected[static_cast<size_t>(put + i)] = at + i;
        expected[static_cast<size_t>(put + 46)] = 77;
        EXPECT_EQ(target.ToVector<int64_t>(), expected) << at << " " << put;
      }
    }
  }
}

TEST(CudaFloor, FillsAndTurnsWhatHasGaps) {
  const Tensor target = Tensor::Empty({4, 6}, DType::kF32, kCuda).value();
  Fill(target, 1);
  Fill(target.Slice(1, 2, 1), 2);                  // a column
  Fill(target.Slice(0, 3, 1).Transpose(0, 1), 3);  // a row
  Copy(NumbersOnCuda(4), target.Select(1, 5));
  EXPECT_EQ(target.ToVector<int64_t>(),
            (std::vector<int64_t>{1, 1, 2, 1, 1, 0, 1, 1, 2, 1, 1, 1,  //
                                  1, 1, 2, 1, 1, 2, 3, 3, 3, 3, 3, 3}));
}

// A launch takes 8 dims, and reaches so many elements; of other arrays there are several.
TEST(CudaFloor, TakesMoreDimsThanALaunch) {
  constexpr int kDims = 12;
  Tensor turned = NumbersOnCuda(1 << kDims).View(Shape(kDims, 2)).value();
  for (int d = 0; d < kDims / 2; ++d) turned = turned.Transpose(d, kDims - 1 - d);
  const std::vector<int64_t> all = turned.ToVector<int64_t>();
  ASSERT_EQ(all.size(), 1 << kDims);
  for (int64_t i = 0; i < 1 << kDims; ++i) {
    int64_t mirrored = 0;
    for (int d = 0; d < kDims; ++d) mirrored |= (i >> d & 1) << (kDims - 1 - d);
    ASSERT_EQ(all[static_cast<size_t>(i)], mirrored) << i;
  }
}
TEST(CudaFloor, ReachesFurtherThanALaunch) {
  constexpr int64_t kFar = (int64_t{1} << 29) + 4;
  const Tensor whole = Tensor::Empty({2 * kFar + 8}, DType::kBF16, kCuda).value();
  const Tensor rows = whole.AsStrided({3, 5}, {kFar, 1}, 2);
  Copy(NumbersOnCuda(15).View({3, 5}).value(), rows);
  EXPECT_EQ(rows.ToVector<int64_t>(), NumbersOnCuda(15).ToVector<int64_t>());
  EXPECT_EQ(rows.Select(0, 2).ToVector<int64_t>(), (std::vector<int64_t>{10, 11, 12, 13, 14}));
}

TEST(CudaFloor, AnyByteButZeroIsTrueWhenItIsCopied) {
  const uint8_t bytes[] = {0, 1, 2, 255};
  const Tensor source = Tensor::Empty({4}, DType::kBool, kCuda).value();
  Cuda().Upload(bytes, sizeof(bytes), source.data());
  const Tensor target = Tensor::Empty({4}, DType::kBool, kCuda).value();
  Copy(source, target);
  uint8_t copied[4] = {};
  ASSERT_TRUE(Cuda().Download(target.data(), sizeof(copied), copied).ok());
  EXPECT_THAT(copied, testing::ElementsAre(0, 1, 1, 1));
}

TEST(CudaFloor, NothingIsCopiedFilledAndAddedToo) {
  const Tensor none = Tensor::Empty({0, 3}, DType::kF32, kCuda).value();
  Fill(none, 1);
  AddInPlace(none, none.To(DType::kI64).value().To(DType::kF32).value());
  Copy(none.Clone().value(), none);
  EXPECT_TRUE(none.ToVector<float>().empty());
  const TensorRef ref = none.ref();  // the table takes it, too
  const DeviceTable& table = Cuda().table();
  const double one = 1;
  EXPECT_EQ(table.fill(Cuda().stream(), &ref, &one, DType::kF64), 0);
  EXPECT_EQ(table.copy(Cuda().stream(), &ref, &ref), 0);
  EXPECT_EQ(table.reduce(Cuda().stream(), 1, &ref, 1, &ref, static_cast<int>(ReduceOp::kSum)), 0);
  EXPECT_EQ(NumbersOnCuda(4).ToVector<int64_t>()[3], 3);  // the device goes on
}

TEST(CudaFloor, ScopesNest) {
  const Tensor t = NumbersOnCuda(64);
  Tensor doubled, fourfold;
  for (int i = 0; i < 2; ++i) {  // of a stream that is new, and of one that was there
    {
      const StreamScope scope(Cuda());
      doubled = t.Clone().value();
      AddInPlace(doubled, t);
      {
        const StreamScope inner(Cuda());
        fourfold = doubled.Clone().value();
        AddInPlace(fourfold, doubled);
      }
      AddInPlace(fourfold, t);
    }
    AddInPlace(doubled, fourfold);
    EXPECT_EQ(doubled.ToVector<double>()[5], 35);
  }
}

TEST(CudaFloor, MemoryThatAnotherStreamUsesIsHandedOutAfterIt) {
  const StreamHandle outer = Cuda().stream();
  const Tensor kept = Tensor::Empty({64}, DType::kF32, kCuda).value();
  StreamHandle side = nullptr;
  ASSERT_EQ(Cuda().table().stream(Cuda().device()->handle(), &side), 0);
  Event used;
  const void* memory = nullptr;
  {
    const Tensor t = NumbersOnCuda(64);
    memory = t.data();
    const Event ready = Cuda().Record();
    ready.OrderBefore(side);
    const TensorRef from = t.ref(), to = kept.ref();
    ASSERT_EQ(Cuda().table().copy(side, &from, &to), 0);
    used = Event::Record(Cuda().device(), side);
    t.buffer().RecordUse(used);
  }
  const Tensor next = Tensor::Empty({64}, DType::kF32, kCuda).value();
  EXPECT_EQ(next.data(), memory);
  Fill(next, -1);
  used.OrderBefore(outer);
  EXPECT_EQ(kept.ToVector<double>()[9], 9);
  ASSERT_EQ(Cuda().table().stream_free(Cuda().device()->handle(), side), 0);
}

// What a function of two indices, of which the first is good, says on CUDA; "": nothing.
std::string SaidOf(DTensor (*fn)(const DTensor& table, const DTensor& ids), const DTensor& table,
                   int64_t id) {
  try {
    (void)fn(table, FromVector(std::vector<int64_t>{1, id}, {2})).ToVector<float>();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}
// The word for errors is used again: of a longer one nothing is left.
TEST(CudaFloor, ErrorsOfKernelsAreSaidAsTheyAreOneAfterTheOther) {
  const auto run = [](RankContext&) -> absl::Status {
    const auto rows =
        +[](const DTensor& table, const DTensor& ids) { return embedding(ids, table); };
    const auto loss =
        +[](const DTensor& table, const DTensor& ids) { return cross_entropy(table, ids); };
    const DTensor table = zeros({10, 4}), logits = zeros({2, 10});
    for (const int64_t id :
         {int64_t{-1234567890123}, int64_t{12345678}, int64_t{-5}, int64_t{10}}) {
      EXPECT_EQ(SaidOf(rows, table, 9), "");
      EXPECT_THAT(SaidOf(rows, table, id),
                  testing::HasSubstr(absl::StrCat("[embedding] index ", id,
                                                  " is out of range for 10 rows (position 1) ("
                                                  "found on the device")));
      EXPECT_EQ(SaidOf(loss, logits, 9), "");
      EXPECT_THAT(SaidOf(loss, logits, id),
                  testing::HasSubstr(absl::StrCat(
                      "target ", id, " at position 1 is out of range for 10 classes (found")));
    }
    return absl::OkStatus();
  };
  const absl::Status status = RunSpmd(1, run, {.device = kCuda});
  EXPECT_TRUE(status.ok()) << status;
}

// No case line calls this op.
TEST(CudaFloor, SliceBackwardPutsGradientsWhereTheyWereTaken) {
  const auto run = [](RankContext&) -> absl::Status {
    const DTensor dy = FromVector(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
    const DTensor dx =
        Call1(GetOp("slice_backward"), {&dy}, {IntAttr(1), IntAttr(1), IntAttr(2), IntAttr(7)});
    EXPECT_THAT(dx.ToVector<float>(),
                testing::ElementsAre(0, 1, 0, 2, 0, 3, 0, 0, 4, 0, 5, 0, 6, 0));
    return absl::OkStatus();
  };
  for (const DeviceType device : {DeviceType::kCpu, kCuda}) {
    const absl::Status status = RunSpmd(1, run, {.device = device});
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A program may use another device itself.
TEST(CudaFloor, TheDeviceOfTheThreadStays) {
  const Tensor t = NumbersOnCuda(64);  // loads the plugin, on device 0
  void* const runtime = dlopen("libcudart.so.13", RTLD_LAZY | RTLD_NOLOAD);
  ASSERT_NE(runtime, nullptr);
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(runtime, "cudaGetDeviceCount"));
  const auto set = reinterpret_cast<int (*)(int)>(dlsym(runtime, "cudaSetDevice"));
  const auto get = reinterpret_cast<int (*)(int*)>(dlsym(runtime, "cudaGetDevice"));
  int devices = 0, current = 0;
  ASSERT_EQ(count(&devices), 0);
  ASSERT_GE(devices, 2) << "tests/cuda_suite.cmake runs it where there are more";
  ASSERT_EQ(set(1), 0);
  const Tensor large = Tensor::Empty({1 << 20}, DType::kF32, kCuda).value();  // memory of its own
  EXPECT_EQ(get(&current), 0);
  EXPECT_EQ(current, 1);
  try {  // a launch is refused
    Fill(large.Slice(0, 0, 64), 1);
    ADD_FAILURE() << "was launched";
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), testing::HasSubstr("another device than its rank's"));
  }
  ASSERT_EQ(set(0), 0);
  const Tensor part = large.Slice(0, 0, 64);
  Copy(t, part);
  AddInPlace(part, t);
  EXPECT_EQ(part.ToVector<int64_t>()[63], 126);
}

// Where the device has no more, what lies free goes back to it first: here 64 of its 84 MiB
// (tests/cuda_suite.cmake).
TEST(CudaFloor, FreeMemoryGoesBackBeforeThereIsNone) {
  const auto take = [](int64_t mib) {
    return Tensor::Empty({mib << 20}, DType::kU8, kCuda).value();
  };
  {
    const Tensor a = take(32), b = take(32);
  }
  const Tensor c = take(28);
  Fill(c, 1);
  EXPECT_EQ(c.Slice(0, 0, 1).ToVector<int64_t>()[0], 1);
}

// What goes up comes by pinned memory of the host, which is used again.
TEST(CudaFloor, UploadsDoNotOvertakeEachOther) {
  std::vector<Tensor> all;
  for (int i = 0; i < 40; ++i) {
    all.push_back(Tensor::FromVector(std::vector<float>(1000, static_cast<float>(i)), {1000})
                      .value()
                      .To(kCuda)
                      .value());
  }
  for (int i = 0; i < 40; ++i) EXPECT_EQ(all[static_cast<size_t>(i)].ToVector<double>()[999], i);
}

}  // namespace
}  // namespace dtensor
