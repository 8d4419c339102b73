#include "dtensor/sharding.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/given_rows.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/search.h"
#include "dtensor/strategy_cost.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using internal::Cost;
using internal::CostOfMove;
using internal::MeshGroups;
using internal::Search;

namespace {

// Where self of an in-place op could stay, cheapest to reach first: "[R], [S(1)]".
std::string NearestForSelf(const OpCall& call, const std::vector<FactorMap>& maps) {
  constexpr size_t kNearest = 3, kMost = 4096;
  std::vector<Strategy> all;
  MeshGroups groups(call.mesh(), internal::WorldCost());
  for (const FactorMap& map : maps) {
    Search search(call, absl::MakeConstSpan(&map, 1), nullptr, &groups);
    search.LetSelfMove();
    search.Collect(&all, kMost);
    Strategy best;
    search.RunExhaustively(&best);
  }
  std::stable_sort(all.begin(), all.end(), [](const Strategy& a, const Strategy& b) {
    return std::pair(a.cost_bytes, a.cost_us) < std::pair(b.cost_bytes, b.cost_us);
  });
  std::vector<std::string> names;
  for (const Strategy& s : all) {
    const std::string name = ToString(s.inputs[0]);
    const bool stays = s.inputs[0] == s.outputs[0];
    if (stays && std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  if (names.size() > kNearest) names.resize(kNearest);
  return absl::StrJoin(names, ", ");
}

absl::Status NoStrategy(const OpCall& call, const std::vector<FactorMap>& maps) {
  if (call.op().in_place()) {
    const std::string nearest = NearestForSelf(call, maps);
    return absl::FailedPreconditionError(absl::StrCat(
        "in-place op cannot keep ", call.op().InputName(0), " where it is (", call.in(0).ToString(),
        "): self is never redistributed. Redistribute it first",
        nearest.empty() ? "" : absl::StrCat(" (nearest that it can keep: ", nearest, ")"),
        ", or use the op that returns a new tensor"));
  }
  return absl::FailedPreconditionError(
      "no rule fits: the op gives no row of placements for this call, not even with all inputs "
      "replicated");
}

absl::Status PlanByFactors(const OpCall& call, const std::vector<FactorMap>& maps, const Spec* like,
                           bool exhaustive, OpPlan* plan) {
  MeshGroups groups(call.mesh(), internal::WorldCost());
  if (maps.size() > 1 && like == nullptr && !exhaustive) {
    Search search(call, maps, nullptr, &groups);
    const bool found = search.Run(&plan->strategy);
    plan->candidates += search.candidates();
    if (found) return absl::OkStatus();
  }
  Cost best = Cost::Infinite();
  bool found = false;
  for (size_t i = 0; i < maps.size() && (exhaustive || !best.zero()); ++i) {
    Search search(call, absl::MakeConstSpan(&maps[i], 1), like, &groups);
    if (exhaustive ? search.RunExhaustively(&plan->strategy, best)
                   : search.Run(&plan->strategy, best)) {
      plan->strategy.factor_map = static_cast<int>(i);
      best = search.cost();
      found = true;
    }
    plan->candidates += search.candidates();
    plan->beam |= search.beam();
  }
  return found ? absl::OkStatus() : NoStrategy(call, maps);
}

absl::Status PlanByStrategies(const OpCall& call, const Spec* like, bool exhaustive, OpPlan* plan) {
  DT_ASSIGN_OR_RETURN(RowList rows, internal::GivenRows(call, plan->out_shapes));
  MeshGroups groups(call.mesh(), internal::WorldCost());
  Search search(call, std::move(rows), plan->out_shapes, like, &groups);
  const bool found =
      exhaustive ? search.RunExhaustively(&plan->strategy) : search.Run(&plan->strategy);
  plan->candidates = search.candidates();
  plan->beam = search.beam();
  return found ? absl::OkStatus() : NoStrategy(call, {});
}

absl::Status PlanByRule(const OpCall& call, OpPlan* plan) {
  DT_ASSIGN_OR_RETURN(ShardingDecision decision, call.op().rule()(call));
  DT_RETURN_IF_ERROR(internal::NormalizeGiven(call, plan->out_shapes, call.mesh().ndim(),
                                              &decision.inputs, &decision.outputs));
  Cost cost;
  for (int i = 0; i < call.num_inputs(); ++i) {
    cost += CostOfMove(call.mesh(), call.shape(i), call.dtype(i), call.in(i).placements(),
                       decision.inputs[i]);
  }
  plan->strategy.cost_bytes = cost.bytes;
  plan->strategy.cost_us = cost.us;
  plan->strategy.inputs = std::move(decision.inputs);
  plan->strategy.outputs = std::move(decision.outputs);
  plan->candidates = 1;
  return absl::OkStatus();
}

// The ranges of the NeedsOffset factors on this rank. The factor strings name the dims that hold
// them, also where rows or a rule given by hand decide what is sharded.
absl::Status PlanOffsets(const OpCall& call, const std::vector<FactorMap>& maps, OpPlan* plan) {
  const std::vector<std::string>& names = call.op().offsets();
  if (names.empty() || call.mesh().is_self()) {
    // One device has all of everything; its maps may still tell how much that is.
    if (names.empty() || maps.empty()) return absl::OkStatus();
  }
  const size_t at = std::max(plan->strategy.factor_map, 0);
  if (at >= maps.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "op ", call.op().name(), " needs the offset of factor ", names[0],
        ", but has no factor string that says which dims hold it; add .Factors beside it"));
  }
  // A string that is the same for every call names it; one of several is enough.
  const std::vector<OpDef::FactorSource>& sources = call.op().factor_sources();
  const bool fixed = std::all_of(sources.begin(), sources.end(),
                                 [](const OpDef::FactorSource& s) { return s.fn == nullptr; });
  for (const std::string& name : names) {
    const auto named = [&](const FactorMap& map) { return map->IndexOf(name) >= 0; };
    if (!fixed || std::any_of(maps.begin(), maps.end(), named)) continue;
    return absl::InvalidArgumentError(absl::StrCat("op ", call.op().name(),
                                                   " needs the offset of factor ", name,
                                                   ", which none of its factor strings has"));
  }
  Dims coordinate;
  call.mesh().Coordinate(RankContext::Current().rank(), &coordinate);
  plan->offsets =
      FactorRanges(call, maps[at], plan->strategy.inputs, plan->strategy.outputs, coordinate);
  return absl::OkStatus();
}

absl::Status InferOutputs(const OpCall& call, const std::vector<FactorMap>& maps, OpPlan* plan) {
  const OpDef& op = call.op();
  if (op.shapes()) {
    DT_ASSIGN_OR_RETURN(plan->out_shapes, op.shapes()(call));
    if (static_cast<int>(plan->out_shapes.size()) != op.num_outputs()) {
      return absl::InvalidArgumentError(
          absl::StrCat("the shape function of op ", op.name(), " gives ", plan->out_shapes.size(),
                       " shapes, the op has ", op.num_outputs(), " outputs"));
    }
  } else if (!maps.empty()) {
    for (int o = 0; o < op.num_outputs(); ++o) plan->out_shapes.push_back(maps[0].OutputShape(o));
  } else if (op.in_place()) {
    for (int o = 0; o < op.num_outputs(); ++o) plan->out_shapes.push_back(call.shape(o));
  } else {
    return absl::UnimplementedError(absl::StrCat(
        "op ", op.name(), " declares neither .Factors nor .Shapes: output shapes are unknown"));
  }
  for (int o = 0; op.in_place() && o < op.num_outputs(); ++o) {
    if (plan->out_shapes[o] == call.shape(o)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("the result has shape ", ToString(plan->out_shapes[o]), ", which ",
                     op.InputName(o), " ", ToString(call.shape(o)), " cannot hold in place"));
  }
  for (int o = 0; o < op.num_outputs(); ++o) {
    DType dtype = call.dtype(0);
    if (op.out_dtype()) {
      DT_ASSIGN_OR_RETURN(dtype, op.out_dtype()(call, o));
    }
    plan->out_dtypes.push_back(dtype);
  }
  return absl::OkStatus();
}

}  // namespace

namespace {

// Inputs, then outputs.
using PlacedOperands = absl::InlinedVector<const Placements*, 12>;

// The first operand whose dim of factor f is cut on mesh dim m; its placement there.
const Placement* CutOf(const FactorNest& nest, const PlacedOperands& operands, int f, size_t m,
                       const FactorDim** dim) {
  for (size_t k = 0; k < operands.size(); ++k) {
    const int d = nest.CutDim(k, f);
    const Placement& p = (*operands[k])[m];
    if (d < 0 || !p.cuts_dim() || p.dim() != d) continue;
    *dim = &nest.Operand(k)[d];
    if (std::find((*dim)->begin(), (*dim)->end(), f) != (*dim)->end()) return &p;  // or a part of f
  }
  return nullptr;
}

// Blocks of a factor.
FactorRange BlockRange(const FactorMap& map, int f, const PlacedOperands& operands,
                       const DeviceMesh& mesh, IntSpan coordinate) {
  FactorRange range = {0, map.sizes[f], map.sizes[f]};
  for (size_t m = 0; m < coordinate.size(); ++m) {
    const FactorDim* dim = nullptr;
    const Placement* p = CutOf(*map.nest, operands, f, m, &dim);
    if (p == nullptr) continue;
    int64_t minor = 1;
    for (auto it = dim->rbegin(); *it != f; ++it) minor *= map.sizes[*it];
    minor = std::max<int64_t>(1, minor);
    const int64_t n = mesh.size(static_cast<int>(m));
    if (!p->is_shard()) {  // of no use but to the judge: a kernel must not pass what there is
      std::vector<Interval> held;
      LocalIntervals(*p, range.local * minor, n, coordinate[m], &held);
      range.start += held.empty() ? range.local : held[0].start / minor;
      range.local = 0;
      for (const Interval& i : held) range.local += i.length() / minor;
      continue;
    }
    const int64_t unit = std::max<int64_t>(1, p->unit() / minor);
    const Interval cut = ShardInterval(range.local, unit, n, coordinate[m]);
    range.start += cut.length() > 0 ? cut.start : range.local;
    range.local = cut.length();
  }
  return range;
}

// How many indices of a part of a joined factor there are, however the whole is cut.
FactorRange PartRange(const FactorMap& map, int f, const PlacedOperands& operands,
                      const DeviceMesh& mesh, IntSpan coordinate) {
  const int whole = map->part_of[f];
  int64_t start = 0, size = map.sizes[whole];
  for (const int part : map->parts[whole]) {
    if (part == f) break;
    start += map.sizes[part];
  }
  int64_t end = start + map.sizes[f];
  std::vector<Interval> held;
  for (size_t m = 0; m < coordinate.size(); ++m) {
    const FactorDim* dim = nullptr;
    const Placement* p = CutOf(*map.nest, operands, whole, m, &dim);
    if (p == nullptr) continue;
    LocalIntervals(*p, size, mesh.size(static_cast<int>(m)), coordinate[m], &held);
    const auto below = [&held](int64_t at) {
      int64_t count = 0;
      for (const Interval& i : held) {
        count += std::clamp<int64_t>(at - i.start, 0, i.length());
      }
      return count;
    };
    start = below(start);
    end = below(end);
    size = below(size);
  }
  return {start, end - start, map.sizes[f]};
}

}  // namespace

absl::InlinedVector<FactorRange, 2> FactorRanges(const OpCall& call, const FactorMap& map,
                                                 const std::vector<Placements>& inputs,
                                                 const std::vector<Placements>& outputs,
                                                 IntSpan coordinate) {
  absl::InlinedVector<FactorRange, 2> ranges;
  if (call.op().offsets().empty()) return ranges;
  PlacedOperands operands;
  for (const Placements& input : inputs) operands.push_back(&input);
  for (const Placements& output : outputs) operands.push_back(&output);
  for (const std::string& name : call.op().offsets()) {
    const int f = map->IndexOf(name);
    if (f < 0) {
      ranges.push_back({0, -1, -1});
    } else if (map->part_of[f] >= 0) {
      ranges.push_back(PartRange(map, f, operands, call.mesh(), coordinate));
    } else {
      ranges.push_back(BlockRange(map, f, operands, call.mesh(), coordinate));
    }
  }
  return ranges;
}

// Of an op that does not check its inputs: its kernel reads all by the dtype of one.
static absl::Status CheckFloats(const OpCall& call) {
  int first = -1;
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (!IsFloating(call.dtype(i))) continue;
    if (first < 0) first = i;
    if (call.dtype(i) == call.dtype(first)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(call.op().InputName(first), " is ", std::string(Name(call.dtype(first))),
                     " and ", call.op().InputName(i), " ", std::string(Name(call.dtype(i))),
                     ": cast one of them; an op that takes both says so in a Check"));
  }
  return absl::OkStatus();
}

static absl::StatusOr<OpPlan> Plan(const OpCall& call, const Spec* like, bool exhaustive) {
  const OpDef& op = call.op();
  OpPlan plan;
  DT_ASSIGN_OR_RETURN(std::vector<FactorMap> maps, FactorMapsOf(call));
  DT_RETURN_IF_ERROR(op.check() ? op.check()(call) : CheckFloats(call));
  DT_RETURN_IF_ERROR(InferOutputs(call, maps, &plan));
  if (op.rule()) {
    DT_RETURN_IF_ERROR(PlanByRule(call, &plan));
    DT_RETURN_IF_ERROR(internal::CheckCuts(call, maps, plan.strategy));
    DT_RETURN_IF_ERROR(PlanOffsets(call, maps, &plan));
  } else if (op.strategies()) {
    DT_RETURN_IF_ERROR(PlanByStrategies(call, like, exhaustive, &plan));
    DT_RETURN_IF_ERROR(internal::CheckCuts(call, maps, plan.strategy));
    DT_RETURN_IF_ERROR(PlanOffsets(call, maps, &plan));
  } else if (!maps.empty()) {
    DT_RETURN_IF_ERROR(PlanByFactors(call, maps, like, exhaustive, &plan));
    DT_RETURN_IF_ERROR(PlanOffsets(call, maps, &plan));
  } else if (op.decompose() != nullptr) {
    plan.strategy.cost_bytes = std::numeric_limits<double>::infinity();
  } else if (call.mesh().is_self()) {
    plan.strategy.inputs.resize(call.num_inputs());
    plan.strategy.outputs.resize(op.num_outputs());
  } else {
    return absl::UnimplementedError(
        absl::StrCat("op ", op.name(),
                     " has no sharding declaration. Give it one with .Factors (a factor "
                     "string), .Strategies (rows per mesh dim), .Rule or .Decompose; or run it on "
                     "local tensors"));
  }
  return plan;
}

absl::StatusOr<OpPlan> PlanOp(const OpCall& call, const Spec* like) {
  return Plan(call, like, /*exhaustive=*/false);
}
absl::StatusOr<OpPlan> PlanOpExhaustively(const OpCall& call) {
  return Plan(call, nullptr, /*exhaustive=*/true);
}

std::vector<Strategy> LegalStrategies(const OpCall& call, size_t most) {
  std::vector<Strategy> all;
  Strategy best;
  if (call.op().rule()) return all;  // says one thing
  const absl::StatusOr<std::vector<FactorMap>> maps = FactorMapsOf(call);
  if (!maps.ok()) return all;
  MeshGroups groups(call.mesh(), internal::WorldCost());
  if (call.op().strategies()) {
    OpPlan plan;
    if (!InferOutputs(call, *maps, &plan).ok()) return all;
    absl::StatusOr<RowList> rows = internal::GivenRows(call, plan.out_shapes);
    if (!rows.ok()) return all;
    Search search(call, *std::move(rows), plan.out_shapes, nullptr, &groups);
    search.Collect(&all, most);
    search.RunExhaustively(&best);
    return all;
  }
  for (const FactorMap& map : *maps) {
    Search search(call, absl::MakeConstSpan(&map, 1), nullptr, &groups);
    search.Collect(&all, most);
    search.RunExhaustively(&best);
  }
  return all;
}

}  // namespace dtensor
