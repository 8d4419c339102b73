// Reductions of any dims of a strided array in an order that the shape alone decides: the same bits
// on every device and for every layout in memory.
//
// A fold is a struct by value with
//   Acc                      what is carried
//   Acc Start()              of nothing
//   Acc Term(at, r, o)       of the element at offset `at`, number r of those of output o
//   Acc Join(a, b)
//   void Finish(o, acc)      writes output o
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

// Some dims of an array, outermost first, neighbours merged where their strides allow.
struct Walk {
  int ndim = 0;
  int64_t sizes[kMaxDims], strides[kMaxDims];

  void Append(int64_t size, int64_t stride) {
    if (size == 1) return;
    if (ndim > 0 && strides[ndim - 1] == size * stride) {
      sizes[ndim - 1] *= size;
      strides[ndim - 1] = stride;
      return;
    }
    sizes[ndim] = size;
    strides[ndim++] = stride;
  }
  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim; ++d) n *= sizes[d];
    return n;
  }
  __device__ int64_t At(int64_t i) const {
    int64_t at = 0;
    for (int d = ndim - 1; d > 0; --d) {
      // Divisions of 64 bits are slow, and seldom needed.
      const int64_t size = sizes[d];
      const int64_t rest =
          (i | size) >> 32 == 0 ? static_cast<uint32_t>(i) / static_cast<uint32_t>(size) : i / size;
      at += (i - rest * size) * strides[d];
      i = rest;
    }
    return ndim == 0 ? 0 : at + i * strides[0];
  }
};

struct FoldPlan {
  Walk kept, folded;
  int64_t outs, n;    // how many outputs, and elements of each
  int64_t chunk;      // elements that a block folds
  int chunks, lanes;  // threads that share an output: a power of two
  bool rows;          // whether these are neighbours

  // `axes`: ascending.
  FoldPlan(const TensorRef& x, const int64_t* axes, int64_t num_axes) {
    int64_t next = 0;
    bool last = false;
    for (int d = 0; d < x.ndim; ++d) {
      last = next < num_axes && axes[next] == d;
      if (last) ++next;
      (last ? folded : kept).Append(x.sizes[d], x.strides[d]);
    }
    Divide(last);
  }
  FoldPlan(const TensorRef& x, const Attr& axes) : FoldPlan(x, axes.ints, axes.n) {}
  // Columns of a contiguous [n, outs].
  FoldPlan(int64_t rows_of_parts, int64_t columns) {
    kept.Append(columns, 1);
    folded.Append(rows_of_parts, columns);
    Divide(false);
  }
  int64_t blocks() const { return (outs + kThreads / lanes - 1) / (kThreads / lanes); }

 private:
  // By sizes alone.
  void Divide(bool last_is_folded) {
    constexpr int64_t kLeast = 4096, kEnough = 512;
    outs = kept.numel();
    n = folded.numel();
    rows = last_is_folded || outs == 1;
    lanes = PowerOfTwo((n + 3) / 4, rows ? kThreads : 8);
    const int64_t spare = blocks() == 0 ? 1 : kEnough / blocks();
    const int64_t wanted = (n + kLeast - 1) / kLeast, most = spare < 1 ? 1 : spare;
    chunks = static_cast<int>(wanted < 1 ? 1 : wanted < most ? wanted : most);
    chunk = (n + chunks - 1) / chunks;
  }
};

// Joins what the lanes of each output have; the first of them gets it.
template <class Fold>
__device__ typename Fold::Acc JoinLanes(const Fold& fold, typename Fold::Acc acc, int lane,
                                        int lanes, int step) {
  using Acc = typename Fold::Acc;
  __shared__ alignas(Acc) char memory[kThreads * sizeof(Acc)];
  Acc* const all = reinterpret_cast<Acc*>(memory);
  all[threadIdx.x] = acc;
  for (int d = lanes / 2; d > 0; d /= 2) {
    __syncthreads();
    if (lane < d) all[threadIdx.x] = fold.Join(all[threadIdx.x], all[threadIdx.x + d * step]);
  }
  return all[threadIdx.x];
}

// Chunk blockIdx.y of some outputs; to `parts` [chunks, outs] where there are several.
template <class Fold>
__global__ void __launch_bounds__(kThreads, 1)
    FoldChunks(Fold fold, FoldPlan plan, typename Fold::Acc* parts) {
  const int t = static_cast<int>(threadIdx.x), lanes = plan.lanes, width = kThreads / lanes;
  const int lane = plan.rows ? t % lanes : t / width, column = plan.rows ? t / lanes : t % width;
  const int64_t begin = blockIdx.y * plan.chunk, stop = begin + plan.chunk;
  const int64_t end = stop < plan.n ? stop : plan.n;
  const int64_t o = blockIdx.x * static_cast<int64_t>(width) + column;
  typename Fold::Acc acc = fold.Start();
  if (o < plan.outs) {
    const int64_t base = plan.kept.At(o);
#pragma unroll 4
    for (int64_t r = begin + lane; r < end; r += lanes) {
      acc = fold.Join(acc, fold.Term(base + plan.folded.At(r), r, o));
    }
  }
  acc = JoinLanes(fold, acc, lane, lanes, plan.rows ? 1 : width);
  if (lane != 0 || o >= plan.outs) return;
  if (parts == nullptr) {
    fold.Finish(o, acc);
  } else {
    parts[blockIdx.y * plan.outs + o] = acc;
  }
}

// A block per output.
template <class Fold>
__global__ void __launch_bounds__(kThreads)
    FoldParts(Fold fold, const typename Fold::Acc* parts, int64_t outs, int chunks) {
  const int64_t o = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x);
  typename Fold::Acc acc = fold.Start();
  for (int c = lane; c < chunks; c += kThreads) acc = fold.Join(acc, parts[c * outs + o]);
  acc = JoinLanes(fold, acc, lane, kThreads, 1);
  if (lane == 0) fold.Finish(o, acc);
}

template <class Fold>
void RunFold(const KernelCall& call, const Fold& fold, const FoldPlan& plan) {
  using Acc = typename Fold::Acc;
  if (plan.outs == 0) return;
  Acc* parts = nullptr;
  if (plan.chunks > 1) {
    parts = Scratch<Acc>(call, plan.chunks * plan.outs);
    if (parts == nullptr) return;
  }
  const dim3 grid(static_cast<unsigned>(plan.blocks()), static_cast<unsigned>(plan.chunks));
  FoldChunks<<<grid, kThreads, 0, StreamOf(call)>>>(fold, plan, parts);
  CheckLaunch();
  if (parts == nullptr) return;
  FoldParts<<<static_cast<unsigned>(plan.outs), kThreads, 0, StreamOf(call)>>>(
      fold, parts, plan.outs, plan.chunks);
  CheckLaunch();
}

}  // namespace dtensor::cuda
