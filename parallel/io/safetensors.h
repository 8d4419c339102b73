// safetensors files: 8 bytes with the length of a header, the header (JSON: name -> dtype, shape,
// bytes), then the bytes of all tensors without gaps. Bytes of a file are never trusted: whatever
// is wrong with them is an error, found before memory is taken for it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/tensor/dtype.h"
#include "dtensor/tensor/shape.h"

namespace dtensor {

// In one file, and in one folder.
inline constexpr size_t kMostTensors = 1'000'000;

struct SafetensorsEntry {
  std::string dtype;  // the file's name for it: "F32"
  Shape shape;
  int64_t begin = 0, end = 0;  // its bytes, counted from the end of the header
};

struct SafetensorsOptions {
  // Reads through a mapping of the file instead of by pread. For files that nobody changes: one
  // that is cut short meanwhile ends the program.
  bool map = false;
  // Whether the path may be a link.
  bool follow = true;
};

// An open file whose header was checked. Thread-safe.
class SafetensorsFile {
 public:
  // Errors, with the path and the tensor: NotFound for what cannot be opened (rank-local);
  // InvalidArgument for a header that is longer than the file or 100 MB, not a JSON object in
  // UTF-8, with keys twice or more levels than it needs; for names that are empty, longer than
  // 4,096 bytes, hold NUL or lead out of a folder; unknown dtypes and fields; numbers that are not
  // whole or negative; shapes of more than 64 dims, or whose bytes are not those of the range;
  // ranges that overlap, leave gaps or do not end with the file; more than a million tensors,
  // 100,000 items of metadata or 16 MB of it. Each is found where the header says it, by one pass
  // that keeps nothing but tensors and metadata.
  static absl::StatusOr<std::shared_ptr<const SafetensorsFile>> Open(
      const std::string& path, const SafetensorsOptions& options = {});
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, SafetensorsEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // What stands before the data: the length of the header, and its text. Errors: Read's.
  absl::StatusOr<std::string> Header() const;
  // Bytes [begin, begin + bytes) of the data. Errors: Unavailable (rank-local) where the system
  // does not give them; OutOfRange where there are none.
  absl::Status Read(int64_t begin, int64_t bytes, void* out) const;

 private:
  SafetensorsFile() = default;
  absl::Status ReadHeader();
  absl::Status TakeHeader(const std::string& text);
  absl::Status CheckCovered() const;
  absl::Status Pread(int64_t at, int64_t bytes, void* out) const;

  std::string path_;
  int descriptor_ = -1;
  int64_t size_ = 0, data_ = 0;  // of the file; where its data begins
  const char* mapping_ = nullptr;
  std::map<std::string, SafetensorsEntry> tensors_;
  std::map<std::string, std::string> metadata_;
};

// The dtype of that name in files; none for those that are in files and not here (I8, F8_E4M3).
std::optional<DType> FromSafetensorsName(absl::string_view name);
absl::string_view SafetensorsName(DType dtype);

// Whether a header can hold a tensor of that name. Errors: InvalidArgument for one that is not
// UTF-8, and "__metadata__".
absl::Status CheckTensorName(absl::string_view name);

// A header as Hugging Face's writer makes it, with its length before and padding behind: entries by
// falling dtype, then by name. Sets the entries' ranges. All of them must have a known dtype
// and a name that CheckTensorName takes, and the metadata must be UTF-8.
std::string SafetensorsHeader(std::map<std::string, SafetensorsEntry>* entries,
                              const std::map<std::string, std::string>& metadata);

}  // namespace dtensor
