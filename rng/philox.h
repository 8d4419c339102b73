// Philox4x32-10 in cuRAND's counter layout, and the portable functions from its words to numbers.
//
// Plain enough for `.cu` files and per-level kernel files. Every function is built from integer
// operations, IEEE add, multiply, divide, square root and explicit fma, so that all compilers and
// instruction sets give the same bits (the project is compiled with -ffp-contract=off).
//   Source: cuRAND's headers. The polynomials of sine, cosine and of the
//   double logarithm were fitted for this file (interpolation at Chebyshev nodes with 60 digits).
#pragma once

#include "dtensor/tensor/dtype.h"

namespace dtensor {

#define DT_RNG_FN DT_HOST_DEVICE static inline __attribute__((always_inline))

// --- Philox -----------------------------------------------------------------------------------

// The ten round keys of a seed; computed once per op.
struct PhiloxKeys {
  uint32_t k0[10], k1[10];
};
struct PhiloxWords {
  uint32_t x, y, z, w;
};
inline constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;

DT_RNG_FN PhiloxKeys MakePhiloxKeys(uint64_t seed) {
  PhiloxKeys keys;
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int r = 0; r < 10; ++r) {
    keys.k0[r] = k0;
    keys.k1[r] = k1;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return keys;
}

DT_RNG_FN PhiloxWords Philox4x32(const PhiloxKeys& keys, PhiloxWords c) {
  for (int r = 0; r < 10; ++r) {
    const uint64_t a = static_cast<uint64_t>(kPhiloxM0) * c.x;
    const uint64_t b = static_cast<uint64_t>(kPhiloxM1) * c.z;
    c = PhiloxWords{static_cast<uint32_t>(b >> 32) ^ c.y ^ keys.k0[r], static_cast<uint32_t>(b),
                    static_cast<uint32_t>(a >> 32) ^ c.w ^ keys.k1[r], static_cast<uint32_t>(a)};
  }
  return c;
}

// What curand_init(seed, subsequence, 4 * block) followed by curand4 returns.
DT_RNG_FN PhiloxWords CurandBlock(const PhiloxKeys& keys, uint64_t block, uint64_t subsequence) {
  return Philox4x32(
      keys,
      PhiloxWords{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                  static_cast<uint32_t>(subsequence), static_cast<uint32_t>(subsequence >> 32)});
}

// --- arithmetic that means the same on host and device ------------------------------------------

#ifdef __CUDA_ARCH__
// nvcc contracts a * b + c unless told not to; the intrinsics are never contracted.
DT_RNG_FN float FmaF(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DT_RNG_FN float MulF(float a, float b) { return __fmul_rn(a, b); }
DT_RNG_FN float AddF(float a, float b) { return __fadd_rn(a, b); }
DT_RNG_FN float SqrtF(float a) { return __fsqrt_rn(a); }
DT_RNG_FN double FmaD(double a, double b, double c) { return __fma_rn(a, b, c); }
DT_RNG_FN double MulD(double a, double b) { return __dmul_rn(a, b); }
DT_RNG_FN double AddD(double a, double b) { return __dadd_rn(a, b); }
DT_RNG_FN double SqrtD(double a) { return __dsqrt_rn(a); }
#else
DT_RNG_FN float FmaF(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DT_RNG_FN float MulF(float a, float b) { return a * b; }
DT_RNG_FN float AddF(float a, float b) { return a + b; }
DT_RNG_FN float SqrtF(float a) { return __builtin_sqrtf(a); }
DT_RNG_FN double FmaD(double a, double b, double c) { return __builtin_fma(a, b, c); }
DT_RNG_FN double MulD(double a, double b) { return a * b; }
DT_RNG_FN double AddD(double a, double b) { return a + b; }
DT_RNG_FN double SqrtD(double a) { return __builtin_sqrt(a); }
#endif

// The GPU's own approximations, for those who want PyTorch's bits there and not the CPU's. A CPU
// has none of them and never takes what stands in their place.
#ifdef __CUDA_ARCH__
DT_RNG_FN bool TakesHardware(bool wanted) { return wanted; }
DT_RNG_FN float HardwareSinF(float a) { return __sinf(a); }
DT_RNG_FN float HardwareCosF(float a) { return __cosf(a); }
DT_RNG_FN float HardwareTanF(float a) { return __tanf(a); }
DT_RNG_FN float HardwareLogF(float a) { return __logf(a); }
DT_RNG_FN float HardwareExpF(float a) { return __expf(a); }
#else
DT_RNG_FN bool TakesHardware(bool) { return false; }
DT_RNG_FN float HardwareSinF(float a) { return __builtin_sinf(a); }
DT_RNG_FN float HardwareCosF(float a) { return __builtin_cosf(a); }
DT_RNG_FN float HardwareTanF(float a) { return __builtin_tanf(a); }
DT_RNG_FN float HardwareLogF(float a) { return __builtin_logf(a); }
DT_RNG_FN float HardwareExpF(float a) { return __builtin_expf(a); }
#endif

DT_RNG_FN uint32_t BitsOf(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
DT_RNG_FN float FloatOf(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
DT_RNG_FN uint64_t BitsOf(double d) {
  uint64_t u;
  memcpy(&u, &d, 8);
  return u;
}
DT_RNG_FN double DoubleOf(uint64_t u) {
  double d;
  memcpy(&d, &u, 8);
  return d;
}

// x rounded to nearest even. Without a conversion instruction for unsigned words the halves are
// converted, which is exact, and their sum rounds once: the same bits, and it vectorises.
DT_RNG_FN float FloatOfWord(uint32_t x) {
#if defined(__CUDA_ARCH__) || defined(__AVX512F__)
  return static_cast<float>(x);
#else
  return static_cast<float>(static_cast<int32_t>(x >> 16)) * 65536.0f +
         static_cast<float>(static_cast<int32_t>(x & 0xFFFFu));
#endif
}
// Exact for z <= 2^53: both halves are put into mantissas, and their offsets taken off again.
DT_RNG_FN double DoubleOfWord53(uint64_t z) {
#if defined(__CUDA_ARCH__) || defined(__AVX512DQ__)
  return static_cast<double>(z);
#else
  const double high = DoubleOf((z >> 32) | 0x4530000000000000u);         // 2^84 + high * 2^32
  const double low = DoubleOf((z & 0xFFFFFFFFu) | 0x4330000000000000u);  // 2^52 + low
  return (high - 0x1.00000001p84) + low;
#endif
}

// --- words to uniforms in (0, 1] ----------------------------------------------------------------

DT_RNG_FN float UniformFloat(uint32_t x) {
  return AddF(MulF(FloatOfWord(x), 0x1p-32f), 0x1p-33f);  // the product is exact
}
DT_RNG_FN uint64_t Word53(uint32_t x, uint32_t y) {
  return static_cast<uint64_t>(x) ^ (static_cast<uint64_t>(y) << 21);
}
DT_RNG_FN double UniformDouble(uint32_t x, uint32_t y) {
  return AddD(MulD(DoubleOfWord53(Word53(x, y)), 0x1p-53), 0x1p-54);
}

// --- logarithm of a normal positive number
// --------------------------------------------------------

// The function that CUDA compiles `logf` to, read from its PTX: bit-equal to the device.
DT_RNG_FN float LogF(float u) {
  const uint32_t bits = BitsOf(u);
  const uint32_t k = (bits - 0x3F2AAAABu) & 0xFF800000u;
  const float f = AddF(FloatOf(bits - k), -1.0f);
  const float i = MulF(static_cast<float>(static_cast<int32_t>(k)), 0x1p-23f);
  float p = FloatOf(0xBE055027u);
  p = FmaF(p, f, FloatOf(0x3E1039F6u));
  p = FmaF(p, f, FloatOf(0xBDF8CDCCu));
  p = FmaF(p, f, FloatOf(0x3E0F2955u));
  p = FmaF(p, f, FloatOf(0xBE2AD8B9u));
  p = FmaF(p, f, FloatOf(0x3E4CED0Bu));
  p = FmaF(p, f, FloatOf(0xBE7FFF22u));
  p = FmaF(p, f, FloatOf(0x3EAAAA78u));
  p = FmaF(p, f, FloatOf(0xBF000000u));
  p = MulF(p, f);
  p = FmaF(p, f, f);
  return FmaF(i, FloatOf(0x3F317218u), p);
}

// u = 2^e * m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(q), q = (m - 1) / (m + 1). About 2
// ulp.
DT_RNG_FN double LogD(double u) {
  const uint64_t shifted = BitsOf(u) - 0x3FE6A09E667F3BCDu;  // the bits of sqrt(1/2)
  const double m = DoubleOf(BitsOf(u) - (shifted & 0xFFF0000000000000u));
  // The exponent as a double, by its biased value in a mantissa: 64-bit conversions do not
  // vectorise at every level.
  const uint64_t biased = (shifted + 0x3FF0000000000000u) >> 52;
  const double e = AddD(DoubleOf(biased | 0x4330000000000000u), -(0x1p52 + 1023.0));
  const double f = AddD(m, -1.0);
  const double q = f / AddD(f, 2.0);
  const double z = MulD(q, q);
  double p = 0x1.0c04595972ab8p-3;
  p = FmaD(p, z, 0x1.0fbe83c2cbcf3p-3);
  p = FmaD(p, z, 0x1.3b1c360763b8ap-3);
  p = FmaD(p, z, 0x1.745cf901605f7p-3);
  p = FmaD(p, z, 0x1.c71c720160b47p-3);
  p = FmaD(p, z, 0x1.2492492476c87p-2);
  p = FmaD(p, z, 0x1.9999999999a38p-2);
  p = FmaD(p, z, 0x1.5555555555555p-1);
  p = FmaD(MulD(p, z), q, MulD(2.0, q));
  p = FmaD(e, 0x1.ef35793c76730p-45, p);  // ln 2 in two parts; e * the high part is exact
  return FmaD(e, 0x1.62e42fefa3800p-1, p);
}

// --- sine and cosine
// --------------------------------------------------------------------------------

// Of v in [0, 2 pi]: quadrant by rounding, remainder by two fma.
DT_RNG_FN void SinCosF(float v, float* sine, float* cosine) {
  const float shifted = AddF(MulF(v, 0x1.45f306p-1f), 0x1.8p23f);  // integer in the low bits
  const uint32_t q = BitsOf(shifted);
  const float n = AddF(shifted, -0x1.8p23f);
  float r = FmaF(-n, 0x1.921fb6p+0f, v);  // pi / 2 in two parts
  r = FmaF(-n, -0x1.777a5cp-25f, r);
  const float z = MulF(r, r);
  float s = FmaF(-0x1.9ac96cp-13f, z, 0x1.110c28p-7f);
  s = FmaF(s, z, -0x1.555552p-3f);
  s = FmaF(MulF(s, z), r, r);
  float c = FmaF(0x1.9bd864p-16f, z, -0x1.6c12d2p-10f);
  c = FmaF(c, z, 0x1.555554p-5f);
  c = FmaF(c, z, -0.5f);
  c = FmaF(c, z, 1.0f);
  const bool swap = (q & 1u) != 0;
  *sine = FloatOf(BitsOf(swap ? c : s) ^ ((q & 2u) << 30));
  *cosine = FloatOf(BitsOf(swap ? s : c) ^ (((q + 1u) & 2u) << 30));
}

// Of pi * v, v in [0, 2].
DT_RNG_FN void SinCosPiD(double v, double* sine, double* cosine) {
  const double shifted = AddD(MulD(v, 2.0), 0x1.8p52);
  const uint64_t q = BitsOf(shifted);
  const double r = FmaD(AddD(shifted, -0x1.8p52), -0.5, v);  // exact
  const double z = MulD(r, r);
  double s = -0x1.6cc564dff8a7ap-16;
  s = FmaD(s, z, 0x1.e8f036889ff68p-12);
  s = FmaD(s, z, -0x1.e3074d25df4e9p-8);
  s = FmaD(s, z, 0x1.50783486fab1cp-4);
  s = FmaD(s, z, -0x1.32d2cce62b872p-1);
  s = FmaD(s, z, 0x1.466bc6775aae1p+1);
  s = FmaD(s, z, -0x1.4abbce625be53p+2);
  s = FmaD(s, z, 0x1.1a62633145c07p-53);  // pi in two parts
  s = FmaD(r, 0x1.921fb54442d18p+1, MulD(s, r));
  double c = -0x1.b2f3d15e072b2p-14;
  c = FmaD(c, z, 0x1.f9ce24161feb0p-10);
  c = FmaD(c, z, -0x1.a6d1eef43193ep-6);
  c = FmaD(c, z, 0x1.e1f5068688925p-3);
  c = FmaD(c, z, -0x1.55d3c7e3cb23fp+0);
  c = FmaD(c, z, 0x1.03c1f081b5ac0p+2);
  c = FmaD(c, z, -0x1.3bd3cc9be45dep+2);
  c = FmaD(c, z, 1.0);
  const bool swap = (q & 1u) != 0;
  *sine = DoubleOf(BitsOf(swap ? c : s) ^ ((q & 2u) << 62));
  *cosine = DoubleOf(BitsOf(swap ? s : c) ^ (((q + 1u) & 2u) << 62));
}

// --- exponential
// ----------------------------------------------------------------------------------

// exp(x), about 1 ulp; 0 and infinity beyond what a double holds.
DT_RNG_FN double ExpD(double x) {
  const double low = x < -745.5 ? -745.5 : x;
  const double v = low > 710.0 ? 710.0 : low;
  const double shifted = AddD(MulD(v, 0x1.71547652b82fep+0), 0x1.8p52);
  const double n = AddD(shifted, -0x1.8p52);
  double r = FmaD(-n, 0x1.62e42fefa39efp-1, v);  // ln 2 in two parts
  r = FmaD(-n, 0x1.abc9e3b39803fp-56, r);
  double p = 1.0 / 6227020800.0;
  p = FmaD(p, r, 1.0 / 479001600.0);
  p = FmaD(p, r, 1.0 / 39916800.0);
  p = FmaD(p, r, 1.0 / 3628800.0);
  p = FmaD(p, r, 1.0 / 362880.0);
  p = FmaD(p, r, 1.0 / 40320.0);
  p = FmaD(p, r, 1.0 / 5040.0);
  p = FmaD(p, r, 1.0 / 720.0);
  p = FmaD(p, r, 1.0 / 120.0);
  p = FmaD(p, r, 1.0 / 24.0);
  p = FmaD(p, r, 1.0 / 6.0);
  p = FmaD(p, r, 0.5);
  p = FmaD(p, r, 1.0);
  p = FmaD(p, r, 1.0);
  // 2^n in two factors, so that subnormal and overflowing results come out right.
  const int64_t e = static_cast<int64_t>(n), half = e / 2;
  const double a = DoubleOf(static_cast<uint64_t>(1023 + half) << 52);
  const double b = DoubleOf(static_cast<uint64_t>(1023 + (e - half)) << 52);
  return MulD(MulD(p, a), b);
}

// --- Box-Muller
// ---------------------------------------------------------------------------------------

// The pair of standard normals of words (a, b). The angle is rounded to float exactly as the device
// rounds it and then reduced, rather than taken from the integer b: a rounded angle is off by up to
// 6e-7, as much as the device's own sine, and matching it keeps |ours - torch| <= 5.5e-6.
DT_RNG_FN void NormalPairF(uint32_t a, uint32_t b, float* first, float* second,
                           bool hardware = false) {
  const float u = UniformFloat(a);
  const float v = FmaF(FloatOfWord(b), FloatOf(0x30C90FDBu), FloatOf(0x30490FDBu));
  const float s = SqrtF(MulF(-2.0f, LogF(u)));
  float sine, cosine;
  if (TakesHardware(hardware)) {
    sine = HardwareSinF(v);
    cosine = HardwareCosF(v);
  } else {
    SinCosF(v, &sine, &cosine);
  }
  *first = MulF(s, sine);
  *second = MulF(s, cosine);
}

// Double: u from (x, y), the angle in half-turns from (z, w).
DT_RNG_FN void NormalPairD(PhiloxWords c, double* first, double* second) {
  const double u = UniformDouble(c.x, c.y);
  const double v = AddD(MulD(DoubleOfWord53(Word53(c.z, c.w)), 0x1p-52), 0x1p-53);
  const double s = SqrtD(MulD(-2.0, LogD(u)));
  double sine, cosine;
  SinCosPiD(v, &sine, &cosine);
  *first = MulD(s, sine);
  *second = MulD(s, cosine);
}

}  // namespace dtensor
