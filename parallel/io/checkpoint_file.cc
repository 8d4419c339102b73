#include "dtensor/parallel/io/checkpoint_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/file_bytes.h"
#include "dtensor/parallel/io/pieces.h"
#include "dtensor/parallel/io/safetensors.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

absl::Status Failed(const std::string& path, const char* what, int error) {
  return RankLocal(
      absl::UnavailableError(absl::StrCat(path, " cannot be ", what, ": ", std::strerror(error))));
}
absl::Status Damaged(const std::string& path, const std::string& what) {
  return RankLocal(absl::DataLossError(absl::StrCat(path, " ", what)));
}

class Descriptor {
 public:
  Descriptor(const std::string& path, int flags)
      : path_(path), fd_(open(path.c_str(), flags | O_CLOEXEC, 0666)) {}
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  int fd() const { return fd_; }

  absl::Status Write(const char* from, int64_t bytes, int64_t offset) const {
    return WriteBytes(fd_, path_, offset, from, bytes);
  }
  absl::Status Read(char* to, int64_t bytes, int64_t offset) const {
    DT_ASSIGN_OR_RETURN(const int64_t done, ReadUpTo(fd_, path_, offset, to, bytes));
    if (done == bytes) return absl::OkStatus();
    return Damaged(path_, absl::StrCat("ends at byte ", offset + done));
  }

 private:
  const std::string path_;
  const int fd_;
};

template <class Bits>
uint64_t SumOf(const void* elements, int64_t first, int64_t count) {
  const auto* at = static_cast<const char*>(elements);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, at + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    sum += Scramble((bits + 1) * 0x9E3779B97F4A7C15 ^
                    static_cast<uint64_t>(first + i) * 0xD6E8FEB86659FD93);
  }
  return sum;
}

}  // namespace

absl::StatusOr<FileLayout> LayOut(std::string file, std::vector<FileTensor> tensors) {
  FileLayout layout = {.file = std::move(file), .tensors = std::move(tensors)};
  std::map<std::string, SafetensorsEntry> entries;
  int64_t data = 0;
  for (const FileTensor& t : layout.tensors) {
    DT_ASSIGN_OR_RETURN(const int64_t bytes, CheckedBytes(t.shape, t.dtype));
    if (__builtin_add_overflow(data, bytes, &data) ||
        !entries
             .try_emplace(t.name, SafetensorsEntry{std::string(SafetensorsName(t.dtype)), t.shape})
             .second) {
      return absl::InvalidArgumentError(
          absl::StrCat(layout.file, ": ", t.name, " is there twice, or there are too many bytes"));
    }
  }
  layout.head = SafetensorsHeader(&entries, {});
  const auto head = static_cast<int64_t>(layout.head.size());
  for (FileTensor& t : layout.tensors) t.offset = head + entries[t.name].begin;
  std::stable_sort(layout.tensors.begin(), layout.tensors.end(),
                   [](const FileTensor& a, const FileTensor& b) { return a.offset < b.offset; });
  layout.bytes = head + data;
  return layout;
}

bool Writes(const Spec& spec) {
  return IsFirstHolder(spec) && (!spec.mesh().is_self() || RankContext::Current().rank() == 0);
}

uint64_t ElementSum(const void* elements, int64_t first, int64_t count, int64_t element_bytes) {
  switch (element_bytes) {
    case 8:
      return SumOf<uint64_t>(elements, first, count);
    case 4:
      return SumOf<uint32_t>(elements, first, count);
    case 2:
      return SumOf<uint16_t>(elements, first, count);
    default:
      return SumOf<uint8_t>(elements, first, count);
  }
}

absl::Status CreateFile(const std::string& path, const FileLayout& layout) {
  const Descriptor file(path, O_WRONLY | O_CREAT | O_EXCL);
  if (file.fd() < 0) return Failed(path, "written", errno);
  const int full = posix_fallocate(file.fd(), 0, layout.bytes);
  if (full == EINVAL || full == EOPNOTSUPP) {  // the file system cannot promise the room
    if (ftruncate(file.fd(), layout.bytes) != 0) return Failed(path, "written", errno);
  } else if (full != 0) {
    return Failed(path, "written", full);
  }
  return file.Write(layout.head.data(), static_cast<int64_t>(layout.head.size()), 0);
}

absl::StatusOr<std::vector<uint64_t>> WriteParts(const std::string& path, const FileLayout& layout,
                                                 const std::vector<DTensor>& values) {
  const Descriptor file(path, O_WRONLY);
  if (file.fd() < 0) return Failed(path, "written", errno);
  std::vector<uint64_t> sums(values.size(), 0);
  for (size_t i = 0; i < values.size(); ++i) {
    const Spec& spec = values[i].spec();
    if (!Writes(spec)) continue;
    DT_ASSIGN_OR_RETURN(const Tensor part, values[i].local().ToHost());
    const auto* from = static_cast<const char*>(part.data());
    const int64_t size = SizeOf(spec.dtype()), offset = layout.tensors[i].offset;
    for (const Stretch& s : LocalStretches(spec)) {
      sums[i] += ElementSum(from, s.start, s.length, size);
      DT_RETURN_IF_ERROR(file.Write(from, s.length * size, offset + s.start * size));
      from += s.length * size;
    }
  }
  if (fsync(file.fd()) != 0) return Failed(path, "written", errno);
  return sums;
}

absl::StatusOr<PartsRead> ReadParts(const std::string& path, const FileLayout& layout,
                                    const std::vector<SpecRef>& specs) {
  const Descriptor file(path, O_RDONLY | O_NONBLOCK);
  struct stat info;
  if (file.fd() < 0 || fstat(file.fd(), &info) != 0) return Failed(path, "read", errno);
  if (!S_ISREG(info.st_mode) || info.st_size != layout.bytes) {
    return Damaged(
        path, absl::StrCat("has ", info.st_size, " bytes, the checkpoint says ", layout.bytes));
  }
  std::string head(layout.head.size(), '\0');
  DT_RETURN_IF_ERROR(file.Read(head.data(), static_cast<int64_t>(head.size()), 0));
  if (head != layout.head) return Damaged(path, "has another head than the checkpoint says");
  PartsRead read = {std::vector<Tensor>(specs.size()), std::vector<uint64_t>(specs.size(), 0)};
  for (size_t i = 0; i < specs.size(); ++i) {
    const Spec& spec = *specs[i];
    if (!spec.in_mesh()) continue;
    DT_ASSIGN_OR_RETURN(read.parts[i], Tensor::Empty(spec.local_shape(), spec.dtype()));
    auto* to = static_cast<char*>(read.parts[i].data());
    const int64_t size = SizeOf(spec.dtype()), offset = layout.tensors[i].offset;
    const bool mine = Writes(spec);
    for (const Stretch& s : LocalStretches(spec)) {
      DT_RETURN_IF_ERROR(file.Read(to, s.length * size, offset + s.start * size));
      if (mine) read.sums[i] += ElementSum(to, s.start, s.length, size);
      to += s.length * size;
    }
  }
  return read;
}

absl::Status PutFolder(const std::string& from, const std::string& to, bool may_exchange) {
  std::error_code error;
  // What is no folder is not ours to remove.
  if (std::filesystem::is_regular_file(to, error)) return Failed(to, "written", ENOTDIR);
  if (!std::filesystem::exists(to, error)) {
    if (std::rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
    return Failed(to, "written", errno);
  }
  if (may_exchange &&
      renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    return absl::OkStatus();
  }
  if (may_exchange && errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
    return Failed(to, "written", errno);
  }
  const std::string old = to + ".old.partial";
  std::filesystem::remove_all(old, error);
  if (std::rename(to.c_str(), old.c_str()) != 0) return Failed(to, "written", errno);
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    const absl::Status failed = Failed(to, "written", errno);
    std::rename(old.c_str(), to.c_str());
    return failed;
  }
  std::filesystem::remove_all(old, error);
  return absl::OkStatus();
}

}  // namespace dtensor::internal
