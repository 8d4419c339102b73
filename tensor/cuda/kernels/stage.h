// Lines of an array in the shared memory of the block that works on them. What is held there is
// read from global memory once, and comes and goes in whole sectors of 32 bytes wherever lines
// begin. In which order a team adds has nothing to do with how much is held.
#pragma once

#include "dtensor/tensor/cuda/kernels/team.h"

namespace dtensor::cuda {

inline constexpr int kSector = 32;  // bytes that global memory moves at once
inline constexpr int kPackBytes = 16;
inline constexpr int64_t kSharedAlways = 32 << 10;  // that each device has beside a kernel's own

// Whether lines of n elements that follow each other begin amid sectors.
inline bool AmidSectors(int64_t n, int64_t size) { return n * size % kSector != 0; }

// --- host ---------------------------------------------------------------------------------------

// How much of `wanted` bytes of dynamic shared memory a launch of the kernel may have on the
// current device; it is allowed them.
template <class... Args>
int64_t SharedRoom(void (*kernel)(Args...), int64_t wanted) {
  if (wanted <= kSharedAlways) return wanted;
  int device = 0, most = 0;
  cudaFuncAttributes own = {};
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  }
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&own, kernel);
  const int room = most - static_cast<int>(own.sharedSizeBytes);
  // Always the same number: other threads launch it, too.
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
  }
  if (error != cudaSuccess) {
    NoteError(error);
    return kSharedAlways;
  }
  return wanted < room ? wanted : room;
}

// How much of its lines a block holds, of several arrays of elements of one size.
struct StagePlan {
  int64_t held = 0;  // the first elements of each line
  int64_t slot = 0;  // bytes of an array's
  size_t bytes = 0;  // of all

  StagePlan() = default;
  // Of lines that registers hold (Stage::kRows) always all: devices have room for these.
  template <class... Args>
  StagePlan(void (*kernel)(Args...), const TeamPlan& plan, int64_t n, int arrays, int64_t size) {
    const int64_t each = plan.teams() * size * arrays, around = 2 * kPackBytes * arrays;
    // Teams of neighbouring lines read with little ahead: several blocks have to fit.
    const int64_t all = n * each + around;
    const int64_t wanted = plan.rows || all < kSharedAlways ? all : kSharedAlways;
    const int64_t fits = (SharedRoom(kernel, wanted) - around) / each;
    held = fits >= n || plan.holds ? n : fits < 0 ? 0 : fits;
    slot = SlotOf(held * plan.teams() * size);
    bytes = static_cast<size_t>(slot * arrays);
  }
  // Room for them and what is in front of them in their pack.
  static int64_t SlotOf(int64_t bytes) {
    return (bytes + 2 * kPackBytes - 1) / kPackBytes * kPackBytes;
  }
};

// --- device -------------------------------------------------------------------------------------

__device__ inline char* DynamicShared() {
  extern __shared__ __align__(16) char dynamic_shared[];
  return dynamic_shared;
}
// Where elements that lie at `global` are put so that packs of both lie alike.
template <class X>
__device__ inline X* PlaceFor(const X* global, char* slot) {
  return reinterpret_cast<X*>(slot + reinterpret_cast<uintptr_t>(global) % kPackBytes);
}

// n elements from one place to another by all threads of the block, in whole sectors of `global`,
// which is the one of both in global memory.
template <class X>
__device__ inline void CopyBySectors(const X* from, X* to, int64_t n, const X* global) {
  constexpr int kEach = kPackBytes / static_cast<int>(sizeof(X));
  const auto amid = static_cast<int>(reinterpret_cast<uintptr_t>(global) % kSector);
  const int64_t before = (kSector - amid) % kSector / static_cast<int>(sizeof(X));
  const int64_t head = before < n ? before : n;
  const int t = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  if (t < head) to[t] = from[t];
  int64_t done = head;
  const auto apart = reinterpret_cast<uintptr_t>(from) ^ reinterpret_cast<uintptr_t>(to);
  if (apart % kPackBytes == 0) {
    const int64_t packs = (n - head) / kEach;
    const auto* const source = reinterpret_cast<const uint4*>(from + head);
    auto* const target = reinterpret_cast<uint4*>(to + head);
#pragma unroll 4
    for (int64_t p = t; p < packs; p += threads) target[p] = source[p];
    done += packs * kEach;
  }
#pragma unroll 4
  for (int64_t i = done + t; i < n; i += threads) to[i] = from[i];
}

// The lines of a contiguous [lines / inner, n, inner] that a block has, and its team's among them.
struct BlockLines {
  int64_t n, inner, first, count;  // of the block: its first line, how many
  int64_t base, mine;  // where the team's begins, and its elements: none behind the last line
  __device__ BlockLines(const Team& team, int64_t n, int64_t inner, int64_t lines, int64_t first)
      : n(n), inner(inner), first(first) {
    const int64_t teams = team.teams(), line = first + team.number;
    count = lines - first < teams ? lines - first : teams;
    const bool is = line < lines;  // others come along: teams of a block wait for each other
    mine = is ? n : 0;
    base = is ? line / inner * n * inner + line % inner : 0;
  }
  __device__ BlockLines(const Team& team, int64_t n, int64_t inner, int64_t lines)
      : BlockLines(team, n, inner, lines, static_cast<int64_t>(blockIdx.x) * team.teams()) {}
};

// What of its lines a block holds: nothing; all of neighbouring rows; of any lines what fits.
enum class Stage { kNone, kRows, kPart };

// One array's lines as a team reads and writes them: where they lie, or what is held of them.
template <class X, Stage kStage>
class Lines {
 public:
  using T = Computed<X>;
  // Number `array` of those of the plan. Unless kNone all threads of the block come, and wait for
  // each other before they read.
  __device__ Lines(const Team& team, const BlockLines& at, const StagePlan& stage, int array,
                   const X* x)
      : global_(x + at.base), step_(at.inner) {
    if constexpr (kStage == Stage::kNone) return;
    held_ = kStage == Stage::kRows ? at.n : stage.held;
    rows_ = team.rows();
    char* const slot = DynamicShared() + array * stage.slot;
    if (kStage == Stage::kRows || rows_) {
      const X* const begin = x + at.first * at.n;
      X* const block = PlaceFor(begin, slot);
      CopyBySectors(begin, block, Held(at), begin);
      shared_ = block + team.number * at.n;
    } else {
      shared_ = reinterpret_cast<X*>(slot) + team.number;
      shared_step_ = team.teams();
      const int64_t end = at.mine < held_ ? at.mine : held_;
#pragma unroll 4
      for (int64_t i = team.lane; i < end; i += team.lanes) {
        shared_[i * shared_step_] = global_[i * step_];
      }
    }
  }
  __device__ T operator()(int64_t i) const {
    if constexpr (kStage == Stage::kRows) return Widen(shared_[i]);
    if constexpr (kStage == Stage::kPart) {
      if (i < held_) return Widen(shared_[i * shared_step_]);
    }
    return Widen(global_[i * step_]);
  }
  // What becomes element i of an array of the same form; the lane has read what is there. `Send`
  // brings what was held to `out`, by all threads of the block, who may put nothing else until it
  // is there.
  __device__ void Put(int64_t i, T v, const BlockLines& at, X* out) const {
    if constexpr (kStage == Stage::kRows) return Store(v, shared_ + i);
    if constexpr (kStage == Stage::kPart) {
      if (rows_ && i < held_) return Store(v, shared_ + i);
    }
    Store(v, out + at.base + i * step_);
  }
  __device__ void Send(const Team& team, const BlockLines& at, X* out) const {
    if constexpr (kStage == Stage::kNone) return;
    if (kStage == Stage::kPart && !rows_) return;
    __syncthreads();
    X* const begin = out + at.first * at.n;
    CopyBySectors<X>(shared_ - team.number * at.n, begin, Held(at), begin);
    __syncthreads();
  }

 private:
  // Elements of the block's lines that are held. Of several lines, which are short, all.
  __device__ int64_t Held(const BlockLines& at) const {
    return kStage == Stage::kRows || held_ == at.n ? at.count * at.n : held_;
  }
  const X* global_;
  int64_t step_;
  X* shared_ = nullptr;
  int64_t held_ = 0, shared_step_ = 1;
  bool rows_ = true;
};

// visit(x) of each element of the team's line in turn, read once; where kStaged by tiles of the
// block's lines in shared memory, of which a launch needs kStageTileBytes.
inline constexpr int kStageTile = kMostThreads * kHeld;
template <class X>
inline constexpr size_t kStageTileBytes = kStageTile * sizeof(X) + kPackBytes;
template <bool kStaged, class X, class Visit>
__device__ inline void ForOnce(const Team& team, const BlockLines& at, const X* x,
                               const Visit& visit) {
  if constexpr (!kStaged) {
    ForLane<false>(team, at.mine, [&](int, int64_t i) { visit(Widen(x[at.base + i])); });
  } else {
    // One line, or several that a tile holds.
    const X* const begin = x + at.first * at.n;
    const int64_t all = at.count * at.n, line = team.number * at.n;
    for (int64_t tile = 0; tile < all; tile += kStageTile) {
      const int64_t n = all - tile < kStageTile ? all - tile : kStageTile;
      X* const held = PlaceFor(begin + tile, DynamicShared());
      CopyBySectors(begin + tile, held, n, begin + tile);
      __syncthreads();
      for (int64_t i = tile + team.lane; i < at.mine && line + i < tile + n; i += team.lanes) {
        visit(Widen(held[line + i - tile]));
      }
      __syncthreads();
    }
  }
}

}  // namespace dtensor::cuda
