// ProgressThread: carries out calls that overlap, beside the rank that asked for them. Private to
// mesh/.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

// One after another, in the order in which they came: ranks that ask for the same calls in one
// order, as those of a group do, meet. The thread starts with the first call.
class ProgressThread {
 public:
  class Job;
  // What is done for a call, on the thread. Exceptions are errors of the call.
  using Run = std::function<absl::Status(Job&)>;

  ProgressThread() = default;
  ~ProgressThread();  // after the calls under way; those not begun are dropped
  ProgressThread(const ProgressThread&) = delete;

  // `place` in the flight recorder is ended with the call.
  Work Post(const CollectiveCall& call, FlightRecorder& flight, size_t place, Run run);
  // Until all are done; from here on somebody waits for all. The first error that there was.
  absl::Status Quiesce();

 private:
  class Lent;
  void Loop();
  void Want(uint64_t number);

  std::mutex mutex_;
  std::condition_variable posted_, idle_;
  std::deque<std::shared_ptr<Lent>> jobs_;  // guarded by mutex_, as what follows
  uint64_t count_ = 0;                      // of those posted
  bool ends_ = false;
  absl::Status failed_;              // the first error of a call
  std::atomic<uint64_t> wanted_{0};  // somebody waits for jobs up to this number
  std::thread thread_;
};

// A call as the thread sees it.
class ProgressThread::Job {
 public:
  virtual ~Job() = default;
  // As it was asked for; its tensors are not to be read.
  virtual const CollectiveCall& call() const = 0;
  virtual std::string Describe(absl::Span<const int64_t> ranks) const = 0;
  // The same to be read from, until the call ends or EndReading: whoever wants to write to what it
  // reads waits from here on. Who wanted that before has put a copy in its place.
  virtual const CollectiveCall& BeginReading() = 0;
  virtual void EndReading() = 0;
  // Whether somebody waits for it, so that a deadline makes sense.
  virtual bool wanted() const = 0;
};

}  // namespace dtensor
