// Bytes of an open file at a place, whatever the system gives at a time.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace dtensor::internal {

// Errors: Unavailable, rank-local: "PATH cannot be written: reason".
absl::Status WriteBytes(int descriptor, const std::string& path, int64_t at, const char* from,
                        int64_t bytes);
// How many there were before the file's end. Errors: Unavailable, rank-local: "PATH cannot be read:
// reason".
absl::StatusOr<int64_t> ReadUpTo(int descriptor, const std::string& path, int64_t at, char* to,
                                 int64_t bytes);
// All of them. Errors: those above, also for an end that comes too early.
absl::Status ReadBytes(int descriptor, const std::string& path, int64_t at, char* to,
                       int64_t bytes);

}  // namespace dtensor::internal
