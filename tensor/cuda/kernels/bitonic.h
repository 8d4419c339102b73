// Sorting in place by a bitonic network: the same steps whatever the keys are. No two keys of a
// line may be equal, so the order is fixed. after(a, b): whether a comes after b.
//   Source: Batcher 1968.
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

inline constexpr int kSortTile = 1024;  // keys that a block sorts in shared memory

// One step of the network in lines of `room` keys: pairs at distance `stride` within runs of
// `size`, which ascend and descend in turns. Pair number p.
struct BitonicPair {
  int64_t low, high;
  bool ascends;
  __device__ BitonicPair(int64_t p, int64_t size, int64_t stride, int64_t room) {
    low = (p & ~(stride - 1)) << 1 | (p & (stride - 1));
    high = low + stride;
    ascends = (low & (room - 1) & size) == 0;
  }
};
struct After {
  template <class Key>
  __device__ bool operator()(const Key& a, const Key& b) const {
    return a > b;
  }
};
template <class Key, class Compare>
__device__ void Order(Key* a, Key* b, bool ascends, const Compare& after) {
  if (after(*a, *b) != ascends) return;
  const Key t = *a;
  *a = *b;
  *b = t;
}

// Steps whose pairs lie within a tile: of runs of `from` up to runs of `to`.
template <class Key, class Compare>
__global__ void __launch_bounds__(kSortTile / 2)
    SortTiles(Key* keys, int64_t from, int64_t to, int64_t room, Compare after) {
  __shared__ alignas(Key) char memory[kSortTile * sizeof(Key)];
  Key* const tile = reinterpret_cast<Key*>(memory);
  const int64_t first = blockIdx.x * int64_t{kSortTile};
  const int t = static_cast<int>(threadIdx.x);
  tile[t] = keys[first + t];
  tile[t + kSortTile / 2] = keys[first + t + kSortTile / 2];
  for (int64_t size = from; size <= to; size *= 2) {
    int64_t stride = size / 2;
    if (stride > kSortTile / 2) stride = kSortTile / 2;
    for (; stride > 0; stride /= 2) {
      __syncthreads();
      const BitonicPair pair(first / 2 + t, size, stride, room);
      Order(&tile[pair.low - first], &tile[pair.high - first], pair.ascends, after);
    }
  }
  __syncthreads();
  keys[first + t] = tile[t];
  keys[first + t + kSortTile / 2] = tile[t + kSortTile / 2];
}
template <class Key, class Compare>
__global__ void __launch_bounds__(kThreads)
    SortStep(Key* keys, int64_t pairs, int64_t size, int64_t stride, int64_t room, Compare after) {
  for (int64_t p = GridStart(); p < pairs; p += GridStep()) {
    const BitonicPair pair(p, size, stride, room);
    Order(&keys[pair.low], &keys[pair.high], pair.ascends, after);
  }
}

// Keys that a line of n needs: a power of two, at least `least`.
inline int64_t RoomFor(int64_t n, int64_t least) {
  int64_t room = least;
  while (room < n) room *= 2;
  return room;
}
// Sorts lines of `room` keys each, at most a tile; `all` keys are whole tiles.
template <class Key, class Compare = After>
void SortShortLines(const KernelCall& c, Key* keys, int64_t all, int64_t room, Compare after = {}) {
  SortTiles<<<static_cast<unsigned>(all / kSortTile), kSortTile / 2, 0, StreamOf(c)>>>(
      keys, int64_t{2}, room, room, after);
  CheckLaunch();
}
// Sorts one line of `room` keys, a tile or more.
template <class Key, class Compare>
void SortLine(const KernelCall& c, Key* keys, int64_t room, Compare after) {
  const auto tiles = static_cast<unsigned>(room / kSortTile);
  SortTiles<<<tiles, kSortTile / 2, 0, StreamOf(c)>>>(keys, int64_t{2}, int64_t{kSortTile}, room,
                                                      after);
  CheckLaunch();
  for (int64_t size = 2 * kSortTile; size <= room; size *= 2) {
    for (int64_t stride = size / 2; stride > kSortTile / 2; stride /= 2) {
      SortStep<<<BlocksFor(room / 2), kThreads, 0, StreamOf(c)>>>(keys, room / 2, size, stride,
                                                                  room, after);
      CheckLaunch();
    }
    SortTiles<<<tiles, kSortTile / 2, 0, StreamOf(c)>>>(keys, size, size, room, after);
    CheckLaunch();
  }
}

}  // namespace dtensor::cuda
