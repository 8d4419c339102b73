// What was wrong in other systems, by the number of the report: pytorch/pytorch unless another
// repository is named. Each is tried under every placement of its inputs on 2, 3 and 2 x 2 ranks,
// values and gradients against one rank, on sizes that do not divide.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "absl/strings/str_join.h"
#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "tests/common/message.h"
#include "tests/ops/sharded.h"

namespace dtensor::known_bugs_test {
namespace {

using testing::CheckSharded;
using testing::Float;
using ::testing::HasSubstr;
using testing::Ints;
using testing::MessageOf;
using testing::Operand;
using testing::OpFn;
using testing::ShardedCheck;

using In = const std::vector<DTensor>&;

Operand Bools(Shape shape, std::vector<double> values) {
  return {std::move(shape), std::move(values), DType::kBool};
}

// --- wrong results -------------------------------------------------------------------------------

TEST(KnownBugs, Mean_162692_OfUnevenShards) {  // veScale legacy: Partial(avg) whatever the lengths
  CheckSharded([](In x) { return mean(x[0], {0}); }, {Float({5, 3}, 1)});
  CheckSharded([](In x) { return mean(x[0]); }, {Float({7, 2}, 1)});
}

TEST(KnownBugs, PendingSumAndNumber_147180_153603_145218) {
  CheckSharded([](In x) { return x[0] + 1; }, {Float({5}, 1)});
  CheckSharded([](In x) { return 2 - x[0]; }, {Float({5}, 1)});
  CheckSharded([](In x) { return norm(x[0]) + 1; }, {Float({5, 2}, 1)});
  // A cached plan of one number is not that of another.
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    for (const double s : {0.0, 1.0, 2.0, 0.0}) {
      const DTensor x = full({3}, 1, {DType::kF64, mesh, {Replicate()}}).Redistribute({Partial()});
      EXPECT_EQ((x + s).ToVector<double>(), std::vector<double>(3, 1 + s));
      EXPECT_EQ((x * s).ToVector<double>(), std::vector<double>(3, s));
      EXPECT_EQ(masked_fill(x, full({3}, 1, {DType::kBool, mesh}), s).ToVector<double>(),
                std::vector<double>(3, s));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(KnownBugs, All_165923_IsNoSum) {
  const Operand x = Bools({5, 2}, {1, 1, 1, 0, 1, 1, 1, 1, 0, 0});
  CheckSharded([](In in) { return all(in[0], {0}); }, {x});
  CheckSharded([](In in) { return any(in[0], {0}); }, {x});
  CheckSharded([](In in) { return all(in[0]); }, {Bools({6}, {1, 1, 1, 1, 1, 1})});
}

TEST(KnownBugs, MinMaxIndices_168940_169691) {  // the first of equal ones, in the whole dim
  const Operand ties = {{5, 4}, {3, 1, 3, 1, 7, 7, 7, 7, 0, 2, 2, 0, 5, 5, 4, 4, 1, 2, 3, 4}};
  for (const int64_t dim : {0, 1}) {
    CheckSharded([=](In x) { return max(x[0], dim)[1]; }, {ties});
    CheckSharded([=](In x) { return min(x[0], dim)[1]; }, {ties});
    CheckSharded([=](In x) { return argmax(x[0], dim); }, {ties});
    CheckSharded([=](In x) { return max(x[0], dim)[0]; }, {ties});
  }
  CheckSharded([](In x) { return argmin(x[0]); }, {ties});
}

TEST(KnownBugs, ViewOfASharded_179502) {
  CheckSharded([](In x) { return view(x[0], {2, 2, 3}); }, {Float({4, 3}, 1)});
  CheckSharded([](In x) { return view(x[0], {3, 4}); }, {Float({4, 3}, 1)});
  CheckSharded([](In x) { return view(x[0], {-1}); }, {Float({5, 3}, 1)});
  CheckSharded([](In x) { return view(x[0], {5, 3}); }, {Float({15}, 1)});
}

TEST(KnownBugs, IndexPut_172350_ShardsNoIndexedDim) {
  const auto put = [](bool accumulate) {
    return [=](In x) { return index_put(x[0], {x[1]}, x[2], accumulate); };
  };
  const Operand rows = Ints({3}, {4, 0, 2});
  CheckSharded(put(false), {Float({5, 2}, 1), rows, Float({3, 2}, 2)});
  CheckSharded(put(true), {Float({5, 2}, 1), Ints({3}, {4, 0, 4}), Float({3, 2}, 2)});
}

// Calls of which the second would do with the plan of the first, and the first again: on ranks that
// keep their plans.
struct PlannedCall {
  OpFn fn;
  std::vector<Operand> operands;
};
void CheckOneAfterTheOther(const std::vector<PlannedCall>& calls) {
  std::vector<std::unique_ptr<const ShardedCheck>> checks;
  for (const PlannedCall& call : calls) {
    checks.push_back(std::make_unique<const ShardedCheck>(call.fn, call.operands,
                                                          ShardedCheck::Options{.most = 60}));
  }
  for (const Dims& shape : {Dims{2}, Dims{3}, Dims{2, 2}}) {
    std::vector<std::string> failures;
    const absl::Status status = RunSpmd(Numel(shape), [&](RankContext& context) -> absl::Status {
      DT_ASSIGN_OR_RETURN(const DeviceMesh mesh, DeviceMesh::Create(shape));
      for (const auto& check : checks) check->RunHere(context, mesh, &failures);
      const int64_t misses = GetDispatchStats().misses;
      for (const auto& check : checks) check->RunHere(context, mesh, &failures);
      EXPECT_EQ(GetDispatchStats().misses, misses) << "the second time all plans are there";
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(absl::StrJoin(failures, "\n"), "") << "on a mesh " << ToString(shape);
  }
}

TEST(KnownBugs, EmbeddingGradient_174727_KnowsItsTable) {  // one cached plan for two tables
  std::vector<PlannedCall> calls;
  for (const int64_t rows : {5, 7, 5}) {
    calls.push_back(
        {[](In x) { return embedding(x[0], x[1]); }, {Ints({3}, {4, 0, 2}), Float({rows, 2}, 1)}});
  }
  CheckOneAfterTheOther(calls);
}

TEST(KnownBugs, StaleSizes_183021) {  // what a plan was made for is part of its key
  std::vector<PlannedCall> calls;
  for (const int64_t n : {6, 5, 6, 7}) {
    calls.push_back({[=](In x) { return reshape(x[0], {n, 2}) * 2; }, {Float({2 * n}, 1)}});
    calls.push_back({[](In x) { return slice(x[0], 0, 1, -1); }, {Float({n, 2}, 1)}});
  }
  CheckOneAfterTheOther(calls);
}

TEST(KnownBugs, AttentionPlans_134050_DependOnTheirArguments) {
  std::vector<PlannedCall> calls;
  for (const bool causal : {false, true, false}) {
    calls.push_back(
        {[=](In x) { return scaled_dot_product_attention(x[0], x[1], x[2], {}, causal); },
         {Float({1, 2, 3, 4}, 1), Float({1, 2, 3, 4}, 2), Float({1, 2, 3, 4}, 3)}});
  }
  CheckOneAfterTheOther(calls);
}

TEST(KnownBugs, Replicas_171916_AreBitwiseEqual) {
  const absl::Status status = RunSpmd(4, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 2}, {"dp", "tp"});
    const DTensor x = randn({64, 3}, {.mesh = mesh, .placements = {Shard(0), Shard(0)}});
    const DTensor total = sum(x * x * 1e7, {0}).Redistribute({Replicate(), Replicate()});
    FromLocalOptions check;
    check.run_check = true;  // compares the bits of all replicas
    FromLocal(OnSelf(total.local()), mesh, {Replicate(), Replicate()}, check);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(KnownBugs, Torchtitan_3204_LossOverAnOrthogonalMeshDim) {
  CheckSharded([](In x) { return mean(x[0] * x[0]); }, {Float({3, 5}, 1)});
  CheckSharded([](In x) { return cross_entropy(x[0], x[1]); },
               {Float({5, 4}, 1), Ints({5}, {0, 3, 1, 2, 2})});
}

TEST(KnownBugs, Autoparallel_462_LinearityIsOfTheCall) {  // a flag that leaked into other calls
  std::vector<PlannedCall> calls;
  for (const double s : {0.0, 3.0, 0.0}) {
    calls.push_back({[=](In x) { return masked_fill(x[0], x[1], s); },
                     {Float({5}, 1), Bools({5}, {1, 0, 1, 0, 0})}});
  }
  CheckOneAfterTheOther(calls);
}

// --- wrong gradients -----------------------------------------------------------------------------

TEST(KnownBugs, LogSoftmax_190746_OverShardedClasses) {
  CheckSharded([](In x) { return log_softmax(x[0], 1); }, {Float({3, 7}, 1)});
  CheckSharded([](In x) { return nll_loss(log_softmax(x[0], 1), x[1]); },
               {Float({3, 7}, 1), Ints({3}, {6, 0, 3})});
}

TEST(KnownBugs, ToLocalAndBackOfAPendingSum_172932) {
  const absl::Status status = RunSpmd(2, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2}, {"tp"});
    DTensor x = full({3}, 2, {DType::kF64, mesh, {Replicate()}});
    x.RequiresGrad();
    const DTensor pending = (x * 1).Redistribute({Partial()});
    const DTensor back = FromLocal(pending.ToLocal() * 3, mesh, {Partial()});
    EXPECT_EQ(back.ToVector<double>(), std::vector<double>(3, 6));
    sum(back).Backward();
    EXPECT_EQ(x.grad().ToVector<double>(), std::vector<double>(3, 3));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(KnownBugs, UnusedOutputs_173123_HaveGradientsOnTheMesh) {
  CheckSharded([](In x) { return max(x[0], 1)[0]; }, {Float({3, 4}, 1)});
  CheckSharded([](In x) { return split(x[0], {2, 3}, 0)[1] * 2; }, {Float({5, 2}, 1)});
  CheckSharded([](In x) { return var_mean(x[0], {0})[1]; }, {Float({5, 2}, 1)});
}

// --- uneven --------------------------------------------------------------------------------------

TEST(KnownBugs, UnevenCorners_103306) {  // fewer elements than ranks, none at all
  for (const int64_t n : {0, 1, 2, 5}) {
    CheckSharded([](In x) { return transpose(x[0], 0, 1) * 2; }, {Float({n, 3}, 1)});
    CheckSharded([](In x) { return sum(x[0], {0}); }, {Float({n, 3}, 1)});
    CheckSharded([](In x) { return cat({x[0], x[0]}, 0); }, {Float({n, 2}, 1)});
  }
}

// A rank's strides are of what it holds, not of the whole, and rows stay rows where others have
// more.
TEST(KnownBugs, LocalStrides_118836_OfUnevenShards) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    for (const int64_t n : {2, 4, 5}) {
      for (const int dim : {0, 1}) {
        const DTensor x = zeros({n, 7}, {DType::kF64, mesh, {Shard(dim)}});
        const Tensor local = x.local();
        EXPECT_EQ(local.strides(), ContiguousStrides(local.shape())) << n << " S(" << dim << ")";
        const DTensor turned = transpose(x, 0, 1);
        EXPECT_EQ(turned.local().strides(), local.Permute({1, 0}).strides()) << n;
        EXPECT_EQ(MemoryStrides(turned), IntSpan({1, 7})) << "of the whole, on every rank";
        const DTensor rows = contiguous(turned);
        EXPECT_TRUE(rows.local().is_contiguous()) << n << " S(" << dim << ")";
        EXPECT_TRUE(MemoryStrides(rows).empty() || MemoryStrides(rows) == IntSpan({n, 1})) << n;
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(KnownBugs, SizesOfOnesOwn_144109_110762_169320_129627) {  // what a rank holds is what it says
  const absl::Status status = RunSpmd(3, [](RankContext& context) -> absl::Status {
    const DeviceMesh mesh({3}, {"tp"});
    const int64_t lengths[] = {4, 0, 3};
    const int64_t mine = lengths[context.rank()], start = context.rank() == 0 ? 0 : 4;
    const DTensor local = arange(start, start + mine, 1, {DType::kF64});
    FromLocalOptions whole;
    whole.shape = {7};
    const DTensor x = FromLocal(local, mesh, {FlatShard({4, 0, 3})}, whole);
    EXPECT_EQ(x.FullTensor().ToVector<double>(), (std::vector<double>{0, 1, 2, 3, 4, 5, 6}));
    EXPECT_EQ((x * 2).ToVector<double>(), (std::vector<double>{0, 2, 4, 6, 8, 10, 12}));
    // A shard is as torch.chunk cuts it; what is not is refused, and says what it must be.
    const std::string text = MessageOf([&] { FromLocal(local, mesh, {Shard(0)}, whole); });
    EXPECT_THAT(text, HasSubstr("is not the ["));
    return absl::OkStatus();
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("is not the ["));  // whoever was first
}

// LocalResults_172812: tests/parallel/local_map_test.cc.

TEST(KnownBugs, NestedCuts_161368_168134) {  // one dim over two mesh dims, and in segments
  const absl::Status status = RunSpmd(6, [](RankContext&) -> absl::Status {
    const DeviceMesh mesh({2, 3}, {"dp", "tp"});
    for (const int64_t n : {1, 4, 7, 13}) {
      std::vector<double> want;
      for (int64_t i = 0; i < n; ++i) want.push_back(static_cast<double>(i));
      for (const Placements& p : {Placements{Shard(0), Shard(0)}, Placements{Shard(0, 2), Shard(0)},
                                  Placements{SegmentedShard(0, {n / 2, n - n / 2}), Shard(0)}}) {
        EXPECT_EQ(arange(0, n, 1, {DType::kF64, mesh, p}).ToVector<double>(), want) << ToString(p);
        EXPECT_EQ((arange(0, n, 1, {DType::kF64, mesh, p}) + 0).FullTensor().ToVector<double>(),
                  want)
            << ToString(p);
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// --- veScale legacy: rules that pass placements straight through ---------------------------------

TEST(KnownBugs, Vescale_NormIsNoPendingSum) {
  for (const double p : {1.0, 2.0, 3.0}) {
    CheckSharded([=](In x) { return linalg_vector_norm(x[0], p, {0}); }, {Float({5, 2}, 1)});
  }
}

TEST(KnownBugs, Vescale_TopkOfAShardedOrPendingDim) {
  CheckSharded([](In x) { return topk(x[0], 2, 0)[0]; }, {Float({5, 3}, 1)});
  CheckSharded([](In x) { return topk(x[0], 2, 1, /*largest=*/false)[1]; }, {Float({3, 5}, 1)});
}

TEST(KnownBugs, Vescale_GatherLooksAtItsIndices) {
  CheckSharded([](In x) { return gather(x[0], 0, x[1]); },
               {Float({5, 2}, 1), Ints({3, 2}, {4, 0, 2, 2, 0, 4})});
}

TEST(KnownBugs, Vescale_PaddedDimsAreNotWhatTheyWere) {
  CheckSharded([](In x) { return constant_pad_nd(x[0], {1, 2, 2, 1}, 7); }, {Float({5, 3}, 1)});
}

TEST(KnownBugs, Vescale_UniqueOnAnyMesh) {
  const Operand x = Ints({7}, {3, 1, 3, 9, 1, 1, 0});
  CheckSharded([](In in) { return unique(in[0])[0]; }, {x});
  CheckSharded([](In in) { return unique(in[0], true, true)[1]; }, {x});
}

}  // namespace
}  // namespace dtensor::known_bugs_test
