// WriteTensors: ranks agree on files, each writes what it holds first, then the files get their
// names.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/io/tensor_folder.h"
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
};

// Cuts the tensors, in their order, into files that are not too large.
std::vector<OneFile> Split(const StateDict& tensors, const WriteOptions& options) {
  std::vector<OneFile> files(1);
  for (const auto& item : tensors) {
    const DTensor& t = item.second;
    if (!files.back().tensors.empty() &&
        files.back().bytes + t.spec().bytes() > options.most_bytes) {
      files.emplace_back();
    }
    OneFile& file = files.back();
    file.bytes += t.spec().bytes();
    file.tensors.push_back(&item);
    file.entries[item.first] = {std::string(SafetensorsName(t.dtype())), t.shape()};
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

absl::Status WriteAt(int descriptor, const std::string& path, int64_t at, const char* data,
                     int64_t bytes) {
  while (bytes > 0) {
    const ssize_t n = pwrite(descriptor, data, static_cast<size_t>(bytes), at);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return CannotWrite(path, std::strerror(errno));
    data += n, at += n, bytes -= n;
  }
  return absl::OkStatus();
}

// The file under its unfinished name, with its header and room for its data.
absl::Status Create(const OneFile& file, const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Cleanup done = [descriptor] { close(descriptor); };
  const int64_t size = static_cast<int64_t>(file.header.size()) + file.bytes;
  if (ftruncate(descriptor, size) != 0) return CannotWrite(path, std::strerror(errno));
  return WriteAt(descriptor, path, 0, file.header.data(), static_cast<int64_t>(file.header.size()));
}

absl::Status WriteParts(const OneFile& file, const std::string& path) {
  const int descriptor = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (descriptor < 0) return CannotWrite(path, std::strerror(errno));
  const absl::Cleanup done = [descriptor] { close(descriptor); };
  for (const auto* item : file.tensors) {
    const DTensor& t = item->second;
    if (!IsFirstHolder(t.spec())) continue;
    DT_ASSIGN_OR_RETURN(const Tensor near, t.local().To(DeviceType::kCpu));
    DT_ASSIGN_OR_RETURN(const Tensor values, near.Contiguous());
    const int64_t size = SizeOf(t.dtype());
    int64_t at = static_cast<int64_t>(file.header.size()) + file.entries.at(item->first).begin;
    const char* data = static_cast<const char*>(values.data());
    for (const Stretch& s : LocalStretches(t.spec())) {
      DT_RETURN_IF_ERROR(WriteAt(descriptor, path, at + s.start * size, data, s.length * size));
      data += s.length * size;
    }
  }
  if (fsync(descriptor) != 0) return CannotWrite(path, std::strerror(errno));
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

// Gives the files their names and removes those of an earlier writing, which a reader would take
// for a part of this one.
absl::Status Commit(const fs::path& folder, const std::vector<OneFile>& files,
                    const std::string& index, const WriteOptions& options) {
  const std::string index_name = options.stem + ".safetensors.index.json";
  std::set<std::string> mine = {files.size() > 1 ? index_name : ""};
  for (const OneFile& file : files) {
    const fs::path path = folder / file.name;
    if (std::rename((path.string() + ".unfinished").c_str(), path.c_str()) != 0) {
      return CannotWrite(path.string(), std::strerror(errno));
    }
    mine.insert(file.name);
  }
  if (files.size() > 1) DT_RETURN_IF_ERROR(WriteFile((folder / index_name).string(), index));
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    const bool ours = name == index_name || name == options.stem + ".safetensors" ||
                      (absl::StartsWith(name, options.stem + "-") &&
                       absl::StrContains(name, "-of-") && absl::EndsWith(name, ".safetensors"));
    if (ours && !mine.contains(name)) fs::remove(entry.path(), error);
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
  const DeviceMesh mesh = MeshOf(tensors);
  DT_RETURN_IF_ERROR(CheckWhole(tensors, mesh));
  const int64_t rank = RankContext::Current().rank();
  if (!mesh.is_self() && !mesh.Contains(rank)) return absl::OkStatus();
  const bool first = mesh.is_self() || mesh.Ranks()[0] == rank;
  const std::vector<OneFile> files = Split(tensors, options);
  const auto unfinished = [&](const OneFile& file) {
    return (fs::path(folder) / (file.name + ".unfinished")).string();
  };
  const auto each = [&](const auto& step) -> absl::Status {
    for (const OneFile& file : files) DT_RETURN_IF_ERROR(step(file, unfinished(file)));
    return absl::OkStatus();
  };
  absl::Status status;
  if (first) {
    std::error_code error;
    fs::create_directories(folder, error);
    status = error ? CannotWrite(folder, error.message()) : each(Create);
  }
  status = Agree(mesh, "write_tensors: create", status);
  if (status.ok()) status = Agree(mesh, "write_tensors: write", each(WriteParts));
  if (status.ok()) {
    status = first ? Commit(folder, files, IndexOf(tensors, files), options) : absl::OkStatus();
    status = Agree(mesh, "write_tensors: commit", status);
  }
  if (!status.ok() && first) {
    for (const OneFile& file : files) unlink(unfinished(file).c_str());
  }
  return status;
}

}  // namespace dtensor
