#include "dtensor/mesh/backends.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "dtensor/mesh/flight.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

#define DT_COMM_BACKEND(entry) BackendEntry entry();
#include "dtensor/mesh/backends.inc"
#undef DT_COMM_BACKEND

namespace {

absl::Span<const BackendEntry> Backends() {
  static const BackendEntry entries[] = {
#define DT_COMM_BACKEND(entry) entry(),
#include "dtensor/mesh/backends.inc"
#undef DT_COMM_BACKEND
  };
  return entries;
}

}  // namespace

absl::StatusOr<bool> LogsComm() {
  const char* text = std::getenv("DTENSOR_LOG");
  if (text == nullptr || *text == '\0') return false;
  if (absl::string_view(text) == "comm") return true;
  return absl::InvalidArgumentError(
      absl::StrCat("DTENSOR_LOG is \"", text, "\": give comm, or unset it"));
}

namespace {

void Log(const BackendEntry& chosen, const GroupRequest& group, const CommCaps& caps) {
  const std::string line = absl::StrCat("comm: ", RankNames(group.ranks), " as ", group.label, ": ",
                                        chosen.name, " (", chosen.what, "); ", ToString(caps));
  std::fprintf(stderr, "%s\n", line.c_str());
}

}  // namespace

absl::StatusOr<std::unique_ptr<CommBackend>> MakeBackend(World& world, const GroupRequest& group,
                                                         const WrapBackend& wrap) {
  DT_ASSIGN_OR_RETURN(const bool logs, LogsComm());
  for (const BackendEntry& b : Backends()) {
    if (!b.serves(world, group)) continue;
    std::unique_ptr<CommBackend> backend;
    try {
      backend = b.make(world, group);
    } catch (...) {
      return CurrentException();
    }
    if (wrap) backend = wrap(std::move(backend));
    if (logs && group.index == 0) Log(b, group, backend->caps());
    return backend;
  }
  const auto name = [](std::string* out, const BackendEntry& b) { absl::StrAppend(out, b.name); };
  return absl::UnimplementedError(absl::StrCat("no communicator for ", RankNames(group.ranks),
                                               " as ", group.label, " on their device; there are ",
                                               absl::StrJoin(Backends(), ", ", name)));
}

}  // namespace dtensor
