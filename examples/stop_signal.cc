#include "examples/stop_signal.h"

#include <unistd.h>

#include <csignal>
#include <thread>

namespace dtensor {
namespace {

std::atomic<bool> stop_asked{false};
static_assert(std::atomic<bool>::is_always_lock_free);

}  // namespace

const std::atomic<bool>* StopOnSignal() {
  struct sigaction action = {};
  action.sa_handler = [](int) { stop_asked = true; };
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : {SIGTERM, SIGUSR1}) {
    sigaction(signal, &action, nullptr);
    sigaddset(&set, signal);
  }
  // On a thread that does nothing else: a handler that interrupted oneDNN's sgemm left a broken
  // heap (seen in processes of mpirun, one time out of two).
  std::thread([] {
    for (;;) pause();
  }).detach();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  return &stop_asked;
}

}  // namespace dtensor
