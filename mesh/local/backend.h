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

// `device`: where the tensors of its calls are.
std::unique_ptr<CommBackend> MakeLocalBackend(std::shared_ptr<LocalGroup> group, int index,
                                              std::string label, DeviceType device = {});

// World::Exchange among the members of a group: in step with its collectives, and as they are
// compared, recorded and ended.
absl::StatusOr<std::vector<std::string>> ExchangeBytes(std::shared_ptr<LocalGroup> group, int index,
                                                       const std::string& label,
                                                       absl::string_view what_for,
                                                       std::string mine);

}  // namespace dtensor
