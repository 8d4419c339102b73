// Test support: an op under every placement of its inputs on 1-d meshes gives what one rank gives,
// values and gradients.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::testing {

// Replicate, every Shard, and Partial for floating operands.
inline std::vector<Placement> PlacementsOf(const Operand& operand) {
  std::vector<Placement> all = {Replicate()};
  for (size_t d = 0; d < operand.shape.size(); ++d) all.push_back(Shard(static_cast<int>(d)));
  if (IsFloating(operand.dtype)) all.push_back(Partial());
  return all;
}

// The operand on `mesh`; a Partial's terms differ on every rank.
inline DTensor Place(const Operand& operand, const DeviceMesh& mesh, const Placement& placement,
                     int64_t rank, uint64_t seed) {
  const Placements placements = {placement};
  DTensor t;
  if (placement.is_partial()) {
    std::vector<double> mine = operand.values;
    const int64_t n = mesh.size();
    if (rank < n - 1) {
      mine = Noise(static_cast<int64_t>(mine.size()), seed + static_cast<uint64_t>(rank));
    } else {
      for (int64_t r = 0; r < n - 1; ++r) {
        const auto other =
            Noise(static_cast<int64_t>(mine.size()), seed + static_cast<uint64_t>(r));
        for (size_t i = 0; i < mine.size(); ++i) mine[i] -= other[i];
      }
    }
    const DTensor local = FromVector(mine, operand.shape, {operand.dtype, DeviceMesh::Self(), {}});
    FromLocalOptions options;
    options.shape = operand.shape;
    t = FromLocal(local, mesh, placements, options);
  } else {
    t = FromVector(operand.values, operand.shape, {operand.dtype, mesh, placements});
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
  ShardedCheck(OpFn fn, std::vector<Operand> operands, double tolerance)
      : fn_(std::move(fn)), operands_(std::move(operands)), tolerance_(tolerance) {
    const std::vector<DTensor> inputs = MakeAll(operands_);
    const DTensor y = fn_(inputs);
    differentiable_ = y.requires_grad();
    value_ = y.ToVector<double>();
    if (differentiable_) grads_ = Gradients(fn_, MakeAll(operands_));
  }

  // Failures of every choice of placements on `ranks` ranks, at most five.
  std::vector<std::string> Run(int64_t ranks) const {
    std::vector<std::string> failures;
    const absl::Status status = RunSpmd(ranks, [&](RankContext& context) {
      const DeviceMesh mesh({ranks});
      std::vector<Placement> chosen(operands_.size());
      Visit(0, &chosen, mesh, context.rank(), &failures);
      return absl::OkStatus();
    });
    if (!status.ok()) failures.push_back(std::string(status.message()));
    return failures;
  }

 private:
  void Visit(size_t i, std::vector<Placement>* chosen, const DeviceMesh& mesh, int64_t rank,
             std::vector<std::string>* failures) const {
    if (i < operands_.size()) {
      for (const Placement& p : PlacementsOf(operands_[i])) {
        (*chosen)[i] = p;
        Visit(i + 1, chosen, mesh, rank, failures);
      }
      return;
    }
    const std::string why = One(*chosen, mesh, rank);
    if (why.empty()) return;
    const Placements shown(chosen->begin(), chosen->end());
    std::lock_guard<std::mutex> lock(mutex_);
    if (failures->size() >= 5) return;
    failures->push_back(absl::StrCat("rank ", rank, ", inputs ", ToString(shown), ": ", why));
  }

  std::string One(const std::vector<Placement>& chosen, const DeviceMesh& mesh,
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
      note("value", Differs(fn_(place()).ToVector<double>(), value_, tolerance_));
      if (!differentiable_) return all;  // no early way out otherwise: ranks go alike
      const auto grads = Gradients(fn_, place());
      for (size_t i = 0; i < grads.size(); ++i) {
        note(absl::StrCat("gradient ", i), Differs(grads[i], grads_[i], tolerance_));
      }
    } catch (const Error& e) {
      if (e.status().code() == absl::StatusCode::kAborted) throw;
      note("error", e.what());
    }
    return all;
  }

  OpFn fn_;
  std::vector<Operand> operands_;
  double tolerance_;
  mutable std::mutex mutex_;  // guards the list of failures
  bool differentiable_ = false;
  std::vector<double> value_;
  std::vector<std::vector<double>> grads_;
};

// Every placement of every operand on 2 and 3 ranks.
inline void CheckSharded(const OpFn& fn, const std::vector<Operand>& operands,
                         double tolerance = 1e-10) {
  const ShardedCheck check(fn, operands, tolerance);
  for (int64_t ranks : {2, 3}) {
    EXPECT_EQ(absl::StrJoin(check.Run(ranks), "\n"), "") << "on " << ranks << " ranks";
  }
}

}  // namespace dtensor::testing
