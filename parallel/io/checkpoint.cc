#include "dtensor/parallel/io/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint_file.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"
#include "nlohmann/json.hpp"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using internal::FileLayout;
using internal::FileTensor;
using nlohmann::json;

constexpr char kManifest[] = "checkpoint.json";
constexpr char kModelFile[] = "model.safetensors", kOptimizerFile[] = "optimizer.safetensors";
constexpr char kPartial[] = ".partial";
constexpr int kVersion = 1;

// What every rank brings to the others: how it went, and a few bytes. The first error by rank is
// everybody's.
absl::StatusOr<std::vector<std::string>> Agree(absl::string_view what, const absl::Status& status,
                                               absl::string_view mine = "") {
  RankContext& rank = RankContext::Current();
  std::string said(1, static_cast<char>(status.code()));
  absl::StrAppend(&said, status.ok() ? mine : status.message());
  const DeviceMesh world({rank.world_size()}, {"world"});
  DT_ASSIGN_OR_RETURN(std::vector<std::string> all, rank.Exchange(world, {0}, what, said));
  for (size_t r = 0; r < all.size(); ++r) {
    const auto code = static_cast<absl::StatusCode>(all[r].at(0));
    if (code == absl::StatusCode::kOk) continue;
    const std::string who = all.size() == 1 ? "" : absl::StrCat("rank ", r, ": ");
    return absl::Status(code, absl::StrCat(who, all[r].substr(1)));
  }
  for (std::string& a : all) a.erase(0, 1);
  return all;
}

// Sums of all ranks, added up.
absl::StatusOr<std::vector<uint64_t>> AddUp(absl::string_view what,
                                            const absl::StatusOr<std::vector<uint64_t>>& mine) {
  std::string bytes;
  if (mine.ok()) {
    bytes.assign(reinterpret_cast<const char*>(mine->data()), mine->size() * sizeof(uint64_t));
  }
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all, Agree(what, mine.status(), bytes));
  std::vector<uint64_t> sums(bytes.size() / sizeof(uint64_t), 0);
  for (const std::string& theirs : all) {
    if (theirs.size() != bytes.size()) {
      return absl::FailedPreconditionError(
          "[checkpoint] ranks have different numbers of tensors: all need the same model");
    }
    for (size_t i = 0; i < sums.size(); ++i) {
      uint64_t sum;
      std::memcpy(&sum, theirs.data() + i * sizeof(sum), sizeof(sum));
      sums[i] += sum;
    }
  }
  return sums;
}

absl::Status Unwritable(const fs::path& path, int error) {
  return absl::UnavailableError(
      absl::StrCat(path.string(), " cannot be written: ", std::strerror(error)));
}

absl::Status SyncFolder(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool ok = fd >= 0 && fsync(fd) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  return ok ? absl::OkStatus() : Unwritable(path, error);
}

std::string StepName(int64_t step) { return absl::StrFormat("step-%08d", step); }

// The number of a step's folder; nothing for other names.
std::optional<int64_t> StepOf(const std::string& name) {
  int64_t step = 0;
  absl::string_view digits = name;
  if (!absl::ConsumePrefix(&digits, "step-") || !absl::SimpleAtoi(digits, &step)) return {};
  return name == StepName(step) ? std::optional<int64_t>(step) : std::nullopt;
}

// Whole checkpoints by step, and folders that are none.
struct Listing {
  std::vector<std::pair<int64_t, fs::path>> steps;
  std::vector<std::string> others;
};
Listing List(const fs::path& dir) {
  Listing all;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    const std::optional<int64_t> step = StepOf(name);
    if (step && fs::exists(entry.path() / kManifest, error)) {
      all.steps.emplace_back(*step, entry.path());
    } else if (step || (absl::StartsWith(name, "step-") && absl::EndsWith(name, kPartial))) {
      all.others.push_back(name);
    }
  }
  std::sort(all.steps.begin(), all.steps.end());
  std::sort(all.others.begin(), all.others.end());
  return all;
}

// --- what is saved ---

// A file with the tensors that this rank has of it, both in the layout's order.
struct Content {
  FileLayout layout;
  std::vector<DTensor> values;
};

absl::StatusOr<Content> ContentOf(const char* file, const StateDict& state) {
  std::vector<FileTensor> tensors;
  absl::flat_hash_map<std::string, DTensor> by_name;
  for (const auto& [name, value] : state) {
    if (value.spec().has_partial()) {
      return absl::InvalidArgumentError(
          absl::StrCat("[checkpoint] ", name, " is a pending sum: ", value.spec().ToString()));
    }
    tensors.push_back({name, value.dtype(), value.shape()});
    by_name[name] = value;
  }
  Content content;
  DT_ASSIGN_OR_RETURN(content.layout, internal::LayOut(file, std::move(tensors)));
  for (const FileTensor& t : content.layout.tensors) content.values.push_back(by_name[t.name]);
  return content;
}

// Of parameters and persistent buffers, each once, under its first name.
StateDict TensorsOf(const Module& model) {
  StateDict state;
  for (const NamedParameter& p : model.NamedTensors()) {
    if (p.parameter->persistent()) state.emplace_back(p.fqn, p.parameter->tensor().Detach());
  }
  return state;
}

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }
uint64_t SumOf(const std::string& text) {
  return internal::ElementSum(text.data(), 0, static_cast<int64_t>(text.size()), 1);
}

json ManifestOf(const std::vector<Content>& contents, const CheckpointInfo& info) {
  json files = json::array();
  for (const Content& c : contents) {
    json tensors = json::array();
    for (const FileTensor& t : c.layout.tensors) {
      tensors.push_back({{"name", t.name},
                         {"dtype", std::string(Name(t.dtype))},
                         {"shape", std::vector<int64_t>(t.shape.begin(), t.shape.end())},
                         {"sum", Hex(t.sum)}});
    }
    files.push_back({{"file", c.layout.file}, {"bytes", c.layout.bytes}, {"tensors", tensors}});
  }
  const auto generator = DefaultGenerator().State();
  const json body = {
      {"version", kVersion},
      {"step", info.step},
      {"notes", info.notes},
      {"generator", absl::BytesToHexString(absl::string_view(
                        reinterpret_cast<const char*>(generator.data()), generator.size()))},
      {"files", files}};
  return {{"dtensor_checkpoint", body}, {"sum", Hex(SumOf(body.dump()))}};
}

// One saving: where its folder is made and where it ends up.
class Saving {
 public:
  Saving(const std::string& dir, int64_t step)
      : dir_(dir), place_(dir_ / StepName(step)), partial_(place_.string() + kPartial) {}

  const fs::path& place() const { return place_; }
  std::string Path(const FileLayout& layout) const { return (partial_ / layout.file).string(); }

  absl::Status Prepare(const std::vector<Content>& contents) const {
    std::error_code error;
    fs::create_directories(dir_, error);
    if (error) return Unwritable(dir_, error.value());
    for (const std::string& left : List(dir_).others) {  // of jobs that were ended
      if (absl::EndsWith(left, kPartial)) fs::remove_all(dir_ / left, error);
    }
    fs::create_directory(partial_, error);
    if (error) return Unwritable(partial_, error.value());
    for (const Content& c : contents) {
      DT_RETURN_IF_ERROR(internal::CreateFile(Path(c.layout), c.layout));
    }
    return absl::OkStatus();
  }

  absl::Status Commit(const std::string& manifest) const {
    DT_RETURN_IF_ERROR(WriteFile((partial_ / kManifest).string(), manifest));
    DT_RETURN_IF_ERROR(SyncFolder(partial_));
    // One that is there changes places with the new one, so there always is one.
    const unsigned how = fs::exists(place_) ? RENAME_EXCHANGE : 0;
    if (renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, place_.c_str(), how) != 0) {
      return Unwritable(place_, errno);
    }
    return SyncFolder(dir_);
  }

  void DropPartial() const {
    std::error_code error;
    fs::remove_all(partial_, error);
  }
  void DropOld(int keep) const {
    std::error_code error;
    auto steps = List(dir_).steps;
    const auto is_new = [&](const auto& s) { return s.second == place_; };
    steps.erase(std::remove_if(steps.begin(), steps.end(), is_new), steps.end());
    for (int left = static_cast<int>(steps.size()); left > std::max(keep, 1) - 1; --left) {
      const fs::path& old = steps[steps.size() - static_cast<size_t>(left)].second;
      fs::remove(old / kManifest, error);  // first: what is half removed is no checkpoint
      fs::remove_all(old, error);
    }
  }

 private:
  const fs::path dir_, place_, partial_;
};

absl::StatusOr<std::vector<uint64_t>> WriteAll(const Saving& saving,
                                               const std::vector<Content>& contents) {
  std::vector<uint64_t> sums;
  for (const Content& c : contents) {
    DT_ASSIGN_OR_RETURN(const std::vector<uint64_t> part,
                        internal::WriteParts(saving.Path(c.layout), c.layout, c.values));
    sums.insert(sums.end(), part.begin(), part.end());
  }
  return sums;
}

absl::Status Save(const Saving& saving, std::vector<Content>* contents,
                  const CheckpointInfo& info) {
  const bool first = RankContext::Current().rank() == 0;
  DT_RETURN_IF_ERROR(
      Agree("checkpoint_prepare", first ? saving.Prepare(*contents) : absl::OkStatus()).status());
  DT_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums,
                      AddUp("checkpoint_write", WriteAll(saving, *contents)));
  size_t next = 0;
  for (Content& c : *contents) {
    for (FileTensor& t : c.layout.tensors) t.sum = sums[next++];
  }
  const auto commit = [&] { return saving.Commit(ManifestOf(*contents, info).dump(1) + "\n"); };
  return Agree("checkpoint_commit", first ? commit() : absl::OkStatus()).status();
}

// --- what is loaded ---

// A manifest as it was written.
struct Manifest {
  CheckpointInfo info = {};
  std::string generator = {};
  std::vector<FileLayout> files = {};
};

absl::StatusOr<FileLayout> LayoutOf(const json& file) {
  std::vector<FileTensor> tensors;
  for (const json& t : file.at("tensors")) {
    const auto shape = t.at("shape").get<std::vector<int64_t>>();
    FileTensor tensor = {.name = t.at("name"), .shape = Shape(shape.begin(), shape.end())};
    if (!ParseDType(t.at("dtype").get<std::string>(), &tensor.dtype) ||
        !absl::SimpleHexAtoi(t.at("sum").get<std::string>(), &tensor.sum)) {
      return absl::DataLossError(absl::StrCat("tensor ", tensor.name, " is described wrongly"));
    }
    tensors.push_back(std::move(tensor));
  }
  DT_ASSIGN_OR_RETURN(FileLayout layout,
                      internal::LayOut(file.at("file").get<std::string>(), std::move(tensors)));
  if (layout.bytes == file.at("bytes").get<int64_t>()) return layout;
  return absl::DataLossError(
      absl::StrCat("the size of ", layout.file, " does not fit its tensors"));
}

absl::StatusOr<Manifest> Parse(const std::string& text) {
  const absl::Status foreign = absl::DataLossError("it is not as it was written, or no manifest");
  const absl::StatusOr<json> parsed = ParseJsonObject(text, "it", /*most_depth=*/8);
  if (!parsed.ok()) return foreign;
  json all = *parsed;
  if (!all.contains("dtensor_checkpoint") || !all.contains("sum") ||
      all["sum"] != Hex(SumOf(all["dtensor_checkpoint"].dump()))) {
    return foreign;
  }
  const json& body = all["dtensor_checkpoint"];
  try {
    if (body.at("version") != kVersion) {
      return absl::DataLossError(
          absl::StrCat("version ", body.at("version").dump(), ", this program reads ", kVersion));
    }
    Manifest manifest = {
        .info = {body.at("step"), body.at("notes")},
        .generator = absl::HexStringToBytes(body.at("generator").get<std::string>())};
    if (manifest.info.step < 0) return foreign;
    for (const json& file : body.at("files")) {
      DT_ASSIGN_OR_RETURN(FileLayout layout, LayoutOf(file));
      manifest.files.push_back(std::move(layout));
    }
    return manifest;
  } catch (const json::exception&) {
    return foreign;
  }
}

// The folder to load, its manifest's text, and what else lies in `path`.
struct Found {
  std::string folder = {}, text = {};
  std::vector<std::string> ignored = {};
};
absl::StatusOr<Found> Find(const std::string& path) {
  Found found = {.folder = path};
  std::error_code error;
  if (!fs::is_directory(path, error)) {
    return absl::NotFoundError(absl::StrCat(path, " is no folder of checkpoints"));
  }
  if (!fs::exists(fs::path(path) / kManifest, error)) {
    const Listing all = List(path);
    if (all.steps.empty()) {
      const std::string beside =
          all.others.empty() ? "" : absl::StrCat(", only ", absl::StrJoin(all.others, ", "));
      return absl::NotFoundError(
          absl::StrCat(path, " has no checkpoint (step-*/", kManifest, ")", beside));
    }
    found.folder = all.steps.back().second.string();
    found.ignored = all.others;
  }
  DT_ASSIGN_OR_RETURN(found.text,
                      ReadFile((fs::path(found.folder) / kManifest).string(), int64_t{100} << 20));
  return found;
}

// Rank 0 looks, and all go on with what it found.
absl::StatusOr<Found> FindForAll(const std::string& path) {
  absl::StatusOr<Found> found = Found{};
  if (RankContext::Current().rank() == 0) found = Find(path);
  // No path has a NUL, no name in a folder a slash; the text, which may have any bytes, is last.
  const auto bytes = [&] {
    const std::string nul(1, '\0');
    return absl::StrCat(found->folder, nul, absl::StrJoin(found->ignored, "/"), nul, found->text);
  };
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      Agree("checkpoint_find", found.status(), found.ok() ? bytes() : ""));
  const std::vector<std::string> said = absl::StrSplit(all[0], absl::MaxSplits('\0', 2));
  return Found{said[0], said[2], absl::StrSplit(said[1], '/', absl::SkipEmpty())};
}

using Specs = std::vector<std::pair<std::string, SpecRef>>;

// What does not fit between a file and what is wanted of it. `partly`: some may be missing.
void Compare(const FileLayout& file, const Specs& wanted, bool partly, std::vector<SpecRef>* specs,
             std::vector<std::string>* problems) {
  absl::flat_hash_map<std::string, SpecRef> by_name(wanted.begin(), wanted.end());
  for (const FileTensor& t : file.tensors) {
    const auto at = by_name.find(t.name);
    if (at == by_name.end()) {
      problems->push_back(absl::StrCat("unexpected ", t.name));
      continue;
    }
    const Spec& spec = *at->second;
    if (spec.shape() != t.shape || spec.dtype() != t.dtype) {
      problems->push_back(
          absl::StrCat(t.name, " is ", std::string(Name(t.dtype)), " ", ToString(t.shape),
                       ", must be ", std::string(Name(spec.dtype())), " ", ToString(spec.shape())));
    }
    specs->push_back(at->second);
    by_name.erase(at);
  }
  if (partly) return;
  for (const auto& [name, spec] : wanted) {
    if (by_name.contains(name)) problems->push_back(absl::StrCat("missing ", name));
  }
}

DTensor Placed(const Tensor& part, const Spec& spec) {
  const Placements placements(spec.placements().begin(), spec.placements().end());
  if (!part.defined()) return empty(spec.shape(), {spec.dtype(), spec.mesh(), placements});
  const DTensor local = OnSelf(ValueOrThrow(part.To(spec.mesh().device())));
  if (spec.mesh().is_self()) return local;
  return FromLocal(local, spec.mesh(), placements, {.shape = spec.shape()});
}

// Reads a file and compares its checksums, which takes all ranks.
absl::StatusOr<StateDict> Read(const std::string& folder, const FileLayout& file,
                               const std::vector<SpecRef>& specs) {
  const std::string path = (fs::path(folder) / file.file).string();
  const absl::StatusOr<internal::PartsRead> read = internal::ReadParts(path, file, specs);
  const auto mine = [&]() -> absl::StatusOr<std::vector<uint64_t>> {
    if (!read.ok()) return read.status();
    return read->sums;
  };
  DT_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums, AddUp("checkpoint_read", mine()));
  StateDict state;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (sums[i] != file.tensors[i].sum) {
      return absl::DataLossError(absl::StrCat(path, ": ", file.tensors[i].name,
                                              " was changed: its checksum is ", Hex(sums[i]),
                                              ", must be ", Hex(file.tensors[i].sum)));
    }
    state.emplace_back(file.tensors[i].name, Placed(read->parts[i], *specs[i]));
  }
  return state;
}

// Both or none.
void Apply(const StateDict& model_state, const StateDict& optimizer_state, Module& model,
           Optimizer& optimizer) {
  const StateDict before = optimizer.GetStateDict();
  optimizer.LoadStateDict(optimizer_state);
  try {
    model.LoadStateDict(model_state);
  } catch (...) {
    optimizer.LoadStateDict(before);
    throw;
  }
}

absl::StatusOr<LoadedCheckpoint> Load(
    const Found& found, Module& model, Optimizer& optimizer,
    const std::function<absl::Status(const CheckpointInfo&)>& accepts) {
  const std::string where = (fs::path(found.folder) / kManifest).string();
  const absl::StatusOr<Manifest> manifest = Parse(found.text);
  if (!manifest.ok()) return Prefixed(where, manifest.status());
  const auto is = [&](size_t i, absl::string_view name) { return manifest->files[i].file == name; };
  if (manifest->files.size() != 2 || !is(0, kModelFile) || !is(1, kOptimizerFile)) {
    return absl::DataLossError(
        absl::StrCat(where, ": the files it names must be ", kModelFile, " and ", kOptimizerFile));
  }
  Specs wanted;
  for (const auto& [name, value] : TensorsOf(model)) wanted.emplace_back(name, value.spec_ref());
  std::vector<SpecRef> specs[2];
  std::vector<std::string> problems;
  Compare(manifest->files[0], wanted, false, &specs[0], &problems);
  Compare(manifest->files[1], optimizer.StateSpecs(), true, &specs[1], &problems);
  if (!problems.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        found.folder, " does not fit, nothing was loaded: ", absl::StrJoin(problems, "; ")));
  }
  if (accepts) {
    const absl::Status accepted = accepts(manifest->info);
    if (!accepted.ok()) return Prefixed(found.folder, accepted);
  }
  DT_ASSIGN_OR_RETURN(const StateDict model_state,
                      Read(found.folder, manifest->files[0], specs[0]));
  DT_ASSIGN_OR_RETURN(const StateDict optimizer_state,
                      Read(found.folder, manifest->files[1], specs[1]));
  Generator generator = DefaultGenerator();
  DT_RETURN_IF_ERROR(generator.SetState(absl::MakeConstSpan(
      reinterpret_cast<const uint8_t*>(manifest->generator.data()), manifest->generator.size())));
  Apply(model_state, optimizer_state, model, optimizer);
  DefaultGenerator() = generator;
  return LoadedCheckpoint{manifest->info, found.folder, found.ignored};
}

}  // namespace

absl::StatusOr<std::string> SaveCheckpoint(const std::string& dir, const Module& model,
                                           const Optimizer& optimizer, const CheckpointInfo& info,
                                           const SaveOptions& options) {
  try {
    const NoGrad no_grad;
    std::vector<Content> contents(2);
    DT_ASSIGN_OR_RETURN(contents[0], ContentOf(kModelFile, TensorsOf(model)));
    DT_ASSIGN_OR_RETURN(contents[1], ContentOf(kOptimizerFile, optimizer.GetStateDict()));
    const Saving saving(dir, info.step);
    const absl::Status status = Save(saving, &contents, info);
    if (RankContext::Current().rank() == 0) {
      saving.DropPartial();
      if (status.ok()) saving.DropOld(options.keep);
    }
    if (!status.ok()) return status;
    return saving.place().string();
  } catch (...) {
    return CurrentException();
  }
}

absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(
    const std::string& path, Module& model, Optimizer& optimizer,
    const std::function<absl::Status(const CheckpointInfo&)>& accepts) {
  try {
    const NoGrad no_grad;
    DT_ASSIGN_OR_RETURN(const Found found, FindForAll(path));
    return Load(found, model, optimizer, accepts);
  } catch (...) {
    return CurrentException();
  }
}

}  // namespace dtensor
