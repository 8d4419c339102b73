#include "dtensor/verify/verify.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/claims.h"
#include "dtensor/verify/simulate.h"
#include "dtensor/verify/verify_text.h"

namespace dtensor {

using internal::Claim;
using internal::PlacedCall;
using internal::Simulation;

namespace {

constexpr int64_t kWorlds[] = {2, 3, 4};
constexpr int64_t kLargestMesh = 8;
// How often each drawing is repeated with other values before a row is said to be missing.
constexpr uint64_t kRedrawn = 32;

// Placements that give the right answer.
struct TrueRow {
  std::vector<Placements> inputs, outputs;
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

// Whether row b gives row a by steps that move nothing: a replica may be cut or taken as a pending
// value, a replicated result be read as anything, a sharded one as a sum of padded pieces.
bool Implies(const TrueRow& b, const TrueRow& a) {
  if (b.inputs.size() != a.inputs.size()) return false;  // two samples of a variadic op
  for (size_t m = 0; m < a.outputs[0].size(); ++m) {
    for (size_t i = 0; i < a.inputs.size(); ++i) {
      if (!(b.inputs[i][m] == a.inputs[i][m]) && !a.inputs[i][m].is_replicate()) return false;
    }
    for (size_t o = 0; o < a.outputs.size(); ++o) {
      const Placement &have = b.outputs[o][m], &want = a.outputs[o][m];
      const bool padded =
          have.is_shard() && want.is_partial() && want.reduce_op() == ReduceOp::kSum;
      if (!(have == want) && !have.is_replicate() && !padded) return false;
    }
  }
  return true;
}

// Pending sums of truth values are pending maxima: whether one of them is true.
bool AlwaysMax(const Placement& p, DType dtype) {
  return dtype == DType::kBool && p.is_partial() && p.reduce_op() == ReduceOp::kSum;
}
TrueRow WithMaxima(TrueRow row, const VerifySample& sample, const std::vector<DType>& outputs) {
  const auto rename = [](Placements* all, DType dtype) {
    for (Placement& p : *all) {
      if (AlwaysMax(p, dtype)) p = Partial(ReduceOp::kMax);
    }
  };
  for (size_t i = 0; i < row.inputs.size(); ++i) rename(&row.inputs[i], sample.inputs[i].dtype);
  for (size_t o = 0; o < row.outputs.size(); ++o) rename(&row.outputs[o], outputs[o]);
  return row;
}

// Whether something in the row is a pending maximum or minimum.
bool WaitsForExtreme(const TrueRow& row) {
  const auto waits = [](const Placements& of) {
    return std::any_of(of.begin(), of.end(), [](const Placement& p) {
      return p.is_partial() && p.reduce_op() != ReduceOp::kSum;
    });
  };
  return std::any_of(row.inputs.begin(), row.inputs.end(), waits) ||
         std::any_of(row.outputs.begin(), row.outputs.end(), waits);
}

// The row with plain cuts where it has segments.
TrueRow WithoutSegments(TrueRow row) {
  for (std::vector<Placements>* operands : {&row.inputs, &row.outputs}) {
    for (Placements& of : *operands) {
      for (Placement& p : of) {
        if (p.cuts_dim() && !p.is_shard()) p = Shard(p.dim());
      }
    }
  }
  return row;
}

// The sample with the values of another drawing of that kind; those that it gives stay.
VerifySample Redrawn(const VerifySample& sample, internal::Draw draw, uint64_t again) {
  VerifySample other = sample;
  for (size_t i = 0; i < other.inputs.size(); ++i) {
    other.inputs[i].values = internal::Drawn(other.inputs[i], 7919 * again + i + 1, draw);
  }
  return other;
}

// Tries every row on one mesh dim.
class RowSearch {
 public:
  RowSearch(SampleFacts* facts, const OpDef& op, const DeviceMesh& mesh, int64_t* candidates)
      : facts_(*facts), op_(op), mesh_(mesh), world_(mesh.size()), candidates_(*candidates) {}

  void Run() {
    Cuts(0, {});
    if (op_.elementwise()) FlatCalls();  // another kernel may not be given a flat piece
  }

 private:
  const Simulation& First() const { return *facts_.draws[0]; }

  // All choices of Replicate or Shard per input, then per output.
  void Cuts(size_t operand, std::vector<Placement> chosen) {
    if (!First().MayBeCallable(mesh_, chosen)) return;
    const size_t inputs = facts_.sample->inputs.size();
    const size_t operands = inputs + First().out_shapes().size();
    if (operand == operands) {
      PlacedCall call;
      for (size_t k = 0; k < operands; ++k) {
        (k < inputs ? call.inputs : call.outputs).push_back({chosen[k]});
      }
      if (!SelfStays(call)) return;
      if (!First().Callable(mesh_, call).empty()) Pendings(call);
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

  // A row whose cuts are all in two segments instead.
  void InSegments(const TrueRow& row) {
    PlacedCall call{row.inputs, row.outputs, {}};
    bool segmented = false;
    for (size_t k = 0; k < call.inputs.size() + call.outputs.size(); ++k) {
      const bool input = k < call.inputs.size();
      const size_t o = input ? 0 : k - call.inputs.size();
      Placement& p = input ? call.inputs[k][0] : call.outputs[o][0];
      if (!p.is_shard()) continue;
      const Shape& shape = input ? facts_.sample->inputs[k].shape : First().out_shapes()[o];
      p = SimplestSegmented(p.dim(), internal::HalvesOf(shape[p.dim()], p.dim()).segments(),
                            world_);
      segmented |= !p.is_shard();
    }
    if (segmented && !First().Callable(mesh_, call).empty()) Try(call);
  }

  // What an op writes in place it has where it was.
  bool SelfStays(const PlacedCall& call) const {
    for (size_t o = 0; op_.in_place() && o < call.outputs.size(); ++o) {
      if (!(call.inputs[o] == call.outputs[o])) return false;
    }
    return true;
  }

  // Inputs of one shape in flat pieces, the others whole.
  void FlatCalls() {
    std::set<std::string> tried;
    for (const VerifyInput& of : facts_.sample->inputs) {
      if (of.shape.empty() || !tried.insert(dtensor::ToString(of.shape)).second) continue;
      const int64_t numel = Numel(of.shape);
      const Placement flat = internal::FlatPieces(numel, world_);
      PlacedCall call;
      bool callable = true;  // a piece has one dim: no more is stretched to it than a number
      for (const VerifyInput& in : facts_.sample->inputs) {
        const bool cut = in.shape == of.shape;
        callable &= cut || (in.shape.size() <= 1 && Numel(in.shape) == 1);
        call.inputs.push_back({cut ? flat : Replicate()});
      }
      for (const Shape& shape : First().out_shapes()) {  // nor has it dims to reduce but all
        callable &= Numel(shape) == numel || shape.empty();
        call.outputs.push_back({Numel(shape) == numel ? flat : Replicate()});
      }
      if (!callable) continue;
      if (SelfStays(call)) Try(call);
    }
  }

  // All sets of replicated inputs that could be pending, of one kind.
  void Pendings(const PlacedCall& cut) {
    std::vector<size_t> free;
    for (size_t i = 0; i < cut.inputs.size(); ++i) {
      const VerifyInput& in = facts_.sample->inputs[i];
      const bool drawn = IsFloating(in.dtype) || in.values.empty();
      if (cut.inputs[i][0].is_replicate() && drawn) free.push_back(i);
    }
    for (uint64_t set = 0; set < (uint64_t{1} << free.size()); ++set) {
      for (ReduceOp kind : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        if (set == 0 && kind != ReduceOp::kSum) continue;
        PlacedCall call = cut;
        bool is_max = false;  // by another name
        for (size_t k = 0; k < free.size(); ++k) {
          if (((set >> k) & 1) == 0) continue;
          call.inputs[free[k]] = {Partial(kind)};
          is_max |= AlwaysMax(Partial(kind), facts_.sample->inputs[free[k]].dtype);
        }
        if (is_max) continue;
        const bool replicated =
            std::all_of(call.inputs.begin(), call.inputs.end(),
                        [](const Placements& p) { return p[0].is_replicate(); });
        if (!replicated) Try(call);
      }
    }
  }

  // What each output can be read as, with the ranges of some factor string, over all drawings of
  // values.
  void Try(const PlacedCall& call) {
    ++candidates_;
    std::vector<std::vector<Placement>> all;
    for (const Placements& p : call.outputs) {
      const DType dtype = First().out_dtypes()[all.size()];
      all.push_back({op_.in_place() ? call.inputs[all.size()][0] : p[0]});
      if (!p[0].is_replicate() || op_.in_place()) continue;
      for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kMin}) {
        if (!AlwaysMax(Partial(op), dtype)) all.back().push_back(Partial(op));
      }
    }
    std::vector<std::vector<std::vector<Placement>>> readings;  // by factor string
    for (const PlacedCall& placed : First().Callable(mesh_, call)) {
      std::vector<std::vector<Placement>>& left = readings.emplace_back(all);
      for (const auto& simulation : facts_.draws) Read(*simulation, placed, &left);
    }
    for (size_t o = 0; o < all.size(); ++o) {
      for (const Placement& p : all[o]) {
        const bool right = std::any_of(readings.begin(), readings.end(), [&](const auto& left) {
          return std::count(left[o].begin(), left[o].end(), p) > 0;
        });
        if (!right) Refute(call, o, p);
      }
    }
    for (const auto& left : readings) {
      TrueRow row{call.inputs, {}};
      for (const auto& of : left) {
        if (!of.empty()) row.outputs.push_back({of[0]});
      }
      if (row.outputs.size() < all.size()) continue;
      facts_.true_rows[world_].push_back(row);
      const auto segmented = [](const Placements& p) {
        return p[0].cuts_dim() && !p[0].is_shard();
      };
      if (std::none_of(row.inputs.begin(), row.inputs.end(), segmented)) InSegments(row);
      return;
    }
  }

  // Keeps the readings of each output that are right.
  void Read(const Simulation& simulation, const PlacedCall& call,
            std::vector<std::vector<Placement>>* left) const {
    if (std::any_of(left->begin(), left->end(), [](const auto& of) { return of.empty(); })) return;
    const absl::StatusOr<Simulation::Parts> parts = simulation.Run(mesh_, call);
    for (size_t o = 0; o < left->size(); ++o) {
      auto& of = (*left)[o];
      of.erase(std::remove_if(
                   of.begin(), of.end(),
                   [&](const Placement& p) {
                     return !parts.ok() ||
                            !simulation.Differs(mesh_, static_cast<int>(o), {p}, *parts).empty();
                   }),
               of.end());
    }
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
    pair_verdicts_.resize(samples_.size());
    for (const VerifySample& sample : samples_) {
      DT_RETURN_IF_ERROR(internal::CheckSample(op_, sample));
      SampleFacts& f = facts->emplace_back();
      f.sample = &sample;
      for (internal::Draw draw : internal::DrawsOf(sample)) {
        DT_ASSIGN_OR_RETURN(std::unique_ptr<Simulation> s, Simulation::Create(op_, sample, draw));
        f.draws.push_back(std::move(s));
      }
      if (groups_.size() < samples_.size()) {
        out_dtypes_.push_back(f.draws[0]->out_dtypes());
        DT_ASSIGN_OR_RETURN(std::string group, GroupOf(sample));
        groups_.push_back(std::move(group));
      }
    }
    return absl::OkStatus();
  }

  // "0 101": the number it was given and what each condition of the declaration says of it. What is
  // ordered among numbers is not among integers, which wrap around; a negative factor turns an
  // order round.
  absl::StatusOr<std::string> GroupOf(const VerifySample& sample) const {
    DT_ASSIGN_OR_RETURN(const std::vector<SpecRef> specs,
                        internal::SpecsOf(DeviceMesh::Self(), sample,
                                          std::vector<Placements>(sample.inputs.size())));
    std::vector<const Spec*> pointers;
    for (const SpecRef& spec : specs) pointers.push_back(spec.get());
    const Attrs attrs = internal::AttrsOf(sample);
    const OpCall call(op_, pointers, attrs);
    std::string group = absl::StrCat(sample.group, " ");
    const auto note = [&group](bool holds) { group += holds ? '1' : '0'; };
    for (const OpDef::LinearForm& form : op_.linear_forms()) note(!form.when || form.when(call));
    for (const OpDef::MonotoneForm& form : op_.monotone_forms()) {
      for (const ReduceOp kind : {ReduceOp::kMax, ReduceOp::kMin}) {
        note(!form.when || form.when(call, kind));
      }
    }
    return group;
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
    ListMissing(facts, claims, report);
    return absl::OkStatus();
  }

  void JudgeClaims(const internal::ClaimSet& claims, const SampleFacts& facts,
                   std::map<std::string, std::string>* verdicts, const VerifyOptions& options,
                   VerifyReport* report) {
    for (const internal::ClaimSet::Impossible& c : claims.impossible) {
      report->wrong.push_back(
          internal::Finding(op_, *facts.sample, c.mesh.shape(), c.inputs, {}, c.why));
      if (options.stop_at_wrong) return;
    }
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
        refuted_[groups_[s]].insert((*facts)[s].refuted[world].begin(),
                                    (*facts)[s].refuted[world].end());
      }
    }
  }

  // Segments are tried only where the plain row is true: of truth values there are more pending
  // maxima and minima, which other samples refute of plain cuts and do not try of segments.
  bool Refuted(const TrueRow& row, const std::string& group) {
    if (RefutedAsItIs(row, group)) return true;
    return WaitsForExtreme(row) && RefutedAsItIs(WithoutSegments(row), group);
  }
  bool RefutedAsItIs(const TrueRow& row, const std::string& group) {
    for (size_t o = 0; o < row.outputs.size(); ++o) {
      if (refuted_[group].count(
              internal::OutputPattern(op_, row.inputs, static_cast<int>(o), row.outputs[o]))) {
        return true;
      }
    }
    return false;
  }

  // What is known about one pattern in one group: where it is true, and where first not offered.
  struct Pattern {
    std::set<std::string> seen;  // sizes and meshes: the same sizes in another dtype tell no more
    bool refuted = false;
    size_t sample = 0;
    Dims mesh;  // empty: offered everywhere
    TrueRow row;
  };
  using Patterns = std::map<std::pair<std::string, std::string>, Pattern>;
  // What is claimed of a sample, by mesh, with pending sums of truth values as maxima.
  using Offers = std::map<Dims, std::vector<TrueRow>>;

  void See(size_t s, IntSpan mesh, const TrueRow& row, const Offers& offers, Patterns* patterns) {
    Pattern& p = (*patterns)[{groups_[s], internal::Pattern(op_, row.inputs, row.outputs)}];
    std::string where = absl::StrJoin(mesh, "x");
    for (const VerifyInput& in : samples_[s].inputs) {
      absl::StrAppend(&where, " ", dtensor::ToString(in.shape));
    }
    p.seen.insert(std::move(where));
    if (!p.mesh.empty() || Offered(offers, s, mesh, row)) return;
    p.sample = s;
    p.mesh.assign(mesh.begin(), mesh.end());
    p.row = row;
  }

  void ListMissing(const std::vector<SampleFacts>& facts,
                   const std::vector<internal::ClaimSet>& claims, VerifyReport* report) {
    Patterns patterns;
    for (size_t s = 0; s < samples_.size(); ++s) {
      const Offers offers = OffersOf(claims[s], s);
      for (const auto& [world, rows] : true_rows_[s]) {
        for (const TrueRow& row : rows) {
          if (!Refuted(row, groups_[s])) See(s, {world}, row, offers, &patterns);
        }
      }
      if (!IsEmpty(samples_[s])) SeePairs(facts[s], s, claims[s], offers, &patterns);
    }
    for (auto& [key, p] : patterns) {
      if (IsMissing(p)) p.refuted = !StillTrue(key, p);
    }
    for (const auto& [key, p] : patterns) {
      if (!IsMissing(p)) continue;
      bool follows = false;
      VerifyFinding finding =
          internal::Finding(op_, samples_[p.sample], p.mesh, p.row.inputs, p.row.outputs, "");
      finding.why = absl::StrCat("true in all ", p.seen.size(), " samples and meshes that have it");
      for (const auto& [other_key, other] : patterns) {
        if (&other == &p || !IsMissing(other) || other_key.first != key.first ||
            other.mesh.size() != p.mesh.size()) {
          continue;
        }
        follows |= Implies(other.row, p.row);
        if (Implies(p.row, other.row)) finding.follows.push_back(other_key.second);
      }
      if (!follows) report->missing.push_back(std::move(finding));
    }
  }
  // What a few drawings did not refute may be true of them by chance: in the values drawn for `any`
  // every part may have what decides the whole.
  bool StillTrue(const std::pair<std::string, std::string>& key, const Pattern& p) {
    const auto [it, fresh] = still_true_.try_emplace(key, true);
    if (!fresh) return it->second;
    const DeviceMesh mesh = ValueOrThrow(DeviceMesh::Create(p.mesh));
    for (uint64_t again = 1; again <= kRedrawn && it->second; ++again) {
      for (internal::Draw draw : internal::DrawsOf(samples_[p.sample])) {
        const VerifySample sample = Redrawn(samples_[p.sample], draw, again);
        const auto simulation = Simulation::Create(op_, sample, draw);
        if (!simulation.ok()) continue;  // values that the op refuses
        const std::vector<PlacedCall> calls =
            (*simulation)->Callable(mesh, {p.row.inputs, p.row.outputs, {}});
        it->second &= std::any_of(calls.begin(), calls.end(), [&](const PlacedCall& call) {
          return (*simulation)->Check(mesh, call).empty();
        });
      }
    }
    return it->second;
  }
  static bool IsMissing(const Pattern& p) {
    return !p.mesh.empty() && !p.refuted && p.seen.size() > 1;
  }

  // Pairs that are not offered although both halves are.
  void SeePairs(const SampleFacts& facts, size_t s, const internal::ClaimSet& claims,
                const Offers& offers, Patterns* patterns) {
    for (const Claim& pair : claims.refused) {
      const auto [it, fresh] = pair_verdicts_[s].try_emplace(pair.text, false);
      if (fresh) it->second = PairHolds(facts, pair);
      const TrueRow row{pair.call.inputs, pair.call.outputs};
      if (it->second) {
        See(s, pair.mesh.shape(), row, offers, patterns);
      } else {
        (*patterns)[{groups_[s], internal::Pattern(op_, row.inputs, row.outputs)}].refuted = true;
      }
    }
  }
  static bool PairHolds(const SampleFacts& facts, const Claim& pair) {
    for (const PlacedCall& call : facts.draws[0]->Callable(pair.mesh, pair.call)) {
      if (std::all_of(facts.draws.begin(), facts.draws.end(), [&](const auto& simulation) {
            return simulation->Check(pair.mesh, call).empty();
          })) {
        return true;
      }
    }
    return false;
  }

  Offers OffersOf(const internal::ClaimSet& claims, size_t s) const {
    Offers offers;
    for (const Claim& c : claims.all) {
      const IntSpan mesh = c.mesh.shape();
      offers[Dims(mesh.begin(), mesh.end())].push_back(
          WithMaxima({c.call.inputs, c.call.outputs}, samples_[s], out_dtypes_[s]));
    }
    return offers;
  }
  bool Offered(const Offers& offers, size_t s, IntSpan mesh, const TrueRow& row) const {
    const auto at = offers.find(Dims(mesh.begin(), mesh.end()));
    if (at == offers.end()) return false;
    const TrueRow wanted = WithMaxima(row, samples_[s], out_dtypes_[s]);
    return std::any_of(at->second.begin(), at->second.end(),
                       [&](const TrueRow& offer) { return Implies(offer, wanted); });
  }

  const OpDef& op_;
  const std::vector<VerifySample> samples_;
  std::vector<std::map<std::string, std::string>> verdicts_;        // per sample, by claim
  std::vector<std::map<int64_t, std::vector<TrueRow>>> true_rows_;  // per sample, by world
  std::vector<std::map<std::string, bool>> pair_verdicts_;          // per sample
  std::vector<std::string> groups_;                                 // per sample
  std::vector<std::vector<DType>> out_dtypes_;                      // per sample
  std::map<std::string, std::set<std::string>> refuted_;            // by group
  std::map<std::pair<std::string, std::string>, bool> still_true_;  // by group and pattern
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
    absl::StrAppend(&text, "\n  WRONG ", f.row, ": ", f.why);
    if (!f.reproducer.empty()) absl::StrAppend(&text, "\n    ", f.reproducer);
  }
  return text;
}

absl::StatusOr<VerifyReport> VerifyOp(const OpDef& op, const std::vector<VerifySample>& samples,
                                      const VerifyOptions& options) {
  if (samples.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("[verify] ", op.name(), " has no samples: there is nothing to judge it by"));
  }
  return Verifier::Create(op, samples)->Verify(op, options);
}

namespace {

// Whether each of `shapes` has a placement per dim of the mesh that it can have.
absl::Status CheckPlaced(absl::string_view what, const DeviceMesh& mesh,
                         const std::vector<Shape>& shapes,
                         const std::vector<Placements>& placements) {
  if (placements.size() != shapes.size()) {
    return absl::InvalidArgumentError(absl::StrCat("placements of ", placements.size(), " ", what,
                                                   ", the op has ", shapes.size()));
  }
  for (size_t k = 0; k < shapes.size(); ++k) {
    DT_RETURN_IF_ERROR(RankContext::Current()
                           .specs()
                           .Intern(mesh, placements[k], shapes[k], DType::kF64)
                           .status());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status VerifyStrategy(const OpDef& op, const VerifySample& sample, const Dims& mesh_shape,
                            const std::vector<Placements>& inputs,
                            const std::vector<Placements>& outputs) {
  DT_RETURN_IF_ERROR(internal::CheckSample(op, sample));
  DT_RETURN_IF_ERROR(DeviceMesh::Create(mesh_shape).status());
  return RunFake({.world = Numel(mesh_shape)}, [&](RankContext&) -> absl::Status {
    DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(mesh_shape));
    std::vector<Shape> shapes;
    for (const VerifyInput& in : sample.inputs) shapes.push_back(in.shape);
    DT_RETURN_IF_ERROR(CheckPlaced("inputs", mesh, shapes, inputs));
    const std::optional<Claim> claim = internal::ClaimFor(op, sample, mesh, inputs);
    std::vector<std::unique_ptr<Simulation>> draws;
    for (internal::Draw draw : internal::DrawsOf(sample)) {
      DT_ASSIGN_OR_RETURN(std::unique_ptr<Simulation> simulation,
                          Simulation::Create(op, sample, draw));
      draws.push_back(std::move(simulation));
    }
    DT_RETURN_IF_ERROR(CheckPlaced("outputs", mesh, draws[0]->out_shapes(), outputs));
    std::vector<PlacedCall> calls;  // as the op offers it, else by any factor string that fits
    if (claim && claim->call.outputs == outputs) {
      calls.push_back(claim->call);
    } else {
      calls = draws[0]->Callable(mesh, {inputs, outputs, {}});
    }
    std::string why = "no factor string of the op gives parts of these shapes";
    for (const PlacedCall& call : calls) {
      why.clear();
      for (const auto& simulation : draws) {
        if (why.empty()) why = simulation->Check(mesh, call);
      }
      if (why.empty()) break;
    }
    if (!why.empty()) return absl::FailedPreconditionError(why);
    return absl::OkStatus();
  });
}

}  // namespace dtensor
