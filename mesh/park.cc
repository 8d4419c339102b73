#include "dtensor/mesh/park.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <ctime>

#include "dtensor/mesh/store/deadline.h"

namespace dtensor {
namespace {

using Clock = std::chrono::steady_clock;

// A wake-up through the kernel costs about 20 us; spinning longer than that cannot win.
constexpr auto kSpin = std::chrono::microseconds(25);

// Sleeps while *word == value, for at most `limit`; may return early.
void FutexWait(std::atomic<uint32_t>* word, uint32_t value, std::chrono::nanoseconds limit) {
  timespec time;
  time.tv_sec = limit.count() / 1000000000;
  time.tv_nsec = limit.count() % 1000000000;
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT_PRIVATE, value, &time, nullptr,
          0);
}

}  // namespace

bool ParkSpot::WaitSlow(absl::FunctionRef<bool()> ready, absl::Duration timeout, bool spin) {
  const Clock::time_point start = Clock::now();
  while (spin && Clock::now() - start < kSpin) {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      SpinHint();
    }
  }
  const auto limit = absl::ToChronoNanoseconds(std::min(timeout, kLongestWait));
  sleepers_.fetch_add(1);
  bool done;
  while (true) {
    uint32_t seen = word_.load();
    if ((done = ready())) break;
    auto left = limit - (Clock::now() - start);
    if (left <= left.zero()) break;
    FutexWait(&word_, seen, left);
  }
  sleepers_.fetch_sub(1);
  return done;
}

void ParkSpot::WakeSlow() {
  word_.fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr,
          nullptr, 0);
}

}  // namespace dtensor
