#include "dtensor/parallel/models/pretrained.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "dtensor/impl.h"
#include "dtensor/names.h"
#include "dtensor/parallel/io/json.h"
#include "dtensor/parallel/models/config_fields.h"
#include "dtensor/tensor/file.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

namespace fs = std::filesystem;

using Place = TensorFolder::Place;

// What a folder has for one logical tensor, under one name or several.
struct Source {
  Parameter* parameter;
  std::vector<std::string> names = {};  // of the parameter
  std::vector<std::pair<std::string, Place>> found = {};
};

bool SameKind(DType parameter, const std::string& file) {
  const std::optional<DType> dtype = FromSafetensorsName(file);
  return dtype && (*dtype == parameter || (IsFloating(*dtype) && IsFloating(parameter)));
}

// The tensors of a model that are in files, by the names that files have for them.
class NamesInFiles {
 public:
  explicit NamesInFiles(const Module& model) : lm_(dynamic_cast<const CausalLM*>(&model)) {
    for (const NamedParameter& p : model.NamedTensors()) {
      if (!p.parameter->persistent()) continue;
      tensors_.push_back({p.parameter, p.aliases});
      std::vector<std::string>& names = tensors_.back().names;
      names.insert(names.begin(), p.fqn);
      for (const std::string& name : names) by_name_[name] = tensors_.size() - 1;
    }
  }

  const std::vector<Source>& tensors() const { return tensors_; }
  // Which of them it is, by its own name or behind the prefix that files may leave out; null where
  // it is none.
  const size_t* Find(const std::string& name) const {
    auto at = by_name_.find(name);
    if (at == by_name_.end() && lm_ != nullptr) at = by_name_.find(lm_->file_prefix() + name);
    return at == by_name_.end() ? nullptr : &at->second;
  }
  bool Ignores(const std::string& name) const { return lm_ != nullptr && lm_->IgnoresTensor(name); }

 private:
  const CausalLM* const lm_;
  std::vector<Source> tensors_;
  std::map<std::string, size_t> by_name_;
};

// Which tensor of a folder is which of the model's.
class Matcher {
 public:
  Matcher(const Module& model, const TensorFolder& folder, bool allow_missing)
      : names_(model), folder_(folder), allow_missing_(allow_missing), sources_(names_.tensors()) {
    for (const Source& s : sources_) known_.insert(known_.end(), s.names.begin(), s.names.end());
  }

  // All of the model's tensors; those that are missing, where they may be, without a place.
  absl::StatusOr<std::vector<Source>> Match() {
    for (const auto& [name, place] : folder_.tensors()) Take(name, place);
    for (const Source& s : sources_) {
      if (!s.found.empty() || allow_missing_) continue;
      Problem("tensor \"", s.names[0], "\" is missing", Nearest(s.names[0], surplus_));
    }
    for (size_t i = 0; problems_.empty() && i < sources_.size(); ++i) {
      if (!sources_[i].found.empty()) DT_RETURN_IF_ERROR(CompareNames(sources_[i]));
    }
    if (problems_.empty()) return std::move(sources_);
    const size_t more = count_ - problems_.size();
    return absl::InvalidArgumentError(
        absl::StrCat("nothing was loaded: ", absl::StrJoin(problems_, "; "),
                     more > 0 ? absl::StrCat("; and ", more, " more") : ""));
  }

 private:
  // The first are told and the rest counted: a file may have millions.
  static constexpr size_t kShown = 20;
  void Problem(const auto&... what) {
    if (++count_ <= kShown) problems_.push_back(absl::StrCat(what...));
  }
  // For a problem that will be told: what its name may have been meant to be.
  std::string Nearest(const std::string& name, const std::vector<std::string>& names) const {
    if (count_ >= kShown || names.empty()) return "";
    return absl::StrCat(" (nearest: ", NearestNames(name, names, 1)[0], ")");
  }

  void Take(const std::string& name, const Place& place) {
    const std::string in = absl::StrCat(" in ", place.file->path());
    const size_t* const at = names_.Find(name);
    if (at == nullptr) {
      if (names_.Ignores(name)) return;
      Problem("tensor \"", name, "\"", in, " is none of the model's", Nearest(name, known_));
      if (count_ <= kShown) surplus_.push_back(name);
      return;
    }
    Source& source = sources_[*at];
    const Parameter& p = *source.parameter;
    if (place.entry->shape != p.shape()) {
      Problem("tensor \"", name, "\"", in, " has shape ", ToString(place.entry->shape),
              ", the model's has ", ToString(p.shape()));
    } else if (!SameKind(p.dtype(), place.entry->dtype)) {
      Problem("tensor \"", name, "\"", in, " has dtype ", place.entry->dtype, ", the model's has ",
              std::string(Name(p.dtype())));
    }
    source.found.emplace_back(name, place);
  }

  // Names of one parameter must say the same. Each rank of its mesh compares every n-th piece, and
  // all hear of what one finds.
  absl::Status CompareNames(const Source& s) {
    constexpr int64_t kPiece = int64_t{1} << 20;
    const DeviceMesh& mesh = s.parameter->mesh();
    Dims coordinate;  // none on Self, where every rank loads for itself
    if (!mesh.Coordinate(RankContext::Current().rank(), &coordinate)) return absl::OkStatus();
    int64_t mine = 0;
    for (int m = 0; m < mesh.ndim(); ++m) mine = mine * mesh.size(m) + coordinate[m];
    const auto& [first, a] = s.found[0];
    for (size_t k = 1; k < s.found.size(); ++k) {
      const auto& [name, b] = s.found[k];
      const int64_t bytes = a.entry->end - a.entry->begin;
      bool same = a.entry->dtype == b.entry->dtype;
      std::string x(std::min(bytes, kPiece), '\0'), y = x;
      for (int64_t at = mine * kPiece; same && at < bytes; at += mesh.size() * kPiece) {
        const int64_t n = std::min(kPiece, bytes - at);
        DT_RETURN_IF_ERROR(a.file->Read(a.entry->begin + at, n, x.data()));
        DT_RETURN_IF_ERROR(b.file->Read(b.entry->begin + at, n, y.data()));
        same = std::equal(x.begin(), x.begin() + n, y.begin());
      }
      if (!same) {
        Problem("tensors \"", first, "\" in ", a.file->path(), " and \"", name, "\" in ",
                b.file->path(), " are one parameter, but their values differ");
      }
    }
    return absl::OkStatus();
  }

  const NamesInFiles names_;
  const TensorFolder& folder_;
  const bool allow_missing_;
  std::vector<Source> sources_;
  std::vector<std::string> known_;    // names of the model's tensors
  std::vector<std::string> surplus_;  // names of the folder's that are none of these: the first
  size_t count_ = 0;                  // of problems
  std::vector<std::string> problems_;
};

// This rank's part of a parameter, read.
absl::StatusOr<DTensor> ReadPart(const Source& source) {
  Parameter& p = *source.parameter;
  Placements placements = p.placements();
  placements.resize(p.mesh().ndim());
  try {
    if (p.materialized()) internal::Here(p.tensor(), p.fqn());
    const DTensor t = empty(p.shape(), {p.dtype(), p.mesh(), placements});
    if (t.spec().in_mesh()) {
      const absl::Status read =
          ReadStretches(source.found[0].second, LocalStretches(t.spec()), t.local());
      if (!read.ok()) return Prefixed(absl::StrCat("tensor \"", source.found[0].first, "\""), read);
    }
    return t;
  } catch (...) {
    return CurrentException();
  }
}

struct Loaded {
  std::vector<std::pair<Parameter*, DTensor>> values = {};
  FolderForm form = {};
  std::vector<std::string> missing = {};  // names of tensors that the folder lacks
};

absl::StatusOr<Loaded> ReadAll(Module& model, const std::string& folder,
                               const LoadPretrainedOptions& options) {
  DT_ASSIGN_OR_RETURN(const TensorFolder files, TensorFolder::Open(folder, options.files));
  absl::StatusOr<std::vector<Source>> sources =
      Matcher(model, files, options.allow_missing).Match();
  if (!sources.ok()) return Prefixed(folder, sources.status());
  DT_RETURN_IF_ERROR(files.total());
  Loaded loaded;
  DT_ASSIGN_OR_RETURN(loaded.form, files.Form());
  for (const Source& s : *sources) {
    if (s.found.empty()) {
      loaded.missing.push_back(s.names[0]);
      continue;
    }
    if (!s.parameter->materialized()) internal::ApplyMaterializeAs(s.parameter);
    DT_ASSIGN_OR_RETURN(DTensor part, ReadPart(s));
    loaded.values.emplace_back(s.parameter, std::move(part));
  }
  return loaded;
}

// The tensors under the names that `form` has for them. What it has besides and the model ignores
// is taken out of it; all of it, where it lacks a tensor of the model's.
StateDict TensorsLike(const NamesInFiles& names, FolderForm* form) {
  StateDict out;
  std::set<size_t> found;
  for (FolderForm::File& file : form->files) {
    for (auto entry = file.entries.begin(); entry != file.entries.end();) {
      const size_t* const at = names.Find(entry->first);
      if (at == nullptr) {
        entry = file.entries.erase(entry);
        file.header.clear();
        continue;
      }
      found.insert(*at);
      out.emplace_back(entry->first, names.tensors()[*at].parameter->tensor().Detach());
      ++entry;
    }
  }
  std::erase_if(form->files, [](const FolderForm::File& file) { return file.entries.empty(); });
  if (found.size() < names.tensors().size()) *form = {};
  return out;
}

// A config that says the dtype of the weights; the same text where it does already.
std::string WithDType(const std::string& text, DType dtype) {
  auto config = nlohmann::ordered_json::parse(text, nullptr, /*allow_exceptions=*/false);
  const char* const key = config.contains("torch_dtype") ? "torch_dtype" : "dtype";
  if (config.is_discarded() || !config.contains(key) || config[key] == Name(dtype)) return text;
  config[key] = Name(dtype);
  return config.dump(2) + "\n";
}

// The distinct meshes of a model's tensors, in order.
std::vector<DeviceMesh> MeshesOf(const Module& model) {
  std::vector<DeviceMesh> meshes;
  for (const NamedParameter& p : model.NamedTensors()) {
    if (std::find(meshes.begin(), meshes.end(), p.parameter->mesh()) == meshes.end()) {
      meshes.push_back(p.parameter->mesh());
    }
  }
  return meshes;
}

void TellMissing(const std::string& folder, std::vector<std::string> names,
                 const DeviceMesh& mesh) {
  constexpr size_t kShown = 20;
  const int64_t first = mesh.is_self() ? 0 : mesh.MinRank();
  if (RankContext::Current().rank() != first) return;
  const size_t count = names.size();
  names.resize(std::min(count, kShown));
  absl::FPrintF(stderr,
                "warning: %s lacks %d of the model's tensors, which are as they were made: %s%s\n",
                folder, count, absl::StrJoin(names, ", "),
                count > kShown ? absl::StrCat(" and ", count - kShown, " more") : "");
}

}  // namespace

std::unique_ptr<CausalLM> MakeModel(const ModelConfig& config) {
  std::unique_ptr<CausalLM> model;
  if (const auto* llama = std::get_if<LlamaConfig>(&config.model)) {
    model = std::make_unique<Llama>(*llama);
  } else {
    model = std::make_unique<GPT2>(std::get<GPT2Config>(config.model));
  }
  SetDType(*model, config.dtype);
  model->companions = config.files;
  if (config.files.empty()) model->companions = {{"config.json", ModelConfigJson(config)}};
  return model;
}

Plan PlanFor(const ModelConfig& config, const ModelPlanOptions& options) {
  const auto* llama = std::get_if<LlamaConfig>(&config.model);
  return llama != nullptr ? LlamaPlan(*llama, options)
                          : GPT2Plan(std::get<GPT2Config>(config.model), options);
}

absl::Status LoadPretrained(Module& model, const std::string& folder,
                            const LoadPretrainedOptions& options) {
  auto loaded = ReadAll(model, folder, options);
  absl::Status status = loaded.status();
  for (const NamedParameter& p : model.NamedParameters()) {
    if (!p.parameter->materialized() || p.parameter->mesh().device() != DeviceType::kMeta) continue;
    status.Update(absl::FailedPreconditionError(
        absl::StrCat("parameter ", p.fqn,
                     " was materialised on meta and holds no values; load into the model "
                     "as it was made, or materialise it elsewhere")));
  }
  const std::vector<DeviceMesh> meshes = MeshesOf(model);
  for (const DeviceMesh& mesh : meshes) status = Agree(mesh, "load_pretrained", status);
  if (!status.ok()) return Prefixed("[load_pretrained]", status);
  if (!loaded->missing.empty()) TellMissing(folder, loaded->missing, meshes[0]);
  for (auto& [parameter, value] : loaded->values) parameter->Take(std::move(value));
  if (auto* lm = dynamic_cast<CausalLM*>(&model)) lm->form = std::move(loaded->form);
  try {
    Materialize(model);  // hooks, and what is in no file
  } catch (...) {
    return CurrentException();
  }
  return absl::OkStatus();
}

absl::Status CheckExportFolder(const std::string& folder, const std::set<std::string>& names) {
  std::vector<std::string> known(std::begin(internal::kTokenizerFiles),
                                 std::end(internal::kTokenizerFiles));
  known.emplace_back(internal::kGenerationFile);
  std::error_code none;
  if (fs::exists(fs::path(folder) / "checkpoint.json", none)) {
    return absl::FailedPreconditionError(
        absl::StrCat(folder,
                     " is a checkpoint of a training (it has a checkpoint.json), which a "
                     "model would be written over; choose another folder"));
  }
  for (const std::string& name : known) {
    std::error_code error;
    if (names.contains(name) || !fs::exists(fs::path(folder) / name, error)) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(folder, " has a ", name,
                     " that is not this model's and would be taken for it; choose another folder, "
                     "or move the file away"));
  }
  return absl::OkStatus();
}

absl::Status SavePretrained(const Module& model, const std::string& folder,
                            const WriteOptions& options) {
  const NamesInFiles names(model);
  StateDict tensors;
  for (const Source& t : names.tensors()) {
    if (!t.parameter->materialized()) {
      return absl::FailedPreconditionError(absl::StrCat("[save_pretrained] parameter ", t.names[0],
                                                        " has no values; Materialize the model"));
    }
    tensors.emplace_back(t.names[0], t.parameter->tensor().Detach());
  }
  WriteOptions all = options;
  const auto* lm = dynamic_cast<const CausalLM*>(&model);
  if (lm != nullptr && !tensors.empty()) {
    for (const auto& [name, text] : lm->companions) {
      all.texts[name] = name == "config.json" ? WithDType(text, tensors[0].second.dtype()) : text;
    }
    if (!all.most_bytes && all.like.files.empty()) {
      all.like = lm->form;
      StateDict as_they_came = TensorsLike(names, &all.like);
      if (!all.like.files.empty()) tensors = std::move(as_they_came);
    }
  }
  absl::Status status;
  if (lm != nullptr) {
    std::set<std::string> texts;
    for (const auto& [name, text] : all.texts) texts.insert(name);
    status = CheckExportFolder(folder, texts);
    for (const DeviceMesh& mesh : MeshesOf(model)) status = Agree(mesh, "save_pretrained", status);
  }
  if (status.ok()) status = WriteTensors(tensors, folder, all);
  return status.ok() ? status : Prefixed("[save_pretrained]", status);
}

}  // namespace dtensor
