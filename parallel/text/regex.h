// Regex: a regular expression over UTF-8, in the syntax of Oniguruma (parallel/text/oniguruma.h).
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// Immutable and cheap to copy; may be used by many threads at once.
class Regex {
 public:
  // `literal`: the pattern stands for itself. Errors: InvalidArgument with the place in the
  // pattern; Unimplemented naming what is not served.
  static absl::StatusOr<Regex> Compile(absl::string_view pattern, bool literal = false);
  // All matches, left to right, as [start, end) in bytes; an empty one not where the last one ends.
  // `text` must be well-formed UTF-8.
  //   Errors: ResourceExhausted where the pattern tries too much.
  absl::StatusOr<std::vector<std::pair<size_t, size_t>>> FindAll(absl::string_view text) const;

 private:
  struct Code;
  std::shared_ptr<const Code> code_;
};

}  // namespace dtensor
