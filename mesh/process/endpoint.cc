#include "dtensor/mesh/process/endpoint.h"

#include <dlfcn.h>
#include <limits.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/process/meeting.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Plugin {
  const char *name, *file, *variable;  // which holds its path
  int flags;                           // of dlopen
};
// Global: MPI loads parts of its own that look for it.
constexpr Plugin kMpi = {"MPI", "libdtensor_mpi.so", "DTENSOR_MPI_PLUGIN", RTLD_GLOBAL};
constexpr Plugin kGloo = {"gloo", "libdtensor_gloo.so", "DTENSOR_GLOO_PLUGIN", RTLD_LOCAL};

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

// Beside the library or the program that this code is in, as built and as installed.
std::vector<std::string> PluginPaths(const Plugin& plugin) {
  if (const char* path = std::getenv(plugin.variable); path != nullptr) return {path};
  std::vector<std::string> paths, files;
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&PluginOf), &info) != 0 && info.dli_fname != nullptr) {
    files.emplace_back(info.dli_fname);
  }
  char program[PATH_MAX] = "";
  if (readlink("/proc/self/exe", program, sizeof(program) - 1) > 0) files.emplace_back(program);
  for (const std::string& file : files) {
    if (file.rfind('/') == std::string::npos) continue;  // the program, by its name only
    for (const char* way : {"", "../mesh/", "../lib/"}) {
      paths.push_back(absl::StrCat(file.substr(0, file.rfind('/') + 1), way, plugin.file));
    }
  }
  paths.push_back(plugin.file);  // as the loader looks for libraries
  return paths;
}

absl::StatusOr<const DtMessages*> Load(const ProcessPlace& place) {
  std::vector<std::string> tried;
  const Plugin& plugin = PluginOf(place);
  const std::vector<std::string> paths = PluginPaths(plugin);
  for (const std::string& path : paths) {
    void* library = dlopen(path.c_str(), RTLD_NOW | plugin.flags);
    if (library == nullptr) {
      const char* why = dlerror();
      // Of the places where it is not the last is named; of a file that cannot be loaded, why.
      if (access(path.c_str(), F_OK) != 0 && &path != &paths.back()) continue;
      tried.emplace_back(why);
      continue;
    }
    const auto entry = reinterpret_cast<DtMessagesEntry>(dlsym(library, DT_MESSAGES_ENTRY));
    const DtMessages* table = entry == nullptr ? nullptr : entry();
    if (table == nullptr) return NoPlugin(place, absl::StrCat(", and ", path, " is none"));
    if (table->abi != DT_MESSAGES_ABI || table->struct_size < sizeof(DtMessages)) {
      return NoPlugin(place, absl::StrCat(", and ", path, " is of version ", table->abi,
                                          ", not of ", DT_MESSAGES_ABI));
    }
    return table;
  }
  return NoPlugin(place,
                  absl::StrCat(", which cannot be loaded (", absl::StrJoin(tried, "; "), ")"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Endpoint>> Endpoint::Open(ProcessPlace place) {
  DT_ASSIGN_OR_RETURN(const DtMessages* table, Load(place));
  char why[1024] = "";
  int64_t rank = place.rank, size = place.size;
  std::string address;
  if (table->meet == nullptr) {
    if (table->open(&rank, &size, why, sizeof(why)) != 0) {
      return absl::UnavailableError(absl::StrCat(PluginOf(place).name, " cannot start: ", why));
    }
  } else {
    DT_ASSIGN_OR_RETURN(const std::unique_ptr<Meeting> meeting, Meeting::Join(place, &std::getenv));
    if (table->meet(&meeting->table(), why, sizeof(why)) != 0) {
      return absl::UnavailableError(absl::StrCat(PluginOf(place).name, " cannot start: ", why));
    }
    DT_RETURN_IF_ERROR(meeting->End());
    address = meeting->address();
  }
  std::string library = table->library();
  library = library.substr(0, library.find_first_of(",\n"));
  if (rank != place.rank || size != place.size) {
    return absl::FailedPreconditionError(
        absl::StrCat(place.ToString(), "; but ", library, " says rank ", rank, " of ", size,
                     ": the launcher belongs to another MPI than the plugin (DTENSOR_MPI_PLUGIN "
                     "names another)"));
  }
  if (rank == 0) {
    fprintf(stderr, "processes: %s, messages by %s\n", place.ToString().c_str(), library.c_str());
  }
  std::unique_ptr<Endpoint> endpoint(new Endpoint(std::move(place), table));
  endpoint->address_ = std::move(address);
  return endpoint;
}

absl::StatusOr<Endpoint*> Endpoint::OfLaunch() {
  // A process has one place in one launch, which MPI too can be told of once only.
  static std::mutex mutex;
  static std::unique_ptr<Endpoint> endpoint;
  const std::lock_guard<std::mutex> lock(mutex);
  DT_ASSIGN_OR_RETURN(std::optional<ProcessPlace> place, FindPlace(&std::getenv));
  if (!place || place->size == 1) return static_cast<Endpoint*>(nullptr);
  if (!endpoint) {
    DT_ASSIGN_OR_RETURN(endpoint, Open(*std::move(place)));
  }
  return endpoint.get();
}

Endpoint::~Endpoint() {
  // Whoever exits in the middle of a world must not wait for the others, who wait for it.
  if (!broken() && open_worlds == 0) table_->close();
}

template <class Start>
absl::Status Transfers::Begin(const char* what, int64_t peer, int64_t bytes, bool always,
                              Start start) {
  if (bytes == 0 && !always) return absl::OkStatus();
  char why[512] = "";
  requests_.push_back(nullptr);
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  if (start(&requests_.back(), why, sizeof(why)) == 0) return absl::OkStatus();
  return RankLocal(
      absl::InternalError(absl::StrCat("a message ", what, " rank ", peer, ": ", why)));
}

absl::Status Transfers::Send(int64_t peer, int64_t channel, const void* data, int64_t bytes,
                             bool always) {
  return Begin("to", peer, bytes, always, [&](auto... rest) {
    return endpoint_.table_->send(peer, channel, data, bytes, rest...);
  });
}

absl::Status Transfers::Recv(int64_t peer, int64_t channel, void* data, int64_t bytes,
                             bool always) {
  return Begin("from", peer, bytes, always, [&](auto... rest) {
    return endpoint_.table_->recv(peer, channel, data, bytes, rest...);
  });
}

absl::StatusOr<bool> Transfers::Done() {
  char why[512] = "";
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  bool all = true;
  for (size_t i = first_; i < requests_.size(); ++i) {
    if (requests_[i] == nullptr) {
      if (all) first_ = i + 1;
      continue;
    }
    int done = 0;
    if (endpoint_.table_->test(&requests_[i], &done, why, sizeof(why)) != 0) {
      return RankLocal(absl::InternalError(absl::StrCat("a message: ", why)));
    }
    all = all && done != 0;
    if (all) first_ = i + 1;
  }
  return all;
}

void Transfers::Abandon(std::shared_ptr<void> memory) {
  const std::lock_guard<std::mutex> lock(endpoint_.mutex_);
  bool any = false;
  for (void*& request : requests_) {
    if (request == nullptr) continue;
    any = true;
    endpoint_.table_->forget(&request);
  }
  if (any && memory) endpoint_.kept_.push_back(std::move(memory));
  requests_.clear();
  first_ = 0;
}

}  // namespace dtensor
