// DeriveRows: legal strategies for one mesh dim, from factors and forms: docs/reference/rules.md.
#include <algorithm>
#include <deque>
#include <optional>

#include "absl/container/node_hash_map.h"
#include "absl/strings/str_cat.h"
#include "dtensor/forms.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr int kMaxEnumeratedInputs = 6;

// The op's forms with conditions evaluated and names resolved for this call.
struct Forms {
  std::vector<const LinearSum*> linear;  // per output; null: not linear
  std::deque<LinearSum> own;             // those that are kept nowhere else
};

// Parsed forms of registered ops, by the address of their text.
struct FormCache {
  absl::node_hash_map<const std::string*, LinearSum> parsed;
};

const LinearSum* ParseFor(const OpCall& call, const std::string& form, Forms* forms) {
  const OpDef& op = call.op();
  if (op.variadic()) {  // its form is the sum of all inputs
    LinearSum& sum = forms->own.emplace_back();
    for (int i = 0; i < call.num_inputs(); ++i) sum.push_back({{i}, {}});
    return &sum;
  }
  if (op.id() < 0) return &forms->own.emplace_back(*ParseLinear(form, op.input_names()));
  const auto [at, fresh] =
      RankContext::Current().Slot<FormCache>().parsed.try_emplace(&form, LinearSum());
  if (fresh) at->second = *ParseLinear(form, op.input_names());
  return &at->second;
}

Forms FormsOf(const OpCall& call) {
  Forms forms;
  const OpDef& op = call.op();
  forms.linear.resize(op.num_outputs());
  for (const OpDef::LinearForm& form : op.linear_forms()) {
    if (form.when && !form.when(call)) continue;
    size_t o = 0;
    if (!form.output.empty()) {
      while (op.output_names()[o] != form.output) ++o;
    }
    forms.linear[o] = ParseFor(call, form.form, &forms);
  }
  return forms;
}

// The bit of input i in a set. Where there are many inputs only the sets of none and of all linear
// ones occur, so the late ones may share a bit.
uint64_t Bit(int i) { return uint64_t{1} << std::min(i, 63); }
bool Has(uint64_t set, int i) { return (set & Bit(i)) != 0; }

class RowBuilder {
 public:
  RowBuilder(const OpCall& call, const FactorMap& map, int mesh_dim, const Spec* like)
      : call_(call), map_(map), mesh_dim_(mesh_dim), like_(like), forms_(FormsOf(call)) {}

  std::vector<ShardingRow> Build() {
    rows_.reserve(16);
    std::vector<std::vector<ShardingRow>> cuts;  // of the factors that may be sharded
    for (int f = 0; f < static_cast<int>(map_.names.size()); ++f) {
      if (Shardable(f)) cuts.push_back(Cuts(f));
    }
    const std::vector<uint64_t> sets = PartialSets();
    Try({}, 0);
    for (const auto& of_factor : cuts) {
      for (const ShardingRow& cut : of_factor) Try(cut, 0);
    }
    for (uint64_t set : sets) Try({}, set);
    for (const auto& of_factor : cuts) {
      for (uint64_t set : sets) {
        for (const ShardingRow& cut : of_factor) Try(cut, set);
      }
    }
    FlatRows();
    MonotoneRows();
    return std::move(rows_);
  }

  // Rows whose inputs are placed as the call's are.
  std::vector<ShardingRow> BuildMatching() {
    uint64_t partial = 0;
    const FactorDim* sharded = nullptr;
    bool flat = false;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& p = call_.in(i).placement(mesh_dim_);
      if (p.is_partial() && p.reduce_op() == ReduceOp::kSum) partial |= Bit(i);
      if (p.cuts_dim() && sharded == nullptr) {
        sharded = &map_.inputs[i][p.dim()];
      }
      flat |= p.is_flat();
    }
    if (flat) {
      FlatRows();
    } else if (sharded == nullptr) {
      Try({}, partial);
    } else {
      for (int f : *sharded) {
        if (map_.part_of[f] >= 0) f = map_.part_of[f];
        if (!Shardable(f)) continue;
        for (const ShardingRow& cut : Cuts(f)) Try(cut, partial);
      }
    }
    MonotoneRows();
    return std::move(rows_);
  }

 private:
  // Parts are sharded with the whole that they are parts of. What there is one of stays where it is
  // if it was cut (one rank has it), but is never cut: the other ranks would have nothing to do.
  bool Shardable(int f) const {
    return !map_.whole[f] && (map_.sizes[f] != 1 || IsCut(f)) && map_.part_of[f] < 0 &&
           std::none_of(
               map_.parts[f].begin(), map_.parts[f].end(),
               [this](int part) { return map_.whole[part]; });
  }

  bool IsCut(int f) const {
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& p = call_.in(i).placement(mesh_dim_);
      const bool cut = p.cuts_dim();
      if (cut && p.dim() == FactorMap::DimOf(map_.inputs[i], f)) return true;
    }
    return false;
  }

  // Sets of inputs, not the empty one, that may be Partial(sum) together: worth trying only where
  // some form is linear.
  std::vector<uint64_t> PartialSets() const {
    std::vector<uint64_t> sets;
    uint64_t linear = 0, may_wait = 0;
    for (const LinearSum* form : forms_.linear) {
      if (form == nullptr) continue;
      for (const LinearProduct& p : *form) {
        for (int i : p.linear) linear |= Bit(i);
      }
    }
    if (linear == 0) return sets;
    if (call_.num_inputs() > kMaxEnumeratedInputs) return {linear};
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (Has(linear, i) && MayWait(i)) may_wait |= Bit(i);
    }
    for (uint64_t s = 1; s <= may_wait; ++s) {
      if ((s & ~may_wait) == 0) sets.push_back(s);
    }
    return sets;
  }

  // Rows that say how factor f is cut, and no more: into blocks of unit 1, and as the inputs are.
  std::vector<ShardingRow> Cuts(int f) const {
    if (!map_.parts[f].empty()) return JoinedCuts(f);
    std::vector<ShardingRow> cuts = {CutRow(f, {})};
    bool cut_so = false;  // an input's cut is one of f
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const auto seen = PartitionOf(map_, map_.inputs[i], call_.in(i), mesh_dim_, f);
      if (!seen) continue;
      cut_so |= !call_.in(i).placement(mesh_dim_).is_shard() || IsMajor(map_.inputs[i], f);
      if (!seen->is_block() && call_.op().in_blocks(map_.names[f])) continue;
      AddCut(CutRow(f, *seen), &cuts);
    }
    for (ShardingRow& row : cuts) row.repeats = cut_so && !call_.op().in_blocks(map_.names[f]);
    return cuts;
  }

  bool IsPending(int i) const { return call_.in(i).placement(mesh_dim_) == Partial(); }
  // Whether an input that is no pending sum may be taken as one: the value on one rank, zeros on
  // the others. Not where the zeros are multiplied by numbers that may be infinite, or divided by
  // what may be zero: that gives NaN where one rank has an infinity. (A sum that is pending already
  // was made so by the program; waiting for its reduction is then the caller's choice.)
  bool MayBePadded(int i) const {
    const auto harmless = [&](int k) { return k == i || !IsFloating(call_.dtype(k)); };
    for (const LinearSum* form : forms_.linear) {
      if (form == nullptr) continue;
      for (const LinearProduct& p : *form) {
        if (p.Mentions(i) && !(std::all_of(p.linear.begin(), p.linear.end(), harmless) &&
                               std::all_of(p.params.begin(), p.params.end(), harmless))) {
          return false;
        }
      }
    }
    return true;
  }

  bool MayWait(int i) const { return IsPending(i) || MayBePadded(i); }

  static ShardingRow CutRow(int f, Partition cut) {
    ShardingRow row;
    row.factor = f;
    row.resolve = !cut.is_block();
    row.cut = std::move(cut);
    return row;
  }
  static void AddCut(ShardingRow row, std::vector<ShardingRow>* cuts) {
    if (std::none_of(cuts->begin(), cuts->end(), [&row](const ShardingRow& have) {
          return have.cut == row.cut && have.part_cuts == row.part_cuts;
        })) {
      cuts->push_back(std::move(row));
    }
  }

  // Whether blocks of the dim are blocks of f.
  bool IsMajor(const FactorOperand& operand, int f) const {
    for (const int g : operand[FactorMap::DimOf(operand, f)]) {
      if (g == f) return true;
      if (map_.sizes[g] > 1) return false;
    }
    return true;
  }

  // A joined factor is cut as an operand holds it, or as the parts are; those without a cut of
  // their own then in blocks.
  std::vector<ShardingRow> JoinedCuts(int f) const {
    std::vector<ShardingRow> cuts;
    const FactorDim& parts = map_.parts[f];
    std::vector<Partition> part_cuts(parts.size());
    bool cut_so = false;
    const auto look = [&](const FactorOperand& operand, const Spec& spec) {
      const auto whole = PartitionOf(map_, operand, spec, mesh_dim_, f);
      if (whole) AddCut(CutRow(f, *whole), &cuts);
      for (size_t k = 0; k < parts.size(); ++k) {
        const auto seen = PartitionOf(map_, operand, spec, mesh_dim_, parts[k]);
        if (!seen) continue;
        part_cuts[k] = *seen;
        cut_so = true;
      }
    };
    for (int i = 0; i < call_.num_inputs(); ++i) look(map_.inputs[i], call_.in(i));
    if (like_ != nullptr) look(map_.outputs[0], *like_);
    if (cut_so) {
      ShardingRow row = CutRow(f, {});
      row.part_cuts = std::move(part_cuts);
      AddCut(std::move(row), &cuts);
    }
    for (ShardingRow& row : cuts) row.resolve = true;
    return cuts;
  }

  bool Holds(int input, int f) const { return f >= 0 && map_.CutIn(map_.inputs[input], f) >= 0; }

  // Where an operand is cut if f is: exactly, unless the row has to be resolved.
  Placement ShardOf(const FactorOperand& operand, ShardingRow* row) const {
    const int d = FactorMap::DimOf(operand, map_.CutIn(operand, row->factor));
    row->resolve |= operand[d].size() > 1;
    return Shard(d, row->cut.unit);
  }

  // Adds the row with these inputs pending, if every output gets a placement.
  void Try(ShardingRow row, uint64_t partial) {
    const int f = row.factor;
    uint64_t holding = 0;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const bool holds = Holds(i, f);
      if (Has(partial, i) && (holds || !MayWait(i))) return;
      row.inputs.push_back(Has(partial, i) ? Partial()
                           : holds         ? ShardOf(map_.inputs[i], &row)
                                           : Replicate());
      if (holds) holding |= Bit(i);
    }
    const auto holds = [this, holding, f](int i) { return i < 63 ? Has(holding, i) : Holds(i, f); };
    for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
      const bool in_output = f >= 0 && map_.CutIn(map_.outputs[o], f) >= 0;
      const std::optional<Placement> p = Output(o, holds, in_output, partial);
      if (!p) return;
      row.outputs.push_back(p->is_shard() ? ShardOf(map_.outputs[o], &row) : *p);
    }
    if (row.resolve) {
      std::vector<SizeSet> sizes;
      for (const int64_t size : map_.sizes) sizes.push_back({size});
      Placements inputs = row.inputs, outputs = row.outputs;
      if (PlaceRow(map_, row, sizes, call_.mesh().size(mesh_dim_), &inputs, &outputs)) {
        row.inputs = std::move(inputs);
        row.outputs = std::move(outputs);
      }
    }
    rows_.push_back(std::move(row));
  }

  // --- flat -------------------------------------------------------------------------------------

  // The factors of an operand, major first.
  static FactorDim FactorsOf(const FactorOperand& operand) {
    FactorDim all;
    for (const FactorDim& dim : operand) all.insert(all.end(), dim.begin(), dim.end());
    return all;
  }

  // A flat cut of one input is one of all operands that hold its factors, in its order; those that
  // hold none are repeated.
  void FlatRows() {
    if (!call_.op().elementwise() || !call_.op().offsets().empty()) return;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& p = call_.in(i).placement(mesh_dim_);
      if (!p.is_flat()) continue;
      const bool seen = std::any_of(rows_.begin(), rows_.end(),
                                    [&p, i](const ShardingRow& row) { return row.inputs[i] == p; });
      if (!seen) TryFlat(p, FactorsOf(map_.inputs[i]));
    }
  }

  void TryFlat(const Placement& flat, const FactorDim& factors) {
    for (const int f : factors) {
      if (map_.whole[f] || !map_.parts[f].empty() || map_.part_of[f] >= 0) return;
    }
    ShardingRow row;
    const auto holds = [&](int i) { return FactorsOf(map_.inputs[i]) == factors; };
    for (int i = 0; i < call_.num_inputs(); ++i) {
      // A flat piece has one dim, to which no operand of more is expanded.
      const bool repeated = FactorsOf(map_.inputs[i]).empty() && call_.in(i).ndim() <= 1;
      if (!holds(i) && !repeated) return;
      row.inputs.push_back(holds(i) ? flat : Replicate());
    }
    for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
      const FactorDim out = FactorsOf(map_.outputs[o]);
      if (out != factors && !out.empty()) return;
      const std::optional<Placement> p = Output(o, holds, out == factors, 0);
      if (!p) return;
      row.outputs.push_back(p->is_shard() ? flat : *p);
    }
    rows_.push_back(std::move(row));
  }

  // What output o is where the inputs that hold something are cut and those of `partial` pending:
  // a Shard if it holds it too, nothing if the forms do not allow it.
  template <class Holding>
  std::optional<Placement> Output(int o, const Holding& holds, bool in_output,
                                  uint64_t partial) const {
    const LinearSum* const form = forms_.linear[o];
    bool held = false;
    uint64_t affecting = 0;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (form != nullptr && std::none_of(form->begin(), form->end(),
                                          [i](const LinearProduct& p) { return p.Mentions(i); })) {
        continue;
      }
      affecting |= Bit(i);
      held |= holds(i);
    }
    partial &= affecting;
    if (in_output) {
      if (partial != 0) return std::nullopt;
      return Shard(0);
    }
    if (!held && partial == 0) return Replicate();
    if (form == nullptr) {
      if (held && partial == 0 && call_.op().has_reduce()) return Partial(call_.op().reduce_op());
      return std::nullopt;
    }
    for (const LinearProduct& p : *form) {
      if (!ProductPasses(p, holds, held, partial)) return std::nullopt;
    }
    return Partial();
  }

  // A product that carries what vanishes admits no Partial operand; any other has exactly one (by
  // occurrence), and no Partial parameter.
  template <class Holding>
  bool ProductPasses(const LinearProduct& p, const Holding& holds, bool vanishing,
                     uint64_t partial) const {
    int count = 0;
    bool carries = false;
    for (int i : p.linear) {
      count += Has(partial, i) ? 1 : 0;
      carries |= holds(i);
    }
    for (int i : p.params) {
      if (Has(partial, i)) return false;
      carries |= holds(i);
    }
    return vanishing && carries ? count == 0 : count == 1;
  }

  // Partial(max | min) of arguments that pass a monotone op.
  void MonotoneRows() {
    for (const OpDef::MonotoneForm& form : call_.op().monotone_forms()) {
      for (const ReduceOp kind : {ReduceOp::kMax, ReduceOp::kMin}) {
        // The largest of minima is not the minimum of the largest ones.
        if (call_.op().has_reduce() && kind != call_.op().reduce_op()) continue;
        const std::vector<int> pending = Pending(form, kind);
        if (pending.empty() || (form.when && !form.when(call_, kind))) continue;
        if (form.together) {
          MonotoneRow(form, kind, pending);
        } else {
          for (const int i : pending) MonotoneRow(form, kind, {i});
        }
      }
    }
  }
  // The arguments of a form that are Partial of this kind.
  std::vector<int> Pending(const OpDef::MonotoneForm& form, ReduceOp kind) const {
    std::vector<int> pending;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const std::string& name = call_.op().input_names()[call_.op().variadic() ? 0 : i];
      const Placement& p = call_.in(i).placement(mesh_dim_);
      if (p.is_partial() && p.reduce_op() == kind &&
          std::find(form.args.begin(), form.args.end(), name) != form.args.end()) {
        pending.push_back(i);
      }
    }
    return pending;
  }
  void MonotoneRow(const OpDef::MonotoneForm& form, ReduceOp kind, absl::Span<const int> pending) {
    const ReduceOp other = kind == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax;
    ShardingRow row;
    row.inputs.resize(call_.num_inputs());
    for (const int i : pending) row.inputs[i] = Partial(kind);
    row.outputs.push_back(Partial(form.decreasing ? other : kind));
    rows_.push_back(std::move(row));
  }

  const OpCall& call_;
  const FactorMap& map_;
  const int mesh_dim_;
  const Spec* const like_;
  Forms forms_;
  std::vector<ShardingRow> rows_;
};

}  // namespace

std::vector<ShardingRow> DeriveRows(const OpCall& call, const FactorMap& map, int mesh_dim,
                                    const Spec* like) {
  return RowBuilder(call, map, mesh_dim, like).Build();
}

std::vector<ShardingRow> MatchingRows(const OpCall& call, const FactorMap& map, int mesh_dim,
                                      const Spec* like) {
  return RowBuilder(call, map, mesh_dim, like).BuildMatching();
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
  const FactorDim& parts = map.parts[row.factor];
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
              int64_t n, Placements* inputs, Placements* outputs) {
  const std::optional<RowCuts> cuts = CutsOf(map, row, sizes, n);
  if (!cuts) return false;
  const FactorDim& parts = map.parts[row.factor];
  const auto place = [&](const std::vector<FactorOperand>& operands, Placements* placements) {
    for (size_t k = 0; k < operands.size(); ++k) {
      const int f = map.CutIn(operands[k], row.factor);
      if (f < 0) continue;
      const std::optional<Partition>* cut = nullptr;
      const std::optional<Partition> whole = cuts->whole;
      if (f == row.factor) {
        cut = &whole;
      } else {
        cut = &cuts->parts[std::find(parts.begin(), parts.end(), f) - parts.begin()];
      }
      if (!*cut) return false;
      const int d = FactorMap::DimOf(operands[k], f);
      const std::optional<Placement> p =
          PlaceFactor(map, operands[k][d], d, f, **cut, sizes, n, row.repeats);
      if (!p) return false;
      (*placements)[k] = *p;
    }
    return true;
  };
  return place(map.inputs, inputs) && place(map.outputs, outputs);
}

std::vector<SizeSet> SizesAfter(const FactorMap& map, const ShardingRow& row,
                                const std::vector<SizeSet>& sizes, int64_t n) {
  std::vector<SizeSet> next = sizes;
  if (row.factor < 0) return next;
  const FactorDim& parts = map.parts[row.factor];
  if (parts.empty()) {
    next[row.factor] = CutSizes(sizes[row.factor], row.cut, n);
    return next;
  }
  const std::optional<RowCuts> cuts = CutsOf(map, row, sizes, n);
  next[row.factor] = CutSizes(sizes[row.factor], cuts->whole, n);
  for (size_t k = 0; k < parts.size(); ++k) {
    // Of a part that nobody holds by itself only this matters: it is not the same everywhere.
    next[parts[k]] = cuts->parts[k] ? CutSizes(sizes[parts[k]], *cuts->parts[k], n) : SizeSet{0, 1};
  }
  return next;
}

}  // namespace dtensor
