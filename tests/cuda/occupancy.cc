// How many of a multiprocessor's warps fit, by NVIDIA's own rules: for each line "sm threads
// registers shared barriers" of standard input (of a block, a thread, a block in bytes, a block) a
// line with the percentage of the warps that it could hold. No GPU is asked. Exits with 1, and says
// why, at a line that it cannot read or that no such device can run.
#include <cuda_occupancy.h>

#include <cstdio>

namespace {

// What cudaGetDeviceProperties says of A100, H100 and B200. Source: Technical Specifications per
// Compute Capability of the CUDA Programming Guide.
bool Properties(int sm, cudaOccDeviceProp* p) {
  if (sm != 80 && sm != 90 && sm != 100) return false;
  const size_t shared = (sm == 80 ? 164 : 228) * 1024;
  p->computeMajor = sm / 10;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiprocessor = 2048;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->sharedMemPerBlock = 48 * 1024;
  p->sharedMemPerMultiprocessor = shared;
  p->numSms = 1;  // of one alone
  p->sharedMemPerBlockOptin = shared - 1024;
  p->reservedSharedMemPerBlock = 1024;
  return true;
}

}  // namespace

int main() {
  int sm, threads, registers, shared, barriers, read, line = 0;
  while ((read = std::scanf("%d %d %d %d %d", &sm, &threads, &registers, &shared, &barriers)) ==
         5) {
    ++line;
    cudaOccDeviceProp device;
    if (!Properties(sm, &device)) {
      std::fprintf(stderr, "occupancy: line %d: sm must be 80, 90 or 100, is %d\n", line, sm);
      return 1;
    }
    cudaOccFuncAttributes kernel;
    kernel.maxThreadsPerBlock = threads;
    kernel.numRegs = registers;
    kernel.sharedSizeBytes = static_cast<size_t>(shared);
    kernel.numBlockBarriers = barriers;
    const cudaOccDeviceState state;
    cudaOccResult result;
    const cudaOccError error =
        cudaOccMaxActiveBlocksPerMultiprocessor(&result, &device, &kernel, &state, threads, 0);
    if (error != CUDA_OCC_SUCCESS || result.activeBlocksPerMultiprocessor == 0) {
      std::fprintf(stderr,
                   "occupancy: line %d: no block of %d threads, %d registers each, %d bytes and %d "
                   "barriers runs on sm_%d (error %d)\n",
                   line, threads, registers, shared, barriers, sm, error);
      return 1;
    }
    const int warps = result.activeBlocksPerMultiprocessor * ((threads + 31) / 32);
    std::printf("%d\n", 100 * warps / (device.maxThreadsPerMultiprocessor / device.warpSize));
  }
  if (read == EOF) return 0;
  std::fprintf(stderr, "occupancy: line %d is not five whole numbers\n", line + 1);
  return 1;
}
