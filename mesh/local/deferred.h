// Deferred collectives between threads: started without waiting, finished by whoever reads.
//
// A rank posts its call and goes on. The first read waits until all have posted and then does what
// is left to do for this rank: it pulls its pieces from the peers' memory, or, of an all-reduce, it
// reduces the slices that no other reader has taken. Nobody has to read. The posted calls hold the
// tensors; a rank that wants to write to what it posted takes a copy for those who have not read it
// (Loan).
//
// On a device nobody pulls: the last rank to post queues the whole call on its side stream, after
// the places that all streams had reached when their ranks posted, and who reads comes after that.
// Private to mesh/.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/mesh/local/group.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

// One call of all ranks of a group.
struct DeferredCall {
  struct Part {
    std::mutex mutex;  // guards `call` and `ready` once it is posted
    std::optional<KeptCall> call;
    uint64_t balance = 0;
    Event ready;  // on a device: its owner's tensors may be touched
    std::atomic<bool> posted{false};
    std::atomic<int> reading{0};       // ranks inside its memory; rises under the mutex only
    std::atomic<int> readers_left{0};  // ranks that may still come, its owner among them
  };
  explicit DeferredCall(int ranks) : parts(ranks) {
    for (Part& part : parts) part.readers_left.store(ranks);
  }
  std::vector<Part> parts;  // by group index
  std::atomic<int> posted{0};
  std::atomic<int> next_slice{0}, slices_done{0};  // of an all-reduce
  // On a device, by the last one that posts: whether it was queued (else its tensors are the
  // host's, or the ranks disagree), and the end of it. They stand once `decided` does.
  std::mutex deciding;
  std::atomic<bool> decided{false};
  bool queued = false;
  Event done;
};

// As the thread that asks uses it: the rank whose call it is about may be gone.
inline RankDevice& ThisDevice(DeviceType type) {
  return *ValueOrThrow(RankDevices::Current().Get(type));
}

// Posts `call` as rank `me`'s next deferred one. `balance` as of a plain call; `device`: of the
// group. What comes of it may outlive the rank, its devices and its world.
Work PostDeferred(const std::shared_ptr<LocalGroup>& group, int me, const std::string& label,
                  const CollectiveCall& call, uint64_t balance, DeviceType device);

}  // namespace dtensor
