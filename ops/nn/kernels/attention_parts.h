// What forward and backward of attention are made of: which rows belong together, operands as rows,
// packing, products of blocks, reductions and exponentials of rows, masks, dropout.
#pragma once

#include <cstdint>

#include "dtensor/ops/cpu/rows.h"
#include "dtensor/rng/keep_mask.h"
#include "dtensor/tensor/cpu/kernels/runs.h"
#include "dtensor/tensor/cpu/kernels/tile.h"
#include "dtensor/tensor/kernel.h"

namespace dtensor {
namespace DT_LEVEL_NS {

static constexpr int64_t kQueries = 96;           // of a block: whole strips at every level
static constexpr int64_t kKeys = 256;             // of a block
static constexpr int64_t kScoreRow = kKeys + 16;  // rows of a block of scores share no cache set
static constexpr int64_t kFewRows = 4;            // so many queries do not pay for packed keys
static_assert(kQueries % kTileRows == 0);

template <class T>
constexpr DType TypeOf() {
  return sizeof(T) == 8 ? DType::kF64 : DType::kF32;
}

DT_MATH int64_t Least(int64_t a, int64_t b) { return a < b ? a : b; }

// Sizes; which key head a query head reads; where the mask of dropout is. factors: {s, h, b, g} or
// the first two of them; global < 0 where heads are not called so (ForwardFactors).
struct Geometry {
  Geometry(const KernelCall& c, int q) {
    const TensorRef &tq = c.in[q], &tk = c.in[q + 1], &tv = c.in[q + 2];
    b = tq.sizes[0];
    h = tq.sizes[1];
    s = tq.sizes[2];
    d = tq.sizes[3];
    g = tk.sizes[1];
    t = tk.sizes[2];
    e = tv.sizes[3];
    scale = c.attrs[0].d;
    causal = c.attrs[1].i != 0;
    first_query = Start(c, 0);
    first_head = Start(c, 1);
    heads = Global(c, 1, h);
    global_s = Global(c, 0, s);
    first_batch = Start(c, 2);
    first_group = Start(c, 3);
    repeats = g > 0 && !IsCut(c, 1) ? h / g : 1;
    global_heads = IsCut(c, 1) ? heads : Global(c, 3, g) * repeats;
  }
  static bool IsCut(const KernelCall& c, size_t f) {
    return c.factors.size() > f && c.factors[f].global >= 0;
  }
  static int64_t Start(const KernelCall& c, size_t f) {
    return IsCut(c, f) ? c.factors[f].start : 0;
  }
  static int64_t Global(const KernelCall& c, size_t f, int64_t local) {
    return IsCut(c, f) ? c.factors[f].global : local;
  }
  int64_t KvHead(int64_t head) const {
    const int64_t group = g > 0 && heads >= g ? heads / g : 1;
    return (first_head + head) / group;
  }
  // The query heads [*from, *to) read this key head.
  void HeadsOf(int64_t kv, int64_t* from, int64_t* to) const {
    *from = 0;
    while (*from < h && KvHead(*from) < kv) ++*from;
    *to = *from;
    while (*to < h && KvHead(*to) == kv) ++*to;
  }
  // False where a declaration handed over what is not so: no memory is touched then.
  bool Fits(Workspace* workspace) const {
    const bool fits = h == 0 || (first_head >= 0 && KvHead(h - 1) < g);
    if (!fits) workspace->Fail("a query head without a key head");
    return fits;
  }
  // Whether scores are products of packed panels, else dot products: they differ in rounding, so it
  // is the same on every rank and forward and backward, where a weight is exp(score - lse).
  bool packed() const { return global_s > kFewRows; }
  // How many of the first `keys` keys query row i sees.
  int64_t Visible(int64_t row, int64_t keys) const {
    const int64_t n = first_query + row + 1;
    return causal && n < keys ? n : keys;
  }
  // The first query row, perhaps one of other ranks, that sees this key.
  int64_t FirstRow(int64_t key) const { return causal ? key - first_query : 0; }
  // Place of a score among those of the whole op, in row-major order.
  int64_t PlaceOf(int64_t batch, int64_t head, int64_t query, int64_t key) const {
    const int64_t global_head = first_head + first_group * repeats + head;
    return (((first_batch + batch) * global_heads + global_head) * global_s + first_query + query) *
               t +
           key;
  }
  int64_t b, h, s, d, g, t, e;
  int64_t first_query, first_head, heads;
  int64_t global_s, first_batch, first_group, repeats, global_heads;
  double scale;
  bool causal;
};

template <class T>
struct Matrix {
  const T* data;
  int64_t row;
};

// A tensor of four dims, the last one with stride 1, as rows in T.
template <class T>
class Source {
 public:
  explicit Source(const TensorRef& t)
      : t_(t),
        copy_(ActiveRuns().copy[static_cast<int>(t.dtype)][static_cast<int>(TypeOf<T>())]),
        direct_(t.dtype == TypeOf<T>()) {}
  // Rows [first, first + n): where they are, or widened to `scratch`.
  Matrix<T> RowsAt(int64_t b, int64_t h, int64_t first, int64_t n, T* scratch) const {
    const int64_t at = b * t_.strides[0] + h * t_.strides[1] + first * t_.strides[2];
    if (direct_) return {static_cast<const T*>(t_.data) + at, t_.strides[2]};
    const int64_t cols = t_.sizes[3];
    const auto* from = static_cast<const uint16_t*>(t_.data) + at;
    for (int64_t r = 0; r < n; ++r) {
      copy_(scratch + r * cols, 1, from + r * t_.strides[2], 1, cols);
    }
    return {scratch, cols};
  }
  bool direct() const { return direct_; }

 private:
  const TensorRef& t_;
  CopyRunFn copy_;
  bool direct_;
};

// n contiguous elements of T to element `at` of t.
template <class T>
void StoreRun(const TensorRef& t, int64_t at, const T* from, int64_t n) {
  ActiveRuns().copy[static_cast<int>(TypeOf<T>())][static_cast<int>(t.dtype)](
      static_cast<char*>(t.data) + at * SizeOf(t.dtype), 1, from, 1, n);
}

template <class T>
T* Scratch(const KernelCall& c, int64_t n) {
  return static_cast<T*>(c.workspace->Allocate(n * static_cast<int64_t>(sizeof(T))));
}

static constexpr int64_t RoundUp(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Four rows of four elements, `row` apart and times `by`, become columns `step` apart.
template <class T>
DT_INLINE void Turn4x4(const T* from, int64_t row, T by, T* to, int64_t step) {
  typedef T Four __attribute__((vector_size(4 * sizeof(T))));
  Four in[4];
  for (int k = 0; k < 4; ++k) {
    __builtin_memcpy(&in[k], from + k * row, sizeof(Four));
    in[k] *= by;
  }
  const Four a = __builtin_shufflevector(in[0], in[1], 0, 4, 1, 5);
  const Four b = __builtin_shufflevector(in[2], in[3], 0, 4, 1, 5);
  const Four c = __builtin_shufflevector(in[0], in[1], 2, 6, 3, 7);
  const Four d = __builtin_shufflevector(in[2], in[3], 2, 6, 3, 7);
  const Four out[4] = {
      __builtin_shufflevector(a, b, 0, 1, 4, 5), __builtin_shufflevector(a, b, 2, 3, 6, 7),
      __builtin_shufflevector(c, d, 0, 1, 4, 5), __builtin_shufflevector(c, d, 2, 3, 6, 7)};
  for (int k = 0; k < 4; ++k) __builtin_memcpy(to + k * step, &out[k], sizeof(Four));
}

// [n, cols] times `by` -> groups of kGroup rows, in each [cols, kGroup], the last padded with
// zeros.
template <int64_t kGroup, class T>
void PackColumns(Matrix<T> x, int64_t n, int64_t cols, T by, T* out) {
  for (int64_t j = 0; j < n; j += kGroup, out += cols * kGroup) {
    const int64_t rows = Least(kGroup, n - j), turned = cols / 4 * 4;
    const T* from = x.data + j * x.row;
    int64_t i = 0;
    for (; i + 4 <= rows; i += 4, from += 4 * x.row) {
      for (int64_t k = 0; k < turned; k += 4) {
        Turn4x4(from + k, x.row, by, out + k * kGroup + i, kGroup);
      }
      for (int64_t k = turned; k < cols; ++k) {
        for (int64_t r = 0; r < 4; ++r) out[k * kGroup + i + r] = by * from[r * x.row + k];
      }
    }
    for (; i < rows; ++i, from += x.row) {
      for (int64_t k = 0; k < cols; ++k) out[k * kGroup + i] = by * from[k];
    }
    for (; i < kGroup; ++i) {
      for (int64_t k = 0; k < cols; ++k) out[k * kGroup + i] = T(0);
    }
  }
}
// Panels: B of a product with the transpose. Strips: A of a product.
template <class T>
void PackPanels(Matrix<T> x, int64_t n, int64_t cols, T by, T* out) {
  PackColumns<kTileCols<T>>(x, n, cols, by, out);
}
template <class T>
void PackStrips(Matrix<T> x, int64_t n, int64_t cols, T* out) {
  PackColumns<kTileRows>(x, n, cols, T(1), out);
}

// C[m, n] += A B, where a_row is kARow if that is not 0.
template <int64_t kARow, class T>
void AddProduct(int64_t m, int64_t n, int64_t k, const T* a, int64_t a_row, int64_t a_col,
                Matrix<T> b, T* c, int64_t c_row) {
  const TileCall<T> call = {m, n, k, a, a_row, a_col, nullptr, b.row, nullptr, c_row, true};
  for (int64_t j = 0; j < n; j += kTileCols<T>) {
    TilePanel<kTileRows, kARow>(call, b.data + j, c + j, Least(kTileCols<T>, n - j));
  }
}

// out[r, j] = the products of a strip with the first `n` columns of panels; also columns up to
// the next whole panel are written.
template <class T>
void StripByPanels(const T* strip, int64_t rows, int64_t depth, const T* panels, int64_t n,
                   T* out) {
  constexpr int64_t kPanel = kTileCols<T>;
  const TileCall<T> call = {rows,    kPanel, depth,   strip,     1,    kTileRows,
                            nullptr, kPanel, nullptr, kScoreRow, false};
  for (int64_t j = 0; j < n; j += kPanel, panels += depth * kPanel) {
    TilePanel<kTileRows, 1>(call, panels, out + j, kPanel);
  }
}

template <class T>
DT_MATH T Dot(const T* a, const T* b, int64_t n) {
  return SumOf<T>(n, [a, b](int64_t i) { return a[i] * b[i]; });
}

static constexpr int kChains = 4;  // independent vectors of a reduction over a row

// Rows of scores are gone over in whole steps; what follows the scores of a row is minus infinity,
// which weighs nothing, up to the end of the last step.
template <class T>
static constexpr int64_t kRowStep = kChains * Vector<T>::kWidth;
static_assert(kKeys % kRowStep<float> == 0 && kKeys % kRowStep<double> == 0);

// Ends a row of n scores so; returns how many there are then.
template <class T>
DT_INLINE int64_t EndRow(T* x, int64_t n) {
  const int64_t whole = RoundUp(n, kRowStep<T>);
  for (int64_t i = n; i < whole; ++i) x[i] = -__builtin_inff();
  return whole;
}

// Scores of a strip without packing.
template <class T>
void DotScores(Matrix<T> q, int64_t rows, const Geometry& z, Matrix<T> k, int64_t n, T* out) {
  const T scale = static_cast<T>(z.scale);
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t r = 0; r < rows; ++r) {
      out[r * kScoreRow + j] = scale * Dot(q.data + r * q.row, k.data + j * k.row, z.d);
    }
  }
}

// The largest of a row's scores; NaN is passed over.
template <class T>
T RowMax(const T* x, int64_t whole) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  V<T> most[kChains];
  for (V<T>& m : most) m = V<T>{} - __builtin_inff();
  for (int64_t i = 0; i < whole; i += kRowStep<T>) {
    for (int c = 0; c < kChains; ++c) {
      most[c] = Larger(Load<false>(x + i + c * kWidth, kWidth), most[c]);
    }
  }
  return MaxLanes(Larger(Larger(most[0], most[1]), Larger(most[2], most[3])));
}

// What is added to scores: input `at` of the call, bool (false: minus infinity) or floating, any of
// whose dims may have size 1; none where `at` < 0.
template <class T>
class ScoreMask {
 public:
  ScoreMask(const KernelCall& c, int at) {
    if (at < 0) return;
    const TensorRef& t = c.in[at];
    data_ = static_cast<const char*>(t.data);
    size_ = SizeOf(t.dtype);
    boolean_ = t.dtype == DType::kBool;
    direct_ = t.dtype == TypeOf<T>();
    copy_ = ActiveRuns().copy[static_cast<int>(t.dtype)][static_cast<int>(TypeOf<T>())];
    for (int d = 0; d < 4; ++d) stride_[d] = t.sizes[d] == 1 ? 0 : t.strides[d];
    row_ = Scratch<T>(c, kKeys);
  }
  // Adds it to n scores of a row from key j on.
  void Apply(int64_t b, int64_t h, int64_t query, int64_t j, int64_t n, T* scores) {
    if (data_ == nullptr) return;
    const T* row = RowAt(
        data_ + size_ * (b * stride_[0] + h * stride_[1] + query * stride_[2] + j * stride_[3]), n);
    if (boolean_) {
      for (int64_t i = 0; i < n; ++i) scores[i] = row[i] != T(0) ? scores[i] : -__builtin_inff();
    } else {
      for (int64_t i = 0; i < n; ++i) scores[i] += row[i];
    }
  }

 private:
  // In T; the last one is kept, as padding is the same for all queries.
  const T* RowAt(const char* at, int64_t n) {
    if (direct_ && stride_[3] == 1) return reinterpret_cast<const T*>(at);
    if (at != held_ || n > num_held_) copy_(row_, 1, at, stride_[3], n);
    held_ = at;
    num_held_ = n;
    return row_;
  }

  const char *data_ = nullptr, *held_ = nullptr;
  int64_t size_ = 0, num_held_ = 0, stride_[4] = {};
  bool boolean_ = false, direct_ = false;
  CopyRunFn copy_ = nullptr;
  T* row_ = nullptr;
};

// Dropout of weights by the bits that ReserveDropout reserved: attributes 2 (what is kept times
// this) and 3; none where the call has no such attributes or no words.
template <class T>
class Dropped {
 public:
  Dropped(const KernelCall& c, const Geometry& z, bool masked) : z_(z) {
    if (!masked || c.attrs[3].n == 0) return;
    words_ = c.attrs[3].ints;
    num_words_ = c.attrs[3].n;
    kept_ = static_cast<T>(c.attrs[2].d);
    bits_ = Scratch<bool>(c, Least(kQueries, z.s) * kKeys);
  }
  bool any() const { return words_ != nullptr; }
  // Of the block of `rows` queries from i on and n keys from j on.
  void Draw(int64_t b, int64_t head, int64_t i, int64_t rows, int64_t j, int64_t n) {
    if (!any()) return;
    DrawKeepMask(words_, num_words_, z_.PlaceOf(b, head, i, j), rows, z_.t, n, bits_, kKeys);
  }
  // To the scores of row `row` of that block.
  void Apply(int64_t row, int64_t n, T* x) const {
    if (!any()) return;
    const bool* keep = bits_ + row * kKeys;
    const T kept = kept_;
    for (int64_t k = 0; k < n; ++k) x[k] = keep[k] ? kept * x[k] : T(0);
  }

 private:
  const Geometry& z_;
  const int64_t* words_ = nullptr;
  int64_t num_words_ = 0;
  T kept_ = 1;
  bool* bits_ = nullptr;
};

// exp(x) for x up to about 0, which scores less their largest are: what would be subnormal is 0. A
// minimax polynomial of degree 6 (error 1 ulp), half the work of Exp. Of floats or a vector of
// them.
DT_INLINE float PowerOfTwo(float rounded) { return FromBits((Bits(rounded) + 127) << 23); }
DT_INLINE V<float> PowerOfTwo(V<float> rounded) {
  typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
  return reinterpret_cast<V<float>>((reinterpret_cast<Words>(rounded) + 127) << 23);
}
template <class X>
DT_INLINE X ExpWeight(X x) {
  const X all = {};  // and a number: that number in every element
  const X rounded = MultiplyAdd(x, all + 1.44269504f, all + kRoundF32), n = rounded - kRoundF32;
  const X r = MultiplyAdd(n, all + 2.12194440e-4f, MultiplyAdd(n, all - 0.693359375f, x));
  X p = all + 0.0013814535f;
  p = MultiplyAdd(p, r, all + 0.0083687457f);
  p = MultiplyAdd(p, r, all + 0.041668391f);
  p = MultiplyAdd(p, r, all + 0.16666520f);
  p = MultiplyAdd(p, r, all + 0.49999993f);
  p = MultiplyAdd(p, r, all + 1.0f);
  p = MultiplyAdd(p, r, all + 1.0f);
  const X scaled = p * PowerOfTwo(rounded);  // NaN stays
  return x < -87.0f ? all : scaled;
}
DT_INLINE double ExpWeight(double x) { return Exp(x); }
// Exp is not written for vectors: element by element, which compilers make into some.
DT_INLINE V<double> ExpWeight(V<double> x) {
  V<double> y;
  for (int64_t i = 0; i < Vector<double>::kWidth; ++i) y[i] = Exp(x[i]);
  return y;
}

// A row's scores become its weights before they are divided by their sum, which is returned.
template <class T>
T ExpRow(T* x, int64_t whole, T shift) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  V<T> sum[kChains] = {};
  for (int64_t i = 0; i < whole; i += kRowStep<T>) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) {
      const V<T> weight = ExpWeight(Load<false>(x + i + c * kWidth, kWidth) - shift);
      Store<false>(x + i + c * kWidth, weight, kWidth);
      sum[c] += weight;
    }
  }
  return SumLanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Rows without any key have nothing but minus infinity.
template <class T>
DT_MATH T ShiftOf(T largest) {
  return largest == -__builtin_inff() ? T(0) : largest;
}

// lse as most + rest: where that is rounded to float32, all weights of the row are wrong by as
// much.
template <class T>
void PutLse(const TensorRef& lse, int64_t at, T most, T rest) {
  if (lse.dtype == DType::kF64) {
    static_cast<double*>(lse.data)[at] = static_cast<double>(most) + static_cast<double>(rest);
  } else {
    static_cast<T*>(lse.data)[at] = most + rest;
  }
}

// exp(x - lse) is by * exp(x - most).
template <class T>
struct RowShift {
  T most, by;
  static RowShift Of(const TensorRef& lse, int64_t at) {
    if (lse.dtype != DType::kF64) return {ShiftOf(static_cast<const T*>(lse.data)[at]), T(1)};
    const double whole = ShiftOf(static_cast<const double*>(lse.data)[at]);
    const T most = static_cast<T>(whole);
    return {most, static_cast<T>(Exp(static_cast<double>(most) - whole))};
  }
};

// Scores become weights, and the slopes of the weights those of the scores before scaling; `dot`:
// the sum over the row of weight times slope.
template <class T>
void SlopeRow(T* w, T* ds, int64_t whole, RowShift<T> shift, T dot, T scale) {
  constexpr int64_t kWidth = Vector<T>::kWidth;
  for (int64_t i = 0; i < whole; i += kWidth) {
    const V<T> weight = shift.by * ExpWeight(Load<false>(w + i, kWidth) - shift.most);
    Store<false>(w + i, weight, kWidth);
    Store<false>(ds + i, scale * weight * (Load<false>(ds + i, kWidth) - dot), kWidth);
  }
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
