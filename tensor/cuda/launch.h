// What kernels of the CUDA plugin share: sizes of grids, strided arrays as arguments of a kernel,
// what went wrong with a launch, and what a kernel says of its data.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

#include "dtensor/tensor/cuda/kernels.h"

namespace dtensor::cuda {

// --- launches -----------------------------------------------------------------------------------

inline constexpr int kThreads = 256;  // of a block, unless a kernel has reasons for others

inline cudaStream_t StreamOf(const KernelCall& call) {
  return static_cast<cudaStream_t>(call.stream);
}

// Blocks for so many threads' work; kernels go on in steps of the grid (GridStart, GridStep) where
// there is more than a grid holds.
inline unsigned BlocksFor(int64_t work, int threads = kThreads) {
  constexpr int64_t kMost = 1 << 20;
  const int64_t blocks = (work + threads - 1) / threads;
  return static_cast<unsigned>(blocks < kMost ? blocks : kMost);
}
__device__ inline int64_t GridStart() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t GridStep() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Keeps the first error of this thread until the table's next function tells of it: kernels return
// nothing.
void NoteError(cudaError_t error);
// To be called after each launch.
inline void CheckLaunch() { NoteError(cudaGetLastError()); }

// Memory of n elements until the call returns; later work of the stream may use it again then. Null
// where there is none: the kernel returns, and the call has failed.
template <class T>
T* Scratch(const KernelCall& call, int64_t n) {
  return static_cast<T*>(call.workspace->Allocate(n * static_cast<int64_t>(sizeof(T))));
}

inline bool IsContiguous(const TensorRef& t) {
  int64_t stride = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.sizes[d] != 1 && t.strides[d] != stride) return false;
    stride *= t.sizes[d];
  }
  return true;
}

// --- strided arrays -----------------------------------------------------------------------------

inline constexpr int kMaxStridedDims = 8;

// N arrays of equal sizes as a kernel takes them, by value. Offsets fit into 31 bits.
template <int N>
struct Strided {
  int ndim;
  uint32_t numel;
  uint32_t sizes[kMaxStridedDims];
  int32_t strides[N][kMaxStridedDims];  // in elements
  // Where element number i lies in each.
  __device__ void Offsets(uint32_t i, int32_t (&offsets)[N]) const {
    for (int k = 0; k < N; ++k) offsets[k] = 0;
#pragma unroll  // so that no array is indexed, which would lie in local memory then
    for (int d = kMaxStridedDims - 1; d > 0; --d) {
      if (d >= ndim) continue;
      const uint32_t rest = i / sizes[d];
      const auto at = static_cast<int32_t>(i - rest * sizes[d]);
      for (int k = 0; k < N; ++k) offsets[k] += at * strides[k][d];
      i = rest;
    }
    for (int k = 0; k < N; ++k) offsets[k] += static_cast<int32_t>(i) * strides[k][0];
  }
};

// N arrays of equal sizes, neighbouring dims merged where all of them allow it, without dims of
// size 1 (but for one where nothing else is left).
template <int N>
class Arrays {
 public:
  explicit Arrays(const TensorRef* const (&refs)[N]) {
    for (int k = 0; k < N; ++k) {
      data_[k] = static_cast<char*>(refs[k]->data);
      bytes_[k] = SizeOf(refs[k]->dtype);
    }
    for (int d = 0; d < refs[0]->ndim; ++d) Append(refs, d);
    if (ndim_ == 0) {
      ndim_ = 1;
      sizes_[0] = 1;
      for (int k = 0; k < N; ++k) strides_[k][0] = 1;
    }
  }

  int64_t numel() const {
    int64_t n = 1;
    for (int d = 0; d < ndim_; ++d) n *= sizes_[d];
    return n;
  }
  // Whether all of them are one run of elements.
  bool IsOneRun() const {
    for (int k = 0; k < N; ++k) {
      if (strides_[k][0] != 1 && sizes_[0] != 1) return false;
    }
    return ndim_ == 1;
  }
  char* const* data() const { return data_; }

  // launch(const Strided<N>&, char* const* data), once; or for parts, where the whole has more dims
  // or elements than a Strided holds. Nothing for empty arrays.
  template <class Launch>
  void ForEach(const Launch& launch) const {
    if (numel() > 0) Part(0, data_, launch);
  }

 private:
  void Append(const TensorRef* const (&refs)[N], int d) {
    const int64_t size = refs[0]->sizes[d];
    if (size == 1) return;
    bool merges = ndim_ > 0;
    for (int k = 0; k < N; ++k) {
      merges = merges && strides_[k][ndim_ - 1] == refs[k]->strides[d] * size;
    }
    if (merges) {
      sizes_[ndim_ - 1] *= size;
    } else {
      sizes_[ndim_++] = size;
    }
    for (int k = 0; k < N; ++k) strides_[k][ndim_ - 1] = refs[k]->strides[d];
  }

  // Whether dims from `first` on fit, the first of them with `size` elements.
  bool Fits(int first, int64_t size) const {
    constexpr int64_t kLimit = int64_t{1} << 30;
    if (ndim_ - first > kMaxStridedDims) return false;
    int64_t numel = 1, reach[N] = {};
    for (int d = first; d < ndim_; ++d) {
      const int64_t n = d == first ? size : sizes_[d];
      numel *= n;
      if (numel > kLimit) return false;
      for (int k = 0; k < N; ++k) {
        const int64_t stride = strides_[k][d] < 0 ? -strides_[k][d] : strides_[k][d];
        if (n > 1 && stride > kLimit) return false;
        reach[k] += (n - 1) * stride;
        if (reach[k] > kLimit) return false;
      }
    }
    return true;
  }

  template <class Launch>
  void Part(int first, char* const* data, const Launch& launch) const {
    int64_t size = sizes_[first];
    while (size > 1 && !Fits(first, size)) size = (size + 1) / 2;
    const bool whole = Fits(first, size);
    for (int64_t at = 0; at < sizes_[first]; at += size) {
      char* part[N];
      for (int k = 0; k < N; ++k) part[k] = data[k] + at * strides_[k][first] * bytes_[k];
      if (whole) {
        launch(Make(first, at + size < sizes_[first] ? size : sizes_[first] - at), part);
      } else {
        Part(first + 1, part, launch);
      }
    }
  }

  Strided<N> Make(int first, int64_t size) const {
    Strided<N> s = {};
    s.ndim = ndim_ - first;
    s.numel = 1;
    for (int d = 0; d < s.ndim; ++d) {
      s.sizes[d] = static_cast<uint32_t>(d == 0 ? size : sizes_[first + d]);
      s.numel *= s.sizes[d];
      for (int k = 0; k < N; ++k) {
        s.strides[k][d] = s.sizes[d] == 1 ? 0 : static_cast<int32_t>(strides_[k][first + d]);
      }
    }
    return s;
  }

  int ndim_ = 0;
  int64_t sizes_[kMaxDims];
  int64_t strides_[N][kMaxDims];
  char* data_[N];
  int64_t bytes_[N];
};

// --- vectors ------------------------------------------------------------------------------------

// V elements that one instruction loads or stores, where they are aligned to their size.
template <class T, int V>
struct alignas(sizeof(T) * V) Pack {
  T v[V];
};
inline bool IsAligned(const void* p, size_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// --- bad data -----------------------------------------------------------------------------------

// What a kernel is given so that it can say what is wrong with its data. As a `const
// __grid_constant__` parameter, which is read where it lies.
struct ErrorSlot {
  ErrorWord* word;
  char op[sizeof(ErrorWord::op)];
};
inline ErrorSlot ErrorSlotOf(const KernelCall& call) {
  ErrorSlot slot = {call.device->error, {}};
  std::strncpy(slot.op, call.device->op, sizeof(slot.op) - 1);
  return slot;
}

// Values of ErrorWord::code: the host takes the word where it is kErrorWritten.
inline constexpr uint32_t kErrorWritten = 1, kErrorClaimed = 2;

// The error of one thread: the first that comes writes the word, of the others nothing is kept.
//   Complaint(slot) << "index " << i << " is out of range";
class Complaint {
 public:
  // The atomic is one of this device's threads only: behind PCIe it has none that the host takes
  // part in, and the host clears what was written here, never what is claimed.
  __device__ explicit Complaint(const ErrorSlot& slot) : slot_(slot) {
    mine_ = slot.word != nullptr &&
            atomicCAS(reinterpret_cast<unsigned*>(&slot.word->code), 0u, kErrorClaimed) == 0;
  }
  __device__ Complaint(const Complaint&) = delete;
  __device__ ~Complaint() {
    if (!mine_) return;
    slot_.word->text[at_] = 0;
    for (size_t i = 0; i < sizeof(slot_.op); ++i) slot_.word->op[i] = slot_.op[i];
    __threadfence_system();
    *reinterpret_cast<volatile uint32_t*>(&slot_.word->code) = kErrorWritten;
  }
  __device__ Complaint& operator<<(const char* text) {
    for (; *text != 0; ++text) Put(*text);
    return *this;
  }
  __device__ Complaint& operator<<(int64_t number) {
    uint64_t left = number < 0 ? 0 - static_cast<uint64_t>(number) : static_cast<uint64_t>(number);
    if (number < 0) Put('-');
    uint64_t power = 1;
    while (left / power >= 10) power *= 10;
    for (; power > 0; power /= 10) Put(static_cast<char>('0' + left / power % 10));
    return *this;
  }

 private:
  __device__ void Put(char c) {
    if (mine_ && at_ + 1 < sizeof(ErrorWord::text)) slot_.word->text[at_++] = c;
  }
  const ErrorSlot& slot_;
  bool mine_;
  unsigned at_ = 0;
};

}  // namespace dtensor::cuda
