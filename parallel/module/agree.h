// What every rank of the world has a list of, and all must have alike. Private to parallel/.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor::internal {

// What each rank says, by rank; every rank must call it. `names`: of what it speaks.
//   Comm:   one exchange of `mine` and eight bytes; of names where they differ.
//   Errors: FailedPrecondition, alike on all ranks, naming `who` and the first of `names` that one
//           rank has and rank 0 has not there, or the other way round.
absl::StatusOr<std::vector<std::string>> ExchangeListed(absl::string_view who,
                                                        const std::vector<std::string>& names,
                                                        const std::string& mine);

}  // namespace dtensor::internal
