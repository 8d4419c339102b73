// The state behind the functions of libcudart: devices, streams that run nothing until something
// asks for it, events, captures, and who may touch what when.
#pragma once

#include <cuda_runtime_api.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tests/cusim/exec.h"

namespace cusim {

// Streams (0: the host) and up to which of their works is known to be done before.
using Clock = std::map<int, uint64_t>;
void Join(Clock* into, const Clock& from);

struct Range {
  uint64_t low, high;
  bool write;
};
struct Stream;
struct Work {
  std::string name;
  std::function<void(std::vector<Range>*)> run;     // says what it touched
  std::vector<std::pair<Stream*, uint64_t>> after;  // what runs before, of other streams
  Clock clock;
};
struct Capture;
struct Stream {
  int id = 0;
  bool legacy_waits = true;  // not made with cudaStreamNonBlocking
  unsigned flags = 0;
  int priority = 0, device = 0;
  std::deque<Work> queue;
  uint64_t queued = 0, done = 0;
  bool running = false;
  Clock clock;  // of all that is queued
  Capture* capture = nullptr;
  uint64_t captured = 0, joined = 0;  // works of the capture; those that the first stream waits for
};
struct Event {
  Stream* stream = nullptr;  // null: never recorded
  uint64_t position = 0;
  Clock clock;
  Capture* capture = nullptr;
  bool timed = true;
  // Instructions run when it happened; a queued record may outlive the event.
  std::shared_ptr<uint64_t> ticks = std::make_shared<uint64_t>(0);
};
struct Graph {
  std::vector<Work> works;
};
struct Capture {
  Stream* origin = nullptr;
  std::set<Stream*> streams;
  std::unique_ptr<Graph> graph = std::make_unique<Graph>();
  std::string broken;  // why it cannot be ended well
};

// What cudaGetLastError says of this thread.
cudaError_t LastError(bool take, cudaError_t sticky);

class Runtime {
 public:
  static Runtime& Get();
  std::recursive_mutex mutex;

  int devices() const { return devices_; }
  DeviceMemory& memory() { return memory_; }
  Options& options() { return options_; }

  // ---- Errors. ----
  // Counts the call and gives the error that DT_CUSIM_FAIL asks for, else the sticky one.
  cudaError_t Enter(const char* call);
  cudaError_t Return(cudaError_t error);  // notes it for cudaGetLastError
  void Say(const std::string& kind, const std::string& text);
  void Break(cudaError_t error) { sticky_ = error; }
  cudaError_t sticky() const { return sticky_; }

  // ---- Streams. ----
  Stream* Of(cudaStream_t stream);  // null: none that lives
  Stream* MakeStream(unsigned flags, int priority);
  cudaError_t DestroyStream(Stream* stream);
  cudaError_t Queue(Stream* stream, std::string name, std::function<void(std::vector<Range>*)> run);
  cudaError_t Record(Event* event, Stream* stream);
  cudaError_t Wait(Stream* stream, Event* event);
  cudaError_t Synchronize(Stream* stream);
  cudaError_t SynchronizeAll();
  cudaError_t Synchronize(Event* event);
  bool Done(Event* event);
  bool Idle(Stream* stream);
  // The host uses memory itself: what is queued for it must be known to be done.
  void HostTouches(const char* what, uint64_t address, uint64_t bytes, bool write);

  // ---- Captures. ----
  cudaError_t Begin(Stream* stream);
  cudaError_t End(Stream* stream, Graph** graph);
  cudaError_t LaunchGraph(const Graph& graph, Stream* stream);
  // Not while capturing: it would have to run. Breaks the capture.
  bool Refuses(Stream* stream, const char* call);
  bool AnyCapture() const { return !captures_.empty(); }

  // ---- Kernels. ----
  void Load(void** handle, const uint8_t* fatbin);
  void RegisterKernel(const void* host, const std::string& name);
  void RegisterVariable(const void* host, const std::string& name);
  const Kernel* KernelOf(const void* host) const;
  std::pair<uint64_t, size_t> VariableOf(const void* host) const;
  cudaError_t LaunchKernel(const void* host, Dim grid, Dim block, void** args, size_t shared,
                           Stream* stream, bool cooperative);

  // ---- Memory. ----
  cudaError_t Allocate(void** p, size_t bytes);
  cudaError_t Free(void* p);
  cudaError_t AllocateInOrder(void** p, size_t bytes, Stream* stream);
  cudaError_t FreeInOrder(void* p, Stream* stream);
  cudaError_t Copy(const char* name, void* to, const void* from, size_t width, size_t height,
                   size_t to_pitch, size_t from_pitch, Stream* stream, bool async);
  cudaError_t Fill(void* to, int value, size_t bytes, Stream* stream);
  uint8_t* Reach(const void* p);  // the simulator's view of any address
  bool IsDevice(const void* p) const { return memory_.Owns(reinterpret_cast<uint64_t>(p)); }
  std::map<uint64_t, uint64_t>& pinned() { return pinned_; }
  bool Pinned(const void* p) const;

  uint64_t ticks() const { return total_.warp_insns; }

 private:
  Runtime();
  void AtExit();
  void Run(Stream* stream);
  void Force(Stream* stream, uint64_t position);
  void Check(const std::string& name, int stream, uint64_t position, const Clock& clock,
             const std::vector<Range>& ranges);
  bool InRange(uint64_t address, uint64_t bytes, const char* what);

  struct Use {
    int stream;
    uint64_t position, low, high;
    bool write;
    std::string name;
  };

  DeviceMemory memory_;
  Options options_;
  int devices_ = 1;
  bool strict_ = false, report_ = false, leaks_ = false;
  cudaError_t sticky_ = cudaSuccess;
  std::map<std::string, uint64_t> calls_;
  struct Injection {
    std::string call;
    uint64_t nth;
    cudaError_t error;
  };
  std::vector<Injection> injections_;
  std::map<int, std::unique_ptr<Stream>> streams_;
  int next_stream_ = 1;
  uint64_t host_time_ = 0;
  Clock host_;
  std::map<uint64_t, std::vector<Use>> uses_;  // by allocation
  std::vector<std::unique_ptr<Capture>> captures_;
  std::vector<std::unique_ptr<Module>> modules_;
  std::map<std::string, const Kernel*> kernels_;
  std::map<std::string, std::pair<uint64_t, size_t>> variables_;
  std::map<const void*, std::string> host_kernels_, host_variables_;
  std::map<uint64_t, uint64_t> pinned_;
  std::map<std::string, Counters> counters_;  // by kernel
  Counters total_;
  uint64_t reports_ = 0, synchronizations_ = 0, copies_ = 0;
};

}  // namespace cusim
