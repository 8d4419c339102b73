// How a GPT is spread over the mesh dim "tp".
#pragma once

#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor {

// Vocabulary, heads and inner features are sharded: per block one all-reduce after attention and
// one after the MLP, and the same in backward. Logits stay sharded by class.
Plan GPTPlan(const GPTConfig& config);

}  // namespace dtensor
