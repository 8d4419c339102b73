// Redistribution between all pairs of all five placements: the values on every rank, and the bytes,
// against a bound found element by element.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <optional>
#include <set>

#include "dtensor/distribute.h"
#include "dtensor/mesh/limited.h"
#include "dtensor/redistribute.h"
#include "tests/common/index_oracle.h"
#include "tests/common/layouts.h"
#include "tests/common/thin.h"

namespace dtensor::redistribute_bytes_test {
namespace {

using testing::CoordinateOf;
using testing::Held;
using testing::HeldBy;
using testing::kKinds;
using testing::Layout;
using testing::MakeLayout;
using testing::NewTerm;
using testing::Reduced;
using testing::ReductionOf;

std::vector<Layout> AllLayouts(const Dims& mesh, const Shape& shape) {
  std::vector<Layout> all;
  std::vector<int> kinds(mesh.size(), 0);
  while (true) {
    if (auto layout = MakeLayout(mesh, shape, kinds)) all.push_back(*std::move(layout));
    int m = static_cast<int>(mesh.size()) - 1;
    while (m >= 0 && ++kinds[m] == kKinds) kinds[m--] = 0;
    if (m < 0) return all;
  }
}

struct Pair {
  Shape shape;
  Layout from, to;
};

// What is true of a pair, found element by element.
class Truth {
 public:
  explicit Truth(const Pair& pair)
      : pair_(pair), same_mesh_(pair.from.mesh == pair.to.mesh), ranks_(Numel(pair.from.mesh)) {
    const int ndim = static_cast<int>(pair.from.mesh.size());
    for (int m = 0; m < ndim; ++m) {
      const Placement& p = pair.from.placements[m];
      const bool stays = same_mesh_ && p == pair.to.placements[m];
      if (p.is_partial() && !stays) reduced_.push_back(m);
      const bool is_whole = same_mesh_ && (pair.to.placements[m].is_replicate() ||
                                           pair.to.placements[m].is_partial());
      if ((p.is_partial() && stays) || (p.is_replicate() && is_whole)) alone_.push_back(m);
    }
    for (const int m : reduced_) terms_ *= pair.from.mesh[m];
    for (int64_t r = 0; r < ranks_; ++r) {
      from_.push_back(CoordinateOf(pair.from.mesh, r));
      to_.push_back(CoordinateOf(pair.to.mesh, r));
      has_.push_back(HeldBy(pair.from.mesh, pair.from.placements, pair.shape, from_[r]));
      wants_.push_back(HeldBy(pair.to.mesh, pair.to.placements, pair.shape, to_[r]));
    }
  }

  int64_t ranks() const { return ranks_; }
  int64_t terms() const { return terms_; }
  const Held& has(int64_t r) const { return has_[r]; }
  const Held& wants(int64_t r) const { return wants_[r]; }

  // Elements that rank r wants and has not.
  int64_t Lacks(int64_t r) const {
    const std::set<int64_t> has(has_[r].ids.begin(), has_[r].ids.end());
    return std::count_if(wants_[r].ids.begin(), wants_[r].ids.end(),
                         [&](int64_t id) { return has.count(id) == 0; });
  }

  // Elements that all ranks together have to receive. To combine t terms takes t - 1 receives, to
  // give the result to w ranks w - 1 more, w if none of them is among those that have terms.
  // Coordinates of mesh dims that stay whole on both sides are on their own.
  int64_t Bound() const {
    std::map<Dims, std::vector<int64_t>> worlds;
    for (int64_t r = 0; r < ranks_; ++r) {
      Dims key;
      for (const int m : alone_) key.push_back(from_[r][m]);
      worlds[key].push_back(r);
    }
    int64_t total = 0;
    for (const auto& [key, members] : worlds) {
      std::vector<int64_t> wanting(Numel(pair_.shape), 0), found(Numel(pair_.shape), 0);
      for (const int64_t r : members) {
        const std::set<int64_t> has(has_[r].ids.begin(), has_[r].ids.end());
        for (const int64_t id : wants_[r].ids) {
          ++wanting[id];
          found[id] += static_cast<int64_t>(has.count(id));
        }
      }
      for (int64_t id = 0; id < Numel(pair_.shape); ++id) {
        // Without terms to combine every rank that has it needs no copy.
        const int64_t free = terms_ == 1 ? found[id] : std::min<int64_t>(found[id], 1);
        total += terms_ - 1 + wanting[id] - free;
      }
    }
    return total;
  }

  // Whether combining terms is all there is to do: nobody wants what it holds no term of.
  bool NobodyLacks() const {
    for (int64_t r = 0; r < ranks_; ++r) {
      if (Lacks(r) > 0) return false;
    }
    return true;
  }
  // Whether every combined element goes to one rank (of those that hold its terms).
  bool OneReaderEach() const {
    int64_t wanted = 0;
    for (const Held& held : wants_) wanted += static_cast<int64_t>(held.ids.size());
    return NobodyLacks() && Bound() == (terms_ - 1) * wanted;
  }
  int64_t ChangedDims() const {
    if (!same_mesh_) {
      return static_cast<int64_t>(std::max(pair_.from.mesh.size(), pair_.to.mesh.size()));
    }
    int64_t changed = 0;
    for (size_t m = 0; m < pair_.from.mesh.size(); ++m) {
      changed += pair_.from.placements[m] == pair_.to.placements[m] ? 0 : 1;
    }
    return changed;
  }

  // The term of an element that a rank at `coordinate` of the source holds.
  int64_t Term(int64_t id, const Dims& coordinate) const {
    int64_t mix = id * 37 + 11;
    for (size_t m = 0; m < coordinate.size(); ++m) {
      if (pair_.from.placements[m].is_partial()) mix = mix * 31 + (coordinate[m] + 1) * 17;
    }
    return mix % 101 - 50;
  }
  std::vector<int64_t> Source(int64_t r) const {
    std::vector<int64_t> values;
    for (const int64_t id : has_[r].ids) values.push_back(Term(id, from_[r]));
    return values;
  }
  std::vector<int64_t> Target(int64_t r) const {
    std::optional<int64_t> neutral;  // off coordinate 0 of a new sum or product
    for (size_t m = 0; m < to_[r].size(); ++m) {
      const Placement& p = pair_.to.placements[m];
      const bool stays = same_mesh_ && p == pair_.from.placements[m];
      if (NewTerm(p) && !stays && to_[r][m] != 0) neutral = NewTerm(p);
    }
    std::vector<int64_t> values;
    for (const int64_t id : wants_[r].ids) {
      values.push_back(neutral ? *neutral : Value(id, from_[r]));
    }
    return values;
  }

 private:
  int64_t Value(int64_t id, const Dims& coordinate) const {
    const ReduceOp op = ReductionOf(pair_.from);
    int64_t value = 0;
    for (int64_t k = 0; k < terms_; ++k) {
      Dims at = coordinate;
      int64_t rest = k;
      for (const int m : reduced_) {
        at[m] = rest % pair_.from.mesh[m];
        rest /= pair_.from.mesh[m];
      }
      const int64_t term = Term(id, at);
      value = k == 0 ? term : Reduced(op, value, term);
    }
    return value;
  }

  const Pair& pair_;
  const bool same_mesh_;
  const int64_t ranks_;
  int64_t terms_ = 1;
  std::vector<int> reduced_, alone_;  // mesh dims of the source
  std::vector<Dims> from_, to_;       // coordinates by rank
  std::vector<Held> has_, wants_;
};

std::string Name(const Pair& pair) {
  return ToString(pair.from.placements) + " on " + ToString(pair.from.mesh) + " to " +
         ToString(pair.to.placements) + " on " + ToString(pair.to.mesh) + " of " +
         ToString(pair.shape);
}

// What one rank saw of one pair.
struct Seen {
  bool right = false;
  int64_t bytes = 0, collectives = 0;
};

Seen RunOne(const Pair& pair, const Truth& truth, int64_t rank) {
  const DeviceMesh from = *DeviceMesh::Create(pair.from.mesh),
                   to = *DeviceMesh::Create(pair.to.mesh);
  const Tensor local = ValueOrThrow(Tensor::FromVector(truth.Source(rank), truth.has(rank).shape));
  const DTensor x = FromLocal(OnSelf(local), from, pair.from.placements, {.shape = pair.shape});
  Seen seen;
  DTensor y;
  {
    CommTrace trace;
    y = x.Redistribute(to, pair.to.placements);
    seen.bytes = trace.TotalBytes();
    seen.collectives = trace.TotalCount();
  }
  seen.right = y.local().shape() == truth.wants(rank).shape &&
               y.local().ToVector<int64_t>() == truth.Target(rank) &&
               x.local().ToVector<int64_t>() == truth.Source(rank);
  return seen;
}

struct Outcome {
  int64_t pairs = 0, moving = 0;
  double log_sum = 0, worst = 1;
};

// Of all pairs of layouts `most` or fewer, evenly thinned. The stride has no factor in common with
// the number of targets: with one it would meet some of them only.
std::vector<Pair> PairsOf(const std::vector<Layout>& from, const std::vector<Layout>& to,
                          const Shape& shape, int64_t most) {
  most = std::max<int64_t>(1, most / testing::Thin(25));
  const auto targets = static_cast<int64_t>(to.size());
  const int64_t all = static_cast<int64_t>(from.size()) * targets;
  int64_t stride = (all + most - 1) / most;
  while (std::gcd(stride, targets) > 1) ++stride;
  std::vector<Pair> pairs;
  for (int64_t i = 0; i < all; i += stride) {
    pairs.push_back({shape, from[i / targets], to[i % targets]});
  }
  return pairs;
}

// Pairs on worlds of one size.
void RunPairs(const std::vector<Pair>& chosen, bool packed, Outcome* outcome) {
  std::vector<Truth> truths;
  truths.reserve(chosen.size());
  for (const Pair& pair : chosen) truths.emplace_back(pair);
  const int64_t ranks = Numel(chosen[0].from.mesh);
  std::vector<std::vector<Seen>> seen(chosen.size(), std::vector<Seen>(ranks));
  SpmdOptions options;
  if (packed) options.wrap = Packed();
  const absl::Status status = RunSpmd(
      ranks,
      [&](RankContext& context) {
        for (size_t i = 0; i < chosen.size(); ++i) {
          seen[i][context.rank()] = RunOne(chosen[i], truths[i], context.rank());
        }
        return absl::OkStatus();
      },
      options);
  ASSERT_TRUE(status.ok()) << status;
  for (size_t i = 0; i < chosen.size(); ++i) {
    SCOPED_TRACE(Name(chosen[i]));
    const Truth& truth = truths[i];
    int64_t bytes = 0;
    for (int64_t r = 0; r < ranks; ++r) {
      ASSERT_TRUE(seen[i][r].right) << "on rank " << r;
      bytes += seen[i][r].bytes;
      if (truth.terms() == 1) {
        ASSERT_EQ(seen[i][r].bytes, 8 * truth.Lacks(r)) << "bytes of rank " << r;
      }
      if (truth.OneReaderEach()) {
        ASSERT_EQ(seen[i][r].bytes,
                  8 * (truth.terms() - 1) * static_cast<int64_t>(truth.wants(r).ids.size()));
      }
      // Combining terms that end elsewhere takes a second one: no collective does both.
      ASSERT_LE(seen[i][r].collectives, truth.terms() == 1 ? 1 : 2);
      if (truth.NobodyLacks()) {
        ASSERT_LE(seen[i][r].collectives, truth.ChangedDims());
      }
    }
    if (!packed) {
      ASSERT_EQ(bytes, 8 * truth.Bound());
    }
    ++outcome->pairs;
    if (truth.Bound() == 0) {
      ASSERT_EQ(bytes, 0);
      continue;
    }
    const double ratio = static_cast<double>(bytes) / static_cast<double>(8 * truth.Bound());
    ++outcome->moving;
    outcome->log_sum += std::log(ratio);
    outcome->worst = std::max(outcome->worst, ratio);
  }
}

void RunAll(bool packed) {
  Outcome outcome;
  const auto run = [&](const Dims& from, const Dims& to, const std::vector<Shape>& shapes,
                       int64_t most) {
    for (const Shape& shape : shapes) {
      RunPairs(PairsOf(AllLayouts(from, shape), AllLayouts(to, shape), shape, most), packed,
               &outcome);
    }
  };
  const std::vector<Shape> shapes = {{4, 6}, {5, 7}, {12, 1}, {2, 3}, {0, 3}};
  for (const int64_t n : {2, 3, 4}) run({n}, {n}, shapes, 1000);
  run({2, 2}, {2, 2}, {{8, 4}, {5, 7}, {1, 6}}, 1500);
  run({2, 3}, {2, 3}, {{12, 6}, {7, 4}}, 1500);
  run({3, 2}, {3, 2}, {{6, 5}}, 1500);
  run({2, 2, 2}, {2, 2, 2}, {{8, 8}, {9, 5}}, 1500);
  run({1, 3}, {1, 3}, {{4, 5}}, 500);
  run({6}, {2, 3}, {{12, 6}, {7, 4}}, 500);  // between meshes
  run({2, 2, 2}, {4, 2}, {{8, 6}}, 500);
  run({2, 3}, {3, 2}, {{7, 6}}, 500);
  const double mean = std::exp(outcome.log_sum / static_cast<double>(outcome.moving));
  EXPECT_GE(outcome.pairs, 16000 / testing::Thin(30));
  EXPECT_LE(mean, packed ? 1.1 : 1);
  EXPECT_LE(outcome.worst, packed ? 2 : 1);
  std::printf("%s: %lld pairs, %lld move; counted / bound: mean %.4f, worst %.4f\n",
              packed ? "packed collectives" : "local", static_cast<long long>(outcome.pairs),
              static_cast<long long>(outcome.moving), mean, outcome.worst);
}

TEST(RedistributeBytes, EqualTheBoundOnTheLocalBackend) { RunAll(/*packed=*/false); }
// Whether two mesh dims exchange the tensor dims that they cut.
bool SwapsDims(const Pair& pair) {
  const Placements &a = pair.from.placements, &b = pair.to.placements;
  for (size_t m = 0; m < a.size(); ++m) {
    for (size_t k = 0; k < m; ++k) {
      if (a[m].is_shard() && a[k].is_shard() && !(a[m] == a[k]) && a[m] == b[k] && a[k] == b[m]) {
        return true;
      }
    }
  }
  return false;
}

// A flat cut stays what it is beside mesh dims that only become whole or are reduced.
bool KeepsFlat(const Pair& pair) {
  bool keeps = false;
  for (size_t m = 0; m < pair.from.placements.size(); ++m) {
    const Placement &from = pair.from.placements[m], &to = pair.to.placements[m];
    if (!from.is_flat() && (from.cuts() || to.cuts())) return false;
    if (from.is_flat() && !(from == to)) return false;
    keeps |= from.is_flat();
  }
  return keeps;
}

// What strategies are chosen by is what is moved, where all sizes divide.
TEST(RedistributeBytes, EqualTheModelledCost) {
  int64_t pairs = 0, exact = 0, kept = 0, flat_pairs = 0;
  for (const Dims& mesh :
       {Dims{4}, Dims{2, 2}, Dims{2, 4}, Dims{1, 4}, Dims{4, 1, 2}, Dims{2, 2, 2}}) {
    const Shape shape = {16, 16};
    const auto divides = [](const Layout& layout) {
      return std::all_of(layout.placements.begin(), layout.placements.end(),
                         [](const Placement& p) { return !p.is_segmented() && p.unit() == 1; });
    };
    const auto flat = [](const Layout& layout) {
      return std::any_of(layout.placements.begin(), layout.placements.end(),
                         [](const Placement& p) { return p.is_flat(); });
    };
    std::vector<Layout> layouts = AllLayouts(mesh, shape);
    layouts.erase(std::remove_if(layouts.begin(), layouts.end(), std::not_fn(divides)),
                  layouts.end());
    for (const Pair& pair : PairsOf(layouts, layouts, shape, 10300)) {
      const bool keeps_flat = KeepsFlat(pair);
      const double cost = RedistributeCost(*DeviceMesh::Create(mesh), shape, DType::kI64,
                                           pair.from.placements, pair.to.placements) *
                          static_cast<double>(Numel(mesh));
      const auto moved = static_cast<double>(8 * Truth(pair).Bound());
      if ((flat(pair.from) || flat(pair.to)) && !keeps_flat) {
        // Seen as cut anew: what old and new pieces happen to have in common is moved the less.
        ASSERT_GE(cost, moved) << Name(pair);
        ++flat_pairs;
        continue;
      }
      kept += keeps_flat ? 1 : 0;
      ++pairs;
      exact += cost == moved ? 1 : 0;
      // Cuts that change places between tensor dims: what the ranks on a diagonal keep is not seen.
      ASSERT_GE(cost, moved) << Name(pair);
      if (mesh.size() <= 2 && !SwapsDims(pair)) {
        ASSERT_EQ(cost, moved) << Name(pair);
      }
    }
  }
  EXPECT_GE(exact * 100, pairs * 95) << exact << " of " << pairs;
  EXPECT_GT(kept, 0);
  EXPECT_GT(flat_pairs, 0);
}

// And the time is that of the collectives that run, by whatever model. Ranks that take turns in
// serving receive unlike amounts, and of cuts that change places a part is not seen: bytes apart,
// the same collectives over the same groups.
TEST(RedistributeBytes, AreModelledInTheCollectivesThatRun) {
  CostModel model = {.intra_node = {{1, 1e12}}, .inter_node = {{100, 1e12}}, .ranks_per_node = 2};
  model.intra_node.measured[CollectiveKind::kAllReduce] = {7, 1e12};
  model.intra_node.measured[CollectiveKind::kAllGather] = {11, 1e12};
  model.inter_node.measured[CollectiveKind::kReduceScatter] = {1300, 1e12};
  int64_t pairs = 0, same = 0;
  for (const Dims& mesh : {Dims{4}, Dims{2, 2}, Dims{2, 4}, Dims{2, 2, 2}}) {
    const Shape shape = {16, 16};
    std::vector<Placements> layouts;
    for (const Layout& layout : AllLayouts(mesh, shape)) {
      if (std::all_of(layout.placements.begin(), layout.placements.end(), [](const Placement& p) {
            return !p.is_flat() && !p.is_segmented() && p.unit() == 1;
          })) {
        layouts.push_back(layout.placements);
      }
    }
    const auto body = [&](RankContext&) {
      const DeviceMesh m = *DeviceMesh::Create(mesh);
      for (size_t i = 0; i < layouts.size(); ++i) {
        for (size_t j = i % 3; j < layouts.size(); j += 3) {
          const DTensor x = ones(shape, {DType::kI64, m, layouts[i]});
          const CommTrace trace;
          x.Redistribute(layouts[j]);
          const double us = PriceMove(m, shape, DType::kI64, layouts[i], layouts[j], model).us;
          ++pairs;
          same += std::fabs(us - trace.ModelledUs()) < 0.1 ? 1 : 0;
        }
      }
      return absl::OkStatus();
    };
    ASSERT_TRUE(RunFake({.world = Numel(mesh), .cost = model}, body).ok());
  }
  EXPECT_GE(same * 100, pairs * 98) << same << " of " << pairs;
}

TEST(RedistributeBytes, StayNearTheBoundWithPackedCollectives) { RunAll(/*packed=*/true); }

}  // namespace
}  // namespace dtensor::redistribute_bytes_test
