#include "dtensor/verify/claims.h"

#include <algorithm>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/given_rows.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/verify_text.h"

namespace dtensor::internal {
namespace {

using InputList = std::vector<Placements>;

std::vector<const Spec*> Pointers(const std::vector<SpecRef>& specs) {
  std::vector<const Spec*> pointers;
  for (const SpecRef& s : specs) pointers.push_back(s.get());
  return pointers;
}

std::string TextOf(const OpDef& op, const Claim& claim) {
  std::string text =
      absl::StrCat(claim.mesh.ToString(), ": ", RowText(op, claim.call.inputs, claim.call.outputs));
  for (const auto& of_rank : claim.call.ranges) {
    for (const FactorRange& r : of_rank) {
      absl::StrAppend(&text, " ", r.start, "+", r.local, "/", r.global);
    }
  }
  return text;
}

// Lists in order of arrival, each once.
class Lists {
 public:
  void Add(InputList inputs) {
    std::string key = absl::StrJoin(
        inputs, ";", [](std::string* s, const Placements& p) { absl::StrAppend(s, ToString(p)); });
    if (seen_.insert(std::move(key)).second) all_.push_back(std::move(inputs));
  }
  const std::vector<InputList>& all() const { return all_; }

 private:
  std::set<std::string> seen_;
  std::vector<InputList> all_;
};

// Placements of inputs on one mesh dim that are worth asking for.
class OneDim {
 public:
  OneDim(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh, int64_t most)
      : op_(op), sample_(sample), mesh_(mesh), most_(most), n_(sample.inputs.size()) {}

  std::vector<InputList> All() {
    lists_.Add(InputList(n_, {Replicate()}));
    AddRows(InputList(n_, {Replicate()}));
    AddRows(InputList(n_, {Partial()}));
    for (size_t i = 0; i < n_; ++i) {  // a dim of size 1 is cut only where it comes so
      const Shape& shape = sample_.inputs[i].shape;
      for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
        if (shape[d] != 1) continue;
        InputList one(n_, {Replicate()});
        one[i] = {Shard(d)};
        AddRows(one);
      }
    }
    for (ReduceOp kind : {ReduceOp::kMax, ReduceOp::kMin}) {
      AddRows(InputList(n_, {Partial(kind)}));
      lists_.Add(InputList(n_, {Partial(kind)}));
      for (size_t i = 0; i < n_; ++i) {
        InputList one(n_, {Replicate()});
        one[i] = {Partial(kind)};
        lists_.Add(one);
        AddRows(one);
      }
    }
    AddFlat();
    AddProduct();
    return lists_.all();
  }

 private:
  // Every row derived for inputs placed so, and its variants in units of 2 and as segments, of
  // units of their own.
  void AddRows(const InputList& inputs) {
    const absl::StatusOr<std::vector<SpecRef>> specs = SpecsOf(mesh_, sample_, inputs);
    if (!specs.ok()) return;  // e.g. bools cannot be pending
    const std::vector<const Spec*> pointers = Pointers(*specs);
    const Attrs attrs = AttrsOf(sample_);
    const OpCall call(op_, pointers, attrs);
    AddGiven(call);
    const absl::StatusOr<std::vector<FactorMap>> maps = FactorMapsOf(call);
    if (!maps.ok()) return;
    for (const FactorMap& map : *maps) {
      for (const ShardingRow& row : DeriveRows(call, map, 0)) {
        InputList plain, units, segments, mixed;
        for (size_t i = 0; i < n_; ++i) {
          const Placement& p = row.inputs[i];
          plain.push_back({p});
          units.push_back({p.is_shard() ? Shard(p.dim(), 2 * p.unit()) : p});
          segments.push_back({p.is_shard() ? Halves(i, p.dim(), 1) : p});
          mixed.push_back({p.is_shard() ? Halves(i, p.dim(), 2) : p});
        }
        lists_.Add(plain);
        lists_.Add(units);
        lists_.Add(segments);
        lists_.Add(mixed);
      }
    }
  }

  // Every row that is given by hand for a call, as it stands.
  void AddGiven(const OpCall& call) {
    if (!op_.strategies()) return;
    const absl::StatusOr<std::vector<StrategyRow>> rows = op_.strategies()(call);
    if (!rows.ok()) return;
    for (const StrategyRow& row : *rows) {
      InputList given;
      for (size_t i = 0; i < n_ && row.inputs.size() == n_; ++i) {
        const Placement& p = row.inputs[i];
        const bool from_end = p.cuts_dim() && p.dim() < 0;
        given.push_back({from_end ? p.WithDim(p.dim() + static_cast<int>(
                                                            call.shape(static_cast<int>(i)).size()))
                                  : p});
      }
      if (given.size() == n_ && SpecsOf(mesh_, sample_, given).ok()) lists_.Add(given);
    }
  }

  Placement Halves(size_t i, int dim, int64_t unit) const {
    return HalvesOf(sample_.inputs[i].shape[dim], dim, unit);
  }

  // All inputs of one shape in flat pieces, the others whole; of each shape.
  void AddFlat() {
    for (const VerifyInput& of : sample_.inputs) {
      InputList flat, alone;
      for (const VerifyInput& in : sample_.inputs) {
        const bool cut = in.shape == of.shape;
        flat.push_back({cut ? FlatPieces(Numel(in.shape), mesh_.size()) : Replicate()});
        alone.push_back({&in == &of ? flat.back()[0] : Replicate()});
      }
      lists_.Add(flat);
      lists_.Add(alone);
    }
  }

  // All of {R, S(d), P(sum)} per input.
  void AddProduct() {
    int64_t total = 1;
    std::vector<std::vector<Placement>> options;
    for (const VerifyInput& in : sample_.inputs) {
      std::vector<Placement>& of_input = options.emplace_back();
      of_input.push_back(Replicate());
      for (int d = 0; d < static_cast<int>(in.shape.size()); ++d) of_input.push_back(Shard(d));
      if (in.dtype != DType::kBool) of_input.push_back(Partial());
      total *= static_cast<int64_t>(of_input.size());
    }
    const int64_t step = total <= most_ ? 1 : (total / most_) | 1;
    for (int64_t c = 0; c < total; c += step) {
      int64_t rest = c;
      InputList inputs;
      for (const auto& of_input : options) {
        inputs.push_back({of_input[rest % static_cast<int64_t>(of_input.size())]});
        rest /= static_cast<int64_t>(of_input.size());
      }
      lists_.Add(std::move(inputs));
    }
  }

  const OpDef& op_;
  const VerifySample& sample_;
  const DeviceMesh& mesh_;
  const int64_t most_;
  const size_t n_;
  Lists lists_;
};

// What is claimed on one mesh, each claim once however it is written.
class Collector {
 public:
  Collector(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh)
      : op_(op), sample_(sample), mesh_(mesh) {}

  bool Add(const InputList& inputs, const Placements* like = nullptr) {
    std::string impossible;
    std::optional<Claim> claim = ClaimFor(op_, sample_, mesh_, inputs, like, &impossible);
    if (!impossible.empty()) impossible_.push_back({mesh_, inputs, std::move(impossible)});
    if (!claim) return false;
    if (!seen_.insert(claim->text).second) return true;
    const bool replicated =
        std::all_of(claim->call.outputs[0].begin(), claim->call.outputs[0].end(),
                    [](const Placement& p) { return p.is_replicate(); });
    claims_.push_back(*std::move(claim));
    if (replicated && like == nullptr) AddCuts(inputs, {});
    return true;
  }
  std::vector<Claim>& claims() { return claims_; }
  const std::vector<ClaimSet::Impossible>& impossible() const { return impossible_; }

 private:
  // Output 0 replicated: a caller may ask for a cut instead (autograd does).
  void AddCuts(const InputList& inputs, const Placements& like) {
    if (static_cast<int>(like.size()) == mesh_.ndim()) {
      Add(inputs, &like);
      return;
    }
    const Shape shape = claims_[0].out_shape;  // claims_ grows
    for (int d = -1; d < static_cast<int>(shape.size()); ++d) {
      Placements longer = like;
      longer.push_back(d < 0 ? Replicate() : Shard(d));
      AddCuts(inputs, longer);
      if (d < 0 || mesh_.ndim() > 1) continue;
      longer.back() = HalvesOf(shape[d], d, 1);
      AddCuts(inputs, longer);
    }
  }

  const OpDef& op_;
  const VerifySample& sample_;
  const DeviceMesh& mesh_;
  std::set<std::string> seen_;
  std::vector<Claim> claims_;
  std::vector<ClaimSet::Impossible> impossible_;
};

// A claim, and another one on one mesh dim more.
Claim Pair(const DeviceMesh& mesh, const Claim& a, const Claim& b) {
  Claim both{mesh, a.call, a.out_shape, ""};
  both.call.ranges.clear();
  for (size_t i = 0; i < both.call.inputs.size(); ++i) {
    both.call.inputs[i].push_back(b.call.inputs[i][0]);
  }
  for (size_t o = 0; o < both.call.outputs.size(); ++o) {
    both.call.outputs[o].push_back(b.call.outputs[o][0]);
  }
  return both;
}

void AddPairs(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh,
              const std::vector<Claim>& outer, const std::vector<Claim>& inner, int64_t most,
              ClaimSet* claims) {
  Collector collector(op, sample, mesh);
  std::set<std::string> tried;
  const auto add = [&](const Claim& a, const Claim& b) {
    Claim pair = Pair(mesh, a, b);
    pair.text = TextOf(op, pair);
    if (!tried.insert(pair.text).second) return;
    if (!collector.Add(pair.call.inputs)) claims->refused.push_back(std::move(pair));
  };
  const auto total = static_cast<int64_t>(outer.size() * inner.size());
  const int64_t step = total <= most ? 1 : (total / most) | 1;
  for (const Claim& a : outer) add(a, a);  // nested cuts of one dim among them
  for (int64_t c = 0; c < total; c += step) add(outer[c / inner.size()], inner[c % inner.size()]);
  for (Claim& c : collector.claims()) claims->all.push_back(std::move(c));
}

// Pairs refused on one mesh are asked for on the other one, too: thinned as they are, each would be
// seen once, which proves little.
void RepeatRefused(const OpDef& op, const VerifySample& sample, const DeviceMesh meshes[2],
                   ClaimSet* claims) {
  std::set<std::string> known;
  for (const Claim& pair : claims->refused) known.insert(pair.text);
  const auto sized = [](const Placements& placements) {
    return std::any_of(placements.begin(), placements.end(),
                       [](const Placement& p) { return p.is_sized(); });
  };
  for (size_t k = 0, n = claims->refused.size(); k < n; ++k) {
    Claim pair = claims->refused[k];
    pair.mesh = meshes[pair.mesh == meshes[0] ? 1 : 0];
    pair.text = TextOf(op, pair);
    const std::vector<Placements>& inputs = pair.call.inputs;
    if (std::any_of(inputs.begin(), inputs.end(), sized) || !known.insert(pair.text).second ||
        ClaimFor(op, sample, pair.mesh, inputs)) {
      continue;
    }
    claims->refused.push_back(std::move(pair));
  }
}

// Claims on 2 x 2 x 2 ranks, `most` of those that could be.
void AddTriples(const OpDef& op, const VerifySample& sample, const std::vector<Claim>& each,
                int64_t most, ClaimSet* claims) {
  const DeviceMesh mesh({2, 2, 2});
  Collector collector(op, sample, mesh);
  const auto n = static_cast<int64_t>(each.size()), total = n * n * n;
  const int64_t step = total <= most ? 1 : (total / std::max<int64_t>(most, 1)) | 1;
  for (int64_t k = 0; k < n; k += n / std::max<int64_t>(most, 1) + 1) {  // nested cuts of one dim
    const Claim& a = each[k];
    collector.Add(Pair(mesh, Pair(mesh, a, a), a).call.inputs);
  }
  for (int64_t c = 0; c < total; c += step) {
    const Claim outer = Pair(mesh, each[c / (n * n)], each[c / n % n]);
    collector.Add(Pair(mesh, outer, each[c % n]).call.inputs);
  }
  for (Claim& c : collector.claims()) claims->all.push_back(std::move(c));
}

}  // namespace

Placement HalvesOf(int64_t size, int dim, int64_t unit) {
  return SegmentedShard(dim, {{size / 2, 1}, {size - size / 2, unit}});
}

Placement FlatPieces(int64_t numel, int64_t n) {
  std::vector<int64_t> lengths(static_cast<size_t>(n), 0);
  lengths[0] = numel / 2;
  lengths[n - 1] += numel - numel / 2;
  return FlatShard(std::move(lengths));
}

std::optional<Claim> ClaimFor(const OpDef& op, const VerifySample& sample, const DeviceMesh& mesh,
                              const std::vector<Placements>& inputs, const Placements* like,
                              std::string* impossible) {
  const absl::StatusOr<std::vector<SpecRef>> specs = SpecsOf(mesh, sample, inputs);
  if (!specs.ok()) return std::nullopt;
  const std::vector<const Spec*> pointers = Pointers(*specs);
  const Attrs attrs = AttrsOf(sample);
  const OpCall call(op, pointers, attrs);
  absl::StatusOr<OpPlan> plan = PlanOp(call, nullptr);
  if (impossible != nullptr && IsFalseRule(plan.status())) {
    *impossible = std::string(plan.status().message());
  }
  if (!plan.ok()) return std::nullopt;
  const auto spec_of = [&](size_t o, const Placements& placements) {
    return RankContext::Current().specs().Intern(mesh, placements, plan->out_shapes[o],
                                                 plan->out_dtypes[o]);
  };
  if (like != nullptr) {
    const absl::StatusOr<SpecRef> wanted = spec_of(0, *like);
    if (!wanted.ok()) return std::nullopt;
    plan = PlanOp(call, wanted->get());
  }
  if (!plan.ok() || plan->strategy.cost_bytes > 0) return std::nullopt;
  // A step from R to S or P costs no bytes, but makes it another placement's strategy.
  const absl::StatusOr<std::vector<SpecRef>> taken = SpecsOf(mesh, sample, plan->strategy.inputs);
  if (!taken.ok() || !(*taken == *specs)) return std::nullopt;
  Claim claim{mesh, {}, plan->out_shapes[0], ""};
  for (const SpecRef& spec : *specs) {  // placements as specs write them
    claim.call.inputs.emplace_back(spec->placements().begin(), spec->placements().end());
  }
  for (size_t o = 0; o < plan->strategy.outputs.size(); ++o) {
    const absl::StatusOr<SpecRef> out = spec_of(o, plan->strategy.outputs[o]);
    if (!out.ok()) return std::nullopt;
    claim.call.outputs.emplace_back((*out)->placements().begin(), (*out)->placements().end());
  }
  if (plan->strategy.factor_map >= 0) {
    const std::vector<FactorMap> maps = *FactorMapsOf(call);
    for (int64_t r = 0; r < mesh.size(); ++r) {
      Dims coordinate;
      mesh.Coordinate(r, &coordinate);
      claim.call.ranges.push_back(FactorRanges(call, maps[plan->strategy.factor_map],
                                               plan->strategy.inputs, plan->strategy.outputs,
                                               coordinate));
    }
  }
  claim.text = TextOf(op, claim);
  return claim;
}

std::vector<std::vector<Placements>> AskedOnOneDim(const OpDef& op, const VerifySample& sample,
                                                   const DeviceMesh& mesh, int64_t most) {
  return OneDim(op, sample, mesh, most).All();
}

absl::StatusOr<ClaimSet> ClaimsOf(const OpDef& op, const VerifySample& sample, int64_t most) {
  ClaimSet claims;
  std::map<int64_t, std::vector<Claim>> on_one;  // by world
  for (int64_t world : {2, 3, 4}) {
    const DeviceMesh mesh({world});
    DT_ASSIGN_OR_RETURN(const std::vector<SpecRef> specs,
                        SpecsOf(mesh, sample, InputList(sample.inputs.size(), {Replicate()})));
    const std::vector<const Spec*> pointers = Pointers(specs);
    const Attrs attrs = AttrsOf(sample);
    DT_RETURN_IF_ERROR(PlanOp(OpCall(op, pointers, attrs), nullptr).status());
    Collector collector(op, sample, mesh);
    for (const InputList& inputs : AskedOnOneDim(op, sample, mesh, most)) collector.Add(inputs);
    on_one[world] = collector.claims();
    claims.impossible.insert(claims.impossible.end(), collector.impossible().begin(),
                             collector.impossible().end());
    claims.all.insert(claims.all.end(), on_one[world].begin(), on_one[world].end());
  }
  const DeviceMesh meshes[] = {DeviceMesh({2, 2}), DeviceMesh({2, 3})};
  for (const DeviceMesh& mesh : meshes) {
    AddPairs(op, sample, mesh, on_one[2], on_one[mesh.size(1)], most, &claims);
  }
  RepeatRefused(op, sample, meshes, &claims);
  AddTriples(op, sample, on_one[2], most / 8, &claims);
  return claims;
}

}  // namespace dtensor::internal
