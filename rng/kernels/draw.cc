// The samplers' value functions over tiles of words. Compiled once per CPU level.
#include "dtensor/rng/draw.h"

#include "dtensor/rng/kernels/words.h"

namespace dtensor {
namespace DT_LEVEL_NS {
namespace {

using Words = uint32_t (*)[kTile];

// --- rounding a tile of floats to the element type ---

static inline void RoundTile(const float* v, int n, float* out) {
  memcpy(out, v, n * sizeof(float));
}
static inline void RoundTile(const float* v, int n, BFloat16* out) {
  for (int i = 0; i < n; ++i) out[i] = ToBFloat16(v[i]);
}
static inline void RoundTile(const float* v, int n, Half* out) {
  int i = 0;
#ifdef __F16C__
  for (; i + 8 <= n; i += 8) {
    const __m128i h = _mm256_cvtps_ph(_mm256_loadu_ps(v + i), _MM_FROUND_TO_NEAREST_INT);
    memcpy(out + i, &h, sizeof(h));
  }
#endif
  for (; i < n; ++i) out[i] = ToHalf(v[i]);
}

// --- tiles of results: the samplers of rng/values.h over arrays of words ---

// What most samplers need: a loop that the compiler vectorises.
template <class Sampler, class T>
struct Tile {
  Sampler sampler;
  explicit Tile(const DrawCall& call) : sampler(call) {}

  void operator()(Words w, int n, T* const* out) const {
    const Sampler s = sampler;  // in registers: nothing aliases it
    alignas(64) T results[2][kTile];
    constexpr bool kPairs = Sampler::kTakes == Takes::kPair || Sampler::kTakes == Takes::kBlock;
    for (int c = 0; c < kResults<Sampler>; c += kPairs ? 2 : 1) {
      if (!out[c] && !(kPairs && out[c + 1])) continue;
      for (int i = 0; i < n; ++i) {
        if constexpr (Sampler::kTakes == Takes::kWord) {
          results[0][i] = s(w[c][i]);
        } else if constexpr (Sampler::kTakes == Takes::kTwoWords) {
          results[0][i] = s(w[2 * c][i], w[2 * c + 1][i]);
        } else {
          T first, second;
          if constexpr (Sampler::kTakes == Takes::kPair) {
            s(w[c][i], w[c + 1][i], &first, &second);
          } else {
            s(PhiloxWords{w[0][i], w[1][i], w[2][i], w[3][i]}, &first, &second);
          }
          results[0][i] = first;
          results[1][i] = second;
        }
      }
      if (out[c]) memcpy(out[c], results[0], n * sizeof(T));
      if (kPairs && out[c + 1]) memcpy(out[c + 1], results[1], n * sizeof(T));
    }
  }
};

// uniform_ of float types: rounded by tiles; float32 straight from the rounds' registers.
template <class T>
struct UniformTile : Uniform<T> {
  using Uniform<T>::from, Uniform<T>::to, Uniform<T>::range, Uniform<T>::flip_raw;
  explicit UniformTile(const DrawCall& call) : Uniform<T>(call) {}

  static constexpr bool kFromLanes = sizeof(T) == sizeof(float);
  bool FromLanes() const { return !flip_raw && (kVectorFma || BitsOf(from) == 0); }
  FloatVector Lanes(WordVector x) const {
    const FloatVector a = FloatVector{} + from, b = FloatVector{} + to, r = FloatVector{} + range;
    const FloatVector v = FmaVector(UniformVector(x), r, a);
    return v == b ? a : v;
  }

  // `to` itself must not come out.
  static inline void Flip(float to, float from, int n, float* out) {
    for (int i = 0; i < n; ++i) out[i] = out[i] == to ? from : out[i];
  }
  template <class U>
  static inline void Flip(U to, U from, int n, U* out) {
    const uint16_t mask = (to.bits & 0x7FFFu) == 0 ? 0x7FFF : 0xFFFF;  // -0 equals 0
    const uint16_t wanted = to.bits & mask;
    for (int i = 0; i < n; ++i) {
      out[i].bits = (out[i].bits & mask) == wanted ? from.bits : out[i].bits;
    }
  }
  void Component(const uint32_t* x, int n, T* out) const {
    alignas(64) float v[kTile];
    for (int i = 0; i < n; ++i) v[i] = UniformFloat(x[i]);
    if (flip_raw) {
      for (int i = 0; i < n; ++i) v[i] = v[i] == 1.0f ? 0.0f : v[i];
    }
    if (from == 0.0f) {  // the fma is a product then; the baseline level has no fast fma
      for (int i = 0; i < n; ++i) v[i] = v[i] * range;
    } else {
      for (int i = 0; i < n; ++i) v[i] = FmaF(v[i], range, from);
    }
    RoundTile(v, n, out);
    if (!flip_raw) Flip(FromFloat<T>(to), this->from_value, n, out);
  }
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; ++c) {
      if (out[c]) Component(w[c], n, out[c]);
    }
  }
};

// normal_ of float types: computed in float, rounded by tiles.
template <class T>
struct NormalTile : Normal<float> {
  explicit NormalTile(const DrawCall& call) : Normal<float>(call) {}
  void operator()(Words w, int n, T* const* out) const {
    alignas(64) float scratch[2][kTile];
    for (int c = 0; c < 4; c += 2) {
      if (!out[c] && !out[c + 1]) continue;
      const Normal<float> normal = *this;  // in registers: nothing aliases it
      const uint32_t *a = w[c], *b = w[c + 1];
      float* __restrict first = scratch[0];
      float* __restrict second = scratch[1];
      if constexpr (sizeof(T) == sizeof(float)) {  // nothing to round
        if (out[c]) first = out[c];
        if (out[c + 1]) second = out[c + 1];
      }
      for (int i = 0; i < n; ++i) {
        float f, s;
        normal(a[i], b[i], &f, &s);
        first[i] = f;
        second[i] = s;
      }
      if constexpr (sizeof(T) != sizeof(float)) {
        if (out[c]) RoundTile(first, n, out[c]);
        if (out[c + 1]) RoundTile(second, n, out[c + 1]);
      }
    }
  }
};

// The tile op of a sampler.
template <template <class> class Sampler, class T>
struct TileOf {
  using Op = Tile<Sampler<T>, T>;
};
template <class T>
struct TileOf<Uniform, T> {
  using Op = UniformTile<T>;
};
template <>
struct TileOf<Uniform, double> {
  using Op = Tile<Uniform<double>, double>;
};
template <class T>
struct TileOf<Normal, T> {
  using Op = NormalTile<T>;
};
template <>
struct TileOf<Normal, double> {
  using Op = Tile<Normal<double>, double>;
};

// --- the loop over tiles ---

// An op whose results need no array of words may make them of the words' vectors (Lanes).
template <class Op>
concept FromLanes = Op::kFromLanes;

template <template <class> class Sampler, class T>
void Draw(const DrawCall& call) {
  using Op = typename TileOf<Sampler, T>::Op;
  const Op op(call);
  alignas(64) uint32_t words[4][kTile];
  for (int64_t start = 0; start < call.n; start += kTile) {
    const int n = static_cast<int>(call.n - start < kTile ? call.n - start : kTile);
    T* out[kMaxUnroll];
    for (int c = 0; c < kMaxUnroll; ++c) {
      out[c] = call.out[c] ? static_cast<T*>(call.out[c]) + start : nullptr;
    }
    if constexpr (FromLanes<Op>) {
      if (n % kStep == 0 && op.FromLanes()) {
        PhiloxLanes(call, start, n, [&](int w, int i, WordVector x) {
          if (!out[w]) return;
          const FloatVector v = op.Lanes(x);
          memcpy(out[w] + i, &v, sizeof(v));
        });
        continue;
      }
    }
    PhiloxTile(call, start, n, words);
    op(words, n, out);
  }
}

// --- groups of neighbours ---

// The bytes (u < p) of `count` words of every lane, the first word in the lowest byte.
static inline void PackMask(Words w, int count, float p, int n, uint32_t* packed) {
  for (int i = 0; i < n; ++i) packed[i] = UniformFloat(w[0][i]) < p ? 1u : 0u;
  for (int c = 1; c < count; ++c) {
    const uint32_t bit = 1u << (8 * c);
    for (int i = 0; i < n; ++i) packed[i] |= UniformFloat(w[c][i]) < p ? bit : 0u;
  }
}

// T has a byte per neighbour.
template <class T>
void DrawMask(const DrawCall& call) {
  const auto p = static_cast<float>(call.a);
  alignas(64) uint32_t words[4][kTile], packed[kTile];
  auto* const out = static_cast<T*>(call.out[0]);
  DrawCall second = call;
  ++second.block;
  for (int64_t start = 0; start < call.n; start += kTile) {
    const int n = static_cast<int>(call.n - start < kTile ? call.n - start : kTile);
    PhiloxTile(call, start, n, words);
    PackMask(words, sizeof(T) == 2 ? 2 : 4, p, n, packed);
    for (int i = 0; i < n; ++i) out[start + i] = static_cast<T>(packed[i]);
    if constexpr (sizeof(T) == 8) {
      PhiloxTile(second, start, n, words);
      PackMask(words, 4, p, n, packed);
      for (int i = 0; i < n; ++i) out[start + i] |= static_cast<T>(packed[i]) << 32;
    }
  }
}

void DrawUniform4(const DrawCall& call) {
  alignas(64) uint32_t words[4][kTile];
  auto* const out = static_cast<float*>(call.out[0]);
  for (int64_t start = 0; start < call.n; start += kTile) {
    const int n = static_cast<int>(call.n - start < kTile ? call.n - start : kTile);
    PhiloxTile(call, start, n, words);
    for (int i = 0; i < n; ++i) {
      for (int c = 0; c < 4; ++c) out[(start + i) * 4 + c] = UniformFloat(words[c][i]);
    }
  }
}

template <template <class> class Op>
DrawFn OfDType(DType dtype);

template <template <class> class Op>
DrawFn OfAnyDType(DType dtype) {
  switch (dtype) {
    case DType::kI64:
      return &Draw<Op, int64_t>;
    case DType::kI32:
      return &Draw<Op, int32_t>;
    case DType::kU8:
      return &Draw<Op, uint8_t>;
    case DType::kBool:
      return &Draw<Op, bool>;
    default:
      return OfDType<Op>(dtype);
  }
}

template <template <class> class Op>
DrawFn OfDType(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return &Draw<Op, double>;
    case DType::kF32:
      return &Draw<Op, float>;
    case DType::kBF16:
      return &Draw<Op, BFloat16>;
    case DType::kF16:
      return &Draw<Op, Half>;
    default:
      return nullptr;
  }
}

}  // namespace

DrawFn FindDraw(RandomKind kind, DType dtype) {
  switch (kind) {
    case RandomKind::kUniform:
      return OfDType<Uniform>(dtype);
    case RandomKind::kNormal:
      return OfDType<Normal>(dtype);
    case RandomKind::kWords32:
      return OfAnyDType<Words32>(dtype);
    case RandomKind::kWords64:
      return OfAnyDType<Words64>(dtype);
    case RandomKind::kBernoulli:
      return OfAnyDType<Bernoulli>(dtype);
    case RandomKind::kExponential:
      return OfDType<Exponential>(dtype);
    case RandomKind::kCauchy:
      return OfDType<Cauchy>(dtype);
    case RandomKind::kLogNormal:
      return OfDType<LogNormal>(dtype);
    case RandomKind::kGeometric:
      return OfAnyDType<Geometric>(dtype);
  }
  return nullptr;
}

DrawFn FindGroupDraw(GroupKind kind) {
  switch (kind) {
    case GroupKind::kMask2:
      return &DrawMask<uint16_t>;
    case GroupKind::kMask4:
      return &DrawMask<uint32_t>;
    case GroupKind::kMask8:
      return &DrawMask<uint64_t>;
    case GroupKind::kUniform4:
      return &DrawUniform4;
  }
  return nullptr;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
