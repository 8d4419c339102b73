// Sorting an array along a dim by the library, all lines of it at once.
#pragma once

#include <utility>

#include "dtensor/tensor/cuda/kernels/sort_keys.h"
#include "dtensor/tensor/cuda/radix.h"

namespace dtensor::cuda {

// An array as lines along a dim.
struct Lines {
  int64_t n, inner, count;
  Lines(const TensorRef& x, int64_t axis)
      : n(x.sizes[axis]),
        inner(ProductOf(x, static_cast<int>(axis) + 1, x.ndim)),
        count(ProductOf(x, 0, static_cast<int>(axis)) * inner) {}
  // Of the number of an element, as they come line by line.
  int PlaceBits() const { return BitsOf(static_cast<uint64_t>(count * n)); }
  __device__ int64_t At(int64_t line, int64_t i, int64_t size) const {
    return (line / inner * size + i) * inner + line % inner;
  }
};

// Keys of `bits` bits, from bit `from` on, of the number (line, element), above the place of the
// element: its number among all of them. `sorted`: in the order of the places in `keys`.
template <class X>
__global__ void __launch_bounds__(kThreads)
    TakeBits(const X* x, Lines lines, bool descending, int from, int bits, int place_bits,
             bool sorted, uint64_t* keys) {
  constexpr int kBits = kKeyBits<X>;
  for (int64_t k = GridStart(); k < lines.count * lines.n; k += GridStep()) {
    const uint64_t place = sorted ? keys[k] & LowBits(place_bits) : static_cast<uint64_t>(k);
    const int64_t line = static_cast<int64_t>(place) / lines.n;
    uint64_t key = KeyOf(x[lines.At(line, static_cast<int64_t>(place) - line * lines.n, lines.n)]);
    if (descending) key = ~key;
    const auto number = static_cast<unsigned __int128>(line) << kBits | (key & LowBits(kBits));
    const auto taken = static_cast<uint64_t>(number >> from) & LowBits(bits);
    keys[k] = taken << place_bits | place;
  }
}
// Sorts by (line, element), from the lowest bits up, as many at a time as a key has room for beside
// a place. The places are the lowest PlaceBits() of what comes back; null where there is no memory.
template <class X>
uint64_t* SortAllLines(const KernelCall& c, const Lines& lines, bool descending) {
  const int64_t n = lines.count * lines.n;
  const int place_bits = lines.PlaceBits();
  auto *keys = Scratch<uint64_t>(c, n), *spare = Scratch<uint64_t>(c, n);
  if (keys == nullptr || spare == nullptr) return nullptr;
  const int all = BitsOf(static_cast<uint64_t>(lines.count - 1)) + kKeyBits<X>;
  const int times = (all + 63 - place_bits) / (64 - place_bits), bits = (all + times - 1) / times;
  for (int from = 0; from < all; from += bits) {
    const int now = bits < all - from ? bits : all - from;
    TakeBits<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(In<X>(c, 0), lines, descending, from, now,
                                                         place_bits, from > 0, keys);
    CheckLaunch();
    uint64_t* const sorted = SortByBits(c, keys, spare, n, place_bits, now);
    if (sorted == nullptr) return nullptr;
    if (sorted != keys) std::swap(keys, spare);
  }
  return keys;
}

}  // namespace dtensor::cuda
