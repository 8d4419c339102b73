// LocalGroup: what the members of a group share that are threads of one process. Private to mesh/.
//
// A collective is: publish the call in this rank's slot; meet (`arrived`); compare fingerprints;
// move data straight between the ranks' memory; meet again (`finished`), so that nobody reuses
// memory that a peer still reads. Small calls go through staging memory of the group and need one
// meeting only.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/park.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

// Largest message that is staged. Beyond, the second meeting is cheaper than the extra copy.
inline constexpr int64_t kStageBytes = 512;

// Where the sends of one rank to another wait for their receiver.
struct Mailbox {
  alignas(64) std::atomic<uint64_t> posted{0};  // sends offered
  const CollectiveCall* call = nullptr;         // of the last offered; valid until it is taken
  alignas(64) std::atomic<uint64_t> taken{0};   // sends received
  std::string error;                            // of the last taken, empty if it went well
  Event ready, done;                            // on a device: the data may be read; it was
  ParkSpot spot;
};

struct DeferredCall;
class ThreadWorld;

class LocalGroup {
 public:
  // What one rank shows of its current call. Two sides, because a rank may enter the next call
  // while a slow peer still reads this one; it cannot be two ahead.
  struct Posted {
    uint64_t fingerprint = 0;
    // Data of an all-reduce whose tensors are contiguous here, else null: saves peers from reading
    // the call, which lies on lines of their own.
    char* in = nullptr;
    char* out = nullptr;
  };
  struct Rest {
    uint64_t balance = 0;  // of an exchange: hashes of sends minus hashes of receives
    const CollectiveCall* call = nullptr;  // valid while its owner is inside the call
    Event ready, done;  // of a call on a device: its owner's data is there; all was done
  };
  // Cache lines that peers poll hold nothing that the owner writes meanwhile.
  struct alignas(64) Slot {
    std::atomic<uint64_t> arrived{0};
    Posted side[2];
    alignas(64) Rest rest[2];
    alignas(64) std::atomic<uint64_t> finished{0};
    std::atomic<uint64_t> described{0};
    // The last call that it is through with: it touches memory of peers only while it has arrived
    // at a later one, and while it is `pulling` a message.
    alignas(64) std::atomic<uint64_t> through{0};
    std::atomic<uint32_t> pulling{0};
    std::atomic<bool> left{false};        // its body has returned
    uint64_t sequence = 0, deferred = 0;  // numbers of its last calls; owner only
    // Of deferred calls: the last that peers can find, and the one that it waits for (0: none).
    std::atomic<uint64_t> posted{0}, awaited{0};
    std::string text;      // what it says about a mismatch
    std::string bytes[2];  // of ExchangeBytes; as Posted
    FlightRecorder flight;
    absl::flat_hash_map<int64_t, uint64_t> sent, received;  // by peer; owner only
  };
  using Phase = std::atomic<uint64_t> Slot::*;

  LocalGroup(std::weak_ptr<ThreadWorld> world, std::vector<int64_t> ranks, absl::Duration timeout,
             bool spin);
  int size() const { return static_cast<int>(ranks_.size()); }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  Slot& slot(int i) { return slots_[i]; }
  // Of every wait for peers from here on, of all members.
  void set_timeout(absl::Duration timeout) { timeout_ns_.store(absl::ToInt64Nanoseconds(timeout)); }
  char* stage(int i, uint64_t sequence) { return stage_ + (2 * i + (sequence & 1)) * kStageBytes; }

  // Says that member `me` reached `phase` of its call.
  void Reach(int me, Phase phase, const CollectiveCall& call) {
    (slots_[me].*phase).store(call.sequence);
  }
  // Waits until all have: what a member does in between costs nothing while its flag is on its way.
  // An error ends the group: DeadlineExceeded naming the absent ranks, or why it was aborted.
  absl::Status Await(Phase phase, const CollectiveCall& call, const std::string& label) {
    const auto all = [&] { return All(phase, call.sequence); };
    if (TimelineTrack::Current() == nullptr && !all() && ParkSpot::Spin(all, spin_)) {
      return absl::OkStatus();
    }
    return AwaitSlow(phase, call, label);
  }
  absl::Status Meet(int me, Phase phase, const CollectiveCall& call, const std::string& label) {
    Reach(me, phase, call);
    return Await(phase, call, label);
  }
  // Waits at a mailbox shared with `peer` until `counter` reaches `count`.
  absl::Status MeetPeer(Mailbox* box, const std::atomic<uint64_t>& counter, uint64_t count,
                        int peer, const CollectiveCall& call, const std::string& label);
  Mailbox* MailboxOf(int from, int to);

  // The deferred call of this number, where the members meet. Each asks once.
  std::shared_ptr<DeferredCall> DeferredOf(uint64_t number);
  // Waits until all have posted it. Errors as Meet's.
  absl::Status AwaitPosts(const DeferredCall& shared, int me, const std::string& label,
                          absl::Duration timeout);
  void WaitUntil(absl::FunctionRef<bool()> ready) {
    spot_.Wait(ready, absl::InfiniteDuration(), spin_);
  }
  void Wake() { spot_.WakeAll(); }

  // Between a Meet of `arrived` and this a rank may touch memory of peers, unless the group was
  // aborted when it arrived: whoever aborts later sees that it has arrived and waits.
  void Through(int me, const CollectiveCall& call) {
    slots_[me].through.store(call.sequence, std::memory_order_release);
  }
  // The same for messages, which have no phases; false if the group was aborted: keep off then.
  bool BeginPull(int me);
  void EndPull(int me);
  // To be called before leaving a call with an error: waits until no peer can be touching this
  // rank's memory. They do nothing but copy, so this ends.
  void Drain(int me);

  bool aborted() const { return events_.load() & kAborted; }
  absl::Status Health();
  void Abort(const absl::Status& why);  // the first reason stays
  void MemberLeft(int64_t rank);

  // What the members do and did; at most `calls` of each. From any thread.
  FlightGroup Report(size_t calls) const;
  // Those of ThreadWorld; of this group alone where that is gone.
  std::string ReportOnce(const void* where, uint64_t number);
  std::string LastingReport();

 private:
  enum : uint32_t { kAborted = 1, kLeft = 2 };
  // The rest of Await: for the last one to come, for long waits, and for those that are drawn.
  absl::Status AwaitSlow(Phase phase, const CollectiveCall& call, const std::string& label);
  bool All(Phase phase, uint64_t sequence) const {
    const Slot* const end = slots_.get() + size();
    for (const Slot* slot = slots_.get(); slot != end; ++slot) {
      if ((slot->*phase).load() < sequence) return false;
    }
    return true;
  }
  absl::Duration timeout() const { return absl::Nanoseconds(timeout_ns_.load()); }
  int Deferring(const CollectiveCall& call) const;
  std::string PostedText(int member, uint64_t number) const;
  // First member that left without reaching `phase`, or -1.
  int Deserter(Phase phase, uint64_t sequence) const;
  std::string Absent(Phase phase, uint64_t sequence) const;
  void WakeEverybody();
  FlightCall FlightOf(int member, const FlightEntry& entry, int64_t now) const;
  std::vector<int64_t> Missing(Phase phase, uint64_t sequence) const;
  std::string OwnReport() const;

  const std::weak_ptr<ThreadWorld> world_;  // gone where a Work outlives it
  const std::vector<int64_t> ranks_;
  std::atomic<int64_t> timeout_ns_;  // saturated: never
  const bool spin_;
  std::unique_ptr<Slot[]> slots_;
  std::unique_ptr<char[]> stage_memory_;
  char* stage_;  // inside stage_memory_, 64-byte aligned
  std::atomic<uint32_t> events_{0};
  ParkSpot spot_;
  std::mutex mutex_;
  absl::Status why_;                                                  // guarded by mutex_
  absl::flat_hash_map<int64_t, std::unique_ptr<Mailbox>> mailboxes_;  // guarded by mutex_
  struct Gathering {
    std::shared_ptr<DeferredCall> call;
    int members = 0;  // that have it
  };
  absl::flat_hash_map<uint64_t, Gathering> deferred_;  // not with all members yet; by mutex_
};

}  // namespace dtensor
