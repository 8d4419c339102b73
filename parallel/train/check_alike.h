// CheckAlike: whether the ranks were started alike, so that they train one model.
#pragma once

#include <map>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace dtensor::internal {

// Compares what every rank of the world brings with what rank 0 brings; all ranks call it.
//   `mine`: a name and a value for each thing that must be the same ("seed", "7").
//   Errors: FailedPrecondition on every rank, with the first rank that differs and what differs:
//   "[who] rank 1 has seed 7, rank 0 has 0"; those of the exchange.
absl::Status CheckAlike(absl::string_view who, const std::map<std::string, std::string>& mine);

}  // namespace dtensor::internal
