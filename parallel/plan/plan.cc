#include "dtensor/parallel/plan/plan.h"

#include <fnmatch.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>

#include "absl/algorithm/container.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "dtensor/local_check.h"
#include "dtensor/mesh_scope.h"
#include "dtensor/names.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status Unmatched(absl::string_view pattern, absl::string_view atom,
                       const std::vector<NamedModule>& parents) {
  std::vector<std::string> names;
  for (const NamedModule& parent : parents) {
    for (const auto& child : parent.module->children()) {
      if (std::find(names.begin(), names.end(), child.first) == names.end()) {
        names.push_back(child.first);
      }
    }
  }
  const std::string& first = parents[0].fqn;
  std::string where = first.empty() ? "the root" : first;
  if (parents.size() > 1) absl::StrAppend(&where, " (and ", parents.size() - 1, " like it)");
  const auto& own = parents[0].module->own_parameters();
  const bool is_parameter =
      absl::c_any_of(own, [&](const auto& parameter) { return parameter->name() == atom; });
  const std::string hint =
      is_parameter    ? "that is a parameter of it, patterns name modules"
      : names.empty() ? "it has no children"
                      : absl::StrCat("nearest: ", absl::StrJoin(NearestNames(atom, names), ", "));
  return absl::NotFoundError(absl::StrCat("pattern \"", pattern, "\" matches nothing: no child of ",
                                          where, " is called \"", atom, "\"; ", hint));
}

}  // namespace

absl::StatusOr<std::vector<NamedModule>> MatchModules(Module& root, absl::string_view pattern) {
  std::vector<NamedModule> matched = {{"", &root}};
  if (pattern.empty()) return matched;
  for (const absl::string_view atom : absl::StrSplit(pattern, '.')) {
    const std::string wildcard(atom);
    std::vector<NamedModule> next;
    for (const NamedModule& parent : matched) {
      for (const auto& [name, child] : parent.module->children()) {
        if (fnmatch(wildcard.c_str(), name.c_str(), 0) != 0) continue;
        next.push_back(
            {parent.fqn.empty() ? name : absl::StrCat(parent.fqn, ".", name), child.get()});
      }
    }
    if (next.empty()) return Unmatched(pattern, atom, matched);
    matched = std::move(next);
  }
  return matched;
}

namespace {

// A function that returns a Status throws nothing, whatever styles and parameters do.
absl::Status Named(absl::string_view function, const DeviceMesh& mesh,
                   absl::FunctionRef<absl::Status()> body) {
  absl::Status status = absl::InvalidArgumentError(
      "the mesh is null; leave it out where that of the innermost MeshScope is meant");
  try {
    if (mesh.defined()) status = body();
  } catch (...) {
    status = CurrentException();
  }
  return status.ok() ? status : TellPeers(mesh, InFunction(function, status));
}

absl::Status Distribute(Module& module, const DeviceMesh& mesh, const PartitionFn& partition,
                        const PartitionFn& buffers, int64_t source = 0) {
  struct Change {
    NamedParameter parameter;
    Placements placements;
  };
  std::vector<Change> changes;
  int64_t taken = 0, asked_of = 0;
  for (const NamedParameter& p : module.NamedTensors()) {
    Placements placements(mesh.ndim());
    const bool placed = !p.parameter->mesh().is_self();
    const PartitionFn& asked = p.parameter->is_buffer() ? buffers : partition;
    const bool asks = asked != nullptr && !placed;
    if (asks) {
      placements = asked(p);
    } else if (placed) {
      placements = p.parameter->placements();
    }
    const absl::Status fits = p.parameter->CheckPlace(mesh, placements);
    if (!fits.ok()) {
      return Prefixed(absl::StrCat("parameter ", p.fqn), fits);
    }
    if (!placed) changes.push_back({p, std::move(placements)});
    if (!p.parameter->is_buffer()) ++(placed ? taken : asked_of);
  }
  if (partition != nullptr && asked_of == 0 && taken > 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "all ", taken,
        " parameters are placed already, and what is stays: `partition` would place "
        "nothing; call it before ParallelizeModule, whose plan leaves other mesh dims as they are, "
        "or Parameter::Place each"));
  }
  for (Change& c : changes) c.parameter.parameter->Place(mesh, std::move(c.placements), source);
  return absl::OkStatus();
}

}  // namespace

absl::Status DistributeModule(Module& module, const DeviceMesh& mesh, const PartitionFn& partition,
                              const ValuesFn& input, const ValuesFn& output,
                              const PartitionFn& buffers) {
  return Named("distribute_module", mesh, [&]() -> absl::Status {
    DT_RETURN_IF_ERROR(Distribute(module, mesh, partition, buffers));
    if (input) {
      module.AddPreHook([input, mesh](Module& m, const Values& in) { return input(m, in, mesh); });
    }
    if (output) {
      module.AddPostHook([output, mesh](Module& m, const Values&, const Values& out) {
        return output(m, out, mesh);
      });
    }
    return absl::OkStatus();
  });
}

absl::Status DistributeModule(Module& module, const PartitionFn& partition, const ValuesFn& input,
                              const ValuesFn& output, const PartitionFn& buffers) {
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, OpenMesh("distribute_module"));
  return DistributeModule(module, mesh, partition, input, output, buffers);
}

namespace {

// One rank tells for all.
bool IsFirstOf(const DeviceMesh& mesh) {
  Dims coordinate;
  return mesh.Coordinate(RankContext::Current().rank(), &coordinate) &&
         absl::c_all_of(coordinate, [](int64_t c) { return c == 0; });
}

bool SharesOneIndex(const Placement& p, IntSpan shape) {
  const int ndim = static_cast<int>(shape.size());
  const int d = p.dim() < 0 ? p.dim() + ndim : p.dim();
  return p.is_shard() && d >= 0 && d < ndim && shape[d] == 1;
}

// The layouts of a module's inputs or outputs, on one mesh dim.
struct ValueRules {
  std::vector<std::optional<ValueLayout>> by_position;
  std::map<std::string, ValueLayout> by_name;
  DeviceMesh mesh;
  int mesh_dim;
  std::string what;   // "blocks.0: input"
  bool all;           // by_position has one for each value without a name
  Layouts elsewhere;  // of local values, by mesh dim; null: not said, and on mesh_dim
  std::shared_ptr<bool> watches_names;  // until a name has been told of; shared by copies of a hook

  const ValueLayout* Of(const Values& values, size_t i) const {
    const auto named = by_name.find(std::string(values.name(i)));
    if (named != by_name.end()) return &named->second;
    return i < by_position.size() && by_position[i] ? &*by_position[i] : nullptr;
  }
  std::string Called(const Values& values, size_t i) const {
    return absl::StrCat(what, " ", values.name(i).empty() ? absl::StrCat(i) : values.name(i));
  }
};

// Segments and flat pieces that the value has on other mesh dims are of what this one left before:
// where that is no longer so those dims have all.
void DropWhatDoesNotFit(const DTensor& value, int mesh_dim, Placements* placements) {
  const auto sized = [](const Placement& p) { return p.is_sized(); };
  if (std::none_of(placements->begin(), placements->end(), sized)) return;
  SpecInterner& specs = RankContext::Current().specs();
  if (specs.Intern(value.mesh(), *placements, value.shape(), value.dtype()).ok()) return;
  for (int m = 0; m < value.mesh().ndim(); ++m) {
    if (m != mesh_dim && (*placements)[m].is_sized()) (*placements)[m] = Replicate();
  }
}

// `gives_local`: it goes on as a local tensor, whose sizes and `rules` tell what it is. `called`:
// for the error where the value cannot be placed so.
DTensor Placed(const DTensor& value, const ValueLayout& layout, const ValueRules& rules,
               bool gives_local, absl::FunctionRef<std::string()> called) {
  Placements p(value.placements().begin(), value.placements().end());
  p[rules.mesh_dim] = layout.placement;
  if (gives_local) {
    for (size_t m = 0; m < p.size(); ++m) p[m] = rules.elsewhere[m].value_or(p[m]);
  } else if (SharesOneIndex(p[rules.mesh_dim], value.shape())) {
    p[rules.mesh_dim] = Replicate();
  }
  if (!gives_local) DropWhatDoesNotFit(value, rules.mesh_dim, &p);
  try {
    return value.Redistribute(p, {.shared = true});
  } catch (const Error& e) {
    if (e.status().code() != absl::StatusCode::kInvalidArgument) throw;
    Throw(
        Prefixed(absl::StrCat("[parallelize_module] the plan's layout of ", called()), e.status()));
  }
}

void CheckNumber(const Values& values, const ValueRules& rules) {
  size_t unnamed = 0;
  for (size_t i = 0; i < values.size(); ++i) unnamed += values.name(i).empty() ? 1 : 0;
  if (!rules.all || unnamed == rules.by_position.size()) return;
  ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
      "[parallelize_module] ", rules.what, "s without a name: the call has ", unnamed,
      ", the style has layouts for ", rules.by_position.size(), "; null leaves one alone")));
}

// A name of the plan that no value has, beside one of almost that name without a layout.
void WarnOfNames(const Values& values, const ValueRules& rules) {
  if (rules.by_name.empty() || rules.watches_names == nullptr || !*rules.watches_names) return;
  std::vector<std::string> names;
  for (size_t i = 0; i < values.size(); ++i) names.emplace_back(values.name(i));
  for (const auto& [planned, layout] : rules.by_name) {
    if (absl::c_linear_search(names, planned)) continue;
    for (const std::string& name : names) {
      const int edits = EditDistance(planned, name);
      if (name.empty() || rules.by_name.contains(name) || edits > 2 ||
          edits >= static_cast<int>(planned.size())) {
        continue;
      }
      *rules.watches_names = false;
      if (!IsFirstOf(rules.mesh)) return;
      fprintf(stderr,
              "warning: [parallelize_module] the plan has a layout of %s \"%s\", the call has none "
              "of that name but \"%s\", which has no layout (ParallelizeOptions::warn = false says "
              "nothing)\n",
              rules.what.c_str(), planned.c_str(), name.c_str());
      return;
    }
  }
}

// This rank's part as a value of the plan's mesh.
DTensor OfPart(const DTensor& part, const ValueLayout& layout, const ValueRules& rules,
               const std::string& called) {
  const DeviceMesh& mesh = rules.mesh;
  Placements p(mesh.ndim());
  std::vector<std::string> unsaid;
  for (int m = 0; m < mesh.ndim(); ++m) {
    if (m == rules.mesh_dim) {
      p[m] = layout.taken_as.value_or(layout.placement);
    } else if (rules.elsewhere[m]) {
      p[m] = *rules.elsewhere[m];
    } else if (mesh.size(m) > 1) {
      unsaid.push_back(mesh.names()[m]);
    }
  }
  if (!unsaid.empty()) {
    Throw(absl::InvalidArgumentError(absl::StrCat(
        "[parallelize_module] ", called, " is a local tensor, ", part.spec().ToString(),
        ", taken as ", p[rules.mesh_dim].ToString(), " over ", mesh.names()[rules.mesh_dim],
        " of mesh ", mesh.ToString(), ", and nothing says what it is over ",
        absl::StrJoin(unsaid, ", "), ": give ParallelizeOptions::local_layouts = {{\"", unsaid[0],
        "\", Shard(0)}} where ranks hold parts of dim 0, Replicate() where they hold the same; or "
        "bring it to the mesh with FromLocal")));
  }
  const absl::StatusOr<Shape> shape = internal::ShapeOfParts(part.local(), mesh, p);
  if (!shape.ok()) {
    Throw(
        TellPeers(mesh, Prefixed(absl::StrCat("[parallelize_module] ", called, ", a local tensor"),
                                 shape.status())));
  }
  return FromLocal(part, mesh, p, {.shape = *shape});
}

// A value as it is on the plan's mesh.
DTensor OnTheMesh(const Values& values, size_t i, const ValueLayout& layout,
                  const ValueRules& rules, bool takes_local) {
  const DTensor& value = values[i];
  if (value.mesh() == rules.mesh) return value;
  if (takes_local && value.mesh().is_self()) {
    return OfPart(value, layout, rules, rules.Called(values, i));
  }
  Throw(absl::InvalidArgumentError(
      absl::StrCat("[parallelize_module] ", rules.Called(values, i), " is ",
                   value.spec().ToString(), ", but the plan is for mesh ", rules.mesh.ToString(),
                   "; bring it there with DistributeTensor")));
}

// Brings values to what a plan wants of them.
Values Convert(const Values& values, const ValueRules& rules, bool entering) {
  CheckNumber(values, rules);
  WarnOfNames(values, rules);
  Values out = values;
  for (size_t i = 0; i < values.size(); ++i) {
    const ValueLayout* layout = rules.Of(values, i);
    if (layout == nullptr || !values[i].defined()) continue;
    const bool takes_local = layout->taken_as.has_value() || (entering && layout->local);
    const bool gives_local = layout->give_local || (!entering && layout->local);
    out[i] = Placed(OnTheMesh(values, i, *layout, rules, takes_local), *layout, rules, gives_local,
                    [&] { return rules.Called(values, i); });
    if (gives_local) out[i] = out[i].ToLocal();
  }
  return out;
}

// One module's share of a plan: checked first, applied when all of it is known to be right.
struct Assignment {
  NamedModule target;
  const std::string* pattern;
  const Style* style;
  ModuleLayout layout;
};

absl::StatusOr<std::vector<Assignment>> Assign(Module& module, const Plan& plan) {
  std::vector<Assignment> assignments;
  absl::flat_hash_map<Module*, const std::string*> taken;
  absl::flat_hash_set<const Parameter*> known;
  for (const NamedModule& m : module.NamedModules()) {
    for (const auto& p : m.module->own_parameters()) known.insert(p.get());
  }
  for (const auto& [pattern, style] : plan) {
    absl::StatusOr<std::vector<NamedModule>> matched = MatchModules(module, pattern);
    if (!matched.ok() && style.optional) continue;
    if (!matched.ok()) return matched.status();
    if (!style.layout) {
      return absl::InvalidArgumentError(absl::StrCat("pattern \"", pattern, "\": the style \"",
                                                     style.name, "\" has no function"));
    }
    for (const NamedModule& target : *matched) {
      const auto [it, fresh] = taken.try_emplace(target.module, &pattern);
      if (!fresh) {
        return absl::InvalidArgumentError(absl::StrCat("two patterns match module \"", target.fqn,
                                                       "\": \"", *it->second, "\" and \"", pattern,
                                                       "\"; make one of them narrower"));
      }
      absl::StatusOr<ModuleLayout> layout = style.layout(*target.module);
      if (!layout.ok()) {
        return Prefixed(absl::StrCat("pattern \"", pattern, "\", module \"", target.fqn, "\""),
                        layout.status());
      }
      for (size_t i = 0; i < layout->parameters.size(); ++i) {
        const Parameter* const p = layout->parameters[i].first;
        if (known.contains(p)) continue;
        const std::string why = p == nullptr
                                    ? "null; FindParameter gives null for a name that is not there"
                                    : absl::StrCat(p->fqn(), " of another model");
        return absl::InvalidArgumentError(absl::StrCat("pattern \"", pattern, "\" (", style.name,
                                                       "), module \"", target.fqn, "\": parameter ",
                                                       i, " of its layout is ", why));
      }
      assignments.push_back({target, &pattern, &style, *std::move(layout)});
    }
  }
  return assignments;
}

// The parameter's placements with `placement` on one mesh dim.
absl::StatusOr<Placements> NewPlacements(const Parameter& p, const Placement& placement,
                                         const DeviceMesh& mesh, int mesh_dim) {
  Placements placements(mesh.ndim());
  if (p.mesh() == mesh) {
    placements.assign(p.placements().begin(), p.placements().end());
    if (!placements[mesh_dim].is_replicate()) {
      return absl::InvalidArgumentError(
          absl::StrCat("has ", placements[mesh_dim].ToString(), " on this mesh dim already"));
    }
  }
  placements[mesh_dim] = placement;
  DT_RETURN_IF_ERROR(p.CheckPlace(mesh, placements));
  return placements;
}

// "2 units of 16 on 4 ranks: 2 hold them all", or "": how a parameter is cut. Of segments the one
// that most ranks hold something of.
std::string IdleRanks(const Parameter& p, int mesh_dim) {
  const Placement& placement = p.placements()[mesh_dim];
  const int64_t parts = p.mesh().size(mesh_dim);
  Segments pieces;
  if (placement.cuts_dim()) pieces = placement.SegmentsOf(p.shape()[placement.dim()], parts);
  int64_t most = 0;
  Segment held(0);
  for (const Segment& s : pieces) {
    if (s.size == 0) continue;
    const int64_t each = ShardInterval(s.size, s.unit, parts, 0).length();
    const int64_t busy = (s.size + each - 1) / each;
    if (busy <= most) continue;
    most = busy;
    held = s;
  }
  if (most == 0 || most == parts) return "";
  return absl::StrCat((held.size + held.unit - 1) / held.unit, " units of ", held.unit, " on ",
                      parts, " ranks: ", most, " hold them all");
}

using Changes = std::vector<std::pair<Parameter*, Placements>>;

// Once for parameters that are cut alike, by the first rank of the mesh: the others' share of the
// module's work is nothing, and nothing else says so.
void WarnOfIdleRanks(const DeviceMesh& mesh, int mesh_dim, const Changes& changes) {
  if (!IsFirstOf(mesh)) return;
  std::map<std::string, std::vector<std::string>> alike;
  for (const auto& change : changes) {
    const std::string idle = IdleRanks(*change.first, mesh_dim);
    if (!idle.empty()) alike[idle].push_back(change.first->fqn());
  }
  for (const auto& [idle, names] : alike) {
    const std::string more =
        names.size() == 1 ? "" : absl::StrCat(" and ", names.size() - 1, " more parameters");
    fprintf(stderr,
            "warning: [parallelize_module] %s%s: %s, the rest idles there (docs/guide/models.md; "
            "ParallelizeOptions::warn = false says nothing)\n",
            names[0].c_str(), more.c_str(), idle.c_str());
  }
}

absl::StatusOr<int> PlanDim(const DeviceMesh& mesh, const std::string& name) {
  if (!mesh.defined() || mesh.is_self()) {
    return absl::InvalidArgumentError("the mesh has no dims; give one, such as {2} named tp");
  }
  return mesh.ndim() == 1 ? absl::StatusOr<int>(0) : mesh.DimIndex(name);
}

// Of local values, by mesh dim.
absl::StatusOr<Layouts> Elsewhere(const DeviceMesh& mesh, int mesh_dim, const NamedLayouts& named) {
  Layouts elsewhere(mesh.ndim());
  for (const auto& [name, placement] : named) {
    DT_ASSIGN_OR_RETURN(const int m, mesh.DimIndex(name));
    if (m == mesh_dim) {
      return absl::InvalidArgumentError(
          absl::StrCat("local_layouts is for the other mesh dims; on ", name,
                       ", the plan's own, styles say what local values are"));
    }
    elsewhere[m] = placement;
  }
  return elsewhere;
}

// What happens to parameters: once to each, however many names of it styles reach.
absl::StatusOr<Changes> ChangesOf(const std::vector<Assignment>& assignments,
                                  const DeviceMesh& mesh, int mesh_dim) {
  Changes changes;
  std::vector<std::string> names;
  absl::flat_hash_map<const void*, size_t> known;  // where in changes, by Parameter::identity
  for (const Assignment& a : assignments) {
    for (const auto& [parameter, placement] : a.layout.parameters) {
      const std::string name = parameter->fqn();
      const std::string who =
          absl::StrCat("pattern \"", *a.pattern, "\" (", a.style->name, "), parameter ", name);
      absl::StatusOr<Placements> p = NewPlacements(*parameter, placement, mesh, mesh_dim);
      if (!p.ok()) return Prefixed(who, p.status());
      const auto [at, is_new] = known.try_emplace(parameter->identity(), changes.size());
      if (is_new) {
        changes.emplace_back(parameter, *std::move(p));
        names.push_back(name);
        continue;
      }
      const auto& [first, placements] = changes[at->second];
      if (placements == *p) continue;
      const std::string other =
          first == parameter
              ? std::string("another style makes it ")
              : absl::StrCat("it is tied to ", names[at->second], ", which another style makes ");
      return Prefixed(who, absl::InvalidArgumentError(absl::StrCat(
                               "would be ", ToString(*p), ", but ", other, ToString(placements),
                               "; let both say the same, or one of them")));
    }
  }
  return changes;
}

// Of a strict plan: every parameter is placed by a style.
absl::Status CheckAllPlaced(const Module& module, const Changes& changes) {
  absl::flat_hash_set<const void*> placed;  // by Parameter::identity
  for (const auto& change : changes) placed.insert(change.first->identity());
  std::vector<std::string> left_out;
  for (const NamedParameter& p : module.NamedParameters()) {
    if (!placed.contains(p.parameter->identity())) left_out.push_back(p.fqn);
  }
  if (left_out.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the plan is strict, and no style places ", absl::StrJoin(left_out, ", "),
                   "; give their modules a style, NoParallel() for what stays whole"));
}

absl::Status Parallelize(Module& module, const DeviceMesh& mesh, const Plan& plan,
                         const ParallelizeOptions& options) {
  DT_ASSIGN_OR_RETURN(const int mesh_dim, PlanDim(mesh, options.mesh_dim));
  DT_ASSIGN_OR_RETURN(std::vector<Assignment> assignments, Assign(module, plan));
  DT_ASSIGN_OR_RETURN(const Changes changes, ChangesOf(assignments, mesh, mesh_dim));
  if (options.strict) DT_RETURN_IF_ERROR(CheckAllPlaced(module, changes));
  const int64_t source = options.src_data_rank;
  if (source >= mesh.size()) {
    return absl::InvalidArgumentError(absl::StrCat("src_data_rank ", source, ": the mesh ",
                                                   mesh.ToString(), " has ", mesh.size(),
                                                   " ranks, from 0"));
  }
  DT_ASSIGN_OR_RETURN(const Layouts elsewhere, Elsewhere(mesh, mesh_dim, options.local_layouts));
  DT_RETURN_IF_ERROR(
      Named("distribute_module", mesh, [&] { return Distribute(module, mesh, {}, {}, source); }));
  for (const auto& [parameter, placements] : changes) parameter->Place(mesh, placements);
  if (options.warn) WarnOfIdleRanks(mesh, mesh_dim, changes);
  module.WarnOfImplicit(options.warn);
  for (Assignment& a : assignments) {
    const std::string name = a.target.fqn.empty() ? "the root" : a.target.fqn;
    ModuleLayout& layout = a.layout;
    const auto rules = [&](const auto& by_position, const auto& by_name, const char* what,
                           bool all) -> ValueRules {
      return {by_position,
              by_name,
              mesh,
              mesh_dim,
              absl::StrCat(name, ": ", what),
              all,
              elsewhere,
              std::make_shared<bool>(options.warn)};
    };
    const ValueRules in = rules(layout.inputs, layout.kwargs, "input", layout.all_inputs);
    const ValueRules out =
        rules(layout.outputs, layout.named_outputs, "output", layout.all_outputs);
    a.target.module->AddPreHook(
        [in](Module&, const Values& values) { return Convert(values, in, true); });
    a.target.module->AddPostHook([out](Module&, const Values&, const Values& values) {
      return Convert(values, out, false);
    });
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const Plan& plan,
                               const ParallelizeOptions& options) {
  return Named("parallelize_module", mesh,
               [&] { return Parallelize(module, mesh, plan, options); });
}

absl::Status ParallelizeModule(Module& module, const DeviceMesh& mesh, const Style& style,
                               const ParallelizeOptions& options) {
  return ParallelizeModule(module, mesh, Plan{{"", style}}, options);
}

absl::Status ParallelizeModule(Module& module, const Plan& plan,
                               const ParallelizeOptions& options) {
  DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, OpenMesh("parallelize_module"));
  return ParallelizeModule(module, mesh, plan, options);
}

absl::Status ParallelizeModule(Module& module, const Style& style,
                               const ParallelizeOptions& options) {
  return ParallelizeModule(module, Plan{{"", style}}, options);
}

}  // namespace dtensor
