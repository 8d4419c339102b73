// What a backward communicates, and what it leaves to be communicated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "dtensor/mesh/expect_comm.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/rng/generator.h"
#include "tests/parallel/small_models.h"
#include "tests/parallel/support.h"

namespace dtensor::gradients_test {
namespace {

using testing::DpTp;

constexpr CollectiveKind kAllReduce = CollectiveKind::kAllReduce;
constexpr GPTConfig kGpt = {.vocab = 16, .seq = 8, .layers = 3, .hidden = 8, .heads = 2};

DTensor Ids(const DeviceMesh& mesh) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < 128; ++i) ids.push_back(i * 5 % kGpt.vocab);
  return FromVector(ids, {16, 8},
                    {.dtype = DType::kI64, .mesh = mesh, .placements = {Shard(0), Replicate()}});
}

DTensor GptLoss(Module& model, const DeviceMesh& mesh) {
  const DTensor ids = Ids(mesh);
  return cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1));
}

// What this rank receives to have every parameter's gradient summed over two ranks.
int64_t GradientBytes(const Module& model) {
  int64_t bytes = 0;
  for (const NamedParameter& p : model.NamedParameters()) {
    bytes += p.parameter->tensor().spec().local_bytes();
  }
  return bytes;
}

int64_t CountOver(const CommTrace& trace, const std::string& mesh_dims) {
  int64_t count = 0;
  for (const CommEvent& e : trace.events()) {
    count += e.mesh_dims == mesh_dims && e.phase == CommPhase::kBackward;
  }
  return count;
}

TEST(GradientTraffic, GptOnTwoByTwoReducesOverDpInThreeOrLess) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = DpTp(2, 2);
    GPT model(kGpt);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(kGpt)));
    Materialize(model);
    const DTensor loss = GptLoss(model, mesh);
    CommTrace trace;
    loss.Backward();
    EXPECT_LE(CountOver(trace, "dp"), 3) << trace.ToString(CommBy::kOp);
    int64_t bytes = 0;
    for (const CommEvent& e : trace.events()) bytes += e.mesh_dims == "dp" ? e.bytes : 0;
    EXPECT_EQ(bytes, GradientBytes(model));  // to the byte what one by one would take
    EXPECT_EQ(CountOver(trace, "tp"), 2 * kGpt.layers + 1) << trace.ToString(CommBy::kOp);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(GradientTraffic, SelectsOfOneParameterAreReducedTogether) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = DpTp(2, 2);
    testing::FusedAttention model(8, 2);
    DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, {{"out", RowwiseParallel({.unit = 4})}}));
    model.Spread(mesh);
    Materialize(model);
    const DTensor x = randn({4, 3, 8}, {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    const DTensor loss = sum(model(x));
    CommTrace trace;
    loss.Backward();
    EXPECT_COMM(trace,
                {.kind = kAllReduce, .mesh_dims = "dp", .count = 1, .bytes = GradientBytes(model)});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Only rows 2 to 5 and 4 to 7 of ten are used: what is reduced is the six that these make up.
TEST(GradientTraffic, BoxesAreNotPaddedBeyondTheirUnion) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor w = ones({10, 3}, {.dtype = DType::kF64, .mesh = mesh}).RequiresGrad();
    const DTensor x = FromVector(testing::Integers(8, 1), {8, 1},
                                 {.dtype = DType::kF64, .mesh = mesh, .placements = {Shard(0)}});
    const DTensor a = slice(w, 0, 2, 5), b = slice(w, 0, 4, 8);
    const DTensor y =
        matmul(x, reshape(select(a, 0, 0), {1, 3})) + matmul(x, slice(a, 0, 2, 3)) +
        matmul(x, slice(a, 0, 1, 2)) + matmul(x, slice(b, 0, 0, 1)) +
        matmul(matmul(x, ones({1, 2}, {.dtype = DType::kF64, .mesh = mesh})), slice(b, 0, 1, 4, 2));
    CommTrace trace;
    sum(y).Backward();
    double total = 0;
    for (const double v : testing::Integers(8, 1)) total += v;
    std::vector<double> want;
    for (const int64_t uses : {0, 0, 1, 1, 2, 1, 0, 1, 0, 0}) {
      for (int c = 0; c < 3; ++c) want.push_back(static_cast<double>(uses) * total);
    }
    EXPECT_EQ(w.grad().ToVector<double>(), want);
    // Rows 2 to 4, and with a step 5 and 7.
    EXPECT_COMM(trace, {.kind = kAllReduce, .count = 1, .bytes = 5 * 3 * 8});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A value that all ranks have, expanded, beside one that is cut over the batch: what comes back is
// summed where it is. Gathered it would be as large as the activation.
TEST(GradientTraffic, OfWhatIsExpandedBesideAShardedBatchIsSummed) {
  using Model = std::function<DTensor(const DTensor& c, const DTensor& x)>;
  const Model masked = [](const DTensor& c, const DTensor& x) {
    return where(gt(x, 0), expand(c, x.shape()), x);
  };
  const Model token = [](const DTensor& c, const DTensor& x) {
    return cat({expand(c, {x.size(0), 1, x.size(2)}), x}, 1);
  };
  const Model queries = [](const DTensor& c, const DTensor& x) {
    return repeat(c, {x.size(0), x.size(1), 1}) + x;
  };
  const Model twice = [](const DTensor& c, const DTensor& x) {
    const DTensor e = expand(c * 2.0, x.shape());
    return where(gt(x, 0), e, x) * (e + x);
  };
  // One reader shards the batch, another gives a pending sum.
  const Model mixed = [](const DTensor& c, const DTensor& x) {
    const DTensor e = expand(c, {x.size(0), 1, x.size(2)});
    const Placements columns = x.mesh().is_self() ? Placements{} : Placements{Shard(1)};
    const DTensor w = FromVector(testing::Integers(4 * 6, 8), {4, 6},
                                 {.dtype = DType::kF64, .mesh = x.mesh(), .placements = columns});
    return cat({e, x}, 1) * sum(square(matmul(e, w)));
  };
  const auto gradients = [](const Model& model, const DeviceMesh& mesh, CommTrace* trace) {
    const TensorOptions whole = {.dtype = DType::kF64, .mesh = mesh};
    const Placements cut = mesh.is_self() ? Placements{} : Placements{Shard(0)};
    DTensor c = FromVector(testing::Integers(4, 1), {1, 1, 4}, whole).RequiresGrad();
    DTensor x = FromVector(testing::Integers(6 * 2 * 4, 2), {6, 2, 4},
                           {.dtype = DType::kF64, .mesh = mesh, .placements = cut})
                    .RequiresGrad();
    const DTensor loss = sum(square(model(c, x)));
    trace->Clear();
    loss.Backward();
    std::vector<double> all = c.grad().ToVector<double>();
    for (const double v : x.grad().ToVector<double>()) all.push_back(v);
    return all;
  };
  const std::vector<Model> models = {masked, token, queries, twice, mixed};
  for (size_t i = 0; i < models.size(); ++i) {
    CommTrace alone;
    const std::vector<double> one = gradients(models[i], DeviceMesh::Self(), &alone);
    for (const int64_t ranks : {2, 3}) {
      const absl::Status status = RunSpmd(ranks, [&](RankContext&) -> absl::Status {
        CommTrace trace;
        EXPECT_EQ(gradients(models[i], DeviceMesh({ranks}, {"dp"}), &trace), one) << i;
        int64_t bytes = 0;
        for (const CommEvent& e : trace.events()) {
          if (e.phase == CommPhase::kBackward) bytes += e.bytes;
        }
        // Of the four numbers of c, all that is to be brought together.
        if (i + 1 < models.size()) {
          EXPECT_NEAR(bytes, 2 * (ranks - 1) * 4 * 8 / ranks, 1) << i << "\n" << trace.ToString();
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(GradientTraffic, ReplicatedKeyAndValueHeadsCostNoAllReducePerLayer) {
  for (const bool recompute : {false, true}) {
    const absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh({2}, {"tp"});
      testing::LlamaConfig config;
      config.layers = 3;
      config.recompute = recompute;
      testing::Llama model(config);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, testing::Llama::ThePlan(config)));
      Materialize(model);
      DTensor x = randn({2, 4, 16}, {.mesh = mesh}).RequiresGrad();
      const StrictRedistribute strict;
      CommTrace trace;
      const DTensor y = model(x);
      EXPECT_EQ(trace.Count(kAllReduce), 2 * config.layers) << trace.ToString(CommBy::kOp);
      EXPECT_EQ(trace.TotalCount(), 2 * config.layers) << trace.ToString(CommBy::kOp);
      trace.Clear();
      y.Backward(ones(y.shape(), {.mesh = mesh}));
      // Per layer where both halves begin, again the one inside of a layer that is recomputed, and
      // one for the weights of all k and v.
      const int64_t again = recompute ? config.layers : 0;
      EXPECT_EQ(CountOver(trace, "tp"), 2 * config.layers + again + 1)
          << trace.ToString(CommBy::kOp);
      EXPECT_EQ(trace.Count(kAllReduce), trace.TotalCount());
      EXPECT_EQ(trace.events().back().bytes, config.layers * 2 * 4 * 16 * 4);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

testing::NamedValues LlamaGradients(const DeviceMesh& mesh, const testing::LlamaConfig& config) {
  ManualSeed(3);
  testing::Llama model(config);
  SetDType(model, DType::kF64);
  if (!mesh.is_self()) {
    ThrowIfError(ParallelizeModule(model, mesh, testing::Llama::ThePlan(config)));
  }
  Materialize(model);
  DTensor x = FromVector(testing::Integers(6 * 4 * 16, 2), {6, 4, 16}, {.dtype = DType::kF64});
  if (!mesh.is_self()) x = DistributeTensor(x, mesh, {Shard(0), Replicate()});
  sum(model(x * 0.1)).Backward();
  return testing::Gather(model, /*gradients=*/true);
}

TEST(Gradients, OfALlamaWithReplicatedHeadsAreThoseOfOneRank) {
  for (const bool recompute : {false, true}) {
    testing::LlamaConfig config;
    config.recompute = recompute;
    const testing::NamedValues want = LlamaGradients(DeviceMesh::Self(), config);
    for (const auto& [dp, tp] : testing::DpTpMeshes()) {
      const absl::Status status = RunSpmd(dp * tp, [&, dp = dp, tp = tp](RankContext&) {
        const testing::NamedValues got = LlamaGradients(DpTp(dp, tp), config);
        for (size_t i = 0; i < want.size(); ++i) {
          for (size_t k = 0; k < want[i].second.size(); ++k) {
            EXPECT_NEAR(got[i].second[k], want[i].second[k], 1e-12)
                << want[i].first << " on " << dp << " x " << tp;
          }
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

// --- NoGradSync ----------------------------------------------------------------------------------

// Parameters of the GPT, sharded over dp besides, where `sharded`.
absl::Status Spread(Module& model, const DeviceMesh& mesh, bool sharded) {
  DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(kGpt)));
  if (!sharded) return absl::OkStatus();
  for (Parameter* p : model.Parameters()) {
    Placements placements = p->placements();
    placements[0] = Shard(0);
    p->Place(mesh, placements);
  }
  return absl::OkStatus();
}

TEST(NoGradSync, MovesNothingOverItsMeshDimsAndKeepsTheRest) {
  for (const bool sharded : {false, true}) {
    const absl::Status status = RunSpmd(4, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = DpTp(2, 2);
      GPT model(kGpt), twin(kGpt);
      for (GPT* m : {&model, &twin}) {
        ManualSeed(1);
        DT_RETURN_IF_ERROR(Spread(*m, mesh, sharded));
        SetDType(*m, DType::kF64);
        Materialize(*m);
      }
      for (const std::vector<std::string>& dims :
           {std::vector<std::string>{}, std::vector<std::string>{"dp"}}) {
        model.ZeroGrad();
        twin.ZeroGrad();
        for (int micro = 0; micro < 2; ++micro) {
          GptLoss(twin, mesh).Backward();
          const DTensor loss = GptLoss(model, mesh);
          const NoGradSync hold(dims);
          CommTrace trace;
          loss.Backward();
          EXPECT_EQ(CountOver(trace, "dp"), 0) << trace.ToString(CommBy::kOp);
          EXPECT_EQ(CountOver(trace, "dp,tp"), 0) << trace.ToString(CommBy::kOp);
          if (!sharded) {
            EXPECT_EQ(CountOver(trace, "tp"), 2 * kGpt.layers + 1) << trace.ToString(CommBy::kOp);
          }
        }
        std::vector<DTensor> leaves;
        for (Parameter* p : model.Parameters()) leaves.push_back(p->tensor());
        CommTrace trace;
        SyncGradients(leaves);
        if (!sharded) {
          EXPECT_LE(trace.TotalCount(), 3) << trace.ToString(CommBy::kOp);
        }
        const testing::NamedValues got = testing::Gather(model, true);
        const testing::NamedValues want = testing::Gather(twin, true);
        for (size_t i = 0; i < want.size(); ++i) {
          for (size_t k = 0; k < want[i].second.size(); ++k) {
            EXPECT_NEAR(got[i].second[k], want[i].second[k], 1e-13) << want[i].first;
          }
        }
      }
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(NoGradSync, OfOneDimLeavesTheLeafReductionsOfOthers) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = DpTp(2, 2);
    DTensor w = ones({4, 4}, {.mesh = mesh}).RequiresGrad();
    const DTensor a = ones({4, 4}, {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    const DTensor b = ones({4, 4}, {.mesh = mesh, .placements = {Shard(0), Shard(0)}});
    CommTrace trace;
    for (int i = 0; i < 2; ++i) {
      const NoGradSync hold({"dp"});
      sum(matmul(a, w.Redistribute({Replicate(), Shard(1)}))).Backward();  // [P, S(1)]
      sum(matmul(b, w)).Backward();                                        // [P, P]
    }
    EXPECT_EQ(CountOver(trace, "dp"), 0) << trace.ToString(CommBy::kOp);
    EXPECT_EQ(CountOver(trace, "dp,tp"), 0) << trace.ToString(CommBy::kOp);
    EXPECT_EQ(CountOver(trace, "tp"), 4) << trace.ToString(CommBy::kOp);
    EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(16, 16));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(NoGradSync, WhatWaitsDoesNotFitTheLengthsOfOtherDims) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh = DpTp(2, 2);
    const TensorOptions cut = {.mesh = mesh, .placements = {Shard(0), FlatShard({3, 1})}};
    DTensor w = ones({4, 2}, cut).RequiresGrad();
    const DTensor x = ones({4, 4}, {.mesh = mesh, .placements = {Shard(0), Replicate()}});
    const DTensor y = sum(matmul(x, w.Redistribute({Replicate(), Replicate()})));
    {
      const NoGradSync hold({"dp"});
      CommTrace trace;
      y.Backward();
      EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString(CommBy::kOp);
    }
    EXPECT_EQ(w.grad().spec_ref(), w.spec_ref());
    EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(8, 4));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- buckets -------------------------------------------------------------------------------------

TEST(GradientBuckets, HoldSoManyBytesAndKeepTheOrderOfBackward) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    std::vector<DTensor> w;
    DTensor h = ones({4, 8}, {.dtype = DType::kF64, .mesh = mesh, .placements = {Shard(0)}});
    for (int i = 0; i < 6; ++i) {
      w.push_back(ones({8}, {.dtype = DType::kF64, .mesh = mesh}).RequiresGrad());
      h = h * w.back();
    }
    const DTensor loss = sum(h);
    const GradientBuckets buckets(128);  // two of 64 bytes
    CommTrace trace;
    loss.Backward();
    EXPECT_COMM(trace, {.kind = kAllReduce, .mesh_dims = "dp", .count = 3, .bytes = 6 * 64});
    for (const CommEvent& e : trace.events()) EXPECT_EQ(e.payload_bytes, 128);
    for (const DTensor& p : w) EXPECT_EQ(p.grad().ToVector<double>(), std::vector<double>(8, 4));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(GradientBuckets, AreLargeByDefaultAndOfOneDtype) {
  const absl::Status status = RunFake({.world = 2}, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    const auto trace_of = [&](int64_t size, int count) {
      std::vector<DTensor> w;
      DTensor loss;
      for (int i = 0; i < count; ++i) {
        const DType dtype = i % 2 == 0 ? DType::kF32 : DType::kF64;
        w.push_back(ones({size}, {.dtype = dtype, .mesh = mesh}).RequiresGrad());
        const DTensor x = ones({2, size}, {.dtype = dtype, .mesh = mesh, .placements = {Shard(0)}});
        const DTensor part = sum(to(x * w.back(), DType::kF64));
        loss = loss.defined() ? loss + part : part;
      }
      CommTrace trace;
      loss.Backward();
      return trace.TotalCount();
    };
    EXPECT_EQ(trace_of(100, 40), 2);     // f32 and f64
    EXPECT_GT(trace_of(1 << 20, 4), 2);  // 4 and 8 MiB: not worth waiting for others
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::gradients_test
