// The caching allocator of one rank on a device that works on its own.
#pragma once

#include <memory>

#include "tensor/device.h"

namespace dtensor {

// `current` is where the rank keeps its current stream. Memory that is freed on a stream serves that
// stream again at once, since its work is done in order; another stream is ordered after it first,
// and everybody after the uses that were recorded (Buffer::RecordUse).
std::shared_ptr<Allocator> CreateDeviceAllocator(std::shared_ptr<PhysicalDevice> device,
                                                 const StreamHandle* current);

}  // namespace dtensor
