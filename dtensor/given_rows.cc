#include "dtensor/given_rows.h"

#include "absl/strings/str_cat.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

// Placements that a user's rule gives for one tensor: the right number, dims in range (negative
// ones counted from the end).
absl::Status Normalize(const OpCall& call, absl::string_view name, IntSpan shape, size_t count,
                       Placements* placements) {
  if (placements->size() != count) {
    return absl::InvalidArgumentError(absl::StrCat("the rule of op ", call.op().name(), " gives ",
                                                   placements->size(), " placements for ", name,
                                                   ", needs ", count));
  }
  for (Placement& p : *placements) {
    if (!p.cuts_dim()) continue;
    absl::StatusOr<int> dim = NormalizeDim(p.dim(), static_cast<int>(shape.size()));
    if (!dim.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the rule of op ", call.op().name(), " gives ", p.ToString(), " for ", name,
                       " of shape ", ToString(shape), ": ", dim.status().message()));
    }
    p = p.WithDim(*dim);
  }
  return absl::OkStatus();
}

// A row for one mesh dim as lists of placements, and back.
absl::Status NormalizeRow(const OpCall& call, const std::vector<Shape>& out_shapes,
                          StrategyRow* row) {
  std::vector<Placements> inputs, outputs;
  for (const Placement& p : row->inputs) inputs.push_back({p});
  for (const Placement& p : row->outputs) outputs.push_back({p});
  DT_RETURN_IF_ERROR(NormalizeGiven(call, out_shapes, 1, &inputs, &outputs));
  for (size_t i = 0; i < inputs.size(); ++i) row->inputs[i] = inputs[i][0];
  for (size_t o = 0; o < outputs.size(); ++o) row->outputs[o] = outputs[o][0];
  return absl::OkStatus();
}

}  // namespace

absl::Status NormalizeGiven(const OpCall& call, const std::vector<Shape>& out_shapes, size_t count,
                            std::vector<Placements>* inputs, std::vector<Placements>* outputs) {
  if (static_cast<int>(inputs->size()) != call.num_inputs() ||
      static_cast<int>(outputs->size()) != call.op().num_outputs()) {
    return absl::InvalidArgumentError(absl::StrCat("the rule of op ", call.op().name(), " places ",
                                                   inputs->size(), " inputs and ", outputs->size(),
                                                   " outputs, there are ", call.num_inputs(),
                                                   " and ", call.op().num_outputs()));
  }
  for (int i = 0; i < call.num_inputs(); ++i) {
    DT_RETURN_IF_ERROR(
        Normalize(call, call.op().InputName(i), call.shape(i), count, &(*inputs)[i]));
  }
  for (size_t o = 0; o < outputs->size(); ++o) {
    DT_RETURN_IF_ERROR(
        Normalize(call, call.op().output_names()[o], out_shapes[o], count, &(*outputs)[o]));
  }
  return absl::OkStatus();
}

absl::StatusOr<RowList> GivenRows(const OpCall& call, const std::vector<Shape>& out_shapes) {
  DT_ASSIGN_OR_RETURN(std::vector<StrategyRow> given, call.op().strategies()(call));
  RowList rows;
  for (StrategyRow& row : given) {
    DT_RETURN_IF_ERROR(NormalizeRow(call, out_shapes, &row));
    if (!(row.cost_us >= 0)) {
      return absl::InvalidArgumentError(absl::StrCat("the rule of op ", call.op().name(),
                                                     " gives a row that costs ", row.cost_us,
                                                     " us; a cost is a number from 0 up"));
    }
    ShardingRow& r = rows.emplace_back();
    r.inputs.assign(row.inputs.begin(), row.inputs.end());
    r.outputs.assign(row.outputs.begin(), row.outputs.end());
    r.cost_us = row.cost_us;
  }
  return rows;
}

}  // namespace dtensor::internal
