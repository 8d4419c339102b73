#include "tensor/gemm.h"

#include <cblas.h>
#include <dlfcn.h>
#include <dnnl.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include "tensor/level.h"

namespace dtensor {
namespace {

// Both libraries have thread pools of their own; a rank is one thread.
void SetUpLibraries() {
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

// An operand as BLAS wants it: row-major with leading dimension, or its transpose.
template <class T>
struct Operand {
  const T* data;
  int64_t ld;
  bool transposed;
};

// Packs where neither stride is 1 (or the leading dimension would be too small for BLAS).
template <class T>
Operand<T> Prepare(const void* data, int64_t rows, int64_t cols, int64_t row_stride,
                   int64_t col_stride, std::vector<T>* storage) {
  const auto* p = static_cast<const T*>(data);
  if (col_stride == 1 && (row_stride >= std::max<int64_t>(1, cols) || rows == 1)) {
    return {p, std::max<int64_t>({row_stride, cols, 1}), false};
  }
  if (row_stride == 1 && (col_stride >= std::max<int64_t>(1, rows) || cols == 1)) {
    return {p, std::max<int64_t>({col_stride, rows, 1}), true};
  }
  storage->resize(static_cast<size_t>(rows * cols));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) {
      (*storage)[i * cols + j] = p[i * row_stride + j * col_stride];
    }
  }
  return {storage->data(), std::max<int64_t>(1, cols), false};
}

void GemmF32(const GemmCall& g) {
  std::vector<float> pack_a, pack_b;
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
  std::vector<double> pack_a, pack_b;
  const Operand<double> a = Prepare<double>(g.a, g.m, g.k, g.a_row, g.a_col, &pack_a);
  const Operand<double> b = Prepare<double>(g.b, g.k, g.n, g.b_row, g.b_col, &pack_b);
  const int64_t ldc = std::max<int64_t>(g.c_row, g.n);
  cblas_dgemm(CblasRowMajor, a.transposed ? CblasTrans : CblasNoTrans,
              b.transposed ? CblasTrans : CblasNoTrans, static_cast<int>(g.m),
              static_cast<int>(g.n), static_cast<int>(g.k), 1.0, a.data, static_cast<int>(a.ld),
              b.data, static_cast<int>(b.ld), g.accumulate ? 1.0 : 0.0, static_cast<double*>(g.c),
              static_cast<int>(ldc));
}

inline BFloat16 Round16(float v, BFloat16) { return ToBFloat16(v); }
inline Half Round16(float v, Half) { return ToHalf(v); }

// 16-bit floats: operands widened to f32, the product rounded once.
template <class T>
void GemmWidened(const GemmCall& g) {
  std::vector<float> a(static_cast<size_t>(g.m * g.k)), b(static_cast<size_t>(g.k * g.n)),
      c(static_cast<size_t>(g.m * g.n));
  const auto* pa = static_cast<const T*>(g.a);
  const auto* pb = static_cast<const T*>(g.b);
  auto* pc = static_cast<T*>(g.c);
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.k; ++j) a[i * g.k + j] = ToFloat(pa[i * g.a_row + j * g.a_col]);
  }
  for (int64_t i = 0; i < g.k; ++i) {
    for (int64_t j = 0; j < g.n; ++j) b[i * g.n + j] = ToFloat(pb[i * g.b_row + j * g.b_col]);
  }
  if (g.accumulate) {
    for (int64_t i = 0; i < g.m; ++i) {
      for (int64_t j = 0; j < g.n; ++j) c[i * g.n + j] = ToFloat(pc[i * g.c_row + j]);
    }
  }
  GemmF32({g.m, g.n, g.k, a.data(), g.k, 1, b.data(), g.n, 1, c.data(), g.n, DType::kF32,
           g.accumulate});
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) pc[i * g.c_row + j] = Round16(c[i * g.n + j], T{});
  }
}

// Integers wrap around; bool is "any of all".
template <class T>
void GemmInteger(const GemmCall& g) {
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

void ZeroRows(const GemmCall& g) {
  const int64_t size = SizeOf(g.dtype);
  for (int64_t i = 0; i < g.m; ++i) {
    std::memset(static_cast<char*>(g.c) + i * g.c_row * size, 0, static_cast<size_t>(g.n * size));
  }
}

}  // namespace

void Gemm(const GemmCall& g) {
  if (g.m == 0 || g.n == 0) return;
  if (g.k == 0) {
    if (!g.accumulate) ZeroRows(g);
    return;
  }
  SetUpLibraries();
  switch (g.dtype) {
    case DType::kF32:
      return GemmF32(g);
    case DType::kF64:
      return GemmF64(g);
    case DType::kBF16:
      return GemmWidened<BFloat16>(g);
    case DType::kF16:
      return GemmWidened<Half>(g);
    case DType::kI64:
      return GemmInteger<int64_t>(g);
    case DType::kI32:
      return GemmInteger<int32_t>(g);
    case DType::kU8:
    case DType::kBool:
      return GemmInteger<uint8_t>(g);
  }
}

const char* GemmBackend() {
  static const std::string text = [] {
    const dnnl_version_t* v = dnnl_version();
    return "oneDNN " + std::to_string(v->major) + "." + std::to_string(v->minor) + "." +
           std::to_string(v->patch) + " (f32, 16-bit through f32), OpenBLAS " +
           std::string(openblas_get_corename()) + " (f64)";
  }();
  return text.c_str();
}

}  // namespace dtensor
