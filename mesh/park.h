// ParkSpot: the one way to wait. Spins while that is likely to be shorter than a wake-up, then
// sleeps in the kernel on a word of its own. Every wait of the library goes through here, so that
// ranks can become fibers later.
#pragma once

#include <atomic>
#include <cstdint>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"

namespace dtensor {

// Tells the core that this is a spin loop.
inline void SpinHint() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Guards what is held for nanoseconds and asked for by somebody else once in a blue moon: half of
// an uncontended std::mutex.
class SpinLock {
 public:
  void lock() {
    while (held_.exchange(true, std::memory_order_acquire)) SpinHint();
  }
  void unlock() { held_.store(false, std::memory_order_release); }

 private:
  std::atomic<bool> held_{false};
};

// Asks for a cache line that will be written to soon: peers that read it lose it meanwhile.
inline void PrefetchForWrite(const void* line) {
#if defined(__x86_64__)
  asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(line)));
#else
  __builtin_prefetch(line, 1);
#endif
}

class ParkSpot {
 public:
  // Waits until `ready()`; false if `timeout` passed before. `spin`: every rank has a core of its
  // own. `ready` must read with sequential consistency what wakers wrote, also so, before WakeAll:
  // the proof that no wake-up is lost needs one order of those writes and of sleepers_.
  template <class Ready>
  bool Wait(Ready ready, absl::Duration timeout, bool spin) {
    return Spin(ready, spin) || WaitSlow(ready, timeout, spin);
  }
  // The first few hundred nanoseconds of Wait, in which most waits end: for callers that can do
  // with a simpler condition there.
  template <class Ready>
  static bool Spin(Ready ready, bool spin) {
    for (int i = spin ? 200 : 20; i > 0; --i) {
      if (ready()) return true;
      SpinHint();
    }
    return false;
  }

  // Costs one load while nobody sleeps.
  void WakeAll() {
    if (sleepers_.load() != 0) WakeSlow();
  }

 private:
  bool WaitSlow(absl::FunctionRef<bool()> ready, absl::Duration timeout, bool spin);
  void WakeSlow();
  std::atomic<uint32_t> word_{0};  // changes with every wake-up
  std::atomic<int32_t> sleepers_{0};
};

}  // namespace dtensor
