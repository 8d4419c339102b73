// Items that go to targets, in the order of targets and, of one target, in that of the items: what
// adds up contributions goes through it, so that sums have the order of the CPU's.
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"
#include "dtensor/tensor/cuda/radix.h"

namespace dtensor::cuda {

// Items by their targets: a key has the item in its lowest bits and the target above. Items that go
// nowhere have the target behind the last one.
struct SortedItems {
  int64_t items, targets;
  int item_bits;
  SortedItems(int64_t n, int64_t num_targets)
      : items(n), targets(num_targets), item_bits(BitsOf(static_cast<uint64_t>(n))) {}
  __device__ uint64_t Key(int64_t target, int64_t item) const {
    return static_cast<uint64_t>(target) << item_bits | static_cast<uint64_t>(item);
  }
  __device__ int64_t Target(uint64_t key) const { return static_cast<int64_t>(key >> item_bits); }
  __device__ int64_t Item(uint64_t key) const {
    return static_cast<int64_t>(key & LowBits(item_bits));
  }
};

// target(i): where item i goes, or -1.
template <class Target>
__global__ void __launch_bounds__(kThreads)
    MakeKeys(Target target, SortedItems by, uint64_t* keys) {
  for (int64_t i = GridStart(); i < by.items; i += GridStep()) {
    const int64_t to = target(i);
    keys[i] = by.Key(to < 0 ? by.targets : to, i);
  }
}

// For every target that has items, and each of `width` columns: acc = apply.Start(target, column),
// then acc = apply.Add(acc, item, column) in the order of items, then apply.Finish(target, column,
// acc). Apply stays where parameters lie: what is copied and indexed lies in local memory.
template <class Apply>
__global__ void __launch_bounds__(kThreads)
    ForSegments(const __grid_constant__ Apply apply, SortedItems by, const uint64_t* keys,
                int64_t width) {
  for (int64_t w = GridStart(); w < by.items * width; w += GridStep()) {
    int64_t k = w / width;
    const int64_t column = w - k * width, target = by.Target(keys[k]);
    if (target == by.targets) return;
    if (k > 0 && by.Target(keys[k - 1]) == target) continue;
    auto acc = apply.Start(target, column);
    do {
      acc = apply.Add(acc, by.Item(keys[k]), column);
    } while (++k < by.items && by.Target(keys[k]) == target);
    apply.Finish(target, column, acc);
  }
}

// n items; targets are 0 to num_targets - 1.
template <class Target, class Apply>
void RunSegments(const KernelCall& c, const Target& target, const Apply& apply, int64_t n,
                 int64_t num_targets, int64_t width) {
  if (n == 0) return;
  const SortedItems by(n, num_targets);
  auto *keys = Scratch<uint64_t>(c, n), *spare = Scratch<uint64_t>(c, n);
  if (keys == nullptr || spare == nullptr) return;
  MakeKeys<<<BlocksFor(n), kThreads, 0, StreamOf(c)>>>(target, by, keys);
  CheckLaunch();
  if (n * width * num_targets == 0) return;
  keys = SortByBits(c, keys, spare, n, by.item_bits, BitsOf(static_cast<uint64_t>(num_targets)));
  if (keys == nullptr) return;
  ForSegments<<<BlocksFor(n * width), kThreads, 0, StreamOf(c)>>>(apply, by, keys, width);
  CheckLaunch();
}

}  // namespace dtensor::cuda
