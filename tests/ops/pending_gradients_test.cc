// A gradient that is a pending sum passes every op whose gradient is no larger than what it got,
// without communication, and the numbers are those of one rank.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/verify_samples.h"
#include "dtensor/tensor/status.h"
#include "dtensor/verify/simulate.h"
#include "tests/common/thin.h"

namespace dtensor::pending_gradients_test {
namespace {

struct Passed {
  std::vector<double> gradient;
  int64_t collectives = 0;  // over mesh dims that the gradient is pending on
  bool larger = false;      // the input than the output, or of a coarser dtype
  bool apart = false;       // the op left the output cut where its gradient is pending
};

// Where the first input lies (the others are whole), and over which mesh dims the output's gradient
// is a pending sum.
struct Layout {
  Dims mesh;
  std::vector<std::string> names;
  Placements first;
  std::vector<bool> pending;
};

// The gradient of one input where no other wants one. Where the output's is pending the terms of
// the ranks that hold a part of it are dy + (their number - 1), and -1 of all the others.
absl::StatusOr<Passed> PassOne(const OpDef& op, const VerifySample& sample, size_t input,
                               const DeviceMesh& mesh, const Layout& layout = {}) {
  Passed p;
  const Attrs attrs = internal::AttrsOf(sample);
  const Placements whole(mesh.ndim());
  std::vector<DTensor> inputs;
  DTensor leaf;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    DT_ASSIGN_OR_RETURN(const Tensor part,
                        internal::PartOf(sample.inputs[i], i, internal::Draw::kSigned,
                                         DeviceMesh({1}), {Replicate()}, {0}));
    const Placements& placed = i == 0 && part.ndim() > 0 ? layout.first : whole;
    inputs.push_back(mesh.is_self() ? OnSelf(part) : DistributeTensor(part, mesh, placed));
    if (i != input) continue;
    leaf = inputs.back();
    leaf.RequiresGrad();
    inputs.back() = mul(leaf, 1.0);
  }
  std::vector<const DTensor*> pointers;
  for (const DTensor& x : inputs) pointers.push_back(&x);
  const DTensor y = Call(op, pointers, attrs)[0];
  if (!y.requires_grad()) return absl::NotFoundError("no gradient");
  p.larger = leaf.numel() > y.numel() || SizeOf(leaf.dtype()) < SizeOf(y.dtype());
  std::vector<double> dy;
  for (int64_t i = 0; i < y.numel(); ++i) dy.push_back(static_cast<double>(i % 5) - 2);
  const DTensor whole_dy = FromVector(dy, y.shape(), {.dtype = y.dtype()});
  if (mesh.is_self()) {
    y.Backward(whole_dy);
  } else {
    Dims at;
    mesh.Coordinate(RankContext::Current().rank(), &at);
    double terms = 1;
    bool first = true;
    Placements placed(y.placements().begin(), y.placements().end()), settled = placed;
    for (int d = 0; d < mesh.ndim(); ++d) {
      if (placed[d].is_partial() || layout.pending[d]) settled[d] = Replicate();
      placed[d] = layout.pending[d] ? Partial() : settled[d];
      if (!layout.pending[d]) continue;
      p.apart = p.apart || y.placements()[d] != Replicate();
      terms *= static_cast<double>(mesh.size(d));
      first = first && at[d] == 0;
    }
    const DTensor part = DistributeTensor(whole_dy.local(), mesh, settled).ToLocal().Detach();
    const DTensor mine = first ? add(part, terms - 1) : sub(zeros_like(part), 1.0);
    const NoGradSync hold;
    CommTrace trace;
    y.Backward(FromLocal(mine, mesh, placed, {.shape = y.shape()}));
    for (const CommEvent& e : trace.events()) {
      for (int d = 0; d < mesh.ndim(); ++d) {
        if (!layout.pending[d] || !absl::StrContains(e.mesh_dims, layout.names[d])) continue;
        ++p.collectives;
        break;
      }
    }
  }
  if (leaf.grad().defined()) p.gradient = leaf.grad().ToVector<double>();
  return p;
}

// Of these the gradient is no product with the gradient that comes: 0 stays 0 where the logarithm
// is infinite (x log y), or it is read where the result is least.
bool LinearForEveryNumber(const std::string& op) {
  return op != "xlogy" && op != "special_xlog1py" && op != "logcumsumexp";
}

// Of these the gradient counts who shares an extreme, along the dim that the batch is cut in: parts
// move over dp, and what moves anyway is planned over both mesh dims.
bool MovesOfACutBatch(const std::string& op) {
  return op == "scatter_amax" || op == "scatter_amin";
}

TEST(PendingGradients, PassWithoutCommunication) {
  const std::vector<std::string> both = {"dp", "tp"};
  const std::vector<Layout> layouts = {{{2}, {"tp"}, {Replicate()}, {true}},
                                       {{2, 2}, both, {Replicate(), Replicate()}, {true, true}},
                                       {{2, 2}, both, {Replicate(), Replicate()}, {false, true}},
                                       {{2, 2}, both, {Shard(0), Replicate()}, {false, true}}};
  int64_t passed = 0;
  std::atomic<int64_t> of_batches{0};
  size_t number = 0;
  for (const VerifyCase& c : VerifyCases()) {
    if (!testing::InTurn(number++, 4)) continue;
    const OpDef& op = *ValueOrThrow(OpRegistry::Find(c.op));
    if (op.vjp() == nullptr || op.in_place()) continue;
    for (const VerifySample& sample : c.samples) {
      for (size_t i = 0; i < sample.inputs.size(); ++i) {
        if (!IsFloating(sample.inputs[i].dtype)) continue;
        const absl::StatusOr<Passed> want = PassOne(op, sample, i, DeviceMesh::Self());
        if (!want.ok()) continue;
        for (const Layout& layout : layouts) {
          const std::string where =
              absl::StrCat(c.op, " input ", i, " of a first input in ", ToString(layout.first));
          const absl::Status status =
              RunSpmd(Numel(layout.mesh), [&](RankContext&) -> absl::Status {
                DT_ASSIGN_OR_RETURN(const DeviceMesh mesh,
                                    DeviceMesh::Create(layout.mesh, layout.names));
                DT_ASSIGN_OR_RETURN(const Passed got, PassOne(op, sample, i, mesh, layout));
                EXPECT_EQ(got.gradient.size(), want->gradient.size()) << where;
                for (size_t k = 0; k < got.gradient.size(); ++k) {
                  const double w = want->gradient[k];
                  if (!std::isfinite(w)) continue;
                  EXPECT_NEAR(got.gradient[k], w, 1e-4 * (1 + std::fabs(w))) << where;
                }
                const bool batch = layout.first[0] == Shard(0);
                if (!got.larger && !got.apart && LinearForEveryNumber(c.op) &&
                    !(batch && MovesOfACutBatch(c.op))) {
                  EXPECT_EQ(got.collectives, 0) << where;
                  of_batches += batch;
                }
                return absl::OkStatus();
              });
          EXPECT_TRUE(status.ok()) << where << ": " << status;
        }
        passed += want->larger ? 0 : 1;
      }
    }
  }
  EXPECT_GT(passed, 60 / testing::Thin(4));
  EXPECT_GT(of_batches, 60 * 4 / testing::Thin(4)) << of_batches;  // of four ranks each
}

// Parts that overlap, or leave a gap: what several of them give to one element is added up, once
// per element, before it is reduced together.
TEST(PendingGradients, PartsThatOverlap) {
  struct Cut {
    int64_t start, end;
  };
  const auto gradient = [](const DeviceMesh& mesh, const Placements& columns,
                           const std::vector<Cut>& cuts) {
    const Placements whole(mesh.ndim());
    DTensor leaf = DistributeTensor(
        ValueOrThrow(Tensor::FromVector(std::vector<double>{1, 2, 3, 4, 5, 6}, {6, 1})), mesh,
        whole);
    leaf.RequiresGrad();
    const DTensor x = mul(leaf, 1.0);
    DTensor total;
    for (const Cut& c : cuts) {
      const DTensor w = DistributeTensor(
          ValueOrThrow(Tensor::FromVector(
              std::vector<double>{1, 10, 100, static_cast<double>(c.start)}, {1, 4})),
          mesh, columns);
      const DTensor y = matmul(slice(x, 0, c.start, c.end), w);
      total = total.defined() ? total + sum(y * y) : sum(y * y);
    }
    CommTrace trace;
    total.Backward();
    if (!mesh.is_self()) {
      EXPECT_LE(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1);
    }
    return leaf.grad().has_values() ? leaf.grad().ToVector<double>() : std::vector<double>();
  };
  for (const std::vector<Cut>& cuts : std::vector<std::vector<Cut>>{{{0, 4}, {2, 6}},
                                                                    {{0, 3}, {3, 6}},
                                                                    {{1, 5}, {2, 4}},
                                                                    {{0, 2}, {4, 6}},
                                                                    {{0, 4}, {1, 5}, {2, 6}}}) {
    std::vector<double> want(6);  // by hand: one rank adds parts up by the same code
    for (const Cut& c : cuts) {
      const double s = static_cast<double>(c.start);
      for (int64_t i = c.start; i < c.end; ++i) {
        want[i] += 2 * static_cast<double>(i + 1) * (1 + 100 + 10000 + s * s);
      }
    }
    EXPECT_EQ(gradient(DeviceMesh::Self(), {}, cuts), want);
    // Rank 1 is not of the mesh: it makes the same calls and holds nothing.
    const absl::Status status = RunSpmd(5, [&](RankContext& context) -> absl::Status {
      const std::vector<double> here = context.rank() == 1 ? std::vector<double>() : want;
      const DeviceMesh both =
          ValueOrThrow(DeviceMesh::FromRanks({2, 2}, {4, 2, 0, 3}, {"dp", "tp"}));
      for (const Placement& dp : {Replicate(), Shard(1)}) {
        EXPECT_EQ(gradient(both, {dp, Shard(1)}, cuts), here) << dp.ToString();
      }
      const bool outside = context.rank() != 0 && context.rank() != 2;
      EXPECT_EQ(
          gradient(ValueOrThrow(DeviceMesh::FromRanks({2}, {2, 0}, {"tp"})), {Shard(1)}, cuts),
          outside ? std::vector<double>() : want);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(PendingGradients, PassASplit) {
  const auto gradient = [](const DeviceMesh& mesh, const Placements& columns) {
    const Placements whole(mesh.ndim());
    const auto at = [&](std::vector<double> v, Shape shape, const Placements& p) {
      return DistributeTensor(ValueOrThrow(Tensor::FromVector(v, shape)), mesh, p);
    };
    DTensor leaf = at({1, 2, 3, 4, 5, 6}, {6, 1}, whole);
    leaf.RequiresGrad();
    const Values parts = split(mul(leaf, 1.0), {2, 4}, 0);
    const DTensor w = at({1, 10, 100, 2}, {1, 4}, columns);
    const DTensor a = matmul(parts[0], w), b = matmul(parts[1], w);
    const DTensor total = sum(a * a) + sum(b * b);
    CommTrace trace;
    total.Backward();
    if (!mesh.is_self()) {
      EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1);
    }
    return leaf.grad().ToVector<double>();
  };
  const std::vector<double> want = gradient(DeviceMesh::Self(), {});
  absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    EXPECT_EQ(gradient(DeviceMesh({2}, {"tp"}), {Shard(1)}), want);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    for (const Placement& dp : {Replicate(), Shard(1)}) {
      EXPECT_EQ(gradient(DeviceMesh({2, 2}, {"dp", "tp"}), {dp, Shard(1)}), want);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A custom function that says so passes them; else each of its gradients is reduced for itself.
TEST(PendingGradients, PassCustomFunctionsThatSaySo) {
  // With the batch cut over dp the gradient is pending over tp alone.
  const auto run = [](const DeviceMesh& mesh, const Placements& batch, const Placements& columns) {
    for (const bool passes : {false, true}) {
      const auto at = [&](std::vector<double> v, Shape shape, const Placements& p) {
        return DistributeTensor(ValueOrThrow(Tensor::FromVector(v, shape)), mesh, p);
      };
      DTensor leaf = at({1, 2, 3, 4, 5, 6}, {6, 1}, batch);
      leaf.RequiresGrad();
      const DTensor x = mul(leaf, 1.0);
      const DTensor y = CustomFunction(
          "same", {x}, [&] { return Values{reshape(x, {6, 1})}; },
          [](const Values& g) { return Values{reshape(g[0], {6, 1})}; }, {}, passes)[0];
      const DTensor w = at({1, 10, 100, 2}, {1, 4}, columns);
      const DTensor a = matmul(x, w), b = matmul(y, w);
      CommTrace trace;
      (sum(a * a) + sum(b * b)).Backward();
      EXPECT_EQ(trace.TotalCount(), passes ? 1 : 2) << trace.ToString();
      EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), passes ? 1 : 2);
      for (const CommEvent& e : trace.events()) {
        EXPECT_EQ(e.mesh_dims, mesh.ndim() > 1 && columns[0] == Shard(1) ? "dp,tp" : "tp");
      }
      EXPECT_EQ(leaf.grad().ToVector<double>()[1], 2 * 2 * 2 * (1 + 100 + 10000 + 4));
    }
  };
  absl::Status status = RunSpmd(2, [&](RankContext&) -> absl::Status {
    run(DeviceMesh({2}, {"tp"}), {Replicate()}, {Shard(1)});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  status = RunSpmd(4, [&](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    run(mesh, {Shard(0), Replicate()}, {Replicate(), Shard(1)});
    run(mesh, {Replicate(), Replicate()}, {Replicate(), Shard(1)});
    run(mesh, {Replicate(), Replicate()}, {Shard(1), Shard(1)});
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Two leaves get one pending sum, which is reduced once: each has memory of its own in the end.
TEST(PendingGradients, LeavesDoNotShareWhatTheyGot) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"dp"});
    DTensor a = ones({3}, {DType::kF64, mesh, {Replicate()}});
    DTensor b = ones({3}, {DType::kF64, mesh, {Replicate()}});
    a.RequiresGrad(), b.RequiresGrad();
    const DTensor x = ones({4, 3}, {DType::kF64, mesh, {Shard(0)}});
    CommTrace trace;
    sum(x * (a + b)).Backward();
    EXPECT_EQ(trace.Count(CollectiveKind::kAllReduce, CommPhase::kBackward), 1) << trace.ToString();
    mul_(a.grad().Detach(), 10);
    EXPECT_EQ(a.grad().ToVector<double>(), std::vector<double>(3, 40));
    EXPECT_EQ(b.grad().ToVector<double>(), std::vector<double>(3, 4));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::pending_gradients_test
