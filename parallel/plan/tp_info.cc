#include "dtensor/parallel/plan/tp_info.h"

#include <algorithm>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/names.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

// What the rules say of one model: per module at most one of each kind.
class TPInfoRules {
 public:
  using Rule = TPInfo::Rule;
  using Kind = TPInfo::Kind;
  struct OfModule {
    NamedModule target;
    const Rule *shard = nullptr, *drop = nullptr, *shrink = nullptr;
  };
  // An attribute and what it becomes.
  struct Change {
    HasAttributes* of;
    std::pair<std::string, std::string> what;  // over which mesh dim
    int64_t* attribute;
    int64_t value;

    void Make() const {
      *attribute = value;
      of->shrunk_.insert(what);
    }
  };
  using Changes = std::vector<Change>;

  static absl::StatusOr<std::vector<OfModule>> Match(Module& module, const TPInfo& info) {
    std::vector<OfModule> found;
    const std::vector<NamedModule> modules = module.NamedModules();
    std::vector<bool> used(info.rules_.size(), false);
    for (const NamedModule& m : modules) {
      OfModule of = {m};
      for (size_t r = 0; r < info.rules_.size(); ++r) {
        const Rule& rule = info.rules_[r];
        if (m.fqn.empty() || !absl::EndsWith(m.fqn, rule.suffix)) continue;
        used[r] = true;
        const Rule*& place = rule.kind == Kind::kShrink       ? of.shrink
                             : rule.kind >= Kind::kReplicDrop ? of.drop
                                                              : of.shard;
        if (place != nullptr) {
          return absl::InvalidArgumentError(absl::StrCat("two rules match module \"", m.fqn,
                                                         "\": ", Name(*place), " and ", Name(rule),
                                                         "; make one of them longer"));
        }
        place = &rule;
      }
      if (of.shard || of.drop || of.shrink) found.push_back(std::move(of));
    }
    for (size_t r = 0; r < used.size(); ++r) {
      if (!used[r] && !info.rules_[r].optional) return Unmatched(info.rules_[r], modules);
      DT_RETURN_IF_ERROR(CheckSplit(info.rules_[r]));
    }
    return found;
  }

  static Style StyleOf(const OfModule& of) {
    const bool whole = of.drop != nullptr && of.drop->kind == Kind::kReplicDrop;
    const Rule shard = of.shard ? *of.shard : Rule{};
    const bool shards = of.shard != nullptr;
    return Style(Text(of), [shard, shards, whole](Module& module) -> absl::StatusOr<ModuleLayout> {
      ModuleLayout layout;
      if (shards) {
        DT_ASSIGN_OR_RETURN(layout, ShardLayout(shard, module));
      }
      if (whole) layout.inputs = {Replicate()};
      return layout;
    });
  }

  // What `of` divides by n; checked, not done yet.
  static absl::Status Shrink(const OfModule& of, int64_t n, const std::string& mesh_dim,
                             Changes* changes) {
    if (of.shrink == nullptr) return absl::OkStatus();
    auto* has = dynamic_cast<HasAttributes*>(of.target.module);
    if (has == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat(of.target.fqn, " (", of.target.module->type_name(),
                       ") has no attributes to shrink; they are those of HasAttributes"));
    }
    const std::map<std::string, int64_t*> attributes = has->attributes();
    for (const std::string& name : of.shrink->attributes) {
      const auto it = attributes.find(name);
      if (it == attributes.end()) {
        std::vector<std::string> known;
        for (const auto& [other, value] : attributes) known.push_back(other);
        return absl::InvalidArgumentError(
            absl::StrCat(of.target.fqn, " has no attribute \"", name,
                         "\"; nearest: ", absl::StrJoin(NearestNames(name, known), ", ")));
      }
      std::pair<std::string, std::string> what = {name, mesh_dim};
      if (has->shrunk_.count(what) > 0) continue;
      if (*it->second % n != 0) {
        return absl::InvalidArgumentError(absl::StrCat(of.target.fqn, ": ", name, " = ",
                                                       *it->second, " does not divide by the ", n,
                                                       " ranks of ", mesh_dim));
      }
      changes->push_back({has, std::move(what), it->second, *it->second / n});
    }
    return absl::OkStatus();
  }

  static std::string Text(const OfModule& of) {
    std::vector<std::string> all;
    if (of.shard) all.push_back(ShardText(*of.shard));
    if (of.drop) all.push_back(DropText(*of.drop));
    if (of.shrink) all.push_back(ShrinkText(*of.shrink));
    return absl::StrJoin(all, "; ");
  }

 private:
  static std::string Name(const Rule& rule) {
    static constexpr const char* kNames[] = {"ShardCol",   "ShardRow",     "ShardVocab", "Whole",
                                             "ReplicDrop", "ParallelDrop", "Shrink"};
    return absl::StrCat(kNames[static_cast<int>(rule.kind)], "(\"", rule.suffix, "\")");
  }

  // What of a TPSplit would be ignored or mean nothing is refused.
  static absl::Status CheckSplit(const Rule& rule) {
    const TPSplit& split = rule.split;
    const bool parts = !split.segments.empty();
    std::string why;
    if (split.stride < 1) why = absl::StrCat("stride ", split.stride, " is no number of parts");
    if (split.unit < 0) why = absl::StrCat("unit ", split.unit, " is no number of features");
    if (split.stride > 1 && parts) why = "stride and segments both say what the parts are";
    if (split.unit > 0 && parts) why = "unit and segments both say what stays together";
    if (rule.kind == Kind::kRow && (split.stride > 1 || parts)) {
      why =
          "stride and segments are of output features, which ShardRow leaves whole; ShardCol cuts "
          "them";
    }
    if (why.empty()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(Name(rule), ": ", why));
  }

  static absl::Status Unmatched(const Rule& rule, const std::vector<NamedModule>& modules) {
    const size_t atoms = std::count(rule.suffix.begin(), rule.suffix.end(), '.') + 1;
    std::set<std::string> endings;  // of as many atoms
    for (const NamedModule& m : modules) {
      if (m.fqn.empty()) continue;  // the root
      const std::vector<std::string> parts = absl::StrSplit(m.fqn, '.');
      const size_t from = parts.size() > atoms ? parts.size() - atoms : 0;
      endings.insert(absl::StrJoin(parts.begin() + static_cast<int64_t>(from), parts.end(), "."));
    }
    const std::vector<std::string> names(endings.begin(), endings.end());
    return absl::NotFoundError(absl::StrCat(Name(rule),
                                            " is the rule of no module; names that are near: ",
                                            absl::StrJoin(NearestNames(rule.suffix, names), ", ")));
  }

  static absl::StatusOr<ModuleLayout> ShardLayout(const Rule& rule, Module& module) {
    ParallelOptions options = {.unit = rule.split.unit, .segments = rule.split.segments};
    const std::optional<ModuleTraits> traits = module.traits();
    if (rule.kind == Kind::kVocab) {
      if (!traits || !traits->looks_up) {
        return absl::UnimplementedError(
            absl::StrCat("ShardVocab serves embeddings, not ", module.type_name()));
      }
      return RowwiseParallel(options).layout(module);
    }
    if (rule.kind == Kind::kWhole) return NoParallel().layout(module);
    if (rule.kind == Kind::kRow) return RowwiseParallel(options).layout(module);
    if (rule.split.stride > 1 && traits && traits->weight != nullptr) {
      const int64_t features = traits->weight->shape()[traits->out_dim];
      const int64_t stride = rule.split.stride;
      if (features % stride != 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("stride ", stride, " does not divide ", features,
                         " output features; parts of unequal sizes are TPSplit::segments"));
      }
      options.segments =
          Segments(stride, Segment(features / stride, std::max<int64_t>(rule.split.unit, 1)));
    }
    return ColwiseParallel(options).layout(module);
  }

  static std::string ShardText(const Rule& rule) {
    if (rule.kind == Kind::kVocab) return "[tp_shard] VocabParallelEmbedding, {}";
    if (rule.kind == Kind::kWhole) return "[replicate]";
    std::vector<std::string> arguments;
    if (rule.split.stride > 1) arguments.push_back(absl::StrCat("'stride': ", rule.split.stride));
    if (!rule.split.segments.empty()) {
      arguments.push_back(absl::StrCat("'segments': [",
                                       absl::StrJoin(rule.split.segments, ", ",
                                                     [](std::string* out, const Segment& s) {
                                                       absl::StrAppend(out, s.size);
                                                       if (s.unit > 1)
                                                         absl::StrAppend(out, ":", s.unit);
                                                     }),
                                       "]"));
    }
    if (rule.split.unit > 0) arguments.push_back(absl::StrCat("'unit': ", rule.split.unit));
    return absl::StrCat("[tp_shard] ",
                        rule.kind == Kind::kCol ? "ColumnParallelLinear" : "RowParallelLinear",
                        ", {", absl::StrJoin(arguments, ", "), "}");
  }
  static std::string DropText(const Rule& rule) {
    return rule.kind == Kind::kReplicDrop ? "[randomizer] ('tensor',)" : "[randomizer] ()";
  }
  static std::string ShrinkText(const Rule& rule) {
    return absl::StrCat("[shrink_attr] {'", absl::StrJoin(rule.attributes, "', '"), "'}");
  }
};

TPInfo& TPInfo::ShardCol(std::string suffix, TPSplit split) {
  rules_.push_back({Kind::kCol, std::move(suffix), std::move(split)});
  return *this;
}
TPInfo& TPInfo::ShardRow(std::string suffix, TPSplit split) {
  rules_.push_back({Kind::kRow, std::move(suffix), std::move(split)});
  return *this;
}
TPInfo& TPInfo::ShardVocab(std::string suffix) {
  rules_.push_back({Kind::kVocab, std::move(suffix)});
  return *this;
}
TPInfo& TPInfo::Whole(std::string suffix) {
  rules_.push_back({Kind::kWhole, std::move(suffix)});
  return *this;
}
TPInfo& TPInfo::ReplicDrop(std::string suffix) {
  rules_.push_back({Kind::kReplicDrop, std::move(suffix)});
  return *this;
}
TPInfo& TPInfo::ParallelDrop(std::string suffix) {
  rules_.push_back({Kind::kParallelDrop, std::move(suffix)});
  return *this;
}
TPInfo& TPInfo::Shrink(std::string suffix, std::set<std::string> attributes) {
  rules_.push_back({Kind::kShrink, std::move(suffix), {}, std::move(attributes)});
  return *this;
}
TPInfo& TPInfo::Optional() {
  if (rules_.empty()) Throw(absl::InvalidArgumentError("[tp_info] Optional is of no rule"));
  rules_.back().optional = true;
  return *this;
}

namespace {

// The pattern that matches this module alone: its name may have wildcards in it.
std::string PatternOf(absl::string_view fqn) {
  return absl::StrReplaceAll(fqn, {{"\\", "\\\\"}, {"*", "\\*"}, {"?", "\\?"}, {"[", "\\["}});
}

// As a plan, and what becomes of attributes; `attributes()` of a module may throw.
absl::StatusOr<Plan> PlanOf(Module& module, const DeviceMesh& mesh, const TPInfo& info,
                            const std::string& mesh_dim, TPInfoRules::Changes* changes) {
  try {
    DT_ASSIGN_OR_RETURN(const auto rules, TPInfoRules::Match(module, info));
    Plan plan;
    for (const TPInfoRules::OfModule& of : rules) {
      if (mesh.defined() && !mesh.is_self()) {
        int dim = 0;
        if (mesh.ndim() > 1) {
          DT_ASSIGN_OR_RETURN(dim, mesh.DimIndex(mesh_dim));
        }
        DT_RETURN_IF_ERROR(TPInfoRules::Shrink(of, mesh.size(dim), mesh.names()[dim], changes));
      }
      plan.emplace_back(PatternOf(of.target.fqn), TPInfoRules::StyleOf(of));
    }
    return plan;
  } catch (...) {
    return CurrentException();
  }
}

}  // namespace

absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const TPInfo& info,
                               const ParallelizeOptions& options) {
  TPInfoRules::Changes changes;
  const absl::StatusOr<Plan> plan = PlanOf(module, mesh, info, options.mesh_dim, &changes);
  if (!plan.ok()) return InFunction("parallelize_module", plan.status());
  DT_RETURN_IF_ERROR(ParallelizeModule(module, mesh, *plan, options));
  for (const TPInfoRules::Change& change : changes) change.Make();
  return absl::OkStatus();
}

absl::Status ParallelizeModule(Module& module, const TPInfo& info,
                               const ParallelizeOptions& options) {
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, OpenMesh("parallelize_module"));
  return ParallelizeModule(module, mesh, info, options);
}

namespace {

struct Branch {
  std::string text;  // of the module's rules; empty: it has none
  std::vector<std::pair<std::string, std::unique_ptr<Branch>>> children = {};
  Branch& Child(const std::string& name) {
    for (auto& [known, child] : children) {
      if (known == name) return *child;
    }
    return *children.emplace_back(name, std::make_unique<Branch>()).second;
  }
};

bool IsNumber(const std::string& name) {
  return !name.empty() && std::all_of(name.begin(), name.end(), absl::ascii_isdigit);
}

std::string Print(const Branch& branch, int indent) {
  std::string text;
  const std::string margin(static_cast<size_t>(indent) * 4, ' ');
  for (size_t i = 0; i < branch.children.size();) {
    const auto& [name, child] = branch.children[i];
    const std::string below = Print(*child, indent + 1);
    size_t end = i + 1;
    std::string head = name;
    if (IsNumber(name)) {
      std::vector<std::string> alike = {name};
      while (end < branch.children.size() && IsNumber(branch.children[end].first) &&
             branch.children[end].second->text == child->text &&
             Print(*branch.children[end].second, indent + 1) == below) {
        alike.push_back(branch.children[end++].first);
      }
      head = absl::StrCat("['", absl::StrJoin(alike, "', '"), "']");
    }
    absl::StrAppend(&text, margin, head, child->text.empty() ? "" : " -> ", child->text, "\n",
                    below);
    i = end;
  }
  return text;
}

}  // namespace

absl::StatusOr<std::string> TensorParallelTree(Module& module, const TPInfo& info) {
  DT_ASSIGN_OR_RETURN(const auto rules, TPInfoRules::Match(module, info));
  Branch root;
  for (const TPInfoRules::OfModule& of : rules) {
    Branch* at = &root;
    for (const absl::string_view atom : absl::StrSplit(of.target.fqn, '.')) {
      at = &at->Child(std::string(atom));
    }
    at->text = TPInfoRules::Text(of);
  }
  return absl::StrCat("Tensor Parallel Sharding Tree:\n", Print(root, 0));
}

}  // namespace dtensor
