// cuBLASLt's stand-in: products against the host's, what is refused, and what is seen of accesses.
#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

namespace {

using ::testing::HasSubstr;

uint64_t SizeOf(cudaDataType type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

// Values here are small multiples of 1/8, or what they give: bf16 and f16 are rounded by hand.
void Put(cudaDataType type, double v, void* to) {
  const float f = static_cast<float>(v);
  if (type == CUDA_R_64F) std::memcpy(to, &v, 8);
  if (type == CUDA_R_32F) std::memcpy(to, &f, 4);
  if (type == CUDA_R_16BF) {
    const uint32_t bits = std::bit_cast<uint32_t>(f);
    const uint16_t half = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    std::memcpy(to, &half, 2);
  }
  if (type == CUDA_R_16F) {
    const _Float16 half = static_cast<_Float16>(f);
    std::memcpy(to, &half, 2);
  }
}
double Take(cudaDataType type, const void* from) {
  if (type == CUDA_R_64F) return *static_cast<const double*>(from);
  if (type == CUDA_R_32F) return *static_cast<const float*>(from);
  uint16_t half;
  std::memcpy(&half, from, 2);
  if (type == CUDA_R_16BF) return std::bit_cast<float>(uint32_t{half} << 16);
  return static_cast<double>(std::bit_cast<_Float16>(half));
}
double Rounded(cudaDataType type, double v) {
  uint8_t bytes[8];
  Put(type, v, bytes);
  return Take(type, bytes);
}

#define CUDA_OK(call) ASSERT_EQ((call), cudaSuccess)
#define LT_OK(call) ASSERT_EQ((call), CUBLAS_STATUS_SUCCESS)

// A batch of matrices on the device, and its values.
struct Matrix {
  Matrix(cudaDataType t, uint64_t r, uint64_t c, bool by_rows, int n, uint64_t pad, uint64_t seed)
      : type(t), rows(r), cols(c), row_order(by_rows), batch(n) {
    ld = static_cast<int64_t>((by_rows ? cols : rows) + pad);
    stride = static_cast<int64_t>(by_rows ? rows : cols) * ld + static_cast<int64_t>(8 * pad);
    std::mt19937_64 random(seed);
    values.resize(rows * cols * static_cast<uint64_t>(batch));
    for (double& v : values) v = static_cast<double>(static_cast<int>(random() % 17) - 8) / 8;
    cudaMalloc(&p, bytes());
    Upload();
    cublasLtMatrixLayoutCreate(&layout, type, rows, cols, ld);
    const int32_t order = by_rows ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    Set(CUBLASLT_MATRIX_LAYOUT_ORDER, order);
    Set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch));
    Set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
  }
  Matrix(const Matrix&) = delete;
  ~Matrix() {
    cudaFree(p);
    cublasLtMatrixLayoutDestroy(layout);
  }
  template <class T>
  void Set(cublasLtMatrixLayoutAttribute_t attribute, T value) {
    ASSERT_EQ(cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value),
              CUBLAS_STATUS_SUCCESS);
  }
  uint64_t bytes() const { return static_cast<uint64_t>(stride * batch) * SizeOf(type); }
  int64_t At(int b, uint64_t i, uint64_t j) const {
    return b * stride + (row_order ? static_cast<int64_t>(i) * ld + static_cast<int64_t>(j)
                                   : static_cast<int64_t>(j) * ld + static_cast<int64_t>(i));
  }
  double& Value(int b, uint64_t i, uint64_t j) {
    return values[(static_cast<uint64_t>(b) * rows + i) * cols + j];
  }
  void Upload() {
    std::vector<uint8_t> image(bytes());
    for (int b = 0; b < batch; ++b) {
      for (uint64_t i = 0; i < rows; ++i) {
        for (uint64_t j = 0; j < cols; ++j) {
          Put(type, Value(b, i, j), &image[static_cast<uint64_t>(At(b, i, j)) * SizeOf(type)]);
        }
      }
    }
    cudaMemcpy(p, image.data(), image.size(), cudaMemcpyHostToDevice);
  }
  void Download() {
    std::vector<uint8_t> image(bytes());
    cudaMemcpy(image.data(), p, image.size(), cudaMemcpyDeviceToHost);
    for (int b = 0; b < batch; ++b) {
      for (uint64_t i = 0; i < rows; ++i) {
        for (uint64_t j = 0; j < cols; ++j) {
          Value(b, i, j) = Take(type, &image[static_cast<uint64_t>(At(b, i, j)) * SizeOf(type)]);
        }
      }
    }
  }
  cudaDataType type;
  uint64_t rows, cols;
  bool row_order;
  int batch;
  int64_t ld, stride;
  std::vector<double> values;
  void* p = nullptr;
  cublasLtMatrixLayout_t layout = nullptr;
};

struct Case {
  cudaDataType in = CUDA_R_32F, out = CUDA_R_32F;
  cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
  bool ta = false, tb = false, rows = false;
  uint64_t m = 9, n = 7, k = 70;
  int batch = 1;
  uint64_t pad = 0;
  double alpha = 1, beta = 0;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

double Gelu(double x) {
  return 0.5 * x * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
}

class LtTest : public ::testing::Test {
 protected:
  void SetUp() override {
    LT_OK(cublasLtCreate(&handle_));
    CUDA_OK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    LT_OK(cublasLtMatmulPreferenceCreate(&preference_));
    CUDA_OK(cudaMalloc(&workspace_, 1 << 20));
    const uint64_t most = 1 << 20;
    LT_OK(cublasLtMatmulPreferenceSetAttribute(
        preference_, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most));
  }
  void TearDown() override {
    CUDA_OK(cudaStreamSynchronize(stream_));
    CUDA_OK(cudaFree(workspace_));
    LT_OK(cublasLtMatmulPreferenceDestroy(preference_));
    CUDA_OK(cudaStreamDestroy(stream_));
    LT_OK(cublasLtDestroy(handle_));
  }
  // The operands of a case; fields may be changed before Run.
  struct Setup {
    explicit Setup(const Case& c)
        : a(c.in, c.ta ? c.k : c.m, c.ta ? c.m : c.k, c.rows, c.batch, c.pad, 1),
          b(c.in, c.tb ? c.n : c.k, c.tb ? c.k : c.n, c.rows, c.batch, c.pad, 2),
          c(c.out, c.m, c.n, c.rows, c.batch, c.pad, 3),
          d(c.out, c.m, c.n, c.rows, c.batch, c.pad, 4),
          bias(c.out, c.m, 1, false, 1, 0, 5),
          wide(c.in == CUDA_R_64F),
          alpha64(c.alpha),
          beta64(c.beta),
          alpha32(static_cast<float>(c.alpha)),
          beta32(static_cast<float>(c.beta)) {
      cublasLtMatmulDescCreate(&desc, c.compute, wide ? CUDA_R_64F : CUDA_R_32F);
      Set(CUBLASLT_MATMUL_DESC_TRANSA, static_cast<int32_t>(c.ta ? CUBLAS_OP_T : CUBLAS_OP_N));
      Set(CUBLASLT_MATMUL_DESC_TRANSB, static_cast<int32_t>(c.tb ? CUBLAS_OP_T : CUBLAS_OP_N));
      Set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<uint32_t>(c.epilogue));
      Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(bias.p));
      alpha = wide ? static_cast<const void*>(&alpha64) : &alpha32;
      beta = wide ? static_cast<const void*>(&beta64) : &beta32;
      pa = a.p, pb = b.p, pc = c.beta != 0 ? this->c.p : d.p, pd = d.p;
      c_layout = c.beta != 0 ? this->c.layout : d.layout;
    }
    ~Setup() { cublasLtMatmulDescDestroy(desc); }
    template <class T>
    void Set(cublasLtMatmulDescAttributes_t attribute, T value) {
      ASSERT_EQ(cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value),
                CUBLAS_STATUS_SUCCESS);
    }
    Matrix a, b, c, d, bias;
    bool wide;
    double alpha64, beta64;
    float alpha32, beta32;
    cublasLtMatmulDesc_t desc = nullptr;
    cublasLtMatrixLayout_t c_layout;
    const void *alpha, *beta, *pa, *pb, *pc;
    void* pd;
  };
  cublasStatus_t Choose(Setup& s, cublasLtMatmulHeuristicResult_t* result) {
    int count = 0;
    return cublasLtMatmulAlgoGetHeuristic(handle_, s.desc, s.a.layout, s.b.layout, s.c_layout,
                                          s.d.layout, preference_, 1, result, &count);
  }
  // What the next algorithms may take for granted of pointers and of batches' strides.
  void Align(uint32_t bytes) {
    for (const cublasLtMatmulPreferenceAttributes_t operand :
         {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
          CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
      LT_OK(cublasLtMatmulPreferenceSetAttribute(preference_, operand, &bytes, sizeof bytes));
    }
  }
  cublasStatus_t Multiply(Setup& s, const cublasLtMatmulAlgo_t* algo, size_t bytes) {
    return cublasLtMatmul(handle_, s.desc, s.alpha, s.pa, s.a.layout, s.pb, s.b.layout, s.beta,
                          s.pc, s.c_layout, s.pd, s.d.layout, algo, workspace_, bytes, stream_);
  }
  // What the product must be, in double.
  static double Expected(Setup& s, const Case& c, int batch, uint64_t i, uint64_t j) {
    double sum = 0;
    for (uint64_t l = 0; l < c.k; ++l) {
      sum += (c.ta ? s.a.Value(batch, l, i) : s.a.Value(batch, i, l)) *
             (c.tb ? s.b.Value(batch, j, l) : s.b.Value(batch, l, j));
    }
    double v = c.alpha * sum + (c.beta != 0 ? c.beta * s.c.Value(batch, i, j) : 0);
    if ((c.epilogue & CUBLASLT_EPILOGUE_BIAS) != 0) v += s.bias.Value(0, i, 0);
    if ((c.epilogue & CUBLASLT_EPILOGUE_RELU) != 0) v = std::max(v, 0.0);
    if ((c.epilogue & CUBLASLT_EPILOGUE_GELU) != 0) v = Gelu(v);
    return v;
  }
  void Compare(const Case& c) {
    Setup s(c);
    cublasLtMatmulHeuristicResult_t result;
    Align(c.batch > 1 ? static_cast<uint32_t>(std::min(SizeOf(c.in), SizeOf(c.out))) : 256);
    LT_OK(Choose(s, &result));
    LT_OK(Multiply(s, &result.algo, result.workspaceSize));
    CUDA_OK(cudaStreamSynchronize(stream_));
    s.d.Download();
    // Sums of products of eighths are exact in f32; GELU is not.
    const double tolerance = (c.epilogue & CUBLASLT_EPILOGUE_GELU) == 0 ? 0 : 1e-2;
    for (int b = 0; b < c.batch; ++b) {
      for (uint64_t i = 0; i < c.m; ++i) {
        for (uint64_t j = 0; j < c.n; ++j) {
          ASSERT_NEAR(s.d.Value(b, i, j), Rounded(c.out, Expected(s, c, b, i, j)), tolerance)
              << b << ", " << i << ", " << j;
        }
      }
    }
  }
  cublasLtHandle_t handle_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cublasLtMatmulPreference_t preference_ = nullptr;
  void* workspace_ = nullptr;
};

TEST_F(LtTest, TypesTransposesOrdersStridesAndBatches) {
  const Case types[] = {{},
                        {.compute = CUBLAS_COMPUTE_32F_FAST_TF32},
                        {.in = CUDA_R_16BF, .out = CUDA_R_16BF},
                        {.in = CUDA_R_16BF},
                        {.in = CUDA_R_16F, .out = CUDA_R_16F},
                        {.in = CUDA_R_16F},
                        {.in = CUDA_R_64F, .out = CUDA_R_64F, .compute = CUBLAS_COMPUTE_64F}};
  ::testing::internal::CaptureStderr();
  for (const Case& type : types) {
    for (int bits = 0; bits < 32; ++bits) {
      Case c = type;
      c.ta = bits & 1, c.tb = bits & 2, c.rows = bits & 4;
      c.batch = bits & 8 ? 3 : 1;
      c.pad = bits & 16 ? 5 : 0;
      if (bits & 1) c.alpha = 0.5, c.beta = -2;
      Compare(c);
    }
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(LtTest, Epilogues) {
  for (const cublasLtEpilogue_t e :
       {CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_RELU_BIAS,
        CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS}) {
    for (const cudaDataType out : {CUDA_R_32F, CUDA_R_16BF}) {
      Compare({.in = out, .out = out, .batch = 2, .alpha = 0.25, .beta = 1, .epilogue = e});
    }
  }
}

TEST_F(LtTest, GradientsOfBiasAndGelu) {
  Case c{.m = 16, .n = 5, .k = 12, .epilogue = CUBLASLT_EPILOGUE_BGRADB};
  for (const cublasLtEpilogue_t e : {CUBLASLT_EPILOGUE_BGRADA, CUBLASLT_EPILOGUE_BGRADB}) {
    c.epilogue = e;
    Setup s(c);
    LT_OK(Multiply(s, nullptr, 0));
    CUDA_OK(cudaStreamSynchronize(stream_));
    s.bias.Download();
    for (uint64_t i = 0; i < (e == CUBLASLT_EPILOGUE_BGRADA ? c.m : c.n); ++i) {
      double sum = 0;
      for (uint64_t l = 0; l < c.k; ++l) {
        sum += e == CUBLASLT_EPILOGUE_BGRADA ? s.a.Value(0, i, l) : s.b.Value(0, l, i);
      }
      EXPECT_EQ(s.bias.Value(0, i, 0), sum) << i;
    }
  }
  // What GELU is taken of goes to the auxiliary matrix, and back into the gradient.
  c.epilogue = CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
  Matrix aux(CUDA_R_32F, c.m, c.n, false, 1, 0, 6);
  Setup forward(c);
  forward.Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p);
  forward.Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux.ld);
  LT_OK(Multiply(forward, nullptr, 0));
  Case back = c;
  back.epilogue = CUBLASLT_EPILOGUE_DGELU_BGRAD;
  Setup s(back);
  s.Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.p);
  s.Set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, aux.ld);
  LT_OK(Multiply(s, nullptr, 0));
  CUDA_OK(cudaStreamSynchronize(stream_));
  aux.Download(), s.d.Download(), s.bias.Download();
  Case linear = c;
  linear.epilogue = CUBLASLT_EPILOGUE_BIAS;
  const Case plain{.m = c.m, .n = c.n, .k = c.k};
  for (uint64_t i = 0; i < c.m; ++i) {
    double sum = 0;
    for (uint64_t j = 0; j < c.n; ++j) {
      const double x = Expected(forward, linear, 0, i, j), step = 1e-4;
      EXPECT_EQ(aux.Value(0, i, j), x);
      const double slope = (Gelu(x + step) - Gelu(x - step)) / (2 * step);
      EXPECT_NEAR(s.d.Value(0, i, j), slope * Expected(s, plain, 0, i, j), 1e-4);
      sum += s.d.Value(0, i, j);
    }
    EXPECT_NEAR(s.bias.Value(0, i, 0), sum, 1e-4);
  }
}

TEST_F(LtTest, Tf32RoundsInputsAndF32DoesNot) {
  for (const bool tf32 : {false, true}) {
    const Case c{.compute = tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F,
                 .m = 1,
                 .n = 1,
                 .k = 1};
    Setup s(c);
    s.a.values[0] = 1 + std::ldexp(1, -11) + std::ldexp(1, -20);
    s.b.values[0] = 1;
    s.a.Upload(), s.b.Upload();
    LT_OK(Multiply(s, nullptr, 0));
    CUDA_OK(cudaStreamSynchronize(stream_));
    s.d.Download();
    EXPECT_EQ(s.d.values[0], tf32 ? 1 + std::ldexp(1, -10) : s.a.values[0]);
  }
}

TEST_F(LtTest, WhatIsRefused) {
  const auto refused = [&](const Case& c, auto change) {
    Setup s(c);
    change(s);
    ::testing::internal::CaptureStderr();
    const cublasStatus_t status = Multiply(s, nullptr, 1 << 20);
    const std::string why = ::testing::internal::GetCapturedStderr();
    return std::string(cublasLtGetStatusName(status)) + why;
  };
  const std::string invalid = "CUBLAS_STATUS_INVALID_VALUEcusim: cublasLt: ";
  const std::string unsupported = "CUBLAS_STATUS_NOT_SUPPORTEDcusim: cublasLt: ";
  const auto says = [&](const std::string& status, const char* why) {
    return ::testing::AllOf(::testing::StartsWith(status), HasSubstr(why));
  };
  const auto nothing = [](Setup&) {};
  EXPECT_EQ(refused({}, nothing), "CUBLAS_STATUS_SUCCESS");
  EXPECT_THAT(refused({}, [](Setup& s) { s.pa = nullptr; }), says(invalid, "null"));
  EXPECT_THAT(refused({}, [](Setup& s) { s.beta = nullptr; }), says(invalid, "null"));
  EXPECT_THAT(refused({}, [](Setup& s) { s.b.Set(CUBLASLT_MATRIX_LAYOUT_ROWS, uint64_t{69}); }),
              says(invalid, "share no k"));
  EXPECT_THAT(refused({}, [](Setup& s) { s.d.Set(CUBLASLT_MATRIX_LAYOUT_COLS, uint64_t{6}); }),
              says(invalid, "D is not m x n"));
  EXPECT_THAT(refused({}, [](Setup& s) { s.a.Set(CUBLASLT_MATRIX_LAYOUT_LD, int64_t{8}); }),
              says(invalid, "leading dimension"));
  EXPECT_THAT(
      refused({}, [](Setup& s) { s.a.Set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, int32_t{2}); }),
      says(invalid, "batch counts"));
  EXPECT_THAT(refused({.batch = 2},
                      [](Setup& s) {
                        s.d.Set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, int64_t{62});
                        s.c_layout = s.c.layout, s.pc = s.c.p;
                      }),
              says(invalid, "overlap"));
  EXPECT_THAT(refused({.epilogue = CUBLASLT_EPILOGUE_BIAS},
                      [](Setup& s) {
                        s.Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, static_cast<const void*>(nullptr));
                      }),
              says(invalid, "without its bias"));
  EXPECT_THAT(refused({}, [](Setup& s) { s.pa = static_cast<const char*>(s.pa) + 2; }),
              says(invalid, "aligned to its elements"));
  EXPECT_THAT(refused({.compute = CUBLAS_COMPUTE_16F}, nothing), says(unsupported, "compute type"));
  EXPECT_THAT(refused({.in = CUDA_R_64F, .out = CUDA_R_64F}, nothing), says(unsupported, "32F"));
  EXPECT_THAT(refused({.in = CUDA_R_16F, .out = CUDA_R_16BF}, nothing),
              says(unsupported, "of the inputs' type"));
  EXPECT_THAT(refused({.in = CUDA_R_16F, .compute = CUBLAS_COMPUTE_32F_FAST_TF32}, nothing),
              says(unsupported, "f32 alone"));
  EXPECT_THAT(refused({.rows = true, .epilogue = CUBLASLT_EPILOGUE_GELU}, nothing),
              says(unsupported, "row order"));
  EXPECT_THAT(refused({.epilogue = CUBLASLT_EPILOGUE_DRELU}, nothing),
              says(unsupported, "epilogue"));
}

TEST_F(LtTest, WhoAsksForAnAlgorithmIsToldQuietly) {
  Setup s({.compute = CUBLAS_COMPUTE_16F});
  cublasLtMatmulHeuristicResult_t result;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Choose(s, &result), CUBLAS_STATUS_NOT_SUPPORTED);
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
}

TEST_F(LtTest, AlgorithmsHoldToAlignmentAndWorkspace) {
  Setup s({});
  cublasLtMatmulHeuristicResult_t result;
  LT_OK(Choose(s, &result));
  ASSERT_GT(result.workspaceSize, 0u);
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(Multiply(s, &result.algo, result.workspaceSize - 1), CUBLAS_STATUS_INVALID_VALUE);
  Setup batch({.batch = 2, .pad = 1});
  LT_OK(Choose(batch, &result));
  EXPECT_EQ(Multiply(batch, &result.algo, result.workspaceSize), CUBLAS_STATUS_INVALID_VALUE);
  s.pd = static_cast<char*>(s.pd) + 4;
  s.pc = s.pd;
  EXPECT_EQ(Multiply(s, &result.algo, result.workspaceSize), CUBLAS_STATUS_INVALID_VALUE);
  s.pd = s.d.p, s.pc = s.pd;
  Setup shifted({.epilogue = CUBLASLT_EPILOGUE_BIAS});
  LT_OK(Choose(shifted, &result));
  shifted.Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER,
              static_cast<const void*>(static_cast<const char*>(shifted.bias.p) + 4));
  EXPECT_EQ(Multiply(shifted, &result.algo, result.workspaceSize), CUBLAS_STATUS_INVALID_VALUE);
  const cublasLtMatmulAlgo_t other = {};
  EXPECT_EQ(Multiply(s, &other, 1 << 20), CUBLAS_STATUS_INVALID_VALUE);
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(said, HasSubstr("smaller than the algorithm needs"));
  EXPECT_THAT(said, HasSubstr("less aligned than the preference"));
  EXPECT_THAT(said, HasSubstr("less aligned than where the descriptor had it"));
  EXPECT_THAT(said, HasSubstr("no heuristic gave"));
}

TEST_F(LtTest, DescriptorsKnowTheirAttributes) {
  Setup s({});
  int64_t ld = 0;
  size_t written = 0;
  LT_OK(cublasLtMatrixLayoutGetAttribute(s.a.layout, CUBLASLT_MATRIX_LAYOUT_LD, &ld, sizeof ld,
                                         &written));
  EXPECT_EQ(ld, 9);
  EXPECT_EQ(written, 8u);
  EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(s.a.layout, CUBLASLT_MATRIX_LAYOUT_LD, &ld, 4),
            CUBLAS_STATUS_INVALID_VALUE);
  EXPECT_EQ(cublasLtMatrixLayoutSetAttribute(s.a.layout, CUBLASLT_MATRIX_LAYOUT_LD, nullptr, 8),
            CUBLAS_STATUS_INVALID_VALUE);
  uint32_t epilogue = 0;
  LT_OK(cublasLtMatmulDescGetAttribute(s.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue,
                                       sizeof epilogue, nullptr));
  EXPECT_EQ(epilogue, static_cast<uint32_t>(CUBLASLT_EPILOGUE_DEFAULT));
  EXPECT_EQ(cublasLtGetVersion(), static_cast<size_t>(CUBLAS_VERSION));
  EXPECT_STREQ(cublasLtGetStatusString(CUBLAS_STATUS_SUCCESS), "success");
}

TEST_F(LtTest, OperandsAreAccessesOfTheStream) {
  cudaStream_t other;
  CUDA_OK(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking));
  ::testing::internal::CaptureStderr();
  {
    Setup s({});
    CUDA_OK(cudaMemsetAsync(s.a.p, 0, 4, other));
    LT_OK(Multiply(s, nullptr, 0));
    CUDA_OK(cudaDeviceSynchronize());
  }
  EXPECT_THAT(::testing::internal::GetCapturedStderr(),
              HasSubstr("stream race: cudaMemset and cublasLtMatmul use the same memory"));
  // A product behind the memset, and one that nothing has written.
  ::testing::internal::CaptureStderr();
  {
    Setup s({});
    cudaEvent_t done;
    CUDA_OK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    CUDA_OK(cudaMemsetAsync(s.a.p, 0, 4, other));
    CUDA_OK(cudaEventRecord(done, other));
    CUDA_OK(cudaStreamWaitEvent(stream_, done, 0));
    LT_OK(Multiply(s, nullptr, 0));
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaEventDestroy(done));
    EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
    void* fresh;
    CUDA_OK(cudaMalloc(&fresh, s.a.bytes()));
    s.pa = fresh;
    ::testing::internal::CaptureStderr();
    LT_OK(Multiply(s, nullptr, 0));
    CUDA_OK(cudaDeviceSynchronize());
    CUDA_OK(cudaFree(fresh));
    EXPECT_THAT(::testing::internal::GetCapturedStderr(),
                HasSubstr("uninitialised read: cublasLtMatmul: A"));
  }
  CUDA_OK(cudaStreamDestroy(other));
}

TEST(LtDeathTest, BeyondTheEndIsAnIllegalAddress) {
  ::testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto run = [] {
    cublasLtHandle_t handle;
    cublasLtCreate(&handle);
    void* small;
    cudaMalloc(&small, 4 * 63);
    cudaMemset(small, 0, 4 * 63);
    cublasLtMatmulDesc_t desc;
    cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    cublasLtMatrixLayout_t layout;
    cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, 8, 8, 8);
    const float one = 1;
    cublasLtMatmul(handle, desc, &one, small, layout, small, layout, &one, small, layout, small,
                   layout, nullptr, nullptr, 0, nullptr);
    std::exit(cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 7 : 1);
  };
  EXPECT_EXIT(run(), ::testing::ExitedWithCode(7),
              "out of bounds: cublasLtMatmul: A of 256 bytes at byte 0 of an allocation of 252");
}

}  // namespace
