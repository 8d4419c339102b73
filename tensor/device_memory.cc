#include "dtensor/tensor/device_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/memory_report.h"
#include "dtensor/tensor/size_class.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

struct Block {
  char* data = nullptr;
  int size_class = 0;
  absl::InlinedVector<Event, 2> uses;  // by other streams than the rank's current one
  Block* next = nullptr;               // of the free list
};

namespace {

constexpr int64_t kArenaBytes = 4 << 20;          // small blocks are cut from these
constexpr int64_t kLargeBytes = kArenaBytes / 4;  // from here on a block is a segment of its own

class DeviceAllocator final : public Allocator {
 public:
  static std::shared_ptr<Allocator> Create(std::shared_ptr<PhysicalDevice> device,
                                           const StreamHandle* current) {
    return Owned(new DeviceAllocator(std::move(device), current));
  }

  AllocatorStats stats() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return {in_use_bytes(), peak_, reserved_, allocations_};
  }
  void ResetPeak() override {
    std::lock_guard<std::mutex> lock(mutex_);
    peak_ = in_use_bytes();
  }
  void ReleaseCached() override {
    std::lock_guard<std::mutex> lock(mutex_);
    Trim(0);
  }
  void SetLimit(int64_t bytes) override {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = bytes;
    if (limit_ > 0) Trim(limit_);
  }

 protected:
  DeviceAllocator(std::shared_ptr<PhysicalDevice> device, const StreamHandle* current)
      : device_(std::move(device)), current_(current) {}
  ~DeviceAllocator() override {
    Trim(0);
    for (void* arena : arenas_) (void)device_->table().segment_free(device_->handle(), arena);
    for (Block* block : blocks_) delete block;
  }

  absl::Status Take(int64_t bytes, void** data, Block** taken) override {
    absl::StatusOr<Block*> block = TakeBlock(bytes);
    if (!block.ok()) return WithMemoryReport(block.status());  // which asks for the stats
    *data = (*block)->data;
    *taken = *block;
    return absl::OkStatus();
  }

  void Give(void*, Block* block, int64_t) override {
    const int64_t size = SizeClassBytes(block->size_class);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      block->next = std::exchange(free_[block->size_class], block);
    }
    Release(size);
  }

  void RecordUse(Block* block, const Event& event) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto done = [](const Event& e) { return e.Done(); };
    block->uses.erase(std::remove_if(block->uses.begin(), block->uses.end(), done),
                      block->uses.end());
    block->uses.push_back(event);
  }

  void Close() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      current_ = &closed_;
    }
    Release(1);
  }

 private:
  absl::StatusOr<Block*> TakeBlock(int64_t bytes) {
    const int c = SizeClassOf(bytes);
    const int64_t size = SizeClassBytes(c);
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t in_use = in_use_bytes() + size;
    if (limit_ > 0 && in_use > limit_) return OutOfMemory(bytes, "the limit is reached");
    Block* block = FromCache(c);
    if (block == nullptr) {
      DT_ASSIGN_OR_RETURN(block, FromDevice(c, in_use));
      if (block == nullptr) return OutOfMemory(bytes, "the device has no more");
    }
    ++allocations_;
    Hold(size);
    peak_ = std::max(peak_, in_use);
    return block;
  }

  // A free block of the class, or null.
  Block* FromCache(int c) {
    Block* block = free_[c];
    if (block == nullptr) return nullptr;
    free_[c] = block->next;
    for (const Event& use : block->uses) use.OrderBefore(*current_);
    block->uses.clear();
    return block;
  }

  absl::StatusOr<Block*> FromDevice(int c, int64_t in_use) {
    const int64_t size = SizeClassBytes(c);
    const bool small = size < kLargeBytes;
    if (small && arena_left_ >= size) return FromArena(c);
    most_ = std::max({most_, peak_, in_use});
    int64_t reservable = std::max(most_ + most_ / 2, 4 * kArenaBytes);
    if (limit_ > 0) reservable = std::min(reservable, std::max(limit_, kArenaBytes));
    const int64_t wanted = small ? kArenaBytes : size;
    // What is free now may be what a graph works on that is being captured.
    const bool may_free = DeviceGraph::Captured() == 0;
    if (may_free) Trim(reservable - wanted);
    void* memory = nullptr;
    if (device_->table().segment(device_->handle(), wanted, &memory) != 0) {
      if (!may_free) return nullptr;
      Trim(0);
      if (device_->table().segment(device_->handle(), wanted, &memory) != 0) return nullptr;
    }
    reserved_ += wanted;
    if (small) {
      arenas_.push_back(memory);
      arena_ = static_cast<char*>(memory);
      arena_left_ = wanted;
      return FromArena(c);
    }
    return NewBlock(static_cast<char*>(memory), c);
  }

  Block* FromArena(int c) {
    const int64_t size = SizeClassBytes(c);
    arena_left_ -= size;
    return NewBlock(std::exchange(arena_, arena_ + size), c);
  }
  Block* NewBlock(char* data, int c) {
    blocks_.push_back(new Block);
    blocks_.back()->data = data;
    blocks_.back()->size_class = c;
    return blocks_.back();
  }

  // Gives large cached segments back, the largest first, until no more than this is reserved. Waits
  // for the work that uses them: only where memory is short, or the rank is done.
  void Trim(int64_t reservable) {
    for (int c = kNumSizeClasses - 1; c >= SizeClassOf(kLargeBytes); --c) {
      while (free_[c] != nullptr && reserved_ > reservable) {
        Block* block = free_[c];
        free_[c] = block->next;
        (void)device_->table().segment_free(device_->handle(), block->data);
        reserved_ -= SizeClassBytes(c);
        blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
        delete block;
      }
    }
  }

  absl::Status OutOfMemory(int64_t bytes, const char* why) const {
    return RankLocal(absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes on ", device_->table().name, ": ", why,
                     " (", in_use_bytes(), " bytes in use, peak ", peak_,
                     limit_ > 0 ? absl::StrCat(", limit ", limit_) : "", ")")));
  }

  const std::shared_ptr<PhysicalDevice> device_;
  mutable std::mutex mutex_;     // guards all below
  const StreamHandle* current_;  // the rank's
  const StreamHandle closed_ = nullptr;
  Block* free_[kNumSizeClasses] = {};
  std::vector<Block*> blocks_;
  std::vector<void*> arenas_;
  char* arena_ = nullptr;  // what is left of the last
  int64_t arena_left_ = 0;
  int64_t peak_ = 0, reserved_ = 0, allocations_ = 0, limit_ = 0, most_ = 0;
};

}  // namespace

std::shared_ptr<Allocator> CreateDeviceAllocator(std::shared_ptr<PhysicalDevice> device,
                                                 const StreamHandle* current) {
  return DeviceAllocator::Create(std::move(device), current);
}

}  // namespace dtensor
