#include "dtensor/tensor/buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/free_lists.h"
#include "dtensor/tensor/memory_report.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kAlignment = 64;

// What the cache may hold beyond what is used: half of the most that ever was, and always this.
constexpr int64_t kFreeCacheBytes = int64_t{1} << 20;

// From here on blocks ask for large pages, where the system leaves it to programs: weights that a
// row is multiplied with are read a fifth faster.
constexpr int64_t kLargePages = int64_t{4} << 20;

void* NewMemory(int64_t size) {
  void* memory = std::aligned_alloc(kAlignment, static_cast<size_t>(size));
#ifdef MADV_HUGEPAGE
  if (memory != nullptr && size >= kLargePages) {
    const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + page - 1) / page * page;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + size) / page * page;
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // or as it was
  }
#endif
  return memory;
}

class CachingAllocator final : public Allocator {
 public:
  AllocatorStats stats() const override {
    AllocatorStats s;
    s.in_use_bytes = in_use_bytes();
    s.peak_bytes = peak_;
    s.reserved_bytes = reserved_;
    s.allocations = allocations_;
    return s;
  }
  void ResetPeak() override { peak_ = in_use_bytes(); }
  void ReleaseCached() override { Trim(0); }
  void SetLimit(int64_t bytes) override {
    limit_ = bytes;
    if (limit_ > 0) Trim(limit_);
  }

 protected:
  ~CachingAllocator() override { Trim(0); }
  void Close() override { Release(1); }

  absl::Status Take(int64_t bytes, MemoryBlock** taken) override {
    const int c = SizeClassOf(bytes);
    const int64_t size = SizeClassBytes(c);
    const int64_t in_use = in_use_bytes() + size;
    if (limit_ > 0 && in_use > limit_) return OutOfMemory(bytes, "the limit is reached");
    MemoryBlock* block = free_.Take(c);
    if (block == nullptr) {
      block = FromSystem(c, in_use);
      if (block == nullptr) return OutOfMemory(bytes, "the system has no more");
    }
    ++allocations_;
    Hold(size);
    if (in_use > peak_) peak_ = in_use;
#ifndef NDEBUG
    std::memset(block->data, 0xCB, static_cast<size_t>(size));
#endif
    *taken = block;
    return absl::OkStatus();
  }

  void Give(MemoryBlock* block) override {
    const int64_t size = SizeClassBytes(block->size_class);
    free_.Give(block);
    Release(size);
  }

 private:
  // `in_use` counts the new block. Cached blocks of other sizes make way first where they would be
  // too many: one tensor that grows slowly would otherwise leave all its sizes behind.
  MemoryBlock* FromSystem(int c, int64_t in_use) {
    const int64_t size = SizeClassBytes(c);
    most_ = std::max({most_, peak_, in_use});
    int64_t reservable = std::max(most_ + most_ / 2, kFreeCacheBytes);
    if (limit_ > 0) reservable = std::min(reservable, limit_);
    Trim(reservable - size);
    auto block = std::make_unique<MemoryBlock>();
    block->data = NewMemory(size);
    if (block->data == nullptr) {
      Trim(0);  // what is cached in other classes may be enough
      block->data = NewMemory(size);
      if (block->data == nullptr) return nullptr;
    }
    block->size_class = c;
    reserved_ += size;
    return block.release();
  }

  // Gives cached blocks back, the largest first, until no more than this is reserved.
  void Trim(int64_t reservable) {
    for (int c = kNumSizeClasses - 1; c >= 0 && reserved_ > reservable; --c) {
      while (reserved_ > reservable) {
        MemoryBlock* const block = free_.Take(c);
        if (block == nullptr) break;
        std::free(block->data);
        delete block;
        reserved_ -= SizeClassBytes(c);
      }
    }
  }

  absl::Status OutOfMemory(int64_t bytes, const char* why) const {
    return WithMemoryReport(RankLocal(absl::ResourceExhaustedError(absl::StrCat(
        "cannot allocate ", bytes, " bytes: ", why, " (", in_use_bytes(), " bytes in use, peak ",
        peak_, limit_ > 0 ? absl::StrCat(", limit ", limit_) : "", ")"))));
  }

  FreeLists free_;
  int64_t peak_ = 0, reserved_ = 0, allocations_ = 0, limit_ = 0;
  int64_t most_ = 0;  // ever in use, as far as FromSystem knows
};

class CountingAllocator final : public Allocator {
 public:
  AllocatorStats stats() const override {
    AllocatorStats s = stats_;
    s.in_use_bytes = in_use_bytes();
    return s;
  }
  void ResetPeak() override { stats_.peak_bytes = in_use_bytes(); }
  void ReleaseCached() override {}
  void SetLimit(int64_t) override {}

 protected:
  absl::Status Take(int64_t bytes, MemoryBlock** taken) override {
    *taken = new MemoryBlock;
    (*taken)->size_class = SizeClassOf(bytes);
    const int64_t in_use = Hold(SizeClassBytes((*taken)->size_class));
    stats_.peak_bytes = std::max(stats_.peak_bytes, in_use);
    ++stats_.allocations;
    return absl::OkStatus();
  }
  void Give(MemoryBlock* block) override {
    Release(SizeClassBytes(block->size_class));
    delete block;
  }
  void Close() override { Release(1); }

 private:
  AllocatorStats stats_;
};

}  // namespace

ScopedMemoryReport::ScopedMemoryReport(MemoryReportFn report)
    : state_(RankState::Current()), outer_(std::exchange(state_.memory_report, report)) {}
ScopedMemoryReport::~ScopedMemoryReport() { state_.memory_report = outer_; }
absl::Status WithMemoryReport(const absl::Status& status) {
  const RankState* state = RankState::IfAny();
  const bool silent = state == nullptr || state->memory_report == nullptr;
  return silent ? status : WithReport(status, "\n" + state->memory_report());
}

std::shared_ptr<Allocator> Allocator::Owned(Allocator* allocator) {
  return std::shared_ptr<Allocator>(allocator, [](Allocator* a) { a->Close(); });
}
std::shared_ptr<Allocator> Allocator::CreateCounting() { return Owned(new CountingAllocator); }
std::shared_ptr<Allocator> Allocator::Create() { return Owned(new CachingAllocator); }

absl::StatusOr<Buffer> Buffer::Allocate(const std::shared_ptr<Allocator>& allocator,
                                        int64_t bytes) {
  Buffer buffer;
  DT_RETURN_IF_ERROR(AllocateInto(allocator, bytes, &buffer));
  return buffer;
}

absl::Status Buffer::AllocateInto(const std::shared_ptr<Allocator>& allocator, int64_t bytes,
                                  Buffer* out) {
  MemoryBlock* block;
  DT_RETURN_IF_ERROR(allocator->Take(bytes, &block));
  block->refs.store(1, std::memory_order_relaxed);
  block->bytes = bytes;
  block->version = block->recorded_version = 0;
  block->allocator = allocator.get();
  out->block_ = block;
  return absl::OkStatus();
}

Buffer Buffer::Meta(int64_t bytes) {
  Buffer buffer;
  buffer.block_ = new MemoryBlock;
  buffer.block_->bytes = bytes;
  return buffer;
}

void Buffer::Destroy(MemoryBlock* block) {
  if (block->allocator != nullptr) return block->allocator->Give(block);
  delete block;
}

}  // namespace dtensor
