#include "dtensor/sharding.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/redistribute.h"
#include "mesh/launch.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int64_t kMaxCandidates = 4096;  // beyond it the search keeps a beam
constexpr size_t kBeamWidth = 16;

// Searches the product over mesh dims of one factor map's rows.
class Search {
 public:
  Search(const OpCall& call, const FactorMap& map, const Spec* like, bool exhaustive)
      : call_(call), map_(map), like_(like), mesh_(call.mesh()), exhaustive_(exhaustive) {
    for (int i = 0; i < call.num_inputs(); ++i) flat_ |= HasFlat(call.in(i).placements());
  }

  // Cheapest legal strategy, or false if there is none.
  bool Run(Strategy* best) {
    best_ = best;
    best_cost_ = std::numeric_limits<double>::infinity();
    std::vector<SizeSet> sizes;
    for (int64_t s : map_.sizes) sizes.push_back({s});
    if (exhaustive_) {
      rows_ = RowsBy(DeriveRows);
      Descend(0, sizes);
      return best_cost_ < std::numeric_limits<double>::infinity();
    }
    only_matching_ = true;
    if (like_ == nullptr) {
      rows_ = RowsBy(MatchingRows);
      Descend(0, sizes);
      if (best_cost_ == 0) return true;
    }
    rows_ = RowsBy(DeriveRows);
    Descend(0, sizes);
    if (best_cost_ > 0) {
      only_matching_ = false;
      double product = 1;
      for (const auto& rows : rows_) product *= static_cast<double>(rows->size());
      if (product > kMaxCandidates) {
        beam_ = true;
        BeamSearch(sizes);
      } else {
        Descend(0, sizes);
      }
    }
    return best_cost_ < std::numeric_limits<double>::infinity();
  }

  // Keeps every legal strategy that is priced from now on.
  void Collect(std::vector<Strategy>* all, size_t most) {
    all_ = all;
    most_ = most;
  }
  // Also strategies that an in-place op may not take.
  void LetSelfMove() { keep_self_ = false; }
  int64_t candidates() const { return candidates_; }
  bool beam() const { return beam_; }

 private:
  struct Choice {
    const ShardingRow* row;
    Placements inputs;   // the row's, with units written as the inputs write them
    Placements outputs;  // where the row was resolved, else empty: the row's
  };
  using Choices = std::vector<Choice>;

  using RowsFn = std::vector<ShardingRow> (*)(const OpCall&, const FactorMap&, int, const Spec*);

  // Rows of every mesh dim; dims on which all inputs are placed alike have the same.
  std::vector<std::shared_ptr<const std::vector<ShardingRow>>> RowsBy(RowsFn derive) const {
    std::vector<std::shared_ptr<const std::vector<ShardingRow>>> all;
    for (int m = 0; m < mesh_.ndim(); ++m) {
      int twin = 0;
      while (twin < m && !PlacedAlike(twin, m)) ++twin;
      if (twin < m) {
        all.push_back(all[twin]);
        continue;
      }
      auto rows = std::make_shared<std::vector<ShardingRow>>(derive(call_, map_, m, like_));
      if (keep_self_ && call_.op().in_place()) KeepSelf(m, rows.get());
      all.push_back(std::move(rows));
    }
    return all;
  }
  bool PlacedAlike(int a, int b) const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (!(call_.in(i).placement(a) == call_.in(i).placement(b))) return false;
    }
    return like_ == nullptr || like_->placement(a) == like_->placement(b);
  }

  // An in-place op may not move self: its row must be self's own placement, in and out.
  void KeepSelf(int m, std::vector<ShardingRow>* rows) const {
    const Placement& self = call_.in(0).placement(m);
    rows->erase(std::remove_if(rows->begin(), rows->end(),
                               [&](const ShardingRow& row) {
                                 return !Alike(row.inputs[0], self) || !Alike(row.outputs[0], self);
                               }),
                rows->end());
  }
  static bool Alike(const Placement& a, const Placement& b) {
    const auto cuts = [](const Placement& p) { return p.is_shard() || p.is_segmented(); };
    return a == b || (cuts(a) && cuts(b) && a.dim() == b.dim());
  }

  // The row on mesh dim m given what the dims before left; false if it is not legal there.
  bool Place(int m, const ShardingRow& row, const std::vector<SizeSet>& sizes, Choice* out) const {
    out->row = &row;
    out->inputs = row.inputs;
    if (row.resolve) {
      out->outputs = row.outputs;
      if (!PlaceRow(map_, row, sizes, mesh_.size(m), &out->inputs, &out->outputs)) return false;
    }
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& have = call_.in(i).placement(m);
      Placement& want = out->inputs[i];
      if (want.kind() == have.kind() && want.dim() == have.dim() &&
          CutsAlike(i, want, have, sizes, mesh_.size(m))) {
        want = have;
      }
    }
    return !keep_self_ || !call_.op().in_place() || out->inputs[0] == call_.in(0).placement(m);
  }

  bool CutsAlike(int input, const Placement& a, const Placement& b,
                 const std::vector<SizeSet>& sizes, int64_t n) const {
    if (a == b) return true;
    if (a.is_segmented()) {
      const Segments one = a.segments(), other = b.segments();
      return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                        [n](const Segment& s, const Segment& t) {
                          return s.size == t.size && SameCut(s.size, s.unit, t.unit, n);
                        });
    }
    if (!a.is_shard()) return false;
    SizeSet dims = {1};
    for (int f : map_.inputs[input][a.dim()]) {
      SizeSet next;
      for (int64_t d : dims) {
        for (int64_t s : sizes[f]) AddSize(d * s, &next);
      }
      dims = next;
    }
    return std::all_of(dims.begin(), dims.end(),
                       [&](int64_t d) { return SameCut(d, a.unit(), b.unit(), n); });
  }

  bool Matches(int m, const Choice& choice) const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (!(choice.inputs[i] == call_.in(i).placement(m))) return false;
    }
    return true;
  }

  // Extends chosen_ by every legal row of mesh dims m and later.
  void Descend(int m, const std::vector<SizeSet>& sizes) {
    if (m == mesh_.ndim()) {
      Consider(chosen_);
      return;
    }
    for (const ShardingRow& row : *rows_[m]) {
      Choice choice;
      if (!Place(m, row, sizes, &choice)) continue;
      if (only_matching_ && !Matches(m, choice)) continue;
      chosen_.push_back(std::move(choice));
      if (row.factor < 0) {
        Descend(m + 1, sizes);
      } else {
        Descend(m + 1, SizesAfter(map_, row, sizes, mesh_.size(m)));
      }
      chosen_.pop_back();
      if (best_cost_ == 0 && !exhaustive_) return;
    }
  }

  Placements InputPlacements(int i, const Choices& chosen) const {
    Placements p;
    for (int m = 0; m < mesh_.ndim(); ++m) {
      p.push_back(m < static_cast<int>(chosen.size()) ? chosen[m].inputs[i]
                                                      : call_.in(i).placement(m));
    }
    return p;
  }
  Placements OutputPlacements(int o, const Choices& chosen) const {
    Placements p;
    for (const Choice& c : chosen) {
      p.push_back((c.outputs.empty() ? c.row->outputs : c.outputs)[o]);
    }
    return p;
  }

  double InputCost(const Choices& chosen) const {
    double cost = 0;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Spec& in = call_.in(i);
      cost += RedistributeCost(mesh_, in.shape(), in.dtype(), in.placements(),
                               InputPlacements(i, chosen));
    }
    return cost;
  }

  // One spec cannot wait for two kinds of reduction.
  static bool MixesPartials(const Placements& p) {
    const Placement* first = nullptr;
    for (const Placement& x : p) {
      if (!x.is_partial()) continue;
      if (first != nullptr && first->reduce_op() != x.reduce_op()) return true;
      first = &x;
    }
    return false;
  }
  bool MixesPartials(const Choices& chosen) const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (MixesPartials(InputPlacements(i, chosen))) return true;
    }
    for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
      if (MixesPartials(OutputPlacements(o, chosen))) return true;
    }
    return false;
  }

  // Flat pieces of several inputs are pieces of one local tensor: all else is placed alike, as it
  // is where one of them comes from.
  bool FlatFits(const Choices& chosen) const {
    bool kept = false;
    Placements first;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placements p = InputPlacements(i, chosen);
      if (!HasFlat(p)) continue;
      if (first.empty()) first = p;
      if (p != first) return false;
      kept |= absl::MakeConstSpan(p) == call_.in(i).placements();
    }
    return kept || first.empty();
  }
  static bool HasFlat(absl::Span<const Placement> p) {
    return std::any_of(p.begin(), p.end(), [](const Placement& x) { return x.is_flat(); });
  }

  void Consider(const Choices& chosen) {
    ++candidates_;
    if (MixesPartials(chosen) || (flat_ && !FlatFits(chosen))) return;
    const double input_cost = InputCost(chosen);
    if (all_ != nullptr && all_->size() < most_) {
      Strategy s;
      s.cost_bytes = input_cost;
      for (int i = 0; i < call_.num_inputs(); ++i) s.inputs.push_back(InputPlacements(i, chosen));
      for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
        s.outputs.push_back(OutputPlacements(o, chosen));
      }
      all_->push_back(std::move(s));
    }
    double cost = input_cost;
    if (like_ != nullptr && cost < best_cost_) {
      // A layout that has to be cut down afterwards costs nothing to move, but was computed in
      // vain.
      const Placements out = OutputPlacements(0, chosen);
      if (absl::MakeConstSpan(out) != like_->placements()) {
        cost += 1 + RedistributeCost(mesh_, like_->shape(), like_->dtype(), out, LikeTarget(out));
      }
    }
    if (cost >= best_cost_) return;
    best_cost_ = cost;
    best_->cost_bytes = input_cost;
    best_->inputs.clear();
    best_->outputs.clear();
    for (int i = 0; i < call_.num_inputs(); ++i) {
      best_->inputs.push_back(InputPlacements(i, chosen));
    }
    for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
      best_->outputs.push_back(OutputPlacements(o, chosen));
    }
  }

  // What `out` would have to become. A sum that comes where a copy was asked for may stay pending:
  // it is for autograd to reduce, once, together with others.
  Placements LikeTarget(const Placements& out) const {
    Placements p(like_->placements().begin(), like_->placements().end());
    for (size_t m = 0; m < p.size(); ++m) {
      if (p[m].is_partial()) p[m] = Replicate();
      if (p[m].is_replicate() && out[m].is_partial()) p[m] = out[m];
    }
    return p;
  }

  void BeamSearch(const std::vector<SizeSet>& sizes) {
    struct State {
      double cost;
      std::vector<SizeSet> sizes;
      Choices chosen;
    };
    std::vector<State> beam = {{0, sizes, {}}};
    for (int m = 0; m < mesh_.ndim(); ++m) {
      std::vector<State> next;
      for (const State& state : beam) {
        for (const ShardingRow& row : *rows_[m]) {
          Choice choice;
          if (!Place(m, row, state.sizes, &choice)) continue;
          State s = {0, SizesAfter(map_, row, state.sizes, mesh_.size(m)), state.chosen};
          s.chosen.push_back(std::move(choice));
          s.cost = InputCost(s.chosen);
          ++candidates_;
          next.push_back(std::move(s));
        }
      }
      std::stable_sort(next.begin(), next.end(),
                       [](const State& a, const State& b) { return a.cost < b.cost; });
      if (next.size() > kBeamWidth) next.resize(kBeamWidth);
      beam = std::move(next);
    }
    for (const State& state : beam) Consider(state.chosen);
  }

  const OpCall& call_;
  const FactorMap& map_;
  const Spec* like_;
  const DeviceMesh& mesh_;
  std::vector<std::shared_ptr<const std::vector<ShardingRow>>> rows_;  // per mesh dim
  Strategy* best_ = nullptr;
  double best_cost_ = 0;
  const bool exhaustive_;
  bool flat_ = false;  // some input is
  bool only_matching_ = false, beam_ = false, keep_self_ = true;
  int64_t candidates_ = 0;
  std::vector<Strategy>* all_ = nullptr;
  size_t most_ = 0;
  Choices chosen_;
};

// Where self of an in-place op could stay, cheapest to reach first: "[R], [S(1)]".
std::string NearestForSelf(const OpCall& call, const std::vector<FactorMap>& maps) {
  constexpr size_t kNearest = 3, kMost = 4096;
  std::vector<Strategy> all;
  for (const FactorMap& map : maps) {
    Search search(call, map, nullptr, /*exhaustive=*/true);
    search.LetSelfMove();
    search.Collect(&all, kMost);
    Strategy best;
    search.Run(&best);
  }
  std::stable_sort(all.begin(), all.end(), [](const Strategy& a, const Strategy& b) {
    return a.cost_bytes < b.cost_bytes;
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
  bool found = false;
  for (size_t i = 0; i < maps.size(); ++i) {
    Search search(call, maps[i], like, exhaustive);
    Strategy strategy;
    if (search.Run(&strategy) && (!found || strategy.cost_bytes < plan->strategy.cost_bytes)) {
      strategy.factor_map = static_cast<int>(i);
      plan->strategy = std::move(strategy);
      found = true;
    }
    plan->candidates += search.candidates();
    plan->beam |= search.beam();
    if (found && plan->strategy.cost_bytes == 0 && !exhaustive) break;
  }
  return found ? absl::OkStatus() : NoStrategy(call, maps);
}

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
    if (!p.is_shard() && !p.is_segmented()) continue;
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

// One list per input and output, normalised in place.
absl::Status NormalizeAll(const OpCall& call, const std::vector<Shape>& out_shapes, size_t count,
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

// A row for one mesh dim in the form of the lists above, and back.
absl::Status NormalizeRow(const OpCall& call, const std::vector<Shape>& out_shapes,
                          StrategyRow* row) {
  std::vector<Placements> inputs, outputs;
  for (const Placement& p : row->inputs) inputs.push_back({p});
  for (const Placement& p : row->outputs) outputs.push_back({p});
  DT_RETURN_IF_ERROR(NormalizeAll(call, out_shapes, 1, &inputs, &outputs));
  for (size_t i = 0; i < inputs.size(); ++i) row->inputs[i] = inputs[i][0];
  for (size_t o = 0; o < outputs.size(); ++o) row->outputs[o] = outputs[o][0];
  return absl::OkStatus();
}

// Rows given by hand: each mesh dim takes the row that is cheapest for it, first ones winning ties.
absl::Status PlanByStrategies(const OpCall& call, OpPlan* plan) {
  DT_ASSIGN_OR_RETURN(std::vector<StrategyRow> rows, call.op().strategies()(call));
  for (StrategyRow& row : rows) DT_RETURN_IF_ERROR(NormalizeRow(call, plan->out_shapes, &row));
  Strategy& s = plan->strategy;
  s.inputs.resize(call.num_inputs());
  for (int i = 0; i < call.num_inputs(); ++i) {
    s.inputs[i].assign(call.in(i).placements().begin(), call.in(i).placements().end());
  }
  s.outputs.assign(call.op().num_outputs(), Placements(call.mesh().ndim()));
  for (int m = 0; m < call.mesh().ndim(); ++m) {
    double best = std::numeric_limits<double>::infinity();
    const StrategyRow* chosen = nullptr;
    for (const StrategyRow& row : rows) {
      double cost = row.cost_us;
      for (int i = 0; i < call.num_inputs(); ++i) {
        Placements to = s.inputs[i];
        to[m] = row.inputs[i];
        cost += RedistributeCost(call.mesh(), call.shape(i), call.dtype(i), s.inputs[i], to);
      }
      ++plan->candidates;
      if (cost < best) {
        best = cost;
        chosen = &row;
      }
    }
    if (chosen == nullptr) return NoStrategy(call, {});
    s.cost_bytes += best;
    for (int i = 0; i < call.num_inputs(); ++i) s.inputs[i][m] = chosen->inputs[i];
    for (size_t o = 0; o < s.outputs.size(); ++o) s.outputs[o][m] = chosen->outputs[o];
  }
  return absl::OkStatus();
}

absl::Status PlanByRule(const OpCall& call, OpPlan* plan) {
  DT_ASSIGN_OR_RETURN(ShardingDecision decision, call.op().rule()(call));
  DT_RETURN_IF_ERROR(NormalizeAll(call, plan->out_shapes, call.mesh().ndim(), &decision.inputs,
                                  &decision.outputs));
  for (int i = 0; i < call.num_inputs(); ++i) {
    plan->strategy.cost_bytes += RedistributeCost(call.mesh(), call.shape(i), call.dtype(i),
                                                  call.in(i).placements(), decision.inputs[i]);
  }
  plan->strategy.inputs = std::move(decision.inputs);
  plan->strategy.outputs = std::move(decision.outputs);
  plan->candidates = 1;
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
    plan->out_shapes.push_back(call.shape(0));
  } else {
    return absl::UnimplementedError(absl::StrCat(
        "op ", op.name(), " declares neither .Factors nor .Shapes: output shapes are unknown"));
  }
  if (op.in_place() && plan->out_shapes[0] != call.shape(0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the result has shape ", ToString(plan->out_shapes[0]), ", which ",
                     op.InputName(0), " ", ToString(call.shape(0)), " cannot hold in place"));
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

// One operand of a placed call.
struct PlacedOperand {
  const FactorOperand& factors;
  const Placements& placements;
};

// The first operand whose dim of factor f is cut on mesh dim m; its placement there.
const Placement* CutOf(absl::Span<const PlacedOperand> operands, int f, size_t m,
                       const FactorDim** dim) {
  for (const PlacedOperand& operand : operands) {
    const int d = FactorMap::DimOf(operand.factors, f);
    const Placement& p = operand.placements[m];
    if (d < 0 || !(p.is_shard() || p.is_segmented()) || p.dim() != d) continue;
    *dim = &operand.factors[d];
    return &p;
  }
  return nullptr;
}

// Blocks of a factor.
FactorRange BlockRange(const FactorMap& map, int f, absl::Span<const PlacedOperand> operands,
                       const DeviceMesh& mesh, IntSpan coordinate) {
  FactorRange range = {0, map.sizes[f], map.sizes[f]};
  for (size_t m = 0; m < coordinate.size(); ++m) {
    const FactorDim* dim = nullptr;
    const Placement* p = CutOf(operands, f, m, &dim);
    if (p == nullptr) continue;
    int64_t minor = 1;
    for (auto it = dim->rbegin(); *it != f; ++it) minor *= map.sizes[*it];
    minor = std::max<int64_t>(1, minor);
    const int64_t n = mesh.size(static_cast<int>(m));
    if (p->is_segmented()) {  // of no use but to the judge: a kernel must not pass what there is
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
FactorRange PartRange(const FactorMap& map, int f, absl::Span<const PlacedOperand> operands,
                      const DeviceMesh& mesh, IntSpan coordinate) {
  const int whole = map.part_of[f];
  int64_t start = 0, size = map.sizes[whole];
  for (const int part : map.parts[whole]) {
    if (part == f) break;
    start += map.sizes[part];
  }
  int64_t end = start + map.sizes[f];
  std::vector<Interval> held;
  for (size_t m = 0; m < coordinate.size(); ++m) {
    const FactorDim* dim = nullptr;
    const Placement* p = CutOf(operands, whole, m, &dim);
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
  absl::InlinedVector<PlacedOperand, 6> operands;
  for (size_t i = 0; i < inputs.size(); ++i) operands.push_back({map.inputs[i], inputs[i]});
  for (size_t o = 0; o < outputs.size(); ++o) operands.push_back({map.outputs[o], outputs[o]});
  for (const std::string& name : call.op().offsets()) {
    const int f = map.IndexOf(name);
    if (f < 0) {
      ranges.push_back({0, -1, -1});
    } else if (map.part_of[f] >= 0) {
      ranges.push_back(PartRange(map, f, operands, call.mesh(), coordinate));
    } else {
      ranges.push_back(BlockRange(map, f, operands, call.mesh(), coordinate));
    }
  }
  return ranges;
}

static absl::StatusOr<OpPlan> Plan(const OpCall& call, const Spec* like, bool exhaustive) {
  const OpDef& op = call.op();
  OpPlan plan;
  DT_ASSIGN_OR_RETURN(std::vector<FactorMap> maps, FactorMapsOf(call));
  if (op.check()) DT_RETURN_IF_ERROR(op.check()(call));
  DT_RETURN_IF_ERROR(InferOutputs(call, maps, &plan));
  if (op.rule()) {
    DT_RETURN_IF_ERROR(PlanByRule(call, &plan));
  } else if (op.strategies()) {
    DT_RETURN_IF_ERROR(PlanByStrategies(call, &plan));
  } else if (!maps.empty()) {
    DT_RETURN_IF_ERROR(PlanByFactors(call, maps, like, exhaustive, &plan));
    Dims coordinate;
    call.mesh().Coordinate(RankContext::Current().rank(), &coordinate);
    plan.offsets = FactorRanges(call, maps[plan.strategy.factor_map], plan.strategy.inputs,
                                plan.strategy.outputs, coordinate);
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
  const absl::StatusOr<std::vector<FactorMap>> maps = FactorMapsOf(call);
  if (!maps.ok()) return all;
  for (const FactorMap& map : *maps) {
    Search search(call, map, nullptr, /*exhaustive=*/true);
    search.Collect(&all, most);
    Strategy best;
    search.Run(&best);
  }
  return all;
}

}  // namespace dtensor
