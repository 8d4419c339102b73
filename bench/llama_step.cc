// One training step of a Llama (parallel/models), the model that bench/torch_step.py runs on torch:
// rotary positions, grouped heads, untied head, AdamW, class-sharded loss; tensor parallel over
// `tp` ranks (threads), with sp=1 also by sequence, with bf16=1 in bfloat16. Prints
//
//   ms <least of the steps>
//   products_ms <the step's products with weights alone, by oneDNN itself on as many threads>
//
// which are run in turns.
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
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Config {
  int64_t tp = 2, hidden = 1024, ffn = 2688, vocab = 4096, layers = 2, heads = 16, kv = 4,
          seq = 512, steps = 3, sp = 0, bf16 = 0;
};
struct Times {
  double step = 1e9, products = 1e9;
};

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

// What a step multiplies this rank's weights with, `tokens` rows, forward and backward: as in the
// step, what is read was written long ago, and no two products write the same memory.
class Products {
 public:
  Products(const Module& model, int64_t tokens) {
    for (const NamedParameter& p : model.NamedParameters()) {
      if (p.parameter->shape().size() != 2 || p.fqn == "model.embed_tokens.weight") continue;
      Add(p.parameter->tensor().local(), tokens);
    }
  }
  void Run() {
    for (DirectProduct& product : products_) product();
  }

 private:
  void Add(const Tensor& w, int64_t m) {
    const int64_t n = w.shape()[0], k = w.shape()[1];
    const DType t = w.dtype();
    const auto memory = [&](int64_t rows, int64_t columns) {
      return operands_.emplace_back(zeros({rows, columns}, {.dtype = t}).local()).data();
    };
    void *x = memory(m, k), *y = memory(m, n), *dy = memory(m, n), *dx = memory(m, k),
         *dw = memory(n, k);
    products_.emplace_back(GemmCall{m, n, k, x, k, 1, w.data(), 1, k, y, n, t});    // x w^T
    products_.emplace_back(GemmCall{m, k, n, dy, n, 1, w.data(), k, 1, dx, k, t});  // dy w
    products_.emplace_back(GemmCall{n, k, m, dy, 1, n, x, k, 1, dw, k, t});         // dy^T x
  }

  std::vector<Tensor> operands_;
  std::vector<DirectProduct> products_;
};

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
  Products products(model, c.seq);
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
    const double alone = MsOf([&] {
      products.Run();
      meet();
    });
    if (step < 2 || context.rank() != 0) continue;
    times->step = std::min(times->step, ms);
    times->products = std::min(times->products, alone);
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
  std::printf("ms %.3f\nproducts_ms %.3f\n", times.step, times.products);
  return 0;
}
