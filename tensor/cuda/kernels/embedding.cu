// Rows of a table by ids, and the sums of their gradients.
#include "dtensor/tensor/cuda/kernels/segments.h"

namespace dtensor::cuda {
namespace {

// Ids, and which of the table's rows this rank has.
struct Ids {
  Indices of;
  FactorRange rows;
  // The row here, or -1; complains of what is none of the table's.
  __device__ int64_t Row(int64_t i, const ErrorSlot& slot) const {
    const int64_t id = of[i];
    if (id < 0 || id >= rows.global) {
      Complaint(slot) << "index " << id << " is out of range for " << rows.global
                      << " rows (position " << i << ")";
      return -1;
    }
    const int64_t row = id - rows.start;
    return row >= 0 && row < rows.local ? row : -1;
  }
};

// U: pieces of a row, as wide as its bytes and addresses allow.
template <class U>
__global__ void __launch_bounds__(kThreads)
    Embedding(const U* w, Ids ids, U* out, int64_t n, int64_t width, ErrorSlot slot) {
  for (int64_t i = GridStart(); i < n * width; i += GridStep()) {
    const int64_t k = i / width, row = ids.Row(k, slot);
    out[i] = row < 0 ? U{} : w[row * width + (i - k * width)];
  }
}

// w [v, d], ids; rows of other ranks give zeros.
void EmbeddingKernel(const KernelCall& c) {
  const TensorRef& w = c.in[0];
  const int64_t bytes = w.sizes[1] * SizeOf(w.dtype), n = NumelOf(c.in[1]);
  if (n * bytes == 0) return;
  const Ids ids = {Indices(c.in[1]), PartOf(c, 0, w.sizes[0])};
  const auto run = [&](auto piece) {
    using U = decltype(piece);
    const int64_t width = bytes / static_cast<int64_t>(sizeof(U));
    Embedding<<<BlocksFor(n * width), kThreads, 0, StreamOf(c)>>>(In<U>(c, 0), ids, Out<U>(c, 0), n,
                                                                  width, ErrorSlotOf(c));
    CheckLaunch();
  };
  const bool aligned = IsAligned(w.data, 16) && IsAligned(c.out[0].data, 16);
  aligned&& bytes % 16 == 0 ? run(uint4{}) : VisitSize(w.dtype, run);
}

struct RowOfId {
  Ids ids;
  int64_t padding;
  ErrorSlot slot;
  __device__ int64_t operator()(int64_t i) const {
    const int64_t row = ids.Row(i, slot);
    return ids.of[i] == padding ? -1 : row;
  }
};
template <class X>
struct SumRows {
  const X* dy;
  X* out;
  int64_t width;
  using Acc = Computed<X>;
  __device__ Acc Start(int64_t, int64_t) const { return 0; }
  __device__ Acc Add(Acc sum, int64_t i, int64_t column) const {
    return sum + Widen(dy[i * width + column]);
  }
  __device__ void Finish(int64_t row, int64_t column, Acc sum) const {
    Store(sum, out + row * width + column);
  }
};

// dy [..., d], ids -> [v, d]; num_rows, padding_idx. Sums in the order of ids.
void EmbeddingBackwardKernel(const KernelCall& c) {
  const TensorRef& out = c.out[0];
  const int64_t n = NumelOf(c.in[1]), width = out.sizes[1];
  if (NumelOf(out) > 0) {
    NoteError(cudaMemsetAsync(out.data, 0, static_cast<size_t>(NumelOf(out) * SizeOf(out.dtype)),
                              StreamOf(c)));
  }
  const RowOfId target = {
      {Indices(c.in[1]), PartOf(c, 0, out.sizes[0])}, c.attrs[1].i, ErrorSlotOf(c)};
  VisitFloat(out.dtype, [&](auto e) {
    using X = decltype(e);
    const SumRows<X> apply = {In<X>(c, 0), Out<X>(c, 0), width};
    RunSegments(c, target, apply, n, out.sizes[0], width);
  });
}

}  // namespace

void AddEmbeddingKernels(AddKernelFn add) {
  add("embedding", EmbeddingKernel, kAllDTypes, KernelLayout::kContiguous);
  add("embedding_backward", EmbeddingBackwardKernel, kFloatDTypes, KernelLayout::kContiguous);
}

}  // namespace dtensor::cuda
