// Test support: small models of many kinds, written as for one device: experts, latent attention,
// norms of heads, masks, images, sound, relative positions, diffusion, low-rank updates,
// preferences.
#pragma once

#include <cmath>
#include <cstdint>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor::testing {

// [b, s, h d] -> [b, h, s, d], and back.
inline DTensor HeadsOf(const DTensor& x, int64_t d) {
  return transpose(unflatten(x, -1, {-1, d}), 1, 2);
}
inline DTensor Joined(const DTensor& x) { return flatten(transpose(x, 1, 2), 2, 3); }

// A model and its loss.
struct Task : Module {
  virtual DTensor Loss(const Values& in) = 0;
  Values Forward(const Values& in) override { return {Loss(in)}; }
};

// Experts as one stack of matrices; every token goes through all of them.
struct Experts : Module {
  Parameter &w1, &w2;
  Experts(int64_t e, int64_t h, int64_t f)
      : w1(AddParameter("w1", {e, h, f}, Init::Normal(0, 0.2))),
        w2(AddParameter("w2", {e, f, h}, Init::Normal(0, 0.2))) {}
  Values Forward(const Values& in) override {  // x [t, h], gates [t, e]
    const DTensor hidden = silu(einsum("th,ehf->etf", {in[0], w1}));
    const DTensor out = einsum("etf,efh->eth", {hidden, w2});
    return {einsum("eth,te->th", {out, in[1]})};
  }
};

struct Mixtral : Task {  // ids, labels
  int64_t V = 24, H = 12, E = 5, F = 8;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  RMSNorm& norm = AddChild<RMSNorm>("norm", H);
  Linear& router = AddChild<Linear>("router", H, E, false);
  Experts& experts = AddChild<Experts>("experts", E, H, F);
  Linear& head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    const DTensor x = tok(in[0]);
    const DTensor flat = flatten(norm(x), 0, 1);
    const DTensor p = softmax(router(flat), -1);
    const Values top = topk(p, 2);
    const DTensor w = top[0] / sum(top[0], {-1}, true);
    const DTensor gates = scatter(zeros_like(p), 1, top[1], w);
    const DTensor y = flatten(x, 0, 1) + experts(flat, gates);
    // So that experts are used alike.
    const DTensor frac = mean(to(one_hot(top[1], E), DType::kF64), {0, 1});
    const DTensor aux = sum(frac * mean(p, {0})) * static_cast<double>(E);
    return cross_entropy(head(y), flatten(in[1], 0, 1)) + aux * 0.01;
  }
};

// The same, but each expert sees its tokens only, which the data decides.
struct MixtralSorted : Task {
  int64_t V = 24, H = 12, E = 4, F = 8;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear& router = AddChild<Linear>("router", H, E, false);
  Sequential& ex = AddChild<Sequential>("ex");
  Linear& head = AddChild<Linear>("head", H, V, false);
  MixtralSorted() {
    for (int i = 0; i < E; ++i) ex.Append<MLP>(H, F);
  }
  DTensor Loss(const Values& in) override {
    const DTensor x = flatten(tok(in[0]), 0, 1);
    const DTensor p = softmax(router(x), -1);
    const Values top = topk(p, 2);
    DTensor y = x;
    for (int64_t e = 0; e < E; ++e) {
      const DTensor hit = eq(top[1], e);                        // [t, 2]
      const DTensor gate = sum(where(hit, top[0], 0.0), {-1});  // [t]
      const DTensor rows = squeeze(nonzero(any(hit, {1})), DimList{1});
      if (rows.size(0) == 0) continue;
      const DTensor part = index_select(x, 0, rows);
      const DTensor out = static_cast<MLP&>(*ex.children()[e].second)(part) *
                          unsqueeze(index_select(gate, 0, rows), 1);
      y = index_add(y, 0, rows, out);
    }
    return cross_entropy(head(y), flatten(in[1], 0, 1));
  }
};

// Positions by rotation, written as in a notebook.
inline DTensor Rope(const DTensor& x) {
  const int64_t s = x.size(-2), d = x.size(-1);
  const TensorOptions o{.dtype = DType::kF64, .mesh = x.mesh()};
  const DTensor f = exp(arange(0, d / 2, 1, o) * (-2.0 * std::log(100.0) / static_cast<double>(d)));
  const DTensor a = outer(arange(0, s, 1, o), f);
  const Values h = chunk(x, 2, -1);
  const DTensor c = cos(a), n = sin(a);
  return cat({h[0] * c - h[1] * n, h[1] * c + h[0] * n}, -1);
}

// DeepSeek: queries, keys and values through a narrow latent, positions in a part that heads share.
struct MLA : Module {
  int64_t H = 12, heads = 4, nope = 4, rope = 2, vd = 3, rank = 5, qrank = 7;
  Linear &qa = AddChild<Linear>("qa", H, qrank, false),
         &qb = AddChild<Linear>("qb", qrank, heads*(nope + rope), false),
         &kva = AddChild<Linear>("kva", H, rank + rope, false),
         &kvb = AddChild<Linear>("kvb", rank, heads*(nope + vd), false),
         &o = AddChild<Linear>("o", heads* vd, H, false);
  RMSNorm &qn = AddChild<RMSNorm>("qn", qrank), &kvn = AddChild<RMSNorm>("kvn", rank);
  Values Forward(const Values& in) override {
    const DTensor& x = in[0];
    const Values q = split(HeadsOf(qb(qn(qa(x))), nope + rope), DimList{nope, rope}, -1);
    const Values c = split(kva(x), DimList{rank, rope}, -1);
    const Values kv = split(HeadsOf(kvb(kvn(c[0])), nope + vd), DimList{nope, vd}, -1);
    const DTensor kr = Rope(unsqueeze(c[1], 1));
    const DTensor qq = cat({q[0], Rope(q[1])}, -1);
    const DTensor kk = cat({kv[0], expand(kr, {-1, heads, -1, -1})}, -1);
    return {o(Joined(scaled_dot_product_attention(qq, kk, kv[1], {}, true)))};
  }
};

struct DeepSeek : Task {
  int64_t V = 20, H = 12;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  RMSNorm& norm = AddChild<RMSNorm>("norm", H);
  MLA& attn = AddChild<MLA>("attn");
  MLP& mlp = AddChild<MLP>("mlp", H, 16);
  Linear& head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    DTensor x = tok(in[0]);
    x = x + attn(norm(x));
    x = x + mlp(x);
    return cross_entropy(flatten(head(x), 0, 1), flatten(in[1], 0, 1));
  }
};

// Qwen: norms of each head's queries and keys, grouped heads, tied head.
struct QwenAttention : Module {
  int64_t H = 12, d = 4, h = 6, g = 2;
  Linear &q = AddChild<Linear>("q", H, h* d), &k = AddChild<Linear>("k", H, g* d),
         &v = AddChild<Linear>("v", H, g* d), &o = AddChild<Linear>("o", h* d, H, false);
  RMSNorm &qn = AddChild<RMSNorm>("qn", d), &kn = AddChild<RMSNorm>("kn", d);
  Values Forward(const Values& in) override {
    const DTensor& x = in[0];
    return {o(
        Joined(scaled_dot_product_attention(Rope(qn(HeadsOf(q(x), d))), Rope(kn(HeadsOf(k(x), d))),
                                            HeadsOf(v(x), d), {}, true, {}, true)))};
  }
};

struct Qwen : Task {
  int64_t V = 20, H = 12;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  RMSNorm& norm = AddChild<RMSNorm>("norm", H);
  QwenAttention& attn = AddChild<QwenAttention>("attn");
  Linear &gate = AddChild<Linear>("gate", H, 17, false), &up = AddChild<Linear>("up", H, 17, false),
         &down = AddChild<Linear>("down", 17, H, false);
  Linear& head = AddChild<Linear>("head", H, V, false);
  Qwen() { Tie(tok.weight(), head.weight()); }
  DTensor Loss(const Values& in) override {
    DTensor x = tok(in[0]);
    x = x + attn(norm(x));
    x = x + down(silu(gate(x)) * up(x));
    return cross_entropy(flatten(head(x), 0, 1), flatten(in[1], 0, 1));
  }
};

// Attention to itself, or to the value named "context"; may have "mask"; "causal" where that is
// there.
struct Attn : Module {
  int64_t d;
  Linear &q, &k, &v, &o;
  Attn(int64_t H, int64_t h)
      : d(H / h),
        q(AddChild<Linear>("q", H, H)),
        k(AddChild<Linear>("k", H, H)),
        v(AddChild<Linear>("v", H, H)),
        o(AddChild<Linear>("o", H, H)) {}
  Values Forward(const Values& in) override {
    const DTensor ctx = in.Named("context");
    const DTensor from = ctx.defined() ? ctx : in[0];
    const DTensor mask = in.Named("mask");
    const bool causal = in.Named("causal").defined();
    return {o(Joined(scaled_dot_product_attention(HeadsOf(q(in[0]), d), HeadsOf(k(from), d),
                                                  HeadsOf(v(from), d), mask, causal)))};
  }
};

struct Bert : Task {  // ids, labels, mask [b, t], types
  int64_t V = 22, H = 12, P = 9;
  Embedding &tok = AddChild<Embedding>("tok", V, H), &pos = AddChild<Embedding>("pos", P, H),
            &typ = AddChild<Embedding>("typ", 2, H);
  LayerNorm &ln0 = AddChild<LayerNorm>("ln0", H), &ln1 = AddChild<LayerNorm>("ln1", H),
            &ln2 = AddChild<LayerNorm>("ln2", H), &ln3 = AddChild<LayerNorm>("ln3", H);
  Attn& attn = AddChild<Attn>("attn", H, 3);
  MLP& mlp = AddChild<MLP>("mlp", H, 20);
  Linear &dense = AddChild<Linear>("dense", H, H), &head = AddChild<Linear>("head", H, V);
  Bert() { Tie(tok.weight(), head.weight()); }
  DTensor Loss(const Values& in) override {
    const DTensor ids = in[0];
    const DTensor position = arange(0, ids.size(1), 1, {.dtype = DType::kI64, .mesh = ids.mesh()});
    DTensor x = ln0(tok(ids) + pos(position) + typ(in[3]));
    const DTensor mask = unsqueeze(unsqueeze(in[2], 1), 1);
    x = ln1(x + attn(Values{x}.Add("mask", mask))[0]);
    x = ln2(x + mlp(x));
    const DTensor logits = head(ln3(gelu(dense(x))));
    return cross_entropy(flatten(logits, 0, 1), flatten(in[1], 0, 1));
  }
};

struct Conv2d : Module {
  Parameter &weight, &bias;
  int64_t stride, pad;
  Conv2d(int64_t in, int64_t out, int64_t k, int64_t s = 1, int64_t p = 0)
      : weight(AddParameter("weight", {out, in, k, k}, Init::Uniform(-0.2, 0.2))),
        bias(AddParameter("bias", {out}, Init::Uniform(-0.1, 0.1))),
        stride(s),
        pad(p) {}
  Values Forward(const Values& in) override { return {conv2d(in[0], weight, bias, {stride}, pad)}; }
};

struct ViT : Task {  // images [b, 3, 8, 8], labels [b]
  int64_t H = 12, C = 7;
  Conv2d& patch = AddChild<Conv2d>("patch", 3, H, 4, 4);
  Parameter &cls = AddParameter("cls", {1, 1, H}, Init::Normal(0, 0.1)),
            &pos = AddParameter("pos", {1, 5, H}, Init::Normal(0, 0.1));
  LayerNorm &ln1 = AddChild<LayerNorm>("ln1", H), &ln2 = AddChild<LayerNorm>("ln2", H);
  Attn& attn = AddChild<Attn>("attn", H, 3);
  MLP& mlp = AddChild<MLP>("mlp", H, 18);
  Linear& head = AddChild<Linear>("head", H, C);
  DTensor Loss(const Values& in) override {
    DTensor x = transpose(flatten(patch(in[0]), 2), 1, 2);
    x = cat({expand(cls, {x.size(0), -1, -1}), x}, 1) + pos;
    x = x + attn(ln1(x));
    x = x + mlp(ln2(x));
    return cross_entropy(head(select(x, 1, 0)), in[1], {}, -100, Reduction::kMean, 0.1);
  }
};

// T5: a learned bias per head and distance is added to the scores.
struct T5Attn : Module {
  int64_t H = 12, d = 3, h = 4, buckets = 6;
  Linear &q = AddChild<Linear>("q", H, h* d, false), &k = AddChild<Linear>("k", H, h* d, false),
         &v = AddChild<Linear>("v", H, h* d, false), &o = AddChild<Linear>("o", h* d, H, false);
  Embedding& bias = AddChild<Embedding>("bias", buckets, h);
  Values Forward(const Values& in) override {
    const DTensor& x = in[0];
    const int64_t s = x.size(1);
    const TensorOptions o64{.dtype = DType::kI64, .mesh = x.mesh()};
    const DTensor at = arange(0, s, 1, o64);
    const DTensor far = unsqueeze(at, 1) - unsqueeze(at, 0);
    const DTensor b = permute(bias(clamp(far, 0, buckets - 1)), {2, 0, 1});  // [h, s, s]
    const DTensor seen = ge(far, 0);
    const DTensor mask = unsqueeze(where(seen, b, -1e9), 0);
    return {o(Joined(scaled_dot_product_attention(HeadsOf(q(x), d), HeadsOf(k(x), d),
                                                  HeadsOf(v(x), d), mask, false, 1.0)))};
  }
};

struct T5 : Task {  // ids, labels, what the encoder gave [b, t, 12]
  int64_t V = 20, H = 12;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  RMSNorm &n1 = AddChild<RMSNorm>("n1", H), &n2 = AddChild<RMSNorm>("n2", H),
          &n3 = AddChild<RMSNorm>("n3", H);
  T5Attn& self = AddChild<T5Attn>("self");
  Attn& cross = AddChild<Attn>("cross", H, 4);
  Linear &w0 = AddChild<Linear>("w0", H, 15, false), &w1 = AddChild<Linear>("w1", H, 15, false),
         &wo = AddChild<Linear>("wo", 15, H, false);
  Linear& head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    DTensor x = tok(in[0]);
    x = x + self(n1(x));
    x = x + cross(Values{n2(x)}.Add("context", in[2]))[0];
    const DTensor y = n3(x);
    x = x + wo(gelu(w0(y), true) * w1(y));
    return cross_entropy(flatten(head(x), 0, 1), flatten(in[1], 0, 1));
  }
};

struct Conv1d : Module {
  Parameter &weight, &bias;
  int64_t stride;
  Conv1d(int64_t in, int64_t out, int64_t s)
      : weight(AddParameter("weight", {out, in, 3}, Init::Uniform(-0.3, 0.3))),
        bias(AddParameter("bias", {out}, Init::Zeros())),
        stride(s) {}
  Values Forward(const Values& in) override { return {conv1d(in[0], weight, bias, {stride}, 1)}; }
};

struct Whisper : Task {  // ids, labels, sound [b, 5, 16]
  int64_t H = 12, V = 20;
  Conv1d &c1 = AddChild<Conv1d>("c1", 5, H, 1), &c2 = AddChild<Conv1d>("c2", H, H, 2);
  Parameter& pos = AddBuffer("pos", {8, H}, Init::Normal(0, 1), DType::kF64);
  LayerNorm &l1 = AddChild<LayerNorm>("l1", H), &l2 = AddChild<LayerNorm>("l2", H),
            &l3 = AddChild<LayerNorm>("l3", H);
  Attn &enc = AddChild<Attn>("enc", H, 3), &dec = AddChild<Attn>("dec", H, 3),
       &cross = AddChild<Attn>("cross", H, 3);
  MLP& mlp = AddChild<MLP>("mlp", H, 16);
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear& head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    DTensor m = transpose(gelu(c2(gelu(c1(in[2])))), 1, 2) + pos;
    m = m + enc(l1(m));
    m = m + mlp(m);
    DTensor x = tok(in[0]);
    x = x + dec(Values{l2(x)}.Add("causal", in[0]))[0];
    x = x + cross(Values{l3(x)}.Add("context", m))[0];
    return cross_entropy(flatten(head(x), 0, 1), flatten(in[1], 0, 1));
  }
};

struct GroupNorm : Module {
  Parameter &weight, &bias;
  int64_t g;
  GroupNorm(int64_t g, int64_t c)
      : weight(AddParameter("weight", {c}, Init::Ones())),
        bias(AddParameter("bias", {c}, Init::Zeros())),
        g(g) {}
  Values Forward(const Values& in) override { return {group_norm(in[0], g, weight, bias)}; }
};

// A block of a diffusion model, with one step down and up.
struct UNet : Task {  // images [b, 4, 6, 6], times [b], noise
  int64_t C = 8;
  Conv2d &in_ = AddChild<Conv2d>("in", 4, C, 3, 1, 1), &c1 = AddChild<Conv2d>("c1", C, C, 3, 1, 1),
         &down = AddChild<Conv2d>("down", C, C, 3, 2, 1),
         &mid = AddChild<Conv2d>("mid", C, C, 3, 1, 1),
         &up = AddChild<Conv2d>("up", 2 * C, C, 3, 1, 1),
         &out = AddChild<Conv2d>("out", C, 4, 3, 1, 1);
  GroupNorm &g1 = AddChild<GroupNorm>("g1", 4, C), &g2 = AddChild<GroupNorm>("g2", 2, C);
  Linear &t1 = AddChild<Linear>("t1", 6, 10), &t2 = AddChild<Linear>("t2", 10, C);
  Attn& attn = AddChild<Attn>("attn", C, 2);
  DTensor Loss(const Values& in) override {
    const TensorOptions o{.dtype = DType::kF64, .mesh = in[0].mesh()};
    const DTensor f = exp(arange(0, 3, 1, o) * -1.5);
    const DTensor a = unsqueeze(in[1], 1) * unsqueeze(f, 0);
    const DTensor t = t2(silu(t1(cat({sin(a), cos(a)}, -1))));
    DTensor x = in_(in[0] + in[2] * 0.3);
    DTensor y = c1(silu(g1(x))) + unsqueeze(unsqueeze(t, -1), -1);
    x = x + y;
    DTensor z = down(x);
    const int64_t h = z.size(2), w = z.size(3);
    const DTensor s = transpose(flatten(g2(z), 2), 1, 2);
    z = z + unflatten(transpose(attn(s), 1, 2), 2, {h, w});
    z = mid(silu(z));
    z = interpolate(z, {}, {2, 2}, "nearest");
    z = up(cat({z, x}, 1));
    return mse_loss(out(silu(z)), in[2]);
  }
};

// A frozen Linear with a low-rank one beside it.
struct LoraLinear : Module {
  Linear& base;
  Parameter &a, &b;
  LoraLinear(int64_t i, int64_t o, int64_t r)
      : base(AddChild<Linear>("base", i, o)),
        a(AddParameter("a", {r, i}, Init::Normal(0, 0.3))),
        b(AddParameter("b", {o, r}, Init::Normal(0, 0.3))) {}
  Values Forward(const Values& in) override {
    return {base(in[0]) + linear(linear(in[0], a), b) * 2.0};
  }
};

struct Lora : Task {
  int64_t V = 20, H = 12, d = 4;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  LoraLinear &q = AddChild<LoraLinear>("q", H, H, 2), &v = AddChild<LoraLinear>("v", H, H, 2);
  Linear &k = AddChild<Linear>("k", H, H), &o = AddChild<Linear>("o", H, H),
         &head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    DTensor x = tok(in[0]);
    x = x + o(Joined(scaled_dot_product_attention(HeadsOf(q(x), d), HeadsOf(k(x), d),
                                                  HeadsOf(v(x), d), {}, true)));
    return cross_entropy(flatten(head(x), 0, 1), flatten(in[1], 0, 1));
  }
};

struct Lm : Module {
  int64_t V = 18, H = 8;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  MLP& mlp = AddChild<MLP>("mlp", H, 12);
  Attn& attn = AddChild<Attn>("attn", H, 2);
  Linear& head = AddChild<Linear>("head", H, V, false);
  Values Forward(const Values& in) override {
    DTensor x = tok(in[0]);
    x = x + attn(Values{x}.Add("causal", in[0]))[0];
    return {head(x + mlp(x))};
  }
};

// Direct preference optimisation: a policy against a frozen reference.
struct Dpo : Task {  // chosen, rejected, weights of tokens
  Lm &policy = AddChild<Lm>("policy"), &ref = AddChild<Lm>("ref");
  static DTensor LogP(Lm& m, const DTensor& ids, const DTensor& mask) {
    const DTensor lp = log_softmax(slice(m(ids), 1, 0, ids.size(1) - 1), -1);
    const DTensor next = unsqueeze(slice(ids, 1, 1, ids.size(1)), 2);
    return sum(squeeze(gather(lp, 2, next), DimList{2}) * slice(mask, 1, 1, ids.size(1)), {1});
  }
  DTensor Loss(const Values& in) override {
    const DTensor pc = LogP(policy, in[0], in[2]), pr = LogP(policy, in[1], in[2]);
    DTensor rc, rr;
    {
      const NoGrad no;
      rc = LogP(ref, in[0], in[2]), rr = LogP(ref, in[1], in[2]);
    }
    return neg(mean(logsigmoid(((pc - pr) - (rc - rr)) * 0.5)));
  }
};

}  // namespace dtensor::testing
