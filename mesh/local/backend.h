// The local backend: the ranks of a group are threads. Private to mesh/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

class LocalGroup;
class World;
struct GroupRequest;

// A way for data between ranks that are threads, other than through each other's memory. Who meets,
// compares calls, waits, aborts and reports stays the local backend.
class Transport {
 public:
  virtual ~Transport() = default;
  virtual const CommCaps& caps() const = 0;  // without overlap
  // What this rank gives of a call, before it meets the others; not asked of a receiver.
  virtual absl::Status Give(const CollectiveCall& call) = 0;
  // What it gets: all have given, and their calls agree. Nobody begins the group's next but one
  // call before all have taken. An error of either aborts the group.
  virtual absl::Status Take(const CollectiveCall& call) = 0;
};

// The local backend of a group of a ThreadWorld; null: through the ranks' memory.
std::unique_ptr<CommBackend> MakeLocalBackend(World& world, const GroupRequest& group,
                                              std::unique_ptr<Transport> transport);

// The same whose calls only agree: they end as they would, and move nothing.
std::unique_ptr<CommBackend> MakeLocalAgreement(World& world, const GroupRequest& group);

// World::Exchange among the members of a group: in step with its collectives, and as they are
// compared, recorded and ended.
absl::StatusOr<std::vector<std::string>> ExchangeBytes(std::shared_ptr<LocalGroup> group, int index,
                                                       const std::string& label,
                                                       absl::string_view what_for,
                                                       std::string mine);

}  // namespace dtensor
