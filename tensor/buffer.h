// Buffer: counted memory with a version counter, and the caching allocator a rank owns.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {

struct Block;  // what the allocator of a device knows of one piece of memory (device_memory.h)
class Event;

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
  virtual absl::Status Take(int64_t bytes, void** data, Block** block) = 0;
  virtual void Give(void* data, Block* block, int64_t bytes) = 0;
  virtual void RecordUse(Block*, const Event&) {}
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
    rep_->version = o.rep_->version;
    rep_->recorded_version = o.rep_->recorded_version;
  }

  Buffer(const Buffer& o) : rep_(o.rep_) { Ref(); }
  Buffer(Buffer&& o) noexcept : rep_(o.rep_) { o.rep_ = nullptr; }
  Buffer& operator=(Buffer o) noexcept {
    std::swap(rep_, o.rep_);
    return *this;
  }
  ~Buffer() { Unref(); }

  explicit operator bool() const { return rep_ != nullptr; }
  void* data() const { return rep_ ? rep_->data : nullptr; }
  int64_t bytes() const { return rep_ ? rep_->bytes : 0; }
  // Counts in-place writes; shared by all views.
  uint64_t version() const { return rep_ ? rep_->version : 0; }
  void BumpVersion() const {
    if (rep_) ++rep_->version;
  }
  // The version that the last in-place op recorded by autograd made; 0 if there was none.
  uint64_t recorded_version() const { return rep_ ? rep_->recorded_version : 0; }
  void MarkRecorded() const {
    if (rep_) rep_->recorded_version = rep_->version;
  }
  // Says that work which another stream than the current one was given reads or writes the memory
  // until `event`: freed, it is not handed out before.
  void RecordUse(const Event& event) const {
    if (rep_ && rep_->block != nullptr) rep_->allocator->RecordUse(rep_->block, event);
  }
  bool SharesWith(const Buffer& o) const { return rep_ == o.rep_; }
  const void* identity() const { return rep_; }  // equal for all that share it, while one lives
  // True if this handle is the only one.
  bool unique() const { return rep_ && rep_->refs.load(std::memory_order_acquire) == 1; }

 private:
  struct Rep {
    std::atomic<int64_t> refs{1};
    void* data = nullptr;
    int64_t bytes = 0;
    uint64_t version = 0, recorded_version = 0;
    Allocator* allocator = nullptr;  // null: no memory, device meta
    Block* block = nullptr;          // null on the CPU
  };
  void Ref() const {
    if (rep_) rep_->refs.fetch_add(1, std::memory_order_relaxed);
  }
  void Unref() {
    if (rep_ && rep_->refs.fetch_sub(1, std::memory_order_acq_rel) == 1) Destroy(rep_);
  }
  static void Destroy(Rep* rep);
  Rep* rep_ = nullptr;
};

}  // namespace dtensor
