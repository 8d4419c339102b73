// One training step of the Llama-like model that bench/torch_step.py runs on torch: RMSNorm, causal
// attention, SwiGLU, untied head, no biases, no rotary embedding; tensor parallel over `tp` ranks
// (threads), class-sharded loss, AdamW. Prints "ms <median of a step>".
//
//   bench_llama_step --tp=2 --hidden=1024 --ffn=2688 --vocab=4096 --heads=8 --seq=512 --steps=3
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/module/layers.h"
#include "dtensor/parallel/module/module.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"

namespace dtensor {
namespace {

struct Config {
  int64_t tp = 2, hidden = 1024, ffn = 2688, vocab = 4096, layers = 2, heads = 8, seq = 512,
          steps = 3;
};

class Block : public Module {
 public:
  explicit Block(const Config& c) : head_dim_(c.hidden / c.heads) {
    norm1_ = &AddChild<RMSNorm>("norm1", c.hidden);
    for (const char* name : {"wq", "wk", "wv", "wo"}) Add(name, c.hidden, c.hidden);
    norm2_ = &AddChild<RMSNorm>("norm2", c.hidden);
    Add("gate", c.hidden, c.ffn);
    Add("up", c.hidden, c.ffn);
    Add("down", c.ffn, c.hidden);
  }

 protected:
  Values Forward(const Values& in) override {
    const DTensor& x = in[0];
    const int64_t b = x.size(0), s = x.size(1);
    const DTensor h = (*norm1_)(x);
    const auto heads = [&](const char* name) {
      return transpose(view(Lin(name, h), {b, s, -1, head_dim_}), 1, 2);
    };
    DTensor o = scaled_dot_product_attention(heads("wq"), heads("wk"), heads("wv"), {}, true);
    const DTensor y = x + Lin("wo", reshape(transpose(o, 1, 2), {b, s, -1}));
    const DTensor m = (*norm2_)(y);
    return {y + Lin("down", silu(Lin("gate", m)) * Lin("up", m))};
  }

 private:
  void Add(const char* name, int64_t in, int64_t out) {
    linears_[name] = &AddChild<Linear>(name, in, out, /*bias=*/false);
  }
  DTensor Lin(const std::string& name, const DTensor& x) { return (*linears_[name])(x); }
  int64_t head_dim_;
  RMSNorm *norm1_, *norm2_;
  std::map<std::string, Linear*> linears_;
};

class Model : public Module {
 public:
  explicit Model(const Config& c) {
    embed_ = &AddChild<Embedding>("embed", c.vocab, c.hidden);
    for (int64_t i = 0; i < c.layers; ++i) {
      blocks_.push_back(&AddChild<Block>("block" + std::to_string(i), c));
    }
    norm_ = &AddChild<RMSNorm>("norm", c.hidden);
    head_ = &AddChild<Linear>("head", c.hidden, c.vocab, /*bias=*/false);
  }

 protected:
  Values Forward(const Values& in) override {
    DTensor x = (*embed_)(in[0]);
    for (Block* block : blocks_) x = (*block)(x);
    return {(*head_)((*norm_)(x))};
  }

 private:
  Embedding* embed_;
  std::vector<Block*> blocks_;
  RMSNorm* norm_;
  Linear* head_;
};

Plan PlanFor(const Config& c) {
  const int64_t head_dim = c.hidden / c.heads;
  Plan plan;
  plan.emplace_back("embed", RowwiseParallel());
  plan.emplace_back("block*.w[qkv]", ColwiseParallel({.unit = head_dim}));
  plan.emplace_back("block*.wo", RowwiseParallel({.unit = head_dim}));
  plan.emplace_back("block*.gate", ColwiseParallel());
  plan.emplace_back("block*.up", ColwiseParallel());
  plan.emplace_back("block*.down", RowwiseParallel());
  plan.emplace_back("head", ColwiseParallel());
  return plan;
}

absl::Status Train(const Config& c, double* median_ms) {
  ManualSeed(0);
  const DeviceMesh mesh({c.tp}, {"tp"});
  Model model(c);
  DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, PlanFor(c)));
  Materialize(model);
  AdamW optim(model.NamedParameters(), {.lr = 1e-3});
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i <= c.seq; ++i) tokens.push_back((i * 7919 + 13) % c.vocab);
  const std::vector<int64_t> in(tokens.begin(), tokens.end() - 1),
      out(tokens.begin() + 1, tokens.end());
  const TensorOptions options = {DType::kI64, mesh, {Replicate()}};
  const DTensor ids = FromVector(in, {1, c.seq}, options),
                targets = FromVector(out, {c.seq}, options);
  std::vector<double> ms;
  for (int64_t step = 0; step < c.steps + 2; ++step) {
    const auto start = std::chrono::steady_clock::now();
    const DTensor logits = model(ids);
    cross_entropy(view(logits, {c.seq, c.vocab}), targets).Backward();
    optim.Step();
    optim.ZeroGrad();
    const auto end = std::chrono::steady_clock::now();
    if (step >= 2) ms.push_back(std::chrono::duration<double, std::milli>(end - start).count());
  }
  std::sort(ms.begin(), ms.end());
  if (RankContext::Current().rank() == 0) *median_ms = ms[ms.size() / 2];
  return absl::OkStatus();
}

bool Parse(int argc, char** argv, Config* c) {
  const std::map<std::string, int64_t*> known = {
      {"tp", &c->tp},         {"hidden", &c->hidden}, {"ffn", &c->ffn}, {"vocab", &c->vocab},
      {"layers", &c->layers}, {"heads", &c->heads},   {"seq", &c->seq}, {"steps", &c->steps}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const auto it = arg.rfind("--", 0) == 0 && equals != std::string::npos
                        ? known.find(arg.substr(2, equals - 2))
                        : known.end();
    if (it == known.end()) {
      std::fprintf(stderr,
                   "unknown argument %s; --NAME=NUMBER with tp hidden ffn vocab layers heads "
                   "seq steps\n",
                   argv[i]);
      return false;
    }
    *it->second = std::atoll(arg.c_str() + equals + 1);
  }
  return true;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  dtensor::Config config;
  if (!dtensor::Parse(argc, argv, &config)) return 2;
  double median_ms = 0;
  const absl::Status status = dtensor::RunSpmd(
      config.tp, [&](dtensor::RankContext&) { return dtensor::Train(config, &median_ms); });
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return 1;
  }
  std::printf("ms %.3f\n", median_ms);
  return 0;
}
