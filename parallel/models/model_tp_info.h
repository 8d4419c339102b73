// A Llama and a GPT2 as ATorch's TPInfo spreads them: rules by suffix (parallel/plan/tp_info.h).
#pragma once

#include "dtensor/parallel/models/gpt2.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/plan/tp_info.h"

namespace dtensor {

// Vocabulary, whole groups of heads and inner features are sharded, logits by class. No attribute
// shrinks: the modules infer what they have, so heads need not divide.
//   Source: ATorch, the examples of TPInfo for Llama and GPT-2
TPInfo LlamaTPInfo(const LlamaConfig& config);
// The same; of the fused q, k, v each is cut by heads, and dropout is said to be alike or not.
TPInfo GPT2TPInfo(const GPT2Config& config);

}  // namespace dtensor
