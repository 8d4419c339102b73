// libcublasLt's functions: descriptors, what a product is refused for, and its place on a stream.
#include "tests/cusim/cublaslt.h"

#include <climits>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <set>
#include <span>

using cusim::Runtime;
using cusim::Stream;
using namespace cusim::lt;

// Each function that can fail counts its call, and fails where DT_CUSIM_FAIL asks for it.
#define CUSIM_LT(name)                                  \
  cusim::Runtime& r = cusim::Runtime::Get();            \
  std::lock_guard<std::recursive_mutex> lock_(r.mutex); \
  if (const int e_ = r.Injected(#name); e_ != 0) {      \
    return static_cast<cublasStatus_t>(e_);             \
  }

struct cublasLtContext {
  int device;
};

namespace {

std::set<const cublasLtContext*>& Handles() {  // under the runtime's mutex
  static auto* const handles = new std::set<const cublasLtContext*>;
  return *handles;
}

// ---- Attributes: where each lies in its descriptor. ----

struct Attribute {
  int number;
  size_t offset, bytes;
};
#define CUSIM_FIELD(number, type, field) {number, offsetof(type, field), sizeof(type::field)}
constexpr Attribute kLayout[] = {
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch),
    CUSIM_FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, stride),
};
constexpr Attribute kProduct[] = {
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Product, compute),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Product, scale),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, Product, pointer_mode),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_TRANSA, Product, trans_a),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_TRANSB, Product, trans_b),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_TRANSC, Product, trans_c),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_FILL_MODE, Product, fill),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, Product, epilogue),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Product, bias),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, Product, bias_stride),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, Product, aux),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, Product, aux_ld),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, Product, aux_stride),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Product, sm_count),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Product, bias_type),
    CUSIM_FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, Product, aux_type),
};
constexpr Attribute kPreference[] = {
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reduction),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, align_a),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, align_b),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, align_c),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, align_d),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, waves),
    CUSIM_FIELD(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, implementations),
};

template <class T>
T* As(void* opaque) {  // null: none, or destroyed
  auto* const t = static_cast<T*>(opaque);
  return t != nullptr && t->magic == T::kMagic ? t : nullptr;
}
const Attribute* Named(std::span<const Attribute> all, int number) {
  for (const Attribute& a : all) {
    if (a.number == number) return &a;
  }
  std::fprintf(stderr, "cusim: cublasLt: attribute %d is none, or not simulated\n", number);
  return nullptr;
}
template <class T>
cublasStatus_t Set(void* opaque, std::span<const Attribute> all, int number, const void* from,
                   size_t bytes) {
  T* const t = As<T>(opaque);
  const Attribute* const a = Named(all, number);
  if (t == nullptr || a == nullptr || from == nullptr || bytes != a->bytes) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  std::memcpy(reinterpret_cast<uint8_t*>(t) + a->offset, from, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t GetOne(void* opaque, std::span<const Attribute> all, int number, void* to,
                      size_t bytes, size_t* written) {
  const T* const t = As<T>(opaque);
  const Attribute* const a = Named(all, number);
  if (t == nullptr || a == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (written != nullptr) *written = a->bytes;
  if (bytes == 0 && written != nullptr) return CUBLAS_STATUS_SUCCESS;
  if (to == nullptr || bytes != a->bytes) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(to, reinterpret_cast<const uint8_t*>(t) + a->offset, bytes);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t Destroy(void* opaque) {
  T* const t = As<T>(opaque);
  if (t == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  t->magic = 0;
  std::free(opaque);
  return CUBLAS_STATUS_SUCCESS;
}
template <class T>
cublasStatus_t Start(void* opaque, size_t size, T value) {
  if (opaque == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (size < sizeof(T)) return CUBLAS_STATUS_ALLOC_FAILED;
  std::memset(opaque, 0, size);
  value.magic = T::kMagic;
  std::memcpy(opaque, &value, sizeof value);
  return CUBLAS_STATUS_SUCCESS;
}

// ---- What a product is refused for. ----

// Who asks for an algorithm may have another way where there is none: nothing is said then.
thread_local bool t_asks = false;

cublasStatus_t Refuse(cublasStatus_t status, const char* why) {
  if (t_asks && status == CUBLAS_STATUS_NOT_SUPPORTED) return status;
  std::fprintf(stderr, "cusim: cublasLt: %s: %s\n", cublasLtGetStatusName(status), why);
  return status;
}
cublasStatus_t Invalid(const char* why) { return Refuse(CUBLAS_STATUS_INVALID_VALUE, why); }
cublasStatus_t Unsupported(const char* why) { return Refuse(CUBLAS_STATUS_NOT_SUPPORTED, why); }

cublasStatus_t CheckLayout(const Layout& l, bool written) {
  if (SizeOf(l.type) == 0) return Unsupported("a matrix of a type that is not simulated");
  if (l.order != CUBLASLT_ORDER_COL && l.order != CUBLASLT_ORDER_ROW) {
    return Unsupported("an order that is neither of columns nor of rows");
  }
  if (l.rows == 0 || l.cols == 0) return Invalid("a matrix without rows or columns");
  if (l.rows > INT_MAX || l.cols > INT_MAX)
    return Unsupported("more rows or columns than 2^31 - 1");
  if (l.ld < static_cast<int64_t>(l.length())) {
    return Invalid("a leading dimension below the rows (or, in row order, the columns)");
  }
  if (l.batch < 1) return Invalid("a batch count below 1");
  const int64_t extent =
      (static_cast<int64_t>(l.lines()) - 1) * l.ld + static_cast<int64_t>(l.length());
  if (written && l.batch > 1 && l.stride < extent) {
    return Invalid("matrices of D that overlap: its batch stride is too small");
  }
  return CUBLAS_STATUS_SUCCESS;
}

// Types as the table of cublasLtMatmul has them, as far as they are simulated.
cublasStatus_t CheckTypes(const Call& c) {
  const int32_t in = c.a.type, out = c.d.type;
  if (c.b.type != in) return Unsupported("A and B of different types");
  if (c.c.type != out) return Unsupported("C and D of different types");
  switch (c.what.compute) {
    case CUBLAS_COMPUTE_32F:
    case CUBLAS_COMPUTE_32F_PEDANTIC:
      if (c.what.scale != CUDA_R_32F) return Unsupported("compute 32F scales in f32 only");
      if (in == CUDA_R_64F) return Unsupported("f64 with compute 32F");
      if (out != in && (in == CUDA_R_32F || out != CUDA_R_32F)) {
        return Unsupported("C and D are of the inputs' type, or f32");
      }
      return CUBLAS_STATUS_SUCCESS;
    case CUBLAS_COMPUTE_32F_FAST_TF32:
      if (c.what.scale != CUDA_R_32F || in != CUDA_R_32F || out != CUDA_R_32F) {
        return Unsupported("compute 32F_FAST_TF32 is for f32 alone");
      }
      return CUBLAS_STATUS_SUCCESS;
    case CUBLAS_COMPUTE_64F:
    case CUBLAS_COMPUTE_64F_PEDANTIC:
      if (c.what.scale != CUDA_R_64F || in != CUDA_R_64F || out != CUDA_R_64F) {
        return Unsupported("compute 64F is for f64 alone");
      }
      return CUBLAS_STATUS_SUCCESS;
    default:
      return Unsupported("a compute type that is not simulated");
  }
}

cublasStatus_t CheckEpilogue(const Call& c, bool pointers) {
  switch (c.what.epilogue) {
    case CUBLASLT_EPILOGUE_DEFAULT:
      return CUBLAS_STATUS_SUCCESS;
    case CUBLASLT_EPILOGUE_RELU:
    case CUBLASLT_EPILOGUE_BIAS:
    case CUBLASLT_EPILOGUE_RELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU:
    case CUBLASLT_EPILOGUE_GELU_BIAS:
    case CUBLASLT_EPILOGUE_GELU_AUX:
    case CUBLASLT_EPILOGUE_GELU_AUX_BIAS:
    case CUBLASLT_EPILOGUE_DGELU:
    case CUBLASLT_EPILOGUE_DGELU_BGRAD:
    case CUBLASLT_EPILOGUE_BGRADA:
    case CUBLASLT_EPILOGUE_BGRADB:
      break;
    default:
      return Unsupported("an epilogue that is not simulated");
  }
  const uint32_t e = c.what.epilogue;
  if (c.d.type == CUDA_R_64F) return Unsupported("an epilogue of f64");
  if (c.d.order != CUBLASLT_ORDER_COL) return Unsupported("an epilogue with D in row order");
  const bool bias = (e & (CUBLASLT_EPILOGUE_BIAS | 16)) != 0 || e == CUBLASLT_EPILOGUE_BGRADA ||
                    e == CUBLASLT_EPILOGUE_BGRADB;
  if (bias && c.what.bias_type != c.d.type && c.what.bias_type != c.what.scale) {
    return Unsupported("a bias of another type than D's");
  }
  if (bias && pointers && c.what.bias == nullptr) return Invalid("an epilogue without its bias");
  if ((e & 128) == 0) return CUBLAS_STATUS_SUCCESS;
  if (c.what.aux_type != c.d.type) return Unsupported("an auxiliary matrix of another type than D");
  if (c.what.aux_ld < static_cast<int64_t>(c.m) || c.what.aux_ld % 8 != 0) {
    return Invalid(
        "the leading dimension of the auxiliary matrix: at least D's rows, a multiple "
        "of 8");
  }
  if (pointers && c.what.aux == nullptr) return Invalid("an epilogue without its auxiliary matrix");
  return CUBLAS_STATUS_SUCCESS;
}

#define CUSIM_CHECK(expression)                                              \
  if (const cublasStatus_t s_ = (expression); s_ != CUBLAS_STATUS_SUCCESS) { \
    return s_;                                                               \
  }

// Takes in the descriptors and checks all that they say; `pointers`: what they point to as well.
cublasStatus_t Describe(const Product* what, const Layout* a, const Layout* b, const Layout* c,
                        const Layout* d, bool pointers, Call* call) {
  if (what == nullptr || a == nullptr || b == nullptr || c == nullptr || d == nullptr) {
    return Invalid("a descriptor that is null, or destroyed");
  }
  call->what = *what;
  call->a = *a, call->b = *b, call->c = *c, call->d = *d;
  for (const Layout* l : {a, b, c}) CUSIM_CHECK(CheckLayout(*l, false));
  CUSIM_CHECK(CheckLayout(*d, true));
  const bool ta = what->trans_a != CUBLAS_OP_N, tb = what->trans_b != CUBLAS_OP_N;
  if (what->trans_c != CUBLAS_OP_N) return Unsupported("C transposed");
  if (what->fill != CUBLAS_FILL_MODE_FULL) return Unsupported("a fill mode but full");
  call->m = ta ? a->cols : a->rows;
  call->k = ta ? a->rows : a->cols;
  call->n = tb ? b->rows : b->cols;
  if ((tb ? b->cols : b->rows) != call->k) return Invalid("op(A) and op(B) share no k");
  if (d->rows != call->m || d->cols != call->n) return Invalid("D is not m x n");
  if (c->rows != call->m || c->cols != call->n) return Invalid("C is not m x n");
  if (a->batch != d->batch || b->batch != d->batch || c->batch != d->batch) {
    return Invalid("batch counts that differ");
  }
  CUSIM_CHECK(CheckTypes(*call));
  if (call->what.bias_type < 0) call->what.bias_type = d->type;
  if (call->what.aux_type < 0) call->what.aux_type = d->type;
  return CheckEpilogue(*call, pointers);
}

bool Aligned(const void* p, uint64_t bytes) { return reinterpret_cast<uint64_t>(p) % bytes == 0; }

uint32_t AlignmentOf(const void* p) {
  uint32_t bytes = 256;
  while (!Aligned(p, bytes)) bytes /= 2;
  return bytes;
}

// Alignment and workspace are those that the algorithm was chosen for.
cublasStatus_t CheckMemory(const Call& c, const Algo* algo, size_t given) {
  if (c.pc == c.pd && !(c.c == c.d)) return Invalid("C is D, but their layouts differ");
  const struct {
    const void* p;
    const Layout& layout;
    uint64_t chosen;
  } operands[] = {{c.pa, c.a, algo != nullptr ? algo->align_a : 1},
                  {c.pb, c.b, algo != nullptr ? algo->align_b : 1},
                  {c.pc, c.c, algo != nullptr ? algo->align_c : 1},
                  {c.pd, c.d, algo != nullptr ? algo->align_d : 1}};
  for (const auto& o : operands) {
    const uint64_t element = SizeOf(o.layout.type);
    if (!Aligned(o.p, element)) return Invalid("a matrix that is not aligned to its elements");
    const uint64_t step = o.layout.batch > 1 ? static_cast<uint64_t>(o.layout.stride) * element : 0;
    if (!Aligned(o.p, o.chosen) || step % o.chosen != 0) {
      return Invalid(
          "a matrix, or another of its batch, that is less aligned than the preference said to the "
          "heuristic (CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_*_BYTES, 256 where it is not set)");
    }
  }
  constexpr uint32_t kAux = CUBLASLT_EPILOGUE_GELU_AUX & ~CUBLASLT_EPILOGUE_GELU;
  const auto epilogue = static_cast<uint32_t>(c.what.epilogue);
  const bool has_bias = (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0, has_aux = (epilogue & kAux) != 0;
  if (algo != nullptr && ((has_bias && !Aligned(c.what.bias, algo->align_bias)) ||
                          (has_aux && !Aligned(c.what.aux, algo->align_aux)))) {
    return Invalid(
        "a bias or an auxiliary matrix that is less aligned than where the descriptor had it when "
        "the heuristic was asked (256 where it had none)");
  }
  if (c.workspace_bytes > given) return Invalid("a workspace smaller than the algorithm needs");
  if (c.workspace_bytes != 0 && c.workspace == nullptr) return Invalid("no workspace");
  if (!Aligned(c.workspace, 256)) return Invalid("a workspace that is not aligned to 256 bytes");
  return CUBLAS_STATUS_SUCCESS;
}

}  // namespace

extern "C" {

// ---- The library. ----

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  CUSIM_LT(cublasLtCreate);
  if (handle == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (r.sticky() != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasLtContext{r.device()};
  Handles().insert(*handle);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  CUSIM_LT(cublasLtDestroy);
  if (Handles().erase(handle) == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
size_t cublasLtGetVersion() { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion() { return 13000; }
const char* cublasLtGetStatusName(cublasStatus_t status) {
  switch (status) {
#define CUSIM_NAME(name) \
  case name:             \
    return #name
    CUSIM_NAME(CUBLAS_STATUS_SUCCESS);
    CUSIM_NAME(CUBLAS_STATUS_NOT_INITIALIZED);
    CUSIM_NAME(CUBLAS_STATUS_ALLOC_FAILED);
    CUSIM_NAME(CUBLAS_STATUS_INVALID_VALUE);
    CUSIM_NAME(CUBLAS_STATUS_ARCH_MISMATCH);
    CUSIM_NAME(CUBLAS_STATUS_MAPPING_ERROR);
    CUSIM_NAME(CUBLAS_STATUS_EXECUTION_FAILED);
    CUSIM_NAME(CUBLAS_STATUS_INTERNAL_ERROR);
    CUSIM_NAME(CUBLAS_STATUS_NOT_SUPPORTED);
    CUSIM_NAME(CUBLAS_STATUS_LICENSE_ERROR);
#undef CUSIM_NAME
  }
  return "<unknown>";
}
const char* cublasLtGetStatusString(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_SUCCESS:
      return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED:
      return "the library was not initialized";
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "the resource allocation failed";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "the function failed to launch on the GPU";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "the functionality requested is not supported";
    default:
      return cublasLtGetStatusName(status);
  }
}

// ---- Descriptors. ----

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size,
                                                 cudaDataType type, uint64_t rows, uint64_t cols,
                                                 int64_t ld) {
  return Start(layout, size, Layout{0, type, CUBLASLT_ORDER_COL, 1, rows, cols, ld, 0});
}
cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType type,
                                          uint64_t rows, uint64_t cols, int64_t ld) {
  CUSIM_LT(cublasLtMatrixLayoutCreate);
  if (layout == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *layout = static_cast<cublasLtMatrixLayout_t>(std::malloc(sizeof **layout));
  return cublasLtMatrixLayoutInit_internal(*layout, sizeof **layout, type, rows, cols, ld);
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  return Destroy<Layout>(layout);
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* from, size_t bytes) {
  return Set<Layout>(layout, kLayout, attribute, from, bytes);
}
cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, void* to,
                                                size_t bytes, size_t* written) {
  return GetOne<Layout>(layout, kLayout, attribute, to, bytes, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale) {
  Product p{};
  p.compute = compute;
  p.scale = scale;
  p.fill = CUBLAS_FILL_MODE_FULL;
  p.epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  p.bias_type = p.aux_type = -1;
  return Start(desc, size, p);
}
cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  CUSIM_LT(cublasLtMatmulDescCreate);
  if (desc == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *desc = static_cast<cublasLtMatmulDesc_t>(std::malloc(sizeof **desc));
  return cublasLtMatmulDescInit_internal(*desc, sizeof **desc, compute, scale);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  return Destroy<Product>(desc);
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* from, size_t bytes) {
  return Set<Product>(desc, kProduct, attribute, from, bytes);
}
cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute, void* to,
                                              size_t bytes, size_t* written) {
  return GetOne<Product>(desc, kProduct, attribute, to, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference,
                                                     size_t size) {
  Preference p{};
  p.align_a = p.align_b = p.align_c = p.align_d = 256;
  p.reduction = ~0u;
  p.implementations = ~0ull;
  return Start(preference, size, p);
}
cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  CUSIM_LT(cublasLtMatmulPreferenceCreate);
  if (preference == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  *preference = static_cast<cublasLtMatmulPreference_t>(std::malloc(sizeof **preference));
  return cublasLtMatmulPreferenceInit_internal(*preference, sizeof **preference);
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  return Destroy<Preference>(preference);
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* from, size_t bytes) {
  return Set<Preference>(preference, kPreference, attribute, from, bytes);
}
cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    void* to, size_t bytes, size_t* written) {
  return GetOne<Preference>(preference, kPreference, attribute, to, bytes, written);
}

// ---- Products. ----

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* returned) {
  CUSIM_LT(cublasLtMatmulAlgoGetHeuristic);
  if (Handles().count(handle) == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  const Preference* const p = As<Preference>(preference);
  if (p == nullptr || requested < 1 || results == nullptr || returned == nullptr) {
    return Invalid("no preference, or nowhere to put a result");
  }
  *returned = 0;
  Call call{};
  t_asks = true;
  const cublasStatus_t known = Describe(As<Product>(desc), As<Layout>(a), As<Layout>(b),
                                        As<Layout>(c), As<Layout>(d), false, &call);
  t_asks = false;
  CUSIM_CHECK(known);
  Algo algo{};
  algo.magic = Algo::kMagic;
  algo.align_a = p->align_a, algo.align_b = p->align_b;
  algo.align_c = p->align_c, algo.align_d = p->align_d;
  algo.align_bias = AlignmentOf(call.what.bias), algo.align_aux = AlignmentOf(call.what.aux);
  // Long sums are split where there is room for the parts, as devices do: callers have to pass what
  // the result asks for.
  const uint64_t parts = call.m * call.n * 8 * static_cast<uint64_t>(call.d.batch);
  if (call.k >= 64 && parts <= p->workspace) algo.workspace = parts;
  cublasLtMatmulHeuristicResult_t& result = results[0];
  std::memset(&result, 0, sizeof result);
  std::memcpy(&result.algo, &algo, sizeof algo);
  result.workspaceSize = algo.workspace;
  result.state = CUBLAS_STATUS_SUCCESS;
  result.wavesCount = 1;
  *returned = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a, cublasLtMatrixLayout_t a_layout, const void* b,
                              cublasLtMatrixLayout_t b_layout, const void* beta, const void* c,
                              cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* chosen,
                              void* workspace, size_t workspace_bytes, cudaStream_t stream) {
  CUSIM_LT(cublasLtMatmul);
  if (Handles().count(handle) == 0) return CUBLAS_STATUS_NOT_INITIALIZED;
  if (alpha == nullptr || beta == nullptr || a == nullptr || b == nullptr || c == nullptr ||
      d == nullptr) {
    return Invalid("a pointer that is null");
  }
  Call call{};
  call.pa = a, call.pb = b, call.pc = c, call.pd = d;
  call.workspace = workspace;
  CUSIM_CHECK(Describe(As<Product>(desc), As<Layout>(a_layout), As<Layout>(b_layout),
                       As<Layout>(c_layout), As<Layout>(d_layout), true, &call));
  Algo algo{};
  if (chosen != nullptr) {
    std::memcpy(&algo, chosen, sizeof algo);
    if (algo.magic != Algo::kMagic) return Invalid("an algorithm that no heuristic gave");
    call.workspace_bytes = algo.workspace;
  }
  CUSIM_CHECK(CheckMemory(call, chosen != nullptr ? &algo : nullptr, workspace_bytes));
  const bool wide = call.what.scale == CUDA_R_64F;
  if (call.what.pointer_mode == CUBLASLT_POINTER_MODE_HOST) {
    const auto value = [&](const void* p) {
      return wide ? *static_cast<const double*>(p) : *static_cast<const float*>(p);
    };
    if (r.IsDevice(alpha) || r.IsDevice(beta)) return Invalid("alpha or beta is not the host's");
    call.alpha = value(alpha);
    call.beta = value(beta);
  } else if (call.what.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE) {
    call.device_alpha = alpha;
    call.device_beta = beta;
  } else {
    return Unsupported("a pointer mode but host and device");
  }
  Stream* const s = r.Of(stream);
  if (s == nullptr || s->device != handle->device || r.device() != handle->device) {
    return Refuse(CUBLAS_STATUS_EXECUTION_FAILED, "a stream of another device than the handle");
  }
  call.device = s->device;
  const cudaError_t queued = r.Queue(
      s, "cublasLtMatmul", [&r, call](std::vector<cusim::Range>* ranges) { Run(r, call, ranges); });
  return queued == cudaSuccess && r.sticky() == cudaSuccess ? CUBLAS_STATUS_SUCCESS
                                                            : CUBLAS_STATUS_EXECUTION_FAILED;
}

}  // extern "C"
