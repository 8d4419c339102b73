#include "dtensor/parallel/models/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

std::vector<double> Inverse(double theta, int64_t size) {
  std::vector<double> inverse;
  for (int64_t i = 0; i < size; i += 2) {
    inverse.push_back(std::pow(theta, -static_cast<double>(i) / static_cast<double>(size)));
  }
  return inverse;
}

// Long waves are stretched by the factor, short ones are left, and those between go from one to the
// other.
void ScaleLlama3(const RopeConfig& c, double positions, std::vector<double>* inverse) {
  const double longest = positions / c.low_freq_factor, shortest = positions / c.high_freq_factor;
  for (double& f : *inverse) {
    const double wave = 2 * std::numbers::pi / f;
    if (wave < shortest) continue;
    if (wave > longest) {
      f /= c.factor;
      continue;
    }
    const double smooth =
        (positions / wave - c.low_freq_factor) / (c.high_freq_factor - c.low_freq_factor);
    f = (1 - smooth) * f / c.factor + smooth * f;
  }
}

// The same by the number of turns over the original positions: more than beta_fast are left, fewer
// than beta_slow are stretched, by a ramp over the dims between.
void ScaleYarn(const RopeConfig& c, int64_t size, double positions, std::vector<double>* inverse) {
  const double dims = static_cast<double>(size);
  const auto dim_of = [&](double turns) {
    return dims * std::log(positions / (turns * 2 * std::numbers::pi)) / (2 * std::log(c.theta));
  };
  double low = dim_of(c.beta_fast), high = dim_of(c.beta_slow);
  if (c.truncate) low = std::floor(low), high = std::ceil(high);
  low = std::max(low, 0.0);
  high = std::min(high, dims - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inverse->size(); ++i) {
    const double stretched = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    double& f = (*inverse)[i];
    f = stretched * f / c.factor + (1 - stretched) * f;
  }
}

double YarnAttention(const RopeConfig& c) {
  const auto scale = [&](double mscale) {
    return c.factor <= 1 ? 1 : 0.1 * mscale * std::log(c.factor) + 1;
  };
  if (c.attention_factor) return *c.attention_factor;
  if (c.mscale != 0 && c.mscale_all_dim != 0) return scale(c.mscale) / scale(c.mscale_all_dim);
  return scale(1);
}

double LongropeAttention(const RopeConfig& c, double positions) {
  if (c.attention_factor) return *c.attention_factor;
  return c.factor <= 1 ? 1 : std::sqrt(1 + std::log(c.factor) / std::log(positions));
}

}  // namespace

const std::vector<std::string>& RopeTypes() {
  static const auto* types =
      new std::vector<std::string>{"default", "linear", "dynamic", "llama3", "yarn", "longrope"};
  return *types;
}

absl::StatusOr<RopeFrequencies> MakeRopeFrequencies(const RopeConfig& c, int64_t size,
                                                    int64_t max_positions, int64_t tokens) {
  const auto bad = [](const auto&... what) {
    return absl::InvalidArgumentError(absl::StrCat("rotary embedding: ", what...));
  };
  if (!absl::c_linear_search(RopeTypes(), c.type)) {
    return bad("type \"", c.type, "\" is not supported; there are ",
               absl::StrJoin(RopeTypes(), ", "));
  }
  if (size <= 0 || size % 2 != 0) return bad("the head size must be even, is ", size);
  const auto finite = [](double f) { return std::isfinite(f) && f > 0; };
  RopeFrequencies out;
  double theta = c.theta;
  const double original =
      static_cast<double>(c.original_positions > 0 ? c.original_positions : max_positions);
  if (c.type == "dynamic") {
    const double ratio =
        static_cast<double>(std::max(tokens, max_positions)) / static_cast<double>(max_positions);
    const double dims = static_cast<double>(size);
    theta *= std::pow(c.factor * ratio - (c.factor - 1), dims / (dims - 2));
  }
  out.inverse = Inverse(theta, size);
  if (c.type == "linear") {
    for (double& f : out.inverse) f /= c.factor;
  }
  if (c.type == "llama3") ScaleLlama3(c, original, &out.inverse);
  if (c.type == "yarn") {
    ScaleYarn(c, size, original, &out.inverse);
    out.attention_factor = YarnAttention(c);
  }
  if (c.type == "longrope") {
    for (const auto& [name, factors] :
         {std::pair("short_factor", &c.short_factor), std::pair("long_factor", &c.long_factor)}) {
      if (factors->size() == out.inverse.size() && absl::c_all_of(*factors, finite)) continue;
      return bad(name, " must have ", out.inverse.size(), " positive numbers for heads of ", size,
                 ", has ", factors->size());
    }
    const auto& factors = static_cast<double>(tokens) > original ? c.long_factor : c.short_factor;
    for (size_t i = 0; i < factors.size(); ++i) out.inverse[i] /= factors[i];
    out.attention_factor = LongropeAttention(c, original);
  }
  if (absl::c_all_of(out.inverse, finite) && std::isfinite(out.attention_factor)) return out;
  return bad("type ", c.type, " with theta ", c.theta, " and factor ", c.factor,
             " gives frequencies that are not positive and finite");
}

Rotation MakeRotation(const DTensor& positions, const DTensor& frequencies, double attention_factor,
                      DType dtype) {
  const NoGrad no_grad;
  DTensor angle = mul(unsqueeze(to(positions, DType::kF64), -1), frequencies);
  if (angle.ndim() == 3) angle = unsqueeze(angle, 1);
  angle = cat({angle, angle}, -1);
  DTensor c = cos(angle), s = sin(angle);
  if (attention_factor != 1) c = mul(c, attention_factor), s = mul(s, attention_factor);
  return {to(c, dtype), to(s, dtype)};
}

DTensor Rotate(const DTensor& x, const Rotation& by) {
  const int64_t half = x.size(-1) / 2;
  const DTensor a = slice(x, -1, 0, half), b = slice(x, -1, half, 2 * half);
  return x * by.cos + cat({neg(b), a}, -1) * by.sin;
}

}  // namespace dtensor
