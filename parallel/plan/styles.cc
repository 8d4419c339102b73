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
  if (units <= 0) return 1;
  const int64_t features = traits.weight->shape()[dim];
  if (features % units == 0) return features / units;
  return absl::InvalidArgumentError(
      absl::StrCat("the module has ", units, " units of features, which do not divide ", features));
}

ValueLayout OutputOf(const ParallelOptions& options, const Placement& otherwise) {
  ValueLayout output = options.output.value_or(otherwise);
  output.local |= options.use_local_output;
  return output;
}

}  // namespace

Style ColwiseParallel(const ParallelOptions& options) {
  return {"ColwiseParallel", [options](Module& module) -> absl::StatusOr<ModuleLayout> {
            DT_ASSIGN_OR_RETURN(const ModuleTraits t, TraitsFor("ColwiseParallel", module));
            DT_ASSIGN_OR_RETURN(const int64_t unit, UnitOf(options, t, t.out_dim, t.out_units));
            const auto cut = [&](int dim) {
              return options.segments.empty() ? Shard(dim, unit)
                                              : SegmentedShard(dim, options.segments);
            };
            ModuleLayout layout;
            layout.parameters.emplace_back(t.weight, cut(t.out_dim));
            if (t.bias != nullptr) layout.parameters.emplace_back(t.bias, cut(0));
            layout.inputs = {options.input.value_or(Replicate())};
            layout.outputs = {OutputOf(options, cut(-1))};
            return layout;
          }};
}

Style RowwiseParallel(const ParallelOptions& options) {
  return {"RowwiseParallel", [options](Module& module) -> absl::StatusOr<ModuleLayout> {
            DT_ASSIGN_OR_RETURN(const ModuleTraits t, TraitsFor("RowwiseParallel", module));
            DT_ASSIGN_OR_RETURN(const int64_t unit, UnitOf(options, t, t.in_dim, t.in_units));
            ModuleLayout layout;
            layout.parameters.emplace_back(t.weight, Shard(t.in_dim, unit));
            if (t.bias != nullptr) layout.parameters.emplace_back(t.bias, Replicate());
            const Placement input = t.looks_up ? Replicate() : Shard(-1, unit);
            layout.inputs = {options.input.value_or(input)};
            layout.outputs = {OutputOf(options, Replicate())};
            return layout;
          }};
}

Style PrepareModule(ModuleLayout layout) {
  return {"PrepareModule", [layout](Module&) -> absl::StatusOr<ModuleLayout> { return layout; }};
}

}  // namespace dtensor
