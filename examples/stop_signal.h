// Ending a training in good order.
#pragma once

#include <atomic>

namespace dtensor {

// From now on SIGTERM and SIGUSR1 set the flag instead of ending the program: the step is finished
// and saved (TrainerOptions::stop). A second one ends the program at once.
const std::atomic<bool>* StopOnSignal();

}  // namespace dtensor
