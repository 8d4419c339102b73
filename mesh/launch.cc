#include "dtensor/mesh/launch.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <system_error>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/comm_work.h"
#include "dtensor/mesh/fake/fake_world.h"
#include "dtensor/mesh/local/thread_world.h"
#include "dtensor/mesh/process/endpoint.h"
#include "dtensor/mesh/process/process_world.h"
#include "dtensor/mesh/program.h"
#include "dtensor/mesh/run_rank.h"
#include "dtensor/mesh/timeout.h"
#include "dtensor/mesh/world.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxThreads = 1024;  // ranks of one process

// Cores this process may use, in order.
std::vector<int> CoreList() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int i = 0; i < CPU_SETSIZE; ++i) {
      if (CPU_ISSET(i, &set)) cores.push_back(i);
    }
  }
  return cores;
}

void PinTo(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  // Without the pin the program is slower, not wrong.
  (void)pthread_setaffinity_np(pthread_self(), sizeof(set), &set);
}

std::string DimsLabel(const DeviceMesh& mesh, absl::Span<const int> dims) {
  return absl::StrJoin(dims, ",", [&](std::string* out, int d) {
    const std::string& name = mesh.names()[d];
    absl::StrAppend(out, name.empty() ? absl::StrCat(d) : name);
  });
}

absl::Status CheckInWorld(const DeviceMesh& mesh, int64_t world) {
  if (mesh.device() == DeviceType::kMeta || mesh.MaxRank() < world) return absl::OkStatus();
  return absl::InvalidArgumentError(
      mesh.size() > world ? absl::StrCat("mesh ", mesh.ToString(), " has ", mesh.size(),
                                         " ranks, the world has ", world)
                          : absl::StrCat("mesh ", mesh.ToString(), " names rank ", mesh.MaxRank(),
                                         ", the world has ", world, " ranks"));
}

GroupRequest RequestOf(std::vector<int64_t> ranks, int64_t rank, std::string label,
                       DeviceType device) {
  const auto index = std::find(ranks.begin(), ranks.end(), rank) - ranks.begin();
  return {std::move(ranks), static_cast<int>(index), std::move(label), device};
}

std::atomic<uint64_t> next_context_id{2};  // even: RankContext::IsOfRehearsal
std::atomic<int> next_slot_id{1};          // 0: none yet

}  // namespace

int64_t UsableCores() {
  static const int64_t cores = std::max<int64_t>(1, static_cast<int64_t>(CoreList().size()));
  return cores;
}

bool RankContext::InsideRank() {
  const RankState* state = RankState::IfAny();
  return state != nullptr && state->context != nullptr && state->context->world_->spmd();
}

RankContext::RankContext(std::shared_ptr<World> world, int64_t rank,
                         std::optional<DeviceType> device)
    : world_(std::move(world)),
      rank_(rank),
      id_(next_context_id.fetch_add(2)),
      allocator_(world_->spmd() ? Allocator::Create() : CurrentAllocator()),
      own_devices_(device ? std::make_unique<RankDevices>(*device, static_cast<int>(rank))
                          : nullptr),
      specs_(rank) {}

RankContext::~RankContext() {
  while (!slot_order_.empty()) {
    std::unique_ptr<HolderBase> last = std::move(slot_order_.back());
    slot_order_.pop_back();
    std::replace(std::begin(slots_), std::end(slots_), last.get(),
                 static_cast<HolderBase*>(nullptr));
  }
  RankState& state = RankState::Current();
  if (state.context == this) state.context = nullptr;
}

RankContext& RankContext::MakeDefault() {
  RankState& state = RankState::Current();  // made before, so that it goes after
  thread_local std::unique_ptr<RankContext> context;
  context = std::make_unique<RankContext>(
      std::make_shared<ThreadWorld>(1, ThreadWorldOptions{.spmd = false}), 0);
  state.context = context.get();
  return *context;
}

RehearsedRank::RehearsedRank(RankContext& context) : context_(context), outside_(context.id_) {
  context.id_ = next_context_id.fetch_add(2) + 1;
}

int RankContext::NextSlotId() {
  const int id = next_slot_id.fetch_add(1);
  DT_CHECK_MSG(id < kMaxSlots, "more types are kept in RankContext::Slot than kMaxSlots");
  return id;
}

void RankContext::KeepInSlot(int id, std::unique_ptr<HolderBase> holder) {
  slots_[id] = holder.get();
  slot_order_.push_back(std::move(holder));
}

const std::shared_ptr<Allocator>& RankContext::device_allocator() {
  const DeviceType type = device();
  if (!IsRemote(type)) return allocator_;
  return ValueOrThrow(devices().Get(type))->memory();
}

int64_t RankContext::world_size() const { return world_->size(); }
Store& RankContext::store() { return world_->StoreOf(rank_); }
const CostModel& RankContext::cost_model() const { return world_->cost_model(); }
bool RankContext::simulated() const { return world_->launcher() == Launcher::kFake; }

absl::StatusOr<GroupRequest> RankContext::GroupFor(const DeviceMesh& mesh,
                                                   absl::Span<const int> mesh_dims) const {
  if (!mesh.defined()) return absl::InvalidArgumentError("communicator of a null mesh");
  if (mesh.is_self() || mesh_dims.empty()) return RequestOf({rank_}, rank_, "self", mesh.device());
  DT_RETURN_IF_ERROR(CheckInWorld(mesh, world_size()));
  if (!mesh.Contains(rank_)) {
    return absl::FailedPreconditionError(absl::StrCat("rank ", rank_, " is not in mesh ",
                                                      mesh.ToString(),
                                                      ": only its members may communicate on it"));
  }
  DT_ASSIGN_OR_RETURN(const DeviceMesh sub, mesh.SubMeshByDims(mesh_dims, rank_));
  return RequestOf(sub.Ranks(), rank_, DimsLabel(mesh, mesh_dims), mesh.device());
}

absl::StatusOr<Comm*> RankContext::CommFor(const DeviceMesh& mesh,
                                           absl::Span<const int> mesh_dims) {
  if (!mesh.defined()) return absl::InvalidArgumentError("communicator of a null mesh");
  CommKey key{mesh, {mesh_dims.begin(), mesh_dims.end()}};
  const auto it = comm_cache_.find(key);
  if (it != comm_cache_.end()) return it->second;
  DT_ASSIGN_OR_RETURN(GroupRequest group, GroupFor(mesh, mesh_dims));
  DT_ASSIGN_OR_RETURN(Comm * comm, MakeComm(std::move(group)));
  if (comm_cache_.size() >= kMostCached) comm_cache_.clear();
  return comm_cache_[key] = comm;
}

absl::StatusOr<Comm*> RankContext::CommFor(const DeviceMesh& mesh, absl::Span<const int> mesh_dims,
                                           const GroupOptions& options) {
  DT_ASSIGN_OR_RETURN(const GroupRequest group, GroupFor(mesh, mesh_dims));
  if (group.ranks.size() > 1) DT_RETURN_IF_ERROR(world_->SetOptions(group, options));
  return CommFor(mesh, mesh_dims);
}

absl::StatusOr<std::vector<std::string>> RankContext::Exchange(const DeviceMesh& mesh,
                                                               absl::Span<const int> mesh_dims,
                                                               absl::string_view what_for,
                                                               std::string mine) {
  DT_ASSIGN_OR_RETURN(const GroupRequest group, GroupFor(mesh, mesh_dims));
  const auto n = static_cast<int64_t>(group.ranks.size());
  if (n == 1) return std::vector<std::string>{std::move(mine)};
  if (rehearses()) {
    return absl::InvalidArgumentError(
        absl::StrCat("[comm ", group.label, "] ", std::string(Name(CollectiveKind::kHostExchange)),
                     ": in a rehearsal (Explain) there are no peers"));
  }
  NoteExchange(group, static_cast<int64_t>(mine.size()));
  return world_->Exchange(group, what_for, std::move(mine));
}

void RankContext::NoteExchange(const GroupRequest& group, int64_t bytes) {
  const auto peers = static_cast<int64_t>(group.ranks.size()) - 1;
  if (!trace_.active() || peers == 0) return;
  trace_.Record(CollectiveKind::kHostExchange, group.label, bytes * peers, bytes, 0);
}

absl::Status RankContext::RehearseExchange(const DeviceMesh& mesh, absl::Span<const int> mesh_dims,
                                           int64_t bytes) {
  DT_ASSIGN_OR_RETURN(const GroupRequest group, GroupFor(mesh, mesh_dims));
  NoteExchange(group, bytes);
  return absl::OkStatus();
}

absl::StatusOr<Comm*> RankContext::CommForUnion(const DeviceMesh& a, const DeviceMesh& b) {
  if (!a.defined() || !b.defined()) {
    return absl::InvalidArgumentError("communicator of a null mesh");
  }
  DT_RETURN_IF_ERROR(CheckInWorld(a, world_size()));
  DT_RETURN_IF_ERROR(CheckInWorld(b, world_size()));
  if (!a.Contains(rank_) && !b.Contains(rank_)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", rank_, " is in neither of the meshes ", a.ToString(), " and ", b.ToString()));
  }
  std::vector<int64_t> ranks = a.Ranks();
  const std::vector<int64_t> more = b.Ranks();
  ranks.insert(ranks.end(), more.begin(), more.end());
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  const auto label = [](const DeviceMesh& mesh) {
    std::vector<int> dims(mesh.ndim());
    std::iota(dims.begin(), dims.end(), 0);
    return DimsLabel(mesh, dims);
  };
  return MakeComm(
      RequestOf(std::move(ranks), rank_, absl::StrCat(label(a), "|", label(b)), a.device()));
}

absl::StatusOr<Comm*> RankContext::WorldComm() {
  std::vector<int64_t> ranks(world_size());
  for (int64_t i = 0; i < world_size(); ++i) ranks[i] = i;
  return MakeComm(RequestOf(std::move(ranks), rank_, "world", device()));
}

absl::StatusOr<Comm*> RankContext::MakeComm(GroupRequest group) {
  std::unique_ptr<Comm>& comm = comms_[absl::StrCat(
      absl::StrJoin(group.ranks, ","), " ", static_cast<int>(group.device), " ", group.label)];
  if (!comm) {
    DT_ASSIGN_OR_RETURN(std::unique_ptr<CommBackend> backend, world_->MakeComm(group));
    comm = std::make_unique<Comm>(this, std::move(backend), std::move(group.ranks), group.index,
                                  std::move(group.label));
  }
  return comm.get();
}

void RankContext::Lend(std::shared_ptr<Loan> loan) {
  const auto returned = [](const std::shared_ptr<Loan>& l) { return l->Returned(); };
  loans_.erase(std::remove_if(loans_.begin(), loans_.end(), returned), loans_.end());
  if (loan) loans_.push_back(std::move(loan));
}

absl::Status RankContext::TakeBack(const Buffer& buffer) {
  Lend(nullptr);
  for (const std::shared_ptr<Loan>& loan : loans_) {
    if (loan->Holds(buffer)) DT_RETURN_IF_ERROR(loan->TakeBack());
  }
  return absl::OkStatus();
}

absl::Status RankContext::Quiesce() {
  absl::Status status;
  for (const auto& [name, comm] : comms_) {
    if (comm) status.Update(comm->Quiesce());
  }
  return heard_of_failure_ ? absl::OkStatus() : status;
}

FlightReport RankContext::TakeFlightReport() { return world_->Report(); }

void RankContext::AbortAll(const absl::Status& why) {
  HearOfFailure();
  world_->Fail(rank_, why);
}

namespace {

absl::Status RunBody(RankContext& context, absl::FunctionRef<absl::Status(RankContext&)> body) {
  try {
    return body(context);
  } catch (...) {
    return CurrentException();
  }
}

}  // namespace

void RunRank(const std::shared_ptr<World>& world, int64_t rank, DeviceType device,
             absl::FunctionRef<absl::Status(RankContext&)> body) {
  RankState state;
  const RankState::Scope scope(&state);
  auto context = std::make_unique<RankContext>(world, rank, device);
  state.allocator = context->allocator();
  state.devices = &context->devices();
  state.context = context.get();
  absl::Status status = RunBody(*context, body);
  if (status.ok()) status = context->Quiesce();
  // Peers learn it before this rank takes its time to clean up.
  world->Leave(rank, status);
  context.reset();  // while still current: slots may ask for it
}

absl::Status HowItEnded(World& world, FlightReport* report) {
  FlightReport last = world.LastReport();
  const absl::Status cause = world.FirstCause();
  if (last.groups.empty()) return cause;
  const char* const name = std::getenv("DTENSOR_FLIGHT_REPORT");
  if (name != nullptr && *name != '\0' && !cause.ok()) {
    std::string path = name;
    // Each process has its own, as it saw the others: one that came late knows less.
    if (LaunchedProcesses() > 1) absl::StrAppend(&path, ".rank", ThisProcess());
    const absl::Status written = WriteFile(path, last.ToJson() + "\n");
    fprintf(stderr, "flight report: %s\n",
            (written.ok() ? path : std::string(written.message())).c_str());
  }
  if (report != nullptr) *report = std::move(last);
  return cause;
}

absl::Status RunFake(const FakeOptions& options,
                     absl::FunctionRef<absl::Status(RankContext&)> body) {
  if (options.rank < 0 || options.rank >= options.world) {
    return absl::InvalidArgumentError(
        absl::StrCat("RunFake: rank ", options.rank, " is not in a world of ", options.world));
  }
  if (RankContext::InsideRank()) {
    return absl::FailedPreconditionError("RunFake inside a rank of RunSpmd");
  }
  const auto world =
      std::make_shared<FakeWorld>(options.world, options.rank, options.cost, options.wrap);
  DT_ASSIGN_OR_RETURN(const DeviceType device, DefaultDevice());
  RunRank(world, options.rank, device, body);
  return world->FirstCause();
}

namespace {
// Those that the program gives, else those of the file that the environment names, else the usual.
absl::StatusOr<CostModel> LinkCosts(const std::optional<CostModel>& given) {
  if (given) return CostModel::FromJson(given->ToJson());  // which checks them
  const char* const file = std::getenv("DTENSOR_COST_MODEL");
  if (file == nullptr || *file == '\0') return CostModel();
  absl::StatusOr<CostModel> measured = CostModel::FromFile(file);
  if (!measured.ok()) return Prefixed("DTENSOR_COST_MODEL", measured.status());
  return measured;
}
}  // namespace

absl::Status RunSpmd(int64_t ranks, absl::FunctionRef<absl::Status(RankContext&)> body,
                     SpmdOptions options) {
  if (ranks < 1) {
    return absl::InvalidArgumentError(absl::StrCat("RunSpmd needs at least 1 rank, got ", ranks));
  }
  if (RankContext::InsideRank()) {
    return absl::FailedPreconditionError("RunSpmd inside a rank of another RunSpmd");
  }
  if (options.timeout <= absl::ZeroDuration()) {
    const char* const text = std::getenv("DTENSOR_TIMEOUT_S");
    DT_ASSIGN_OR_RETURN(options.timeout,
                        TimeoutFrom(text == nullptr ? "" : text, absl::Seconds(60)));
  }
  if (!options.device) {
    DT_ASSIGN_OR_RETURN(options.device, DefaultDevice());
  }
  DT_RETURN_IF_ERROR(CheckDevice(*options.device));
  DT_ASSIGN_OR_RETURN(Endpoint* const processes, Endpoint::OfLaunch());
  if (processes == nullptr || processes->rank() == 0) {
    DT_ASSIGN_OR_RETURN(options.cost, LinkCosts(options.cost));
  }
  if (processes != nullptr) {
    // Of tests, whose worlds have all sizes.
    const bool any_world = std::getenv("DTENSOR_ANY_WORLD") != nullptr;
    if (ranks == processes->size() || (any_world && ranks < processes->size())) {
      return RunOnProcesses(*processes, ranks, body, options);
    }
    if (!any_world) {
      return absl::InvalidArgumentError(absl::StrCat(
          "RunSpmd of ", ranks, " ranks in a program that was started as ", processes->size(),
          " processes, one for each rank (", processes->place().size_name, ")"));
    }
  }
  if (ranks > kMaxThreads) {
    return absl::InvalidArgumentError(
        absl::StrCat("RunSpmd runs the ranks of one process as threads, at most ", kMaxThreads,
                     ", got ", ranks, "; for more start it by mpirun or srun"));
  }
  ThreadWorldOptions of_world = {
      .timeout = options.timeout, .spin = ranks <= UsableCores(), .wrap = options.wrap};
  of_world.cost = options.cost.value_or(CostModel());
  of_world.cost.ranks_per_node = ranks;
  const auto world = std::make_shared<ThreadWorld>(ranks, std::move(of_world));
  const std::vector<int> cores = CoreList();
  const bool pin = options.pin && ranks <= static_cast<int64_t>(cores.size());
  std::vector<std::thread> threads;
  for (int64_t r = 0; r < ranks; ++r) {
    try {
      threads.emplace_back([&, r] {
        if (pin) PinTo(cores[r]);
        RunRank(world, r, *options.device, body);
      });
    } catch (const std::system_error& e) {
      const absl::Status none = RankLocal(
          absl::ResourceExhaustedError(absl::StrCat("cannot start a thread: ", e.what())));
      for (int64_t rest = r; rest < ranks; ++rest) world->Fail(rest, none);
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  return HowItEnded(*world, options.flight_report);
}

}  // namespace dtensor
