// Views and what they view, written to: the mesh does what one rank does, or says that it cannot.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>

#include "absl/strings/str_cat.h"
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

struct Layout {
  Dims mesh;
  Placements placements;
};

// The body on every rank of the mesh of each layout.
void OnEach(const std::vector<Layout>& layouts,
            const std::function<void(const DeviceMesh&, const Placements&)>& body) {
  for (const Layout& layout : layouts) {
    const absl::Status status = RunSpmd(Numel(layout.mesh), [&](RankContext& rank) {
      const DeviceMesh mesh = ValueOrThrow(DeviceMesh::Create(layout.mesh));
      SCOPED_TRACE(absl::StrCat(ToString(layout.placements), " on ", ToString(layout.mesh),
                                ", rank ", rank.rank()));
      body(mesh, layout.placements);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << ToString(layout.placements) << ": " << status;
  }
}

// Every placement without pending sums, of a tensor of so many dims, on meshes of one and two dims.
std::vector<Layout> AllLayouts(int ndim) {
  std::vector<Placement> one = {Replicate()};
  for (int dim = 0; dim < ndim; ++dim) one.push_back(Shard(dim));
  std::vector<Layout> all;
  for (const Placement& p : one) {
    for (const int64_t ranks : {2, 3, 4}) all.push_back({{ranks}, {p}});
    for (const Placement& q : one) all.push_back({{2, 2}, {p, q}});
  }
  return all;
}

// Every rank of the mesh sees what one rank does, under every placement.
void ExpectAsOneRank(const Shape& shape, const Program& program) {
  const std::vector<double> values = Iota(Numel(shape));
  const std::vector<double> want = program(FromVector(values, shape, {.dtype = DType::kF64}));
  OnEach(AllLayouts(static_cast<int>(shape.size())),
         [&](const DeviceMesh& mesh, const Placements& placements) {
           EXPECT_EQ(program(FromVector(values, shape, {DType::kF64, mesh, placements})), want);
         });
}

TEST(ViewWrites, WhatSharesMemoryIsRefusedAlikeOnRanksThatHaveNothingOfIt) {
  const auto refused = [](const DTensor& x) {
    const DTensor twice = expand(x, {2, 4, 4});
    for (const DTensor& y : {twice, flatten(twice, 1)}) {
      EXPECT_THAT(MessageOf([&] { add_(y, 1); }), HasSubstr("an expanded tensor"));
      EXPECT_THAT(MessageOf([&] { bernoulli_(y, 0.5); }), HasSubstr("an expanded tensor"));
    }
  };
  refused(FromVector(Iota(16), {4, 4}, {.dtype = DType::kF64}));
  OnEach(AllLayouts(2), [&](const DeviceMesh& mesh, const Placements& placements) {
    refused(FromVector(Iota(16), {4, 4}, {DType::kF64, mesh, placements}));
  });
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
  OnEach(AllLayouts(2), [](const DeviceMesh& mesh, const Placements& placements) {
    const DTensor x = FromVector(Iota(6), {2, 3}, {DType::kF64, mesh, placements});
    DTensor w = ones({6}, {.dtype = DType::kF64, .mesh = mesh});
    w.RequiresGrad();
    const DTensor y = reshape(transpose(x, 0, 1), {6});
    add_(y, w);  // a copy on one rank, so here too: nothing refuses
    EXPECT_EQ(x.ToVector<double>(), Iota(6));
  });
}

// Where x has to be moved before it is viewed, the result is a copy that refuses; else a view.
// `moves`: under some of these placements it has to be.
void ExpectViewOrRefusal(const std::function<DTensor(const DTensor&)>& view, bool moves = true) {
  int64_t refused_by_all = 0;
  for (const Layout& layout : AllLayouts(2)) {
    std::atomic<int64_t> refused{0};  // ranks
    OnEach({layout}, [&](const DeviceMesh& mesh, const Placements& placements) {
      const DTensor base = FromVector(Iota(8), {2, 4}, {DType::kF64, mesh, placements});
      const DTensor y = view(base);
      const std::vector<double> before = y.ToVector<double>();
      const DTensor again = y + 0.0;  // readable as long as the base is what it was
      EXPECT_EQ(again.ToVector<double>(), before);
      std::vector<double> twice = before;
      for (double& v : twice) v *= 2;
      const bool moved = MessageOf([&] { mul_(y, 2); }) != "";
      if (!moved) {
        EXPECT_EQ(view(base).ToVector<double>(), twice);
        return;
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
    });
    const int64_t ranks = Numel(layout.mesh);
    EXPECT_TRUE(refused == 0 || refused == ranks) << refused << " of " << ranks << " ranks refuse";
    refused_by_all += refused == ranks;
  }
  if (moves) {
    EXPECT_GT(refused_by_all, 0);
  }
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
  // Four columns on as many ranks are left out: what is sliced begins on the second rank, which no
  // placement says.
  const std::vector<Layout> layouts = {{{3}, {Shard(0)}},
                                       {{3}, {Shard(1)}},
                                       {{2, 2}, {Shard(0), Replicate()}},
                                       {{2, 2}, {Replicate(), Shard(1)}},
                                       {{2, 2}, {Shard(0), Shard(1)}},
                                       {{2, 2}, {Shard(1), Shard(0)}},
                                       {{2, 2}, {Shard(0), Shard(0)}}};
  OnEach(layouts, [](const DeviceMesh& mesh, const Placements& placements) {
    const DTensor x = FromVector(Iota(8), {2, 4}, {DType::kF64, mesh, placements});
    add_(slice(x, 1, 1, 3), 10.0);
    EXPECT_EQ(x.ToVector<double>(), (std::vector<double>{1, 12, 13, 4, 5, 16, 17, 8}));
  });
}

TEST(ViewWrites, AViewOfSuchACopyKnows) {
  const std::vector<Layout> layouts = {{{2}, {Shard(0)}},
                                       {{2, 2}, {Shard(0), Replicate()}},
                                       {{2, 2}, {Shard(1), Shard(0)}},
                                       {{2, 2}, {Shard(0), Shard(0)}}};
  OnEach(layouts, [](const DeviceMesh& mesh, const Placements& placements) {
    const DTensor x = FromVector(Iota(8), {2, 4}, {DType::kF64, mesh, placements});
    const DTensor y = unsqueeze(select(x, 0, 0), 0), z = y.Detach(), part = y.ToLocal();
    mul_(x, 2);
    for (const DTensor& t : {y, z, part}) {
      EXPECT_THAT(MessageOf([&] { t + 1.0; }), HasSubstr("changed in place since"));
    }
  });
}

// A view that was made before its base got a history would change it behind that history.
TEST(ViewWrites, AViewOlderThanTheHistoryOfItsBaseIsRefused) {
  const auto stale = HasSubstr("make the view again");
  OnEach({{{1}, {Replicate()}},
          {{2}, {Shard(0)}},
          {{2}, {Replicate()}},
          {{2, 2}, {Shard(1), Shard(0)}}},
         [&](const DeviceMesh& mesh, const Placements& placements) {
           const TensorOptions options = {DType::kF64, mesh, placements};
           DTensor w = ones({3, 4}, options);
           w.RequiresGrad();
           const DTensor base = zeros({3, 4}, options), row = base[0], part = base.ToLocal();
           const DTensor apart = base.Detach();
           add_(base, w);
           EXPECT_THAT(MessageOf([&] { mul_(row, 3.0); }), stale);
           EXPECT_THAT(MessageOf([&] { zero_(row); }), stale);
           EXPECT_THAT(MessageOf([&] { normal_(row); }), stale);
           EXPECT_THAT(MessageOf([&] { bernoulli_(row, ones_like(row)); }), stale);
           EXPECT_THAT(MessageOf([&] { fill_(part, 2.0); }), stale);
           EXPECT_THAT(MessageOf([&] { row* row; }), stale);
           mul_(apart, 2.0);  // which says that no history is to know
           sum(base).Backward();
           EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(12, 1.0));
         });
}

// Under NoGrad a view has no history that a write to it could join, and its base has one.
TEST(ViewWrites, AViewMadeUnderNoGradIsWrittenUnderNoGrad) {
  const auto refused = HasSubstr("a view made under NoGrad of a tensor that requires grad");
  OnEach({{{1}, {Replicate()}},
          {{2}, {Shard(0)}},
          {{2}, {Replicate()}},
          {{2, 2}, {Shard(0), Replicate()}}},
         [&](const DeviceMesh& mesh, const Placements& placements) {
           const DTensor w = ones({3, 4}, {DType::kF64, mesh, placements}).RequiresGrad();
           const DTensor x = w * 2.0;
           DTensor column, wide, part, again, apart;
           {
             const NoGrad no_grad;
             column = select(x, 1, 0);
             part = x.ToLocal();
             again = FromLocal(part, mesh, placements, {.shape = {3, 4}});
             apart = select(x.Detach(), 1, 0);
           }
           wide = unsqueeze(column, 0);  // while recording, of what has no history
           EXPECT_THAT(MessageOf([&] { mul_(column, 3.0); }), refused);
           EXPECT_THAT(MessageOf([&] { zero_(wide); }), refused);
           EXPECT_THAT(MessageOf([&] { fill_(part, 2.0); }), refused);
           EXPECT_THAT(MessageOf([&] { normal_(again); }), refused);
           mul_(apart, 3.0);  // which says that no history is to know
           {
             const NoGrad no_grad;
             mul_(column, 3.0);
           }
           EXPECT_EQ(select(x, 1, 0).ToVector<double>(), std::vector<double>(3, 18.0));
           EXPECT_EQ(select(x, 1, 2).ToVector<double>(), std::vector<double>(3, 2.0));
           sum(x).Backward();
           EXPECT_EQ(w.grad().ToVector<double>(), std::vector<double>(12, 2.0));
         });
}

// Local parts whose rows are apart: a rank that has one row of them, or none, is to say what the
// others do. They are copied, and what is made of them is as of a row-major tensor.
TEST(ViewWrites, LocalPartsThatAreNotRowMajorAreCopied) {
  for (const int64_t ranks : {2, 3, 4}) {
    const absl::Status status = RunSpmd(ranks, [&](RankContext& rank) {
      const DeviceMesh mesh({ranks});
      const int64_t rows = ranks == 2 ? 2 - rank.rank() : rank.rank() < 3 ? 1 : 0;
      const DTensor wide = full({rows, 4}, 3.0, {.dtype = DType::kF64}).RequiresGrad();
      DTensor x = FromLocal(slice(wide, 1, 0, 2), mesh, {Shard(0)}, {.shape = {3, 2}});
      DTensor y = reshape(x, {6});
      {
        const NoGrad no_grad;
        mul_(y, 2.0);  // a view: x changes with it
      }
      EXPECT_EQ(x.ToVector<double>(), std::vector<double>(6, 6.0));
      EXPECT_EQ(wide.ToVector<double>(), std::vector<double>(static_cast<size_t>(rows * 4), 3.0));
      sum(x).Backward();
      const std::vector<double> grad = wide.grad().ToVector<double>();
      for (size_t i = 0; i < grad.size(); ++i) EXPECT_EQ(grad[i], i % 4 < 2 ? 1.0 : 0.0) << i;
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

// A function that gives back what it was given gives a view of it.
TEST(ViewWrites, AFunctionsInputThatComesOutIsAView) {
  const absl::Status status = RunSpmd(1, [&](RankContext&) {
    const DTensor x = full({3}, 1.0, {.dtype = DType::kF64}).RequiresGrad();
    const DTensor z = full({3}, 10.0, {.dtype = DType::kF64}).RequiresGrad();
    DTensor a = x * 2.0;
    DTensor y = CustomFunction(
        "same", Values{a}, [&]() -> Values { return {a}; },
        [](const Values& g) -> Values { return {g[0] * 3.0}; })[0];
    add_(a, z);
    EXPECT_THAT(MessageOf([&] { sum(y); }), HasSubstr("changed in place after the view was made"));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A parameter that shares its memory with what it was made of is trained like any other.
TEST(ViewWrites, LeavesThatAreViewsCanBeTrained) {
  for (const Placement& placement : {Replicate(), Shard(0)}) {
    OnEach({{{2}, {placement}}}, [](const DeviceMesh& mesh, const Placements& placements) {
      const auto whole = [] { return full({4, 2}, 2.0, {DType::kF64}); };
      const DTensor part = full({placements[0].cuts_dim() ? 2 : 4, 2}, 2.0, {DType::kF64});
      for (DTensor w :
           {DistributeTensor(whole(), mesh, placements), FromLocal(part, mesh, placements),
            DistributeTensor(whole(), mesh, placements)[Slice(0, 2)]}) {
        w.RequiresGrad();
        for (int step = 0; step < 2; ++step) {
          w.ZeroGrad();
          sum(w * w).Backward();
          const NoGrad no_grad;
          sub_(w, w.grad(), 0.25);
        }
        EXPECT_EQ(w.ToVector<double>(), std::vector<double>(w.numel(), 0.5));
      }
    });
  }
}

// What is saved of an input that gets its history later, from what it was saved for.
TEST(ViewWrites, ATensorThatIsChangedByWhatWasMadeOfItIsFreed) {
  DTensor w = full({1000}, 0.5);
  w.RequiresGrad();
  const auto in_use = [] { return RankContext::Current().allocator()->stats().in_use_bytes; };
  const int64_t before = in_use();
  {
    const DTensor h = ones({1000});
    add_(h, h * w);
    EXPECT_TRUE(h.requires_grad());
  }
  EXPECT_EQ(in_use(), before);
}

// A tensor without elements from a mesh that has not all ranks.
TEST(ViewWrites, NothingMayBeWrittenWhereverItCameFrom) {
  const absl::Status status = RunSpmd(3, [](RankContext&) -> absl::Status {
    const DeviceMesh some = *DeviceMesh::FromRanks({2}, {1, 2}, {"dp"}), all({3}, {"dp"});
    for (const Shape& shape : {Shape{2, 7, 0}, Shape{0, 7, 5}, Shape{5, 0, 7}}) {
      const DTensor t = ones(shape, {.mesh = some});
      const NoGrad no_grad;
      const DTensor moved = t.Redistribute(all, {Replicate()});
      mul_(moved, 2.0);
      EXPECT_EQ(moved.shape(), shape);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace dtensor::testing::view_writes_test
