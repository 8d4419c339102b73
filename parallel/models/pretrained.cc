#include "dtensor/parallel/models/pretrained.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/parallel/io/json.h"
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

// Which tensor of a folder is which of the model's.
class Matcher {
 public:
  Matcher(const Module& model, const TensorFolder& folder)
      : lm_(dynamic_cast<const CausalLM*>(&model)), folder_(folder) {
    for (const NamedParameter& p : model.NamedTensors()) {
      if (!p.parameter->persistent()) continue;
      sources_.push_back({p.parameter, p.aliases});
      sources_.back().names.insert(sources_.back().names.begin(), p.fqn);
      for (const std::string& name : sources_.back().names) {
        by_name_[name] = sources_.size() - 1;
        known_.push_back(name);
      }
    }
  }

  absl::StatusOr<std::vector<Source>> Match() {
    for (const auto& [name, place] : folder_.tensors()) Take(name, place);
    std::vector<std::string> there;
    for (const auto& [name, place] : folder_.tensors()) there.push_back(name);
    for (const Source& s : sources_) {
      if (s.found.empty()) {
        const auto nearest = NearestNames(s.names[0], there, 1);
        Problem("tensor \"", s.names[0], "\" is missing",
                nearest.empty() ? "" : absl::StrCat(" (nearest: ", nearest[0], ")"));
      }
    }
    for (size_t i = 0; problems_.empty() && i < sources_.size(); ++i) {
      DT_RETURN_IF_ERROR(CompareNames(sources_[i]));
    }
    if (problems_.empty()) return std::move(sources_);
    constexpr size_t kShown = 20;
    const size_t count = problems_.size();
    if (count > kShown) problems_.resize(kShown);
    return absl::InvalidArgumentError(
        absl::StrCat("nothing was loaded: ", absl::StrJoin(problems_, "; "),
                     count > kShown ? absl::StrCat("; and ", count - kShown, " more") : ""));
  }

 private:
  void Problem(const auto&... what) { problems_.push_back(absl::StrCat(what...)); }

  // By its own name, or behind the prefix that files may leave out.
  const size_t* Find(const std::string& name) const {
    auto at = by_name_.find(name);
    if (at == by_name_.end() && lm_ != nullptr) at = by_name_.find(lm_->file_prefix() + name);
    return at == by_name_.end() ? nullptr : &at->second;
  }

  void Take(const std::string& name, const Place& place) {
    const std::string in = absl::StrCat(" in ", place.file->path());
    const size_t* const at = Find(name);
    if (at == nullptr) {
      if (lm_ != nullptr && lm_->IgnoresTensor(name)) return;
      const auto nearest = NearestNames(name, known_, 1);
      Problem("tensor \"", name, "\"", in, " is none of the model's",
              nearest.empty() ? "" : absl::StrCat(" (nearest: ", nearest[0], ")"));
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

  // Names of one parameter must say the same.
  absl::Status CompareNames(const Source& s) {
    constexpr int64_t kChunk = int64_t{1} << 20;
    const auto& [first, a] = s.found[0];
    for (size_t k = 1; k < s.found.size(); ++k) {
      const auto& [name, b] = s.found[k];
      const int64_t bytes = a.entry->end - a.entry->begin;
      bool same = a.entry->dtype == b.entry->dtype;
      std::string x(std::min(bytes, kChunk), '\0'), y = x;
      for (int64_t at = 0; same && at < bytes; at += kChunk) {
        const int64_t n = std::min(kChunk, bytes - at);
        DT_RETURN_IF_ERROR(a.file->Read(a.entry->begin + at, n, x.data()));
        DT_RETURN_IF_ERROR(b.file->Read(b.entry->begin + at, n, y.data()));
        same = x == y;
      }
      if (!same) {
        Problem("tensors \"", first, "\" in ", a.file->path(), " and \"", name, "\" in ",
                b.file->path(), " are one parameter, but their values differ");
      }
    }
    return absl::OkStatus();
  }

  const CausalLM* const lm_;
  const TensorFolder& folder_;
  std::vector<Source> sources_;
  std::map<std::string, size_t> by_name_;
  std::vector<std::string> known_, problems_;
};

// This rank's part of a parameter, read.
absl::StatusOr<DTensor> ReadPart(const Source& source) {
  Parameter& p = *source.parameter;
  Placements placements = p.placements();
  placements.resize(p.mesh().ndim());
  try {
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

absl::StatusOr<std::vector<std::pair<Parameter*, DTensor>>> ReadAll(
    Module& model, const std::string& folder, const SafetensorsOptions& options) {
  DT_ASSIGN_OR_RETURN(const TensorFolder files, TensorFolder::Open(folder, options));
  absl::StatusOr<std::vector<Source>> sources = Matcher(model, files).Match();
  if (!sources.ok()) return Prefixed(folder, sources.status());
  DT_RETURN_IF_ERROR(files.total());
  std::vector<std::pair<Parameter*, DTensor>> values;
  for (const Source& s : *sources) {
    if (!s.parameter->materialized()) internal::ApplyMaterializeAs(s.parameter);
    DT_ASSIGN_OR_RETURN(DTensor part, ReadPart(s));
    values.emplace_back(s.parameter, std::move(part));
  }
  return values;
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
                            const SafetensorsOptions& options) {
  auto values = ReadAll(model, folder, options);
  absl::Status status = values.status();
  for (const DeviceMesh& mesh : MeshesOf(model)) status = Agree(mesh, "load_pretrained", status);
  if (!status.ok()) return Prefixed("[load_pretrained]", status);
  for (auto& [parameter, value] : *values) parameter->Take(std::move(value));
  try {
    Materialize(model);  // hooks, and what is in no file
  } catch (...) {
    return CurrentException();
  }
  return absl::OkStatus();
}

absl::Status SavePretrained(const Module& model, const std::string& folder,
                            const WriteOptions& options) {
  StateDict tensors;
  for (const NamedParameter& p : model.NamedTensors()) {
    if (!p.parameter->persistent()) continue;
    if (!p.parameter->materialized()) {
      return absl::FailedPreconditionError(absl::StrCat("[save_pretrained] parameter ", p.fqn,
                                                        " has no values; Materialize the model"));
    }
    tensors.emplace_back(p.fqn, p.parameter->tensor().Detach());
  }
  WriteOptions all = options;
  const auto* lm = dynamic_cast<const CausalLM*>(&model);
  if (lm != nullptr && !tensors.empty()) {
    for (const auto& [name, text] : lm->companions) {
      all.texts[name] = name == "config.json" ? WithDType(text, tensors[0].second.dtype()) : text;
    }
  }
  const absl::Status status = WriteTensors(tensors, folder, all);
  return status.ok() ? status : Prefixed("[save_pretrained]", status);
}

}  // namespace dtensor
