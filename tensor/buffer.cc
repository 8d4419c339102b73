#include "tensor/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensor/memory_report.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

thread_local constinit MemoryReportFn memory_report = nullptr;

constexpr int64_t kAlignment = 64;
constexpr int64_t kSmallLimit = 4096;  // above it, classes grow by eighths of a power of two
constexpr int kNumClasses = 512;

// Size classes: multiples of 64 up to 4 KiB, then 8 per doubling (at most 1/8 wasted).
int ClassOf(int64_t bytes) {
  if (bytes <= kSmallLimit) return static_cast<int>((bytes + kAlignment - 1) / kAlignment);
  const int log = 63 - __builtin_clzll(static_cast<uint64_t>(bytes - 1));  // 2^log < bytes
  const int eighth = static_cast<int>((bytes - 1) >> (log - 3)) - 8;       // 0..7
  return 65 + (log - 12) * 8 + eighth;
}
int64_t BytesOf(int size_class) {
  if (size_class <= 64) return std::max<int64_t>(1, size_class) * kAlignment;
  const int log = 12 + (size_class - 65) / 8, eighth = (size_class - 65) % 8;
  return (int64_t{8} + eighth + 1) << (log - 3);
}

// What the cache may hold beyond what is used: half of the most that ever was, and always this.
constexpr int64_t kFreeCacheBytes = int64_t{1} << 20;

// Free blocks keep the next one of their list in their first words.
struct FreeBlock {
  FreeBlock* next;
  int size_class;
};

class CachingAllocator final : public Allocator {
 public:
  CachingAllocator() : owner_(std::this_thread::get_id()) {}
  ~CachingAllocator() override {
    CollectRemote();
    FreeAll();
  }

  AllocatorStats stats() const override {
    AllocatorStats s;
    s.in_use_bytes = in_use_.load(std::memory_order_relaxed);
    s.peak_bytes = peak_;
    s.reserved_bytes = reserved_;
    s.allocations = allocations_;
    return s;
  }
  void ResetPeak() override { peak_ = in_use_.load(std::memory_order_relaxed); }
  void ReleaseCached() override {
    CollectRemote();
    FreeAll();
  }
  void SetLimit(int64_t bytes) override {
    limit_ = bytes;
    CollectRemote();
    if (limit_ > 0) Trim(limit_);
  }

 protected:
  absl::StatusOr<void*> Take(int64_t bytes) override {
    const int c = ClassOf(bytes);
    const int64_t size = BytesOf(c);
    const int64_t in_use = in_use_.load(std::memory_order_relaxed) + size;
    if (limit_ > 0 && in_use > limit_) return OutOfMemory(bytes, "the limit is reached");
    if (remote_.load(std::memory_order_relaxed) != nullptr) CollectRemote();
    void* block = free_[c];
    if (block != nullptr) {
      free_[c] = free_[c]->next;
    } else {
      block = FromSystem(size, in_use);
      if (block == nullptr) return OutOfMemory(bytes, "the system has no more");
    }
    ++allocations_;
    in_use_.fetch_add(size, std::memory_order_relaxed);
    if (in_use > peak_) peak_ = in_use;
#ifndef NDEBUG
    std::memset(block, 0xCB, static_cast<size_t>(size));
#endif
    return block;
  }

  void Give(void* data, int64_t bytes) override {
    const int c = ClassOf(bytes);
    in_use_.fetch_sub(BytesOf(c), std::memory_order_relaxed);
    if (std::this_thread::get_id() == owner_) {
      Push(data, c);
      return;
    }
    auto* block = static_cast<FreeBlock*>(data);
    block->size_class = c;
    block->next = remote_.load(std::memory_order_relaxed);
    while (!remote_.compare_exchange_weak(block->next, block, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
  }

 private:
  void Push(void* data, int c) {
    auto* block = static_cast<FreeBlock*>(data);
    block->next = free_[c];
    free_[c] = block;
  }

  // `in_use` counts the new block. Cached blocks of other sizes make way first where they would be
  // too many: one tensor that grows slowly would otherwise leave all its sizes behind.
  void* FromSystem(int64_t size, int64_t in_use) {
    most_ = std::max({most_, peak_, in_use});
    int64_t reservable = std::max(most_ + most_ / 2, kFreeCacheBytes);
    if (limit_ > 0) reservable = std::min(reservable, limit_);
    Trim(reservable - size);
    void* block = std::aligned_alloc(kAlignment, static_cast<size_t>(size));
    if (block == nullptr) {
      FreeAll();  // what is cached in other classes may be enough
      block = std::aligned_alloc(kAlignment, static_cast<size_t>(size));
    }
    if (block != nullptr) reserved_ += size;
    return block;
  }

  void CollectRemote() {
    FreeBlock* block = remote_.exchange(nullptr, std::memory_order_acquire);
    while (block != nullptr) {
      FreeBlock* next = block->next;
      Push(block, block->size_class);
      block = next;
    }
  }

  // Gives cached blocks back, the largest first, until no more than this is reserved.
  void Trim(int64_t reservable) {
    for (int c = kNumClasses - 1; c >= 0 && reserved_ > reservable; --c) {
      while (free_[c] != nullptr && reserved_ > reservable) {
        std::free(std::exchange(free_[c], free_[c]->next));
        reserved_ -= BytesOf(c);
      }
    }
  }
  void FreeAll() { Trim(0); }

  absl::Status OutOfMemory(int64_t bytes, const char* why) const {
    const absl::Status status = RankLocal(absl::ResourceExhaustedError(absl::StrCat(
        "cannot allocate ", bytes, " bytes: ", why, " (", in_use_.load(std::memory_order_relaxed),
        " bytes in use, peak ", peak_, limit_ > 0 ? absl::StrCat(", limit ", limit_) : "", ")")));
    return memory_report == nullptr ? status : WithReport(status, memory_report());
  }

  const std::thread::id owner_;
  FreeBlock* free_[kNumClasses] = {};
  std::atomic<int64_t> in_use_{0};
  int64_t peak_ = 0, reserved_ = 0, allocations_ = 0, limit_ = 0;
  int64_t most_ = 0;                         // ever in use, as far as FromSystem knows
  std::atomic<FreeBlock*> remote_{nullptr};  // given back by other threads
};

class CountingAllocator final : public Allocator {
 public:
  AllocatorStats stats() const override {
    AllocatorStats s = stats_;
    s.in_use_bytes = in_use_.load(std::memory_order_relaxed);
    return s;
  }
  void ResetPeak() override { stats_.peak_bytes = in_use_.load(std::memory_order_relaxed); }
  void ReleaseCached() override {}
  void SetLimit(int64_t) override {}

 protected:
  absl::StatusOr<void*> Take(int64_t bytes) override {
    const int64_t size = BytesOf(ClassOf(bytes));
    const int64_t in_use = in_use_.fetch_add(size, std::memory_order_relaxed) + size;
    stats_.peak_bytes = std::max(stats_.peak_bytes, in_use);
    ++stats_.allocations;
    return nullptr;
  }
  void Give(void*, int64_t bytes) override {
    in_use_.fetch_sub(BytesOf(ClassOf(bytes)), std::memory_order_relaxed);
  }

 private:
  AllocatorStats stats_;
  std::atomic<int64_t> in_use_{0};  // memory may be freed from any thread
};

}  // namespace

ScopedMemoryReport::ScopedMemoryReport(MemoryReportFn report)
    : outer_(std::exchange(memory_report, report)) {}
ScopedMemoryReport::~ScopedMemoryReport() { memory_report = outer_; }

std::shared_ptr<Allocator> Allocator::CreateCounting() {
  return std::make_shared<CountingAllocator>();
}
std::shared_ptr<Allocator> Allocator::Create() { return std::make_shared<CachingAllocator>(); }

absl::StatusOr<Buffer> Buffer::Allocate(const std::shared_ptr<Allocator>& allocator,
                                        int64_t bytes) {
  Buffer buffer;
  DT_RETURN_IF_ERROR(AllocateInto(allocator, bytes, &buffer));
  return buffer;
}

absl::Status Buffer::AllocateInto(const std::shared_ptr<Allocator>& allocator, int64_t bytes,
                                  Buffer* out) {
  auto rep = std::make_unique<Rep>();
  absl::StatusOr<void*> data = allocator->Take(bytes);
  if (!data.ok()) return std::move(data).status();
  rep->data = *data;
  rep->bytes = bytes;
  rep->allocator = allocator;
  out->rep_ = rep.release();
  return absl::OkStatus();
}

Buffer Buffer::Meta(int64_t bytes) {
  Buffer buffer;
  buffer.rep_ = new Rep;
  buffer.rep_->bytes = bytes;
  return buffer;
}

void Buffer::Destroy(Rep* rep) {
  if (rep->allocator) rep->allocator->Give(rep->data, rep->bytes);
  delete rep;
}

}  // namespace dtensor
