// How calls that should be one differ. Private to mesh/.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace dtensor {

// What one member of a group issued.
struct IssuedCall {
  uint64_t fingerprint = 0;
  std::string text;     // Describe(call, ranks)
  std::string label;    // of the mesh dims: "tp"
  uint64_t before = 0;  // calls of the other sort that came before it
};

// "ranks 0, 1 issued all_reduce(...); rank 2 issued all_gather(...)", and over which mesh dims or
// after how many of the `others`, the calls of the other sort, if that differs. `calls` by group
// index, `ranks` the world ranks.
std::string CallDifference(absl::Span<const IssuedCall> calls, absl::Span<const int64_t> ranks,
                           absl::string_view others = "deferred");

}  // namespace dtensor
