// GEMM through dispatch against oneDNN called directly, and two ranks against one, each beside what
// two threads gain over one in a plain FMA loop of the same run.
//
//   bench_gemm [--n=1024] [--samples=21]
//
// Everything runs in one process on two pinned threads, in turns. A sample during which the kernel
// took a core away (involuntary context switches) is thrown away and taken again; medians of what
// is left are compared. Prints per line: what, ratio, goal, PASS or miss; exit code 1 if one is
// missed.
#include <dnnl.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "dtensor/distribute.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Seconds(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Independent chains of multiply-add: the core's arithmetic and nothing else. The result is
// returned so that it is computed.
float FmaLoop(int64_t n) {
  constexpr int kChains = 64;
  float x[kChains];
  for (int i = 0; i < kChains; ++i) x[i] = static_cast<float>(i);
  for (int64_t k = 0; k < n; ++k) {
    for (int i = 0; i < kChains; ++i) x[i] = x[i] * 0.999f + 0.001f;
  }
  float sum = 0;
  for (float v : x) sum += v;
  return sum;
}

class Bench {
 public:
  Bench(RankContext& context, int64_t n, int samples)
      : context_(context), world_(*ValueOrThrow(context.WorldComm())), n_(n), wanted_(samples) {
    const DeviceMesh mesh({2}, {"tp"});
    const TensorOptions whole{DType::kF32, mesh, {Replicate()}};
    x_ = randn({n, n}, whole);
    x_cols_ = x_.Redistribute({Shard(1)});
    w_rows_ = randn({n, n}, {DType::kF32, mesh, {Shard(0)}});
    w_cols_ = randn({n, n}, {DType::kF32, mesh, {Shard(1)}});
    one_x_ = randn({n, n}, {});
    one_w_ = randn({n, n}, {});
    out_ = ValueOrThrow(Tensor::Empty({n, n}, DType::kF32));
  }

  // Samples until every list is long enough; false if the machine is too busy for that.
  bool Run() {
    Round();
    for (Samples* list : Lists()) list->clear();  // that was to warm up
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (true) {
      Round();
      const auto lists = Lists();
      const bool enough = std::all_of(lists.begin(), lists.end(), [&](const Samples* s) {
        return static_cast<int>(s->size()) >= wanted_;
      });
      if (enough) return true;
      if (context_.rank() == 0 && std::chrono::steady_clock::now() > give_up) busy_.store(true);
      Meet();
      if (busy_.load()) return false;
    }
  }
  bool Print() const {
    const double one = Median(dispatched_), gain = 2 * Median(fma_one_) / Median(fma_two_);
    bool fine = Line("matmul through dispatch, of oneDNN direct", Median(direct_) / one, 0.95);
    std::printf("%-50s %6.3f\n", "gain of two threads in a plain FMA loop", gain);
    fine &= Line("tp=2 speedup (columns of w), of that gain", one / Median(columns_) / gain, 0.85);
    fine &= Line("tp=2 speedup (rows of w, all-reduce), of that gain", one / Median(rows_) / gain,
                 0.85);
    return fine;
  }

 private:
  using Samples = std::vector<double>;
  std::vector<Samples*> Lists() {
    return {&direct_, &dispatched_, &fma_one_, &fma_two_, &columns_, &rows_};
  }
  static int64_t Preemptions() {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_nivcsw;
  }

  // Seconds until the ranks in `all` (else rank 0 alone, the other asleep) have done `body`. Both
  // ranks keep a sample or both drop it.
  void Sample(bool all, Samples* samples, const std::function<void()>& body) {
    if (context_.rank() == 0) disturbed_.store(false);
    if (all || context_.rank() == 0) body();  // its operands come to the caches
    Meet();
    const int64_t before = Preemptions();
    const double seconds = Seconds([&] {
      if (all || context_.rank() == 0) body();
      Meet();
    });
    if (Preemptions() != before) disturbed_.store(true);
    Meet();
    if (!disturbed_.load()) samples->push_back(seconds);
    Meet();
  }
  void Meet() { ThrowIfError(world_.Barrier().Wait()); }

  void Direct() const {
    dnnl_sgemm('N', 'N', n_, n_, n_, 1.0f, one_x_.local().data_as<float>(), n_,
               one_w_.local().data_as<float>(), n_, 0.0f, out_.data_as<float>(), n_);
  }

  void Round() {
    const auto fma = [&] { sink_ = sink_ + FmaLoop(n_ * n_ / 2); };
    Sample(false, &direct_, [&] { Direct(); });
    Sample(false, &dispatched_, [&] { const DTensor y = matmul(one_x_, one_w_); });
    Sample(false, &fma_one_, fma);
    Sample(true, &fma_two_, fma);
    Sample(true, &columns_, [&] { const DTensor y = matmul(x_, w_cols_); });
    Sample(true, &rows_,
           [&] { const DTensor y = matmul(x_cols_, w_rows_).Redistribute({Replicate()}); });
  }

  static bool Line(const char* what, double ratio, double goal) {
    std::printf("%-50s %6.3f  goal %.2f  %s\n", what, ratio, goal, ratio >= goal ? "PASS" : "miss");
    return ratio >= goal;
  }

  RankContext& context_;
  Comm& world_;
  const int64_t n_;
  const int wanted_;
  DTensor x_, x_cols_, w_rows_, w_cols_, one_x_, one_w_;
  Tensor out_;
  volatile float sink_ = 0;
  Samples direct_, dispatched_, fma_one_, fma_two_, columns_, rows_;
  inline static std::atomic<bool> disturbed_{false}, busy_{false};  // shared by the ranks
};

int Main(int argc, char** argv) {
  int64_t n = 1024, samples = 21;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg.rfind("--n=", 0) == 0) {
      n = std::atoll(arg.c_str() + 4);
    } else if (arg.rfind("--samples=", 0) == 0) {
      samples = std::atoll(arg.c_str() + 10);
    } else {
      n = 0;
    }
  }
  if (n < 2 || samples < 1) {
    std::fprintf(stderr, "usage: bench_gemm [--n=1024] [--samples=21]\n");
    return 2;
  }
  bool fine = true;
  const absl::Status status = RunSpmd(2, [&](RankContext& context) -> absl::Status {
    Bench bench(context, n, static_cast<int>(samples));
    if (!bench.Run()) return absl::UnavailableError("the machine is too busy to measure");
    if (context.rank() == 0) fine = bench.Print();
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() && fine ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
