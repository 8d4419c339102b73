// Kernels, dispatch and training steps on a CUDA device, for bench/compare_gpu: what
// bench/torch_gpu.py does in torch.
//
//   bench_gpu [--tiny] [name part]
//   bench_gpu --adds=N              cached adds and nothing else, for bench/count_instructions
//
// Prints lines "<name> 1 <us>": the least time of a call, of many in a row until the device is
// done; "enqueue..." is what the host takes for a call alone; "gpt2..." is a step of GPT-2 (124M)
// in bfloat16 with float32 masters, "_graph" replayed, "_tpN" on N ranks that share the device.
// --tiny: of small tensors, a few calls, only to see it run. Exit code 1 with the reason where
// there is no device.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "dtensor/autograd.h"
#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/module/materialize.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/plan/plan.h"
#include "dtensor/parallel/train/graphed_step.h"
#include "dtensor/parallel/train/trainer.h"
#include "dtensor/rng/generator.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

struct Options {
  bool tiny = false;
  int64_t adds = 0;
  std::string only;
};

class Bench {
 public:
  // Of one rank: all ranks of the world do the same, and the first prints.
  Bench(const Options& options, RankContext& rank)
      : o_(options), rank_(rank), world_(rank.WorldComm().value()) {}

  void Products() {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      for (const int64_t size : {256, 2048, 8192}) {
        const int64_t n = o_.tiny ? size / 256 : size;
        const std::string name = (dtype == DType::kBF16 ? "matmul.bf16_" : "matmul.f32_");
        Row(name + std::to_string(size), [&] {
          const DTensor a = to(randn({n, n}), dtype), b = to(randn({n, n}), dtype);
          Time(10, [&] { matmul(a, b); });
        });
      }
    }
  }
  void Host() {
    const DTensor x = ones({10, 10}), y = ones({10, 10});
    Row("enqueue.add", [&] { Time(10000, [&] { x + y; }, true); });
    Row("enqueue.matmul", [&] { Time(10000, [&] { matmul(x, y); }, true); });
  }
  void Memory() {
    const Shape shape = Sized({8192, 8192});
    const DTensor x = rand(shape), y = rand(shape);
    Row("memory.fill", [&] { Time(20, [&] { zeros(shape); }); });
    Row("memory.rand", [&] { Time(20, [&] { rand(shape); }); });
    Row("memory.randn", [&] { Time(20, [&] { randn(shape); }); });
    Row("memory.add", [&] { Time(20, [&] { x + y; }); });
    Row("memory.gelu", [&] { Time(20, [&] { gelu(x); }); });
    Row("memory.sum_rows", [&] { Time(20, [&] { sum(x, {1}); }); });
    Row("memory.softmax", [&] { Time(20, [&] { softmax(x, 1); }); });
    Row("memory.layer_norm", [&] { Time(20, [&] { layer_norm(x, {shape[1]}); }); });
    Row("memory.transpose", [&] { Time(20, [&] { contiguous(t(x)); }); });
  }
  void Attention() {
    const Shape shape = o_.tiny ? Shape{1, 2, 70, 16} : Shape{8, 12, 1024, 64};
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const std::string name = (dtype == DType::kBF16 ? "attention.bf16" : "attention.f32");
      DTensor q = to(randn(shape), dtype), k = to(randn(shape), dtype), v = to(randn(shape), dtype);
      const DTensor dout = to(randn(shape), dtype);
      const auto forward = [&] { return scaled_dot_product_attention(q, k, v, {}, true); };
      Row(name + "_forward", [&] { Time(10, forward); });
      for (DTensor* x : {&q, &k, &v}) x->RequiresGrad();
      Row(name + "_step", [&] {
        Time(10, [&] {
          for (DTensor* x : {&q, &k, &v}) x->ZeroGrad();
          forward().Backward(dout);
        });
      });
    }
  }
  // Random numbers of a tensor that is cut over the ranks, each of which draws its part.
  void ShardedRandom() {
    const DeviceMesh mesh({rank_.world_size()}, {"x"});
    const Shape shape = Sized({8192, 8192});
    for (const int dim : {0, 1}) {
      const TensorOptions cut = {.mesh = mesh, .placements = {Shard(dim)}};
      Row(dim == 0 ? "memory.rand_rows_" : "memory.rand_columns_", rank_.world_size(),
          [&] { Time(20, [&] { rand(shape, cut); }); });
    }
  }
  // Tensor parallel over all ranks.
  void Steps() {
    const int64_t ranks = rank_.world_size();
    if (ranks == 1) {
      Row("gpt2.bf16_step", [&] { Train(false); });
      Row("gpt2.bf16_graph", [&] { Train(true); });
    } else {
      Row("gpt2.bf16_tp", ranks, [&] { Train(false); });
    }
  }

 private:
  void Train(bool graph) {
    const int64_t batch = o_.tiny ? 1 : 8, seq = o_.tiny ? 4 : 1024;
    const int64_t ranks = rank_.world_size();
    const DeviceMesh mesh = ranks == 1 ? DeviceMesh::Self() : DeviceMesh({ranks}, {"tp"});
    const GPT2Config config = o_.tiny ? GPT2Config{.vocab = 24,
                                                   .hidden = 16,
                                                   .inner = 64,
                                                   .layers = 1,
                                                   .heads = 4,
                                                   .max_positions = seq}
                                      : GPT2Config{};
    ManualSeed(1);
    GPT2 model(config);
    SetDType(model, DType::kBF16);
    if (ranks > 1) ThrowIfError(ParallelizeModule(model, mesh, GPT2Plan(config)));
    Materialize(model);
    AdamW optimizer(model.NamedParameters(), {.lr = 1e-4}, [](const Parameter& p) {
      StateLayout layout = LikeParameter(p);
      layout.dtype = DType::kF32;
      return layout;
    });
    const DTensor ids = Tokens(mesh, {batch, seq}, config.vocab),
                  targets = Tokens(mesh, {batch, seq}, config.vocab);
    const std::function<DTensor()> step = [&] {
      const DTensor loss = NextTokenLoss(model(ids), targets);
      optimizer.ZeroGrad();
      loss.Backward();
      optimizer.Step();
      return loss;
    };
    if (!graph) return Time(5, step);
    GraphedStep graphed(optimizer, step);
    graphed();  // The first runs plainly; Time's first captures, before it measures.
    Time(5, [&] { graphed(); });
  }
  static DTensor Tokens(const DeviceMesh& mesh, const Shape& shape, int64_t vocab) {
    const TensorOptions whole = {.mesh = mesh, .placements = Placements(mesh.ndim(), Replicate())};
    return to(floor(static_cast<double>(vocab) * rand(shape, whole)), DType::kI64);
  }
  void Row(const std::string& name, int64_t ranks, const std::function<void()>& run) {
    Row(name + std::to_string(ranks), run);
  }
  Shape Sized(Shape shape) const {
    for (int64_t& n : shape) n = o_.tiny ? n / 256 : n;
    return shape;
  }
  void Row(const std::string& name, const std::function<void()>& run) {
    if (name.find(o_.only) == std::string::npos) return;
    run();
    if (rank_.rank() != 0) return;
    std::printf("%s 1 %.3f\n", name.c_str(), us_);
    std::fflush(stdout);
  }
  // Until the device is done with what all ranks gave it.
  void Wait() {
    ThrowIfError(rank_.devices().Synchronize());
    if (rank_.world_size() > 1) ThrowIfError(world_->Barrier().Wait());
  }
  // Microseconds of a call, the least of several rounds of so many calls.
  void Time(int calls, const std::function<void()>& body, bool host_only = false) {
    using Clock = std::chrono::steady_clock;
    if (o_.tiny) calls = 2;
    body();
    Wait();
    us_ = 1e12;
    for (int round = 0; round < (o_.tiny ? 1 : 7); ++round) {
      const auto begin = Clock::now();
      for (int i = 0; i < calls; ++i) body();
      auto end = Clock::now();
      Wait();
      if (!host_only) end = Clock::now();
      us_ = std::min(us_, std::chrono::duration<double, std::micro>(end - begin).count() / calls);
    }
  }

  const Options o_;
  RankContext& rank_;
  Comm* const world_;
  double us_ = 0;
};

// bench/count_instructions counts what runs inside of this function, so nothing is inlined into it.
[[gnu::noinline]] void CachedAdd(const DTensor& x, const DTensor& y) { const DTensor z = x + y; }

void CachedAdds(int64_t n) {
  const DTensor x = ones({10, 10}), y = ones({10, 10});
  for (int64_t i = 0; i < 100; ++i) x + y;  // plans, takes memory
  ThrowIfError(RankContext::Current().devices().Synchronize());
  for (int64_t i = 0; i < n; ++i) CachedAdd(x, y);
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  dtensor::Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--tiny") {
      options.tiny = true;
    } else if (argument.rfind("--adds=", 0) == 0) {
      options.adds = std::atoll(argument.c_str() + 7);
    } else if (argument.rfind("--", 0) != 0) {
      options.only = argument;
    } else {
      std::fprintf(stderr, "unknown argument %s; --tiny, --adds=N, or a part of the names\n",
                   argv[i]);
      return 2;
    }
  }
  dtensor::SpmdOptions where;
  where.device = dtensor::DeviceType::kCuda;
  absl::Status status = dtensor::RunSpmd(
      1,
      [&](dtensor::RankContext& rank) {
        if (options.adds > 0) {
          dtensor::CachedAdds(options.adds);
          return absl::OkStatus();
        }
        dtensor::Bench bench(options, rank);
        bench.Products();
        bench.Host();
        bench.Memory();
        bench.Attention();
        bench.Steps();
        return absl::OkStatus();
      },
      where);
  // Ranks that share the device.
  for (const int64_t ranks : {2, 3, 4}) {
    if (!status.ok() || options.adds > 0) break;
    status = dtensor::RunSpmd(
        ranks,
        [&](dtensor::RankContext& rank) {
          dtensor::Bench bench(options, rank);
          bench.ShardedRandom();
          if (ranks != 3) bench.Steps();
          return absl::OkStatus();
        },
        where);
  }
  if (status.ok()) return 0;
  std::fprintf(stderr, "bench_gpu: %s\n", std::string(status.message()).c_str());
  return 1;
}
