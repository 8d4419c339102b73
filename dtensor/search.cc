#include "dtensor/search.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "dtensor/mesh/launch.h"

namespace dtensor::internal {
namespace {

// Where the exact search would look at more prefixes, or price more targets of one input, a beam
// has to do.
constexpr int64_t kMaxVisited = 20000, kMaxTargets = 4096;
constexpr size_t kBeamWidth = 16;
constexpr int kFewInputs = 8;  // to look which are alike would not pay
constexpr int kUnknown = -1;   // an option

// Both cut the same tensor dim, or they are the same.
bool Alike(const Placement& a, const Placement& b) {
  return a.cuts_dim() ? b.cuts_dim() && a.dim() == b.dim() : a == b;
}

// Whether both are blocks of the same dim and unit, or replicas: seen at once.
bool AreSameBlocks(const Placement& a, const Placement& b) {
  return a.kind() == b.kind() && (a.is_replicate() || a.is_shard()) && a.dim() == b.dim() &&
         a.unit() == b.unit();
}

bool HasFlat(absl::Span<const Placement> p) {
  return std::any_of(p.begin(), p.end(), [](const Placement& x) { return x.is_flat(); });
}

}  // namespace

Search::Search(const OpCall& call, absl::Span<const FactorMap> maps, const Spec* like,
               MeshGroups* groups)
    : call_(call),
      maps_(maps),
      like_(like),
      builder_(std::in_place, call, maps, like),
      mesh_(call.mesh()),
      groups_(groups) {
  for (int i = 0; i < call.num_inputs(); ++i) flat_ |= HasFlat(call.in(i).placements());
}

Search::Search(const OpCall& call, RowList rows, const std::vector<Shape>& out_shapes,
               const Spec* like, MeshGroups* groups)
    : call_(call),
      given_(std::make_shared<const RowList>(std::move(rows))),
      given_outs_(out_shapes),
      like_(like),
      mesh_(call.mesh()),
      groups_(groups) {}

bool Search::Run(Strategy* best, const Cost& below) {
  Begin(below);
  if (!maps_.empty() && like_ == nullptr) {
    const int maps = static_cast<int>(maps_.size());
    for (int map = 0; map < maps; ++map) {
      if (DeriveMatching(map)) DescendMatching();
      if (found_) return map == 0 && Take(best);  // without any cost
    }
    if (!Derive()) return false;
  } else {
    Derive();
    DescendMatching();
    if (found_ && best_cost_.zero()) return Take(best);
  }
  PreparePrices();
  for (const InputPrices& prices : prices_) beam_ |= prices.targets() > kMaxTargets;
  left_to_visit_ = kMaxVisited;
  if (!beam_) Descend();
  if (beam_ && maps_.size() > 1) return false;
  if (beam_) BeamSearch();
  return Take(best);
}

bool Search::RunExhaustively(Strategy* best, const Cost& below) {
  Begin(below);
  exhaustive_ = true;
  Derive();
  PreparePrices();
  Descend();
  return Take(best);
}

void Search::Begin(const Cost& below) {
  best_cost_ = below;
  chosen_.reserve(mesh_.ndim());
}

bool Search::Take(Strategy* best) const {
  if (!found_) return false;
  *best = StrategyOf(best_, best_own_);
  if (!maps_.empty()) best->factor_map = FirstMap(best_, nullptr);
  return true;
}

// Sizes of the factors of the row's map that the choices so far leave.
const std::vector<SizeSet>& Search::SizesLeft(const ShardingRow& row) {
  const int of_map = First(row.map);
  left_.resize(maps_.size());
  Left& left = left_[of_map];
  if (left.after == version_) return left.sizes;
  left.after = version_;
  const FactorMap& map = maps_[of_map];
  left.sizes.resize(map.sizes.size());
  for (size_t f = 0; f < map.sizes.size(); ++f) left.sizes[f].assign(1, map.sizes[f]);
  for (size_t m = 0; m < chosen_.size(); ++m) {
    const ShardingRow& chosen = *chosen_[m].row;
    if (First(chosen.map) != of_map) continue;
    CutSizesBy(map, chosen, mesh_.size(static_cast<int>(m)), &left.sizes);
  }
  return left.sizes;
}

void Search::Push(Choice choice) {
  chosen_.push_back(std::move(choice));
  ++version_;
}
void Search::Pop() {
  chosen_.pop_back();
  ++version_;
}

// --- rows ---------------------------------------------------------------------------------------

bool Search::Derive() {
  if (builder_ && !builder_->OrderFactors()) return false;
  rows_.clear();
  rows_.reserve(mesh_.ndim());
  for (int m = 0; m < mesh_.ndim(); ++m) {
    const int twin = TwinOf(m);
    rows_.push_back(twin < m ? rows_[twin] : KeepingSelf(m, given_ ? given_ : builder_->Build(m)));
  }
  return true;
}

bool Search::DeriveMatching(int map) {
  for (int m = 0; m < mesh_.ndim(); ++m) {
    if (!builder_->MayMatch(m, map)) return false;
  }
  rows_.clear();
  rows_.reserve(mesh_.ndim());
  for (int m = 0; m < mesh_.ndim(); ++m) {
    const int twin = TwinOf(m);
    if (twin < m) {
      rows_.push_back(rows_[twin]);
      continue;
    }
    auto rows = std::make_shared<const RowList>(builder_->BuildMatching(m, map));
    rows_.push_back(KeepingSelf(m, std::move(rows)));
    if (std::none_of(rows_[m]->begin(), rows_[m]->end(),
                     [this, m](const ShardingRow& row) { return MayMatch(m, row); })) {
      return false;
    }
  }
  return true;
}

// The first mesh dim that is placed like m.
int Search::TwinOf(int m) const {
  int twin = 0;
  while (twin < m && !PlacedAlike(twin, m)) ++twin;
  return twin;
}

// Without the rows that an in-place op may not take.
std::shared_ptr<const RowList> Search::KeepingSelf(int m,
                                                   std::shared_ptr<const RowList> rows) const {
  if (!keep_self_ || !call_.op().in_place()) return rows;
  auto kept = std::make_shared<RowList>();
  std::copy_if(rows->begin(), rows->end(), std::back_inserter(*kept),
               [this, m](const ShardingRow& row) { return KeepsSelf(m, row); });
  return kept;
}

bool Search::PlacedAlike(int a, int b) const {
  if (mesh_.size(a) != mesh_.size(b)) return false;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (!(call_.in(i).placement(a) == call_.in(i).placement(b))) return false;
  }
  return like_ == nullptr || like_->placement(a) == like_->placement(b);
}

// Where it is placed only cuts may turn out otherwise than the row says, and cut the same dim then.
bool Search::MayMatch(int m, const ShardingRow& row) const {
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (!Alike(row.inputs[i], call_.in(i).placement(m))) return false;
  }
  return true;
}

// An in-place op may not move what it writes: its row must have that where it is, in and out.
bool Search::KeepsSelf(int m, const ShardingRow& row) const {
  for (int o = 0; o < call_.op().num_outputs(); ++o) {
    const Placement& self = call_.in(o).placement(m);
    if (!Alike(row.inputs[o], self) || !Alike(row.outputs[o], self)) return false;
  }
  return true;
}

// Of many inputs those that are placed alike by the call and by all rows are priced once.
int Search::PricedAs(int input) const {
  if (call_.num_inputs() <= kFewInputs) return input;
  for (int i = 0; i < input; ++i) {
    const auto same = [=, this](const ShardingRow& row) {
      return row.inputs[i] == row.inputs[input] &&
             (!row.resolve || MapOf(row)->inputs[i] == MapOf(row)->inputs[input]);
    };
    if (&call_.in(i) == &call_.in(input) &&
        std::all_of(rows_.begin(), rows_.end(), [&](const std::shared_ptr<const RowList>& rows) {
          return std::all_of(rows->begin(), rows->end(), same);
        })) {
      return i;
    }
  }
  return input;
}

// Inputs with one spec share what is known of its moves, whatever rows ask of each.
void Search::AddPriced(int input) {
  int before = static_cast<int>(priced_.size()) - 1;
  while (before >= 0 && &call_.in(priced_[before].input) != &call_.in(input)) --before;
  if (before < 0) prices_.emplace_back(call_.in(input), groups_);
  const int prices = before < 0 ? static_cast<int>(prices_.size()) - 1 : priced_[before].prices;
  priced_.push_back({prices, input, before});
}

void Search::PreparePrices() {
  priced_.reserve(call_.num_inputs());
  prices_.reserve(call_.num_inputs());
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const int like = PricedAs(i);
    if (like == i) {
      priced_as_.push_back(static_cast<int>(priced_.size()));
      AddPriced(i);
    } else {
      priced_as_.push_back(priced_as_[like]);
      ++priced_[priced_as_[like]].times;
    }
  }
  open_.resize(mesh_.ndim());
  rows_ask_.resize(mesh_.ndim());
  least_own_.assign(mesh_.ndim() + 1, Cost());
  for (int m = mesh_.ndim() - 1; m >= 0; --m) {
    const RowList& rows = *rows_[m];
    double least = std::numeric_limits<double>::infinity();
    for (const ShardingRow& row : rows) least = std::min(least, row.cost_us);
    rows_ask_[m].options.resize(rows.size() * priced_.size());
    rows_ask_[m].unsure.resize(rows.size());
    AskAll(m);
    least_own_[m] = least_own_[m + 1];
    if (!rows.empty()) least_own_[m] += Cost::Of(0, least);
  }
  for (InputPrices& prices : prices_) prices.Seal();
}

// What the rows of mesh dim m ask for.
void Search::AskAll(int m) {
  const int count = static_cast<int>(priced_.size());
  PerPriced whole(prices_.size(), kUnknown);  // by prices: the option of a replica
  int* options = rows_ask_[m].options.data();
  uint64_t* unsure = rows_ask_[m].unsure.data();
  for (const ShardingRow& row : *rows_[m]) {
    const Placement* const inputs = row.inputs.data();
    for (int k = 0; k < count; ++k) {
      const Priced& priced = priced_[k];
      const Placement& p = inputs[priced.input];
      int& of_whole = whole[priced.prices];
      const int before = priced.before;
      if (p.is_replicate() && of_whole != kUnknown) {
        options[k] = of_whole;
      } else if (before >= 0 && !row.resolve && AreSameBlocks(p, inputs[priced_[before].input])) {
        options[k] = options[before];
        if ((*unsure & BitOf(before)) != 0) *unsure |= BitOf(k);
      } else {
        const bool resolves = row.resolve && MapOf(row)->CutDim(priced.input, row.factor) >= 0;
        bool may_stay = false;
        options[k] = prices_[priced.prices].Ask(m, p, resolves, &may_stay);
        if (may_stay) *unsure |= BitOf(k);
        if (p.is_replicate()) of_whole = options[k];
      }
    }
    options += count;
    ++unsure;
  }
}

// --- one row, given what the mesh dims before left -----------------------------------------------

bool Search::IsAsWhole(const ShardingRow& row) const {
  return !row.resolve ||
         (row.placed && (chosen_.empty() || (chosen_.back().cut & row.depends) == 0));
}

// The placements of a row that is not as it is where nothing is cut; false if it is not legal.
bool Search::Resolve(int m, Choice* out) {
  const ShardingRow& row = *out->row;
  out->placed = std::make_shared<PlacedRow>(PlacedRow{row.inputs, row.outputs});
  return PlaceRow(MapOf(row), row, SizesLeft(row), mesh_.size(m), &out->placed->inputs,
                  &out->placed->outputs);
}

// Row r of mesh dim m; false if no map has it and the choices before.
bool Search::Choose(int m, int r, Choice* out) const {
  const Choice* const before = LastChosen();
  out->row = &(*rows_[m])[r];
  out->index = r;
  out->map = out->row->map;
  if (before == nullptr || before->map == kEveryMap) return true;
  if (out->map == kEveryMap) out->map = before->map;
  return out->map == before->map;
}

// What the row adds to the choices before.
void Search::Append(Choice* out) const {
  const ShardingRow& row = *out->row;
  out->cut = row.cuts;
  out->own = row.cost_us > 0 ? Cost::Of(0, row.cost_us) : Cost();
  if (chosen_.empty()) return;
  out->cut |= chosen_.back().cut;
  out->own += chosen_.back().own;
}

// False if some input does not match.
bool Search::PlaceMatching(int m, int r, Choice* out) {
  const ShardingRow& row = (*rows_[m])[r];
  if (!MayMatch(m, row) || !Choose(m, r, out)) return false;
  Append(out);
  if (!IsAsWhole(row) && !Resolve(m, out)) return false;
  const RowPlacements& inputs = out->placed ? out->placed->inputs : row.inputs;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (!Stays(i, m, inputs[i], row)) return false;
  }
  return true;
}

// Finds what a row that was chosen for mesh dim m is there; false if it is not legal.
bool Search::Place(int m, Choice* out) {
  const ShardingRow& row = *out->row;
  if (!IsAsWhole(row) && !Resolve(m, out)) return false;
  const RowPlacements& inputs = out->placed ? out->placed->inputs : row.inputs;
  const int* const option = OptionsOf(m, out->index);
  out->asked.assign(option, option + priced_.size());
  const uint64_t unsure = rows_ask_[m].unsure[out->index];
  for (size_t k = 0; unsure != 0 && k < priced_.size(); ++k) {
    if ((unsure & BitOf(static_cast<int>(k))) == 0) continue;
    const int i = priced_[k].input;
    int& asks = out->asked[k] = PricesAt(k).OptionOf(m, inputs[i]);
    if (asks != InputPrices::kStays && Stays(i, m, inputs[i], row)) asks = InputPrices::kStays;
  }
  if (!keep_self_ || !call_.op().in_place()) return true;
  // Of placements that are alike only the very same will do.
  for (int o = 0; o < call_.op().num_outputs(); ++o) {
    if (out->asked[priced_as_[o]] != InputPrices::kStays) return false;
  }
  return true;
}

// Looks up what inputs cost at least with every option on mesh dim m after the choices so far.
void Search::LookAhead(int m) {
  const int* const nodes = NodesBefore();
  const auto node = [nodes](size_t k) { return nodes == nullptr ? InputPrices::kRoot : nodes[k]; };
  for (size_t k = 0; k < priced_.size(); ++k) PricesAt(k).LookAhead(m, node(k));
  for (size_t k = 0; k < priced_.size(); ++k) {
    priced_[k].least_here = PricesAt(k).LeastBytes(node(k));
  }
}

// Bytes of a strategy that begins with the choices so far and row r, at least, by what is seen
// before the row is placed.
double Search::Ahead(int m, int r) const {
  if (exhaustive_) return 0;
  double bytes = 0;
  const int* const option = OptionsOf(m, r);
  const uint64_t unsure = rows_ask_[m].unsure[r];
  const bool any_unsure = unsure != 0;
  for (int k = 0; k < static_cast<int>(priced_.size()); ++k) {
    const double* const here = priced_[k].least_here;
    double least = here[option[k]];
    if (any_unsure && (unsure & BitOf(k)) != 0) least = std::min(least, here[InputPrices::kStays]);
    bytes += priced_[k].times * least;
  }
  return bytes;
}

// Whether such a strategy may be the best.
bool Search::Bound(int m, double bytes, Choice* out) {
  Append(out);
  out->least = out->own;
  out->least += least_own_[m + 1];
  out->least.bytes += bytes;
  return exhaustive_ || MayBeBest(*out);
}

// The same once it is placed, exactly.
void Search::Price(int m, Choice* out) {
  const bool whole = m + 1 == mesh_.ndim();
  out->priced = true;
  out->least = out->own;
  out->least += least_own_[m + 1];
  const size_t count = priced_.size();
  out->nodes.resize(count);
  int* const nodes = out->nodes.data();
  const int *const before = NodesBefore(), *const asked = out->asked.data();
  for (size_t k = 0; k < count; ++k) {
    InputPrices& prices = PricesAt(k);
    nodes[k] = prices.Extend(m, before == nullptr ? InputPrices::kRoot : before[k], asked[k]);
    if (exhaustive_ && !whole) continue;
    out->least += prices.Least(m + 1, nodes[k]).Times(priced_[k].times);
    if (!exhaustive_ && best_cost_.bytes < out->least.bytes) return;  // so it is not the best
  }
}

// Of the same kind and tensor dim as what is there: it may cut at the same places.
bool Search::MayStay(int input, int m, const Placement& want) const {
  const Placement& have = call_.in(input).placement(m);
  return want.kind() == have.kind() && want.dim() == have.dim();
}

bool Search::Stays(int input, int m, const Placement& want, const ShardingRow& row) {
  if (!MayStay(input, m, want)) return false;
  const Placement& have = call_.in(input).placement(m);
  if (want == have) return true;
  return !maps_.empty() && want.cuts_dim() &&
         CutsAlike(MapOf(row)->inputs[input][want.dim()], want, have, SizesLeft(row),
                   mesh_.size(m));
}

// Whether two placements cut a dim of these factors at the same places.
bool Search::CutsAlike(const FactorDim& dim, const Placement& a, const Placement& b,
                       const std::vector<SizeSet>& sizes, int64_t n) const {
  if (a.is_segmented()) {
    const Segments one = a.segments(), other = b.segments();
    return std::equal(one.begin(), one.end(), other.begin(), other.end(),
                      [n](const Segment& s, const Segment& t) {
                        return s.size == t.size && SameCut(s.size, s.unit, t.unit, n);
                      });
  }
  SizeSet all = {1};
  for (const int f : dim) {
    SizeSet next;
    for (const int64_t d : all) {
      for (const int64_t s : sizes[f]) AddSize(d * s, &next);
    }
    all = next;
  }
  return std::all_of(all.begin(), all.end(),
                     [&](int64_t d) { return SameCut(d, a.unit(), b.unit(), n); });
}

// --- all rows -----------------------------------------------------------------------------------

// Extends chosen_ by every row of the later mesh dims that the inputs match as they are.
void Search::DescendMatching() {
  const int m = static_cast<int>(chosen_.size());
  if (m == mesh_.ndim()) {
    Consider(chosen_);
    return;
  }
  for (int r = 0; r < static_cast<int>(rows_[m]->size()); ++r) {
    Choice choice;
    if (!PlaceMatching(m, r, &choice)) continue;
    Push(std::move(choice));
    DescendMatching();
    Pop();
    if (found_ && best_cost_.zero()) return;
  }
}

// Extends chosen_ by every legal row of the later mesh dims that may still be the best: the most
// promising first, as what it leads to ends most of the others.
void Search::Descend() {
  const int m = static_cast<int>(chosen_.size());
  if (m == mesh_.ndim()) {
    Consider(chosen_);
    return;
  }
  Choices& open = open_[m];
  open.clear();
  open.reserve(rows_[m]->size());
  if (!exhaustive_) LookAhead(m);
  for (int r = 0; r < static_cast<int>(rows_[m]->size()); ++r) {
    if (--left_to_visit_ < 0 && !exhaustive_) beam_ = true;
    if (beam_) return;
    const double bytes = Ahead(m, r);
    if (best_cost_.bytes < bytes) continue;
    Choice& next = open.emplace_back();
    if (!Choose(m, r, &next) || !Bound(m, bytes, &next)) open.pop_back();
  }
  while (!beam_) {
    Choice* cheapest = nullptr;
    for (Choice& c : open) {
      if (c.row == nullptr || (cheapest != nullptr && cheapest->least < c.least)) continue;
      if (cheapest == nullptr || IsMorePromising(c, *cheapest)) cheapest = &c;
    }
    if (cheapest == nullptr) return;
    if (!exhaustive_ && !MayBeBest(*cheapest)) return;  // nor any other
    if (!cheapest->priced) {
      if (Place(m, cheapest)) {
        Price(m, cheapest);
      } else {
        cheapest->row = nullptr;
      }
      continue;
    }
    Push(std::move(*cheapest));
    cheapest->row = nullptr;
    Descend();
    Pop();
  }
}

// Of choices for the same mesh dim of which b is the earlier row.
bool Search::IsMorePromising(const Choice& a, const Choice& b) {
  return a.least < b.least || (!(b.least < a.least) && First(a.map) < First(b.map));
}

// Of what costs the same the earlier is taken.
bool Search::MayBeBest(const Choice& last) const {
  return last.least < best_cost_ || (!(best_cost_ < last.least) && ComesFirst(chosen_, &last));
}

// Whether choices, and one more if it is given, come before those of the best or begin as they do.
bool Search::ComesFirst(const Choices& chosen, const Choice* last) const {
  if (!found_) return false;
  const int map = FirstMap(chosen, last), best_map = FirstMap(best_, nullptr);
  if (map != best_map) return map < best_map;
  for (size_t m = 0; m < chosen.size(); ++m) {
    if (chosen[m].index != best_[m].index) return chosen[m].index < best_[m].index;
  }
  return last == nullptr || last->index <= best_[chosen.size()].index;
}

// The first map that has all of these rows.
int Search::FirstMap(const Choices& chosen, const Choice* last) {
  if (last == nullptr && !chosen.empty()) last = &chosen.back();
  return last == nullptr ? 0 : First(last->map);
}

// Keeps the cheapest beginnings, mesh dim by mesh dim, if all that follows stays where it is.
void Search::BeamSearch() {
  struct Step {
    const Choices* before;
    Choice choice;
  };
  std::vector<Choices> beam = {{}};
  for (int m = 0; m < mesh_.ndim(); ++m) {
    std::vector<Step> steps;
    for (const Choices& before : beam) {
      chosen_ = before;
      ++version_;
      for (int r = 0; r < static_cast<int>(rows_[m]->size()); ++r) {
        Step step = {&before, {}};
        Choice& choice = step.choice;
        if (!Choose(m, r, &choice) || !Place(m, &choice)) continue;
        Append(&choice);
        for (size_t k = 0; k < priced_.size(); ++k) {
          choice.nodes.push_back(PricesAt(k).Extend(m, NodeBefore(k), choice.asked[k]));
        }
        choice.least = CostIfTheRestStays(m, choice);
        steps.push_back(std::move(step));
      }
    }
    std::stable_sort(steps.begin(), steps.end(),
                     [](const Step& a, const Step& b) { return a.choice.least < b.choice.least; });
    if (steps.size() > kBeamWidth) steps.resize(kBeamWidth);
    std::vector<Choices> next;
    for (Step& step : steps) {
      next.emplace_back(*step.before).push_back(std::move(step.choice));
    }
    beam = std::move(next);
  }
  for (const Choices& chosen : beam) Consider(chosen);
}

Cost Search::CostIfTheRestStays(int m, const Choice& last) {
  Cost cost = last.own;
  for (size_t k = 0; k < priced_.size(); ++k) {
    InputPrices& prices = PricesAt(k);
    int node = last.nodes[k];
    for (int d = m + 1; d < mesh_.ndim(); ++d) node = prices.Extend(d, node, InputPrices::kStays);
    cost += prices.Least(mesh_.ndim(), node).Times(priced_[k].times);
  }
  return cost;
}

// --- whole strategies ---------------------------------------------------------------------------

const Placement& Search::InputOf(int i, const Choices& chosen, int m) const {
  const Choice& c = chosen[m];
  const int k = c.nodes.empty() ? 0 : priced_as_[i];
  if (c.nodes.empty() || PricesAt(k).Stays(c.nodes[k])) return call_.in(i).placement(m);
  return (c.placed ? c.placed->inputs : c.row->inputs)[i];
}

const Placement& Search::OutputOf(int o, const Choices& chosen, int m) {
  const Choice& c = chosen[m];
  return (c.placed ? c.placed->outputs : c.row->outputs)[o];
}

Placements Search::InputPlacements(int i, const Choices& chosen) const {
  Placements p;
  for (int m = 0; m < static_cast<int>(chosen.size()); ++m) p.push_back(InputOf(i, chosen, m));
  return p;
}

Placements Search::OutputPlacements(int o, const Choices& chosen) {
  Placements p;
  for (int m = 0; m < static_cast<int>(chosen.size()); ++m) p.push_back(OutputOf(o, chosen, m));
  return p;
}

// One spec cannot wait for two kinds of reduction. `of`: the placement on mesh dim m.
template <class PlacementOf>
bool Search::Mixes(const PlacementOf& of) const {
  const Placement* first = nullptr;
  for (int m = 0; m < mesh_.ndim(); ++m) {
    const Placement& p = of(m);
    if (!p.is_partial()) continue;
    if (first != nullptr && first->reduce_op() != p.reduce_op()) return true;
    first = &p;
  }
  return false;
}

bool Search::MixesPartials(const Choices& chosen) const {
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (Mixes([&](int m) -> const Placement& { return InputOf(i, chosen, m); })) return true;
  }
  for (int o = 0; o < call_.op().num_outputs(); ++o) {
    if (Mixes([&](int m) -> const Placement& { return OutputOf(o, chosen, m); })) return true;
  }
  return false;
}

// Flat pieces of several inputs are pieces of one local tensor: all else is placed alike, as it
// is where one of them comes from.
bool Search::FlatFits(const Choices& chosen) const {
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

// Of rows given by hand: whether there is what is cut in segments and flat pieces of one size after
// what the other mesh dims cut. Derived rows are made for what there is.
bool Search::SizesFit(const Choices& chosen) const {
  SpecInterner& specs = RankContext::Current().specs();
  const auto fits = [&](const Placements& p, const Shape& shape, DType dtype) {
    return std::none_of(p.begin(), p.end(), [](const Placement& x) { return x.is_sized(); }) ||
           specs.Intern(mesh_, p, shape, dtype).ok();
  };
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (!fits(InputPlacements(i, chosen), call_.shape(i), call_.dtype(i))) return false;
  }
  for (size_t o = 0; o < given_outs_.size(); ++o) {
    const Placements p = OutputPlacements(static_cast<int>(o), chosen);
    if (!fits(p, given_outs_[o], DType::kF32)) return false;
  }
  return true;
}

void Search::Consider(const Choices& chosen) {
  ++candidates_;
  if (MixesPartials(chosen) || (flat_ && !FlatFits(chosen))) return;
  if (given_ != nullptr && !SizesFit(chosen)) return;
  // Where all inputs stay, only the rows cost something.
  const bool matching = chosen.empty() || chosen.back().nodes.empty();
  const Cost own = chosen.empty() ? Cost() : matching ? chosen.back().own : chosen.back().least;
  if (all_ != nullptr && all_->size() < most_) all_->push_back(StrategyOf(chosen, own));
  if (best_cost_ < own) return;
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
  if (best_cost_ < cost || (!(cost < best_cost_) && !ComesFirst(chosen, nullptr))) return;
  found_ = true;
  best_cost_ = cost;
  best_own_ = own;
  best_ = chosen;
}

Strategy Search::StrategyOf(const Choices& chosen, const Cost& cost) const {
  Strategy s;
  s.cost_bytes = cost.bytes;
  s.cost_us = cost.us;
  s.inputs.reserve(call_.num_inputs());
  s.outputs.reserve(call_.op().num_outputs());
  for (int i = 0; i < call_.num_inputs(); ++i) s.inputs.push_back(InputPlacements(i, chosen));
  for (int o = 0; o < call_.op().num_outputs(); ++o) {
    s.outputs.push_back(OutputPlacements(o, chosen));
  }
  return s;
}

// What `out` would have to become. A sum that comes where a copy was asked for may stay pending:
// it is for autograd to reduce, once, together with others.
Placements Search::LikeTarget(const Placements& out) const {
  Placements p(like_->placements().begin(), like_->placements().end());
  for (size_t m = 0; m < p.size(); ++m) {
    if (p[m].is_partial()) p[m] = Replicate();
    if (p[m].is_replicate() && out[m].is_partial()) p[m] = out[m];
  }
  return p;
}

}  // namespace dtensor::internal
