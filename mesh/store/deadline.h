// Deadline: until when somebody waits, whatever happens to the system's clock meanwhile. Private to
// mesh/.
#pragma once

#include <algorithm>
#include <chrono>
#include <compare>
#include <cstdint>

#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace dtensor {

// Stands for ever: more would overflow the arithmetic of clocks.
inline constexpr absl::Duration kLongestWait = absl::Hours(24 * 365);

class Deadline {
 public:
  static Deadline Never() { return Deadline(Clock::time_point::max()); }
  static Deadline In(absl::Duration from_now) {
    if (from_now > kLongestWait) return Never();
    const auto wait = absl::ToChronoNanoseconds(std::max(from_now, absl::ZeroDuration()));
    return Deadline(Clock::now() + wait);
  }
  // As far from now as `time` is on the system's clock.
  static Deadline At(absl::Time time) { return In(time - absl::Now()); }

  bool passed() const { return at_ != Clock::time_point::max() && Clock::now() >= at_; }
  absl::Duration left() const {
    if (at_ == Clock::time_point::max()) return absl::InfiniteDuration();
    return std::max(absl::FromChrono(at_ - Clock::now()), absl::ZeroDuration());
  }
  // For poll(), and as messages carry it: rounded up; -1: never.
  int Milliseconds() const {
    if (at_ == Clock::time_point::max()) return -1;
    const int64_t ms = absl::ToInt64Milliseconds(left() + absl::Microseconds(999));
    return static_cast<int>(std::min<int64_t>(ms, 1 << 30));
  }
  friend auto operator<=>(const Deadline&, const Deadline&) = default;

 private:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace dtensor
