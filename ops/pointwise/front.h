// What the functions of this family do before they call an op: null inputs, promotion, numbers.
#pragma once

#include <initializer_list>

#include "dtensor/op.h"
#include "dtensor/ops/pointwise/pointwise.h"
#include "dtensor/ops/rules.h"

namespace dtensor::pointwise {

// `op` is that of the op's name, in the function that says so.
#define DT_OP(name) static const OpDef& op = GetOp(#name)

// A number as a kernel of dtype t takes it.
double NumberAs(DType t, double s);
inline Attr NumberAttr(const Scalar& s) { return s.is_float ? FloatAttr(s.d) : IntAttr(s.i); }
// As an element of dtype t: of integers the fraction is cut, and a bool is whether it is not 0.
inline Attr NumberIn(DType t, const Scalar& s) {
  if (IsFloating(t)) return FloatAttr(s.d);
  return IntAttr(t == DType::kBool ? s.d != 0 : s.i);
}
// Integers wrap around, as in kernels.
inline Scalar Times(const Scalar& a, const Scalar& b) {
  if (!b.is_float && b.i == 1) return a;  // a bool stays one
  if (a.is_float || b.is_float) return a.d * b.d;
  return static_cast<int64_t>(static_cast<uint64_t>(a.i) * static_cast<uint64_t>(b.i));
}
// The same in dtype t.
inline Scalar TimesIn(DType t, const Scalar& a, const Scalar& b) {
  return IsFloating(t) ? Scalar(a.d * b.d) : Times(a, b);
}
// What is added where s is subtracted, in dtype t: of a floating 0 that is -0.0, which changes
// none.
inline Scalar Negated(const Scalar& s, DType t) {
  return IsFloating(t) ? Scalar(-s.d) : Times(s, -1);
}
// A tensor without dims on x's mesh, for kernels that broadcast it. Not a wrapped number: t is the
// promoted dtype.
DTensor NumberLike(const char* name, const DTensor& x, const Scalar& s, DType t);

// torch.result_type: tensors without dims, and after them numbers, count only where their category
// (floating, integral, bool) is higher. Null inputs are an error of `name`.
DType AllTypes(const char* name, absl::Span<const DTensor* const> inputs);
inline bool SameTypes(const DTensor& x, const DTensor& y) {
  return x.defined() && y.defined() && x.dtype() == y.dtype();
}
inline DType BothTypes(const char* name, const DTensor& x, const DTensor& y) {
  return SameTypes(x, y) ? x.dtype() : AllTypes(name, {&x, &y});
}
DType TypeWith(const char* name, const DTensor& x, const Scalar& s);
inline DType AsFloat(DType t) { return IsFloating(t) ? t : DType::kF32; }

void CheckDefined(const char* name, const DTensor& t);
void RefuseBool(const char* name, DType t, const DTensor& x);
// A floating factor must not change the dtype of integers.
[[noreturn]] void ThrowOfFactor(const char* name, const char* factor,
                                std::initializer_list<NamedInput> inputs);
inline void CheckFactor(const char* name, const char* factor, DType t, const Scalar& value,
                        std::initializer_list<NamedInput> inputs) {
  if (value.is_float && !IsFloating(t)) ThrowOfFactor(name, factor, inputs);
}

// The op on inputs converted to t.
DTensor Cast(const DTensor& x, DType t);
DTensor Apply(const OpDef& op, const DTensor& x, DType t, absl::Span<const Attr> attrs = {});
DTensor ApplyCast(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                  absl::Span<const Attr> attrs);
inline DTensor Apply(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                     absl::Span<const Attr> attrs = {}) {
  if (x.dtype() != t || y.dtype() != t) return ApplyCast(op, x, y, t, attrs);
  const DTensor* inputs[] = {&x, &y};
  return Call1(op, inputs, attrs);
}
// Sums, products and quotients take a tensor without dims as the number that it is: with 16-bit
// floats they are computed in float32, which holds it, and rounded once. As torch does.
DTensor ArithmeticCast(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                       absl::Span<const Attr> attrs);
inline DTensor Arithmetic(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                          absl::Span<const Attr> attrs = {}) {
  if (x.dtype() != t || y.dtype() != t) return ArithmeticCast(op, x, y, t, attrs);
  const DTensor* inputs[] = {&x, &y};
  return Call1(op, inputs, attrs);
}
DTensor Apply(const OpDef& op, const DTensor& x, const DTensor& y, const DTensor& z, DType t,
              absl::Span<const Attr> attrs = {});

}  // namespace dtensor::pointwise
