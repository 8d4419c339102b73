#include "dtensor/ops/pointwise/front.h"

#include <cmath>

#include "absl/strings/str_cat.h"

namespace dtensor::pointwise {
namespace {

int Category(DType t) { return IsFloating(t) ? 2 : t == DType::kBool ? 0 : 1; }

}  // namespace

double NumberAs(DType t, double s) {
  if (t == DType::kF64) return s;
  if (t == DType::kF16) return std::fabs(s) >= 65520 ? HUGE_VAL : std::fabs(s) < 6e-8 ? 0 : s;
  return static_cast<float>(s);
}
DTensor NumberLike(const char* name, const DTensor& x, const Scalar& s, DType t) {
  RequireOwn(name, {{"x", x}});
  Scalar held = s;  // as kernels take it: an integer wraps around
  if (t == DType::kU8) held = static_cast<uint8_t>(s.i);
  if (t == DType::kI32) held = static_cast<int32_t>(s.i);
  return full({}, held, {.dtype = t, .mesh = x.mesh()});
}

void CheckDefined(const char* name, const DTensor& t) {
  if (t.defined()) return;
  Throw(InFunction(name, absl::InvalidArgumentError("an input is null")));
}

DType AllTypes(const char* name, absl::Span<const DTensor* const> inputs) {
  std::optional<DType> with_dims, without;
  for (const DTensor* x : inputs) {
    CheckDefined(name, *x);
    std::optional<DType>& t = x->ndim() > 0 ? with_dims : without;
    t = t ? PromoteTypes(*t, x->dtype()) : x->dtype();
  }
  if (!with_dims || !without) return with_dims ? *with_dims : *without;
  return Category(*without) > Category(*with_dims) ? PromoteTypes(*with_dims, *without)
                                                   : *with_dims;
}
DType TypeWith(const char* name, const DTensor& x, const Scalar& s) {
  CheckDefined(name, x);
  const DType t = x.dtype();
  if (s.is_float && !IsFloating(t)) return DType::kF32;
  if (!s.is_float && !s.is_bool && t == DType::kBool) return DType::kI64;
  return t;
}

void RefuseBool(const char* name, DType t, const DTensor& x) {
  if (t != DType::kBool) return;
  ThrowInvalid(name, "is not defined for bool; use logical_not or eq, or convert with to()",
               {{"x", x}});
}
void ThrowOfFactor(const char* name, const char* factor, std::initializer_list<NamedInput> inputs) {
  ThrowInvalid(name, absl::StrCat(factor, " is a floating number, the tensors are integers"),
               inputs);
}

DTensor Cast(const DTensor& x, DType t) { return x.dtype() == t ? x : to(x, t); }
DTensor Apply(const OpDef& op, const DTensor& x, DType t, absl::Span<const Attr> attrs) {
  if (x.dtype() == t) {
    const DTensor* inputs[] = {&x};
    return Call1(op, inputs, attrs);
  }
  const DTensor a = Cast(x, t);
  const DTensor* inputs[] = {&a};
  return Call1(op, inputs, attrs);
}
DTensor ApplyCast(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                  absl::Span<const Attr> attrs) {
  const DTensor a = Cast(x, t), b = Cast(y, t);
  const DTensor* inputs[] = {&a, &b};
  return Call1(op, inputs, attrs);
}
DTensor ArithmeticCast(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
                       absl::Span<const Attr> attrs) {
  const DTensor& other = x.dtype() == t ? y : x;
  if (!IsNarrow(t) || other.ndim() > 0) return ApplyCast(op, x, y, t, attrs);
  return to(ApplyCast(op, x, y, DType::kF32, attrs), t);
}
DTensor Apply(const OpDef& op, const DTensor& x, const DTensor& y, const DTensor& z, DType t,
              absl::Span<const Attr> attrs) {
  const DTensor a = Cast(x, t), b = Cast(y, t), c = Cast(z, t);
  const DTensor* inputs[] = {&a, &b, &c};
  return Call1(op, inputs, attrs);
}

}  // namespace dtensor::pointwise
