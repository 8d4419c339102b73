// The kernels of rng/device_draw.h on a device, against the same functions in a loop on the host:
// the same bits. Exits with 77, saying so, where there is no device.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "dtensor/rng/device_draw.h"

namespace dtensor {
namespace {

void Check(cudaError_t e, const char* what) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(e));
  std::exit(1);
}

template <class Job, class Sampler, void (*kBody)(const Job&, const Sampler&, int64_t)>
__global__ void Run(Job job, Sampler sampler, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i < n) kBody(job, sampler, i);
}
template <class Job>
__global__ void RunDropout(Job job, int64_t n) {
  const int64_t i = blockIdx.x * int64_t{256} + threadIdx.x;
  if (i < n) DropoutThread(job, i);
}
unsigned Blocks(int64_t n) { return static_cast<unsigned>((n + 255) / 256); }

// Memory on both sides.
template <class T>
struct Both {
  std::vector<T> host, back;
  T* device = nullptr;
  explicit Both(int64_t n) : host(n), back(n) {
    Check(cudaMalloc(&device, n * sizeof(T)), "cudaMalloc");
    Check(cudaMemset(device, 0, n * sizeof(T)), "cudaMemset");
  }
  ~Both() { cudaFree(device); }
  bool Same() {
    Check(cudaDeviceSynchronize(), "kernel");
    Check(cudaMemcpy(back.data(), device, back.size() * sizeof(T), cudaMemcpyDeviceToHost), "copy");
    return std::memcmp(back.data(), host.data(), host.size() * sizeof(T)) == 0;
  }
};

int g_failed = 0, g_passed = 0;
void Count(const char* what, bool same) {
  same ? ++g_passed : ++g_failed;
  if (!same) std::printf("FAILED %s\n", what);
}

template <class Sampler, class T>
void CheckSampler(const char* name, DrawParams params) {
  const Sampler sampler(params);
  const int64_t rows = 700, width = 1000, n = rows * width;
  const DeviceSegment segment = {MakePhiloxKeys(0x5EED00000007ull), 2, 0, 270336};
  Both<T> whole(n), box(rows * 130), small(5000);
  const IntervalJob<T> h1 = {segment, 0, n, whole.host.data()};
  IntervalJob<T> d1 = h1;
  d1.out = whole.device;
  const int64_t threads = IntervalThreads<Sampler>(h1);
  for (int64_t i = 0; i < threads; ++i) IntervalThread(h1, sampler, i);
  Run<IntervalJob<T>, Sampler, &IntervalThread<Sampler, T>>
      <<<Blocks(threads), 256>>>(d1, sampler, threads);
  Count(name, whole.Same());
  const BoxJob<T> h2 = {segment,
                        0,
                        rows,
                        500,
                        130,
                        FastDivide(width),
                        FastDivide(130),
                        FastDivide(segment.threads),
                        box.host.data()};
  BoxJob<T> d2 = h2;
  d2.out = box.device;
  for (int64_t i = 0; i < BoxThreads(h2); ++i) BoxThread(h2, sampler, i);
  Run<BoxJob<T>, Sampler, &BoxThread<Sampler, T>>
      <<<Blocks(BoxThreads(h2)), 256>>>(d2, sampler, BoxThreads(h2));
  Count(name, box.Same());
  const IntervalJob<T> h4 = {segment, 0, 5000, small.host.data()};
  IntervalJob<T> d4 = h4;
  d4.out = small.device;
  for (int64_t i = 0; i < 5000; ++i) SmallThread(h4, sampler, i);
  Run<IntervalJob<T>, Sampler, &SmallThread<Sampler, T>><<<Blocks(5000), 256>>>(d4, sampler, 5000);
  Count(name, small.Same());
}

template <template <class> class Sampler>
void CheckFloating(const char* name, DrawParams params) {
  CheckSampler<Sampler<float>, float>(name, params);
  CheckSampler<Sampler<double>, double>(name, params);
  CheckSampler<Sampler<BFloat16>, BFloat16>(name, params);
  CheckSampler<Sampler<Half>, Half>(name, params);
}

template <class T, class Acc>
void CheckDropout(const char* name) {
  const int64_t n = int64_t{300000} * kDropoutVec<T>;
  Both<T> y(n);
  Both<uint8_t> mask(n);
  std::vector<T> x;
  for (int64_t i = 0; i < n; ++i) x.push_back(FromReal<T>(static_cast<double>(i % 13) - 6));
  T* on_device;
  Check(cudaMalloc(&on_device, n * sizeof(T)), "cudaMalloc");
  Check(cudaMemcpy(on_device, x.data(), n * sizeof(T), cudaMemcpyHostToDevice), "copy");
  const Acc keep = static_cast<Acc>(0.7);
  const DropoutJob<T, Acc> h = {{MakePhiloxKeys(5), 2, 0, 270336},
                                0,
                                n,
                                static_cast<float>(keep),
                                Acc(1) / keep,
                                x.data(),
                                y.host.data(),
                                reinterpret_cast<bool*>(mask.host.data())};
  DropoutJob<T, Acc> d = h;
  d.x = on_device;
  d.y = y.device;
  d.mask = reinterpret_cast<bool*>(mask.device);
  const int64_t threads = DropoutThreads(h);
  for (int64_t i = 0; i < threads; ++i) DropoutThread(h, i);
  RunDropout<<<Blocks(threads), 256>>>(d, threads);
  Count(name, y.Same() && mask.Same());
  cudaFree(on_device);
}

int Main() {
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("skipped: no CUDA device (%s)\n", cudaGetErrorString(found));
    return 77;
  }
  CheckFloating<Uniform>("uniform_", {.a = -0.3, .b = 0.7});
  CheckFloating<Normal>("normal_", {.a = 1, .b = 2});
  CheckFloating<LogNormal>("log_normal_", {});
  CheckFloating<Exponential>("exponential_", {.a = 2});
  CheckFloating<Cauchy>("cauchy_", {.a = 1, .b = 3});
  CheckFloating<Bernoulli>("bernoulli_", {.a = 0.3});
  CheckFloating<Geometric>("geometric_", {.a = -0.2231435513142097});
  CheckSampler<Words32<int32_t>, int32_t>("random_", {.range = 100, .from = -5});
  CheckSampler<Words32<uint8_t>, uint8_t>("random_", {.range = 100});
  CheckSampler<Words64<int64_t>, int64_t>("random_", {.range = 1000000007});
  CheckDropout<float, float>("dropout");
  CheckDropout<double, double>("dropout");
  CheckDropout<BFloat16, float>("dropout");
  std::printf("%d passed, %d failed\n", g_passed, g_failed);
  return g_failed == 0 ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main() { return dtensor::Main(); }
