// State dicts of modules: every name of every logical tensor, and back.
#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/names.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// What a state dict gives for one logical tensor.
struct Found {
  const NamedParameter* target;
  std::vector<std::pair<std::string, const DTensor*>> values = {};  // by name
};

// In how many elements two values differ; NaN is NaN. On a, b's mesh, or Self.
DTensor Differences(const DTensor& a, const DTensor& b) {
  if (a.mesh() != b.mesh()) {
    return Differences(a.mesh().is_self() ? a : a.FullTensor(),
                       b.mesh().is_self() ? b : b.FullTensor());
  }
  return sum(logical_and(ne(a, b), logical_or(eq(a, a), eq(b, b))));
}

// Whether two values for one tensor on `mesh` are the same on every rank of it. All must call it:
// values on Self may differ on one rank only, and all come to one answer.
bool SameValues(const DTensor& a, const DTensor& b, const DeviceMesh& mesh) {
  if (a.impl() == b.impl()) return true;
  RankContext& context = RankContext::Current();
  if (!mesh.is_self() && !mesh.Contains(context.rank())) return true;
  const DTensor count = Differences(a, b);
  const bool same = count.Item() == 0;
  if (count.mesh() == mesh) return same;
  std::vector<int> dims(mesh.ndim());
  std::iota(dims.begin(), dims.end(), 0);
  const std::vector<std::string> all =
      ValueOrThrow(context.Exchange(mesh, dims, "load_state_dict", same ? "=" : "!"));
  return std::count(all.begin(), all.end(), "!") == 0;
}

class Loader {
 public:
  explicit Loader(const std::vector<NamedParameter>& mine) {
    found_.reserve(mine.size());
    for (const NamedParameter& p : mine) {
      if (!p.parameter->persistent()) continue;
      found_.push_back({&p});
      AddName(p.fqn);
      for (const std::string& alias : p.aliases) AddName(alias);
    }
  }

  void Take(const std::string& name, const DTensor& value) {
    const auto at = by_name_.find(name);
    if (at == by_name_.end()) {
      Problem(absl::StrCat("unexpected ", name, Nearest(name)));
      return;
    }
    Found& found = found_[at->second];
    for (const auto& known : found.values) {
      if (known.first == name) Problem(absl::StrCat(name, " is there twice"));
    }
    const std::string misfit = Misfit(value, found.target->parameter->tensor().spec());
    if (!misfit.empty()) Problem(absl::StrCat(name, " ", misfit));
    found.values.emplace_back(name, &value);
  }

  // Once all are taken; what is equal is only looked at where everything else is right.
  void Finish() {
    for (const Found& f : found_) {
      if (f.values.empty()) Problem(absl::StrCat("missing ", f.target->fqn));
    }
    if (problems_.empty()) {  // all of them, so that ranks compare the same whatever they find
      for (const Found& f : found_) CompareNames(f);
    }
    if (!problems_.empty()) {
      Throw(absl::InvalidArgumentError(
          absl::StrCat("[load_state_dict] nothing was loaded: ", absl::StrJoin(problems_, "; "))));
    }
    for (const Found& f : found_) f.target->parameter->Set(*f.values[0].second);
  }

 private:
  void AddName(const std::string& name) {
    by_name_[name] = found_.size() - 1;
    names_.push_back(name);
  }
  // Of the first few: where all names are others, each would be compared with all.
  std::string Nearest(const std::string& name) {
    if (names_.empty() || hints_-- <= 0) return "";
    return absl::StrCat(" (nearest: ", absl::StrJoin(NearestNames(name, names_, 1), ", "), ")");
  }
  void Problem(std::string what) { problems_.push_back(std::move(what)); }
  void CompareNames(const Found& f) {
    const NoGrad no_grad;
    const auto& [first, value] = f.values[0];
    for (size_t k = 1; k < f.values.size(); ++k) {
      const auto& [name, other] = f.values[k];
      if (SameValues(*value, *other, f.target->parameter->mesh())) continue;
      Problem(absl::StrCat(first, " and ", name, " are one parameter, but their values differ"));
    }
  }

  std::vector<Found> found_;
  std::vector<std::string> names_, problems_;
  absl::flat_hash_map<std::string, size_t> by_name_;
  int hints_ = 10;
};

}  // namespace

StateDict Module::GetStateDict() const {
  std::vector<NamedParameter> all;
  Collect("", &all);
  StateDict state;
  for (const NamedParameter& p : all) {
    if (p.parameter->persistent()) state.emplace_back(p.fqn, p.parameter->tensor().Detach());
  }
  return state;
}

void Module::LoadStateDict(const StateDict& state) {
  const std::vector<NamedParameter> mine = NamedTensors();
  Loader loader(mine);
  for (const auto& [name, value] : state) loader.Take(name, value);
  loader.Finish();
}

}  // namespace dtensor
