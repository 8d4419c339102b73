#include <cfenv>
#include <utility>

#include "tests/cusim/ops.h"

namespace cusim {
namespace {

template <class S>
constexpr bool kWhole = std::is_integral_v<S>;

// make(Tag<T>()) for any type that cvt has.
template <class F>
OpFn ForAny(Type type, F make) {
  switch (type) {
    case Type::kB8:
    case Type::kU8:
      return make(Tag<uint8_t>());
    case Type::kS8:
      return make(Tag<int8_t>());
    case Type::kF16:
      return make(Tag<F16>());
    case Type::kBF16:
      return make(Tag<BF16>());
    case Type::kF32:
      return make(Tag<float>());
    case Type::kF64:
      return make(Tag<double>());
    default:
      return ForInteger(type, make);
  }
}

double ToWhole(double v, uint8_t rounding) {
  switch (rounding) {
    case kZero:
      return std::trunc(v);
    case kDown:
      return std::floor(v);
    case kUp:
      return std::ceil(v);
    default:
      return std::nearbyint(v);
  }
}

template <class D, class S>
D Integer(const Insn& in, S s) {
  if constexpr (kWhole<S>) {
    if (in.saturate) {
      if (std::cmp_less(s, std::numeric_limits<D>::min())) return std::numeric_limits<D>::min();
      if (std::cmp_greater(s, std::numeric_limits<D>::max())) return std::numeric_limits<D>::max();
    }
    return static_cast<D>(s);
  } else {
    double v = Real(s);
    if (in.flush && std::is_same_v<S, float>) v = Flush(static_cast<float>(v));
    if (v != v) {  // zero, but the top bit where 64 bits are on either side
      constexpr bool wide = sizeof(D) == 8 || std::is_same_v<S, double>;
      return wide ? static_cast<D>(1ull << (sizeof(D) * 8 - 1)) : D{0};
    }
    v = ToWhole(v, in.rounding);
    if (v <= static_cast<double>(std::numeric_limits<D>::min()))
      return std::numeric_limits<D>::min();
    if (v >= static_cast<double>(std::numeric_limits<D>::max()))
      return std::numeric_limits<D>::max();
    return static_cast<D>(v);
  }
}

int HostRounding(uint8_t rounding) {
  return rounding == kZero   ? FE_TOWARDZERO
         : rounding == kDown ? FE_DOWNWARD
         : rounding == kUp   ? FE_UPWARD
                             : FE_TONEAREST;
}

// An integer or floating value, rounded once to D.
template <class D, class S>
D Floating(const Insn& in, S s) {
  const int mode = in.round_to_integer ? FE_TONEAREST : HostRounding(in.rounding);
  if constexpr (kWhole<S>) {
    if constexpr (sizeof(D) == 2) {
      // At most 64 bits: a double that keeps, in its last bit, that there was more.
      const double near = static_cast<double>(s);
      double error = 0;
      if constexpr (sizeof(S) == 8) {
        error = static_cast<double>(static_cast<__int128>(s) - static_cast<__int128>(near));
      }
      return FromReal<D>(Odd(near, error));
    } else {
      using R = decltype(Real(D{}));
      std::fesetround(mode);
      volatile S from = s;
      volatile R r = static_cast<R>(from);
      std::fesetround(FE_TONEAREST);
      return FromReal<D>(static_cast<R>(r));
    }
  } else {
    double v = Real(s);
    if (in.flush && std::is_same_v<S, float>) v = Flush(static_cast<float>(v));
    if (in.round_to_integer) v = ToWhole(v, in.rounding);
    if (in.saturate) v = v > 0 ? std::min(v, 1.0) : 0;
    if (in.relu && v < 0) v = 0;
    if constexpr (std::is_same_v<D, F16>) return {Narrow<10, 15>(v, mode == FE_TOWARDZERO)};
    if constexpr (std::is_same_v<D, BF16>) return {Narrow<7, 127>(v, mode == FE_TOWARDZERO)};
    if constexpr (std::is_same_v<D, float>) {
      std::fesetround(mode);
      volatile double from = v;
      volatile float r = static_cast<float>(from);
      std::fesetround(FE_TONEAREST);
      const float f = FromReal<float>(static_cast<float>(r));
      return in.flush ? Flush(f) : f;
    }
    if constexpr (std::is_same_v<D, double>) return v;
  }
}

template <class D, class S>
void CvtOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t* const a = e.Reg(in.s[0]);
  EachLane(mask, [&](int l) {
    if constexpr (kWhole<D>) {
      // Registers wider than D get its sign.
      const D v = Integer<D>(in, Get<S>(a[l]));
      d[l] = std::is_signed_v<D> ? static_cast<uint64_t>(static_cast<int64_t>(v)) : Put(v);
    } else {
      d[l] = Put(Floating<D>(in, Get<S>(a[l])));
    }
  });
}

template <class T>
uint16_t Half(const Insn& in, uint64_t slot) {
  return Floating<T>(in, Get<float>(slot)).bits;
}

OpFn FindCvt(const Opcode& op, Insn* in) {
  const Type to = in->type, from = in->from;
  if (to == Type::kF16x2 || to == Type::kBF16x2) {  // two f32 into one register, the first above
    if (from != Type::kF32) return nullptr;
    if (to == Type::kF16x2) {
      return Raw([](const Insn& i, uint64_t a, uint64_t b, uint64_t, uint64_t) {
        return uint64_t{Half<F16>(i, a)} << 16 | Half<F16>(i, b);
      });
    }
    return Raw([](const Insn& i, uint64_t a, uint64_t b, uint64_t, uint64_t) {
      return uint64_t{Half<BF16>(i, a)} << 16 | Half<BF16>(i, b);
    });
  }
  if (to == Type::kTF32 && from == Type::kF32) {
    return Raw([](const Insn& i, uint64_t a, uint64_t, uint64_t, uint64_t) -> uint64_t {
      const uint32_t bits = static_cast<uint32_t>(a);
      if ((bits & 0x7f800000) == 0x7f800000) return bits;
      const uint32_t half = i.rounding == kNearestAway ? 0x1000 : 0xfff + (bits >> 13 & 1);
      return (bits + half) & ~0x1fffu;
    });
  }
  if (op.Has("pack") || op.Has("satfinite")) return nullptr;
  // The common ones, as they come with no rounding to think of.
  if (!in->saturate && !in->flush) {
    const auto is = [&](Type t, Type f) { return to == t && from == f; };
    if (is(Type::kU32, Type::kU64) || is(Type::kS32, Type::kS64) || is(Type::kS32, Type::kU64) ||
        is(Type::kU32, Type::kS64) || is(Type::kU64, Type::kU32)) {
      return Unary<uint32_t>([](uint32_t v) { return v; });
    }
  }
  return ForAny(to, [&]<class D>(Tag<D>) -> OpFn {
    return ForAny(from, []<class S>(Tag<S>) -> OpFn { return &CvtOp<D, S>; });
  });
}

// mov.b64 d, {a, b} and back.
void PackOp(Exec& e, const Insn& in, uint32_t mask) {
  const int bits = SizeOf(in.type) * 8 / in.vec;
  EachLane(mask, [&](int l) {
    uint64_t v = 0;
    for (int i = 0; i < in.vec; ++i) {
      v |= (e.Reg(in.s[i])[l] & ((1ull << bits) - 1)) << (bits * i);
    }
    e.Reg(in.d[0])[l] = v;
  });
}
void UnpackOp(Exec& e, const Insn& in, uint32_t mask) {
  const int bits = SizeOf(in.type) * 8 / in.vec;
  EachLane(mask, [&](int l) {
    const uint64_t v = e.Reg(in.s[0])[l];
    for (int i = 0; i < in.vec; ++i) {
      if (in.d[i] >= 0) e.Reg(in.d[i])[l] = v >> (bits * i) & ((1ull << bits) - 1);
    }
  });
}

OpFn FindAddress(const Opcode& op, Insn* in) {
  if (op.base == "isspacep") {
    // Constants and parameters are not told from other memory here.
    if (!op.Has("global") && !op.Has("local") && !op.Has("shared")) return nullptr;
    in->mode = static_cast<uint8_t>(in->space);
    in->space = Space::kGeneric;
    return Raw([](const Insn& i, uint64_t a, uint64_t, uint64_t, uint64_t) {
      return static_cast<uint64_t>(SpaceOf(Space::kGeneric, &a) == static_cast<Space>(i.mode));
    });
  }
  const bool to = op.Has("to");
  const uint64_t base = in->space == Space::kShared  ? kSharedBase
                        : in->space == Space::kLocal ? kLocalBase
                                                     : 0;
  if (base == 0) return Unary<uint64_t>([](uint64_t a) { return a; });
  if (base == kSharedBase) {
    return to ? Unary<uint64_t>([](uint64_t a) { return a - kSharedBase; })
              : Unary<uint64_t>([](uint64_t a) { return a + kSharedBase; });
  }
  return to ? Unary<uint64_t>([](uint64_t a) { return a - kLocalBase; })
            : Unary<uint64_t>([](uint64_t a) { return a + kLocalBase; });
}

}  // namespace

OpFn FindConvert(const Opcode& op, Insn* in) {
  if (op.base == "mov") return Unary<uint64_t>([](uint64_t a) { return a; });
  if (op.base == "pack") return &PackOp;
  if (op.base == "unpack") return &UnpackOp;
  if (op.base == "cvta" || op.base == "isspacep") return FindAddress(op, in);
  if (op.base == "cvt") return FindCvt(op, in);
  return nullptr;
}

}  // namespace cusim
