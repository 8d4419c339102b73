#include "examples/output_files.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;

// Whether files can be made in the folder, or in the nearest one above it that is there.
absl::Status CheckFolder(const std::string& path) {
  std::error_code error;
  fs::path at = fs::weakly_canonical(fs::absolute(path, error), error);
  while (!fs::exists(at, error) && at.has_relative_path()) at = at.parent_path();
  const auto cannot = [&](const char* why) {
    return absl::UnavailableError(
        absl::StrCat(path, " cannot be written: ", at.string(), ": ", why));
  };
  if (!fs::is_directory(at, error)) return cannot(std::strerror(ENOTDIR));
  // Asked by trying: root may write where the permissions say no, but not on every file system.
  std::string name = (at / ".writable.XXXXXX").string();
  const int descriptor = mkstemp(name.data());
  if (descriptor < 0) return cannot(std::strerror(errno));
  close(descriptor);
  unlink(name.c_str());
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckOutputs(const OutputFiles& outputs) {
  std::vector<NamedPath> all = outputs.reads;
  const auto differs = [&](const NamedPath& mine) -> absl::Status {
    for (const NamedPath& other : all) {
      if (other.second.empty() || !SameFile(mine.second, other.second)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(mine.first, " and ", other.first, " name the same file, ", mine.second));
    }
    all.push_back(mine);
    return absl::OkStatus();
  };
  for (const std::vector<NamedPath>* group : {&outputs.files, &outputs.folders}) {
    for (const NamedPath& mine : *group) {
      if (mine.second.empty()) continue;
      DT_RETURN_IF_ERROR(differs(mine));
      const absl::Status writable =
          group == &outputs.files ? CheckWritable(mine.second) : CheckFolder(mine.second);
      if (!writable.ok()) return Prefixed(mine.first, writable);
    }
  }
  return absl::OkStatus();
}

}  // namespace dtensor
