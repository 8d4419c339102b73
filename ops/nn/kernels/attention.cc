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
        packed_(z_.global_s > kFewRows) {}

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
          DotScores({q.data + r * q.row, q.row}, strip, k, seen);
        }
        for (int64_t x = 0; x < strip; ++x) {
          Row(b, head, i, r + x, j, seen, scores_ + x * kScoreRow);
        }
        AddProduct<kScoreRow>(strip, z_.e, seen, scores_, kScoreRow, 1, v, acc_ + r * z_.e, z_.e);
      }
    }
    Finish(b, head, i, rows);
  }

  void DotScores(Matrix<T> q, int64_t rows, Matrix<T> k, int64_t n) {
    const T scale = static_cast<T>(z_.scale);
    for (int64_t j = 0; j < n; ++j) {
      for (int64_t r = 0; r < rows; ++r) {
        scores_[r * kScoreRow + j] = scale * Dot(q.data + r * q.row, k.data + j * k.row, z_.d);
      }
    }
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
    T* lse = static_cast<T*>(c_.out[1].data) + at;
    for (int64_t r = 0; r < rows; ++r) {
      const T by = sum_[r] == T(0) ? T(0) : T(1) / sum_[r];
      T* acc = acc_ + r * z_.e;
      for (int64_t k = 0; k < z_.e; ++k) acc[k] *= by;
      lse[r] = ShiftOf(most_[r]) + Log(sum_[r]);
    }
    StoreRun(c_.out[0], at * z_.e, acc_, rows * z_.e);
  }

  const KernelCall& c_;
  const Geometry z_;
  const Source<T> q_, k_, v_;
  ScoreMask<T> mask_;
  Dropped<T> dropped_;
  const bool packed_;  // the same on every rank: so are the bits
  T *panels_ = nullptr, *strips_ = nullptr, *scores_ = nullptr, *acc_ = nullptr;
  T *q_rows_ = nullptr, *k_rows_ = nullptr, *v_rows_ = nullptr;
  T most_[kQueries], sum_[kQueries];
};

// do, q, k, v, o, lse and perhaps a mask -> dq, dk, dv
template <class T>
class Backward {
 public:
  Backward(const KernelCall& c, bool masked)
      : c_(c),
        z_(c, 1),
        do_(c.in[0]),
        q_(c.in[1]),
        k_(c.in[2]),
        v_(c.in[3]),
        o_(c.in[4]),
        mask_(c, masked ? 6 : -1),
        dropped_(c, z_, masked) {}

  void Run() {
    if (!z_.Fits(c_.workspace)) return;
    Allocate();
    for (int64_t b = 0; b < z_.b; ++b) {
      for (int64_t kv = 0; kv < z_.g; ++kv) Group(b, kv);
    }
  }

 private:
  void Allocate() {
    const int64_t rows = Least(kQueries, RoundUp(z_.s, kTileRows));
    const int64_t keys = Least(kKeys, RoundUp(z_.t, kTileCols<T>));
    k_panels_ = Scratch<T>(c_, keys * z_.d);
    v_panels_ = Scratch<T>(c_, keys * z_.e);
    q_strips_ = Scratch<T>(c_, RoundUp(z_.s, kTileRows) * z_.d);
    do_strips_ = Scratch<T>(c_, RoundUp(z_.s, kTileRows) * z_.e);
    weights_ = Scratch<T>(c_, rows * kScoreRow);
    slopes_ = Scratch<T>(c_, rows * kScoreRow);
    dots_ = Scratch<T>(c_, z_.s);
    if (!q_.direct()) {
      q_rows_ = Scratch<T>(c_, rows * z_.d);
      k_rows_ = Scratch<T>(c_, keys * z_.d);
      v_rows_ = Scratch<T>(c_, keys * z_.e);
      dq_wide_ = Scratch<T>(c_, z_.s * z_.d);
      dk_wide_ = Scratch<T>(c_, z_.t * z_.d);
      dv_wide_ = Scratch<T>(c_, z_.t * z_.e);
    }
    if (!do_.direct()) do_rows_ = Scratch<T>(c_, rows * z_.e);
    if (!o_.direct()) o_rows_ = Scratch<T>(c_, rows * z_.e);
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
    const int64_t keys = (b * z_.g + kv) * z_.t;
    dk_ = Zeroed(1, keys * z_.d, z_.t * z_.d, dk_wide_);
    dv_ = Zeroed(2, keys * z_.e, z_.t * z_.e, dv_wide_);
    int64_t from, to;
    z_.HeadsOf(kv, &from, &to);
    for (int64_t head = from; head < to; ++head) Head(b, head, kv);
    Store(1, keys * z_.d, z_.t * z_.d, dk_);
    Store(2, keys * z_.e, z_.t * z_.e, dv_);
  }

  void Head(int64_t b, int64_t head, int64_t kv) {
    const int64_t first = (b * z_.h + head) * z_.s * z_.d;
    T* dq = Zeroed(0, first, z_.s * z_.d, dq_wide_);
    for (int64_t i = 0; i < z_.s; i += kQueries) Prepare(b, head, i, Least(kQueries, z_.s - i));
    for (int64_t j = 0; j < z_.t; j += kKeys) {
      const int64_t n = Least(kKeys, z_.t - j);
      if (z_.Visible(z_.s - 1, j + n) <= j) break;
      const Matrix<T> k = k_.RowsAt(b, kv, j, n, k_rows_);
      PackPanels(k, n, z_.d, static_cast<T>(z_.scale), k_panels_);
      PackPanels(v_.RowsAt(b, kv, j, n, v_rows_), n, z_.e, T(1), v_panels_);
      for (int64_t i = 0; i < z_.s; i += kQueries) {
        const int64_t rows = Least(kQueries, z_.s - i);
        if (z_.Visible(i + rows - 1, j + n) > j) Block(b, head, i, rows, j, n, k, dq + i * z_.d);
      }
    }
    Store(0, first, z_.s * z_.d, dq);
  }

  // Queries and gradients of a block as strips, once for all keys; and per row the sum of weight
  // times slope, which is that of do times o.
  void Prepare(int64_t b, int64_t head, int64_t i, int64_t rows) {
    const Matrix<T> dout = do_.RowsAt(b, head, i, rows, do_rows_);
    const Matrix<T> o = o_.RowsAt(b, head, i, rows, o_rows_);
    for (int64_t r = 0; r < rows; ++r) {
      dots_[i + r] = Dot(dout.data + r * dout.row, o.data + r * o.row, z_.e);
    }
    PackStrips(q_.RowsAt(b, head, i, rows, q_rows_), rows, z_.d, q_strips_ + i * z_.d);
    PackStrips(dout, rows, z_.e, do_strips_ + i * z_.e);
  }

  void Block(int64_t b, int64_t head, int64_t i, int64_t rows, int64_t j, int64_t n, Matrix<T> k,
             T* dq) {
    const Matrix<T> q = q_.RowsAt(b, head, i, rows, q_rows_);
    const Matrix<T> dout = do_.RowsAt(b, head, i, rows, do_rows_);
    const T *q_strips = q_strips_ + i * z_.d, *do_strips = do_strips_ + i * z_.e;
    dropped_.Draw(b, head, i, rows, j, n);
    const int64_t reached = z_.Visible(i + rows - 1, j + n) - j;
    for (int64_t r = 0; r < rows; r += kTileRows) {
      const int64_t strip = Least(kTileRows, rows - r);
      const int64_t visible = z_.Visible(i + r + strip - 1, j + n) - j;
      const int64_t seen = visible < 0 ? 0 : visible;
      T *w = weights_ + r * kScoreRow, *ds = slopes_ + r * kScoreRow;
      StripByPanels(q_strips + r * z_.d, strip, z_.d, k_panels_, seen, w);
      StripByPanels(do_strips + r * z_.e, strip, z_.e, v_panels_, seen, ds);
      for (int64_t x = 0; x < strip; ++x) {
        Row(b, head, i, r + x, j, n, reached, w + x * kScoreRow, ds + x * kScoreRow);
      }
      AddProduct<kScoreRow>(strip, z_.d, seen, ds, kScoreRow, 1, k, dq + r * z_.d, z_.d);
    }
    const int64_t all = z_.Visible(i, j + reached) - j;
    const int64_t whole = all == reached ? all : (all < 0 ? 0 : all / kTileRows * kTileRows);
    AddKeys(j, whole, 0, rows, 0, dout, q);
    for (int64_t key = whole; key < reached; key += kTileRows) {
      const int64_t first = z_.FirstRow(j + key) - i;
      AddKeys(j + key, Least(kTileRows, reached - key), first < 0 ? 0 : first, rows, key, dout, q);
    }
  }

  // Adds to dv and dk of the n keys from `key` on, whose weights begin in column `col`, what the
  // rows from `first` on give.
  void AddKeys(int64_t key, int64_t n, int64_t first, int64_t rows, int64_t col, Matrix<T> dout,
               Matrix<T> q) {
    const int64_t at = first * kScoreRow + col;
    const T *from_dout = dout.data + first * dout.row, *from_q = q.data + first * q.row;
    AddProduct<1>(n, z_.e, rows - first, weights_ + at, 1, kScoreRow, {from_dout, dout.row},
                  dv_ + key * z_.e, z_.e);
    AddProduct<1>(n, z_.d, rows - first, slopes_ + at, 1, kScoreRow, {from_q, q.row},
                  dk_ + key * z_.d, z_.d);
  }

  // Scores and slopes of the weights become weights and slopes of the scores before scaling; 0
  // for keys up to `reached` that the row does not see.
  void Row(int64_t b, int64_t head, int64_t i, int64_t r, int64_t j, int64_t n, int64_t reached,
           T* w, T* ds) {
    const int64_t visible = z_.Visible(i + r, j + n) - j, seen = visible < 0 ? 0 : visible;
    const int64_t* step = c_.in[5].strides;
    const T lse =
        static_cast<const T*>(c_.in[5].data)[b * step[0] + head * step[1] + (i + r) * step[2]];
    const T dot = dots_[i + r], scale = static_cast<T>(z_.scale);
    mask_.Apply(b, head, i + r, j, seen, w);
    dropped_.Apply(r, seen, ds);
    SlopeRow(w, ds, EndRow(w, seen), ShiftOf(lse), dot, scale);
    dropped_.Apply(r, seen, w);
    for (int64_t x = seen; x < reached; ++x) w[x] = ds[x] = T(0);
  }

  const KernelCall& c_;
  const Geometry z_;
  const Source<T> do_, q_, k_, v_, o_;
  ScoreMask<T> mask_;
  Dropped<T> dropped_;
  T *k_panels_, *v_panels_, *q_strips_, *do_strips_, *weights_, *slopes_, *dk_, *dv_, *dots_;
  T *q_rows_ = nullptr, *k_rows_ = nullptr, *v_rows_ = nullptr, *do_rows_ = nullptr;
  T *o_rows_ = nullptr, *dq_wide_ = nullptr, *dk_wide_ = nullptr, *dv_wide_ = nullptr;
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
