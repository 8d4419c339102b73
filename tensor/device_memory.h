// The caching allocator of one rank on a device that works on its own.
#pragma once

#include <memory>

#include "dtensor/tensor/device.h"

namespace dtensor {

// `current` is where the rank keeps its current stream. Freed memory serves again at once: whatever
// the rank queues comes after all that it has queued before, on whichever stream (StreamScope).
// Uses by other streams are those that were recorded (Buffer::RecordUse): the current stream is
// ordered after them first.
std::shared_ptr<Allocator> CreateDeviceAllocator(std::shared_ptr<PhysicalDevice> device,
                                                 const StreamHandle* current);

}  // namespace dtensor
