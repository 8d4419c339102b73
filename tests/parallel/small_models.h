// Small models written from what the library has: a Llama block whose key and value heads every
// rank holds whole, and a GPT block with one parameter for q, k and v.
#pragma once

#include <cstdint>
#include <string>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/plan/plan.h"

namespace dtensor::testing {

struct LlamaConfig {
  int64_t layers = 2, hidden = 16, heads = 4, kv_heads = 1, inner = 24;
  bool recompute = false;
  int64_t head_size() const { return hidden / heads; }
};

// x [b, s, hidden] -> the same: x + attention(norm(x)), then x + down(silu(gate(x)) * up(x)).
class LlamaBlock : public Module {
 public:
  explicit LlamaBlock(const LlamaConfig& c)
      : config_(c),
        norm1_(AddChild<RMSNorm>("norm1", c.hidden)),
        q_(AddChild<Linear>("q", c.hidden, c.hidden, false)),
        k_(AddChild<Linear>("k", c.hidden, c.kv_heads * c.head_size(), false)),
        v_(AddChild<Linear>("v", c.hidden, c.kv_heads * c.head_size(), false)),
        o_(AddChild<Linear>("o", c.hidden, c.hidden, false)),
        norm2_(AddChild<RMSNorm>("norm2", c.hidden)),
        gate_(AddChild<Linear>("gate", c.hidden, c.inner, false)),
        up_(AddChild<Linear>("up", c.hidden, c.inner, false)),
        down_(AddChild<Linear>("down", c.inner, c.hidden, false)) {}
  std::string type_name() const override { return "LlamaBlock"; }

 protected:
  Values Forward(const Values& in) override {
    const DTensor n = norm1_(in[0]);
    const DTensor a = scaled_dot_product_attention(Rotated(Heads(q_, n)), Rotated(Heads(k_, n)),
                                                   Heads(v_, n), {}, /*is_causal=*/true, {},
                                                   /*enable_gqa=*/true);
    const DTensor x = in[0] + o_(flatten(transpose(a, 1, 2), 2, 3));
    const DTensor m = norm2_(x);
    return {x + down_(silu(gate_(m)) * up_(m))};
  }

 private:
  DTensor Heads(Linear& projection, const DTensor& x) const {
    return transpose(unflatten(projection(x), -1, {-1, config_.head_size()}), 1, 2);
  }
  // Rotary positions, written out. `x` is [b, heads, s, d].
  DTensor Rotated(const DTensor& x) const {
    const int64_t half = config_.head_size() / 2;
    const TensorOptions options = {.dtype = x.dtype(), .mesh = x.mesh()};
    const DTensor angle = unsqueeze(arange(0, x.size(2), 1, options), 1) * 0.25;
    const DTensor c = 1.0 - angle * angle, s = angle;  // near enough to cos and sin
    const DTensor a = slice(x, -1, 0, half), b = slice(x, -1, half, 2 * half);
    return x * c + cat({neg(b), a}, -1) * s;
  }

  const LlamaConfig config_;
  RMSNorm& norm1_;
  Linear &q_, &k_, &v_, &o_;
  RMSNorm& norm2_;
  Linear &gate_, &up_, &down_;
};

class Llama : public Module {
 public:
  explicit Llama(const LlamaConfig& c) : config_(c), blocks_(AddChild<Sequential>("blocks")) {
    for (int64_t i = 0; i < c.layers; ++i) blocks_.Append<LlamaBlock>(c);
  }
  std::string type_name() const override { return "Llama"; }
  // k and v stay whole.
  static Plan ThePlan(const LlamaConfig& c) {
    return {{"blocks.*.q", ColwiseParallel({.unit = c.head_size()})},
            {"blocks.*.o", RowwiseParallel({.unit = c.head_size()})},
            {"blocks.*.gate", ColwiseParallel()},
            {"blocks.*.up", ColwiseParallel()},
            {"blocks.*.down", RowwiseParallel()}};
  }

 protected:
  Values Forward(const Values& in) override {
    DTensor x = in[0];
    for (const auto& [name, block] : blocks_.children()) {
      Module& run = *block;
      x = config_.recompute ? Recompute([&run](const Values& v) { return run(v); }, {x})[0]
                            : run(x);
    }
    return {x};
  }

 private:
  const LlamaConfig config_;
  Sequential& blocks_;
};

// x [b, s, hidden] -> the same. One weight [3, hidden, hidden] for q, k and v, and one bias; both
// are cut by select.
class FusedAttention : public Module {
 public:
  FusedAttention(int64_t hidden, int64_t heads)
      : hidden_(hidden),
        heads_(heads),
        weight_(AddParameter("weight", {3, hidden, hidden}, Init::Normal(0, 0.1))),
        bias_(AddParameter("bias", {3, hidden}, Init::Zeros())),
        out_(AddChild<Linear>("out", hidden, hidden)) {}
  std::string type_name() const override { return "FusedAttention"; }
  // Before Materialize: heads over the last mesh dim of `mesh` (dp, tp).
  void Spread(const DeviceMesh& mesh) {
    weight_.Place(mesh, {Replicate(), Shard(1, hidden_ / heads_)});
    bias_.Place(mesh, {Replicate(), Shard(1, hidden_ / heads_)});
  }

 protected:
  Values Forward(const Values& in) override {
    const auto part = [&](int64_t i) {
      const DTensor y = linear(in[0], select(weight_, 0, i), select(bias_, 0, i));
      return transpose(unflatten(y, -1, {-1, hidden_ / heads_}), 1, 2);
    };
    const DTensor o = scaled_dot_product_attention(part(0), part(1), part(2), {}, true);
    return {out_(flatten(transpose(o, 1, 2), 2, 3))};
  }

 private:
  const int64_t hidden_, heads_;
  Parameter &weight_, &bias_;
  Linear& out_;
};

}  // namespace dtensor::testing
