#include "dtensor/tensor/buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "dtensor/tensor/tensor.h"

namespace dtensor::buffer_test {
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

// What the cache may hold: half of the most that was ever in use, or the first MiB.
void ExpectBounded(const AllocatorStats& stats, int64_t most_in_use, int64_t limit) {
  EXPECT_LE(stats.reserved_bytes, std::max<int64_t>(most_in_use * 3 / 2, 1 << 20));
  if (limit > 0) {
    EXPECT_LE(stats.reserved_bytes, limit);
  }
}

TEST(Allocator, OneTensorThatGrowsSlowlyLeavesLittleBehind) {
  const auto allocator = Allocator::Create();
  for (double size = 1 << 12; size < 32e6; size *= 1.05) {
    const Buffer b = Buffer::Allocate(allocator, static_cast<int64_t>(size)).value();
    ExpectBounded(allocator->stats(), allocator->stats().peak_bytes, 0);
  }
  allocator->SetLimit(4 << 20);
  EXPECT_LE(allocator->stats().reserved_bytes, 4 << 20);
  EXPECT_TRUE(Buffer::Allocate(allocator, 3 << 20).ok());
}

TEST(Allocator, ReservedBytesAreBoundedWhateverIsAskedFor) {
  std::mt19937_64 random(1);
  for (const int64_t limit : {int64_t{0}, int64_t{6} << 20}) {
    const auto allocator = Allocator::Create();
    allocator->SetLimit(limit);
    std::vector<Buffer> held;
    int64_t most = 0, refused = 0;
    for (int i = 0; i < 20000; ++i) {
      if (!held.empty() && random() % 100 < 52) {
        std::swap(held[random() % held.size()], held.back());
        held.pop_back();
      } else {
        const int64_t bytes = static_cast<int64_t>(uint64_t{1} << (random() % 21)) + 17;
        absl::StatusOr<Buffer> b = Buffer::Allocate(allocator, bytes);
        refused += b.ok() ? 0 : 1;
        if (b.ok()) held.push_back(*std::move(b));
      }
      if (i % 5000 == 0) allocator->ResetPeak();  // measuring changes nothing
      most = std::max(most, allocator->stats().in_use_bytes);
      ExpectBounded(allocator->stats(), most, limit);
    }
    EXPECT_EQ(limit > 0, refused > 0);
  }
}

// What comes back in every step is kept: no step asks the system again.
TEST(Allocator, ASteadyStepIsServedFromTheCache) {
  const auto allocator = Allocator::Create();
  const auto step = [&] {
    std::vector<Buffer> layers;
    for (int i = 0; i < 8; ++i) {
      layers.push_back(Buffer::Allocate(allocator, 1 << 20).value());
      Buffer::Allocate(allocator, 3 << 19).value();  // for a moment
    }
    std::vector<const void*> places;
    for (const Buffer& b : layers) places.push_back(b.data());
    std::sort(places.begin(), places.end());
    return places;
  };
  const auto first = step();
  const int64_t reserved = allocator->stats().reserved_bytes;
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(step(), first);
    EXPECT_EQ(allocator->stats().reserved_bytes, reserved);
  }
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
}  // namespace dtensor::buffer_test
