// Communicator: one communicator of NCCL, of one rank. Private to mesh/.
#pragma once

#include <mutex>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dtensor/mesh/nccl/api.h"

namespace dtensor::nccl {

// Its rank's thread joins and queues, another one may look after it and abort it. Nothing of NCCL
// blocks: where it is under way, `alive` is asked until it is not, and its error ends the wait and
// the communicator.
class Communicator {
 public:
  using Alive = absl::FunctionRef<absl::Status()>;

  explicit Communicator(const Api& api) : api_(api) {}
  ~Communicator() { Abort(); }
  Communicator(const Communicator&) = delete;

  // As rank `me` of `size`, on the thread's device: returns when all have joined. Errors: alive's;
  // Internal with NCCL's words.
  absl::Status Join(const UniqueId& id, int size, int me, Config config, Alive alive);
  // calls(handle) queues operations, which become one group; gives NCCL's first error. They are on
  // their streams when this returns. Errors: as Join; Aborted where the communicator was.
  absl::Status Queue(absl::FunctionRef<int(CommHandle)> calls, Alive alive);

  // From any thread, and without waiting for the rank's:
  // What NCCL has found since. That a peer is gone only after a while: NCCL does not know whose
  // process that was, and who does shall say it first.
  absl::Status Fault();
  // Ends what is queued; the memory that it was to fill holds anything then.
  void TryAbort();
  // Where nothing is under way any more.
  void Destroy();

 private:
  void Abort();
  // Under mutex_:
  absl::Status Settle(absl::string_view function, Alive alive);
  absl::Status Judge(int state, absl::string_view function);

  const Api& api_;
  std::mutex mutex_;
  CommHandle handle_ = nullptr;  // guarded by mutex_; null: not joined yet, or no more
  absl::Time peer_gone_ = absl::InfiniteFuture();  // guarded by mutex_: since when NCCL says so
};

}  // namespace dtensor::nccl
