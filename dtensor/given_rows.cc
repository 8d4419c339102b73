#include "dtensor/given_rows.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/tensor/status.h"

namespace dtensor::internal {
namespace {

constexpr absl::string_view kFalseRule = "dtensor/false_rule";

absl::Status FalseRule(const std::string& message) {
  absl::Status status = absl::InvalidArgumentError(message);
  status.SetPayload(kFalseRule, absl::Cord());
  return status;
}

// Placements that a user's rule gives for one tensor: the right number, dims in range (negative
// ones counted from the end).
absl::Status Normalize(const OpCall& call, absl::string_view name, IntSpan shape, size_t count,
                       Placements* placements) {
  if (placements->size() != count) {
    return FalseRule(absl::StrCat("the rule of op ", call.op().name(), " gives ",
                                  placements->size(), " placements for ", name, ", needs ", count));
  }
  for (Placement& p : *placements) {
    if (p.is_partial() && p.reduce_op() == ReduceOp::kAvg) {
      return FalseRule(absl::StrCat("the rule of op ", call.op().name(), " gives ", p.ToString(),
                                    " for ", name,
                                    ": parts may be unequal, whose means have no mean"));
    }
    if (!p.cuts_dim()) continue;
    absl::StatusOr<int> dim = NormalizeDim(p.dim(), static_cast<int>(shape.size()));
    if (!dim.ok()) {
      return FalseRule(absl::StrCat("the rule of op ", call.op().name(), " gives ", p.ToString(),
                                    " for ", name, " of shape ", ToString(shape), ": ",
                                    dim.status().message()));
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

std::string NameOf(const OpCall& call, size_t operand) {
  const auto inputs = static_cast<size_t>(call.num_inputs());
  return operand < inputs ? call.op().InputName(static_cast<int>(operand))
                          : call.op().output_names()[operand - inputs];
}

// A dim of an operand as one mesh dim has it.
struct PlacedDim {
  size_t operand;
  int dim;
  const Placement* placement;

  bool IsCut() const { return placement->cuts_dim() && placement->dim() == dim; }
  // What coordinate `at` of `n` holds of the dim's `size` indices.
  std::vector<Interval> Held(int64_t size, int64_t n, int64_t at) const {
    std::vector<Interval> held;
    LocalIntervals(IsCut() ? *placement : Replicate(), size, n, at, &held);
    return held;
  }
};

absl::Status Differ(const OpCall& call, const std::string& factor, const PlacedDim& a,
                    const PlacedDim& b, int64_t size, int mesh_dim) {
  const int64_t n = call.mesh().size(mesh_dim);
  const auto has = [&](const PlacedDim& p, int64_t at) {
    int64_t length = 0;
    for (const Interval& i : p.Held(size, n, at)) length += i.length();
    return absl::StrCat(length, " in dim ", p.dim, " of ", NameOf(call, p.operand), " (",
                        p.placement->ToString(), ")");
  };
  int64_t at = 0;
  while (at < n - 1 && a.Held(size, n, at) == b.Held(size, n, at)) ++at;
  return FalseRule(absl::StrCat(
      "the rule of op ", call.op().name(), " gives its kernel other indices of factor ", factor,
      " in one tensor than in another: of ", size, ", coordinate ", at, " of mesh dim ", mesh_dim,
      " has ", has(a, at), " and ", has(b, at)));
}

// Of a factor that has its dims to itself. Flat pieces are not of a dim.
absl::Status CheckFactor(const OpCall& call, const FactorMap& map, int f, const Strategy& strategy,
                         int mesh_dim) {
  const size_t inputs = strategy.inputs.size(), all = inputs + strategy.outputs.size();
  std::optional<PlacedDim> first;
  for (size_t k = 0; k < all; ++k) {
    const Placement& p = (k < inputs ? strategy.inputs[k] : strategy.outputs[k - inputs])[mesh_dim];
    if (p.is_flat()) continue;
    const FactorOperand& operand = map->Operand(k);
    for (size_t d = 0; d < operand.size(); ++d) {
      if (operand[d].size() != 1 || operand[d][0] != f) continue;
      const PlacedDim here = {k, static_cast<int>(d), &p};
      if (!first) first = here;
      if (!here.IsCut() && !first->IsCut()) continue;
      const int64_t n = call.mesh().size(mesh_dim);
      for (int64_t at = 0; at < n; ++at) {
        if (here.Held(map.sizes[f], n, at) == first->Held(map.sizes[f], n, at)) continue;
        return Differ(call, map->names[f], *first, here, map.sizes[f], mesh_dim);
      }
    }
  }
  return absl::OkStatus();
}

// The placements of a whole strategy on one mesh dim, of inputs and outputs.
const Placement& PlacementOf(const Strategy& strategy, size_t operand, int mesh_dim) {
  const size_t inputs = strategy.inputs.size();
  return (operand < inputs ? strategy.inputs[operand]
                           : strategy.outputs[operand - inputs])[mesh_dim];
}

// Flat pieces are of all dims together: tensors of the same factors have the same of them, or none.
absl::Status CheckFlats(const OpCall& call, const FactorMap& map, const Strategy& strategy,
                        int mesh_dim) {
  const size_t all = strategy.inputs.size() + strategy.outputs.size();
  for (size_t a = 0; a < all; ++a) {
    for (size_t b = a + 1; b < all; ++b) {
      const Placement& p = PlacementOf(strategy, a, mesh_dim);
      const Placement& q = PlacementOf(strategy, b, mesh_dim);
      if ((!p.is_flat() && !q.is_flat()) || p == q) continue;
      if (!(map->Operand(a) == map->Operand(b))) continue;
      return FalseRule(absl::StrCat("the rule of op ", call.op().name(),
                                    " gives its kernel other elements of ", NameOf(call, a), " (",
                                    p.ToString(), ") than of ", NameOf(call, b), " (", q.ToString(),
                                    ") on mesh dim ", mesh_dim));
    }
  }
  return absl::OkStatus();
}

// How many indices of the factors of dim `d` of operand `whole` coordinate `at` holds of operand
// `k`, which has each of them in dims of none but those; nothing where it has not.
std::optional<int64_t> CountHeld(const FactorMap& map, const Strategy& strategy, int mesh_dim,
                                 int64_t n, int64_t at, size_t k, const FactorDim& factors) {
  const Placement& p = PlacementOf(strategy, k, mesh_dim);
  if (p.is_flat()) return std::nullopt;
  const FactorOperand& operand = map->Operand(k);
  int64_t held = 1;
  size_t found = 0;
  for (size_t d = 0; d < operand.size(); ++d) {
    const auto among = std::count_if(operand[d].begin(), operand[d].end(), [&](int f) {
      return std::find(factors.begin(), factors.end(), f) != factors.end();
    });
    if (among == 0) continue;
    if (among != std::ssize(operand[d])) return std::nullopt;
    found += operand[d].size();
    int64_t size = 1, length = 0;
    for (const int f : operand[d]) size *= map.sizes[f];
    for (const Interval& i : PlacedDim{k, static_cast<int>(d), &p}.Held(size, n, at)) {
      length += i.length();
    }
    held *= length;
  }
  if (found != factors.size()) return std::nullopt;
  return held;
}

// How factors that share a dim are cut is the op's to know, but not of how many indices.
absl::Status CheckSharedDims(const OpCall& call, const FactorMap& map, const Strategy& strategy,
                             int mesh_dim) {
  const size_t all = strategy.inputs.size() + strategy.outputs.size();
  const int64_t n = call.mesh().size(mesh_dim);
  for (size_t a = 0; a < all; ++a) {
    for (const FactorDim& factors : map->Operand(a)) {
      if (factors.size() < 2) continue;
      for (size_t b = 0; b < all; ++b) {
        for (int64_t at = 0; a != b && at < n; ++at) {
          const auto has = CountHeld(map, strategy, mesh_dim, n, at, a, factors);
          const auto other = CountHeld(map, strategy, mesh_dim, n, at, b, factors);
          if (!has || !other || *has == *other) continue;
          std::vector<std::string> names;
          for (const int f : factors) names.push_back(map->names[f]);
          return FalseRule(absl::StrCat(
              "the rule of op ", call.op().name(), " gives its kernel ", *has, " indices of (",
              absl::StrJoin(names, " "), ") in ", NameOf(call, a), " (",
              PlacementOf(strategy, a, mesh_dim).ToString(), ") and ", *other, " in ",
              NameOf(call, b), " (", PlacementOf(strategy, b, mesh_dim).ToString(),
              ") at coordinate ", at, " of mesh dim ", mesh_dim));
        }
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

bool IsFalseRule(const absl::Status& status) { return status.GetPayload(kFalseRule).has_value(); }

absl::Status CheckCuts(const OpCall& call, const std::vector<FactorMap>& maps,
                       const Strategy& strategy) {
  absl::Status why;
  for (const FactorMap& map : maps) {
    absl::Status status;
    for (int m = 0; status.ok() && m < call.mesh().ndim(); ++m) {
      status = CheckFlats(call, map, strategy, m);
      if (status.ok()) status = CheckSharedDims(call, map, strategy, m);
      for (size_t f = 0; status.ok() && f < map.sizes.size(); ++f) {
        status = CheckFactor(call, map, static_cast<int>(f), strategy, m);
      }
    }
    if (status.ok()) return status;
    if (why.ok()) why = status;
  }
  return why;
}

absl::Status NormalizeGiven(const OpCall& call, const std::vector<Shape>& out_shapes, size_t count,
                            std::vector<Placements>* inputs, std::vector<Placements>* outputs) {
  if (static_cast<int>(inputs->size()) != call.num_inputs() ||
      static_cast<int>(outputs->size()) != call.op().num_outputs()) {
    return FalseRule(absl::StrCat("the rule of op ", call.op().name(), " places ", inputs->size(),
                                  " inputs and ", outputs->size(), " outputs, there are ",
                                  call.num_inputs(), " and ", call.op().num_outputs()));
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
      return FalseRule(absl::StrCat("the rule of op ", call.op().name(), " gives a row that costs ",
                                    row.cost_us, " us; a cost is a number from 0 up"));
    }
    ShardingRow& r = rows.emplace_back();
    r.inputs.assign(row.inputs.begin(), row.inputs.end());
    r.outputs.assign(row.outputs.begin(), row.outputs.end());
    r.cost_us = row.cost_us;
  }
  return rows;
}

}  // namespace dtensor::internal
