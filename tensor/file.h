// Whole files: read within bounds, and written so that what was there is never half lost.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// The contents of a regular file. Errors: NotFound for what cannot be opened or read and for what
// is no regular file (a folder, a device, a pipe: these may never end); InvalidArgument for more
// than `most_bytes`. Messages start with the path.
absl::StatusOr<std::string> ReadFile(const std::string& path,
                                     int64_t most_bytes = int64_t{1} << 30);

// Puts `text` in the place of what `path` held: a new file is written beside it, brought to the
// disk and renamed, so a reader sees the old contents or the new ones, whatever happens meanwhile.
// The old file's permissions stay, a symbolic link keeps pointing to it, and devices, pipes and
// what is open already (/dev/stdout, also where it is a file) are written to directly. Errors:
// Unavailable with the path and the system's reason; the old file is as it was and nothing is left
// beside it.
absl::Status WriteFile(const std::string& path, absl::string_view text);

// Whether WriteFile could, asked before long work instead of after it. Changes nothing. Errors as
// WriteFile's, as far as they can be foreseen (a disk may fill up later).
absl::Status CheckWritable(const std::string& path);

// Whether both names lead to one file, which need not exist yet.
bool SameFile(const std::string& a, const std::string& b);

}  // namespace dtensor
