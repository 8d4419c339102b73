#include "dtensor/sharding.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/given_rows.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/strategy_cost.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using internal::Cost;
using internal::CostOfMove;
using internal::InputPrices;
using internal::MeshGroups;

namespace {

// Where the exact search would look at more prefixes, or price more targets of one input, a beam
// has to do.
constexpr int64_t kMaxVisited = 20000, kMaxTargets = 4096;
// Where the exact search looks at every prefix that may be the best, one beginning will do.
constexpr size_t kNarrowBeam = 1, kBeamWidth = 16;

// Searches the product over mesh dims of rows: those of one factor map, or those given by hand.
class Search {
 public:
  Search(const OpCall& call, const FactorMap& map, const Spec* like, bool exhaustive)
      : call_(call),
        map_(&map),
        like_(like),
        mesh_(call.mesh()),
        groups_(mesh_, internal::WorldCost()),
        exhaustive_(exhaustive) {
    for (int i = 0; i < call.num_inputs(); ++i) flat_ |= HasFlat(call.in(i).placements());
  }
  // `rows` are legal on every mesh dim, whatever the others do.
  Search(const OpCall& call, std::vector<ShardingRow> rows, const Spec* like, bool exhaustive)
      : call_(call),
        map_(nullptr),
        given_(std::move(rows)),
        like_(like),
        mesh_(call.mesh()),
        groups_(mesh_, internal::WorldCost()),
        exhaustive_(exhaustive) {}

  // Cheapest legal strategy, of equals the first; false if there is none. One that costs more than
  // `known` need not be found.
  bool Run(Strategy* best, const Cost& known = Cost::Infinite()) {
    best_ = best;
    best_cost_ = limit_ = Cost::Infinite();
    std::vector<SizeSet> sizes;
    if (map_ != nullptr) {
      for (int64_t s : map_->sizes) sizes.push_back({s});
    }
    if (exhaustive_) {
      Prepare(DeriveRows);
      Descend(0, sizes);
      return Found();
    }
    only_matching_ = true;
    if (like_ == nullptr && map_ != nullptr) {
      Prepare(MatchingRows);
      Descend(0, sizes);
      if (best_cost_.zero()) return true;
    }
    Prepare(DeriveRows);
    Descend(0, sizes);
    if (best_cost_.zero()) return true;
    only_matching_ = false;
    for (const InputPrices& p : prices_) beam_ |= p.targets() > kMaxTargets;
    double prefixes = mesh_.ndim();  // at most
    for (const auto& rows : rows_) prefixes *= static_cast<double>(rows->size());
    // What a quick look finds is what the exact search need not be dearer than.
    BeamSearch(sizes, beam_ || prefixes > kMaxVisited ? kBeamWidth : kNarrowBeam);
    const Cost quick = best_cost_;
    const Strategy found = *best_;
    best_cost_ = Cost::Infinite();
    limit_ = std::min(quick, known);
    left_to_visit_ = kMaxVisited;
    if (!beam_) Descend(0, sizes);
    if (quick < best_cost_) {
      best_cost_ = quick;
      *best_ = found;
    }
    return Found();
  }

  // Of what Run found, and of a layout of output 0 that has to be changed to `like` afterwards.
  const Cost& cost() const { return best_cost_; }
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
  // A row of one mesh dim, after those chosen for the mesh dims before.
  using PerInput = absl::InlinedVector<int, 6>;
  struct Choice {
    const ShardingRow* row;
    PerInput options;    // the inputs' placements, as InputPrices numbers them
    PerInput nodes;      // what the choices up to this one are to InputPrices
    Placements outputs;  // where the row was resolved, else empty: the row's
  };
  using Choices = std::vector<Choice>;

  using RowsFn = std::vector<ShardingRow> (*)(const OpCall&, const FactorMap&, int, const Spec*);

  bool Found() const { return best_cost_ < Cost::Infinite(); }

  void Prepare(RowsFn derive) {
    rows_ = RowsBy(derive);
    std::vector<bool> open;  // mesh dims whose placements are known only where rows are placed
    for (const auto& rows : rows_) {
      open.push_back(std::any_of(rows->begin(), rows->end(),
                                 [](const ShardingRow& row) { return row.resolve; }));
    }
    prices_.clear();
    for (int i = 0; i < call_.num_inputs(); ++i) {
      std::vector<Placements> stays;  // also for a cut that Place finds to be the same
      for (const Placement& p : call_.in(i).placements()) stays.push_back({p});
      prices_.emplace_back(call_.in(i), &groups_, std::move(stays), open);
    }
    options_.assign(mesh_.ndim(), {});
    for (int m = 0; m < mesh_.ndim(); ++m) {
      for (const ShardingRow& row : *rows_[m]) {
        PerInput& numbers = options_[m].emplace_back();
        if (row.resolve) continue;
        for (int i = 0; i < call_.num_inputs(); ++i) {
          numbers.push_back(prices_[i].OptionOf(m, row.inputs[i]));
        }
      }
    }
    least_own_us_.assign(mesh_.ndim() + 1, 0);
    for (int m = mesh_.ndim() - 1; m >= 0; --m) {
      double least = std::numeric_limits<double>::infinity();
      for (const ShardingRow& row : *rows_[m]) least = std::min(least, row.cost_us);
      least_own_us_[m] = least_own_us_[m + 1] + (rows_[m]->empty() ? 0 : least);
    }
  }

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
      auto rows = std::make_shared<std::vector<ShardingRow>>(
          map_ == nullptr ? given_ : derive(call_, *map_, m, like_));
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

  // An in-place op may not move what it writes: its row must have that where it is, in and out.
  void KeepSelf(int m, std::vector<ShardingRow>* rows) const {
    const auto moves = [&](const ShardingRow& row) {
      for (int o = 0; o < call_.op().num_outputs(); ++o) {
        const Placement& self = call_.in(o).placement(m);
        if (!Alike(row.inputs[o], self) || !Alike(row.outputs[o], self)) return true;
      }
      return false;
    };
    rows->erase(std::remove_if(rows->begin(), rows->end(), moves), rows->end());
  }
  // Of placements that are alike only the very same will do.
  bool SelfStays(const Choice& choice) const {
    const auto self = choice.options.begin();
    return std::all_of(self, self + call_.op().num_outputs(), Stays);
  }
  static bool Stays(int option) { return option == InputPrices::kStays; }
  static bool Alike(const Placement& a, const Placement& b) {
    const auto cuts = [](const Placement& p) { return p.cuts_dim(); };
    return a == b || (cuts(a) && cuts(b) && a.dim() == b.dim());
  }

  // Row number r of mesh dim m given what the dims before left; false if it is not legal there.
  bool Place(int m, size_t r, const std::vector<SizeSet>& sizes, Choice* out) {
    const ShardingRow& row = (*rows_[m])[r];
    out->row = &row;
    out->options = options_[m][r];
    if (map_ == nullptr) return true;
    if (row.resolve) {
      Placements inputs = row.inputs;
      out->outputs = row.outputs;
      if (!PlaceRow(*map_, row, sizes, mesh_.size(m), &inputs, &out->outputs)) return false;
      for (int i = 0; i < call_.num_inputs(); ++i) {
        out->options.push_back(prices_[i].OptionOf(m, inputs[i]));
      }
    }
    for (int i = 0; i < call_.num_inputs(); ++i) {
      int& option = out->options[i];
      if (Stays(option)) continue;
      const Placement &have = call_.in(i).placement(m), &want = prices_[i].option(m, option);
      if (want.kind() == have.kind() && want.dim() == have.dim() &&
          CutsAlike(i, want, have, sizes, mesh_.size(m))) {
        option = InputPrices::kStays;
      }
    }
    return !keep_self_ || !call_.op().in_place() || SelfStays(*out);
  }
  // Where the choice leads from that of the mesh dim before.
  void Extend(const Choice* before, Choice* choice) {
    choice->nodes.resize(call_.num_inputs());
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const int node = before == nullptr ? InputPrices::kRoot : before->nodes[i];
      choice->nodes[i] = prices_[i].Extend(node, choice->options[i]);
    }
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
    for (int f : map_->inputs[input][a.dim()]) {
      SizeSet next;
      for (int64_t d : dims) {
        for (int64_t s : sizes[f]) AddSize(d * s, &next);
      }
      dims = next;
    }
    return std::all_of(dims.begin(), dims.end(),
                       [&](int64_t d) { return SameCut(d, a.unit(), b.unit(), n); });
  }

  std::vector<SizeSet> After(const std::vector<SizeSet>& sizes, const ShardingRow& row,
                             int64_t n) const {
    return row.factor < 0 ? sizes : SizesAfter(*map_, row, sizes, n);
  }

  // Extends chosen_ by every legal row of mesh dims m and later that may still be the best.
  void Descend(int m, const std::vector<SizeSet>& sizes) {
    if (m == mesh_.ndim()) {
      Consider(chosen_);
      return;
    }
    for (size_t r = 0; r < rows_[m]->size(); ++r) {
      Choice choice;
      if (!Place(m, r, sizes, &choice)) continue;
      if (only_matching_ && !std::all_of(choice.options.begin(), choice.options.end(), Stays)) {
        continue;
      }
      Extend(m == 0 ? nullptr : &chosen_.back(), &choice);
      const ShardingRow& row = *choice.row;
      chosen_.push_back(std::move(choice));
      if (!exhaustive_ && !only_matching_ && !MayBeBest()) {
        chosen_.pop_back();
        if (beam_) return;
        continue;
      }
      Descend(m + 1, m + 1 == mesh_.ndim() ? sizes : After(sizes, row, mesh_.size(m)));
      chosen_.pop_back();
      if ((best_cost_.zero() || beam_) && !exhaustive_) return;
    }
  }

  Placements InputPlacements(int i, const Choices& chosen) const {
    Placements p;
    for (size_t m = 0; m < chosen.size(); ++m) {
      p.push_back(prices_[i].option(static_cast<int>(m), chosen[m].options[i]));
    }
    return p;
  }
  Placements OutputPlacements(int o, const Choices& chosen) const {
    Placements p;
    for (const Choice& c : chosen) p.push_back(OutputOf(o, c));
    return p;
  }
  static const Placement& OutputOf(int o, const Choice& c) {
    return (c.outputs.empty() ? c.row->outputs : c.outputs)[o];
  }

  // Of a later strategy only one that is cheaper is taken.
  bool MayBeBest() {
    if (--left_to_visit_ < 0) {
      beam_ = true;
      return false;
    }
    double bytes = 0;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      bytes += prices_[i].LeastBytes(chosen_.back().nodes[i]);
    }
    constexpr double kRounding = 1 - 0x1p-30;  // what is as cheap as the best must not be lost
    if (bytes * kRounding - 1 > std::min(best_cost_.bytes, limit_.bytes)) return false;
    const Cost least = LeastCost(chosen_);
    return least < best_cost_ && !(limit_ < least);
  }

  // What every strategy that starts so costs at least; of a whole one what it costs.
  Cost LeastCost(const Choices& chosen) {
    Cost cost;
    for (const Choice& c : chosen) cost += Cost::Of(0, c.row->cost_us);
    cost += Cost::Of(0, least_own_us_[chosen.size()]);
    for (int i = 0; i < call_.num_inputs(); ++i) {
      cost += prices_[i].Least(chosen.empty() ? InputPrices::kRoot : chosen.back().nodes[i]);
    }
    return cost;
  }

  // One spec cannot wait for two kinds of reduction.
  template <class PlacementOf>  // of a choice, and the mesh dim that it is for
  static bool Mixes(const Choices& chosen, const PlacementOf& of) {
    const Placement* first = nullptr;
    for (size_t m = 0; m < chosen.size(); ++m) {
      const Placement& p = of(chosen[m], static_cast<int>(m));
      if (!p.is_partial()) continue;
      if (first != nullptr && first->reduce_op() != p.reduce_op()) return true;
      first = &p;
    }
    return false;
  }
  bool MixesPartials(const Choices& chosen) const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (Mixes(chosen, [&](const Choice& c, int m) -> const Placement& {
            return prices_[i].option(m, c.options[i]);
          })) {
        return true;
      }
    }
    for (int o = 0; o < call_.op().num_outputs(); ++o) {
      if (Mixes(chosen, [o](const Choice& c, int) -> const Placement& { return OutputOf(o, c); })) {
        return true;
      }
    }
    return false;
  }

  // Flat pieces of several inputs are pieces of one local tensor: all else is placed alike, as it
  // is where one of them comes from.
  bool FlatFits(const Choices& chosen) const {
    bool kept = false;
    Placements first;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placements p = WithoutPending(InputPlacements(i, chosen));
      if (!HasFlat(p)) continue;
      if (first.empty()) first = p;
      if (p != first) return false;
      const absl::Span<const Placement> own = call_.in(i).placements();
      kept |= p == WithoutPending(own);
    }
    return kept || first.empty();
  }
  static bool HasFlat(absl::Span<const Placement> p) {
    return std::any_of(p.begin(), p.end(), [](const Placement& x) { return x.is_flat(); });
  }

  void Consider(const Choices& chosen) {
    ++candidates_;
    if (MixesPartials(chosen) || (flat_ && !FlatFits(chosen))) return;
    const Cost own = LeastCost(chosen);
    if (all_ != nullptr && all_->size() < most_) all_->push_back(StrategyOf(chosen, own));
    if (!(own < best_cost_)) return;
    Cost cost = own;
    if (like_ != nullptr) {
      // A layout that has to be cut down afterwards costs nothing to move, but was computed in
      // vain.
      const Placements out = OutputPlacements(0, chosen), target = LikeTarget(out);
      if (out != target) {
        cost += Cost::Of(1, 0);
        cost += CostOfMove(mesh_, like_->shape(), like_->dtype(), out, target);
      }
    }
    if (!(cost < best_cost_)) return;
    best_cost_ = cost;
    *best_ = StrategyOf(chosen, own);
  }

  Strategy StrategyOf(const Choices& chosen, const Cost& cost) const {
    Strategy s;
    s.cost_bytes = cost.bytes;
    s.cost_us = cost.us;
    for (int i = 0; i < call_.num_inputs(); ++i) s.inputs.push_back(InputPlacements(i, chosen));
    for (int o = 0; o < call_.op().num_outputs(); ++o) {
      s.outputs.push_back(OutputPlacements(o, chosen));
    }
    return s;
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

  // Keeps the cheapest `width` beginnings, mesh dim by mesh dim, if all that follows stays where it
  // is.
  void BeamSearch(const std::vector<SizeSet>& sizes, size_t width) {
    struct State {
      std::vector<SizeSet> sizes;
      Choices chosen;
    };
    struct Step {
      Cost cost;
      const State* from;
      Choice choice;
    };
    std::vector<State> beam = {{sizes, {}}};
    for (int m = 0; m < mesh_.ndim(); ++m) {
      std::vector<Step> steps;
      for (const State& state : beam) {
        for (size_t r = 0; r < rows_[m]->size(); ++r) {
          Step step = {{}, &state, {}};
          if (!Place(m, r, state.sizes, &step.choice)) continue;
          Extend(m == 0 ? nullptr : &state.chosen.back(), &step.choice);
          step.cost = CostIfTheRestStays(state.chosen, step.choice);
          steps.push_back(std::move(step));
        }
      }
      std::stable_sort(steps.begin(), steps.end(),
                       [](const Step& a, const Step& b) { return a.cost < b.cost; });
      if (steps.size() > width) steps.resize(width);
      std::vector<State> next;
      for (Step& step : steps) {
        State& state = next.emplace_back();
        state.sizes = After(step.from->sizes, *step.choice.row, mesh_.size(m));
        state.chosen = step.from->chosen;
        state.chosen.push_back(std::move(step.choice));
      }
      beam = std::move(next);
    }
    for (const State& state : beam) Consider(state.chosen);
  }
  Cost CostIfTheRestStays(const Choices& chosen, const Choice& last) {
    Cost cost = Cost::Of(0, last.row->cost_us);
    for (const Choice& c : chosen) cost += Cost::Of(0, c.row->cost_us);
    for (int i = 0; i < call_.num_inputs(); ++i) {
      int node = last.nodes[i];
      for (int m = static_cast<int>(chosen.size()) + 1; m < mesh_.ndim(); ++m) {
        node = prices_[i].Extend(node, InputPrices::kStays);
      }
      cost += prices_[i].Least(node);
    }
    return cost;
  }

  const OpCall& call_;
  const FactorMap* const map_;            // null: rows given by hand
  const std::vector<ShardingRow> given_;  // those
  const Spec* like_;
  const DeviceMesh& mesh_;
  MeshGroups groups_;
  std::vector<std::shared_ptr<const std::vector<ShardingRow>>> rows_;  // per mesh dim
  std::vector<InputPrices> prices_;                                    // per input
  std::vector<std::vector<PerInput>> options_;  // per mesh dim and row: what it asks of the inputs
  std::vector<double> least_own_us_;            // of the rows of this mesh dim and later ones
  Strategy* best_ = nullptr;
  Cost best_cost_, limit_;  // a strategy that costs more than the limit is known not to be best
  const bool exhaustive_;
  bool flat_ = false;  // some input is
  bool only_matching_ = false, beam_ = false, keep_self_ = true;
  int64_t candidates_ = 0, left_to_visit_ = 0;
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
  Cost best = Cost::Infinite();
  bool found = false;
  for (size_t i = 0; i < maps.size(); ++i) {
    Search search(call, maps[i], like, exhaustive);
    Strategy strategy;
    if (search.Run(&strategy, best) && (!found || search.cost() < best)) {
      strategy.factor_map = static_cast<int>(i);
      plan->strategy = std::move(strategy);
      best = search.cost();
      found = true;
    }
    plan->candidates += search.candidates();
    plan->beam |= search.beam();
    if (best.zero() && !exhaustive) break;
  }
  return found ? absl::OkStatus() : NoStrategy(call, maps);
}

absl::Status PlanByStrategies(const OpCall& call, const Spec* like, bool exhaustive, OpPlan* plan) {
  DT_ASSIGN_OR_RETURN(std::vector<ShardingRow> rows, internal::GivenRows(call, plan->out_shapes));
  Search search(call, std::move(rows), like, exhaustive);
  const bool found = search.Run(&plan->strategy);
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
    if (d < 0 || !p.cuts_dim() || p.dim() != d) continue;
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
    DT_RETURN_IF_ERROR(PlanOffsets(call, maps, &plan));
  } else if (op.strategies()) {
    DT_RETURN_IF_ERROR(PlanByStrategies(call, like, exhaustive, &plan));
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
  if (call.op().strategies()) {
    OpPlan plan;
    if (!InferOutputs(call, *maps, &plan).ok()) return all;
    absl::StatusOr<std::vector<ShardingRow>> rows = internal::GivenRows(call, plan.out_shapes);
    if (!rows.ok()) return all;
    Search search(call, *std::move(rows), nullptr, /*exhaustive=*/true);
    search.Collect(&all, most);
    search.Run(&best);
    return all;
  }
  for (const FactorMap& map : *maps) {
    Search search(call, map, nullptr, /*exhaustive=*/true);
    search.Collect(&all, most);
    search.Run(&best);
  }
  return all;
}

}  // namespace dtensor
