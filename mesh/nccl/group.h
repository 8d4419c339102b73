// NcclGroup: what one member of a group has queued by NCCL, and what becomes of it. Private to
// mesh/.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/mesh/nccl/calls.h"
#include "dtensor/mesh/nccl/communicator.h"
#include "dtensor/mesh/nccl/watchdog.h"
#include "dtensor/mesh/store.h"
#include "dtensor/mesh/world.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/device_health.h"

namespace dtensor::nccl {

// Operations go to one stream of the rank and device, whichever group they are of: NCCL needs one
// order. The host goes on; the watchdog sees what fails, or is not done in time, ends the group for
// all its members, and frees their devices. Then whoever waits for this device is told.
class NcclGroup : public Watched {
 public:
  // Peers that are not there end the group through `agreement`, a backend of the same members.
  NcclGroup(const Api& api, World& world, const GroupRequest& group,
            std::unique_ptr<CommBackend> agreement, const Config& config);

  CommBackend& agreement() { return *agreement_; }
  const std::vector<int64_t>& ranks() const { return request_.ranks; }
  int size() const { return static_cast<int>(request_.ranks.size()); }
  int me() const { return request_.index; }
  int64_t rank() const { return request_.ranks[static_cast<size_t>(me())]; }
  const std::string& label() const { return request_.label; }
  DeviceType device_type() const { return request_.device; }
  RankDevice& device() const;  // of the rank whose thread asks

  // Queues what this rank does of a call, after all that its current stream has; the event is the
  // end of it. Where the communicator is new it waits for the hosts of its other members, all of
  // whom must be about to queue. `hash`: of this and all calls before.
  //   Errors: what ended the group; Internal with NCCL's words.
  absl::StatusOr<Event> Queue(const CollectiveCall& call, uint64_t hash);
  // Until all that was queued is done, or the group has ended: with that error then.
  absl::Status Quiesce();
  // By the rank's thread, before its device goes.
  void Close();
  void Look() override;

  int64_t most_elements = kMostElements;

 private:
  struct Pending {
    uint64_t number = 0;    // among the group's collectives that were queued; 0: a message
    uint64_t sequence = 0;  // CollectiveCall's
    int peer = 0;           // of a message
    Event ready, done;      // it can begin; it has ended
    absl::Time queued, reached = absl::InfiniteFuture();
  };
  absl::StatusOr<Communicator*> CommunicatorOf(const CollectiveCall& call, int* me, int* size);
  absl::Status Alive(absl::Time deadline);
  void Launched(const Event& before, const Event& after);  // a graph with calls of it
  void Prune();                                            // under mutex_
  absl::Status Late();  // an error: the oldest call is not done in time
  absl::Status TooLate(const Pending& call);
  void Say();  // to the members, how far this one is
  void End(const absl::Status& why);
  std::string TextOf(uint64_t sequence);
  std::string Key(absl::string_view what) const;

  const Api& api_;
  Store& store_;
  const GroupRequest request_;
  const std::unique_ptr<CommBackend> agreement_;
  const Config config_;
  const absl::Duration timeout_;
  // Asked where the host waits for the device.
  std::shared_ptr<const DeviceHealth> health_;
  std::mutex mutex_;
  // What follows is guarded by mutex_; the rank's thread alone adds communicators.
  std::map<int, std::unique_ptr<Communicator>> communicators_;  // by peer; kAll: of all members
  std::deque<Pending> pending_;                                 // in the order of the stream
  uint64_t queued_ = 0, hash_ = 0, sequence_ = 0;
  absl::Status cut_;  // what was queued will not be done
  // Of the watchdog:
  uint64_t said_ = 0;
  absl::Time said_at_ = absl::InfinitePast();
};

}  // namespace dtensor::nccl
