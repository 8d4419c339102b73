#include "dtensor/parallel/io/file_bytes.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

absl::Status Failed(const std::string& path, const char* what, const char* why) {
  return RankLocal(absl::UnavailableError(absl::StrCat(path, " cannot be ", what, ": ", why)));
}

}  // namespace

absl::Status WriteBytes(int descriptor, const std::string& path, int64_t at, const char* from,
                        int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pwrite(descriptor, from, static_cast<size_t>(bytes), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return Failed(path, "written", std::strerror(n < 0 ? errno : ENOSPC));
    from += n, at += n, bytes -= n;
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> ReadUpTo(int descriptor, const std::string& path, int64_t at, char* to,
                                 int64_t bytes) {
  int64_t done = 0;
  while (done < bytes) {
    const ssize_t n = pread(descriptor, to + done, static_cast<size_t>(bytes - done), at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Failed(path, "read", std::strerror(errno));
    if (n == 0) break;
    done += n;
  }
  return done;
}

absl::Status ReadBytes(int descriptor, const std::string& path, int64_t at, char* to,
                       int64_t bytes) {
  DT_ASSIGN_OR_RETURN(const int64_t done, ReadUpTo(descriptor, path, at, to, bytes));
  return done == bytes ? absl::OkStatus() : Failed(path, "read", "it has become shorter");
}

}  // namespace dtensor::internal
