// Kernel interface: the same for CPU kernels, the CUDA plugin and users' own. Plain C++ without
// Abseil, so that `.cu` files and per-level kernel files can include it.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "tensor/dtype.h"

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

struct KernelCall {
  std::span<const TensorRef> in;
  std::span<const TensorRef> out;
  const Attr* attrs;                     // in the order of the op's signature; never null entries
  std::span<const FactorRange> factors;  // in the order of NeedsOffset
  StreamHandle stream = nullptr;
  Workspace* workspace = nullptr;
};

using KernelFn = void (*)(const KernelCall&);

enum class KernelLayout : uint8_t {
  kStrided,     // takes any strides
  kContiguous,  // dispatch makes inputs contiguous first, and counts the copies
};

struct Kernel {
  KernelFn fn = nullptr;
  uint32_t dtypes = 0;  // DTypeBit set of the dtypes that in[0] may have
  KernelLayout layout = KernelLayout::kContiguous;
};

enum class DeviceType : uint8_t { kCpu, kCuda, kMeta };

// Registers the kernel of `op` on `device`; the last registration wins. Thread-safe. Not on the op
// path: dispatch reads a kernel once per cache entry.
void RegisterKernel(std::string_view op, DeviceType device, Kernel kernel);
// Null when there is none.
const Kernel* FindKernel(std::string_view op, DeviceType device);

}  // namespace dtensor
