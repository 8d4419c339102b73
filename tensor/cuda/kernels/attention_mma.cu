// Attention of 16-bit floats on tensor cores, in heads of up to 128 columns. A block has 64
// queries, or keys, whose operands stay; tiles of the others pass by, the next being copied while
// one is multiplied. Scores are in registers only. No atomics: gradients are the same in every run.
//
//   forward               per tile of keys      s = q k^T, o += softmax(s) v
//   gradient of q         per tile of keys      s = q k^T, w' = do v^T, dq += ds k
//   gradients of k and v  per tile of queries   s = k q^T, w' = v do^T, dk += ds q, dv += w do
//
// Source: Milakov and Gimelshein 2018 (online softmax); Dao 2023, FlashAttention-2.
#include "dtensor/tensor/cuda/kernels/attention.h"
#include "dtensor/tensor/cuda/kernels/mma_tile.h"

namespace dtensor::cuda {
namespace {

constexpr int kFixed = 64;  // queries or keys of a block

// The tile of a block: the last come first, since with a causal mask they see most.
struct Place {
  int64_t b, head, first;
  __device__ Place(int64_t heads, int64_t rows, bool last_first) {
    const int64_t tiles = (rows + kFixed - 1) / kFixed, tile = blockIdx.x % tiles;
    first = (last_first ? tiles - 1 - tile : tile) * kFixed;
    const int64_t rest = blockIdx.x / tiles;
    head = rest % heads;
    b = rest / heads;
  }
};

// Scores are in units of log(2): their weights are powers of 2, which the device has an instruction
// for, exact to 2 units in the last place of float32. They are rounded to 16 bits afterwards.
constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
__device__ inline float PowerOf2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// A score, in those units, of a product of a query and a key.
template <bool kPlain>
__device__ inline float ScoreOf(const Shapes& z, float product, float unit, int64_t b, int64_t head,
                                int64_t query, int64_t key) {
  if (kPlain) return product * unit;
  return z.mask.Apply(static_cast<float>(z.scale) * product, b, head, query, key) * kLog2E;
}

// kPlain: no mask but a causal one, no dropout.
template <class X, int kWidth, bool kPlain>
__global__ void __launch_bounds__(128, kWidth == 64 && kPlain ? 4 : 1)  // without: 142 registers
    Forward(const __grid_constant__ Shapes z, Heads q, Heads k, Heads v, X* o, float* lse) {
  using Tile = MmaTile<X, kWidth>;
  constexpr int kKeys = kWidth == 64 ? 64 : 32, kTile = kKeys * Tile::kStep;
  constexpr float kNone = -INFINITY;
  // Queries stay in shared memory where there is room for them, else in registers.
  constexpr bool kShared = kWidth == 64;
  constexpr int kQueries = kFixed * Tile::kStep;
  __shared__ alignas(16) X memory[(kShared ? kQueries : 0) + 4 * kTile];
  static_assert(kShared || kQueries <= 4 * kTile);
  X* const passing = memory + (kShared ? kQueries : 0);  // keys and values, twice
  const Place place(z.h, z.s, z.causal);
  const int64_t kv = z.KeyHead(place.head), last = place.first + kFixed - 1;
  const auto keys = static_cast<int>(z.Visible(last < z.s ? last : z.s - 1, z.t));
  const auto all_see = static_cast<int>(z.Visible(place.first, z.t));

  uint32_t query[kShared ? 1 : kWidth / 16][4];
  Tile::template Load<kFixed>(HeadRows<X>(q, place.b, place.head, place.first, z.s, z.d), memory);
  EndCopies();
  if constexpr (!kShared) {
    WaitForCopies<0>();
    __syncthreads();
#pragma unroll
    for (int x = 0; x < kWidth; x += 16) Tile::Fragment(memory, x, query[x / 16]);
    __syncthreads();
  }
  const auto queries = [&](int x, uint32_t(&left)[4]) {
    if constexpr (kShared) {
      Tile::Fragment(memory, x, left);
    } else {
#pragma unroll
      for (int a = 0; a < 4; ++a) left[a] = query[x / 16][a];
    }
  };

  const auto load = [&](int j) {
    X* const to = passing + j / kKeys % 2 * 2 * kTile;
    Tile::template Load<kKeys>(HeadRows<X>(k, place.b, kv, j, z.t, z.d), to);
    Tile::template Load<kKeys>(HeadRows<X>(v, place.b, kv, j, z.t, z.e), to + kTile);
    EndCopies();
  };
  const float unit = static_cast<float>(z.scale) * kLog2E;
  float acc[2][kWidth / 4] = {}, most[2] = {kNone, kNone}, sum[2] = {};
  if (keys > 0) load(0);
  for (int j = 0; j < keys; j += kKeys) {
    if (j + kKeys < keys) {
      load(j + kKeys);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const X* const key_rows = passing + j / kKeys % 2 * 2 * kTile;
    float w[2][kKeys / 4] = {};
    Tile::template AddDots<kKeys>(queries, key_rows, z.d, w);
    const bool all = kPlain && j + kKeys <= all_see;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = place.first + Tile::Row(i);
      int seen = static_cast<int>(z.t) - j;  // of the keys here
      if (z.causal && all_see + Tile::Row(i) - j < seen) seen = all_see + Tile::Row(i) - j;
      if (!kPlain && row >= z.s) seen = 0;
      float here = kNone;
#pragma unroll
      for (int x = 0; x < kKeys / 4; ++x) {
        w[i][x] =
            all || Tile::Column(x) < seen
                ? ScoreOf<kPlain>(z, w[i][x], unit, place.b, place.head, row, j + Tile::Column(x))
                : kNone;
        here = w[i][x] > here ? w[i][x] : here;
      }
      here = Tile::OverRow(here, [](float a, float b) { return b > a ? b : a; });
      const float now = here > most[i] ? here : most[i], shift = ShiftOf(now);
      const float by = now == most[i] ? 1.0f : PowerOf2(most[i] - shift);
      most[i] = now;
      sum[i] *= by;  // of this lane's keys
#pragma unroll
      for (int x = 0; x < kKeys / 4; ++x) {
        w[i][x] = PowerOf2(w[i][x] - shift);
        sum[i] += w[i][x];
        if (!kPlain) {
          w[i][x] *= z.Dropped<float>(place.b, place.head, row, j + Tile::Column(x));
        }
      }
#pragma unroll
      for (int x = 0; x < kWidth / 4; ++x) acc[i][x] *= by;
    }
    Tile::template AddProduct<kKeys>(w, key_rows + kTile, z.e, acc);
    __syncthreads();
  }
  if (keys <= 0) WaitForCopies<0>();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = Tile::OverRow(sum[i], [](float a, float b) { return a + b; });
    const float by = sum[i] == 0 ? 0.0f : 1 / sum[i];
#pragma unroll
    for (int x = 0; x < kWidth / 4; ++x) acc[i][x] *= by;
  }
  const int64_t head = (place.b * z.h + place.head) * z.s;
  Tile::Write(acc, z.e, [&](int i) {
    const int64_t row = place.first + Tile::Row(i);
    if (row < z.s && Tile::Column(0) == 0) {
      lse[head + row] = ShiftOf(most[i]) * kLn2 + LogOf(sum[i]);
    }
    return row < z.s ? o + (head + row) * z.e : nullptr;
  });
}

// The gradient of q, to `first`; or (kOfKeys) those of k and v, to `first` and `second`.
template <class X, int kWidth, bool kPlain, bool kOfKeys>
__global__ void __launch_bounds__(128)
    Gradient(const __grid_constant__ Shapes z, Heads dout, Heads q, Heads k, Heads v,
             RowFacts<float, float> facts, X* first, X* second) {
  using Tile = MmaTile<X, kWidth>;
  constexpr int kOther = kWidth == 64 ? 32 : 16, kTile = kOther * Tile::kStep;
  constexpr int kStages = kWidth == 64 ? 2 : 1, kStay = kFixed * Tile::kStep;
  __shared__ alignas(16) X stay[2 * kStay];
  __shared__ alignas(16) X memory[kStages * 2 * kTile];
  __shared__ float shifts[kStages][kOther], dots[kStages][kOther];  // kOfKeys: of passing queries
  const Place place(kOfKeys ? z.g : z.h, kOfKeys ? z.t : z.s, !kOfKeys && z.causal);
  // Query heads of the block, of which the first key head is that of all.
  int64_t head = place.head, heads = 1, kv = place.head;
  if (kOfKeys) {
    const int64_t group = z.g > 0 && z.heads >= z.g ? z.heads / z.g : 1;
    const int64_t from = place.head * group - z.first_head, to = from + group;
    head = from > 0 ? from : 0;
    heads = (to < z.h ? to : z.h) - head;
  } else {
    kv = z.KeyHead(place.head);
  }
  // What passes by: keys that somebody here sees; or queries that see somebody here.
  int begin = 0, end = 0;
  if (kOfKeys) {
    const int64_t sees = z.causal ? place.first - z.first_query : 0;
    begin = static_cast<int>(sees > 0 ? sees / kOther * kOther : 0);
    end = static_cast<int>(z.s);
  } else {
    const int64_t last = place.first + kFixed - 1;
    end = static_cast<int>(z.Visible(last < z.s ? last : z.s - 1, z.t));
  }
  const int tiles = end > begin ? (end - begin + kOther - 1) / kOther : 0;
  const int steps = heads > 0 ? tiles * static_cast<int>(heads) : 0;

  const auto of_queries = [&](const Heads& t, int64_t h, int64_t row, int64_t columns) {
    return HeadRows<X>(t, place.b, h, row, z.s, columns);
  };
  const auto of_keys = [&](const Heads& t, int64_t row, int64_t columns) {
    return HeadRows<X>(t, place.b, kv, row, z.t, columns);
  };
  if (kOfKeys) {
    Tile::template Load<kFixed>(of_keys(k, place.first, z.d), stay);
    Tile::template Load<kFixed>(of_keys(v, place.first, z.e), stay + kStay);
  } else {
    Tile::template Load<kFixed>(of_queries(q, head, place.first, z.d), stay);
    Tile::template Load<kFixed>(of_queries(dout, head, place.first, z.e), stay + kStay);
  }
  const auto shift_of = [&](int64_t h, int64_t row) {
    const int64_t* const s = facts.strides;
    return row < z.s ? ShiftOf(facts.lse[place.b * s[0] + h * s[1] + row * s[2]]) * kLog2E : 0.0f;
  };
  const auto dot_of = [&](int64_t h, int64_t row) {
    return row < z.s ? facts.dots[(place.b * z.h + h) * z.s + row] : 0.0f;
  };
  const auto load = [&](int step) {
    const int64_t h = head + step / tiles, at = begin + step % tiles * kOther;
    X* const to = memory + step % kStages * 2 * kTile;
    if (kOfKeys) {
      Tile::template Load<kOther>(of_queries(q, h, at, z.d), to);
      Tile::template Load<kOther>(of_queries(dout, h, at, z.e), to + kTile);
      const auto x = static_cast<int>(threadIdx.x);
      if (x < kOther) {
        shifts[step % kStages][x] = shift_of(h, at + x);
        dots[step % kStages][x] = dot_of(h, at + x);
      }
    } else {
      Tile::template Load<kOther>(of_keys(k, at, z.d), to);
      Tile::template Load<kOther>(of_keys(v, at, z.e), to + kTile);
    }
    EndCopies();
  };
  float row_shift[2] = {}, row_dot[2] = {};
  if (!kOfKeys) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      row_shift[i] = shift_of(head, place.first + Tile::Row(i));
      row_dot[i] = dot_of(head, place.first + Tile::Row(i));
    }
  }
  const float scale = static_cast<float>(z.scale), unit = scale * kLog2E;
  float acc[2][kWidth / 4] = {}, of_values[kOfKeys ? 2 : 1][2][kWidth / 4] = {};
  if (kStages == 2 && steps > 0) load(0);
  for (int step = 0; step < steps; ++step) {
    if (kStages == 1) {
      load(step);
      WaitForCopies<0>();
    } else if (step + 1 < steps) {
      load(step + 1);
      WaitForCopies<1>();
    } else {
      WaitForCopies<0>();
    }
    __syncthreads();
    const int stage = step % kStages;
    const X *const passing = memory + stage * 2 * kTile, *const other = passing + kTile;
    const int64_t h = head + step / tiles;
    const int at = begin + step % tiles * kOther;
    float w[2][kOther / 4] = {}, slope[2][kOther / 4] = {};
    const auto left = [&](const X* tile) {
      return [tile](int x, uint32_t(&out)[4]) { Tile::Fragment(tile, x, out); };
    };
    Tile::template AddDots<kOther>(left(stay), passing, z.d, w);
    Tile::template AddDots<kOther>(left(stay + kStay), other, z.e, slope);
    // Whether every query here sees every key here.
    const int64_t least = kOfKeys ? at : place.first, past = least + (kOfKeys ? kOther : kFixed);
    const int64_t keys_end = kOfKeys ? place.first + kFixed : at + kOther;
    const bool all = kPlain && past <= z.s && keys_end <= z.Visible(least, z.t);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int x = 0; x < kOther / 4; ++x) {
        const int64_t row = place.first + Tile::Row(i), column = at + Tile::Column(x);
        const int64_t query = kOfKeys ? column : row, key = kOfKeys ? row : column;
        const bool sees = all || (query < z.s && key < z.Visible(query, z.t));
        const float score = sees ? ScoreOf<kPlain>(z, w[i][x], unit, place.b, h, query, key) : 0.0f;
        const float dropped = !kPlain && sees ? z.Dropped<float>(place.b, h, query, key) : 1.0f;
        const float shift = kOfKeys ? shifts[stage][Tile::Column(x)] : row_shift[i];
        const float dot = kOfKeys ? dots[stage][Tile::Column(x)] : row_dot[i];
        const float weight = sees ? PowerOf2(score - shift) : 0.0f;
        slope[i][x] = sees ? scale * weight * (dropped * slope[i][x] - dot) : 0.0f;
        w[i][x] = sees ? weight * dropped : 0.0f;
      }
    }
    Tile::template AddProduct<kOther>(slope, passing, z.d, acc);
    if constexpr (kOfKeys) Tile::template AddProduct<kOther>(w, other, z.e, of_values[0]);
    __syncthreads();
  }
  if (steps == 0) {
    EndCopies();
    WaitForCopies<0>();
  }
  const int64_t rows = kOfKeys ? z.t : z.s;
  const int64_t begins = (place.b * (kOfKeys ? z.g : z.h) + place.head) * rows;
  const auto row_of = [&](X* out, int64_t columns) {
    return [=](int i) {
      const int64_t row = place.first + Tile::Row(i);
      return row < rows ? out + (begins + row) * columns : nullptr;
    };
  };
  Tile::Write(acc, z.d, row_of(first, z.d));
  if constexpr (kOfKeys) Tile::Write(of_values[0], z.e, row_of(second, z.e));
}

// run(X, width, plain) with the type, 64 or 128 columns, and whether there is neither a mask nor
// dropout. False where it is not for tensor cores.
template <class Run>
bool Dispatch(DType dtype, const Shapes& z, const Run& run) {
  constexpr int kNarrow = 64, kWide = 128;
  constexpr int64_t kMost = int64_t{1} << 30;
  const int64_t columns = z.d > z.e ? z.d : z.e;
  const bool half = dtype == DType::kF16;
  if ((!half && dtype != DType::kBF16) || columns > kWide || z.s > kMost || z.t > kMost) {
    return false;
  }
  const bool plain = z.mask.data == nullptr && !z.drops;
  const auto with_width = [&](auto x) {
    const auto with_plain = [&](auto width) {
      if (plain) return run(x, width, std::true_type{});
      run(x, width, std::false_type{});
    };
    if (columns <= kNarrow) return with_plain(std::integral_constant<int, kNarrow>{});
    with_plain(std::integral_constant<int, kWide>{});
  };
  if (half) {
    with_width(Half{});
  } else {
    with_width(BFloat16{});
  }
  return true;
}
unsigned BlocksOf(int64_t heads, int64_t rows) {
  return static_cast<unsigned>(heads * ((rows + kFixed - 1) / kFixed));
}

}  // namespace

bool AttentionByTensorCores(const KernelCall& c, const Shapes& z) {
  const unsigned blocks = BlocksOf(z.b * z.h, z.s);
  return Dispatch(c.in[0].dtype, z, [&](auto x, auto width, auto plain) {
    using X = decltype(x);
    if (blocks == 0) return;
    Forward<X, decltype(width)::value, decltype(plain)::value><<<blocks, 128, 0, StreamOf(c)>>>(
        z, Heads(c.in[0]), Heads(c.in[1]), Heads(c.in[2]), Out<X>(c, 0), Out<float>(c, 1));
    CheckLaunch();
  });
}

bool GradientsByTensorCores(const KernelCall& c, const Shapes& z,
                            const RowFacts<float, float>& facts) {
  const unsigned queries = BlocksOf(z.b * z.h, z.s), keys = BlocksOf(z.b * z.g, z.t);
  return Dispatch(c.in[1].dtype, z, [&](auto x, auto width, auto plain) {
    using X = decltype(x);
    constexpr int kWidth = decltype(width)::value;
    constexpr bool kPlain = decltype(plain)::value;
    const Heads dout(c.in[0]), q(c.in[1]), k(c.in[2]), v(c.in[3]);
    if (queries > 0) {
      Gradient<X, kWidth, kPlain, false>
          <<<queries, 128, 0, StreamOf(c)>>>(z, dout, q, k, v, facts, Out<X>(c, 0), nullptr);
      CheckLaunch();
    }
    if (keys > 0) {
      Gradient<X, kWidth, kPlain, true>
          <<<keys, 128, 0, StreamOf(c)>>>(z, dout, q, k, v, facts, Out<X>(c, 1), Out<X>(c, 2));
      CheckLaunch();
    }
  });
}

}  // namespace dtensor::cuda
