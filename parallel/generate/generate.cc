#include "dtensor/parallel/generate/generate.h"

#include <algorithm>

#include "absl/algorithm/container.h"
#include "absl/strings/str_cat.h"
#include "dtensor/distribute.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/mode_scope.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

absl::Status CheckPrompts(const CausalLM& model, absl::Span<const std::vector<int64_t>> prompts,
                          const GenerateOptions& options) {
  DT_RETURN_IF_ERROR(CheckSampling(options.sampling));
  if (options.max_new < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_new must be positive, is ", options.max_new));
  }
  if (prompts.empty()) return absl::InvalidArgumentError("there are no prompts");
  for (size_t i = 0; i < prompts.size(); ++i) {
    const int64_t length = static_cast<int64_t>(prompts[i].size());
    if (length == 0)
      return absl::InvalidArgumentError(absl::StrCat("prompt ", i, " has no tokens"));
    if (length >= model.max_tokens()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prompt ", i, " has ", length, " tokens; the model has ",
                       model.max_positions(), " positions, one of them for a new token"));
    }
    for (const int64_t id : prompts[i]) {
      if (id >= 0 && id < model.vocab()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("prompt ", i, " has the token ", id, "; the model has ", model.vocab()));
    }
  }
  return absl::OkStatus();
}

// The rows of a batch as they grow, and what a model is told of them.
class Batch {
 public:
  Batch(const CausalLM& model, absl::Span<const std::vector<int64_t>> prompts)
      : mesh_(model.Parameters()[0]->mesh()), rows_(static_cast<int64_t>(prompts.size())) {
    for (const auto& p : prompts) length_ = std::max(length_, static_cast<int64_t>(p.size()));
    for (const auto& p : prompts) {
      padding_.push_back(length_ - static_cast<int64_t>(p.size()));
      ids_.emplace_back(static_cast<size_t>(padding_.back()), p[0]);
      ids_.back().insert(ids_.back().end(), p.begin(), p.end());
    }
    padded_ = absl::c_any_of(padding_, [](int64_t n) { return n > 0; });
    for (int m = 0; m < mesh_.ndim(); ++m) {
      // Fewer rows than ranks of dp: all have all.
      const bool share = mesh_.names()[m] == "dp" && rows_ >= mesh_.size(m);
      placements_.push_back(share ? Shard(0) : Replicate());
    }
  }
  int64_t length() const { return length_; }
  void Append(absl::Span<const int64_t> next) {
    for (int64_t r = 0; r < rows_; ++r) ids_[r].push_back(next[r]);
    ++length_;
  }
  // Tokens from `start` on. Padding repeats a row's first token.
  DTensor Ids(int64_t start) const {
    return Make(length_ - start, DType::kI64,
                [&](int64_t r, int64_t i) { return ids_[r][start + i]; });
  }
  // Null without padding.
  DTensor Positions(int64_t start) const {
    if (!padded_) return {};
    return Make(length_ - start, DType::kI64, [&](int64_t r, int64_t i) {
      return std::max<int64_t>(start + i - padding_[r], 0);
    });
  }
  DTensor Mask() const {
    if (!padded_) return {};
    return Make(length_, DType::kBool,
                [&](int64_t r, int64_t i) { return int64_t{i >= padding_[r]}; });
  }

 private:
  template <class F>
  DTensor Make(int64_t columns, DType dtype, F value) const {
    std::vector<int64_t> values;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t i = 0; i < columns; ++i) values.push_back(value(r, i));
    }
    return FromVector(values, {rows_, columns},
                      {.dtype = dtype, .mesh = mesh_, .placements = placements_});
  }

  const DeviceMesh mesh_;
  const int64_t rows_;
  int64_t length_ = 0;
  bool padded_ = false;
  std::vector<int64_t> padding_;
  std::vector<std::vector<int64_t>> ids_;
  Placements placements_;
};

}  // namespace

std::vector<std::vector<int64_t>> Generate(CausalLM& model,
                                           absl::Span<const std::vector<int64_t>> prompts,
                                           const GenerateOptions& options) {
  ThrowIfError(CheckPrompts(model, prompts, options));
  const NoGrad no_grad;
  const EvaluationScope evaluation(model);
  Batch batch(model, prompts);
  const int64_t steps = std::min(options.max_new, model.max_tokens() - batch.length());
  KVCache cache(batch.length() + steps);
  std::vector<std::vector<int64_t>> continuations(prompts.size());
  std::vector<bool> ended(prompts.size());
  for (int64_t step = 0; step < steps; ++step) {
    const DTensor logits =
        model.Decode(batch.Ids(cache.length), cache, batch.Positions(cache.length), batch.Mask(),
                     /*last_only=*/true);
    const DTensor last = select(logits, 1, -1);
    const bool penalty = options.sampling.repetition_penalty != 1;
    const DTensor tokens = NextTokens(last, options.sampling, penalty ? batch.Ids(0) : DTensor());
    std::vector<int64_t> next = tokens.ToVector<int64_t>();
    batch.Append(next);
    for (size_t r = 0; r < next.size(); ++r) {
      if (ended[r]) {
        next[r] = -1;
        continue;
      }
      continuations[r].push_back(next[r]);
      ended[r] = absl::c_linear_search(options.stop, next[r]);
    }
    if (options.on_tokens) options.on_tokens(next);
    if (absl::c_all_of(ended, [](bool end) { return end; })) break;
  }
  return continuations;
}

}  // namespace dtensor
