#include "dtensor/parallel/io/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/file_bytes.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using nlohmann::json;

constexpr int64_t kLength = 8;  // of the header's length
constexpr int64_t kMostHeader = 100'000'000;
constexpr int64_t kMostTensors = 1'000'000;
constexpr size_t kMostDims = 64, kMostName = 4096;

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

// A whole number in [0, 2^63).
bool TakeSize(const json& value, int64_t* out) {
  if (!value.is_number_unsigned()) return false;
  const uint64_t v = value.get<uint64_t>();
  if (v > static_cast<uint64_t>(INT64_MAX)) return false;
  *out = static_cast<int64_t>(v);
  return true;
}

absl::Status TakeShape(const json& value, Shape* shape) {
  if (!value.is_array()) return Wrong("its shape is ", DescribeJson(value), ", not a list");
  if (value.size() > kMostDims) return Wrong("has ", value.size(), " dims, at most ", kMostDims);
  for (const json& size : value) {
    if (!TakeSize(size, &shape->emplace_back())) {
      return Wrong("a size of its shape is ", DescribeJson(size), ", not a whole number");
    }
  }
  return absl::OkStatus();
}

absl::Status TakeRange(const json& value, SafetensorsEntry* entry) {
  if (!value.is_array() || value.size() != 2) {
    return Wrong("its data_offsets are ", DescribeJson(value), ", not [begin, end]");
  }
  for (int i = 0; i < 2; ++i) {
    if (TakeSize(value[i], i == 0 ? &entry->begin : &entry->end)) continue;
    return Wrong("an offset is ", DescribeJson(value[i]), ", not a whole number below 2^63");
  }
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

absl::Status TakeEntry(const json& value, SafetensorsEntry* entry) {
  if (!value.is_object()) return Wrong("is ", DescribeJson(value), ", not an object");
  for (const auto& [key, field] : value.items()) {
    if (key == "dtype" || key == "shape" || key == "data_offsets") continue;
    return Wrong("has the unknown field \"", absl::CHexEscape(key.substr(0, 80)),
                 "\"; there are dtype, shape and data_offsets");
  }
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return Wrong("has no ", key);
  }
  const json& dtype = value["dtype"];
  if (!dtype.is_string()) return Wrong("its dtype is ", DescribeJson(dtype), ", not a string");
  entry->dtype = dtype.get<std::string>();
  const FileDType* known = FindDType(entry->dtype);
  if (known == nullptr) {
    return Wrong("its dtype \"", absl::CHexEscape(entry->dtype.substr(0, 80)),
                 "\" is unknown (F32, BF16, I64, ...)");
  }
  DT_RETURN_IF_ERROR(TakeShape(value["shape"], &entry->shape));
  DT_RETURN_IF_ERROR(TakeRange(value["data_offsets"], entry));
  return CheckSize(*entry, known->bits);
}

// No reader may use a name as a path, and some do: a name that would lead out of a folder has no
// other purpose.
bool LeadsOut(absl::string_view name) {
  return absl::StartsWith(name, "/") || name == ".." || absl::StartsWith(name, "../") ||
         absl::EndsWith(name, "/..") || absl::StrContains(name, "/../");
}

absl::Status CheckName(const std::string& name) {
  if (name.empty()) return Wrong("a tensor has an empty name");
  if (name.size() > kMostName)
    return Wrong("a name has ", name.size(), " bytes, at most ", kMostName);
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
  DT_RETURN_IF_ERROR(TakeHeader(text));
  return CheckCovered();
}

absl::Status SafetensorsFile::TakeHeader(const std::string& text) {
  // A tensor of eight dims has a value in five bytes, and a hostile header one in two.
  const int64_t most = 1000 + static_cast<int64_t>(text.size()) / 4;
  DT_ASSIGN_OR_RETURN(const json header, ParseJsonObject(text, "its header", 4, most));
  if (header.size() > static_cast<size_t>(kMostTensors)) {
    return Wrong("has ", header.size(), " tensors, at most ", kMostTensors);
  }
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      if (!value.is_object()) return Wrong("__metadata__ is ", DescribeJson(value));
      for (const auto& [key, item] : value.items()) {
        if (!item.is_string()) {
          return Wrong("__metadata__: \"", absl::CHexEscape(key.substr(0, 80)), "\" is ",
                       DescribeJson(item), ", not a string");
        }
        metadata_[key] = item.get<std::string>();
      }
      continue;
    }
    DT_RETURN_IF_ERROR(CheckName(name));
    const absl::Status entry = TakeEntry(value, &tensors_[name]);
    if (!entry.ok()) return Prefixed(absl::StrCat("tensor \"", name, "\""), entry);
  }
  return absl::OkStatus();
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
