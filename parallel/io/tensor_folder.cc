#include "dtensor/parallel/io/tensor_folder.h"

#include <algorithm>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/json_reader.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr char kSingle[] = "model.safetensors";
constexpr int64_t kMostIndex = 100'000'000;   // bytes
constexpr int64_t kStage = int64_t{1} << 18;  // elements that are converted at once

struct WeightIndex {
  std::string text;
  std::map<std::string, std::string> files;  // by tensor
  json metadata = json::object();
};

absl::Status TakeWeightMap(JsonReader* reader, std::map<std::string, std::string>* files) {
  return reader->Object([&](const std::string& tensor) -> absl::Status {
    if (files->size() == kMostTensors) return Wrong("has more than ", kMostTensors, " tensors");
    const absl::StatusOr<std::string> file = reader->String(JsonReader::kMostName);
    if (!file.ok()) {
      return Prefixed(absl::StrCat("tensor \"", absl::CHexEscape(tensor), "\""), file.status());
    }
    const size_t before = files->size();
    files->try_emplace(files->end(), tensor, *file);  // most are sorted
    return files->size() > before ? absl::OkStatus() : JsonReader::Twice(tensor);
  });
}

absl::Status TakeIndex(WeightIndex* index) {
  JsonReader reader(index->text);
  std::set<std::string> there;
  DT_RETURN_IF_ERROR(reader.Object([&](const std::string& name) -> absl::Status {
    if (!there.insert(name).second) return JsonReader::Twice(name);
    if (name == "weight_map") {
      const absl::Status taken = TakeWeightMap(&reader, &index->files);
      return taken.ok() ? taken : Prefixed(name, taken);
    }
    DT_ASSIGN_OR_RETURN(const absl::string_view value, reader.Skip(8));
    if (name == "metadata") {
      index->metadata =
          json::parse(value.begin(), value.end(), nullptr, /*allow_exceptions=*/false);
    }
    return absl::OkStatus();
  }));
  DT_RETURN_IF_ERROR(reader.End());
  return there.contains("weight_map") ? absl::OkStatus() : Wrong("has no weight_map");
}

absl::StatusOr<WeightIndex> ReadIndex(const std::string& path) {
  WeightIndex index;
  DT_ASSIGN_OR_RETURN(index.text, ReadFile(path, kMostIndex));
  const absl::Status taken = TakeIndex(&index);
  if (!taken.ok()) return Prefixed(path, taken);
  return index;
}

// metadata.total_size, where there is one, is the bytes of all tensors.
absl::Status CheckTotal(const json& metadata, const std::string& path, int64_t bytes) {
  if (!metadata.is_object()) return Wrong(path, ": metadata is ", DescribeJson(metadata));
  if (!metadata.contains("total_size")) return absl::OkStatus();
  const json& total = metadata["total_size"];
  if (total.is_number() && total == bytes) return absl::OkStatus();
  return Wrong(path, ": total_size is ", DescribeJson(total), ", the files have ", bytes, " bytes");
}

std::string DTypeProblem(const std::string& path, const SafetensorsEntry& e) {
  return absl::StrCat(path, ": dtype ", e.dtype, " is not supported");
}

// Other bytes are neither true nor false to what computes with them.
absl::Status CheckBools(const void* values, int64_t count, const std::string& path) {
  const uint8_t* const begin = static_cast<const uint8_t*>(values);
  const auto odd = std::find_if(begin, begin + count, [](uint8_t v) { return v > 1; });
  if (odd == begin + count) return absl::OkStatus();
  return Wrong(path, ": a bool is the byte ", static_cast<int>(*odd), ", not 0 or 1");
}

// Puts values that come in order into a flat tensor, through a small one of the file's dtype unless
// it can take them as they are.
class Sink {
 public:
  Sink(const Tensor& out, DType from) : out_(out), from_(from) {}
  // Where the next `most` bytes or fewer are to be put; sets how many elements.
  absl::StatusOr<void*> Room(int64_t most, int64_t* count) {
    const int64_t left = out_.numel() - done_;
    if (out_.on_host() && out_.dtype() == from_) {
      *count = std::min(most, left);
      return static_cast<char*>(out_.data()) + (done_ + held_) * SizeOf(from_);
    }
    if (!stage_.defined()) {
      DT_ASSIGN_OR_RETURN(stage_, Tensor::Empty(Shape{std::min(kStage, left)}, from_));
    }
    *count = std::min(most, stage_.numel() - held_);
    return static_cast<char*>(stage_.data()) + held_ * SizeOf(from_);
  }
  absl::Status Take(int64_t count) {
    held_ += count;
    return stage_.defined() && held_ == stage_.numel() ? Flush() : absl::OkStatus();
  }
  absl::Status Flush() {
    if (stage_.defined() && held_ > 0) {
      DT_ASSIGN_OR_RETURN(const Tensor ready, stage_.Slice(0, 0, held_).To(out_.dtype()));
      DT_ASSIGN_OR_RETURN(const Tensor flat, out_.View(Shape{out_.numel()}));
      Copy(ready, flat.Slice(0, done_, held_));
    }
    done_ += held_;
    held_ = 0;
    return absl::OkStatus();
  }

 private:
  const Tensor out_;
  const DType from_;
  Tensor stage_;
  int64_t done_ = 0, held_ = 0;
};

}  // namespace

absl::StatusOr<std::string> PathInside(const std::string& folder, const std::string& name) {
  const std::string shown = absl::CHexEscape(name.substr(0, 200));
  if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
      name.find('\\') != std::string::npos || name.find('\0') != std::string::npos) {
    return Wrong("the file \"", shown, "\" is no plain name inside of the folder");
  }
  std::error_code error;
  const fs::path path = fs::path(folder) / name;
  if (!fs::is_symlink(fs::symlink_status(path, error))) return path.string();
  const fs::path target = fs::canonical(path, error);
  if (error) {
    return absl::NotFoundError(
        absl::StrCat("the file \"", shown, "\" is a link that leads nowhere: ", error.message()));
  }
  const fs::path home = fs::canonical(folder, error);
  const fs::path blobs = home.parent_path().parent_path() / "blobs";
  if (target.parent_path() == home || target.parent_path() == blobs) return target.string();
  return Wrong("the file \"", shown, "\" is a link that leads out of the folder, to ",
               target.string());
}

absl::StatusOr<TensorFolder> TensorFolder::Open(const std::string& path,
                                                const SafetensorsOptions& options) {
  TensorFolder folder;
  folder.path_ = path;
  std::error_code error;
  std::string single = path;
  SafetensorsOptions how = options;
  if (fs::is_directory(path, error)) {
    single = (fs::path(path) / kSingle).string();
    const std::string index = single + ".index.json";
    if (!fs::exists(single, error)) {
      if (!fs::exists(index, error)) {
        return RankLocal(absl::NotFoundError(absl::StrCat(
            path, ": has neither model.safetensors nor model.safetensors.index.json")));
      }
      DT_RETURN_IF_ERROR(folder.OpenIndex(index, options));
      return folder;
    }
    const absl::StatusOr<std::string> inside = PathInside(path, kSingle);
    if (!inside.ok()) return Prefixed(path, inside.status());
    single = *inside;
    how.follow = false;
  }
  DT_ASSIGN_OR_RETURN(const auto file, SafetensorsFile::Open(single, how));
  folder.files_[kSingle] = file;
  for (const auto& [name, entry] : file->tensors()) folder.tensors_[name] = {file, &entry};
  return folder;
}

absl::Status TensorFolder::OpenIndex(const std::string& path, const SafetensorsOptions& options) {
  DT_ASSIGN_OR_RETURN(WeightIndex index, ReadIndex(path));
  SafetensorsOptions how = options;
  how.follow = false;
  for (const auto& [tensor, name] : index.files) {
    std::shared_ptr<const SafetensorsFile>& file = files_[name];
    if (file != nullptr) continue;
    const absl::StatusOr<std::string> inside = PathInside(path_, name);
    auto opened = inside.ok() ? SafetensorsFile::Open(*inside, how) : inside.status();
    if (!opened.ok()) {
      return Prefixed(absl::StrCat(path, ": tensor \"", absl::CHexEscape(tensor), "\""),
                      opened.status());
    }
    file = *std::move(opened);
  }
  int64_t bytes = 0;
  for (const auto& [name, file] : files_) {
    for (const auto& [tensor, entry] : file->tensors()) {
      const auto said = index.files.find(tensor);
      if (said == index.files.end()) {
        return Wrong(file->path(), ": tensor \"", tensor, "\" is not in ", path);
      }
      if (said->second != name) {
        return Wrong(file->path(), ": tensor \"", tensor, "\" is mapped to \"",
                     absl::CHexEscape(said->second), "\" by ", path);
      }
      tensors_[tensor] = {file, &entry};
      bytes += entry.end - entry.begin;
    }
  }
  for (const auto& [tensor, name] : index.files) {
    if (!tensors_.contains(tensor)) {
      return Wrong(path, ": tensor \"", absl::CHexEscape(tensor), "\" is not in ",
                   files_[name]->path());
    }
  }
  total_ = CheckTotal(index.metadata, path, bytes);
  index_ = std::move(index.text);
  return absl::OkStatus();
}

absl::StatusOr<FolderForm> TensorFolder::Form() const {
  FolderForm form = {.index = index_};
  for (const auto& [name, file] : files_) {
    // Written under that name it would be taken for something else, and something else for it.
    if (!absl::EndsWith(name, ".safetensors")) return FolderForm();
    DT_ASSIGN_OR_RETURN(std::string header, file->Header());
    form.files.push_back({name, std::move(header), file->tensors(), file->metadata()});
  }
  return form;
}

absl::Status ReadStretches(const TensorFolder::Place& place, absl::Span<const Stretch> stretches,
                           const Tensor& out) {
  if (!out.has_data()) return absl::OkStatus();
  const std::optional<DType> dtype = FromSafetensorsName(place.entry->dtype);
  if (!dtype) return absl::UnimplementedError(DTypeProblem(place.file->path(), *place.entry));
  const int64_t size = SizeOf(*dtype);
  Sink sink(out, *dtype);
  for (Stretch s : stretches) {
    while (s.length > 0) {
      int64_t count = 0;
      DT_ASSIGN_OR_RETURN(void* const to, sink.Room(s.length, &count));
      DT_RETURN_IF_ERROR(place.file->Read(place.entry->begin + s.start * size, count * size, to));
      if (*dtype == DType::kBool) DT_RETURN_IF_ERROR(CheckBools(to, count, place.file->path()));
      DT_RETURN_IF_ERROR(sink.Take(count));
      s.start += count, s.length -= count;
    }
  }
  return sink.Flush();
}

absl::StatusOr<std::map<std::string, Tensor>> ReadTensors(const TensorFolder& folder) {
  std::map<std::string, Tensor> out;
  for (const auto& [name, place] : folder.tensors()) {
    const SafetensorsEntry& e = *place.entry;
    const std::optional<DType> dtype = FromSafetensorsName(e.dtype);
    const auto problem = [&](const absl::Status& why) {
      return Prefixed(absl::StrCat(place.file->path(), ": tensor \"", name, "\""), why);
    };
    if (!dtype) {
      return problem(
          absl::UnimplementedError(absl::StrCat("dtype ", e.dtype, " is not supported")));
    }
    absl::StatusOr<Tensor> made = Tensor::Empty(e.shape, *dtype);
    if (!made.ok()) return problem(made.status());
    const Stretch all[] = {{0, made->numel()}};
    const absl::Status read = ReadStretches(place, all, *made);
    if (!read.ok()) return Prefixed(absl::StrCat("tensor \"", name, "\""), read);
    out[name] = *std::move(made);
  }
  return out;
}

absl::Status Agree(const DeviceMesh& mesh, absl::string_view what_for, const absl::Status& mine) {
  RankContext& context = RankContext::Current();
  if (mesh.is_self() || !mesh.Contains(context.rank())) return mine;
  std::vector<int> dims;
  for (int m = 0; m < mesh.ndim(); ++m) dims.push_back(m);
  std::string text =
      mine.ok() ? "" : absl::StrCat(static_cast<int>(mine.code()), " ", mine.message());
  absl::StatusOr<std::vector<std::string>> all =
      context.Exchange(mesh, dims, what_for, std::move(text));
  if (!mine.ok()) return mine;
  DT_RETURN_IF_ERROR(all.status());
  for (size_t i = 0; i < all->size(); ++i) {
    const std::string& other = (*all)[i];
    if (other.empty()) continue;
    const auto code = static_cast<absl::StatusCode>(std::atoi(other.c_str()));
    return absl::Status(
        code, absl::StrCat("rank ", i, " of the mesh: ", other.substr(other.find(' ') + 1)));
  }
  return absl::OkStatus();
}

}  // namespace dtensor
