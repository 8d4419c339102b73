#include "dtensor/mesh/process/endpoint.h"

#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "dtensor/mesh/kept_call.h"
#include "dtensor/mesh/process/meeting.h"
#include "dtensor/mesh/process/rendezvous.h"
#include "dtensor/mesh/process/start_watch.h"
#include "dtensor/tensor/plugin.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

bool in_child = false;  // of a rank that has forked

struct Plugin {
  const char *name, *file, *variable;  // which holds its path
  bool global;                         // MPI loads parts of its own that look for it
};
constexpr Plugin kMpi = {"MPI", "libdtensor_mpi.so", "DTENSOR_MPI_PLUGIN", true};
// Beside another MPI's, from the same source. Where MPICH is the only one, the other is its.
constexpr Plugin kMpich = {"MPI", "libdtensor_mpich.so", "DTENSOR_MPI_PLUGIN", true};
constexpr Plugin kGloo = {"gloo", "libdtensor_gloo.so", "DTENSOR_GLOO_PLUGIN", false};

// MPI's processes find each other by mpirun or srun only.
const Plugin& PluginOf(const ProcessPlace& place) {
  return place.launcher == "torchrun" || place.launcher == "dtensor" ? kGloo : kMpi;
}

absl::Status NoPlugin(const ProcessPlace& place, absl::string_view why) {
  return absl::UnimplementedError(absl::StrCat(
      "started as one of ", place.size, " processes (", place.size_name, " is set, by ",
      place.launcher, "), which needs the ", PluginOf(place).name, " plugin", why,
      "; start one process and give --ranks=", place.size, " to run the ranks as threads"));
}

absl::StatusOr<void*> EntryOf(const Plugin& plugin) {
  return LoadPlugin(plugin.file, plugin.variable, "mesh", DT_MESSAGES_ENTRY, plugin.global);
}

// "Open MPI v4.1.4", "MPICH Version: 4.0.2": how what the library says of itself begins.
std::string Beginning(absl::string_view library) {
  return absl::StrReplaceAll(library.substr(0, library.find_first_of(",\n")), {{"\t", " "}});
}

// mpirun's processes are Open MPI's: another library would take each for a world of its own.
absl::Status CheckFamily(const ProcessPlace& place, absl::string_view library) {
  if (place.launcher != "Open MPI" || absl::StrContains(library, "Open MPI")) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(place.ToString(), "; but the plugin is of ", Beginning(library),
                   ": start it by the mpiexec of that, or let DTENSOR_MPI_PLUGIN name Open MPI's"));
}

absl::StatusOr<const DtMessages*> Load(const ProcessPlace& place) {
  const bool hydra = place.launcher == "PMI" || place.launcher == "MVAPICH";
  absl::StatusOr<void*> entry = EntryOf(hydra ? kMpich : PluginOf(place));
  if (hydra && absl::IsNotFound(entry.status())) entry = EntryOf(kMpi);
  if (!entry.ok()) {
    return NoPlugin(place, absl::StrCat(absl::IsNotFound(entry.status()) ? ", which " : ", and ",
                                        entry.status().message()));
  }
  const DtMessages* table = reinterpret_cast<DtMessagesEntry>(*entry)();
  if (table == nullptr) return NoPlugin(place, ", and what is loaded is none");
  if (table->abi != DT_MESSAGES_ABI || table->struct_size < sizeof(DtMessages)) {
    return NoPlugin(
        place, absl::StrCat(", and it is of version ", table->abi, ", not of ", DT_MESSAGES_ABI));
  }
  DT_RETURN_IF_ERROR(CheckFamily(place, table->library()));
  return table;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Endpoint>> Endpoint::Open(ProcessPlace place) {
  DT_ASSIGN_OR_RETURN(const DtMessages* table, Load(place));
  char why[1024] = "";
  int64_t rank = place.rank, size = place.size;
  std::string address;
  int64_t store_requests = 0;
  if (table->meet == nullptr) {
    const StartWatch watch(place, PluginOf(place).name, &std::getenv);
    if (table->open(&rank, &size, why, sizeof(why)) != 0) {
      return absl::UnavailableError(absl::StrCat(PluginOf(place).name, " cannot start: ", why));
    }
  } else {
    DT_ASSIGN_OR_RETURN(const std::unique_ptr<Meeting> meeting, Meeting::Join(place, &std::getenv));
    if (table->meet(&meeting->table(), why, sizeof(why)) != 0) {
      return Prefixed(absl::StrCat(PluginOf(place).name, " cannot start"), meeting->Failed(why));
    }
    DT_RETURN_IF_ERROR(meeting->End());
    address = meeting->address();
    store_requests = meeting->requests();
  }
  const std::string library = Beginning(table->library());
  if (rank != place.rank || size != place.size) {
    return absl::FailedPreconditionError(
        absl::StrCat(place.ToString(), "; but ", library, " says rank ", rank, " of ", size,
                     ": the launcher belongs to another MPI than the plugin (DTENSOR_MPI_PLUGIN "
                     "names another)"));
  }
  if (rank == 0) {
    fprintf(stderr, "processes: %s, messages by %s\n", place.ToString().c_str(), library.c_str());
  }
  auto endpoint = std::make_unique<Endpoint>(std::move(place), table);
  endpoint->address_ = std::move(address);
  endpoint->store_requests = store_requests;
  return endpoint;
}

absl::StatusOr<Endpoint*> Endpoint::OfLaunch() {
  // A process has one place in one launch, which MPI too can be told of once only: what failed is
  // not tried again.
  static std::mutex mutex;
  static struct Launched {
    std::unique_ptr<Endpoint> endpoint;
    pid_t process = 0;  // that opened it: a child that exits is no rank, and ends nothing
    ~Launched() {
      if (!endpoint) return;
      const bool mine = process == getpid();
      if (mine) endpoint->End();
      // exit() in the middle of a world, whose threads still use it.
      if (!mine || endpoint->open_worlds != 0) (void)endpoint.release();
    }
  } launched;
  static absl::Status failed;
  const std::lock_guard<std::mutex> lock(mutex);
  DT_ASSIGN_OR_RETURN(std::optional<ProcessPlace> place, FindPlace(&std::getenv));
  if (!place || place->size == 1) return static_cast<Endpoint*>(nullptr);
  if (!launched.endpoint && failed.ok()) {
    absl::StatusOr<std::unique_ptr<Endpoint>> opened = Open(*std::move(place));
    failed = opened.status();
    if (opened.ok()) launched.endpoint = *std::move(opened);
    launched.process = getpid();
    (void)pthread_atfork(nullptr, nullptr, [] { in_child = true; });
  }
  if (!failed.ok()) return failed;
  return launched.endpoint.get();
}

void Endpoint::End() {
  if (!broken() && open_worlds == 0 && ends_with.ok()) {
    if (!MeetForEnd(*this)) MarkBroken();
  } else {
    EndAlone(*this, ends_with);
    MarkBroken();
  }
}

Endpoint::~Endpoint() {
  if (!broken() && open_worlds == 0) table_->close();
}

size_t Endpoint::abandoned() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return kept_.size();
}

template <class Start>
absl::Status Transfers::Begin(bool receives, int64_t peer, int64_t bytes, bool always,
                              Start start) {
  if (bytes == 0 && !always) return absl::OkStatus();
  if (in_child) {
    return absl::FailedPreconditionError(
        "a child that a rank has forked is no rank: its parent alone communicates");
  }
  char why[512] = "";
  requests_.push_back({nullptr, peer, receives});
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  if (start(&requests_.back().handle, why, sizeof(why)) == 0) return absl::OkStatus();
  return RankLocal(absl::InternalError(
      absl::StrCat("a message ", receives ? "from" : "to", " rank ", peer, ": ", why)));
}

absl::Status Transfers::Send(int64_t peer, int64_t channel, const void* data, int64_t bytes,
                             bool always) {
  return Begin(/*receives=*/false, peer, bytes, always, [&](auto... rest) {
    return endpoint_.table_->send(peer, channel, data, bytes, rest...);
  });
}

absl::Status Transfers::Recv(int64_t peer, int64_t channel, void* data, int64_t bytes,
                             bool always) {
  return Begin(/*receives=*/true, peer, bytes, always, [&](auto... rest) {
    return endpoint_.table_->recv(peer, channel, data, bytes, rest...);
  });
}

// Under the endpoint's mutex.
absl::Status Transfers::Test(Request& request) {
  if (request.handle == nullptr) return absl::OkStatus();
  char why[512] = "";
  int done = 0;
  if (endpoint_.table_->test(&request.handle, &done, why, sizeof(why)) == 0) {
    return absl::OkStatus();
  }
  return RankLocal(absl::InternalError(absl::StrCat("a message: ", why)));
}

absl::StatusOr<bool> Transfers::Done() {
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  for (; first_ < requests_.size(); ++first_) {
    DT_RETURN_IF_ERROR(Test(requests_[first_]));
    if (!done(first_)) return false;
  }
  return true;
}

bool Transfers::Sleep(absl::Duration most) {
  if (endpoint_.table_->wait == nullptr) return false;
  endpoint_.table_->wait(requests_[first_].handle, absl::ToInt64Microseconds(most));
  return true;
}

absl::Status Transfers::Sweep() {
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  for (Request& request : requests_) DT_RETURN_IF_ERROR(Test(request));
  return absl::OkStatus();
}

std::vector<int64_t> Transfers::Open(bool receives) const {
  std::vector<int64_t> peers;
  for (const Request& request : requests_) {
    if (request.handle != nullptr && request.receives == receives) peers.push_back(request.peer);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

Transfers::~Transfers() {
  const auto open = [](const Request& request) { return request.handle != nullptr; };
  if (std::none_of(requests_.begin(), requests_.end(), open)) return;
  struct Kept {
    std::shared_ptr<void> memory;
    std::unique_ptr<const KeptCall> call;
  };
  auto kept = std::make_shared<Kept>();
  kept->memory = memory_;
  if (call_ != nullptr) kept->call = std::make_unique<const KeptCall>(*call_);
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  for (Request& request : requests_) {
    if (open(request)) endpoint_.table_->forget(&request.handle);
  }
  endpoint_.kept_.push_back(std::move(kept));
}

}  // namespace dtensor
