// CommTime: how long a rank has been in collectives, waiting for peers and moving data.
#pragma once

#include <chrono>
#include <cstdint>

#include "dtensor/mesh/launch.h"

namespace dtensor {

// Of one rank (RankContext::Slot): calls and waits of those that overlap, while a WatchCommTime is
// open; of those on a device only what the host waited. Host bytes (RankContext::Exchange) are not
// in it.
struct CommTime {
  int64_t ns = 0;
  int watches = 0;
};

// While one is open the calling rank's collectives are timed.
class WatchCommTime {
 public:
  WatchCommTime() : time_(RankContext::Current().Slot<CommTime>()) { ++time_.watches; }
  ~WatchCommTime() { --time_.watches; }
  WatchCommTime(const WatchCommTime&) = delete;

 private:
  CommTime& time_;
};

// Adds its lifetime to that of the rank, if it is watched; null: nothing.
class TimedComm {
 public:
  explicit TimedComm(RankContext* context)
      : time_(context == nullptr ? nullptr : &context->Slot<CommTime>()) {
    if (time_ != nullptr && time_->watches == 0) time_ = nullptr;
    if (time_ != nullptr) start_ = Clock::now();
  }
  ~TimedComm() {
    if (time_ == nullptr) return;
    const auto spent = Clock::now() - start_;
    time_->ns += std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
  }
  TimedComm(const TimedComm&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  CommTime* time_;
  Clock::time_point start_;
};

}  // namespace dtensor
