#include "dtensor/parallel/data/token_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr char kMagic[] = "DTTOKENS";
constexpr int64_t kHead = 32;
constexpr uint64_t kVersion = 1;

void Put(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> 8 * i & 0xFF));
}
uint64_t Get(const char* from, int bytes) {
  uint64_t value = 0;
  for (int i = 0; i < bytes; ++i) value |= uint64_t{static_cast<unsigned char>(from[i])} << 8 * i;
  return value;
}

absl::Status Unreadable(const std::string& path, absl::string_view why) {
  return RankLocal(absl::NotFoundError(absl::StrCat(path, " cannot be read: ", why)));
}
template <class... Words>
absl::Status Bad(const std::string& path, const Words&... words) {
  return RankLocal(absl::InvalidArgumentError(absl::StrCat(path, " ", words...)));
}

// Errors: Unavailable, also for an end that comes too early.
absl::Status ReadAt(int descriptor, const std::string& path, int64_t offset, char* out,
                    int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pread(descriptor, out, static_cast<size_t>(bytes), offset);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      return RankLocal(absl::UnavailableError(
          absl::StrCat(path, " cannot be read at byte ", offset, ": ",
                       n < 0 ? std::strerror(errno) : "it has become shorter")));
    }
    out += n, offset += n, bytes -= n;
  }
  return absl::OkStatus();
}

// Tokens of so many bytes each, and the largest of them.
absl::StatusOr<std::string> Packed(const std::string& path, absl::Span<const int64_t> tokens,
                                   int width, int64_t* largest) {
  std::string bytes;
  bytes.reserve(tokens.size() * static_cast<size_t>(width));
  *largest = 0;
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] < 0 || tokens[i] >> 8 * width != 0) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": token ", tokens[i], " at ", i,
                                                     " does not fit into ", width, " bytes"));
    }
    *largest = std::max(*largest, tokens[i]);
    Put(static_cast<uint64_t>(tokens[i]), width, &bytes);
  }
  return bytes;
}

}  // namespace

// A file that is open, or the bytes of tokens in memory.
struct TokenFile::Handle {
  Handle(std::string p, int d, std::string m = "")
      : path(std::move(p)), descriptor(d), memory(std::move(m)) {}
  ~Handle() {
    if (descriptor >= 0) close(descriptor);
  }
  Handle(const Handle&) = delete;
  absl::Status Read(int64_t offset, char* out, int64_t bytes) const {
    if (descriptor >= 0) return ReadAt(descriptor, path, offset, out, bytes);
    std::memcpy(out, memory.data() + offset, static_cast<size_t>(bytes));
    return absl::OkStatus();
  }
  const std::string path;
  const int descriptor;
  const std::string memory;
};

const std::string& TokenFile::path() const { return file_->path; }

absl::StatusOr<TokenFile> TokenFile::OpenRegular(const std::string& path) {
  TokenFile file;
  file.file_ =
      std::make_shared<const Handle>(path, open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat info;
  if (file.file_->descriptor < 0 || fstat(file.file_->descriptor, &info) != 0) {
    return Unreadable(path, strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) return Unreadable(path, "it is no regular file");
  file.count_ = info.st_size;
  return file;
}

absl::StatusOr<TokenFile> TokenFile::OpenBytes(const std::string& path) {
  return OpenRegular(path);
}

absl::StatusOr<TokenFile> TokenFile::Of(std::string name, absl::Span<const int64_t> tokens) {
  TokenFile file;
  file.width_ = 4;
  DT_ASSIGN_OR_RETURN(std::string bytes, Packed(name, tokens, 4, &file.largest_));
  file.count_ = static_cast<int64_t>(tokens.size());
  file.file_ = std::make_shared<const Handle>(std::move(name), -1, std::move(bytes));
  return file;
}

absl::StatusOr<TokenFile> TokenFile::Open(const std::string& path) {
  DT_ASSIGN_OR_RETURN(TokenFile file, OpenRegular(path));
  const int64_t size = file.count_;
  char head[kHead] = {};
  DT_RETURN_IF_ERROR(file.file_->Read(0, head, std::min<int64_t>(kHead, size)));
  if (std::memcmp(head, kMagic, 8) != 0) {
    if (!absl::EndsWith(path, ".bin")) return file;
    return Bad(path,
               "does not begin with the head of a token file (DTTOKENS), and what width its tokens "
               "have is not known: write it with WriteTokens");
  }
  if (size < kHead) {
    return Bad(path, "is a token file of ", size, " bytes, its head alone has ", kHead);
  }
  const uint64_t version = Get(head + 8, 4), width = Get(head + 12, 4), count = Get(head + 16, 8);
  if (version != kVersion) {
    return Bad(path, "is a token file of version ", version, ", this program reads ", kVersion);
  }
  if (width != 2 && width != 4) return Bad(path, "says ", width, " bytes per token, not 2 or 4");
  const auto tokens = static_cast<uint64_t>(size - kHead);
  if (count != tokens / width || tokens % width != 0) {
    return Bad(path, "says ", count, " tokens of ", width, " bytes, and ", tokens, " bytes follow");
  }
  const uint64_t largest = Get(head + 24, 8);
  if (largest >> 8 * width != 0) return Bad(path, "says that its largest token is ", largest);
  file.count_ = static_cast<int64_t>(count);
  file.largest_ = static_cast<int64_t>(largest);
  file.width_ = static_cast<int>(width);
  file.head_ = kHead;
  return file;
}

absl::Status TokenFile::Read(int64_t start, absl::Span<int64_t> out) const {
  const auto length = static_cast<int64_t>(out.size());
  if (start < 0 || start > count_ || length > count_ - start) {
    return absl::OutOfRangeError(
        absl::StrCat(path(), ": tokens ", start, " to ", start + length, " of ", count_));
  }
  std::string bytes(out.size() * static_cast<size_t>(width_), '\0');
  DT_RETURN_IF_ERROR(
      file_->Read(head_ + start * width_, bytes.data(), static_cast<int64_t>(bytes.size())));
  for (int64_t i = 0; i < length; ++i) {
    out[i] = static_cast<int64_t>(Get(bytes.data() + i * width_, width_));
    if (out[i] > largest_) {
      return Bad(path(), "has token ", out[i], " at ", start + i, ", above the ", largest_,
                 " of its head");
    }
  }
  return absl::OkStatus();
}

absl::Status WriteTokens(const std::string& path, absl::Span<const int64_t> tokens,
                         int bytes_per_token) {
  if (bytes_per_token != 2 && bytes_per_token != 4) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a token takes 2 or 4 bytes, not ", bytes_per_token));
  }
  int64_t largest = 0;
  DT_ASSIGN_OR_RETURN(const std::string packed, Packed(path, tokens, bytes_per_token, &largest));
  std::string text = kMagic;
  Put(kVersion, 4, &text);
  Put(static_cast<uint64_t>(bytes_per_token), 4, &text);
  Put(tokens.size(), 8, &text);
  Put(static_cast<uint64_t>(largest), 8, &text);
  return WriteFile(path, text + packed);
}

}  // namespace dtensor
