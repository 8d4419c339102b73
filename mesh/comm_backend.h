// CommBackend: what runs the collectives of one group. tests/mesh/conformance.h says what is asked
// of one; mesh/backends.h chooses it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_call.h"

namespace dtensor {

class FlightRecorder;
class Loan;

// A started collective. One that is dropped before it is done does not bring its result to this
// rank; peers get theirs. [[nodiscard]].
class [[nodiscard]] Work {
 public:
  Work() = default;                                                   // done, OK
  explicit Work(absl::Status status) : status_(std::move(status)) {}  // done with this status
  bool Done() const { return !state_ || StateDone(); }
  bool GoesOn() const { return state_ != nullptr; }  // after the call that started it, or may
  // Blocks until done; on a device until it is queued by whoever queues it, and this rank's later
  // work of the current stream comes after it: nobody waits for data. Errors: DeadlineExceeded,
  // Aborted, FailedPrecondition as of Comm.
  absl::Status Wait(absl::Duration timeout = absl::InfiniteDuration()) {
    return state_ ? StateWait(timeout) : status_;
  }
  // What is still read of this rank's memory; null: nothing. Belongs to the RankContext.
  std::shared_ptr<Loan> TheLoan() const;

  struct State;
  explicit Work(std::shared_ptr<State> state);

 private:
  bool StateDone() const;
  absl::Status StateWait(absl::Duration timeout);
  std::shared_ptr<State> state_;
  absl::Status status_;
};

// What a backend implements.
class CommBackend {
 public:
  virtual ~CommBackend() = default;
  virtual const CommCaps& caps() const = 0;
  // Writes the call into the flight recorder; gives its place there.
  using Record = absl::FunctionRef<size_t()>;
  // Calls record() once, before it waits for anybody and where that costs least. `call` asks for
  // nothing beyond the capabilities and lives until this returns: keep a KeptCall. The Work is done
  // then, unless the call may overlap. Who has deferred_pull leaves the rest to Work::Wait; who
  // does not works on, and ends the recorder's entry when the call ends.
  virtual Work Start(const CollectiveCall& call, Record record) = 0;
  virtual absl::Status Health() = 0;
  virtual void Abort(absl::Status why) = 0;
  // Until none of this rank's calls goes on by itself: before the rank leaves, whose peers wait for
  // them also if it has dropped the Work. The first error of what failed so.
  virtual absl::Status Quiesce() { return absl::OkStatus(); }
  // Sets the call's `sequence` and `before`; the face asks once per collective. Backends that serve
  // several Comms of one group count in the group.
  virtual void Number(CollectiveCall* call) {
    call->sequence = ++sequence_[call->options.overlap];
    call->before = sequence_[!call->options.overlap];
  }
  // Where this rank's calls on the group are recorded.
  virtual FlightRecorder& flight() = 0;

 private:
  uint64_t sequence_[2] = {};
};

// Puts a backend around another.
using WrapBackend = std::function<std::unique_ptr<CommBackend>(std::unique_ptr<CommBackend> inner)>;

}  // namespace dtensor
