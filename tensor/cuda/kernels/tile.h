// Products of tiles as attention takes them: a block of threads has a tile of scores of which each
// thread owns some rows and columns, and sums of products with the weights made of them.
//
// A tile class has: T, which it computes in; kN rows and columns of scores, of which a thread owns
// kRows and kKeys; kBlock threads; Row(i) and Column(j), where what it owns lies, also in
// kOwn<columns> columns of a result; Dots, Keep, AddProduct and OverRow as below.
#pragma once

#include "dtensor/tensor/cuda/kernels/element.h"

namespace dtensor::cuda {

// Four dims, any strides.
struct Heads {
  const void* data;
  int64_t b, h, row, column;  // strides
  Heads() = default;
  explicit Heads(const TensorRef& t)
      : data(t.data), b(t.strides[0]), h(t.strides[1]), row(t.strides[2]), column(t.strides[3]) {}
};
// Rows [first, first + count) of one head of a tensor.
template <class X>
struct HeadRows {
  const X* data;
  int64_t row, column, count, columns;
  __device__ HeadRows(const Heads& t, int64_t b, int64_t h, int64_t first, int64_t end,
                      int64_t columns)
      : data(static_cast<const X*>(t.data) + b * t.b + h * t.h + first * t.row),
        row(t.row),
        column(t.column),
        count(end - first),
        columns(columns) {}
  __device__ bool Has(int64_t r, int64_t x) const { return r < count && x < columns; }
  __device__ Computed<X> At(int64_t r, int64_t x) const {
    return Has(r, x) ? Widen(data[r * row + x * column]) : Computed<X>(0);
  }
};

// Of float32 and float64, by fma: 16 x 16 threads.
template <class Type>
class Tile {
 public:
  using T = Type;
  static constexpr int kSide = 16, kBlock = kSide * kSide;
  static constexpr int kN = sizeof(T) == 8 ? 32 : 64;
  static constexpr int kRows = kN / kSide, kKeys = kN / kSide;
  template <int kColumns>
  static constexpr int kOwn = kColumns / kSide;
  static constexpr int kDepth = 32;  // columns of operands that are in shared memory at a time
  static constexpr int kRow = kDepth + 1;
  struct Memory {
    T operands[2 * kN * kRow];
    T weights[kN * (kN + 1)];
  };
  __device__ explicit Tile(Memory* memory)
      : m_(memory),
        tx_(static_cast<int>(threadIdx.x) % kSide),
        ty_(static_cast<int>(threadIdx.x) / kSide) {}

  __device__ int Row(int i) const { return ty_ * kRows + i; }
  __device__ int Column(int j) const { return tx_ + kSide * j; }

  // out[i][j] = the product of row i of a and row j of b. All threads of the block.
  template <class X>
  __device__ void Dots(const HeadRows<X>& a, const HeadRows<X>& b, T (&out)[kRows][kKeys]) {
    T *const sa = m_->operands, *const sb = sa + kN * kRow;
    for (auto& row : out) {
      for (T& v : row) v = 0;
    }
    for (int64_t x = 0; x < a.columns; x += kDepth) {
      __syncthreads();
      for (int k = static_cast<int>(threadIdx.x); k < kN * kDepth; k += kBlock) {
        const int r = k / kDepth, col = k % kDepth;
        sa[r * kRow + col] = a.At(r, x + col);
        sb[r * kRow + col] = b.At(r, x + col);
      }
      __syncthreads();
#pragma unroll 4
      for (int k = 0; k < kDepth; ++k) {
        T left[kRows], right[kKeys];
#pragma unroll
        for (int i = 0; i < kRows; ++i) left[i] = sa[Row(i) * kRow + k];
#pragma unroll
        for (int j = 0; j < kKeys; ++j) right[j] = sb[Column(j) * kRow + k];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
          for (int j = 0; j < kKeys; ++j) out[i][j] = MulAdd(left[i], right[j], out[i][j]);
        }
      }
    }
  }

  // Puts a tile of weights where all threads see it.
  __device__ void Keep(const T (&w)[kRows][kKeys]) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int j = 0; j < kKeys; ++j) m_->weights[Row(i) * (kN + 1) + Column(j)] = w[i][j];
    }
  }

  // out += W x, or W^T x, of the weights kept: columns from `first` on of x.
  template <bool kTransposed, int kColumns, class X>
  __device__ void AddProduct(const HeadRows<X>& x, int64_t first, T (&out)[kRows][kOwn<kColumns>]) {
    constexpr int kLoaded = kN * 64 / kColumns < kN ? kN * 64 / kColumns : kN;
    static_assert(kLoaded * kColumns <= 2 * kN * kRow);
    for (int at = 0; at < kN && at < x.count; at += kLoaded) {
      __syncthreads();
      for (int k = static_cast<int>(threadIdx.x); k < kLoaded * kColumns; k += kBlock) {
        m_->operands[k] = x.At(at + k / kColumns, first + k % kColumns);
      }
      __syncthreads();
#pragma unroll 2
      for (int k = 0; k < kLoaded; ++k) {
        T left[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const int r = Row(i), o = at + k;
          left[i] = kTransposed ? m_->weights[o * (kN + 1) + r] : m_->weights[r * (kN + 1) + o];
        }
#pragma unroll
        for (int j = 0; j < kOwn<kColumns>; ++j) {
          const T right = m_->operands[k * kColumns + Column(j)];
#pragma unroll
          for (int i = 0; i < kRows; ++i) out[i][j] = MulAdd(left[i], right, out[i][j]);
        }
      }
    }
  }

  // Over the threads that share rows.
  template <class Join>
  __device__ static T OverRow(T v, const Join& join) {
    for (int d = kSide / 2; d > 0; d /= 2) v = join(v, __shfl_xor_sync(~0u, v, d));
    return v;
  }

 private:
  Memory* m_;
  int tx_, ty_;
};

}  // namespace dtensor::cuda
