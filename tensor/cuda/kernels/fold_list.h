// Folds of whole runs of elements, many at once: what fold.h does for one array, for a list of
// them.
#pragma once

#include "dtensor/tensor/cuda/kernels/fold.h"

namespace dtensor::cuda {

// Runs of elements that are folded whole, each into one output, with the bits of RunFold: as many
// as the parameters of a kernel hold (32 KB).
inline constexpr int kMostListed = 384;
template <class Fold>
struct FoldList {
  struct Run {
    Fold fold;
    int64_t n, chunk;
    int chunks, lanes;
    typename Fold::Acc* parts;
  };
  int count = 0;
  unsigned blocks = 0, first[kMostListed];  // the first block of each
  Run runs[kMostListed];
};
// Which entry of an ascending list a block belongs to.
__device__ inline int EntryOf(const unsigned* first, int count, unsigned block) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (first[middle] <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// A block per chunk, as FoldChunks.
template <class Fold>
__global__ void __launch_bounds__(kThreads)
    FoldListChunks(const __grid_constant__ FoldList<Fold> list) {
  const int k = EntryOf(list.first, list.count, blockIdx.x);
  const typename FoldList<Fold>::Run& run = list.runs[k];
  const int lane = static_cast<int>(threadIdx.x) % run.lanes;
  const unsigned c = blockIdx.x - list.first[k];
  const int64_t begin = c * run.chunk, stop = begin + run.chunk;
  const int64_t end = stop < run.n ? stop : run.n;
  const Fold fold = run.fold;
  typename Fold::Acc acc = fold.Start();
  if (threadIdx.x == static_cast<unsigned>(lane)) {  // all that fold one output
#pragma unroll 4
    for (int64_t r = begin + lane; r < end; r += run.lanes)
      acc = fold.Join(acc, fold.Term(r, r, 0));
  }
  acc = JoinLanes(fold, acc, lane, run.lanes, 1);
  if (threadIdx.x != 0) return;
  if (run.parts == nullptr) {
    fold.Finish(0, acc);
  } else {
    run.parts[c] = acc;
  }
}
// A block per entry, as FoldParts.
template <class Fold>
__global__ void __launch_bounds__(kThreads)
    FoldListParts(const __grid_constant__ FoldList<Fold> list) {
  const typename FoldList<Fold>::Run& run = list.runs[blockIdx.x];
  if (run.parts == nullptr) return;
  const Fold fold = run.fold;
  const int lane = static_cast<int>(threadIdx.x);
  typename Fold::Acc acc = fold.Start();
  for (int c = lane; c < run.chunks; c += kThreads) acc = fold.Join(acc, run.parts[c]);
  acc = JoinLanes(fold, acc, lane, kThreads, 1);
  if (lane == 0) fold.Finish(0, acc);
}

template <class Fold>
void RunFoldList(const KernelCall& call, const FoldList<Fold>& list) {
  if (list.count == 0) return;
  FoldListChunks<Fold><<<list.blocks, kThreads, 0, StreamOf(call)>>>(list);
  CheckLaunch();
  bool parts = false;
  for (int k = 0; k < list.count; ++k) parts = parts || list.runs[k].parts != nullptr;
  if (!parts) return;
  FoldListParts<Fold><<<static_cast<unsigned>(list.count), kThreads, 0, StreamOf(call)>>>(list);
  CheckLaunch();
}

}  // namespace dtensor::cuda
