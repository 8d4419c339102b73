#include "tests/cusim/ops.h"

namespace cusim {
namespace {

// Beyond 5 what is true of NaNs too, then the two that ask for them.
enum Comparison : uint8_t {
  kEq,
  kNe,
  kLt,
  kLe,
  kGt,
  kGe,
  kEqu,
  kNeu,
  kLtu,
  kLeu,
  kGtu,
  kGeu,
  kNum,
  kNan
};
constexpr std::pair<const char*, Comparison> kComparisons[] = {
    {"eq", kEq},   {"ne", kNe},   {"lt", kLt},   {"le", kLe},   {"gt", kGt},   {"ge", kGe},
    {"lo", kLt},   {"ls", kLe},   {"hi", kGt},   {"hs", kGe},   {"equ", kEqu}, {"neu", kNeu},
    {"ltu", kLtu}, {"leu", kLeu}, {"gtu", kGtu}, {"geu", kGeu}, {"num", kNum}, {"nan", kNan}};
enum Combine : uint8_t { kAlone, kAnd, kOr, kXor };

template <class T>
bool Compare(uint8_t how, T a, T b) {
  const bool nan = a != a || b != b;
  if (nan) return how >= kEqu ? how != kNum : how == kNe && false;
  switch (how >= kEqu && how < kNum ? how - kEqu : how) {
    case kEq:
      return a == b;
    case kNe:
      return a != b;
    case kLt:
      return a < b;
    case kLe:
      return a <= b;
    case kGt:
      return a > b;
    case kGe:
      return a >= b;
    default:
      return how == kNum;
  }
}

template <class T>
bool CompareSlots(uint8_t how, uint64_t a, uint64_t b) {
  if constexpr (std::is_integral_v<T>) {
    return Compare(how, Get<T>(a), Get<T>(b));
  } else {
    return Compare(how, Real(Get<T>(a)), Real(Get<T>(b)));
  }
}

bool Combined(uint8_t how, bool r, bool p) {
  return how == kAnd ? r && p : how == kOr ? r || p : how == kXor ? r != p : r;
}

template <class T>
void SetpOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t *const a = e.Reg(in.s[0]), *const b = e.Reg(in.s[1]);
  const uint64_t* const c = in.s[2] >= 0 ? e.Reg(in.s[2]) : nullptr;
  uint64_t *const d = e.Reg(in.d[0]), *const q = in.d[1] >= 0 ? e.Reg(in.d[1]) : nullptr;
  EachLane(mask, [&](int l) {
    const bool r = CompareSlots<T>(in.compare, a[l], b[l]);
    const bool p = c != nullptr && ((c[l] & 1) != 0) != in.negate;
    if (q != nullptr) q[l] = Combined(in.combine, !r, p);
    d[l] = Combined(in.combine, r, p);
  });
}

// Of two halves: setp.f16x2 has a predicate for each, set.f16x2 halves that are 1.0 or 0.
template <class T>
void SetpPairOp(Exec& e, const Insn& in, uint32_t mask) {
  EachLane(mask, [&](int l) {
    const uint64_t a = e.Reg(in.s[0])[l], b = e.Reg(in.s[1])[l];
    const bool p = in.s[2] >= 0 && ((e.Reg(in.s[2])[l] & 1) != 0) != in.negate;
    for (int h = 0; h < 2; ++h) {
      const bool r = CompareSlots<T>(in.compare, a >> (16 * h), b >> (16 * h));
      if (in.d[h] >= 0) e.Reg(in.d[h])[l] = Combined(in.combine, r, p);
    }
  });
}
template <class T>
void SetPairOp(Exec& e, const Insn& in, uint32_t mask) {
  EachLane(mask, [&](int l) {
    const uint64_t a = e.Reg(in.s[0])[l], b = e.Reg(in.s[1])[l];
    uint64_t d = 0;
    const uint64_t yes = IsFloat(in.type) || in.type == Type::kF16x2 ? 0x3c00
                         : in.type == Type::kBF16x2                  ? 0x3f80
                                                                     : 0xffff;
    for (int h = 0; h < 2; ++h) {
      if (CompareSlots<T>(in.compare, a >> (16 * h), b >> (16 * h))) d |= yes << (16 * h);
    }
    e.Reg(in.d[0])[l] = d;
  });
}
template <class T>
void SetOp(Exec& e, const Insn& in, uint32_t mask) {
  const uint64_t yes = in.type == Type::kF32    ? Put(1.0f)
                       : in.type == Type::kF16  ? 0x3c00
                       : in.type == Type::kBF16 ? 0x3f80
                       : SizeOf(in.type) == 2   ? 0xffff
                                                : 0xffffffff;
  EachLane(mask, [&](int l) {
    const bool r = CompareSlots<T>(in.compare, e.Reg(in.s[0])[l], e.Reg(in.s[1])[l]);
    const bool p = in.s[2] >= 0 && ((e.Reg(in.s[2])[l] & 1) != 0) != in.negate;
    e.Reg(in.d[0])[l] = Combined(in.combine, r, p) ? yes : 0;
  });
}

template <class F>
OpFn ForType(Type type, bool flush, F make) {
  switch (type) {
    case Type::kF16:
      return make(Tag<F16>());
    case Type::kBF16:
      return make(Tag<BF16>());
    case Type::kF32:
      return flush ? make(Tag<FlushedF32>()) : make(Tag<float>());
    case Type::kF64:
      return make(Tag<double>());
    default:
      return ForInteger(type, make);
  }
}

bool SetComparison(const Opcode& op, Insn* in) {
  for (const auto& [name, how] : kComparisons) {
    if (op.modifiers.at(0) != name) continue;
    in->compare = how;
    in->combine = op.Has("and") ? kAnd : op.Has("or") ? kOr : op.Has("xor") ? kXor : kAlone;
    return true;
  }
  return false;
}

}  // namespace

OpFn FindCompare(const Opcode& op, Insn* in) {
  if (op.base == "setp") {
    if (!SetComparison(op, in)) return nullptr;
    if (in->type == Type::kF16x2) return &SetpPairOp<F16>;
    if (in->type == Type::kBF16x2) return &SetpPairOp<BF16>;
    return ForType(in->type, in->flush, []<class T>(Tag<T>) -> OpFn { return &SetpOp<T>; });
  }
  if (op.base == "set") {
    if (!SetComparison(op, in)) return nullptr;
    if (in->from == Type::kF16x2) return &SetPairOp<F16>;
    if (in->from == Type::kBF16x2) return &SetPairOp<BF16>;
    return ForType(in->from, in->flush, []<class T>(Tag<T>) -> OpFn { return &SetOp<T>; });
  }
  if (op.base == "selp") {
    return Raw([](const Insn& i, uint64_t a, uint64_t b, uint64_t c, uint64_t) {
      return ((c & 1) != 0) != i.negate ? a : b;
    });
  }
  if (op.base == "slct") {  // by the sign of the third
    if (in->from == Type::kF32) {
      return Raw([](const Insn& i, uint64_t a, uint64_t b, uint64_t c, uint64_t) {
        const float sign = Get<float>(c);
        return (i.flush ? Flush(sign) : sign) >= 0 ? a : b;  // what is flushed is a zero
      });
    }
    return Raw([](const Insn&, uint64_t a, uint64_t b, uint64_t c, uint64_t) {
      return Get<int32_t>(c) >= 0 ? a : b;
    });
  }
  return nullptr;
}

}  // namespace cusim
