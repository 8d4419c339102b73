// How stores name keys, and what they say of waits that end without a value. Private to mesh/.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "dtensor/tensor/text.h"

namespace dtensor::store {

// Keys and values are any bytes; messages are text.
inline std::string Quoted(absl::string_view bytes) {
  return absl::StrCat("\"", absl::CHexEscape(bytes.substr(0, 200)), "\"");
}

// "key \"a\"", "keys \"a\", \"b\"".
inline std::string KeyNames(absl::Span<const std::string> keys) {
  return absl::StrCat(keys.size() == 1 ? "key " : "keys ",
                      JoinSome(keys, [](std::string* out, const std::string& key) {
                        absl::StrAppend(out, Quoted(key));
                      }));
}

// `who` has waited since `start`, and at the deadline `what` is not there.
inline absl::Status Late(absl::string_view who, absl::string_view what, absl::Time start,
                         absl::Time deadline) {
  return absl::DeadlineExceededError(absl::StrCat(
      "store: ", who, " waited for ", what, " until ", absl::FormatTime(deadline), ", ",
      absl::FormatDuration(absl::Trunc(absl::Now() - start, absl::Milliseconds(1))),
      "; nobody has set it"));
}

// What Add says of a value that is no number, and of a sum that does not fit.
inline std::string NoNumber(absl::string_view who, absl::string_view key, absl::string_view value) {
  return absl::StrCat("store: ", who, " adds to key ", Quoted(key), ", which is ", Quoted(value),
                      ", no number");
}
inline std::string TooLarge(absl::string_view who, absl::string_view key, int64_t n) {
  return absl::StrCat("store: ", who, " adds ", n, " to key ", Quoted(key), ": too large");
}

}  // namespace dtensor::store
