// What kernels and training steps do on the CUDA device, counted by the stand-in (tests/cusim),
// against the limits of tests/data/cuda_counts.txt. Each failure says what was counted: a table
// that has become better is written anew by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/graphed_step.h"
#include "dtensor/rng/generator.h"
#include "tests/common/cuda_counters.h"

namespace dtensor {
namespace {

using testing::Counts;

// "kind name number number ..." of the table, by kind and name.
std::map<std::string, std::vector<double>> Limits(const std::string& kind) {
  std::map<std::string, std::vector<double>> all;
  std::ifstream file(DT_TEST_DATA "/cuda_counts.txt");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string of, name;
    words >> of >> name;
    if (of != kind) continue;
    double number = 0;
    while (words >> number) all[name].push_back(number);
  }
  EXPECT_FALSE(all.empty()) << "no lines of " << kind << " in cuda_counts.txt";
  return all;
}

void OnCuda(const std::function<void()>& fn) {
  const absl::Status status = RunSpmd(1,
                                      [&](RankContext&) -> absl::Status {
                                        fn();
                                        return absl::OkStatus();
                                      },
                                      {.device = DeviceType::kCuda});
  EXPECT_TRUE(status.ok()) << status;
}

// --- kernels ------------------------------------------------------------------------------------

constexpr int64_t kRows = 96, kColumns = 256;

// What must be read and written: bytes of tensors, each so often as it is named.
int64_t BytesOf(std::initializer_list<DTensor> tensors) {
  int64_t bytes = 0;
  for (const DTensor& t : tensors) bytes += Numel(t.shape()) * SizeOf(t.dtype());
  return bytes;
}

struct KernelRun {
  std::function<void()> run;
  int64_t needed = 0;
};
KernelRun Forward(const std::vector<DTensor>& in, const std::function<DTensor()>& fn) {
  int64_t needed = BytesOf({fn()});
  for (const DTensor& t : in) needed += BytesOf({t});
  return {[fn] { fn(); }, needed};
}
// Of rows that all read one weight, which counts for each of them.
DTensor PerRow(const DTensor& weight) { return zeros({kRows, weight.size(0)}); }
// What the gradient of a weight is added up of, in a fixed order: a row of sums from each of the
// teams that share the rows, written and read.
DTensor TeamSums() { return zeros({8, kColumns}); }

// The gradient of a function of x: reads what it keeps and the result's gradient, writes x's.
KernelRun Backward(const DTensor& x, const std::vector<DTensor>& reads,
                   const std::function<DTensor(const DTensor&)>& fn) {
  const auto leaf = std::make_shared<DTensor>(clone(x));
  leaf->RequiresGrad();
  const auto result = std::make_shared<DTensor>(fn(*leaf));
  const DTensor dy = ones_like(*result);
  int64_t needed = BytesOf({x, dy});
  for (const DTensor& t : reads) needed += BytesOf({t});
  return {[=] { result->Backward(dy); }, needed};
}

KernelRun Updates(int states,
                  const std::function<void(const std::vector<std::vector<DTensor>>&)>& fn) {
  auto lists = std::make_shared<std::vector<std::vector<DTensor>>>();
  int64_t bytes = 0;
  for (int k = 0; k < states + 2; ++k) {
    lists->emplace_back();
    for (const int64_t n : {4096, 1000, 8192, 64}) {
      lists->back().push_back(ones({n}));
      bytes += BytesOf({lists->back().back()}) * (k < states + 1 ? 2 : 1);  // the last are read
    }
  }
  return {[=] {
            const NoGrad no_grad;
            fn(*lists);
          },
          bytes};
}

std::map<std::string, std::function<KernelRun()>> Kernels() {
  const auto make = [](DType dtype = DType::kF32) { return to(rand({kRows, kColumns}), dtype); };
  const std::vector<int64_t> steps(4, 2);
  return {
      {"add",
       [=] {
         const DTensor x = make(), y = make();
         return Forward({x, y}, [=] { return x + y; });
       }},
      {"add_bfloat16",
       [=] {
         const DTensor x = make(DType::kBF16), y = make(DType::kBF16);
         return Forward({x, y}, [=] { return x + y; });
       }},
      {"gelu",
       [=] {
         const DTensor x = make();
         return Forward({x}, [=] { return gelu(x); });
       }},
      {"gelu_gradient",
       [=] {
         const DTensor x = make();
         return Backward(x, {x}, [](const DTensor& t) { return gelu(t); });
       }},
      {"to_bfloat16",
       [=] {
         const DTensor x = make();
         return Forward({x}, [=] { return to(x, DType::kBF16); });
       }},
      {"softmax",
       [=] {
         const DTensor x = make();
         return Forward({x}, [=] { return softmax(x, 1); });
       }},
      {"softmax_gradient",
       [=] {
         const DTensor x = make();
         return Backward(x, {x}, [](const DTensor& t) { return softmax(t, 1); });
       }},
      {"log_softmax",
       [=] {
         const DTensor x = make();
         return Forward({x}, [=] { return log_softmax(x, 1); });
       }},
      {"rms_norm",
       [=] {
         const DTensor x = make(), w = ones({kColumns});
         return Forward({x, PerRow(w)}, [=] { return rms_norm(x, {kColumns}, w, 1e-5); });
       }},
      {"layer_norm",
       [=] {
         const DTensor x = make(), w = ones({kColumns}), b = zeros({kColumns});
         return Forward({x, PerRow(w), PerRow(b)},
                        [=] { return layer_norm(x, {kColumns}, w, b, 1e-5); });
       }},
      {"cross_entropy",
       [=] {
         // Of a vocabulary: no lane holds its part of a row, and what is written for a row, a
         // sector each, is little beside it.
         const DTensor x = rand({8, 5000}), t = zeros({8}, {.dtype = DType::kI64});
         return Forward({x, t}, [=] { return cross_entropy(x, t); });
       }},
      {"log_softmax_gradient",
       [=] {
         const DTensor x = make();
         return Backward(x, {x}, [](const DTensor& t) { return log_softmax(t, 1); });
       }},
      {"rms_norm_gradient",
       [=] {
         const DTensor x = make(), w = ones({kColumns});
         const DTensor rstd = zeros({kRows}), sums = TeamSums();
         return Backward(x, {x, PerRow(w), rstd, w, sums, sums},
                         [=](const DTensor& t) { return rms_norm(t, {kColumns}, w, 1e-5); });
       }},
      {"layer_norm_gradient",
       [=] {
         const DTensor x = make(), w = ones({kColumns}), b = zeros({kColumns});
         const DTensor mean = zeros({kRows}), rstd = mean, sums = TeamSums();
         return Backward(x, {x, PerRow(w), mean, rstd, w, b, sums, sums, sums, sums},
                         [=](const DTensor& t) { return layer_norm(t, {kColumns}, w, b, 1e-5); });
       }},
      {"cross_entropy_gradient",
       [=] {
         const DTensor x = rand({8, 5000}), t = zeros({8}, {.dtype = DType::kI64});
         return Backward(x, {x}, [=](const DTensor& in) { return cross_entropy(in, t); });
       }},
      // More elements than the launch has threads, so that a thread draws several.
      {"rand", [=] { return Forward({}, [] { return rand({1280, 256}); }); }},
      {"randn", [=] { return Forward({}, [] { return randn({1280, 256}); }); }},
      {"rand_bfloat16",
       [=] { return Forward({}, [] { return rand({1280, 256}, {.dtype = DType::kBF16}); }); }},
      {"dropout",
       [=] {
         const DTensor x = make(), mask = make(DType::kBool);
         return Forward({x, mask}, [=] { return dropout(x, 0.3); });
       }},
      {"dropout_gradient",
       [=] {
         const DTensor x = make(), mask = make(DType::kBool);
         return Backward(x, {mask}, [](const DTensor& t) { return dropout(t, 0.3); });
       }},
      {"sgd_",
       [=] {
         return Updates(0, [=](const auto& l) { sgd_(l[0], {}, l[1], steps, {.lr = 0.1}); });
       }},
      {"adamw_",
       [=] {
         return Updates(
             2, [=](const auto& l) { adamw_(l[0], l[1], l[2], {}, l[3], steps, {.lr = 0.1}); });
       }},
      {"total_norm",
       [=] {
         KernelRun run = Updates(0, [](const auto& l) { get_total_norm(l[1]); });
         run.needed /= 3;
         return run;
       }},
  };
}

TEST(CudaCounts, KernelsMoveWhatTheyMust) {
  const auto limits = Limits("kernel");
  OnCuda([&] {
    for (const auto& [name, make] : Kernels()) {
      ASSERT_TRUE(limits.contains(name)) << name << " is not in the table";
      const std::vector<double>& limit = limits.at(name);
      ASSERT_EQ(limit.size(), 2u) << name;
      const KernelRun kernel = make();
      const Counts counts = testing::CudaCountsOf(kernel.run);
      const double bytes = static_cast<double>(counts.at("bytes"));
      const double sectors = 32 * static_cast<double>(counts.at("sectors"));
      // Lanes that ask for the same number together move it once.
      const double share = std::min(bytes, sectors) / static_cast<double>(kernel.needed);
      const double ideal = bytes / sectors;
      std::printf("kernel %s %.2f %.2f\n", name.c_str(), share, ideal);
      EXPECT_LE(share, limit[0]) << name << ": bytes for each that is needed";
      EXPECT_GE(share, 0.4) << name << " was not counted whole";
      EXPECT_GE(ideal, limit[1]) << name << ": bytes asked for by bytes of sectors touched";
    }
    EXPECT_EQ(Kernels().size(), limits.size()) << "the table has others";
  });
}

// --- steps --------------------------------------------------------------------------------------

struct Step {
  std::unique_ptr<Module> model;
  std::unique_ptr<AdamW> optimizer;
  DTensor ids, targets;
  int64_t vocab = 0;

  Step(std::unique_ptr<Module> of, int64_t seq, int64_t words)
      : model(std::move(of)), vocab(words) {
    ManualSeed(7);
    Materialize(*model);
    optimizer = std::make_unique<AdamW>(model->NamedParameters(), AdamWOptions{.lr = 0.01});
    ids = zeros({2, seq}, {.dtype = DType::kI64});
    targets = zeros({2, seq}, {.dtype = DType::kI64});
  }
  DTensor operator()() const {
    const DTensor loss =
        cross_entropy(reshape((*model)(ids), {Numel(ids.shape()), vocab}), flatten(targets, 0, 1));
    optimizer->ZeroGrad();
    loss.Backward();
    ClipGradients(model->NamedParameters(), 0.5);
    optimizer->Step();
    return loss.Detach();
  }
};
std::unique_ptr<Step> MakeGpt() {
  const GPTConfig config = {
      .vocab = 32, .seq = 8, .layers = 2, .hidden = 16, .heads = 4, .dropout = 0.1};
  return std::make_unique<Step>(std::make_unique<GPT>(config), config.seq, config.vocab);
}
std::unique_ptr<Step> MakeLlama() {
  const LlamaConfig config = {
      .vocab = 32, .hidden = 32, .inner = 48, .layers = 1, .heads = 4, .kv_heads = 2};
  return std::make_unique<Step>(std::make_unique<Llama>(config), 8, config.vocab);
}

void ExpectWithin(const std::string& name, const Counts& counts) {
  // What the host may do in a step: calls that wait, that take memory, that bring something in.
  const auto of = [&](const char* what) {
    const auto at = counts.find(what);
    return at == counts.end() ? 0 : at->second;
  };
  const std::map<std::string, int64_t> now = {
      {"launches", of("cudaLaunchKernel")},
      {"copies", of("cudaMemcpyAsync")},
      {"uploads", of("uploads")},
      {"waits", of("waits") + of("cudaStreamSynchronize") + of("cudaDeviceSynchronize") +
                    of("cudaEventSynchronize")},
      {"allocations", of("cudaMalloc") + of("cudaHostAlloc")}};
  const auto limits = Limits(name);
  for (const auto& [what, value] : now) {
    std::printf("%s %s %lld\n", name.c_str(), what.c_str(), static_cast<long long>(value));
    ASSERT_TRUE(limits.contains(what)) << name << " " << what;
    EXPECT_LE(value, limits.at(what)[0]) << name << ": " << what << " of a step";
  }
}

TEST(CudaCounts, StepsLaunchCopyAndWaitNoMoreThan) {
  OnCuda([] {
    const struct {
      const char* name;
      std::unique_ptr<Step> step;
    } programs[] = {{"gpt", MakeGpt()}, {"llama", MakeLlama()}};
    for (const auto& p : programs) {
      (*p.step)();
      (*p.step)();
      ExpectWithin(p.name, testing::CudaCountsOf([&] { (*p.step)(); }));
    }
  });
}

// The third call of a GraphedStep is the first that only launches; the block of numbers that it
// brings is the one copy.
TEST(CudaCounts, AStepAsAGraphIsOneLaunch) {
  OnCuda([] {
    const struct {
      const char* name;
      std::unique_ptr<Step> step;
    } programs[] = {{"gpt_graph", MakeGpt()}, {"llama_graph", MakeLlama()}};
    for (const auto& p : programs) {
      GraphedStep graphed(*p.step->optimizer, [&] { return (*p.step)(); });
      graphed();
      graphed();
      ASSERT_TRUE(graphed.captured());
      const Counts counts = testing::CudaCountsOf([&] { graphed(); });
      ExpectWithin(p.name, counts);
      EXPECT_EQ(counts.at("cudaGraphLaunch"), 1) << p.name;
      EXPECT_GT(counts.at("bytes"), 0) << p.name << " did nothing";
    }
  });
}

}  // namespace
}  // namespace dtensor
