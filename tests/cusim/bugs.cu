// One planted bug for each report of the stand-in, and the same program without it.
//   bugs NAME [fine]
#include <cassert>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int kCount = 1024;

__global__ void OutOfBounds(float* x, int n, bool fine) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (fine ? i < n : i <= n) x[i] = 1;
}
__global__ void Misaligned(float* x, bool fine) {
  reinterpret_cast<float4*>(x + (fine ? 4 : 1))[threadIdx.x] = make_float4(1, 2, 3, 4);
}
__global__ void Fill(float* x, float v, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = v;
}
__global__ void Scale(float* y, const float* x, float a, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = a * x[i];
}
__global__ void SharedSum(const float* x, float* sum, bool wait, bool all) {
  __shared__ float s[64];
  if (all || threadIdx.x < 40) s[threadIdx.x] = x[threadIdx.x];
  if (wait) __syncthreads();
  if (threadIdx.x == 0) {
    float v = 0;
    for (int i = 0; i < 64; ++i) v += s[i];
    *sum = v;
  }
}
__global__ void Count(int* n, bool fine) {
  if (threadIdx.x != 0) return;
  if (fine) {
    atomicAdd(n, 1);
  } else {
    *n = *n + 1;
  }
}
__global__ void Divergent(float* x, bool fine) {
  if (fine) {
    x[threadIdx.x] = 1;
    __syncthreads();
  } else if (threadIdx.x < 32) {
    x[threadIdx.x] = 1;
    __syncthreads();
  } else {
    x[threadIdx.x] = 2;
    __syncthreads();
    x[threadIdx.x] += 1;
  }
}
__global__ void Asserts(const float* x, float most) { assert(x[threadIdx.x] <= most); }

void Check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::printf("%s: %s\n", what, cudaGetErrorString(e));
  std::fflush(stdout);
  std::exit(1);
}
#define CHECK(call) Check(call, #call)

int Streams(float* x, float* y, const std::string& name, bool fine) {
  cudaStream_t a, b;
  cudaEvent_t done;
  CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  float* pinned;
  CHECK(cudaMallocHost(&pinned, 4096));
  Fill<<<4, 256, 0, a>>>(x, 3, kCount);
  CHECK(cudaEventRecord(done, a));
  if (fine || name != "stream_race") CHECK(cudaStreamWaitEvent(b, done, 0));
  Scale<<<4, 256, 0, b>>>(y, x, 2, kCount);
  CHECK(cudaMemcpyAsync(pinned, y, 4096, cudaMemcpyDeviceToHost, b));
  if (fine || name != "early_read") CHECK(cudaStreamSynchronize(b));
  const float* from = pinned;
  float* other;  // a copy between host memory reads what the first one writes
  CHECK(cudaMallocHost(&other, 4096));
  CHECK(cudaMemcpy(other, from, 4096, cudaMemcpyHostToHost));
  CHECK(cudaDeviceSynchronize());
  for (int i = 0; fine && i < kCount; ++i) {
    if (other[i] != 6) std::printf("%d: %g\n", i, other[i]);
  }
  CHECK(cudaFreeHost(pinned));
  CHECK(cudaFreeHost(other));
  return 0;
}

void Captured(float* x, float* y, bool fine) {
  cudaStream_t a, b;
  cudaEvent_t fork, join;
  CHECK(cudaStreamCreateWithFlags(&a, cudaStreamNonBlocking));
  CHECK(cudaStreamCreateWithFlags(&b, cudaStreamNonBlocking));
  CHECK(cudaEventCreateWithFlags(&fork, cudaEventDisableTiming));
  CHECK(cudaEventCreateWithFlags(&join, cudaEventDisableTiming));
  CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  Fill<<<4, 256, 0, a>>>(x, 3, kCount);
  if (!fine) cudaStreamSynchronize(a);
  CHECK(cudaEventRecord(fork, a));
  CHECK(cudaStreamWaitEvent(b, fork, 0));
  Scale<<<4, 256, 0, b>>>(y, x, 2, kCount);
  CHECK(cudaEventRecord(join, b));
  CHECK(cudaStreamWaitEvent(a, join, 0));
  Scale<<<4, 256, 0, a>>>(x, y, 2, kCount);
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(a, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3; ++i) CHECK(cudaGraphLaunch(exec, a));
  CHECK(cudaStreamSynchronize(a));
  float last;
  CHECK(cudaMemcpy(&last, x + kCount - 1, 4, cudaMemcpyDeviceToHost));
  if (last != 12) std::printf("%g\n", last);
  CHECK(cudaGraphExecDestroy(exec));
  CHECK(cudaGraphDestroy(graph));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const bool fine = argc > 2 || name == "graph" || name == "fill";
  float *x, *y;
  CHECK(cudaMalloc(&x, 4096));
  CHECK(cudaMalloc(&y, 4096));
  if (name != "uninitialised" || fine) CHECK(cudaMemset(x, 0, 4096));
  CHECK(cudaDeviceSynchronize());
  if (name == "out_of_bounds") OutOfBounds<<<5, 256>>>(x, kCount, fine);
  if (name == "misaligned") Misaligned<<<1, 32>>>(x, fine);
  if (name == "uninitialised") Scale<<<4, 256>>>(y, x, 2, kCount);
  if (name == "uninitialised_shared") SharedSum<<<1, 64>>>(x, y, true, fine);
  if (name == "shared_race") SharedSum<<<1, 64>>>(x, y, fine, true);
  if (name == "global_race") Count<<<4, 32>>>(reinterpret_cast<int*>(x), fine);
  if (name == "divergent_barrier") Divergent<<<1, 64>>>(x, fine);
  if (name == "assertion") Asserts<<<1, 64>>>(x, fine ? 0 : -1);
  if (name == "fill") Fill<<<16, 256>>>(x, 1, kCount);
  if (name == "stream_race" || name == "early_read") Streams(x, y, name, fine);
  if (name == "capture" || name == "graph") Captured(x, y, fine);
  if (name == "use_after_free") {
    if (!fine) CHECK(cudaFree(x));
    Fill<<<4, 256>>>(x, 1, kCount);
  }
  if (name == "host_access" && !fine) x[10] = 1;
  if (name == "sticky") {
    std::printf("%s, ", cudaGetErrorString(cudaDeviceSynchronize()));
    std::printf("then: %s\n", cudaGetErrorString(cudaMemset(x, 0, 4)));
    return 0;
  }
  CHECK(cudaDeviceSynchronize());
  if (!(name == "use_after_free" && !fine) && !(name == "leak" && !fine)) CHECK(cudaFree(x));
  if (name == "double_free" && !fine) cudaFree(x);
  CHECK(cudaFree(y));
  std::printf("fine\n");
  return 0;
}
