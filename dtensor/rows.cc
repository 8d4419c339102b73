// DeriveRows: legal strategies for one mesh dim, from factors and forms.
#include <algorithm>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dtensor/forms.h"
#include "dtensor/sharding.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

constexpr int kMaxEnumeratedInputs = 6;

// The op's forms with conditions evaluated and names resolved for this call.
struct Forms {
  std::vector<std::optional<LinearSum>> linear;  // per output; nullopt = not linear
};

LinearSum ParseFor(const OpCall& call, const std::string& form) {
  const OpDef& op = call.op();
  if (!op.variadic()) return *ParseLinear(form, op.input_names());
  LinearSum sum;  // a variadic form is the sum of all inputs
  for (int i = 0; i < call.num_inputs(); ++i) sum.push_back({{i}, {}});
  return sum;
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
    forms.linear[o] = ParseFor(call, form.form);
  }
  return forms;
}

// The bit of input i in a set. Where there are many inputs only the sets of none and of all linear
// ones occur, so the late ones may share a bit.
uint64_t Bit(int i) { return uint64_t{1} << std::min(i, 63); }
bool Has(uint64_t set, int i) { return (set & Bit(i)) != 0; }

class RowBuilder {
 public:
  RowBuilder(const OpCall& call, const FactorMap& map, int mesh_dim)
      : call_(call), map_(map), mesh_dim_(mesh_dim), forms_(FormsOf(call)) {}

  std::vector<ShardingRow> Build() {
    const std::vector<uint64_t> sets = PartialSets();
    for (uint64_t set : sets) {
      if (set == 0) Try(-1, 1, 0);
    }
    for (int f = 0; f < static_cast<int>(map_.names.size()); ++f) {
      if (map_.whole[f]) continue;
      for (int64_t unit : Units(f)) Try(f, unit, 0);
    }
    for (uint64_t set : sets) {
      if (set != 0) Try(-1, 1, set);
    }
    for (int f = 0; f < static_cast<int>(map_.names.size()); ++f) {
      if (map_.whole[f]) continue;
      for (uint64_t set : sets) {
        if (set != 0) {
          for (int64_t unit : Units(f)) Try(f, unit, set);
        }
      }
    }
    MonotoneRows();
    return std::move(rows_);
  }

  // Rows whose inputs are placed as the call's are.
  std::vector<ShardingRow> BuildMatching() {
    uint64_t partial = 0;
    const FactorDim* sharded = nullptr;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& p = call_.in(i).placement(mesh_dim_);
      if (p.is_partial() && p.reduce_op() == ReduceOp::kSum) partial |= Bit(i);
      if (p.is_shard() && sharded == nullptr) sharded = &map_.inputs[i][p.dim()];
    }
    if (sharded == nullptr) {
      Try(-1, 1, partial);
    } else {
      for (int f : *sharded) {
        if (map_.whole[f]) continue;
        for (int64_t unit : Units(f)) Try(f, unit, partial);
      }
    }
    MonotoneRows();
    return std::move(rows_);
  }

 private:
  // Sets of inputs that may be Partial(sum) together: worth trying only where some form is linear.
  std::vector<uint64_t> PartialSets() const {
    std::vector<uint64_t> sets = {0};
    uint64_t linear = 0;
    for (const auto& form : forms_.linear) {
      if (!form) continue;
      for (const LinearProduct& p : *form) {
        for (int i : p.linear) linear |= Bit(i);
      }
    }
    if (linear == 0) return sets;
    if (call_.num_inputs() > kMaxEnumeratedInputs) {
      sets.push_back(linear);
      return sets;
    }
    for (uint64_t s = 1; s < (uint64_t{1} << call_.num_inputs()); ++s) {
      if ((s & ~linear) == 0) sets.push_back(s);
    }
    return sets;
  }

  // Block units of factor f: 1, and those that the inputs' shards have.
  std::vector<int64_t> Units(int f) const {
    std::vector<int64_t> units = {1};
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const Placement& p = call_.in(i).placement(mesh_dim_);
      const int d = FactorMap::DimOf(map_.inputs[i], f);
      if (d < 0 || !p.is_shard() || p.dim() != d) continue;
      const int64_t minor = Minor(map_.inputs[i][d], f);
      if (minor > 0 && p.unit() % minor == 0 &&
          std::find(units.begin(), units.end(), p.unit() / minor) == units.end()) {
        units.push_back(p.unit() / minor);
      }
    }
    return units;
  }

  // Product of the factors minor to f in the dim.
  int64_t Minor(const FactorDim& dim, int f) const {
    int64_t product = 1;
    for (auto it = dim.rbegin(); it != dim.rend() && *it != f; ++it) product *= map_.sizes[*it];
    return product;
  }

  bool Holds(int input, int f) const {
    return f >= 0 && FactorMap::DimOf(map_.inputs[input], f) >= 0;
  }

  Placement ShardOf(const FactorOperand& operand, int f, int64_t unit) const {
    const int d = FactorMap::DimOf(operand, f);
    return Shard(d, std::max<int64_t>(1, unit * Minor(operand[d], f)));
  }

  void Try(int f, int64_t unit, uint64_t partial) {
    ShardingRow row;
    row.factor = f;
    row.unit = unit;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      const bool is_partial = Has(partial, i);
      if (is_partial && Holds(i, f)) return;
      row.inputs.push_back(is_partial    ? Partial()
                           : Holds(i, f) ? ShardOf(map_.inputs[i], f, unit)
                                         : Replicate());
    }
    for (int o = 0; o < static_cast<int>(map_.outputs.size()); ++o) {
      std::optional<Placement> p = Output(o, f, unit, partial);
      if (!p) return;
      row.outputs.push_back(*p);
    }
    rows_.push_back(std::move(row));
  }

  std::optional<Placement> Output(int o, int f, int64_t unit, uint64_t partial) const {
    const auto& form = forms_.linear[o];
    bool held = false;
    uint64_t affecting = 0;
    for (int i = 0; i < call_.num_inputs(); ++i) {
      if (form && std::none_of(form->begin(), form->end(),
                               [i](const LinearProduct& p) { return p.Mentions(i); })) {
        continue;
      }
      affecting |= Bit(i);
      held |= Holds(i, f);
    }
    const bool in_output = f >= 0 && FactorMap::DimOf(map_.outputs[o], f) >= 0;
    partial &= affecting;
    if (in_output) {
      if (partial != 0) return std::nullopt;
      return ShardOf(map_.outputs[o], f, unit);
    }
    if (!held && partial == 0) return Replicate();
    if (!form) {
      if (held && partial == 0 && call_.op().has_reduce()) return Partial(call_.op().reduce_op());
      return std::nullopt;
    }
    for (const LinearProduct& p : *form) {
      if (!ProductPasses(p, f, held, partial)) return std::nullopt;
    }
    return Partial();
  }

  // A product that carries the vanishing factor admits no Partial operand; any other has exactly
  // one (by occurrence), and no Partial parameter.
  bool ProductPasses(const LinearProduct& p, int f, bool vanishing, uint64_t partial) const {
    int count = 0;
    bool carries = false;
    for (int i : p.linear) {
      count += Has(partial, i) ? 1 : 0;
      carries |= Holds(i, f);
    }
    for (int i : p.params) {
      if (Has(partial, i)) return false;
      carries |= Holds(i, f);
    }
    return vanishing && carries ? count == 0 : count == 1;
  }

  // Partial(max | min) of one argument passes a monotone op.
  void MonotoneRows() {
    for (const OpDef::MonotoneForm& form : call_.op().monotone_forms()) {
      for (const std::string& arg : form.args) {
        const auto& names = call_.op().input_names();
        const int i = static_cast<int>(std::find(names.begin(), names.end(), arg) - names.begin());
        if (i >= call_.num_inputs()) continue;
        const Placement& p = call_.in(i).placement(mesh_dim_);
        if (!p.is_partial()) continue;
        const ReduceOp op = p.reduce_op();
        if (op != ReduceOp::kMax && op != ReduceOp::kMin) continue;
        // The largest of minima is not the minimum of the largest ones.
        if (call_.op().has_reduce() && op != call_.op().reduce_op()) continue;
        ShardingRow row;
        row.inputs.resize(call_.num_inputs());
        row.inputs[i] = p;
        const bool swap = form.decreasing;
        row.outputs.push_back(
            !swap ? p : Partial(op == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax));
        rows_.push_back(std::move(row));
      }
    }
  }

  const OpCall& call_;
  const FactorMap& map_;
  int mesh_dim_;
  Forms forms_;
  std::vector<ShardingRow> rows_;
};

}  // namespace

std::vector<ShardingRow> DeriveRows(const OpCall& call, const FactorMap& map, int mesh_dim) {
  return RowBuilder(call, map, mesh_dim).Build();
}

std::vector<ShardingRow> MatchingRows(const OpCall& call, const FactorMap& map, int mesh_dim) {
  return RowBuilder(call, map, mesh_dim).BuildMatching();
}

bool SameCut(int64_t size, int64_t u, int64_t v, int64_t n) {
  if (u == v) return true;
  const auto chunk = [&](int64_t unit) {
    const int64_t blocks = (size + unit - 1) / unit;
    return unit * ((blocks + n - 1) / n);
  };
  const int64_t a = chunk(u), b = chunk(v);
  return a == b || (a >= size && b >= size);
}

}  // namespace dtensor
