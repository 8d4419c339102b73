#include "dtensor/parallel/generate/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "dtensor/distribute.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

absl::Status OutOfRange(const char* option, const char* range, double value) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s must be %s, is %.17g", option, range, value));
}

// Floats of at least 32 bits without pending sums; the vocabulary whole, or cut into blocks on one
// mesh dim, which is `cut`.
DTensor SettledLogits(const DTensor& logits, int* cut) {
  if (logits.ndim() != 2 || logits.size(1) == 0 || !IsFloating(logits.dtype())) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("logits must be floating [rows, vocab], got ", logits.spec().ToString())));
  }
  *cut = -1;
  Placements placements = WithoutPending(logits.placements());
  for (size_t m = 0; m < placements.size(); ++m) {
    Placement& p = placements[m];
    if (!p.cuts() || (p.is_shard() && p.dim() == 0)) continue;
    if (p.is_shard() && *cut < 0) {
      *cut = static_cast<int>(m);
    } else {
      p = Replicate();
    }
  }
  const DTensor x = logits.Redistribute(placements, {.shared = true});
  return SizeOf(x.dtype()) < 4 ? to(x, DType::kF32) : x;
}

// This rank's k best, filled up with candidates that nobody takes where it has less.
Values LocalTop(const DTensor& local, int64_t k, int64_t first_token, int64_t vocab) {
  const int64_t rows = local.size(0), have = std::min(k, local.size(1));
  Values top;
  if (have == 1) {
    top = max(local, 1, /*keepdim=*/true);
  } else if (have > 0) {
    top = topk(local, have, 1);
  } else {
    top = {new_zeros(local, {rows, 0}), new_zeros(local, {rows, 0}, {.dtype = DType::kI64})};
  }
  top[1] = top[1] + first_token;
  if (have == k) return top;
  return {cat({{top[0], new_full(local, {rows, k - have}, -kInfinity)}}, 1),
          cat({{top[1], new_full(local, {rows, k - have}, vocab, {.dtype = DType::kI64})}}, 1)};
}

}  // namespace

absl::Status CheckSampling(const SamplingOptions& o) {
  if (!(o.temperature >= 0 && std::isfinite(o.temperature))) {
    return OutOfRange("temperature", "at least 0 and finite", o.temperature);
  }
  if (o.top_k < 0) return OutOfRange("top_k", "at least 0", static_cast<double>(o.top_k));
  if (!(o.top_p > 0 && o.top_p <= 1)) return OutOfRange("top_p", "above 0, at most 1", o.top_p);
  if (o.min_tokens_to_keep < 1) {
    return OutOfRange("min_tokens_to_keep", "at least 1",
                      static_cast<double>(o.min_tokens_to_keep));
  }
  if (!(o.repetition_penalty > 0 && std::isfinite(o.repetition_penalty))) {
    return OutOfRange("repetition_penalty", "above 0 and finite", o.repetition_penalty);
  }
  return absl::OkStatus();
}

Values TopTokens(const DTensor& logits, int64_t k) {
  int cut = -1;
  const DTensor x = SettledLogits(logits, &cut);
  const int64_t vocab = x.size(1);
  k = std::clamp<int64_t>(k, 1, vocab);
  if (cut < 0) return k == 1 ? max(x, 1, /*keepdim=*/true) : topk(x, k, 1);
  const DeviceMesh& mesh = x.mesh();
  const int64_t ranks = mesh.size(cut);
  const int64_t each =
      std::min(k, ShardInterval(vocab, x.placements()[cut].unit(), ranks, 0).length());
  const Values mine = LocalTop(x.ToLocal(), each, x.spec().local_start()[1], vocab);
  Placements cut_here(x.placements().begin(), x.placements().end()), whole = cut_here;
  cut_here[cut] = Shard(1);
  whole[cut] = Replicate();
  const auto gathered = [&](const DTensor& part) {
    const Shape shape = {x.size(0), each * ranks};
    return FromLocal(part, mesh, cut_here, {.shape = shape}).Redistribute(whole);
  };
  // Candidates stand in the order of ranks, so the first of equal ones is the lowest token.
  const DTensor values = gathered(mine[0]), tokens = gathered(mine[1]);
  const Values best = k == 1 ? max(values, 1, /*keepdim=*/true) : topk(values, k, 1);
  return {best[0], gather(tokens, 1, best[1])};
}

DTensor PenaliseRepetition(const DTensor& logits, const DTensor& seen, double penalty) {
  int cut = -1;
  const DTensor x = SettledLogits(logits, &cut);
  const DTensor scores = Settled(gather(x, 1, seen));
  return scatter(x, 1, seen, where(lt(scores, 0), scores * penalty, scores / penalty));
}

namespace {

// Which token each column is, cut as x is.
DTensor TokensOf(const DTensor& x, int cut) {
  Placements placements(x.placements().size());
  if (cut >= 0) placements[cut] = x.placements()[cut].WithDim(0);
  return arange(0, x.size(1), 1,
                {.dtype = DType::kI64, .mesh = x.mesh(), .placements = placements});
}

DTensor KeepTopK(const DTensor& x, int cut, int64_t k) {
  const Values top = TopTokens(x, k);
  const DTensor least = slice(top[0], 1, k - 1, k), token = slice(top[1], 1, k - 1, k);
  const DTensor behind = logical_and(eq(x, least), gt(TokensOf(x, cut), token));
  return masked_fill(x, logical_or(lt(x, least), behind), -kInfinity);
}

// Halves the range in which the least logit that is kept lies until no number is between its ends:
// those from `low` on have the share, those from `high` on have not. `count` tokens stay at least.
DTensor KeepTopP(const DTensor& x, double p, int64_t count) {
  const bool wide = x.dtype() == DType::kF64;
  const DTensor most = Settled(amax(x, {1}, /*keepdim=*/true));
  const DTensor weights = exp(x - most);
  const auto total = [](const DTensor& of) { return Settled(sum(of, {1}, /*keepdim=*/true)); };
  const DTensor share = total(weights) * p;
  // What is further from the largest has no weight in this type.
  DTensor low = most - (wide ? 750.0 : 110.0), high = most + 1;
  for (int i = 0; i < (wide ? 64 : 36); ++i) {
    const DTensor middle = (low + high) * 0.5;
    const DTensor enough = ge(total(where(ge(x, middle), weights, 0.0)), share);
    low = where(enough, middle, low);
    high = where(enough, high, middle);
  }
  DTensor least = minimum(low, most);
  if (count > 1) {
    const DTensor top = TopTokens(x, count)[0];
    least = minimum(least, slice(top, 1, top.size(1) - 1, top.size(1)));
  }
  return masked_fill(x, lt(x, least), -kInfinity);
}

// x / temperature. Below kTiny that may be more than any float, for several tokens: there it is
// that less its largest, by no less than the least normal number. What is not the largest is as
// good as never drawn.
DTensor OverTemperature(const DTensor& x, double temperature) {
  constexpr double kTiny = 1e-6;
  if (temperature >= kTiny) return x / temperature;
  const bool wide = x.dtype() == DType::kF64;
  using F32 = std::numeric_limits<float>;
  using F64 = std::numeric_limits<double>;
  const double largest = wide ? F64::max() : F32::max(), least = wide ? F64::min() : F32::min();
  const DTensor most = Settled(amax(x, {1}, /*keepdim=*/true));
  return (x - clamp(most, -largest, largest)) / std::max(temperature, least);
}

}  // namespace

DTensor FilterLogits(const DTensor& logits, const SamplingOptions& options) {
  const NoGrad no_grad;
  ThrowIfError(CheckSampling(options));
  int cut = -1;
  DTensor x = SettledLogits(logits, &cut);
  if (options.temperature > 0) x = OverTemperature(x, options.temperature);
  if (options.top_k > 0 && options.top_k < x.size(1)) x = KeepTopK(x, cut, options.top_k);
  if (options.top_p < 1) x = KeepTopP(x, options.top_p, options.min_tokens_to_keep);
  return x;
}

DTensor NextTokens(const DTensor& logits, const SamplingOptions& options, const DTensor& seen) {
  const NoGrad no_grad;
  ThrowIfError(CheckSampling(options));
  if (seen.defined()) RequireOwn("next_tokens", {{"seen", seen}});  // without a penalty unread
  int cut = -1;
  DTensor x = SettledLogits(logits, &cut);
  if (options.repetition_penalty != 1 && seen.defined()) {
    x = PenaliseRepetition(x, seen, options.repetition_penalty);
  }
  if (options.temperature > 0) {
    x = FilterLogits(x, options);
    const DTensor noise = empty_like(x);
    exponential_(noise);
    x = x - log(noise);
  }
  const Values best = TopTokens(x, 1);
  for (const double value : best[0].ToVector<double>()) {
    if (std::isnan(value)) Throw(absl::OutOfRangeError("there are logits that are no numbers"));
  }
  return best[1];
}

}  // namespace dtensor
