// Kernel interface: the same for CPU kernels, the CUDA plugin and users' own. Plain C++ without
// Abseil, so that `.cu` files and per-level kernel files can include it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "dtensor/tensor/dtype.h"

namespace dtensor {

inline constexpr int kMaxDims = 64;  // of a tensor, as in PyTorch

// One strided array. Strides are in elements; 0 repeats the element along that dim.
struct TensorRef {
  void* data;
  const int64_t* sizes;
  const int64_t* strides;
  int ndim;
  DType dtype;
};

inline int64_t NumelOf(const TensorRef& t) {
  int64_t n = 1;
  for (int d = 0; d < t.ndim; ++d) n *= t.sizes[d];
  return n;
}

// This rank's part of one factor: elements [start, start + local) of `global`.
struct FactorRange {
  int64_t start, local, global;
};

// One attribute of an op. `ints` is valid during the call only.
struct Attr {
  enum class Kind : uint8_t { kNone, kInt, kFloat, kInts };
  Kind kind = Kind::kNone;
  int64_t i = 0;                  // kInt (bools and dtypes too); for kFloat the truncated value
  double d = 0;                   // kFloat; for kInt the converted value
  const int64_t* ints = nullptr;  // kInts
  int64_t n = 0;                  // kInts: how many
};

using StreamHandle = void*;  // a cudaStream_t; null on the CPU

// Scratch memory and the error slot of one kernel call.
class Workspace {
 public:
  virtual ~Workspace() = default;
  // Uninitialised scratch, 64-byte aligned, freed when the call returns. Throws Error
  // (ResourceExhausted) when there is no memory.
  virtual void* Allocate(int64_t bytes) = 0;
  // Reports a data-dependent error (an index out of range); the op fails with `message`.
  virtual void Fail(std::string_view message) = 0;
};

// What a kernel on a device that works on its own (not the CPU) finds out too late for the call
// that queued it. Lies in pinned memory; the first to set `code` keeps it. The host reads it
// wherever it waits for the device.
struct ErrorWord {
  uint32_t code;   // 0: none
  char op[60];     // whose kernel, for the message
  char text[192];  // what is wrong
};

// A launch that differs from call to call in addresses and attributes alone. The first call of a
// plan whose arrays are all row-major runs may leave it there; further ones need nothing but this.
struct DeviceLaunch {
  // Queues it with these attributes. Null: there is none.
  void (*run)(DeviceLaunch& launch, const Attr* attrs, StreamHandle stream) = nullptr;
  const void* kernel = nullptr;
  uint32_t blocks = 0;
  int num_attrs = 0;
  void** addresses = nullptr;  // in `arguments`: of the output, then of the inputs
  int64_t arguments[12];       // of the kernel
};

// What a kernel gets besides where it does not run inline.
struct DeviceCall {
  const void* self = nullptr;  // Kernel::self
  const char* op = nullptr;    // lives as long as the program
  int num_attrs = 0;
  ErrorWord* error = nullptr;      // for kernels that may fail
  DeviceLaunch* launch = nullptr;  // of the plan, for kernels whose launch it can hold; may be null
};

struct KernelCall {
  std::span<const TensorRef> in;
  std::span<const TensorRef> out;
  const Attr* attrs;                     // in the order of the op's signature; never null entries
  std::span<const FactorRange> factors;  // in the order of NeedsOffset
  StreamHandle stream = nullptr;         // where to queue it; on the CPU it runs inline
  Workspace* workspace = nullptr;
  const DeviceCall* device = nullptr;  // null on the CPU
};

// Works on the memory that it is given, and calls no ops.
using KernelFn = void (*)(const KernelCall&);

enum class KernelLayout : uint8_t {
  kStrided,     // takes any strides
  kContiguous,  // dispatch makes inputs contiguous first, and counts the copies
};

struct Kernel {
  KernelFn fn = nullptr;
  uint32_t dtypes = 0;  // DTypeBit set of the dtypes that in[0] may have
  KernelLayout layout = KernelLayout::kContiguous;
  const void* self = nullptr;  // for a device that serves many kernels with one function
  bool keeps_launch = false;   // may be one launch, which it leaves in DeviceCall::launch then
};

// kMeta has no data. kCustom is a device that a program registers (RegisterDevice). What follows it
// is built in: devices.inc.
enum class DeviceType : uint8_t {
  kCpu,
  kCuda,
  kMeta,
  kCustom,
#define DT_DEVICE(type, name, table) type,
#include "dtensor/tensor/devices.inc"
#undef DT_DEVICE
};
#define DT_DEVICE(type, name, table) +1
inline constexpr int kNumDeviceTypes = 4
#include "dtensor/tensor/devices.inc"
    ;
#undef DT_DEVICE
// Whether kernels run inline, on memory that the host reads and writes.
constexpr bool IsHost(DeviceType device) { return device == DeviceType::kCpu; }
// Whether it works on its own: has streams, and memory that the host cannot read.
constexpr bool IsRemote(DeviceType device) {
  return device != DeviceType::kCpu && device != DeviceType::kMeta;
}

// Registers the kernel of `op` on `device`; the last registration wins, also over the device's own
// (DeviceTable::kernel). Thread-safe. Not on the op path: dispatch reads a kernel once per cache
// entry.
void RegisterKernel(std::string_view op, DeviceType device, Kernel kernel);
// Null when there is none.
const Kernel* FindKernel(std::string_view op, DeviceType device);
// The one that runs inline on host memory.
const Kernel* FindHostKernel(std::string_view op);

}  // namespace dtensor
