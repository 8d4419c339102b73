// Happens-before among the threads of a launch, and the accesses that it does not order.
//
// Each thread has an epoch that grows with all it publishes. A thread knows, of blocks and of
// single threads, up to which epoch their accesses are before its own: barriers, and fences with
// atomics or volatile accesses, pass that on.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "tests/cusim/ptx.h"

namespace cusim {

// Epochs that are known: of all threads of a block, and of single threads beyond that.
struct Known {
  std::map<uint32_t, uint32_t> blocks, threads;
  void Join(const Known& other);
};
using KnownPtr = std::shared_ptr<const Known>;
KnownPtr Joined(const KnownPtr& a, const KnownPtr& b);

struct ThreadClock {
  uint32_t epoch = 1;
  KnownPtr known;
  // From the last fence: what a relaxed write publishes, and how far.
  KnownPtr fenced;
  Scope fenced_scope = Scope::kWeak;
  bool told_host = false;  // wrote to memory of the host since the last fence of the system
  // What relaxed reads have seen, which the next fence makes known: of its block, and of all.
  KnownPtr seen_block, seen_device;
};

class BlockClocks {
 public:
  BlockClocks(uint32_t block, uint32_t threads) : block_(block), threads_(threads) {}
  ThreadClock& of(uint32_t thread) { return threads_[thread]; }
  uint32_t count() const { return static_cast<uint32_t>(threads_.size()); }
  uint32_t block() const { return block_; }
  // All that `threads` (numbers within the block) did is before all that they do next.
  void Meet(const std::vector<uint32_t>& threads);
  // What `thread` has done and knows; it enters a new epoch.
  KnownPtr Publish(uint32_t thread);

 private:
  uint32_t block_, time_ = 1;
  std::vector<ThreadClock> threads_;
};

// What was published at addresses, by releases.
class SyncMap {
 public:
  void Release(uint64_t address, uint32_t block, Scope scope, const KnownPtr& known);
  // What a read of `scope` by a thread of `block` sees: of its block and of the device.
  struct Seen {
    KnownPtr block, device;
  };
  Seen Look(uint64_t address, uint32_t block, Scope scope) const;
  bool empty() const { return places_.empty(); }

 private:
  struct PlaceState {
    KnownPtr device;
    std::map<uint32_t, KnownPtr> blocks;
  };
  std::unordered_map<uint64_t, PlaceState> places_;
};

// The last accesses of each byte or word.
struct Stamp {
  enum Kind : uint8_t { kNobody, kThread, kWarp, kBlock };
  uint32_t who = 0, epoch = 0;  // a thread, or the first of a warp or block
  Kind kind = kNobody;
  Scope strong = Scope::kWeak;  // of atomics and volatile accesses
};
struct Cell {
  Stamp write, reads[2];
};

class ShadowMap {
 public:
  explicit ShadowMap(uint32_t block_threads) : block_threads_(block_threads) {}
  struct Conflict {
    Stamp other;
    bool other_wrote;
  };
  // Notes an access of `thread` (of the grid) and gives the earlier one that nothing orders before
  // it, if any. Of readers that nothing orders two groups are kept: with more a race may be missed,
  // none is invented.
  bool Note(uint64_t address, int bytes, uint32_t thread, const ThreadClock& clock, bool write,
            bool update, Scope strong, Conflict* conflict);
  // "thread 3 of block 1"
  std::string NameOf(const Stamp& stamp) const;

 private:
  struct Page {
    bool bytes = false;       // a cell per byte, not per word
    std::vector<Cell> cells;  // of 256 bytes
  };
  bool Before(const Stamp& stamp, uint32_t thread, const ThreadClock& clock) const;
  bool MayMeet(const Stamp& stamp, uint32_t thread, Scope strong) const;
  bool NoteCell(Cell* cell, uint32_t thread, const ThreadClock& clock, bool write, bool update,
                Scope strong, Conflict* conflict);
  void NoteRead(Cell* cell, uint32_t thread, const ThreadClock& clock, Scope strong);
  uint32_t BlockOf(uint32_t thread) const { return thread / block_threads_; }

  uint32_t block_threads_;
  std::unordered_map<uint64_t, Page> pages_;
  uint64_t last_at_ = ~0ull;
  Page* last_ = nullptr;
};

}  // namespace cusim
