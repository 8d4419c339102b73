// The state behind the functions of libcudart, and of the libraries beside it: devices, streams
// that run nothing until something asks for it, events, captures, and who may touch what when.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
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

struct Stream;
struct Launched {  // a kernel with its parameters
  const Kernel* kernel;
  Dim grid, block;
  size_t shared;
  int device;
  bool cooperative;
  std::vector<uint8_t> params;
};
struct Work {
  std::string name;
  std::function<void(std::vector<Range>*)> run;  // says what it touched
  // Whether it can run now: for what needs other streams and threads. Null: it can.
  std::function<bool()> ready;
  // Fills `run` and `ready` for the place where it is queued, each time that its graph is launched.
  std::function<void(Work* work, Stream* stream, uint64_t position)> prepare;
  std::vector<std::pair<Stream*, uint64_t>> after;  // what runs before, of other streams
  Clock clock;
  std::shared_ptr<const Launched> launched;  // null: no kernel
};
struct Capture;
struct Stream {
  int id = 0;
  bool legacy_waits = true;  // not made with cudaStreamNonBlocking
  bool hidden = false;       // a graph's own
  bool destroyed = false;
  unsigned flags = 0;
  int priority = 0, device = 0;
  std::deque<Work> queue;
  uint64_t queued = 0, done = 0;
  bool running = false;
  Clock clock;  // of all that is queued
  // From where on it knows more than when it was queued: what met works of other streams.
  std::vector<std::pair<uint64_t, Clock>> met;
  std::shared_ptr<Capture> capture;
  uint64_t captured = 0, joined = 0;  // works of the capture; those that the first stream waits for
};
struct Event {
  Stream* stream = nullptr;  // null: never recorded
  int device = 0;
  uint64_t position = 0;
  Clock clock;
  std::shared_ptr<Capture> capture;
  bool timed = true;
  // Instructions run when it happened; a queued record may outlive the event.
  std::shared_ptr<uint64_t> ticks = std::make_shared<uint64_t>(0);
};
struct Graph {
  struct Node {
    size_t lane;  // which of the streams that were captured; 0: the first
    Work work;    // `after` is in `waits`
    std::vector<std::pair<size_t, uint64_t>> waits;  // lane, how many of its nodes
  };
  std::vector<Node> nodes;
  uint64_t first_node = 0;     // number of the first, in instances too
  std::vector<Stream*> lanes;  // of an instance: where the nodes run; [0]: where it is launched
};
struct Capture {
  Stream* origin = nullptr;
  std::vector<Stream*> streams;  // by lane
  Graph graph;
  std::string broken;  // why it cannot be ended well
  bool ended = false;
  bool relaxed = false;                         // others may call what is unsafe in captures
  uint64_t LastOf(const Stream* stream) const;  // node that it queued; 0: none
};

// What has been counted so far, of works that have run: for a test in the same process, which finds
// cusim_counters by dlsym and needs no header of ours.
struct CounterVisitor {
  void* to;
  void (*kernel)(void* to, const char* name, uint64_t launches, uint64_t bytes, uint64_t sectors);
  // Calls of a function of the runtime; "uploads": copies from the host to a device, captured and
  // launched ones too.
  void (*number)(void* to, const char* name, uint64_t value);
};
extern "C" void cusim_counters(const CounterVisitor* visitor);
// Of all calls from now on the n-th of that name fails with `error`, in the place of what was asked
// for so before and has not come. n = 0: none does.
extern "C" void cusim_fail(const char* call, uint64_t n, int error);

// Bytes of shared memory that a block may have on each device: DT_CUSIM_SHARED as it is now.
int SharedOfABlock();

// What cudaGetLastError says of this thread.
cudaError_t LastError(bool take, cudaError_t sticky);

class Runtime {
 public:
  static Runtime& Get();
  std::recursive_mutex mutex;

  int devices() const { return devices_; }
  int device() const;  // of the calling thread
  void SetDevice(int device);
  DeviceMemory& memory() { return memory_; }
  Options& options() { return options_; }

  // ---- Errors. ----
  // Counts the call and gives the error that DT_CUSIM_FAIL asks for, else the sticky one.
  cudaError_t Enter(const char* call);
  // The same for calls with errors of their own: the number asked for, 0 if none.
  int Injected(const char* call);
  cudaError_t Return(cudaError_t error);  // notes it for cudaGetLastError
  void Say(const std::string& kind, const std::string& text);
  void Break(cudaError_t error) { sticky_ = error; }
  cudaError_t sticky() const { return sticky_; }

  // ---- Streams. ----
  Stream* Of(cudaStream_t stream);  // null: none that lives
  Stream* MakeStream(unsigned flags, int priority);
  cudaError_t DestroyStream(Stream* stream);
  cudaError_t Queue(Stream* stream, std::string name, std::function<void(std::vector<Range>*)> run);
  cudaError_t Queue(Stream* stream, Work work);
  cudaError_t Record(Event* event, Stream* stream);
  cudaError_t Wait(Stream* stream, Event* event);
  cudaError_t Synchronize(Stream* stream);
  cudaError_t SynchronizeDevice();
  cudaError_t Synchronize(Event* event);
  bool Done(Event* event);
  bool Idle(Stream* stream);

  // ---- Works that need other streams and threads (collectives). ----
  // Runs what comes before `position`; false where it waits for somebody.
  bool Force(Stream* stream, uint64_t position);
  // Why a work is not ready, and the threads that would have to come.
  void Block(std::string why, std::vector<int> threads);
  void Notify();  // something has come that others may wait for
  // Works of streams meet: what is queued behind those of `after` is ordered after what was before
  // those of `before`.
  using Places = std::vector<std::pair<Stream*, uint64_t>>;
  void Rendezvous(const Places& before, const Places& after);
  int thread();  // a number for the calling thread
  bool Gone(int thread) const { return gone_.count(thread) != 0; }
  // Until `done`, an error of the device, or the end of patience, which is said; whether it is
  // done. Waiting releases the mutex.
  bool WaitFor(const std::function<bool()>& done);
  cudaError_t Await(const std::function<bool()>& done);  // the same; a device that hangs is lost

  // ---- Captures. ----
  cudaError_t Begin(Stream* stream, bool relaxed);
  cudaError_t End(Stream* stream, Graph** graph);
  Graph* Instantiate(const Graph& graph);
  cudaError_t LaunchGraph(Graph* graph, Stream* stream);
  void Destroy(Graph* captured);
  // From its next launch on the node, a kernel, has these parameters. Nodes are known by those of
  // the graph that was captured, which has to live.
  cudaError_t SetParams(Graph* instance, uint64_t node, const void* host, Dim grid, Dim block,
                        void** args, size_t shared);
  // Not while capturing: it would have to run. Breaks the capture.
  bool Refuses(Stream* stream, const char* call);
  bool AnyCapture() const { return !captures_.empty(); }

  // ---- Kernels. ----
  void Load(void** handle, const uint8_t* fatbin);
  void RegisterKernel(const void* host, const std::string& name);
  void RegisterVariable(const void* host, const std::string& name);
  const Kernel* KernelOf(const void* host);  // read from its module when first asked for
  std::pair<uint64_t, size_t> VariableOf(const void* host) const;
  // Of dynamic shared memory a launch of the kernel may have so much from now on: without, what its
  // own leaves of 48 KiB.
  cudaError_t AllowShared(const void* host, int bytes);
  size_t DynamicSharedOf(const void* host, const Kernel& kernel) const;
  cudaError_t LaunchKernel(const void* host, Dim grid, Dim block, void** args, size_t shared,
                           Stream* stream, bool cooperative);
  // What a launch asks for, if it can be: else null and the error.
  std::shared_ptr<const Launched> Checked(const void* host, Dim grid, Dim block, void** args,
                                          size_t shared, int device, bool cooperative,
                                          cudaError_t* error);
  Work WorkOf(std::shared_ptr<const Launched> launched);

  // ---- Memory. ----
  cudaError_t Allocate(void** p, size_t bytes, int device);
  cudaError_t Free(void* p);
  cudaError_t AllocateInOrder(void** p, size_t bytes, Stream* stream);
  cudaError_t FreeInOrder(void* p, Stream* stream);
  cudaError_t AllocatePinned(void** p, size_t bytes);
  cudaError_t FreePinned(void* p);
  cudaError_t Copy(const char* name, void* to, const void* from, size_t width, size_t height,
                   size_t to_pitch, size_t from_pitch, Stream* stream, bool async);
  cudaError_t Fill(void* to, int value, size_t width, Stream* stream, size_t height = 1,
                   size_t pitch = 0);
  // Checks that a work of `device` may use the bytes, notes them, and gives the simulator's view;
  // null: it may not, and that has been said.
  uint8_t* Use(const std::string& what, int device, const void* p, uint64_t bytes, Access access,
               std::vector<Range>* ranges);
  uint8_t* Reach(const void* p);  // the simulator's view of any address
  bool IsDevice(const void* p) const { return memory_.Owns(reinterpret_cast<uint64_t>(p)); }
  std::map<uint64_t, uint64_t>& pinned() { return pinned_; }
  bool Pinned(const void* p) const;
  uint64_t Reaches(int device) const;  // whose memory its kernels may use: a bit for each
  cudaError_t SetPeer(int peer, bool on);

  uint64_t ticks() const { return total_.warp_insns; }
  void Visit(const CounterVisitor& visitor) const;
  void FailFromNow(const char* call, uint64_t n, int error);

 private:
  Runtime();
  void ReadInjections(const char* text);
  void AtExit();
  void PrintCounters() const;
  bool Run(Stream* stream);
  Stream* Legacy(int device) { return streams_.at(device + 1).get(); }
  bool IsLegacy(const Stream* stream) const { return stream->id <= devices_; }
  Stream* NewStream(int device);
  bool ForceAll(int device);
  void Check(const std::string& name, int stream, uint64_t position, const Clock& clock,
             const std::vector<Range>& ranges);
  Clock Known(const Clock& clock) const;
  uint64_t BlockOf(uint64_t address) const;

  DeviceMemory memory_;
  Options options_;
  int devices_ = 1;
  bool strict_ = false, report_ = false, leaks_ = false, whole_ = false;
  std::chrono::milliseconds patience_;
  cudaError_t sticky_ = cudaSuccess;
  std::map<std::string, uint64_t> calls_;
  struct Injection {
    std::string call;
    uint64_t nth;
    int error;
    bool fired = false, from_now = false;
  };
  std::vector<Injection> injections_;
  std::map<int, std::unique_ptr<Stream>> streams_;  // first the legacy stream of each device
  int next_stream_ = 1;
  Clock host_;
  std::map<uint64_t, std::vector<cusim::Use>> uses_;  // by allocation or pinned block
  std::vector<std::shared_ptr<Capture>> captures_;
  std::set<Graph*> graphs_;  // captured and not destroyed
  uint64_t begun_ = 0;       // captures there have been
  std::vector<std::unique_ptr<Module>> modules_;
  cudaError_t load_error_ = cudaErrorInvalidDeviceFunction;  // of kernels that are not there
  std::map<std::string, Module*> kernels_;                   // which has the kernel of this name
  std::map<std::string, std::pair<uint64_t, size_t>> variables_;
  std::map<const void*, std::string> host_kernels_, host_variables_;
  std::map<const void*, size_t> allowed_shared_;  // by kernel
  std::map<uint64_t, uint64_t> pinned_;
  std::set<std::pair<int, int>> peers_;  // which device reaches which
  // Threads that wait, and of which generation of works they know that they must.
  std::map<int, uint64_t> waiting_;
  std::set<int> gone_;
  uint64_t generation_ = 0;
  std::condition_variable_any changed_;
  struct {
    std::string why;
    std::vector<int> threads;
  } blocked_;
  std::set<std::string> said_;                // deadlocks
  std::map<std::string, Counters> counters_;  // by kernel
  Counters total_;
  uint64_t reports_ = 0, synchronizations_ = 0, copies_ = 0, uploads_ = 0;
};

}  // namespace cusim
