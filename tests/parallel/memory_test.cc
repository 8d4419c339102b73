// What a step leaves in memory, what it holds at most, and the report of who holds it.
#include "dtensor/memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "dtensor/mesh/comm_trace.h"
#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/parallel/train/recompute.h"
#include "dtensor/tensor/status.h"
#include "tests/parallel/support.h"

namespace dtensor::memory_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::MessageOf;

int64_t InUse() { return RankContext::Current().device_allocator()->stats().in_use_bytes; }

// gelu(x W^T), W cut over dp and gathered where it is used. Where there is a tp dim, W's columns
// are cut over it, and stay so: every rank has a term of the product, and a part of its sum.
class WholeLayer : public Module {
 public:
  explicit WholeLayer(int64_t size)
      : weight_(AddParameter("weight", {size, size}, Init::Normal(0, 0.1))) {}
  std::string type_name() const override { return "WholeLayer"; }

 protected:
  Values Forward(const Values& in) override {
    const DTensor& w = weight_.tensor();
    if (w.mesh().ndim() == 1) {
      return {gelu(linear(in[0], w.Redistribute({Replicate()}, {.shared = true})))};
    }
    const DTensor y = linear(in[0], w.Redistribute({Replicate(), Shard(1)}, {.shared = true}));
    return {gelu(y.Redistribute({Shard(0), Shard(1)}))};
  }

 private:
  Parameter& weight_;
};

class Stack : public Module {
 public:
  Stack(int64_t layers, int64_t size, bool recompute) : recompute_(recompute) {
    for (int64_t i = 0; i < layers; ++i) AddChild<WholeLayer>(std::to_string(i), size);
  }
  std::string type_name() const override { return "Stack"; }

 protected:
  Values Forward(const Values& in) override {
    DTensor x = in[0];
    for (const auto& [name, layer] : children()) {
      Module& run = *layer;
      x = recompute_ ? Recompute([&run](const Values& v) { return run(v); }, {x})[0] : run(x);
    }
    return {x};
  }

 private:
  const bool recompute_;
};

constexpr int64_t kLayers = 8, kSize = 128;
constexpr int64_t kLayerBytes = kSize * kSize * 4;

// dp alone, and dp x tp.
const Dims kMeshes[] = {{2}, {2, 2}};
DeviceMesh MeshOf(const Dims& shape) {
  const bool one = shape.size() == 1;
  return ValueOrThrow(DeviceMesh::Create(
      shape, one ? std::vector<std::string>{"dp"} : std::vector<std::string>{"dp", "tp"}));
}
// Of weights and of activations: rows over dp, columns over tp.
Placements Cut(const DeviceMesh& mesh) {
  return mesh.ndim() == 1 ? Placements{Shard(0)} : Placements{Shard(0), Shard(1)};
}
absl::Status Distribute(Module& model, const DeviceMesh& mesh) {
  DT_RETURN_IF_ERROR(
      DistributeModule(model, mesh, [&](const NamedParameter&) { return Cut(mesh); }));
  Materialize(model);
  return absl::OkStatus();
}
int64_t CountOver(const CommTrace& trace, const std::string& dims, CollectiveKind kind) {
  return std::count_if(trace.events().begin(), trace.events().end(),
                       [&](const CommEvent& e) { return e.kind == kind && e.mesh_dims == dims; });
}

TEST(Memory, AStepLeavesNothingOfParametersThatWereUsedWhole) {
  for (const Dims& shape : kMeshes) {
    for (const bool recompute : {false, true}) {
      const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) -> absl::Status {
        const DeviceMesh mesh = MeshOf(shape);
        Stack model(kLayers, kSize, recompute);
        DT_RETURN_IF_ERROR(Distribute(model, mesh));
        SGD optimizer(model.NamedParameters(), {.lr = 0.1, .momentum = 0.9});
        const DTensor x = randn({4, kSize}, {.mesh = mesh, .placements = Cut(mesh)});
        const auto step = [&] {
          sum(model(x)).Backward();
          optimizer.Step();
          optimizer.ZeroGrad();
        };
        step();  // makes the momentum
        const int64_t before = InUse();
        step();
        EXPECT_EQ(InUse(), before);
        {
          NoGrad no_grad;
          model(x);
        }
        EXPECT_EQ(InUse(), before);
        CommTrace trace;
        sum(model(x)).Backward();
        const int64_t forwards = recompute ? 2 : 1;
        EXPECT_EQ(CountOver(trace, "dp", CollectiveKind::kAllGather), forwards * kLayers);
        EXPECT_EQ(CountOver(trace, "dp", CollectiveKind::kReduceScatter), kLayers);
        // Over tp sums forward, and their gradients back.
        const int64_t tp = mesh.ndim() == 1 ? 0 : kLayers;
        EXPECT_EQ(CountOver(trace, "tp", CollectiveKind::kReduceScatter), forwards * tp);
        EXPECT_EQ(CountOver(trace, "tp", CollectiveKind::kAllGather), tp);
        EXPECT_EQ(trace.TotalCount(), (forwards + 1) * (kLayers + tp)) << trace.ToString();
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << ToString(shape) << ": " << status;
    }
  }
}

TEST(Memory, ATapeThatHoldsAGatheredParameterSharesItUntilTheBackward) {
  for (const Dims& shape : kMeshes) {
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh = MeshOf(shape);
      WholeLayer model(kSize);
      DT_RETURN_IF_ERROR(Distribute(model, mesh));
      // Its gradient reads the whole weight.
      const DTensor x = randn({4, kSize}, {.mesh = mesh, .placements = Cut(mesh)}).RequiresGrad();
      CommTrace trace;
      const auto gathered = [&] { return CountOver(trace, "dp", CollectiveKind::kAllGather); };
      DTensor kept;  // a handle on one rank only decides nothing
      if (rank.rank() == 0) {
        kept = model.FindParameter("weight")->tensor();
      }
      const DTensor a = sum(model(x)), b = sum(model(x));
      EXPECT_EQ(gathered(), 1);
      a.Backward();
      const DTensor c = sum(model(x));  // b still waits for its backward
      EXPECT_EQ(gathered(), 1);
      b.Backward();
      c.Backward();
      sum(model(x));
      EXPECT_EQ(gathered(), 2);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(shape) << ": " << status;
  }
}

TEST(Memory, PeakOfRecomputedLayersIsTheShardsAndOneLayer) {
  for (const Dims& shape : kMeshes) {
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext& rank) -> absl::Status {
      const DeviceMesh mesh = MeshOf(shape);
      Stack model(kLayers, kSize, /*recompute=*/true);
      DT_RETURN_IF_ERROR(Distribute(model, mesh));
      const DTensor x = randn({4, kSize}, {.mesh = mesh, .placements = Cut(mesh)});
      const int64_t shards = InUse();
      rank.device_allocator()->ResetPeak();
      sum(model(x)).Backward();
      // A rank of tp has its columns of a layer, gathered over dp.
      const int64_t tp = mesh.ndim() == 1 ? 1 : mesh.size(1), layer = kLayerBytes / tp;
      const int64_t gradients = kLayers * layer / 2, activation = 2 * kSize * 4;
      const int64_t activations = (kLayers + 8) * activation;  // inputs of layers, and of one all
      EXPECT_LE(rank.device_allocator()->stats().peak_bytes,
                shards + gradients + layer + layer + activations);
      EXPECT_LT(activations, kLayerBytes / 2);  // it would show
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(shape) << ": " << status;
  }
}

// A parameter that a recomputed module uses three times is gathered once forward and once again.
TEST(Memory, WhatIsRecomputedGathersAParameterOnce) {
  class Thrice : public Module {
   public:
    Thrice() : weight_(AddParameter("weight", {8, 8}, Init::Normal(0, 0.3))) {}

   protected:
    Values Forward(const Values& in) override {
      const DTensor& w = weight_.tensor();
      return {tanh(matmul(tanh(matmul(tanh(matmul(in[0], w)), w)), w))};
    }

   private:
    Parameter& weight_;
  };
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    std::vector<double> gradients[2];
    for (const bool again : {false, true}) {
      ManualSeed(2);
      Thrice module;
      module.own_parameters()[0]->Place(mesh, {Shard(0)});
      Materialize(module);
      module.SetRecompute(again);
      // Of more rows than it costs to gather the weight.
      const DTensor x = randn({600, 8}, {.mesh = mesh, .placements = {Shard(0)}});
      const int64_t before = InUse();
      CommTrace trace;
      const DTensor loss = sum(module(x));
      EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), 1);
      loss.Backward();
      EXPECT_EQ(trace.Count(CollectiveKind::kAllGather), again ? 2 : 1);
      gradients[again] = module.own_parameters()[0]->tensor().grad().ToVector<double>();
      EXPECT_LE(InUse(), before + 1024);  // the gradient and the loss, no gathered weight
    }
    EXPECT_EQ(gradients[0], gradients[1]);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Memory, AModuleThatIsGoneCannotRecompute) {
  DTensor loss;
  const DTensor x = ones({2, 3}).RequiresGrad();
  {
    Linear layer(3, 3);
    Materialize(layer);
    layer.SetRecompute(true);
    loss = sum(layer(x));
  }
  EXPECT_THAT(MessageOf([&] { loss.Backward(); }),
              HasSubstr("[Linear] was destroyed before Backward, which runs it again"));
}

TEST(Memory, AModelWhoseBlocksAreRecomputedIsKept) {
  GPTConfig config;
  config.recompute = true;
  DTensor loss;
  {
    GPT model(config);
    Materialize(model);
    loss = sum(model(zeros({1, 4}, {.dtype = DType::kI64})));
  }
  EXPECT_THAT(MessageOf([&] { loss.Backward(); }),
              HasSubstr("was destroyed before Backward, which runs it again"));
}

// The scopes of the first time are there in the second.
TEST(Memory, RecomputeRunsUnderItsScopesAgain) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    std::vector<double> gradients[2];
    for (const bool again : {false, true}) {
      DTensor x = DistributeTensor(ones({4, 3}), mesh, {Shard(0)});
      x.RequiresGrad();
      DTensor loss;
      {
        const ImplicitReplication replication;
        const MeshScope scope(mesh);
        const auto body = [](const Values& in) -> Values {
          const DTensor here = DistributeTensor(full({3}, 2.0));
          return {sum(square(in[0] * full({3}, 5.0)) * here)};
        };
        loss = (again ? Recompute(body, {x}) : body({x}))[0];
      }
      loss.Backward();
      gradients[again] = x.grad().ToVector<double>();
    }
    EXPECT_EQ(gradients[0], gradients[1]);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Memory, RecomputeServesLayersWhoseInputNeedsNoGradient) {
  const absl::Status status = RunSpmd(1, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({1}, {"dp"});
    const auto held = [&](bool recompute) {
      Stack model(kLayers, kSize, recompute);
      ThrowIfError(DistributeModule(model, mesh));
      Materialize(model);
      const DTensor x = randn({256, kSize}, {.mesh = mesh});  // activations are what counts
      const int64_t before = InUse();
      const DTensor loss = sum(model(x));
      return InUse() - before;
    };
    constexpr int64_t kActivation = 256 * kSize * 4;
    EXPECT_LT(held(true), kActivation * (kLayers + 1));  // the input of each layer
    EXPECT_GT(held(false), kActivation * (2 * kLayers - 2));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Memory, StrictModeDoesNotDependOnWhatRanBefore) {
  for (const Dims& shape : kMeshes) {
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) {
      const DeviceMesh mesh = MeshOf(shape);
      Placements rows = Cut(mesh);
      if (mesh.ndim() == 2) rows[1] = Replicate();
      const DTensor x = ones({64, 8}, {.mesh = mesh, .placements = rows});
      const DTensor w = ones({8, 8}, {.mesh = mesh, .placements = Cut(mesh)});
      const auto strictly = [&] {
        const StrictRedistribute strict;
        return MessageOf([&] { matmul(x, w); });
      };
      const std::string before = strictly();
      EXPECT_THAT(before, HasSubstr("[matmul] input w: strict mode"));
      matmul(x, w);
      EXPECT_EQ(strictly(), before);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(shape) << ": " << status;
  }
}

// What backward reads for gradients that nobody wants: activations before frozen weights, both
// factors of a product of which one is constant.
TEST(Memory, NothingIsKeptForGradientsThatAreNotWanted) {
  const absl::Status status = RunSpmd(2, [&](RankContext&) {
    const DeviceMesh mesh = *DeviceMesh::Create({2}, {"dp"});
    const TensorOptions rows = {.mesh = mesh, .placements = {Shard(0)}};
    const TensorOptions whole = {.mesh = mesh, .placements = {Replicate()}};
    const auto kept = [](const DTensor& y) {
      EXPECT_TRUE(y.requires_grad());
      return DescribeMemory().saved_bytes;
    };
    const DTensor leaf = ones({64, 16}, rows).RequiresGrad();
    const DTensor x = leaf * 1.0, w = ones({32, 16}, whole), b = ones({32}, whole);
    const DTensor trained = ones({32, 16}, whole).RequiresGrad();
    const int64_t of_x = 32 * 16 * 4, of_w = 32 * 16 * 4;
    EXPECT_EQ(kept(linear(x, w, b)), of_w);
    EXPECT_EQ(kept(linear(x, trained, b)), of_x + of_w);
    EXPECT_EQ(kept(linear(x.Detach(), trained, b)), of_x);
    EXPECT_EQ(kept(matmul(x, ones({16, 32}, whole))), of_w);
    EXPECT_EQ(kept(mul(x, ones({64, 16}, rows))), of_x);  // the other factor
    EXPECT_EQ(kept(mul(x, x)), of_x);
    EXPECT_EQ(kept(div(x, ones({16}, whole))), 16 * 4);
    EXPECT_EQ(kept(div(ones({16}, whole), x)), of_x + 16 * 4);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(Memory, AWriteEndsTheMemosOfAValue) {
  for (const Dims& shape : kMeshes) {
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext&) {
      const DeviceMesh mesh = MeshOf(shape);
      const Placements whole(static_cast<size_t>(mesh.ndim()), Replicate());
      const DTensor w = ones({1000, 8}, {.mesh = mesh, .placements = Cut(mesh)});
      const int64_t before = InUse();
      w.Redistribute(whole, {.shared = true});
      EXPECT_GT(InUse(), before);
      EXPECT_GT(DescribeMemory().memo_bytes, 1000 * 8 * 4 - 1);
      add_(w, 1.0);
      EXPECT_EQ(InUse(), before);
      EXPECT_EQ(DescribeMemory().memo_bytes, 0);
      EXPECT_EQ(w.Redistribute(whole, {.shared = true}).ToVector<double>()[7999], 2);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(shape) << ": " << status;
  }
}

// --- What a Llama holds --------------------------------------------------------------------------

// Bytes that forward of the ids keeps for backward, tables of first calls aside.
int64_t HeldByForward(Llama& model, const DTensor& ids) {
  model(ids);
  const int64_t before = InUse();
  const DTensor logits = model(ids);
  return InUse() - before;
}

struct Spread {
  int64_t tp;
  bool sequence_parallel, recompute;
};

// Of the layers between the embedding and the head: what one more layer adds.
int64_t HeldPerLayer(LlamaConfig config, int64_t seq, const Spread& how) {
  const DeviceMesh mesh = testing::DpTp(1, how.tp);
  int64_t held[2];
  for (const int64_t more : {0, 1}) {
    config.layers = 2 + more;
    Llama model(config);
    ThrowIfError(ParallelizeModule(
        model, mesh, LlamaPlan(config, {.sequence_parallel = how.sequence_parallel})));
    Materialize(model);
    if (how.recompute) ThrowIfError(RecomputeModules(model, {"model.layers.*"}));
    const DTensor ids =
        FromVector(std::vector<int64_t>(static_cast<size_t>(seq), 3), {1, seq}, {.mesh = mesh});
    held[more] = HeldByForward(model, ids);
  }
  return held[1] - held[0];
}

TEST(Memory, ALayerOfLlamaHoldsExactlyThis) {
  constexpr int64_t kSeq = 64, kHidden = 32, kInner = 48, kHeads = 8, kKv = 4, kHead = 4;
  constexpr int64_t kQ = kHeads * kHead, kK = kKv * kHead;  // features of q, and of k and of v
  const LlamaConfig config = {.vocab = 32,
                              .hidden = kHidden,
                              .inner = kInner,
                              .heads = kHeads,
                              .kv_heads = kKv,
                              .head_size = kHead,
                              .max_positions = kSeq,
                              .tied = false};
  std::vector<Spread> spreads;
  for (const int64_t tp : {1, 2, 4}) {
    for (const bool sequence_parallel : {false, true}) {
      for (const bool recompute : {false, true}) {
        spreads.push_back({tp, sequence_parallel, recompute});
      }
    }
  }
  for (const Spread& how : spreads) {
    // Of the norms' inputs a rank has its part of the sequence, or all.
    const int64_t tp = how.tp, rows = how.sequence_parallel ? kSeq / tp : kSeq;
    // Floats of a layer that runs again: its input alone. Cosines and sines are those of all
    // layers.
    const int64_t again = rows * kHidden;
    // Of one that does not, what the gradients are made of:
    const int64_t kept = 2 * rows * (kHidden + 1)   // a norm: its input; per row 1 / its size
                         + 2 * kSeq * kHidden       // what q, k and v, and gate and up multiply
                         + 2 * kSeq * kQ / tp       // attention: q and o
                         + 2 * kSeq * kK / tp       // k and v
                         + 2 * kSeq * kHeads / tp   // its log-sum-exp, in float64
                         + kSeq * kQ / tp           // o as rows of all heads, for o_proj
                         + 4 * kSeq * kInner / tp;  // gate, silu(gate), up, and their product
    const absl::Status status = RunSpmd(static_cast<int>(tp), [&](RankContext&) -> absl::Status {
      EXPECT_EQ(HeldPerLayer(config, kSeq, how), 4 * (how.recompute ? again : kept))
          << "tp=" << tp << " sequence_parallel=" << how.sequence_parallel
          << " recompute=" << how.recompute;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(Memory, PaddedRowsTakeAsLittleAsOthers) {
  for (const int64_t tp : {1, 2}) {
    const absl::Status status =
        RunSpmd(static_cast<int>(tp), [&](RankContext& rank) -> absl::Status {
          constexpr int64_t kSeq = 1024;
          const DeviceMesh mesh = testing::DpTp(1, tp);
          const LlamaConfig config = {.vocab = 16,
                                      .hidden = 16,
                                      .inner = 16,
                                      .layers = 1,
                                      .heads = 2,
                                      .kv_heads = 2,
                                      .head_size = 8,
                                      .max_positions = kSeq,
                                      .tied = false};
          Llama model(config);
          DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, LlamaPlan(config)));
          Materialize(model);
          const DTensor ids = FromVector(std::vector<int64_t>(kSeq, 3), {1, kSeq}, {.mesh = mesh});
          std::vector<int64_t> there(kSeq, 1);
          there[0] = 0;
          const DTensor mask = FromVector(there, {1, kSeq}, {.dtype = DType::kBool, .mesh = mesh});
          Values padded = {ids};
          padded.Add("mask", mask);
          const auto peak = [&](absl::FunctionRef<void()> run) {
            run();  // makes tables
            model.ZeroGrad();
            const int64_t before = InUse();
            rank.device_allocator()->ResetPeak();
            run();
            model.ZeroGrad();
            return rank.device_allocator()->stats().peak_bytes - before;
          };
          const auto decode = [&](const DTensor& m) {
            KVCache cache(kSeq);
            model.Decode(ids, cache, {}, m);
          };
          // Some bytes per token, and never some per pair of tokens.
          EXPECT_LE(peak([&] { sum(model(padded)[0]).Backward(); }),
                    peak([&] { sum(model(ids)).Backward(); }) + 16 * kSeq);
          EXPECT_LE(peak([&] { decode(mask); }), peak([&] { decode({}); }) + 16 * kSeq);
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << tp << ": " << status;
  }
}

// The table of positions grows with the sequences, not with what the config allows.
TEST(Memory, PositionsAreTabledAsFarAsSequencesGo) {
  const absl::Status status = RunSpmd(1, [](RankContext&) -> absl::Status {
    const NoGrad no_grad;
    Llama model({.vocab = 16,
                 .hidden = 8,
                 .inner = 8,
                 .layers = 1,
                 .heads = 1,
                 .kv_heads = 1,
                 .head_size = 8,
                 .max_positions = int64_t{1} << 40,
                 .tied = false});
    Materialize(model);
    std::vector<int64_t> tokens;
    for (int64_t i = 0; i < 1040; ++i) tokens.push_back(i * i % 16);
    const DTensor all = FromVector(tokens, {1, 1040});
    const int64_t before = InUse();
    model(slice(all, 1, 0, 6));
    EXPECT_LE(InUse() - before, 1024 * 8 + 64);  // and the frequencies
    // On both sides of the first table's end, one by one and several at once.
    KVCache cache(2048);
    model.Decode(slice(all, 1, 0, 1020), cache);
    std::vector<double> got;
    for (const int64_t to : {1023, 1024, 1025, 1030, 1040}) {
      const DTensor logits = model.Decode(slice(all, 1, cache.length, to), cache);
      for (const double x : logits.ToVector<double>()) got.push_back(x);
    }
    const std::vector<double> want = slice(model(all), 1, 1020, 1040).ToVector<double>();
    EXPECT_THAT(got, ::testing::Pointwise(::testing::DoubleNear(1e-5), want));
    EXPECT_LE(InUse() - before,
              1024 * 8 + 2048 * 8 + 2 * 2048 * 8 * 4 + 64);  // two tables; keys and values
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- DescribeMemory ------------------------------------------------------------------------------

TEST(DescribeMemory, NamesWhoHoldsWhat) {
  constexpr GPTConfig kConfig = {.vocab = 64, .seq = 32, .layers = 2, .hidden = 16, .heads = 2};
  for (const int64_t dp : {1, 2}) {
    const absl::Status status = RunSpmd(dp * 2, [&](RankContext&) -> absl::Status {
      const DeviceMesh mesh = testing::DpTp(dp, 2);
      GPT model(kConfig);
      DT_RETURN_IF_ERROR(ParallelizeModule(model, mesh, GPTPlan(kConfig)));
      Materialize(model);
      std::vector<int64_t> numbers(8 * 32, 3);
      const DTensor ids =
          FromVector(numbers, {8, 32}, {DType::kI64, mesh, {Shard(0), Replicate()}});
      const DTensor loss = cross_entropy(flatten(model(ids), 0, 1), flatten(ids, 0, 1));
      MemoryReport report = DescribeMemory();
      EXPECT_GT(report.saved_bytes, 0);
      EXPECT_EQ(report.gradient_bytes, 0);
      EXPECT_LE(report.saved_bytes + report.memo_bytes, report.stats.in_use_bytes);
      EXPECT_EQ(report.largest.size(), 10u);
      EXPECT_GT(report.others, 0);
      EXPECT_TRUE(std::is_sorted(report.largest.begin(), report.largest.end(),
                                 [](const auto& a, const auto& b) { return a.bytes > b.bytes; }));
      // The largest are logits and the inner values of the MLPs, by the op that reads them.
      EXPECT_THAT(report.ToString(),
                  AllOf(HasSubstr("blocks.1.mlp.up  linear_act_kept  float32 [8, 32, 64]"),
                        HasSubstr("cross_entropy"), HasSubstr("smaller ones")));
      loss.Backward();
      report = DescribeMemory(1000);
      EXPECT_EQ(report.saved_bytes, 0);
      int64_t gradients = 0;
      for (const Parameter* p : model.Parameters()) gradients += p->tensor().spec().local_bytes();
      EXPECT_EQ(report.gradient_bytes, gradients);
      EXPECT_EQ(report.named_bytes, gradients);
      EXPECT_EQ(report.largest.size(), 2 * model.Parameters().size());
      EXPECT_EQ(report.largest[0].op, "gradient");
      EXPECT_THAT(report.largest[0].module, ::testing::AnyOf("tokens", "head"));
      // Without gradients parameters are what there is.
      model.ZeroGrad();
      report = DescribeMemory(1);
      EXPECT_EQ(report.gradient_bytes, 0);
      EXPECT_THAT(report.ToString(), ::testing::ContainsRegex(
                                         "module    (tokens|head)\\.weight  parameter  float32 "));
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << dp << ": " << status;
  }
}

TEST(DescribeMemory, StandsInErrorsForWantOfMemory) {
  const absl::Status status = RunSpmd(1, [](RankContext& rank) {
    DTensor w = ones({64, 64}).RequiresGrad();
    const DTensor kept = tanh(w * w);
    rank.device_allocator()->SetLimit(InUse() + 4096);
    const std::string message = MessageOf([&] { kept* kept; });
    rank.device_allocator()->SetLimit(0);
    EXPECT_THAT(message, AllOf(HasSubstr("[mul] cannot allocate 16384 bytes"),
                               HasSubstr("\nbytes in use "), HasSubstr("saved for backward 32768"),
                               HasSubstr("saved     -  tanh  float32 [64, 64]")));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::memory_test
