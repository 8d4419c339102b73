// How a Llama and a GPT2 are spread over the mesh dim "tp".
#pragma once

#include "dtensor/parallel/models/gpt2.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor {

struct ModelPlanOptions {
  // Norms and residuals are sharded by sequence: per block two all-gathers and two reduce-scatters
  // in forward and in backward instead of two all-reduces each. A sequence of one token is not cut.
  bool sequence_parallel = false;
  // Logits stay sharded by class, as cross_entropy takes them; else every rank gets all.
  bool loss_parallel = true;
};

// Vocabulary, whole groups of heads and inner features are sharded. With more ranks than kv_heads
// some have no heads.
//   Source: torchtitan, models/llama3
Plan LlamaPlan(const LlamaConfig& config, const ModelPlanOptions& options = {});
// The same; of the fused q, k, v each is cut by heads.
Plan GPT2Plan(const GPT2Config& config, const ModelPlanOptions& options = {});

}  // namespace dtensor
