// Conversions, comparisons and selections against the host's.
#include <cfenv>
#include <functional>

#include "tests/cusim/lanes.h"

namespace cusim::testing {
namespace {

constexpr size_t kRows = 1500;

template <class T>
std::string NameOf() {
  if constexpr (!std::is_integral_v<T>) return sizeof(T) == 4 ? "f32" : "f64";
  return (std::is_signed_v<T> ? "s" : "u") + std::to_string(sizeof(T) * 8);
}
template <class T>
constexpr int kRegister = sizeof(T) == 1 ? 16 : sizeof(T) * 8;

template <class D, class S, class F>
void CheckCvt(const std::string& modifiers, F want) {
  const std::string text = "cvt" + modifiers + "." + NameOf<D>() + "." + NameOf<S>();
  const auto s = Operands(kRegister<S>, kRows, 3, !std::is_integral_v<S>);
  const auto got = RunOp({text, kRegister<D>, {kRegister<S>}, ""}, {s});
  int wrong = 0;
  for (size_t i = 0; i < kRows && wrong < 3; ++i) {
    const D expected = want(Get<S>(s[i]));
    const D have = Get<D>(got[i]);
    if (Put(have) == Put(expected) || (have != have && expected != expected)) continue;
    ++wrong;
    ADD_FAILURE() << text << " of " << std::hex << s[i] << ": " << got[i] << ", not "
                  << Put(expected);
  }
}

template <class D, class S>
void Whole() {
  CheckCvt<D, S>("", [](S v) { return static_cast<D>(v); });
  CheckCvt<D, S>(".sat", [](S v) {
    const __int128 low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
    return static_cast<D>(std::clamp<__int128>(v, low, high));
  });
}
template <class S>
void WholeFrom() {
  Whole<uint8_t, S>(), Whole<int8_t, S>(), Whole<uint16_t, S>(), Whole<int16_t, S>();
  Whole<uint32_t, S>(), Whole<int32_t, S>(), Whole<uint64_t, S>(), Whole<int64_t, S>();
}

TEST(ConvertTest, IntegersWrapOrSaturate) {
  WholeFrom<uint8_t>(), WholeFrom<int8_t>(), WholeFrom<uint16_t>(), WholeFrom<int16_t>();
  WholeFrom<uint32_t>(), WholeFrom<int32_t>(), WholeFrom<uint64_t>(), WholeFrom<int64_t>();
}

const std::pair<std::string, int> kModes[] = {
    {"n", FE_TONEAREST}, {"z", FE_TOWARDZERO}, {"m", FE_DOWNWARD}, {"p", FE_UPWARD}};

template <class D, class S>
void FromReal() {
  for (const auto& [name, mode] : kModes) {
    CheckCvt<D, S>(".r" + name + "i", [mode = mode](S v) {
      const bool wide = sizeof(D) == 8 || sizeof(S) == 8;
      if (v != v) return wide ? static_cast<D>(1ull << (sizeof(D) * 8 - 1)) : D{0};
      std::fesetround(mode);
      volatile S x = v;
      const S whole = std::nearbyint(x);
      std::fesetround(FE_TONEAREST);
      const long double low = std::numeric_limits<D>::min(), high = std::numeric_limits<D>::max();
      return static_cast<D>(std::clamp<long double>(whole, low, high));
    });
  }
}

TEST(ConvertTest, RealsToIntegersSaturateAndNansAreNamed) {
  FromReal<int32_t, float>(), FromReal<uint32_t, float>(), FromReal<int64_t, float>();
  FromReal<uint64_t, float>(), FromReal<int16_t, float>(), FromReal<uint8_t, float>();
  FromReal<int32_t, double>(), FromReal<uint32_t, double>(), FromReal<int64_t, double>();
  FromReal<uint64_t, double>(), FromReal<int8_t, double>();
}

template <class D, class S>
void ToReal() {
  for (const auto& [name, mode] : kModes) {
    CheckCvt<D, S>(".r" + name, [mode = mode](S v) {
      std::fesetround(mode);
      volatile S x = v;
      volatile D r = static_cast<D>(x);
      std::fesetround(FE_TONEAREST);
      return static_cast<D>(r);
    });
  }
}

TEST(ConvertTest, ToRealsRoundsAsAsked) {
  ToReal<float, int32_t>(), ToReal<float, uint32_t>(), ToReal<float, int64_t>();
  ToReal<float, uint64_t>(), ToReal<double, int64_t>(), ToReal<double, uint64_t>();
  ToReal<float, double>(), ToReal<float, int16_t>();
  CheckCvt<double, float>("", [](float v) { return double{v}; });
  CheckCvt<double, int32_t>(".rn", [](int32_t v) { return double(v); });
}

TEST(ConvertTest, RealsToWholeReals) {
  for (const auto& [name, mode] : kModes) {
    CheckCvt<float, float>(".r" + name + "i", [mode = mode](float v) {
      std::fesetround(mode);
      volatile float x = v;
      const float r = std::nearbyint(x);
      std::fesetround(FE_TONEAREST);
      return r;
    });
  }
  CheckCvt<float, float>(".sat", [](float v) { return v > 0 ? std::min(v, 1.0f) : 0.0f; });
}

// The bits of a 16-bit float for v, by looking at all of them.
uint16_t Nearest(double v, int mantissa, bool toward_zero) {
  if (v != v) return 0x7fff;
  const int bias = (1 << (14 - mantissa)) - 1;
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  v = std::fabs(v);
  const int infinity = ((1 << (15 - mantissa)) - 1) << mantissa;
  const auto value = [&](int bits) {
    const int exponent = bits >> mantissa, fraction = bits & ((1 << mantissa) - 1);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                         : std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
  };
  if (std::isinf(v)) return static_cast<uint16_t>(sign | infinity);
  int low = 0, high = infinity;
  while (high - low > 1) (value((low + high) / 2) <= v ? low : high) = (low + high) / 2;
  if (toward_zero) return static_cast<uint16_t>(sign | low);
  const double below = v - value(low), above = value(high) - v;
  return static_cast<uint16_t>(sign | (below > above || (below == above && low % 2) ? high : low));
}

TEST(ConvertTest, SixteenBits) {
  const auto s = Operands(32, kRows, 9, true);
  for (const auto& [type, mantissa] :
       std::initializer_list<std::pair<std::string, int>>{{"f16", 10}, {"bf16", 7}}) {
    for (const bool zero : {false, true}) {
      const std::string round = zero ? "rz." : "rn.";
      const auto one = RunOp({"cvt." + round + type + ".f32", 16, {32}, ""}, {s});
      auto turned = s;
      std::rotate(turned.begin(), turned.begin() + 1, turned.end());
      const auto two = RunOp({"cvt." + round + type + "x2.f32", 32, {32, 32}, ""}, {s, turned});
      for (size_t i = 0; i < kRows; ++i) {
        const uint16_t a = Nearest(Get<float>(s[i]), mantissa, zero);
        const uint16_t b = Nearest(Get<float>(turned[i]), mantissa, zero);
        ASSERT_EQ(one[i], a) << type << round << std::hex << s[i];
        ASSERT_EQ(two[i], uint64_t{a} << 16 | b) << type << round << std::hex << s[i];
      }
    }
    std::vector<uint64_t> all(1 << 16);
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    const auto back = RunOp({"cvt.f32." + type, 32, {16}, ""}, {all});
    const auto again = RunOp({"cvt.rn." + type + ".f32", 16, {32}, ""}, {back});
    for (size_t i = 0; i < all.size(); ++i) {
      const float v = Get<float>(back[i]);
      ASSERT_EQ(again[i], v == v ? i : 0x7fffu);  // there and back
    }
    EXPECT_EQ(Get<float>(back[type == "f16" ? 0x3e00 : 0x3fc0]), 1.5f);
  }
  const auto wide = Operands(64, kRows, 11);
  const auto from_int = RunOp({"cvt.rn.f16.s64", 16, {64}, ""}, {wide});
  for (size_t i = 0; i < kRows; ++i) {
    ASSERT_EQ(from_int[i], Nearest(static_cast<double>(static_cast<int64_t>(wide[i])), 10, false));
  }
  const auto tf32 =
      RunOp({"cvt.rna.tf32.f32", 32, {32}, ""}, {{Put(1.0f), 0x3f801000, 0x3f800fff}});
  EXPECT_EQ(tf32, (std::vector<uint64_t>{0x3f800000, 0x3f802000, 0x3f800000}));
}

template <class T>
void Comparisons(const std::string& type) {
  const int bits = sizeof(T) * 8;
  const bool real = !std::is_integral_v<T>;
  const auto a = Operands(bits, kRows, 21, real);
  auto b = Operands(bits, kRows, 22, real);
  for (size_t i = 0; i < kRows; i += 5) b[i] = a[i];
  const auto check = [&](const std::string& how, std::function<bool(T, T, bool)> want) {
    const auto got = RunOp({"set." + how + ".u32." + type, 32, {bits, bits}, ""}, {a, b});
    // setp, with both predicates and the and with another, by selp.
    for (size_t i = 0; i < kRows; ++i) {
      const T x = Get<T>(a[i]), y = Get<T>(b[i]);
      ASSERT_EQ(got[i], want(x, y, x != x || y != y) ? 0xffffffffu : 0u) << how << "." << type;
    }
  };
  check("eq", [](T x, T y, bool nan) { return !nan && x == y; });
  check("ne", [](T x, T y, bool nan) { return !nan && x != y; });
  check(real || std::is_signed_v<T> ? "lt" : "lo", [](T x, T y, bool) { return x < y; });
  check(real || std::is_signed_v<T> ? "le" : "ls", [](T x, T y, bool) { return x <= y; });
  check(real || std::is_signed_v<T> ? "gt" : "hi", [](T x, T y, bool) { return x > y; });
  check(real || std::is_signed_v<T> ? "ge" : "hs", [](T x, T y, bool) { return x >= y; });
  if (!real) return;
  check("equ", [](T x, T y, bool nan) { return nan || x == y; });
  check("neu", [](T x, T y, bool nan) { return nan || x != y; });
  check("ltu", [](T x, T y, bool nan) { return nan || x < y; });
  check("leu", [](T x, T y, bool nan) { return nan || x <= y; });
  check("gtu", [](T x, T y, bool nan) { return nan || x > y; });
  check("geu", [](T x, T y, bool nan) { return nan || x >= y; });
  check("num", [](T, T, bool nan) { return !nan; });
  check("nan", [](T, T, bool nan) { return nan; });
}

TEST(ConvertTest, Comparisons) {
  Comparisons<uint16_t>("u16");
  Comparisons<int16_t>("s16");
  Comparisons<uint32_t>("u32");
  Comparisons<int32_t>("s32");
  Comparisons<uint64_t>("u64");
  Comparisons<int64_t>("s64");
  Comparisons<float>("f32");
  Comparisons<double>("f64");
}

TEST(ConvertTest, PredicatesAndSelection) {
  const std::string entry =
      ".visible .entry k(.param .u64 o)\n{\n.reg .pred %p<5>;\n.reg .b32 %r<6>;\n.reg .b64 "
      "%rd<3>;\n"
      "mov.u32 %r0, %tid.x;\nand.b32 %r1, %r0, 1;\nsetp.eq.s32 %p0, %r1, 1;\n"
      "setp.lt.and.s32 %p1|%p2, %r0, 10, !%p0;\nxor.pred %p3, %p1, %p2;\nnot.pred %p4, %p3;\n"
      "selp.b32 %r2, 1, 0, %p1;\nselp.b32 %r3, 2, 0, %p2;\nselp.b32 %r4, 4, 0, %p4;\n"
      "add.s32 %r5, %r2, %r3;\nadd.s32 %r5, %r5, %r4;\n@!%p0 add.s32 %r5, %r5, 8;\n"
      "ld.param.u64 %rd0, [o];\nmul.wide.u32 %rd1, %r0, 8;\nadd.s64 %rd0, %rd0, %rd1;\n"
      "cvt.u64.u32 %rd2, %r5;\nst.global.u64 [%rd0], %rd2;\nret;\n}\n";
  Device device;
  const uint64_t at = device.Put(std::vector<uint64_t>(40));
  EXPECT_EQ(device.Run(entry, {1}, {40}, {at}).kind, Outcome::kFine);
  const auto got = device.Take(at, 40);
  for (uint64_t t = 0; t < 40; ++t) {
    const bool even = t % 2 == 0, p = t < 10 && even, q = t >= 10 && even;
    EXPECT_EQ(got[t], uint64_t{p} + 2 * q + 4 * (p == q) + 8 * even) << t;
  }
}

TEST(ConvertTest, PacksAndUnpacks) {
  const auto got = RunOp(
      {"brev.b32", 32, {32}, ";\nmov.b32 {%h0, %h1}, %d;\nmov.b32 %d, {%h1, %h0}"}, {{0x00000001}});
  EXPECT_EQ(got[0], 0x00008000u);
}

}  // namespace
}  // namespace cusim::testing
