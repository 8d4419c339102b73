// The functions that elementwise.inc makes, and those of its first part that take more than that.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"

namespace dtensor {

using namespace pointwise;  // NOLINT(google-build-using-namespace): this file is its user

namespace {

// The dtype in which a function computes, of the promoted one.
DType AsItIs(const char*, DType t) { return t; }
DType Real(const char*, DType t) { return AsFloat(t); }
DType WholeType(const char* name, DType t) {
  if (!IsFloating(t)) return t;
  ThrowInvalid(name, absl::StrCat("takes integers and bool, not ", TypeName(t),
                                  "; convert with to() first"));
}

}  // namespace

DTensor add(const DTensor& x, const DTensor& y, Scalar alpha) {
  DT_OP(add);
  const DType t = BothTypes("add", x, y);
  CheckFactor("add", "alpha", t, alpha, {{"x", x}, {"y", y}});
  const Attr attrs[] = {NumberAttr(alpha)};
  return Arithmetic(op, x, y, t, attrs);
}
// As add and sub do with a factor of 1, by themselves, as most calls are these.
constexpr Attr kOnce[] = {IntAttr(1)};
DTensor operator+(const DTensor& x, const DTensor& y) {
  DT_OP(add);
  if (!SameTypes(x, y)) [[unlikely]]
    return add(x, y, 1);
  const DTensor* inputs[] = {&x, &y};
  return Call1(op, inputs, kOnce);
}
DTensor operator-(const DTensor& x, const DTensor& y) {
  DT_OP(sub);
  if (!SameTypes(x, y) || x.dtype() == DType::kBool) [[unlikely]]
    return sub(x, y, 1);
  const DTensor* inputs[] = {&x, &y};
  return Call1(op, inputs, kOnce);
}
DTensor add(const DTensor& x, Scalar y, Scalar alpha) {
  DT_OP(add_scalar);
  if (alpha.is_float && x.defined()) {
    CheckFactor("add", "alpha", TypeWith("add", x, y), alpha, {{"x", x}});
  }
  const DType t = TypeWith("add", x, y);
  const Attr attrs[] = {t == DType::kBool ? BoolAttr(y.i != 0 && alpha.i != 0)
                                          : NumberAttr(TimesIn(t, y, alpha))};
  return Apply(op, x, t, attrs);
}
DTensor add(Scalar x, const DTensor& y, Scalar alpha) {
  if (alpha.d == 1) return add(y, x);
  const DType t = TypeWith("add", y, x);
  return add(NumberLike("add", y, x, t), Cast(y, t), alpha);
}
DTensor sub(const DTensor& x, const DTensor& y, Scalar alpha) {
  DT_OP(sub);
  const DType t = BothTypes("sub", x, y);
  RefuseBool("sub", t, x);
  CheckFactor("sub", "alpha", t, alpha, {{"x", x}, {"y", y}});
  const Attr attrs[] = {NumberAttr(alpha)};
  return Arithmetic(op, x, y, t, attrs);
}
DTensor sub(const DTensor& x, Scalar y, Scalar alpha) {
  const DType t = TypeWith("sub", x, y);
  RefuseBool("sub", t, x);
  CheckFactor("sub", "alpha", t, alpha, {{"x", x}});
  return add(x, Negated(TimesIn(t, y, alpha), t));
}
DTensor sub(Scalar x, const DTensor& y) {
  DT_OP(rsub_scalar);
  const DType t = TypeWith("sub", y, x);
  RefuseBool("sub", t, y);
  const Attr attrs[] = {NumberAttr(x)};
  return Apply(op, y, t, attrs);
}
DTensor rsub(const DTensor& x, const DTensor& y, Scalar alpha) {
  return AsOp("rsub", {{"x", x}, {"y", y}}, [&] { return sub(y, x, alpha); });
}
DTensor rsub(const DTensor& x, Scalar y, Scalar alpha) {
  return AsOp("rsub", {{"x", x}}, [&] {
    const DType t = TypeWith("rsub", x, y);
    CheckFactor("rsub", "alpha", t, alpha, {{"x", x}});
    return alpha.d == 1 ? sub(y, x) : sub(NumberLike("rsub", x, y, t), Cast(x, t), alpha);
  });
}
DTensor mul(const DTensor& x, const DTensor& y) {
  DT_OP(mul);
  return Arithmetic(op, x, y, BothTypes("mul", x, y));
}
// The zeros of a pending sum stay zeros only under finite factors; t: the kernel's dtype.
static DTensor ReadyFor(double factor, DType t, const DTensor& x) {
  if (std::isfinite(NumberAs(t, factor)) || !x.defined() || !x.spec().has_partial()) return x;
  return Settled(x);
}
DTensor mul(const DTensor& x, Scalar y) {
  DT_OP(mul_scalar);
  const DType t = TypeWith("mul", x, y);
  const Attr attrs[] = {NumberAttr(y)};
  return Apply(op, ReadyFor(y.d, t, x), t, attrs);
}
DTensor div(const DTensor& x, const DTensor& y) {
  DT_OP(div);
  return Arithmetic(op, x, y, AsFloat(BothTypes("div", x, y)));
}
DTensor div(const DTensor& x, Scalar y) {
  DT_OP(div_scalar);
  const DType t = AsFloat(TypeWith("div", x, y));
  const Attr attrs[] = {NumberAttr(y)};
  return Apply(op, ReadyFor(1 / NumberAs(t, y.d), t, x), t, attrs);
}
DTensor true_divide(const DTensor& x, const DTensor& y) {
  return AsOp("true_divide", {{"x", x}, {"y", y}}, [&] { return div(x, y); });
}
DTensor true_divide(const DTensor& x, Scalar y) {
  return AsOp("true_divide", {{"x", x}}, [&] { return div(x, y); });
}
DTensor div(Scalar x, const DTensor& y) {
  DT_OP(rdiv_scalar);
  const DType t = AsFloat(TypeWith("div", y, x));
  const Attr attrs[] = {NumberAttr(x)};
  return Apply(op, y, t, attrs);
}
DTensor div(const DTensor& x, const DTensor& y, absl::string_view rounding_mode) {
  if (rounding_mode == "floor") return floor_divide(x, y);
  if (rounding_mode == "trunc") {
    DT_OP(trunc_divide);
    return Apply(op, x, y, BothTypes("div", x, y));
  }
  ThrowInvalid(
      "div",
      absl::StrCat("rounding_mode is \"", rounding_mode, "\"; there are \"floor\" and \"trunc\""),
      {{"x", x}, {"y", y}});
}
DTensor div(const DTensor& x, Scalar y, absl::string_view rounding_mode) {
  const DType t = TypeWith("div", x, y);
  return div(Cast(x, t), NumberLike("div", x, y, t), rounding_mode);
}
DTensor pow(const DTensor& x, const DTensor& y) {
  DT_OP(pow);
  return Apply(op, x, y, BothTypes("pow", x, y));
}
DTensor pow(const DTensor& x, Scalar y) {
  DT_OP(pow_scalar);
  const DType t = TypeWith("pow", x, y);
  if (!IsFloating(t) && y.i < 0) {
    ThrowInvalid("pow",
                 "integers to a negative integer power are not integers; convert with to() first",
                 {{"x", x}});
  }
  const Attr attrs[] = {NumberAttr(y)};
  return Apply(op, x, t, attrs);
}
DTensor pow(Scalar x, const DTensor& y) {
  DT_OP(rpow_scalar);
  const DType t = TypeWith("pow", y, x);
  const Attr attrs[] = {NumberAttr(x)};
  return Apply(op, y, t, attrs);
}

// The functions of elementwise.inc that need no more than their line.
#define DT_DEFINE_Hidden(name)
#define DT_DEFINE_Real(name)                 \
  DTensor name(const DTensor& x) {           \
    DT_OP(name);                             \
    CheckDefined(#name, x);                  \
    return Apply(op, x, AsFloat(x.dtype())); \
  }
#define DT_DEFINE_Same(name)        \
  DTensor name(const DTensor& x) {  \
    DT_OP(name);                    \
    CheckDefined(#name, x);         \
    return Apply(op, x, x.dtype()); \
  }
#define DT_DEFINE_NotBool(name)      \
  DTensor name(const DTensor& x) {   \
    DT_OP(name);                     \
    CheckDefined(#name, x);          \
    RefuseBool(#name, x.dtype(), x); \
    return Apply(op, x, x.dtype());  \
  }
#define DT_DEFINE_Two(name)                          \
  DTensor name(const DTensor& x, const DTensor& y) { \
    DT_OP(name);                                     \
    return Apply(op, x, y, BothTypes(#name, x, y));  \
  }
#define DT_DEFINE_Backward DT_DEFINE_Two
#define DT_DEFINE_TwoReal(name)                              \
  DTensor name(const DTensor& x, const DTensor& y) {         \
    DT_OP(name);                                             \
    return Apply(op, x, y, AsFloat(BothTypes(#name, x, y))); \
  }
#define DT_DEFINE_TwoInt(name)                                        \
  DTensor name(const DTensor& x, const DTensor& y) {                  \
    DT_OP(name);                                                      \
    return Apply(op, x, y, WholeType(#name, BothTypes(#name, x, y))); \
  }
#define DT_DEFINE_WITH_NUMBERS(name, As)                \
  DTensor name(const DTensor& x, Scalar y) {            \
    DT_OP(name);                                        \
    const DType t = As(#name, TypeWith(#name, x, y));   \
    return Apply(op, x, NumberLike(#name, x, y, t), t); \
  }                                                     \
  DTensor name(Scalar x, const DTensor& y) {            \
    DT_OP(name);                                        \
    const DType t = As(#name, TypeWith(#name, y, x));   \
    return Apply(op, NumberLike(#name, y, x, t), y, t); \
  }
#define DT_DEFINE_Mixed(name) DT_DEFINE_Two(name) DT_DEFINE_WITH_NUMBERS(name, AsItIs)
#define DT_DEFINE_MixedReal(name) DT_DEFINE_TwoReal(name) DT_DEFINE_WITH_NUMBERS(name, Real)
#define DT_DEFINE_MixedInt(name) DT_DEFINE_TwoInt(name) DT_DEFINE_WITH_NUMBERS(name, WholeType)
#define DT_DEFINE_Compared(name)                                 \
  DT_DEFINE_Two(name) DTensor name(const DTensor& x, Scalar y) { \
    DT_OP(name##_scalar);                                        \
    const DType t = TypeWith(#name, x, y);                       \
    const Attr attrs[] = {NumberAttr(y)};                        \
    return Apply(op, x, t, attrs);                               \
  }
#define DT_POINTWISE(kind, user, name, ...) DT_DEFINE_##user(name)
#include "dtensor/ops/pointwise/elementwise.inc"

DTensor gelu(const DTensor& x, bool approx_tanh) {
  DT_OP(gelu);
  CheckDefined("gelu", x);
  const Attr attrs[] = {BoolAttr(approx_tanh)};
  return Apply(op, x, AsFloat(x.dtype()), attrs);
}
DTensor gelu_backward(const DTensor& dy, const DTensor& x, bool approx_tanh) {
  DT_OP(gelu_backward);
  const Attr attrs[] = {BoolAttr(approx_tanh)};
  return Apply(op, dy, x, BothTypes("gelu_backward", dy, x), attrs);
}
DTensor maximum_backward(const DTensor& dy, const DTensor& x, const DTensor& y) {
  DT_OP(maximum_backward);
  const DTensor* inputs[] = {&dy, &x, &y};
  return Call1(op, inputs);
}

DTensor where(const DTensor& cond, const DTensor& x, const DTensor& y) {
  DT_OP(where);
  CheckDefined("where", cond);
  const DType t = BothTypes("where", x, y);
  const DTensor a = Cast(x, t), b = Cast(y, t);
  const DTensor* inputs[] = {&cond, &a, &b};
  return Call1(op, inputs);
}
DTensor where(const DTensor& cond, const DTensor& x, Scalar y) {
  const DTensor a = Cast(x, TypeWith("where", x, y));
  RequireHolds("where", a.dtype(), y, {{"cond", cond}, {"x", x}});
  return masked_fill(a, logical_not(cond), y);
}
DTensor where(const DTensor& cond, Scalar x, const DTensor& y) {
  const DTensor b = Cast(y, TypeWith("where", y, x));
  RequireHolds("where", b.dtype(), x, {{"cond", cond}, {"y", y}});
  return masked_fill(b, cond, x);
}
DTensor where(const DTensor& cond, Scalar x, Scalar y) {
  CheckDefined("where", cond);
  const DType whole = x.is_bool && y.is_bool ? DType::kBool : DType::kI64;
  const DType t = x.is_float || y.is_float ? DType::kF32 : whole;
  return where(cond, NumberLike("where", cond, x, t), NumberLike("where", cond, y, t));
}
DTensor dropout_apply(const DTensor& x, const DTensor& mask, double scale) {
  DT_OP(dropout_apply);
  const DTensor* inputs[] = {&x, &mask};
  return Call1(op, inputs, {FloatAttr(scale)});
}
DTensor masked_fill(const DTensor& x, const DTensor& mask, const DTensor& value) {
  CheckDefined("masked_fill", x);
  CheckDefined("masked_fill", value);
  if (value.ndim() != 0) {
    ThrowInvalid("masked_fill", "value must have no dims",
                 {{"x", x}, {"mask", mask}, {"value", value}});
  }
  return where(mask, Cast(value, x.dtype()), x);
}
DTensor masked_fill(const DTensor& x, const DTensor& mask, Scalar value) {
  DT_OP(masked_fill);
  CheckDefined("masked_fill", x);
  CheckDefined("masked_fill", mask);
  RequireHolds("masked_fill", x.dtype(), value, {{"x", x}, {"mask", mask}});
  const Attr attrs[] = {NumberIn(x.dtype(), value)};
  const DTensor* inputs[] = {&x, &mask};
  return Call1(op, inputs, attrs);
}

}  // namespace dtensor
