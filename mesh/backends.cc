#include "dtensor/mesh/backends.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/fake/backend.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/mesh/local/backend.h"
#include "dtensor/mesh/local/thread_world.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Backend {
  absl::string_view name, what;
  bool (*serves)(const World&, const GroupRequest&);
  std::unique_ptr<CommBackend> (*make)(World&, const GroupRequest&);
};

constexpr Backend kBackends[] = {
    {"fake", "nobody: there is no data, or there are no peers",
     [](const World& world, const GroupRequest& group) {
       return world.launcher() == Launcher::kFake || group.device == DeviceType::kMeta;
     },
     [](World&, const GroupRequest& group) { return MakeFakeBackend(group.index); }},
    {"local", "threads of one process, through each other's memory",
     [](const World& world, const GroupRequest& group) {
       return world.launcher() == Launcher::kThreads;
     },
     [](World& world, const GroupRequest& group) {
       return MakeLocalBackend(static_cast<ThreadWorld&>(world).GroupOf(group.ranks), group.index,
                               group.label, group.device);
     }},
};

absl::StatusOr<bool> Logs() {
  const char* text = std::getenv("DTENSOR_LOG");
  if (text == nullptr || *text == '\0') return false;
  if (absl::string_view(text) == "comm") return true;
  return absl::InvalidArgumentError(
      absl::StrCat("DTENSOR_LOG is \"", text, "\": give comm, or unset it"));
}

void Log(const Backend& chosen, const GroupRequest& group, const CommCaps& caps) {
  const std::string line = absl::StrCat("comm: ", RankNames(group.ranks), " as ", group.label, ": ",
                                        chosen.name, " (", chosen.what, "); ", ToString(caps));
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommBackend>> MakeBackend(World& world, const GroupRequest& group,
                                                         const WrapBackend& wrap) {
  DT_ASSIGN_OR_RETURN(const bool logs, Logs());
  for (const Backend& b : kBackends) {
    if (!b.serves(world, group)) continue;
    std::unique_ptr<CommBackend> backend = b.make(world, group);
    if (wrap) backend = wrap(std::move(backend));
    if (logs && group.index == 0) Log(b, group, backend->caps());
    return backend;
  }
  const auto name = [](std::string* out, const Backend& b) { absl::StrAppend(out, b.name); };
  return absl::UnimplementedError(absl::StrCat("no communicator for ", RankNames(group.ranks),
                                               " as ", group.label, " on their device; there are ",
                                               absl::StrJoin(kBackends, ", ", name)));
}

}  // namespace dtensor
