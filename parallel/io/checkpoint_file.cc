#include "dtensor/parallel/io/checkpoint_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/region.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor::internal {
namespace {

const char* SafetensorsName(DType t) {
  switch (t) {
    case DType::kF64:
      return "F64";
    case DType::kF32:
      return "F32";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kU8:
      return "U8";
    case DType::kBool:
      return "BOOL";
  }
  return "";
}

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
    while (bytes > 0) {
      const ssize_t n = pwrite(fd_, from, static_cast<size_t>(bytes), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return Failed(path_, "written", n < 0 ? errno : ENOSPC);
      from += n, offset += n, bytes -= n;
    }
    return absl::OkStatus();
  }
  absl::Status Read(char* to, int64_t bytes, int64_t offset) const {
    while (bytes > 0) {
      const ssize_t n = pread(fd_, to, static_cast<size_t>(bytes), offset);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return Failed(path_, "read", errno);
      if (n == 0) return Damaged(path_, absl::StrCat("ends at byte ", offset));
      to += n, offset += n, bytes -= n;
    }
    return absl::OkStatus();
  }

 private:
  const std::string path_;
  const int fd_;
};

uint64_t Mix(uint64_t v) {
  v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9;
  v = (v ^ v >> 27) * 0x94D049BB133111EB;
  return v ^ v >> 31;
}

template <class Bits>
uint64_t SumOf(const void* elements, int64_t first, int64_t count) {
  const auto* at = static_cast<const char*>(elements);
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    Bits bits;
    std::memcpy(&bits, at + i * static_cast<int64_t>(sizeof(Bits)), sizeof(Bits));
    sum += Mix((bits + 1) * 0x9E3779B97F4A7C15 ^
               static_cast<uint64_t>(first + i) * 0xD6E8FEB86659FD93);
  }
  return sum;
}

// The runs of one block: positions of the dims before `inner`, and intervals of that one, which
// are whole rows of everything behind it.
class BlockRuns {
 public:
  BlockRuns(const Block& block, const Shape& whole) : block_(block) {
    for (int d = static_cast<int>(whole.size()) - 1; d >= 0; --d) {
      strides_.insert(strides_.begin(), row_);
      cut_ = d;
      row_ *= whole[d];
      if (block.index[d].size() != 1 || block.index[d][0].length() != whole[d]) break;
    }
    if (cut_ > 0) {
      for (int d = cut_ - 1; d >= 0; --d) {
        strides_.insert(strides_.begin(), row_);
        row_ *= whole[d];
      }
    }
  }

  absl::Status Visit(absl::FunctionRef<absl::Status(const Run&)> visit) const {
    if (block_.index.empty()) return visit({0, block_.offset, 1});
    return Descend(0, 0, block_.offset, visit);
  }

 private:
  absl::Status Descend(int dim, int64_t whole, int64_t part,
                       absl::FunctionRef<absl::Status(const Run&)> visit) const {
    const int64_t stride = strides_[dim];
    for (const Interval& i : block_.index[dim]) {
      if (dim == cut_) {
        DT_CHECK(i.length() == 1 || block_.strides[dim] == stride);
        DT_RETURN_IF_ERROR(visit({whole + i.start * stride, part, i.length() * stride}));
        part += i.length() * block_.strides[dim];
        continue;
      }
      for (int64_t k = i.start; k < i.end; ++k, part += block_.strides[dim]) {
        DT_RETURN_IF_ERROR(Descend(dim + 1, whole + k * stride, part, visit));
      }
    }
    return absl::OkStatus();
  }

  const Block& block_;
  std::vector<int64_t> strides_;  // of the whole tensor
  int64_t row_ = 1;
  int cut_ = 0;
};

}  // namespace

absl::StatusOr<FileLayout> LayOut(std::string file, std::vector<FileTensor> tensors) {
  FileLayout layout = {.file = std::move(file), .tensors = std::move(tensors)};
  std::stable_sort(
      layout.tensors.begin(), layout.tensors.end(),
      [](const FileTensor& a, const FileTensor& b) { return SizeOf(a.dtype) > SizeOf(b.dtype); });
  nlohmann::ordered_json head = nlohmann::ordered_json::object();
  int64_t end = 0;
  for (FileTensor& t : layout.tensors) {
    DT_ASSIGN_OR_RETURN(const int64_t bytes, CheckedBytes(t.shape, t.dtype));
    t.offset = end;
    if (__builtin_add_overflow(end, bytes, &end)) {
      return absl::InvalidArgumentError(absl::StrCat(layout.file, ": too many bytes"));
    }
    head[t.name] = {{"dtype", SafetensorsName(t.dtype)},
                    {"shape", std::vector<int64_t>(t.shape.begin(), t.shape.end())},
                    {"data_offsets", {t.offset, end}}};
  }
  std::string text = head.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  for (int i = 0; i < 8; ++i) layout.head.push_back(static_cast<char>(text.size() >> 8 * i & 0xFF));
  layout.head += text;
  for (FileTensor& t : layout.tensors) t.offset += static_cast<int64_t>(layout.head.size());
  layout.bytes = static_cast<int64_t>(layout.head.size()) + end;
  return layout;
}

absl::Status ForEachRun(const Spec& spec, absl::FunctionRef<absl::Status(const Run&)> visit) {
  for (const Block& block : RegionOf(spec, spec.coordinate())) {
    DT_RETURN_IF_ERROR(BlockRuns(block, spec.shape()).Visit(visit));
  }
  return absl::OkStatus();
}

bool Writes(const Spec& spec) {
  if (spec.mesh().is_self()) return RankContext::Current().rank() == 0;
  if (!spec.in_mesh()) return false;
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).cuts() && spec.coordinate()[m] != 0) return false;
  }
  return true;
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
    DT_ASSIGN_OR_RETURN(Tensor part, values[i].local().To(DeviceType::kCpu));
    DT_ASSIGN_OR_RETURN(part, part.Contiguous());
    const auto* from = static_cast<const char*>(part.data());
    const int64_t size = SizeOf(spec.dtype()), offset = layout.tensors[i].offset;
    const auto write = [&](const Run& run) {
      const char* elements = from + run.part * size;
      sums[i] += ElementSum(elements, run.whole, run.count, size);
      return file.Write(elements, run.count * size, offset + run.whole * size);
    };
    DT_RETURN_IF_ERROR(ForEachRun(spec, write));
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
    const auto take = [&](const Run& run) -> absl::Status {
      char* elements = to + run.part * size;
      DT_RETURN_IF_ERROR(file.Read(elements, run.count * size, offset + run.whole * size));
      if (mine) read.sums[i] += ElementSum(elements, run.whole, run.count, size);
      return absl::OkStatus();
    };
    DT_RETURN_IF_ERROR(ForEachRun(spec, take));
  }
  return read;
}

}  // namespace dtensor::internal
