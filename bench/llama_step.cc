// One training step of a Llama (parallel/models), the model that bench/torch_step.py runs on torch:
// rotary positions, grouped heads, untied head, AdamW, class-sharded loss; tensor parallel over
// `tp` ranks (threads, or processes under mpirun), with sp=1 also by sequence, with bf16=1 in
// bfloat16. Prints
//
//   ms <least of the steps>
//   products_ms <the step's matrix products alone, by oneDNN itself on as many threads>
//   weights_ms <of these the products with weights>
//
// which are run in turns; the last two not for bf16 on a processor without units for it.
//
//   bench_llama_step --tp=2 --hidden=1024 --ffn=2688 --vocab=4096 --heads=16 --kv=4 --seq=512
//                    --steps=3 --sp=0 --bf16=0
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "bench/direct_product.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/mesh/program.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/cpu/bf16_gemm.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Config {
  int64_t tp = 2, hidden = 1024, ffn = 2688, vocab = 4096, layers = 2, heads = 16, kv = 4,
          seq = 512, steps = 3, sp = 0, bf16 = 0;
};
struct Times {
  double step = 1e9, products = 1e9, weights = 1e9;
};

// By itself it takes bfloat16 only where there are units for it.
bool OneDnnMultiplies(const Config& c) { return c.bf16 == 0 || HasBf16Units(); }

LlamaConfig ModelOf(const Config& c) {
  return {.vocab = c.vocab,
          .hidden = c.hidden,
          .inner = c.ffn,
          .layers = c.layers,
          .heads = c.heads,
          .kv_heads = c.kv,
          .head_size = c.hidden / c.heads,
          .max_positions = c.seq};
}

// Products of this rank, ready to run: as in the step, what is read was written long ago, and no
// two of them write the same memory.
class Products {
 public:
  void Run() {
    for (DirectProduct& product : products_) product();
  }
  void* Memory(int64_t rows, int64_t columns, DType t) {
    return operands_.emplace_back(zeros({rows, columns}, {.dtype = t}).local()).data();
  }
  void Add(const GemmCall& call) { products_.emplace_back(call); }

 private:
  std::vector<Tensor> operands_;
  std::vector<DirectProduct> products_;
};

// What a step multiplies this rank's weights with, `tokens` rows, forward and backward.
Products OfWeights(const Module& model, int64_t tokens) {
  Products all;
  for (const NamedParameter& p : model.NamedParameters()) {
    if (p.parameter->shape().size() != 2 || p.fqn == "model.embed_tokens.weight") continue;
    const Tensor& w = p.parameter->tensor().local();
    const int64_t m = tokens, n = w.shape()[0], k = w.shape()[1];
    const DType t = w.dtype();
    void *x = all.Memory(m, k, t), *y = all.Memory(m, n, t), *dy = all.Memory(m, n, t),
         *dx = all.Memory(m, k, t), *dw = all.Memory(n, k, t);
    all.Add({m, n, k, x, k, 1, w.data(), 1, k, y, n, t});    // x w^T
    all.Add({m, k, n, dy, n, 1, w.data(), k, 1, dx, k, t});  // dy w
    all.Add({n, k, m, dy, 1, n, x, k, 1, dw, k, t});         // dy^T x
  }
  return all;
}

// The seven products of a causal attention in a layer: two forward, five backward, where the scores
// are computed once more. Of the keys only those up to the last query of a tile are multiplied.
// All sequences x heads of a rank lie as the model's projections write them, a token per row.
Products OfAttention(const Config& c, DType t) {
  constexpr int64_t kTile = 128;
  const int64_t heads = c.heads / c.tp, group = c.heads / c.kv, d = c.hidden / c.heads,
                width = heads * d, kv_width = width / group, size = SizeOf(t);
  Products all;
  const auto at = [&](void* base, int64_t row, int64_t wide, int64_t head) -> void* {
    return static_cast<char*>(base) + (row * wide + head * d) * size;
  };
  for (int64_t layer = 0; layer < c.layers; ++layer) {
    void *q = all.Memory(c.seq, width, t), *k = all.Memory(c.seq, kv_width, t),
         *v = all.Memory(c.seq, kv_width, t), *o = all.Memory(c.seq, width, t),
         *dout = all.Memory(c.seq, width, t), *dq = all.Memory(c.seq, width, t);
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t from = head / group;
      void *keys = at(k, 0, kv_width, from), *values = at(v, 0, kv_width, from);
      for (int64_t row = 0; row < c.seq; row += kTile) {
        const int64_t m = std::min(kTile, c.seq - row), n = row + m;
        void *qs = at(q, row, width, head), *dos = at(dout, row, width, head);
        void *scores = all.Memory(m, n, t), *again = all.Memory(m, n, t),
             *slopes = all.Memory(m, n, t), *dk = all.Memory(n, d, t), *dv = all.Memory(n, d, t);
        all.Add({m, n, d, qs, width, 1, keys, 1, kv_width, scores, n, t});  // q k^T
        all.Add({m, d, n, scores, n, 1, values, kv_width, 1, at(o, row, width, head), width, t});
        all.Add({m, n, d, qs, width, 1, keys, 1, kv_width, again, n, t});      // q k^T
        all.Add({m, n, d, dos, width, 1, values, 1, kv_width, slopes, n, t});  // do v^T
        all.Add({n, d, m, again, 1, n, dos, width, 1, dv, d, t});              // p^T do
        all.Add({m, d, n, slopes, n, 1, keys, kv_width, 1, at(dq, row, width, head), width, t});
        all.Add({n, d, m, slopes, 1, n, qs, width, 1, dk, d, t});  // ds^T q
      }
    }
  }
  return all;
}

double MsOf(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

absl::Status Train(RankContext& context, const Config& c, Times* times) {
  ManualSeed(0);
  const DeviceMesh mesh({c.tp}, {"tp"});
  Llama model(ModelOf(c));
  SetDType(model, c.bf16 != 0 ? DType::kBF16 : DType::kF32);
  DT_RETURN_IF_ERROR(
      ParallelizeModule(model, mesh, LlamaPlan(model.config(), {.sequence_parallel = c.sp != 0})));
  Materialize(model);
  AdamW optim(model.NamedParameters(), {.lr = 1e-3});
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i <= c.seq; ++i) tokens.push_back((i * 7919 + 13) % c.vocab);
  const std::vector<int64_t> in(tokens.begin(), tokens.end() - 1),
      out(tokens.begin() + 1, tokens.end());
  const TensorOptions options = {DType::kI64, mesh, {Replicate()}};
  const DTensor ids = FromVector(in, {1, c.seq}, options),
                targets = FromVector(out, {c.seq}, options);
  Products weights, attention;
  if (OneDnnMultiplies(c)) {
    weights = OfWeights(model, c.seq);
    attention = OfAttention(c, c.bf16 != 0 ? DType::kBF16 : DType::kF32);
  }
  DT_ASSIGN_OR_RETURN(Comm* const world, context.WorldComm());
  const auto meet = [&] { ThrowIfError(world->Barrier().Wait()); };
  for (int64_t step = 0; step < c.steps + 2; ++step) {
    meet();
    const double ms = MsOf([&] {
      cross_entropy(view(model(ids), {c.seq, c.vocab}), targets).Backward();
      optim.Step();
      optim.ZeroGrad();
      meet();
    });
    const auto alone = [&](Products* products) {
      return MsOf([&] {
        products->Run();
        meet();
      });
    };
    const double of_weights = alone(&weights), of_attention = alone(&attention);
    if (step < 2 || context.rank() != 0) continue;
    times->step = std::min(times->step, ms);
    times->weights = std::min(times->weights, of_weights);
    times->products = std::min(times->products, of_weights + of_attention);
  }
  return absl::OkStatus();
}

bool Parse(int argc, char** argv, Config* c) {
  const std::map<std::string, int64_t*> known = {
      {"tp", &c->tp},         {"hidden", &c->hidden}, {"ffn", &c->ffn},  {"vocab", &c->vocab},
      {"layers", &c->layers}, {"heads", &c->heads},   {"kv", &c->kv},    {"seq", &c->seq},
      {"steps", &c->steps},   {"sp", &c->sp},         {"bf16", &c->bf16}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const size_t equals = arg.find('=');
    const auto it = arg.rfind("--", 0) == 0 && equals != std::string::npos
                        ? known.find(arg.substr(2, equals - 2))
                        : known.end();
    if (it == known.end()) {
      std::fprintf(stderr,
                   "unknown argument %s; --NAME=NUMBER with tp hidden ffn vocab layers heads kv "
                   "seq steps sp bf16\n",
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
  dtensor::Times times;
  const absl::Status status = dtensor::RunSpmd(config.tp, [&](dtensor::RankContext& context) {
    return dtensor::Train(context, config, &times);
  });
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return 1;
  }
  if (dtensor::ThisProcess() != 0) return 0;  // rank 0 took the times
  std::printf("ms %.3f\n", times.step);
  if (dtensor::OneDnnMultiplies(config)) {
    std::printf("products_ms %.3f\nweights_ms %.3f\n", times.products, times.weights);
  }
  return 0;
}
