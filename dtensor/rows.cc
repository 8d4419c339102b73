// Legal strategies for one mesh dim, from factors and forms: docs/reference/rules.md.
#include "dtensor/rows.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/container/node_hash_map.h"
#include "dtensor/mesh/launch.h"

namespace dtensor {
namespace {

constexpr int kMaxEnumeratedInputs = 6;

// Where there are many inputs only the sets of none and of all linear ones occur, so the late ones
// may share a bit.
bool Has(uint64_t set, int i) { return (set & BitOf(i)) != 0; }

}  // namespace

namespace internal {

// Of registered ops, by the address of their text.
struct RowBuilder::FormCache {
  absl::node_hash_map<const std::string*, Form> known;
};

RowBuilder::Product::Product(const LinearProduct& product) {
  for (const int i : product.linear) {
    twice |= linear & BitOf(i);
    linear |= BitOf(i);
    if (BitOf(i) == BitOf(kLateBit)) late = i;
  }
  for (const int i : product.params) params |= BitOf(i);
}

namespace {

// Whether rows that shard factor f are the same by another map, whatever else is cut: all that
// holds it is a dim of its own.
bool HaveAlike(const FactorMap& map, int f, const FactorMap& other) {
  const int twin = other->IndexOf(map->names[f]);
  if (twin < 0 || map.sizes[f] != other.sizes[twin] || other->whole[twin]) return false;
  const auto joined = [](const FactorMap& m, int k) {
    return m->part_of[k] >= 0 || !m->parts[k].empty();
  };
  if (joined(map, f) || joined(other, twin)) return false;
  size_t operand = 0;
  for (const auto operands : {&FactorNest::inputs, &FactorNest::outputs}) {
    for (size_t k = 0; k < (*map.nest.*operands).size(); ++k, ++operand) {
      const int d = map->CutDim(operand, f);
      if (d != other->CutDim(operand, twin)) return false;
      if (d < 0) continue;
      const FactorDim &dim = (*map.nest.*operands)[k][d],
                      &other_dim = (*other.nest.*operands)[k][d];
      if (dim.size() != 1 || dim[0] != f || other_dim.size() != 1 || other_dim[0] != twin) {
        return false;
      }
    }
  }
  return true;
}

}  // namespace

RowBuilder::RowBuilder(const OpCall& call, absl::Span<const FactorMap> maps, const Spec* like)
    : call_(call),
      maps_(maps),
      like_(like),
      map_(maps.data()),
      whole_(maps.size()),
      affecting_(maps[0]->outputs.size()),
      may_pad_(call.num_inputs()) {
  FindForms();
  for (int i = 0; i < call.num_inputs(); ++i) {
    if (IsFloating(call.dtype(i))) floating_ |= BitOf(i);
  }
}

bool RowBuilder::OrderFactors() {
  const FactorMap& first = maps_[0];
  for (int f = 0; f < static_cast<int>(first->names.size()); ++f) {
    if (first->whole[f]) continue;
    const bool shared = std::all_of(maps_.begin() + 1, maps_.end(), [&](const FactorMap& other) {
      return HaveAlike(first, f, other);
    });
    factors_.push_back({shared ? kEveryMap : 0, f});
  }
  if (maps_.size() == 1) return true;
  for (int k = 1; k < static_cast<int>(maps_.size()); ++k) {
    auto at = factors_.begin();  // after the factor of map k that came last
    for (int f = 0; f < static_cast<int>(maps_[k]->names.size()); ++f) {
      if (maps_[k]->whole[f]) continue;
      const int number = first->IndexOf(maps_[k]->names[f]);
      const auto shared = std::find_if(factors_.begin(), factors_.end(), [=](const MapFactor& of) {
        return of.map == kEveryMap && of.factor == number;
      });
      if (shared < at) return false;
      at = (shared == factors_.end() ? factors_.insert(at, {k, f}) : shared) + 1;
    }
  }
  return !call_.op().elementwise() && call_.op().monotone_forms().empty();
}

void RowBuilder::FindForms() {
  const OpDef& op = call_.op();
  forms_.resize(op.num_outputs());
  for (const OpDef::LinearForm& form : op.linear_forms()) {
    if (form.when && !form.when(call_)) continue;
    size_t o = 0;
    if (!form.output.empty()) {
      while (op.output_names()[o] != form.output) ++o;
    }
    forms_[o] = FormOf(form.form);
  }
  for (size_t o = 0; o < affecting_.size(); ++o) {
    if (forms_[o] == nullptr) {
      affecting_[o] = ~uint64_t{0};
      continue;
    }
    for (const Product& p : *forms_[o]) {
      linear_ |= p.linear;
      affecting_[o] |= p.linear | p.params;
    }
  }
}

const RowBuilder::Form* RowBuilder::FormOf(const std::string& text) {
  const OpDef& op = call_.op();
  if (op.variadic()) {  // its form is the sum of all inputs
    Form& form = *own_.emplace_back(std::make_unique<Form>());
    for (int i = 0; i < call_.num_inputs(); ++i) form.emplace_back(LinearProduct{{i}, {}});
    return &form;
  }
  const auto parse = [&] {
    const LinearSum sum = *ParseLinear(text, op.input_names());
    return Form(sum.begin(), sum.end());
  };
  if (op.id() < 0) return own_.emplace_back(std::make_unique<Form>(parse())).get();
  auto& known = RankContext::Current().Slot<FormCache>().known;
  const auto [at, fresh] = known.try_emplace(&text);
  if (fresh) at->second = parse();
  return &at->second;
}

void RowBuilder::Begin(int mesh_dim) {
  mesh_dim_ = mesh_dim;
  rows_.clear();
}

std::shared_ptr<const RowList> RowBuilder::Build(int mesh_dim) {
  Begin(mesh_dim);
  CutList cuts;  // of the factors that may be sharded
  cuts.reserve(8);
  for (const MapFactor& of : factors_) {
    Use(of.map);
    if (!Shardable(of.factor)) continue;
    const size_t first = cuts.size();
    AddCuts(of.factor, &cuts);
    for (size_t k = first; k < cuts.size(); ++k) cuts[k].map = of.map;
  }
  std::vector<uint64_t> sets = PartialSets();
  const bool plain = IsPlain();
  const Built* like = nullptr;
  for (const Built& other : built_) {
    if (!HasCuts(other, cuts)) continue;
    if (plain && other.sets == sets) return other.rows;
    like = &other;
  }
  rows_.reserve(16);
  if (like != nullptr) {
    rows_.assign(like->rows->begin(), like->rows->begin() + like->settled);
  } else {
    AddSettledRows(cuts);
  }
  const auto settled = static_cast<int64_t>(rows_.size());
  AddPendingRows(cuts, sets);
  auto rows = std::make_shared<const RowList>(std::move(rows_));
  if (plain) {
    built_.push_back(
        {std::move(cuts), std::move(sets), call_.mesh().size(mesh_dim), rows, settled});
  }
  return rows;
}

bool RowBuilder::IsPlain() const {
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    if (p.is_flat() || (p.is_partial() && p.reduce_op() != ReduceOp::kSum)) return false;
  }
  return true;
}

bool RowBuilder::HasCuts(const Built& other, const CutList& cuts) const {
  const auto same = [](const FactorCut& a, const FactorCut& b) {
    return a.map == b.map && a.factor == b.factor && a.cut == b.cut && a.part_cuts == b.part_cuts &&
           a.repeats == b.repeats;
  };
  return other.ranks == call_.mesh().size(mesh_dim_) &&
         std::equal(cuts.begin(), cuts.end(), other.cuts.begin(), other.cuts.end(), same);
}

void RowBuilder::AddSettledRows(const CutList& cuts) {
  Try({}, 0);
  for (const FactorCut& cut : cuts) Try(cut, 0);
}

void RowBuilder::AddPendingRows(const CutList& cuts, const std::vector<uint64_t>& sets) {
  for (const uint64_t set : sets) Try({}, set);
  for (auto first = cuts.begin(); first != cuts.end();) {
    const auto last = std::find_if(first, cuts.end(), [&](const FactorCut& cut) {
      return cut.map != first->map || cut.factor != first->factor;
    });
    for (const uint64_t set : sets) {
      for (auto cut = first; cut != last; ++cut) Try(*cut, set);
    }
    first = last;
  }
  FlatRows();
  MonotoneRows();
}

namespace {

// The factor that is sharded where this one is: the whole that it is a part of.
int ShardedWith(const FactorMap& map, int f) { return map->part_of[f] < 0 ? f : map->part_of[f]; }

}  // namespace

bool RowBuilder::MayMatch(int mesh_dim, int of_map) {
  Begin(mesh_dim);
  Use(of_map);
  if (!call_.op().monotone_forms().empty()) return true;
  const FactorDim* sharded = nullptr;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim);
    if (p.is_flat()) return true;
    if (p.cuts_dim() && sharded == nullptr) sharded = &map()->inputs[i][p.dim()];
  }
  return sharded == nullptr || std::any_of(sharded->begin(), sharded->end(), [this](int f) {
           return AreCutBy(ShardedWith(map(), f));
         });
}

bool RowBuilder::AreCutBy(int f) const {
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    if (map()->CutDim(i, f) != (p.cuts_dim() ? p.dim() : -1)) return false;
  }
  return true;
}

RowList RowBuilder::BuildMatching(int mesh_dim, int of_map) {
  Begin(mesh_dim);
  Use(of_map);
  uint64_t partial = 0;
  const FactorDim* sharded = nullptr;
  bool flat = false;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim);
    if (p.is_partial() && p.reduce_op() == ReduceOp::kSum) partial |= BitOf(i);
    if (p.cuts_dim() && sharded == nullptr) sharded = &map()->inputs[i][p.dim()];
    flat |= p.is_flat();
  }
  if (flat) {
    FlatRows();
  } else if (sharded == nullptr) {
    Try({}, partial);
  } else {
    CutList cuts;
    for (const int part : *sharded) {
      const int f = ShardedWith(map(), part);
      if (AreCutBy(f) && Shardable(f)) AddCuts(f, &cuts);
    }
    for (FactorCut& cut : cuts) {
      cut.map = of_map;
      Try(cut, partial);
    }
  }
  MonotoneRows();
  for (ShardingRow& row : rows_) row.map = of_map;
  return std::move(rows_);
}

// Parts are sharded with the whole that they are parts of. What there is one of stays where it is
// if it was cut (one rank has it), but is never cut: the other ranks would have nothing to do.
bool RowBuilder::Shardable(int f) const {
  return !map()->whole[f] && (map().sizes[f] != 1 || IsCut(f)) && map()->part_of[f] < 0 &&
         std::none_of(
             map()->parts[f].begin(), map()->parts[f].end(),
             [this](int part) { return map()->whole[part]; });
}

bool RowBuilder::IsCut(int f) const {
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    const bool cut = p.cuts_dim();
    if (cut && p.dim() == FactorNest::DimOf(map()->inputs[i], f)) return true;
  }
  return false;
}

// False if no cut makes a row in which these inputs are pending: see Passes.
bool RowBuilder::MayPass(uint64_t partial) const {
  for (const Form* form : forms_) {
    if (form == nullptr) continue;
    for (const Product& p : *form) {
      const uint64_t linear = partial & p.linear;
      if ((partial & (p.params | p.twice)) != 0 || (linear & (linear - 1)) != 0) return false;
    }
  }
  return true;
}

// Sets of inputs, not the empty one, that may be Partial(sum) together: worth trying only where
// some form is linear.
std::vector<uint64_t> RowBuilder::PartialSets() {
  std::vector<uint64_t> sets;
  if (linear_ == 0) return sets;
  if (call_.num_inputs() > kMaxEnumeratedInputs) {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (Has(linear_, i) && !MayWait(i)) return sets;
    }
    return {linear_};
  }
  uint64_t may_wait = 0;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    if (Has(linear_, i) && MayWait(i)) may_wait |= BitOf(i);
  }
  for (uint64_t s = -may_wait & may_wait; s != 0; s = (s - may_wait) & may_wait) {
    if (MayPass(s)) sets.push_back(s);
  }
  return sets;
}

// --- cuts ---------------------------------------------------------------------------------------

namespace {

FactorCut& AddCut(int f, Partition cut, uint64_t parts, std::vector<FactorCut>* cuts) {
  FactorCut& row = cuts->emplace_back();
  row.factor = f;
  row.cuts = BitOf(f) | parts;
  row.resolve = !cut.is_block();
  row.cut = std::move(cut);
  return row;
}

bool HasCut(absl::Span<const FactorCut> cuts, const Partition& cut) {
  return std::any_of(cuts.begin(), cuts.end(), [&cut](const FactorCut& have) {
    return have.part_cuts.empty() && have.cut == cut;
  });
}

}  // namespace

void RowBuilder::AddCuts(int f, CutList* cuts) const {
  if (map()->parts[f].empty()) {
    AddBlockCuts(f, cuts);
  } else {
    AddJoinedCuts(f, cuts);
  }
}

// Into blocks of unit 1, and as the inputs are.
void RowBuilder::AddBlockCuts(int f, CutList* cuts) const {
  const size_t first = cuts->size();
  FactorCut& blocks = cuts->emplace_back();
  blocks.factor = f;
  blocks.cuts = BitOf(f);
  bool cut_so = false;  // an input's cut is one of f
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    if (!p.cuts_dim() || p.dim() != map()->CutDim(i, f)) continue;
    if (p.is_shard() && p.unit() == 1 && map()->inputs[i][p.dim()].size() == 1) {
      cut_so = true;  // into the blocks that are there
      continue;
    }
    const auto seen = PartitionOf(map(), map()->inputs[i], call_.in(i), mesh_dim_, f);
    if (!seen) continue;
    cut_so |= !p.is_shard() || IsMajor(map()->inputs[i], f);
    if (!seen->is_block() && call_.op().in_blocks(map()->names[f])) continue;
    if (!HasCut(absl::MakeConstSpan(*cuts).subspan(first), *seen)) AddCut(f, *seen, 0, cuts);
  }
  cut_so &= (map()->composed & BitOf(f)) != 0 && !call_.op().in_blocks(map()->names[f]);
  for (size_t k = first; k < cuts->size(); ++k) (*cuts)[k].repeats = cut_so;
}

// Whether blocks of the dim are blocks of f.
bool RowBuilder::IsMajor(const FactorOperand& operand, int f) const {
  for (const int g : operand[FactorNest::DimOf(operand, f)]) {
    if (g == f) return true;
    if (map().sizes[g] > 1) return false;
  }
  return true;
}

// A joined factor is cut as an operand holds it, or as the parts are; those without a cut of
// their own then in blocks.
void RowBuilder::AddJoinedCuts(int f, CutList* cuts) const {
  const size_t first = cuts->size();
  const FactorDim& parts = map()->parts[f];
  uint64_t bits = 0;
  for (const int part : parts) bits |= BitOf(part);
  std::vector<Partition> part_cuts(parts.size());
  bool cut_so = false;
  const auto look = [&](const FactorOperand& operand, const Spec& spec) {
    const auto whole = PartitionOf(map(), operand, spec, mesh_dim_, f);
    if (whole && !HasCut(absl::MakeConstSpan(*cuts).subspan(first), *whole)) {
      AddCut(f, *whole, bits, cuts);
    }
    for (size_t k = 0; k < parts.size(); ++k) {
      const auto seen = PartitionOf(map(), operand, spec, mesh_dim_, parts[k]);
      if (!seen) continue;
      part_cuts[k] = *seen;
      cut_so = true;
    }
  };
  for (int i = 0; i < call_.num_inputs(); ++i) look(map()->inputs[i], call_.in(i));
  if (like_ != nullptr) look(map()->outputs[0], *like_);
  if (cut_so) AddCut(f, {}, bits, cuts).part_cuts = std::move(part_cuts);
  for (size_t k = first; k < cuts->size(); ++k) (*cuts)[k].resolve = true;
}

// --- rows of a cut and of pending inputs
// ----------------------------------------------------------

// Whether an input that is no pending sum may be taken as one: the value on one rank, zeros on
// the others. Not where the zeros are multiplied by numbers that may be infinite, or divided by
// what may be zero: that gives NaN where one rank has an infinity. (A sum that is pending already
// was made so by the program; waiting for its reduction is then the caller's choice.)
bool RowBuilder::MayBePadded(int i) const {
  for (const Form* form : forms_) {
    if (form == nullptr) continue;
    for (const Product& p : *form) {
      const uint64_t all = p.linear | p.params;
      if (Has(all, i) && (all & ~BitOf(i) & floating_) != 0) return false;
    }
  }
  return true;
}

bool RowBuilder::MayWait(int i) {
  if (IsPending(i)) return true;
  if (!may_pad_[i]) may_pad_[i] = MayBePadded(i);
  return *may_pad_[i];
}

// Where an operand is cut if the row's factor is: exactly, unless the row has to be resolved.
Placement RowBuilder::ShardOf(size_t operand, const FactorOperand& factors,
                              ShardingRow* row) const {
  const int d = map()->CutDim(operand, row->factor);
  row->resolve |= factors[d].size() > 1;
  return Shard(d, row->cut.unit);
}

// Adds the row of a cut with these inputs pending (they may be), if every output gets a placement.
void RowBuilder::Try(const FactorCut& cut, uint64_t partial) {
  Use(cut.map);
  const int f = cut.factor, inputs = call_.num_inputs();
  const uint64_t holding = f < 0 ? 0 : map()->holding[f];
  if ((partial & holding & ~BitOf(kLateBit)) != 0) return;
  for (int i = kLateBit; i < inputs; ++i) {
    if (Has(partial, i) && Holds(i, f)) return;
  }
  const auto holds = [this, holding, f](int i) {
    return i < kLateBit ? Has(holding, i) : Holds(i, f);
  };
  absl::InlinedVector<Becomes, 8> become;
  for (size_t o = 0; o < map()->outputs.size(); ++o) {
    const bool in_output = f >= 0 && map()->CutDim(inputs + o, f) >= 0;
    become.push_back(Output(static_cast<int>(o), holding, holds, in_output, partial));
    if (become.back() == Becomes::kNever) return;
  }
  ShardingRow& row = rows_.emplace_back(cut);
  row.inputs.resize(inputs);
  for (int i = 0; i < inputs; ++i) {
    if (Has(partial, i)) {
      row.inputs[i] = Partial();
    } else if (holds(i)) {
      row.inputs[i] = ShardOf(i, map()->inputs[i], &row);
    }
  }
  row.outputs.resize(become.size());
  for (size_t o = 0; o < become.size(); ++o) {
    if (become[o] == Becomes::kCut) row.outputs[o] = ShardOf(inputs + o, map()->outputs[o], &row);
    if (become[o] == Becomes::kPending) row.outputs[o] = PendingOutput(static_cast<int>(o));
  }
  if (row.resolve) PlaceWhole(&row);
}

// Sizes of the factors where nothing is cut.
const std::vector<SizeSet>& RowBuilder::Whole() {
  std::vector<SizeSet>& sizes = whole_[map_ - maps_.data()];
  if (sizes.empty()) {
    sizes.reserve(map().sizes.size());
    for (const int64_t size : map().sizes) sizes.push_back({size});
  }
  return sizes;
}

// As it is where nothing is cut.
void RowBuilder::PlaceWhole(ShardingRow* row) {
  RowPlacements inputs = row->inputs, outputs = row->outputs;
  row->placed = PlaceRow(map(), *row, Whole(), call_.mesh().size(mesh_dim_), &inputs, &outputs);
  if (!row->placed) return;
  row->inputs = std::move(inputs);
  row->outputs = std::move(outputs);
  row->depends = row->cuts;
  size_t operand = 0;
  for (const auto* operands : {&map()->inputs, &map()->outputs}) {
    for (const FactorOperand& factors : *operands) {
      const int d = map()->CutDim(operand++, row->factor);
      if (d < 0) continue;
      for (const int g : factors[d]) row->depends |= BitOf(g);
    }
  }
}

// --- flat ---------------------------------------------------------------------------------------

namespace {

// The factors of an operand, major first.
FactorDim FactorsOf(const FactorOperand& operand) {
  FactorDim all;
  for (const FactorDim& dim : operand) all.insert(all.end(), dim.begin(), dim.end());
  return all;
}

}  // namespace

// A flat cut of one input is one of all operands that hold its factors, in its order; those that
// hold none are repeated.
void RowBuilder::FlatRows() {
  if (!call_.op().elementwise() || !call_.op().offsets().empty()) return;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    if (!p.is_flat()) continue;
    const bool seen = std::any_of(rows_.begin(), rows_.end(),
                                  [&p, i](const ShardingRow& row) { return row.inputs[i] == p; });
    if (!seen) TryFlat(p, FactorsOf(map()->inputs[i]));
  }
}

void RowBuilder::TryFlat(const Placement& flat, const FactorDim& factors) {
  for (const int f : factors) {
    if (map()->whole[f] || !map()->parts[f].empty() || map()->part_of[f] >= 0) return;
  }
  ShardingRow row;
  uint64_t holding = 0;
  const auto holds = [&](int i) { return FactorsOf(map()->inputs[i]) == factors; };
  for (int i = 0; i < call_.num_inputs(); ++i) {
    // A flat piece has one dim, to which no operand of more is expanded.
    const bool repeated = FactorsOf(map()->inputs[i]).empty() && call_.in(i).ndim() <= 1;
    if (!holds(i) && !repeated) return;
    row.inputs.push_back(holds(i) ? flat : Replicate());
    if (holds(i)) holding |= BitOf(i);
  }
  for (int o = 0; o < static_cast<int>(map()->outputs.size()); ++o) {
    const FactorDim out = FactorsOf(map()->outputs[o]);
    if (out != factors && !out.empty()) return;
    switch (Output(o, holding, holds, out == factors, 0)) {
      case Becomes::kNever:
        return;
      case Becomes::kWhole:
        row.outputs.push_back(Replicate());
        break;
      case Becomes::kCut:
        row.outputs.push_back(flat);
        break;
      case Becomes::kPending:
        row.outputs.push_back(PendingOutput(o));
    }
  }
  rows_.push_back(std::move(row));
}

// --- what outputs are
// -----------------------------------------------------------------------------

// A product that carries what vanishes admits no Partial operand; any other has exactly one (by
// occurrence), and no Partial parameter.
template <class Holding>
bool RowBuilder::Passes(const Product& p, uint64_t holding, const Holding& holds, bool vanishing,
                        uint64_t partial) {
  if ((partial & p.params) != 0) return false;
  if (vanishing && (p.late < 0 ? (holding & (p.linear | p.params)) != 0 : holds(p.late))) {
    return (partial & p.linear) == 0;
  }
  return std::has_single_bit(partial & p.linear) && (partial & p.twice) == 0;
}

// What output o is where the inputs that hold something are cut and those of `partial` pending: cut
// if it holds it too, illegal if the forms do not allow it.
template <class Holding>
RowBuilder::Becomes RowBuilder::Output(int o, uint64_t holding, const Holding& holds,
                                       bool in_output, uint64_t partial) const {
  const Form* const form = forms_[o];
  const bool held = (holding & affecting_[o]) != 0;
  partial &= affecting_[o];
  if (in_output) return partial == 0 ? Becomes::kCut : Becomes::kNever;
  if (!held && partial == 0) return Becomes::kWhole;
  if (form == nullptr) {
    return held && partial == 0 && call_.op().has_reduce() ? Becomes::kPending : Becomes::kNever;
  }
  for (const Product& p : *form) {
    if (!Passes(p, holding, holds, held, partial)) return Becomes::kNever;
  }
  return Becomes::kPending;
}

Placement RowBuilder::PendingOutput(int o) const {
  return forms_[o] == nullptr ? Partial(call_.op().reduce_op()) : Partial();
}

// Partial(max | min) of arguments that pass a monotone op.
void RowBuilder::MonotoneRows() {
  for (const OpDef::MonotoneForm& form : call_.op().monotone_forms()) {
    for (const ReduceOp kind : {ReduceOp::kMax, ReduceOp::kMin}) {
      const std::vector<int> pending = Pending(form, kind);
      if (pending.empty() || (form.when && !form.when(call_, kind))) continue;
      if (!form.together) {
        for (const int i : pending) MonotoneRow(form, kind, {i});
        continue;
      }
      MonotoneRow(form, kind, pending);
      if (call_.op().has_reduce() && kind == call_.op().reduce_op()) CutMonotoneRows(pending);
    }
  }
}

// The arguments of a form that are Partial of this kind.
std::vector<int> RowBuilder::Pending(const OpDef::MonotoneForm& form, ReduceOp kind) const {
  std::vector<int> pending;
  for (int i = 0; i < call_.num_inputs(); ++i) {
    const Placement& p = call_.in(i).placement(mesh_dim_);
    if (!p.is_partial() || p.reduce_op() != kind) continue;
    const std::string& name = call_.op().input_names()[call_.op().variadic() ? 0 : i];
    if (std::find(form.args.begin(), form.args.end(), name) != form.args.end()) {
      pending.push_back(i);
    }
  }
  return pending;
}

void RowBuilder::MonotoneRow(const OpDef::MonotoneForm& form, ReduceOp kind,
                             absl::Span<const int> pending) {
  // The largest of minima is not the minimum of the largest ones.
  if (call_.op().has_reduce() && kind != call_.op().reduce_op() &&
      std::any_of(pending.begin(), pending.end(), [this](int i) { return IsReduced(i); })) {
    return;
  }
  const ReduceOp other = kind == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax;
  ShardingRow row;
  row.inputs.resize(call_.num_inputs());
  for (const int i : pending) row.inputs[i] = Partial(kind);
  row.outputs.push_back(Partial(form.decreasing ? other : kind));
  rows_.push_back(std::move(row));
}

// Whether the output lacks a factor of the input.
bool RowBuilder::IsReduced(int input) const {
  for (int f = 0; f < static_cast<int>(map()->names.size()); ++f) {
    if (Holds(input, f) && map()->CutDim(call_.num_inputs(), f) < 0) return true;
  }
  return false;
}

// A maximum over a cut factor, of inputs that are pending maxima and lack it: each rank has its
// term of them and its part of the others.
void RowBuilder::CutMonotoneRows(absl::Span<const int> pending) {
  const int inputs = call_.num_inputs();
  CutList cuts;
  for (int f = 0; f < static_cast<int>(map()->names.size()); ++f) {
    const bool lacked =
        map()->CutDim(inputs, f) < 0 &&
        std::none_of(pending.begin(), pending.end(), [this, f](int i) { return Holds(i, f); });
    if (lacked && Shardable(f)) AddCuts(f, &cuts);
  }
  const Placement term = Partial(call_.op().reduce_op());
  for (FactorCut& cut : cuts) {
    ShardingRow row(std::move(cut));
    row.inputs.resize(inputs);
    for (const int i : pending) row.inputs[i] = term;
    for (int i = 0; i < inputs; ++i) {
      if (Holds(i, row.factor)) row.inputs[i] = ShardOf(i, map()->inputs[i], &row);
    }
    row.outputs.push_back(term);
    if (row.resolve) PlaceWhole(&row);
    rows_.push_back(std::move(row));
  }
}

}  // namespace internal

RowList DeriveRows(const OpCall& call, const FactorMap& map, int mesh_dim, const Spec* like) {
  const absl::Span<const FactorMap> maps(&map, 1);
  internal::RowBuilder builder(call, maps, like);
  builder.OrderFactors();
  return *builder.Build(mesh_dim);
}

namespace {

// How a row cuts its factor and, of a joined one, the parts, where these sizes are left.
struct RowCuts {
  Partition whole;
  std::vector<std::optional<Partition>> parts;
};
std::optional<RowCuts> CutsOf(const FactorMap& map, const ShardingRow& row,
                              const std::vector<SizeSet>& sizes, int64_t n) {
  RowCuts cuts{row.cut, {}};
  const FactorDim& parts = map->parts[row.factor];
  if (parts.empty()) return cuts;
  if (!row.part_cuts.empty()) {
    std::optional<Partition> joined = JoinParts(parts, row.part_cuts, sizes);
    if (!joined) return std::nullopt;
    cuts.whole = *std::move(joined);
  }
  auto split = SplitParts(parts, cuts.whole, sizes, n);
  if (!split) return std::nullopt;
  cuts.parts = *std::move(split);
  return cuts;
}

}  // namespace

bool PlaceRow(const FactorMap& map, const ShardingRow& row, const std::vector<SizeSet>& sizes,
              int64_t n, RowPlacements* inputs, RowPlacements* outputs) {
  const std::optional<RowCuts> cuts = CutsOf(map, row, sizes, n);
  if (!cuts) return false;
  const FactorDim& parts = map->parts[row.factor];
  size_t operand = 0;
  const FactorDim* last_dim = nullptr;  // that was placed, and how
  const Placement* last = nullptr;
  const auto place = [&](const std::vector<FactorOperand>& operands, RowPlacements* placements) {
    for (size_t k = 0; k < operands.size(); ++k) {
      const int d = map->CutDim(operand++, row.factor);
      if (d < 0) continue;
      const FactorDim& dim = operands[k][d];
      Placement& placed = (*placements)[k];
      if (last != nullptr && last->dim() == d && *last_dim == dim) {
        placed = *last;
        continue;
      }
      int f = row.factor;
      const Partition* cut = &cuts->whole;
      if (std::find(dim.begin(), dim.end(), f) == dim.end()) {  // a part of it
        f = map->CutIn(operands[k], f);
        const auto& own = cuts->parts[std::find(parts.begin(), parts.end(), f) - parts.begin()];
        if (!own) return false;
        cut = &*own;
      }
      std::optional<Placement> p = PlaceFactor(map, dim, d, f, *cut, sizes, n, row.repeats);
      if (!p) return false;
      placed = *std::move(p);
      last = &placed;
      last_dim = &dim;
    }
    return true;
  };
  return place(map->inputs, inputs) && place(map->outputs, outputs);
}

void CutSizesBy(const FactorMap& map, const ShardingRow& row, int64_t n,
                std::vector<SizeSet>* sizes) {
  if (row.factor < 0) return;
  SizeSet& whole = (*sizes)[row.factor];
  const FactorDim& parts = map->parts[row.factor];
  if (parts.empty()) {
    whole = CutSizes(whole, row.cut, n);
    return;
  }
  const std::optional<RowCuts> cuts = CutsOf(map, row, *sizes, n);
  whole = CutSizes(whole, cuts->whole, n);
  for (size_t k = 0; k < parts.size(); ++k) {
    // Of a part that nobody holds by itself only this matters: it is not the same everywhere.
    SizeSet& part = (*sizes)[parts[k]];
    part = cuts->parts[k] ? CutSizes(part, *cuts->parts[k], n) : SizeSet{0, 1};
  }
}

}  // namespace dtensor
