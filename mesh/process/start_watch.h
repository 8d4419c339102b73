// StartWatch: for a library of messages that starts only when all processes of the launch have come
// to it, and that nobody can call off. Private to mesh/.
#pragma once

#include <condition_variable>
#include <mutex>
#include <thread>

#include "absl/time/time.h"
#include "dtensor/mesh/process/launcher.h"

namespace dtensor {

// From construction to destruction the library starts. Where it cannot, because a process that the
// launcher has started on this machine has ended meanwhile, or not within the limit, says so on
// stderr and ends this process, with 71 or 72 as RunProgram does.
class StartWatch {
 public:
  StartWatch(const ProcessPlace& place, const char* library, const Environment& environment);
  ~StartWatch();
  StartWatch(const StartWatch&) = delete;

  // DTENSOR_TIMEOUT_S, but no less than what starting may take; without it, machines start at
  // different times.
  static absl::Duration Limit(const Environment& environment);

 private:
  void Watch();
  [[noreturn]] void End(int code, const std::string& why) const;

  const ProcessPlace place_;
  const char* const library_;
  const absl::Duration limit_;
  std::mutex mutex_;
  std::condition_variable over_;
  bool started_ = false;  // guarded by mutex_
  std::thread thread_;    // last: it uses the rest
};

}  // namespace dtensor
