#include "dtensor/ops/sort/sharded_sort.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "absl/functional/function_ref.h"
#include "dtensor/mesh/comm.h"
#include "dtensor/ops/long_list.h"
#include "dtensor/ops/rows.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/keys.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

using Counts = RankList<int64_t>;

// How lines along a dim are cut, and what the ranks that have a line do together. In a rehearsal,
// which has no elements, counts say that none is like another, and all ranks get as much of each.
class LineBlocks {
 public:
  LineBlocks(const DTensor& x, int dim)
      : like_(x.spec_ref()),
        cuts_(CutsOf(x.spec(), dim)),
        comm_(ValueOrThrow(RankContext::Current().CommFor(x.mesh(), cuts_))),
        ranks_(comm_->size()),
        me_(comm_->index()),
        size_(x.size(dim)),
        known_(!RankContext::Current().rehearses()),
        blocks_(BlocksOf(x.spec(), dim, cuts_)) {}

 protected:
  Interval BlockOf(int64_t rank) const { return {blocks_[rank][0].begin, blocks_[rank][0].end}; }

  // The line of which `mine` is this rank's block.
  DTensor Whole(const DTensor& mine) const { return On(like_->placements(), mine, {size_}); }
  // Sums of `mine` [.., 1, ..], on all ranks.
  DTensor Summed(const DTensor& mine, int dim) const {
    Placements placements(like_->placements().begin(), like_->placements().end());
    Shape shape = like_->shape();
    shape[dim] = 1;
    for (const int m : cuts_) placements[m] = Partial();
    const DTensor pending = On(placements, mine, shape);
    for (const int m : cuts_) placements[m] = Replicate();
    return pending.Redistribute(placements);
  }

  // Of int64 numbers of each rank the sums over ranks, or (gathered) those of all ranks, one rank
  // after the other.
  Counts Reduced(const DTensor& mine) const {
    const Tensor line = flatten(mine).local();
    const Tensor sums = ValueOrThrow(Tensor::Empty(line.shape(), line.dtype(), line.device()));
    ThrowIfError(comm_->AllReduce(line, sums, ReduceOp::kSum).Wait());
    return ValuesOf(sums, size_);
  }
  Counts Gathered(const DTensor& mine) const {
    const Tensor line = flatten(mine).local();
    const Tensor all =
        ValueOrThrow(Tensor::Empty({ranks_ * line.numel()}, line.dtype(), line.device()));
    ThrowIfError(comm_->AllGather(line, all).Wait());
    return ValuesOf(all, 0);
  }

  // [r][b]: how many of rank r's elements go to ranks up to b.
  using Splits = std::vector<Counts>;
  // Elements of rank `from` that go to rank `to`.
  static Interval Sent(const Splits& splits, int64_t from, int64_t to) {
    return {to == 0 ? 0 : splits[from][to - 1], splits[from][to]};
  }
  // What does not come out even stays where it is.
  Splits EvenSplits() const {
    Splits splits(ranks_);
    for (int64_t r = 0; r < ranks_; ++r) {
      const auto share = [&](int64_t b) {
        return BlockOf(r).length() * BlockOf(b).length() / size_;
      };
      int64_t rest = BlockOf(r).length(), end = 0;
      for (int64_t b = 0; b < ranks_; ++b) rest -= share(b);
      for (int64_t b = 0; b < ranks_; ++b)
        splits[r].push_back(end += share(b) + (b == r ? rest : 0));
    }
    return splits;
  }
  // What all ranks have for this one, in the order of ranks.
  DTensor Swapped(const DTensor& mine, const Splits& splits) const {
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
    ThrowIfError(comm_->Exchange(std::move(sends), std::move(recvs)).Wait());
    return out;
  }

  const SpecRef like_;  // of x
  const MeshDims cuts_;
  Comm* const comm_;
  const int64_t ranks_, me_, size_;
  const bool known_;  // not a rehearsal

 private:
  Counts ValuesOf(const Tensor& counts, int64_t rehearsed) const {
    if (known_) return ListOf(OnSelf(counts));
    return Counts(static_cast<size_t>(counts.numel()), rehearsed);
  }
  DTensor On(absl::Span<const Placement> placements, const DTensor& mine,
             const Shape& shape) const {
    FromLocalOptions options;
    options.shape = shape;
    return FromLocal(mine, like_->mesh(), placements, options);
  }

  const RowsOfRanks blocks_;
};

// This rank's parts of lines, each sorted, and what is known of the others.
class SortedBlocks : LineBlocks {
 public:
  SortedBlocks(const DTensor& x, int dim, bool descending)
      : LineBlocks(x, dim), dim_(dim), dtype_(x.dtype()), descending_(descending) {
    const DTensor last = transpose(x.ToLocal(), dim, -1);
    turned_ = last.shape();
    const int64_t n = last.size(-1);
    lines_ = 1;
    for (int d = 0; d + 1 < last.ndim(); ++d) lines_ *= last.size(d);
    const Values sorted = sort(reshape(last, {lines_, n}), 1, descending);
    values_ = sorted[0];
    places_ = to(add(sorted[1], BlockOf(me_).start), DType::kI32);
    if (descending) backwards_ = unsqueeze(arange(n - 1, -1, -1, {.dtype = DType::kI64}), 0);
  }

  Values Merged() const {
    const Splits splits = FindSplits();
    const DTensor values = Swapped(flatten(values_), splits);
    const DTensor places = Swapped(flatten(places_), splits);
    // What came from lower ranks stands first, so equal elements keep their order.
    const Values merged = sort(values, 0, descending_);
    const DTensor indices = to(TakeAlong(places, merged[1], 0), DType::kI64);
    return {Whole(merged[0]), Whole(indices)};
  }

  // Of each line the element of rank(elements of it that are not NaN), from 1 up, and its index:
  // [.., 1, ..]. The lines ascend.
  Values Nth(absl::FunctionRef<int64_t(int64_t numbers)> rank) const {
    Counts at(lines_, 0), elsewhere(lines_, 1);
    if (lines_ > 0) Find(rank, &at, &elsewhere);
    return {FromOwners(values_, at, elsewhere),
            FromOwners(to(places_, DType::kI64), at, elsewhere)};
  }

 private:
  // Where the element is in this rank's part of each line, unless it is elsewhere.
  void Find(absl::FunctionRef<int64_t(int64_t numbers)> rank, Counts* at, Counts* elsewhere) const {
    Counts ranks = Reduced(sum(eq(values_, values_), {1}));
    for (int64_t& n : ranks) n = rank(n);
    VisitDType(dtype_, [&](auto element) {
      using T = typename decltype(element)::type;
      const Around around = CountsAt<T>(KeysBefore<T>(ranks));
      if (!known_) return;
      for (int64_t line = 0; line < lines_; ++line) {
        int64_t rest = ranks[line], owner = 0;
        for (int64_t r = 0; r < ranks_; ++r) rest -= around.less[r * lines_ + line];
        while (rest > around.equal[owner * lines_ + line]) {
          rest -= around.equal[owner++ * lines_ + line];
        }
        if (owner != me_) continue;
        (*at)[line] = around.less[owner * lines_ + line] + rest - 1;
        (*elsewhere)[line] = 0;
      }
    });
  }

  // Elements of lines, here or `elsewhere`, on all ranks, in the dims of x.
  DTensor FromOwners(const DTensor& mine, const Counts& at, const Counts& elsewhere) const {
    Shape shape = turned_;
    shape.back() = 1;
    // What is added to -0 stays as it is, zeros of both signs included.
    DTensor found = full({lines_, 1}, -0.0, {.dtype = mine.dtype(), .mesh = mine.mesh()});
    if (mine.size(1) > 0) {
      const DTensor taken = TakeAlong(mine, FromList(at, {lines_, 1}, mine.mesh()), 1);
      found = where(ne(FromList(elsewhere, {lines_, 1}, mine.mesh()), 0), found, taken);
    }
    return Summed(contiguous(transpose(reshape(found, shape), dim_, -1)), dim_);
  }

  template <class T>
  using Keys = RankList<typename SortKey<T>::Key>;

  // How many elements of this rank have at most these keys, equally many of each line.
  template <class T>
  DTensor UpTo(const Keys<T>& keys) const {
    const auto n = static_cast<int64_t>(keys.size());
    const Tensor bounds = ValueOrThrow(Tensor::Empty({lines_, n / lines_}, dtype_));
    std::transform(keys.begin(), keys.end(), static_cast<T*>(bounds.data()), SortKey<T>::At);
    return searchsorted(values_, DistributeTensor(bounds, DeviceMesh::Self(), {}), false,
                        /*right=*/true, backwards_);
  }

  // Of each bound in a line, equally many in each, the key of the element before it. As many rounds
  // whatever the elements: other lines are elsewhere.
  template <class T>
  Keys<T> KeysBefore(const Counts& bounds) const {
    using Key = typename SortKey<T>::Key;
    Keys<T> low(bounds.size(), SortKey<T>::kLeast), high(bounds.size(), SortKey<T>::kNan);
    Keys<T> middle(bounds.size());
    for (Key span = SortKey<T>::kNan - SortKey<T>::kLeast; span > 0; span /= 2) {
      for (size_t b = 0; b < bounds.size(); ++b) {
        middle[b] = static_cast<Key>(low[b] + static_cast<Key>(high[b] - low[b]) / 2);
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
    if (!known_) return EvenSplits();
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
  Around CountsAt(const Keys<T>& keys) const {
    Keys<T> before = keys;
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

  const int dim_;
  const DType dtype_;
  const bool descending_;
  Shape turned_;             // of this rank's part of x with dim_ and the last swapped
  int64_t lines_;            // there
  DTensor values_, places_;  // [lines, n] of this rank, in order
  DTensor backwards_;        // of descending lines: where their elements ascend
};

// Elements of a line that go to places of it, every place once.
class PlacedBlocks : LineBlocks {
 public:
  explicit PlacedBlocks(const DTensor& places) : LineBlocks(places, 0) {
    const Values sorted = sort(places.ToLocal(), 0);
    places_ = sorted[0];
    order_ = sorted[1];
    Counts ends;
    for (int64_t r = 0; r < ranks_; ++r) ends.push_back(BlockOf(r).end);
    const DTensor bounds = FromList(ends, {ranks_}, places_.mesh());
    const Counts all = Gathered(searchsorted(places_, bounds));
    for (int64_t r = 0; r < ranks_; ++r) {
      splits_.emplace_back(all.begin() + r * ranks_, all.begin() + (r + 1) * ranks_);
    }
    if (!known_) splits_ = EvenSplits();
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

// How many ranks have parts of a line; 0 where it is not cut into blocks.
int64_t RanksOf(const DTensor& x, int dim) {
  const MeshDims cuts = CutsOf(x.spec(), dim);
  int64_t ranks = cuts.empty() ? 0 : 1;
  for (const int m : cuts) ranks *= x.mesh().size(m);
  return ranks;
}

}  // namespace

bool AreLinesInBlocks(const DTensor& x, int dim) {
  constexpr int64_t kFew = 4096;  // elements whose gathering is cheaper than counting
  if (x.ndim() == 0 || x.size(dim) < kFew || x.size(dim) > std::numeric_limits<int32_t>::max()) {
    return false;
  }
  if (x.numel() == 0 || x.spec().has_partial()) return false;
  if (x.spec().in_mesh() && !x.has_values() && !RankContext::Current().rehearses()) return false;
  const int64_t ranks = RanksOf(x, dim);
  // With other dims to cut instead every rank could get a part of each line. Counting sends two
  // numbers of 8 bytes for a bit of an element: less than that, where the parts are that long.
  constexpr int64_t kLongPart = 128;
  return ranks > 0 && (x.numel() == x.size(dim) || x.size(dim) >= kLongPart * ranks);
}

bool SortsInBlocks(const DTensor& x, int64_t more) {
  if (x.ndim() != 1 || !AreLinesInBlocks(x, 0)) return false;
  // Every element and its index once, against every element to all ranks.
  const int64_t bytes = SizeOf(x.dtype());
  return bytes + 4 + more < bytes * RanksOf(x, 0);
}

DTensor PutInBlocks(const DTensor& line, const DTensor& places) {
  const NoGrad no_grad;
  return PlacedBlocks(places).Put(line);
}

namespace {

// `make` of the sorted blocks gives elements of x along dim and their indices, to which the
// gradient goes.
Values Taken(const char* name, const DTensor& x, int dim, bool descending, const Shape& shape,
             absl::Span<const Placement> placements,
             absl::FunctionRef<Values(const SortedBlocks&)> make) {
  const auto indices = std::make_shared<DTensor>();
  const auto absent = [&](DType dtype) {
    return DTensor::Absent(
        *ValueOrThrow(RankContext::Current().specs().Intern(x.mesh(), placements, shape, dtype)));
  };
  const auto forward = [&]() -> Values {
    if (!x.spec().in_mesh()) {
      *indices = absent(DType::kI64);
      return {absent(x.dtype()), *indices};
    }
    Values taken = make(SortedBlocks(x, dim, descending));
    *indices = taken[1].Detach();
    return {Owned(taken[0]), Owned(taken[1])};
  };
  const auto backward = [indices, dim, n = x.size(dim)](const Values& grads) -> Values {
    return {PutAlong(grads[0], *indices, dim, n)};
  };
  return CustomFunction(name, {x}, forward, backward, absl::MakeConstSpan(indices.get(), 1));
}

}  // namespace

Values SortInBlocks(const DTensor& x, bool descending) {
  return Taken("sort", x, 0, descending, x.shape(), x.placements(),
               [](const SortedBlocks& blocks) { return blocks.Merged(); });
}

Values RankInBlocks(const char* name, const DTensor& x, int dim,
                    absl::FunctionRef<int64_t(int64_t numbers)> rank) {
  Shape shape = x.shape();
  shape[dim] = 1;
  Placements placements(x.placements().begin(), x.placements().end());
  for (const int m : CutsOf(x.spec(), dim)) placements[m] = Replicate();
  return Taken(name, x, dim, false, shape, placements,
               [&](const SortedBlocks& blocks) { return blocks.Nth(rank); });
}

}  // namespace dtensor
