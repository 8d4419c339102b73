#include "dtensor/parallel/train/log.h"

#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

absl::Status CannotWrite(const std::string& path, int error) {
  return RankLocal(
      absl::UnavailableError(absl::StrCat(path, " cannot be written: ", std::strerror(error))));
}

// --- protobuf: fields by number, without a library for two messages ---
void Varint(uint64_t value, std::string* out) {
  for (; value >= 128; value >>= 7) out->push_back(static_cast<char>((value & 127) | 128));
  out->push_back(static_cast<char>(value));
}
void Little(uint64_t value, int bytes, std::string* out) {
  for (int i = 0; i < bytes; ++i) out->push_back(static_cast<char>(value >> 8 * i & 0xFF));
}
enum Wire { kVarint = 0, kDouble = 1, kBytes = 2, kFloat = 5 };
void Tag(int field, Wire wire, std::string* out) {
  Varint(static_cast<uint64_t>(field) << 3 | wire, out);
}
void Message(int field, absl::string_view bytes, std::string* out) {
  Tag(field, kBytes, out);
  Varint(bytes.size(), out);
  absl::StrAppend(out, bytes);
}

std::string BeginEvent(int64_t step) {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const double seconds = static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
  std::string event;
  Tag(1, kDouble, &event);  // wall_time
  Little(std::bit_cast<uint64_t>(seconds), 8, &event);
  Tag(2, kVarint, &event);  // step
  Varint(static_cast<uint64_t>(step), &event);
  return event;
}

// A checksum of a checksum would be a constant: hence the rotation.
uint32_t Masked(uint32_t crc) { return ((crc >> 15) | (crc << 17)) + 0xA282EAD8u; }

std::string Record(absl::string_view bytes) {
  std::string record;
  Little(bytes.size(), 8, &record);
  Little(Masked(Crc32c(record)), 4, &record);
  absl::StrAppend(&record, bytes);
  Little(Masked(Crc32c(bytes)), 4, &record);
  return record;
}

}  // namespace

std::string HumanFormat(double value) {
  constexpr const char* kLetters[] = {"", "K", "M", "B", "T", "P", "E", "Z"};
  if (!std::isfinite(value)) return absl::StrCat(value);
  double rounded = std::strtod(absl::StrFormat("%.3g", value).c_str(), nullptr);
  size_t thousands = 0;
  for (; std::fabs(rounded) >= 1000 && thousands + 1 < std::size(kLetters); ++thousands) {
    rounded /= 1000;
  }
  return absl::StrCat(absl::StrFormat("%.3g", rounded), kLetters[thousands]);
}

std::string HumanSeconds(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(std::min(std::max(seconds, 0.0), 1e12)));
  const int64_t h = whole / 3600, m = whole / 60 % 60, s = whole % 60;
  if (h > 0) return absl::StrFormat("%d:%02d:%02d", h, m, s);
  return m > 0 ? absl::StrFormat("%d:%02d", m, s) : absl::StrCat(s, " s");
}

std::string LogItem::ToString() const {
  switch (format) {
    case Format::kFixed:
      return absl::StrFormat("%s %.*f", tag, digits, value);
    case Format::kExponent:
      return absl::StrFormat("%s %.*e", tag, digits, value);
    case Format::kHuman:
      break;
  }
  return absl::StrCat(tag, " ", HumanFormat(value));
}

std::string ToString(const std::vector<LogItem>& items) {
  return absl::StrJoin(
      items, "  ", [](std::string* out, const LogItem& i) { absl::StrAppend(out, i.ToString()); });
}

std::string ToJson(int64_t step, const std::vector<LogItem>& items) {
  nlohmann::ordered_json line = {{"step", step}};
  for (const LogItem& i : items) {
    if (!std::isfinite(i.value)) {
      line[i.tag] = absl::StrCat(i.value);
    } else if (i.value == std::floor(i.value) && std::fabs(i.value) < 0x1p53) {
      line[i.tag] = static_cast<int64_t>(i.value);
    } else {
      line[i.tag] = i.value;
    }
  }
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

void LogRank(std::FILE* to, absl::string_view text, const DeviceMesh& mesh, int64_t index) {
  const int64_t rank = RankContext::Current().rank();
  if (!mesh.is_self() && !mesh.Contains(rank)) return;
  if (index < 0) {
    absl::FPrintF(to, "rank %d: %s\n", rank, text);
  } else if (mesh.is_self() ? rank == 0 : mesh.Ranks()[static_cast<size_t>(index)] == rank) {
    absl::FPrintF(to, "%s\n", text);
  }
}

namespace {
// What the rank has said.
struct Said {
  absl::flat_hash_set<std::string> texts;
};
}  // namespace

void LogRankOnce(std::FILE* to, absl::string_view text, const DeviceMesh& mesh, int64_t index) {
  if (!RankContext::Current().Slot<Said>().texts.insert(std::string(text)).second) return;
  LogRank(to, text, mesh, index);
}

LineFile::~LineFile() {
  if (file_ != nullptr) std::fclose(file_);
}

// Of a disk that was full, or a program that was killed.
static bool EndsWithinALine(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return false;
  std::ifstream file(path, std::ios::binary);
  file.seekg(-1, std::ios::end);
  const int last = file.get();
  return file.good() && last != '\n';
}

absl::StatusOr<LineFile> LineFile::Open(const std::string& path) {
  LineFile file;
  const bool torn = EndsWithinALine(path);
  file.file_ = std::fopen(path.c_str(), "ae");
  file.path_ = path;
  if (file.file_ == nullptr) return CannotWrite(path, errno);
  if (torn) DT_RETURN_IF_ERROR(file.Add("\n"));
  return file;
}

absl::Status LineFile::Add(absl::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), file_) == text.size() && std::fflush(file_) == 0) {
    return absl::OkStatus();
  }
  const int error = errno;
  std::clearerr(file_);
  return CannotWrite(path_, error);
}

absl::StatusOr<EventFile> EventFile::Open(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return CannotWrite(folder, error.value());
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  EventFile events;
  DT_ASSIGN_OR_RETURN(events.file_,
                      LineFile::Open(absl::StrFormat("%s/events.out.tfevents.%010d.%s.%d", folder,
                                                     std::time(nullptr), host, getpid())));
  return events;
}

absl::Status EventFile::Add(int64_t step, const std::vector<LogItem>& items) {
  if (!std::exchange(begun_, true)) {
    std::string first = BeginEvent(0);
    Message(3, "brain.Event:2", &first);  // file_version
    DT_RETURN_IF_ERROR(file_.Add(Record(first)));
  }
  std::string summary;
  for (const LogItem& i : items) {
    std::string value;
    Message(1, i.tag, &value);
    Tag(2, kFloat, &value);  // simple_value
    Little(std::bit_cast<uint32_t>(static_cast<float>(i.value)), 4, &value);
    Message(1, value, &summary);
  }
  std::string event = BeginEvent(step);
  Message(5, summary, &event);
  return file_.Add(Record(event));
}

uint32_t Crc32c(absl::string_view bytes) {
  static constexpr auto kTable = [] {
    std::array<uint32_t, 256> table{};
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t crc = i;
      for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82F63B78u : 0);
      table[i] = crc;
    }
    return table;
  }();
  uint32_t crc = ~0u;
  for (const char c : bytes) crc = crc >> 8 ^ kTable[(crc ^ static_cast<unsigned char>(c)) & 0xFF];
  return ~crc;
}

}  // namespace dtensor
