// PyTorch's own samples, values and gradients: on one rank, and under every placement of the inputs
// on 2 and 3 ranks (so under every derived strategy). Prints how many passed and, by reason, how
// many were left out.
#include <cstdio>
#include <mutex>
#include <optional>

#include "dtensor/mesh/launch.h"
#include "gtest/gtest.h"
#include "tests/common/thin.h"
#include "tests/ops/torch_args.h"

namespace dtensor {
namespace {

using testing::Json;
using testing::LeftOut;
using testing::MatchRule;
using testing::TensorFile;
using testing::TorchArgs;

const TensorFile& File() {
  static const TensorFile file(DT_TEST_DATA "/ops/samples.safetensors");
  return file;
}
const Json& Manifest() {
  static const Json manifest = Json::parse(testing::ReadFile(DT_TEST_DATA "/ops/manifest.json"));
  return manifest;
}

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
    Tensor t = File().Get(key);
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
  if (f64.is_string()) rule.f64 = File().Get(f64.get<std::string>());
  return rule;
}

// Whole values of a DTensor.
Tensor Whole(const DTensor& t) { return t.FullTensor().local(); }

// The sum of all outputs times their cotangents, so that one backward serves all.
void Backward(const Values& outputs, const Json& cotangents, const DeviceMesh& mesh) {
  std::vector<std::pair<DTensor, DTensor>> pairs;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (cotangents[i].is_null() || !outputs[i].requires_grad()) continue;
    pairs.emplace_back(outputs[i], DistributeTensor(File().Get(cotangents[i].get<std::string>()),
                                                    mesh, Placements(mesh.ndim())));
  }
  if (pairs.size() == 1) return pairs[0].first.Backward(pairs[0].second);
  DTensor total;
  for (const auto& [y, c] : pairs) total = total.defined() ? total + sum(y * c) : sum(y * c);
  if (total.defined()) total.Backward();
}

// Runs the sample on the inputs given; "" or what differs from torch.
std::string RunSample(const OpCase& op, const Sample& s, std::vector<DTensor> inputs,
                      const DeviceMesh& mesh, bool sharded) {
  std::map<std::string, DTensor> by_key;
  const Json grads = s.json.value("grads", Json::object());
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
  const auto check = [&](const std::string& what, const Tensor& got, const std::string& key,
                         bool gradient, const Json& f64) {
    MatchRule rule = RuleOf(s, gradient, f64);
    rule.any_zero |= sharded;  // a pending sum forgets the sign of zero
    // A float64 gradient of float32 cotangents carries float32 rounding.
    if (gradient) rule.coarsest = outputs[0].dtype();
    const std::string why = testing::Differs(got, File().Get(key), rule);
    if (!why.empty()) absl::StrAppend(&all, what, " ", why, "; ");
  };
  const Json f64 = s.json.value("outputs_f64", Json::array());
  for (size_t i = 0; i < outputs.size(); ++i) {
    check(absl::StrCat("output ", i), Whole(outputs[i]), wanted[i].get<std::string>(), false,
          i < f64.size() ? f64[i] : Json());
  }
  if (grads.empty()) return all;
  Backward(outputs, s.json.at("cotangents"), mesh);
  const Json grads_f64 = s.json.value("grads_f64", Json::object());
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!grads.contains(s.keys[i]) || grads[s.keys[i]].is_null()) continue;
    DTensor g = inputs[i].grad();
    if (!g.defined()) g = zeros_like(inputs[i]);
    check(absl::StrCat("gradient ", i), Whole(g), grads[s.keys[i]].get<std::string>(), true,
          grads_f64.value(s.keys[i], Json()));
  }
  return all;
}

// The tensor under one placement on a 1-D mesh. A Partial has the value on the last rank and the
// neutral -0.0 elsewhere, so that the sum is exact.
DTensor Placed(const Tensor& t, const Placement& p, const DeviceMesh& mesh, int64_t rank) {
  if (!p.is_partial()) return DistributeTensor(t, mesh, {p});
  Tensor mine = ValueOrThrow(t.Clone());
  if (rank != mesh.size() - 1) Fill(mine, -0.0);
  FromLocalOptions options;
  options.shape = t.shape();
  return FromLocal(OnSelf(mine), mesh, {p}, options);
}

std::vector<Placement> PlacementsFor(const Tensor& t, bool finite) {
  std::vector<Placement> p = {Replicate()};
  for (int d = 0; d < t.ndim(); ++d) p.push_back(Shard(d));
  // A pending sum of infinities is no number; those reach ops as whole values only.
  if (IsFloating(t.dtype()) && finite) p.push_back(Partial());
  return p;
}

// All placements of all inputs, evenly thinned to at most most_.
class Choices {
 public:
  explicit Choices(const Sample& s) {
    bool finite = true;
    for (const Tensor& t : s.inputs) finite &= !IsFloating(t.dtype()) || testing::AllFinite(t);
    for (const Tensor& t : s.inputs) {
      options_.push_back(PlacementsFor(t, finite));
      total_ *= static_cast<int64_t>(options_.back().size());
    }
    step_ = total_ <= most_ ? 1 : (total_ / most_) | 1;
  }
  int64_t count() const { return (total_ + step_ - 1) / step_; }
  Placements At(int64_t i) const {
    Placements chosen;
    int64_t rest = i * step_;
    for (const auto& of_input : options_) {
      chosen.push_back(of_input[rest % static_cast<int64_t>(of_input.size())]);
      rest /= static_cast<int64_t>(of_input.size());
    }
    return chosen;
  }

 private:
  std::vector<std::vector<Placement>> options_;
  const int64_t most_ = 150 / testing::Thin(15);
  int64_t total_ = 1, step_ = 1;
};

// Every choice on `ranks` ranks; the first failure of each sample.
std::vector<std::string> RunSharded(const OpCase& op, const std::vector<Sample>& samples,
                                    int64_t ranks, int64_t* runs) {
  std::vector<std::string> failures;
  std::mutex mutex;
  const absl::Status status = RunSpmd(ranks, [&](RankContext& context) {
    const DeviceMesh mesh({ranks}, {"tp"});
    for (const Sample& s : samples) {
      const Choices choices(s);
      bool failed = false;
      for (int64_t i = 0; i < choices.count(); ++i) {
        const Placements chosen = choices.At(i);
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
        failures.push_back(absl::StrCat(s.id, " on rank ", context.rank(), " of ", ranks, ", ",
                                        ToString(chosen), ": ", why));
      }
    }
    return absl::OkStatus();
  });
  if (!status.ok()) failures.push_back(std::string(status.message()));
  return failures;
}

TEST(TorchSamples, ValuesAndGradients) {
  std::map<std::string, int64_t> left_out;
  int64_t passed = 0, failed = 0, runs = 0;
  for (const Json& op : Manifest().at("ops")) {
    const std::string name = op.value("op", "");
    const OpCase* call = FindCase(name);
    if (call == nullptr) continue;  // optimizers: tests/parallel/optim_test.cc
    std::vector<Sample> taken;
    for (const Json& json : op.at("samples")) {
      Sample s = Load(op, json);
      std::vector<DTensor> inputs;
      for (const Tensor& t : s.inputs) inputs.push_back(OnSelf(t));
      std::string why;
      try {
        why = RunSample(*call, s, inputs, DeviceMesh::Self(), false);
      } catch (const LeftOut& l) {
        ++left_out[absl::StrCat(name, ": ", l.reason)];
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
    for (const int64_t ranks : {2, 3}) {
      for (const std::string& f : RunSharded(*call, taken, ranks, &runs)) {
        ADD_FAILURE() << f;
      }
    }
    passed += static_cast<int64_t>(taken.size());
  }
  std::printf("%lld samples passed, %lld failed; %lld runs on 2 and 3 ranks; left out:\n",
              static_cast<long long>(passed), static_cast<long long>(failed),
              static_cast<long long>(runs));
  for (const auto& [reason, count] : left_out) {
    std::printf("  %lld %s\n", static_cast<long long>(count), reason.c_str());
  }
  EXPECT_GE(passed, 780) << "samples were lost";
}

}  // namespace
}  // namespace dtensor
