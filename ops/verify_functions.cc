// Case lines before the judge of functions.
#include <cmath>
#include <memory>

#include "absl/strings/match.h"
#include "dtensor/ops/case_samples.h"
#include "dtensor/ops/rules.h"
#include "dtensor/rng/generator.h"

namespace dtensor {
namespace {

// Numbers of the domain that are short, so that terms of a pending sum add up to them exactly; with
// `ties` of a few.
double Shortened(double value, const CaseTensor& t, bool ties) {
  if (!IsFloating(t.dtype)) return value;
  const double step = ties ? (t.high - t.low) / 4 : 1.0 / 256;
  const double down = t.low + std::floor((value - t.low) / step) * step;
  return std::ceil(down * 256) / 256;
}

FunctionSample JudgedSample(const OpCase& c, const CaseSample& sample, bool ties) {
  FunctionSample judged;
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const CaseTensor& t = sample.tensors[i];
    VerifyInput in = {t.shape, t.dtype, t.Values(i + (ties ? 40 : 3))};
    for (double& v : in.values) v = Shortened(v, t, ties);
    judged.inputs.push_back(std::move(in));
    judged.differentiable.push_back(sample.WantsGradient(c, i));
  }
  judged.text = sample.ToString();
  const auto kept = std::make_shared<const CaseSample>(sample);
  judged.call = [call = c.call, kept](const std::vector<DTensor>& inputs) {
    ManualSeed(5);
    SampleArgs args(*kept, inputs);
    return call(args);
  };
  return judged;
}

}  // namespace

FunctionCase JudgedCase(const OpCase& c) {
  FunctionCase judged = {c.name, {}, {}};
  judged.options.in_place = absl::EndsWith(c.name, "_") || (c.is & kWrites) != 0;
  judged.options.pending_extremes = (c.is & kDraws) == 0;
  std::vector<CaseSample> samples = SamplesOf(c);
  if (!c.large.empty()) {
    OpCase large = c;
    large.samples = c.large;
    for (CaseSample& sample : SamplesOf(large)) samples.push_back(std::move(sample));
  }
  for (const CaseSample& sample : samples) {
    if (sample.tensors.empty()) continue;
    for (const bool ties : {false, true}) judged.samples.push_back(JudgedSample(c, sample, ties));
  }
  return judged;
}

std::vector<FunctionCase> FunctionCases() {
  RegisterOps();
  std::vector<FunctionCase> all;
  for (const OpCase& c : AllCases().cases) {
    FunctionCase judged = JudgedCase(c);
    if (!judged.samples.empty()) all.push_back(std::move(judged));
  }
  return all;
}

}  // namespace dtensor
