// Operations from functions of one lane's values.
#pragma once

#include <bit>
#include <cstdint>

#include "tests/cusim/exec.h"
#include "tests/cusim/number.h"

namespace cusim {

// Each finds what runs an opcode of its kind; null where it is of another kind or not known. `in`
// has types, space and flags already.
OpFn FindInteger(const Opcode& op, Insn* in);
OpFn FindFloat(const Opcode& op, Insn* in);
OpFn FindPair(const Opcode& op, Insn* in);  // f16x2, bf16x2
OpFn FindCompare(const Opcode& op, Insn* in);
OpFn FindConvert(const Opcode& op, Insn* in);
OpFn FindMemory(const Opcode& op, Insn* in);
OpFn FindWarp(const Opcode& op, Insn* in);
OpFn FindMatrix(const Opcode& op, Insn* in);

template <class F>
inline void EachLane(uint32_t mask, F f) {
  if (mask == ~0u) {
    for (int l = 0; l < 32; ++l) f(l);
    return;
  }
  for (; mask != 0; mask &= mask - 1) f(std::countr_zero(mask));
}

template <class T, class F>
void UnaryOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t* const a = e.Reg(in.s[0]);
  EachLane(mask, [&](int l) { d[l] = Put(F{}(Get<T>(a[l]))); });
}
template <class T, class F>
void BinaryOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t *const a = e.Reg(in.s[0]), *const b = e.Reg(in.s[1]);
  EachLane(mask, [&](int l) { d[l] = Put(F{}(Get<T>(a[l]), Get<T>(b[l]))); });
}
template <class T, class F>
void TernaryOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t *const a = e.Reg(in.s[0]), *const b = e.Reg(in.s[1]), *const c = e.Reg(in.s[2]);
  EachLane(mask, [&](int l) { d[l] = Put(F{}(Get<T>(a[l]), Get<T>(b[l]), Get<T>(c[l]))); });
}
// Of slots as they are, with a fourth operand where there is one.
template <class F>
void RawOp(Exec& e, const Insn& in, uint32_t mask) {
  uint64_t* const d = e.Reg(in.d[0]);
  const uint64_t* s[4];
  for (int i = 0; i < 4; ++i) s[i] = e.Reg(in.s[i] >= 0 ? in.s[i] : in.s[0]);
  EachLane(mask, [&](int l) { d[l] = F{}(in, s[0][l], s[1][l], s[2][l], s[3][l]); });
}

// The operation of a lambda without captures: Binary<float>([](float a, float b) { ... }).
template <class T, class F>
OpFn Unary(F) {
  return &UnaryOp<T, F>;
}
template <class T, class F>
OpFn Binary(F) {
  return &BinaryOp<T, F>;
}
template <class T, class F>
OpFn Ternary(F) {
  return &TernaryOp<T, F>;
}
template <class F>
OpFn Raw(F) {
  return &RawOp<F>;
}

template <class T>
struct Tag {
  using type = T;
};
// make(Tag<T>()) for the integer that `type` is; null for others.
template <class F>
OpFn ForInteger(Type type, F make) {
  switch (type) {
    case Type::kB16:
    case Type::kU16:
      return make(Tag<uint16_t>());
    case Type::kS16:
      return make(Tag<int16_t>());
    case Type::kB32:
    case Type::kU32:
      return make(Tag<uint32_t>());
    case Type::kS32:
      return make(Tag<int32_t>());
    case Type::kB64:
    case Type::kU64:
      return make(Tag<uint64_t>());
    case Type::kS64:
      return make(Tag<int64_t>());
    default:
      return nullptr;
  }
}
template <class F>
OpFn ForFloat(const Insn& in, F make) {
  switch (in.type) {
    case Type::kF16:
      return make(Tag<F16>());
    case Type::kBF16:
      return make(Tag<BF16>());
    case Type::kF32:
      return in.flush ? make(Tag<FlushedF32>()) : make(Tag<float>());
    case Type::kF64:
      return make(Tag<double>());
    default:
      return nullptr;
  }
}

}  // namespace cusim
