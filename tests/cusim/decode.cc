#include <cfenv>
#include <string>

#include "tests/cusim/ops.h"

namespace cusim {
namespace {

constexpr std::pair<std::string_view, Type> kTypes[] = {
    {"pred", Type::kPred},     {"b8", Type::kB8},     {"b16", Type::kB16}, {"b32", Type::kB32},
    {"b64", Type::kB64},       {"b128", Type::kB128}, {"u8", Type::kU8},   {"u16", Type::kU16},
    {"u32", Type::kU32},       {"u64", Type::kU64},   {"s8", Type::kS8},   {"s16", Type::kS16},
    {"s32", Type::kS32},       {"s64", Type::kS64},   {"f16", Type::kF16}, {"bf16", Type::kBF16},
    {"tf32", Type::kTF32},     {"f32", Type::kF32},   {"f64", Type::kF64}, {"f16x2", Type::kF16x2},
    {"bf16x2", Type::kBF16x2},
};

// For the time of one instruction the host rounds as it says.
void Rounded(Exec& e, const Insn& in, uint32_t mask) {
  std::fesetround(in.rounding == kZero   ? FE_TOWARDZERO
                  : in.rounding == kDown ? FE_DOWNWARD
                                         : FE_UPWARD);
  in.inner(e, in, mask);
  std::fesetround(FE_TONEAREST);
}

void SetFlags(const Opcode& op, Insn* in) {
  for (const std::string& m : op.modifiers) {
    const Type type = TypeNamed(m);
    if (type != Type::kNone) {
      if (in->type == Type::kNone) {
        in->type = type;
      } else if (in->from == Type::kNone) {
        in->from = type;
      }
    } else if (m == "global" || m == "const") {
      in->space = Space::kGlobal;
    } else if (m.starts_with("shared")) {
      in->space = Space::kShared;
    } else if (m == "local") {
      in->space = Space::kLocal;
    } else if (m == "param" && in->space != Space::kLocal) {
      in->space = Space::kParam;
    } else if (m == "v2") {
      in->vec = 2;
    } else if (m == "v4") {
      in->vec = 4;
    } else if (m == "sat") {
      in->saturate = true;
    } else if (m == "relu") {
      in->relu = true;
    } else if (m == "ftz") {
      in->flush = true;
    } else if (m == "rn" || m == "rni") {
      in->rounding = kNearest;
    } else if (m == "rz" || m == "rzi") {
      in->rounding = kZero;
    } else if (m == "rm" || m == "rmi") {
      in->rounding = kDown;
    } else if (m == "rp" || m == "rpi") {
      in->rounding = kUp;
    } else if (m == "rna") {
      in->rounding = kNearestAway;
    }
    in->round_to_integer |= m == "rni" || m == "rzi" || m == "rmi" || m == "rpi";
  }
}

void SetClass(const Opcode& op, Insn* in) {
  const auto is = [&](std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (op.base == name) return true;
    }
    return false;
  };
  const Class c = is({"ld", "ldu", "st", "atom", "red", "cp", "ldmatrix", "prefetch"})
                      ? Class::kMemory
                  : is({"mma"})                                          ? Class::kMatrix
                  : is({"shfl", "vote", "match", "redux", "activemask"}) ? Class::kWarp
                  : is({"bar", "barrier", "membar", "fence"})            ? Class::kBarrier
                                                                         : Class::kArithmetic;
  in->mode_class = static_cast<uint8_t>(c);
}

}  // namespace

int SizeOf(Type type) {
  switch (type) {
    case Type::kNone:
    case Type::kPred:
    case Type::kB8:
    case Type::kU8:
    case Type::kS8:
      return 1;
    case Type::kB16:
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBF16:
      return 2;
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
    case Type::kF64:
      return 8;
    case Type::kB128:
      return 16;
    default:
      return 4;
  }
}

bool IsSigned(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}
bool IsFloat(Type type) {
  return type == Type::kF16 || type == Type::kBF16 || type == Type::kF32 || type == Type::kF64 ||
         type == Type::kTF32;
}

Type TypeNamed(std::string_view name) {
  for (const auto& [known, type] : kTypes) {
    if (known == name) return type;
  }
  return Type::kNone;
}

Opcode::Opcode(std::string_view text) {
  size_t dot = std::min(text.find('.'), text.size());
  base = text.substr(0, dot);
  while (dot < text.size()) {
    const size_t end = std::min(text.find('.', dot + 1), text.size());
    modifiers.emplace_back(text.substr(dot + 1, end - dot - 1));
    dot = end;
  }
}

bool Opcode::Has(std::string_view modifier) const {
  return std::find(modifiers.begin(), modifiers.end(), modifier) != modifiers.end();
}

bool Decode(const Opcode& op, Insn* in) {
  SetFlags(op, in);
  SetClass(op, in);
  if (op.base == "selp") in->undefined = Undefined::kSelects;
  if (op.base == "and" && in->type == Type::kPred) in->undefined = Undefined::kAnd;
  if (op.base == "or" && in->type == Type::kPred) in->undefined = Undefined::kOr;
  const auto c = static_cast<Class>(in->mode_class);
  if (c == Class::kMemory) {
    in->undefined = op.base == "ld"   ? Undefined::kLoads
                    : op.base == "st" ? Undefined::kStores
                                      : Undefined::kReports;
  }
  if (c == Class::kMatrix || c == Class::kWarp || c == Class::kBarrier ||
      (op.base == "setp" && op.modifiers.size() > 2)) {  // combined with a predicate, which decides
    in->undefined = Undefined::kClears;
  }
  using Find = OpFn (*)(const Opcode&, Insn*);
  for (const Find find : {&FindMemory, &FindWarp, &FindMatrix, &FindCompare, &FindConvert,
                          &FindPair, &FindFloat, &FindInteger}) {
    in->run = find(op, in);
    if (in->run != nullptr) break;
  }
  if (in->run == nullptr) return in->flow != Flow::kNext;
  const bool directed = in->rounding == kZero || in->rounding == kDown || in->rounding == kUp;
  if (directed && op.base != "cvt") {
    in->inner = in->run;
    in->run = &Rounded;
  }
  return true;
}

}  // namespace cusim
