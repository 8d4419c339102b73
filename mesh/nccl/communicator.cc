#include "dtensor/mesh/nccl/communicator.h"

#include <algorithm>
#include <thread>

#include "absl/time/clock.h"
#include "dtensor/tensor/status.h"

namespace dtensor::nccl {
namespace {

// Of the world, to say which process is gone.
constexpr absl::Duration kGrace = absl::Seconds(2);

}  // namespace

absl::Status Communicator::Join(const UniqueId& id, int size, int me, Config config, Alive alive) {
  const std::lock_guard<std::mutex> lock(mutex_);
  config.blocking = 0;
  constexpr absl::string_view kFunction = "CommInitRankConfig";
  const int result = api_.CommInitRankConfig(&handle_, size, id, me, &config);
  const absl::Status began = api_.Check(result, kFunction);
  if (!began.ok()) handle_ = nullptr;  // nothing was made
  DT_RETURN_IF_ERROR(began);
  return Settle(kFunction, alive);
}

absl::Status Communicator::Queue(absl::FunctionRef<int(CommHandle)> calls, Alive alive) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ == nullptr) {
    DT_RETURN_IF_ERROR(alive());
    return RankLocal(absl::AbortedError("NCCL: the communicator was aborted"));
  }
  DT_RETURN_IF_ERROR(api_.Check(api_.GroupStart(), "GroupStart"));
  const int queued = calls(handle_);
  const int ended = api_.GroupEnd();  // also after an error
  DT_RETURN_IF_ERROR(Judge(queued, "Group"));
  DT_RETURN_IF_ERROR(Judge(ended, "GroupEnd"));
  return Settle("GroupEnd", alive);
}

// Once a peer is gone it stays so, whatever is said of later calls.
absl::Status Communicator::Judge(int state, absl::string_view function) {
  if (state != kRemoteError) DT_RETURN_IF_ERROR(api_.Check(state, function, handle_));
  if (state == kRemoteError) peer_gone_ = std::min(peer_gone_, absl::Now());
  const bool soon = absl::Now() - peer_gone_ < kGrace;
  return soon ? absl::OkStatus() : api_.Check(kRemoteError, function, handle_);
}

absl::Status Communicator::Settle(absl::string_view function, Alive alive) {
  for (;;) {
    int state = kSuccess;
    DT_RETURN_IF_ERROR(api_.Check(api_.CommGetAsyncError(handle_, &state), "CommGetAsyncError"));
    DT_RETURN_IF_ERROR(Judge(state, function));
    if (state == kSuccess && peer_gone_ == absl::InfiniteFuture()) return absl::OkStatus();
    const absl::Status living = alive();
    if (!living.ok()) {
      (void)api_.CommAbort(handle_);
      handle_ = nullptr;
      return living;
    }
    std::this_thread::yield();
  }
}

absl::Status Communicator::Fault() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || handle_ == nullptr) return absl::OkStatus();
  int state = kSuccess;
  DT_RETURN_IF_ERROR(api_.Check(api_.CommGetAsyncError(handle_, &state), "CommGetAsyncError"));
  return Judge(state, "CommGetAsyncError");
}

void Communicator::TryAbort() {
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || handle_ == nullptr) return;  // its thread is in it, and asks `alive`
  (void)api_.CommAbort(handle_);
  handle_ = nullptr;
}

void Communicator::Abort() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ != nullptr) (void)api_.CommAbort(handle_);
  handle_ = nullptr;
}

void Communicator::Destroy() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (handle_ != nullptr) (void)api_.CommDestroy(handle_);
  handle_ = nullptr;
}

}  // namespace dtensor::nccl
