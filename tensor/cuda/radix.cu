#include <cub/device/device_radix_sort.cuh>

#include "dtensor/tensor/cuda/radix.h"

namespace dtensor::cuda {

uint64_t* SortByBits(const KernelCall& call, uint64_t* keys, uint64_t* spare, int64_t n, int low,
                     int bits) {
  if (n < 2 || bits == 0) return keys;
  cub::DoubleBuffer<uint64_t> both(keys, spare);
  void* memory = nullptr;
  size_t bytes = 0;
  // First asks how much memory it takes.
  for (int pass = 0; pass < 2; ++pass) {
    const cudaError_t error =
        cub::DeviceRadixSort::SortKeys(memory, bytes, both, n, low, low + bits, StreamOf(call));
    NoteError(error);
    if (error != cudaSuccess || pass == 1) break;
    memory = Scratch<char>(call, static_cast<int64_t>(bytes));
    if (memory == nullptr) return nullptr;
  }
  return both.Current();
}

}  // namespace dtensor::cuda
