// Products by cuBLASLt, which is loaded when the first is wanted. Its matrices are stored by
// columns: what it computes is c^T = b^T a^T.
#if __has_include(<cublasLt.h>)
#include <cublasLt.h>
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#endif

#include "dtensor/tensor/cuda/kernels/products.h"

namespace dtensor::cuda {

#if !__has_include(<cublasLt.h>)
bool MultiplyByLibrary(const KernelCall&, const Products&, const Strided<3>&, char* const*) {
  return false;
}
#else
namespace {

constexpr size_t kWorkspaceBytes = 4 << 20;
constexpr uint32_t kMostAlignment = 256;

#define DT_LT_FUNCTIONS(X)                \
  X(cublasLtCreate)                       \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatrixLayoutSetAttribute)

// The library's functions; all null where it is not there.
struct Library {
#define DT_POINTER(name) decltype(&::name) name = nullptr;
  DT_LT_FUNCTIONS(DT_POINTER)
#undef DT_POINTER
  static const Library& Get() {
    static const Library library = Load();
    return library;
  }
  bool loaded() const { return cublasLtMatmul != nullptr; }

 private:
  static Library Load() {
    Library l;
    const char* wish = std::getenv("DTENSOR_CUDA_BLAS");
    if (wish != nullptr && std::strcmp(wish, "own") == 0) return {};
    void* const file = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_LOCAL);
    if (file == nullptr) return {};
#define DT_LOAD(name)                                               \
  l.name = reinterpret_cast<decltype(&::name)>(dlsym(file, #name)); \
  if (l.name == nullptr) return {};
    DT_LT_FUNCTIONS(DT_LOAD)
#undef DT_LOAD
    return l;
  }
};

// The library's handle on this thread's device; null where it does not start.
cublasLtHandle_t HandleHere() {
  static std::mutex mutex;
  static std::map<int, cublasLtHandle_t> handles;
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return nullptr;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, is_new] = handles.try_emplace(device, nullptr);
  if (is_new && Library::Get().cublasLtCreate(&entry->second) != CUBLAS_STATUS_SUCCESS) {
    entry->second = nullptr;
  }
  return entry->second;
}

struct Types {
  cudaDataType data, scale;
  cublasComputeType_t compute;
};
// What DTENSOR_CUDA_TF32 wishes: factors of f32 rounded to 10 bits.
bool WishesTf32(Workspace* workspace) {
  static const std::string_view wish = [] {
    const char* const text = std::getenv("DTENSOR_CUDA_TF32");
    return std::string_view(text == nullptr ? "0" : text);
  }();
  if (wish != "0" && wish != "1") {
    workspace->Fail("DTENSOR_CUDA_TF32 must be 0 or 1, is \"" + std::string(wish) + "\"");
  }
  return wish == "1";
}

std::optional<Types> TypesOf(DType t, Workspace* workspace) {
  switch (t) {
    case DType::kF64:
      return Types{CUDA_R_64F, CUDA_R_64F, CUBLAS_COMPUTE_64F};
    case DType::kF32:
      return Types{CUDA_R_32F, CUDA_R_32F,
                   WishesTf32(workspace) ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F};
    case DType::kBF16:
      return Types{CUDA_R_16BF, CUDA_R_32F, CUBLAS_COMPUTE_32F};
    case DType::kF16:
      return Types{CUDA_R_16F, CUDA_R_32F, CUBLAS_COMPUTE_32F};
    default:
      return std::nullopt;
  }
}

// A matrix as the library sees it: stored by columns, its rows and columns exchanged by
// `transposed`.
struct Stored {
  int64_t rows, cols, ld;
  bool transposed;
};
// The transposed of `m`; nothing where no stride is 1, or rows overlap.
std::optional<Stored> StoredTransposed(const Matrix& m) {
  const auto leading = [](int64_t stride, int64_t run, int64_t count) {
    return count == 1 ? (run > 1 ? run : 1) : stride;
  };
  if (m.col_stride == 1 || m.cols == 1) {  // rows are runs: a column of the transposed each
    const int64_t ld = leading(m.row_stride, m.cols, m.rows);
    if (ld >= m.cols && ld >= 1) return Stored{m.cols, m.rows, ld, false};
  }
  if (m.row_stride == 1 || m.rows == 1) {
    const int64_t ld = leading(m.col_stride, m.rows, m.cols);
    if (ld >= m.rows && ld >= 1) return Stored{m.rows, m.cols, ld, true};
  }
  return std::nullopt;
}

// Of all elements of a batch that lie `step` bytes apart.
uint32_t AlignmentOf(const void* p, int64_t step) {
  uint32_t bytes = kMostAlignment;
  while ((reinterpret_cast<uintptr_t>(p) | static_cast<uintptr_t>(step)) % bytes != 0) bytes /= 2;
  return bytes;
}

// What is done to a product, as the library has it; nothing where it does not.
std::optional<uint32_t> EpilogueOf(const Products& p) {
  uint32_t epilogue = p.bias != nullptr ? uint32_t{CUBLASLT_EPILOGUE_BIAS} : 0;
  if (p.activation == Activation::kRelu && p.kept == nullptr) {
    epilogue |= CUBLASLT_EPILOGUE_RELU;
  } else if (p.activation == Activation::kGeluTanh) {
    if (p.kept != nullptr && (p.b.cols % 8 != 0 || !IsAligned(p.kept, 16))) return std::nullopt;
    epilogue |= CUBLASLT_EPILOGUE_GELU;
    if (p.kept != nullptr) epilogue |= CUBLASLT_EPILOGUE_GELU_AUX;
  } else if (p.activation) {
    return std::nullopt;
  }
  return epilogue == 0 ? uint32_t{CUBLASLT_EPILOGUE_DEFAULT} : epilogue;
}

// Everything but the pointers, which only have an alignment: what a plan is for.
struct Shape {
  DType dtype;
  uint32_t epilogue;
  bool a_transposed, b_transposed;
  int64_t m, n, k, a_ld, b_ld, count, a_step, b_step, c_step;
  uint32_t a_alignment, b_alignment, c_alignment, bias_alignment, kept_alignment;
  auto Key() const {
    return std::tie(dtype, epilogue, a_transposed, b_transposed, m, n, k, a_ld, b_ld, count, a_step,
                    b_step, c_step, a_alignment, b_alignment, c_alignment, bias_alignment,
                    kept_alignment);
  }
  friend bool operator<(const Shape& x, const Shape& y) { return x.Key() < y.Key(); }
};

// The library's objects for one shape.
class Plan {
 public:
  // `bias`, `kept`: those of the first product; from their addresses the library reads alignments
  // when it chooses.
  Plan(cublasLtHandle_t handle, const Shape& s, const Types& types, const void* bias, void* kept)
      : types_(types) {
    ok_ = Describe(s) && Point(bias, kept) && SetLeading(kept, s.n) && Choose(handle, s);
  }
  ~Plan() {
    const Library& lt = Library::Get();
    for (cublasLtMatrixLayout_t layout : {a_, b_, c_}) {
      if (layout != nullptr) (void)lt.cublasLtMatrixLayoutDestroy(layout);
    }
    if (product_ != nullptr) (void)lt.cublasLtMatmulDescDestroy(product_);
  }
  Plan(const Plan&) = delete;
  bool ok() const { return ok_; }

  bool Run(cublasLtHandle_t handle, const KernelCall& call, const void* a, const void* b, void* c,
           const void* bias, void* kept) {
    const Library& lt = Library::Get();
    if (!Point(bias, kept)) return false;
    const auto bytes = static_cast<int64_t>(algo_.workspaceSize);
    uintptr_t scratch = 0;
    if (bytes > 0) {  // the library wants it aligned to more than Workspace promises
      scratch = reinterpret_cast<uintptr_t>(Scratch<char>(call, bytes + kMostAlignment));
      scratch = (scratch + kMostAlignment - 1) / kMostAlignment * kMostAlignment;
    }
    const double one64 = 1, zero64 = 0;
    const float one32 = 1, zero32 = 0;
    const bool wide = types_.scale == CUDA_R_64F;
    const void* const one = wide ? static_cast<const void*>(&one64) : &one32;
    const void* const zero = wide ? static_cast<const void*>(&zero64) : &zero32;
    return lt.cublasLtMatmul(handle, product_, one, b, b_, a, a_, zero, c, c_, c, c_, &algo_.algo,
                             reinterpret_cast<void*>(scratch), algo_.workspaceSize,
                             StreamOf(call)) == CUBLAS_STATUS_SUCCESS;
  }

 private:
  template <class T>
  bool Set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    return Library::Get().cublasLtMatmulDescSetAttribute(product_, attribute, &value,
                                                         sizeof(value)) == CUBLAS_STATUS_SUCCESS;
  }
  bool Point(const void* bias, void* kept) {
    return (bias == nullptr || Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias)) &&
           (kept == nullptr || Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, kept));
  }
  bool SetLeading(const void* kept, int64_t n) {
    return kept == nullptr || Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, n);
  }
  bool Layout(cublasLtMatrixLayout_t* layout, int64_t rows, int64_t cols, int64_t ld, int64_t count,
              int64_t step) {
    const Library& lt = Library::Get();
    if (lt.cublasLtMatrixLayoutCreate(layout, types_.data, static_cast<uint64_t>(rows),
                                      static_cast<uint64_t>(cols), ld) != CUBLAS_STATUS_SUCCESS) {
      return false;
    }
    const auto number = static_cast<int32_t>(count);
    return count == 1 ||
           (lt.cublasLtMatrixLayoutSetAttribute(*layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT,
                                                &number, sizeof(number)) == CUBLAS_STATUS_SUCCESS &&
            lt.cublasLtMatrixLayoutSetAttribute(*layout,
                                                CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &step,
                                                sizeof(step)) == CUBLAS_STATUS_SUCCESS);
  }
  bool Describe(const Shape& s) {
    if (Library::Get().cublasLtMatmulDescCreate(&product_, types_.compute, types_.scale) !=
        CUBLAS_STATUS_SUCCESS) {
      return false;
    }
    const cublasOperation_t b = s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t a = s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    if (!Set(CUBLASLT_MATMUL_DESC_TRANSA, b) || !Set(CUBLASLT_MATMUL_DESC_TRANSB, a) ||
        !Set(CUBLASLT_MATMUL_DESC_EPILOGUE, s.epilogue)) {
      return false;
    }
    return Layout(&b_, s.b_transposed ? s.k : s.n, s.b_transposed ? s.n : s.k, s.b_ld, s.count,
                  s.b_step) &&
           Layout(&a_, s.a_transposed ? s.m : s.k, s.a_transposed ? s.k : s.m, s.a_ld, s.count,
                  s.a_step) &&
           Layout(&c_, s.n, s.m, s.n, s.count, s.c_step);
  }
  bool Choose(cublasLtHandle_t handle, const Shape& s) {
    const Library& lt = Library::Get();
    cublasLtMatmulPreference_t wish = nullptr;
    if (lt.cublasLtMatmulPreferenceCreate(&wish) != CUBLAS_STATUS_SUCCESS) return false;
    bool set = true;
    const auto say = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
      set = set && lt.cublasLtMatmulPreferenceSetAttribute(wish, attribute, &value,
                                                           sizeof(value)) == CUBLAS_STATUS_SUCCESS;
    };
    say(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    say(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.b_alignment);
    say(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.a_alignment);
    say(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.c_alignment);
    say(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.c_alignment);
    int found = 0;
    const bool asked =
        set && lt.cublasLtMatmulAlgoGetHeuristic(handle, product_, b_, a_, c_, c_, wish, 1, &algo_,
                                                 &found) == CUBLAS_STATUS_SUCCESS;
    (void)lt.cublasLtMatmulPreferenceDestroy(wish);
    return asked && found == 1 && algo_.state == CUBLAS_STATUS_SUCCESS;
  }

  const Types types_;
  bool ok_ = false;
  cublasLtMatmulDesc_t product_ = nullptr;
  cublasLtMatrixLayout_t a_ = nullptr, b_ = nullptr, c_ = nullptr;
  cublasLtMatmulHeuristicResult_t algo_ = {};
};

// One batch: elements of the stack's last dim, at these addresses.
bool RunBatch(const KernelCall& call, Shape s, const Types& types, const Products& p,
              char* const (&at)[3]) {
  thread_local std::map<Shape, Plan> plans;  // descriptors are not shared between threads
  const cublasLtHandle_t handle = HandleHere();
  if (handle == nullptr) return false;
  const int64_t size = SizeOf(s.dtype);
  s.c_alignment = AlignmentOf(at[0], s.c_step * size);
  s.a_alignment = AlignmentOf(at[1], s.a_step * size);
  s.b_alignment = AlignmentOf(at[2], s.b_step * size);
  if (p.bias != nullptr) s.bias_alignment = AlignmentOf(p.bias, 0);
  if (p.kept != nullptr) s.kept_alignment = AlignmentOf(p.kept, 0);
  Plan& plan = plans.try_emplace(s, handle, s, types, p.bias, p.kept).first->second;
  return plan.ok() && plan.Run(handle, call, at[1], at[2], at[0], p.bias, p.kept);
}

}  // namespace

bool MultiplyByLibrary(const KernelCall& call, const Products& p, const Strided<3>& stack,
                       char* const* data) {
  const std::optional<Types> types = TypesOf(p.dtype, call.workspace);
  if (!types || p.a.cols == 0 || (p.bias != nullptr && p.bias_stride != 1)) return false;
  const std::optional<Stored> a = StoredTransposed(p.a), b = StoredTransposed(p.b);
  const std::optional<uint32_t> epilogue = EpilogueOf(p);
  if (!a || !b || !epilogue || !Library::Get().loaded()) return false;
  const int last = stack.ndim - 1;
  const auto count = static_cast<int64_t>(stack.sizes[last]);
  const Shape shape = {p.dtype,
                       *epilogue,
                       a->transposed,
                       b->transposed,
                       p.a.rows,
                       p.b.cols,
                       p.a.cols,
                       a->ld,
                       b->ld,
                       count,
                       stack.strides[1][last],
                       stack.strides[2][last],
                       stack.strides[0][last],
                       0,
                       0,
                       0,
                       0,
                       0};
  const int64_t size = SizeOf(p.dtype);
  for (uint32_t outer = 0; outer < stack.numel / stack.sizes[last]; ++outer) {
    char* at[3] = {data[0], data[1], data[2]};
    uint32_t rest = outer;
    for (int d = last - 1; d >= 0; --d) {
      for (int k = 0; k < 3; ++k) at[k] += rest % stack.sizes[d] * stack.strides[k][d] * size;
      rest /= stack.sizes[d];
    }
    // All have the first one's layout: the library takes all of them, or none.
    if (!RunBatch(call, shape, *types, p, at)) {
      if (outer > 0) NoteError(cudaErrorUnknown);
      return outer > 0;
    }
  }
  return true;
}
#endif

}  // namespace dtensor::cuda
