// Training on a device that the host cannot read and that does nothing before it must: the bits of
// the CPU, in any order that the streams allow, and no wait but where a value is read. On another
// device (DT_TEST_DEVICE) the losses are the CPU's within 1e-5, and of whole numbers all bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "dtensor/ops/ops.h"
#include "dtensor/parallel/models/gpt.h"
#include "dtensor/parallel/models/gpt_plan.h"
#include "dtensor/parallel/models/llama.h"
#include "dtensor/parallel/models/model_plans.h"
#include "dtensor/parallel/module/init.h"
#include "dtensor/parallel/optim/optim.h"
#include "dtensor/rng/generator.h"
#include "tests/common/far_device.h"
#include "tests/common/remote_device.h"
#include "tests/parallel/support.h"

namespace dtensor::far_suite_test {
namespace {

DeviceType Far() { return testing::RemoteDevice(); }
constexpr GPTConfig kConfig = {
    .vocab = 32, .seq = 8, .layers = 2, .hidden = 16, .heads = 4, .dropout = 0.1};

struct Trained {
  std::vector<double> losses;
  testing::NamedValues parameters;
  int64_t most_waits = 0;  // of a step, its Item included
  friend bool operator==(const Trained& a, const Trained& b) {
    return a.losses == b.losses && a.parameters == b.parameters;
  }
};

int64_t HostWaits() {
  const RankDevice* far = RankContext::Current().devices().Opened(Far());
  return far == nullptr ? 0 : far->stats().host_waits;
}

// Three steps of AdamW with clipping, dropout and new tokens.
Trained Train(const DeviceMesh& mesh) {
  ManualSeed(7);
  GPT model(kConfig);
  if (!mesh.is_self()) {
    ThrowIfError(ParallelizeModule(model, mesh, GPTPlan(kConfig)));
    ThrowIfError(DistributeModule(model, mesh));
  }
  Materialize(model);
  AdamW optimizer(model.NamedParameters(), {.lr = 0.01});
  Trained t;
  for (int64_t step = 0; step < 3; ++step) {
    std::vector<int64_t> tokens, next;
    for (int64_t i = 0; i < 4 * kConfig.seq; ++i) {
      tokens.push_back((i * 5 + step) % kConfig.vocab);
      next.push_back((i * 7 + step) % kConfig.vocab);
    }
    const auto place = [&](const std::vector<int64_t>& ids) {
      const DTensor t = FromVector(ids, {4, kConfig.seq}, {.dtype = DType::kI64});
      return mesh.is_self() ? t : DistributeTensor(t, mesh, {Shard(0), Replicate()});
    };
    const int64_t before = HostWaits();
    const DTensor logits = model(place(tokens));
    const int64_t rows = 4 * kConfig.seq;
    const DTensor loss =
        cross_entropy(reshape(logits, {rows, kConfig.vocab}), reshape(place(next), {rows}));
    optimizer.ZeroGrad();
    loss.Backward();
    ClipGradients(model.NamedParameters(), 1.0);
    optimizer.Step();
    t.losses.push_back(loss.Item());
    t.most_waits = std::max(t.most_waits, HostWaits() - before);
  }
  t.parameters = testing::Gather(model);
  return t;
}

Trained TrainOn(int64_t ranks, DeviceType device) {
  Trained trained;
  const absl::Status status =
      RunSpmd(ranks,
              [&](RankContext& rank) -> absl::Status {
                const DeviceMesh mesh =
                    ranks == 1 ? DeviceMesh::Self() : DeviceMesh({2, ranks / 2}, {"dp", "tp"});
                const Trained t = Train(mesh);
                if (IsRemote(device)) {
                  EXPECT_EQ(t.most_waits, 1) << "only Item waits";
                }
                if (rank.rank() == 0) trained = t;
                return absl::OkStatus();
              },
              {.device = device});
  EXPECT_TRUE(status.ok()) << status;
  return trained;
}

void ExpectNear(const Trained& here, const Trained& there) {
  ASSERT_EQ(here.losses.size(), there.losses.size());
  for (size_t i = 0; i < here.losses.size(); ++i) {
    EXPECT_NEAR(here.losses[i], there.losses[i], 1e-5) << "step " << i;
  }
  ASSERT_EQ(here.parameters.size(), there.parameters.size());
  for (size_t p = 0; p < here.parameters.size(); ++p) {
    const auto& [name, values] = here.parameters[p];
    const std::vector<double>& others = there.parameters[p].second;
    ASSERT_EQ(values.size(), others.size()) << name;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(values[i], others[i], 1e-4) << name << "[" << i << "]";
    }
  }
}

TEST(FarSuite, TrainingGivesTheBitsOfTheCpu) {
  const bool exact = testing::HasCpuBits(Far());
  for (const int64_t ranks : {1, 4}) {
    const Trained here = TrainOn(ranks, DeviceType::kCpu);
    for (const uint64_t seed : {0, 1, 2}) {
      if (!exact && seed > 0) break;  // the environment has the seed of its orders
      testing::SeedFarDevice(seed);
      const int64_t before = testing::GetFarStats().kernels;
      const Trained far = TrainOn(ranks, Far());
      if (exact) {
        EXPECT_GT(testing::GetFarStats().kernels - before, 300 * ranks);
        EXPECT_TRUE(far == here) << ranks << " ranks, seed " << seed;
      } else {
        ExpectNear(here, far);
      }
    }
  }
}

// Three layers of SmolLM2-135M, of another vocabulary: 9 heads of queries in 3 groups, rotated
// positions. On two ranks one has two of the groups.
constexpr LlamaConfig kLlama = {.vocab = 48,
                                .hidden = 576,
                                .inner = 1536,
                                .layers = 3,
                                .heads = 9,
                                .kv_heads = 3,
                                .head_size = 64,
                                .max_positions = 32,
                                .tied = true};

// The loss, and the gradients of all parameters.
testing::NamedValues LlamaGradients(int64_t ranks, DeviceType device) {
  testing::NamedValues all;
  const auto body = [&](RankContext& rank) -> absl::Status {
    ManualSeed(5);
    Llama model(kLlama);
    const bool alone = ranks == 1;
    const DeviceMesh mesh = alone ? DeviceMesh::Self() : DeviceMesh({ranks}, {"tp"});
    if (!alone) {
      ThrowIfError(ParallelizeModule(model, mesh, LlamaPlan(kLlama)));
      ThrowIfError(DistributeModule(model, mesh));
    }
    Materialize(model);
    constexpr int64_t kSeq = 12, kRows = 2 * kSeq;
    const auto tokens = [&](int64_t factor) {
      std::vector<int64_t> ids;
      for (int64_t i = 0; i < kRows; ++i) ids.push_back(i * factor % kLlama.vocab);
      const DTensor t = FromVector(ids, {2, kSeq}, {.dtype = DType::kI64});
      return alone ? t : DistributeTensor(t, mesh, {Replicate()});
    };
    const DTensor logits = model(tokens(5));
    const DTensor loss =
        cross_entropy(reshape(logits, {kRows, kLlama.vocab}), reshape(tokens(7), {kRows}));
    loss.Backward();
    testing::NamedValues mine = testing::Gather(model, true);
    mine.emplace_back("loss", std::vector<double>{loss.Item()});
    if (rank.rank() == 0) all = mine;
    return absl::OkStatus();
  };
  const absl::Status status = RunSpmd(ranks, body, {.device = device});
  EXPECT_TRUE(status.ok()) << status;
  return all;
}

TEST(FarSuite, ALlamaGivesTheGradientsOfTheCpu) {
  const testing::NamedValues alone = LlamaGradients(1, DeviceType::kCpu);
  EXPECT_NEAR(alone.back().second[0], std::log(48), 0.2);
  for (const int64_t ranks : {1, 2}) {
    const testing::NamedValues here = LlamaGradients(ranks, DeviceType::kCpu);
    const testing::NamedValues there = LlamaGradients(ranks, Far());
    if (testing::HasCpuBits(Far())) {
      EXPECT_TRUE(there == here) << ranks << " ranks";
    }
    ASSERT_EQ(there.size(), alone.size());
    ASSERT_EQ(here.size(), alone.size());
    double largest = 0;
    for (size_t p = 0; p < here.size(); ++p) {
      const auto& [name, values] = there[p];
      ASSERT_EQ(values.size(), alone[p].second.size()) << name;
      ASSERT_FALSE(values.empty()) << name << " has no gradient";
      size_t wrong = 0;  // of millions, the first is told
      for (size_t i = 0; i < values.size(); ++i) {
        const double off = std::max(std::abs(values[i] - here[p].second[i]),
                                    std::abs(values[i] - alone[p].second[i]));
        if (!(off <= 1e-5) && wrong++ == 0) {
          ADD_FAILURE() << name << "[" << i << "]: " << values[i] << ", on the CPU "
                        << here[p].second[i] << ", on one rank " << alone[p].second[i];
        }
        if (name != "loss") largest = std::max(largest, std::abs(values[i]));
      }
      ASSERT_EQ(wrong, 0u) << "elements of " << name;
    }
    EXPECT_GT(largest, 1e-2) << "gradients that say nothing";
  }
}

// A layer of whole numbers, sharded over rows, columns and inner index: no rounding, so any device
// has the CPU's bits.
TEST(FarSuite, AnIntegerModelHasTheBitsOfTheCpu) {
  const auto run = [](int64_t ranks, DeviceType device) {
    std::vector<int64_t> all;
    const absl::Status status = RunSpmd(
        ranks,
        [&](RankContext& rank) -> absl::Status {
          const DeviceMesh mesh = ranks == 1 ? DeviceMesh({1, 1}) : DeviceMesh({2, ranks / 2});
          const auto numbers = [&](IntSpan shape, int64_t factor, const Placements& placements) {
            std::vector<int64_t> values;
            for (int64_t i = 0; i < Numel(shape); ++i) values.push_back(i * factor % 23 - 11);
            return DistributeTensor(ValueOrThrow(Tensor::FromVector(values, shape, DType::kI64)),
                                    mesh, placements);
          };
          DTensor x = numbers({6, 10}, 7, {Shard(0), Replicate()});
          const DTensor up = numbers({10, 14}, 5, {Replicate(), Shard(1)});
          const DTensor down = numbers({14, 10}, 3, {Replicate(), Shard(0)});
          for (int64_t step = 0; step < 3; ++step) {
            const DTensor h = relu(add(matmul(x, up), step));
            x = remainder(add(matmul(h, down), x), 101);
          }
          const std::vector<int64_t> values = x.ToVector<int64_t>();
          if (rank.rank() == 0) all = values;
          return absl::OkStatus();
        },
        {.device = device});
    EXPECT_TRUE(status.ok()) << status;
    return all;
  };
  for (const int64_t ranks : {1, 4}) {
    const std::vector<int64_t> here = run(ranks, DeviceType::kCpu);
    EXPECT_EQ(here.size(), 60u);
    EXPECT_EQ(run(ranks, Far()), here) << ranks << " ranks";
  }
}

TEST(FarSuite, RandomNumbersAreThoseOfTheCpu) {
  const auto draw = [](DeviceType device) {
    std::vector<double> all;
    const absl::Status status = RunSpmd(
        4,
        [&](RankContext& rank) -> absl::Status {
          ManualSeed(3);
          const DeviceMesh mesh({2, 2});
          const DTensor x = randn({5, 6}, {.mesh = mesh, .placements = {Shard(0), Shard(1)}});
          const DTensor mask = dropout_with_mask(x, 0.3)[1];
          const DTensor chance = rand({5, 6}, {.mesh = mesh, .placements = {Shard(1), Shard(0)}});
          const DTensor picked = multinomial(rand({3, 7}, {.mesh = mesh}), 4, false);
          const auto add = [&](const DTensor& t) {
            const std::vector<double> values = t.ToVector<double>();
            if (rank.rank() == 0) all.insert(all.end(), values.begin(), values.end());
          };
          for (const DTensor& t : {x, mask, bernoulli(chance), picked, randperm(9)}) add(t);
          return absl::OkStatus();
        },
        {.device = device});
    EXPECT_TRUE(status.ok()) << status;
    return all;
  };
  const std::vector<double> here = draw(DeviceType::kCpu);
  EXPECT_EQ(here.size(), 30u * 3 + 12 + 9);
  EXPECT_EQ(draw(Far()), here);
}

// With Profile::hardware_math a GPU's numbers are near the CPU's and its own, those of one rank on
// every mesh; the CPU has none of its own.
TEST(FarSuite, HardwareMathIsNearTheCpusAndTheSameOnEveryMesh) {
  const auto draw = [](int64_t ranks, DeviceType device) {
    std::vector<double> all;
    const absl::Status status =
        RunSpmd(ranks,
                [&](RankContext& rank) -> absl::Status {
                  DefaultGenerator().set_profile({.hardware_math = true});
                  ManualSeed(3);
                  const DeviceMesh mesh = ranks == 1 ? DeviceMesh::Self() : DeviceMesh({ranks});
                  const Placements parts = ranks == 1 ? Placements() : Placements{Shard(1)};
                  for (const DType dtype : {DType::kF32, DType::kBF16}) {
                    for (int op = 0; op < 5; ++op) {
                      const DTensor t = zeros({6, 70}, {dtype, mesh, parts});
                      if (op == 0) normal_(t, 0.5, 2);
                      if (op == 1) log_normal_(t, 0, 0.5);
                      if (op == 2) exponential_(t, 3);
                      if (op == 3) cauchy_(t, 1, 0.5);
                      if (op == 4) geometric_(t, 0.3);
                      const std::vector<double> values = t.ToVector<double>();
                      if (rank.rank() == 0) all.insert(all.end(), values.begin(), values.end());
                    }
                  }
                  return absl::OkStatus();
                },
                {.device = device});
    EXPECT_TRUE(status.ok()) << status;
    return all;
  };
  const std::vector<double> here = draw(1, DeviceType::kCpu), there = draw(1, Far());
  EXPECT_EQ(draw(3, Far()), there);
  EXPECT_EQ(here == there, testing::HasCpuBits(Far()));
  constexpr size_t kNumbers = 6 * 70, kGeometric = 4;
  ASSERT_EQ(here.size(), 2 * 5 * kNumbers);
  ASSERT_EQ(there.size(), here.size());
  for (size_t i = 0; i < here.size(); ++i) {
    const double step = i < 5 * kNumbers ? 0x1p-16 : 0x1p-7;  // of float32, of bfloat16
    // The tangent is as steep as 1 + t^2 in the angle, whose error is the sine's.
    const double t = std::abs(here[i]), most = step * std::max(1.0, t * t);
    ASSERT_NEAR(here[i], there[i], i / kNumbers % 5 == kGeometric ? 1 : most) << i;
  }
}

// What the host computes says in its declaration how often it waits.
TEST(FarSuite, WhatTheHostComputesWaitsAsItSays) {
  const absl::Status status = RunSpmd(
      2,
      [](RankContext&) -> absl::Status {
        const DeviceMesh mesh({2});
        const DTensor chances = rand({3, 7}, {.mesh = mesh, .placements = {Shard(0)}});
        const DTensor weight = zeros({6, 4}, {.mesh = mesh, .placements = {Shard(0)}});
        const auto waits = [](const std::function<void()>& fn) {
          const int64_t before = HostWaits();
          fn();
          return HostWaits() - before;
        };
        EXPECT_EQ(waits([&] { randperm(9, {.dtype = DType::kI64, .mesh = mesh}); }), 0);
        EXPECT_EQ(waits([&] { multinomial(chances, 4); }), 2);
        EXPECT_EQ(waits([&] { multinomial(chances, 4, true); }), 1);
        EXPECT_EQ(waits([&] { orthogonal_(weight); }), 1);
        EXPECT_EQ(waits([&] { sum(randn({8, 8}, {.mesh = mesh, .placements = {Shard(1)}})); }), 0);
        return absl::OkStatus();
      },
      {.device = Far()});
  EXPECT_TRUE(status.ok()) << status;
}

TEST(FarSuite, ErrorsOfKernelsAreToldWhereTheHostWaits) {
  const absl::Status status = RunSpmd(
      2,
      [](RankContext& rank) -> absl::Status {
        const DTensor table = ones({4, 2});
        const DTensor bad = FromVector(std::vector<int64_t>{1, 9}, {2}, {.dtype = DType::kI64});
        const DTensor rows = embedding(rank.rank() == 1 ? bad : bad * 0, table);
        const DTensor later = rows + 1;  // goes on
        later.ToVector<double>();
        return absl::OkStatus();
      },
      {.device = Far()});
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(std::string(status.message()).find("rank 1: [embedding]"), std::string::npos) << status;
}

}  // namespace
}  // namespace dtensor::far_suite_test
