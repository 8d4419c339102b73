// Sorting whole numbers by some of their bits: NVIDIA's radix sort (CUB), compiled once for all
// kernels.
#pragma once

#include "dtensor/tensor/cuda/launch.h"

namespace dtensor::cuda {

// Bits that a number needs: 0 for 0, 3 for 4.
constexpr int BitsOf(uint64_t x) {
  int bits = 0;
  for (; x != 0; x >>= 1) ++bits;
  return bits;
}
// The lowest bits, 1 to 64 of them.
__host__ __device__ constexpr uint64_t LowBits(int bits) { return ~uint64_t{0} >> (64 - bits); }

// Sorts n keys by `bits` bits from bit `low` on; keys in which these are equal stay in their order.
// `spare` has room for n. Where they lie then: `keys` or `spare`; null where there is no memory.
uint64_t* SortByBits(const KernelCall& call, uint64_t* keys, uint64_t* spare, int64_t n, int low,
                     int bits);

}  // namespace dtensor::cuda
