#include "dtensor/mesh/store/file_store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/store/text.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using store::Quoted;

namespace {

absl::Status Unavailable(absl::string_view path, absl::string_view why) {
  return RankLocal(absl::UnavailableError(absl::StrCat("store: ", path, ": ", why)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<FileStore>> FileStore::Open(std::string folder, std::string who) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return Unavailable(folder, error.message());
  std::unique_ptr<FileStore> store(new FileStore(std::move(folder), std::move(who)));
  DT_RETURN_IF_ERROR(store->Locked([] { return absl::OkStatus(); }));
  return store;
}

// The key in hexadecimal, cut into folders: names of files have a most of 255 bytes.
std::string FileStore::PathOf(Key key) const {
  const std::string hex = absl::BytesToHexString(key);
  std::string path = folder_ + "/keys";
  for (size_t at = 0; at < hex.size(); at += 200) absl::StrAppend(&path, "/", hex.substr(at, 200));
  return path + "/value";
}

absl::Status FileStore::Locked(absl::FunctionRef<absl::Status()> change) const {
  const std::string path = folder_ + "/lock";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return Unavailable(path, strerror(errno));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  int locked;
  do {
    locked = fcntl(fd, F_OFD_SETLKW, &lock);  // of this opening: threads exclude each other too
  } while (locked != 0 && errno == EINTR);
  const absl::Status status = locked == 0 ? change() : Unavailable(path, strerror(errno));
  close(fd);
  return status;
}

absl::StatusOr<std::string> FileStore::Read(Key key) const { return ReadFile(PathOf(key)); }

absl::Status FileStore::Write(Key key, absl::string_view value) const {
  const std::string path = PathOf(key);
  const std::string next = path + ".new";  // ours alone: the folder is locked
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  if (error) return Unavailable(path, error.message());
  FILE* file = fopen(next.c_str(), "wb");
  if (file == nullptr) return Unavailable(next, strerror(errno));
  const bool written = fwrite(value.data(), 1, value.size(), file) == value.size();
  if (fclose(file) != 0 || !written) return Unavailable(next, strerror(errno));
  if (rename(next.c_str(), path.c_str()) != 0) return Unavailable(path, strerror(errno));
  return absl::OkStatus();
}

absl::Status FileStore::Set(Key key, absl::string_view value) {
  return Locked([&] { return Write(key, value); });
}

absl::Status FileStore::Wait(absl::Span<const std::string> keys, absl::Time deadline) {
  const absl::Time start = absl::Now();
  absl::Duration pause = absl::Milliseconds(1);
  while (true) {
    std::vector<std::string> missing;
    for (const std::string& key : keys) {
      if (access(PathOf(key).c_str(), F_OK) != 0) missing.push_back(key);
    }
    if (missing.empty()) return absl::OkStatus();
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return store::Late(who_, store::KeyNames(missing), start, deadline);
    }
    absl::SleepFor(std::min(pause, left));
    pause = std::min(2 * pause, absl::Milliseconds(20));
  }
}

absl::StatusOr<std::string> FileStore::Get(Key key, absl::Time deadline) {
  DT_RETURN_IF_ERROR(Wait({std::string(key)}, deadline));
  return Read(key);
}

absl::StatusOr<int64_t> FileStore::Add(Key key, int64_t n) {
  int64_t sum = 0;
  DT_RETURN_IF_ERROR(Locked([&]() -> absl::Status {
    const absl::StatusOr<std::string> value = Read(key);
    if (value.ok() && !absl::SimpleAtoi(*value, &sum)) {
      return absl::InvalidArgumentError(store::NoNumber(who_, key, *value));
    }
    if (__builtin_add_overflow(sum, n, &sum)) {
      return absl::OutOfRangeError(store::TooLarge(who_, key, n));
    }
    return Write(key, absl::StrCat(sum));
  }));
  return sum;
}

absl::StatusOr<std::string> FileStore::CompareExchange(Key key, absl::string_view expected,
                                                       absl::string_view desired) {
  std::string before;
  DT_RETURN_IF_ERROR(Locked([&]() -> absl::Status {
    before = Read(key).value_or("");
    return before == expected ? Write(key, desired) : absl::OkStatus();
  }));
  return before;
}

}  // namespace dtensor
