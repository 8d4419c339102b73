#include "dtensor/ops/verify_samples.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <thread>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/case_samples.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rng/generator.h"
#include "dtensor/verify/simulate.h"
#include "dtensor/watch.h"

namespace dtensor {

#define DT_OP_CASES(name) void Add##name##Cases(CaseTable* table);
#include "dtensor/ops/families.inc"

const CaseTable& AllCases() {
  static const CaseTable& table = []() -> const CaseTable& {
    auto* all = new CaseTable;
#define DT_OP_CASES(name) Add##name##Cases(all);
#include "dtensor/ops/families.inc"
    return *all;
  }();
  return table;
}

void CaseTable::Large(const std::vector<std::pair<std::string, std::string>>& samples) {
  for (const auto& [name, text] : samples) {
    const auto it = std::find_if(cases.begin(), cases.end(),
                                 [&name = name](const OpCase& c) { return c.name == name; });
    if (it == cases.end()) ThrowInvalid("CaseTable", absl::StrCat("there is no case of ", name));
    it->large = text;
  }
}

const OpCase* FindCase(const std::string& name) {
  for (const OpCase& c : AllCases().cases) {
    if (c.name == name) return &c;
  }
  return nullptr;
}

const std::vector<DecidedAgainst>& OpsDecidedAgainst() {
  static const auto& all = *[] {
    const std::string spec =
        "a tensor has one shape for its life, which caches, views of its memory and histories go "
        "by, so a handle is given another tensor instead: ";
    return new std::vector<DecidedAgainst>{
        {"squeeze_", spec + "`x = squeeze(x)`"},
        {"unsqueeze_", spec + "`x = unsqueeze(x, dim)`"},
        {"transpose_", spec + "`x = transpose(x, a, b)`"},
        {"t_", spec + "`x = t(x)`"},
        {"swapaxes_", spec + "`x = swapaxes(x, a, b)`"},
        {"as_strided_", spec + "`x = as_strided(x, size, stride)`"},
        {"detach_",
         "a tensor has one place in the history, which nodes after it hold: `x = x.Detach()`"},
    };
  }();
  return all;
}

namespace {

// Numbers that an attribute takes, in turn: 0 and both signs, beside and within (0, 1).
double Number(const std::string& attr, size_t sample) {
  static constexpr double kNumbers[] = {1.5, -0.5, 0.5, 2, -1.5};
  const double number = kNumbers[sample % 5];
  if (attr == "lo") return -std::fabs(number);  // a range that is not empty
  if (attr == "hi") return std::fabs(number);
  if (attr == "eps") return number / 10;
  return attr == "value" && sample % 2 == 0 ? 0 : number;
}

// Whole numbers that may be divided by.
std::vector<double> Divisors(int64_t n) {
  std::vector<double> v(static_cast<size_t>(n));
  for (size_t i = 0; i < v.size(); ++i) v[i] = static_cast<double>(1 + i * 5 % 7);
  return v;
}

// The dtypes in which an op is judged: of the floats one stands for all, of the others each wraps,
// ends and orders as it does alone.
constexpr DType kJudged[] = {DType::kF64, DType::kI64, DType::kI32, DType::kU8, DType::kBool};

// Broadcast or not, uneven, with sizes 1 and 0; once in every other dtype that the op takes. In
// place the first operand has the shape of the result. Where a bool comes first, the dtypes are
// those of the others.
std::vector<VerifySample> PointwiseSamples(const PointwiseCase& c) {
  std::vector<VerifySample> samples;
  const OpDef& op = GetOp(c.name);
  const std::vector<std::vector<Shape>> shapes = {
      {{5, 4}, {4}, {5, 1}}, {{2, 3, 4}, {3, 1}, {2, 3, 4}}, {{6, 1}, {1, 7}, {6, 7}},
      {{0, 3}, {3}, {3}},    {{3, 4, 2}, {2}, {3, 4, 1}},    {{7, 3}, {7, 3}, {7, 3}}};
  const uint32_t kernel_takes = FindHostKernel(c.name)->dtypes;
  const auto add = [&](size_t n, DType dtype) {
    const bool whole = !IsFloating(dtype);
    VerifySample s;
    for (int i = 0; i < c.inputs; ++i) {
      VerifyInput in = {shapes[n][i], i == c.bool_input ? DType::kBool : dtype};
      if (op.in_place() && i == 0 && n == 2) in.shape = {6, 7};
      if (whole && c.divides && i == 1) in.values = Divisors(Numel(in.shape));
      s.inputs.push_back(in);
    }
    for (const std::string& attr : op.attr_names()) {
      const size_t k = s.attrs.size();
      s.attrs.push_back(attr == "approx_tanh"     ? BoolAttr(n % 2 == 1)
                        : attr.ends_with("_type") ? DTypeAttr(DType::kF64)
                        : whole                   ? IntAttr(2 + static_cast<int64_t>(k))
                                                  : FloatAttr(Number(attr, n + k)));
    }
    s.exact = c.name == "nextafter";
    samples.push_back(std::move(s));
  };
  const bool takes_floats = c.bool_input == 0 || (kernel_takes & DTypeBit(DType::kF64)) != 0;
  for (size_t n = 0; n < shapes.size(); ++n) add(n, takes_floats ? DType::kF64 : DType::kI64);
  for (DType t : kJudged) {
    const bool takes = c.bool_input == 0 || (kernel_takes & DTypeBit(t)) != 0;
    if (takes && !IsFloating(t)) add(shapes.size() - 1, t);
  }
  return samples;
}

// --- what case lines call

struct Recorded {
  VerifySample sample;
  std::string key;
  bool own = false;  // made by the function of the op's name
};

// Everything that tells two calls apart.
std::string KeyOf(const VerifySample& s) {
  std::string key;
  for (const VerifyInput& in : s.inputs) {
    absl::StrAppend(&key, static_cast<int>(in.dtype), ToString(in.shape), " ");
  }
  for (const Attr& attr : s.attrs) absl::StrAppend(&key, " ", attr.d, ":", attr.i);
  for (int64_t i : s.ints) absl::StrAppend(&key, ",", i);
  return key;
}

VerifySample SampleOf(Inputs inputs, absl::Span<const Attr> attrs, bool finite) {
  VerifySample sample;
  sample.finite = finite;
  const NoGrad no_grad;
  for (const DTensor* t : inputs) {
    VerifyInput in = {t->shape(), t->dtype()};
    const bool any_value = IsFloating(t->dtype()) || t->dtype() == DType::kBool;
    if (!any_value) in.values = t->ToVector<double>();  // it may be an index
    sample.inputs.push_back(std::move(in));
  }
  for (const Attr& attr : attrs) {
    if (attr.kind != Attr::Kind::kInts) {
      sample.attrs.push_back(attr);
      continue;
    }
    sample.ints_attr = static_cast<int>(sample.attrs.size());
    sample.ints.assign(attr.ints, attr.ints + attr.n);
    sample.attrs.emplace_back();
  }
  return sample;
}

using Recordings = std::map<std::string, std::vector<Recorded>>;  // by op

void Record(const OpCase& c, const CaseSample& sample, Recordings* all) {
  bool forward = true;
  const WatchCalls watch([&](const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs) {
    std::vector<Recorded>& calls = (*all)[op.name()];
    Recorded call = {SampleOf(inputs, attrs, (c.is & kFinite) != 0), "",
                     forward && c.name == op.name()};
    call.key = KeyOf(call.sample);
    const bool known = std::any_of(calls.begin(), calls.end(),
                                   [&](const Recorded& other) { return other.key == call.key; });
    if (!known) calls.push_back(std::move(call));
  });
  std::vector<DTensor> tensors = sample.Make(1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (sample.WantsGradient(c, i)) tensors[i].RequiresGrad();
  }
  SampleArgs args(sample, tensors);
  DTensor total;
  for (const DTensor& y : c.call(args)) {
    if (!y.requires_grad()) continue;
    const DTensor part = sum(y);
    total = total.defined() ? total + part : part;
  }
  forward = false;
  if (total.defined()) total.Backward();
}

// Of each op the calls by the function of its name, and of others as many as make four.
std::vector<VerifyCase> RecordedCases() {
  Recordings all;
  absl::Status status;
  // In a world of its own: whoever asks may be a rank, and keeps its generators and its tape.
  std::thread([&] {
    status = RunSpmd(1, [&](RankContext&) {
      for (const OpCase& c : AllCases().cases) {
        for (const CaseSample& sample : SamplesOf(c)) Record(c, sample, &all);
      }
      return absl::OkStatus();
    });
  }).join();
  ThrowIfError(status);
  std::vector<VerifyCase> cases;
  for (auto& [op, calls] : all) {
    std::stable_partition(calls.begin(), calls.end(), [](const Recorded& r) { return r.own; });
    VerifyCase c = {op, {}};
    for (const Recorded& call : calls) {
      if (call.own || c.samples.size() < 4) c.samples.push_back(call.sample);
    }
    cases.push_back(std::move(c));
  }
  return cases;
}

// Whether the values of an input are drawn, not given as those of indices are.
bool IsDrawn(const VerifyInput& in) { return in.values.empty() && Numel(in.shape) > 0; }

// The sample in another dtype: its first input, and those that are drawn in the dtype of that one.
// What may be a float is no index: its values are drawn.
VerifySample InDType(const VerifySample& sample, DType t) {
  VerifySample other = sample;
  for (VerifyInput& in : other.inputs) {
    if (in.dtype == sample.inputs[0].dtype && IsDrawn(in)) in.dtype = t;
  }
  return other;
}

// Whether the op takes the sample, whatever is drawn for it.
bool Runs(const OpDef& op, const VerifySample& sample) {
  bool runs = true;
  // In a world of its own: whoever asks may be a rank, and keeps its tape.
  std::thread([&] {
    runs = RunFake({.world = 1}, [&](RankContext&) -> absl::Status {
             for (const internal::Draw draw : internal::DrawsOf(sample)) {
               DT_RETURN_IF_ERROR(internal::Simulation::Create(op, sample, draw).status());
             }
             return absl::OkStatus();
           }).ok();
  }).join();
  return runs;
}

// The op also in the dtypes that its kernel takes and that no sample of it has: from two of its
// samples each, where the op itself does not refuse that. Views read no element.
void Widen(VerifyCase* c) {
  const OpDef& op = GetOp(c->op);
  const Kernel* kernel = FindHostKernel(c->op);
  if (op.view() != nullptr || kernel == nullptr) return;
  std::vector<VerifySample> bases;
  for (const VerifySample& s : c->samples) {
    if (!s.inputs.empty() && IsDrawn(s.inputs[0]) && !s.exact) bases.push_back(s);
  }
  size_t turn = 0;
  for (const DType t : kJudged) {
    const auto has = [t](const VerifySample& s) { return s.inputs[0].dtype == t; };
    if ((kernel->dtypes & DTypeBit(t)) == 0 || std::any_of(bases.begin(), bases.end(), has)) {
      continue;
    }
    int added = 0;
    for (size_t tries = 0; tries < bases.size() && added < 2; ++tries) {
      VerifySample s = InDType(bases[turn++ % bases.size()], t);
      if (!Runs(op, s)) continue;
      c->samples.push_back(std::move(s));
      ++added;
    }
  }
}

std::vector<VerifyCase> MakeVerifyCases() {
  RegisterOps();
  std::vector<VerifyCase> all;
  std::map<std::string, size_t> at;
  for (const PointwiseCase& c : PointwiseCases()) {
    at[c.name] = all.size();
    all.push_back({c.name, PointwiseSamples(c)});
  }
  const size_t by_line = all.size();  // from these lines come all that are needed
  const auto add = [&](VerifyCase c) {
    const auto [found, is_new] = at.emplace(c.op, all.size());
    if (is_new) {
      all.push_back(std::move(c));
    } else if (found->second >= by_line) {
      std::vector<VerifySample>& samples = all[found->second].samples;
      samples.insert(samples.end(), c.samples.begin(), c.samples.end());
    }
  };
  for (VerifyCase& c : RecordedCases()) add(std::move(c));
  for (const VerifyCase& c : AllCases().judged) add(c);
  for (size_t i = by_line; i < all.size(); ++i) Widen(&all[i]);
  return all;
}

}  // namespace

std::vector<VerifyCase> VerifyCases() {
  static const std::vector<VerifyCase>& all = *new std::vector<VerifyCase>(MakeVerifyCases());
  return all;
}

}  // namespace dtensor
