// Functions beyond arithmetic that take numbers or several tensors, or are made of other ops.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

using namespace pointwise;  // NOLINT(google-build-using-namespace): this file is its user

// --- rounding and signs
DTensor round(const DTensor& x, int64_t decimals) {
  CheckDefined("round", x);
  RefuseBool("round", x.dtype(), x);
  if (decimals == 0) {
    DT_OP(round);
    return Apply(op, x, x.dtype());
  }
  DT_OP(round_decimals);
  if (!IsFloating(x.dtype())) {
    ThrowInvalid("round", "integers are rounded to 0 decimals only; convert with to() first",
                 {{"x", x}});
  }
  const double power = std::pow(10.0, std::fabs(static_cast<double>(decimals)));
  const Attr attrs[] = {FloatAttr(power), BoolAttr(decimals < 0)};
  return Apply(op, x, x.dtype(), attrs);
}
DTensor sgn(const DTensor& x) { return sign(x); }
DTensor positive(const DTensor& x) {
  CheckDefined("positive", x);
  RefuseBool("positive", x.dtype(), x);
  return Unchanged("positive", x);
}
DTensor bitwise_not(const DTensor& x) {
  DT_OP(bitwise_not);
  CheckDefined("bitwise_not", x);
  if (x.dtype() == DType::kBool) return logical_not(x);
  if (IsFloating(x.dtype())) {
    ThrowInvalid("bitwise_not", "takes integers and bool; convert with to() first", {{"x", x}});
  }
  return Apply(op, x, x.dtype());
}
DTensor heaviside(const DTensor& x, const DTensor& values) {
  DT_OP(heaviside);
  const DType t = BothTypes("heaviside", x, values);
  if (x.dtype() != values.dtype()) {
    ThrowInvalid("heaviside", "x and values have different dtypes; convert one with to()",
                 {{"x", x}, {"values", values}});
  }
  return Apply(op, x, values, t);
}
DTensor nextafter(const DTensor& x, const DTensor& y) {
  DT_OP(nextafter);
  const DType t = AsFloat(BothTypes("nextafter", x, y));
  const Attr attrs[] = {IntAttr(t == DType::kBF16 ? 16 : t == DType::kF16 ? 13 : 0)};
  return Apply(op, x, y, t, attrs);
}
DTensor isclose(const DTensor& x, const DTensor& y, double rtol, double atol, bool equal_nan) {
  DT_OP(isclose);
  const DType t = BothTypes("isclose", x, y);
  if (!(rtol >= 0 && atol >= 0)) {
    ThrowInvalid("isclose",
                 absl::StrCat("rtol ", rtol, " and atol ", atol, " must not be negative"),
                 {{"x", x}, {"y", y}});
  }
  const Attr attrs[] = {FloatAttr(rtol), FloatAttr(atol), BoolAttr(equal_nan)};
  return Apply(op, x, y, IsFloating(t) ? t : DType::kF64, attrs);
}

// --- powers and angles
DTensor square(const DTensor& x) { return pow(x, 2); }
DTensor float_power(const DTensor& x, const DTensor& y) {
  BothTypes("float_power", x, y);
  return pow(Cast(x, DType::kF64), Cast(y, DType::kF64));
}
DTensor float_power(const DTensor& x, Scalar y) {
  CheckDefined("float_power", x);
  return pow(Cast(x, DType::kF64), Scalar(y.d));
}
DTensor float_power(Scalar x, const DTensor& y) {
  CheckDefined("float_power", y);
  return pow(Scalar(x.d), Cast(y, DType::kF64));
}
DTensor ldexp(const DTensor& x, const DTensor& exponent) {
  CheckDefined("ldexp", x);
  CheckDefined("ldexp", exponent);
  const DType t = x.dtype();
  if (!IsFloating(t) || IsFloating(exponent.dtype())) return mul(x, pow(Scalar(2.0), exponent));
  // Whole exponents leave x's dtype as it is. In two steps: a power may be out of range where the
  // product is not.
  const DType wide = ComputeType(t);
  const DTensor all = Cast(exponent, wide), half = floor(mul(all, 0.5));
  const DTensor y = mul(Cast(x, wide), pow(Scalar(2.0), half));
  return Cast(mul(y, pow(Scalar(2.0), sub(all, half))), t);
}
DTensor deg2rad(const DTensor& x) { return mul(x, M_PI / 180); }
DTensor rad2deg(const DTensor& x) { return mul(x, 180 / M_PI); }
DTensor logit(const DTensor& x, std::optional<double> eps) {
  DT_OP(logit);
  CheckDefined("logit", x);
  const Attr attrs[] = {FloatAttr(eps.value_or(-1))};
  return Apply(op, x, AsFloat(x.dtype()), attrs);
}
DTensor polygamma(int64_t n, const DTensor& x) {
  DT_OP(polygamma);
  CheckDefined("polygamma", x);
  if (n < 0) {
    ThrowInvalid("polygamma", absl::StrCat("n is ", n, "; there are derivatives from 0 on"),
                 {{"x", x}});
  }
  // n! is infinite long before: of more only whether it is even counts, and n + 1 is a number.
  constexpr int64_t kMany = int64_t{1} << 40;
  const Attr attrs[] = {IntAttr(n < kMany ? n : kMany + n % 2)};
  return Apply(op, x, AsFloat(x.dtype()), attrs);
}

// --- bounds
static DTensor ClampTo(const char* name, const DTensor& x, std::optional<Scalar> min,
                       std::optional<Scalar> max) {
  DT_OP(clamp);
  CheckDefined(name, x);
  if (!min && !max) ThrowInvalid(name, "one of min and max must be given", {{"x", x}});
  const bool floating = (min && min->is_float) || (max && max->is_float);
  const DType t = TypeWith(name, x, floating ? Scalar(0.0) : Scalar(0));
  // int64 holds every whole number that there is.
  if (t == DType::kU8 || t == DType::kI32) {
    const auto [least, past] = RangeOf(t);
    const char* wrong = min && min->d >= past   ? "min is above"
                        : max && max->d < least ? "max is below"
                                                : nullptr;
    if (wrong != nullptr) {
      ThrowInvalid(name, absl::StrCat(wrong, " all that ", TypeName(t), " holds"), {{"x", x}});
    }
  }
  const auto bound = [&](const std::optional<Scalar>& s, double end, int64_t whole_end) {
    if (!s) return IsFloating(t) ? FloatAttr(end) : IntAttr(whole_end);
    return NumberAttr(*s);
  };
  const Attr attrs[] = {bound(min, -HUGE_VAL, INT64_MIN), bound(max, HUGE_VAL, INT64_MAX)};
  return Apply(op, x, t, attrs);
}
DTensor clamp(const DTensor& x, std::optional<Scalar> min, std::optional<Scalar> max) {
  return ClampTo("clamp", x, min, max);
}
DTensor clamp_min(const DTensor& x, Scalar min) { return ClampTo("clamp_min", x, min, {}); }
DTensor clamp_max(const DTensor& x, Scalar max) { return ClampTo("clamp_max", x, {}, max); }
DTensor clamp_min(const DTensor& x, const DTensor& min) {
  DT_OP(clamp_min);
  return Apply(op, x, min, BothTypes("clamp_min", x, min));
}
DTensor clamp_max(const DTensor& x, const DTensor& max) {
  DT_OP(clamp_max);
  return Apply(op, x, max, BothTypes("clamp_max", x, max));
}
DTensor clamp(const DTensor& x, const DTensor& min, const DTensor& max) {
  return AsOp("clamp", {{"x", x}, {"min", min, true}, {"max", max, true}}, [&] {
    if (!min.defined() && !max.defined()) {
      ThrowInvalid("clamp", "one of min and max must be given");
    }
    if (!min.defined()) return clamp_max(x, max);
    if (!max.defined()) return clamp_min(x, min);
    DT_OP(clamp_both);
    return Apply(op, x, min, max, AllTypes("clamp", {&x, &min, &max}));
  });
}

static double LargestOf(DType t) {
  return t == DType::kF64    ? DBL_MAX
         : t == DType::kF16  ? 65504
         : t == DType::kBF16 ? 0x1.FEp127
                             : static_cast<double>(FLT_MAX);
}
DTensor nan_to_num(const DTensor& x, std::optional<double> nan, std::optional<double> posinf,
                   std::optional<double> neginf) {
  DT_OP(nan_to_num);
  CheckDefined("nan_to_num", x);
  const double largest = LargestOf(x.dtype());
  const Attr attrs[] = {FloatAttr(nan.value_or(0)), FloatAttr(posinf.value_or(largest)),
                        FloatAttr(neginf.value_or(-largest))};
  return Apply(op, x, x.dtype(), attrs);
}

// --- of three tensors
DTensor lerp(const DTensor& x, const DTensor& end, const DTensor& weight) {
  DT_OP(lerp);
  return Apply(op, x, end, weight, AsFloat(AllTypes("lerp", {&x, &end, &weight})));
}
DTensor lerp(const DTensor& x, const DTensor& end, double weight) {
  DT_OP(lerp_scalar);
  const Attr attrs[] = {FloatAttr(weight)};
  return Apply(op, x, end, AsFloat(BothTypes("lerp", x, end)), attrs);
}
DTensor addcmul(const DTensor& x, const DTensor& y, const DTensor& z, Scalar value) {
  DT_OP(addcmul);
  const DType t = AllTypes("addcmul", {&x, &y, &z});
  CheckFactor("addcmul", "value", t, value, {{"x", x}, {"y", y}, {"z", z}});
  const Attr attrs[] = {NumberAttr(value), DTypeAttr(y.dtype()), DTypeAttr(z.dtype())};
  return Apply(op, x, y, z, t, attrs);
}
DTensor addcdiv(const DTensor& x, const DTensor& y, const DTensor& z, Scalar value) {
  DT_OP(addcdiv);
  const DType t = AllTypes("addcdiv", {&x, &y, &z});
  if (!IsFloating(t)) {
    ThrowInvalid("addcdiv", "a quotient of integers is no integer; convert one with to() first",
                 {{"x", x}, {"y", y}, {"z", z}});
  }
  const Attr attrs[] = {NumberAttr(value), DTypeAttr(y.dtype()), DTypeAttr(z.dtype())};
  return Apply(op, x, y, z, t, attrs);
}

DTensor fill(const DTensor& x, const DTensor& value) {
  return AsOp("fill", {{"x", x}, {"value", value}}, [&] {
    if (value.ndim() != 0) ThrowInvalid("fill", "value must have no dims");
    return copy_(empty_like(x), Cast(value, x.dtype()));
  });
}
DTensor fill(const DTensor& x, Scalar value) {
  CheckDefined("fill", x);
  RequireHolds("fill", x.dtype(), value, {{"x", x}});
  return fill(x, NumberLike("fill", x, value, x.dtype()));
}

}  // namespace dtensor
