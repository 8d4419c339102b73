// The samplers' value functions over tiles of words. Compiled once per CPU level.
#include "rng/draw.h"

#include "rng/kernels/words.h"

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

static inline float Narrow(double v, float) { return static_cast<float>(v); }
static inline BFloat16 Narrow(double v, BFloat16) { return ToBFloat16(static_cast<float>(v)); }
static inline Half Narrow(double v, Half) { return ToHalf(static_cast<float>(v)); }
static inline float Widen(float v) { return v; }
static inline float Widen(BFloat16 v) { return ToFloat(v); }
static inline float Widen(Half v) { return ToFloat(v); }

// --- uniform_(from, to): cuRAND's (0, 1] scaled, and `to` turned into `from` ---

// The bounds are cast to the element type and their difference is taken in it (rng.md 4.2).
template <class T>
struct Uniform {
  float range, from, to;
  T from_value;
  bool flip_raw;
  explicit Uniform(const DrawCall& call) : flip_raw(call.flip_raw_uniform) {
    from_value = Narrow(call.a, T{});
    from = Widen(from_value);
    to = Widen(Narrow(call.b, T{}));
    range = Widen(Narrow(static_cast<double>(to - from), T{}));
  }

  // Where the flip is not on u, `to` itself must not come out.
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

  // float32 straight from the rounds' registers: nothing is rounded after the fma.
  static constexpr bool kFromLanes = sizeof(T) == sizeof(float);
  bool FromLanes() const { return !flip_raw && (kVectorFma || BitsOf(from) == 0); }
  FloatVector Lanes(WordVector x) const {
    const FloatVector a = FloatVector{} + from, b = FloatVector{} + to, r = FloatVector{} + range;
    const FloatVector v = FmaVector(UniformVector(x), r, a);
    return v == b ? a : v;
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
    if (!flip_raw) Flip(Narrow(to, T{}), from_value, n, out);
  }
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; ++c) {
      if (out[c]) Component(w[c], n, out[c]);
    }
  }
};

template <>
struct Uniform<double> {
  double from, to, range;
  bool flip_raw;
  explicit Uniform(const DrawCall& call)
      : from(call.a), to(call.b), range(call.b - call.a), flip_raw(call.flip_raw_uniform) {}
  void operator()(Words w, int n, double* const* out) const {
    for (int c = 0; c < 2; ++c) {
      double* o = out[c];
      if (!o) continue;
      const uint32_t *x = w[2 * c], *y = w[2 * c + 1];
      for (int i = 0; i < n; ++i) o[i] = UniformDouble(x[i], y[i]);
      if (flip_raw) {
        for (int i = 0; i < n; ++i) o[i] = o[i] == 1.0 ? 0.0 : o[i];
      }
      for (int i = 0; i < n; ++i) o[i] = FmaD(o[i], range, from);
      if (flip_raw) continue;
      for (int i = 0; i < n; ++i) o[i] = o[i] == to ? from : o[i];
    }
  }
};

// --- normal_(mean, std): Box-Muller ---

template <class T>
struct Normal {
  float mean, std;
  explicit Normal(const DrawCall& call)
      : mean(static_cast<float>(call.a)), std(static_cast<float>(call.b)) {}

  void Store(float* z, int n, T* out) const {
    if (!out) return;
    if constexpr (sizeof(T) == sizeof(float)) {
      for (int i = 0; i < n; ++i) out[i] = FmaF(z[i], std, mean);
    } else {
      for (int i = 0; i < n; ++i) z[i] = FmaF(z[i], std, mean);
      RoundTile(z, n, out);
    }
  }
  void operator()(Words w, int n, T* const* out) const {
    alignas(64) float first[kTile], second[kTile];
    for (int c = 0; c < 4; c += 2) {
      if (!out[c] && !out[c + 1]) continue;
      const uint32_t *a = w[c], *b = w[c + 1];
      for (int i = 0; i < n; ++i) {
        float f, s;
        NormalPairF(a[i], b[i], &f, &s);
        first[i] = f;
        second[i] = s;
      }
      Store(first, n, out[c]);
      Store(second, n, out[c + 1]);
    }
  }
};

template <>
struct Normal<double> {
  double mean, std;
  explicit Normal(const DrawCall& call) : mean(call.a), std(call.b) {}
  void operator()(Words w, int n, double* const* out) const {
    alignas(64) double z[2][kTile];
    for (int i = 0; i < n; ++i) {
      double f, s;
      NormalPairD(PhiloxWords{w[0][i], w[1][i], w[2][i], w[3][i]}, &f, &s);
      z[0][i] = f;
      z[1][i] = s;
    }
    for (int c = 0; c < 2; ++c) {
      if (!out[c]) continue;
      double* o = out[c];
      for (int i = 0; i < n; ++i) o[i] = FmaD(z[c][i], std, mean);
    }
  }
};

// --- whole numbers ---

template <class T>
static inline T FromInt(int64_t v) {
  return static_cast<T>(v);
}
template <>
inline BFloat16 FromInt<BFloat16>(int64_t v) {
  return ToBFloat16(static_cast<float>(v));
}
template <>
inline Half FromInt<Half>(int64_t v) {
  return ToHalf(static_cast<float>(v));
}
template <>
inline bool FromInt<bool>(int64_t v) {
  return v != 0;
}

template <class T>
struct Words32 {
  uint32_t range;
  int64_t from;
  explicit Words32(const DrawCall& call)
      : range(static_cast<uint32_t>(call.range)), from(call.from) {}
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; ++c) {
      if (!out[c]) continue;
      const uint32_t* x = w[c];
      if (range == 0) {  // 2^32: every word
        for (int i = 0; i < n; ++i) out[c][i] = FromInt<T>(static_cast<int64_t>(x[i]) + from);
      } else if ((range & (range - 1)) == 0) {
        for (int i = 0; i < n; ++i) {
          out[c][i] = FromInt<T>(static_cast<int64_t>(x[i] & (range - 1)) + from);
        }
      } else {
        for (int i = 0; i < n; ++i) {
          out[c][i] = FromInt<T>(static_cast<int64_t>(x[i] % range) + from);
        }
      }
    }
  }
};

template <class T>
struct Words64 {
  uint64_t range, from;
  explicit Words64(const DrawCall& call)
      : range(call.range), from(static_cast<uint64_t>(call.from)) {}
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 2; ++c) {
      if (!out[c]) continue;
      for (int i = 0; i < n; ++i) {
        const uint64_t word = static_cast<uint64_t>(w[2 * c][i]) << 32 | w[2 * c + 1][i];
        const uint64_t v = (range == 0 ? word : word % range) + from;
        out[c][i] = FromInt<T>(static_cast<int64_t>(v));
      }
    }
  }
};

template <class T>
struct Bernoulli {
  float p;
  explicit Bernoulli(const DrawCall& call) : p(static_cast<float>(call.a)) {}
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; ++c) {
      if (!out[c]) continue;
      const T one = FromInt<T>(1), zero = FromInt<T>(0);
      for (int i = 0; i < n; ++i) out[c][i] = UniformFloat(w[c][i]) < p ? one : zero;
    }
  }
};
template <>
struct Bernoulli<double> {
  double p;
  explicit Bernoulli(const DrawCall& call) : p(call.a) {}
  void operator()(Words w, int n, double* const* out) const {
    for (int c = 0; c < 2; ++c) {
      if (!out[c]) continue;
      for (int i = 0; i < n; ++i) {
        out[c][i] = UniformDouble(w[2 * c][i], w[2 * c + 1][i]) < p ? 1.0 : 0.0;
      }
    }
  }
};

// --- functions of one uniform or normal: in float, or in double for double ---

struct ExponentialValue {
  double lambda;
  bool plain;
  explicit ExponentialValue(const DrawCall& call) : lambda(call.a), plain(call.plain_log) {}
  float operator()(float u) const {
    const float log = !plain && u >= 1 - 0x1p-24f ? -0x1p-24f : LogF(u);
    return MulF(-1 / static_cast<float>(lambda), log);
  }
  double operator()(double u) const {
    const double log = !plain && u >= 1 - 0x1p-53 ? -0x1p-53 : LogD(u);
    return MulD(-1 / lambda, log);
  }
};

struct CauchyValue {
  double median, sigma;
  explicit CauchyValue(const DrawCall& call) : median(call.a), sigma(call.b) {}
  static double TanPi(double v) {  // v in [-1/2, 1/2]
    double sine, cosine;
    SinCosPiD(v < 0 ? v + 2 : v, &sine, &cosine);
    return sine / cosine;
  }
  float operator()(float u) const {
    const float e = 0x1p-23f, clipped = u > 1 - e ? 1 - e : u < e ? e : u;
    const auto t = static_cast<float>(TanPi(static_cast<double>(clipped - 0.5f)));
    return FmaF(static_cast<float>(sigma), t, static_cast<float>(median));
  }
  double operator()(double u) const { return FmaD(sigma, TanPi(u - 0.5), median); }
};

struct GeometricValue {
  double log_rest;
  explicit GeometricValue(const DrawCall& call) : log_rest(call.a) {}
  static double Ceil(double v) {  // v >= 0, below 2^52
    const double whole = AddD(AddD(v, 0x1p52), -0x1p52);
    return whole < v ? whole + 1 : whole;
  }
  float operator()(float u) const {
    const float q = LogF(u) / static_cast<float>(log_rest);
    return static_cast<float>(Ceil(static_cast<double>(q)));
  }
  double operator()(double u) const { return Ceil(LogD(u) / log_rest); }
};

template <class T>
static inline T FromReal(double v) {
  return FromInt<T>(static_cast<int64_t>(v));
}
template <>
inline double FromReal<double>(double v) {
  return v;
}
template <>
inline float FromReal<float>(double v) {
  return static_cast<float>(v);
}
template <>
inline BFloat16 FromReal<BFloat16>(double v) {
  return ToBFloat16(static_cast<float>(v));
}
template <>
inline Half FromReal<Half>(double v) {
  return ToHalf(static_cast<float>(v));
}

template <class Value, class T>
struct OfUniform {
  Value value;
  explicit OfUniform(const DrawCall& call) : value(call) {}
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; ++c) {
      if (!out[c]) continue;
      for (int i = 0; i < n; ++i) {
        out[c][i] = FromReal<T>(static_cast<double>(value(UniformFloat(w[c][i]))));
      }
    }
  }
};
template <class Value>
struct OfUniform<Value, double> {
  Value value;
  explicit OfUniform(const DrawCall& call) : value(call) {}
  void operator()(Words w, int n, double* const* out) const {
    for (int c = 0; c < 2; ++c) {
      if (!out[c]) continue;
      for (int i = 0; i < n; ++i) out[c][i] = value(UniformDouble(w[2 * c][i], w[2 * c + 1][i]));
    }
  }
};
template <class T>
using Exponential = OfUniform<ExponentialValue, T>;
template <class T>
using Cauchy = OfUniform<CauchyValue, T>;
template <class T>
using Geometric = OfUniform<GeometricValue, T>;

template <class T>
struct LogNormal {
  float mean, std;
  explicit LogNormal(const DrawCall& call)
      : mean(static_cast<float>(call.a)), std(static_cast<float>(call.b)) {}
  static T Value(double z) { return FromReal<T>(static_cast<double>(static_cast<float>(ExpD(z)))); }
  void operator()(Words w, int n, T* const* out) const {
    for (int c = 0; c < 4; c += 2) {
      if (!out[c] && !out[c + 1]) continue;
      for (int i = 0; i < n; ++i) {
        float f, s;
        NormalPairF(w[c][i], w[c + 1][i], &f, &s);
        if (out[c]) out[c][i] = Value(FmaF(f, std, mean));
        if (out[c + 1]) out[c + 1][i] = Value(FmaF(s, std, mean));
      }
    }
  }
};
template <>
struct LogNormal<double> {
  double mean, std;
  explicit LogNormal(const DrawCall& call) : mean(call.a), std(call.b) {}
  void operator()(Words w, int n, double* const* out) const {
    for (int i = 0; i < n; ++i) {
      double f, s;
      NormalPairD(PhiloxWords{w[0][i], w[1][i], w[2][i], w[3][i]}, &f, &s);
      if (out[0]) out[0][i] = ExpD(FmaD(f, std, mean));
      if (out[1]) out[1][i] = ExpD(FmaD(s, std, mean));
    }
  }
};

// --- the loop over tiles ---

// An op whose results need no array of words may make them of the words' vectors (Lanes).
template <class Op>
concept FromLanes = Op::kFromLanes;

template <template <class> class Op, class T>
void Draw(const DrawCall& call) {
  const Op<T> op(call);
  alignas(64) uint32_t words[4][kTile];
  for (int64_t start = 0; start < call.n; start += kTile) {
    const int n = static_cast<int>(call.n - start < kTile ? call.n - start : kTile);
    T* out[kMaxUnroll];
    for (int c = 0; c < kMaxUnroll; ++c) {
      out[c] = call.out[c] ? static_cast<T*>(call.out[c]) + start : nullptr;
    }
    if constexpr (FromLanes<Op<T>>) {
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
