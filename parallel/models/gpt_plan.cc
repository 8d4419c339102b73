#include "dtensor/parallel/models/gpt_plan.h"

namespace dtensor {

Plan GPTPlan(const GPTConfig& config) {
  const int64_t head_size = config.hidden / config.heads;
  return {
      {"tokens", RowwiseParallel()},
      {"blocks.*.attn.w[qkv]", ColwiseParallel({.unit = head_size})},
      {"blocks.*.attn.wo", RowwiseParallel({.unit = head_size})},
      {"blocks.*.mlp.up", ColwiseParallel()},
      {"blocks.*.mlp.down", RowwiseParallel()},
      {"head", ColwiseParallel()},
  };
}

}  // namespace dtensor
