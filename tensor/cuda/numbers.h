// Numbers that are others at every launch of a graph: the kernels that have such.
#pragma once

#include <cstring>

#include "dtensor/tensor/cuda/launch.h"
#include "dtensor/tensor/device_table.h"

namespace dtensor::cuda {

// What DeviceTable::numbers was given by this thread.
inline thread_local NumberBlock* numbers_block = nullptr;

// Where a kernel reads `now` from: a place in the graph that is being captured, else null: then it
// is a parameter.
template <class T>
const T* PlaceOf(const KernelCall& call, const T& now) {
  NumberBlock* const block = numbers_block;
  if (block == nullptr) return nullptr;
  const int64_t at = (block->used + 15) / 16 * 16, end = at + static_cast<int64_t>(sizeof(T));
  if (end > block->size) {
    call.workspace->Fail("a graph has no room for the numbers of so many different updates");
    return nullptr;
  }
  std::memcpy(block->host + at, static_cast<const void*>(&now), sizeof(T));
  block->used = end;
  return reinterpret_cast<const T*>(block->device + at);
}
// Whether nothing is to be launched.
inline bool OnlyNumbers() { return numbers_block != nullptr && numbers_block->only; }

}  // namespace dtensor::cuda
