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
    for (int i = 0; i < n; ++i) z[i] = FmaF(z[i], std, mean);
    RoundTile(z, n, out);
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

// --- the loop over tiles ---

template <template <class> class Op, class T>
void Draw(const DrawCall& call) {
  const Op<T> op(call);
  alignas(64) uint32_t words[4][kTile];
  for (int64_t start = 0; start < call.n; start += kTile) {
    const int n = static_cast<int>(call.n - start < kTile ? call.n - start : kTile);
    PhiloxTile(call, start, n, words);
    T* out[kMaxUnroll];
    for (int c = 0; c < kMaxUnroll; ++c) {
      out[c] = call.out[c] ? static_cast<T*>(call.out[c]) + start : nullptr;
    }
    op(words, n, out);
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
  }
  return nullptr;
}

}  // namespace DT_LEVEL_NS
}  // namespace dtensor
