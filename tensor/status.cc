#include "tensor/status.h"

#include <cstdio>
#include <cstdlib>

namespace dtensor {

static constexpr char kNoValues[] = "dtensor/no_values";  // a payload

absl::Status NoValues(absl::string_view message) {
  absl::Status status = absl::FailedPreconditionError(message);
  status.SetPayload(kNoValues, absl::Cord());
  return status;
}

bool IsNoValues(const absl::Status& status) { return status.GetPayload(kNoValues).has_value(); }

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) throw Error(status);
}

void CheckFailed(const char* file, int line, const char* condition, const std::string& message) {
  std::fprintf(stderr, "%s:%d: invariant broken: %s %s\n", file, line, condition, message.c_str());
  std::abort();
}

void Throw(const absl::Status& status) {
  ThrowIfError(status);
  CheckFailed(__FILE__, __LINE__, "!status.ok()", "Throw needs an error");
}

}  // namespace dtensor
