// libnccl's functions: communicators, groups, and the operations' way to a stream.
#include "tests/cusim/nccl.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <set>

#include "tests/cusim/number.h"

using cusim::Runtime;
using cusim::Stream;
using namespace cusim::nccl;

// Each function counts its call, and fails where DT_CUSIM_FAIL asks for it.
#define CUSIM_NCCL(name)                                \
  cusim::Runtime& r = cusim::Runtime::Get();            \
  std::lock_guard<std::recursive_mutex> lock_(r.mutex); \
  if (const int e_ = r.Injected(#name); e_ != 0) {      \
    return static_cast<ncclResult_t>(e_);               \
  }

namespace cusim::nccl {

bool Clique::complete() const {
  return std::all_of(members.begin(), members.end(), [](const Member& m) { return m.come; });
}

std::string Clique::Clash(size_t a, size_t b) const {
  const int device = members[a].device;
  if (device != members[b].device || std::getenv("DT_CUSIM_NCCL_SHARED") != nullptr) return "";
  return "Duplicate GPU detected: ranks " + std::to_string(a) + " and " + std::to_string(b) +
         " both on device " + std::to_string(device);
}

std::shared_ptr<Clique::Split>& Clique::SplitOf(uint64_t number) {
  std::shared_ptr<Split>& split = splits[number];
  if (split == nullptr) split = std::make_shared<Split>();
  return split;
}

}  // namespace cusim::nccl

namespace {

constexpr char kIdBegins[] = "cusim-nccl-";

// What outlives single calls; under the runtime's mutex.
struct State {
  std::map<std::string, std::shared_ptr<Clique>> cliques;  // by id, of those that began here
  std::set<ncclComm*> comms;  // kept when destroyed, so that their use is seen
  uint64_t names = 0;
};
State& Global() {
  static auto* const state = new State;
  return *state;
}

struct Asked {
  ncclComm* comm;
  Stream* stream;
  Call call;
};
// A group of this thread: its operations, and what its GroupEnd waits for.
struct Group {
  int depth = 0;
  std::vector<Asked> calls;
  std::vector<std::pair<ncclComm*, std::function<bool()>>> waits;
  ncclResult_t error = ncclSuccess;
};
thread_local Group t_group;
thread_local std::string t_last;  // text of the last error without a communicator

}  // namespace

namespace cusim::nccl {
ncclResult_t Refuse(Runtime& r, ncclComm* comm, ncclResult_t error, const std::string& why) {
  r.Say("nccl", std::string(ncclGetErrorString(error)) + ": " + why);
  t_last = why;
  if (comm != nullptr) comm->last = why;
  if (t_group.depth > 0 && t_group.error == ncclSuccess) t_group.error = error;
  return error;
}
}  // namespace cusim::nccl

namespace {

bool Lives(const ncclComm* comm) {
  return Global().comms.count(const_cast<ncclComm*>(comm)) != 0 && !comm->destroyed &&
         !comm->aborted;
}
#define CUSIM_COMM(comm)                                                \
  if (!Lives(comm)) {                                                   \
    return Refuse(r, nullptr, ncclInvalidArgument,                      \
                  "a communicator that is null, destroyed or aborted"); \
  }

std::shared_ptr<Clique> NewClique(int size, const char* name) {
  auto clique = std::make_shared<Clique>();
  clique->size = size;
  clique->members.resize(static_cast<size_t>(size));
  const std::string number = "communicator #" + std::to_string(++Global().names);
  clique->name = name != nullptr ? number + " (" + name + ")" : number;
  return clique;
}

ncclComm* NewComm(Runtime& r, const ncclConfig_t* config) {
  auto* const comm = new ncclComm;
  comm->device = r.device();
  comm->thread = r.thread();
  comm->blocking = config == nullptr || config->blocking != 0;
  Global().comms.insert(comm);
  return comm;
}

ncclResult_t CheckConfig(Runtime& r, const ncclConfig_t* config) {
  if (config == nullptr) return ncclSuccess;
  if (config->magic != 0xcafebeef || config->size == 0) {
    return Refuse(r, nullptr, ncclInvalidArgument,
                  "a config that NCCL_CONFIG_INITIALIZER did not begin");
  }
  if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1) {
    return Refuse(r, nullptr, ncclInvalidArgument, "blocking is 0 or 1");
  }
  return ncclSuccess;
}

// Waits now, or at the end of the group, until `done` or the communicator is no more; one that does
// not block never waits here.
ncclResult_t Wait(Runtime& r, ncclComm* comm, bool blocking, const std::function<bool()>& done) {
  const auto over = [comm, done] { return comm->aborted || comm->broken || done(); };
  if (t_group.depth > 0) {
    t_group.waits.push_back({comm, over});
    return ncclSuccess;
  }
  if (!over()) {
    if (!blocking) return ncclInProgress;
    if (!r.WaitFor(over)) return ncclSystemError;
  }
  return comm->broken ? comm->error : ncclSuccess;
}

// Whether all ranks have come, and a text with those that have not.
bool Arrived(Runtime& r, const Clique& clique, int rank) {
  if (clique.complete()) return true;
  std::string missing;
  for (size_t i = 0; i < clique.members.size(); ++i) {
    if (!clique.members[i].come) missing += " " + std::to_string(i);
  }
  r.Block("initialization of rank " + std::to_string(rank) + " of " + std::to_string(clique.size) +
              " in " + clique.name + " waits for rank" + missing,
          {});
  return false;
}

ncclResult_t Enlist(Runtime& r, const std::shared_ptr<Clique>& clique, ncclComm* comm, int rank) {
  const auto at = static_cast<size_t>(rank);
  Clique::Member& me = clique->members[at];
  me = {.come = true, .comm = comm, .device = comm->device, .process = getpid(), .left = ""};
  for (size_t i = 0; i < clique->members.size(); ++i) {
    if (i == at || clique->members[i].comm == nullptr) continue;
    const std::string why = clique->Clash(i, at);
    if (why.empty()) continue;
    me = {};
    return Refuse(r, comm, ncclInvalidUsage, why);
  }
  comm->clique = clique;
  comm->rank = rank;
  if (!Enter(r, clique, rank)) {
    me = {};
    comm->clique = nullptr;
    return Refuse(r, comm, ncclInvalidUsage, "two ranks " + std::to_string(rank));
  }
  r.Notify();
  return comm->error;
}

// Of a caller whose header is older the config ends before some fields.
const char* NameIn(const ncclConfig_t* config) {
  const bool has = config != nullptr && config->size > offsetof(ncclConfig_t, commName);
  return has ? config->commName : nullptr;
}

ncclResult_t Init(Runtime& r, ncclComm_t* out, int ranks, const ncclUniqueId& id, int rank,
                  const ncclConfig_t* config) {
  if (out == nullptr || ranks < 1 || rank < 0 || rank >= ranks) {
    return Refuse(r, nullptr, ncclInvalidArgument,
                  "rank " + std::to_string(rank) + " of " + std::to_string(ranks));
  }
  *out = nullptr;
  if (const ncclResult_t e = CheckConfig(r, config); e != ncclSuccess) return e;
  const std::string name(id.internal, strnlen(id.internal, sizeof id.internal));
  if (name.rfind(kIdBegins, 0) != 0) {
    return Refuse(r, nullptr, ncclInvalidArgument, "an id that ncclGetUniqueId did not give");
  }
  std::shared_ptr<Clique>& clique = Global().cliques[name];
  if (clique == nullptr) {
    clique = NewClique(ranks, NameIn(config));
    clique->id = name;
  }
  if (clique->size != ranks) {
    return Refuse(r, nullptr, ncclInvalidArgument,
                  "one rank says " + std::to_string(clique->size) + " ranks, rank " +
                      std::to_string(rank) + " " + std::to_string(ranks));
  }
  if (clique->members[static_cast<size_t>(rank)].come) {
    return Refuse(r, nullptr, ncclInvalidUsage, "two ranks " + std::to_string(rank));
  }
  ncclComm* const comm = NewComm(r, config);
  ncclResult_t e = Enlist(r, clique, comm, rank);
  if (e == ncclSuccess) {
    e = Wait(r, comm, comm->blocking, [&r, comm] { return Arrived(r, *comm->clique, comm->rank); });
  }
  if (e != ncclSuccess && e != ncclInProgress) {
    comm->destroyed = true;
    TellLeave(r, *comm, "is destroyed");
    return e;
  }
  *out = comm;
  return e;
}

// ---- Operations. ----

ncclResult_t Check(Runtime& r, ncclComm* comm, const Call& c, const Stream* stream) {
  const auto refuse = [&](ncclResult_t e, const std::string& why) {
    return Refuse(r, comm, e, Describe(c) + ": " + why);
  };
  if (comm->clique == nullptr || !comm->clique->complete()) {
    return refuse(ncclInvalidUsage, "the communicator is not initialized yet");
  }
  if (SizeOf(c.type) == 0) return refuse(ncclInvalidArgument, "no type that is known here");
  if (c.op < 0 || (c.op >= ncclNumOps && comm->operators.count(c.op) == 0)) {
    return refuse(ncclInvalidArgument, "no operator of this communicator");
  }
  if (c.op >= ncclNumOps && comm->operators.at(c.op).type != c.type) {
    return refuse(ncclInvalidArgument, "the operator is of another type");
  }
  if (c.root < 0 || c.root >= comm->clique->size) {
    return refuse(ncclInvalidArgument, "no such root or peer");
  }
  if (stream == nullptr || stream->device != comm->device) {
    return refuse(ncclInvalidUsage, "the stream is not one of the communicator's device");
  }
  const bool root = comm->rank == c.root;
  const bool sends = c.kind != Kind::kRecv && (c.kind != Kind::kBroadcast || root);
  const bool receives = c.kind != Kind::kSend && (c.kind != Kind::kReduce || root);
  for (const void* const p : std::initializer_list<const void*>{
           sends ? c.send : nullptr, receives ? static_cast<const void*>(c.recv) : nullptr}) {
    if (p != nullptr && !r.IsDevice(p) && !r.Pinned(p)) {
      return refuse(ncclInvalidArgument, "a buffer that the device cannot reach");
    }
  }
  if (c.count != 0 && ((sends && c.send == nullptr) || (receives && c.recv == nullptr))) {
    return refuse(ncclInvalidArgument, "a buffer that is null");
  }
  return ncclSuccess;
}

// The calls of one communicator and stream become one work.
ncclResult_t Start(Runtime& r, ncclComm* comm, Stream* stream, std::vector<Call> calls) {
  cusim::Work work;
  work.name =
      Describe(calls[0]) + " of rank " + std::to_string(comm->rank) + " in " + comm->clique->name;
  work.prepare = [&r, comm, calls = std::move(calls)](cusim::Work* w, Stream* s, uint64_t at) {
    auto launch = std::make_shared<Launch>();
    launch->comm = comm;
    launch->stream = s;
    launch->position = at;
    Post(r, launch, calls);
    w->ready = [&r, launch] { return Progress(r, launch.get()); };
    w->run = [launch](std::vector<cusim::Range>* ranges) { *ranges = std::move(launch->ranges); };
  };
  if (r.Queue(stream, std::move(work)) != cudaSuccess) {
    return Refuse(r, comm, ncclUnhandledCudaError, "the stream does not take it");
  }
  return ncclSuccess;
}

ncclResult_t Ask(Runtime& r, ncclComm* comm, cudaStream_t stream, Call call) {
  CUSIM_COMM(comm);
  if (r.sticky() != cudaSuccess) return ncclUnhandledCudaError;
  comm->thread = r.thread();
  Stream* const s = stream == nullptr && r.device() != comm->device ? nullptr : r.Of(stream);
  if (const ncclResult_t e = Check(r, comm, call, s); e != ncclSuccess) return e;
  if (call.op >= ncclNumOps) call.premul = comm->operators.at(call.op);
  const bool message = call.kind == Kind::kSend || call.kind == Kind::kRecv;
  if (call.count == 0 && !message) return ncclSuccess;  // for all ranks alike
  if (t_group.depth > 0) {
    t_group.calls.push_back({comm, s, call});
    return ncclSuccess;
  }
  return Start(r, comm, s, {call});
}

ncclResult_t EndGroup(Runtime& r) {
  if (t_group.depth == 0) return Refuse(r, nullptr, ncclInvalidUsage, "a group that did not start");
  if (--t_group.depth > 0) return ncclSuccess;
  const Group group = std::move(t_group);
  t_group = Group();
  if (group.error != ncclSuccess) return group.error;
  for (const auto& [comm, over] : group.waits) {
    if (!r.WaitFor(over)) return ncclSystemError;
    if (comm->broken) return comm->error;
  }
  // By communicator and stream, in the order of the first call of each.
  std::vector<std::pair<std::pair<ncclComm*, Stream*>, std::vector<Call>>> launches;
  for (const Asked& a : group.calls) {
    const std::pair<ncclComm*, Stream*> key{a.comm, a.stream};
    auto it = std::find_if(launches.begin(), launches.end(),
                           [&](const auto& l) { return l.first == key; });
    if (it == launches.end()) it = launches.insert(launches.end(), {key, {}});
    it->second.push_back(a.call);
  }
  for (auto& [key, calls] : launches) {
    const ncclResult_t e = Start(r, key.first, key.second, std::move(calls));
    if (e != ncclSuccess) return e;
  }
  return ncclSuccess;
}

// All that the communicator has queued has run.
bool Flushed(Runtime& r, const ncclComm& comm) {
  if (comm.clique == nullptr) return true;
  bool all = AllTold(*comm.clique);
  for (const auto& weak : comm.launches) {
    const std::shared_ptr<Launch> launch = weak.lock();
    if (launch != nullptr) all = r.Force(launch->stream, launch->position) && all;
  }
  return all;
}

// The communicators of a split, once all ranks have said where they want to be.
bool MakeSplit(Runtime& r, const std::shared_ptr<Clique>& parent, uint64_t number, int rank) {
  Clique::Split* const split = parent->SplitOf(number).get();
  if (split->made) return true;
  std::string missing;
  std::vector<int> threads;
  for (int i = 0; i < parent->size; ++i) {
    if (split->wishes.count(i) != 0) continue;
    missing += " " + std::to_string(i);
    if (!parent->remote(i)) {
      threads.push_back(parent->members[static_cast<size_t>(i)].comm->thread);
    }
  }
  if (!missing.empty()) {
    if (OthersMayCome()) threads.clear();
    r.Block("ncclCommSplit of rank " + std::to_string(rank) + " in " + parent->name +
                " waits for rank" + missing,
            threads);
    return false;
  }
  std::map<int, std::vector<std::pair<int, int>>> colors;  // keys and ranks in the parent
  for (const auto& [from, wish] : split->wishes) {
    if (wish.color != NCCL_SPLIT_NOCOLOR) colors[wish.color].push_back({wish.key, from});
  }
  for (auto& [color, members] : colors) {
    std::sort(members.begin(), members.end());
    const auto clique = NewClique(static_cast<int>(members.size()), nullptr);
    if (std::any_of(members.begin(), members.end(),
                    [&](const auto& m) { return parent->remote(m.second); })) {
      clique->id = parent->id + "." + std::to_string(number) + "." + std::to_string(color);
    }
    for (size_t i = 0; i < members.size(); ++i) {
      ncclComm* const child = split->wishes.at(members[i].second).child;
      if (child != nullptr) Enlist(r, clique, child, static_cast<int>(i));
    }
  }
  split->made = true;
  r.Notify();
  return true;
}

}  // namespace

extern "C" {

// ---- The library. ----

ncclResult_t ncclGetVersion(int* version) {
  if (version == nullptr) return ncclInvalidArgument;
  const char* const other = std::getenv("DT_CUSIM_NCCL_VERSION");
  *version = other != nullptr ? std::atoi(other) : NCCL_VERSION_CODE;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  CUSIM_NCCL(ncclGetUniqueId);
  if (id == nullptr) return Refuse(r, nullptr, ncclInvalidArgument, "nowhere to put an id");
  std::random_device random;  // nobody else on this machine may have the same
  std::memset(id->internal, 0, sizeof id->internal);
  std::snprintf(id->internal, sizeof id->internal, "%s%08x%08x%08x%08x", kIdBegins, random(),
                random(), random(), random());
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclUnhandledCudaError:
      return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
      return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
      return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
      return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
      return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclInProgress:
      return "NCCL operation in progress";
    default:
      return "unknown result code";
  }
}
const char* ncclGetLastError(ncclComm_t comm) {
  const std::lock_guard<std::recursive_mutex> lock(Runtime::Get().mutex);
  return comm != nullptr && Global().comms.count(comm) != 0 ? comm->last.c_str() : t_last.c_str();
}

// ---- Communicators. ----

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  CUSIM_NCCL(ncclCommInitRankConfig);
  return Init(r, comm, ranks, id, rank, config);
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank) {
  CUSIM_NCCL(ncclCommInitRank);
  return Init(r, comm, ranks, id, rank, nullptr);
}
ncclResult_t ncclCommInitAll(ncclComm_t* comms, int count, const int* devices) {
  CUSIM_NCCL(ncclCommInitAll);
  if (comms == nullptr || count < 1) {
    return Refuse(r, nullptr, ncclInvalidArgument, "no communicators");
  }
  const auto clique = NewClique(count, nullptr);
  const int before = r.device();
  for (int i = 0; i < count; ++i) {
    const int device = devices != nullptr ? devices[i] : i;
    if (device < 0 || device >= r.devices()) {
      r.SetDevice(before);
      return Refuse(r, nullptr, ncclInvalidArgument, "no device " + std::to_string(device));
    }
    r.SetDevice(device);
    comms[i] = NewComm(r, nullptr);
    const ncclResult_t e = Enlist(r, clique, comms[i], i);
    r.SetDevice(before);
    if (e != ncclSuccess) return e;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* out,
                           ncclConfig_t* config) {
  CUSIM_NCCL(ncclCommSplit);
  CUSIM_COMM(comm);
  if (out == nullptr || (color < 0 && color != NCCL_SPLIT_NOCOLOR)) {
    return Refuse(r, comm, ncclInvalidArgument, "a color is at least 0, or NCCL_SPLIT_NOCOLOR");
  }
  if (const ncclResult_t e = CheckConfig(r, config); e != ncclSuccess) return e;
  comm->thread = r.thread();
  const uint64_t number = comm->splits++;
  *out = nullptr;
  if (color != NCCL_SPLIT_NOCOLOR) {
    *out = NewComm(r, config);
    (*out)->device = comm->device;
    if (config == nullptr) (*out)->blocking = comm->blocking;
  }
  comm->clique->SplitOf(number)->wishes[comm->rank] = {color, key, *out};
  TellWish(*comm, number, color, key);
  r.Notify();
  return Wait(r, comm, *out == nullptr || (*out)->blocking, [&r, number, comm, child = *out] {
    if (!MakeSplit(r, comm->clique, number, comm->rank)) return false;
    return child == nullptr || child->broken || Arrived(r, *child->clique, child->rank);
  });
}
ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  CUSIM_NCCL(ncclCommFinalize);
  CUSIM_COMM(comm);
  return Wait(r, comm, comm->blocking, [&r, comm] { return Flushed(r, *comm); });
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  CUSIM_NCCL(ncclCommDestroy);
  CUSIM_COMM(comm);
  const bool flushed = r.WaitFor([&r, comm] { return comm->aborted || Flushed(r, *comm); });
  comm->destroyed = true;
  TellLeave(r, *comm, "is destroyed");
  r.WaitFor([comm] { return comm->clique == nullptr || AllTold(*comm->clique); });
  return flushed ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  CUSIM_NCCL(ncclCommAbort);
  CUSIM_COMM(comm);
  comm->aborted = true;
  TellLeave(r, *comm, "has aborted");
  return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  CUSIM_NCCL(ncclCommGetAsyncError);
  CUSIM_COMM(comm);
  if (error == nullptr) return Refuse(r, comm, ncclInvalidArgument, "nowhere to put an error");
  const bool ready = comm->clique != nullptr && comm->clique->complete();
  *error = comm->error != ncclSuccess  ? comm->error
           : r.sticky() != cudaSuccess ? ncclUnhandledCudaError
           : ready                     ? ncclSuccess
                                       : ncclInProgress;
  return ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* count) {
  CUSIM_NCCL(ncclCommCount);
  CUSIM_COMM(comm);
  if (count == nullptr) return Refuse(r, comm, ncclInvalidArgument, "nowhere to put a count");
  *count = comm->clique == nullptr ? 0 : comm->clique->size;
  return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int* device) {
  CUSIM_NCCL(ncclCommCuDevice);
  CUSIM_COMM(comm);
  if (device == nullptr) return Refuse(r, comm, ncclInvalidArgument, "nowhere to put a device");
  *device = comm->device;
  return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) {
  CUSIM_NCCL(ncclCommUserRank);
  CUSIM_COMM(comm);
  if (rank == nullptr) return Refuse(r, comm, ncclInvalidArgument, "nowhere to put a rank");
  *rank = comm->rank;
  return ncclSuccess;
}

// ---- Groups. ----

ncclResult_t ncclGroupStart() {
  CUSIM_NCCL(ncclGroupStart);
  ++t_group.depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  CUSIM_NCCL(ncclGroupEnd);
  return EndGroup(r);
}

// ---- Operators. ----

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t where, ncclComm_t comm) {
  CUSIM_NCCL(ncclRedOpCreatePreMulSum);
  CUSIM_COMM(comm);
  if (op == nullptr || scalar == nullptr || SizeOf(type) == 0) {
    return Refuse(r, comm, ncclInvalidArgument, "PreMulSum without a scalar of a type known here");
  }
  PreMul p{type, where == ncclScalarDevice, scalar, 0};
  if (!p.device) {
    if (r.IsDevice(scalar)) {
      return Refuse(r, comm, ncclInvalidArgument, "an immediate scalar that is the device's");
    }
    p.value = ScalarOf(type, scalar);
  }
  *op = static_cast<ncclRedOp_t>(comm->next_operator++);
  comm->operators[*op] = p;
  return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
  CUSIM_NCCL(ncclRedOpDestroy);
  CUSIM_COMM(comm);
  // What is queued with it has it still: only new calls are refused.
  if (comm->operators.erase(op) == 0) {
    return Refuse(r, comm, ncclInvalidArgument, "no operator of this communicator");
  }
  return ncclSuccess;
}

// ---- Operations. ----

ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclAllReduce);
  return Ask(r, comm, stream, {Kind::kAllReduce, send, recv, count, type, op});
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclReduce);
  return Ask(r, comm, stream, {Kind::kReduce, send, recv, count, type, op, root});
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclBroadcast);
  return Ask(r, comm, stream, {Kind::kBroadcast, send, recv, count, type, ncclSum, root});
}
ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
  CUSIM_NCCL(ncclBcast);
  return Ask(r, comm, stream, {Kind::kBroadcast, buffer, buffer, count, type, ncclSum, root});
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclAllGather);
  return Ask(r, comm, stream, {Kind::kAllGather, send, recv, count, type});
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclReduceScatter);
  return Ask(r, comm, stream, {Kind::kReduceScatter, send, recv, count, type, op});
}
ncclResult_t ncclSend(const void* send, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  CUSIM_NCCL(ncclSend);
  return Ask(r, comm, stream, {Kind::kSend, send, nullptr, count, type, ncclSum, peer});
}
ncclResult_t ncclRecv(void* recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  CUSIM_NCCL(ncclRecv);
  return Ask(r, comm, stream, {Kind::kRecv, nullptr, recv, count, type, ncclSum, peer});
}

// ---- Memory. ----

ncclResult_t ncclMemAlloc(void** p, size_t bytes) {
  CUSIM_NCCL(ncclMemAlloc);
  return p != nullptr && r.Allocate(p, bytes, r.device()) == cudaSuccess ? ncclSuccess
                                                                         : ncclUnhandledCudaError;
}
ncclResult_t ncclMemFree(void* p) {
  CUSIM_NCCL(ncclMemFree);
  return r.Free(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void* buffer, size_t, void** handle) {
  CUSIM_NCCL(ncclCommRegister);
  CUSIM_COMM(comm);
  if (handle == nullptr) return Refuse(r, comm, ncclInvalidArgument, "nowhere to put a handle");
  *handle = buffer;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void*) {
  CUSIM_NCCL(ncclCommDeregister);
  CUSIM_COMM(comm);
  return ncclSuccess;
}

}  // extern "C"
