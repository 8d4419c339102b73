#include "dtensor/parallel/models/gpt2.h"

#include <cmath>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

const GPT2Config& Checked(const GPT2Config& config) {
  const absl::Status status = CheckConfig(config);
  if (!status.ok()) Throw(Prefixed("[GPT2]", status));
  return config;
}

Init Drawn(const GPT2Config& c) { return Init::Normal(0, c.init_std); }
Init BackIntoStream(const GPT2Config& c) {
  return Init::Normal(0, c.init_std / std::sqrt(2.0 * static_cast<double>(c.layers)));
}

Activation ActivationOf(const std::string& name) {
  if (name == "gelu") return Activation::kGelu;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu") return Activation::kSilu;
  return Activation::kGeluTanh;
}

double ScaleOf(const GPT2Config& c, int64_t layer) {
  const double by_head = c.scale_by_head ? std::sqrt(static_cast<double>(c.head_size())) : 1;
  return 1 / (by_head * (c.scale_by_layer ? static_cast<double>(layer + 1) : 1));
}

}  // namespace

const std::vector<std::string>& GPT2Activations() {
  static const auto* names =
      new std::vector<std::string>{"gelu_new", "gelu_pytorch_tanh", "gelu", "relu", "silu"};
  return *names;
}

absl::Status CheckConfig(const GPT2Config& c) {
  const std::pair<const char*, int64_t> sizes[] = {
      {"vocab", c.vocab},   {"hidden", c.hidden}, {"inner", c.inner},
      {"layers", c.layers}, {"heads", c.heads},   {"max_positions", c.max_positions}};
  for (const auto& [name, value] : sizes) {
    if (value > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(name, " must be positive, is ", value));
  }
  if (c.hidden % c.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("heads must divide hidden, are ", c.heads, " and ", c.hidden));
  }
  if (!(std::isfinite(c.norm_eps) && c.norm_eps >= 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("norm_eps must be finite and not negative, is ", c.norm_eps));
  }
  for (const double p : {c.embedding_dropout, c.attention_dropout, c.residual_dropout}) {
    if (p >= 0 && p < 1) continue;
    return absl::InvalidArgumentError(absl::StrCat("dropout must be in [0, 1), is ", p));
  }
  if (!absl::c_linear_search(GPT2Activations(), c.activation)) {
    return absl::InvalidArgumentError(absl::StrCat("activation \"", c.activation,
                                                   "\" is not supported; there are ",
                                                   absl::StrJoin(GPT2Activations(), ", ")));
  }
  for (const Shape& shape : {Shape{c.vocab, c.hidden}, Shape{c.inner, c.hidden},
                             Shape{c.max_positions, c.hidden}, Shape{3, c.hidden, c.hidden}}) {
    const absl::Status fits = CheckedBytes(shape, DType::kF64).status();
    if (!fits.ok()) return Prefixed("hidden or another size is too large", fits);
  }
  return absl::OkStatus();
}

Conv1D::Conv1D(int64_t in, int64_t out, Init weight, std::optional<Activation> activation)
    : weight_(AddParameter("weight", {in, out}, std::move(weight))),
      bias_(AddParameter("bias", {out}, Init::Zeros())),
      activation_(activation) {}

Values Conv1D::Forward(const Values& in) {
  if (activation_) return {linear_activation(in[0], t(weight_), bias_, *activation_)};
  return {linear(in[0], t(weight_), bias_)};
}

GPT2Attention::GPT2Attention(const GPT2Config& c, const CausalLM& model, int64_t layer)
    : hidden_(c.hidden),
      head_size_(c.head_size()),
      dropout_(c.attention_dropout),
      scale_(ScaleOf(c, layer)),
      in_(AddChild<Conv1D>("c_attn", c.hidden, 3 * c.hidden, Drawn(c))),
      out_(AddChild<Conv1D>("c_proj", c.hidden, c.hidden, BackIntoStream(c))),
      drop_(AddChild<Dropout>("resid_dropout", c.residual_dropout)),
      attend_(model, layer) {}

Values GPT2Attention::Forward(const Values& in) {
  const Values qkv = split(in_(in[0]), hidden_, -1);
  const auto heads = [&](int i) { return SplitHeads(qkv[i], head_size_); };
  const DTensor mask = in.size() > 1 ? in[1] : DTensor();
  const DTensor o = attend_(heads(0), heads(1), heads(2), mask, scale_, training() ? dropout_ : 0);
  return {drop_(out_(JoinHeads(o)))};
}

GPT2MLP::GPT2MLP(const GPT2Config& c)
    : up_(AddChild<Conv1D>("c_fc", c.hidden, c.inner, Drawn(c), ActivationOf(c.activation))),
      down_(AddChild<Conv1D>("c_proj", c.inner, c.hidden, BackIntoStream(c))),
      drop_(AddChild<Dropout>("dropout", c.residual_dropout)) {}

Values GPT2MLP::Forward(const Values& in) { return {drop_(down_(up_(in[0])))}; }

GPT2Block::GPT2Block(const GPT2Config& c, const CausalLM& model, int64_t layer)
    : norm1_(AddChild<LayerNorm>("ln_1", c.hidden, c.norm_eps)),
      attention_(AddChild<GPT2Attention>("attn", c, model, layer)),
      norm2_(AddChild<LayerNorm>("ln_2", c.hidden, c.norm_eps)),
      mlp_(AddChild<GPT2MLP>("mlp", c)) {}

Values GPT2Block::Forward(const Values& in) {
  Values normed = {norm1_(in[0])};
  normed.insert(normed.end(), in.begin() + 1, in.end());
  const DTensor x = in[0] + attention_(normed)[0];
  return {x + mlp_(norm2_(x))};
}

GPT2::Body::Body(const GPT2Config& c, const CausalLM& lm)
    : recompute(c.recompute),
      tokens(AddChild<Embedding>("wte", c.vocab, c.hidden, Drawn(c))),
      positions(AddChild<Embedding>("wpe", c.max_positions, c.hidden, Drawn(c))),
      drop(AddChild<Dropout>("drop", c.embedding_dropout)),
      blocks(AddChild<Sequential>("h")),
      norm([&]() -> LayerNorm& {
        for (int64_t i = 0; i < c.layers; ++i) blocks.Append<GPT2Block>(c, lm, i);
        return AddChild<LayerNorm>("ln_f", c.hidden, c.norm_eps);
      }()) {}

Values GPT2::Body::Forward(const Values& in) {
  DTensor x = drop(tokens(in[0]) + positions(in[1]));
  for (const auto& [name, block] : blocks.children()) {
    Values all = {x};
    if (in.size() > 2) all.push_back(in[2]);
    x = (recompute ? block->Recomputed(all) : (*block)(all))[0];
  }
  return {norm(x)};
}

GPT2::GPT2(const GPT2Config& config)
    : config_(Checked(config)),
      body_(AddChild<Body>("transformer", config, *this)),
      head_(
          AddChild<Linear>("lm_head", config.hidden, config.vocab, /*bias=*/false, Drawn(config))) {
  if (config.tied) Tie(body_.tokens.weight(), head_.weight());
}

// Older files have the causal mask of every layer.
bool GPT2::IgnoresTensor(absl::string_view name) const {
  return absl::EndsWith(name, ".attn.bias") || absl::EndsWith(name, ".attn.masked_bias");
}

Values GPT2::Forward(const Values& in) {
  const Sight sight = Look(in);
  if (sight.positions.ndim() == 1 && sight.keys > config_.max_positions) {
    Throw(absl::InvalidArgumentError(
        absl::StrCat("[GPT2] takes ", config_.max_positions, " positions, got ", sight.keys)));
  }
  Values all = {in[0], sight.positions};
  if (sight.mask.defined()) all.push_back(sight.mask);
  return {head_(Wanted(body_(all)[0]))};
}

}  // namespace dtensor
