// Buffer: counted memory with a version counter, and the caching allocator a rank owns.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

class Allocator;
class Event;

// One piece of memory. Its allocator makes the record with it and hands both out again and again.
struct MemoryBlock {
  std::atomic<int64_t> refs{1};  // of the handles
  void* data = nullptr;
  int64_t bytes = 0;                           // asked for
  uint64_t version = 0, recorded_version = 0;  // see Buffer
  Allocator* allocator = nullptr;              // null: no memory, device meta
  int size_class = 0;
  MemoryBlock* next = nullptr;  // of the free list
};

struct AllocatorStats {
  int64_t in_use_bytes = 0;    // handed out and alive
  int64_t peak_bytes = 0;      // largest in_use_bytes since the last ResetPeak
  int64_t reserved_bytes = 0;  // taken from the system, cached ones included
  int64_t allocations = 0;     // calls
};

// Caching allocator of one rank, for one device. Allocate is for the owner's thread; memory may be
// freed from any thread. Lives until its last buffer is gone. Debug builds fill new CPU memory with
// 0xCB.
class Allocator {
 public:
  static std::shared_ptr<Allocator> Create();  // for the CPU
  // Counts and gives no memory (null pointers): what a run would take.
  static std::shared_ptr<Allocator> CreateCounting();
  Allocator(const Allocator&) = delete;
  virtual AllocatorStats stats() const = 0;
  virtual void ResetPeak() = 0;
  virtual void ReleaseCached() = 0;
  // Refuses to go beyond this many bytes in use (ResourceExhausted); 0 = no limit.
  virtual void SetLimit(int64_t bytes) = 0;

 protected:
  friend class Buffer;
  Allocator() = default;
  virtual ~Allocator() = default;
  // Of the owner; it goes when the last buffer has gone too.
  static std::shared_ptr<Allocator> Owned(Allocator* allocator);
  virtual absl::Status Take(int64_t bytes, MemoryBlock** block) = 0;
  virtual void Give(MemoryBlock* block) = 0;
  virtual void RecordUse(MemoryBlock*, const Event&) {}
  virtual void Close() = 0;  // the owner has gone

  // Bytes handed out, and one for the owner: at 0 the allocator deletes itself.
  int64_t in_use_bytes() const { return held_.load(std::memory_order_relaxed) & ~int64_t{1}; }
  // The bytes in use with these; sizes are even.
  int64_t Hold(int64_t size) {
    return (held_.fetch_add(size, std::memory_order_relaxed) + size) & ~int64_t{1};
  }
  void Release(int64_t size) {
    if (held_.fetch_sub(size, std::memory_order_acq_rel) == size) delete this;
  }

 private:
  std::atomic<int64_t> held_{1};
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
  void Ref() const {
    if (block_) block_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  void Unref() {
    if (block_ && block_->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) Destroy(block_);
  }
  static void Destroy(MemoryBlock* block);
  MemoryBlock* block_ = nullptr;
};

}  // namespace dtensor
