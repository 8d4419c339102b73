// Test support: more small models, of the kinds that architectures.h has not: recurrence, graphs,
// contrast, codebooks, running sums, statistics of a batch, tables of bags, experts that choose
// their tokens, structured outputs.
#pragma once

#include <limits>

#include "tests/parallel/architectures.h"

namespace dtensor::testing {

// Mamba: a state per channel that decays as the input says, one step after the other.
struct Mamba : Task {  // ids, labels
  int64_t V = 20, H = 8, N = 3, K = 3;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear &in_ = AddChild<Linear>("in", H, 2 * H, false), &bc = AddChild<Linear>("bc", H, 2 * N),
         &dt = AddChild<Linear>("dt", H, H), &out = AddChild<Linear>("out", H, H, false),
         &head = AddChild<Linear>("head", H, V, false);
  Parameter &filter = AddParameter("filter", {H, 1, K}, Init::Uniform(-0.5, 0.5)),
            &a_log = AddParameter("a_log", {H, N}, Init::Uniform(-1, 1)),
            &skip = AddParameter("skip", {H}, Init::Ones());
  DTensor Loss(const Values& in) override {
    const DTensor x = tok(in[0]);
    const int64_t t = x.size(1);
    const Values xz = chunk(in_(x), 2, -1);
    // Causal: padded on both sides, what is seen of the right cut off.
    const DTensor wide = conv1d(transpose(xz[0], 1, 2), filter, {}, {1}, K - 1, {1}, H);
    const DTensor u = silu(transpose(slice(wide, 2, 0, t), 1, 2));
    const DTensor delta = softplus(dt(u));   // [b, t, H]
    const Values b_c = chunk(bc(u), 2, -1);  // [b, t, N] each
    const DTensor decay = exp(unsqueeze(delta, -1) * neg(exp(a_log)));
    const DTensor fed = unsqueeze(delta * u, -1) * unsqueeze(b_c[0], 2);
    DTensor state = zeros_like(select(fed, 1, 0));
    std::vector<DTensor> steps;
    for (int64_t i = 0; i < t; ++i) {
      state = select(decay, 1, i) * state + select(fed, 1, i);
      steps.push_back(sum(state * unsqueeze(select(b_c[1], 1, i), 1), {-1}));
    }
    const DTensor y = (stack(steps, 1) + u * skip) * silu(xz[1]);
    return cross_entropy(flatten(head(x + out(y)), 0, 1), flatten(in[1], 0, 1));
  }
};

struct Lstm : Task {  // ids, labels
  int64_t V = 20, H = 6;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear &wi = AddChild<Linear>("wi", H, 4 * H), &wh = AddChild<Linear>("wh", H, 4 * H, false),
         &head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    const DTensor x = wi(tok(in[0]));
    DTensor h = zeros_like(slice(select(x, 1, 0), 1, 0, H)), c = h;
    std::vector<DTensor> steps;
    for (int64_t t = 0; t < x.size(1); ++t) {
      const Values g = chunk(select(x, 1, t) + wh(h), 4, -1);
      c = sigmoid(g[1]) * c + sigmoid(g[0]) * tanh(g[2]);
      h = sigmoid(g[3]) * tanh(c);
      steps.push_back(h);
    }
    return cross_entropy(flatten(head(stack(steps, 1)), 0, 1), flatten(in[1], 0, 1));
  }
};

// Attention along the edges of a graph; each node weighs the edges that end in it.
struct GraphAttention : Task {  // nodes [n, 5], classes [n], edges from [e] and to [e]
  int64_t H = 6, C = 4;
  Linear &lin = AddChild<Linear>("lin", 5, H, false), &head = AddChild<Linear>("head", H, C);
  Parameter &from = AddParameter("from", {H}, Init::Normal(0, 0.5)),
            &to_ = AddParameter("to", {H}, Init::Normal(0, 0.5));
  DTensor Loss(const Values& in) override {
    const DTensor h = lin(in[0]);
    const int64_t n = h.size(0);
    const DTensor source = index_select(h, 0, in[2]), target = index_select(h, 0, in[3]);
    const DTensor score = leaky_relu(sum(source * from + target * to_, {-1}), 0.2);
    const DTensor none = new_full(h, {n}, -std::numeric_limits<double>::infinity());
    const DTensor most = scatter_reduce(none, 0, in[3], score.Detach(), "amax");
    const DTensor e = exp(score - index_select(most, 0, in[3]));
    const DTensor total = index_add(new_zeros(h, {n}), 0, in[3], e);
    const DTensor weight = e / index_select(total, 0, in[3]);
    const DTensor y = index_add(new_zeros(h, {n, H}), 0, in[3], source * unsqueeze(weight, 1));
    return cross_entropy(head(elu(y) + h), in[1]);
  }
};

// Two encoders; what belongs together is to be alike, what does not unlike.
struct Clip : Task {  // images [b, 9], texts [b, 7]
  int64_t H = 6;
  MLP& image = AddChild<MLP>("image", 9, 12);
  Linear &to_image = AddChild<Linear>("to_image", 9, H, false),
         &to_text = AddChild<Linear>("to_text", 7, H, false);
  Parameter& scale = AddParameter("scale", {1}, Init::Ones());
  DTensor Loss(const Values& in) override {
    const DTensor a = normalize(to_image(image(in[0])), 2, {-1});
    const DTensor b = normalize(to_text(in[1]), 2, {-1});
    const DTensor logits = matmul(a, transpose(b, 0, 1)) * exp(scale);
    const DTensor own = arange(0, a.size(0), 1, {.dtype = DType::kI64, .mesh = a.mesh()});
    return (cross_entropy(logits, own) + cross_entropy(transpose(logits, 0, 1), own)) * 0.5;
  }
};

// Latents become the nearest entry of a codebook; gradients pass as if they had not.
struct VqVae : Task {  // x [b, 8]
  int64_t H = 4, K = 6;
  MLP& deep = AddChild<MLP>("deep", 8, 10);
  Linear &enc = AddChild<Linear>("enc", 8, H), &dec = AddChild<Linear>("dec", H, 8);
  Embedding& codes = AddChild<Embedding>("codes", K, H);
  DTensor Loss(const Values& in) override {
    const DTensor z = enc(in[0] + deep(in[0]));
    const DTensor& table = codes.weight();
    const DTensor far =
        sum(z * z, {1}, true) - matmul(z, transpose(table, 0, 1)) * 2.0 + sum(table * table, {1});
    const DTensor q = codes(argmin(far.Detach(), 1));
    const DTensor x = dec(z + (q - z).Detach());
    return mse_loss(x, in[0]) + mse_loss(q, z.Detach()) + mse_loss(z, q.Detach()) * 0.25;
  }
};

// Linear attention: running sums over the sequence instead of scores.
struct LinearAttention : Task {  // ids, labels
  int64_t V = 20, H = 12, d = 3;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear &q = AddChild<Linear>("q", H, H, false), &k = AddChild<Linear>("k", H, H, false),
         &v = AddChild<Linear>("v", H, H, false), &o = AddChild<Linear>("o", H, H, false),
         &head = AddChild<Linear>("head", H, V, false);
  DTensor Loss(const Values& in) override {
    const DTensor x = tok(in[0]);
    const DTensor a = elu(HeadsOf(q(x), d)) + 1.0, b = elu(HeadsOf(k(x), d)) + 1.0;
    const DTensor state = cumsum(einsum("bhtd,bhte->bhtde", {b, HeadsOf(v(x), d)}), 2);
    const DTensor norm = sum(a * cumsum(b, 2), {-1}, true);
    const DTensor y = einsum("bhtd,bhtde->bhte", {a, state}) / norm;
    return cross_entropy(flatten(head(x + o(Joined(y))), 0, 1), flatten(in[1], 0, 1));
  }
};

// Statistics over the batch and the pixels, wherever they are.
struct ResNet : Task {  // images [b, 3, 8, 8], classes [b]
  int64_t C = 6;
  Conv2d &stem = AddChild<Conv2d>("stem", 3, C, 3, 1, 1),
         &c1 = AddChild<Conv2d>("c1", C, C, 3, 1, 1), &c2 = AddChild<Conv2d>("c2", C, C, 3, 1, 1);
  Parameter &w0 = AddParameter("w0", {C}, Init::Ones()),
            &b0 = AddParameter("b0", {C}, Init::Zeros()),
            &w1 = AddParameter("w1", {C}, Init::Ones()),
            &b1 = AddParameter("b1", {C}, Init::Zeros());
  Linear& head = AddChild<Linear>("head", C, 5);
  DTensor Loss(const Values& in) override {
    DTensor x = relu(batch_norm(stem(in[0]), {}, {}, w0, b0, true));
    x = max_pool2d(x, {2});
    x = relu(x + c2(relu(batch_norm(c1(x), {}, {}, w1, b1, true))));
    return cross_entropy(head(flatten(adaptive_avg_pool2d(x, {1}), 1)), in[1]);
  }
};

// Recommendation: bags of ids, and how each pair of features agrees.
struct Dlrm : Task {  // numbers [b, 5], ids [b, 2], ids [b, 3], clicks [b]
  int64_t H = 6;
  MLP& bottom = AddChild<MLP>("bottom", 5, 9);
  Linear &dense = AddChild<Linear>("dense", 5, H), &top = AddChild<Linear>("top", H + 3, 1);
  Parameter &t1 = AddParameter("t1", {11, H}, Init::Normal(0, 0.5)),
            &t2 = AddParameter("t2", {7, H}, Init::Normal(0, 0.5));
  DTensor Loss(const Values& in) override {
    const DTensor x = dense(in[0] + bottom(in[0]));
    const DTensor all =
        stack({x, embedding_bag(in[1], t1, {}, "sum"), embedding_bag(in[2], t2, {}, "mean")}, 1);
    const DTensor pairs = flatten(bmm(all, transpose(all, 1, 2)), 1);  // [b, 9]
    const DTensor below = FromVector<int64_t>({3, 6, 7}, {3}, {.mesh = x.mesh()});
    const DTensor y = top(cat({x, index_select(pairs, 1, below)}, 1));
    return binary_cross_entropy_with_logits(squeeze(y, DimList{1}), in[3]);
  }
};

// Each expert takes the tokens that want it most, as many as it has room for.
struct ExpertChoice : Task {  // ids, labels
  int64_t V = 20, H = 8, E = 3, F = 6, room = 9;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear &router = AddChild<Linear>("router", H, E, false),
         &head = AddChild<Linear>("head", H, V, false);
  Parameter &w1 = AddParameter("w1", {E, H, F}, Init::Normal(0, 0.3)),
            &w2 = AddParameter("w2", {E, F, H}, Init::Normal(0, 0.3));
  DTensor Loss(const Values& in) override {
    const DTensor x = flatten(tok(in[0]), 0, 1);
    const Values best = topk(transpose(softmax(router(x), -1), 0, 1), room);  // [E, room]
    const DTensor rows = flatten(best[1]);
    const DTensor mine = unflatten(index_select(x, 0, rows), 0, {E, room});
    const DTensor y = bmm(gelu(bmm(mine, w1)), w2) * unsqueeze(best[0], -1);
    return cross_entropy(head(index_add(x, 0, rows, flatten(y, 0, 1))), flatten(in[1], 0, 1));
  }
};

// A chain of labels, each of which depends on the one before: all chains are summed over.
struct Crf : Task {  // ids, labels
  int64_t V = 20, H = 6, K = 4;
  Embedding& tok = AddChild<Embedding>("tok", V, H);
  Linear& emit = AddChild<Linear>("emit", H, K);
  Parameter& step = AddParameter("step", {K, K}, Init::Normal(0, 0.5));
  DTensor Loss(const Values& in) override {
    const DTensor e = log_softmax(emit(tanh(tok(in[0]))), -1);  // [b, t, K]
    DTensor all = select(e, 1, 0);
    for (int64_t t = 1; t < e.size(1); ++t) {
      all = logsumexp(unsqueeze(all, 2) + step, {1}) + select(e, 1, t);
    }
    const DTensor at = sum(squeeze(gather(e, 2, unsqueeze(in[1], 2)), DimList{2}), {1});
    const int64_t t = in[1].size(1);
    const DTensor moves = slice(in[1], 1, 0, t - 1) * K + slice(in[1], 1, 1, t);
    const DTensor along = sum(take(step, moves), {1});
    return mean(logsumexp(all, {1}) - at - along);
  }
};

}  // namespace dtensor::testing
