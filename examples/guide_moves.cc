// The programs of docs/guide/redistribution.md, gradients.md and ops.md, run. The guides quote this
// file; scripts/check_tree.py compares them.
#include <dtensor/dtensor.h>
#include <dtensor/verify/verify.h>

#include <cstdio>
#include <vector>

using namespace dtensor;  // NOLINT: as a user writes it

namespace {

std::vector<float> Numbers(const DTensor& t) { return t.ToVector<float>(); }

absl::Status Expect(bool holds, const char* what) {
  return holds ? absl::OkStatus() : absl::InternalError(what);
}

// --- redistribution.md

absl::Status Moves() {
  const DTensor x = view(arange(0, 24, 1, {.mesh = DeviceMesh({4}, {"tp"})}), {4, 6});
  DTensor rows = x.Redistribute({Shard(0)});
  DTensor flat = x.Redistribute({FlatShard({10, 0, 8, 6})});
  DTensor other = x.Redistribute(DeviceMesh({2, 2}, {"dp", "tp"}), {Shard(1), Replicate()});
  DTensor later = x.Redistribute({Replicate()}, {.async = true});  // waits when it is first read
  for (const DTensor& t : {rows, flat, other, later}) {
    DT_RETURN_IF_ERROR(Expect(Numbers(t) == Numbers(x), "a value changed on its way"));
  }
  return absl::OkStatus();
}

absl::Status BetweenMeshes(RankContext& context) {
  const Shape shape = {4, 6};
  std::vector<float> seen;
  const auto stage0 = [](const DTensor& t) { return matmul(t, ones({3, 6}, {.mesh = t.mesh()})); };
  const auto stage1 = [](const DTensor& t) { return t * 2; };
  const auto loss = [&seen](const DTensor& t) {
    seen = Numbers(t);
    return sum(t);
  };
  const DeviceMesh first = *DeviceMesh::FromRanks({2}, {0, 1}, {"tp"});
  const DTensor x = ones({4, 3}, {.mesh = first, .placements = {Shard(1)}}).RequiresGrad();

  const DeviceMesh second = *DeviceMesh::FromRanks({2}, {2, 3}, {"tp"});
  if (context.rank() < 2) {
    DTensor sent = stage0(x).Redistribute(second, {Shard(0)});  // absent here
    sent.Backward(DTensor::Absent(sent.spec()));                // what comes back goes on from here
  } else {
    DTensor h = DTensor::Absent(first, {Partial()}, shape, DType::kF32, /*requires_grad=*/true)
                    .Redistribute(second, {Shard(0)});
    loss(stage1(h)).Backward();
  }

  if (context.rank() >= 2) return Expect(seen == std::vector<float>(24, 6), "what stage 1 got");
  return Expect(Numbers(x.grad()) == std::vector<float>(12, 12), "the gradient of stage 0");
}

// --- gradients.md

absl::Status Microbatches() {
  const DeviceMesh mesh({2, 2}, {"dp", "tp"});
  MLP model(6, 8);
  DT_RETURN_IF_ERROR(
      ParallelizeModule(model, mesh, {{"up", ColwiseParallel()}, {"down", RowwiseParallel()}}));
  Materialize(model);
  AdamW optim(model.NamedParameters(), {.lr = 3e-4}, FlatState("dp"));
  constexpr int micro = 3;
  const TensorOptions rows = {.mesh = mesh, .placements = {Shard(0), Replicate()}};
  const std::vector<DTensor> batch(micro, ones({4, 6}, rows));
  CommTrace trace;
  const auto over_dp = [&trace] { return !CommMismatch(trace, {{.mesh_dims = "tp"}}).empty(); };
  bool early = false;
  const auto Loss = [&](Module& m, const DTensor& input) {
    early |= over_dp();
    return mean(m(input));
  };

  for (int i = 0; i + 1 < micro; ++i) {
    const NoGradSync hold({"dp"});     // default: over any mesh dim
    Loss(model, batch[i]).Backward();  // nothing moves over dp
  }
  Loss(model, batch[micro - 1]).Backward();  // now it does, for all of them

  optim.Step();
  DT_RETURN_IF_ERROR(Expect(!early, "gradients moved over dp under NoGradSync"));
  return Expect(over_dp(), "gradients did not move over dp");
}

// --- ops.md

void AddKernel(const KernelCall& call) {  // plain arrays, this rank's part
  const int64_t n = Numel(IntSpan(call.out[0].sizes, call.out[0].ndim));
  for (int64_t i = 0; i < n; ++i) {
    static_cast<double*>(call.out[0].data)[i] = static_cast<const double*>(call.in[0].data)[i] +
                                                static_cast<const double*>(call.in[1].data)[i];
  }
}

void Declare() {
  RegisterKernel("my_add", DeviceType::kCpu,
                 {AddKernel, DTypeBit(DType::kF64), KernelLayout::kContiguous});
  Op("my_add(x, y)")               // inputs; attributes after a ';'; -> outputs
      .Factors("n m, n m -> n m")  // one name per index of the loop nest
      .Linear("x + y")             // when a pending sum (Partial) may pass
      .Elementwise()               // the kernel takes runs of elements, whatever their dims
      .Vjp([](VjpCall& c) {
        c.set(0, c.grad());
        c.set(1, c.grad());
      });
  Op("add_row_number(x)")
      .Factors("n m -> n m")
      .NeedsOffset("n")
      .Strategies({{{Replicate()}, {Replicate()}}, {{Shard(0)}, {Shard(0)}}});
}

DTensor my_add(const DTensor& x, const DTensor& y) {
  static const OpDef& op = *OpRegistry::Find("my_add").value();
  return Call1(op, {&x, &y});
}

absl::Status Judged() {
  const std::vector<VerifySample> samples = {{{{{8, 6}}, {{8, 6}}}}, {{{{5, 3}}, {{5, 3}}}}};
  const VerifyReport report = *VerifyOp(**OpRegistry::Find("my_add"), samples);
  if (!report.wrong.empty() || !report.missing.empty()) {
    return absl::InternalError(report.ToString("my_add"));
  }
  const DTensor x = ones({2, 2}, {DType::kF64});
  return Expect(my_add(x, x).ToVector<double>() == std::vector<double>(4, 2), "my_add");
}

}  // namespace

int main() {
  return RunProgram([]() -> absl::Status {
    Declare();
    DT_RETURN_IF_ERROR(Judged());
    DT_RETURN_IF_ERROR(RunSpmd(4, [](RankContext& context) -> absl::Status {
      DT_RETURN_IF_ERROR(Moves());
      DT_RETURN_IF_ERROR(BetweenMeshes(context));
      return Microbatches();
    }));
    std::puts("OK");
    return absl::OkStatus();
  });
}
