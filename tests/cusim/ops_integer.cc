#include "tests/cusim/ops.h"

namespace cusim {
namespace {

template <class T>
using Unsigned = std::make_unsigned_t<T>;

template <class T>
using Wide = std::conditional_t<
    sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>,
                       std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>>>;

template <class T>
T Sum(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
template <class T>
T Difference(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) - static_cast<uint64_t>(b));
}
template <class T>
T Low(T a, T b) {
  return static_cast<T>(static_cast<uint64_t>(a) * static_cast<uint64_t>(b));
}
template <class T>
T High(T a, T b) {
  return static_cast<T>(static_cast<Wide<T>>(a) * static_cast<Wide<T>>(b) >> (sizeof(T) * 8));
}
template <class T>
T Clamped(Wide<T> v) {
  if (v < std::numeric_limits<T>::min()) return std::numeric_limits<T>::min();
  if (v > std::numeric_limits<T>::max()) return std::numeric_limits<T>::max();
  return static_cast<T>(v);
}

// Division by zero has no defined result; devices give all ones and the dividend.
template <class T>
T Quotient(T a, T b) {
  if (b == 0) return static_cast<T>(-1);
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return Difference<T>(0, a);
  return static_cast<T>(a / b);
}
template <class T>
T Remainder(T a, T b) {
  if (b == 0) return a;
  if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
  return static_cast<T>(a % b);
}

template <class T>
int LeadingZeros(T v) {
  return std::countl_zero(static_cast<Unsigned<T>>(v));
}
// The place of the highest bit that differs from the sign; all ones where none does.
template <class T>
uint32_t HighestBit(T v) {
  const auto u = static_cast<Unsigned<T>>(v < 0 ? ~v : v);
  return u == 0 ? ~0u : static_cast<uint32_t>(sizeof(T) * 8 - 1 - std::countl_zero(u));
}
template <class T>
T Reversed(T v) {
  T r = 0;
  for (size_t i = 0; i < sizeof(T) * 8; ++i) r |= (v >> i & 1) << (sizeof(T) * 8 - 1 - i);
  return r;
}

OpFn FindMultiply(const Opcode& op, Insn* in) {
  const bool add = op.base == "mad";
  if (op.Has("wide")) {
    return ForInteger(in->type, [&]<class T>(Tag<T>) -> OpFn {
      if constexpr (sizeof(T) == 8) {
        return nullptr;
      } else {
        using W = Wide<T>;
        if (!add) return Binary<T>([](T a, T b) -> W { return W(a) * W(b); });
        return +[](Exec& e, const Insn& i, uint32_t mask) {
          uint64_t* const d = e.Reg(i.d[0]);
          const uint64_t *a = e.Reg(i.s[0]), *b = e.Reg(i.s[1]), *c = e.Reg(i.s[2]);
          EachLane(mask, [&](int l) {
            d[l] = Put(Sum<W>(W(Get<T>(a[l])) * W(Get<T>(b[l])), Get<W>(c[l])));
          });
        };
      }
    });
  }
  if (op.base == "mul24" || op.base == "mad24") {
    if (op.Has("hi")) return nullptr;
    const bool sign = in->type == Type::kS32;
    if (op.base == "mul24") {
      if (sign) {
        return Binary<int32_t>([](int32_t a, int32_t b) {
          return static_cast<int32_t>(int64_t{int32_t(uint32_t(a) << 8) >> 8} *
                                      (int32_t(uint32_t(b) << 8) >> 8));
        });
      }
      return Binary<uint32_t>([](uint32_t a, uint32_t b) { return (a << 8 >> 8) * (b << 8 >> 8); });
    }
    return nullptr;
  }
  const bool high = op.Has("hi"), saturate = in->saturate;
  return ForInteger(in->type, [&]<class T>(Tag<T>) -> OpFn {
    if (!add && !high) return Binary<T>([](T a, T b) { return Low<T>(a, b); });
    if (!add) return Binary<T>([](T a, T b) { return High<T>(a, b); });
    if (!high) return Ternary<T>([](T a, T b, T c) { return Sum<T>(Low<T>(a, b), c); });
    if (!saturate) return Ternary<T>([](T a, T b, T c) { return Sum<T>(High<T>(a, b), c); });
    return Ternary<T>([](T a, T b, T c) { return Clamped<T>(Wide<T>(High<T>(a, b)) + c); });
  });
}

// With the condition code, whose slot is in.d[1]: add.cc, addc, sub.cc, subc, mad.cc, madc.
template <class T, bool take, bool subtract, int multiply>
void CarryOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t *const d = e.Reg(in.d[0]), *const cc = e.Reg(in.d[1]);
  const uint64_t *a = e.Reg(in.s[0]), *b = e.Reg(in.s[1]);
  const uint64_t* const c = multiply != 0 ? e.Reg(in.s[2]) : nullptr;
  EachLane(mask, [&](int l) {
    T x = Get<T>(a[l]), y = Get<T>(b[l]);
    if constexpr (multiply != 0) {
      x = multiply == 1 ? Low<T>(x, y) : High<T>(x, y);
      y = Get<T>(c[l]);
    }
    using W = unsigned __int128;
    const W carry = take ? static_cast<W>(cc[l] & 1) : 0;
    const W sum = subtract ? static_cast<W>(x) - static_cast<W>(y) - carry
                           : static_cast<W>(x) + static_cast<W>(y) + carry;
    if (in.mode == 1) cc[l] = static_cast<uint64_t>(sum >> (sizeof(T) * 8)) & 1;
    d[l] = Put(static_cast<T>(sum));
  });
}

OpFn FindCarry(const Opcode& op, Insn* in) {
  const bool take = op.base == "addc" || op.base == "subc" || op.base == "madc";
  if (!take && !op.Has("cc")) return nullptr;
  in->mode = op.Has("cc");
  const bool wide = SizeOf(in->type) == 8;
  const auto of = [&]<class T>(Tag<T>) -> OpFn {
    if (op.base.starts_with("add")) {
      return take ? &CarryOp<T, true, false, 0> : &CarryOp<T, false, false, 0>;
    }
    if (op.base.starts_with("sub")) {
      return take ? &CarryOp<T, true, true, 0> : &CarryOp<T, false, true, 0>;
    }
    // The high half of a signed product is another than that of an unsigned one.
    if (!op.base.starts_with("mad") || (op.Has("hi") && IsSigned(in->type))) return nullptr;
    if (op.Has("lo")) return take ? &CarryOp<T, true, false, 1> : &CarryOp<T, false, false, 1>;
    return take ? &CarryOp<T, true, false, 2> : &CarryOp<T, false, false, 2>;
  };
  return wide ? of(Tag<uint64_t>()) : of(Tag<uint32_t>());
}

OpFn FindArithmetic(const Opcode& op, Insn* in) {
  const std::string& b = op.base;
  const Type t = in->type;
  if (b == "mul" || b == "mad" || b == "mul24") return FindMultiply(op, in);
  if (b == "add" || b == "sub") {
    if (in->saturate) {
      if (t != Type::kS32) return nullptr;
      return b == "add" ? Binary<int32_t>(
                              [](int32_t x, int32_t y) { return Clamped<int32_t>(int64_t{x} + y); })
                        : Binary<int32_t>([](int32_t x, int32_t y) {
                            return Clamped<int32_t>(int64_t{x} - y);
                          });
    }
    const bool add = b == "add";
    return ForInteger(t, [&]<class T>(Tag<T>) {
      return add ? Binary<T>([](T x, T y) { return Sum<T>(x, y); })
                 : Binary<T>([](T x, T y) { return Difference<T>(x, y); });
    });
  }
  return ForInteger(t, [&]<class T>(Tag<T>) -> OpFn {
    if (b == "div") return Binary<T>([](T x, T y) { return Quotient<T>(x, y); });
    if (b == "rem") return Binary<T>([](T x, T y) { return Remainder<T>(x, y); });
    if (b == "min") return Binary<T>([](T x, T y) { return x < y ? x : y; });
    if (b == "max") return Binary<T>([](T x, T y) { return x < y ? y : x; });
    if (b == "neg") return Unary<T>([](T x) { return Difference<T>(0, x); });
    if (b == "abs") return Unary<T>([](T x) { return x < 0 ? Difference<T>(0, x) : x; });
    if (b == "not") return Unary<T>([](T x) { return static_cast<T>(~x); });
    if (b == "cnot") return Unary<T>([](T x) { return static_cast<T>(x == 0); });
    if (b == "sad") {
      return Ternary<T>([](T x, T y, T z) {
        return Sum<T>(z, x < y ? Difference<T>(y, x) : Difference<T>(x, y));
      });
    }
    if (b == "popc") {
      return Unary<T>([](T x) { return uint32_t(std::popcount(static_cast<Unsigned<T>>(x))); });
    }
    if (b == "clz") return Unary<T>([](T x) { return uint32_t(LeadingZeros(x)); });
    if (b == "brev") return Unary<T>([](T x) { return T(Reversed(static_cast<Unsigned<T>>(x))); });
    if (b == "bfind" && !op.Has("shiftamt")) return Unary<T>([](T x) { return HighestBit(x); });
    if (b == "bfind") {
      return Unary<T>([](T x) {
        const uint32_t at = HighestBit(x);
        return at == ~0u ? at : static_cast<uint32_t>(sizeof(T) * 8 - 1) - at;
      });
    }
    return nullptr;
  });
}

OpFn FindBits(const Opcode& op, Insn* in) {
  const std::string& b = op.base;
  const bool is64 = SizeOf(in->type) == 8;
  if (in->type == Type::kPred && b == "not") {
    return Raw([](const Insn&, uint64_t x, uint64_t, uint64_t, uint64_t) { return ~x & 1; });
  }
  if (b == "and") {
    return Raw([](const Insn&, uint64_t x, uint64_t y, uint64_t, uint64_t) { return x & y; });
  }
  if (b == "or") {
    return Raw([](const Insn&, uint64_t x, uint64_t y, uint64_t, uint64_t) { return x | y; });
  }
  if (b == "xor") {
    return Raw([](const Insn&, uint64_t x, uint64_t y, uint64_t, uint64_t) { return x ^ y; });
  }
  if (b == "shl") {
    return ForInteger(in->type, []<class T>(Tag<T>) {
      return Raw([](const Insn&, uint64_t x, uint64_t n, uint64_t, uint64_t) {
        const uint32_t by = static_cast<uint32_t>(n);
        return by >= sizeof(T) * 8 ? 0 : Put(static_cast<T>(x << by));
      });
    });
  }
  if (b == "shr") {
    return ForInteger(in->type, []<class T>(Tag<T>) {
      return Raw([](const Insn&, uint64_t x, uint64_t n, uint64_t, uint64_t) {
        const uint32_t by = static_cast<uint32_t>(n), most = sizeof(T) * 8 - 1;
        if (by > most) return Put(static_cast<T>(Get<T>(x) < 0 ? -1 : 0));
        return Put(static_cast<T>(Get<T>(x) >> by));
      });
    });
  }
  if (b == "shf") {
    in->mode = op.Has("l");
    in->combine = op.Has("wrap");
    return Raw([](const Insn& i, uint64_t lo, uint64_t hi, uint64_t n, uint64_t) {
      const uint64_t both = (hi & 0xffffffff) << 32 | (lo & 0xffffffff);
      const uint32_t by = i.combine ? n & 31 : std::min<uint32_t>(static_cast<uint32_t>(n), 32);
      if (i.mode) return (by == 32 ? both << 32 : both << by) >> 32;
      return both >> by & 0xffffffff;
    });
  }
  if (b == "lop3") {
    return Raw([](const Insn&, uint64_t x, uint64_t y, uint64_t z, uint64_t table) {
      uint64_t r = 0;
      for (int i = 0; i < 8; ++i) {
        if (!(table >> i & 1)) continue;
        r |= (i & 4 ? x : ~x) & (i & 2 ? y : ~y) & (i & 1 ? z : ~z);
      }
      return r & 0xffffffff;
    });
  }
  if (b == "prmt" && op.modifiers.size() == 1) {
    return Raw([](const Insn&, uint64_t lo, uint64_t hi, uint64_t select, uint64_t) {
      const uint64_t both = (hi & 0xffffffff) << 32 | (lo & 0xffffffff);
      uint64_t r = 0;
      for (int i = 0; i < 4; ++i) {
        const uint64_t which = select >> (4 * i) & 15;
        uint64_t byte = both >> (8 * (which & 7)) & 0xff;
        if (which & 8) byte = byte & 0x80 ? 0xff : 0;
        r |= byte << (8 * i);
      }
      return r;
    });
  }
  if (b == "bfi") {
    in->mode = is64;
    return Raw([](const Insn& i, uint64_t x, uint64_t into, uint64_t at, uint64_t n) {
      const uint64_t size = i.mode ? 64 : 32;
      at &= 0xff, n &= 0xff;
      if (at >= size) return i.mode ? into : into & 0xffffffff;
      const uint64_t field = (n >= 64 ? ~0ull : (1ull << n) - 1) << at;
      const uint64_t r = (into & ~field) | (x << at & field);
      return i.mode ? r : r & 0xffffffff;
    });
  }
  if (b == "bfe") {
    return ForInteger(in->type, []<class T>(Tag<T>) {
      return Raw([](const Insn&, uint64_t x, uint64_t at, uint64_t n, uint64_t) {
        constexpr uint64_t bits = sizeof(T) * 8;
        const T v = Get<T>(x);
        at &= 0xff, n &= 0xff;
        const uint64_t top = std::min(at + n, bits);  // what is beyond has the sign
        uint64_t r = 0;
        if (at < bits && n != 0) {
          const uint64_t length = top - at;
          const uint64_t field = length >= 64 ? ~0ull : (1ull << length) - 1;
          const bool sign = std::is_signed_v<T> && (static_cast<uint64_t>(v) >> (top - 1) & 1);
          r = (static_cast<uint64_t>(v) >> at & field) | (sign ? ~field : 0);
        } else if (n != 0 && v < 0) {
          r = ~0ull;
        }
        return Put(static_cast<T>(r));
      });
    });
  }
  if (b == "bmsk") {
    in->combine = op.Has("wrap");
    return Raw([](const Insn& i, uint64_t at, uint64_t n, uint64_t, uint64_t) -> uint64_t {
      const uint64_t a = i.combine ? at & 31 : std::min<uint64_t>(at & 0xffffffff, 32);
      const uint64_t k = i.combine ? n & 31 : std::min<uint64_t>(n & 0xffffffff, 32);
      return ((1ull << k) - 1) << a & 0xffffffff;
    });
  }
  return nullptr;
}

OpFn FindDot(const Opcode& op, Insn* in) {  // dp4a.u32.s32: the first type is of a
  if (op.base != "dp4a" && op.base != "dp2a") return nullptr;
  in->mode = static_cast<uint8_t>((in->type == Type::kS32) | (in->from == Type::kS32) << 1 |
                                  op.Has("hi") << 2 | (op.base == "dp2a") << 3);
  return Raw([](const Insn& i, uint64_t a, uint64_t b, uint64_t c, uint64_t) {
    int64_t sum = static_cast<int64_t>(static_cast<uint32_t>(c));
    const int n = i.mode & 8 ? 2 : 4, bits = 32 / n;
    if (i.mode & 4) b >>= 16;
    for (int k = 0; k < n; ++k) {
      int64_t x = static_cast<int64_t>(a >> (bits * k) & ((1u << bits) - 1));
      int64_t y = static_cast<int64_t>(b >> (8 * k) & 0xff);
      if (i.mode & 1 && x >> (bits - 1)) x -= int64_t{1} << bits;
      if (i.mode & 2 && y >> 7) y -= 256;
      sum += x * y;
    }
    return static_cast<uint64_t>(sum) & 0xffffffff;
  });
}

}  // namespace

OpFn FindInteger(const Opcode& op, Insn* in) {
  if (op.base == "clock") {
    return +[](Exec& e, const Insn& i, uint32_t mask) {
      EachLane(mask, [&](int l) { e.Reg(i.d[0])[l] = e.out->counters.warp_insns; });
    };
  }
  if (const OpFn carry = FindCarry(op, in)) return carry;
  if (const OpFn bits = FindBits(op, in)) return bits;
  if (const OpFn dot = FindDot(op, in)) return dot;
  return FindArithmetic(op, in);
}

}  // namespace cusim
