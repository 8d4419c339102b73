// Kernels as libraries have them, on the stand-in (or a GPU) against loops on the host.
#include <cooperative_groups.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

int g_failed = 0, g_passed = 0;

void Check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}
#define CHECK(call) Check(call, #call)

void Count(const char* what, double got, double want, double tolerance = 0) {
  const bool same = std::fabs(got - want) <= tolerance * std::fmax(1, std::fabs(want));
  same ? ++g_passed : ++g_failed;
  if (!same) std::printf("FAILED %s: %.17g, not %.17g\n", what, got, want);
}

template <class T>
T* Up(const std::vector<T>& host) {
  T* p;
  CHECK(cudaMalloc(&p, host.size() * sizeof(T)));
  CHECK(cudaMemcpy(p, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return p;
}
template <class T>
std::vector<T> Down(const T* p, size_t n) {
  std::vector<T> host(n);
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaMemcpy(host.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
  return host;
}

__device__ float BlockSum(float v) {
  __shared__ float s[32];
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  if (threadIdx.x % 32 == 0) s[threadIdx.x / 32] = v;
  __syncthreads();
  v = threadIdx.x < blockDim.x / 32 ? s[threadIdx.x] : 0;
  if (threadIdx.x < 32) {
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  }
  return v;
}

// The last block to come adds up what all have left.
__global__ void Sum(const float* x, int n, float* parts, unsigned* come, float* sum) {
  __shared__ bool last;
  float v = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) v += x[i];
  v = BlockSum(v);
  if (threadIdx.x == 0) {
    parts[blockIdx.x] = v;
    __threadfence();
    last = atomicAdd(come, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (threadIdx.x == 0) {
    float all = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) all += parts[b];
    *sum = all;
  }
}

__global__ void Softmax(const __nv_bfloat16* x, __nv_bfloat16* y, int columns) {
  extern __shared__ float s[];
  const __nv_bfloat16* const row = x + size_t(blockIdx.x) * columns;
  float most = -INFINITY, sum = 0;
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    most = fmaxf(most, __bfloat162float(row[i]));
  s[threadIdx.x] = most;
  __syncthreads();
  for (int d = blockDim.x / 2; d > 0; d /= 2) {
    if (threadIdx.x < d) s[threadIdx.x] = fmaxf(s[threadIdx.x], s[threadIdx.x + d]);
    __syncthreads();
  }
  most = s[0];
  __syncthreads();
  for (int i = threadIdx.x; i < columns; i += blockDim.x)
    sum += __expf(__bfloat162float(row[i]) - most);
  s[threadIdx.x] = sum;
  __syncthreads();
  for (int d = blockDim.x / 2; d > 0; d /= 2) {
    if (threadIdx.x < d) s[threadIdx.x] += s[threadIdx.x + d];
    __syncthreads();
  }
  for (int i = threadIdx.x; i < columns; i += blockDim.x) {
    y[size_t(blockIdx.x) * columns + i] =
        __float2bfloat16(__expf(__bfloat162float(row[i]) - most) / s[0]);
  }
}

// A warp's 16 x 8 tile of a b, through shared memory: cp.async, ldmatrix, mma.
__global__ void Tile(const __nv_bfloat16* a, const __nv_bfloat16* b, float* c, int k) {
  __shared__ __align__(16) __nv_bfloat16 sa[16 * 16], sb[16 * 8];
  const int lane = threadIdx.x;
  float d[4] = {};
  for (int at = 0; at < k; at += 16) {
    const unsigned to_a = __cvta_generic_to_shared(&sa[lane / 2 * 16 + lane % 2 * 8]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_a),
                 "l"(a + lane / 2 * k + at + lane % 2 * 8)
                 : "memory");
    if (lane < 16) {
      const unsigned to_b = __cvta_generic_to_shared(&sb[lane * 8]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to_b), "l"(b + (at + lane) * 8)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;\ncp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    unsigned ra[4], rb[2];
    const unsigned from_a = __cvta_generic_to_shared(&sa[lane % 16 * 16 + lane / 16 * 8]);
    const unsigned from_b = __cvta_generic_to_shared(&sb[lane % 16 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3])
                 : "r"(from_a)
                 : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                 : "=r"(rb[0]), "=r"(rb[1])
                 : "r"(from_b)
                 : "memory");
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    __syncwarp();
  }
  for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

__global__ void Grid(int* x) {  // each round reads what another block wrote in the one before
  auto grid = cooperative_groups::this_grid();
  for (int round = 0; round < 3; ++round) {
    const int v = threadIdx.x == 0 ? x[(blockIdx.x + 1) % gridDim.x] : 0;
    grid.sync();
    if (threadIdx.x == 0) x[blockIdx.x] = v + 1;
    grid.sync();
  }
}

__global__ void Functions(const double* x, double* y, float* z, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  y[i] = sin(x[i]) + pow(fabs(x[i]), 0.3) + erf(x[i]) + tgamma(1 + fabs(fmod(x[i], 3.0)));
  const float f = static_cast<float>(x[i]);
  z[i] = sinf(f) + powf(fabsf(f), 1.3f) + erff(f) + tanhf(f) + log1pf(fabsf(f)) + fmodf(f, 3);
}

__device__ int g_table[4] = {3, 1, 4, 1};
__constant__ float g_scale[2];
__global__ void Symbols(float* x) {
  x[threadIdx.x] = g_table[threadIdx.x] * g_scale[threadIdx.x % 2];
}

__global__ void Cases(int* x) {  // a jump table
  switch (x[threadIdx.x]) {
    case 0:
      x[threadIdx.x] = 17;
      break;
    case 1:
      x[threadIdx.x] *= 5;
      break;
    case 2:
      x[threadIdx.x] ^= 77;
      break;
    case 3:
      x[threadIdx.x] -= 1000;
      break;
    case 4:
      x[threadIdx.x] = x[threadIdx.x] << 7;
      break;
    case 5:
      x[threadIdx.x] = -3;
      break;
    case 6:
      x[threadIdx.x] = 1 / (x[threadIdx.x] - 5);
      break;
    default:
      x[threadIdx.x] = 9;
  }
}

int Run() {
  const int n = 10000;
  std::vector<float> x(n);
  double want = 0;
  for (int i = 0; i < n; ++i) want += x[i] = static_cast<float>(i % 17) * 0.25f;
  float* const dx = Up(x);
  float *const parts = Up(std::vector<float>(16)), *const sum = Up(std::vector<float>(1));
  unsigned* const come = Up(std::vector<unsigned>(1));
  Sum<<<16, 256>>>(dx, n, parts, come, sum);
  Count("Sum", Down(sum, 1)[0], want);

  const int rows = 4, columns = 300;
  std::vector<__nv_bfloat16> logits(rows * columns);
  for (size_t i = 0; i < logits.size(); ++i)
    logits[i] = __float2bfloat16(static_cast<float>(i % 31) * 0.1f);
  __nv_bfloat16* const dy = Up(logits);
  Softmax<<<rows, 128, 512>>>(Up(logits), dy, columns);
  const auto soft = Down(dy, logits.size());
  for (int r = 0; r < rows; ++r) {
    double all = 0;
    for (int c = 0; c < columns; ++c)
      all += std::exp(double(__bfloat162float(logits[r * columns + c])));
    for (int c = 0; c < columns; c += 37) {
      Count("Softmax", __bfloat162float(soft[r * columns + c]),
            std::exp(double(__bfloat162float(logits[r * columns + c]))) / all, 1e-4);
    }
  }

  const int k = 48;
  std::vector<__nv_bfloat16> a(16 * k), b(k * 8);
  for (size_t i = 0; i < a.size(); ++i) a[i] = __float2bfloat16(static_cast<float>(i % 7) - 3);
  for (size_t i = 0; i < b.size(); ++i) b[i] = __float2bfloat16(static_cast<float>(i % 5) - 2);
  float* const dc = Up(std::vector<float>(128));
  Tile<<<1, 32>>>(Up(a), Up(b), dc, k);
  const auto c = Down(dc, 128);
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < 8; ++j) {
      float v = 0;
      for (int t = 0; t < k; ++t)
        v += __bfloat162float(a[i * k + t]) * __bfloat162float(b[t * 8 + j]);
      Count("Tile", c[i * 8 + j], v);
    }
  }

  std::vector<int> start = {5, 60, 700, 8000, 90000, 100000};
  int* dg = Up(start);
  void* args[] = {&dg};
  CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(&Grid), dim3(6), dim3(64), args, 0,
                                    nullptr));
  const auto grid = Down(dg, 6);
  for (int i = 0; i < 6; ++i) Count("Grid", grid[i], start[(i + 3) % 6] + 3);

  std::vector<double> in;
  for (int i = 0; i < 200; ++i) in.push_back((i - 100) * 0.37 * (i % 10 == 0 ? 1e7 : 1));
  double* const dd = Up(std::vector<double>(200));
  float* const df = Up(std::vector<float>(200));
  Functions<<<4, 64>>>(Up(in), dd, df, 200);
  const auto y = Down(dd, 200);
  const auto z = Down(df, 200);
  for (int i = 0; i < 200; ++i) {
    const double v = in[i];
    Count("Functions in double", y[i],
          std::sin(v) + std::pow(std::fabs(v), 0.3) + std::erf(v) +
              std::tgamma(1 + std::fabs(std::fmod(v, 3.0))),
          1e-14);
    const float f = static_cast<float>(v);
    Count("Functions in float", z[i],
          std::sin(f) + std::pow(std::fabs(f), 1.3f) + std::erf(f) + std::tanh(f) +
              std::log1p(std::fabs(f)) + std::fmod(f, 3.0f),
          2e-6);
  }

  const float scale[] = {2, 0.5f};
  CHECK(cudaMemcpyToSymbol(g_scale, scale, sizeof scale));
  float* const ds = Up(std::vector<float>(4));
  Symbols<<<1, 4>>>(ds);
  const auto s = Down(ds, 4);
  for (int i = 0; i < 4; ++i) Count("Symbols", s[i], (i == 0 ? 3 : i == 2 ? 4 : 1) * scale[i % 2]);

  int* const di = Up(std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7});
  Cases<<<1, 8>>>(di);
  const auto cases = Down(di, 8);
  const int expected[] = {17, 5, 79, -997, 512, -3, 1, 9};
  for (int i = 0; i < 8; ++i) Count("Cases", cases[i], expected[i]);

  int blocks = 0, flagged = 0;
  const auto occupancy = [&](unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&flagged, Cases, 512, 0, flags);
  };
  CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, Cases, 512, 0));
  CHECK(occupancy(cudaOccupancyDisableCachingOverride));
  Count("Occupancy", flagged, blocks);
  Count("Occupancy, wrong flags", occupancy(2), cudaErrorInvalidValue);
  std::printf("%d passed, %d failed\n", g_passed, g_failed);
  return g_failed == 0 ? 0 : 1;
}

}  // namespace

int main() { return Run(); }
