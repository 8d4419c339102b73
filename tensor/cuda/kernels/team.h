// Lines of an array, each the work of a team of threads that keep it in registers where it is short
// enough, so that it is read once.
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

inline constexpr int kHeld = 8;  // elements of a line that a thread keeps
inline constexpr int kMostThreads = 512;

// Threads that share a line. Where elements of a line are neighbours so are the threads of a team,
// else the threads of neighbouring lines are.
struct TeamPlan {
  int lanes, threads;  // of a team, of a block; powers of two
  bool rows, holds;
  TeamPlan(int64_t n, bool rows) : rows(rows) {
    lanes = PowerOfTwo(n, rows ? 32 : 8);
    if (rows && n > 32 * kHeld) lanes = PowerOfTwo((n + kHeld - 1) / kHeld, kMostThreads);
    threads = lanes > kThreads ? lanes : kThreads;
    holds = n <= static_cast<int64_t>(lanes) * kHeld;
  }
  int teams() const { return threads / lanes; }  // of a block
};

// This thread's team. All threads of a block call its functions together.
class Team {
 public:
  __device__ explicit Team(const TeamPlan& plan) : lanes(plan.lanes), rows_(plan.rows) {
    const int t = static_cast<int>(threadIdx.x), teams = static_cast<int>(blockDim.x) / lanes;
    lane = rows_ ? t % lanes : t / teams;
    number = rows_ ? t / lanes : t % teams;
    teams_ = teams;
  }
  int lane, lanes, number;
  __device__ int teams() const { return teams_; }  // of the block
  __device__ bool rows() const { return rows_; }

  // What join makes of every lane's x, in a fixed order; every lane gets it.
  template <class T, class Join>
  __device__ T All(T x, const Join& join) const {
    __shared__ T shared[kMostThreads];
    if (rows_) {
      for (int d = (lanes < 32 ? lanes : 32) / 2; d > 0; d /= 2) {
        x = join(x, __shfl_xor_sync(~0u, x, d));
      }
      if (lanes <= 32) return x;
      const int warp = static_cast<int>(threadIdx.x) / 32, first = number * (lanes / 32);
      if (threadIdx.x % 32 == 0) shared[warp] = x;
      __syncthreads();
      x = shared[first];
      for (int k = 1; k < lanes / 32; ++k) x = join(x, shared[first + k]);
    } else {
      shared[threadIdx.x] = x;
      __syncthreads();
      x = shared[number];
      for (int k = 1; k < lanes; ++k) x = join(x, shared[number + k * teams_]);
    }
    __syncthreads();
    return x;
  }
  template <class T>
  __device__ T Sum(T x) const {
    return All(x, [](T a, T b) { return a + b; });
  }
  template <class T>
  __device__ T Max(T x) const {
    return All(x, [](T a, T b) { return Maximum(a, b); });
  }

 private:
  int teams_;
  bool rows_;
};

// visit(k, i) for each element i of the line that is this lane's, number k of them.
template <bool kHolds, class Visit>
__device__ inline void ForLane(const Team& team, int64_t n, const Visit& visit) {
  if constexpr (kHolds) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int i = team.lane + k * team.lanes;  // what is held is short
      if (i < static_cast<int>(n)) visit(k, i);
    }
  } else {
    for (int64_t i = team.lane; i < n; i += team.lanes) visit(0, i);
  }
}

// A line as the lane reads it, of a source(i) that has its elements: once, where it is held.
template <class Source, bool kHolds>
class Line {
 public:
  using T = typename Source::T;
  __device__ Line(const Team& team, const Source& source, int64_t n) : source_(source) {
    if constexpr (kHolds) {
      ForLane<true>(team, n, [&](int k, int64_t i) { held_[k] = source(i); });
    }
  }
  __device__ T operator()(int k, int64_t i) const {
    if constexpr (kHolds) return held_[k];
    return source_(i);
  }

 private:
  Source source_;
  T held_[kHolds ? kHeld : 1];
};

}  // namespace dtensor::cuda
