#include "dtensor/verify.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/dispatch.h"
#include "dtensor/distribute.h"
#include "dtensor/sharding.h"
#include "mesh/launch.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

using Whole = std::vector<double>;  // values of a whole tensor, row-major

// Numbers without pattern, multiples of 2^-10: sums of a few of them are exact.
Whole Noise(int64_t n, uint64_t seed) {
  Whole v(static_cast<size_t>(n));
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 77;
  for (double& x : v) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    x = static_cast<double>(static_cast<int64_t>(state >> 53)) / 1024 - 1;
  }
  return v;
}

Whole ValuesOf(const VerifyInput& in, uint64_t seed) {
  if (!in.values.empty()) return in.values;
  Whole v = Noise(Numel(in.shape), seed);
  if (in.dtype == DType::kBool) {
    for (double& x : v) x = x > 0;
  }
  return v;
}

std::vector<Placement> PlacementsFor(const VerifyInput& in) {
  std::vector<Placement> p = {Replicate()};
  for (int d = 0; d < static_cast<int>(in.shape.size()); ++d) p.push_back(Shard(d));
  if (IsFloating(in.dtype)) p.push_back(Partial());
  return p;
}

// All choices of placements of all inputs on a mesh.
class Choices {
 public:
  Choices(const VerifySample& s, int mesh_dims, int64_t most) {
    for (const VerifyInput& in : s.inputs) {
      for (int m = 0; m < mesh_dims; ++m) options_.push_back(PlacementsFor(in));
    }
    mesh_dims_ = mesh_dims;
    for (const auto& o : options_) total_ *= static_cast<int64_t>(o.size());
    step_ = total_ <= most ? 1 : (total_ / most) | 1;
  }
  int64_t count() const { return (total_ + step_ - 1) / step_; }
  std::vector<Placements> At(int64_t i) const {
    int64_t rest = i * step_;
    std::vector<Placements> chosen;
    for (size_t k = 0; k < options_.size(); ++k) {
      if (k % mesh_dims_ == 0) chosen.emplace_back();
      const auto size = static_cast<int64_t>(options_[k].size());
      chosen.back().push_back(options_[k][rest % size]);
      rest /= size;
    }
    return chosen;
  }

 private:
  std::vector<std::vector<Placement>> options_;
  int mesh_dims_ = 1;
  int64_t total_ = 1, step_ = 1;
};

// What one rank holds under one choice: outputs and where they are; null if the choice is not one
// that the op claims to take as it is.
struct Part {
  std::vector<Placements> placements;
  std::vector<Whole> values;
  std::string error;
};

class Judge {
 public:
  Judge(const OpDef& op, const VerifySample& sample, const Dims& mesh_shape, int64_t most)
      : op_(op),
        sample_(sample),
        mesh_shape_(mesh_shape),
        choices_(sample, static_cast<int>(mesh_shape.size()), most) {
    attrs_ = sample.attrs;
    if (sample.ints_attr >= 0) attrs_[sample.ints_attr] = IntsAttr(sample_.ints);
    for (size_t i = 0; i < sample.inputs.size(); ++i) {
      values_.push_back(ValuesOf(sample.inputs[i], i + 1));
    }
  }

  absl::Status Run(VerifyReport* report) {
    DT_RETURN_IF_ERROR(RunFake({.world = 1}, [&](RankContext&) { return Truth(); }));
    const int64_t ranks = Numel(mesh_shape_);
    std::vector<std::vector<std::optional<Part>>> parts(ranks);
    for (int64_t r = 0; r < ranks; ++r) {
      parts[r].resize(choices_.count());
      DT_RETURN_IF_ERROR(
          RunFake({.world = ranks, .rank = r}, [&](RankContext&) { return OneRank(&parts[r]); }));
    }
    return RunFake({.world = ranks}, [&](RankContext&) {
      for (int64_t c = 0; c < choices_.count(); ++c) Compare(c, parts, report);
      return absl::OkStatus();
    });
  }

 private:
  Values Apply(const std::vector<DTensor>& inputs) const {
    std::vector<const DTensor*> pointers;
    for (const DTensor& t : inputs) pointers.push_back(&t);
    return Call(op_, pointers, attrs_);
  }

  absl::Status Truth() {
    std::vector<DTensor> inputs;
    for (size_t i = 0; i < values_.size(); ++i) {
      inputs.push_back(Local(ValueOrThrow(
          Tensor::FromVector(values_[i], sample_.inputs[i].shape, sample_.inputs[i].dtype))));
    }
    for (const DTensor& y : Apply(inputs)) {
      truth_.push_back(y.local().ToVector<double>());
      shapes_.push_back(y.shape());
      dtypes_.push_back(y.dtype());
    }
    return absl::OkStatus();
  }

  // This rank's part of input i: terms of a pending sum differ from rank to rank.
  DTensor Input(size_t i, const DeviceMesh& mesh, const Placements& placements) const {
    Dims coordinate;
    mesh.Coordinate(RankContext::Current().rank(), &coordinate);
    Placements settled = placements;
    int64_t terms = 1, term = 0;
    for (size_t m = 0; m < settled.size(); ++m) {
      if (!settled[m].is_partial()) continue;
      settled[m] = Replicate();
      terms *= mesh.size(static_cast<int>(m));
      term = term * mesh.size(static_cast<int>(m)) + coordinate[m];
    }
    const VerifyInput& in = sample_.inputs[i];
    Whole mine = values_[i];
    const auto noise = [&](int64_t t) { return Noise(Numel(in.shape), 100 * (i + 1) + t); };
    if (terms > 1 && term < terms - 1) mine = noise(term);
    if (terms > 1 && term == terms - 1) {
      for (int64_t t = 0; t < terms - 1; ++t) {
        const Whole other = noise(t);
        for (size_t k = 0; k < mine.size(); ++k) mine[k] -= other[k];
      }
    }
    const Tensor whole = ValueOrThrow(Tensor::FromVector(mine, in.shape, in.dtype));
    const DTensor cut = DistributeTensor(whole, mesh, settled);
    FromLocalOptions options;
    options.shape = in.shape;
    return terms > 1 ? FromLocal(Local(cut.local()), mesh, placements, options) : cut;
  }

  absl::Status OneRank(std::vector<std::optional<Part>>* parts) {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(mesh_shape_));
    for (int64_t c = 0; c < choices_.count(); ++c) {
      const std::vector<Placements> chosen = choices_.At(c);
      std::vector<DTensor> inputs;
      std::vector<const Spec*> specs;
      for (size_t i = 0; i < chosen.size(); ++i) inputs.push_back(Input(i, mesh, chosen[i]));
      for (const DTensor& t : inputs) specs.push_back(&t.spec());
      const absl::StatusOr<OpPlan> plan = PlanOp(OpCall(op_, specs, attrs_), nullptr);
      if (!plan.ok() || plan->strategy.cost_bytes > 0 || MovesAnything(*plan, chosen)) continue;
      Part part;
      try {
        for (const DTensor& y : Apply(inputs)) {
          part.placements.emplace_back(y.placements().begin(), y.placements().end());
          part.values.push_back(y.local().ToVector<double>());
        }
      } catch (const Error& e) {
        part.error = e.what();
      }
      (*parts)[c] = std::move(part);
    }
    return absl::OkStatus();
  }

  // A strategy that needs R -> S or R -> P first costs no bytes, but is another choice's.
  static bool MovesAnything(const OpPlan& plan, const std::vector<Placements>& chosen) {
    for (size_t i = 0; i < chosen.size(); ++i) {
      for (size_t m = 0; m < chosen[i].size(); ++m) {
        const Placement &a = plan.strategy.inputs[i][m], &b = chosen[i][m];
        if (a.kind() != b.kind() || (a.is_shard() && a.dim() != b.dim())) return true;
      }
    }
    return false;
  }

  void Compare(int64_t c, const std::vector<std::vector<std::optional<Part>>>& parts,
               VerifyReport* report) {
    if (!parts[0][c]) return;
    ++report->combinations;
    std::string why;
    for (const auto& rank : parts) {
      if (why.empty() && !rank[c]) why = "ranks disagree on whether it is legal";
      if (why.empty() && !rank[c]->error.empty()) why = rank[c]->error;
    }
    for (size_t o = 0; why.empty() && o < truth_.size(); ++o) why = CompareOutput(c, o, parts);
    if (why.empty()) return;
    std::vector<std::string> inputs;
    const std::vector<Placements> chosen = choices_.At(c);
    for (size_t i = 0; i < chosen.size(); ++i) {
      inputs.push_back(absl::StrCat(op_.InputName(static_cast<int>(i)), " ",
                                    ToString(sample_.inputs[i].shape), " ", ToString(chosen[i])));
    }
    std::string outputs;
    if (parts[0][c]->error.empty()) {
      for (const Placements& p : parts[0][c]->placements)
        absl::StrAppend(&outputs, " ", ToString(p));
    }
    report->wrong.push_back(absl::StrCat(op_.name(), " on mesh ", ToString(mesh_shape_), ": ",
                                         absl::StrJoin(inputs, ", "), " ->", outputs, ": ", why));
  }

  // Puts the parts of one output together: replicas must be alike, terms are reduced.
  std::string CompareOutput(int64_t c, size_t o,
                            const std::vector<std::vector<std::optional<Part>>>& parts) const {
    const DeviceMesh mesh = ValueOrThrow(DeviceMesh::Create(mesh_shape_));
    const Placements& placements = parts[0][c]->placements[o];
    const SpecRef spec = ValueOrThrow(
        RankContext::Current().specs().Intern(mesh, placements, shapes_[o], dtypes_[o]));
    ReduceOp reduce = ReduceOp::kSum;
    for (const Placement& p : placements) {
      if (p.is_partial()) reduce = p.reduce_op();
    }
    // By the coordinates on dims that are not pending: the reduced value of every element held.
    std::map<std::vector<int64_t>, std::map<int64_t, double>> groups;
    for (int64_t r = 0; r < mesh.size(); ++r) {
      Dims coordinate;
      mesh.Coordinate(r, &coordinate);
      std::vector<int64_t> group;
      for (size_t m = 0; m < placements.size(); ++m) {
        if (!placements[m].is_partial()) group.push_back(coordinate[m]);
      }
      const std::vector<int64_t> positions = Positions(*spec, coordinate);
      const Whole& held = parts[r][c]->values[o];
      if (held.size() != positions.size()) {
        return absl::StrCat("rank ", r, " gives ", held.size(), " elements, its part has ",
                            positions.size());
      }
      for (size_t k = 0; k < held.size(); ++k) {
        const auto [it, fresh] = groups[group].emplace(positions[k], held[k]);
        if (fresh) continue;
        if (reduce == ReduceOp::kSum) it->second += held[k];
        if (reduce == ReduceOp::kMax) it->second = std::max(it->second, held[k]);
        if (reduce == ReduceOp::kMin) it->second = std::min(it->second, held[k]);
        if (reduce == ReduceOp::kProd) it->second *= held[k];
      }
    }
    std::vector<bool> covered(truth_[o].size(), false);
    double scale = 1;
    for (double t : truth_[o]) scale = std::max(scale, std::isfinite(t) ? std::fabs(t) : 0);
    for (const auto& [group, elements] : groups) {
      for (const auto& [at, got] : elements) {
        covered[at] = true;
        const double want = truth_[o][at];
        if (got == want || (std::isnan(got) && std::isnan(want))) continue;
        if (!(std::fabs(got - want) <= 1e-9 * scale)) {
          return absl::StrCat("output ", o, " element ", at, " is ", got, ", must be ", want);
        }
      }
    }
    const auto hole = std::find(covered.begin(), covered.end(), false);
    if (hole == covered.end()) return "";
    return absl::StrCat("output ", o, " element ", hole - covered.begin(), " is held by no rank");
  }

  // Row-major positions of a coordinate's elements.
  static std::vector<int64_t> Positions(const Spec& spec, const Dims& coordinate) {
    std::vector<int64_t> positions = {0};
    const Strides strides = ContiguousStrides(spec.shape());
    const auto index = LocalIndex(spec, coordinate);
    for (size_t d = 0; d < index.size(); ++d) {
      std::vector<int64_t> next;
      for (int64_t p : positions) {
        for (const Interval& run : index[d]) {
          for (int64_t j = run.start; j < run.end; ++j) next.push_back(p + j * strides[d]);
        }
      }
      positions = std::move(next);
    }
    return positions;
  }

  const OpDef& op_;
  const VerifySample& sample_;
  const Dims mesh_shape_;
  Choices choices_;
  Attrs attrs_;
  std::vector<Whole> values_, truth_;
  std::vector<Shape> shapes_;
  std::vector<DType> dtypes_;
};

}  // namespace

std::string VerifyReport::ToString(const std::string& op) const {
  std::string text = absl::StrCat(op, ": ", combinations, " strategies, ", wrong.size(), " wrong");
  for (const std::string& w : wrong) absl::StrAppend(&text, "\n  WRONG ", w);
  return text;
}

absl::StatusOr<VerifyReport> VerifyOp(const OpDef& op, const std::vector<VerifySample>& samples,
                                      int64_t most) {
  VerifyReport report;
  for (const VerifySample& sample : samples) {
    for (const Dims& mesh : {Dims{2}, Dims{3}, Dims{4}, Dims{2, 2}, Dims{2, 3}}) {
      DT_RETURN_IF_ERROR(Judge(op, sample, mesh, most).Run(&report));
    }
  }
  return report;
}

}  // namespace dtensor
