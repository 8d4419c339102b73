#include "dtensor/ops/sort/sharded_sort.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "absl/functional/function_ref.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/keys.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Counts = std::vector<int64_t>;

// The one mesh dim over which the line is cut; -1 where it is not cut so.
int CutOf(const DTensor& x) {
  int cut = -1;
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    const Placement& p = x.placements()[m];
    if (p.is_replicate()) continue;
    if (!p.is_shard() || p.unit() != 1 || cut >= 0) return -1;
    cut = m;
  }
  return cut;
}

// How a line is cut, and what its ranks do together.
class LineBlocks {
 public:
  explicit LineBlocks(const DTensor& x)
      : mesh_(x.mesh()),
        cut_(CutOf(x)),
        ranks_(x.mesh().size(cut_)),
        me_(x.spec().coordinate()[cut_]),
        size_(x.numel()) {}

 protected:
  Interval BlockOf(int64_t rank) const { return ShardInterval(size_, 1, ranks_, rank); }

  // The line of which `mine` is this rank's block.
  DTensor Whole(const DTensor& mine) const { return OnMesh(mine, Shard(0), {size_}); }
  // Of `mine`, a number of each rank: the sums over ranks, or (gathered) those of all ranks.
  DTensor Pending(const DTensor& mine) const { return OnMesh(mine, Partial(), mine.shape()); }
  Counts Reduced(const DTensor& mine) const { return Pending(mine).ToVector<int64_t>(); }
  Counts Gathered(const DTensor& mine) const {
    return OnMesh(unsqueeze(mine, 0), Shard(0), {ranks_, mine.numel()}).ToVector<int64_t>();
  }

  // [r][b]: how many of rank r's elements go to ranks up to b.
  using Splits = std::vector<Counts>;
  // Elements of rank `from` that go to rank `to`.
  static Interval Sent(const Splits& splits, int64_t from, int64_t to) {
    return {to == 0 ? 0 : splits[from][to - 1], splits[from][to]};
  }
  // What all ranks have for this one, in the order of ranks.
  DTensor Swapped(const DTensor& mine, const Splits& splits) const {
    RankContext& context = RankContext::Current();
    Comm* comm = ValueOrThrow(context.CommFor(mesh_, {cut_}));
    const DTensor out = empty({BlockOf(me_).length()}, {.dtype = mine.dtype()});
    std::vector<Piece> sends, recvs;
    int64_t at = 0;
    for (int64_t r = 0; r < ranks_; ++r) {
      const Interval there = Sent(splits, me_, r), here = Sent(splits, r, me_);
      const int peer = static_cast<int>(r);
      if (there.length() > 0) {
        sends.push_back({peer, mine.local().Slice(0, there.start, there.length())});
      }
      if (here.length() > 0) {
        recvs.push_back({peer, out.local().Slice(0, at, here.length())});
      }
      at += here.length();
    }
    ThrowIfError(comm->Exchange(std::move(sends), std::move(recvs)).Wait());
    return out;
  }

  const DeviceMesh mesh_;
  const int cut_;
  const int64_t ranks_, me_, size_;

 private:
  DTensor OnMesh(const DTensor& mine, const Placement& p, const Shape& shape) const {
    Placements placements(mesh_.ndim());
    placements[cut_] = p;
    FromLocalOptions options;
    options.shape = shape;
    return FromLocal(mine, mesh_, placements, options);
  }
};

// This rank's part, sorted, and what is known of the others.
class SortedBlocks : LineBlocks {
 public:
  SortedBlocks(const DTensor& x, bool descending)
      : LineBlocks(x), dtype_(x.dtype()), descending_(descending) {
    const Values sorted = sort(x.ToLocal(), 0, descending);
    values_ = sorted[0];
    places_ = to(add(sorted[1], BlockOf(me_).start), DType::kI32);
    const int64_t n = values_.numel();
    if (descending) backwards_ = arange(n - 1, -1, -1, {.dtype = DType::kI64});
  }

  Values Merged() const {
    const Splits splits = FindSplits();
    const DTensor values = Swapped(values_, splits), places = Swapped(places_, splits);
    // What came from lower ranks stands first, so equal elements keep their order.
    const Values merged = sort(values, 0, descending_);
    const DTensor indices = to(TakeAlong(places, merged[1], 0), DType::kI64);
    return {Whole(merged[0]), Whole(indices)};
  }

  // The element that `k` - 1 others come before (of an ascending line), and its index.
  Values Nth(int64_t k) const {
    Values found;
    VisitDType(dtype_, [&](auto element) {
      using T = typename decltype(element)::type;
      const Around around = CountsAt<T>(KeysBefore<T>({k}));
      int64_t rest = k, owner = 0;
      for (const int64_t less : around.less) rest -= less;
      while (rest > around.equal[owner]) rest -= around.equal[owner++];
      const int64_t at = around.less[owner] + rest - 1;
      for (const DTensor& mine : {values_, to(places_, DType::kI64)}) {
        const DTensor one =
            owner == me_ ? slice(mine, 0, at, at + 1) : zeros({1}, {.dtype = mine.dtype()});
        found.push_back(Pending(one).Redistribute(Placements(mesh_.ndim())));
      }
    });
    return found;
  }
  // How many elements are not NaN.
  int64_t Numbers() const { return Reduced(unsqueeze(sum(eq(values_, values_)), 0))[0]; }

 private:
  // How many elements of this rank have at most these keys.
  template <class T>
  DTensor UpTo(const std::vector<typename SortKey<T>::Key>& keys) const {
    const int64_t n = static_cast<int64_t>(keys.size());
    const Tensor bounds = ValueOrThrow(Tensor::Empty({n}, dtype_));
    std::transform(keys.begin(), keys.end(), static_cast<T*>(bounds.data()), SortKey<T>::At);
    return searchsorted(values_, DistributeTensor(bounds, DeviceMesh::Self(), {}), false,
                        /*right=*/true, backwards_);
  }

  // Of each bound between two ranks the key of the element before it.
  template <class T>
  std::vector<typename SortKey<T>::Key> KeysBefore(const Counts& bounds) const {
    using Key = typename SortKey<T>::Key;
    std::vector<Key> low(bounds.size(), SortKey<T>::kLeast), high(bounds.size(), SortKey<T>::kNan);
    while (low != high) {
      std::vector<Key> middle;
      for (size_t b = 0; b < bounds.size(); ++b) {
        middle.push_back(static_cast<Key>(low[b] + static_cast<Key>(high[b] - low[b]) / 2));
      }
      const Counts counts = Reduced(UpTo<T>(middle));
      for (size_t b = 0; b < bounds.size(); ++b) {
        const int64_t wanted = descending_ ? size_ - bounds[b] + 1 : bounds[b];
        if (counts[b] >= wanted) {
          high[b] = middle[b];
        } else {
          low[b] = static_cast<Key>(middle[b] + 1);
        }
      }
    }
    return low;
  }

  // Of equal elements those of lower ranks go first.
  Splits FindSplits() const {
    Counts bounds;
    for (int64_t r = 1; r < ranks_; ++r) {
      const int64_t start = BlockOf(r).start;  // an empty block starts at the end
      if (start < size_) bounds.push_back(start);
    }
    Splits splits(ranks_);
    VisitDType(dtype_,
               [&](auto element) { Split<typename decltype(element)::type>(bounds, &splits); });
    for (int64_t r = 0; r < ranks_; ++r) {
      splits[r].resize(ranks_, BlockOf(r).length());  // bounds at the end
    }
    return splits;
  }
  // Of every rank and key how many elements have less, and how many have the key: [rank * keys +
  // k].
  struct Around {
    Counts less, equal;
  };
  template <class T>
  Around CountsAt(const std::vector<typename SortKey<T>::Key>& keys) const {
    std::vector<typename SortKey<T>::Key> before = keys;
    for (auto& key : before) key -= key > SortKey<T>::kLeast ? 1 : 0;
    Around around = {Gathered(UpTo<T>(before)), Gathered(UpTo<T>(keys))};
    for (size_t i = 0; i < around.less.size(); ++i) {
      if (keys[i % keys.size()] == SortKey<T>::kLeast) around.less[i] = 0;
      around.equal[i] -= around.less[i];
    }
    return around;
  }
  template <class T>
  void Split(const Counts& bounds, Splits* splits) const {
    const size_t n = bounds.size();
    const Around around = CountsAt<T>(KeysBefore<T>(bounds));
    for (size_t b = 0; b < n; ++b) {
      int64_t left = bounds[b];  // elements equal to the key that come before the bound
      Counts before(ranks_);
      for (int64_t r = 0; r < ranks_; ++r) {
        const int64_t less = around.less[r * n + b], equal = around.equal[r * n + b];
        before[r] = descending_ ? BlockOf(r).length() - less - equal : less;
        left -= before[r];
      }
      for (int64_t r = 0; r < ranks_; ++r) {
        const int64_t taken = std::clamp<int64_t>(left, 0, around.equal[r * n + b]);
        (*splits)[r].push_back(before[r] + taken);
        left -= taken;
      }
    }
  }

  const DType dtype_;
  const bool descending_;
  DTensor values_, places_;  // of this rank, in order
  DTensor backwards_;        // of a descending line: where its elements ascend
};

// Elements of a line that go to places of it, every place once.
class PlacedBlocks : LineBlocks {
 public:
  explicit PlacedBlocks(const DTensor& places) : LineBlocks(places) {
    const Values sorted = sort(places.ToLocal(), 0);
    places_ = sorted[0];
    order_ = sorted[1];
    std::vector<int64_t> ends;
    for (int64_t r = 0; r < ranks_; ++r) ends.push_back(BlockOf(r).end);
    const DTensor bounds = FromVector(ends, {ranks_}, {.mesh = places_.mesh()});
    const Counts all = Gathered(searchsorted(places_, bounds));
    for (int64_t r = 0; r < ranks_; ++r) {
      splits_.emplace_back(all.begin() + r * ranks_, all.begin() + (r + 1) * ranks_);
    }
  }

  DTensor Put(const DTensor& line) const {
    const DTensor mine = to(TakeAlong(line.ToLocal(), order_, 0), DType::kI32);
    const DTensor got = to(Swapped(mine, splits_), line.dtype());
    const Interval block = BlockOf(me_);
    const DTensor at = to(Swapped(to(places_, DType::kI32), splits_), DType::kI64);
    return Whole(PutAlong(got, sub(at, block.start), 0, block.length()));
  }

 private:
  DTensor places_, order_;  // of this rank's elements: where they go, ascending, and where they are
  Splits splits_;
};

}  // namespace

bool IsLineInBlocks(const DTensor& x) {
  constexpr int64_t kFew = 4096;  // elements whose gathering is cheaper than counting
  return x.ndim() == 1 && x.numel() >= kFew && x.numel() <= std::numeric_limits<int32_t>::max() &&
         CutOf(x) >= 0 && x.has_values();
}

bool SortsInBlocks(const DTensor& x, int64_t more) {
  if (!IsLineInBlocks(x)) return false;
  // Every element and its index once, against every element to all ranks.
  const int64_t bytes = SizeOf(x.dtype());
  return bytes + 4 + more < bytes * x.mesh().size(CutOf(x));
}

DTensor PutInBlocks(const DTensor& line, const DTensor& places) {
  const NoGrad no_grad;
  return PlacedBlocks(places).Put(line);
}

namespace {

// `make` of the sorted blocks gives elements of x and their indices, to which the gradient goes.
Values Taken(const char* name, const DTensor& x, bool descending,
             absl::FunctionRef<Values(const SortedBlocks&)> make) {
  const auto indices = std::make_shared<DTensor>();
  const auto forward = [&]() -> Values {
    Values taken = make(SortedBlocks(x, descending));
    *indices = taken[1].Detach();
    return taken;
  };
  const auto backward = [indices, n = x.numel()](const Values& grads) -> Values {
    return {PutAlong(grads[0], *indices, 0, n)};
  };
  return CustomFunction(name, {x}, forward, backward, absl::MakeConstSpan(indices.get(), 1));
}

}  // namespace

Values SortInBlocks(const DTensor& x, bool descending) {
  return Taken("sort", x, descending, [](const SortedBlocks& blocks) { return blocks.Merged(); });
}

Values RankInBlocks(const char* name, const DTensor& x,
                    absl::FunctionRef<int64_t(absl::FunctionRef<int64_t()> numbers)> rank) {
  return Taken(name, x, false, [&](const SortedBlocks& blocks) {
    return blocks.Nth(rank([&] { return blocks.Numbers(); }));
  });
}

}  // namespace dtensor
