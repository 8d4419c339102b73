// Items that go to targets, in the order of targets and, of one target, in that of the items: what
// adds up contributions goes through it, so that sums have the order of the CPU's.
#pragma once

#include "dtensor/tensor/cuda/kernels/bitonic.h"

namespace dtensor::cuda {

// A key is target * number of items + item: no two are equal. Items that go nowhere come last.
inline constexpr uint64_t kNowhere = ~uint64_t{0};

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

// For every target that has items, and each of `width` columns: acc = apply.Start(target, column),
// then acc = apply.Add(acc, item, column) in the order of items, then apply.Finish(target, column,
// acc). Apply stays where parameters lie: what is copied and indexed lies in local memory.
template <class Apply>
__global__ void __launch_bounds__(kThreads)
    ForSegments(const __grid_constant__ Apply apply, const uint64_t* keys, uint64_t n,
                int64_t width) {
  const int64_t all = static_cast<int64_t>(n) * width;
  for (int64_t w = GridStart(); w < all; w += GridStep()) {
    const int64_t k = w / width, column = w - k * width;
    const uint64_t key = keys[k];
    if (key == kNowhere) return;
    const uint64_t target = key / n;
    if (k > 0 && keys[k - 1] / n == target) continue;
    auto acc = apply.Start(static_cast<int64_t>(target), column);
    uint64_t at = key;
    for (uint64_t next = static_cast<uint64_t>(k);;) {
      acc = apply.Add(acc, static_cast<int64_t>(at - target * n), column);
      if (++next >= n) break;
      at = keys[next];
      if (at == kNowhere || at / n != target) break;
    }
    apply.Finish(static_cast<int64_t>(target), column, acc);
  }
}

template <class Target, class Apply>
void RunSegments(const KernelCall& c, const Target& target, const Apply& apply, int64_t n,
                 int64_t width) {
  if (n == 0) return;
  const int64_t room = RoomFor(n, kSortTile);
  auto* keys = Scratch<uint64_t>(c, room);
  if (keys == nullptr) return;
  MakeKeys<<<BlocksFor(room), kThreads, 0, StreamOf(c)>>>(target, keys, n, room);
  CheckLaunch();
  SortLines(c, keys, room, room);
  if (width == 0) return;
  ForSegments<<<BlocksFor(n * width), kThreads, 0, StreamOf(c)>>>(apply, keys,
                                                                  static_cast<uint64_t>(n), width);
  CheckLaunch();
}

}  // namespace dtensor::cuda
