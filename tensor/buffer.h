// Buffer: counted memory with a version counter, and the caching allocator a rank owns.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>

#include "absl/base/attributes.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/free_lists.h"
#include "dtensor/tensor/kernel.h"
#include "dtensor/tensor/size_class.h"

namespace dtensor {

class Event;

struct AllocatorStats {
  int64_t in_use_bytes = 0;    // handed out and alive
  int64_t peak_bytes = 0;      // largest in_use_bytes since the last ResetPeak
  int64_t reserved_bytes = 0;  // taken from the system, cached ones included
  int64_t allocations = 0;     // calls
};

// Allocator of one rank, for one device. Take is for the owner's thread; memory may be freed from
// any thread. Lives until its last buffer is gone.
class Allocator {
 public:
  // Caches, for the CPU. Debug builds fill new memory with 0xCB.
  static std::shared_ptr<Allocator> Create();
  // Counts and gives no memory (null pointers): what a run would take.
  static std::shared_ptr<Allocator> CreateCounting();
  Allocator(const Allocator&) = delete;
  AllocatorStats stats() const { return {in_use_bytes(), peak_, reserved_, allocations_}; }
  void ResetPeak() { peak_ = in_use_bytes(); }
  void ReleaseCached() { Trim(0); }
  // Refuses to go beyond this many bytes in use (ResourceExhausted); 0 = no limit.
  void SetLimit(int64_t bytes);

 protected:
  friend class Buffer;
  // One that caches keeps what is given back, and makes new blocks where it has none of a size.
  explicit Allocator(bool caches) : caches_(caches) {}
  virtual ~Allocator() = default;
  // Of the owner; it goes when the last buffer has gone too.
  static std::shared_ptr<Allocator> Owned(Allocator* allocator);

  // A new block of a size class. Null where there is no more memory.
  virtual MemoryBlock* Make(int size_class) = 0;
  virtual void Unmake(MemoryBlock* block) = 0;  // gives it back for good
  // Gives cached blocks back, the largest first, until no more than this is reserved.
  virtual void Trim(int64_t reservable) { (void)reservable; }
  // Says that work other than what the taker queues reads or writes the block until `event`.
  virtual void RecordUse(MemoryBlock*, const Event&) {}
  // Makes the taker's work come after what uses the block still (`awaited`).
  virtual void Await(MemoryBlock*) {}
#ifndef NDEBUG
  virtual void Scramble(MemoryBlock*) {}
#endif
  virtual absl::string_view where() const { return ""; }  // " on cuda"

  int64_t in_use_bytes() const { return held_.load(std::memory_order_relaxed) & ~int64_t{1}; }
  // The most that may be reserved, of what the policy wants.
  int64_t Reservable(int64_t wanted) const { return std::min(wanted, limit_); }
  absl::Status OutOfMemory(int64_t bytes, absl::string_view why) const;

  FreeLists free_;
  int64_t peak_ = 0, reserved_ = 0;

 private:
  static constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();
  absl::Status Take(int64_t bytes, MemoryBlock** block);
  // Null where it would have to be made, awaited or refused.
  MemoryBlock* TakeAtHand(int64_t bytes);
  void CountTaken(MemoryBlock* block);
  absl::Status TakeSlowly(int size_class, int64_t bytes, MemoryBlock** block);
  void Give(MemoryBlock* block);
  void Drop(MemoryBlock* block);  // the same of one that does not cache
  void Release(int64_t size) {
    if (held_.fetch_sub(size, std::memory_order_acq_rel) == size) Delete(this);
  }
  static void Delete(Allocator* allocator);

  const bool caches_;
  // Bytes handed out, which are even, and one for the owner: at 0 the allocator deletes itself.
  std::atomic<int64_t> held_{1};
  int64_t allocations_ = 0, limit_ = kNoLimit;
};

// Counted handle on one block of memory, 64-byte aligned. Copies share the memory and the version.
// The reference count is atomic; the contents are not guarded.
class Buffer {
 public:
  Buffer() = default;  // null
  // Errors: ResourceExhausted naming bytes asked and bytes in use.
  static absl::StatusOr<Buffer> Allocate(const std::shared_ptr<Allocator>& allocator,
                                         int64_t bytes);
  // The same into a null handle.
  static absl::Status AllocateInto(const std::shared_ptr<Allocator>& allocator, int64_t bytes,
                                   Buffer* out);
  // Null where the allocator has no free block of the size.
  static Buffer AtHand(const std::shared_ptr<Allocator>& allocator, int64_t bytes);
  // A buffer without memory (device meta): data() is null, bytes() as given.
  static Buffer Meta(int64_t bytes);
  // Takes over the versions of another buffer, which this one stands for.
  void CopyVersions(const Buffer& o) const {
    block_->version = o.block_->version;
    block_->recorded_version = o.block_->recorded_version;
  }

  Buffer(const Buffer& o) : block_(o.block_) { Ref(); }
  Buffer(Buffer&& o) noexcept : block_(o.block_) { o.block_ = nullptr; }
  Buffer& operator=(Buffer o) noexcept {
    std::swap(block_, o.block_);
    return *this;
  }
  ~Buffer() { Unref(); }

  explicit operator bool() const { return block_ != nullptr; }
  void* data() const { return block_ ? block_->data : nullptr; }
  int64_t bytes() const { return block_ ? block_->bytes : 0; }
  // Counts in-place writes; shared by all views.
  uint64_t version() const { return block_ ? block_->version : 0; }
  void BumpVersion() const {
    if (block_) ++block_->version;
  }
  // The version that the last in-place op recorded by autograd made; 0 if there was none.
  uint64_t recorded_version() const { return block_ ? block_->recorded_version : 0; }
  void MarkRecorded() const {
    if (block_) block_->recorded_version = block_->version;
  }
  // Says that work which another stream than the current one was given reads or writes the memory
  // until `event`: freed, it is not handed out before.
  void RecordUse(const Event& event) const {
    if (block_ && block_->allocator != nullptr) block_->allocator->RecordUse(block_, event);
  }
  bool SharesWith(const Buffer& o) const { return block_ == o.block_; }
  const void* identity() const { return block_; }  // equal for all that share it, while one lives
  // True if this handle is the only one.
  bool unique() const { return block_ && block_->refs.load(std::memory_order_acquire) == 1; }

 private:
  // Takes a block into use.
  ABSL_ATTRIBUTE_ALWAYS_INLINE Buffer(MemoryBlock* block, int64_t bytes, Allocator* allocator)
      : block_(block) {
    block->refs.store(1, std::memory_order_relaxed);
    block->bytes = bytes;
    block->version = block->recorded_version = 0;
    block->allocator = allocator;
  }
  void Ref() const {
    if (block_) block_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  ABSL_ATTRIBUTE_ALWAYS_INLINE void Unref() {
    if (block_ && block_->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) Destroy(block_);
  }
  static void Destroy(MemoryBlock* block);
  MemoryBlock* block_ = nullptr;
};

// --- the op path: inlined, or it would be a third of what a small op costs -----------------------

ABSL_ATTRIBUTE_ALWAYS_INLINE inline absl::Status Allocator::Take(int64_t bytes,
                                                                 MemoryBlock** taken) {
  const int size_class = SizeClassOf(bytes);
  MemoryBlock* block = free_.Take(size_class);
  if (block == nullptr || block->awaited || in_use_bytes() + block->size > limit_) [[unlikely]] {
    if (absl::Status status = TakeSlowly(size_class, bytes, &block); !status.ok()) return status;
  }
  CountTaken(block);
  *taken = block;
  return absl::OkStatus();
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline MemoryBlock* Allocator::TakeAtHand(int64_t bytes) {
  MemoryBlock* const block = free_.Take(SizeClassOf(bytes));
  if (block == nullptr) return nullptr;
  if (block->awaited || in_use_bytes() + block->size > limit_) [[unlikely]] {
    free_.Give(block);
    return nullptr;
  }
  CountTaken(block);
  return block;
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline void Allocator::CountTaken(MemoryBlock* block) {
  const int64_t size = block->size;
  const int64_t in_use = (held_.fetch_add(size, std::memory_order_relaxed) + size) & ~int64_t{1};
  if (in_use > peak_) peak_ = in_use;
  ++allocations_;
#ifndef NDEBUG
  Scramble(block);
#endif
}

inline void Allocator::Give(MemoryBlock* block) {
  if (!caches_) [[unlikely]]
    return Drop(block);
  const int64_t size = block->size;
  free_.Give(block);
  Release(size);
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline absl::Status Buffer::AllocateInto(
    const std::shared_ptr<Allocator>& allocator, int64_t bytes, Buffer* out) {
  MemoryBlock* block;
  if (absl::Status status = allocator->Take(bytes, &block); !status.ok()) return status;
  *out = Buffer(block, bytes, allocator.get());
  return absl::OkStatus();
}

ABSL_ATTRIBUTE_ALWAYS_INLINE inline Buffer Buffer::AtHand(
    const std::shared_ptr<Allocator>& allocator, int64_t bytes) {
  MemoryBlock* const block = allocator->TakeAtHand(bytes);
  return block == nullptr ? Buffer() : Buffer(block, bytes, allocator.get());
}

}  // namespace dtensor
