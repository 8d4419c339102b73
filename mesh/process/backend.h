// The communicator of ranks that are processes. Private to mesh/.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/comm_backend.h"

namespace dtensor {

class ProcessGroup;
class World;
struct GroupRequest;

// That of a group of a ProcessWorld. Unless it `moves` its calls only agree: they end as they
// would, and move nothing. Throws what ProcessWorld::GroupOf refuses.
std::unique_ptr<CommBackend> MakeProcessBackend(World& world, const GroupRequest& group,
                                                bool moves);

// World::Exchange among the members of a group, in step with its collectives.
absl::StatusOr<std::vector<std::string>> ExchangeBytes(const std::shared_ptr<ProcessGroup>& group,
                                                       const std::string& label,
                                                       absl::string_view what_for,
                                                       std::string mine);

}  // namespace dtensor
