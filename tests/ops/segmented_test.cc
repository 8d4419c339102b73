// Placements other than blocks through ops: segments of a fused dim, and flat pieces.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/text.h"
#include "tests/ops/gradcheck.h"

namespace dtensor::testing::segmented_test {
namespace {

using ::testing::HasSubstr;
using ::testing::UnorderedElementsAreArray;

std::vector<double> Whole(int64_t n, int64_t seed) {  // small integers: sums of products are exact
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>((i * i + 3 * i + seed) % 5 - 2));
  return v;
}

// Self attention whose q, k and v are rows of one weight.
struct Fused {
  int64_t heads, groups, head_size;
  bool softmax;  // else all that is done to heads is a product and a sum: integers stay exact

  static constexpr int64_t kBatch = 2, kSeq = 3;
  int64_t q() const { return heads * head_size; }
  int64_t kv() const { return groups * head_size; }
  Placement Cut(int dim) const {
    const int64_t d = head_size;
    return SegmentedShard(dim, {{q(), heads / groups * d}, {kv(), d}, {kv(), d}});
  }
  int64_t inner_unit() const { return heads / groups * head_size; }

  // [batch, seq, n * head_size] -> [batch, n, seq, head_size]
  DTensor Heads(const DTensor& x) const {
    return transpose(unflatten(x, -1, {-1, head_size}), 1, 2);
  }
  DTensor Mix(const DTensor& q, const DTensor& k, const DTensor& v) const {
    if (softmax) {
      return scaled_dot_product_attention(Heads(q), Heads(k), Heads(v), {}, true, {}, true);
    }
    const Shape grouped = {kBatch, kSeq, groups, heads / groups, head_size};
    const Shape one = {kBatch, kSeq, groups, 1, head_size};
    const DTensor o = add(mul(reshape(q, grouped), reshape(k, one)), reshape(v, one));
    return transpose(reshape(o, {kBatch, kSeq, heads, head_size}), 1, 2);
  }
  // x, w [q + 2 kv, c], b, wo [c, q] -> y, the values before it, and gradients of x, w, b, wo.
  // On a mesh with a dp dim the batch is cut over it.
  std::vector<std::vector<double>> Run(const DeviceMesh& mesh) const {
    const int64_t c = 4, rows = q() + 2 * kv();
    const bool local = mesh.is_self();
    const int tp = mesh.ndim() - 1;
    const auto make = [&](Shape shape, int64_t seed, const Placement& p, bool batch = false) {
      const int64_t n = Numel(shape);
      const std::vector<double> v = softmax ? Noise(n, seed) : Whole(n, seed);
      const Tensor full = ValueOrThrow(Tensor::FromVector(v, shape, DType::kF64));
      Placements placed(static_cast<size_t>(mesh.ndim()), batch ? Shard(0) : Replicate());
      if (!local) placed[tp] = p;
      DTensor t = local ? OnSelf(full) : DistributeTensor(full, mesh, placed);
      t.RequiresGrad();
      return t;
    };
    const DTensor x = make({kBatch, kSeq, c}, 1, Replicate(), true);
    const DTensor w = make({rows, c}, 2, Cut(0)), b = make({rows}, 3, Cut(0));
    const DTensor wo = make({c, q()}, 4, Shard(1, inner_unit()));
    DTensor y;
    {
      const StrictRedistribute strict;
      const CommTrace trace;
      const Values qkv = split(linear(x, w, b), {q(), kv(), kv()}, -1);
      const DTensor o = Mix(qkv[0], qkv[1], qkv[2]);
      y = linear(flatten(transpose(o, 1, 2), 2, 3), wo);
      EXPECT_EQ(trace.TotalCount(), 0) << trace.ToString();
    }
    if (!local) {
      EXPECT_TRUE(y.placements()[tp].is_partial() || mesh.size(tp) == 1) << y.spec().ToString();
    }
    const DTensor loss = sum(mul(y, make(Shape(y.shape()), 5, Replicate(), true).Detach()));
    {
      // Of the backward the input's gradient, which every rank of tp has a term of, is summed over
      // tp; and those of the three parameters over the batch, together. Nothing else moves.
      const CommTrace trace;
      loss.Backward();
      std::vector<std::string> moved, sums;
      const auto bytes = [](std::initializer_list<const DTensor*> all) {
        int64_t total = 0;
        for (const DTensor* t : all) total += t->local().nbytes();
        return total;
      };
      for (const CommEvent& e : trace.events()) {
        EXPECT_FALSE(e.implicit) << trace.ToString(CommBy::kOp);
        moved.push_back(absl::StrCat(View(Name(e.kind)), " over ", e.mesh_dims, " for ", e.op, ": ",
                                     e.payload_bytes));
      }
      for (int d = 0; d < mesh.ndim(); ++d) {
        if (mesh.size(d) == 1) continue;
        sums.push_back(absl::StrCat("all_reduce over ", mesh.names()[d], " for gradient: ",
                                    d == tp ? bytes({&x}) : bytes({&w, &b, &wo})));
      }
      EXPECT_THAT(moved, UnorderedElementsAreArray(sums)) << trace.ToString(CommBy::kOp);
    }
    std::vector<std::vector<double>> all = {y.ToVector<double>()};
    for (const DTensor& t : {x, w, b, wo}) {
      EXPECT_EQ(t.grad().placements(), t.placements()) << t.spec().ToString();
      all.push_back(t.grad().ToVector<double>());
    }
    return all;
  }
};

void ExpectOneRanks(const Fused& model, double tolerance) {
  const std::vector<std::vector<double>> want = model.Run(DeviceMesh::Self());
  for (int64_t dp : {1, 2}) {
    for (int64_t tp : {1, 2, 3, 4}) {
      SCOPED_TRACE(absl::StrCat(model.heads, ":", model.groups, " heads on ", dp, " x ", tp));
      const absl::Status status = RunSpmd(dp * tp, [&](RankContext&) {
        const auto got =
            model.Run(dp == 1 ? DeviceMesh({tp}, {"tp"}) : DeviceMesh({dp, tp}, {"dp", "tp"}));
        for (size_t i = 0; i < want.size(); ++i) {
          EXPECT_EQ(got[i].size(), want[i].size());
          for (size_t k = 0; k < std::min(got[i].size(), want[i].size()); ++k) {
            EXPECT_NEAR(got[i][k], want[i][k], tolerance) << "value " << i << " element " << k;
          }
        }
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(Segmented, FusedAttentionMovesNothing) {
  for (const auto& [heads, groups] : {std::pair{12, 12}, {5, 5}, {8, 2}}) {
    ExpectOneRanks({heads, groups, 4, true}, 1e-12);
  }
}

TEST(Segmented, FusedAttentionOfIntegersIsExact) {
  for (const auto& [heads, groups] : {std::pair{12, 12}, {5, 5}, {8, 2}}) {
    ExpectOneRanks({heads, groups, 4, false}, 0);
  }
}

// What functions of tensors give where nothing may move: "[Segmented(0, [4, 2])]".
class Placed {
 public:
  explicit Placed(Dims mesh) : mesh_(*DeviceMesh::Create(mesh)) {}
  DTensor operator()(Shape shape, Placements placements) const {
    const int64_t n = Numel(shape);
    return DistributeTensor(ValueOrThrow(Tensor::FromVector(Whole(n, 1), shape, DType::kF64)),
                            mesh_, placements);
  }

 private:
  DeviceMesh mesh_;
};

void OnRanks(Dims mesh, const std::function<void(const Placed&)>& body) {
  const absl::Status status = RunSpmd(Numel(mesh), [&](RankContext&) {
    const StrictRedistribute strict;
    body(Placed(mesh));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}
std::string Of(const DTensor& t) { return ToString(t.placements()); }

TEST(Segmented, JoinedAndCutApart) {
  OnRanks({2}, [](const Placed& on) {
    const DTensor joined = cat({on({3, 6}, {Shard(1)}), on({3, 3}, {Shard(1, 2)})}, 1);
    EXPECT_EQ(Of(joined), "[Segmented(1, [6, 3])]");  // a unit of 2 cuts 3 as 1 does
    EXPECT_EQ(Of(slice(joined, 1, 6, 9)), "[S(1)]");
    EXPECT_EQ(Of(slice(joined, 1, 2, 4)), "[S(1)]");
    EXPECT_EQ(Of(slice(joined, 1, 0, 8)), "[Segmented(1, [6, 2:2])]");
    EXPECT_EQ(Of(mul(joined, joined)), "[Segmented(1, [6, 3])]");
    EXPECT_EQ(Of(softmax(transpose(joined, 0, 1), 1)), "[Segmented(0, [6, 3])]");
    EXPECT_EQ(Of(sum(joined, {1})), "[P(sum)]");
    const DTensor whole = cat({on({3, 6}, {Replicate()}), on({3, 3}, {Replicate()})}, 1);
    for (const auto& [start, end] : {std::pair{6, 9}, {2, 4}, {0, 8}, {0, 9}, {3, 3}}) {
      EXPECT_EQ(slice(joined, 1, start, end).ToVector<double>(),
                slice(whole, 1, start, end).ToVector<double>());
    }
    // What is left begins on the second rank: no placement says so.
    EXPECT_THAT(MessageOf([&] { slice(joined, 1, 3, 6); }), HasSubstr("[slice]"));
  });
}

TEST(Segmented, DimsThatAreMergedAndSplit) {
  OnRanks({2}, [](const Placed& on) {
    const DTensor x = on({3, 4, 5}, {Shard(1)});
    const DTensor merged = reshape(x, {12, 5});
    EXPECT_EQ(Of(merged), "[Segmented(0, [4, 4, 4])]");
    EXPECT_EQ(Of(reshape(merged, {3, 4, 5})), "[S(1)]");
    EXPECT_EQ(Of(reshape(merged, {60})), "[Segmented(0, [20, 20, 20])]");
    EXPECT_EQ(merged.ToVector<double>(), x.ToVector<double>());
    // Nothing is cut between the segments: 2 x 6 knows no 3 x 4.
    EXPECT_THAT(MessageOf([&] { reshape(merged, {2, 6, 5}); }), HasSubstr("[reshape]"));
  });
  OnRanks({2, 2}, [](const Placed& on) {
    const DTensor x = on({4, 6, 2}, {Shard(0), Shard(1)});
    const DTensor merged = reshape(x, {24, 2});
    EXPECT_EQ(Of(merged), "[S(0), Segmented(0, [6, 6])]");
    EXPECT_EQ(Of(reshape(merged, {4, 6, 2})), "[S(0), S(1)]");
    EXPECT_EQ(merged.ToVector<double>(), x.ToVector<double>());
  });
}

// Where an earlier mesh dim leaves some ranks nothing there are no segments either.
TEST(Segmented, NoneOfDimsThatAreMissingOnSomeRanks) {
  OnRanks({4, 2}, [](const Placed& on) {
    for (const Placements& p : {Placements{Shard(1), Shard(2)}, {Shard(0), Shard(2)}}) {
      const DTensor x = on({2, 6, 3}, p);
      EXPECT_EQ(
          contiguous(reshape(x.Redistribute({Replicate(), Replicate()}), {36})).ToVector<double>(),
          x.ToVector<double>());
      const std::string refused = MessageOf([&] { reshape(x, {36}); });
      EXPECT_THAT(refused, HasSubstr("strict mode: needs exchange over"));
    }
  });
}

// Embedding rows are found by their offset, which segments do not have.
TEST(Segmented, OpsWithOffsetsTakeBlocks) {
  OnRanks({2}, [](const Placed& on) {
    const DTensor ids = FromVector(std::vector<int64_t>{0, 3, 5}, {3},
                                   {DType::kI64, on({1}, {Replicate()}).mesh(), {}});
    EXPECT_EQ(Of(embedding(ids, on({6, 2}, {Shard(0)}))), "[P(sum)]");
    const DTensor w = on({6, 2}, {SegmentedShard(0, {4, 2})});
    EXPECT_THAT(MessageOf([&] { embedding(ids, w); }), HasSubstr("input w"));
    EXPECT_EQ(Of(embedding(mul(ids, 0), on({2, 6}, {SegmentedShard(1, {4, 2})}))),
              "[Segmented(1, [4, 2])]");
  });
}

TEST(Flat, PassesWhatKeepsTheOrderOfElements) {
  OnRanks({2}, [](const Placed& on) {
    const Placement flat = FlatShard({5, 7});
    const DTensor x = on({3, 4}, {flat}), whole = on({3, 4}, {Replicate()});
    EXPECT_EQ(Of(mul(x, x) + 1), "[Flat([5, 7])]");
    EXPECT_EQ(Of(mul(x, on({}, {Replicate()}))), "[Flat([5, 7])]");
    EXPECT_EQ(Of(add(x, whole)), "[Flat([5, 7])]");  // the copy is cut
    EXPECT_EQ(Of(reshape(x, {3, 2, 2})), "[Flat([5, 7])]");
    EXPECT_EQ(Of(unsqueeze(x, 1)), "[Flat([5, 7])]");
    EXPECT_EQ(Of(squeeze(unsqueeze(x, 1))), "[Flat([5, 7])]");
    EXPECT_EQ(Of(to(clone(x), DType::kF32)), "[Flat([5, 7])]");
    EXPECT_EQ(Of(sum(x)), "[P(sum)]");
    EXPECT_EQ(Of(sum(x, {}, true)), "[P(sum)]");
    EXPECT_EQ(Of(amax(x)), "[P(max)]");
    EXPECT_EQ(sum(mul(x, x)).ToVector<double>(), sum(mul(whole, whole)).ToVector<double>());
    EXPECT_EQ(add(x, whole).ToVector<double>(), add(whole, whole).ToVector<double>());
    add_(x, whole);
    EXPECT_EQ(x.ToVector<double>(), add(whole, whole).ToVector<double>());
    EXPECT_THAT(MessageOf([&] { transpose(x, 0, 1); }), HasSubstr("[transpose]"));
    EXPECT_THAT(MessageOf([&] { sum(x, {1}); }), HasSubstr("[sum]"));
    EXPECT_THAT(MessageOf([&] { mul(x, on({4}, {Replicate()})); }), HasSubstr("[mul]"));
    EXPECT_THAT(MessageOf([&] { mul(x, on({1, 1}, {Replicate()})); }), HasSubstr("[mul]"));
  });
  OnRanks({2, 2}, [](const Placed& on) {
    const DTensor x = on({4, 4}, {Shard(0), FlatShard({3, 5})});
    EXPECT_EQ(Of(mul(x, x)), "[S(0), Flat([3, 5])]");
    EXPECT_EQ(Of(reshape(x, {2, 2, 4})), "[S(0), Flat([3, 5])]");
    EXPECT_EQ(Of(sum(x)), "[P(sum), P(sum)]");
    EXPECT_EQ(mul(x, x).ToVector<double>(),
              mul(on({4, 4}, {Shard(0), Replicate()}), on({4, 4}, {Shard(0), Replicate()}))
                  .ToVector<double>());
    // The pieces are of other local tensors.
    EXPECT_THAT(MessageOf([&] { mul(x, on({4, 4}, {Replicate(), FlatShard({3, 13})})); }),
                HasSubstr("[mul]"));
  });
}

TEST(Flat, GradientsAndNormsOfPieces) {
  OnRanks({2}, [](const Placed& on) {
    DTensor x = on({3, 4}, {FlatShard({0, 12})});
    x.RequiresGrad();
    const DTensor norm = sqrt(sum(mul(x, x)).Redistribute({Replicate()}));
    norm.Backward();
    EXPECT_EQ(Of(x.grad()), "[Flat([0, 12])]");
    const double n = norm.ToVector<double>()[0];
    std::vector<double> want = x.ToVector<double>();
    for (double& v : want) v /= n;
    EXPECT_EQ(x.grad().ToVector<double>(), want);
  });
}

TEST(Flat, AValueWithoutDimsIsOnOneRank) {
  const absl::Status status = RunSpmd(2, [](RankContext& context) {
    const DeviceMesh mesh({2});
    const int64_t rank = context.rank();
    const Tensor mine = ValueOrThrow(
        Tensor::FromVector(std::vector<double>(rank == 1 ? 1 : 0, 2.5), {rank}, DType::kF64));
    const DTensor x = FromLocal(OnSelf(mine), mesh, {FlatShard({0, 1})});
    EXPECT_EQ(x.ndim(), 0);
    EXPECT_EQ(mul(x, x).ToVector<double>(), (std::vector<double>{6.25}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Two ways to write a cut that gives each rank the same: nothing moves, and strict mode says
// nothing.
TEST(Segmented, WhatMovesNothingIsNotRefused) {
  OnRanks({2}, [](const Placed& on) {
    const DTensor x = on({2, 8}, {SegmentedShard(1, {{4, 4}, {4, 4}})});
    const DTensor y = on({2, 8}, {Shard(1, 8)});
    DTensor sum;
    {
      const CommTrace trace;
      sum = x + y;
      EXPECT_TRUE(trace.Rows().empty());
    }
    const std::vector<double> got = sum.ToVector<double>(), one = x.ToVector<double>();
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], 2 * one[i]);
    EXPECT_THAT(testing::MessageOf([&] { x + on({2, 8}, {Shard(0)}); }),
                ::testing::HasSubstr("strict mode"));
  });
}

}  // namespace
}  // namespace dtensor::testing::segmented_test
