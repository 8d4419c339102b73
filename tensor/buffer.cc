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
  CachingAllocator() : Allocator(/*caches=*/true) {}

 protected:
  ~CachingAllocator() override { Trim(0); }

  // Cached blocks of other sizes make way first where they would be too many: one tensor that grows
  // slowly would otherwise leave all its sizes behind.
  MemoryBlock* Make(int size_class) override {
    const int64_t size = SizeClassBytes(size_class);
    most_ = std::max({most_, peak_, in_use_bytes() + size});
    Trim(Reservable(std::max(most_ + most_ / 2, kFreeCacheBytes)) - size);
    auto block = std::make_unique<MemoryBlock>();
    block->data = NewMemory(size);
    if (block->data == nullptr) {
      Trim(0);  // what is cached in other classes may be enough
      block->data = NewMemory(size);
      if (block->data == nullptr) return nullptr;
    }
    reserved_ += size;
    return block.release();
  }
  void Unmake(MemoryBlock* block) override {
    std::free(block->data);
    reserved_ -= block->size;
    delete block;
  }
  void Trim(int64_t reservable) override {
    for (int c = kNumSizeClasses - 1; c >= 0 && reserved_ > reservable; --c) {
      while (reserved_ > reservable) {
        MemoryBlock* const block = free_.Take(c);
        if (block == nullptr) break;
        Unmake(block);
      }
    }
  }
#ifndef NDEBUG
  void Scramble(MemoryBlock* block) override {
    std::memset(block->data, 0xCB, static_cast<size_t>(block->size));
  }
#endif

 private:
  int64_t most_ = 0;  // ever in use, as far as Make knows
};

class CountingAllocator final : public Allocator {
 public:
  CountingAllocator() : Allocator(/*caches=*/false) {}

 protected:
  MemoryBlock* Make(int) override { return new MemoryBlock; }
  void Unmake(MemoryBlock* block) override { delete block; }
};

}  // namespace

ScopedMemoryReport::ScopedMemoryReport(MemoryReportFn report)
    : state_(RankState::Current()), outer_(std::exchange(state_.memory_report, report)) {}
ScopedMemoryReport::~ScopedMemoryReport() { state_.memory_report = outer_; }
absl::Status WithMemoryReport(const absl::Status& status) {
  const RankState* state = RankState::IfAny();
  const bool silent = state == nullptr || state->memory_report == nullptr;
  return silent ? status : WithReport(status, absl::StrCat("\n", state->memory_report()));
}

std::shared_ptr<Allocator> Allocator::Owned(Allocator* allocator) {
  return std::shared_ptr<Allocator>(allocator, [](Allocator* a) { a->Release(1); });
}
std::shared_ptr<Allocator> Allocator::CreateCounting() { return Owned(new CountingAllocator); }
std::shared_ptr<Allocator> Allocator::Create() { return Owned(new CachingAllocator); }

void Allocator::SetLimit(int64_t bytes) {
  limit_ = bytes > 0 ? bytes : kNoLimit;
  if (bytes > 0) Trim(bytes);
}

// `block` is what the free list had, or null.
absl::Status Allocator::TakeSlowly(int size_class, int64_t bytes, MemoryBlock** block) {
  const int64_t size = SizeClassBytes(size_class);
  if (in_use_bytes() + size > limit_) {
    if (*block != nullptr) free_.Give(*block);
    return OutOfMemory(bytes, "the limit is reached");
  }
  if (*block != nullptr) {
    Await(*block);
    return absl::OkStatus();
  }
  *block = Make(size_class);
  if (*block == nullptr) {
    return OutOfMemory(bytes,
                       where().empty() ? "the system has no more" : "the device has no more");
  }
  (*block)->size = size;
  (*block)->size_class = size_class;
  return absl::OkStatus();
}

absl::Status Allocator::OutOfMemory(int64_t bytes, absl::string_view why) const {
  return WithMemoryReport(RankLocal(absl::ResourceExhaustedError(
      absl::StrCat("cannot allocate ", bytes, " bytes", where(), ": ", why, " (", in_use_bytes(),
                   " bytes in use, peak ", peak_,
                   limit_ != kNoLimit ? absl::StrCat(", limit ", limit_) : "", ")"))));
}

absl::StatusOr<Buffer> Buffer::Allocate(const std::shared_ptr<Allocator>& allocator,
                                        int64_t bytes) {
  Buffer buffer;
  DT_RETURN_IF_ERROR(AllocateInto(allocator, bytes, &buffer));
  return buffer;
}

Buffer Buffer::Meta(int64_t bytes) {
  Buffer buffer;
  buffer.block_ = new MemoryBlock;
  buffer.block_->bytes = bytes;
  return buffer;
}

void Allocator::Drop(MemoryBlock* block) {
  const int64_t size = block->size;
  Unmake(block);
  Release(size);
}
void Allocator::Delete(Allocator* allocator) { delete allocator; }

void Buffer::Destroy(MemoryBlock* block) {
  if (block->allocator != nullptr) return block->allocator->Give(block);
  delete block;
}

}  // namespace dtensor
