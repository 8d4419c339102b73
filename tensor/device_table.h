// DeviceTable: what a device plugin exports, one plain table of functions. Everything above it
// (allocator, streams of a rank, staging, errors) is the same for every device and lives in
// device.h. Plain C++ without Abseil, so that nvcc can include it.
//
// Functions return 0, or an error number that `describe` puts into words. None of them waits for
// the device, except those whose comment says so. They may be called from any thread.
//   Source: the shape (size first, fields appended only) is that of PJRT's C API.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dtensor/tensor/kernel.h"

namespace dtensor {

inline constexpr uint32_t kDeviceTableAbi = 4;

inline constexpr int kMaxReduced = 96;  // arrays of one reduction, inputs and outputs

// Of a graph (device_graph.h): numbers that kernels read from device memory instead of having them
// as parameters, since they are others at every launch. Who queues such a kernel puts them behind
// `used` in `host`, which every launch writes to `device` first.
inline constexpr int64_t kNumberBlockBytes = 4032;  // what parameters of a kernel have room for
struct NumberBlock {
  char *host, *device;
  int64_t size, used;
  bool only;   // nothing is queued: the numbers are all that is wanted
  void* node;  // the device's: where in the graph they are written
};

struct DeviceTable {
  uint32_t struct_size;  // sizeof(DeviceTable) of the plugin: later fields are only appended
  uint32_t abi;          // kDeviceTableAbi
  const char* name;      // "cuda"
  const char* (*describe)(int error);

  // How many there are. Where there is none, `why` names the step that failed.
  int (*count)(int* number, char* why, size_t size);
  int (*open)(int index, void** device, char* why, size_t size);
  void (*close)(void* device);  // waits

  // Memory in large pieces; the allocator above cuts them up. 256-byte aligned.
  int (*segment)(void* device, int64_t bytes, void** memory);
  int (*segment_free)(void* device, void* memory);  // may wait
  // Host memory that `move` and kernels may use.
  int (*pinned)(void* device, int64_t bytes, void** memory);
  int (*pinned_free)(void* device, void* memory);  // may wait

  int (*stream)(void* device, void** stream);
  int (*stream_free)(void* device, void* stream);  // what was queued is still done
  int (*event)(void* device, void** event);
  int (*event_free)(void* device, void* event);
  int (*record)(void* event, void* stream);  // the stream's work so far
  int (*order)(void* stream, void* event);   // later work of the stream comes after the event
  int (*query)(void* event, int* done);

  // Queued on `stream`. Arrays are of equal sizes, any strides; refs are read during the call.
  int (*copy)(void* stream, const TensorRef* from, const TensorRef* to);  // converts dtypes
  int (*fill)(void* stream, const TensorRef* to, const void* value, DType value_dtype);
  // Every output = the reduction of the inputs in their order. Inputs may be outputs. `op` is a
  // ReduceOp; one dtype; kMaxReduced arrays at most.
  int (*reduce)(void* stream, int ins, const TensorRef* in, int outs, const TensorRef* out, int op);
  // Between pinned and device memory.
  int (*move)(void* stream, void* to, const void* from, int64_t bytes);

  // The kernel of an op; `out->fn` stays null where there is none.
  int (*kernel)(const char* op, Kernel* out);

  // Graphs; null where there are none. From `capture` to `capture_end` what is queued on `stream`,
  // and on streams that events order behind it, is kept and not run. On such a stream `capture`
  // adds another block to what is captured. `graph` stays null where something of it could not be
  // kept. A launch writes the numbers of all its blocks, as they are when it is called, to their
  // places on the device before they are read, and copies nothing for that.
  int (*capture)(void* stream, NumberBlock* block) = nullptr;
  int (*capture_end)(void* stream, void** graph) = nullptr;
  int (*graph_launch)(void* graph, const NumberBlock* const* blocks, int count,
                      void* stream) = nullptr;
  int (*graph_free)(void* graph) = nullptr;
  // Kernels that the calling thread queues from now on, and that have such numbers, have them in
  // `block`; null: among their parameters again.
  void (*numbers)(NumberBlock* block) = nullptr;

  // For who measures; null where there are none. `elapsed` is of two events that have happened and
  // were made by `timed_event` (freed as others are), in milliseconds. Ranges are those of the
  // calling thread in a profiler.
  int (*timed_event)(void* device, void** event) = nullptr;
  int (*elapsed)(void* from, void* to, float* ms) = nullptr;
  void (*range_push)(const char* name) = nullptr;
  void (*range_pop)() = nullptr;

  // What `segment` returns where it is asked for more memory than there is: no failure of the
  // device. 0: it says so by no number of its own.
  int no_memory = 0;
};

}  // namespace dtensor
