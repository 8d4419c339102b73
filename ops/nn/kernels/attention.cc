// Attention in blocks of queries and keys, so that scores exist for one block at a time. A block is
// done in strips of the few rows whose sums the registers hold: scores of a strip, its softmax
// against the largest score so far, its part of the result.
// Source: Milakov and Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2 (backward by
// blocks of keys).
#include "dtensor/ops/cpu/widen.h"
#include "dtensor/ops/kernels.h"
#include "dtensor/ops/nn/kernels/attention_parts.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

// q, k, v and perhaps a mask -> o, lse
template <class T>
class Forward {
 public:
  Forward(const KernelCall& c, bool masked)
      : c_(c),
        z_(c, 0),
        q_(c.in[0]),
        k_(c.in[1]),
        v_(c.in[2]),
        mask_(c, masked ? 3 : -1),
        dropped_(c, z_, masked),
        packed_(z_.packed()) {}

  void Run() {
    if (!z_.Fits(c_.workspace)) return;
    Allocate();
    for (int64_t b = 0; b < z_.b; ++b) {
      for (int64_t kv = 0; kv < z_.g; ++kv) {
        int64_t from, to;
        z_.HeadsOf(kv, &from, &to);
        if (packed_ && to > from) Pack(b, kv);
        for (int64_t head = from; head < to; ++head) {
          for (int64_t i = 0; i < z_.s; i += kQueries) {
            Block(b, head, kv, i, Least(kQueries, z_.s - i));
          }
        }
      }
    }
  }

 private:
  void Allocate() {
    const int64_t rows = Least(kQueries, RoundUp(z_.s, kTileRows));
    const int64_t keys = Least(kKeys, RoundUp(z_.t, kTileCols<T>));
    if (packed_) panels_ = Scratch<T>(c_, RoundUp(z_.t, kTileCols<T>) * z_.d);
    strips_ = Scratch<T>(c_, rows * z_.d);
    scores_ = Scratch<T>(c_, kTileRows * kScoreRow);
    acc_ = Scratch<T>(c_, rows * z_.e);
    if (q_.direct()) return;
    q_rows_ = Scratch<T>(c_, rows * z_.d);
    k_rows_ = Scratch<T>(c_, keys * z_.d);
    v_rows_ = Scratch<T>(c_, keys * z_.e);
  }

  void Pack(int64_t b, int64_t kv) {
    for (int64_t j = 0; j < z_.t; j += kKeys) {
      const int64_t n = Least(kKeys, z_.t - j);
      PackPanels(k_.RowsAt(b, kv, j, n, k_rows_), n, z_.d, static_cast<T>(z_.scale),
                 panels_ + j * z_.d);
    }
  }

  void Block(int64_t b, int64_t head, int64_t kv, int64_t i, int64_t rows) {
    const Matrix<T> q = q_.RowsAt(b, head, i, rows, q_rows_);
    if (packed_) PackStrips(q, rows, z_.d, strips_);
    for (int64_t r = 0; r < rows; ++r) {
      most_[r] = -__builtin_inff();
      sum_[r] = 0;
    }
    for (int64_t x = 0; x < rows * z_.e; ++x) acc_[x] = 0;
    const int64_t keys = z_.Visible(i + rows - 1, z_.t);
    for (int64_t j = 0; j < keys; j += kKeys) {
      const int64_t n = Least(kKeys, keys - j);
      const Matrix<T> v = v_.RowsAt(b, kv, j, n, v_rows_);
      const Matrix<T> k = packed_ ? Matrix<T>{} : k_.RowsAt(b, kv, j, n, k_rows_);
      dropped_.Draw(b, head, i, rows, j, n);
      for (int64_t r = 0; r < rows; r += kTileRows) {
        const int64_t strip = Least(kTileRows, rows - r);
        const int64_t seen = z_.Visible(i + r + strip - 1, j + n) - j;
        if (seen <= 0) continue;
        if (packed_) {
          StripByPanels(strips_ + r * z_.d, strip, z_.d, panels_ + j * z_.d, seen, scores_);
        } else {
          DotScores({q.data + r * q.row, q.row}, strip, z_, k, seen, scores_);
        }
        for (int64_t x = 0; x < strip; ++x) {
          Row(b, head, i, r + x, j, seen, scores_ + x * kScoreRow);
        }
        AddProduct<kScoreRow>(strip, z_.e, seen, scores_, kScoreRow, 1, v, acc_ + r * z_.e, z_.e);
      }
    }
    Finish(b, head, i, rows);
  }

  // Row r of the block from query i on, whose scores for the keys from j on are x: the strip is
  // computed up to key j + n.
  void Row(int64_t b, int64_t head, int64_t i, int64_t r, int64_t j, int64_t n, T* x) {
    const int64_t visible = z_.Visible(i + r, j + n) - j, seen = visible < 0 ? 0 : visible;
    mask_.Apply(b, head, i + r, j, seen, x);
    const int64_t whole = EndRow(x, seen);
    const T before = most_[r], here = RowMax(x, whole), most = here > before ? here : before;
    const T shift = ShiftOf(most);
    const T sum = ExpRow(x, whole, shift);
    for (int64_t k = whole; k < n; ++k) x[k] = T(0);
    if (most != before) {
      const T by = ExpWeight(before - shift);
      sum_[r] *= by;
      T* acc = acc_ + r * z_.e;
      for (int64_t k = 0; k < z_.e; ++k) acc[k] *= by;
      most_[r] = most;
    }
    sum_[r] += sum;
    dropped_.Apply(r, seen, x);
  }

  void Finish(int64_t b, int64_t head, int64_t i, int64_t rows) {
    const int64_t at = (b * z_.h + head) * z_.s + i;
    for (int64_t r = 0; r < rows; ++r) {
      const T by = sum_[r] == T(0) ? T(0) : T(1) / sum_[r];
      T* acc = acc_ + r * z_.e;
      for (int64_t k = 0; k < z_.e; ++k) acc[k] *= by;
      PutLse(c_.out[1], at + r, ShiftOf(most_[r]), Log(sum_[r]));
    }
    StoreRun(c_.out[0], at * z_.e, acc_, rows * z_.e);
  }

  const KernelCall& c_;
  const Geometry z_;
  const Source<T> q_, k_, v_;
  ScoreMask<T> mask_;
  Dropped<T> dropped_;
  const bool packed_;
  T *panels_ = nullptr, *strips_ = nullptr, *scores_ = nullptr, *acc_ = nullptr;
  T *q_rows_ = nullptr, *k_rows_ = nullptr, *v_rows_ = nullptr;
  T most_[kQueries], sum_[kQueries];
};

// The gradient of q, a block of queries at a time, as sums in T that grow with every block of keys.
// In T they are where they are to be. Those of a 16-bit gradient wait in two halves of their bits,
// one in its place and one in scratch: half of the memory of T, and nothing is rounded before the
// end.
template <class T>
class Sums {
 public:
  // `block`: the most elements of a block; `all`: that wait at a time.
  Sums(const KernelCall& c, const TensorRef& t, int64_t block, int64_t all)
      : c_(c), t_(t), all_(all), direct_(t.dtype == TypeOf<T>()) {
    if (!direct_) block_ = Scratch<T>(c, block);
  }
  // Where the n sums from element `at` of the gradient on grow, 0 at first; the block is number
  // `slot` (in elements) of those that wait.
  T* Take(int64_t at, int64_t slot, int64_t n, bool first) {
    T* sums = direct_ ? static_cast<T*>(t_.data) + at : block_;
    if (first) {
      for (int64_t i = 0; i < n; ++i) sums[i] = 0;
    } else if (!direct_) {
      const uint16_t *high = High(at), *low = low_ + slot;
      for (int64_t i = 0; i < n; ++i) {
        sums[i] = FromBits(static_cast<uint32_t>(high[i]) << 16 | low[i]);
      }
    }
    return sums;
  }
  // Of the block that was taken last.
  void Put(int64_t at, int64_t slot, int64_t n, bool last) {
    if (direct_) return;
    if (last) return StoreRun(t_, at, block_, n);
    if (low_ == nullptr) low_ = Scratch<uint16_t>(c_, all_);
    uint16_t *high = High(at), *low = low_ + slot;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bits = Bits(static_cast<float>(block_[i]));
      high[i] = static_cast<uint16_t>(bits >> 16);
      low[i] = static_cast<uint16_t>(bits);
    }
  }

 private:
  uint16_t* High(int64_t at) const { return static_cast<uint16_t*>(t_.data) + at; }

  const KernelCall& c_;
  const TensorRef& t_;
  const int64_t all_;
  const bool direct_;
  T* block_ = nullptr;
  uint16_t* low_ = nullptr;
};

// do, q, k, v, o, lse and perhaps a mask -> dq, dk, dv
template <class T>
class Backward {
 public:
  Backward(const KernelCall& c, bool masked)
      : c_(c),
        z_(c, 1),
        rows_(Least(kQueries, RoundUp(z_.s, kTileRows))),
        keys_(Least(kKeys, RoundUp(z_.t, kTileCols<T>))),
        heads_(MostHeads(z_)),
        do_(c.in[0]),
        q_(c.in[1]),
        k_(c.in[2]),
        v_(c.in[3]),
        o_(c.in[4]),
        mask_(c, masked ? 6 : -1),
        dropped_(c, z_, masked),
        dq_(c, c.out[0], rows_ * z_.d, heads_ * z_.s * z_.d) {}

  void Run() {
    if (!z_.Fits(c_.workspace)) return;
    Allocate();
    for (int64_t b = 0; b < z_.b; ++b) {
      for (int64_t kv = 0; kv < z_.g; ++kv) Group(b, kv);
    }
  }

 private:
  void Allocate() {
    k_panels_ = Scratch<T>(c_, keys_ * z_.d);
    v_panels_ = Scratch<T>(c_, keys_ * z_.e);
    q_strip_ = Scratch<T>(c_, kTileRows * z_.d);
    do_strip_ = Scratch<T>(c_, kTileRows * z_.e);
    weights_ = Scratch<T>(c_, rows_ * kScoreRow);
    slopes_ = Scratch<T>(c_, rows_ * kScoreRow);
    dots_ = Scratch<T>(c_, heads_ * z_.s);
    if (!q_.direct()) {
      q_rows_ = Scratch<T>(c_, rows_ * z_.d);
      k_rows_ = Scratch<T>(c_, keys_ * z_.d);
      v_rows_ = Scratch<T>(c_, keys_ * z_.e);
      dk_wide_ = Scratch<T>(c_, keys_ * z_.d);
      dv_wide_ = Scratch<T>(c_, keys_ * z_.e);
    }
    if (!do_.direct()) do_rows_ = Scratch<T>(c_, rows_ * z_.e);
    if (!o_.direct()) o_rows_ = Scratch<T>(c_, rows_ * z_.e);
  }

  // Query heads that read one key head.
  static int64_t MostHeads(const Geometry& z) {
    int64_t most = 0;
    for (int64_t kv = 0, from, to; kv < z.g; ++kv) {
      z.HeadsOf(kv, &from, &to);
      if (to - from > most) most = to - from;
    }
    return most;
  }

  // The place of a gradient in T, which is 0: where it is to be, or `wide`.
  T* Zeroed(int out, int64_t at, int64_t n, T* wide) const {
    T* sums = q_.direct() ? static_cast<T*>(c_.out[out].data) + at : wide;
    for (int64_t x = 0; x < n; ++x) sums[x] = 0;
    return sums;
  }
  void Store(int out, int64_t at, int64_t n, const T* sums) const {
    if (!q_.direct()) StoreRun(c_.out[out], at, sums, n);
  }

  // One key head and the query heads that read it.
  void Group(int64_t b, int64_t kv) {
    int64_t from, to;
    z_.HeadsOf(kv, &from, &to);
    for (int64_t head = from; head < to; ++head) {
      for (int64_t i = 0; i < z_.s; i += kQueries) {
        const int64_t rows = Least(kQueries, z_.s - i), at = RowOf(b, head, i) * z_.d;
        Prepare(b, head, i, rows, DotsOf(head - from) + i);
        if (z_.t > 0) continue;
        dq_.Take(at, 0, rows * z_.d, /*first=*/true);
        dq_.Put(at, 0, rows * z_.d, /*last=*/true);
      }
    }
    for (int64_t j = 0; j < z_.t; j += kKeys) {
      const int64_t n = Least(kKeys, z_.t - j), at = (b * z_.g + kv) * z_.t + j;
      dk_ = Zeroed(1, at * z_.d, n * z_.d, dk_wide_);
      dv_ = Zeroed(2, at * z_.e, n * z_.e, dv_wide_);
      if (z_.Visible(z_.s - 1, j + n) > j) Keys(b, kv, from, to, j, n);
      Store(1, at * z_.d, n * z_.d, dk_);
      Store(2, at * z_.e, n * z_.e, dv_);
    }
  }

  // n keys from j on of a key head, and the query heads [from, to) that read it.
  void Keys(int64_t b, int64_t kv, int64_t from, int64_t to, int64_t j, int64_t n) {
    const Matrix<T> k = k_.RowsAt(b, kv, j, n, k_rows_);
    if (z_.packed()) PackPanels(k, n, z_.d, static_cast<T>(z_.scale), k_panels_);
    PackPanels(v_.RowsAt(b, kv, j, n, v_rows_), n, z_.e, T(1), v_panels_);
    for (int64_t head = from; head < to; ++head) {
      for (int64_t i = 0; i < z_.s; i += kQueries) {
        const int64_t rows = Least(kQueries, z_.s - i), seen = z_.Visible(i + rows - 1, z_.t);
        if (seen <= j) continue;
        const int64_t at = RowOf(b, head, i) * z_.d, slot = ((head - from) * z_.s + i) * z_.d;
        T* dq = dq_.Take(at, slot, rows * z_.d, j == 0);
        Block(b, head, i, rows, j, n, k, DotsOf(head - from) + i, dq);
        dq_.Put(at, slot, rows * z_.d, seen <= j + n);
      }
    }
  }

  int64_t RowOf(int64_t b, int64_t head, int64_t i) const { return (b * z_.h + head) * z_.s + i; }
  T* DotsOf(int64_t head) const { return dots_ + head * z_.s; }

  // Per row of a block the sum of weight times slope, which is that of do times o.
  void Prepare(int64_t b, int64_t head, int64_t i, int64_t rows, T* dots) {
    const Matrix<T> dout = do_.RowsAt(b, head, i, rows, do_rows_);
    const Matrix<T> o = o_.RowsAt(b, head, i, rows, o_rows_);
    for (int64_t r = 0; r < rows; ++r) {
      dots[r] = Dot(dout.data + r * dout.row, o.data + r * o.row, z_.e);
    }
  }

  void Block(int64_t b, int64_t head, int64_t i, int64_t rows, int64_t j, int64_t n, Matrix<T> k,
             const T* dots, T* dq) {
    const Matrix<T> q = q_.RowsAt(b, head, i, rows, q_rows_);
    const Matrix<T> dout = do_.RowsAt(b, head, i, rows, do_rows_);
    dropped_.Draw(b, head, i, rows, j, n);
    const int64_t reached = z_.Visible(i + rows - 1, j + n) - j;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t strip = Least(kTileRows, rows - r);
      const int64_t visible = z_.Visible(i + r + strip - 1, j + n) - j;
      const int64_t seen = visible < 0 ? 0 : visible;
      T *w = weights_ + r * kScoreRow, *ds = slopes_ + r * kScoreRow;
      const Matrix<T> queries = {q.data + r * q.row, q.row};
      if (z_.packed()) {
        PackStrips(queries, strip, z_.d, q_strip_);
        StripByPanels(q_strip_, strip, z_.d, k_panels_, seen, w);
      } else {
        DotScores(queries, strip, z_, k, seen, w);
      }
      PackStrips({dout.data + r * dout.row, dout.row}, strip, z_.e, do_strip_);
      StripByPanels(do_strip_, strip, z_.e, v_panels_, seen, ds);
      for (int64_t x = 0; x < strip; ++x) {
        Row(b, head, i, r + x, j, n, reached, dots[r + x], w + x * kScoreRow, ds + x * kScoreRow);
      }
      AddProduct<kScoreRow>(strip, z_.d, seen, ds, kScoreRow, 1, k, dq + r * z_.d, z_.d);
    }
    const int64_t all = z_.Visible(i, j + reached) - j;
    const int64_t whole = all == reached ? all : (all < 0 ? 0 : all / kTileRows * kTileRows);
    AddKeys(whole, 0, rows, 0, dout, q);
    for (int64_t key = whole; key < reached; key += kTileRows) {
      const int64_t first = z_.FirstRow(j + key) - i;
      AddKeys(Least(kTileRows, reached - key), first < 0 ? 0 : first, rows, key, dout, q);
    }
  }

  // Adds to dv and dk of n keys of the block, from `key` on, what the rows from `first` on give.
  void AddKeys(int64_t n, int64_t first, int64_t rows, int64_t key, Matrix<T> dout, Matrix<T> q) {
    const int64_t at = first * kScoreRow + key;
    const T *from_dout = dout.data + first * dout.row, *from_q = q.data + first * q.row;
    AddProduct<1>(n, z_.e, rows - first, weights_ + at, 1, kScoreRow, {from_dout, dout.row},
                  dv_ + key * z_.e, z_.e);
    AddProduct<1>(n, z_.d, rows - first, slopes_ + at, 1, kScoreRow, {from_q, q.row},
                  dk_ + key * z_.d, z_.d);
  }

  // Scores and slopes of the weights become weights and slopes of the scores before scaling; 0
  // for keys up to `reached` that the row does not see.
  void Row(int64_t b, int64_t head, int64_t i, int64_t r, int64_t j, int64_t n, int64_t reached,
           T dot, T* w, T* ds) {
    const int64_t visible = z_.Visible(i + r, j + n) - j, seen = visible < 0 ? 0 : visible;
    const int64_t* step = c_.in[5].strides;
    const auto shift = RowShift<T>::Of(c_.in[5], b * step[0] + head * step[1] + (i + r) * step[2]);
    const T scale = static_cast<T>(z_.scale);
    mask_.Apply(b, head, i + r, j, seen, w);
    dropped_.Apply(r, seen, ds);
    SlopeRow(w, ds, EndRow(w, seen), shift, dot, scale);
    dropped_.Apply(r, seen, w);
    for (int64_t x = seen; x < reached; ++x) w[x] = ds[x] = T(0);
  }

  const KernelCall& c_;
  const Geometry z_;
  const int64_t rows_, keys_, heads_;  // the most of a block, and that read one key head
  const Source<T> do_, q_, k_, v_, o_;
  ScoreMask<T> mask_;
  Dropped<T> dropped_;
  Sums<T> dq_;
  T *k_panels_, *v_panels_, *q_strip_, *do_strip_, *weights_, *slopes_, *dk_, *dv_, *dots_;
  T *q_rows_ = nullptr, *k_rows_ = nullptr, *v_rows_ = nullptr, *do_rows_ = nullptr;
  T *o_rows_ = nullptr, *dk_wide_ = nullptr, *dv_wide_ = nullptr;
};

// Heads may lie apart and rows between each other; the elements of a row lie side by side.
bool RowsLieTogether(const KernelCall& c, int tensors) {
  for (int i = 0; i < tensors; ++i) {
    const TensorRef& t = c.in[i];
    if (t.sizes[3] > 1 && t.strides[3] != 1) return false;
  }
  return true;
}

template <template <class> class Work, int kQ, bool kMasked>
void Run(const KernelCall& c) {
  if (c.in[kQ].dtype == DType::kF64) {
    Work<double>(c, kMasked).Run();
  } else {
    Work<float>(c, kMasked).Run();
  }
}
template <template <class> class Work, int kQ, bool kMasked>
void Kernel(const KernelCall& c) {
  if (RowsLieTogether(c, kQ == 0 ? 3 : 5)) return Run<Work, kQ, kMasked>(c);
  RunContiguous(c, Run<Work, kQ, kMasked>);
}

}  // namespace

void RegisterAttention(AddKernelFn add) {
  constexpr KernelLayout kStrided = KernelLayout::kStrided;
  add("attention", Kernel<Forward, 0, false>, kFloatDTypes, kStrided);
  add("attention_backward", Kernel<Backward, 1, false>, kFloatDTypes, kStrided);
  add("masked_attention", Kernel<Forward, 0, true>, kFloatDTypes, kStrided);
  add("masked_attention_backward", Kernel<Backward, 1, true>, kFloatDTypes, kStrided);
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
