#include "tensor/buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <vector>

#include "tensor/tensor.h"

namespace dtensor {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Allocator, CountsAndReuses) {
  const auto allocator = Allocator::Create();
  const void* first;
  {
    const Buffer a = Buffer::Allocate(allocator, 1000).value();
    const Buffer b = Buffer::Allocate(allocator, 3000).value();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(a.data()) % 64, 0u);
    EXPECT_GE(allocator->stats().in_use_bytes, 4000);
    first = a.data();
  }
  EXPECT_EQ(allocator->stats().in_use_bytes, 0);
  EXPECT_GE(allocator->stats().peak_bytes, 4000);
  const int64_t reserved = allocator->stats().reserved_bytes;
  const Buffer again = Buffer::Allocate(allocator, 1000).value();
  EXPECT_EQ(again.data(), first);
  EXPECT_EQ(allocator->stats().reserved_bytes, reserved);
  EXPECT_EQ(allocator->stats().allocations, 3);
  allocator->ResetPeak();
  EXPECT_EQ(allocator->stats().peak_bytes, allocator->stats().in_use_bytes);
  allocator->ReleaseCached();
  EXPECT_LT(allocator->stats().reserved_bytes, reserved);
}

TEST(Allocator, LimitNamesBytes) {
  const auto allocator = Allocator::Create();
  allocator->SetLimit(1 << 20);
  const Buffer a = Buffer::Allocate(allocator, 1 << 19).value();
  const absl::Status status = Buffer::Allocate(allocator, 1 << 20).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("1048576"), HasSubstr("524288")));
  EXPECT_TRUE(Buffer::Allocate(allocator, 1 << 18).ok());  // still usable
}

TEST(Allocator, ImpossibleSizesAreErrors) {
  const auto allocator = Allocator::Create();
  EXPECT_FALSE(Buffer::Allocate(allocator, int64_t{1} << 47).ok());
  EXPECT_TRUE(Buffer::Allocate(allocator, 0).ok());
}

TEST(Allocator, OtherThreadsMayFree) {
  const auto allocator = Allocator::Create();
  for (int round = 0; round < 200; ++round) {
    std::vector<Buffer> mine;
    for (int i = 0; i < 10; ++i) mine.push_back(Buffer::Allocate(allocator, 100 * (i + 1)).value());
    std::thread other([theirs = std::move(mine)]() mutable { theirs.clear(); });
    const Buffer meanwhile = Buffer::Allocate(allocator, 555).value();
    std::memset(meanwhile.data(), 1, 555);
    other.join();
  }
  EXPECT_EQ(allocator->stats().in_use_bytes, 0);
  EXPECT_LT(allocator->stats().reserved_bytes, 1 << 20);
}

TEST(Allocator, LivesAsLongAsItsBuffers) {
  Buffer survivor;
  {
    const auto allocator = Allocator::Create();
    survivor = Buffer::Allocate(allocator, 64).value();
  }
  std::memset(survivor.data(), 7, 64);
  EXPECT_EQ(static_cast<char*>(survivor.data())[63], 7);
}

TEST(Buffer, VersionIsSharedByAllHandles) {
  const Tensor t = Tensor::Full({4}, DType::kF32, 1).value();
  const Tensor view = t.Slice(0, 1, 2);
  const uint64_t before = t.buffer().version();
  view.buffer().BumpVersion();
  EXPECT_EQ(t.buffer().version(), before + 1);
  EXPECT_TRUE(t.buffer().SharesWith(view.buffer()));
  EXPECT_FALSE(t.buffer().unique());
  EXPECT_EQ(Buffer::Meta(100).data(), nullptr);
  EXPECT_EQ(Buffer::Meta(100).bytes(), 100);
}

}  // namespace
}  // namespace dtensor
