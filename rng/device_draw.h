// The samplers as GPU threads run them: what one thread of each kernel does, as host-device
// functions. A launch is a grid over `index`; on the host the same functions are called in a loop,
// which is how they are tested without a GPU.
//
// K1 fills an interval of g (Replicate, dim-0 and flat shards), K2 a box of columns, K3 dropout
// masks of whole groups, K4 tensors with no more elements than threads.
#pragma once

#include "dtensor/rng/philox.h"
#include "dtensor/rng/values.h"

namespace dtensor {

// One launch of the one-device op (RandomSegment of planner.h), as kernels take it.
struct DeviceSegment {
  PhiloxKeys keys;
  uint64_t block;          // of call 0: offset / 4
  int64_t first, threads;  // g of its first element; V
};

// All results of the block of a thread's call.
template <class Sampler, class T>
DT_RNG_FN void DrawBlock(const DeviceSegment& segment, const Sampler& sampler, int64_t thread,
                         int64_t call, T* results) {
  BlockResults(sampler,
               CurandBlock(segment.keys, segment.block + static_cast<uint64_t>(call),
                           static_cast<uint64_t>(thread)),
               results);
}

// Division of numbers below 2^63 by a divisor fixed at launch: a multiplication and a shift.
//   Source: Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994.
struct FastDivide {
  uint64_t divisor, magic = 0;
  int shift = 0;  // ceil(log2(divisor))
  explicit FastDivide(int64_t d) : divisor(static_cast<uint64_t>(d)) {
    while ((uint64_t{1} << shift) < divisor) ++shift;
    // floor(2^64 (2^shift - d) / d) + 1
    const unsigned __int128 top = static_cast<unsigned __int128>((uint64_t{1} << shift) - divisor)
                                  << 64;
    magic = static_cast<uint64_t>(top / divisor) + 1;
  }
};
DT_RNG_FN int64_t Divide(const FastDivide& d, int64_t n) {
  const auto u = static_cast<uint64_t>(n);
#ifdef __CUDA_ARCH__
  const uint64_t high = __umul64hi(d.magic, u);
#else
  const auto high = static_cast<uint64_t>((static_cast<unsigned __int128>(d.magic) * u) >> 64);
#endif
  if (d.shift == 0) return n;
  return static_cast<int64_t>((((u - high) >> 1) + high) >> (d.shift - 1));
}

// Elements [begin, end) of g, in order, to `out`.
template <class T>
struct IntervalJob {
  DeviceSegment segment;
  int64_t begin, end;
  T* out;
};
// Calls that have results in the interval: the first, and how many.
template <class Sampler, class T>
DT_RNG_FN int64_t FirstCall(const IntervalJob<T>& job) {
  return (job.begin - job.segment.first) / (job.segment.threads * kResults<Sampler>);
}
template <class Sampler, class T>
int64_t IntervalCalls(const IntervalJob<T>& job) {
  const int64_t sweep = job.segment.threads * kResults<Sampler>;
  return (job.end - 1 - job.segment.first) / sweep - FirstCall<Sampler>(job) + 1;
}
// Threads of a launch: one per Philox block that has a result in the interval, at most 2 V more.
template <class Sampler, class T>
int64_t IntervalThreads(const IntervalJob<T>& job) {
  return IntervalCalls<Sampler>(job) * job.segment.threads;
}
// K1: what calls first_call + k, first_call + k + step, ... of a thread draw, k below `calls`.
// Consecutive threads write consecutive elements. Where results lie is added up from call to call,
// and calls that lie inside of the interval do not look at each: 5 % less time for a uniform fill
// on an H100. (Which form of this loop ptxas makes fast has to be measured: others took a third
// more.)
template <class Sampler, class T>
DT_RNG_FN void IntervalRun(const IntervalJob<T>& job, const Sampler& sampler, int64_t thread,
                           int64_t first_call, int k, int calls, unsigned step) {
  constexpr int kCount = kResults<Sampler>;
  const int64_t threads = job.segment.threads, n = job.end - job.begin;
  const int64_t call = first_call + k;
  uint64_t block = job.segment.block + call;
  int64_t at = job.segment.first + call * threads * kCount + thread - job.begin;
  const int64_t sweep = threads * kCount * step;
  const int64_t inside =
      n - (kCount - 1) * threads;  // from here on some results are beyond the end
  T* out = job.out + at;           // used where it is in the interval only
  for (; k < calls; k += step, block += step, at += sweep, out += sweep) {
    T results[kCount];
    BlockResults(sampler, CurandBlock(job.segment.keys, block, static_cast<uint64_t>(thread)),
                 results);
    if (at >= 0 && at < inside) {
      for (int c = 0; c < kCount; ++c) out[c * threads] = results[c];
    } else {
      for (int c = 0; c < kCount; ++c) {
        const int64_t to = at + c * threads;
        if (to >= 0 && to < n) job.out[to] = results[c];
      }
    }
  }
}
template <class Sampler, class T>
DT_RNG_FN void IntervalThread(const IntervalJob<T>& job, const Sampler& sampler, int64_t index) {
  const int64_t threads = job.segment.threads;
  IntervalRun(job, sampler, index % threads, FirstCall<Sampler>(job) + index / threads, 0, 1, 1);
}

// Rows [row, row + rows) of a matrix of width W whose element (0, 0) is g = 0, columns
// [column, column + columns), written densely.
template <class T>
struct BoxJob {
  DeviceSegment segment;  // first 0: the whole matrix
  int64_t row, rows, column, columns;
  FastDivide width, local_width, threads;
  T* out;
};
template <class T>
int64_t BoxThreads(const BoxJob<T>& job) {
  return job.rows * job.columns;
}
// K2, a thread per local element: the one with the lowest result number of its block computes the
// block and writes every local result of it, the others leave.
template <class Sampler, class T>
DT_RNG_FN void BoxThread(const BoxJob<T>& job, const Sampler& sampler, int64_t index) {
  constexpr int kCount = kResults<Sampler>;
  const int64_t r = Divide(job.local_width, index), width = static_cast<int64_t>(job.width.divisor);
  const int64_t g = (job.row + r) * width + job.column + (index - r * job.columns);
  const int64_t q = Divide(job.threads, g), thread = g - q * job.segment.threads;
  const int64_t call = q / kCount;
  int64_t place[kCount];  // in the local box, -1 outside
  for (int c = 0; c < kCount; ++c) {
    const int64_t at = (call * kCount + c) * job.segment.threads + thread;
    const int64_t row = Divide(job.width, at), column = at - row * width;
    const bool local = row >= job.row && row < job.row + job.rows && column >= job.column &&
                       column < job.column + job.columns;
    if (local && c < q % kCount) return;
    place[c] = local ? (row - job.row) * job.columns + column - job.column : -1;
  }
  T results[kCount];
  DrawBlock(job.segment, sampler, thread, call, results);
  for (int c = 0; c < kCount; ++c) {
    if (place[c] >= 0) job.out[place[c]] = results[c];
  }
}

// Neighbours of type T that share the one or two blocks of a group of a dropout mask where nothing
// cuts groups (DropoutPlan): as many as 16 bytes hold, or 8.
template <class T>
constexpr int kDropoutVec = sizeof(T) == 2 ? 8 : 16 / static_cast<int>(sizeof(T));

// What dropout leaves of an element: x * mask * scale.
template <class T, class Acc>
DT_RNG_FN T Dropped(T x, bool stays, Acc scale) {
  const Acc factor = stays ? Acc(1) : Acc(0);
  if constexpr (std::is_same_v<Acc, double>) {
    return MulD(MulD(x, factor), scale);
  } else {
    return FromFloat<T>(MulF(MulF(Widen(x), factor), scale));
  }
}

// Elements [begin, end) of the whole, in groups of kDropoutVec: mask, and y.
template <class T, class Acc>
struct DropoutJob {
  DeviceSegment segment;  // of groups
  int64_t begin, end;
  float keep;  // u < keep
  Acc scale;
  const T* x;  // element begin on
  T* y;
  bool* mask;
};
template <class T, class Acc>
DT_RNG_FN int64_t DropoutThreads(const DropoutJob<T, Acc>& job) {
  return (job.end - 1) / kDropoutVec<T> - job.begin / kDropoutVec<T> + 1;
}
// K3, a thread per group that has elements of the interval: fused with load, mask, scale and store.
// A whole group that lies well is read and written at once.
template <class T, class Acc>
DT_RNG_FN void DropoutThread(const DropoutJob<T, Acc>& job, int64_t index) {
  constexpr int kVec = kDropoutVec<T>, kBlocks = kVec == 8 ? 2 : 1, kEach = kVec / kBlocks;
  const int64_t j = job.begin / kVec + index, call = j / job.segment.threads;
  uint64_t kept = 0;  // a byte for each, the first lowest
  for (int b = 0; b < kBlocks; ++b) {
    const PhiloxWords w =
        CurandBlock(job.segment.keys, job.segment.block + static_cast<uint64_t>(call * kBlocks + b),
                    static_cast<uint64_t>(j - call * job.segment.threads));
    const uint32_t words[4] = {w.x, w.y, w.z, w.w};
    for (int c = 0; c < kEach; ++c) {
      kept |= static_cast<uint64_t>(UniformFloat(words[c]) < job.keep) << (8 * (b * kEach + c));
    }
  }
  struct alignas(kVec * sizeof(T)) Group {
    T v[kVec];
  };
  struct alignas(kVec) Bools {
    bool v[kVec];
  };
  const auto aligned = [](const void* p, size_t bytes) {
    return reinterpret_cast<uintptr_t>(p) % bytes == 0;
  };
  const int64_t g = j * kVec;
  const int64_t at = g - job.begin;
  if (at >= 0 && g + kVec <= job.end && aligned(job.x + at, sizeof(Group)) &&
      aligned(job.y + at, sizeof(Group)) && aligned(job.mask + at, sizeof(Bools))) {
    Group group = *reinterpret_cast<const Group*>(job.x + at);
    Bools mask;
    for (int k = 0; k < kVec; ++k) {
      mask.v[k] = ((kept >> (8 * k)) & 1) != 0;
      group.v[k] = Dropped(group.v[k], mask.v[k], job.scale);
    }
    *reinterpret_cast<Group*>(job.y + at) = group;
    *reinterpret_cast<Bools*>(job.mask + at) = mask;
    return;
  }
  for (int k = 0; k < kVec; ++k) {
    if (g + k < job.begin || g + k >= job.end) continue;
    const bool stays = ((kept >> (8 * k)) & 1) != 0;
    job.mask[at + k] = stays;
    job.y[at + k] = Dropped(job.x[at + k], stays, job.scale);
  }
}

// K4, a thread per element of an interval of a tensor with at most V elements: only the first
// result of each block is anybody's.
template <class Sampler, class T>
DT_RNG_FN void SmallThread(const IntervalJob<T>& job, const Sampler& sampler, int64_t index) {
  T results[kResults<Sampler>];
  DrawBlock(job.segment, sampler, job.begin - job.segment.first + index, 0, results);
  job.out[index] = results[0];
}

}  // namespace dtensor
