// RankContext, RunSpmd and Launch: where a rank's state lives and how ranks start.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/device.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {

class Store;
class World;
struct GroupOptions;
struct GroupRequest;

// Everything one rank owns. Used by its own thread only.
class RankContext {
 public:
  // That of the rank whose code runs. Outside RunSpmd: a world of one, made on first use, per
  // thread.
  static RankContext& Current() {
    const RankState* state = RankState::IfAny();
    return state != nullptr && state->context != nullptr ? *state->context : MakeDefault();
  }
  // Whether that is a rank of RunSpmd or RunFake.
  static bool InsideRank();

  // Without a device: the thread's (RankDevices::Current).
  RankContext(std::shared_ptr<World> world, int64_t rank, std::optional<DeviceType> device = {});
  ~RankContext();
  RankContext(const RankContext&) = delete;

  int64_t rank() const { return rank_; }
  int64_t world_size() const;
  // By which placements are compared; and by which collectives that nobody runs are timed.
  const CostModel& cost_model() const;
  // Whether nobody runs this rank's collectives (RunFake).
  bool simulated() const;
  // The small texts that the ranks of the world share (mesh/store.h), asked for this rank.
  Store& store();
  // Unique in the process: tells worlds, ranks and rehearsals apart. What a rank makes carries it.
  uint64_t id() const { return id_; }
  // Whether a RehearsedRank is open: then nothing has values, and there are no peers.
  bool rehearses() const { return IsOfRehearsal(id_); }
  static bool IsOfRehearsal(uint64_t id) { return (id & 1) != 0; }
  const std::shared_ptr<Allocator>& allocator() const { return allocator_; }  // of CPU memory
  RankDevices& devices() { return own_devices_ ? *own_devices_ : RankDevices::Current(); }
  DeviceType device() { return devices().type(); }
  // Of the device that this rank makes tensors on. Throws Error where it cannot be opened.
  const std::shared_ptr<Allocator>& device_allocator();
  SpecInterner& specs() { return specs_; }
  TraceState& trace() { return trace_; }
  // What this rank's next collectives are for; set by ScopedCallTag.
  CallTag& call_tag() { return call_tag_; }
  // What all ranks of the world do on every group and did last. Meant for a program that looks
  // stuck; any rank may ask, at any time.
  FlightReport TakeFlightReport();

  // The group of `mesh` ranks that differ from this rank in `mesh_dims` only, in row-major order of
  // those dims. Created on first use by its members only. The pointer lives as long as the context.
  // On a meta mesh, of any size, it records calls and meets nobody.
  //   Errors: FailedPrecondition if this rank is not in the mesh; InvalidArgument if the mesh names
  //   ranks that the world has not.
  absl::StatusOr<Comm*> CommFor(const DeviceMesh& mesh, absl::Span<const int> mesh_dims);
  // The same with options of its own (mesh/world.h), which hold for these ranks' group under
  // whatever mesh and name from here on: also where ops communicate on it.
  absl::StatusOr<Comm*> CommFor(const DeviceMesh& mesh, absl::Span<const int> mesh_dims,
                                const GroupOptions& options);
  // The group of all ranks of either mesh, ascending. For its members; errors as CommFor.
  absl::StatusOr<Comm*> CommForUnion(const DeviceMesh& a, const DeviceMesh& b);
  // All ranks of the world.
  absl::StatusOr<Comm*> WorldComm();
  // Host bytes of every rank of that group, by group index, for what is no tensor; all members call
  // it, and say what for ("run_check"). Recorded as a collective. Errors: as CommFor, and those of
  // a collective.
  absl::StatusOr<std::vector<std::string>> Exchange(const DeviceMesh& mesh,
                                                    absl::Span<const int> mesh_dims,
                                                    absl::string_view what_for, std::string mine);
  // In a rehearsal, where there are no peers: only records what an exchange of so many bytes would.
  absl::Status RehearseExchange(const DeviceMesh& mesh, absl::Span<const int> mesh_dims,
                                int64_t bytes);
  // Memory of this rank that may be read after the call that lent it (CommOptions::overlap).
  void Lend(std::shared_ptr<Loan> loan);
  bool lends() const { return !loans_.empty(); }
  // To be called before writing to memory that may be lent: peers that have not read it get a copy.
  //   Errors: ResourceExhausted without memory for that.
  absl::Status TakeBack(const Buffer& buffer);
  // Until no collective of this rank goes on by itself: before it leaves. The error of one that
  // nobody waited for, if this rank has been told of no failure.
  absl::Status Quiesce();
  // A collective, or what was asked about a group, has given this rank's program an error.
  void HearOfFailure() { heard_of_failure_ = true; }
  // Aborts every present and later group of this rank, naming it: its peers' calls end with
  // Aborted. RunSpmd returns `why` then, also if nobody communicates any more.
  void AbortAll(const absl::Status& why);

  // State of higher layers: one object per type T, default-constructed on first use, destroyed with
  // the context in reverse order of creation.
  template <class T>
  ABSL_ATTRIBUTE_ALWAYS_INLINE T& Slot() {
    HolderBase* holder = slots_[slot_of_<T>.load(std::memory_order_relaxed)];
    if (holder == nullptr) [[unlikely]]
      holder = MakeSlot<T>();
    return static_cast<Holder<T>*>(holder)->value;
  }

 private:
  friend class RehearsedRank;
  struct HolderBase {
    virtual ~HolderBase() = default;
  };
  template <class T>
  struct Holder : HolderBase {
    T value;
  };
  // Where objects of a type are in each context. 0 until one is asked for: nothing is there.
  template <class T>
  static constinit inline std::atomic<int> slot_of_ = 0;
  template <class T>
  [[gnu::noinline]] HolderBase* MakeSlot() {
    static const int id = NextSlotId();
    slot_of_<T>.store(id, std::memory_order_relaxed);
    if (slots_[id] == nullptr) KeepInSlot(id, std::make_unique<Holder<T>>());
    return slots_[id];
  }
  static int NextSlotId();
  void KeepInSlot(int id, std::unique_ptr<HolderBase> holder);
  static RankContext& MakeDefault();

  std::shared_ptr<World> world_;
  int64_t rank_;
  uint64_t id_;
  std::shared_ptr<Allocator> allocator_;
  std::unique_ptr<RankDevices> own_devices_;  // outlives the slots, whose tensors are on them
  SpecInterner specs_;
  TraceState trace_;
  CallTag call_tag_;
  static constexpr int kMaxSlots = 64;  // of types of the program
  HolderBase* slots_[kMaxSlots] = {};
  std::vector<std::unique_ptr<HolderBase>> slot_order_;
  struct CommKey {
    DeviceMesh mesh;
    absl::InlinedVector<int, 4> dims;
    friend bool operator==(const CommKey&, const CommKey&) = default;
    template <typename H>
    friend H AbslHashValue(H h, const CommKey& k) {
      return H::combine(std::move(h), k.mesh.hash(), k.dims);
    }
  };
  // The group that CommFor communicates on.
  void NoteExchange(const GroupRequest& group, int64_t bytes);
  absl::StatusOr<GroupRequest> GroupFor(const DeviceMesh& mesh,
                                        absl::Span<const int> mesh_dims) const;
  absl::StatusOr<Comm*> MakeComm(GroupRequest group);
  static constexpr size_t kMostCached = 4096;
  absl::flat_hash_map<CommKey, Comm*> comm_cache_;                 // what was asked for
  absl::flat_hash_map<std::string, std::unique_ptr<Comm>> comms_;  // by ranks, device and label
  std::vector<std::shared_ptr<Loan>> loans_;
  bool heard_of_failure_ = false;
};

// The calling rank under another id, for a scope: what was made outside of it is foreign inside,
// and what is made inside is foreign outside. Scopes nest. dtensor/rehearsal.h is made of it.
class RehearsedRank {
 public:
  explicit RehearsedRank(RankContext& context);
  ~RehearsedRank() { context_.id_ = outside_; }
  RehearsedRank(const RehearsedRank&) = delete;
  uint64_t outside() const { return outside_; }  // the id before
  // Back outside, for a scope.
  class Outside {
   public:
    explicit Outside(const RehearsedRank& rank)
        : context_(rank.context_), inside_(std::exchange(context_.id_, rank.outside_)) {}
    ~Outside() { context_.id_ = inside_; }
    Outside(const Outside&) = delete;

   private:
    RankContext& context_;
    const uint64_t inside_;
  };

 private:
  RankContext& context_;
  const uint64_t outside_;
};

struct SpmdOptions {
  // Of every wait for peers. Default: DTENSOR_TIMEOUT_S or 60 s.
  absl::Duration timeout = absl::ZeroDuration();
  // Where ranks make tensors and meshes unless told otherwise. Default: DefaultDevice().
  std::optional<DeviceType> device = {};
  // Pin rank i to the i-th core this process may use, when ranks <= cores.
  bool pin = true;
  // What links cost: placements are compared by it (docs/reference/cost.md). Where ranks are
  // processes that of rank 0 counts for all. Which ranks share a machine is found out, and
  // `ranks_per_node` not read. Default: the file that DTENSOR_COST_MODEL names, which `calibrate`
  // writes, or CostModel().
  std::optional<CostModel> cost = {};
  // Around every communicator: Packed() or another Limited() one of mesh/limited.h runs the program
  // as it would on MPI, gloo or NCCL. Without one all is used that threads can do.
  WrapBackend wrap = nullptr;
  // Where to leave what all ranks were doing when the first wait failed or collectives differed.
  // Untouched if that did not happen. DTENSOR_FLIGHT_REPORT=FILE: it is left there too, as JSON.
  FlightReport* flight_report = nullptr;
};

// Runs `body` once per rank: on threads of this process, all of which it joins, or, under mpirun or
// srun, in each process its rank's (docs/guide/launch.md). Returns the first cause: a Status that a
// body returned, the Status of an exception it threw (CurrentException), or what it told its peers
// (RankContext::AbortAll), prefixed "rank R: " and with that rank as CulpritOf; the other ranks'
// waits end with Aborted carrying the message and the culprit. A rank whose body returned while
// peers wait for it is named in their error.
//   Errors: InvalidArgument for ranks < 1, or > 1024 on threads; FailedPrecondition if called
//   inside a rank.
absl::Status RunSpmd(int64_t ranks, absl::FunctionRef<absl::Status(RankContext&)> body,
                     SpmdOptions options = {});

// Runs `body` on the calling thread as one rank of a world that has no other: worlds of any size in
// a unit test. Collectives are recorded (CommTrace, with modelled times), bring nothing from peers
// and end at once. The status of body, as RunSpmd returns it.
struct FakeOptions {
  int64_t world = 1;
  int64_t rank = 0;
  CostModel cost = {};
  WrapBackend wrap = nullptr;  // as SpmdOptions::wrap
};
absl::Status RunFake(const FakeOptions& options,
                     absl::FunctionRef<absl::Status(RankContext&)> body);

// For main(): takes `--ranks=N` / `--ranks N` out of argv (default: the environment's world, else
// 1) and runs `body` as RunSpmd does; takes `--device auto|cpu|cuda` (options.device). A launcher
// of several processes that no plugin serves is refused. Prints an error to stderr; returns the
// exit code.
int Launch(int* argc, char** argv, absl::FunctionRef<absl::Status(RankContext&)> body,
           SpmdOptions options = {});

// Number of cores this process may run on (affinity mask).
int64_t UsableCores();

}  // namespace dtensor
