#include "dtensor/parallel/models/gpt.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

constexpr double kStd = 0.02;

Init In() { return Init::Normal(0, kStd); }
Init BackIntoStream(const GPTConfig& c) {
  return Init::Normal(0, kStd / std::sqrt(2.0 * static_cast<double>(c.layers)));
}

const GPTConfig& Checked(const GPTConfig& c) {
  const auto positive = [](const char* name, int64_t value) {
    if (value > 0) return;
    ThrowIfError(
        absl::InvalidArgumentError(absl::StrCat("[GPT] ", name, " must be positive, got ", value)));
  };
  positive("vocab", c.vocab);
  positive("seq", c.seq);
  positive("layers", c.layers);
  positive("hidden", c.hidden);
  positive("heads", c.heads);
  if (!(c.dropout >= 0 && c.dropout < 1)) {
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("[GPT] dropout must be in [0, 1), got ", c.dropout)));
  }
  return c;
}

}  // namespace

GPTBlock::GPTBlock(const GPTConfig& c)
    : norm1_(AddChild<LayerNorm>("norm1", c.hidden)),
      attn_(AddChild<CausalSelfAttention>("attn", c.hidden, c.heads, In(), BackIntoStream(c),
                                          c.dropout)),
      drop1_(AddChild<Dropout>("drop1", c.dropout)),
      norm2_(AddChild<LayerNorm>("norm2", c.hidden)),
      mlp_(AddChild<MLP>("mlp", c.hidden, 4 * c.hidden, In(), BackIntoStream(c))),
      drop2_(AddChild<Dropout>("drop2", c.dropout)) {}

Values GPTBlock::Forward(const Values& in) {
  const DTensor x = in[0] + drop1_(attn_(norm1_(in[0])));
  return {x + drop2_(mlp_(norm2_(x)))};
}

GPT::GPT(const GPTConfig& config)
    : config_(Checked(config)),
      tokens_(AddChild<Embedding>("tokens", config.vocab, config.hidden, In())),
      positions_(AddParameter("positions", {config.seq, config.hidden}, In())),
      drop_(AddChild<Dropout>("drop", config.dropout)),
      blocks_(AddChild<Sequential>("blocks")),
      norm_([&]() -> LayerNorm& {
        for (int64_t i = 0; i < config.layers; ++i) blocks_.Append<GPTBlock>(config);
        return AddChild<LayerNorm>("norm", config.hidden);
      }()),
      head_(AddChild<Linear>("head", config.hidden, config.vocab, /*bias=*/false, In())) {}

Values GPT::Forward(const Values& in) {
  const int64_t seq = in[0].size(-1);
  if (in[0].ndim() != 2 || seq > config_.seq) {
    ThrowIfError(absl::InvalidArgumentError(absl::StrCat(
        "[GPT] ids must be [batch, seq <= ", config_.seq, "], got ", in[0].spec().ToString())));
  }
  DTensor x = drop_(tokens_(in[0]) + slice(positions_, 0, 0, seq));
  for (const auto& [name, block] : blocks_.children()) {
    x = (config_.recompute ? block->Recomputed({x}) : (*block)(Values{x}))[0];
  }
  return {head_(norm_(x))};
}

}  // namespace dtensor
