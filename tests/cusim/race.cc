#include "tests/cusim/race.h"

#include <algorithm>

namespace cusim {
namespace {

void JoinInto(std::map<uint32_t, uint32_t>* into, const std::map<uint32_t, uint32_t>& from) {
  for (const auto& [who, epoch] : from) {
    uint32_t& have = (*into)[who];
    have = std::max(have, epoch);
  }
}

uint32_t Of(const std::map<uint32_t, uint32_t>& epochs, uint32_t who) {
  const auto it = epochs.find(who);
  return it == epochs.end() ? 0 : it->second;
}

}  // namespace

void Known::Join(const Known& other) {
  JoinInto(&blocks, other.blocks);
  JoinInto(&threads, other.threads);
}

KnownPtr Joined(const KnownPtr& a, const KnownPtr& b) {
  if (a == nullptr || a == b) return b;
  if (b == nullptr) return a;
  auto both = std::make_shared<Known>(*a);
  both->Join(*b);
  return both;
}

void BlockClocks::Meet(const std::vector<uint32_t>& threads) {
  auto known = std::make_shared<Known>();
  const Known* last = nullptr;
  for (const uint32_t t : threads) {  // most know the same: joined once
    const Known* const k = threads_[t].known.get();
    if (k != nullptr && k != last) known->Join(*k);
    last = k;
  }
  const uint32_t first = block_ * count();
  if (threads.size() == threads_.size()) {
    known->blocks[block_] = time_;
    known->threads.erase(known->threads.lower_bound(first),
                         known->threads.lower_bound(first + count()));
  } else {
    for (const uint32_t t : threads) known->threads[first + t] = threads_[t].epoch;
  }
  ++time_;
  for (const uint32_t t : threads) {
    threads_[t].known = known;
    threads_[t].epoch = time_;
  }
}

KnownPtr BlockClocks::Publish(uint32_t thread) {
  ThreadClock& clock = threads_[thread];
  auto known = clock.known ? std::make_shared<Known>(*clock.known) : std::make_shared<Known>();
  known->threads[block_ * count() + thread] = clock.epoch;
  clock.epoch = ++time_;
  return known;
}

void SyncMap::Release(uint64_t address, uint32_t block, Scope scope, const KnownPtr& known) {
  PlaceState& place = places_[address];
  KnownPtr& to = scope == Scope::kBlock ? place.blocks[block] : place.device;
  to = Joined(to, known);
}

SyncMap::Seen SyncMap::Look(uint64_t address, uint32_t block, Scope scope) const {
  const auto it = places_.find(address);
  if (it == places_.end()) return {};
  Seen seen;
  const auto own = it->second.blocks.find(block);
  if (own != it->second.blocks.end()) seen.block = own->second;
  if (scope != Scope::kBlock) seen.device = it->second.device;
  // What was released to the device by a thread of this block is in `device`; a read of block scope
  // sees it too, if only that part: the whole is taken.
  if (scope == Scope::kBlock) seen.block = Joined(seen.block, it->second.device);
  return seen;
}

bool ShadowMap::Before(const Stamp& stamp, uint32_t thread, const ThreadClock& clock) const {
  if (stamp.kind == Stamp::kThread && stamp.who == thread) return true;
  const Known* const known = clock.known.get();
  if (known == nullptr) return false;
  if (Of(known->blocks, BlockOf(stamp.who)) >= stamp.epoch) return true;
  if (stamp.kind == Stamp::kThread) return Of(known->threads, stamp.who) >= stamp.epoch;
  if (stamp.kind == Stamp::kBlock) return false;
  const uint32_t end = std::min(stamp.who + 32, (BlockOf(stamp.who) + 1) * block_threads_);
  for (uint32_t t = stamp.who; t < end; ++t) {
    if (t != thread && Of(known->threads, t) < stamp.epoch) return false;
  }
  return true;
}

// Atomics may meet each other where the scope of both takes in the other's thread.
bool ShadowMap::MayMeet(const Stamp& stamp, uint32_t thread, Scope strong) const {
  if (stamp.strong == Scope::kWeak || strong == Scope::kWeak) return false;
  return BlockOf(stamp.who) == BlockOf(thread) ||
         (stamp.strong != Scope::kBlock && strong != Scope::kBlock);
}

void ShadowMap::NoteRead(Cell* cell, uint32_t thread, const ThreadClock& clock, Scope strong) {
  const Stamp mine{thread, clock.epoch, Stamp::kThread, strong};
  Stamp* free = nullptr;
  for (Stamp& read : cell->reads) {
    if (read.kind == Stamp::kNobody || Before(read, thread, clock)) {
      if (free == nullptr) free = &read;
    }
  }
  if (free != nullptr) {
    *free = mine;
    return;
  }
  // Readers at once: kept as the warp or the block that they are of.
  const uint32_t block = BlockOf(thread) * block_threads_;
  const uint32_t warp = block + (thread - block) / 32 * 32;
  for (const bool whole : {false, true}) {
    const uint32_t first = whole ? block : warp, size = whole ? block_threads_ : 32;
    for (Stamp& read : cell->reads) {
      const bool within =
          read.who >= first && read.who - first < size && (whole || read.kind != Stamp::kBlock);
      if (!within) continue;
      read = {first, std::max(read.epoch, clock.epoch), whole ? Stamp::kBlock : Stamp::kWarp,
              std::min(read.strong, strong)};
      return;
    }
  }
  cell->reads[thread % 2] = mine;
}

bool ShadowMap::NoteCell(Cell* cell, uint32_t thread, const ThreadClock& clock, bool write,
                         bool update, Scope strong, Conflict* conflict) {
  bool found = false;
  const auto clashes = [&](const Stamp& other, bool other_wrote) {
    if (other.kind == Stamp::kNobody || MayMeet(other, thread, strong)) return;
    if (Before(other, thread, clock)) return;
    found = true;
    *conflict = {other, other_wrote};
  };
  clashes(cell->write, true);
  if (write || update) {
    for (const Stamp& read : cell->reads) clashes(read, false);
    cell->write = {thread, clock.epoch, Stamp::kThread, strong};
    cell->reads[0].kind = cell->reads[1].kind = Stamp::kNobody;
  } else {
    NoteRead(cell, thread, clock, strong);
  }
  return found;
}

bool ShadowMap::Note(uint64_t address, int bytes, uint32_t thread, const ThreadClock& clock,
                     bool write, bool update, Scope strong, Conflict* conflict) {
  const uint64_t at = address / 256;
  if (at != last_at_) {
    last_ = &pages_[at];
    last_at_ = at;
    if (last_->cells.empty()) last_->cells.resize(64);
  }
  Page& page = *last_;
  if (!page.bytes && (bytes < 4 || address % 4 != 0)) {
    std::vector<Cell> cells(256);
    for (size_t i = 0; i < 256; ++i) cells[i] = page.cells[i / 4];
    page.cells = std::move(cells);
    page.bytes = true;
  }
  const int unit = page.bytes ? 1 : 4;
  bool found = false;
  for (int i = 0; i < bytes; i += unit) {
    Cell& cell = page.cells[(address % 256 + i) / unit];
    found |= NoteCell(&cell, thread, clock, write, update, strong, conflict);
  }
  return found;
}

std::string ShadowMap::NameOf(const Stamp& stamp) const {
  const std::string block = "block " + std::to_string(BlockOf(stamp.who));
  if (stamp.kind == Stamp::kBlock) return block;
  const std::string in_block = std::to_string(stamp.who % block_threads_) + " of " + block;
  return (stamp.kind == Stamp::kWarp ? "the warp of thread " : "thread ") + in_block;
}

}  // namespace cusim
