// Views and what they view, written to: the mesh does what one rank does, or says that it cannot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

#include "dtensor/mesh/launch.h"
#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"
#include "tests/common/message.h"

namespace dtensor::testing::view_writes_test {
namespace {

using ::testing::HasSubstr;
using Program = std::function<std::vector<double>(const DTensor& x)>;

std::vector<double> Iota(int64_t n) {
  std::vector<double> v;
  for (int64_t i = 0; i < n; ++i) v.push_back(static_cast<double>(i + 1));
  return v;
}

// Every rank of the mesh sees what one rank does, under every placement.
void ExpectAsOneRank(const Shape& shape, const Program& program) {
  const std::vector<double> values = Iota(Numel(shape));
  const std::vector<double> want = program(FromVector(values, shape, {.dtype = DType::kF64}));
  for (const int64_t ranks : {2, 3, 4}) {
    for (int dim = -1; dim < static_cast<int>(shape.size()); ++dim) {
      const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) {
        const DeviceMesh mesh({ranks});
        const Placement p = dim < 0 ? Replicate() : Shard(dim);
        const DTensor x = FromVector(values, shape, {DType::kF64, mesh, {p}});
        EXPECT_EQ(program(x), want)
            << p.ToString() << " on rank " << rank.rank() << " of " << ranks;
        return absl::OkStatus();
      });
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST(ViewWrites, AReshapeThatIsACopyIsOneOnEveryRank) {
  // Of [2, 3] sharded over columns a rank may hold one column, whose transpose could be viewed.
  ExpectAsOneRank({2, 3}, [](const DTensor& x) {
    add_(reshape(transpose(x, 0, 1), {6}), 10);
    return x.ToVector<double>();
  });
  ExpectAsOneRank({3, 2}, [](const DTensor& x) {
    const DTensor y = reshape(transpose(x, 0, 1), {6});
    mul_(x, 2);
    return y.ToVector<double>();
  });
  ExpectAsOneRank({4, 2, 3}, [](const DTensor& x) {
    add_(flatten(transpose(x, 0, 2), 0, 1), 10);
    return x.ToVector<double>();
  });
}

TEST(ViewWrites, ContiguousCopiesOnEveryRankOrOnNone) {
  ExpectAsOneRank({2, 3}, [](const DTensor& x) {
    const DTensor y = contiguous(transpose(x, 0, 1));
    mul_(x, 2);
    return y.ToVector<double>();
  });
  ExpectAsOneRank({2, 3}, [](const DTensor& x) {
    add_(contiguous(x), 10);  // contiguous already: x itself
    return x.ToVector<double>();
  });
  ExpectAsOneRank({3, 2}, [](const DTensor& x) {
    add_(contiguous(transpose(x, 0, 1)), 10);
    return x.ToVector<double>();
  });
}

TEST(ViewWrites, AReshapeThatIsAViewWritesThrough) {
  ExpectAsOneRank({4, 24}, [](const DTensor& x) {
    add_(reshape(x, {4, 12, 2}), 10);
    return x.ToVector<double>();
  });
}

TEST(ViewWrites, WithAGradientEveryRankSaysTheSame) {
  const absl::Status status = RunSpmd(2, [](RankContext& rank) {
    const DeviceMesh mesh({2});
    const DTensor x = FromVector(Iota(6), {2, 3}, {DType::kF64, mesh, {Shard(1)}});
    DTensor w = ones({6}, {.dtype = DType::kF64, .mesh = mesh});
    w.RequiresGrad();
    const DTensor y = reshape(transpose(x, 0, 1), {6});
    add_(y, w);  // a copy on one rank, so here too: nothing refuses
    EXPECT_EQ(x.ToVector<double>(), Iota(6)) << rank.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Where x has to be moved before it is viewed, the result is a copy that refuses; else a view.
// `moves`: under some of these placements it has to be.
void ExpectViewOrRefusal(const std::function<DTensor(const DTensor&)>& view, bool moves = true) {
  const absl::Status status = RunSpmd(3, [&](RankContext&) {
    const DeviceMesh mesh({3});
    const DTensor x = FromVector(Iota(8), {2, 4}, {DType::kF64, mesh, {Shard(0)}});
    const DTensor columns = x.Redistribute({Shard(1)});
    int refused = 0;
    for (const DTensor& base : {x, columns}) {
      const DTensor y = view(base);
      const std::vector<double> before = y.ToVector<double>();
      const DTensor again = y + 0.0;  // readable as long as the base is what it was
      EXPECT_EQ(again.ToVector<double>(), before);
      std::vector<double> twice = before;
      for (double& v : twice) v *= 2;
      const bool moved = MessageOf([&] { mul_(y, 2); }) != "";
      if (!moved) {
        EXPECT_EQ(view(base).ToVector<double>(), twice);
        continue;
      }
      ++refused;
      EXPECT_THAT(MessageOf([&] { add_(y, 1.0); }), HasSubstr("this was to be a view"));
      mul_(base, 2);
      EXPECT_THAT(MessageOf([&] { relu(y); }), HasSubstr("changed in place since"));
      EXPECT_THAT(MessageOf([&] { y.ToVector<double>(); }), HasSubstr("changed in place since"));
      EXPECT_THAT(MessageOf([&] { y.Detach(); }), HasSubstr("changed in place since"));
      EXPECT_THAT(MessageOf([&] { y.local(); }), HasSubstr("changed in place since"));
      EXPECT_THAT(MessageOf([&] { unsqueeze(y, 0); }), HasSubstr("[unsqueeze]"));
      EXPECT_EQ(view(base).ToVector<double>(), twice);
    }
    if (moves) {
      EXPECT_GT(refused, 0);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ViewWrites, ACopyThatWasToBeAViewIsRefusedOnceItsBaseChanges) {
  ExpectViewOrRefusal([](const DTensor& x) { return select(x, 0, 0); });
  ExpectViewOrRefusal([](const DTensor& x) { return slice(x, 0, 1, 2); }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return slice(x, 1, 1, 3); }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return reshape(x, {8}); }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return reshape(x, {4, 2}); }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return flatten(x, 0, 1); }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return split(x, 1, 0)[1]; }, false);
  ExpectViewOrRefusal([](const DTensor& x) { return unsqueeze(select(x, 0, 0).Detach(), 1); });
}

// A rank has its part of a slice already, as segments, so a slice of shards is a view.
TEST(ViewWrites, SlicesOfShardsWriteToTheirBase) {
  const absl::Status status = RunSpmd(3, [](RankContext&) {
    for (const int dim : {0, 1}) {
      const DTensor x = FromVector(Iota(8), {2, 4}, {DType::kF64, DeviceMesh({3}), {Shard(dim)}});
      add_(slice(x, 1, 1, 3), 10.0);
      EXPECT_EQ(x.ToVector<double>(), (std::vector<double>{1, 12, 13, 4, 5, 16, 17, 8}));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(ViewWrites, AViewOfSuchACopyKnows) {
  const absl::Status status = RunSpmd(2, [](RankContext&) {
    const DeviceMesh mesh({2});
    const DTensor x = FromVector(Iota(8), {2, 4}, {DType::kF64, mesh, {Shard(0)}});
    const DTensor y = unsqueeze(select(x, 0, 0), 0), z = y.Detach(), part = y.ToLocal();
    mul_(x, 2);
    for (const DTensor& t : {y, z, part}) {
      EXPECT_THAT(MessageOf([&] { t + 1.0; }), HasSubstr("changed in place since"));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::testing::view_writes_test
