// Items that go to targets, in the order of targets and, of one target, in that of the items: what
// adds up contributions goes through it, so that sums have the order of the CPU's.
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

// A key is target * number of items + item: no two are equal. Items that go nowhere come last.
inline constexpr uint64_t kNowhere = ~uint64_t{0};

inline constexpr int kSortTile = 1024;  // keys that a block sorts in shared memory

// One step of a bitonic network: pairs at distance `stride` within runs of `size`, which ascend
// and descend in turns. Pair number p.
struct BitonicPair {
  int64_t low, high;
  bool ascends;
  __device__ BitonicPair(int64_t p, int64_t size, int64_t stride) {
    low = (p & ~(stride - 1)) << 1 | (p & (stride - 1));
    high = low + stride;
    ascends = (low & size) == 0;
  }
};
__device__ inline void Order(uint64_t* a, uint64_t* b, bool ascends) {
  if ((*a > *b) != ascends) return;
  const uint64_t t = *a;
  *a = *b;
  *b = t;
}

// Steps whose pairs lie within a tile: all up to runs of a tile (from == 2), or the rest of those
// of runs of `from`.
static __global__ void __launch_bounds__(kSortTile / 2)
    SortTiles(uint64_t* keys, int64_t from, int64_t to) {
  __shared__ uint64_t tile[kSortTile];
  const int64_t first = blockIdx.x * int64_t{kSortTile};
  const int t = static_cast<int>(threadIdx.x);
  tile[t] = keys[first + t];
  tile[t + kSortTile / 2] = keys[first + t + kSortTile / 2];
  for (int64_t size = from; size <= to; size *= 2) {
    int64_t stride = size / 2;
    if (stride > kSortTile / 2) stride = kSortTile / 2;
    for (; stride > 0; stride /= 2) {
      __syncthreads();
      const BitonicPair pair(first / 2 + t, size, stride);
      Order(&tile[pair.low - first], &tile[pair.high - first], pair.ascends);
    }
  }
  __syncthreads();
  keys[first + t] = tile[t];
  keys[first + t + kSortTile / 2] = tile[t + kSortTile / 2];
}
static __global__ void __launch_bounds__(kThreads)
    SortStep(uint64_t* keys, int64_t pairs, int64_t size, int64_t stride) {
  for (int64_t p = GridStart(); p < pairs; p += GridStep()) {
    const BitonicPair pair(p, size, stride);
    Order(&keys[pair.low], &keys[pair.high], pair.ascends);
  }
}

// How many keys SortKeys wants for n of them; those after the n are kNowhere.
inline int64_t KeysFor(int64_t n) {
  int64_t room = kSortTile;
  while (room < n) room *= 2;
  return room;
}
// Ascending; `room` is KeysFor something.
//   Source: Batcher 1968, bitonic sorting.
static inline void SortKeys(const KernelCall& c, uint64_t* keys, int64_t room) {
  const auto tiles = static_cast<unsigned>(room / kSortTile);
  SortTiles<<<tiles, kSortTile / 2, 0, StreamOf(c)>>>(keys, 2, kSortTile);
  CheckLaunch();
  for (int64_t size = 2 * kSortTile; size <= room; size *= 2) {
    for (int64_t stride = size / 2; stride > kSortTile / 2; stride /= 2) {
      SortStep<<<BlocksFor(room / 2), kThreads, 0, StreamOf(c)>>>(keys, room / 2, size, stride);
      CheckLaunch();
    }
    SortTiles<<<tiles, kSortTile / 2, 0, StreamOf(c)>>>(keys, size, size);
    CheckLaunch();
  }
}

// target(i): where item i goes, or -1.
template <class Target>
__global__ void __launch_bounds__(kThreads)
    MakeKeys(Target target, uint64_t* keys, int64_t n, int64_t room) {
  for (int64_t i = GridStart(); i < room; i += GridStep()) {
    const int64_t to = i < n ? target(i) : -1;
    keys[i] = to < 0
                  ? kNowhere
                  : static_cast<uint64_t>(to) * static_cast<uint64_t>(n) + static_cast<uint64_t>(i);
  }
}

// For every target that has items, and each of `width` columns: apply.Start(target, column), then
// apply.Add(item, column) in the order of items, then apply.Finish(target, column). Apply is
// copied.
template <class Apply>
__global__ void __launch_bounds__(kThreads)
    ForSegments(Apply apply, const uint64_t* keys, uint64_t n, int64_t width) {
  const int64_t all = static_cast<int64_t>(n) * width;
  for (int64_t w = GridStart(); w < all; w += GridStep()) {
    const int64_t k = w / width, column = w - k * width;
    const uint64_t key = keys[k];
    if (key == kNowhere) return;
    const uint64_t target = key / n;
    if (k > 0 && keys[k - 1] / n == target) continue;
    Apply own = apply;
    own.Start(static_cast<int64_t>(target), column);
    uint64_t at = key;
    for (uint64_t next = static_cast<uint64_t>(k);;) {
      own.Add(static_cast<int64_t>(at - target * n), column);
      if (++next >= n) break;
      at = keys[next];
      if (at == kNowhere || at / n != target) break;
    }
    own.Finish(static_cast<int64_t>(target), column);
  }
}

template <class Target, class Apply>
void RunSegments(const KernelCall& c, const Target& target, const Apply& apply, int64_t n,
                 int64_t width) {
  if (n == 0) return;
  const int64_t room = KeysFor(n);
  auto* keys = Scratch<uint64_t>(c, room);
  if (keys == nullptr) return;
  MakeKeys<<<BlocksFor(room), kThreads, 0, StreamOf(c)>>>(target, keys, n, room);
  CheckLaunch();
  SortKeys(c, keys, room);
  if (width == 0) return;
  ForSegments<<<BlocksFor(n * width), kThreads, 0, StreamOf(c)>>>(apply, keys,
                                                                  static_cast<uint64_t>(n), width);
  CheckLaunch();
}

}  // namespace dtensor::cuda
