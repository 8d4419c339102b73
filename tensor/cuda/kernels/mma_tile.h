// Products of tiles of 16-bit floats on tensor cores: mma.sync m16n8k16, sums in float32. A block
// is four warps with 16 rows each; of each 8 columns a lane owns two neighbours, in rows lane / 4
// and 8 below. Tiles lie in shared memory, rows of kWidth elements.
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

// Copies of 16 bytes to shared memory that go on behind the thread's back, zeros where `has` is
// false: in groups, of which WaitForCopies leaves the last kLeft on their way.
__device__ inline void CopyBehind(void* to, const void* from, bool has) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
               "r"(has ? 16 : 0)
               : "memory");
}
__device__ inline void EndCopies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLeft>
__device__ inline void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

template <class X, int kWidth>
struct MmaTile {
  static constexpr int kBlock = 128, kSide = kBlock / 32 * 16;  // threads, and rows of theirs
  // A row has 16 bytes more: those of 8 rows lie in different banks then.
  static constexpr int kStep = kWidth + 8;

  __device__ static int Lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ static int FirstRow() { return static_cast<int>(threadIdx.x) / 32 * 16; }
  // Where what a lane owns lies: i < 2, and two j for each 8 columns.
  __device__ static int Row(int i) { return FirstRow() + Lane() / 4 + 8 * i; }
  __device__ static int Column(int j) { return j / 2 * 8 + Lane() % 4 * 2 + j % 2; }

  // Starts to copy rows of x, zeros where there are none. By 16 bytes where rows are runs that are
  // aligned so.
  template <int kRows>
  __device__ static void Load(const HeadRows<X>& x, X* to) {
    constexpr int kRun = 8, kRuns = kWidth / kRun, kStride = kBlock / kRuns;
    static_assert(kRows % kStride == 0);
    const int thread = static_cast<int>(threadIdx.x);
    const int row = thread / kRuns, first = thread % kRuns * kRun;
    const bool runs = x.column == 1 && x.columns % kRun == 0 && x.row % kRun == 0 &&
                      reinterpret_cast<uintptr_t>(x.data) % 16 == 0;
    to += row * kStep + first;
    if (runs) {
      const X* from = x.data + row * x.row + first;
      const int64_t rows = first < x.columns ? x.count - row : 0;
      const int left = static_cast<int>(rows < kRows ? rows : kRows);
      // From where there are no rows nothing is read.
#pragma unroll
      for (int r = 0; r < kRows; r += kStride) {
        CopyBehind(to + r * kStep, from, r < left);
        from += kStride * x.row;
      }
      return;
    }
    for (int r = row; r < kRows; r += kStride, to += kStride * kStep) {
      for (int c = 0; c < kRun; ++c) {
        to[c] = x.Has(r, first + c) ? x.data[r * x.row + (first + c) * x.column] : X{};
      }
    }
  }

  // The 16 rows of the warp, columns [k, k + 16) of a tile of kSide rows.
  __device__ static void Fragment(const X* tile, int k, uint32_t (&out)[4]) {
    LoadMatrices<false>(tile + (FirstRow() + Lane() % 16) * kStep + k + Lane() / 16 * 8, out);
  }

  // out[i][j] += the product of row i of a, whose columns [k, k + 16) fragment(k, left) loads, and
  // row j of the tile b, of kRows rows.
  template <int kRows, class Left>
  __device__ static void AddDots(const Left& fragment, const X* b, int64_t columns,
                                 float (&out)[2][kRows / 4]) {
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      if (k >= columns) break;
      uint32_t left[4], right[4];
      fragment(k, left);
#pragma unroll
      for (int n = 0; n < kRows; n += 16) {
        const int row = n + Lane() / 16 * 8 + Lane() % 8;
        LoadMatrices<false>(b + row * kStep + k + Lane() / 8 % 2 * 8, right);
        MultiplyAdd(left, right[0], right[1], n / 4, out);
        MultiplyAdd(left, right[2], right[3], n / 4 + 2, out);
      }
    }
  }

  // out += w x of the tile x of kRows rows; w is rounded to X before, as in FlashAttention-2. What
  // a lane owns of w is what the tensor cores want of their left operand.
  template <int kRows>
  __device__ static void AddProduct(const float (&w)[2][kRows / 4], const X* x, int64_t columns,
                                    float (&out)[2][kWidth / 4]) {
#pragma unroll
    for (int k = 0; k < kRows; k += 16) {
      uint32_t left[4], right[4];
#pragma unroll
      for (int a = 0; a < 4; ++a) {
        const int j = k / 4 + a / 2 * 2;
        left[a] = PackedAs<X>(w[a % 2][j], w[a % 2][j + 1]);
      }
#pragma unroll
      for (int n = 0; n < kWidth; n += 16) {
        if (n >= columns) break;
        LoadMatrices<true>(x + (k + Lane() % 16) * kStep + n + Lane() / 16 * 8, right);
        MultiplyAdd(left, right[0], right[1], n / 4, out);
        MultiplyAdd(left, right[2], right[3], n / 4 + 2, out);
      }
    }
  }

  // What the four lanes that share a row have, joined.
  template <class Join>
  __device__ static float OverRow(float v, const Join& join) {
    for (int d = 2; d > 0; d /= 2) v = join(v, __shfl_xor_sync(~0u, v, d));
    return v;
  }

  // Rows of a result with `columns` columns, those of a run; by pairs where they are aligned so.
  // row(i): where row i begins, null where there is none.
  template <class RowOf>
  __device__ static void Write(const float (&result)[2][kWidth / 4], int64_t columns,
                               const RowOf& row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      X* const to = row(i);
      if (to == nullptr) continue;
#pragma unroll
      for (int j = 0; j < kWidth / 4; j += 2) {
        const int at = Column(j);
        if (at >= columns) break;
        if (columns % 2 == 0) {
          *reinterpret_cast<uint32_t*>(to + at) = PackedAs<X>(result[i][j], result[i][j + 1]);
        } else {
          Store(result[i][j], to + at);
          if (at + 1 < columns) Store(result[i][j + 1], to + at + 1);
        }
      }
    }
  }

 private:
  // The 16 x 8 of `out` whose first own column is j: += a (16 x 16) b (16 x 8).
  template <int kCount>
  __device__ static void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, int j,
                                     float (&out)[2][kCount]) {
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
};

}  // namespace dtensor::cuda
