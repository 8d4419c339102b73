#include "dtensor/parallel/pipeline/model_stages.h"

#include <functional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/rope.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// Of what a decoder is made.
struct Parts {
  std::function<DTensor(const DTensor& ids)> embed;
  std::vector<Module*> embeddings;
  std::vector<Module*> blocks;
  // What blocks take besides x [batch, seq, hidden].
  std::function<Values(const DTensor& x)> beside;
  Module *norm, *head;
  Parameter* table = nullptr;  // of a tied head
  bool recompute;
};

// [0, 1, ...] of the tokens of x [batch, seq, ...], on its mesh.
DTensor PositionsOf(const DTensor& x) {
  return arange(0, x.size(1), 1, {.dtype = DType::kI64, .mesh = x.mesh()});
}

// Logits by a table whose rows may be sharded: x is whole where they are, and so are its rows'
// logits then.
DTensor ByTable(DTensor x, const DTensor& table) {
  Placements placements(x.placements().begin(), x.placements().end());
  bool moves = false;
  for (size_t d = 0; d < placements.size(); ++d) {
    if (table.placements()[d].is_replicate() || placements[d].is_replicate()) continue;
    placements[d] = Replicate();
    moves = true;
  }
  if (moves) x = x.Redistribute(placements);
  return linear(x, table);
}

absl::StatusOr<std::vector<PipelineStage>> StagesOf(const Parts& parts, int stages) {
  // Embedding and head are a block each.
  const std::vector<double> weights(parts.blocks.size() + 2, 1);
  DT_ASSIGN_OR_RETURN(const std::vector<int64_t> cuts, CutEvenly(weights, stages));
  std::vector<PipelineStage> all;
  for (int s = 0; s < stages; ++s) {
    const bool first = s == 0, last = s + 1 == stages;
    const int64_t begin = first ? 0 : cuts[s] - 1, end = cuts[s + 1] - (last ? 2 : 1);
    const std::vector<Module*> blocks(parts.blocks.begin() + begin, parts.blocks.begin() + end);
    const size_t takes = last && parts.table != nullptr ? 2 : 1;
    const auto forward = [=](const Values& in) -> Values {
      if (in.size() != takes) {
        Throw(absl::InvalidArgumentError(absl::StrCat(
            "[pipeline] a model takes ids alone through a pipeline, rows without padding at "
            "positions from 0 on; got ",
            in.size() + 1 - takes, " inputs")));
      }
      DTensor x = first ? parts.embed(in[0]) : in[0];
      Values beside;
      if (!blocks.empty()) beside = parts.beside(x);
      for (Module* block : blocks) {
        Values values = {x};
        values.insert(values.end(), beside.begin(), beside.end());
        x = (parts.recompute ? block->Recomputed(values) : (*block)(values))[0];
      }
      if (!last) return {x};
      x = (*parts.norm)(x);
      return {parts.table == nullptr ? (*parts.head)(x) : ByTable(x, in.back())};
    };
    PipelineStage stage = {forward, blocks};
    if (first) {
      stage.modules.insert(stage.modules.begin(), parts.embeddings.begin(), parts.embeddings.end());
    }
    if (last) {
      stage.modules.push_back(parts.norm);
      if (parts.table == nullptr) {
        stage.modules.push_back(parts.head);
      } else {
        stage.borrows = {parts.table};
      }
    }
    all.push_back(std::move(stage));
  }
  return all;
}

std::vector<Module*> Numbered(Module& model, absl::string_view before, int64_t n) {
  std::vector<Module*> modules;
  for (int64_t i = 0; i < n; ++i) modules.push_back(model.FindModule(absl::StrCat(before, i)));
  return modules;
}

}  // namespace

absl::StatusOr<std::vector<PipelineStage>> LlamaStages(Llama& model, int stages) {
  const LlamaConfig config = model.config();
  if (config.rope.type == "dynamic" || config.rope.type == "longrope") {
    return absl::UnimplementedError(absl::StrCat(
        "[pipeline] positions of type \"", config.rope.type, "\" depend on how many there are"));
  }
  Module* const tokens = model.FindModule("model.embed_tokens");
  const auto turn = [config](const DTensor& x) -> Values {
    const NoGrad no_grad;
    const RopeFrequencies rope = ValueOrThrow(
        MakeRopeFrequencies(config.rope, config.head_size, config.max_positions, x.size(1)));
    const DTensor frequencies =
        FromVector(rope.inverse, {config.head_size / 2}, {.dtype = DType::kF64, .mesh = x.mesh()});
    const Rotation by = MakeRotation(PositionsOf(x), frequencies, rope.attention_factor, x.dtype());
    return {by.cos, by.sin};
  };
  return StagesOf(
      {.embed = [tokens](const DTensor& ids) { return (*tokens)(ids); },
       .embeddings = {tokens},
       .blocks = Numbered(model, "model.layers.", config.layers),
       .beside = turn,
       .norm = model.FindModule("model.norm"),
       .head = model.FindModule("lm_head"),
       .table = config.tied ? model.FindParameter("model.embed_tokens.weight") : nullptr,
       .recompute = config.recompute},
      stages);
}

absl::StatusOr<std::vector<PipelineStage>> GPT2Stages(GPT2& model, int stages) {
  const GPT2Config config = model.config();
  const std::vector<Module*> in = {model.FindModule("transformer.wte"),
                                   model.FindModule("transformer.wpe"),
                                   model.FindModule("transformer.drop")};
  const auto embed = [in, config](const DTensor& ids) {
    if (ids.size(1) > config.max_positions) {
      Throw(absl::InvalidArgumentError(
          absl::StrCat("[GPT2] takes ", config.max_positions, " positions, got ", ids.size(1))));
    }
    return (*in[2])((*in[0])(ids) + (*in[1])(PositionsOf(ids)));
  };
  return StagesOf({.embed = embed,
                   .embeddings = in,
                   .blocks = Numbered(model, "transformer.h.", config.layers),
                   .beside = [](const DTensor&) { return Values(); },
                   .norm = model.FindModule("transformer.ln_f"),
                   .head = model.FindModule("lm_head"),
                   .table = config.tied ? model.FindParameter("transformer.wte.weight") : nullptr,
                   .recompute = config.recompute},
                  stages);
}

}  // namespace dtensor
