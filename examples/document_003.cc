// What veScale's DTensor document shows, as a program: its product of a 12 x 8 by an 8 x 16 matrix;
// both ways in which it registers how layer_norm shards, a rule and strategies; its hooks around
// dispatch. `document_003 rule` and `document_003 strategies`: an op keeps what it was called with.
#include <dtensor/dtensor.h>

#include <cstdio>
#include <string>

using namespace dtensor;  // NOLINT: as a user writes it

namespace {

// x stays where it is, whole in the dim that is normalised; y is where x is.
absl::StatusOr<ShardingDecision> LayerNormRule(const OpCall& call) {
  Placements x(call.in(0).placements().begin(), call.in(0).placements().end());
  for (Placement& p : x) {
    if (p.is_partial() || (p.is_shard() && p.dim() == call.in(0).ndim() - 1)) p = Replicate();
  }
  const Placements whole(x.size());
  return ShardingDecision{{x, whole, whole}, {x, x, x}};  // y, mean, rstd
}

// Every pair of placements that is right, for one mesh dim; the cheapest is searched for.
absl::StatusOr<std::vector<StrategyRow>> LayerNormStrategies(const OpCall& call) {
  const Placement r = Replicate();
  std::vector<StrategyRow> rows = {{{r, r, r}, {r, r, r}}};
  for (int d = 0; d + 1 < call.in(0).ndim(); ++d) {
    const Placement s = Shard(d);
    rows.push_back({{s, r, r}, {s, s, s}});
  }
  return rows;
}

absl::Status Program(RankContext& rank) {
  const DeviceMesh mesh({4}, {"tp"});
  const auto say = [&](const char* what, const DTensor& t) {
    const std::string placed = t.spec().ToString();
    if (rank.rank() == 0) std::printf("%s: %s\n", what, placed.c_str());
  };

  // The product: both operands sharded along the dim that is summed over.
  const DTensor t1 = ones({12, 8}), t2 = ones({8, 16}), t3 = matmul(t1, t2);
  const DTensor dt1 = DistributeTensor(t1, mesh, {Shard(1)});
  const DTensor dt2 = DistributeTensor(t2, mesh, {Shard(0)});
  const DTensor dt3 = matmul(dt1, dt2);
  say("product", dt3);
  const DTensor dt4 = dt3.Redistribute({Replicate()});
  say("reduced", dt4);
  if (dt4.ToVector<float>() != t3.ToVector<float>()) return absl::InternalError("not one device's");

  // layer_norm by the declaration of this program.
  const DTensor x = view(arange(0, 96) * 0.1, {12, 8});
  const DTensor w = ones({8}), b = ones({8});
  const auto placed = [&](const DTensor& t, const Placement& p) {
    return DistributeTensor(t, mesh, {p});
  };
  const DTensor y =
      layer_norm(placed(x, Shard(0)), {8}, placed(w, Replicate()), placed(b, Replicate()));
  say("layer_norm of rows", y);
  const DTensor gathered =
      layer_norm(placed(x, Shard(1)), {8}, placed(w, Replicate()), placed(b, Replicate()));
  say("layer_norm of columns", gathered);
  if (y.ToVector<float>() != gathered.ToVector<float>()) return absl::InternalError("they differ");

  // Before and after dispatch: _pre_patch_for_dispatch and _post_patch_for_dispatch.
  {
    const InterceptCalls around("relu", [](InterceptedCall& call) {
      call.inputs[0] = call.inputs[0] + 1;  // before
      const Values out = call.Proceed();
      return Values{out[0] * 2};  // after
    });
    const DTensor z = relu(placed(full({4}, -0.5), Shard(0)));
    if (z.ToVector<float>() != std::vector<float>(4, 1)) return absl::InternalError("not patched");
    say("relu, patched", z);
  }
  // In dispatch's place: _bypass_for_dispatch. Shape, dtype and placement of the result come from
  // the local tensor, so nothing is propagated (the document's tensor_meta bypass).
  {
    const InterceptCalls instead("neg", [](InterceptedCall& call) {
      const DTensor local = call.inputs[0].ToLocal();
      return Values{FromLocal(local * -1, call.inputs[0].mesh(), call.inputs[0].placements())};
    });
    const DTensor z = neg(placed(arange(0, 8), Shard(0)));
    if (z.ToVector<float>() != std::vector<float>{0, -1, -2, -3, -4, -5, -6, -7}) {
      return absl::InternalError("not bypassed");
    }
    say("neg, bypassed", z);
  }
  // Deferred resharding needs no mode: a pending sum passes additions, and is reduced once.
  CommTrace trace;
  const DTensor sum = matmul(dt1, dt2) + matmul(dt1, dt2) + dt4;
  say("sum of three", sum);
  sum.FullTensor();
  if (trace.events().size() != 1) return absl::InternalError("reduced more than once");
  return absl::OkStatus();
}

}  // namespace

int main(int argc, char** argv) {
  return RunProgram([&]() -> absl::Status {
    const std::string way = argc > 1 ? argv[1] : "rule";
    if (way != "rule" && way != "strategies") {
      return absl::InvalidArgumentError("usage: document_003 [rule|strategies]");
    }
    RegisterOps();  // so that there is a layer_norm to be registered anew
    if (way == "rule") {
      RegisterRule({"layer_norm"}, LayerNormRule);
    } else {
      RegisterStrategies({"layer_norm"}, LayerNormStrategies);
    }
    return RunSpmd(4, Program);
  });
}
