// ProcessGroup: the members of a group as one of them sees the others, which are processes. Private
// to mesh/.
//
// A collective is: every member sends every other one its number, its fingerprint and, if that is
// little, its data; those that have heard of all compare; then data goes from memory to memory. So
// nothing moves before all agree, and nobody waits for somebody without knowing whom.
//
// Calls that overlap (CommOptions::overlap) are a lane of their own, beside those that wait: with
// numbers and channels of its own, and a thread that carries them out.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/progress.h"

namespace dtensor {

class ProcessWorld;

// How far a member had come when it left: of collectives, and of messages by peer.
struct FarewellOfGroup {
  uint64_t arrived[2] = {};                           // by lane
  absl::flat_hash_map<int, uint64_t> sent, received;  // by group index
};

class ProcessGroup {
 public:
  // Channels of one group.
  enum Channel : int64_t {
    kCalls,  // and of the other lane
    kOverlappedCalls,
    kData,  // the same
    kOverlappedData,
    kResults,  // of the same calls, what is passed on
    kOverlappedResults,
    kOffers,
    kAnswers,
    kPayload,
    kChannels
  };

  ProcessGroup(ProcessWorld* world, std::vector<int64_t> ranks, int me, int64_t first_channel);
  int size() const { return static_cast<int>(ranks_.size()); }
  int me() const { return me_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t channel(Channel which) const { return first_channel_ + which; }
  // kCalls, kData or kResults, of the call's lane.
  int64_t channel(Channel which, const CollectiveCall& call) const {
    return first_channel_ + which + (call.options.overlap ? 1 : 0);
  }
  ProcessWorld& world() { return *world_; }
  FlightRecorder& flight() { return flight_; }
  // Of this member's waits for peers from here on; at first the world's.
  absl::Duration timeout() const { return absl::Nanoseconds(timeout_ns_.load()); }
  void set_timeout(absl::Duration timeout) { timeout_ns_.store(absl::ToInt64Nanoseconds(timeout)); }

  // Numbers of this member's calls and messages.
  void Number(CollectiveCall* call);
  uint64_t CountSend(int peer);
  uint64_t CountReceive(int peer);
  // This member has come to the call; it has heard that a peer has.
  void Arrive(const CollectiveCall& call) { LaneOf(call).arrived.store(call.sequence); }
  void Hear(int peer, const CollectiveCall& call) { LaneOf(call).heard[peer].store(call.sequence); }
  // Memory that the calls of a lane use one after another: a part for each member, 64-byte aligned,
  // of at least `bytes`.
  struct Memory {
    int64_t part_bytes = 0;
    std::unique_ptr<char[]> whole;
    char* at = nullptr;  // in `whole`
    char* part(int member) const { return at + member * part_bytes; }
  };
  enum Use { kArrivals, kCutArrivals, kTerms, kUses };
  std::shared_ptr<Memory> MemoryOf(const CollectiveCall& call, Use use, int64_t bytes);
  // Messages of a call that failed may still use it: later ones get other memory.
  void DropMemory(const CollectiveCall& call) { LaneOf(call).memory = {}; }
  ProgressThread& progress() { return *progress_; }
  // Ends the thread: nothing is carried out any more.
  void StopProgress() { progress_.reset(); }

  // Until the messages are done. `left`, now and then: what is wrong if a peer has left, else OK;
  // `late`: at the deadline. Both end the group. `all_are_in`: every member has come to the call,
  // so an abort waits a moment for the messages, whose memory is the caller's. `job`: whose call it
  // is; the time to the deadline begins when somebody waits for it. Null: at once.
  absl::Status Await(Transfers& transfers, absl::FunctionRef<absl::Status()> left,
                     absl::FunctionRef<absl::Status()> late, bool all_are_in,
                     const ProgressThread::Job* job = nullptr);
  // The usual ones of a collective.
  absl::Status LeftBefore(const CollectiveCall& call, const std::string& label);
  // Names who has not come to the call (`text`), or, where all have, whose data is not here.
  absl::Status LateFor(const CollectiveCall& call, const std::string& text,
                       const std::string& label, Transfers& transfers);
  // Of a message number `count` from or to `peer`.
  absl::Status LeftBefore(int peer, bool receives, uint64_t count, const std::string& what);
  absl::Status LateFor(int peer, const std::string& what);

  bool aborted() const { return aborted_.load(); }
  absl::Status Health();
  // Ends the group for all members: the first reason in the world's order stays.
  void AbortAll(const absl::Status& why);

  // What the world hears: from its watcher's thread.
  void Aborted(const absl::Status& why);
  void MemberLeft(int64_t rank, const FarewellOfGroup& farewell);
  // This member's.
  FarewellOfGroup Farewell();
  FlightDump Dump(size_t calls, bool left);
  std::string Key() const;  // its ranks: "0,1,2"

  // What World::Exchange carries, this member's and, once they have come, all others'.
  struct HostBytes {
    std::string mine;
    std::vector<std::string> all;
  };
  std::shared_ptr<HostBytes> host_bytes = std::make_shared<HostBytes>();

 private:
  struct Member {
    bool left = false;
    FarewellOfGroup farewell;
  };
  struct Lane {
    explicit Lane(size_t members) : heard(members) {}
    uint64_t sequence = 0;  // owner only
    std::atomic<uint64_t> arrived{0};
    std::vector<std::atomic<uint64_t>> heard;
    std::array<std::shared_ptr<Memory>, kUses> memory;
  };
  Lane& LaneOf(const CollectiveCall& call) { return lanes_[call.options.overlap ? 1 : 0]; }
  std::vector<int64_t> Missing(const Lane& lane, uint64_t sequence) const;

  ProcessWorld* const world_;
  const std::vector<int64_t> ranks_;
  const int me_;
  const int64_t first_channel_;
  const bool spins_;                 // every process of this machine has a core
  std::atomic<int64_t> timeout_ns_;  // saturated: never
  FlightRecorder flight_;
  std::array<Lane, 2> lanes_;
  std::atomic<bool> aborted_{false}, some_left_{false};
  std::mutex mutex_;
  absl::Status why_;  // guarded by mutex_, as what follows
  std::vector<Member> members_;
  FarewellOfGroup mine_;
  std::unique_ptr<ProgressThread> progress_ = std::make_unique<ProgressThread>();  // last
};

}  // namespace dtensor
