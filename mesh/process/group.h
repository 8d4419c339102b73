// ProcessGroup: the members of a group as one of them sees the others, which are processes. Private
// to mesh/.
//
// A collective is: every member sends every other one its number, its fingerprint and, if that is
// little, its data; those that have heard of all compare; then data goes from memory to memory. So
// nothing moves before all agree, and nobody waits for somebody without knowing whom.
#pragma once

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

namespace dtensor {

class ProcessWorld;

// How far a member had come when it left: of collectives, and of messages by peer.
struct FarewellOfGroup {
  uint64_t arrived = 0;
  absl::flat_hash_map<int, uint64_t> sent, received;  // by group index
};

class ProcessGroup {
 public:
  // Channels of one group.
  enum Channel : int64_t { kCalls, kData, kOffers, kAnswers, kPayload, kChannels };

  ProcessGroup(ProcessWorld* world, std::vector<int64_t> ranks, int me, int64_t first_channel);
  int size() const { return static_cast<int>(ranks_.size()); }
  int me() const { return me_; }
  const std::vector<int64_t>& ranks() const { return ranks_; }
  int64_t channel(Channel which) const { return first_channel_ + which; }
  ProcessWorld& world() { return *world_; }
  FlightRecorder& flight() { return flight_; }

  // Numbers of this member's calls and messages.
  uint64_t NextSequence() { return ++sequence_; }
  uint64_t CountSend(int peer);
  uint64_t CountReceive(int peer);
  // This member has come to the call; it has heard that a peer has.
  void Arrive(uint64_t sequence) { arrived_.store(sequence); }
  void Hear(int peer, uint64_t sequence) { heard_[peer].store(sequence); }

  // Until the messages are done. `left`: what is wrong if a peer has left, else OK; `late`: at the
  // deadline. Both end the group. `all_are_in`: every member has come to the call, so an abort
  // waits a moment for the messages, whose memory is the caller's.
  absl::Status Await(Transfers& transfers, absl::FunctionRef<absl::Status()> left,
                     absl::FunctionRef<absl::Status()> late, bool all_are_in);
  // The usual ones of a collective.
  absl::Status LeftBefore(const CollectiveCall& call, const std::string& label);
  // Names who has not come to the call, or, where all have, whose data is not here.
  absl::Status LateFor(const CollectiveCall& call, const std::string& label,
                       const Transfers& transfers);
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
  std::vector<int64_t> Missing(uint64_t sequence) const;

  ProcessWorld* const world_;
  const std::vector<int64_t> ranks_;
  const int me_;
  const int64_t first_channel_;
  FlightRecorder flight_;
  uint64_t sequence_ = 0;  // owner only
  std::atomic<uint64_t> arrived_{0};
  std::vector<std::atomic<uint64_t>> heard_;
  std::atomic<bool> aborted_{false}, some_left_{false};
  std::mutex mutex_;
  absl::Status why_;  // guarded by mutex_, as what follows
  std::vector<Member> members_;
  FarewellOfGroup mine_;
};

}  // namespace dtensor
