// CommTime: how long a rank has been in collectives, waiting for peers and moving data.
#pragma once

#include <chrono>
#include <cstdint>

#include "dtensor/mesh/launch.h"

namespace dtensor {

// Of one rank (RankContext::Slot), since it began: calls and waits of those that overlap; of those
// on a device only what the host waited. Host bytes (RankContext::Exchange) are not in it.
struct CommTime {
  int64_t ns = 0;
};

// Adds its lifetime to that of the rank; null: nothing.
class TimedComm {
 public:
  explicit TimedComm(RankContext* context) : context_(context) {}
  ~TimedComm() {
    if (context_ == nullptr) return;
    const auto spent = std::chrono::steady_clock::now() - start_;
    context_->Slot<CommTime>().ns +=
        std::chrono::duration_cast<std::chrono::nanoseconds>(spent).count();
  }
  TimedComm(const TimedComm&) = delete;

 private:
  RankContext* const context_;
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace dtensor
