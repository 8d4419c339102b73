// Generate: a model continues texts of tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "dtensor/parallel/generate/sample.h"
#include "dtensor/parallel/models/causal_lm.h"

namespace dtensor {

struct GenerateOptions {
  int64_t max_new = 64;            // tokens per prompt, at most
  SamplingOptions sampling = {};   // draws come from the rank's default generator
  std::vector<int64_t> stop = {};  // a prompt's continuation ends with the first of these
  // Called on every rank after every step with each prompt's next token; -1 for those that have
  // ended.
  std::function<void(absl::Span<const int64_t>)> on_tokens = {};
};

// What follows each prompt, with the token that stopped it. Prompts may differ in length: shorter
// ones are padded on the left, which changes no number of theirs beyond rounding; but of a model
// with "longrope" or "dynamic" the longest row of the batch decides how all of them are turned, as
// in transformers. It ends when all have been stopped, at max_new tokens, or at max_tokens() of the
// model, without a word. The model runs in evaluation mode, on the mesh of its parameters; prompts
// are sharded over the mesh dim "dp" if there are as many, the KV cache as the plan shards keys.
// All ranks of the mesh call it alike and get the same tokens.
//   Comm:   that of the model and of NextTokens, and one gather of the tokens over dp per step.
//   Errors: InvalidArgument for options out of range, no prompts, an empty or too long one, tokens
//           that the model has not; OutOfRange for logits that are no numbers.
std::vector<std::vector<int64_t>> Generate(CausalLM& model,
                                           absl::Span<const std::vector<int64_t>> prompts,
                                           const GenerateOptions& options = {});

}  // namespace dtensor
