// The product of two matrices as cuBLASLt has it, in plain loops: sums of f32 and narrower numbers
// in f32, of f64 in f64.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "tests/cusim/cublaslt.h"
#include "tests/cusim/number.h"

namespace cusim::lt {
namespace {

double Load(int32_t type, const uint8_t* p, int64_t i) {
  const auto as = [&]<class T>(T) {
    T t;
    std::memcpy(&t, p + i * static_cast<int64_t>(sizeof(T)), sizeof t);
    return static_cast<double>(Real(t));
  };
  switch (type) {
    case CUDA_R_16F:
      return as(F16());
    case CUDA_R_16BF:
      return as(BF16());
    case CUDA_R_32F:
      return as(float());
    default:
      return as(double());
  }
}

void Store(int32_t type, uint8_t* p, int64_t i, double v) {
  const auto as = [&]<class T>(T) {
    const T t = FromReal<T>(v);
    std::memcpy(p + i * static_cast<int64_t>(sizeof(T)), &t, sizeof t);
  };
  switch (type) {
    case CUDA_R_16F:
      return as(F16());
    case CUDA_R_16BF:
      return as(BF16());
    case CUDA_R_32F:
      return as(float());
    default:
      return as(double());
  }
}

// 10 bits of mantissa, to nearest.
double ToTf32(double v) {
  if (!std::isfinite(v)) return v;
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(v));
  return std::bit_cast<float>((bits + 0x1000u) & ~0x1fffu);
}

class Running {
 public:
  Running(Runtime& r, const Call& c, std::vector<Range>* ranges) : r_(r), c_(c), ranges_(ranges) {}

  void Run() {
    double alpha = c_.alpha, beta = c_.beta;
    if (c_.device_alpha != nullptr) {
      const uint8_t* const a = One(c_.device_alpha, "alpha");
      const uint8_t* const b = One(c_.device_beta, "beta");
      if (a == nullptr || b == nullptr) return;
      alpha = Load(c_.what.scale, a, 0);
      beta = Load(c_.what.scale, b, 0);
    }
    if (c_.workspace_bytes != 0) {
      uint8_t* const w = r_.Use("cublasLtMatmul: workspace", c_.device, c_.workspace,
                                c_.workspace_bytes, Access::kWrite, ranges_);
      if (w == nullptr) return;
      std::memset(w, 0xcd, c_.workspace_bytes);
    }
    for (int64_t batch = 0; batch < c_.d.batch; ++batch) {
      const bool narrow =
          c_.what.compute != CUBLAS_COMPUTE_64F && c_.what.compute != CUBLAS_COMPUTE_64F_PEDANTIC;
      if (!(narrow ? Matrix<float>(batch, alpha, beta) : Matrix<double>(batch, alpha, beta)))
        return;
    }
  }

 private:
  const uint8_t* One(const void* p, const char* name) {
    return r_.Use(std::string("cublasLtMatmul: ") + name, c_.device, p, SizeOf(c_.what.scale),
                  Access::kRead, ranges_);
  }

  // The simulator's view of one matrix of a batch, all of it checked; null: it may not be used.
  uint8_t* Operand(const char* name, const Layout& layout, const void* p, int64_t batch,
                   Access access) {
    const uint64_t size = SizeOf(layout.type);
    const uint8_t* const base =
        static_cast<const uint8_t*>(p) + batch * layout.stride * static_cast<int64_t>(size);
    const bool packed = static_cast<uint64_t>(layout.ld) == layout.length();
    const uint64_t lines = packed ? 1 : layout.lines();
    const uint64_t bytes = (packed ? layout.lines() : 1) * layout.length() * size;
    for (uint64_t i = 0; i < lines; ++i) {
      const uint8_t* const line = base + i * static_cast<uint64_t>(layout.ld) * size;
      if (r_.Use(std::string("cublasLtMatmul: ") + name, c_.device, line, bytes, access, ranges_) ==
          nullptr) {
        return nullptr;
      }
    }
    return r_.Reach(base);
  }

  // op(X) as rows of R, with the length of a row.
  template <class R>
  std::vector<R> Rows(const Layout& layout, const uint8_t* p, bool transposed, uint64_t rows,
                      uint64_t cols) {
    const bool tf32 = c_.what.compute == CUBLAS_COMPUTE_32F_FAST_TF32;
    std::vector<R> out(rows * cols);
    for (uint64_t i = 0; i < rows; ++i) {
      for (uint64_t j = 0; j < cols; ++j) {
        const double v = Load(layout.type, p, transposed ? layout.at(j, i) : layout.at(i, j));
        out[i * cols + j] = static_cast<R>(tf32 ? ToTf32(v) : v);
      }
    }
    return out;
  }

  template <class R>
  bool Matrix(int64_t batch, double alpha, double beta) {
    const uint8_t* const a = Operand("A", c_.a, c_.pa, batch, Access::kRead);
    if (a == nullptr) return false;
    const uint8_t* const b = Operand("B", c_.b, c_.pb, batch, Access::kRead);
    if (b == nullptr) return false;
    const uint8_t* c = nullptr;
    if (beta != 0) {  // else it is not read
      c = Operand("C", c_.c, c_.pc, batch, Access::kRead);
      if (c == nullptr) return false;
    }
    const std::vector<R> x = Rows<R>(c_.a, a, c_.what.trans_a != CUBLAS_OP_N, c_.m, c_.k);
    const std::vector<R> y = Rows<R>(c_.b, b, c_.what.trans_b != CUBLAS_OP_N, c_.k, c_.n);
    std::vector<R> sums(c_.m * c_.n);
    constexpr uint64_t kBlock = 256;  // rows of y that stay in the cache
    for (uint64_t from = 0; from < c_.k; from += kBlock) {
      for (uint64_t i = 0; i < c_.m; ++i) {
        R* const row = &sums[i * c_.n];
        for (uint64_t l = from; l < std::min(c_.k, from + kBlock); ++l) {
          const R v = x[i * c_.k + l];
          const R* const other = &y[l * c_.n];
          for (uint64_t j = 0; j < c_.n; ++j) row[j] += v * other[j];
        }
      }
    }
    for (uint64_t i = 0; i < c_.m; ++i) {
      for (uint64_t j = 0; j < c_.n; ++j) {
        R& v = sums[i * c_.n + j];
        v *= static_cast<R>(alpha);
        if (c != nullptr) v += static_cast<R>(beta * Load(c_.c.type, c, c_.c.at(i, j)));
      }
    }
    if (!Epilogue(batch, &sums) || !InputGradients(batch, x, y)) return false;
    uint8_t* const d = Operand("D", c_.d, c_.pd, batch, Access::kWrite);
    if (d == nullptr) return false;
    for (uint64_t i = 0; i < c_.m; ++i) {
      for (uint64_t j = 0; j < c_.n; ++j) {
        Store(c_.d.type, d, c_.d.at(i, j), static_cast<double>(sums[i * c_.n + j]));
      }
    }
    return true;
  }

  // The vector that the bias pointer names.
  uint8_t* Bias(int64_t batch, uint64_t count, Access access) {
    const uint64_t size = SizeOf(c_.what.bias_type);
    const uint8_t* const p = static_cast<const uint8_t*>(c_.what.bias) +
                             batch * c_.what.bias_stride * static_cast<int64_t>(size);
    return r_.Use("cublasLtMatmul: bias", c_.device, p, count * size, access, ranges_);
  }

  template <class R>
  bool Epilogue(int64_t batch, std::vector<R>* sums) {
    const uint32_t e = c_.what.epilogue;
    if ((e & CUBLASLT_EPILOGUE_BIAS) != 0) {
      const uint8_t* const bias = Bias(batch, c_.m, Access::kRead);
      if (bias == nullptr) return false;
      for (uint64_t i = 0; i < c_.m; ++i) {
        const R v = static_cast<R>(Load(c_.what.bias_type, bias, static_cast<int64_t>(i)));
        for (uint64_t j = 0; j < c_.n; ++j) (*sums)[i * c_.n + j] += v;
      }
    }
    const bool backward = (e & 64) != 0;
    if ((e & 128) != 0 && !Aux(batch, backward, sums)) return false;
    if ((e & CUBLASLT_EPILOGUE_RELU) != 0) {
      for (R& v : *sums) v = v > 0 || v != v ? v : 0;
    }
    if ((e & CUBLASLT_EPILOGUE_GELU) != 0) {
      for (R& v : *sums) v = Gelu(v);
    }
    if (!backward || (e & 16) == 0) return true;
    uint8_t* const gradient = Bias(batch, c_.m, Access::kWrite);
    if (gradient == nullptr) return false;
    for (uint64_t i = 0; i < c_.m; ++i) {
      R sum = 0;
      for (uint64_t j = 0; j < c_.n; ++j) sum += (*sums)[i * c_.n + j];
      Store(c_.what.bias_type, gradient, static_cast<int64_t>(i), static_cast<double>(sum));
    }
    return true;
  }

  // Writes what GELU is taken of, or multiplies by GELU's derivative there.
  template <class R>
  bool Aux(int64_t batch, bool backward, std::vector<R>* sums) {
    Layout layout{};
    layout.type = c_.what.aux_type;
    layout.order = CUBLASLT_ORDER_COL;
    layout.rows = c_.m, layout.cols = c_.n;
    layout.ld = c_.what.aux_ld, layout.stride = c_.what.aux_stride;
    uint8_t* const aux =
        Operand("aux", layout, c_.what.aux, batch, backward ? Access::kRead : Access::kWrite);
    if (aux == nullptr) return false;
    for (uint64_t i = 0; i < c_.m; ++i) {
      for (uint64_t j = 0; j < c_.n; ++j) {
        R& v = (*sums)[i * c_.n + j];
        if (backward) {
          v *= GeluSlope(static_cast<R>(Load(layout.type, aux, layout.at(i, j))));
        } else {
          Store(layout.type, aux, layout.at(i, j), static_cast<double>(v));
        }
      }
    }
    return true;
  }

  // BGRADA and BGRADB: an input summed over k.
  template <class R>
  bool InputGradients(int64_t batch, const std::vector<R>& x, const std::vector<R>& y) {
    const bool of_a = c_.what.epilogue == CUBLASLT_EPILOGUE_BGRADA;
    if (!of_a && c_.what.epilogue != CUBLASLT_EPILOGUE_BGRADB) return true;
    const uint64_t count = of_a ? c_.m : c_.n;
    uint8_t* const gradient = Bias(batch, count, Access::kWrite);
    if (gradient == nullptr) return false;
    for (uint64_t i = 0; i < count; ++i) {
      R sum = 0;
      for (uint64_t l = 0; l < c_.k; ++l) sum += of_a ? x[i * c_.k + l] : y[l * c_.n + i];
      Store(c_.what.bias_type, gradient, static_cast<int64_t>(i), static_cast<double>(sum));
    }
    return true;
  }

  // The approximation by tanh, as cuBLASLt has it.
  static constexpr double kRoot = 0.7978845608028654, kCubic = 0.044715;
  template <class R>
  static R Gelu(R v) {
    const double x = static_cast<double>(v);
    return static_cast<R>(0.5 * x * (1 + std::tanh(kRoot * (x + kCubic * x * x * x))));
  }
  template <class R>
  static R GeluSlope(R v) {
    const double x = static_cast<double>(v);
    const double t = std::tanh(kRoot * (x + kCubic * x * x * x));
    return static_cast<R>(0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kRoot * (1 + 3 * kCubic * x * x));
  }

  Runtime& r_;
  const Call& c_;
  std::vector<Range>* ranges_;
};

}  // namespace

uint64_t SizeOf(int32_t type) {
  switch (type) {
    case CUDA_R_16F:
    case CUDA_R_16BF:
      return 2;
    case CUDA_R_32F:
      return 4;
    case CUDA_R_64F:
      return 8;
    default:
      return 0;
  }
}

void Run(Runtime& r, const Call& call, std::vector<Range>* ranges) {
  Running(r, call, ranges).Run();
}

}  // namespace cusim::lt
