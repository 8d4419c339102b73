// Test support: an op under every placement of its inputs on small meshes gives what one rank
// gives, values and gradients.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::testing {

// Replicate, every Shard, and Partial for floating operands, on every mesh dim.
inline std::vector<Placements> PlacementsOf(const Operand& operand, int mesh_dims,
                                            bool pending = true) {
  std::vector<Placement> one = {Replicate()};
  for (size_t d = 0; d < operand.shape.size(); ++d) one.push_back(Shard(static_cast<int>(d)));
  if (pending && IsFloating(operand.dtype)) one.push_back(Partial());
  std::vector<Placements> all = {{}};
  for (int m = 0; m < mesh_dims; ++m) {
    std::vector<Placements> longer;
    for (const Placements& p : all) {
      for (const Placement& next : one) {
        longer.push_back(p);
        longer.back().push_back(next);
      }
    }
    all = std::move(longer);
  }
  return all;
}

// The operand on `mesh`; the terms of a Partial differ from rank to rank.
inline DTensor Place(const Operand& operand, const DeviceMesh& mesh, const Placements& placements,
                     int64_t rank, uint64_t seed) {
  Dims coordinate;
  mesh.Coordinate(rank, &coordinate);
  int64_t terms = 1, term = 0;
  Placements settled = placements;
  for (size_t m = 0; m < placements.size(); ++m) {
    if (!placements[m].is_partial()) continue;
    terms *= mesh.size(static_cast<int>(m));
    term = term * mesh.size(static_cast<int>(m)) + coordinate[m];
    settled[m] = Replicate();
  }
  const int64_t n = Numel(operand.shape);
  const auto noise = [&](int64_t r) {  // short fractions: integer values come back exactly
    std::vector<double> v = Noise(n, seed + static_cast<uint64_t>(r));
    for (double& x : v) x = std::round(x * 1024) / 1024;
    return v;
  };
  std::vector<double> mine = terms == 1 || term == terms - 1 ? operand.values : noise(term);
  for (int64_t r = 0; term == terms - 1 && r < terms - 1; ++r) {
    const std::vector<double> other = noise(r);
    for (size_t i = 0; i < mine.size(); ++i) mine[i] -= other[i];
  }
  const Tensor full = ValueOrThrow(Tensor::FromVector(mine, operand.shape, operand.dtype));
  DTensor t = DistributeTensor(full, mesh, settled);
  if (terms > 1) {
    FromLocalOptions options;
    options.shape = operand.shape;
    t = FromLocal(OnSelf(t.local()), mesh, placements, options);
  }
  if (operand.differentiable()) t.RequiresGrad();
  return t;
}

inline std::string Differs(const std::vector<double>& got, const std::vector<double>& want,
                           double tolerance) {
  if (got.size() != want.size()) return absl::StrCat("has ", got.size(), " elements");
  double scale = 1;
  for (double w : want) scale = std::max(scale, std::isfinite(w) ? std::fabs(w) : 0);
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] == want[i] || (std::isnan(got[i]) && std::isnan(want[i]))) continue;
    if (std::fabs(got[i] - want[i]) <= tolerance * scale) continue;
    return absl::StrCat("element ", i, " is ", got[i], ", must be ", want[i]);
  }
  return "";
}

// Compares one choice of placements; "" if all agree.
class ShardedCheck {
 public:
  struct Options {
    double tolerance = 1e-10;
    bool pending = true;      // operands may be pending sums
    bool may_refuse = false;  // in place, where what is written would have to move
    int64_t most = 400;       // choices of placements
  };
  ShardedCheck(OpFn fn, std::vector<Operand> operands, const Options& options)
      : fn_(std::move(fn)), operands_(std::move(operands)), options_(options) {
    const std::vector<DTensor> inputs = MakeAll(operands_);
    const DTensor y = fn_(inputs);
    differentiable_ = y.requires_grad();
    value_ = y.ToVector<double>();
    if (differentiable_) grads_ = Gradients(fn_, MakeAll(operands_));
  }

  // Failures of every choice of placements on a mesh of this shape, at most five. Where there are
  // more than Options::most choices only evenly spread ones are tried.
  std::vector<std::string> Run(const Dims& mesh_shape) const {
    std::vector<std::string> failures;
    const absl::Status status = RunSpmd(Numel(mesh_shape), [&](RankContext& context) {
      RunHere(context, ValueOrThrow(DeviceMesh::Create(mesh_shape)), &failures);
      return absl::OkStatus();
    });
    if (!status.ok()) failures.push_back(std::string(status.message()));
    return failures;
  }
  // The same on a rank that there is, with the plans that it has: what went before may be wrong for
  // this.
  void RunHere(RankContext& context, const DeviceMesh& mesh,
               std::vector<std::string>* failures) const {
    std::vector<std::vector<Placements>> options;
    int64_t choices = 1;
    for (const Operand& o : operands_) {
      options.push_back(PlacementsOf(o, mesh.ndim(), options_.pending));
      choices *= static_cast<int64_t>(options.back().size());
    }
    const int64_t step = choices <= options_.most ? 1 : choices / options_.most | 1;
    for (int64_t choice = 0; choice < choices; choice += step) {
      std::vector<Placements> chosen;
      int64_t rest = choice;
      for (const auto& of_input : options) {
        chosen.push_back(of_input[rest % static_cast<int64_t>(of_input.size())]);
        rest /= static_cast<int64_t>(of_input.size());
      }
      Note(context.rank(), chosen, One(chosen, mesh, context.rank()), failures);
    }
  }

 private:
  void Note(int64_t rank, const std::vector<Placements>& chosen, const std::string& why,
            std::vector<std::string>* failures) const {
    if (why.empty()) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (failures->size() >= 5) return;
    std::string inputs;
    for (const Placements& p : chosen) absl::StrAppend(&inputs, " ", ToString(p));
    failures->push_back(absl::StrCat("rank ", rank, ", inputs", inputs, ": ", why));
  }

  std::string One(const std::vector<Placements>& chosen, const DeviceMesh& mesh,
                  int64_t rank) const {
    const auto place = [&] {
      std::vector<DTensor> inputs;
      for (size_t i = 0; i < operands_.size(); ++i) {
        inputs.push_back(Place(operands_[i], mesh, chosen[i], rank, 1000 * (i + 1)));
      }
      return inputs;
    };
    std::string all;
    const auto note = [&](const std::string& what, const std::string& why) {
      if (!why.empty()) absl::StrAppend(&all, what, " ", why, "; ");
    };
    try {
      note("value", Differs(fn_(place()).ToVector<double>(), value_, options_.tolerance));
      if (!differentiable_) return all;  // no early way out otherwise: ranks go alike
      const auto grads = Gradients(fn_, place());
      for (size_t i = 0; i < grads.size(); ++i) {
        note(absl::StrCat("gradient ", i), Differs(grads[i], grads_[i], options_.tolerance));
      }
    } catch (const Error& e) {
      if (e.status().code() == absl::StatusCode::kAborted) throw;
      const bool refuses = absl::StrContains(e.what(), "in-place op cannot keep");
      if (!refuses || !options_.may_refuse) note("error", e.what());
    }
    return all;
  }

  OpFn fn_;
  std::vector<Operand> operands_;
  Options options_;
  mutable std::mutex mutex_;  // guards the list of failures
  bool differentiable_ = false;
  std::vector<double> value_;
  std::vector<std::vector<double>> grads_;
};

// Placements of every operand on 2, 3 and 2 x 2 ranks.
inline void CheckSharded(const OpFn& fn, const std::vector<Operand>& operands,
                         double tolerance = 1e-10) {
  const ShardedCheck check(fn, operands, {.tolerance = tolerance});
  for (const Dims& mesh : {Dims{2}, Dims{3}, Dims{2, 2}}) {
    EXPECT_EQ(absl::StrJoin(check.Run(mesh), "\n"), "") << "on a mesh " << ToString(mesh);
  }
}

}  // namespace dtensor::testing
