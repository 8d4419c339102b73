#include "dtensor/mesh/timeout.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace dtensor {

absl::StatusOr<absl::Duration> TimeoutFrom(absl::string_view text, absl::Duration otherwise) {
  if (text.empty()) return otherwise;
  double seconds = 0;
  if (!absl::SimpleAtod(text, &seconds) || !(seconds > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("DTENSOR_TIMEOUT_S is \"", text, "\": give a number of seconds above 0"));
  }
  return absl::Seconds(seconds);
}

}  // namespace dtensor
