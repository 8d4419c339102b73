// The least CPU time of calls, for benches of kernels.
#pragma once

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <vector>

namespace dtensor {

// Of the processor, so that a busy machine does not count.
inline double CpuUs() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

inline double UsOf(const std::function<void()>& body) {
  const double start = CpuUs();
  body();
  return CpuUs() - start;
}

// The least of each, in turns, over so many seconds.
inline std::vector<double> BestUs(const std::vector<std::function<void()>>& bodies,
                                  double seconds = 0.6) {
  using Clock = std::chrono::steady_clock;
  for (const auto& body : bodies) body();
  std::vector<double> least(bodies.size(), 1e12);
  const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                   std::chrono::duration<double>(seconds));
  do {
    for (size_t i = 0; i < bodies.size(); ++i) {
      const double us = UsOf(bodies[i]);
      if (us > 0) least[i] = std::min(least[i], us);  // a virtual machine's clock may stand still
    }
  } while (Clock::now() < end);
  return least;
}

}  // namespace dtensor
