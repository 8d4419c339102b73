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

// Runs text, which gives %d, on random operands, and compares each row with want(operands).
template <class F>
void CheckRows(const std::string& text, int d_bits, std::vector<int> bits, std::vector<bool> real,
               F want) {
  std::vector<std::vector<uint64_t>> s;
  for (size_t i = 0; i < bits.size(); ++i) s.push_back(Operands(bits[i], kRows, 50 + i, real[i]));
  if (bits.size() > 1 && bits[0] == bits[1]) {
    for (size_t i = 0; i < kRows; i += 5) s[1][i] = s[0][i];
  }
  const auto got = RunOp({text, d_bits, bits, ""}, s);
  int wrong = 0;
  for (size_t i = 0; i < kRows && wrong < 3; ++i) {
    std::array<uint64_t, 3> row{};
    for (size_t k = 0; k < s.size(); ++k) row[k] = s[k][i];
    const uint64_t expected = want(row[0], row[1], row[2]);
    if (got[i] == expected) continue;
    ++wrong;
    ADD_FAILURE() << text << " of " << std::hex << row[0] << " " << row[1] << " " << row[2] << ": "
                  << got[i] << ", not " << expected;
  }
}

TEST(ConvertTest, SelectsByASignOrAPredicate) {
  for (const int bits : {16, 32, 64}) {
    const std::string n = std::to_string(bits);
    CheckRows("slct.b" + n + ".s32 %d, %s0, %s1, %s2", bits, {bits, bits, 32},
              {false, false, false},
              [](uint64_t a, uint64_t b, uint64_t c) { return c >> 31 ? b : a; });
    for (const bool flush : {false, true}) {
      CheckRows("slct" + std::string(flush ? ".ftz" : "") + ".u" + n + ".f32 %d, %s0, %s1, %s2",
                bits, {bits, bits, 32}, {false, false, true},
                [=](uint64_t a, uint64_t b, uint64_t c) {
                  const float sign = Get<float>(c);
                  const bool tiny = std::fpclassify(sign) == FP_SUBNORMAL;
                  return sign >= 0 || (flush && tiny) ? a : b;
                });
    }
    for (const bool negated : {false, true}) {
      CheckRows(
          "setp.lt.s32 %p1, %s2, 0;\nselp.b" + n + " %d, %s0, %s1, " + (negated ? "!%p1" : "%p1"),
          bits, {bits, bits, 32}, {false, false, false},
          [=](uint64_t a, uint64_t b, uint64_t c) { return c >> 31 != negated ? a : b; });
    }
  }
  CheckRows("slct.f64.f32 %d, %s0, %s1, %s2", 64, {64, 64, 32}, {true, true, true},
            [](uint64_t a, uint64_t b, uint64_t c) { return Get<float>(c) >= 0 ? a : b; });
}

// Whether op(x, y): comparisons by name, of what may be unordered.
bool Holds(const std::string& how, double x, double y) {
  const bool nan = x != x || y != y;
  if (how == "num" || how == "nan") return nan == (how == "nan");
  if (nan) return how.size() == 3;  // equ, ltu
  const std::string base = how.substr(0, 2);
  return base == "eq"   ? x == y
         : base == "ne" ? x != y
         : base == "lt" ? x < y
         : base == "le" ? x <= y
         : base == "gt" ? x > y
                        : x >= y;
}
double Wide16(uint64_t bits, bool bf16) {
  if (bf16) return Get<float>((bits & 0xffff) << 16);
  return static_cast<double>(static_cast<float>(Get<_Float16>(bits & 0xffff)));
}
const char* const kHows[] = {"eq",  "ne",  "lt",  "le",  "gt",  "ge",  "equ",
                             "neu", "ltu", "leu", "gtu", "geu", "num", "nan"};

TEST(ConvertTest, ComparisonsOfHalves) {
  for (const std::string type : {"f16", "bf16"}) {
    const bool bf16 = type == "bf16";
    for (const std::string how : kHows) {
      const auto holds = [=](uint64_t a, uint64_t b) {
        return Holds(how, Wide16(a, bf16), Wide16(b, bf16));
      };
      CheckRows("setp." + how + "." + type + " %p1, %s0, %s1;\nselp.b32 %d, 1, 0, %p1", 32,
                {16, 16}, {true, true},
                [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t { return holds(a, b); });
      CheckRows("setp." + how + "." + type +
                    "x2 %p1|%p2, %s0, %s1;\nselp.b32 %r1, 1, 0, %p1;\nselp.b32 %r2, 2, 0, %p2;\n"
                    "or.b32 %d, %r1, %r2",
                32, {32, 32}, {false, false}, [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t {
                  return uint64_t{holds(a, b)} | uint64_t{holds(a >> 16, b >> 16)} << 1;
                });
      const uint64_t one = bf16 ? 0x3f80 : 0x3c00;
      CheckRows("set." + how + "." + type + "x2." + type + "x2 %d, %s0, %s1", 32, {32, 32},
                {false, false}, [=](uint64_t a, uint64_t b, uint64_t) {
                  return (holds(a, b) ? one : 0) | (holds(a >> 16, b >> 16) ? one << 16 : 0);
                });
      CheckRows("set." + how + ".u32." + type + "x2 %d, %s0, %s1", 32, {32, 32}, {false, false},
                [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t {
                  return (holds(a, b) ? 0xffffu : 0u) |
                         (holds(a >> 16, b >> 16) ? 0xffff0000u : 0u);
                });
      CheckRows("set." + how + "." + type + "." + type + " %d, %s0, %s1", 16, {16, 16},
                {true, true},
                [=](uint64_t a, uint64_t b, uint64_t) { return holds(a, b) ? one : 0; });
      CheckRows(
          "set." + how + ".u16." + type + " %d, %s0, %s1", 16, {16, 16}, {true, true},
          [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t { return holds(a, b) ? 0xffff : 0; });
    }
  }
}

TEST(ConvertTest, ComparisonsCombined) {
  for (const std::string with : {"and", "or", "xor"}) {
    const auto both = [=](bool r, bool p) {
      return with == "and" ? r && p : with == "or" ? r || p : r != p;
    };
    for (const bool negated : {false, true}) {
      const std::string third = negated ? ", !%p3" : ", %p3", first = "setp.lt.s32 %p3, %s2, 0;\n";
      CheckRows(first + "setp.ltu." + with + ".f32 %p1|%p2, %s0, %s1" + third +
                    ";\nselp.b32 %r1, 1, 0, %p1;\nselp.b32 %r2, 2, 0, %p2;\nor.b32 %d, %r1, %r2",
                32, {32, 32, 32}, {true, true, false},
                [=](uint64_t a, uint64_t b, uint64_t c) -> uint64_t {
                  const bool r = Holds("ltu", Get<float>(a), Get<float>(b)), p = c >> 31 != negated;
                  return uint64_t{both(r, p)} | uint64_t{both(!r, p)} << 1;
                });
      CheckRows(first + "set.ge." + with + ".f32.s64 %d, %s0, %s1" + third, 32, {64, 64, 32},
                {false, false, false}, [=](uint64_t a, uint64_t b, uint64_t c) {
                  const bool r = static_cast<int64_t>(a) >= static_cast<int64_t>(b);
                  return both(r, c >> 31 != negated) ? Put(1.0f) : 0;
                });
    }
    CheckRows("setp.lt.s32 %p1, %s0, 0;\nsetp.lt.s32 %p2, %s1, 0;\n" + with +
                  ".pred %p3, %p1, %p2;\nselp.b32 %d, 1, 0, %p3",
              32, {32, 32}, {false, false},
              [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t { return both(a >> 31, b >> 31); });
  }
  // Subnormal numbers are zeros of their sign under .ftz, which are equal.
  const auto flush = [](uint64_t v) {
    const float f = Get<float>(v);
    return std::fpclassify(f) == FP_SUBNORMAL ? 0.0 : double{f};
  };
  CheckRows("setp.gt.ftz.f32 %p1, %s0, %s1;\nselp.b32 %d, 1, 0, %p1", 32, {32, 32}, {true, true},
            [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t { return flush(a) > flush(b); });
  CheckRows("set.eq.ftz.u32.f32 %d, %s0, %s1", 32, {32, 32}, {true, true},
            [=](uint64_t a, uint64_t b, uint64_t) -> uint64_t {
              return flush(a) == flush(b) ? 0xffffffff : 0;
            });
}

TEST(ConvertTest, RarerConversions) {
  // 16 bits to and from whole numbers and doubles.
  for (const bool bf16 : {false, true}) {
    const std::string type = bf16 ? "bf16" : "f16";
    const int mantissa = bf16 ? 7 : 10;
    const auto near = [=](double v) { return uint64_t{Nearest(v, mantissa, false)}; };
    CheckRows("cvt.rn." + type + ".s32 %d, %s0", 16, {32}, {false},
              [=](uint64_t a, uint64_t, uint64_t) { return near(static_cast<int32_t>(a)); });
    CheckRows("cvt.rn." + type + ".u16 %d, %s0", 16, {16}, {false},
              [=](uint64_t a, uint64_t, uint64_t) { return near(static_cast<double>(a)); });
    CheckRows("cvt.rn." + type + ".f64 %d, %s0", 16, {64}, {true},
              [=](uint64_t a, uint64_t, uint64_t) { return near(Get<double>(a)); });
    CheckRows("cvt.rzi.s32." + type + " %d, %s0", 32, {16}, {true},
              [=](uint64_t a, uint64_t, uint64_t) -> uint64_t {
                const double v = Wide16(a, bf16);
                if (v != v) return 0;
                return static_cast<uint32_t>(
                    static_cast<int32_t>(std::clamp<double>(std::trunc(v), INT32_MIN, INT32_MAX)));
              });
    CheckRows("cvt.rni.u8." + type + " %d, %s0", 16, {16}, {true},
              [=](uint64_t a, uint64_t, uint64_t) -> uint64_t {
                const double v = Wide16(a, bf16);
                return v != v ? 0 : static_cast<uint8_t>(std::clamp(std::nearbyint(v), 0.0, 255.0));
              });
    CheckRows("cvt.f64." + type + " %rd3, %s0;\ncvt.rn." + type + ".f64 %d, %rd3", 16, {16}, {true},
              [=](uint64_t a, uint64_t, uint64_t) { return near(Wide16(a, bf16)); });
    CheckRows("cvt.rn.relu." + type + ".f32 %d, %s0", 16, {32}, {true},
              [=](uint64_t a, uint64_t, uint64_t) {
                const float v = Get<float>(a);
                return near(v < 0 ? 0.0 : double{v});
              });
  }
  for (const auto& [name, mode] : kModes) {
    CheckRows("cvt.r" + name + "i.f16.f16 %d, %s0", 16, {16}, {true},
              [mode = mode](uint64_t a, uint64_t, uint64_t) {
                std::fesetround(mode);
                volatile double x = Wide16(a, false);
                const double whole = std::nearbyint(x);
                std::fesetround(FE_TONEAREST);
                return uint64_t{Nearest(whole, 10, false)};
              });
    CheckCvt<double, double>(".r" + name + "i", [mode = mode](double v) {
      std::fesetround(mode);
      volatile double x = v;
      const double r = std::nearbyint(x);
      std::fesetround(FE_TONEAREST);
      return r;
    });
  }
  CheckCvt<float, double>(
      ".rn.sat", [](double v) { return v > 0 ? static_cast<float>(std::min(v, 1.0)) : 0.0f; });
  CheckCvt<float, double>(".rn.ftz", [](double v) {
    const float f = static_cast<float>(v);
    return std::fpclassify(f) == FP_SUBNORMAL ? std::copysign(0.0f, f) : f;
  });
  CheckCvt<int32_t, float>(".rpi.ftz", [](float v) {  // up, from what is a zero
    if (v != v) return 0;
    const double x = std::fpclassify(v) == FP_SUBNORMAL ? 0 : std::ceil(double{v});
    return static_cast<int32_t>(std::clamp<double>(x, INT32_MIN, INT32_MAX));
  });
  // To 10 bits of mantissa; a tie to the even one.
  CheckRows("cvt.rn.tf32.f32 %d, %s0", 32, {32}, {true}, [](uint64_t a, uint64_t, uint64_t) {
    const float v = Get<float>(a);
    if (v != v || std::isinf(v)) return a;
    int exponent;
    std::frexp(v, &exponent);
    const double unit = std::ldexp(1.0, std::max(exponent, -125) - 11);
    return Put(static_cast<float>(std::nearbyint(v / unit) * unit));
  });
  const auto ties =
      RunOp({"cvt.rn.tf32.f32", 32, {32}, ""}, {{0x3f801000, 0x3f803000, 0xbf801001}});
  EXPECT_EQ(ties, (std::vector<uint64_t>{0x3f800000, 0x3f804000, 0xbf802000}));
  // A register that is wider than the type gets its sign.
  CheckRows("cvt.s8.s32 %r1, %s0;\ncvt.s64.s32 %d, %r1", 64, {32}, {false},
            [](uint64_t a, uint64_t, uint64_t) -> uint64_t {
              return static_cast<uint64_t>(int64_t{static_cast<int8_t>(a)});
            });
}

TEST(ConvertTest, RegistersInParts) {
  CheckRows("mov.b64 {%r1, %r2}, %s0;\nmov.b64 %d, {%r2, %r1}", 64, {64}, {false},
            [](uint64_t a, uint64_t, uint64_t) { return a << 32 | a >> 32; });
  CheckRows("mov.b64 {%h0, %h1, %h2, %h3}, %s0;\nmov.b64 %d, {%h3, %h1, %h0, %h2}", 64, {64},
            {false}, [](uint64_t a, uint64_t, uint64_t) {
              const auto part = [=](int i) { return a >> (16 * i) & 0xffff; };
              return part(3) | part(1) << 16 | part(0) << 32 | part(2) << 48;
            });
  CheckRows("mov.b32 {_, %h1}, %s0;\nmov.b16 %d, %h1", 16, {32}, {false},
            [](uint64_t a, uint64_t, uint64_t) { return a >> 16; });
}

TEST(ConvertTest, PacksAndUnpacks) {
  const auto got = RunOp(
      {"brev.b32", 32, {32}, ";\nmov.b32 {%h0, %h1}, %d;\nmov.b32 %d, {%h1, %h0}"}, {{0x00000001}});
  EXPECT_EQ(got[0], 0x00008000u);
}

}  // namespace
}  // namespace cusim::testing
