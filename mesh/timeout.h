// How long ranks wait for each other, as the environment says.
#pragma once

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace dtensor {

// Of what DTENSOR_TIMEOUT_S holds: seconds; `otherwise` where it is empty.
//   Errors: InvalidArgument for what is no number above 0.
absl::StatusOr<absl::Duration> TimeoutFrom(absl::string_view text, absl::Duration otherwise);

}  // namespace dtensor
