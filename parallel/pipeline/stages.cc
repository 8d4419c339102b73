// What stages are made of, and where they lie.
#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/parallel/pipeline/pipeline.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

DeviceMesh StageMesh(const DeviceMesh& mesh, absl::string_view mesh_dim, int stage) {
  const int dim = ValueOrThrow(mesh.DimIndex(mesh_dim));
  if (stage < 0) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[pipeline] stages are numbered from 0 on, got ", stage)));
  }
  Dims at(static_cast<size_t>(mesh.ndim()), 0);
  at[dim] = stage % mesh.size(dim);
  const int64_t first = mesh.RankAt(at);
  std::vector<int> others;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (d != dim) others.push_back(d);
  }
  if (others.empty()) {
    return ValueOrThrow(DeviceMesh::FromRanks({1}, {first}, {"stage"}, mesh.device()));
  }
  return ValueOrThrow(mesh.SubMeshByDims(others, first));
}

PipelineStage StageOf(std::vector<Module*> modules) {
  for (size_t i = 0; i < modules.size(); ++i) {
    if (modules[i] != nullptr) continue;
    Throw(absl::InvalidArgumentError(absl::StrCat("[pipeline] module ", i, " is null")));
  }
  const auto forward = [modules](const Values& inputs) {
    Values values = inputs;
    for (Module* module : modules) {
      Values made = (*module)(values);
      for (size_t i = made.size(); i < values.size(); ++i) made.Add(values.name(i), values[i]);
      values = std::move(made);
    }
    return values;
  };
  return {forward, modules};
}

absl::Status ParallelizeStages(Module& model, const DeviceMesh& mesh,
                               absl::Span<const PipelineStage> stages, const Plan& plan,
                               const ParallelizeOptions& options, absl::string_view mesh_dim) {
  const auto wrong = [](auto... parts) {
    return absl::InvalidArgumentError(absl::StrCat("[pipeline] ", parts...));
  };
  DT_RETURN_IF_ERROR(mesh.DimIndex(mesh_dim).status());
  std::map<const void*, size_t> stage_of;  // by identity: a tied one is in one stage, too
  std::vector<std::vector<Module*>> modules(stages.size());  // of each stage, each once
  for (size_t s = 0; s < stages.size(); ++s) {
    for (Module* module : stages[s].modules) {
      if (module == nullptr) return wrong("a module of stage ", s, " is null");
      if (std::find(modules[s].begin(), modules[s].end(), module) != modules[s].end()) continue;
      modules[s].push_back(module);
      for (const NamedParameter& p : module->NamedTensors()) {
        const auto [at, fresh] = stage_of.emplace(p.parameter->identity(), s);
        if (fresh || at->second == s) continue;
        return wrong(module->fqn(), ".", p.fqn, " is in stage ", at->second, " and in stage ", s,
                     "; one of them may borrow it (PipelineStage::borrows)");
      }
    }
  }
  for (const NamedParameter& p : model.NamedTensors()) {
    if (!stage_of.contains(p.parameter->identity())) return wrong(p.fqn, " is in no stage");
  }
  // Where a module of the model is: below which one of a stage's, by which name from there on.
  std::map<const Module*, std::pair<const Module*, std::string>> places;
  for (const std::vector<Module*>& of_stage : modules) {
    for (Module* module : of_stage) {
      for (const NamedModule& inner : module->NamedModules()) {
        places[inner.module] = {module, inner.fqn};
      }
    }
  }
  // A tied head: what it has is a stage's under another name, and its own stage borrows it.
  const auto borrows_all = [&](Module& module) {
    const std::vector<NamedModule> inner = module.NamedModules();
    const std::vector<NamedParameter> tensors = module.NamedTensors();
    return !tensors.empty() && std::none_of(inner.begin(), inner.end(), [&](const NamedModule& m) {
      return places.contains(m.module);
    });
  };
  std::map<const Module*, Plan> parts;
  for (const auto& [pattern, style] : plan) {
    const absl::StatusOr<std::vector<NamedModule>> matched = MatchModules(model, pattern);
    if (!matched.ok() || matched->empty()) {
      if (style.optional) continue;
      return matched.ok() ? wrong("pattern \"", pattern, "\" matches nothing") : matched.status();
    }
    for (const NamedModule& m : *matched) {
      const auto place = places.find(m.module);
      if (place == places.end()) {
        if (borrows_all(*m.module)) continue;
        return wrong("the plan has a style for ", m.fqn.empty() ? "the model" : m.fqn,
                     ", which is no stage's");
      }
      parts[place->second.first].push_back({place->second.second, style});
    }
  }
  for (size_t s = 0; s < stages.size(); ++s) {
    const DeviceMesh on = StageMesh(mesh, mesh_dim, static_cast<int>(s));
    for (Module* module : modules[s]) {
      DT_RETURN_IF_ERROR(plan.empty() ? DistributeModule(*module, on)
                                      : ParallelizeModule(*module, on, parts[module], options));
    }
  }
  return absl::OkStatus();
}

}  // namespace dtensor
