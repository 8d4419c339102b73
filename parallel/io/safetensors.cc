#include "dtensor/parallel/io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/file_bytes.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/json_reader.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kLength = 8;  // of the header's length
constexpr int64_t kMostHeader = 100'000'000;
constexpr size_t kMostDims = 64;
constexpr int64_t kMostDTypeName = 80;
// Of __metadata__: items, and bytes of their values. Real files have a few of a few bytes, or the
// notes of a training, or one for each tensor.
constexpr size_t kMostItems = 100'000;
constexpr int64_t kMostMetadata = 16'000'000;

// Every dtype of the format, in the order by which its writer sorts.
struct FileDType {
  absl::string_view name;
  int64_t bits;
  std::optional<DType> dtype = {};
};
constexpr FileDType kFileDTypes[] = {{"BOOL", 8, DType::kBool},
                                     {"F4", 4},
                                     {"F6_E2M3", 6},
                                     {"F6_E3M2", 6},
                                     {"U8", 8, DType::kU8},
                                     {"I8", 8},
                                     {"F8_E5M2", 8},
                                     {"F8_E4M3", 8},
                                     {"F8_E8M0", 8},
                                     {"F8_E4M3FNUZ", 8},
                                     {"F8_E5M2FNUZ", 8},
                                     {"I16", 16},
                                     {"U16", 16},
                                     {"F16", 16, DType::kF16},
                                     {"BF16", 16, DType::kBF16},
                                     {"I32", 32, DType::kI32},
                                     {"U32", 32},
                                     {"F32", 32, DType::kF32},
                                     {"C64", 64},
                                     {"F64", 64, DType::kF64},
                                     {"I64", 64, DType::kI64},
                                     {"U64", 64}};

const FileDType* FindDType(absl::string_view name) {
  for (const FileDType& t : kFileDTypes) {
    if (t.name == name) return &t;
  }
  return nullptr;
}

absl::Status TakeDType(JsonReader* json, std::string* name) {
  DT_ASSIGN_OR_RETURN(*name, json->String(kMostDTypeName));
  if (FindDType(*name) != nullptr) return absl::OkStatus();
  return Wrong("\"", absl::CHexEscape(*name), "\" is unknown (F32, BF16, I64, ...)");
}

absl::Status TakeShape(JsonReader* json, Shape* shape) {
  return json->List([&]() -> absl::Status {
    if (shape->size() == kMostDims) return Wrong("has more than ", kMostDims, " dims");
    DT_ASSIGN_OR_RETURN(shape->emplace_back(), json->WholeNumber());
    return absl::OkStatus();
  });
}

absl::Status TakeRange(JsonReader* json, SafetensorsEntry* entry) {
  int count = 0;
  DT_RETURN_IF_ERROR(json->List([&]() -> absl::Status {
    if (++count > 2) return Wrong("has more than the two numbers [begin, end]");
    DT_ASSIGN_OR_RETURN((count == 1 ? entry->begin : entry->end), json->WholeNumber());
    return absl::OkStatus();
  }));
  if (count < 2) return Wrong("has ", count, " numbers, not [begin, end]");
  if (entry->begin <= entry->end) return absl::OkStatus();
  return Wrong("ends at byte ", entry->end, " before it begins at ", entry->begin);
}

// The bytes that the shape needs; a product that wraps is an error even beside a 0.
absl::Status CheckSize(const SafetensorsEntry& e, int64_t bits) {
  int64_t needed = bits;
  for (const int64_t size : e.shape) {
    if (__builtin_mul_overflow(needed, size == 0 ? 1 : size, &needed)) {
      return Wrong("shape ", ToString(e.shape), " of ", e.dtype,
                   " has more bytes than fit 64 bits");
    }
  }
  if (std::find(e.shape.begin(), e.shape.end(), 0) != e.shape.end()) needed = 0;
  if (needed % 8 == 0 && needed / 8 == e.end - e.begin) return absl::OkStatus();
  return Wrong("shape ", ToString(e.shape), " of ", e.dtype, " needs ", needed / 8,
               " bytes, its data_offsets give ", e.end - e.begin);
}

absl::Status TakeEntry(JsonReader* json, SafetensorsEntry* entry) {
  constexpr absl::string_view kFields[] = {"dtype", "shape", "data_offsets"};
  bool there[std::size(kFields)] = {};
  DT_RETURN_IF_ERROR(json->Object([&](const std::string& name) -> absl::Status {
    const size_t field = std::find(std::begin(kFields), std::end(kFields), name) - kFields;
    if (field == std::size(kFields)) {
      return Wrong("has the unknown field \"", absl::CHexEscape(name.substr(0, 80)),
                   "\"; there are dtype, shape and data_offsets");
    }
    if (std::exchange(there[field], true)) return JsonReader::Twice(name);
    const absl::Status taken = field == 0   ? TakeDType(json, &entry->dtype)
                               : field == 1 ? TakeShape(json, &entry->shape)
                                            : TakeRange(json, entry);
    return taken.ok() ? taken : Prefixed(absl::StrCat("its ", name), taken);
  }));
  for (size_t field = 0; field < std::size(kFields); ++field) {
    if (!there[field]) return Wrong("has no ", kFields[field]);
  }
  return CheckSize(*entry, FindDType(entry->dtype)->bits);
}

absl::Status TakeMetadata(JsonReader* json, std::map<std::string, std::string>* metadata) {
  int64_t left = kMostMetadata;
  return json->Object([&](const std::string& name) -> absl::Status {
    if (metadata->size() == kMostItems) return Wrong("has more than ", kMostItems, " items");
    const absl::StatusOr<std::string> value = json->String(left);
    if (!value.ok()) {
      return Prefixed(absl::StrCat("\"", absl::CHexEscape(name.substr(0, 80)), "\""),
                      value.status());
    }
    left -= static_cast<int64_t>(value->size());
    if (!metadata->emplace(name, *value).second) return JsonReader::Twice(name);
    return absl::OkStatus();
  });
}

// No reader may use a name as a path, and some do: a name that would lead out of a folder has no
// other purpose.
bool LeadsOut(absl::string_view name) {
  return absl::StartsWith(name, "/") || name == ".." || absl::StartsWith(name, "../") ||
         absl::EndsWith(name, "/..") || absl::StrContains(name, "/../");
}

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return Wrong("a tensor has an empty name");
  if (name.find('\0') != std::string::npos) {
    return Wrong("tensor \"", absl::CHexEscape(name), "\": a NUL byte in its name");
  }
  if (LeadsOut(name)) return Wrong("tensor \"", name, "\": its name is a path out of a folder");
  return absl::OkStatus();
}

}  // namespace

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) munmap(const_cast<char*>(mapping_), static_cast<size_t>(size_));
  if (descriptor_ >= 0) close(descriptor_);
}

absl::StatusOr<std::shared_ptr<const SafetensorsFile>> SafetensorsFile::Open(
    const std::string& path, const SafetensorsOptions& options) {
  const auto problem = [&](const char* what) {
    return RankLocal(absl::NotFoundError(absl::StrCat(path, " cannot be read: ", what)));
  };
  const std::shared_ptr<SafetensorsFile> file(new SafetensorsFile);
  file->path_ = path;
  file->descriptor_ =
      open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | (options.follow ? 0 : O_NOFOLLOW));
  struct stat info;
  if (file->descriptor_ < 0 || fstat(file->descriptor_, &info) != 0) {
    return problem(std::strerror(errno));
  }
  if (!S_ISREG(info.st_mode)) return problem("it is no regular file");
  file->size_ = info.st_size;
  const absl::Status header = file->ReadHeader();
  if (!header.ok()) return Prefixed(path, header);
  if (!options.map || file->size_ == file->data_) return file;
  void* const map =
      mmap(nullptr, static_cast<size_t>(file->size_), PROT_READ, MAP_PRIVATE, file->descriptor_, 0);
  if (map == MAP_FAILED) return problem(std::strerror(errno));
  file->mapping_ = static_cast<const char*>(map);
  return file;
}

absl::Status SafetensorsFile::ReadHeader() {
  if (size_ < kLength) return Wrong("has ", size_, " bytes; a safetensors file begins with 8");
  unsigned char bytes[kLength];
  DT_RETURN_IF_ERROR(Pread(0, kLength, bytes));
  uint64_t length = 0;
  for (int64_t i = kLength; i-- > 0;) length = length << 8 | bytes[i];
  const int64_t most = std::min(kMostHeader, size_ - kLength);
  if (length > static_cast<uint64_t>(most)) {
    return Wrong("its header is said to have ", length, " bytes; there are ", size_ - kLength,
                 " in the file, and ", kMostHeader, " are the most");
  }
  std::string text(length, '\0');
  DT_RETURN_IF_ERROR(Pread(kLength, static_cast<int64_t>(length), text.data()));
  data_ = kLength + static_cast<int64_t>(length);
  const absl::Status taken = TakeHeader(text);
  return taken.ok() ? CheckCovered() : Prefixed("its header", taken);
}

absl::Status SafetensorsFile::TakeHeader(const std::string& text) {
  if (!absl::StartsWith(text, "{")) return Wrong("does not begin with '{' as a JSON object does");
  JsonReader json(text);
  bool metadata = false;
  DT_RETURN_IF_ERROR(json.Object([&](const std::string& name) -> absl::Status {
    absl::Status taken;
    if (name == "__metadata__") {
      if (std::exchange(metadata, true)) return JsonReader::Twice(name);
      taken = TakeMetadata(&json, &metadata_);
      return taken.ok() ? taken : Prefixed(name, taken);
    }
    DT_RETURN_IF_ERROR(CheckName(name));
    if (tensors_.size() == kMostTensors) return Wrong("has more than ", kMostTensors, " tensors");
    const size_t before = tensors_.size();
    const auto at = tensors_.try_emplace(tensors_.end(), name);  // most files are sorted
    if (tensors_.size() == before) return JsonReader::Twice(name);
    taken = TakeEntry(&json, &at->second);
    return taken.ok() ? taken : Prefixed(absl::StrCat("tensor \"", name, "\""), taken);
  }));
  return json.End();
}

// Every byte of the data belongs to one tensor.
absl::Status SafetensorsFile::CheckCovered() const {
  std::vector<const std::pair<const std::string, SafetensorsEntry>*> order;
  for (const auto& item : tensors_) order.push_back(&item);
  std::sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return std::pair(a->second.begin, a->second.end) < std::pair(b->second.begin, b->second.end);
  });
  const int64_t bytes = size_ - data_;
  int64_t end = 0;
  for (const auto* item : order) {
    const auto& [name, e] = *item;
    if (e.begin != end) {
      return Wrong("tensor \"", name, "\": begins at byte ", e.begin, " of the data, where ",
                   e.begin < end ? "another one lies; it should be " : "a gap ends that begins at ",
                   end);
    }
    if (e.end > bytes) {
      return Wrong("tensor \"", name, "\": ends at byte ", e.end,
                   " of the data, of which the file has ", bytes);
    }
    end = e.end;
  }
  if (end == bytes) return absl::OkStatus();
  return Wrong("has ", bytes - end, " bytes behind the last tensor");
}

absl::Status SafetensorsFile::Pread(int64_t at, int64_t bytes, void* out) const {
  return internal::ReadBytes(descriptor_, path_, at, static_cast<char*>(out), bytes);
}

absl::StatusOr<std::string> SafetensorsFile::Header() const {
  std::string bytes(static_cast<size_t>(data_), '\0');
  DT_RETURN_IF_ERROR(Pread(0, data_, bytes.data()));
  return bytes;
}

absl::Status SafetensorsFile::Read(int64_t begin, int64_t bytes, void* out) const {
  if (begin < 0 || bytes < 0 || bytes > size_ - data_ || begin > size_ - data_ - bytes) {
    return absl::OutOfRangeError(
        absl::StrCat(path_, ": has no bytes [", begin, ", ", begin, " + ", bytes, ") of data"));
  }
  if (mapping_ == nullptr) return Pread(data_ + begin, bytes, out);
  if (bytes > 0) std::memcpy(out, mapping_ + data_ + begin, static_cast<size_t>(bytes));
  return absl::OkStatus();
}

std::optional<DType> FromSafetensorsName(absl::string_view name) {
  const FileDType* known = FindDType(name);
  return known == nullptr ? std::nullopt : known->dtype;
}

absl::string_view SafetensorsName(DType dtype) {
  for (const FileDType& t : kFileDTypes) {
    if (t.dtype == dtype) return t.name;
  }
  return "";
}

absl::Status CheckTensorName(absl::string_view name) {
  const bool text = FirstBadUtf8(name) == std::string::npos;
  if (text && name != "__metadata__") return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("no safetensors file can hold a tensor of the name \"", absl::CHexEscape(name),
                   text ? "\", which is that of its metadata" : "\", which is not UTF-8"));
}

std::string SafetensorsHeader(std::map<std::string, SafetensorsEntry>* entries,
                              const std::map<std::string, std::string>& metadata) {
  std::vector<std::pair<const FileDType*, const std::string*>> order;
  for (const auto& [name, e] : *entries) order.emplace_back(FindDType(e.dtype), &name);
  std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return a.first > b.first;  // the table's order; names are sorted already
  });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t at = 0;
  for (const auto& [dtype, name] : order) {
    SafetensorsEntry& e = (*entries)[*name];
    e.begin = at;
    e.end = at += Numel(e.shape) * dtype->bits / 8;
    header[*name] = {{"dtype", e.dtype},
                     {"shape", std::vector<int64_t>(e.shape.begin(), e.shape.end())},
                     {"data_offsets", {e.begin, e.end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  std::string length;
  for (int64_t i = 0; i < kLength; ++i) length += static_cast<char>(text.size() >> (8 * i) & 0xFF);
  return length + text;
}

}  // namespace dtensor
