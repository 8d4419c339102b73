// NearestNames: suggestions for misspelt names.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace dtensor {

// Edits (insert, delete, replace) that turn a into b.
int EditDistance(absl::string_view a, absl::string_view b);
// At most `count` of `known`, nearest first.
std::vector<std::string> NearestNames(absl::string_view name, const std::vector<std::string>& known,
                                      int count = 3);

}  // namespace dtensor
