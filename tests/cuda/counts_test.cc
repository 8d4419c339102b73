// What kernels and training steps do on the CUDA device, counted by the stand-in (tests/cusim),
// against the limits of tests/data/cuda_counts.txt. Each failure says what was counted: a table
// that has become better is written anew by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

// Of kernels: "kernel NAME A B", or of one case alone "kernel NAME CASE A B"; by "NAME" and "NAME
// CASE".
struct KernelLimit {
  double bytes = 0, sectors = 0;
  bool used = false;
};
std::map<std::string, KernelLimit> KernelLimits() {
  std::map<std::string, KernelLimit> all;
  std::ifstream file(DT_TEST_DATA "/cuda_counts.txt");
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::vector<std::string> of;
    for (std::string word; words >> word;) of.push_back(word);
    if (of.empty() || of[0] != "kernel") continue;
    EXPECT_TRUE(of.size() == 4 || of.size() == 5) << line;
    if (of.size() < 4) continue;
    const std::string name = of.size() == 4 ? of[1] : of[1] + " " + of[2];
    all[name] = {std::stod(of[of.size() - 2]), std::stod(of.back())};
  }
  EXPECT_FALSE(all.empty()) << "no lines of kernels in cuda_counts.txt";
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

KernelRun Updates(int states, DType dtype,
                  const std::function<void(const std::vector<std::vector<DTensor>>&)>& fn) {
  auto lists = std::make_shared<std::vector<std::vector<DTensor>>>();
  int64_t bytes = 0;
  for (int k = 0; k < states + 2; ++k) {
    lists->emplace_back();
    for (const int64_t n : {4096, 1000, 8192, 64, 3001}) {
      lists->back().push_back(ones({n}, {.dtype = dtype}));
      bytes += BytesOf({lists->back().back()}) * (k < states + 1 ? 2 : 1);  // the last are read
    }
  }
  return {[=] {
            const NoGrad no_grad;
            fn(*lists);
          },
          bytes};
}

// One kernel on operands of one form.
struct KernelCase {
  std::string name, form;
  std::function<KernelRun()> make;
};
struct Form {
  int64_t rows, columns;
  DType dtype = DType::kF32;
  std::string text() const {
    return std::to_string(rows) + "x" + std::to_string(columns) + "/" + std::string(Name(dtype));
  }
  DTensor Draw() const { return to(rand({rows, columns}), dtype); }
  DTensor Row(double value = 1) const { return full({columns}, value, {.dtype = dtype}); }
  // Of rows that all read one weight, which counts for each of them.
  DTensor PerRow() const { return zeros({rows, columns}, {.dtype = dtype}); }
  DTensor Statistic() const {
    return zeros({rows}, {.dtype = dtype == DType::kF64 ? dtype : DType::kF32});
  }
  // Rows are shared by teams, each of 16 of them, and those of a block.
  int64_t TeamsOfABlock() const {
    int64_t lanes = 32;
    while (columns > 256 && lanes < 512 && lanes * 8 < columns) lanes *= 2;
    return lanes < 256 ? 256 / lanes : 1;
  }
  int64_t Blocks() const {
    const int64_t teams = (rows + 15) / 16, of_block = TeamsOfABlock();
    return (teams + of_block - 1) / of_block;
  }
  // What the gradient of a weight is added up of, in a fixed order: a row of sums of each team,
  // written and read.
  DTensor TeamSums() const {
    return zeros({Blocks() * TeamsOfABlock(), columns},
                 {.dtype = dtype == DType::kF64 ? dtype : DType::kF32});
  }
  // The weight in a gradient: for each row, or, where rows lie in shared memory, for each block.
  DTensor GradientWeight() const {
    const bool shared = columns > 4096 || columns * SizeOf(dtype) % 32 != 0 || dtype == DType::kF64;
    return zeros({shared ? Blocks() : rows, columns}, {.dtype = dtype});
  }
};

// What works on lines: short ones, of what registers hold, of what shared memory holds, and longer;
// beginning amid sectors and not.
const Form kLines[] = {
    {256, 32},
    {96, 256},
    {40, 251},
    {8, 4096},
    {8, 4099},
    {4, 8192},
    {2, 32768},
    {2, 50257},
    {96, 256, DType::kBF16},
    {40, 251, DType::kBF16},
    {4, 8192, DType::kBF16},
    {2, 50257, DType::kBF16},
    {48, 256, DType::kF64},
    {40, 251, DType::kF64},
    {4, 4096, DType::kF64},
    {4, 8192, DType::kF64},
    {2, 32768, DType::kF64},
};

void AddLineKernels(std::vector<KernelCase>* all) {
  for (const Form& f : kLines) {
    const auto add = [&](const char* name, std::function<KernelRun()> make) {
      all->push_back({name, f.text(), std::move(make)});
    };
    add("softmax", [=] {
      const DTensor x = f.Draw();
      return Forward({x}, [=] { return softmax(x, 1); });
    });
    add("softmax_gradient", [=] {
      const DTensor x = f.Draw();
      return Backward(x, {x}, [](const DTensor& t) { return softmax(t, 1); });
    });
    add("log_softmax", [=] {
      const DTensor x = f.Draw();
      return Forward({x}, [=] { return log_softmax(x, 1); });
    });
    add("log_softmax_gradient", [=] {
      const DTensor x = f.Draw();
      return Backward(x, {x}, [](const DTensor& t) { return log_softmax(t, 1); });
    });
    add("rms_norm", [=] {
      const DTensor x = f.Draw(), w = f.Row();
      return Forward({x, f.PerRow(), f.Statistic()},
                     [=] { return rms_norm(x, {f.columns}, w, 1e-5); });
    });
    add("rms_norm_gradient", [=] {
      const DTensor x = f.Draw(), w = f.Row(), sums = f.TeamSums();
      return Backward(x, {x, f.GradientWeight(), f.Statistic(), w, sums, sums},
                      [=](const DTensor& t) { return rms_norm(t, {f.columns}, w, 1e-5); });
    });
    add("layer_norm", [=] {
      const DTensor x = f.Draw(), w = f.Row(), b = f.Row(0), statistic = f.Statistic();
      return Forward({x, f.PerRow(), f.PerRow(), statistic, statistic},
                     [=] { return layer_norm(x, {f.columns}, w, b, 1e-5); });
    });
    add("layer_norm_gradient", [=] {
      const DTensor x = f.Draw(), w = f.Row(), b = f.Row(0), statistic = f.Statistic();
      const DTensor sums = f.TeamSums();
      return Backward(x,
                      {x, f.GradientWeight(), statistic, statistic, w, b, sums, sums, sums, sums},
                      [=](const DTensor& t) { return layer_norm(t, {f.columns}, w, b, 1e-5); });
    });
  }
  // Of a vocabulary: what is written for a row, a sector each, is little beside it.
  for (const Form& f : {Form{8, 1000}, Form{8, 1003}, Form{8, 5000}, Form{2, 50257},
                        Form{4, 50257, DType::kBF16}, Form{2, 50257, DType::kF64}}) {
    all->push_back({"cross_entropy", f.text(), [=] {
                      const DTensor x = f.Draw(), t = zeros({f.rows}, {.dtype = DType::kI64});
                      return Forward({x, t}, [=] { return cross_entropy(x, t); });
                    }});
    all->push_back({"cross_entropy_gradient", f.text(), [=] {
                      const DTensor x = f.Draw(), t = zeros({f.rows}, {.dtype = DType::kI64});
                      return Backward(x, {x},
                                      [=](const DTensor& in) { return cross_entropy(in, t); });
                    }});
  }
}

void AddPointwiseKernels(std::vector<KernelCase>* all) {
  for (const Form& f : {Form{96, 256}, Form{40, 251}, Form{1, 50257}, Form{96, 256, DType::kBF16},
                        Form{40, 251, DType::kBF16}, Form{40, 251, DType::kF64}}) {
    const auto add = [&](const char* name, std::function<KernelRun()> make) {
      all->push_back({name, f.text(), std::move(make)});
    };
    add("add", [=] {
      const DTensor x = f.Draw(), y = f.Draw();
      return Forward({x, y}, [=] { return x + y; });
    });
    add("gelu", [=] {
      const DTensor x = f.Draw();
      return Forward({x}, [=] { return gelu(x); });
    });
    add("gelu_gradient", [=] {
      const DTensor x = f.Draw();
      return Backward(x, {x}, [](const DTensor& t) { return gelu(t); });
    });
    add("to_float16", [=] {
      const DTensor x = f.Draw();
      return Forward({x}, [=] { return to(x, DType::kF16); });
    });
    add("dropout", [=] {
      const DTensor x = f.Draw(), mask = to(x, DType::kBool);
      return Forward({x, mask}, [=] { return dropout(x, 0.3); });
    });
    add("dropout_gradient", [=] {
      const DTensor x = f.Draw(), mask = to(x, DType::kBool);
      return Backward(x, {mask}, [](const DTensor& t) { return dropout(t, 0.3); });
    });
  }
}

std::vector<KernelCase> Kernels() {
  std::vector<KernelCase> all;
  AddLineKernels(&all);
  AddPointwiseKernels(&all);
  // More elements than the launch has threads, so that a thread draws several.
  for (const DType t : {DType::kF32, DType::kBF16}) {
    const Form f = {1280, 256, t};
    all.push_back({"rand", f.text(),
                   [=] { return Forward({}, [=] { return rand({1280, 256}, {.dtype = t}); }); }});
  }
  all.push_back({"randn", Form{1280, 256}.text(),
                 [] { return Forward({}, [] { return randn({1280, 256}); }); }});
  const std::vector<int64_t> steps(5, 2);
  for (const DType t : {DType::kF32, DType::kBF16, DType::kF64}) {
    const std::string form = "list/" + std::string(Name(t));
    all.push_back({"sgd_", form, [=] {
                     return Updates(
                         0, t, [=](const auto& l) { sgd_(l[0], {}, l[1], steps, {.lr = 0.1}); });
                   }});
    all.push_back({"adamw_", form, [=] {
                     return Updates(2, t, [=](const auto& l) {
                       adamw_(l[0], l[1], l[2], {}, l[3], steps, {.lr = 0.1});
                     });
                   }});
    all.push_back({"total_norm", form, [=] {
                     KernelRun run = Updates(0, t, [](const auto& l) { get_total_norm(l[1]); });
                     run.needed /= 3;
                     return run;
                   }});
  }
  return all;
}

TEST(CudaCounts, KernelsMoveWhatTheyMust) {
  auto limits = KernelLimits();
  OnCuda([&] {
    for (const auto& [name, form, make] : Kernels()) {
      auto limit = limits.find(name + " " + form);
      if (limit == limits.end()) limit = limits.find(name);
      ASSERT_TRUE(limit != limits.end()) << name << " is not in the table";
      limit->second.used = true;
      const KernelRun kernel = make();
      const Counts counts = testing::CudaCountsOf(kernel.run);
      const double bytes = static_cast<double>(counts.at("bytes"));
      const double sectors = 32 * static_cast<double>(counts.at("sectors"));
      // Lanes that ask for the same number together move it once.
      const double share = std::min(bytes, sectors) / static_cast<double>(kernel.needed);
      const double ideal = bytes / sectors;
      std::printf("kernel %s %s %.3f %.3f\n", name.c_str(), form.c_str(), share, ideal);
      EXPECT_LE(share, limit->second.bytes) << name << " " << form << ": bytes for each needed one";
      EXPECT_GE(share, 0.4) << name << " " << form << " was not counted whole";
      EXPECT_GE(ideal, limit->second.sectors)
          << name << " " << form << ": bytes asked for by bytes of sectors touched";
    }
    for (const auto& [name, limit] : limits) {
      EXPECT_TRUE(limit.used) << "the table has a line that is of no case: " << name;
    }
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

// By kernels of ours it always is; by the library where that has it, else it is a kernel more.
TEST(CudaCounts, AnActivationIsPartOfTheProduct) {
  const char* const blas = std::getenv("DTENSOR_CUDA_BLAS");
  const bool own = blas != nullptr && std::string(blas) == "own";
  OnCuda([own] {
    const auto launches = [](int64_t n, Activation activation, bool kept) {
      const DTensor x = rand({16, 24}), b = rand({n});
      DTensor w = rand({n, 24});
      if (kept) w.RequiresGrad();
      const Counts counts = testing::CudaCountsOf([&] { linear_activation(x, w, b, activation); });
      const auto at = counts.find("cudaLaunchKernel");
      return at == counts.end() ? 0 : at->second;
    };
    for (const bool kept : {false, true}) {
      EXPECT_EQ(launches(32, Activation::kRelu, kept), own ? 1 : 0) << kept;
      EXPECT_EQ(launches(32, Activation::kGeluTanh, kept), own ? 1 : 0) << kept;
      EXPECT_EQ(launches(32, Activation::kGelu, kept), 1) << kept;
      EXPECT_EQ(launches(32, Activation::kSilu, kept), 1) << kept;
    }
    // The library keeps rows of 8 elements and multiples.
    EXPECT_EQ(launches(30, Activation::kGeluTanh, true), 1);
    EXPECT_EQ(launches(30, Activation::kGeluTanh, false), own ? 1 : 0);
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
