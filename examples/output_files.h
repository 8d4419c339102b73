// What a program is going to write, asked about before the work and not after it.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace dtensor {

// The name of a flag or setting ("--log", "metrics.log") and the path that it has; an empty path is
// none.
using NamedPath = std::pair<std::string, std::string>;

struct OutputFiles {
  std::vector<NamedPath> reads = {};    // files and folders that must not be written over
  std::vector<NamedPath> files = {};    // each is written, by WriteFile or line by line
  std::vector<NamedPath> folders = {};  // made if they are not there, and written into
};
// Errors name the flags and the path: Unavailable for what cannot be written, InvalidArgument for
// two that are one file or folder. Changes nothing.
absl::Status CheckOutputs(const OutputFiles& outputs);

}  // namespace dtensor
