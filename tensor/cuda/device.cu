// The CUDA device: a table of the runtime's functions. The plugin exports nothing else, links
// nothing of ours and never libcuda, so that a program starts where there is no driver.
#include <nvtx3/nvToolsExt.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <string_view>

#include "dtensor/tensor/cuda/arrays.h"
#include "dtensor/tensor/cuda/kernels/products.h"
#include "dtensor/tensor/cuda/launch.h"
#include "dtensor/tensor/cuda/numbers.h"
#include "dtensor/tensor/device_table.h"

namespace dtensor::cuda {
namespace {

constexpr int kLeastCapability = 8;  // major; what the PTX is compiled for

thread_local cudaError_t noted = cudaSuccess;

int Failed(cudaError_t error, const char* step, char* why, size_t size) {
  std::snprintf(why, size, "%s: %s (error %d)", step, cudaGetErrorString(error),
                static_cast<int>(error));
  (void)cudaGetLastError();  // it is told; the next call begins anew
  return error;
}

struct Device {
  int index;
};
int IndexOf(void* device) { return static_cast<Device*>(device)->index; }

// The device of a call for its time: memory may be freed by a thread that uses another.
class OnDevice {
 public:
  explicit OnDevice(void* device) {
    error_ = cudaGetDevice(&before_);
    if (error_ == cudaSuccess) error_ = cudaSetDevice(IndexOf(device));
  }
  ~OnDevice() { (void)cudaSetDevice(before_); }
  OnDevice(const OnDevice&) = delete;
  template <class Call>
  int Do(const Call& call) const {
    const cudaError_t error = error_ == cudaSuccess ? call() : error_;
    if (error != cudaSuccess) (void)cudaGetLastError();
    return TakeError(error);
  }

 private:
  int before_ = 0;
  cudaError_t error_;
};

const char* Describe(int error) {
  if (error == cudaErrorInvalidResourceHandle) {
    return "invalid resource handle: the thread may have another device than its rank's "
           "(cudaSetDevice)";
  }
  return cudaGetErrorString(static_cast<cudaError_t>(error));
}

int Count(int* number, char* why, size_t size) {
  *number = 0;
  const cudaError_t error = cudaGetDeviceCount(number);
  if (error == cudaSuccess && *number > 0) return 0;
  *number = 0;
  return Failed(error == cudaSuccess ? cudaErrorNoDevice : error, "cudaGetDeviceCount", why, size);
}

int Open(int index, void** device, char* why, size_t size) {
  int major = 0, minor = 0;
  cudaError_t error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index);
  }
  if (error != cudaSuccess) return Failed(error, "cudaDeviceGetAttribute", why, size);
  if (major < kLeastCapability) {
    std::snprintf(why, size, "its compute capability is %d.%d, at least %d.0 is needed", major,
                  minor, kLeastCapability);
    return cudaErrorInsufficientDriver;
  }
  // Makes the context; the thread, whose own device may be another, keeps that.
  int before = 0;
  error = cudaGetDevice(&before);
  if (error == cudaSuccess) error = cudaSetDevice(index);
  if (error != cudaSuccess) return Failed(error, "cudaSetDevice", why, size);
  (void)cudaSetDevice(before);
  *device = new Device{index};
  return 0;
}
// All that was taken has been freed, which waits for what works on it.
void Close(void* device) { delete static_cast<Device*>(device); }

int TakeSegment(void* device, int64_t bytes, void** memory) {
  return OnDevice(device).Do([&] { return cudaMalloc(memory, static_cast<size_t>(bytes)); });
}
int FreeSegment(void* device, void* memory) {
  return OnDevice(device).Do([&] { return cudaFree(memory); });
}
int TakePinned(void* device, int64_t bytes, void** memory) {
  return OnDevice(device).Do(
      [&] { return cudaHostAlloc(memory, static_cast<size_t>(bytes), cudaHostAllocPortable); });
}
int FreePinned(void* device, void* memory) {
  return OnDevice(device).Do([&] { return cudaFreeHost(memory); });
}

// Made by the rank's own thread, which launches there: the device stays the thread's.
int MakeStream(void* device, void** stream) {
  cudaError_t error = cudaSetDevice(IndexOf(device));
  if (error == cudaSuccess) {
    error =
        cudaStreamCreateWithFlags(reinterpret_cast<cudaStream_t*>(stream), cudaStreamNonBlocking);
  }
  return TakeError(error);
}
int FreeStream(void* device, void* stream) {
  return OnDevice(device).Do([&] { return cudaStreamDestroy(static_cast<cudaStream_t>(stream)); });
}
int MakeEvent(void* device, void** event) {
  return OnDevice(device).Do([&] {
    return cudaEventCreateWithFlags(reinterpret_cast<cudaEvent_t*>(event), cudaEventDisableTiming);
  });
}
int FreeEvent(void* device, void* event) {
  return OnDevice(device).Do([&] { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); });
}
int Record(void* event, void* stream) {
  return TakeError(
      cudaEventRecord(static_cast<cudaEvent_t>(event), static_cast<cudaStream_t>(stream)));
}
int Order(void* stream, void* event) {
  return TakeError(
      cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), static_cast<cudaEvent_t>(event), 0));
}
int Query(void* event, int* done) {
  const cudaError_t error = cudaEventQuery(static_cast<cudaEvent_t>(event));
  *done = error == cudaSuccess ? 1 : 0;
  if (error == cudaErrorNotReady) {
    (void)cudaGetLastError();
    return TakeError(cudaSuccess);
  }
  return TakeError(error);
}
int Move(void* stream, void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return TakeError(cudaSuccess);
  return TakeError(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault,
                                   static_cast<cudaStream_t>(stream)));
}

// --- graphs -------------------------------------------------------------------------------------

// The numbers of a block as a node of the graph has them, which writes them to their place.
struct GraphNumbers {
  char* to;
  int64_t used;
  uint4 words[kNumberBlockBytes / sizeof(uint4)];
};
constexpr int kNumberThreads = 256;  // one for each uint4
static_assert(sizeof(GraphNumbers) <= 4096, "more than a kernel takes");
static_assert(kNumberBlockBytes <= kNumberThreads * static_cast<int64_t>(sizeof(uint4)));

__global__ void WriteNumbers(const __grid_constant__ GraphNumbers numbers) {
  const unsigned i = threadIdx.x;
  if (i * sizeof(uint4) < numbers.used) reinterpret_cast<uint4*>(numbers.to)[i] = numbers.words[i];
}

struct Graph {
  cudaGraph_t captured = nullptr;  // its nodes are the names by which the instance knows its own
  cudaGraphExec_t exec = nullptr;
};

GraphNumbers NumbersOf(const NumberBlock& block) {
  GraphNumbers numbers = {block.device, block.used, {}};
  std::memcpy(numbers.words, block.host, static_cast<size_t>(block.used));
  return numbers;
}

// Relaxed: the rank's other calls (memory, other streams) are none of a capture's business.
int Capture(void* stream, NumberBlock* block) {
  const auto on = static_cast<cudaStream_t>(stream);
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaError_t error = cudaStreamIsCapturing(on, &status);
  if (error == cudaSuccess && status == cudaStreamCaptureStatusNone) {
    error = cudaStreamBeginCapture(on, cudaStreamCaptureModeRelaxed);
  }
  if (error != cudaSuccess) return TakeError(error);
  WriteNumbers<<<1, kNumberThreads, 0, on>>>(NumbersOf(*block));
  CheckLaunch();
  // What the stream does next would come after this one node.
  const cudaGraphNode_t* last = nullptr;
  size_t count = 0;
  error = cudaStreamGetCaptureInfo(on, &status, nullptr, nullptr, &last, nullptr, &count);
  block->node = error == cudaSuccess && count == 1 ? last[0] : nullptr;
  return TakeError(error);  // what else went wrong is told when the capture ends
}
int GraphFree(void* graph) {
  auto* const of = static_cast<Graph*>(graph);
  cudaError_t error = cudaSuccess;
  if (of->exec != nullptr) error = cudaGraphExecDestroy(of->exec);
  if (of->captured != nullptr) (void)cudaGraphDestroy(of->captured);
  delete of;
  return TakeError(error);
}
int CaptureEnd(void* stream, void** out) {
  *out = nullptr;
  auto* const graph = new Graph;
  cudaError_t error = cudaStreamEndCapture(static_cast<cudaStream_t>(stream), &graph->captured);
  if (error == cudaSuccess) error = cudaGraphInstantiate(&graph->exec, graph->captured, 0);
  const int first = TakeError(error);  // of the launches before, too
  if (first == 0) {
    *out = graph;
  } else {
    (void)cudaGetLastError();
    (void)GraphFree(graph);
  }
  return first;
}
// A node's parameters are those of later launches: one that is under way keeps its own.
cudaError_t SetNumbers(cudaGraphExec_t exec, const NumberBlock& block) {
  GraphNumbers numbers = NumbersOf(block);
  void* arguments[] = {&numbers};
  cudaKernelNodeParams params = {};
  params.func = reinterpret_cast<void*>(&WriteNumbers);
  params.gridDim = dim3(1);
  params.blockDim = dim3(kNumberThreads);
  params.kernelParams = arguments;
  return cudaGraphExecKernelNodeSetParams(exec, static_cast<cudaGraphNode_t>(block.node), &params);
}
int GraphLaunch(void* graph, const NumberBlock* const* blocks, int count, void* stream) {
  const cudaGraphExec_t exec = static_cast<const Graph*>(graph)->exec;
  cudaError_t error = cudaSuccess;
  for (int k = 0; error == cudaSuccess && k < count; ++k) error = SetNumbers(exec, *blocks[k]);
  if (error == cudaSuccess) error = cudaGraphLaunch(exec, static_cast<cudaStream_t>(stream));
  return TakeError(error);
}

void ListNumbers(NumberBlock* block) { numbers_block = block; }

// --- measurement --------------------------------------------------------------------------------

int MakeTimedEvent(void* device, void** event) {
  return OnDevice(device).Do(
      [&] { return cudaEventCreate(reinterpret_cast<cudaEvent_t*>(event)); });
}
int Elapsed(void* from, void* to, float* ms) {
  return TakeError(
      cudaEventElapsedTime(ms, static_cast<cudaEvent_t>(from), static_cast<cudaEvent_t>(to)));
}
void PushRange(const char* name) { nvtxRangePushA(name); }
void PopRange() { nvtxRangePop(); }

// --- kernels ------------------------------------------------------------------------------------

using KernelMap = std::map<std::string, Kernel, std::less<>>;
KernelMap& MutableKernels() {
  static KernelMap* kernels = new KernelMap;
  return *kernels;
}
void AddKernel(const char* op, KernelFn fn, uint32_t dtypes, KernelLayout layout) {
  MutableKernels()[op] = {fn, dtypes, layout};
}
void KeepsLaunch(const char* op, KernelFn, uint32_t, KernelLayout) {
  MutableKernels()[op].keeps_launch = true;
}
const KernelMap& Kernels() {
  static const bool filled = [] {
#define DT_CUDA_KERNELS(name) Add##name##Kernels(&AddKernel);
#include "dtensor/tensor/cuda/families.inc"
#undef DT_CUDA_KERNELS
    AddPointwiseKernels(&KeepsLaunch);
    return true;
  }();
  (void)filled;
  return MutableKernels();
}
int FindOwnKernel(const char* op, Kernel* out) {
  const auto found = Kernels().find(std::string_view(op));
  if (found != Kernels().end()) *out = found->second;
  return 0;
}

}  // namespace

KernelFn KernelOf(const char* op) { return Kernels().find(std::string_view(op))->second.fn; }

void NoteError(cudaError_t error) {
  if (noted == cudaSuccess) noted = error;
}
int TakeError(cudaError_t now) {
  const cudaError_t first = noted != cudaSuccess ? noted : now;
  noted = cudaSuccess;
  return static_cast<int>(first);
}

}  // namespace dtensor::cuda

extern "C" __attribute__((visibility("default"))) const dtensor::DeviceTable* dtensor_cuda_table() {
  using namespace dtensor::cuda;
  static const dtensor::DeviceTable table = {
      .struct_size = sizeof(dtensor::DeviceTable),
      .abi = dtensor::kDeviceTableAbi,
      .name = "cuda",
      .describe = &Describe,
      .count = &Count,
      .open = &Open,
      .close = &Close,
      .segment = &TakeSegment,
      .segment_free = &FreeSegment,
      .pinned = &TakePinned,
      .pinned_free = &FreePinned,
      .stream = &MakeStream,
      .stream_free = &FreeStream,
      .event = &MakeEvent,
      .event_free = &FreeEvent,
      .record = &Record,
      .order = &Order,
      .query = &Query,
      .copy = &CopyArray,
      .fill = &FillArray,
      .reduce = &ReduceArrays,
      .move = &Move,
      .kernel = &FindOwnKernel,
      .capture = &Capture,
      .capture_end = &CaptureEnd,
      .graph_launch = &GraphLaunch,
      .graph_free = &GraphFree,
      .numbers = &ListNumbers,
      .timed_event = &MakeTimedEvent,
      .elapsed = &Elapsed,
      .range_push = &PushRange,
      .range_pop = &PopRange,
      .no_memory = cudaErrorMemoryAllocation,
  };
  return &table;
}
