#include "dtensor/tensor/cpu/gemm.h"

#include <cblas.h>
#include <dlfcn.h>
#include <dnnl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <type_traits>

#include "dtensor/tensor/cpu/bf16_gemm.h"
#include "dtensor/tensor/cpu/kernels/row_gemm.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/cpu/kernels/small_gemm.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {
namespace {

// An operand as BLAS wants it: row-major with leading dimension, or its transpose.
template <class T>
struct Operand {
  const T* data;
  int64_t ld;
  bool transposed;
};

// Uninitialised memory for one call.
template <class T>
class Scratch {
 public:
  T* Allocate(int64_t n) {
    buffer_ =
        ValueOrThrow(Buffer::Allocate(CurrentAllocator(), n * static_cast<int64_t>(sizeof(T))));
    return static_cast<T*>(buffer_.data());
  }

 private:
  Buffer buffer_;
};

// Packs where neither stride is 1 (or the leading dimension would be too small for BLAS).
template <class T>
Operand<T> Prepare(const void* data, int64_t rows, int64_t cols, int64_t row_stride,
                   int64_t col_stride, Scratch<T>* scratch) {
  const auto* p = static_cast<const T*>(data);
  if (col_stride == 1 && (row_stride >= std::max<int64_t>(1, cols) || rows == 1)) {
    return {p, std::max<int64_t>({row_stride, cols, 1}), false};
  }
  if (row_stride == 1 && (col_stride >= std::max<int64_t>(1, rows) || cols == 1)) {
    return {p, std::max<int64_t>({col_stride, rows, 1}), true};
  }
  T* packed = scratch->Allocate(rows * cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) packed[i * cols + j] = p[i * row_stride + j * col_stride];
  }
  return {packed, std::max<int64_t>(1, cols), false};
}

// Up to here the kernel of ours is faster than the library (measured at v3 and v4).
template <class T>
constexpr int64_t kSmallProduct = std::is_same_v<T, float> ? 32 * 32 * 32 : 12 * 12 * 12;

template <class T>
bool IsSmall(const GemmCall& g) {
  return g.m <= kSmallProduct<T> && g.n <= kSmallProduct<T> && g.m * g.n <= kSmallProduct<T> / g.k;
}

// At v3 the library reads rows of B where they are, and takes up to twice as long as the kernel of
// ours if they meet in the cache, as those of images of 64 x 64 do (measured, up to these sizes).
template <class T>
bool MeetsInCache(const GemmCall& g) {
  return std::is_same_v<T, float> && g.m <= 256 && g.n >= 256 && g.b_col == 1 &&
         RowsMeet<T>(g.b_row) && ActiveCpuLevel() == CpuLevel::kV3;
}

// False if the product is not one for the kernel of ours.
template <class T>
bool TrySmall(const GemmCall& g) {
  if (g.k > kSmallGemmDepth || !(IsSmall<T>(g) || MeetsInCache<T>(g))) return false;
  static const CpuLevel level = ActiveCpuLevel();
  const SmallGemmCall<T> call = {g.m,
                                 g.n,
                                 g.k,
                                 static_cast<const T*>(g.a),
                                 g.a_row,
                                 g.a_col,
                                 static_cast<const T*>(g.b),
                                 g.b_row,
                                 g.b_col,
                                 static_cast<T*>(g.c),
                                 g.c_row,
                                 g.accumulate};
  DT_AT_CPU_LEVEL(level, SmallGemm(call));
  return true;
}

CopyRunFn CopyRun(DType from, DType to) {
  return ActiveRuns().copy[static_cast<int>(from)][static_cast<int>(to)];
}

constexpr int64_t kFewRows = 8;

// A column as a row, times the transpose; where C allows it.
GemmCall WithFewRows(const GemmCall& g) {
  if (g.n != 1 || g.c_row != 1) return g;
  return {1,       g.m,     g.k, g.b, g.b_col, g.b_row,     g.a,
          g.a_col, g.a_row, g.c, g.m, g.dtype, g.accumulate};
}

// Few rows times a matrix that lies in memory by rows or by columns; false if it is not that.
bool TryRows(const GemmCall& call) {
  constexpr int64_t kLeast = 16;
  const GemmCall g = WithFewRows(call);
  // A stride of 1 of a dim of one element says nothing; of both dims it says windows that overlap.
  const bool by_columns = g.b_row == 1 && g.k >= kLeast && (g.n == 1 || g.b_col != 1);
  if (g.m > kFewRows || (!by_columns && (g.b_col != 1 || g.n < kLeast))) return false;
  const bool wide = g.dtype == DType::kF32, apart = g.m > 1;
  Scratch<float> of_a, of_c;
  const auto* a = static_cast<const float*>(g.a);
  if (!wide || g.a_col != 1 || (apart && g.a_row != g.k)) {
    float* copy = of_a.Allocate(g.m * g.k);
    const auto* from = static_cast<const char*>(g.a);
    for (int64_t i = 0; i < g.m; ++i) {
      CopyRun(g.dtype, DType::kF32)(copy + i * g.k, 1, from + i * g.a_row * SizeOf(g.dtype),
                                    g.a_col, g.k);
    }
    a = copy;
  }
  const bool direct = wide && (!apart || g.c_row == g.n);
  float* c = direct ? static_cast<float*>(g.c) : of_c.Allocate(g.m * g.n);
  auto* out = static_cast<char*>(g.c);
  const int64_t row = g.c_row * SizeOf(g.dtype);
  for (int64_t i = 0; i < g.m && !direct && g.accumulate; ++i) {
    CopyRun(g.dtype, DType::kF32)(c + i * g.n, 1, out + i * row, 1, g.n);
  }
  const int64_t b_col = by_columns && g.n == 1 ? g.k : g.b_col;
  const RowGemmCall rows = {g.m, g.n, g.k, a, g.b, g.b_row, b_col, g.dtype, c, g.accumulate};
  static const CpuLevel level = ActiveCpuLevel();
  DT_AT_CPU_LEVEL(level, RowGemm(rows));
  for (int64_t i = 0; i < g.m && !direct; ++i) {
    CopyRun(DType::kF32, g.dtype)(out + i * row, 1, c + i * g.n, 1, g.n);
  }
  return true;
}

void GemmF32(const GemmCall& g) {
  // How one of few rows is computed must not depend on how many they are.
  const bool large = g.m <= kFewRows && g.n * g.k > kSmallProduct<float> / kFewRows;
  if ((large && TryRows(g)) || TrySmall<float>(g) || (!large && TryRows(g))) return;
  SetUpMathLibraries();
  Scratch<float> pack_a, pack_b;
  const Operand<float> a = Prepare<float>(g.a, g.m, g.k, g.a_row, g.a_col, &pack_a);
  const Operand<float> b = Prepare<float>(g.b, g.k, g.n, g.b_row, g.b_col, &pack_b);
  const int64_t ldc = std::max<int64_t>(g.c_row, g.n);
  const dnnl_status_t status =
      dnnl_sgemm(a.transposed ? 'T' : 'N', b.transposed ? 'T' : 'N', g.m, g.n, g.k, 1.0f, a.data,
                 a.ld, b.data, b.ld, g.accumulate ? 1.0f : 0.0f, static_cast<float*>(g.c), ldc);
  if (status == dnnl_success) return;
  cblas_sgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(g.m),
              static_cast<int>(g.n), static_cast<int>(g.k), 1.0f, a.data, static_cast<int>(a.ld),
              b.data, static_cast<int>(b.ld), g.accumulate ? 1.0f : 0.0f, static_cast<float*>(g.c),
              static_cast<int>(ldc));
}

void GemmF64(const GemmCall& g) {
  if (TrySmall<double>(g)) return;
  SetUpMathLibraries();
  Scratch<double> pack_a, pack_b;
  const Operand<double> a = Prepare<double>(g.a, g.m, g.k, g.a_row, g.a_col, &pack_a);
  const Operand<double> b = Prepare<double>(g.b, g.k, g.n, g.b_row, g.b_col, &pack_b);
  const int64_t ldc = std::max<int64_t>(g.c_row, g.n);
  // The library's product of matrices takes four times as long for a vector and a large matrix.
  constexpr int64_t kLarge = 128 * 128;
  const double beta = g.accumulate ? 1.0 : 0.0;
  if (g.m == 1 && g.n * g.k >= kLarge) {
    const int64_t rows = b.transposed ? g.n : g.k, cols = b.transposed ? g.k : g.n;
    return cblas_dgemv(CblasRowMajor, b.transposed ? CblasNoTrans : CblasTrans,
                       static_cast<int>(rows), static_cast<int>(cols), 1.0, b.data,
                       static_cast<int>(b.ld), a.data, a.transposed ? static_cast<int>(a.ld) : 1,
                       beta, static_cast<double*>(g.c), 1);
  }
  if (g.n == 1 && g.m * g.k >= kLarge) {
    const int64_t rows = a.transposed ? g.k : g.m, cols = a.transposed ? g.m : g.k;
    return cblas_dgemv(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
                       static_cast<int>(rows), static_cast<int>(cols), 1.0, a.data,
                       static_cast<int>(a.ld), b.data, b.transposed ? 1 : static_cast<int>(b.ld),
                       beta, static_cast<double*>(g.c), static_cast<int>(ldc));
  }
  cblas_dgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(g.m),
              static_cast<int>(g.n), static_cast<int>(g.k), 1.0, a.data, static_cast<int>(a.ld),
              b.data, static_cast<int>(b.ld), beta, static_cast<double*>(g.c),
              static_cast<int>(ldc));
}

// A block of a 16-bit matrix in f32. In memory as the matrix is: by rows, or by columns where those
// are contiguous.
struct Widened {
  const float* data;
  int64_t row, col;
};
Widened Widen(DType dtype, const void* matrix, int64_t offset, int64_t rows, int64_t cols,
              int64_t row_stride, int64_t col_stride, float* out) {
  const auto* from = static_cast<const uint16_t*>(matrix) + offset;
  const CopyRunFn copy = CopyRun(dtype, DType::kF32);
  if (col_stride != 1 && row_stride == 1) {
    for (int64_t j = 0; j < cols; ++j) copy(out + j * rows, 1, from + j * col_stride, 1, rows);
    return {out, 1, rows};
  }
  for (int64_t i = 0; i < rows; ++i)
    copy(out + i * cols, 1, from + i * row_stride, col_stride, cols);
  return {out, cols, 1};
}

// 16-bit floats where the CPU has no units for them: blocks of the operands widened to f32, sums
// kept in f32, results rounded once. So scratch memory does not grow with the product.
void GemmNarrow(const GemmCall& g) {
  if (TryRows(g) || TryBf16Gemm(g)) return;
  constexpr int64_t kSide = 512, kDepth = 1024;
  const int64_t m = std::min(g.m, kSide), n = std::min(g.n, kSide), k = std::min(g.k, kDepth);
  Scratch<float> scratch;
  float* a = scratch.Allocate(m * k + k * n + m * n);
  float *b = a + m * k, *c = b + k * n;
  const CopyRunFn round = CopyRun(DType::kF32, g.dtype);
  for (int64_t i = 0; i < g.m; i += kSide) {
    for (int64_t j = 0; j < g.n; j += kSide) {
      const int64_t rows = std::min(kSide, g.m - i), cols = std::min(kSide, g.n - j);
      if (g.accumulate) Widen(g.dtype, g.c, i * g.c_row + j, rows, cols, g.c_row, 1, c);
      for (int64_t p = 0; p < g.k; p += kDepth) {
        const int64_t depth = std::min(kDepth, g.k - p);
        const Widened x =
            Widen(g.dtype, g.a, i * g.a_row + p * g.a_col, rows, depth, g.a_row, g.a_col, a);
        const Widened y =
            Widen(g.dtype, g.b, p * g.b_row + j * g.b_col, depth, cols, g.b_row, g.b_col, b);
        GemmF32({rows, cols, depth, x.data, x.row, x.col, y.data, y.row, y.col, c, cols,
                 DType::kF32, g.accumulate || p > 0});
      }
      for (int64_t r = 0; r < rows; ++r) {
        round(static_cast<uint16_t*>(g.c) + (i + r) * g.c_row + j, 1, c + r * cols, 1, cols);
      }
    }
  }
}

void ZeroRows(const GemmCall& g) {
  const int64_t size = SizeOf(g.dtype);
  for (int64_t i = 0; i < g.m; ++i) {
    std::memset(static_cast<char*>(g.c) + i * g.c_row * size, 0, static_cast<size_t>(g.n * size));
  }
}

// Rows of B, in blocks that stay in the cache, are added to rows of C.
template <class T>
void AddIntegerRows(const GemmCall& g) {
  constexpr int64_t kSide = 512, kDepth = 64;
  if (!g.accumulate) ZeroRows(g);
  for (int64_t j = 0; j < g.n; j += kSide) {
    const int64_t width = std::min(kSide, g.n - j);
    for (int64_t p = 0; p < g.k; p += kDepth) {
      const int64_t end = std::min(g.k, p + kDepth);
      for (int64_t i = 0; i < g.m; ++i) {
        T* c = static_cast<T*>(g.c) + i * g.c_row + j;
        for (int64_t k = p; k < end; ++k) {
          const auto x =
              static_cast<uint64_t>(static_cast<const T*>(g.a)[i * g.a_row + k * g.a_col]);
          const T* b = static_cast<const T*>(g.b) + k * g.b_row + j;
          for (int64_t w = 0; w < width; ++w) {
            c[w] = static_cast<T>(static_cast<uint64_t>(c[w]) + x * static_cast<uint64_t>(b[w]));
          }
        }
      }
    }
  }
}

// Integers wrap around; bool is "any of all".
template <class T>
void GemmInteger(const GemmCall& g) {
  constexpr int64_t kLeast = 32;
  if (g.b_col == 1 && g.n >= kLeast && g.dtype != DType::kBool) return AddIntegerRows<T>(g);
  const auto* a = static_cast<const T*>(g.a);
  const auto* b = static_cast<const T*>(g.b);
  auto* c = static_cast<T*>(g.c);
  const bool boolean = g.dtype == DType::kBool;
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      uint64_t sum = g.accumulate ? static_cast<uint64_t>(c[i * g.c_row + j]) : 0;
      for (int64_t k = 0; k < g.k; ++k) {
        sum += static_cast<uint64_t>(a[i * g.a_row + k * g.a_col]) *
               static_cast<uint64_t>(b[k * g.b_row + j * g.b_col]);
      }
      c[i * g.c_row + j] = boolean ? static_cast<T>(sum != 0) : static_cast<T>(sum);
    }
  }
}

}  // namespace

void SetUpMathLibraries() {
  static std::once_flag once;
  std::call_once(once, [] {
    openblas_set_num_threads(1);
    // The level asked for holds for oneDNN too, which would otherwise use all the CPU has.
    if (ActiveCpuLevel() == CpuLevel::kV3) dnnl_set_max_cpu_isa(dnnl_cpu_isa_avx2);
    if (ActiveCpuLevel() == CpuLevel::kBaseline) dnnl_set_max_cpu_isa(dnnl_cpu_isa_sse41);
  });
  // OpenMP's thread count is per calling thread.
  static thread_local bool done = false;
  if (done) return;
  done = true;
  using SetThreads = void (*)(int);
  if (auto set = reinterpret_cast<SetThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"))) set(1);
}

void WarmUpGemm() {
  SetUpMathLibraries();
  constexpr int64_t kSize = 16;
  float a[kSize * kSize] = {}, c[kSize * kSize];
  dnnl_sgemm('N', 'N', kSize, kSize, kSize, 1.0f, a, kSize, a, kSize, 0.0f, c, kSize);
}

void Gemm(const GemmCall& g) {
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0) {
    if (!g.accumulate) ZeroRows(g);
    return;
  }
  switch (g.dtype) {
    case DType::kF32:
      return GemmF32(g);
    case DType::kF64:
      return GemmF64(g);
    case DType::kI64:
      return GemmInteger<int64_t>(g);
    case DType::kI32:
      return GemmInteger<int32_t>(g);
    default:
      return IsNarrow(g.dtype) ? GemmNarrow(g) : GemmInteger<uint8_t>(g);
  }
}

const char* GemmBackend() {
  static const std::string text = [] {
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch) +
           (HasBf16Units() ? " (f32, bf16; f16 through f32)" : " (f32, 16-bit through f32)") +
           ", OpenBLAS " + std::string(openblas_get_corename()) + " (f64)";
  }();
  return text.c_str();
}

}  // namespace dtensor
