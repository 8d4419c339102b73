#include "dtensor/mesh/nccl/watchdog.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace dtensor::nccl {
namespace {

constexpr std::chrono::milliseconds kBetweenLooks(20);

struct Watchdog {
  std::mutex mutex;  // also held while it looks
  std::condition_variable changed;
  std::vector<Watched*> all;
  bool runs = false;

  void Run() {
    std::unique_lock<std::mutex> lock(mutex);
    while (!all.empty()) {
      for (Watched* const watched : all) watched->Look();
      changed.wait_for(lock, kBetweenLooks);
    }
    runs = false;
  }
};
Watchdog& The() {
  static auto* const watchdog = new Watchdog;  // outlives its thread
  return *watchdog;
}

}  // namespace

void Watch(Watched* watched) {
  Watchdog& dog = The();
  const std::lock_guard<std::mutex> lock(dog.mutex);
  dog.all.push_back(watched);
  if (std::exchange(dog.runs, true)) return;
  std::thread([&dog] { dog.Run(); }).detach();
}

void Unwatch(Watched* watched) {
  Watchdog& dog = The();
  {
    const std::lock_guard<std::mutex> lock(dog.mutex);
    std::erase(dog.all, watched);
  }
  dog.changed.notify_all();
}

}  // namespace dtensor::nccl
