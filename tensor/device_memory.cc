#include "dtensor/tensor/device_memory.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device_graph.h"
#include "dtensor/tensor/free_lists.h"
#include "dtensor/tensor/memory_report.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

namespace {

struct DeviceBlock : MemoryBlock {
  absl::InlinedVector<Event, 2> uses;  // by other streams than the rank's current one
};

constexpr int64_t kArenaBytes = 4 << 20;          // small blocks are cut from these
constexpr int64_t kLargeBytes = kArenaBytes / 4;  // from here on a block is a segment of its own

class DeviceAllocator final : public Allocator {
 public:
  static std::shared_ptr<Allocator> Create(std::shared_ptr<PhysicalDevice> device,
                                           const StreamHandle* current) {
    return Owned(new DeviceAllocator(std::move(device), current));
  }

  AllocatorStats stats() const override { return {in_use_bytes(), peak_, reserved_, allocations_}; }
  void ResetPeak() override { peak_ = in_use_bytes(); }
  void ReleaseCached() override { Trim(0); }
  void SetLimit(int64_t bytes) override {
    limit_ = bytes;
    if (limit_ > 0) Trim(limit_);
  }

 protected:
  DeviceAllocator(std::shared_ptr<PhysicalDevice> device, const StreamHandle* current)
      : device_(std::move(device)), current_(current) {}
  ~DeviceAllocator() override {
    Trim(0);
    for (void* arena : arenas_) (void)device_->table().segment_free(device_->handle(), arena);
    for (DeviceBlock* block : blocks_) delete block;
  }

  absl::Status Take(int64_t bytes, MemoryBlock** taken) override {
    const int c = SizeClassOf(bytes);
    const int64_t size = SizeClassBytes(c);
    const int64_t in_use = in_use_bytes() + size;
    if (limit_ > 0 && in_use > limit_) return OutOfMemory(bytes, "the limit is reached");
    auto* block = static_cast<DeviceBlock*>(free_.Take(c));
    if (block == nullptr) {
      block = FromDevice(c, in_use);
      if (block == nullptr) return OutOfMemory(bytes, "the device has no more");
    } else if (!block->uses.empty()) {
      for (const Event& use : block->uses) use.OrderBefore(*current_);
      block->uses.clear();
    }
    ++allocations_;
    Hold(size);
    peak_ = std::max(peak_, in_use);
    *taken = block;
    return absl::OkStatus();
  }

  void Give(MemoryBlock* block) override {
    const int64_t size = SizeClassBytes(block->size_class);
    free_.Give(block);
    Release(size);
  }

  // Its caller has the memory in use: whoever takes it next comes after that.
  void RecordUse(MemoryBlock* block, const Event& event) override {
    std::lock_guard<std::mutex> lock(uses_);
    auto& uses = static_cast<DeviceBlock*>(block)->uses;
    const auto done = [](const Event& e) { return e.Done(); };
    uses.erase(std::remove_if(uses.begin(), uses.end(), done), uses.end());
    uses.push_back(event);
  }

  void Close() override { Release(1); }

 private:
  [[gnu::noinline]] DeviceBlock* FromDevice(int c, int64_t in_use) {
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

  DeviceBlock* FromArena(int c) {
    const int64_t size = SizeClassBytes(c);
    arena_left_ -= size;
    return NewBlock(std::exchange(arena_, arena_ + size), c);
  }
  DeviceBlock* NewBlock(char* data, int c) {
    blocks_.push_back(new DeviceBlock);
    blocks_.back()->data = data;
    blocks_.back()->size_class = c;
    return blocks_.back();
  }

  // Gives large cached segments back, the largest first, until no more than this is reserved. Waits
  // for the work that uses them: only where memory is short, or the rank is done.
  void Trim(int64_t reservable) {
    for (int c = kNumSizeClasses - 1; c >= SizeClassOf(kLargeBytes); --c) {
      while (reserved_ > reservable) {
        auto* const block = static_cast<DeviceBlock*>(free_.Take(c));
        if (block == nullptr) break;
        (void)device_->table().segment_free(device_->handle(), block->data);
        reserved_ -= SizeClassBytes(c);
        blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
        delete block;
      }
    }
  }

  absl::Status OutOfMemory(int64_t bytes, const char* why) const {
    return WithMemoryReport(RankLocal(absl::ResourceExhaustedError(
        absl::StrCat("cannot allocate ", bytes, " bytes on ", device_->table().name, ": ", why,
                     " (", in_use_bytes(), " bytes in use, peak ", peak_,
                     limit_ > 0 ? absl::StrCat(", limit ", limit_) : "", ")"))));
  }

  const std::shared_ptr<PhysicalDevice> device_;
  const StreamHandle* const current_;  // the rank's, while it takes memory
  FreeLists free_;
  std::mutex uses_;  // of blocks
  std::vector<DeviceBlock*> blocks_;
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
