// Attention by tiles of queries and keys: scores exist for one tile at a time. A block of threads
// has a tile of queries (forward, gradient of q) or of keys (gradients of k and v), of which it
// makes up to 128 columns; where heads are wider several blocks make the same scores. Narrow heads
// of 16-bit floats go to attention_mma.cu.
// Source: Milakov and Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2.
#include "dtensor/tensor/cuda/kernels/attention.h"

namespace dtensor::cuda {
namespace {

template <class X>
using TileOf = Tile<Computed<X>>;

// Which tile of which head a block has, and which columns: the last vary fastest.
struct Place {
  int64_t b, head, first, column;
  __device__ Place(int64_t heads, int64_t rows, int tile, int64_t chunks, int columns) {
    const int64_t tiles = (rows + tile - 1) / tile;
    int64_t at = blockIdx.x;
    column = at % chunks * columns;
    at /= chunks;
    first = at % tiles * tile;
    at /= tiles;
    head = at % heads;
    b = at / heads;
  }
};

template <class X, int kColumns>
__global__ void __launch_bounds__(TileOf<X>::kBlock, 1)
    Forward(Shapes z, Heads q, Heads k, Heads v, X* o, Lse<X>* lse, int64_t chunks) {
  using T = Computed<X>;
  using Tile = TileOf<X>;
  constexpr int kN = Tile::kN, kRows = Tile::kRows, kKeys = Tile::kKeys;
  constexpr int kOwn = Tile::template kOwn<kColumns>;
  __shared__ typename Tile::Memory memory;
  Tile tile(&memory);
  const Place place(z.h, z.s, kN, chunks, kColumns);
  const int64_t kv = z.KeyHead(place.head), last = place.first + kN - 1;
  const HeadRows<X> queries(q, place.b, place.head, place.first, z.s, z.d);
  T acc[kRows][kOwn] = {}, most[kRows], sum[kRows] = {};
  for (T& m : most) m = -static_cast<T>(INFINITY);
  const int64_t keys = z.Visible(last < z.s ? last : z.s - 1, z.t);
  for (int64_t j = 0; j < keys; j += kN) {
    const HeadRows<X> key_rows(k, place.b, kv, j, z.t, z.d), values(v, place.b, kv, j, z.t, z.e);
    T w[kRows][kKeys];
    tile.Dots(queries, key_rows, w);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = place.first + tile.Row(i);
      const int64_t seen = row < z.s ? z.Visible(row, z.t) : 0;
      T here = -static_cast<T>(INFINITY), part = 0;
#pragma unroll
      for (int x = 0; x < kKeys; ++x) {
        const int64_t key = j + tile.Column(x);
        if (key < seen) {
          w[i][x] = z.mask.Apply(static_cast<T>(z.scale) * w[i][x], place.b, place.head, row, key);
          here = w[i][x] > here ? w[i][x] : here;
        }
      }
      here = Tile::OverRow(here, [](T a, T b) { return b > a ? b : a; });
      const T now = here > most[i] ? here : most[i], shift = ShiftOf(now);
#pragma unroll
      for (int x = 0; x < kKeys; ++x) {
        const int64_t key = j + tile.Column(x);
        const T weight = key < seen ? ExpOf(w[i][x] - shift) : T(0);
        part += weight;
        w[i][x] = key < seen ? weight * z.Dropped<T>(place.b, place.head, row, key) : T(0);
      }
      const T by = now == most[i] ? T(1) : ExpOf(most[i] - shift);
      sum[i] = sum[i] * by + Tile::OverRow(part, [](T a, T b) { return a + b; });
#pragma unroll
      for (int x = 0; x < kOwn; ++x) acc[i][x] *= by;
      most[i] = now;
    }
    tile.Keep(w);
    tile.template AddProduct<false, kColumns>(values, place.column, acc);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = place.first + tile.Row(i);
    if (row >= z.s) continue;
    const int64_t at = (place.b * z.h + place.head) * z.s + row;
    const T by = sum[i] == T(0) ? T(0) : T(1) / sum[i];
#pragma unroll
    for (int x = 0; x < kOwn; ++x) {
      const int64_t column = place.column + tile.Column(x);
      if (column < z.e) Store(acc[i][x] * by, o + at * z.e + column);
    }
    if (place.column == 0 && tile.Column(0) == 0) {
      lse[at] = static_cast<Lse<X>>(ShiftOf(most[i])) + static_cast<Lse<X>>(LogOf(sum[i]));
    }
  }
}

// Per query the sum of do times o, a warp each.
template <class X>
__global__ void __launch_bounds__(kThreads)
    RowDots(Shapes z, Heads dout, Heads o, Computed<X>* dots, int64_t rows) {
  using T = Computed<X>;
  const int64_t r = (blockIdx.x * int64_t{kThreads} + threadIdx.x) / 32;
  if (r >= rows) return;  // whole warps
  const int64_t row = r % z.s, head = r / z.s % z.h, b = r / z.s / z.h;
  const HeadRows<X> x(dout, b, head, row, z.s, z.e), y(o, b, head, row, z.s, z.e);
  T sum = 0;
  for (int64_t i = threadIdx.x % 32; i < z.e; i += 32) sum += x.At(0, i) * y.At(0, i);
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (threadIdx.x % 32 == 0) dots[r] = sum;
}

// Of scores and of slopes of the weights: weights (dropped out) and slopes of the scores before
// scaling, for rows from `row` on and keys from `key` on.
template <class Tile, class T, class L>
__device__ void WeightsAndSlopes(const Shapes& z, const RowFacts<T, L>& facts, const Tile& tile,
                                 int64_t b, int64_t head, int64_t first, int64_t j,
                                 T (&w)[Tile::kRows][Tile::kKeys],
                                 T (&slope)[Tile::kRows][Tile::kKeys]) {
  const T scale = static_cast<T>(z.scale);
#pragma unroll
  for (int i = 0; i < Tile::kRows; ++i) {
    const int64_t row = first + tile.Row(i);
    const int64_t seen = row < z.s ? z.Visible(row, z.t) : 0;
    T shift = 0, rest = 0, dot = 0;  // shift + rest is lse
    if (row < z.s) {
      const L lse = ShiftOf(
          facts.lse[b * facts.strides[0] + head * facts.strides[1] + row * facts.strides[2]]);
      shift = static_cast<T>(lse);
      rest = static_cast<T>(lse - static_cast<L>(shift));
      dot = facts.dots[(b * z.h + head) * z.s + row];
    }
#pragma unroll
    for (int x = 0; x < Tile::kKeys; ++x) {
      const int64_t key = j + tile.Column(x);
      if (key >= seen) {
        w[i][x] = slope[i][x] = T(0);
        continue;
      }
      const T weight = ExpOf((z.mask.Apply(scale * w[i][x], b, head, row, key) - shift) - rest);
      const T dropped = z.Dropped<T>(b, head, row, key);
      slope[i][x] = scale * weight * (dropped * slope[i][x] - dot);
      w[i][x] = weight * dropped;
    }
  }
}

template <class X, int kColumns>
__global__ void __launch_bounds__(TileOf<X>::kBlock, 1)
    QueryGradient(Shapes z, Heads dout, Heads q, Heads k, Heads v,
                  RowFacts<Computed<X>, Lse<X>> facts, X* dq, int64_t chunks) {
  using T = Computed<X>;
  using Tile = TileOf<X>;
  constexpr int kN = Tile::kN, kRows = Tile::kRows, kKeys = Tile::kKeys;
  constexpr int kOwn = Tile::template kOwn<kColumns>;
  __shared__ typename Tile::Memory memory;
  Tile tile(&memory);
  const Place place(z.h, z.s, kN, chunks, kColumns);
  const int64_t kv = z.KeyHead(place.head), last = place.first + kN - 1;
  const HeadRows<X> queries(q, place.b, place.head, place.first, z.s, z.d);
  const HeadRows<X> grads(dout, place.b, place.head, place.first, z.s, z.e);
  T acc[kRows][kOwn] = {};
  const int64_t keys = z.Visible(last < z.s ? last : z.s - 1, z.t);
  for (int64_t j = 0; j < keys; j += kN) {
    const HeadRows<X> key_rows(k, place.b, kv, j, z.t, z.d), values(v, place.b, kv, j, z.t, z.e);
    T w[kRows][kKeys], slope[kRows][kKeys];
    tile.Dots(queries, key_rows, w);
    tile.Dots(grads, values, slope);
    WeightsAndSlopes(z, facts, tile, place.b, place.head, place.first, j, w, slope);
    tile.Keep(slope);
    tile.template AddProduct<false, kColumns>(key_rows, place.column, acc);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = place.first + tile.Row(i);
#pragma unroll
    for (int x = 0; x < kOwn; ++x) {
      const int64_t column = place.column + tile.Column(x);
      if (row >= z.s || column >= z.d) continue;
      Store(acc[i][x], dq + ((place.b * z.h + place.head) * z.s + row) * z.d + column);
    }
  }
}

// The gradient of v (kOfValues), from the weights, or of k, from the slopes.
template <class X, int kColumns, bool kOfValues>
__global__ void __launch_bounds__(TileOf<X>::kBlock, 1)
    KeyGradient(Shapes z, Heads dout, Heads q, Heads k, Heads v,
                RowFacts<Computed<X>, Lse<X>> facts, X* out, int64_t chunks) {
  using T = Computed<X>;
  using Tile = TileOf<X>;
  constexpr int kN = Tile::kN, kRows = Tile::kRows, kKeys = Tile::kKeys;
  constexpr int kOwn = Tile::template kOwn<kColumns>;
  __shared__ typename Tile::Memory memory;
  Tile tile(&memory);
  const Place place(z.g, z.t, kN, chunks, kColumns);
  const HeadRows<X> key_rows(k, place.b, place.head, place.first, z.t, z.d);
  const HeadRows<X> values(v, place.b, place.head, place.first, z.t, z.e);
  const int64_t columns = kOfValues ? z.e : z.d;
  T acc[kRows][kOwn] = {};
  for (int64_t head = 0; head < z.h; ++head) {
    if (z.KeyHead(head) != place.head) continue;
    for (int64_t i = 0; i < z.s; i += kN) {
      const int64_t last = i + kN - 1 < z.s ? i + kN - 1 : z.s - 1;
      if (z.Visible(last, z.t) <= place.first) continue;
      const HeadRows<X> queries(q, place.b, head, i, z.s, z.d);
      const HeadRows<X> grads(dout, place.b, head, i, z.s, z.e);
      T w[kRows][kKeys], slope[kRows][kKeys] = {};
      tile.Dots(queries, key_rows, w);
      if (!kOfValues) tile.Dots(grads, values, slope);
      WeightsAndSlopes(z, facts, tile, place.b, head, i, place.first, w, slope);
      tile.Keep(kOfValues ? w : slope);
      tile.template AddProduct<true, kColumns>(kOfValues ? grads : queries, place.column, acc);
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = place.first + tile.Row(i);
#pragma unroll
    for (int x = 0; x < kOwn; ++x) {
      const int64_t column = place.column + tile.Column(x);
      if (row >= z.t || column >= columns) continue;
      Store(acc[i][x], out + ((place.b * z.g + place.head) * z.t + row) * columns + column);
    }
  }
}

// run(blocks, chunks) of a kernel on tiles of `rows` of `heads` heads each with `columns` columns.
template <class X, class Run>
void ForTiles(int64_t heads, int64_t rows, int64_t columns, int per_block, const Run& run) {
  const int64_t chunks = columns <= per_block ? 1 : (columns + per_block - 1) / per_block;
  constexpr int kN = TileOf<X>::kN;
  const int64_t blocks = heads * ((rows + kN - 1) / kN) * chunks;
  if (blocks == 0) return;
  run(static_cast<unsigned>(blocks), chunks);
  CheckLaunch();
}
constexpr int kWide = 128;
template <class X>  // 16-bit floats are here in wide heads only
constexpr int kNarrow = sizeof(X) == 2 ? kWide : 64;

// q, k, v and perhaps a mask -> o, lse
template <bool kMasked>
void ForwardKernel(const KernelCall& c) {
  const Shapes z = ShapesOf(c, 0, kMasked ? 3 : -1);
  if (!Fits(z, c.workspace) || AttentionByTensorCores(c, z)) return;
  const Heads q(c.in[0]), k(c.in[1]), v(c.in[2]);
  VisitFloat(c.in[0].dtype, [&](auto e) {
    using X = decltype(e);
    const bool narrow = z.e <= kNarrow<X>;
    const auto run = narrow ? &Forward<X, kNarrow<X>> : &Forward<X, kWide>;
    ForTiles<X>(z.b * z.h, z.s, z.e, narrow ? kNarrow<X> : kWide,
                [&](unsigned blocks, int64_t chunks) {
                  run<<<blocks, TileOf<X>::kBlock, 0, StreamOf(c)>>>(z, q, k, v, Out<X>(c, 0),
                                                                     Out<Lse<X>>(c, 1), chunks);
                });
  });
}

// do, q, k, v, o, lse and perhaps a mask -> dq, dk, dv
template <bool kMasked>
void BackwardKernel(const KernelCall& c) {
  const Shapes z = ShapesOf(c, 1, kMasked ? 6 : -1);
  if (!Fits(z, c.workspace)) return;
  const Heads dout(c.in[0]), q(c.in[1]), k(c.in[2]), v(c.in[3]), o(c.in[4]);
  const int64_t rows = z.b * z.h * z.s;
  VisitFloat(c.in[1].dtype, [&](auto e) {
    using X = decltype(e);
    using T = Computed<X>;
    auto* dots = Scratch<T>(c, rows);
    if (dots == nullptr) return;
    if (rows > 0) {
      RowDots<X><<<static_cast<unsigned>((rows + kThreads / 32 - 1) / (kThreads / 32)), kThreads, 0,
                   StreamOf(c)>>>(z, dout, o, dots, rows);
      CheckLaunch();
    }
    const int64_t* step = c.in[5].strides;
    const RowFacts<T, Lse<X>> facts = {In<Lse<X>>(c, 5), {step[0], step[1], step[2]}, dots};
    if constexpr (sizeof(X) == 2) {
      if (GradientsByTensorCores(c, z, facts)) return;
    }
    const auto of_columns = [&](int64_t heads, int64_t n, int64_t columns, auto narrow, auto wide,
                                X* out) {
      const bool few = columns <= kNarrow<X>;
      ForTiles<X>(heads, n, columns, few ? kNarrow<X> : kWide,
                  [&](unsigned blocks, int64_t chunks) {
                    (few ? narrow : wide)<<<blocks, TileOf<X>::kBlock, 0, StreamOf(c)>>>(
                        z, dout, q, k, v, facts, out, chunks);
                  });
    };
    of_columns(z.b * z.h, z.s, z.d, &QueryGradient<X, kNarrow<X>>, &QueryGradient<X, kWide>,
               Out<X>(c, 0));
    of_columns(z.b * z.g, z.t, z.d, &KeyGradient<X, kNarrow<X>, false>,
               &KeyGradient<X, kWide, false>, Out<X>(c, 1));
    of_columns(z.b * z.g, z.t, z.e, &KeyGradient<X, kNarrow<X>, true>, &KeyGradient<X, kWide, true>,
               Out<X>(c, 2));
  });
}

}  // namespace

void AddAttentionKernels(AddKernelFn add) {
  constexpr KernelLayout kStrided = KernelLayout::kStrided;
  add("attention", ForwardKernel<false>, kFloatDTypes, kStrided);
  add("attention_backward", BackwardKernel<false>, kFloatDTypes, kStrided);
  add("masked_attention", ForwardKernel<true>, kFloatDTypes, kStrided);
  add("masked_attention_backward", BackwardKernel<true>, kFloatDTypes, kStrided);
}

}  // namespace dtensor::cuda
