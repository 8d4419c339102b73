// PyTorch's own samples, values and gradients: on one rank, and under every placement of the inputs
// on 2, 3 and 2 x 2 ranks (so under every derived strategy). Prints how many passed and, by reason,
// how many were left out. DT_THOROUGH=1: of each sample 150 placements instead of 30. DT_OPS: a
// regular expression of the ops that are tried. DT_ONE_RANK=1: nothing is sharded.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>

#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "gtest/gtest.h"
#include "tests/common/pattern.h"
#include "tests/common/thin.h"
#include "tests/ops/torch_args.h"

namespace dtensor::torch_samples_test {
namespace {

using testing::Json;
using testing::LeftOut;
using testing::MatchRule;
using testing::TorchArgs;
using testing::TorchSamples;

Tensor Stored(const Json& key) { return TorchSamples::All().Get(key.get<std::string>()); }

// One sample with its tensors read; shared by the ranks, which only read.
struct Sample {
  std::string id;
  Json json;
  bool exact, any_zero;
  std::vector<std::string> keys;  // of tensor inputs, in the order of the call
  std::vector<Tensor> inputs;     // with the strides of the sample
};

void CollectKeys(const Json& value, std::vector<std::string>* keys) {
  if (value.is_object() && value.contains("tensor")) {
    keys->push_back(value.at("tensor").get<std::string>());
  } else if (value.is_structured()) {
    for (const Json& v : value) CollectKeys(v, keys);
  }
}

Sample Load(const Json& op, const Json& json) {
  Sample s;
  s.id = json.at("id").get<std::string>();
  s.json = json;
  s.exact = json.value("match", op.at("match").get<std::string>()) == "exact";
  s.any_zero = op.value("zero_sign", "") == "any";
  CollectKeys(json.at("args"), &s.keys);
  CollectKeys(json.at("kwargs"), &s.keys);
  for (const std::string& key : s.keys) {
    Tensor t = TorchSamples::All().Get(key);
    if (json.contains("strides") && json["strides"].contains(key)) {
      t = testing::WithStrides(t, json["strides"][key].get<std::vector<int64_t>>());
    }
    s.inputs.push_back(t);
  }
  return s;
}

MatchRule RuleOf(const Sample& s, bool gradient, const Json& f64) {
  MatchRule rule;
  rule.exact = s.exact && !gradient;
  rule.any_zero = s.any_zero;
  rule.special_values = s.json.value("note", "").find("special") != std::string::npos;
  if (f64.is_string()) rule.f64 = Stored(f64);
  return rule;
}

// Whole values of a DTensor.
Tensor Whole(const DTensor& t) { return t.FullTensor().local(); }

// The sum of all outputs times their cotangents, so that one backward serves all.
void Backward(const Values& outputs, const Json& cotangents, const DeviceMesh& mesh) {
  std::vector<std::pair<DTensor, DTensor>> pairs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (cotangents[i].is_null() || !outputs[i].requires_grad()) continue;
    pairs.emplace_back(outputs[i],
                       DistributeTensor(Stored(cotangents[i]), mesh, Placements(mesh.ndim())));
  }
  if (pairs.size() == 1) return pairs[0].first.Backward(pairs[0].second);
  DTensor total;
  for (const auto& [y, c] : pairs) total = total.defined() ? total + sum(y * c) : sum(y * c);
  if (total.defined()) total.Backward();
}

// Indices that torch leaves open for equal values: both name the same values along `dim`, which the
// result may have kept.
bool NameTheSame(const Tensor& input, const Tensor& got, const Tensor& want, int64_t dim) {
  if (got.dtype() != want.dtype() || got.shape() != want.shape()) return false;
  if (input.ndim() == 0) return true;
  dim = dim < 0 ? dim + input.ndim() : dim;
  const auto values = input.ToVector<double>();
  const auto g = got.ToVector<int64_t>(), w = want.ToVector<int64_t>();
  int64_t inner = 1;
  for (int d = static_cast<int>(dim) + 1; d < input.ndim(); ++d) inner *= input.size(d);
  const int64_t size = input.size(static_cast<int>(dim));
  for (int64_t i = 0; i < static_cast<int64_t>(g.size()); ++i) {
    const auto at = [&](int64_t k) { return values[(i / inner * size + k) * inner + i % inner]; };
    if (g[i] < 0 || g[i] >= size || at(g[i]) != at(w[i])) return false;
  }
  return true;
}

// Runs the sample on the inputs given; "" or what differs from torch.
std::string RunSample(const OpCase& op, const Sample& s, std::vector<DTensor> inputs,
                      const DeviceMesh& mesh, bool sharded) {
  std::map<std::string, DTensor> by_key;
  Json grads = s.json.value("grads", Json::object());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (grads.contains(s.keys[i])) inputs[i].RequiresGrad();
    by_key[s.keys[i]] = inputs[i];
  }
  TorchArgs args(s.json, by_key);
  const Values outputs = op.call(args);
  args.CheckAllUsed();
  const Json& wanted = s.json.at("outputs");
  if (outputs.size() != wanted.size()) return absl::StrCat("gives ", outputs.size(), " outputs");
  std::string all;
  const auto check = [&](const std::string& what, const Tensor& got, const Json& key, bool gradient,
                         const Json& f64) {
    MatchRule rule = RuleOf(s, gradient, f64);
    rule.any_zero |= sharded;  // a pending sum forgets the sign of zero
    // A float64 gradient of float32 cotangents carries float32 rounding.
    if (gradient) rule.coarsest = outputs[0].dtype();
    const std::string why = testing::Differs(got, Stored(key), rule);
    if (!why.empty()) absl::StrAppend(&all, what, " ", why, "; ");
    return why.empty();
  };
  const Json f64 = s.json.value("outputs_f64", Json::array());
  const Json open = s.json.value("any_of_ties", Json::array());
  for (size_t i = 0; i < outputs.size(); ++i) {
    const Tensor got = Whole(outputs[i]);
    if (std::find(open.begin(), open.end(), i) != open.end()) {
      const Tensor want = Stored(wanted[i]);
      if (!NameTheSame(s.inputs[0], got, want, args.Int("dim", -1))) {
        absl::StrAppend(&all, "output ", i, " names other values; ");
      }
      // The gradient follows the index that was taken.
      if (!testing::Differs(got, want, MatchRule()).empty()) grads = Json::object();
      continue;
    }
    check(absl::StrCat("output ", i), got, wanted[i], false, i < f64.size() ? f64[i] : Json());
  }
  const Json mutated = s.json.value("mutated", Json::object());
  for (const auto& [key, value] : mutated.items()) {
    check("afterwards " + key, Whole(args.After(key)), value, false, Json());
  }
  if (grads.empty()) return all;
  Backward(outputs, s.json.at("cotangents"), mesh);
  const Json grads_f64 = s.json.value("grads_f64", Json::object());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!grads.contains(s.keys[i]) || grads[s.keys[i]].is_null()) continue;
    DTensor g = inputs[i].grad();
    if (!g.defined()) g = zeros_like(inputs[i]);
    check(absl::StrCat("gradient ", i), Whole(g), grads[s.keys[i]], true,
          grads_f64.value(s.keys[i], Json()));
  }
  return all;
}

// The tensor under these placements. A pending sum has the value on the last rank of its mesh dim
// and the neutral -0.0 elsewhere, so that it is exact.
DTensor Placed(const Tensor& t, const Placements& placements, const DeviceMesh& mesh,
               int64_t rank) {
  Placements whole = placements;
  Dims coordinate;
  mesh.Coordinate(rank, &coordinate);
  bool mine = true, pending = false;
  for (int d = 0; d < mesh.ndim(); ++d) {
    if (!placements[d].is_partial()) continue;
    whole[d] = Replicate();
    pending = true;
    mine &= coordinate[d] == mesh.size(d) - 1;
  }
  const DTensor placed = DistributeTensor(t, mesh, whole);
  if (!pending) return placed;
  Tensor local = ValueOrThrow(placed.local().Clone());
  if (!mine) Fill(local, -0.0);
  FromLocalOptions options;
  options.shape = t.shape();
  return FromLocal(OnSelf(local), mesh, placements, options);
}

std::vector<Placement> PlacementsFor(const Tensor& t, bool finite) {
  std::vector<Placement> p = {Replicate()};
  for (int d = 0; d < t.ndim(); ++d) p.push_back(Shard(d));
  // A pending sum of infinities is no number; those reach ops as whole values only.
  if (IsFloating(t.dtype()) && finite) p.push_back(Partial());
  return p;
}

// All placements of all inputs on a mesh of `dims` dims, evenly thinned to at most most_.
class Choices {
 public:
  Choices(const Sample& s, int dims) : dims_(dims) {
    bool finite = true;
    for (const Tensor& t : s.inputs) finite &= !IsFloating(t.dtype()) || testing::AllFinite(t);
    for (const Tensor& t : s.inputs) {
      options_.push_back(PlacementsFor(t, finite));
      for (int d = 0; d < dims; ++d) total_ *= static_cast<int64_t>(options_.back().size());
    }
    step_ = total_ <= most_ ? 1 : (total_ / most_) | 1;
  }
  int64_t count() const { return (total_ + step_ - 1) / step_; }
  // Of each input.
  std::vector<Placements> At(int64_t i) const {
    std::vector<Placements> chosen;
    int64_t rest = i * step_;
    for (const auto& of_input : options_) {
      const int64_t n = static_cast<int64_t>(of_input.size());
      chosen.emplace_back();
      for (int d = 0; d < dims_; ++d, rest /= n) chosen.back().push_back(of_input[rest % n]);
    }
    return chosen;
  }

 private:
  const int dims_;
  std::vector<std::vector<Placement>> options_;
  const int64_t most_ = testing::Thorough() ? 150 : 30 / testing::Thin(10);
  int64_t total_ = 1, step_ = 1;
};

std::string ToText(const std::vector<Placements>& chosen) {
  return absl::StrJoin(chosen, " ", [](std::string* out, const Placements& p) {
    absl::StrAppend(out, ToString(p));
  });
}

// Every choice on a mesh; the first failure of each sample.
std::vector<std::string> RunSharded(const OpCase& op, const std::vector<Sample>& samples,
                                    const Shape& sizes, int64_t* runs) {
  std::vector<std::string> failures;
  std::mutex mutex;
  const int dims = static_cast<int>(sizes.size());
  const int64_t ranks = dims == 1 ? sizes[0] : sizes[0] * sizes[1];
  const absl::Status status = RunSpmd(ranks, [&](RankContext& context) {
    const DeviceMesh mesh =
        dims == 1 ? DeviceMesh({ranks}, {"tp"}) : DeviceMesh({sizes[0], sizes[1]}, {"dp", "tp"});
    for (const Sample& s : samples) {
      const Choices choices(s, dims);
      bool failed = false;
      for (int64_t i = 0; i < choices.count(); ++i) {
        const std::vector<Placements> chosen = choices.At(i);
        std::vector<DTensor> inputs;
        for (size_t k = 0; k < s.inputs.size(); ++k) {
          inputs.push_back(Placed(s.inputs[k], chosen[k], mesh, context.rank()));
        }
        std::string why;
        try {
          why = RunSample(op, s, inputs, mesh, true);
        } catch (const Error& e) {
          if (e.status().code() == absl::StatusCode::kAborted) throw;
          why = e.what();
        }
        if (context.rank() == 0) ++*runs;
        if (why.empty() || failed) continue;
        failed = true;
        std::lock_guard<std::mutex> lock(mutex);
        failures.push_back(absl::StrCat(s.id, " on rank ", context.rank(), " of ", ToString(sizes),
                                        ", ", ToText(chosen), ": ", why));
      }
    }
    return absl::OkStatus();
  });
  if (!status.ok()) failures.push_back(std::string(status.message()));
  return failures;
}

// DT_OPS: a regular expression; only these.
bool Asked(const std::string& name) {
  static const char* const only = std::getenv("DT_OPS");
  return only == nullptr || testing::IsOf(name, only);
}

// DT_ONE_RANK=1: for a device on which single ops are slow.
bool OnOneRank() {
  static const bool one = std::getenv("DT_ONE_RANK") != nullptr;
  return one;
}

class SamplesOfGroup : public ::testing::TestWithParam<std::string> {
 protected:
  static void TearDownTestSuite() {
    EXPECT_LE(100 * left_out_, tried_) << "more than 1 % of the samples were left out";
    EXPECT_TRUE(tried_ > 0 || std::getenv("DT_OPS") != nullptr) << "there are no samples";
  }
  // Of all groups that this process runs.
  static inline int64_t tried_ = 0, left_out_ = 0;
};

bool IsDecidedAgainst(const std::string& name) {
  const auto& all = OpsDecidedAgainst();
  return std::any_of(all.begin(), all.end(), [&](const auto& d) { return d.name == name; });
}

TEST_P(SamplesOfGroup, ValuesAndGradients) {
  std::map<std::string, int64_t> left_out;
  int64_t passed = 0, failed = 0, runs = 0;
  size_t number = 0;
  for (const Json& op : TorchSamples::All().ops()) {
    const std::string name = op.value("op", "");
    if (op.value("group", "") != GetParam() || !Asked(name)) continue;
    const OpCase* call = FindCase(name);
    if (call == nullptr) {
      EXPECT_TRUE(IsDecidedAgainst(name)) << "there is no function " << name;
      continue;
    }
    std::vector<Sample> taken;
    for (const Json& json : op.at("samples")) {
      ++tried_;
      Sample s = Load(op, json);
      std::vector<DTensor> inputs;
      for (const Tensor& t : s.inputs) inputs.push_back(OnSelf(t));
      std::string why;
      try {
        why = RunSample(*call, s, inputs, DeviceMesh::Self(), false);
      } catch (const LeftOut& l) {
        ++left_out[absl::StrCat(name, ": ", l.reason)];
        ++left_out_;
        continue;
      } catch (const Error& e) {
        why = e.what();
      }
      if (!why.empty()) {
        ++failed;
        ADD_FAILURE() << s.id << " " << json.value("note", "") << ": " << why;
        continue;
      }
      taken.push_back(std::move(s));
    }
    passed += static_cast<int64_t>(taken.size());
    if (OnOneRank() || !testing::InTurn(number++, 3)) continue;  // the others on one rank only
    for (const Shape& sizes : {Shape{2}, Shape{3}, Shape{2, 2}}) {
      for (const std::string& f : RunSharded(*call, taken, sizes, &runs)) ADD_FAILURE() << f;
    }
  }
  std::printf("%s: %lld samples passed, %lld failed; %lld runs on 2, 3 and 2 x 2 ranks\n",
              GetParam().c_str(), static_cast<long long>(passed), static_cast<long long>(failed),
              static_cast<long long>(runs));
  for (const auto& [reason, count] : left_out) {
    std::printf("  left out: %lld %s\n", static_cast<long long>(count), reason.c_str());
  }
}

TEST(DecidedAgainst, AreFewAndNotThere) {
  EXPECT_LE(OpsDecidedAgainst().size(), 10u);
  for (const DecidedAgainst& d : OpsDecidedAgainst()) {
    EXPECT_EQ(FindCase(d.name), nullptr) << d.name << " is there";
    EXPECT_FALSE(d.reason.empty()) << d.name;
  }
}

std::vector<std::string> Groups() {
  std::vector<std::string> groups;
  for (const Json& op : TorchSamples::All().ops()) {
    const std::string group = op.value("group", "");
    if (group == "optimizer") continue;  // tests/parallel/optim_test.cc
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  return groups;
}

INSTANTIATE_TEST_SUITE_P(Torch, SamplesOfGroup, ::testing::ValuesIn(Groups()),
                         [](const auto& group) { return group.param; });

}  // namespace
}  // namespace dtensor::torch_samples_test
