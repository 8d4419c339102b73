// Moves between a range of a strided tensor's elements, in row-major order, and a contiguous array.
#pragma once

#include <cstdint>

#include "dtensor/tensor/tensor.h"

namespace dtensor {

// array[0 .. count) = elements [start, start + count) of `tensor`.
void Pack(const Tensor& tensor, int64_t start, int64_t count, void* array);
// The other way.
void Unpack(const void* array, int64_t start, int64_t count, const Tensor& tensor);

}  // namespace dtensor
