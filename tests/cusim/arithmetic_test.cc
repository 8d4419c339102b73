// Integer and floating instructions against the host's arithmetic, on random and edge operands.
#include <cfenv>
#include <functional>

#include "tests/cusim/lanes.h"

namespace cusim::testing {
namespace {

constexpr size_t kRows = 1500;

template <class T>
constexpr int kBits = sizeof(T) * 8;
template <class T>
constexpr bool kReal = !std::is_integral_v<T>;

template <class T>
std::string Show(T v) {
  char text[32];
  std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(Put(v)));
  return text;
}

// Equal bits, or both NaN.
template <class D>
bool Same(D a, D b) {
  return Put(a) == Put(b) || (kReal<D> && a != a && b != b);
}

template <class D, class S, class... More>
void CheckOp(const std::string& text, std::function<D(S, More...)> want, std::string tail = "") {
  std::vector<std::vector<uint64_t>> s;
  std::vector<int> bits = {kBits<S>, kBits<More>...};
  const bool real[] = {kReal<S>, kReal<More>...};
  for (size_t i = 0; i < bits.size(); ++i) s.push_back(Operands(bits[i], kRows, 17 + i, real[i]));
  const auto got = RunOp({text, kBits<D>, bits, tail}, s);
  int wrong = 0;
  for (size_t i = 0; i < kRows && wrong < 3; ++i) {
    const D expected = [&]<size_t... k>(std::index_sequence<k...>) {
      return want(Get<S>(s[0][i]), Get<More>(s[1 + k][i])...);
    }(std::index_sequence_for<More...>());
    if (Same(Get<D>(got[i]), expected)) continue;
    ++wrong;
    std::string row = text + " of";
    for (const auto& column : s) row += " " + Show(column[i]);
    ADD_FAILURE() << row << ": " << Show(Get<D>(got[i])) << ", not " << Show(expected);
  }
}

template <class T>
void Integers(const std::string& type) {
  using U = std::make_unsigned_t<T>;
  const auto op = [&](const char* name) { return name + ("." + type); };
  using Two = std::function<T(T, T)>;
  using Three = std::function<T(T, T, T)>;
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  CheckOp(op("add"), Two([](T a, T b) { return T(U(a) + U(b)); }));
  CheckOp(op("sub"), Two([](T a, T b) { return T(U(a) - U(b)); }));
  CheckOp(op("mul.lo"), Two([](T a, T b) { return T(Wide(a) * Wide(b)); }));
  CheckOp(op("mul.hi"), Two([](T a, T b) { return T(Wide(a) * Wide(b) >> kBits<T>); }));
  CheckOp(op("mad.lo"), Three([](T a, T b, T c) { return T(Wide(a) * Wide(b) + Wide(c)); }));
  CheckOp(op("mad.hi"),
          Three([](T a, T b, T c) { return T(U(Wide(a) * Wide(b) >> kBits<T>) + U(c)); }));
  CheckOp(op("div"), Two([](T a, T b) { return b == 0 ? T(-1) : T(Wide(a) / Wide(b)); }));
  CheckOp(op("rem"), Two([](T a, T b) { return b == 0 ? a : T(Wide(a) % Wide(b)); }));
  CheckOp(op("min"), Two([](T a, T b) { return std::min(a, b); }));
  CheckOp(op("max"), Two([](T a, T b) { return std::max(a, b); }));
  CheckOp(op("sad"),
          Three([](T a, T b, T c) { return T(U(c) + (a < b ? U(b) - U(a) : U(a) - U(b))); }));
  CheckOp(op("shr"), std::function<T(T, uint32_t)>([](T a, uint32_t n) {
            return n >= kBits<T> ? T(a < 0 ? -1 : 0) : T(a >> n);
          }));
  if constexpr (std::is_signed_v<T>) {
    CheckOp(op("neg"), std::function<T(T)>([](T a) { return T(0 - U(a)); }));
    CheckOp(op("abs"), std::function<T(T)>([](T a) { return a < 0 ? T(0 - U(a)) : a; }));
  }
}

TEST(ArithmeticTest, Integers) {
  Integers<uint16_t>("u16");
  Integers<int16_t>("s16");
  Integers<uint32_t>("u32");
  Integers<int32_t>("s32");
  Integers<uint64_t>("u64");
  Integers<int64_t>("s64");
}

TEST(ArithmeticTest, WideAndSaturating) {
  CheckOp("mul.wide.s16", std::function<int32_t(int16_t, int16_t)>(
                              [](int16_t a, int16_t b) { return int32_t{a} * b; }));
  CheckOp("mul.wide.u32", std::function<uint64_t(uint32_t, uint32_t)>(
                              [](uint32_t a, uint32_t b) { return uint64_t{a} * b; }));
  CheckOp("mul.wide.s32", std::function<int64_t(int32_t, int32_t)>(
                              [](int32_t a, int32_t b) { return int64_t{a} * b; }));
  CheckOp("mad.wide.u32",
          std::function<uint64_t(uint32_t, uint32_t, uint64_t)>(
              [](uint32_t a, uint32_t b, uint64_t c) { return uint64_t{a} * b + c; }));
  const auto clamp = [](int64_t v) {
    return int32_t(std::clamp<int64_t>(v, INT32_MIN, INT32_MAX));
  };
  CheckOp("add.sat.s32", std::function<int32_t(int32_t, int32_t)>(
                             [=](int32_t a, int32_t b) { return clamp(int64_t{a} + b); }));
  CheckOp("sub.sat.s32", std::function<int32_t(int32_t, int32_t)>(
                             [=](int32_t a, int32_t b) { return clamp(int64_t{a} - b); }));
  CheckOp("mul24.lo.s32", std::function<int32_t(int32_t, int32_t)>([](int32_t a, int32_t b) {
            const auto low = [](int32_t v) { return (v & 0xffffff) - (v & 0x800000) * 2; };
            return int32_t(int64_t{low(a)} * low(b));
          }));
  CheckOp(
      "dp4a.s32.u32",
      std::function<uint32_t(uint32_t, uint32_t, uint32_t)>([](uint32_t a, uint32_t b, uint32_t c) {
        for (int i = 0; i < 4; ++i) {
          c += static_cast<uint32_t>(int8_t(a >> (8 * i)) * int(uint8_t(b >> (8 * i))));
        }
        return c;
      }));
}

template <class T>
void Bits(const std::string& size, const std::string& u, const std::string& s) {
  using One = std::function<uint32_t(T)>;
  using Signed = std::make_signed_t<T>;
  using Two = std::function<T(T, T)>;
  CheckOp("popc.b" + size, One([](T a) {
            uint32_t n = 0;
            for (int i = 0; i < kBits<T>; ++i) n += a >> i & 1;
            return n;
          }));
  const auto zeros = [](T a) {
    uint32_t n = 0;
    while (n < kBits<T> && !(a >> (kBits<T> - 1 - n) & 1)) ++n;
    return n;
  };
  CheckOp("clz.b" + size, One(zeros));
  CheckOp("bfind." + u, One([=](T a) { return a == 0 ? ~0u : kBits<T> - 1 - zeros(a); }));
  CheckOp("bfind.shiftamt." + s, std::function<uint32_t(Signed)>([=](Signed a) {
            const T v = T(a < 0 ? ~a : a);
            return v == 0 ? ~0u : zeros(v);
          }));
  CheckOp("brev.b" + size, std::function<T(T)>([](T a) {
            T r = 0;
            for (int i = 0; i < kBits<T>; ++i) r = T(r << 1 | (a >> i & 1));
            return r;
          }));
  CheckOp("and.b" + size, Two([](T a, T b) { return a & b; }));
  CheckOp("or.b" + size, Two([](T a, T b) { return a | b; }));
  CheckOp("xor.b" + size, Two([](T a, T b) { return a ^ b; }));
  CheckOp("not.b" + size, std::function<T(T)>([](T a) { return ~a; }));
  CheckOp("cnot.b" + size, std::function<T(T)>([](T a) { return T(a == 0); }));
  CheckOp("shl.b" + size, std::function<T(T, uint32_t)>(
                              [](T a, uint32_t n) { return n >= kBits<T> ? T(0) : T(a << n); }));
  CheckOp("bfi.b" + size,
          std::function<T(T, T, uint32_t, uint32_t)>([](T a, T b, uint32_t at, uint32_t n) {
            at &= 255, n &= 255;
            for (uint32_t i = 0; i < n && at + i < kBits<T>; ++i) {
              b = T((b & ~(T(1) << (at + i))) | (i < kBits<T> ? (a >> i & 1) : 0) << (at + i));
            }
            return b;
          }));
  const auto field = [](T a, uint32_t at, uint32_t n, bool sign_extends) {
    at &= 255, n &= 255;
    const uint32_t top = std::min<uint32_t>(at + n - 1, kBits<T> - 1);
    const bool sign = sign_extends && n != 0 && (a >> top & 1);
    T r = 0;
    for (uint32_t i = 0; i < kBits<T>; ++i) {
      const bool bit = i < n && at + i < kBits<T> ? (a >> (at + i) & 1) : sign;
      r |= T(bit) << i;
    }
    return r;
  };
  using Extract = std::function<T(T, uint32_t, uint32_t)>;
  CheckOp("bfe." + u, Extract([=](T a, uint32_t p, uint32_t n) { return field(a, p, n, false); }));
  CheckOp("bfe." + s, Extract([=](T a, uint32_t p, uint32_t n) { return field(a, p, n, true); }));
}

TEST(ArithmeticTest, Bits) {
  Bits<uint32_t>("32", "u32", "s32");
  Bits<uint64_t>("64", "u64", "s64");
  using Three = std::function<uint32_t(uint32_t, uint32_t, uint32_t)>;
  const auto shift = [](uint32_t lo, uint32_t hi, uint32_t n, bool left) {
    for (; n != 0; --n) {
      if (left) {
        hi = hi << 1 | lo >> 31;
        lo <<= 1;
      } else {
        lo = lo >> 1 | hi << 31;
        hi >>= 1;
      }
    }
    return left ? hi : lo;
  };
  CheckOp("shf.l.wrap.b32",
          Three([=](uint32_t a, uint32_t b, uint32_t c) { return shift(a, b, c & 31, true); }));
  CheckOp("shf.r.clamp.b32", Three([=](uint32_t a, uint32_t b, uint32_t c) {
            return shift(a, b, std::min(c, 32u), false);
          }));
  CheckOp("lop3.b32", Three([](uint32_t a, uint32_t b, uint32_t c) { return (a & b) ^ ~c; }),
          ", 0x95");
  CheckOp("prmt.b32", Three([](uint32_t a, uint32_t b, uint32_t c) {
            uint32_t r = 0;
            for (int i = 0; i < 4; ++i) {
              const uint32_t which = c >> (4 * i) & 15, from = which & 4 ? b : a;
              const uint32_t byte = from >> (8 * (which & 3)) & 255;
              r |= (which & 8 ? (byte > 127 ? 255 : 0) : byte) << (8 * i);
            }
            return r;
          }));
}

TEST(ArithmeticTest, RarerBits) {
  using One = std::function<uint16_t(uint16_t)>;
  using Two = std::function<uint16_t(uint16_t, uint16_t)>;
  using Shift = std::function<uint16_t(uint16_t, uint32_t)>;
  CheckOp("and.b16", Two([](uint16_t a, uint16_t b) { return a & b; }));
  CheckOp("or.b16", Two([](uint16_t a, uint16_t b) { return a | b; }));
  CheckOp("xor.b16", Two([](uint16_t a, uint16_t b) { return a ^ b; }));
  CheckOp("not.b16", One([](uint16_t a) { return ~a; }));
  CheckOp("cnot.b16", One([](uint16_t a) { return a == 0; }));
  CheckOp("shl.b16", Shift([](uint16_t a, uint32_t n) { return n > 15 ? 0 : a << n; }));
  using Three = std::function<uint32_t(uint32_t, uint32_t, uint32_t)>;
  const auto shifted = [](uint32_t lo, uint32_t hi, uint32_t n, bool left) {
    const unsigned __int128 both = uint64_t{hi} << 32 | lo;
    return static_cast<uint32_t>(left ? both << n >> 32 : both >> n);
  };
  CheckOp("shf.l.clamp.b32", Three([=](uint32_t a, uint32_t b, uint32_t c) {
            return shifted(a, b, std::min(c, 32u), true);
          }));
  CheckOp("shf.r.wrap.b32",
          Three([=](uint32_t a, uint32_t b, uint32_t c) { return shifted(a, b, c % 32, false); }));
  using Mask = std::function<uint32_t(uint32_t, uint32_t)>;
  const auto mask = [](uint32_t at, uint32_t n) {
    uint32_t r = 0;
    for (uint32_t i = at; i < 32 && i < at + n; ++i) r |= 1u << i;
    return r;
  };
  CheckOp("bmsk.clamp.b32",
          Mask([=](uint32_t a, uint32_t b) { return mask(std::min(a, 32u), std::min(b, 32u)); }));
  CheckOp("bmsk.wrap.b32", Mask([=](uint32_t a, uint32_t b) { return mask(a % 32, b % 32); }));
  for (uint32_t table = 0; table < 256; table += 17) {  // all that differ by an operand
    CheckOp("lop3.b32", Three([=](uint32_t a, uint32_t b, uint32_t c) {
              uint32_t r = 0;
              for (int i = 0; i < 32; ++i) {
                const uint32_t row = (a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1);
                r |= (table >> row & 1) << i;
              }
              return r;
            }),
            ", " + std::to_string(table));
  }
}

TEST(ArithmeticTest, RarerProducts) {
  CheckOp("mul.wide.u16", std::function<uint32_t(uint16_t, uint16_t)>(
                              [](uint16_t a, uint16_t b) { return uint32_t{a} * b; }));
  CheckOp("mad.wide.s16",
          std::function<int32_t(int16_t, int16_t, int32_t)>([](int16_t a, int16_t b, int32_t c) {
            return static_cast<int32_t>(uint32_t(a * b) + static_cast<uint32_t>(c));
          }));
  CheckOp("mad.wide.s32",
          std::function<int64_t(int32_t, int32_t, int64_t)>([](int32_t a, int32_t b, int64_t c) {
            return static_cast<int64_t>(uint64_t(int64_t{a} * b) + static_cast<uint64_t>(c));
          }));
  CheckOp("mad.hi.sat.s32",
          std::function<int32_t(int32_t, int32_t, int32_t)>([](int32_t a, int32_t b, int32_t c) {
            const int64_t sum = (int64_t{a} * b >> 32) + c;
            return static_cast<int32_t>(std::clamp<int64_t>(sum, INT32_MIN, INT32_MAX));
          }));
  CheckOp("mul24.lo.u32", std::function<uint32_t(uint32_t, uint32_t)>([](uint32_t a, uint32_t b) {
            return static_cast<uint32_t>(uint64_t{a & 0xffffff} * (b & 0xffffff));
          }));
  // Sums of products of parts: of four bytes by four, or of two halves by two bytes of the second.
  const auto dots = [](const std::string& end, bool a_signed, bool b_signed) {
    const auto part = [](uint32_t v, int at, int bits, bool sign) {
      int64_t x = v >> at & ((1u << bits) - 1);
      if (sign && x >= 1 << (bits - 1)) x -= 1 << bits;
      return x;
    };
    for (const std::string op : {"dp4a", "dp2a.lo", "dp2a.hi"}) {
      const int n = op == "dp4a" ? 4 : 2, from = op == "dp2a.hi" ? 16 : 0;
      CheckOp(op + end, std::function<uint32_t(uint32_t, uint32_t, uint32_t)>(
                            [=](uint32_t a, uint32_t b, uint32_t c) {
                              int64_t sum = c;
                              for (int i = 0; i < n; ++i) {
                                sum += part(a, 32 / n * i, 32 / n, a_signed) *
                                       part(b, from + 8 * i, 8, b_signed);
                              }
                              return static_cast<uint32_t>(sum);
                            }));
    }
  };
  dots(".u32.u32", false, false), dots(".s32.s32", true, true);
  dots(".u32.s32", false, true), dots(".s32.u32", true, false);
  // A product of 128 bits from halves, by carries: as a compiler makes it for 32 bits.
  const auto halves = [](const std::string& last) {
    return "mov.b64 {%r5, %r6}, %s0;\nmov.b64 {%r7, %r8}, %s1;\nmul.lo.u32 %r1, %r5, %r7;\n"
           "mul.hi.u32 %r2, %r5, %r7;\nmad.lo.cc.u32 %r2, %r5, %r8, %r2;\n"
           "madc.hi.u32 %r3, %r5, %r8, 0;\nmad.lo.cc.u32 %r2, %r6, %r7, %r2;\n"
           "madc.hi.cc.u32 %r3, %r6, %r7, %r3;\naddc.u32 %r4, 0, 0;\n"
           "mad.lo.cc.u32 %r3, %r6, %r8, %r3;\nmadc.hi.u32 %r4, %r6, %r8, %r4;\nmov.b64 %d, " +
           last;
  };
  using Product = std::function<uint64_t(uint64_t, uint64_t)>;
  CheckOp(halves("{%r1, %r2}"), Product([](uint64_t a, uint64_t b) { return a * b; }));
  CheckOp(halves("{%r3, %r4}"), Product([](uint64_t a, uint64_t b) {
            return static_cast<uint64_t>(static_cast<unsigned __int128>(a) * b >> 64);
          }));
  CheckOp("mad.lo.cc.u64 %rd3, %s0, %s1, %s2;\nmadc.lo.u64 %d, 0, 0, 0",
          std::function<uint64_t(uint64_t, uint64_t, uint64_t)>(
              [](uint64_t a, uint64_t b, uint64_t c) { return a * b + c < c; }));
  // 96 bits: what is borrowed goes on through the middle.
  CheckOp(
      "sub.cc.u32 %r1, %s0, %s1;\nsubc.cc.u32 %r2, %s1, %s2;\nsubc.u32 %d, %s2, %s0",
      std::function<uint32_t(uint32_t, uint32_t, uint32_t)>([](uint32_t a, uint32_t b, uint32_t c) {
        const auto wide = [](uint32_t low, uint32_t middle, uint32_t high) {
          return static_cast<unsigned __int128>(high) << 64 | uint64_t{middle} << 32 | low;
        };
        return static_cast<uint32_t>((wide(a, b, c) - wide(b, c, a)) >> 64);
      }));
}

TEST(ArithmeticTest, CarriesGoThroughLongSums) {
  // 128 bits from two halves: add.cc sets what addc takes; so with sub.
  for (const bool add : {true, false}) {
    const std::string op = add ? "add" : "sub";
    const std::string entry =
        ".visible .entry k(.param .u64 io)\n{\n.reg .b64 %rd<9>;\n.reg .b32 %r<3>;\n"
        "mov.u32 %r1, %tid.x;\nmul.wide.u32 %rd0, %r1, 32;\nld.param.u64 %rd1, [io];\n"
        "add.s64 %rd1, %rd1, %rd0;\nld.global.v2.u64 {%rd2, %rd3}, [%rd1];\n"
        "ld.global.v2.u64 {%rd4, %rd5}, [%rd1+16];\n" +
        op + ".cc.u64 %rd6, %rd2, %rd4;\n" + op + "c.u64 %rd7, %rd3, %rd5;\n" +
        "st.global.v2.u64 [%rd1], {%rd6, %rd7};\nret;\n}\n";
    Device device;
    const auto values = Operands(64, 4 * 1024, 5);
    const uint64_t at = device.Put(values);
    EXPECT_EQ(device.Run(entry, {1}, {1024}, {at}).reports.size(), 0u);
    const auto got = device.Take(at, values.size());
    for (size_t i = 0; i < values.size(); i += 4) {
      using W = unsigned __int128;
      const W a = W{values[i + 1]} << 64 | values[i], b = W{values[i + 3]} << 64 | values[i + 2];
      const W r = add ? a + b : a - b;
      ASSERT_EQ(got[i], static_cast<uint64_t>(r));
      ASSERT_EQ(got[i + 1], static_cast<uint64_t>(r >> 64));
    }
  }
}

// The host's arithmetic in another rounding mode.
template <class T, class F>
T In(int mode, F f) {
  std::fesetround(mode);
  volatile T r = f();
  std::fesetround(FE_TONEAREST);
  return r;
}

template <class T>
void Reals(const std::string& type) {
  using One = std::function<T(T)>;
  using Two = std::function<T(T, T)>;
  using Three = std::function<T(T, T, T)>;
  for (const auto& [name, mode] : std::initializer_list<std::pair<std::string, int>>{
           {"rn", FE_TONEAREST}, {"rz", FE_TOWARDZERO}, {"rm", FE_DOWNWARD}, {"rp", FE_UPWARD}}) {
    const int m = mode;
    const std::string end = "." + name + "." + type;
    CheckOp("add" + end, Two([=](T a, T b) {
              return In<T>(m, [&] {
                volatile T x = a, y = b;
                return x + y;
              });
            }));
    CheckOp("sub" + end, Two([=](T a, T b) {
              return In<T>(m, [&] {
                volatile T x = a, y = b;
                return x - y;
              });
            }));
    CheckOp("mul" + end, Two([=](T a, T b) {
              return In<T>(m, [&] {
                volatile T x = a, y = b;
                return x * y;
              });
            }));
    CheckOp("div" + end, Two([=](T a, T b) {
              return In<T>(m, [&] {
                volatile T x = a, y = b;
                return x / y;
              });
            }));
    CheckOp("fma" + end, Three([=](T a, T b, T c) {
              return In<T>(m, [&] {
                volatile T x = a;
                return std::fma(x, b, c);
              });
            }));
    CheckOp("rcp" + end, One([=](T a) {
              return In<T>(m, [&] {
                volatile T x = a;
                return 1 / x;
              });
            }));
    CheckOp("sqrt" + end, One([=](T a) {
              return In<T>(m, [&] {
                volatile T x = a;
                return std::sqrt(x);
              });
            }));
  }
  CheckOp("neg." + type, One([](T a) { return -a; }));
  CheckOp("abs." + type, One([](T a) { return std::fabs(a); }));
  CheckOp("copysign." + type, Two([](T a, T b) { return std::copysign(b, a); }));
  const auto extreme = [](T a, T b, bool larger) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) == larger ? b : a;  // +0 above -0
    return larger ? std::max(a, b) : std::min(a, b);
  };
  CheckOp("min." + type, Two([=](T a, T b) { return extreme(a, b, false); }));
  CheckOp("max." + type, Two([=](T a, T b) { return extreme(a, b, true); }));
}

TEST(ArithmeticTest, RealsInAllRoundingModes) {
  Reals<float>("f32");
  Reals<double>("f64");
  CheckOp("max.NaN.f32", std::function<float(float, float)>([](float a, float b) {
            if (std::isnan(a) || std::isnan(b)) return NAN;
            return a == b ? (std::signbit(a) ? b : a) : std::max(a, b);
          }));
  CheckOp("add.sat.f32", std::function<float(float, float)>([](float a, float b) {
            const float sum = a + b;
            return sum > 0 ? std::min(sum, 1.0f) : 0.0f;
          }));
  const auto flush = [](float v) {
    return std::isnormal(v) || v - v != 0 ? v : std::copysign(0.f, v);
  };
  CheckOp("mul.ftz.f32", std::function<float(float, float)>(
                             [=](float a, float b) { return flush(flush(a) * flush(b)); }));
}

TEST(ArithmeticTest, SaturatedFlushedAndFusedReals) {
  using One = std::function<float(float)>;
  using Two = std::function<float(float, float)>;
  using Three = std::function<float(float, float, float)>;
  const auto clamp = [](float v) { return v > 0 ? std::min(v, 1.0f) : 0.0f; };  // a NaN is +0
  CheckOp("sub.sat.f32", Two([=](float a, float b) { return clamp(a - b); }));
  CheckOp("mul.sat.f32", Two([=](float a, float b) { return clamp(a * b); }));
  CheckOp("fma.rn.sat.f32",
          Three([=](float a, float b, float c) { return clamp(std::fma(a, b, c)); }));
  CheckOp("mad.rn.f32", Three([](float a, float b, float c) { return std::fma(a, b, c); }));
  CheckOp("div.full.f32", Two([](float a, float b) { return a / b; }));
  const auto flush = [](float v) {
    return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.f, v) : v;
  };
  CheckOp("add.ftz.f32", Two([=](float a, float b) { return flush(flush(a) + flush(b)); }));
  CheckOp("sub.ftz.f32", Two([=](float a, float b) { return flush(flush(a) - flush(b)); }));
  CheckOp("div.rn.ftz.f32", Two([=](float a, float b) { return flush(flush(a) / flush(b)); }));
  CheckOp("fma.rn.ftz.f32", Three([=](float a, float b, float c) {
            return flush(std::fma(flush(a), flush(b), flush(c)));
          }));
  CheckOp("rcp.rn.ftz.f32", One([=](float a) { return flush(1 / flush(a)); }));
  CheckOp("sqrt.rn.ftz.f32", One([=](float a) { return std::sqrt(flush(a)); }));
  CheckOp("neg.ftz.f32", One([=](float a) { return -flush(a); }));
  CheckOp("abs.ftz.f32", One([=](float a) { return std::fabs(flush(a)); }));
  const auto extreme = [](auto a, auto b, bool larger, bool nan_wins) {
    using T = decltype(a);
    if (std::isnan(a)) return nan_wins ? T{NAN} : b;
    if (std::isnan(b)) return nan_wins ? T{NAN} : a;
    if (a == b) return std::signbit(a) == larger ? b : a;
    return (a > b) == larger ? a : b;
  };
  CheckOp("min.ftz.f32",
          Two([=](float a, float b) { return extreme(flush(a), flush(b), false, false); }));
  CheckOp("max.ftz.NaN.f32",
          Two([=](float a, float b) { return extreme(flush(a), flush(b), true, true); }));
  CheckOp("min.NaN.f32", Two([=](float a, float b) { return extreme(a, b, false, true); }));
}

// testp, whose result is a predicate.
template <class T>
void ClassesOf(const std::string& type) {
  using Is = std::function<uint32_t(T)>;
  const auto check = [&](const std::string& what, bool (*is)(T)) {
    CheckOp("testp." + what + "." + type + " %p1, %s0;\nselp.b32 %d, 1, 0, %p1",
            Is([=](T a) { return uint32_t{is(a)}; }));
  };
  check("finite", [](T a) { return a - a == 0; });
  check("infinite", [](T a) { return std::fabs(a) == T(INFINITY); });
  check("number", [](T a) { return a == a; });
  check("notanumber", [](T a) { return a != a; });
  check("normal", [](T a) {
    return std::fabs(a) >= std::numeric_limits<T>::min() && std::fabs(a) < T(INFINITY);
  });
  check("subnormal", [](T a) { return a != 0 && std::fabs(a) < std::numeric_limits<T>::min(); });
}

TEST(ArithmeticTest, ClassesOfReals) {
  ClassesOf<float>("f32");
  ClassesOf<double>("f64");
}

TEST(ArithmeticTest, NansAreCanonical) {
  const auto got =
      RunOp({"add.f32", 32, {32, 32}, ""}, {{0x7fc12345, 0x7f800000}, {0, 0xff800000}});
  EXPECT_EQ(got, (std::vector<uint64_t>{0x7fffffff, 0x7fffffff}));
}

TEST(ArithmeticTest, ApproximationsAreWithinAFewUlps) {
  const auto near = [](const std::string& text, double (*f)(double), double from, double to) {
    std::vector<uint64_t> s;
    for (int i = 0; i < 1000; ++i)
      s.push_back(Put(static_cast<float>(from + (to - from) * i / 999)));
    const auto got = RunOp({text, 32, {32}, ""}, {s});
    for (size_t i = 0; i < s.size(); ++i) {
      const double want = f(Get<float>(s[i]));
      ASSERT_NEAR(Get<float>(got[i]), want, 3e-7 * std::max(1.0, std::fabs(want))) << text;
    }
  };
  near("ex2.approx.f32", [](double x) { return std::exp2(x); }, -20, 20);
  near("lg2.approx.f32", [](double x) { return std::log2(x); }, 0.01, 100);
  near("sin.approx.f32", [](double x) { return std::sin(x); }, -3, 3);
  near("cos.approx.f32", [](double x) { return std::cos(x); }, -3, 3);
  near("tanh.approx.f32", [](double x) { return std::tanh(x); }, -5, 5);
  near("rsqrt.approx.f32", [](double x) { return 1 / std::sqrt(x); }, 0.01, 50);
  near("rcp.approx.ftz.f32", [](double x) { return 1 / x; }, 0.01, 50);
  near("sqrt.approx.f32", [](double x) { return std::sqrt(x); }, 0.01, 50);
  // Of doubles devices give 20 bits, here they are whole.
  const auto wide = [](const std::string& text, double (*f)(double)) {
    const auto s = Operands(64, kRows, 31, true);
    const auto got = RunOp({text, 64, {64}, ""}, {s});
    for (size_t i = 0; i < s.size(); ++i) {
      const double want = f(Get<double>(s[i])), have = Get<double>(got[i]);
      if (std::isnan(want) && std::isnan(have)) continue;
      if (std::isinf(want) || want == 0) {
        ASSERT_EQ(have, want) << text << s[i];
      } else {
        ASSERT_NEAR(have / want, 1, 2e-6) << text << s[i];
      }
    }
  };
  wide("rcp.approx.ftz.f64", [](double x) { return 1 / x; });
  wide("rsqrt.approx.ftz.f64", [](double x) { return 1 / std::sqrt(x); });
}

// ---- 16 bits: against 113-bit sums, rounded once by comparing neighbours. ----

using Wide = __float128;

struct Narrowed {
  int mantissa, bias;
  double Value(uint16_t bits) const {
    const int exponent = (bits & 0x7fff) >> mantissa, fraction = bits & ((1 << mantissa) - 1);
    const int top = (1 << (15 - mantissa)) - 1;
    double v = exponent == top ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? std::ldexp(fraction, 1 - bias - mantissa)
                               : std::ldexp(fraction + (1 << mantissa), exponent - bias - mantissa);
    return bits >> 15 ? -v : v;
  }
  uint16_t Round(Wide v) const {
    if (v != v) return 0x7fff;
    const uint16_t sign = std::signbit(static_cast<double>(v)) ? 0x8000 : 0;
    if (sign) v = -v;
    const uint16_t infinity = static_cast<uint16_t>(((1 << (15 - mantissa)) - 1) << mantissa);
    uint16_t low = 0, high = infinity;  // value(low) <= v, the next above
    while (high - low > 1) {
      const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
      (Value(middle) <= v ? low : high) = middle;
    }
    // Beyond the largest number infinity lies one step further.
    const Wide top = high == infinity ? Wide{Value(low)} * 2 - Value(static_cast<uint16_t>(low - 1))
                                      : Wide{Value(high)};
    const Wide below = v - Value(low), above = top - v;
    const bool up = below > above || (below == above && low % 2 == 1);
    return sign | (up ? high : low);
  }
};

void Halves(const std::string& type, Narrowed n, int exponents) {
  std::vector<std::vector<uint64_t>> s;
  for (uint64_t seed = 0; seed < 3; ++seed) {
    s.push_back(Operands(16, kRows, 40 + seed, true));
    std::mt19937_64 random(seed);
    // Exponents so near that a sum in 113 bits is exact.
    for (uint64_t& v : s.back()) {
      const uint64_t exponent =
          static_cast<uint64_t>(n.bias + int(random() % exponents) - exponents / 2);
      const uint64_t near =
          exponent << n.mantissa | (random() & ((1u << n.mantissa) - 1)) | (random() & 0x8000);
      const bool special = (v >> n.mantissa & ((1 << (15 - n.mantissa)) - 1)) == 0 ||
                           (v & 0x7fff) >= (((1u << (15 - n.mantissa)) - 1) << n.mantissa);
      if (!special || random() % 8 != 0) v = near;
    }
  }
  const auto check = [&](const std::string& op, int operands, auto want) {
    for (const bool pair : {false, true}) {
      std::vector<std::vector<uint64_t>> in(s.begin(), s.begin() + operands);
      const size_t rows = kRows;
      if (pair) {  // the upper half has another row's
        for (auto& column : in) {
          for (size_t i = 0; i < rows; ++i) {
            column[i] = (column[i] & 0xffff) | (column[(i + 1) % rows] & 0xffff) << 16;
          }
        }
      }
      const int bits = pair ? 32 : 16;
      const auto got = RunOp({op + "." + type + (pair ? "x2" : ""), bits,
                              std::vector<int>(static_cast<size_t>(operands), bits), ""},
                             in);
      int wrong = 0;
      for (size_t i = 0; i < rows && wrong < 3; ++i) {
        for (int h = 0; h < (pair ? 2 : 1); ++h) {
          uint16_t x[3] = {};
          for (int k = 0; k < operands; ++k) x[k] = static_cast<uint16_t>(in[k][i] >> (16 * h));
          const uint16_t have = static_cast<uint16_t>(got[i] >> (16 * h));
          const uint16_t expected = want(x[0], x[1], x[2]);
          const bool nans = std::isnan(n.Value(have)) && std::isnan(n.Value(expected));
          if (have == expected || nans) continue;
          ++wrong;
          ADD_FAILURE() << op << "." << type << (pair ? "x2 " : " ") << std::hex << x[0] << " "
                        << x[1] << " " << x[2] << ": " << have << ", not " << expected;
        }
      }
    }
  };
  const auto value = [n](uint16_t bits) { return Wide{n.Value(bits)}; };
  const auto rounded = [n](Wide v, double plain) {  // infinities and signs of zero as doubles have
    if (!std::isfinite(plain) || plain == 0)
      return plain == 0 && v != 0 ? n.Round(v) : n.Round(plain);
    return n.Round(v);
  };
  check("add", 2, [=](uint16_t a, uint16_t b, uint16_t) {
    return rounded(value(a) + value(b), n.Value(a) + n.Value(b));
  });
  check("sub", 2, [=](uint16_t a, uint16_t b, uint16_t) {
    return rounded(value(a) - value(b), n.Value(a) - n.Value(b));
  });
  check("mul", 2, [=](uint16_t a, uint16_t b, uint16_t) {
    return rounded(value(a) * value(b), n.Value(a) * n.Value(b));
  });
  const auto extreme = [=](uint16_t a, uint16_t b, bool larger) {
    const double x = n.Value(a), y = n.Value(b);
    if (x != x) return b;
    if (y != y) return a;
    if (x == y) return (a >> 15) == larger ? b : a;
    return (x > y) == larger ? a : b;
  };
  // Of a sum, 0 to 1 or not below 0; a NaN is +0 where it is .sat, and stays one where it is .relu.
  const auto between = [=](uint16_t v, bool sat) {
    const double x = n.Value(v);
    if (x != x) return sat ? uint16_t{0} : v;
    return x <= 0 ? uint16_t{0} : sat && x > 1 ? n.Round(1) : v;
  };
  const auto sum = [=](uint16_t a, uint16_t b) {
    return rounded(value(a) + value(b), n.Value(a) + n.Value(b));
  };
  const auto fused = [=](uint16_t a, uint16_t b, uint16_t c) {
    const Wide product = value(a) * value(b), add = value(c);
    Wide all = product + add;
    // What 113 bits cannot hold decides ties: a little of it stands for it.
    const Wide lost = add - (all - product);
    if (lost != 0 && lost - lost == 0) all += (lost > 0 ? all : -all) * (all > 0 ? 1e-30 : -1e-30);
    return rounded(all, std::fma(n.Value(a), n.Value(b), n.Value(c)));
  };
  check("fma.rn", 3, fused);
  if (type == "f16") {
    check("add.sat", 2, [=](uint16_t a, uint16_t b, uint16_t) { return between(sum(a, b), true); });
    check("sub.sat", 2,
          [=](uint16_t a, uint16_t b, uint16_t) { return between(sum(a, b ^ 0x8000), true); });
    check("mul.sat", 2, [=](uint16_t a, uint16_t b, uint16_t) {
      return between(rounded(value(a) * value(b), n.Value(a) * n.Value(b)), true);
    });
    check("fma.rn.sat", 3,
          [=](uint16_t a, uint16_t b, uint16_t c) { return between(fused(a, b, c), true); });
  }
  check("fma.rn.relu", 3,
        [=](uint16_t a, uint16_t b, uint16_t c) { return between(fused(a, b, c), false); });
  const auto strict = [=](uint16_t a, uint16_t b, bool larger) {
    const bool nan = std::isnan(n.Value(a)) || std::isnan(n.Value(b));
    return nan ? uint16_t{0x7fff} : extreme(a, b, larger);
  };
  check("max.NaN", 2, [=](uint16_t a, uint16_t b, uint16_t) { return strict(a, b, true); });
  check("min.NaN", 2, [=](uint16_t a, uint16_t b, uint16_t) { return strict(a, b, false); });
  // Within one step of the value: neighbours have neighbouring bits.
  const auto near = [&](const std::string& op, double (*f)(double)) {
    const auto got = RunOp({op + "." + type, 16, {16}, ""}, {s[0]});
    const auto pairs = Operands(32, kRows, 77);
    const auto two = RunOp({op + "." + type + "x2", 32, {32}, ""}, {pairs});
    const auto compare = [&](uint64_t of, uint64_t have) {
      const double want = f(n.Value(static_cast<uint16_t>(of)));
      const auto bits = static_cast<uint16_t>(have);
      if (std::isnan(want)) {
        ASSERT_TRUE(std::isnan(n.Value(bits))) << op << of;
      } else {
        ASSERT_NEAR(int{bits}, int{n.Round(Wide{want})}, 1) << op << type << std::hex << of;
      }
    };
    for (size_t i = 0; i < kRows; ++i) {
      compare(s[0][i] & 0xffff, got[i]);
      compare(pairs[i] & 0xffff, two[i] & 0xffff);
      compare(pairs[i] >> 16, two[i] >> 16);
    }
  };
  near(type == "f16" ? "ex2.approx" : "ex2.approx.ftz", [](double x) { return std::exp2(x); });
  near("tanh.approx", [](double x) { return std::tanh(x); });
  check("max", 2, [=](uint16_t a, uint16_t b, uint16_t) { return extreme(a, b, true); });
  check("min", 2, [=](uint16_t a, uint16_t b, uint16_t) { return extreme(a, b, false); });
  check("neg", 1, [](uint16_t a, uint16_t, uint16_t) { return uint16_t(a ^ 0x8000); });
  check("abs", 1, [](uint16_t a, uint16_t, uint16_t) { return uint16_t(a & 0x7fff); });
}

TEST(ArithmeticTest, HalvesRoundOnce) {
  Halves("f16", {10, 15}, 26);
  Halves("bf16", {7, 127}, 40);
}

TEST(ArithmeticTest, AFusedBf16SumIsNotRoundedTwice) {
  // 1.0078125 * 1.5 lies between two bf16 numbers, at the same distance from both; 2^-70 less,
  // which a double does not hold, is nearer to the lower one, and the even one is the upper.
  const auto got = RunOp({"fma.rn.bf16", 16, {16, 16, 16}, ""}, {{0x3f81}, {0x3fc0}, {0x9c80}});
  EXPECT_EQ(got[0], 0x3fc1u);
}

TEST(ArithmeticTest, UnknownInstructionsNameThemselvesAndTheKernel) {
  Device device;
  const Outcome out = device.Run(
      ".visible .entry k()\n{\n.reg .b32 %r<2>;\nfoo.s32 %r1, 3;\nret;\n}\n", {1}, {1}, {});
  ASSERT_EQ(out.reports.size(), 1u);
  EXPECT_EQ(out.kind, Outcome::kInvalid);
  EXPECT_EQ(out.reports[0].text, "kernel k: unknown instruction foo.s32");
}

}  // namespace
}  // namespace cusim::testing
