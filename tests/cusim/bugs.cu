// One planted bug for each report of the stand-in, and the same program without it.
//   bugs NAME [fine]
#include <cooperative_groups.h>
#include <cuda_pipeline.h>

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
__global__ void CountOnHost(int* n, bool fine) {
  if (fine) {
    atomicAdd(n, 1);
  } else {
    atomicAdd_system(n, 1);
  }
}
__global__ void TellHost(int* word, bool fine) {
  word[1] = 7;
  if (fine) __threadfence_system();
  *const_cast<volatile int*>(word) = 1;
}
__global__ void MeetAt(int barrier) { asm volatile("bar.sync %0;" ::"r"(barrier)); }
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

// Each one before the beginning: sums of addresses wrap there.
__global__ void BelowShared(float* x, bool fine) {
  __shared__ float s[64];
  s[threadIdx.x] = 1;
  __syncthreads();
  x[threadIdx.x] = s[fine && threadIdx.x == 0 ? 0 : threadIdx.x - 1];
}
__global__ void BelowLocal(float* x, int from) {
  float l[8];
  for (int i = 0; i < 8; ++i) l[i] = x[i];
  float v = 0;
  for (int i = from; i < 8; i += 2) v += l[i & (from < 0 ? -1 : 7)];
  x[threadIdx.x] = v;
}
__global__ void BelowNull(float* x, const double* none, bool fine) {
  x[threadIdx.x] = fine ? 0 : static_cast<float>(none[-1]);
}
__global__ void UnsetRegister(int* x, bool fine) {
  int v = 1;
  if (!fine) {
    asm volatile("{\n.reg .b32 t;\nadd.s32 %0, t, 1;\n}" : "=r"(v));
  }
  x[threadIdx.x] = v;
}
__global__ void Columns(float* x, int first, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (2 * i + first < n) x[2 * i + first] = 1;
}
__global__ void CopiedAsync(float* y, const float* x) {
  __shared__ float4 s[64];
  __pipeline_memcpy_async(&s[threadIdx.x], reinterpret_cast<const float4*>(x) + threadIdx.x, 16);
  __pipeline_commit();
  __pipeline_wait_prior(0);
  reinterpret_cast<float4*>(y)[threadIdx.x] = s[threadIdx.x];
}
__global__ void LargeShared(float* x) {
  extern __shared__ float large[];
  large[threadIdx.x * 200] = 1;
  x[threadIdx.x] = large[threadIdx.x * 200];
}
__global__ void Together(float* x) {
  cooperative_groups::this_grid().sync();
  x[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

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

cudaStream_t NewStream() {
  cudaStream_t s;
  CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
  return s;
}

// Pinned memory that a kernel writes and a copy of another stream reads; and two copies that share
// the end of the one and the beginning of the other, on different pages.
void PinnedRaces(float* x, const std::string& name, bool fine) {
  const cudaStream_t a = NewStream(), b = NewStream();
  cudaEvent_t done;
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  float* pinned;
  CHECK(cudaMallocHost(&pinned, 65536));
  std::memset(pinned, 0, 65536);
  if (name == "pinned_kernel") {
    Fill<<<64, 256, 0, a>>>(pinned, 3, 16384);
  } else {
    float* big;
    CHECK(cudaMalloc(&big, 65536));
    CHECK(cudaMemsetAsync(big, 0, 65536, a));
    CHECK(cudaMemcpyAsync(pinned, big, 65536, cudaMemcpyDeviceToHost, a));
    CHECK(cudaFreeAsync(big, a));
  }
  CHECK(cudaEventRecord(done, a));
  if (fine) CHECK(cudaStreamWaitEvent(b, done, 0));
  CHECK(cudaMemcpyAsync(x, pinned + 8192, 4096, cudaMemcpyHostToDevice, b));
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaFreeHost(pinned));
}

void SystemAtomic(bool fine) {
  int* n;
  CHECK(cudaMallocHost(&n, sizeof(int)));
  *n = 0;
  CountOnHost<<<1, 32>>>(n, fine);
  CHECK(cudaDeviceSynchronize());
  if (*n != 32) std::printf("%d\n", *n);
  CHECK(cudaFreeHost(n));
}

void HostOrder(bool fine) {
  int* word;
  CHECK(cudaMallocHost(&word, 2 * sizeof(int)));
  TellHost<<<1, 1>>>(word, fine);
  CHECK(cudaDeviceSynchronize());
  if (word[0] != 1 || word[1] != 7) std::printf("%d %d\n", word[0], word[1]);
  CHECK(cudaFreeHost(word));
}

void InterleavedColumns(float* x, bool fine) {
  const cudaStream_t a = NewStream(), b = NewStream();
  CHECK(cudaMemset2DAsync(x, 8, 0, 4, kCount / 2, a));
  CHECK(cudaMemset2DAsync(x + 1, 8, 0, 4, kCount / 2, b));
  Columns<<<2, 256, 0, a>>>(x, 0, kCount);
  Columns<<<2, 256, 0, b>>>(x, fine ? 1 : 0, kCount);
}

// The wait that orders two streams of a capture is dropped, though the second joins at the end.
void CapturedRace(float* x, float* y, bool fine) {
  const cudaStream_t a = NewStream(), b = NewStream();
  cudaEvent_t fork, middle, join;
  for (cudaEvent_t* e : {&fork, &middle, &join}) {
    CHECK(cudaEventCreateWithFlags(e, cudaEventDisableTiming));
  }
  CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  CHECK(cudaEventRecord(fork, a));
  CHECK(cudaStreamWaitEvent(b, fork, 0));
  Fill<<<4, 256, 0, a>>>(x, 3, kCount);
  CHECK(cudaEventRecord(middle, a));
  if (fine) CHECK(cudaStreamWaitEvent(b, middle, 0));
  Scale<<<4, 256, 0, b>>>(y, x, 2, kCount);
  CHECK(cudaEventRecord(join, b));
  CHECK(cudaStreamWaitEvent(a, join, 0));
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(a, &graph));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CHECK(cudaGraphDestroy(graph));
  for (int i = 0; i < 2; ++i) CHECK(cudaGraphLaunch(exec, a));
  CHECK(cudaStreamSynchronize(a));
  CHECK(cudaGraphExecDestroy(exec));
}

void EndedCapture(float* x, bool fine) {
  const cudaStream_t a = NewStream(), b = NewStream();
  cudaEvent_t done;
  CHECK(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
  CHECK(cudaStreamBeginCapture(a, cudaStreamCaptureModeThreadLocal));
  Fill<<<4, 256, 0, a>>>(x, 3, kCount);
  CHECK(cudaEventRecord(done, a));
  cudaGraph_t graph;
  CHECK(cudaStreamEndCapture(a, &graph));
  CHECK(cudaGraphDestroy(graph));
  if (fine) CHECK(cudaEventRecord(done, a));
  const cudaError_t waited = cudaStreamWaitEvent(b, done, 0);
  if (waited != (fine ? cudaSuccess : cudaErrorCapturedEvent)) std::printf("%d\n", waited);
}

// Devices 0 and 1: memory without peer access, a stream of the other, memory of one that is full.
void Devices(float* x, const std::string& name, bool fine) {
  const cudaStream_t s = NewStream();
  CHECK(cudaSetDevice(1));
  int can = 0;
  CHECK(cudaDeviceCanAccessPeer(&can, 1, 0));
  if (can != 1) std::printf("no peer\n");
  if (fine) CHECK(cudaDeviceEnablePeerAccess(0, 0));
  if (name == "other_device") Fill<<<4, 256>>>(x, 1, kCount);
  if (name == "other_stream") {
    if (fine) CHECK(cudaSetDevice(0));
    Fill<<<4, 256, 0, s>>>(x, 1, kCount);
    CHECK(cudaGetLastError());
  }
  CHECK(cudaDeviceSynchronize());
  CHECK(cudaSetDevice(0));
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
  const bool fine = argc > 2 || name == "graph" || name == "fill" || name == "copied_async" ||
                    name == "together" || name == "stream";
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
  if (name == "system_atomic") SystemAtomic(fine);
  if (name == "host_order") HostOrder(fine);
  if (name == "divergent_barrier") Divergent<<<1, 64>>>(x, fine);
  if (name == "wrong_barrier") MeetAt<<<1, 64>>>(fine ? 3 : 17);
  if (name == "assertion") Asserts<<<1, 64>>>(x, fine ? 0 : -1);
  if (name == "fill") Fill<<<16, 256>>>(x, 1, kCount);
  if (name == "stream_race" || name == "early_read") Streams(x, y, name, fine);
  if (name == "capture" || name == "graph") Captured(x, y, fine);
  if (name == "below_shared") BelowShared<<<1, 64>>>(x, fine);
  if (name == "below_local") BelowLocal<<<1, 1>>>(x, fine ? 1 : -1);
  if (name == "below_null") BelowNull<<<1, 32>>>(x, nullptr, fine);
  if (name == "unset_register") UnsetRegister<<<1, 32>>>(reinterpret_cast<int*>(x), fine);
  if (name == "pinned_kernel" || name == "pinned_copies") PinnedRaces(x, name, fine);
  if (name == "columns") InterleavedColumns(x, fine);
  if (name == "captured_race") CapturedRace(x, y, fine);
  if (name == "ended_capture") EndedCapture(x, fine);
  if (name == "other_device" || name == "other_stream") Devices(x, name, fine);
  if (name == "large_shared") {
    if (fine) {
      CHECK(cudaFuncSetAttribute(LargeShared, cudaFuncAttributeMaxDynamicSharedMemorySize, 51200));
    }
    LargeShared<<<1, 64, 51200>>>(x);
    CHECK(cudaGetLastError());
  }
  if (name == "copied_async") CopiedAsync<<<1, 64>>>(y, x);
  if (name == "together") {
    void* args[] = {&x};
    CHECK(cudaLaunchCooperativeKernel(reinterpret_cast<void*>(&Together), 4, 256, args, 0, 0));
  }
  if (name == "stream") {
    cudaStream_t s;
    CHECK(cudaStreamCreate(&s));
    CHECK(cudaStreamDestroy(s));
  }
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
  if (name == "wrong_free" && !fine) cudaFree(reinterpret_cast<char*>(y) + 16);
  CHECK(cudaFree(y));
  std::printf("fine\n");
  return 0;
}
