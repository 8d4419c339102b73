// An op of one's own, swiglu(gate, up) = silu(gate) * up in one pass: kernel, gradient, how it
// shards, and the judge's word on that. docs/guide/ops.md is the manual.
#include <dtensor/dtensor.h>
#include <dtensor/verify/verify.h>

#include <cmath>
#include <cstdio>

using namespace dtensor;  // NOLINT: as a user writes it

void SwigluKernel(const KernelCall& call) {
  const auto* gate = static_cast<const double*>(call.in[0].data);
  const auto* up = static_cast<const double*>(call.in[1].data);
  auto* y = static_cast<double*>(call.out[0].data);
  const int64_t n = Numel(IntSpan(call.out[0].sizes, call.out[0].ndim));
  for (int64_t i = 0; i < n; ++i) y[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
}
void SwigluVjp(VjpCall& c) {
  const DTensor s = sigmoid(c.in(0)), silu = c.in(0) * s;
  c.set(0, c.grad() * c.in(1) * (s + silu * (1 - s)));
  c.set(1, c.grad() * silu);
}

int main() {
  return RunProgram([]() -> absl::Status {
    RegisterKernel("swiglu", DeviceType::kCpu,
                   {SwigluKernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
    const OpDef& op = Op("swiglu(gate, up)")
                          .Factors("n c, n c -> n c")
                          .Linear("up(gate)")  // a pending sum of `up` passes
                          .Elementwise()
                          .Vjp(SwigluVjp, "gate, up");
    const std::vector<VerifySample> samples = {{{{{4, 6}}, {{4, 6}}}}, {{{{5, 3}}, {{5, 3}}}}};
    DT_ASSIGN_OR_RETURN(const VerifyReport rows, VerifyOp(op, samples));
    DT_ASSIGN_OR_RETURN(const VerifyReport gradients, VerifyGradients(op, samples));
    std::printf("%lld strategies, %zu wrong, %zu missing; gradients: %lld runs, %zu wrong\n",
                static_cast<long long>(rows.combinations), rows.wrong.size(), rows.missing.size(),
                static_cast<long long>(gradients.combinations), gradients.wrong.size());

    return RunSpmd(4, [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh({2, 2}, {"dp", "tp"});
      const DTensor gate = randn({8, 6}, {DType::kF64, mesh, {Shard(0), Shard(1)}});
      const DTensor up = randn({8, 6}, {DType::kF64, mesh, {Shard(0), Replicate()}});
      const DTensor y = Call1(op, {&gate, &up});
      const double apart = amax(abs(y - silu(gate) * up)).Item();
      if (rank.rank() == 0) std::printf("%s\n", y.spec().ToString().c_str());
      return apart < 1e-15 ? absl::OkStatus() : absl::InternalError("not silu(gate) * up");
    });
  });
}
