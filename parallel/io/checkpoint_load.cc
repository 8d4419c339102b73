// Reading a checkpoint: found by rank 0, compared by all, and put into place when all of it is
// there.
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/impl.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/parallel/io/checkpoint_parts.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;
using internal::AddUp;
using internal::AgreeAll;
using internal::FileLayout;
using internal::FileTensor;
using internal::kManifest;
using internal::Manifest;

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
    const internal::CheckpointListing all = internal::ListCheckpoints(path);
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
  if (RankContext::Current().rank() == 0) {
    found = internal::Guarded([&] { return Find(path); });
  }
  // No path has a NUL, no name in a folder a slash; the text, which may have any bytes, is last.
  const auto bytes = [&] {
    const std::string nul(1, '\0');
    return absl::StrCat(found->folder, nul, absl::StrJoin(found->ignored, "/"), nul, found->text);
  };
  DT_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                      AgreeAll("checkpoint_find", found.status(), found.ok() ? bytes() : ""));
  const std::vector<std::string> said = absl::StrSplit(all[0], absl::MaxSplits('\0', 2));
  return Found{said[0], said[2], absl::StrSplit(said[1], '/', absl::SkipEmpty())};
}

using Specs = std::vector<std::pair<std::string, SpecRef>>;

// The first names of tied tensors, by their others: a model that was built in another order has
// saved under one of these.
using FirstNames = absl::flat_hash_map<std::string, std::string>;
FirstNames FirstNamesOf(const Module& model) {
  FirstNames names;
  for (const NamedParameter& p : model.NamedTensors()) {
    for (const std::string& alias : p.aliases) names[alias] = p.fqn;
  }
  return names;
}

// The name here of a parameter, or of a state of one ("<name>/exp_avg").
std::string NameHere(const std::string& name, const FirstNames& first) {
  const auto whole = first.find(name);
  if (whole != first.end()) return whole->second;
  const size_t slash = name.rfind('/');
  const auto of = slash == std::string::npos ? first.end() : first.find(name.substr(0, slash));
  return of == first.end() ? name : of->second + name.substr(slash);
}

// What does not fit between a file and what is wanted of it. `partly`: some may be missing.
void Compare(const FileLayout& file, const Specs& wanted, const FirstNames& first, bool partly,
             std::vector<SpecRef>* specs, std::vector<std::string>* problems) {
  absl::flat_hash_map<std::string, SpecRef> by_name(wanted.begin(), wanted.end());
  for (const FileTensor& t : file.tensors) {
    auto at = by_name.find(t.name);
    if (at == by_name.end()) at = by_name.find(NameHere(t.name, first));
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
  const absl::StatusOr<internal::PartsRead> read =
      internal::Guarded([&] { return internal::ReadParts(path, file, specs); });
  const auto mine = [&]() -> absl::StatusOr<std::vector<uint64_t>> {
    if (!read.ok()) return read.status();
    return read->sums;
  };
  DT_ASSIGN_OR_RETURN(const std::vector<uint64_t> sums, AddUp("checkpoint_read", mine()));
  StateDict state;
  for (size_t i = 0; i < specs.size(); ++i) {
    if (sums[i] != file.tensors[i].sum) {
      return absl::DataLossError(
          absl::StrCat(path, ": ", file.tensors[i].name, " was changed: its checksum is ",
                       internal::Hex(sums[i]), ", must be ", internal::Hex(file.tensors[i].sum)));
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

// This rank's: all have one, or each its own in a world of that size, else the first one's.
std::string GeneratorOf(const Manifest& manifest) {
  const size_t size = DefaultGenerator().State().size();
  const RankContext& rank = RankContext::Current();
  const bool own = manifest.generator.size() == size * static_cast<size_t>(rank.world_size());
  return manifest.generator.substr(own ? size * static_cast<size_t>(rank.rank()) : 0, size);
}

absl::StatusOr<LoadedCheckpoint> Load(
    const Found& found, Module& model, Optimizer& optimizer,
    const std::function<absl::Status(const CheckpointInfo&)>& accepts) {
  const std::string where = (fs::path(found.folder) / kManifest).string();
  const absl::StatusOr<Manifest> manifest = internal::ParseManifest(found.text);
  if (!manifest.ok()) return Prefixed(where, manifest.status());
  const auto is = [&](size_t i, absl::string_view name) { return manifest->files[i].file == name; };
  if (manifest->files.size() != 2 || !is(0, internal::kModelFile) ||
      !is(1, internal::kOptimizerFile)) {
    return absl::DataLossError(absl::StrCat(where, ": the files it names must be ",
                                            internal::kModelFile, " and ",
                                            internal::kOptimizerFile));
  }
  std::vector<SpecRef> specs[2];
  const absl::Status fits = internal::Guarded([&]() -> absl::Status {
    Specs wanted;
    for (const auto& [name, value] : internal::TensorsOf(model))
      wanted.emplace_back(name, value.spec_ref());
    for (const DTensor& t : optimizer.Written()) DT_RETURN_IF_ERROR(internal::Entered(t).status());
    std::vector<std::string> problems;
    const FirstNames first = FirstNamesOf(model);
    Compare(manifest->files[0], wanted, first, false, &specs[0], &problems);
    Compare(manifest->files[1], optimizer.StateSpecs(), first, true, &specs[1], &problems);
    if (!problems.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          found.folder, " does not fit, nothing was loaded: ", absl::StrJoin(problems, "; ")));
    }
    const absl::Status accepted = accepts ? accepts(manifest->info) : absl::OkStatus();
    return accepted.ok() ? accepted : Prefixed(found.folder, accepted);
  });
  // One rank alone may have another model, or other data.
  DT_RETURN_IF_ERROR(AgreeAll("checkpoint_fits", fits).status());
  DT_ASSIGN_OR_RETURN(const StateDict model_state,
                      Read(found.folder, manifest->files[0], specs[0]));
  DT_ASSIGN_OR_RETURN(const StateDict optimizer_state,
                      Read(found.folder, manifest->files[1], specs[1]));
  Generator generator = DefaultGenerator();
  const std::string its = GeneratorOf(*manifest);
  DT_RETURN_IF_ERROR(generator.SetState(
      absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(its.data()), its.size())));
  Apply(model_state, optimizer_state, model, optimizer);
  DefaultGenerator() = generator;
  return LoadedCheckpoint{manifest->info, found.folder, found.ignored};
}

}  // namespace

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
