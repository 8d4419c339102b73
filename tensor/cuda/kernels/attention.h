// What kernels of attention share: masks, sizes, which keys a query sees, facts of queries.
#pragma once

#include "dtensor/tensor/cuda/kernels/fill_words.h"
#include "dtensor/tensor/cuda/kernels/tile.h"

namespace dtensor::cuda {

// What is added to scores: bool (false: minus infinity) or floating, dims may have size 1.
struct ScoreMask {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t strides[4] = {};
  template <class T>
  __device__ T Apply(T score, int64_t b, int64_t h, int64_t query, int64_t key) const {
    if (data == nullptr) return score;
    const int64_t at = b * strides[0] + h * strides[1] + query * strides[2] + key * strides[3];
    if (dtype == DType::kBool) {
      return static_cast<const uint8_t*>(data)[at] != 0 ? score : -static_cast<T>(INFINITY);
    }
    switch (dtype) {
      case DType::kF64:
        return score + static_cast<T>(static_cast<const double*>(data)[at]);
      case DType::kF32:
        return score + static_cast<const float*>(data)[at];
      case DType::kBF16:
        return score + ToFloat(static_cast<const BFloat16*>(data)[at]);
      default:
        return score + ToFloat(static_cast<const Half*>(data)[at]);
    }
  }
};

// Sizes, which key head a query head reads, and where the mask of dropout is. factors: {s, h, b, g}
// or the first two of them.
struct Shapes {
  int64_t b, h, s, d, g, t, e;
  int64_t first_query, first_head, heads;
  int64_t global_s, first_batch, first_group, repeats, global_heads;
  double scale, kept;
  bool causal, drops;
  ScoreMask mask;
  KeepMask keep;

  __host__ __device__ int64_t KeyHead(int64_t head) const {
    const int64_t group = g > 0 && heads >= g ? heads / g : 1;
    return (first_head + head) / group;
  }
  // How many of the first `keys` keys query `row` sees.
  __device__ int64_t Visible(int64_t row, int64_t keys) const {
    const int64_t n = first_query + row + 1;
    return causal && n < keys ? n : keys;
  }
  // What the weight of a key is multiplied by.
  template <class T>
  __device__ T Dropped(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    if (!drops) return T(1);
    const int64_t global_head = first_head + first_group * repeats + head;
    const int64_t row = ((first_batch + batch) * global_heads + global_head) * global_s;
    return keep((row + first_query + query) * t + key) ? static_cast<T>(kept) : T(0);
  }
};

// Of inputs q, q + 1, q + 2, and of a mask where `mask` is not negative.
inline Shapes ShapesOf(const KernelCall& c, int q, int mask) {
  const auto at = static_cast<size_t>(q);
  const TensorRef &tq = c.in[at], &tk = c.in[at + 1], &tv = c.in[at + 2];
  Shapes z = {};
  z.b = tq.sizes[0];
  z.h = tq.sizes[1];
  z.s = tq.sizes[2];
  z.d = tq.sizes[3];
  z.g = tk.sizes[1];
  z.t = tk.sizes[2];
  z.e = tv.sizes[3];
  const FactorRange s = PartOf(c, 0, z.s), h = PartOf(c, 1, z.h), b = PartOf(c, 2, z.b),
                    g = PartOf(c, 3, z.g);
  const bool cut = c.factors.size() > 1 && c.factors[1].global >= 0;
  z.first_query = s.start;
  z.first_head = h.start;
  z.heads = h.global;
  z.global_s = s.global;
  z.first_batch = b.start;
  z.first_group = g.start;
  z.repeats = z.g > 0 && !cut ? z.h / z.g : 1;
  z.global_heads = cut ? z.heads : g.global * z.repeats;
  z.scale = c.attrs[0].d;
  z.causal = c.attrs[1].i != 0;
  if (mask < 0) return z;
  const TensorRef& m = c.in[static_cast<size_t>(mask)];
  z.mask.data = m.data;
  z.mask.dtype = m.dtype;
  for (int d = 0; d < 4; ++d) z.mask.strides[d] = m.sizes[d] == 1 ? 0 : m.strides[d];
  z.drops = c.attrs[3].n != 0;
  if (!z.drops) return z;
  z.kept = c.attrs[2].d;
  FillWords words(c.attrs[3].ints);
  const FillHead head(&words);
  z.keep = KeepMask(head, words.Next<FillSegment>());
  return z;
}
// False where a declaration handed over what is not so: no memory is touched then.
inline bool Fits(const Shapes& z, Workspace* workspace) {
  const bool fits = z.h == 0 || (z.first_head >= 0 && z.KeyHead(z.h - 1) < z.g);
  if (!fits) workspace->Fail("a query head without a key head");
  return fits;
}

// Rows without any key have nothing but minus infinity.
template <class T>
__device__ T ShiftOf(T largest) {
  return largest == -static_cast<T>(INFINITY) ? T(0) : largest;
}

// The type that lse has: where it is rounded to float32, all weights of the row are wrong by as
// much, which is nothing where they are rounded to 16 bits.
template <class X>
using Lse = std::conditional_t<sizeof(X) == 2, float, double>;

// What the gradients share: per query its lse (any strides) and dot.
template <class T, class L>
struct RowFacts {
  const L* lse;
  int64_t strides[3];
  const T* dots;
};

// By tensor cores (attention_mma.cu): 16-bit floats in heads of up to 128 columns. False where it
// is something else: nothing was queued then. Inputs and outputs as of the kernels in attention.cu.
bool AttentionByTensorCores(const KernelCall& c, const Shapes& z);
bool GradientsByTensorCores(const KernelCall& c, const Shapes& z,
                            const RowFacts<float, float>& facts);

}  // namespace dtensor::cuda
