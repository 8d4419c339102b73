#include "dtensor/parallel/module/layers.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

Init FanIn(int64_t in) {
  const double bound = in > 0 ? 1 / std::sqrt(static_cast<double>(in)) : 0;
  return Init::Uniform(-bound, bound);
}

int64_t HeadSize(int64_t size, int64_t heads) {
  if (heads < 1 || size % heads != 0) {
    ThrowIfError(absl::InvalidArgumentError(
        absl::StrCat("[CausalSelfAttention] ", heads, " heads do not divide the size ", size)));
  }
  return size / heads;
}

}  // namespace

Linear::Linear(int64_t in, int64_t out, bool bias, std::optional<Init> weight,
               std::optional<Activation> activation)
    : weight_(AddParameter("weight", {out, in}, weight.value_or(FanIn(in)))),
      activation_(activation) {
  if (bias) bias_ = &AddParameter("bias", {out}, weight ? Init::Zeros() : FanIn(in));
}
Values Linear::Forward(const Values& in) {
  const DTensor bias = bias_ != nullptr ? bias_->tensor() : DTensor();
  if (activation_) return {linear_activation(in[0], weight_, bias, *activation_)};
  return {linear(in[0], weight_, bias)};
}

Embedding::Embedding(int64_t count, int64_t size, Init weight, int64_t padding)
    : weight_(AddParameter("weight", {count, size}, weight)), padding_(padding) {}
Values Embedding::Forward(const Values& in) { return {embedding(in[0], weight_, padding_)}; }

LayerNorm::LayerNorm(int64_t size, double eps)
    : weight_(AddParameter("weight", {size}, Init::Ones())),
      bias_(AddParameter("bias", {size}, Init::Zeros())),
      eps_(eps) {}
Values LayerNorm::Forward(const Values& in) {
  return {layer_norm(in[0], weight_.shape(), weight_, bias_, eps_)};
}

RMSNorm::RMSNorm(int64_t size, double eps)
    : weight_(AddParameter("weight", {size}, Init::Ones())), eps_(eps) {}
Values RMSNorm::Forward(const Values& in) {
  return {rms_norm(in[0], weight_.shape(), weight_, eps_)};
}

Values Dropout::Forward(const Values& in) {
  if (!training() || p_ == 0) return {in[0]};
  Values both = dropout_with_mask(in[0], p_);
  if (keep_mask_) last_mask_ = both[1];
  return {both[0]};
}

MLP::MLP(int64_t size, int64_t inner, std::optional<Init> up, std::optional<Init> down)
    : up_(AddChild<Linear>("up", size, inner, true, up, Activation::kGelu)),
      down_(AddChild<Linear>("down", inner, size, true, down)) {}
Values MLP::Forward(const Values& in) { return {down_(up_(in[0]))}; }

CausalSelfAttention::CausalSelfAttention(int64_t size, int64_t heads, std::optional<Init> in,
                                         std::optional<Init> out, double dropout)
    : head_size_(HeadSize(size, heads)),
      dropout_(dropout),
      wq_(AddChild<Linear>("wq", size, size, true, in)),
      wk_(AddChild<Linear>("wk", size, size, true, in)),
      wv_(AddChild<Linear>("wv", size, size, true, in)),
      wo_(AddChild<Linear>("wo", size, size, true, out)) {}

// [batch, seq, size] -> [batch, heads, seq, head_size]
DTensor CausalSelfAttention::Heads(Linear& projection, const DTensor& x) const {
  return transpose(unflatten(projection(x), -1, {-1, head_size_}), 1, 2);
}

Values CausalSelfAttention::Forward(const Values& in) {
  const DTensor& x = in[0];
  const DTensor o = scaled_dot_product_attention(Heads(wq_, x), Heads(wk_, x), Heads(wv_, x), {},
                                                 /*is_causal=*/true, {}, /*enable_gqa=*/false,
                                                 training() ? dropout_ : 0);
  return {wo_(flatten(transpose(o, 1, 2), 2, 3))};
}

}  // namespace dtensor
