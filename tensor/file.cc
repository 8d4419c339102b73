#include "dtensor/tensor/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;

// Closes a descriptor, and removes the file of that name unless it was kept.
class OpenFile {
 public:
  OpenFile(int descriptor, std::string unfinished)
      : descriptor_(descriptor), unfinished_(std::move(unfinished)) {}
  ~OpenFile() {
    if (descriptor_ >= 0) close(descriptor_);
    if (!unfinished_.empty()) unlink(unfinished_.c_str());
  }
  OpenFile(const OpenFile&) = delete;
  int descriptor() const { return descriptor_; }
  void Keep() { unfinished_.clear(); }

 private:
  int descriptor_;
  std::string unfinished_;
};

absl::Status CannotWrite(const std::string& path, int error) {
  return RankLocal(
      absl::UnavailableError(absl::StrCat(path, " cannot be written: ", std::strerror(error))));
}

absl::Status WriteAll(int descriptor, const std::string& path, absl::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(descriptor, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return CannotWrite(path, errno);
    text.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

// Where the bytes are to go: what a symbolic link points to, which need not exist.
std::string Target(const std::string& path) {
  std::error_code error;
  fs::path at = fs::absolute(path, error);
  // weakly_canonical takes a link to what does not exist for a file.
  constexpr int kMostLinks = 40;
  for (int links = 0; links < kMostLinks && !error && fs::is_symlink(at, error); ++links) {
    at = at.parent_path() / fs::read_symlink(at, error);
  }
  const fs::path whole = fs::weakly_canonical(at, error);
  return error ? path : whole.string();
}

// The descriptor of this process that a path names ("/dev/stdout", "/dev/fd/3"), or -1. What is
// redirected to a file has no other contents to be replaced: more is written there.
int DescriptorOf(absl::string_view path) {
  if (path == "/dev/stdout") return STDOUT_FILENO;
  if (path == "/dev/stderr") return STDERR_FILENO;
  int descriptor = -1;
  const bool by_number =
      absl::ConsumePrefix(&path, "/dev/fd/") || absl::ConsumePrefix(&path, "/proc/self/fd/");
  return by_number && absl::SimpleAtoi(path, &descriptor) ? descriptor : -1;
}

mode_t NewFileMode() {
  const mode_t mask = umask(0);
  umask(mask);
  return 0666 & ~mask;
}

// An empty file of its own name beside `target`.
absl::StatusOr<std::pair<int, std::string>> CreateBeside(const std::string& path,
                                                         const std::string& target) {
  std::string name = target + ".XXXXXX";
  int descriptor = mkostemp(name.data(), O_CLOEXEC);
  if (descriptor < 0 && errno == ENAMETOOLONG) {  // the name itself may just fit
    name = (fs::path(target).parent_path() / ".unfinished.XXXXXX").string();
    descriptor = mkostemp(name.data(), O_CLOEXEC);
  }
  if (descriptor < 0) return CannotWrite(path, errno);
  return std::pair(descriptor, name);
}

// Checks what is there already. True: something to be written to directly.
absl::StatusOr<bool> IsDirect(const std::string& path, const std::string& target, struct stat* old,
                              bool* exists) {
  *exists = stat(path.c_str(), old) == 0;
  if (!*exists)
    return fs::path(target).filename().empty() ? CannotWrite(path, EISDIR)
                                               : absl::StatusOr<bool>(false);
  if (S_ISDIR(old->st_mode)) return CannotWrite(path, EISDIR);
  if (access(path.c_str(), W_OK) != 0) return CannotWrite(path, errno);
  return !S_ISREG(old->st_mode);
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, int64_t most_bytes) {
  const auto problem = [&](const char* what) {
    return RankLocal(absl::NotFoundError(absl::StrCat(path, " cannot be read: ", what)));
  };
  const OpenFile file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK), "");
  struct stat info;
  if (file.descriptor() < 0 || fstat(file.descriptor(), &info) != 0) {
    return problem(std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) return problem("it is no regular file");
  std::string text;
  char buffer[1 << 16];
  while (const ssize_t n = read(file.descriptor(), buffer, sizeof(buffer))) {
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return problem(std::strerror(errno));
    text.append(buffer, static_cast<size_t>(n));
    if (static_cast<int64_t>(text.size()) <= most_bytes) continue;
    return RankLocal(
        absl::InvalidArgumentError(absl::StrCat(path, " has more than ", most_bytes, " bytes")));
  }
  return text;
}

absl::Status WriteFile(const std::string& path, absl::string_view text) {
  if (const int given = DescriptorOf(path); given >= 0) {
    (void)std::fflush(nullptr);  // what was printed stands before
    const OpenFile file(fcntl(given, F_DUPFD_CLOEXEC, 0), "");
    return file.descriptor() < 0 ? CannotWrite(path, errno)
                                 : WriteAll(file.descriptor(), path, text);
  }
  const std::string target = Target(path);
  struct stat old;
  bool exists;
  DT_ASSIGN_OR_RETURN(const bool direct, IsDirect(path, target, &old, &exists));
  if (direct) {
    const OpenFile file(open(path.c_str(), O_WRONLY | O_CLOEXEC), "");
    if (file.descriptor() < 0) return CannotWrite(path, errno);
    return WriteAll(file.descriptor(), path, text);
  }
  DT_ASSIGN_OR_RETURN(const auto beside, CreateBeside(path, target));
  OpenFile file(beside.first, beside.second);
  DT_RETURN_IF_ERROR(WriteAll(file.descriptor(), path, text));
  if (fchmod(file.descriptor(), exists ? old.st_mode & 07777 : NewFileMode()) != 0 ||
      fsync(file.descriptor()) != 0 || rename(beside.second.c_str(), target.c_str()) != 0) {
    return CannotWrite(path, errno);
  }
  file.Keep();
  return absl::OkStatus();
}

absl::Status CheckWritable(const std::string& path) {
  if (const int given = DescriptorOf(path); given >= 0) {
    const int flags = fcntl(given, F_GETFL);
    const bool reads_only = flags >= 0 && (flags & O_ACCMODE) == O_RDONLY;
    return flags < 0 || reads_only ? CannotWrite(path, EBADF) : absl::OkStatus();
  }
  const std::string target = Target(path);
  struct stat old;
  bool exists;
  DT_ASSIGN_OR_RETURN(const bool direct, IsDirect(path, target, &old, &exists));
  if (direct) return absl::OkStatus();
  DT_ASSIGN_OR_RETURN(const auto beside, CreateBeside(path, target));
  const OpenFile removed(beside.first, beside.second);
  return absl::OkStatus();
}

bool SameFile(const std::string& a, const std::string& b) {
  // "DIR/" is DIR, also before it is there.
  const auto place = [](const std::string& path) {
    const fs::path target = Target(path);
    return target.has_filename() ? target : target.parent_path();
  };
  return place(a) == place(b);
}

}  // namespace dtensor
