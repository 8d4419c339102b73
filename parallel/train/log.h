// What a training tells: named numbers, written for people, as JSON lines, and for TensorBoard.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/mesh.h"

namespace dtensor {

// Three digits and a letter for thousands: 1234567 is 1.23M, 999999 is 1M, 0.12345 is 0.123.
//   Source: nanotron's human_format.
std::string HumanFormat(double value);
// "1:02:03", "2:03", "7 s".
std::string HumanSeconds(double seconds);

// A number with a name, and how people read it.
struct LogItem {
  enum class Format : uint8_t { kFixed, kExponent, kHuman };  // with `digits`, but for kHuman
  std::string tag;
  double value = 0;
  Format format = Format::kHuman;
  int digits = 4;
  std::string ToString() const;  // "loss 2.3026"
};
std::string ToString(const std::vector<LogItem>& items);  // joined by two spaces
// {"step": 3, "loss": 2.3026}; numbers that JSON has not (NaN, infinities) as text.
std::string ToJson(int64_t step, const std::vector<LogItem>& items);

// Prints a line on one rank of the mesh (its index in row-major order), or with -1 on all of it,
// each beginning with its rank. Communicates nothing.
void LogRank(std::FILE* to, absl::string_view text, const DeviceMesh& mesh, int64_t index = 0);

// LogRank, the first time that this rank says this text; later calls print nothing.
//   Source: nanotron's warn_once.
void LogRankOnce(std::FILE* to, absl::string_view text, const DeviceMesh& mesh, int64_t index = 0);

// Lines added to the end of a file.
class LineFile {
 public:
  LineFile() = default;
  ~LineFile();
  LineFile(LineFile&& o) noexcept : file_(std::exchange(o.file_, nullptr)), path_(o.path_) {}
  LineFile& operator=(LineFile&& o) noexcept {
    std::swap(file_, o.file_);
    std::swap(path_, o.path_);
    return *this;
  }
  // Adds to what is there; where that ends within a line, after it.
  // Errors: Unavailable with the path and the system's reason; so does Add, which brings the line
  // to the system at once.
  static absl::StatusOr<LineFile> Open(const std::string& path);
  absl::Status Add(absl::string_view text);  // bytes as they are
  bool is_open() const { return file_ != nullptr; }

 private:
  std::FILE* file_ = nullptr;
  std::string path_;
};

// An event file of TensorBoard: scalars by tag and step.
//   Source: TFRecord framing and tensorflow/core/util/event.proto.
class EventFile {
 public:
  EventFile() = default;
  // In `folder`, which is made; the name has time, host and process. Writes nothing yet: the first
  // Add begins the file. Errors: Unavailable.
  static absl::StatusOr<EventFile> Open(const std::string& folder);
  absl::Status Add(int64_t step, const std::vector<LogItem>& items);
  bool is_open() const { return file_.is_open(); }

 private:
  LineFile file_;
  bool begun_ = false;
};

// CRC-32C (Castagnoli). Source: RFC 3720, appendix B.4.
uint32_t Crc32c(absl::string_view bytes);

}  // namespace dtensor
