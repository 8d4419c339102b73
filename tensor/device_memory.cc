#include "dtensor/tensor/device_memory.h"

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/device_graph.h"
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

 protected:
  DeviceAllocator(std::shared_ptr<PhysicalDevice> device, const StreamHandle* current)
      : Allocator(/*caches=*/true),
        device_(std::move(device)),
        current_(current),
        where_(absl::StrCat(" on ", device_->table().name)) {}
  ~DeviceAllocator() override {
    Trim(0);
    for (void* arena : arenas_) (void)device_->table().segment_free(device_->handle(), arena);
    for (DeviceBlock* block : blocks_) delete block;
  }

  // Its caller has the memory in use: whoever takes it next comes after that.
  void RecordUse(MemoryBlock* block, const Event& event) override {
    std::lock_guard<std::mutex> lock(uses_);
    auto& uses = static_cast<DeviceBlock*>(block)->uses;
    const auto done = [](const Event& e) { return e.Done(); };
    uses.erase(std::remove_if(uses.begin(), uses.end(), done), uses.end());
    uses.push_back(event);
    block->awaited = true;
  }

  void Await(MemoryBlock* block) override {
    auto& uses = static_cast<DeviceBlock*>(block)->uses;
    for (const Event& use : uses) use.OrderBefore(*current_);
    uses.clear();
    block->awaited = false;
  }

  MemoryBlock* Make(int c) override {
    const int64_t size = SizeClassBytes(c);
    const bool small = size < kLargeBytes;
    if (small && arena_left_ >= size) return FromArena(size);
    most_ = std::max({most_, peak_, in_use_bytes() + size});
    const int64_t reservable =
        std::max(Reservable(std::max(most_ + most_ / 2, 4 * kArenaBytes)), kArenaBytes);
    const int64_t wanted = small ? kArenaBytes : size;
    // What is free now may be what a graph works on that is being captured.
    const bool may_free = DeviceGraph::Captured() == 0;
    if (may_free) Trim(reservable - wanted);
    void* memory = nullptr;
    const auto take = [&] { return device_->table().segment(device_->handle(), wanted, &memory); };
    int error = take();
    if (error != 0 && may_free) {
      Trim(0);
      error = take();
    }
    if (error != 0) {
      // A device that has failed gives no memory either, and that is no want of it.
      if (error != device_->table().no_memory) Throw(device_->Check(error, "taking memory"));
      return nullptr;
    }
    reserved_ += wanted;
    if (small) {
      arenas_.push_back(memory);
      arena_ = static_cast<char*>(memory);
      arena_left_ = wanted;
      return FromArena(size);
    }
    return NewBlock(static_cast<char*>(memory));
  }

  MemoryBlock* FromArena(int64_t size) {
    arena_left_ -= size;
    return NewBlock(std::exchange(arena_, arena_ + size));
  }
  MemoryBlock* NewBlock(char* data) {
    blocks_.push_back(new DeviceBlock);
    blocks_.back()->data = data;
    return blocks_.back();
  }

  // Gives back large segments only. Waits for the work that uses them: for where memory is short,
  // or the rank is done.
  void Trim(int64_t reservable) override {
    for (int c = kNumSizeClasses - 1; c >= SizeClassOf(kLargeBytes); --c) {
      while (reserved_ > reservable) {
        MemoryBlock* const block = free_.Take(c);
        if (block == nullptr) break;
        Unmake(block);
      }
    }
  }
  void Unmake(MemoryBlock* block) override {
    (void)device_->table().segment_free(device_->handle(), block->data);
    reserved_ -= block->size;
    blocks_.erase(std::find(blocks_.begin(), blocks_.end(), block));
    delete static_cast<DeviceBlock*>(block);
  }
  absl::string_view where() const override { return where_; }

  const std::shared_ptr<PhysicalDevice> device_;
  const StreamHandle* const current_;  // the rank's, while it takes memory
  const std::string where_;
  std::mutex uses_;  // of blocks
  std::vector<DeviceBlock*> blocks_;
  std::vector<void*> arenas_;
  char* arena_ = nullptr;  // what is left of the last
  int64_t arena_left_ = 0;
  int64_t most_ = 0;  // ever in use, as far as Make knows
};

}  // namespace

std::shared_ptr<Allocator> CreateDeviceAllocator(std::shared_ptr<PhysicalDevice> device,
                                                 const StreamHandle* current) {
  return DeviceAllocator::Create(std::move(device), current);
}

}  // namespace dtensor
