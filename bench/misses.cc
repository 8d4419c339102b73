// What planning a call of every shipped op takes on a mesh of 2 x 2 x 2, where no plan is kept.
// bench/count_instructions counts the instructions of each call of PlanOnce, so nothing is inlined
// into it.
//
//   bench_misses [--op=matmul]      prints one line per call of PlanOnce: op and layout
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/sharding.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/simulate.h"

namespace dtensor {

// Not in the unnamed namespace: the counter knows it by this name.
[[gnu::noinline]] bool PlanOnce(const OpCall& call) { return PlanOp(call, nullptr).ok(); }

namespace {

// Layouts in which the inputs come, for the three mesh dims: whole; batch, columns and what is
// between them; pending and sharded twice.
enum class Layout { kWhole, kSpread, kPending };
constexpr std::pair<Layout, const char*> kLayouts[] = {
    {Layout::kWhole, "whole"}, {Layout::kSpread, "spread"}, {Layout::kPending, "pending"}};

Placements Placed(const VerifyInput& in, Layout layout) {
  Placements p(3);
  const int dims = static_cast<int>(in.shape.size());
  if (layout == Layout::kWhole || dims == 0) return p;
  if (layout == Layout::kSpread) return {Shard(0), Shard(dims - 1), Shard(dims / 2)};
  p[0] = IsFloating(in.dtype) ? Partial() : Shard(0);
  p[1] = Shard(0);
  p[2] = Shard(dims - 1);
  return p;
}

absl::Status Run(const std::string& only) {
  const DeviceMesh mesh({2, 2, 2});
  for (const VerifyCase& c : VerifyCases()) {
    if (!only.empty() && c.op != only) continue;
    const VerifySample& sample = c.samples[0];
    for (const auto& [layout, name] : kLayouts) {
      std::vector<Placements> placed;
      for (const VerifyInput& in : sample.inputs) placed.push_back(Placed(in, layout));
      DT_ASSIGN_OR_RETURN(const std::vector<SpecRef> specs,
                          internal::SpecsOf(mesh, sample, placed));
      std::vector<const Spec*> pointers;
      for (const SpecRef& s : specs) pointers.push_back(s.get());
      const Attrs attrs = internal::AttrsOf(sample);
      const bool planned = PlanOnce(OpCall(GetOp(c.op), pointers, attrs));
      std::printf("%s %s%s\n", c.op.c_str(), name, planned ? "" : " refused");
    }
  }
  return absl::OkStatus();
}

absl::Status Main(int argc, char** argv) {
  const std::string argument = argc > 1 ? argv[1] : "";
  if (argc > 2 || (argc == 2 && argument.rfind("--op=", 0) != 0)) {
    return absl::InvalidArgumentError("usage: bench_misses [--op=matmul]");
  }
  return RunFake({.world = 8},
                 [&](RankContext&) { return Run(argc == 2 ? argument.substr(5) : ""); });
}

}  // namespace
}  // namespace dtensor

int main(int argc, char** argv) {
  const absl::Status status = dtensor::Main(argc, argv);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}
