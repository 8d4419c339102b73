#include "dtensor/parallel/models/model_plans.h"

namespace dtensor {
namespace {

Placement StreamOf(const ModelPlanOptions& options) {
  return options.sequence_parallel ? Shard(1) : Replicate();
}

// What stays whole and works on the stream.
Style NormOf(const ModelPlanOptions& options) {
  return options.sequence_parallel ? SequenceParallel() : NoParallel();
}

ParallelOptions HeadOf(const ModelPlanOptions& options) {
  ParallelOptions head;
  if (!options.loss_parallel) head.output = Replicate();
  return head;
}

}  // namespace

Plan LlamaPlan(const LlamaConfig& c, const ModelPlanOptions& options) {
  const Placement stream = StreamOf(options);
  const int64_t d = c.head_size, group = c.heads / c.kv_heads * d;
  return {
      {"model.embed_tokens", RowwiseParallel({.output = stream})},
      {"model.layers.*.*_layernorm", NormOf(options)},
      {"model.layers.*.self_attn.q_proj", ColwiseParallel({.unit = group})},
      {"model.layers.*.self_attn.[kv]_proj", ColwiseParallel({.unit = d})},
      {"model.layers.*.self_attn.o_proj", RowwiseParallel({.unit = group, .output = stream})},
      {"model.layers.*.mlp.gate_proj", ColwiseParallel()},
      {"model.layers.*.mlp.up_proj", ColwiseParallel()},
      {"model.layers.*.mlp.down_proj", RowwiseParallel({.output = stream})},
      {"model.norm", NormOf(options)},
      {"lm_head", ColwiseParallel(HeadOf(options))},
  };
}

Plan GPT2Plan(const GPT2Config& c, const ModelPlanOptions& options) {
  const Placement stream = StreamOf(options);
  const int64_t n = c.hidden, d = c.head_size();
  return {
      {"transformer.wte", RowwiseParallel({.output = stream})},
      {"transformer.wpe", NoParallel()},
      {"transformer.h.*.ln_[12]", NormOf(options)},
      {"transformer.h.*.attn.c_attn", ColwiseParallel({.segments = {{n, d}, {n, d}, {n, d}}})},
      {"transformer.h.*.attn.c_proj", RowwiseParallel({.unit = d, .output = stream})},
      {"transformer.h.*.mlp.c_fc", ColwiseParallel()},
      {"transformer.h.*.mlp.c_proj", RowwiseParallel({.output = stream})},
      {"transformer.ln_f", NormOf(options)},
      {"lm_head", ColwiseParallel(HeadOf(options))},
  };
}

}  // namespace dtensor
