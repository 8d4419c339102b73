#include "dtensor/parallel/models/llama.h"

#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

const LlamaConfig& Checked(const LlamaConfig& config) {
  const absl::Status status = CheckConfig(config);
  if (!status.ok()) Throw(Prefixed("[Llama]", status));
  return config;
}

Init Drawn(const LlamaConfig& c) { return Init::Normal(0, c.init_std); }

// x in the place of in[0].
Values WithSight(const DTensor& x, const Values& in) {
  Values out = {x};
  out.insert(out.end(), in.begin() + 1, in.end());
  return out;
}

}  // namespace

absl::Status CheckConfig(const LlamaConfig& c) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocab", c.vocab},         {"hidden", c.hidden},
      {"inner", c.inner},         {"layers", c.layers},
      {"heads", c.heads},         {"kv_heads", c.kv_heads},
      {"head_size", c.head_size}, {"max_positions", c.max_positions}};
  for (const auto& [name, value] : sizes) {
    if (value > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " must be positive, is ", value));
  }
  if (c.heads % c.kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("kv_heads must divide heads, are ", c.kv_heads, " and ", c.heads));
  }
  if (!(std::isfinite(c.norm_eps) && c.norm_eps >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("norm_eps must be finite and not negative, is ", c.norm_eps));
  }
  if (!(c.attention_dropout >= 0 && c.attention_dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("attention_dropout must be in [0, 1), is ", c.attention_dropout));
  }
  for (const Shape& shape : {Shape{c.vocab, c.hidden}, Shape{c.inner, c.hidden},
                             Shape{c.heads, c.head_size, c.hidden}}) {
    const absl::Status fits = CheckedBytes(shape, DType::kF64).status();
    if (!fits.ok()) return Prefixed("hidden or another size is too large", fits);
  }
  if (c.head_size > kMostHeadSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_size must be at most ", kMostHeadSize, ", is ", c.head_size));
  }
  return MakeRopeFrequencies(c.rope, c.head_size, c.max_positions, 0).status();
}

LlamaAttention::LlamaAttention(const LlamaConfig& c, const CausalLM& model, int64_t layer)
    : head_size_(c.head_size),
      dropout_(c.attention_dropout),
      q_(AddChild<Linear>("q_proj", c.hidden, c.heads * c.head_size, c.attention_bias, Drawn(c))),
      k_(AddChild<Linear>("k_proj", c.hidden, c.kv_heads * c.head_size, c.attention_bias,
                          Drawn(c))),
      v_(AddChild<Linear>("v_proj", c.hidden, c.kv_heads * c.head_size, c.attention_bias,
                          Drawn(c))),
      o_(AddChild<Linear>("o_proj", c.heads * c.head_size, c.hidden, c.attention_bias, Drawn(c))),
      attend_(model, layer) {}

Values LlamaAttention::Forward(const Values& in) {
  const Rotation turn = {in[1], in[2]};
  const DTensor q = Rotate(SplitHeads(q_(in[0]), head_size_), turn);
  const DTensor k = Rotate(SplitHeads(k_(in[0]), head_size_), turn);
  const DTensor v = SplitHeads(v_(in[0]), head_size_);
  const DTensor mask = in.size() > 3 ? in[3] : DTensor();
  return {o_(JoinHeads(attend_(q, k, v, mask, {}, training() ? dropout_ : 0)))};
}

LlamaMLP::LlamaMLP(const LlamaConfig& c)
    : gate_(AddChild<Linear>("gate_proj", c.hidden, c.inner, c.mlp_bias, Drawn(c),
                             Activation::kSilu)),
      up_(AddChild<Linear>("up_proj", c.hidden, c.inner, c.mlp_bias, Drawn(c))),
      down_(AddChild<Linear>("down_proj", c.inner, c.hidden, c.mlp_bias, Drawn(c))) {}

Values LlamaMLP::Forward(const Values& in) { return {down_(gate_(in[0]) * up_(in[0]))}; }

LlamaBlock::LlamaBlock(const LlamaConfig& c, const CausalLM& model, int64_t layer)
    : attention_(AddChild<LlamaAttention>("self_attn", c, model, layer)),
      mlp_(AddChild<LlamaMLP>("mlp", c)),
      norm1_(AddChild<RMSNorm>("input_layernorm", c.hidden, c.norm_eps)),
      norm2_(AddChild<RMSNorm>("post_attention_layernorm", c.hidden, c.norm_eps)) {}

Values LlamaBlock::Forward(const Values& in) {
  const DTensor x = in[0] + attention_(WithSight(norm1_(in[0]), in))[0];
  return {x + mlp_(norm2_(x))};
}

Llama::Body::Body(const LlamaConfig& c, const CausalLM& lm)
    : recompute(c.recompute),
      tokens(AddChild<Embedding>("embed_tokens", c.vocab, c.hidden, Drawn(c), c.padding)),
      blocks(AddChild<Sequential>("layers")),
      norm([&]() -> RMSNorm& {
        for (int64_t i = 0; i < c.layers; ++i) blocks.Append<LlamaBlock>(c, lm, i);
        return AddChild<RMSNorm>("norm", c.hidden, c.norm_eps);
      }()) {}

Values Llama::Body::Forward(const Values& in) {
  DTensor x = tokens(in[0]);
  for (const auto& [name, block] : blocks.children()) {
    const Values all = WithSight(x, in);
    x = (recompute ? block->Recomputed(all) : (*block)(all))[0];
  }
  return {norm(x)};
}

Llama::Llama(const LlamaConfig& config)
    : config_(Checked(config)),
      body_(AddChild<Body>("model", config, *this)),
      head_(
          AddChild<Linear>("lm_head", config.hidden, config.vocab, /*bias=*/false, Drawn(config))) {
  if (config.tied) Tie(body_.tokens.weight(), head_.weight());
}

bool Llama::IgnoresTensor(absl::string_view name) const {
  return absl::EndsWith(name, ".rotary_emb.inv_freq");
}

int64_t Llama::TokensUpToTheLast(const Sight& sight) const {
  const bool asked = config_.rope.type == "dynamic" || config_.rope.type == "longrope";
  const DTensor& given = sight.positions;
  if (!asked || given.ndim() < 2 || given.numel() == 0) return sight.keys;
  const DTensor last = max(given).Redistribute(Placements(given.mesh().ndim(), Replicate()));
  return last.has_values() ? static_cast<int64_t>(last.Item()) + 1 : sight.keys;
}

Values Llama::Forward(const Values& in) {
  const Sight sight = Look(in);
  const RopeConfig& how = config_.rope;
  const int64_t tokens = TokensUpToTheLast(sight);
  const RopeFrequencies rope =
      ValueOrThrow(MakeRopeFrequencies(how, config_.head_size, config_.max_positions, tokens));
  const DeviceMesh& mesh = in[0].mesh();
  const auto make = [&] {
    return FromVector(rope.inverse, {config_.head_size / 2}, {.dtype = DType::kF64, .mesh = mesh});
  };
  const bool beyond =
      tokens > (how.type == "longrope" && how.original_positions > 0 ? how.original_positions
                                                                     : config_.max_positions);
  // "dynamic" has others for every token there: keeping them would take memory for each.
  const DTensor frequencies =
      beyond && how.type == "dynamic"
          ? make()
          : Cached((beyond ? "frequencies beyond " : "frequencies ") + mesh.ToString(), make);
  const Rotation turn =
      MakeRotation(sight.positions, frequencies, rope.attention_factor, head_.weight().dtype());
  Values all = {in[0], turn.cos, turn.sin};
  if (sight.mask.defined()) all.push_back(sight.mask);
  return {head_(Wanted(body_(all)[0]))};
}

}  // namespace dtensor
