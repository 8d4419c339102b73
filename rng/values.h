// Values: from the words of a Philox block to the results of a random op, one sampler per kind and
// element type. The same source for the CPU kernels and for CUDA, so both give the same bits.
//
// Plain enough for `.cu` files and per-level kernel files; everything has internal linkage, because
// each level compiles its own.
//   Source: cuRAND's samplers, torch's DistributionTemplates.h and TransformationHelper.h.
#pragma once

#include <type_traits>

#include "dtensor/rng/philox.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

// Parameters of a random op, as its sampler takes them.
//   kUniform: from, to. kNormal, kLogNormal: mean, std. kBernoulli: p. kExponential: lambda.
//   kCauchy: median, sigma. kGeometric: log(1 - p). kWords32, kWords64: range and from.
struct DrawParams {
  double a = 0, b = 1;
  uint64_t range = 0;
  int64_t from = 0;
  bool plain_log = false;         // Profile::old_exponential_log
  bool flip_raw_uniform = false;  // Profile::flip_raw_uniform
  bool hardware_math = false;     // Profile::hardware_math
};

// What a sampler makes of a block x, y, z, w: a result of each word; of (x, y) and of (z, w); two
// of (x, y) and two of (z, w); or two of all.
enum class Takes { kWord, kTwoWords, kPair, kBlock };

#define DT_RNG_OP DT_HOST_DEVICE inline __attribute__((always_inline))

namespace {

// --- element types ---

template <class T>
DT_RNG_FN T FromFloat(float v) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return ToBFloat16(v);
  } else if constexpr (std::is_same_v<T, Half>) {
    return ToHalf(v);
  } else {
    return static_cast<T>(v);
  }
}
template <class T>
DT_RNG_FN T FromInt(int64_t v) {
  if constexpr (std::is_same_v<T, bool>) {
    return v != 0;
  } else if constexpr (std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>) {
    return FromFloat<T>(static_cast<float>(v));
  } else {
    return static_cast<T>(v);
  }
}
// Whole numbers where T holds no others.
template <class T>
DT_RNG_FN T FromReal(double v) {
  if constexpr (std::is_same_v<T, double>) {
    return v;
  } else if constexpr (std::is_integral_v<T>) {
    return FromInt<T>(static_cast<int64_t>(v));
  } else {
    return FromFloat<T>(static_cast<float>(v));
  }
}
template <class T>
DT_RNG_FN float Widen(T v) {
  if constexpr (std::is_same_v<T, float>) {
    return v;
  } else {
    return ToFloat(v);
  }
}

// --- uniform_(from, to): cuRAND's (0, 1] scaled, and `to` turned into `from` ---

// The bounds are cast to the element type and their difference is taken in it, as in torch.
template <class T>
struct Uniform {
  static constexpr Takes kTakes = Takes::kWord;
  float range, from, to;
  T from_value;
  bool flip_raw;
  DT_HOST_DEVICE explicit Uniform(const DrawParams& p) : flip_raw(p.flip_raw_uniform) {
    from_value = FromFloat<T>(static_cast<float>(p.a));
    from = Widen(from_value);
    to = Widen(FromFloat<T>(static_cast<float>(p.b)));
    range = Widen(FromFloat<T>(to - from));
  }
  DT_RNG_OP T operator()(uint32_t x) const {
    const float u = UniformFloat(x);
    const T v = FromFloat<T>(FmaF(flip_raw && u == 1.0f ? 0.0f : u, range, from));
    return !flip_raw && Widen(v) == to ? from_value : v;
  }
};
template <>
struct Uniform<double> {
  static constexpr Takes kTakes = Takes::kTwoWords;
  double from, to, range;
  bool flip_raw;
  DT_HOST_DEVICE explicit Uniform(const DrawParams& p)
      : from(p.a), to(p.b), range(AddD(p.b, -p.a)), flip_raw(p.flip_raw_uniform) {}
  DT_RNG_OP double operator()(uint32_t x, uint32_t y) const {
    const double u = UniformDouble(x, y);
    const double v = FmaD(flip_raw && u == 1.0 ? 0.0 : u, range, from);
    return !flip_raw && v == to ? from : v;
  }
};

// --- normal_(mean, std): Box-Muller ---

template <class T>
struct Normal {
  static constexpr Takes kTakes = Takes::kPair;
  float mean, std;
  bool hardware;
  DT_HOST_DEVICE explicit Normal(const DrawParams& p)
      : mean(static_cast<float>(p.a)), std(static_cast<float>(p.b)), hardware(p.hardware_math) {}
  DT_RNG_OP void operator()(uint32_t a, uint32_t b, T* first, T* second) const {
    float f, s;
    NormalPairF(a, b, &f, &s, hardware);
    *first = FromFloat<T>(FmaF(f, std, mean));
    *second = FromFloat<T>(FmaF(s, std, mean));
  }
};
template <>
struct Normal<double> {
  static constexpr Takes kTakes = Takes::kBlock;
  double mean, std;
  DT_HOST_DEVICE explicit Normal(const DrawParams& p) : mean(p.a), std(p.b) {}
  DT_RNG_OP void operator()(const PhiloxWords& w, double* first, double* second) const {
    double f, s;
    NormalPairD(w, &f, &s);
    *first = FmaD(f, std, mean);
    *second = FmaD(s, std, mean);
  }
};

template <class T>
struct LogNormal {
  static constexpr Takes kTakes = Takes::kPair;
  float mean, std;
  bool hardware;
  DT_HOST_DEVICE explicit LogNormal(const DrawParams& p)
      : mean(static_cast<float>(p.a)), std(static_cast<float>(p.b)), hardware(p.hardware_math) {}
  DT_RNG_OP T Value(float z) const {
    const float x = FmaF(z, std, mean);
    if (TakesHardware(hardware)) return FromFloat<T>(HardwareExpF(x));
    return FromFloat<T>(static_cast<float>(ExpD(static_cast<double>(x))));
  }
  DT_RNG_OP void operator()(uint32_t a, uint32_t b, T* first, T* second) const {
    float f, s;
    NormalPairF(a, b, &f, &s, hardware);
    *first = Value(f);
    *second = Value(s);
  }
};
template <>
struct LogNormal<double> {
  static constexpr Takes kTakes = Takes::kBlock;
  Normal<double> normal;
  DT_HOST_DEVICE explicit LogNormal(const DrawParams& p) : normal(p) {}
  DT_RNG_OP void operator()(const PhiloxWords& w, double* first, double* second) const {
    double f, s;
    normal(w, &f, &s);
    *first = ExpD(f);
    *second = ExpD(s);
  }
};

// --- whole numbers: from + word mod range ---

template <class T>
struct Words32 {
  static constexpr Takes kTakes = Takes::kWord;
  uint32_t range;  // 0: 2^32
  int64_t from;
  DT_HOST_DEVICE explicit Words32(const DrawParams& p)
      : range(static_cast<uint32_t>(p.range)), from(p.from) {}
  DT_RNG_OP T operator()(uint32_t x) const {
    return FromInt<T>(static_cast<int64_t>(range == 0 ? x : x % range) + from);
  }
};
template <class T>
struct Words64 {
  static constexpr Takes kTakes = Takes::kTwoWords;
  uint64_t range, from;  // range 0: 2^64
  DT_HOST_DEVICE explicit Words64(const DrawParams& p)
      : range(p.range), from(static_cast<uint64_t>(p.from)) {}
  DT_RNG_OP T operator()(uint32_t x, uint32_t y) const {
    const uint64_t word = static_cast<uint64_t>(x) << 32 | y;
    return FromInt<T>(static_cast<int64_t>((range == 0 ? word : word % range) + from));
  }
};

// --- functions of one uniform: in float, or in double for double ---

DT_RNG_FN float LogOf(float u, bool hardware) {
  return TakesHardware(hardware) ? HardwareLogF(u) : LogF(u);
}

// T of F(u), F having operator() for float and for double.
template <class F, class T>
struct OfUniform {
  static constexpr Takes kTakes = Takes::kWord;
  F f;
  DT_HOST_DEVICE explicit OfUniform(const DrawParams& p) : f(p) {}
  DT_RNG_OP T operator()(uint32_t x) const {
    return FromReal<T>(static_cast<double>(f(UniformFloat(x))));
  }
};
template <class F>
struct OfUniform<F, double> {
  static constexpr Takes kTakes = Takes::kTwoWords;
  F f;
  DT_HOST_DEVICE explicit OfUniform(const DrawParams& p) : f(p) {}
  DT_RNG_OP double operator()(uint32_t x, uint32_t y) const { return f(UniformDouble(x, y)); }
};

struct BernoulliValue {  // 1 where u < p
  double p;
  float p_float;
  DT_HOST_DEVICE explicit BernoulliValue(const DrawParams& d)
      : p(d.a), p_float(static_cast<float>(d.a)) {}
  DT_RNG_OP float operator()(float u) const { return u < p_float ? 1.0f : 0.0f; }
  DT_RNG_OP double operator()(double u) const { return u < p ? 1.0 : 0.0; }
};

struct ExponentialValue {
  double lambda;
  bool plain, hardware;
  DT_HOST_DEVICE explicit ExponentialValue(const DrawParams& p)
      : lambda(p.a), plain(p.plain_log), hardware(p.hardware_math) {}
  DT_RNG_OP float operator()(float u) const {
    const float log = !plain && u >= 1 - 0x1p-24f ? -0x1p-24f : LogOf(u, hardware);
    return MulF(-1 / static_cast<float>(lambda), log);
  }
  DT_RNG_OP double operator()(double u) const {
    const double log = !plain && u >= 1 - 0x1p-53 ? -0x1p-53 : LogD(u);
    return MulD(-1 / lambda, log);
  }
};

struct CauchyValue {
  double median, sigma;
  bool hardware;
  DT_HOST_DEVICE explicit CauchyValue(const DrawParams& p)
      : median(p.a), sigma(p.b), hardware(p.hardware_math) {}
  DT_RNG_OP static double TanPi(double v) {  // v in [-1/2, 1/2]
    double sine, cosine;
    SinCosPiD(v < 0 ? AddD(v, 2) : v, &sine, &cosine);
    return sine / cosine;
  }
  DT_RNG_OP float operator()(float u) const {
    const float e = 0x1p-23f, clipped = u > 1 - e ? 1 - e : u < e ? e : u;
    const float v = AddF(clipped, -0.5f), pi = 0x1.921fb6p1f;
    const float t = TakesHardware(hardware) ? HardwareTanF(MulF(pi, v))
                                            : static_cast<float>(TanPi(static_cast<double>(v)));
    return FmaF(static_cast<float>(sigma), t, static_cast<float>(median));
  }
  DT_RNG_OP double operator()(double u) const { return FmaD(sigma, TanPi(AddD(u, -0.5)), median); }
};

struct GeometricValue {
  double log_rest;
  bool hardware;
  DT_HOST_DEVICE explicit GeometricValue(const DrawParams& p)
      : log_rest(p.a), hardware(p.hardware_math) {}
  DT_RNG_OP static double Ceil(double v) {  // v >= 0, below 2^52
    const double whole = AddD(AddD(v, 0x1p52), -0x1p52);
    return whole < v ? AddD(whole, 1) : whole;
  }
  DT_RNG_OP float operator()(float u) const {
    const float q = LogOf(u, hardware) / static_cast<float>(log_rest);
    return static_cast<float>(Ceil(static_cast<double>(q)));
  }
  DT_RNG_OP double operator()(double u) const { return Ceil(LogD(u) / log_rest); }
};

template <class T>
using Bernoulli = OfUniform<BernoulliValue, T>;
template <class T>
using Exponential = OfUniform<ExponentialValue, T>;
template <class T>
using Cauchy = OfUniform<CauchyValue, T>;
template <class T>
using Geometric = OfUniform<GeometricValue, T>;

// --- all results of a block ---

template <class Sampler>
inline constexpr int kResults =
    Sampler::kTakes == Takes::kWord || Sampler::kTakes == Takes::kPair ? 4 : 2;

template <class Sampler, class T>
DT_HOST_DEVICE static inline void BlockResults(const Sampler& sampler, const PhiloxWords& w,
                                               T* out) {
  if constexpr (Sampler::kTakes == Takes::kWord) {
    out[0] = sampler(w.x);
    out[1] = sampler(w.y);
    out[2] = sampler(w.z);
    out[3] = sampler(w.w);
  } else if constexpr (Sampler::kTakes == Takes::kTwoWords) {
    out[0] = sampler(w.x, w.y);
    out[1] = sampler(w.z, w.w);
  } else if constexpr (Sampler::kTakes == Takes::kPair) {
    sampler(w.x, w.y, &out[0], &out[1]);
    sampler(w.z, w.w, &out[2], &out[3]);
  } else {
    sampler(w, &out[0], &out[1]);
  }
}

}  // namespace
}  // namespace dtensor
