// Kernels on one thread: attention forward and backward, products of float32 and bfloat16, among
// them those of one row that generation is made of.
//
//   bench_kernels [--what=units]
//
// Prints lines "<name> 1 <us>": the least CPU time of many calls through dispatch; "direct_..." is
// oneDNN's matmul called by itself. --what=units only says which units the CPU has.
#include <cstdio>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/best_time.h"
#include "bench/direct_product.h"
#include "dtensor/autograd.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/cpu/bf16_gemm.h"
#include "dtensor/tensor/cpu/gemm.h"
#include "dtensor/tensor/cpu/level.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

void Line(const std::string& name, double us) { std::printf("%s 1 %.3f\n", name.c_str(), us); }

void Attention() {
  const Shape shape = {1, 8, 2048, 64};
  DTensor q = randn(shape), k = randn(shape), v = randn(shape);
  const DTensor dout = randn(shape);
  const DTensor mask = reshape(lt(arange(0, 2048), 1500), {1, 1, 1, 2048});
  const auto forward = [&] { return scaled_dot_product_attention(q, k, v, {}, true); };
  const double plain = BestUs({[&] { forward(); }})[0];
  for (DTensor* x : {&q, &k, &v}) x->RequiresGrad();
  const auto step = [&](const DTensor& m, bool causal) {
    for (DTensor* x : {&q, &k, &v}) x->ZeroGrad();
    scaled_dot_product_attention(q, k, v, m, causal).Backward(dout);
  };
  Line("attention", BestUs({[&] { step({}, true); }}, 3)[0]);
  Line("attention_forward", plain);
  Line("attention_mask", BestUs({[&] { step(mask, false); }}, 3)[0]);
}

void Products() {
  const int64_t sizes[][3] = {{512, 1024, 1024}, {64, 576, 1536}, {1, 576, 1536}, {1, 576, 49152}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto& [m, k, n] : sizes) {
      const DTensor x = to(randn({m, k}), dtype), w = to(randn({n, k}), dtype);
      const std::string name = std::string(dtype == DType::kF32 ? "f32_" : "bf16_") +
                               std::to_string(m) + "x" + std::to_string(k) + "x" +
                               std::to_string(n);
      std::vector<std::function<void()>> bodies = {[&] { linear(x, w); }};
      const bool both = dtype == DType::kBF16 && m > 1 && HasBf16Units();
      const Tensor y = ValueOrThrow(Tensor::Empty({m, n}, dtype));
      std::optional<DirectProduct> direct;
      if (both) {
        direct.emplace(
            GemmCall{m, n, k, x.local().data(), k, 1, w.local().data(), 1, k, y.data(), n, dtype});
        bodies.emplace_back([&] { (*direct)(); });
      }
      const std::vector<double> us = BestUs(bodies);
      Line(name, us[0]);
      if (both) Line("direct_" + name, us[1]);
    }
  }
}

int Main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  if (what == "--what=units") {
    SetUpMathLibraries();
    std::printf("%s, level %s; bf16 units: %s; oneDNN's instruction set %d\n", GemmBackend(),
                Name(ActiveCpuLevel()), HasBf16Units() ? "yes" : "none",
                static_cast<int>(dnnl::get_effective_cpu_isa()));
    return 0;
  }
  if (!what.empty()) {
    std::fprintf(stderr, "bench_kernels [--what=units]\n");
    return 2;
  }
  const absl::Status status = RunSpmd(1, [](RankContext&) {
    Attention();
    Products();
    return absl::OkStatus();
  });
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) { return dtensor::Main(argc, argv); }
