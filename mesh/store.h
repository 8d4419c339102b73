// Store: a few small texts that the ranks of a world share. How they find each other, and what they
// tell each other where no communicator is: names of groups, aborts, reports. Not for tensors.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace dtensor {

// One rank's handle. Keys and values are any bytes (keys that begin with "dtensor/" are the
// library's own); every call is atomic, and what it did all ranks
// see that ask later. Thread-safe. Errors name the key, and who asked; those of waits also the
// deadline.
class Store {
 public:
  using Key = absl::string_view;
  virtual ~Store() = default;

  virtual absl::Status Set(Key key, absl::string_view value) = 0;
  // The value, as soon as there is one. Errors: DeadlineExceeded; Aborted if a rank failed before.
  virtual absl::StatusOr<std::string> Get(Key key, absl::Time deadline) = 0;
  // Until all keys are there. Errors: as Get, naming those that are not.
  virtual absl::Status Wait(absl::Span<const std::string> keys, absl::Time deadline) = 0;
  // Adds n to a decimal number (absent: 0) and returns the sum. Errors: InvalidArgument if the
  // value is no number; OutOfRange if the sum is none of 64 bits.
  virtual absl::StatusOr<int64_t> Add(Key key, int64_t n) = 0;
  // Sets `desired` where the value is `expected`; an absent key is as good as an empty value.
  // Returns what was there.
  virtual absl::StatusOr<std::string> CompareExchange(Key key, absl::string_view expected,
                                                      absl::string_view desired) = 0;
};

}  // namespace dtensor
