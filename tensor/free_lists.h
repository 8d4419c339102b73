// Blocks of memory, and the free ones of an allocator by size class. The owner's thread takes and
// gives back without a lock; other threads give back to a list of their own, which the owner
// collects.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/base/attributes.h"
#include "dtensor/tensor/size_class.h"

namespace dtensor {

class Allocator;

// One piece of memory. Its allocator makes the record with it and hands both out again and again.
struct MemoryBlock {
  std::atomic<int64_t> refs{1};  // of the handles
  void* data = nullptr;
  int64_t bytes = 0;                           // asked for
  uint64_t version = 0, recorded_version = 0;  // see Buffer
  Allocator* allocator = nullptr;              // null: no memory, device meta
  int64_t size = 0;                            // of its class, in bytes
  int size_class = 0;
  bool awaited = false;         // others than its owner's stream may use it still
  MemoryBlock* next = nullptr;  // of the free list
};

// Made by the owner's thread; all but Give is for that one, and for who destroys the allocator when
// no one else knows it any more.
class FreeLists {
 public:
  void Give(MemoryBlock* block) {
    if (&thread_ == owner_) [[likely]] {
      Push(block);
      return;
    }
    block->next = remote_.load(std::memory_order_relaxed);
    while (!remote_.compare_exchange_weak(block->next, block, std::memory_order_release,
                                          std::memory_order_relaxed)) {
    }
  }
  // Null where there is none.
  ABSL_ATTRIBUTE_ALWAYS_INLINE MemoryBlock* Take(int size_class) {
    if (remote_.load(std::memory_order_relaxed) != nullptr) Collect();
    MemoryBlock* const block = free_[size_class];
    if (block != nullptr) free_[size_class] = block->next;
    return block;
  }

 private:
  void Collect() {
    MemoryBlock* block = remote_.exchange(nullptr, std::memory_order_acquire);
    while (block != nullptr) Push(std::exchange(block, block->next));
  }
  void Push(MemoryBlock* block) { block->next = std::exchange(free_[block->size_class], block); }

  static constinit inline thread_local char thread_ = 0;  // its address is the thread's
  const char* const owner_ = &thread_;
  MemoryBlock* free_[kNumSizeClasses] = {};
  std::atomic<MemoryBlock*> remote_{nullptr};  // given back by other threads
};

}  // namespace dtensor
