#include "dtensor/verify.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/claims.h"
#include "dtensor/sharding.h"
#include "dtensor/simulate.h"
#include "dtensor/verify_text.h"
#include "mesh/launch.h"
#include "tensor/status.h"

namespace dtensor {

using internal::Claim;
using internal::PlacedCall;
using internal::Simulation;

namespace {

constexpr int64_t kWorlds[] = {2, 3, 4};
constexpr int64_t kLargestMesh = 6;

// A row on one mesh dim that gives the right answer.
struct TrueRow {
  std::vector<Placement> inputs, outputs;
};

// The op on one sample: its simulations and what was found out about it.
struct SampleFacts {
  const VerifySample* sample;
  std::vector<std::unique_ptr<Simulation>> draws;
  std::map<int64_t, std::vector<TrueRow>> true_rows;  // by world
  std::map<int64_t, std::set<std::string>> refuted;   // patterns, by world
};

bool IsEmpty(const VerifySample& sample) {
  return std::any_of(sample.inputs.begin(), sample.inputs.end(),
                     [](const VerifyInput& in) { return Numel(in.shape) == 0; });
}

std::vector<Placements> OnOneDim(const std::vector<Placement>& row) {
  std::vector<Placements> all;
  for (const Placement& p : row) all.push_back({p});
  return all;
}

// Whether row b gives row a by steps that move nothing: a replica may be cut or taken as a pending
// value, a replicated result be read as anything.
bool Implies(const TrueRow& b, const TrueRow& a) {
  for (size_t i = 0; i < a.inputs.size(); ++i) {
    if (!(b.inputs[i] == a.inputs[i]) && !a.inputs[i].is_replicate()) return false;
  }
  for (size_t o = 0; o < a.outputs.size(); ++o) {
    if (!(b.outputs[o] == a.outputs[o]) && !b.outputs[o].is_replicate()) return false;
  }
  return true;
}

// Tries every row on one mesh dim.
class RowSearch {
 public:
  RowSearch(SampleFacts* facts, const OpDef& op, const DeviceMesh& mesh, int64_t* candidates)
      : facts_(*facts), op_(op), mesh_(mesh), world_(mesh.size()), candidates_(*candidates) {}

  void Run() { Cuts(0, {}); }

 private:
  const Simulation& First() const { return *facts_.draws[0]; }

  // All choices of Replicate or Shard per input, then per output.
  void Cuts(size_t operand, std::vector<Placement> chosen) {
    const size_t inputs = facts_.sample->inputs.size();
    const size_t operands = inputs + First().out_shapes().size();
    if (operand == operands) {
      PlacedCall call;
      for (size_t k = 0; k < operands; ++k) {
        (k < inputs ? call.inputs : call.outputs).push_back({chosen[k]});
      }
      if (op_.in_place() && !(call.inputs[0] == call.outputs[0])) return;  // self stays
      if (First().Callable(mesh_, &call)) Pendings(call);
      return;
    }
    const Shape& shape = operand < inputs ? facts_.sample->inputs[operand].shape
                                          : First().out_shapes()[operand - inputs];
    chosen.push_back(Replicate());
    Cuts(operand + 1, chosen);
    for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
      chosen.back() = Shard(d);
      Cuts(operand + 1, chosen);
    }
  }

  // All sets of replicated inputs that could be pending, of one kind.
  void Pendings(const PlacedCall& cut) {
    std::vector<size_t> free;
    for (size_t i = 0; i < cut.inputs.size(); ++i) {
      const VerifyInput& in = facts_.sample->inputs[i];
      const bool number = in.dtype != DType::kBool && (IsFloating(in.dtype) || in.values.empty());
      if (cut.inputs[i][0].is_replicate() && number) free.push_back(i);
    }
    for (uint64_t set = 0; set < (uint64_t{1} << free.size()); ++set) {
      for (ReduceOp kind : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        if (set == 0 && kind != ReduceOp::kSum) continue;
        PlacedCall call = cut;
        for (size_t k = 0; k < free.size(); ++k) {
          if ((set >> k) & 1) call.inputs[free[k]] = {Partial(kind)};
        }
        const bool replicated =
            std::all_of(call.inputs.begin(), call.inputs.end(),
                        [](const Placements& p) { return p[0].is_replicate(); });
        if (!replicated) Try(call);
      }
    }
  }

  // What each output can be read as, over all drawings of values.
  void Try(const PlacedCall& call) {
    ++candidates_;
    std::vector<std::vector<Placement>> left;
    for (const Placements& p : call.outputs) {
      left.push_back({op_.in_place() ? call.inputs[0][0] : p[0]});
      if (!p[0].is_replicate() || op_.in_place()) continue;
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        left.back().push_back(Partial(op));
      }
    }
    for (const auto& simulation : facts_.draws) {
      const absl::StatusOr<Simulation::Parts> parts = simulation->Run(mesh_, call);
      for (size_t o = 0; o < left.size(); ++o) {
        const auto wrong = [&](const Placement& p) {
          return !parts.ok() ||
                 !simulation->Differs(mesh_, static_cast<int>(o), {p}, *parts).empty();
        };
        for (const Placement& p : left[o]) {
          if (wrong(p)) Refute(call, o, p);
        }
        left[o].erase(std::remove_if(left[o].begin(), left[o].end(), wrong), left[o].end());
        if (left[o].empty()) return;
      }
    }
    TrueRow row;
    for (const Placements& p : call.inputs) row.inputs.push_back(p[0]);
    for (const auto& of_output : left) row.outputs.push_back(of_output[0]);
    facts_.true_rows[world_].push_back(std::move(row));
  }

  // An output refuted as one thing is refuted in every row that reads it so.
  void Refute(const PlacedCall& call, size_t o, const Placement& p) {
    facts_.refuted[world_].insert(
        internal::OutputPattern(op_, call.inputs, static_cast<int>(o), {p}));
  }

  SampleFacts& facts_;
  const OpDef& op_;
  const DeviceMesh& mesh_;
  const int64_t world_;
  int64_t& candidates_;
};

class VerifierImpl final : public Verifier {
 public:
  VerifierImpl(const OpDef& op, std::vector<VerifySample> samples)
      : op_(op), samples_(std::move(samples)) {}

  absl::StatusOr<VerifyReport> Verify(const OpDef& declaration,
                                      const VerifyOptions& options) override {
    VerifyReport report;
    DT_RETURN_IF_ERROR(RunFake({.world = kLargestMesh}, [&](RankContext&) {
      return VerifyInside(declaration, options, &report);
    }));
    return report;
  }

 private:
  // Facts live as long as a call: they hold specs and tensors of the fake rank. Verdicts stay.
  absl::Status Gather(std::vector<SampleFacts>* facts) {
    verdicts_.resize(samples_.size());
    for (const VerifySample& sample : samples_) {
      SampleFacts& f = facts->emplace_back();
      f.sample = &sample;
      for (internal::Draw draw : internal::kDraws) {
        DT_ASSIGN_OR_RETURN(std::unique_ptr<Simulation> s, Simulation::Create(op_, sample, draw));
        f.draws.push_back(std::move(s));
      }
    }
    return absl::OkStatus();
  }

  absl::Status VerifyInside(const OpDef& declaration, const VerifyOptions& options,
                            VerifyReport* report) {
    std::vector<SampleFacts> facts;
    DT_RETURN_IF_ERROR(Gather(&facts));
    std::vector<internal::ClaimSet> claims;
    for (size_t s = 0; s < samples_.size(); ++s) {
      DT_ASSIGN_OR_RETURN(internal::ClaimSet of_sample,
                          internal::ClaimsOf(declaration, samples_[s], options.most));
      for (const Claim& c : of_sample.all) absl::StrAppend(&report->claims, c.text, "\n");
      claims.push_back(std::move(of_sample));
    }
    for (size_t s = 0; s < samples_.size(); ++s) {
      JudgeClaims(claims[s], facts[s], &verdicts_[s], options, report);
      if (options.stop_at_wrong && !report->wrong.empty()) return absl::OkStatus();
    }
    if (true_rows_.empty()) FindTrueRows(&facts);
    report->candidates = candidates_;
    ListMissing(claims, report);
    return absl::OkStatus();
  }

  void JudgeClaims(const internal::ClaimSet& claims, const SampleFacts& facts,
                   std::map<std::string, std::string>* verdicts, const VerifyOptions& options,
                   VerifyReport* report) {
    for (const Claim& c : claims.all) {
      ++report->combinations;
      const auto [it, fresh] = verdicts->try_emplace(c.text, "");
      if (fresh) {
        for (const auto& simulation : facts.draws) {
          it->second = simulation->Check(c.mesh, c.call);
          if (!it->second.empty()) break;
        }
      }
      if (it->second.empty()) continue;
      report->wrong.push_back(internal::Finding(op_, *facts.sample, c.mesh.shape(), c.call.inputs,
                                                c.call.outputs, it->second));
      if (options.stop_at_wrong) return;
    }
  }

  void FindTrueRows(std::vector<SampleFacts>* facts) {
    true_rows_.resize(samples_.size());
    for (size_t s = 0; s < samples_.size(); ++s) {
      if (IsEmpty(samples_[s])) continue;
      for (int64_t world : kWorlds) {
        RowSearch(&(*facts)[s], op_, DeviceMesh({world}), &candidates_).Run();
        true_rows_[s][world] = std::move((*facts)[s].true_rows[world]);
        refuted_.insert((*facts)[s].refuted[world].begin(), (*facts)[s].refuted[world].end());
      }
    }
  }

  bool Refuted(const TrueRow& row) const {
    for (size_t o = 0; o < row.outputs.size(); ++o) {
      if (refuted_.count(internal::OutputPattern(op_, OnOneDim(row.inputs), static_cast<int>(o),
                                                 {row.outputs[o]}))) {
        return true;
      }
    }
    return false;
  }

  // Per pattern the first sample and world where it is true and not offered.
  struct Missing {
    size_t sample;
    int64_t world;
    TrueRow row;
    int64_t seen = 0;
  };

  void ListMissing(const std::vector<internal::ClaimSet>& claims, VerifyReport* report) {
    std::map<std::string, Missing> found;
    for (size_t s = 0; s < samples_.size(); ++s) {
      for (const auto& [world, rows] : true_rows_[s]) {
        for (const TrueRow& row : rows) {
          if (Refuted(row)) continue;
          const std::string pattern =
              internal::Pattern(op_, OnOneDim(row.inputs), OnOneDim(row.outputs));
          const bool offered = Offered(claims[s], world, row);
          auto it = found.find(pattern);
          if (it == found.end() && !offered)
            it = found.emplace(pattern, Missing{s, world, row}).first;
          if (it != found.end()) ++it->second.seen;
        }
      }
    }
    for (const auto& [pattern, m] : found) {
      const bool follows = std::any_of(found.begin(), found.end(), [&](const auto& other) {
        return other.first != pattern && Implies(other.second.row, m.row);
      });
      if (follows || m.seen < 2) continue;
      VerifyFinding finding = internal::Finding(
          op_, samples_[m.sample], {m.world}, OnOneDim(m.row.inputs), OnOneDim(m.row.outputs), "");
      finding.why = absl::StrCat("true in all ", m.seen, " samples and worlds that have it");
      report->missing.push_back(std::move(finding));
    }
  }

  static bool Offered(const internal::ClaimSet& claims, int64_t world, const TrueRow& row) {
    for (const Claim& c : claims.all) {
      if (c.mesh.ndim() != 1 || c.mesh.size() != world) continue;
      TrueRow claimed;
      for (const Placements& p : c.call.inputs) claimed.inputs.push_back(p[0]);
      for (const Placements& p : c.call.outputs) claimed.outputs.push_back(p[0]);
      if (Implies(claimed, row)) return true;
    }
    return false;
  }

  const OpDef& op_;
  const std::vector<VerifySample> samples_;
  std::vector<std::map<std::string, std::string>> verdicts_;        // per sample, by claim
  std::vector<std::map<int64_t, std::vector<TrueRow>>> true_rows_;  // per sample, by world
  std::set<std::string> refuted_;
  int64_t candidates_ = 0;
};

}  // namespace

std::unique_ptr<Verifier> Verifier::Create(const OpDef& op, std::vector<VerifySample> samples) {
  return std::make_unique<VerifierImpl>(op, std::move(samples));
}

std::string VerifyReport::ToString(const std::string& op) const {
  std::string text = absl::StrCat(op, ": ", combinations, " strategies, ", wrong.size(), " wrong; ",
                                  candidates, " rows tried, ", missing.size(), " missing");
  for (const VerifyFinding& f : wrong) {
    absl::StrAppend(&text, "\n  WRONG ", f.row, ": ", f.why, "\n    ", f.reproducer);
  }
  return text;
}

absl::StatusOr<VerifyReport> VerifyOp(const OpDef& op, const std::vector<VerifySample>& samples,
                                      const VerifyOptions& options) {
  return Verifier::Create(op, samples)->Verify(op, options);
}

absl::Status VerifyStrategy(const OpDef& op, const VerifySample& sample, const Dims& mesh_shape,
                            const std::vector<Placements>& inputs,
                            const std::vector<Placements>& outputs) {
  return RunFake({.world = Numel(mesh_shape)}, [&](RankContext&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(mesh_shape));
    const std::optional<Claim> claim = internal::ClaimFor(op, sample, mesh, inputs);
    PlacedCall call{inputs, outputs, {}};
    for (internal::Draw draw : internal::kDraws) {
      DT_ASSIGN_OR_RETURN(const std::unique_ptr<Simulation> simulation,
                          Simulation::Create(op, sample, draw));
      if (claim && claim->call.outputs == outputs) {
        call.ranges = claim->call.ranges;
      } else {
        simulation->Callable(mesh, &call);
      }
      const std::string why = simulation->Check(mesh, call);
      if (!why.empty()) return absl::FailedPreconditionError(why);
    }
    return absl::OkStatus();
  });
}

}  // namespace dtensor
