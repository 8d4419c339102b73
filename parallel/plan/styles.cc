// The styles that ship: what ColwiseParallel and its like decide for one module.
#include "absl/strings/str_cat.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::StatusOr<ModuleTraits> TraitsFor(absl::string_view style, Module& module) {
  const std::optional<ModuleTraits> traits = module.traits();
  if (traits && traits->weight != nullptr) return *traits;
  return absl::UnimplementedError(
      absl::StrCat(style, " serves Linear, Embedding and modules with traits, not ",
                   module.type_name(), "; name its children, or give a Style of your own"));
}

// Where features may be cut: as the options say, else between the units of the module.
absl::StatusOr<int64_t> UnitOf(const ParallelOptions& options, const ModuleTraits& traits, int dim,
                               int64_t units) {
  if (options.unit > 0) return options.unit;
  if (options.unit < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("unit ", options.unit, " is no number of features; 0 takes the module's own"));
  }
  if (units <= 0) return 1;
  const int64_t features = traits.weight->shape()[dim];
  if (features % units == 0) return features / units;
  return absl::InvalidArgumentError(
      absl::StrCat("the module has ", units, " units of features, which do not divide ", features));
}

// What a style computes from, of an input that comes as the options say.
ValueLayout InputOf(const ParallelOptions& options, const Placement& wanted) {
  ValueLayout input(wanted);
  if (options.input && options.input->local) input.taken_as = options.input->placement;
  return input;
}

ValueLayout OutputOf(const ParallelOptions& options, const Placement& otherwise) {
  ValueLayout output = options.output.value_or(otherwise);
  output.local |= options.use_local_output;
  return output;
}

Placement CutOf(const ParallelOptions& options, int dim, int64_t unit) {
  return options.segments.empty() ? Shard(dim, unit) : SegmentedShard(dim, options.segments);
}

}  // namespace

Style ColwiseParallel(const ParallelOptions& options) {
  return {"ColwiseParallel", [options](Module& module) -> absl::StatusOr<ModuleLayout> {
            DT_ASSIGN_OR_RETURN(const ModuleTraits t, TraitsFor("ColwiseParallel", module));
            DT_ASSIGN_OR_RETURN(const int64_t unit, UnitOf(options, t, t.out_dim, t.out_units));
            ModuleLayout layout;
            layout.parameters.emplace_back(t.weight, CutOf(options, t.out_dim, unit));
            if (t.bias != nullptr) layout.parameters.emplace_back(t.bias, CutOf(options, 0, unit));
            layout.inputs = {InputOf(options, Replicate())};
            layout.outputs = {OutputOf(options, CutOf(options, -1, unit))};
            return layout;
          }};
}

Style RowwiseParallel(const ParallelOptions& options) {
  return {"RowwiseParallel", [options](Module& module) -> absl::StatusOr<ModuleLayout> {
            DT_ASSIGN_OR_RETURN(const ModuleTraits t, TraitsFor("RowwiseParallel", module));
            DT_ASSIGN_OR_RETURN(const int64_t unit, UnitOf(options, t, t.in_dim, t.in_units));
            if (t.looks_up && !options.segments.empty()) {
              return absl::InvalidArgumentError(
                  "segments are of features side by side, a vocabulary has none; ColwiseParallel "
                  "cuts the features of an embedding");
            }
            ModuleLayout layout;
            layout.parameters.emplace_back(t.weight, CutOf(options, t.in_dim, unit));
            if (t.bias != nullptr) layout.parameters.emplace_back(t.bias, Replicate());
            const Placement input = t.looks_up ? Replicate() : CutOf(options, -1, unit);
            layout.inputs = {InputOf(options, input)};
            layout.outputs = {OutputOf(options, Replicate())};
            return layout;
          }};
}

Style Optional(Style style) {
  style.optional = true;
  return style;
}

namespace {

// Parameters below the module stay whole.
ModuleLayout AllReplicated(const Module& module) {
  ModuleLayout layout;
  for (const NamedParameter& p : module.NamedParameters()) {
    layout.parameters.emplace_back(p.parameter, Replicate());
  }
  return layout;
}

// A tensor on Self is a part of `declared`; all are brought to `desired`.
ValueLayout Brought(const Placement& declared, const Placement& desired, bool give_local) {
  ValueLayout layout(desired);
  layout.taken_as = declared;
  layout.give_local = give_local;
  return layout;
}

// "inputs" as they come and as they are wanted, side by side.
absl::StatusOr<std::vector<std::optional<ValueLayout>>> SideBySide(absl::string_view what,
                                                                   const Layouts& declared,
                                                                   const Layouts& desired,
                                                                   bool give_local) {
  if (declared.size() != desired.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(declared.size(), " ", what, "_layouts and ", desired.size(), " desired_", what,
                     "_layouts; give as many, null for what is left alone"));
  }
  std::vector<std::optional<ValueLayout>> layouts(declared.size());
  for (size_t i = 0; i < declared.size(); ++i) {
    if (declared[i].has_value() != desired[i].has_value()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, " ", i, " has ", declared[i] ? "a" : "no", " layout and ",
                       desired[i] ? "a" : "no", " desired one; give both, or null in both"));
    }
    if (declared[i]) layouts[i] = Brought(*declared[i], *desired[i], give_local);
  }
  return layouts;
}

absl::StatusOr<std::map<std::string, ValueLayout>> ByName(const PrepareInputOptions& options) {
  std::map<std::string, ValueLayout> layouts;
  for (const auto& [name, declared] : options.input_kwarg_layouts) {
    const auto desired = options.desired_input_kwarg_layouts.find(name);
    if (desired == options.desired_input_kwarg_layouts.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("input \"", name, "\" is not in desired_input_kwarg_layouts"));
    }
    layouts.emplace(name, Brought(declared, desired->second, options.use_local_output));
  }
  for (const auto& [name, desired] : options.desired_input_kwarg_layouts) {
    if (!options.input_kwarg_layouts.contains(name)) {
      return absl::InvalidArgumentError(
          absl::StrCat("input \"", name, "\" is not in input_kwarg_layouts"));
    }
  }
  return layouts;
}

absl::Status Enter(const PrepareInputOptions& options, ModuleLayout* layout) {
  DT_ASSIGN_OR_RETURN(layout->inputs,
                      SideBySide("input", options.input_layouts, options.desired_input_layouts,
                                 options.use_local_output));
  DT_ASSIGN_OR_RETURN(layout->kwargs, ByName(options));
  layout->all_inputs = !layout->inputs.empty();
  return absl::OkStatus();
}

absl::Status Leave(const PrepareOutputOptions& options, ModuleLayout* layout) {
  DT_ASSIGN_OR_RETURN(layout->outputs,
                      SideBySide("output", options.output_layouts, options.desired_output_layouts,
                                 options.use_local_output));
  layout->all_outputs = !layout->outputs.empty();
  return absl::OkStatus();
}

}  // namespace

Style SequenceParallel(int dim, bool use_local_output) {
  return {"SequenceParallel", [=](Module& module) -> absl::StatusOr<ModuleLayout> {
            ModuleLayout layout = AllReplicated(module);
            layout.inputs = {Brought(Shard(dim), Shard(dim), false)};
            layout.outputs = {Brought(Shard(dim), Shard(dim), use_local_output)};
            return layout;
          }};
}

Style NoParallel(const NoParallelOptions& options) {
  return {
      "NoParallel", [options](Module& module) -> absl::StatusOr<ModuleLayout> {
        ModuleLayout layout = AllReplicated(module);
        layout.inputs = {Brought(options.input_layout.value_or(Replicate()), Replicate(), false)};
        layout.outputs = {Brought(Replicate(), options.output_layout.value_or(Replicate()),
                                  options.use_local_output)};
        return layout;
      }};
}

Style PrepareModuleInput(const PrepareInputOptions& options) {
  return {"PrepareModuleInput", [options](Module&) -> absl::StatusOr<ModuleLayout> {
            ModuleLayout layout;
            DT_RETURN_IF_ERROR(Enter(options, &layout));
            return layout;
          }};
}

Style PrepareModuleOutput(const PrepareOutputOptions& options) {
  return {"PrepareModuleOutput", [options](Module&) -> absl::StatusOr<ModuleLayout> {
            ModuleLayout layout;
            DT_RETURN_IF_ERROR(Leave(options, &layout));
            return layout;
          }};
}

Style PrepareModuleInputOutput(const PrepareInputOutputOptions& options) {
  return {"PrepareModuleInputOutput", [options](Module&) -> absl::StatusOr<ModuleLayout> {
            ModuleLayout layout;
            DT_RETURN_IF_ERROR(Enter(options.input, &layout));
            DT_RETURN_IF_ERROR(Leave(options.output, &layout));
            return layout;
          }};
}

Style PrepareModule(ModuleLayout layout) {
  return {"PrepareModule", [layout](Module&) -> absl::StatusOr<ModuleLayout> { return layout; }};
}

}  // namespace dtensor
