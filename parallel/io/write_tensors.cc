// WriteTensors: ranks agree on files, each writes what it holds first, then the files get their
// names.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/algorithm/container.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dtensor/errors.h"
#include "dtensor/parallel/io/checkpoint_parts.h"
#include "dtensor/parallel/io/file_bytes.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/tensor_folder.h"
#include "dtensor/parallel/text/utf8.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;

absl::Status CannotWrite(const std::string& path, absl::string_view reason) {
  return RankLocal(absl::UnavailableError(absl::StrCat(path, " cannot be written: ", reason)));
}

struct OneFile {
  std::string name, header = {};
  std::map<std::string, SafetensorsEntry> entries = {};
  std::vector<const std::pair<std::string, DTensor>*> tensors = {};
  int64_t bytes = 0;
  bool as_it_was = false;  // its header is that of an earlier file

  void Add(const std::pair<std::string, DTensor>& item) {
    const Spec& spec = item.second.spec();
    bytes += spec.bytes();
    tensors.push_back(&item);
    entries[item.first] = {std::string(SafetensorsName(spec.dtype())), item.second.shape()};
  }
};

bool SameKind(const SafetensorsEntry& a, const SafetensorsEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape;
}

// The tensors in files of these names, with the same headers unless an entry is another.
absl::StatusOr<std::vector<OneFile>> Like(const FolderForm& form, const StateDict& tensors) {
  std::vector<OneFile> files;
  std::map<std::string, OneFile*> by_tensor;
  files.reserve(form.files.size());
  for (const FolderForm::File& f : form.files) {
    files.push_back({f.name});
    for (const auto& [name, entry] : f.entries) by_tensor[name] = &files.back();
  }
  for (const auto& item : tensors) {
    const auto at = by_tensor.find(item.first);
    if (at == by_tensor.end()) {
      return Wrong("tensor \"", item.first, "\" is in none of the files to be like");
    }
    OneFile& file = *at->second;
    file.Add(item);
    by_tensor.erase(at);
  }
  if (!by_tensor.empty()) {
    return Wrong("tensor \"", by_tensor.begin()->first, "\" of the files to be like is missing");
  }
  for (size_t i = 0; i < files.size(); ++i) {
    const FolderForm::File& f = form.files[i];
    files[i].as_it_was = !f.header.empty() && absl::c_all_of(f.entries, [&](const auto& e) {
      return SameKind(e.second, files[i].entries.at(e.first));
    });
    if (files[i].as_it_was) files[i].entries = f.entries;
    files[i].header =
        files[i].as_it_was ? f.header : SafetensorsHeader(&files[i].entries, f.metadata);
  }
  return files;
}

// Cuts the tensors, in their order, into files that are not too large.
std::vector<OneFile> Split(const StateDict& tensors, const WriteOptions& options) {
  const int64_t most = options.most_bytes.value_or(50'000'000'000);
  std::vector<OneFile> files(1);
  for (const auto& item : tensors) {
    if (!files.back().tensors.empty() && files.back().bytes + item.second.spec().bytes() > most) {
      files.emplace_back();
    }
    files.back().Add(item);
  }
  for (size_t i = 0; i < files.size(); ++i) {
    files[i].name = files.size() == 1 ? options.stem + ".safetensors"
                                      : absl::StrFormat("%s-%05d-of-%05d.safetensors", options.stem,
                                                        i + 1, files.size());
    files[i].header = SafetensorsHeader(&files[i].entries, options.metadata);
  }
  return files;
}

std::string IndexOf(const StateDict& tensors, const std::vector<OneFile>& files) {
  nlohmann::json index = {{"metadata", {{"total_parameters", 0}, {"total_size", 0}}}};
  int64_t parameters = 0, bytes = 0;
  for (const auto& [name, t] : tensors) parameters += t.numel(), bytes += t.spec().bytes();
  index["metadata"]["total_parameters"] = parameters;
  index["metadata"]["total_size"] = bytes;
  for (const OneFile& file : files) {
    for (const auto& [name, entry] : file.entries) index["weight_map"][name] = file.name;
  }
  return index.dump(2, ' ', /*ensure_ascii=*/true) + "\n";
}

// The file under its unfinished name, with its header and room for its data.
absl::Status Create(const OneFile& file, const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Cleanup done = [descriptor] { close(descriptor); };
  const int64_t size = static_cast<int64_t>(file.header.size()) + file.bytes;
  if (ftruncate(descriptor, size) != 0) return CannotWrite(path, std::strerror(errno));
  return internal::WriteBytes(descriptor, path, 0, file.header.data(),
                              static_cast<int64_t>(file.header.size()));
}

absl::Status WriteParts(const OneFile& file, const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Cleanup done = [descriptor] { close(descriptor); };
  for (const auto* item : file.tensors) {
    const DTensor& t = item->second;
    if (!IsFirstHolder(t.spec())) continue;
    DT_ASSIGN_OR_RETURN(const Tensor values, t.local().ToHost());
    const int64_t size = SizeOf(t.dtype());
    int64_t at = static_cast<int64_t>(file.header.size()) + file.entries.at(item->first).begin;
    const char* data = static_cast<const char*>(values.data());
    for (const Stretch& s : LocalStretches(t.spec())) {
      DT_RETURN_IF_ERROR(
          internal::WriteBytes(descriptor, path, at + s.start * size, data, s.length * size));
      data += s.length * size;
    }
  }
  if (fsync(descriptor) != 0) return CannotWrite(path, std::strerror(errno));
  return absl::OkStatus();
}

// What a header cannot say.
absl::Status CheckTexts(const StateDict& tensors, const WriteOptions& options) {
  for (const auto& [name, t] : tensors) {
    DT_RETURN_IF_ERROR(CheckTensorName(name));
    if (!t.defined()) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", name, "\" is null"));
    }
  }
  for (const auto& [key, value] : options.metadata) {
    if (FirstBadUtf8(key) == std::string::npos && FirstBadUtf8(value) == std::string::npos)
      continue;
    return absl::InvalidArgumentError(
        absl::StrCat("metadata \"", absl::CHexEscape(key), "\" is not UTF-8"));
  }
  return absl::OkStatus();
}

absl::Status CheckWhole(const StateDict& tensors, const DeviceMesh& mesh) {
  std::set<std::string> names;
  for (const auto& [name, t] : tensors) {
    if (!names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat("tensor \"", name, "\" is there twice"));
    }
    if (!t.mesh().is_self() && t.mesh() != mesh) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensor \"", name, "\" is on mesh ", t.mesh().ToString(), ", others are on ",
                       mesh.ToString(), "; Redistribute them to one mesh first"));
    }
    if (!t.spec().has_partial()) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor \"", name, "\" is a pending sum: ",
                                                   t.spec().ToString(), "; Redistribute it first"));
  }
  return absl::OkStatus();
}

// "<stem>-00001-of-00002.safetensors". Other stems may begin with this one ("model-ema").
bool IsPartOf(absl::string_view name, const std::string& stem) {
  if (!absl::ConsumePrefix(&name, stem + "-") || !absl::ConsumeSuffix(&name, ".safetensors")) {
    return false;
  }
  const std::vector<absl::string_view> numbers = absl::StrSplit(name, "-of-");
  return numbers.size() == 2 && absl::c_all_of(numbers, [](absl::string_view n) {
           return !n.empty() && absl::c_all_of(n, absl::ascii_isdigit);
         });
}

// The files of one writing, which get their names together or not at all.
class Staged {
 public:
  // `suffix` is what names end in until then. Not `alone`: other ranks write the same files at the
  // same time, so each is put over what is there, and no reader finds it missing.
  Staged(const std::string& folder, std::string stem, std::string suffix, bool alone)
      : folder_(folder), stem_(std::move(stem)), suffix_(std::move(suffix)), alone_(alone) {}

  // In the order in which they are to appear.
  void Add(std::string name) { names_.push_back(std::move(name)); }
  std::string Unfinished(const std::string& name) const {
    return (folder_ / (name + suffix_)).string();
  }
  void Drop() const {
    for (const std::string& name : names_) unlink(Unfinished(name).c_str());
  }

  absl::Status Commit() const {
    std::set<std::string> old = Earlier();
    std::vector<std::string> away, there;
    absl::Status status;
    for (const std::string& name : old) {
      if (!status.ok()) break;
      std::error_code error;
      if (!alone_ && !fs::exists(folder_ / name, error)) continue;  // another rank was here
      status = Rename(name, name + kBefore);
      if (status.ok()) away.push_back(name);
    }
    for (const std::string& name : names_) {
      if (!status.ok()) break;
      status = Rename(name + suffix_, name);
      if (status.ok() && alone_) there.push_back(name);
    }
    if (!status.ok()) {
      for (const std::string& name : there) unlink((folder_ / name).c_str());
      for (const std::string& name : away) Rename(name + kBefore, name).IgnoreError();
      return status;
    }
    std::error_code error;
    for (const std::string& name : old) fs::remove(folder_ / (name + kBefore), error);
    return Sync();
  }

 private:
  static constexpr char kBefore[] = ".before";

  absl::Status Rename(const std::string& from, const std::string& to) const {
    const std::string path = (folder_ / to).string();
    // What is no file is not ours to move.
    std::error_code error;
    if (fs::is_directory(folder_ / from, error))
      return CannotWrite((folder_ / from).string(), "it is a folder");
    if (std::rename((folder_ / from).c_str(), path.c_str()) == 0) return absl::OkStatus();
    return CannotWrite(path, std::strerror(errno));
  }
  // Files of these names, and those of an earlier writing, which a reader would take for a part of
  // this one.
  std::set<std::string> Earlier() const {
    std::set<std::string> old;
    std::error_code error;
    for (fs::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
      const std::string name = at->path().filename().string();
      const bool ours = name == stem_ + ".safetensors.index.json" ||
                        name == stem_ + ".safetensors" || IsPartOf(name, stem_);
      const bool again = absl::c_linear_search(names_, name);
      if (again ? alone_ : ours) old.insert(name);
    }
    return old;
  }
  absl::Status Sync() const {
    const int descriptor = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    const bool ok = descriptor >= 0 && fsync(descriptor) == 0;
    const int error = errno;
    if (descriptor >= 0) close(descriptor);
    return ok ? absl::OkStatus() : CannotWrite(folder_.string(), std::strerror(error));
  }

  const fs::path folder_;
  const std::string stem_, suffix_;
  const bool alone_;
  std::vector<std::string> names_;
};

// Of all, also those that another rank writes.
absl::Status CheckAllOwn(const StateDict& tensors) {
  for (const auto& [name, t] : tensors) {
    const absl::Status own = CheckOwn(t);
    if (!own.ok()) return Prefixed(absl::StrCat("tensor \"", name, "\""), own);
  }
  return absl::OkStatus();
}

// The mesh on which all tensors are, Self if there is none.
DeviceMesh MeshOf(const StateDict& tensors) {
  for (const auto& [name, t] : tensors) {
    if (!t.mesh().is_self()) return t.mesh();
  }
  return DeviceMesh::Self();
}

}  // namespace

absl::Status WriteTensors(const StateDict& tensors, const std::string& folder,
                          const WriteOptions& options) {
  DT_RETURN_IF_ERROR(CheckTexts(tensors, options));
  const DeviceMesh mesh = MeshOf(tensors);
  DT_RETURN_IF_ERROR(CheckWhole(tensors, mesh));
  const int64_t rank = RankContext::Current().rank();
  if (!mesh.is_self() && !mesh.Contains(rank)) return absl::OkStatus();
  const bool first = mesh.is_self() || mesh.Ranks()[0] == rank;
  const bool like = !options.most_bytes && !options.like.files.empty();
  DT_ASSIGN_OR_RETURN(const std::vector<OneFile> files,
                      like ? Like(options.like, tensors) : Split(tensors, options));
  // Ranks with tensors on Self know nothing of each other.
  const bool alone = !mesh.is_self() || RankContext::Current().world_size() == 1;
  Staged staged(folder, options.stem,
                alone ? ".unfinished" : absl::StrCat(".rank", rank, ".unfinished"), alone);
  for (const OneFile& file : files) staged.Add(file.name);
  std::map<std::string, std::string> texts = options.texts;
  if (files.size() > 1 || (like && !options.like.index.empty())) {
    const bool same = like && absl::c_all_of(files, [](const OneFile& f) { return f.as_it_was; });
    texts[options.stem + ".safetensors.index.json"] =
        same ? options.like.index : IndexOf(tensors, files);
  }
  for (const auto& [name, text] : texts) staged.Add(name);
  const auto each = [&](const auto& step) -> absl::Status {
    for (const OneFile& file : files) DT_RETURN_IF_ERROR(step(file, staged.Unfinished(file.name)));
    return absl::OkStatus();
  };
  absl::Status status = CheckAllOwn(tensors);
  if (first && status.ok()) {
    std::error_code error;
    fs::create_directories(folder, error);
    status = error ? CannotWrite(folder, error.message()) : each(Create);
  }
  status = Agree(mesh, "write_tensors: create", status);
  if (status.ok()) {
    const absl::Status written = internal::Guarded([&] { return each(WriteParts); });
    status = Agree(mesh, "write_tensors: write", written);
  }
  if (status.ok()) {
    absl::Status committed;
    for (const auto& [name, text] : texts) {
      if (first && committed.ok()) committed = WriteFile(staged.Unfinished(name), text);
    }
    if (first && committed.ok()) committed = staged.Commit();
    status = Agree(mesh, "write_tensors: commit", committed);
  }
  if (!status.ok() && first) staged.Drop();
  return status;
}

}  // namespace dtensor
