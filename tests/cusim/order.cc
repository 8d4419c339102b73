// What orders works of streams, what was touched without an order, and threads that wait for works
// which need others.
#include <algorithm>

#include "tests/cusim/runtime.h"

namespace cusim {

void Join(Clock* into, const Clock& from) {
  for (const auto& [stream, position] : from) {
    uint64_t& have = (*into)[stream];
    have = std::max(have, position);
  }
}

// With what works met that are before it: they were queued before that could be known.
Clock Runtime::Known(const Clock& clock) const {
  Clock known = clock;
  for (bool more = true; more;) {
    more = false;
    for (const auto& [id, stream] : streams_) {
      const auto at = known.find(id);
      if (at == known.end() || stream->met.empty()) continue;
      auto last = stream->met.rbegin();  // each knows what those before it do
      while (last != stream->met.rend() && last->first > at->second) ++last;
      if (last == stream->met.rend()) continue;
      const Clock before = known;
      Join(&known, last->second);
      more = more || known != before;
    }
  }
  return known;
}

void Runtime::Rendezvous(const Places& before, const Places& after) {
  Clock all;
  for (const auto& [stream, position] : before) {
    if (stream->done + 1 == position && !stream->queue.empty()) {
      Join(&all, Known(stream->queue.front().clock));
    }
  }
  // Of the works that meet themselves, only what was before them.
  for (const auto& [stream, position] : before) all[stream->id] = position - 1;
  for (const auto& [stream, position] : after) {
    Clock met = all;
    if (!stream->met.empty()) Join(&met, stream->met.back().second);
    stream->met.emplace_back(position, std::move(met));
  }
}

// The block of memory that is kept under one key; 0: not memory that works share.
uint64_t Runtime::BlockOf(uint64_t address) const {
  if (memory_.Owns(address)) {
    const Allocation* const a = memory_.Find(address);
    return a != nullptr ? a->address : 0;
  }
  auto it = pinned_.upper_bound(address);
  if (it == pinned_.begin()) return 0;
  --it;
  return Within(address, 1, it->first, it->second) ? it->first : 0;
}

void Runtime::Check(const std::string& name, int stream, uint64_t position, const Clock& clock,
                    const std::vector<Range>& ranges) {
  std::map<uint64_t, cusim::Use> by_block;
  for (const Range& r : ranges) {
    const uint64_t block = BlockOf(r.low);
    if (block == 0) continue;
    cusim::Use& use = by_block[block];
    (r.write ? use.writes : use.reads).push_back(r);
  }
  bool said = false;
  for (auto& [block, now] : by_block) {
    now.stream = stream;
    now.position = position;
    now.name = name;
    Tidy(&now.reads);
    Tidy(&now.writes);
    std::vector<cusim::Use>& uses = uses_[block];
    size_t kept = 0;
    for (size_t i = 0; i < uses.size(); ++i) {
      cusim::Use& old = uses[i];
      const auto known = clock.find(old.stream);
      const bool before =
          old.stream == stream || (known != clock.end() && known->second >= old.position);
      if (!before && !said && Clash(now, old)) {
        said = true;
        Say("stream race", name + " and " + old.name +
                               " use the same memory, at least one of them writes, and nothing "
                               "orders their streams");
      }
      // What is ordered before a use that covers it need not be asked again.
      if (before && Covers(now, old)) continue;
      if (kept != i) uses[kept] = std::move(old);
      ++kept;
    }
    uses.resize(kept);
    uses.push_back(std::move(now));
  }
}

// ---- Threads. ----

int Runtime::thread() {
  struct Presence {
    int id = 0;
    ~Presence() {
      if (id == 0) return;
      Runtime& r = Get();
      std::lock_guard<std::recursive_mutex> lock(r.mutex);
      r.gone_.insert(id);
      r.Notify();
    }
  };
  static thread_local Presence presence;
  static int threads = 0;  // under the mutex
  if (presence.id == 0) presence.id = ++threads;
  return presence.id;
}

void Runtime::Block(std::string why, std::vector<int> threads) {
  blocked_.why = std::move(why);
  blocked_.threads = std::move(threads);
}

void Runtime::Notify() {
  ++generation_;
  changed_.notify_all();
}

bool Runtime::WaitFor(const std::function<bool()>& done) {
  using std::chrono::steady_clock;
  const steady_clock::time_point limit = steady_clock::now() + patience_;
  const int me = thread();
  bool is_done = false;
  while (!(is_done = done()) && sticky_ == cudaSuccess) {
    const auto blocked = blocked_;
    waiting_[me] = generation_;
    const auto in_vain = [&](int other) {
      const auto it = waiting_.find(other);
      return Gone(other) || (it != waiting_.end() && it->second == generation_);
    };
    if (!blocked.threads.empty() &&
        std::all_of(blocked.threads.begin(), blocked.threads.end(), in_vain) &&
        said_.insert(blocked.why).second) {
      Say("deadlock", blocked.why + ": nobody is left who could come");
    }
    if (steady_clock::now() >= limit) {
      Say("hang", "given up after " + std::to_string(patience_.count()) + " ms: " + blocked.why);
      break;
    }
    changed_.wait_for(mutex, std::chrono::milliseconds(20));
  }
  waiting_.erase(me);
  return is_done;
}

cudaError_t Runtime::Await(const std::function<bool()>& done) {
  if (!WaitFor(done) && sticky_ == cudaSuccess) sticky_ = cudaErrorLaunchTimeout;
  if (sticky_ != cudaSuccess) changed_.notify_all();
  return sticky_;
}

}  // namespace cusim
