// libcudart's functions: devices, errors, streams, events, launches, graphs, and the ones that
// nvcc's objects call unseen.
#include "tests/cusim/cudart.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>

using cusim::Event;
using cusim::Graph;
using cusim::Runtime;
using cusim::Stream;

namespace {

cusim::Dim ToDim(dim3 d) { return {d.x, d.y, d.z}; }

struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
thread_local std::vector<Configuration> t_configurations;

cudaEvent_t MakeEvent(int device, bool timed) {
  auto* const e = new Event;
  e->device = device;
  e->timed = timed;
  return reinterpret_cast<cudaEvent_t>(e);
}

struct Named {
  cudaError_t error;
  const char* name;
  const char* text;
};
constexpr Named kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration",
     "invalid configuration argument"},
    {cudaErrorInvalidDeviceFunction, "cudaErrorInvalidDeviceFunction", "invalid device function"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress",
     "an illegal memory access was encountered"},
    {cudaErrorMisalignedAddress, "cudaErrorMisalignedAddress", "misaligned address"},
    {cudaErrorIllegalInstruction, "cudaErrorIllegalInstruction",
     "an illegal instruction was encountered"},
    {cudaErrorLaunchTimeout, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
};

}  // namespace

extern "C" {

// ---- Devices and errors. ----

cudaError_t cudaGetDeviceCount(int* n) {
  CUSIM_CALL(cudaGetDeviceCount);
  *n = r.devices();
  return r.Return(*n == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaSetDevice(int device) {
  CUSIM_CALL(cudaSetDevice);
  if (device < 0 || device >= r.devices()) return r.Return(cudaErrorInvalidDevice);
  r.SetDevice(device);
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  CUSIM_CALL(cudaGetDevice);
  *device = r.device();
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int* v) { return *v = 13000, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() {
  CUSIM_CALL(cudaDeviceSynchronize);
  return r.Return(r.SynchronizeDevice());
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  CUSIM_CALL(cudaDeviceGetAttribute);
  if (device < 0 || device >= r.devices()) return r.Return(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY:
      *value = 1024;
      break;
    case cudaDevAttrMaxBlockDimZ:
      *value = 64;
      break;
    case cudaDevAttrMaxGridDimX:
      *value = 0x7fffffff;
      break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ:
      *value = 65535;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlock:
      *value = 49152;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = cusim::SharedOfABlock();
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 4;
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor:
      *value = 2048;
      break;
    case cudaDevAttrMaxBlocksPerMultiprocessor:
      *value = 8;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 8;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
      *value = 1;
      break;
    default:
      *value = 0;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  CUSIM_CALL(cudaGetDeviceProperties);
  if (device < 0 || device >= r.devices()) return r.Return(cudaErrorInvalidDevice);
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "cusim");
  p->totalGlobalMem = r.memory().capacity();
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = static_cast<size_t>(cusim::SharedOfABlock());
  p->regsPerBlock = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->major = 8;
  p->multiProcessorCount = 4;
  p->maxThreadsPerMultiProcessor = 2048;
  p->unifiedAddressing = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  CUSIM_CALL(cudaDeviceGetStreamPriorityRange);
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  CUSIM_CALL(cudaDeviceCanAccessPeer);
  *can = device != peer && device < r.devices() && peer < r.devices();
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned) {
  CUSIM_CALL(cudaDeviceEnablePeerAccess);
  return r.Return(r.SetPeer(peer, true));
}
cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  CUSIM_CALL(cudaDeviceDisablePeerAccess);
  return r.Return(r.SetPeer(peer, false));
}
cudaError_t cudaGetLastError() {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  return cusim::LastError(true, r.sticky());
}
cudaError_t cudaPeekAtLastError() {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  return cusim::LastError(false, r.sticky());
}
const char* cudaGetErrorString(cudaError_t error) {
  for (const Named& e : kErrors) {
    if (e.error == error) return e.text;
  }
  return "unrecognized error code";
}
const char* cudaGetErrorName(cudaError_t error) {
  for (const Named& e : kErrors) {
    if (e.error == error) return e.name;
  }
  return "unrecognized error code";
}

// ---- Streams and events. ----

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  CUSIM_CALL(cudaStreamCreateWithPriority);
  *stream = reinterpret_cast<cudaStream_t>(r.MakeStream(flags, priority));
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  CUSIM_CALL(cudaStreamCreateWithFlags);
  *stream = reinterpret_cast<cudaStream_t>(r.MakeStream(flags, 0));
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  CUSIM_CALL(cudaStreamCreate);
  *stream = reinterpret_cast<cudaStream_t>(r.MakeStream(0, 0));
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  CUSIM_CALL(cudaStreamDestroy);
  Stream* const s = r.Of(stream);
  return r.Return(s == nullptr ? cudaErrorInvalidResourceHandle : r.DestroyStream(s));
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  CUSIM_CALL(cudaStreamSynchronize);
  return r.Return(r.Synchronize(r.Of(stream)));
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  CUSIM_CALL(cudaStreamQuery);
  Stream* const s = r.Of(stream);
  if (s == nullptr) return r.Return(cudaErrorInvalidResourceHandle);
  if (s->capture != nullptr && r.Refuses(s, "cudaStreamQuery")) {
    return r.Return(cudaErrorStreamCaptureUnsupported);
  }
  return r.Idle(s) ? r.Return(r.sticky()) : cudaErrorNotReady;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  CUSIM_CALL(cudaStreamWaitEvent);
  return r.Return(r.Wait(r.Of(stream), reinterpret_cast<Event*>(event)));
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t f, void* data) {
  CUSIM_CALL(cudaLaunchHostFunc);
  return r.Return(r.Queue(r.Of(stream), "cudaLaunchHostFunc",
                          [f, data](std::vector<cusim::Range>*) { f(data); }));
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  CUSIM_CALL(cudaEventCreateWithFlags);
  *event = MakeEvent(r.device(), (flags & cudaEventDisableTiming) == 0);
  return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  CUSIM_CALL(cudaEventCreate);
  *event = MakeEvent(r.device(), true);
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  CUSIM_CALL(cudaEventRecord);
  return r.Return(r.Record(reinterpret_cast<Event*>(event), r.Of(stream)));
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  CUSIM_CALL(cudaEventQuery);
  return r.Done(reinterpret_cast<Event*>(event)) ? r.Return(r.sticky()) : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  CUSIM_CALL(cudaEventSynchronize);
  return r.Return(r.Synchronize(reinterpret_cast<Event*>(event)));
}
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t end) {
  CUSIM_CALL(cudaEventElapsedTime);
  auto *const a = reinterpret_cast<Event*>(start), *const b = reinterpret_cast<Event*>(end);
  if (!a->timed || !b->timed) return r.Return(cudaErrorInvalidResourceHandle);
  if (!r.Done(a) || !r.Done(b)) return cudaErrorNotReady;
  // No device's time: a nanosecond for each instruction of a warp.
  *ms = static_cast<float>(*b->ticks - *a->ticks) * 1e-6f;
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  CUSIM_CALL(cudaEventDestroy);
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}

// ---- Graphs. ----

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
  CUSIM_CALL(cudaStreamBeginCapture);
  return r.Return(r.Begin(r.Of(stream), mode == cudaStreamCaptureModeRelaxed));
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  CUSIM_CALL(cudaStreamEndCapture);
  Graph* g = nullptr;
  const cudaError_t e = r.End(r.Of(stream), &g);
  *graph = reinterpret_cast<cudaGraph_t>(g);
  return r.Return(e);
}
static cudaStreamCaptureStatus StatusOf(const Stream& s) {
  if (s.capture == nullptr) return cudaStreamCaptureStatusNone;
  return s.capture->broken.empty() ? cudaStreamCaptureStatusActive
                                   : cudaStreamCaptureStatusInvalidated;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  CUSIM_CALL(cudaStreamIsCapturing);
  Stream* const s = r.Of(stream);
  if (s == nullptr) return r.Return(cudaErrorInvalidResourceHandle);
  *status = StatusOf(*s);
  return cudaSuccess;
}
// A node is its number among those of all graphs. One after which the stream's next would come.
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** after, const cudaGraphEdgeData** edges,
                                     size_t* count) {
  CUSIM_CALL(cudaStreamGetCaptureInfo);
  Stream* const s = r.Of(stream);
  if (s == nullptr || status == nullptr) return r.Return(cudaErrorInvalidValue);
  if (id != nullptr || graph != nullptr || edges != nullptr) {
    return r.Return(cudaErrorNotSupported);  // of what is asked here: the last node
  }
  *status = StatusOf(*s);
  thread_local cudaGraphNode_t last;
  last = reinterpret_cast<cudaGraphNode_t>(s->capture == nullptr ? 0 : s->capture->LastOf(s));
  if (after != nullptr) *after = &last;
  if (count != nullptr) *count = last == nullptr ? 0 : 1;
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  CUSIM_CALL(cudaGraphInstantiate);
  *exec = reinterpret_cast<cudaGraphExec_t>(r.Instantiate(*reinterpret_cast<Graph*>(graph)));
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  CUSIM_CALL(cudaGraphLaunch);
  return r.Return(r.LaunchGraph(reinterpret_cast<Graph*>(exec), r.Of(stream)));
}
cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t stream) {
  CUSIM_CALL(cudaGraphUpload);
  return r.Return(r.Of(stream) == nullptr ? cudaErrorInvalidResourceHandle : cudaSuccess);
}
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) {
  CUSIM_CALL(cudaGraphGetNodes);
  if (nodes != nullptr) return r.Return(cudaErrorNotSupported);  // how many there are, no more
  *count = reinterpret_cast<Graph*>(graph)->nodes.size();
  return cudaSuccess;
}
cudaError_t cudaGraphExecKernelNodeSetParams(cudaGraphExec_t exec, cudaGraphNode_t node,
                                             const cudaKernelNodeParams* params) {
  CUSIM_CALL(cudaGraphExecKernelNodeSetParams);
  if (params == nullptr || params->kernelParams == nullptr) return r.Return(cudaErrorInvalidValue);
  return r.Return(r.SetParams(reinterpret_cast<Graph*>(exec), reinterpret_cast<uint64_t>(node),
                              params->func, ToDim(params->gridDim), ToDim(params->blockDim),
                              params->kernelParams, params->sharedMemBytes));
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  CUSIM_CALL(cudaGraphDestroy);
  r.Destroy(reinterpret_cast<Graph*>(graph));
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  CUSIM_CALL(cudaGraphExecDestroy);
  delete reinterpret_cast<Graph*>(exec);
  return cudaSuccess;
}

// ---- Launches. ----

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** args, size_t shared,
                             cudaStream_t stream) {
  CUSIM_CALL(cudaLaunchKernel);
  return r.Return(
      r.LaunchKernel(kernel, ToDim(grid), ToDim(block), args, shared, r.Of(stream), false));
}
cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void** args,
                                        size_t shared, cudaStream_t stream) {
  CUSIM_CALL(cudaLaunchCooperativeKernel);
  return r.Return(
      r.LaunchKernel(kernel, ToDim(grid), ToDim(block), args, shared, r.Of(stream), true));
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value) {
  CUSIM_CALL(cudaFuncSetAttribute);
  if (r.KernelOf(kernel) == nullptr) return r.Return(cudaErrorInvalidDeviceFunction);
  return r.Return(attribute == cudaFuncAttributeMaxDynamicSharedMemorySize
                      ? r.AllowShared(kernel, value)
                      : cudaSuccess);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  CUSIM_CALL(cudaFuncGetAttributes);
  const cusim::Kernel* const k = r.KernelOf(kernel);
  if (k == nullptr) return r.Return(cudaErrorInvalidDeviceFunction);
  std::memset(attributes, 0, sizeof *attributes);
  attributes->sharedSizeBytes = static_cast<size_t>(k->shared_bytes);
  attributes->localSizeBytes = static_cast<size_t>(k->local_bytes);
  attributes->maxThreadsPerBlock = k->max_threads != 0 ? k->max_threads : 1024;
  attributes->ptxVersion = attributes->binaryVersion = 80;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel,
                                                          int threads, size_t shared) {
  CUSIM_CALL(cudaOccupancyMaxActiveBlocksPerMultiprocessor);
  const cusim::Kernel* const k = r.KernelOf(kernel);
  if (k == nullptr || threads <= 0) return r.Return(cudaErrorInvalidValue);
  const size_t bytes = shared + static_cast<size_t>(k->shared_bytes) + 1;
  *blocks = std::min<int>({8, 2048 / threads, cusim::SharedOfABlock() / static_cast<int>(bytes)});
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel,
                                                                   int threads, size_t shared,
                                                                   unsigned flags) {
  if (flags > cudaOccupancyDisableCachingOverride) {
    return Runtime::Get().Return(cudaErrorInvalidValue);
  }
  return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, shared);
}

// ---- What nvcc's objects call. ----

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const uint8_t* data;
  };
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  void** const handle = new void*[1]{nullptr};
  r.Load(handle, static_cast<const Wrapper*>(wrapper)->data);
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void** handle) { delete[] handle; }
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.RegisterKernel(host, name);
}
void __cudaRegisterVar(void**, char* host, char*, const char* name, int, size_t, int, int) {
  Runtime& r = Runtime::Get();
  std::lock_guard<std::recursive_mutex> lock(r.mutex);
  r.RegisterVariable(host, name);
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** args,
                               size_t shared, cudaStream_t stream) {
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, args, shared, stream);
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  t_configurations.push_back({grid, block, shared, stream});
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  if (t_configurations.empty()) return cudaErrorMissingConfiguration;
  const Configuration c = t_configurations.back();
  t_configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *shared = c.shared;
  *static_cast<cudaStream_t*>(stream) = c.stream;
  return cudaSuccess;
}

}  // extern "C"
