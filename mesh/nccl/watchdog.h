// Watchdog: one thread of the process that looks after what is queued on devices. Private to mesh/.
#pragma once

namespace dtensor::nccl {

class Watched {
 public:
  virtual ~Watched() = default;
  // Every few milliseconds, on the watchdog's thread. Does not throw.
  virtual void Look() = 0;
};

// Looks after it until Unwatch, which waits for a look under way. The thread lives as long as there
// is something to look after.
void Watch(Watched* watched);
void Unwatch(Watched* watched);

}  // namespace dtensor::nccl
