// Products of tiles (tile.h) of 16-bit floats on tensor cores: mma.sync m16n8k16, sums in float32.
// Weights are rounded to the operands' type before they are multiplied, as in FlashAttention-2.
// A warp has 16 rows; of each 8 columns a lane owns two neighbours, in rows lane / 4 and 8 below.
//   Source: PTX ISA, "Matrix fragments for mma.m16n8k16" and "ldmatrix".
#pragma once

#include <type_traits>

#include "dtensor/tensor/cuda/kernels/tile.h"

namespace dtensor::cuda {

// Four matrices of 8 x 8: lane l says where row l % 8 of matrix l / 8 lies, 16 bytes of shared
// memory, and gets two neighbours of row (or, transposed, of column) l / 4 of each.
template <bool kTransposed>
__device__ inline void LoadMatrices(const void* row, uint32_t (&out)[4]) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"(at)
                 : "memory");
  }
}
// Two floats as neighbours of type X, rounded to nearest even.
template <class X>
__device__ inline uint32_t PackedAs(float first, float second) {
  uint32_t both;
  if constexpr (std::is_same_v<X, BFloat16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  }
  return both;
}

template <class X>
class MmaTile {
 public:
  using T = float;
  static constexpr int kN = 64, kBlock = 128;
  static constexpr int kRows = 2, kKeys = kN / 4;
  template <int kColumns>
  static constexpr int kOwn = kColumns / 4;
  static constexpr int kDepth = 64;
  // A row of 16-bit elements in shared memory has 16 bytes more: those of 8 rows lie in different
  // banks then.
  static constexpr int kPad = 8, kRow = kDepth + kPad;
  struct Memory {
    alignas(16) X operands[2 * kN * kRow];
    alignas(16) X weights[kN * (kN + kPad)];
  };
  __device__ explicit MmaTile(Memory* memory)
      : m_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_row_(static_cast<int>(threadIdx.x) / 32 * 16) {}

  __device__ int Row(int i) const { return first_row_ + lane_ / 4 + 8 * i; }
  __device__ int Column(int j) const { return j / 2 * 8 + lane_ % 4 * 2 + j % 2; }

  __device__ void Dots(const HeadRows<X>& a, const HeadRows<X>& b, T (&out)[kRows][kKeys]) {
    X *const sa = m_->operands, *const sb = sa + kN * kRow;
    for (auto& row : out) {
      for (T& v : row) v = 0;
    }
    for (int64_t x = 0; x < a.columns; x += kDepth) {
      __syncthreads();
      Load<kDepth>(a, x, sa);
      Load<kDepth>(b, x, sb);
      __syncthreads();
#pragma unroll
      for (int k = 0; k < kDepth; k += 16) {
        if (x + k >= a.columns) continue;
        uint32_t left[4], right[4];
        LoadMatrices<false>(sa + (first_row_ + lane_ % 16) * kRow + k + lane_ / 16 * 8, left);
#pragma unroll
        for (int n = 0; n < kN; n += 16) {
          const int row = n + lane_ / 16 * 8 + lane_ % 8;
          LoadMatrices<false>(sb + row * kRow + k + lane_ / 8 % 2 * 8, right);
          MultiplyAdd(left, right[0], right[1], n / 4, out);
          MultiplyAdd(left, right[2], right[3], n / 4 + 2, out);
        }
      }
    }
  }

  __device__ void Keep(const T (&w)[kRows][kKeys]) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; j += 2) {
        X* const to = m_->weights + Row(i) * (kN + kPad) + Column(j);
        *reinterpret_cast<uint32_t*>(to) = PackedAs<X>(w[i][j], w[i][j + 1]);
      }
    }
  }

  template <bool kTransposed, int kColumns>
  __device__ void AddProduct(const HeadRows<X>& x, int64_t first, T (&out)[kRows][kOwn<kColumns>]) {
    constexpr int kWeights = kN + kPad, kStep = kColumns + kPad;
    static_assert(kN * kStep <= 2 * kN * kRow);
    __syncthreads();
    Load<kColumns>(x, first, m_->operands);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kN; k += 16) {
      if (k >= x.count) continue;
      uint32_t left[4], right[4];
      const int upper = lane_ % 16, half = lane_ / 16 * 8;
      const X* const weights =
          kTransposed
              ? m_->weights + (k + half + lane_ % 8) * kWeights + first_row_ + lane_ / 8 % 2 * 8
              : m_->weights + (first_row_ + upper) * kWeights + k + half;
      LoadMatrices<kTransposed>(weights, left);
#pragma unroll
      for (int n = 0; n < kColumns; n += 16) {
        if (first + n >= x.columns) continue;
        LoadMatrices<true>(m_->operands + (k + upper) * kStep + n + half, right);
        MultiplyAdd(left, right[0], right[1], n / 4, out);
        MultiplyAdd(left, right[2], right[3], n / 4 + 2, out);
      }
    }
  }

  template <class Join>
  __device__ static T OverRow(T v, const Join& join) {
    for (int d = 2; d > 0; d /= 2) v = join(v, __shfl_xor_sync(~0u, v, d));
    return v;
  }

 private:
  // kN rows of x, columns from `first` on; zeros where there are none. By 16 bytes where rows are
  // runs that are aligned so.
  template <int kColumns>
  __device__ void Load(const HeadRows<X>& x, int64_t first, X* to) const {
    constexpr int kStep = kColumns + kPad, kRun = 8;
    const auto address = reinterpret_cast<uintptr_t>(x.data);
    const bool runs =
        x.column == 1 && x.columns % kRun == 0 && x.row % kRun == 0 && address % 16 == 0;
    if (runs) {
      for (int k = static_cast<int>(threadIdx.x); k < kN * kColumns / kRun; k += kBlock) {
        const int r = k / (kColumns / kRun), at = k % (kColumns / kRun) * kRun;
        uint4 eight = {};
        if (x.Has(r, first + at)) {
          eight = *reinterpret_cast<const uint4*>(x.data + r * x.row + first + at);
        }
        *reinterpret_cast<uint4*>(to + r * kStep + at) = eight;
      }
      return;
    }
    for (int k = static_cast<int>(threadIdx.x); k < kN * kColumns; k += kBlock) {
      const int r = k / kColumns, at = k % kColumns;
      to[r * kStep + at] = x.Has(r, first + at) ? x.data[r * x.row + (first + at) * x.column] : X{};
    }
  }

  // The 16 x 8 of `out` whose first own column is j: += a (16 x 16) b (16 x 8).
  template <int kCount>
  __device__ static void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int j,
                                     T (&out)[kRows][kCount]) {
    if constexpr (std::is_same_v<X, BFloat16>) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(out[0][j]), "+f"(out[0][j + 1]), "+f"(out[1][j]), "+f"(out[1][j + 1])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
          "{%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(out[0][j]), "+f"(out[0][j + 1]), "+f"(out[1][j]), "+f"(out[1][j + 1])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  Memory* m_;
  int lane_, first_row_;
};

}  // namespace dtensor::cuda
