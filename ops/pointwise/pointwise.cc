#include "dtensor/ops/pointwise/pointwise.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

bool ZeroValue(const OpCall& call) { return call.Float("value") == 0; }

// --- when a pending maximum or minimum passes. Integers wrap, and where a rank has nothing its
// term is the least or greatest of them: sums and products of integers are never monotone. Of
// floats it is an infinity, which finite numbers leave where it is.

bool Floats(const OpCall& call, ReduceOp) { return IsFloating(call.dtype(0)); }
bool Maxima(const OpCall&, ReduceOp pending) { return pending == ReduceOp::kMax; }
bool Minima(const OpCall&, ReduceOp pending) { return pending == ReduceOp::kMin; }
// Of comparisons: NaN passes a maximum and a minimum, but is neither less nor more. Integers have
// none.
bool MaximaOrIntegers(const OpCall& call, ReduceOp pending) {
  return Maxima(call, pending) || !Floats(call, pending);
}
bool MinimaOrIntegers(const OpCall& call, ReduceOp pending) {
  return Minima(call, pending) || !Floats(call, pending);
}

// A number as a kernel of dtype t takes it.
double NumberAs(DType t, double s) {
  if (t == DType::kF64) return s;
  if (t == DType::kF16) return std::fabs(s) >= 65520 ? HUGE_VAL : std::fabs(s) < 6e-8 ? 0 : s;
  return static_cast<float>(s);
}
bool FiniteNumber(const OpCall& call, ReduceOp) {
  return IsFloating(call.dtype(0)) && std::isfinite(NumberAs(call.dtype(0), call.Float("s")));
}
bool PositiveNumber(const OpCall& call, ReduceOp pending) {
  return FiniteNumber(call, pending) && NumberAs(call.dtype(0), call.Float("s")) > 0;
}
bool NegativeNumber(const OpCall& call, ReduceOp pending) {
  return FiniteNumber(call, pending) && NumberAs(call.dtype(0), call.Float("s")) < 0;
}

// The gradient of a broadcast input is summed to its shape.
DTensor Fit(DTensor g, const Spec& input) {
  if (g.shape() == input.shape()) return g;
  return sum_to(g, input.shape());
}

DTensor Scaled(const DTensor& g, const VjpCall& c, absl::string_view attr) {
  const double factor = c.Float(attr);
  return factor == 1 ? g : mul(g, factor);
}

DTensor Ternary(const char* name, const DTensor& a, const DTensor& b, const DTensor& c) {
  const DTensor* inputs[] = {&a, &b, &c};
  return Call1(GetOp(name), inputs);
}

// dy * (out * log(x)), where 0^y counts as constant for y >= 0 (torch's convention).
DTensor pow_backward_exponent(const DTensor& g, const DTensor& x, const DTensor& out) {
  return Ternary("pow_backward_log", g, x, out);
}
DTensor pow_backward_base(const DTensor& g, const DTensor& x, const DTensor& y) {
  return Ternary("pow_backward_base", g, x, y);
}
DTensor pow_scalar_backward(const DTensor& g, const DTensor& x, double s) {
  const DTensor* inputs[] = {&g, &x};
  return Call1(GetOp("pow_scalar_backward"), inputs, {FloatAttr(s)});
}
DTensor rpow_scalar_backward(const DTensor& g, const DTensor& y, const DTensor& out, double s) {
  const DTensor d = mul(out, std::log(s));
  return mul(g, s == 0 ? masked_fill(d, ge(y, 0), 0) : d);
}

#define DX(i, e) \
  if (c.needs(i)) c.set(i, Fit((e), c.in_spec(i)));
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, vjp, domain) \
  [[maybe_unused]] void Vjp_##name(VjpCall& c) {                                     \
    [[maybe_unused]] const DTensor& g = c.grad();                                    \
    vjp;                                                                             \
  }
#include "dtensor/ops/pointwise/elementwise.inc"
#undef DX

struct Domain {
  Domain(double low, double high) : lo(low), hi(high) {}
  double lo, hi;
};

DType SecondInput(const OpCall& call) { return call.dtype(1); }

absl::Status BoolInput(const OpCall& call, int input) {
  if (call.dtype(input) == DType::kBool) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(call.op().InputName(input), " must be bool"));
}
// From input `first` on.
absl::Status SameTypes(const OpCall& call, int first) {
  for (int i = first + 1; i < call.num_inputs(); ++i) {
    if (call.dtype(i) != call.dtype(first)) {
      return absl::InvalidArgumentError("operands have different dtypes; convert them with to()");
    }
  }
  return absl::OkStatus();
}

// All operands but the mask have one dtype: the front end promotes them, Dispatch does not.
absl::Status CheckTypes(const OpCall& call) { return SameTypes(call, 0); }
absl::Status CheckWhere(const OpCall& call) {
  const absl::Status cond = BoolInput(call, 0);
  return cond.ok() ? SameTypes(call, 1) : cond;
}
absl::Status CheckMask(const OpCall& call) { return BoolInput(call, 1); }

enum class Kind { Unary, Binary, Ternary, Compare1, Compare2, MaskFill, Where };

// An empty column reads "DT_NONE" as text.
bool Given(const char* column) { return absl::string_view(column) != "DT_NONE"; }

void Finish(OpDef& op, Kind kind, const char* factors, VjpFn vjp, const char* saves,
            const char* gradient) {
  op.Factors(factors).Pointwise();
  const bool compares = kind == Kind::Compare1 || kind == Kind::Compare2;
  if (compares) op.OutDType(DType::kBool);
  if (kind == Kind::Where) {
    op.OutDType([](const OpCall& call, int) { return SecondInput(call); });
    op.Check(CheckWhere);
  } else if (kind == Kind::MaskFill) {
    op.Check(CheckMask);
  } else {
    op.Check(CheckTypes);
  }
  if (Given(gradient)) op.Vjp(vjp, saves);
}

constexpr const char* FactorsOf(Kind kind) {
  switch (kind) {
    case Kind::Unary:
    case Kind::Compare1:
      return "... -> ...";
    case Kind::Ternary:
    case Kind::Where:
      return "..., ..., ... -> ...";
    default:
      return "..., ... -> ...";
  }
}

int InputsOf(Kind kind) {
  return kind == Kind::Unary || kind == Kind::Compare1  ? 1
         : kind == Kind::Ternary || kind == Kind::Where ? 3
                                                        : 2;
}

void CopyVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, zeros_like(c.grad()));
  if (c.needs(1)) c.set(1, Fit(to(c.grad(), c.in_spec(1).dtype()), c.in_spec(1)));
}

// --- front ends --------------------------------------------------------------------------------

void CheckDefined(const char* name, const DTensor& t) {
  if (t.defined()) return;
  Throw(InFunction(name, absl::InvalidArgumentError("an input is null")));
}

int Category(DType t) { return IsFloating(t) ? 2 : t == DType::kBool ? 0 : 1; }

// torch.result_type: a tensor without dims counts less than one with dims unless its category is
// higher.
DType ResultType(const DTensor& x, const DTensor& y) {
  const DType a = x.dtype(), b = y.dtype();
  if (a == b) return a;
  const bool a_dims = x.ndim() > 0, b_dims = y.ndim() > 0;
  if (a_dims == b_dims) return PromoteTypes(a, b);
  const DType strong = a_dims ? a : b, weak = a_dims ? b : a;
  return Category(weak) > Category(strong) ? PromoteTypes(a, b) : strong;
}
DType ResultType(const DTensor& x, const Scalar& s) {
  const DType t = x.dtype();
  if (s.is_float && !IsFloating(t)) return DType::kF32;
  if (!s.is_float && t == DType::kBool) return DType::kI64;
  return t;
}
DType AsFloat(DType t) { return IsFloating(t) ? t : DType::kF32; }

Attr NumberAttr(const Scalar& s) { return s.is_float ? FloatAttr(s.d) : IntAttr(s.i); }

DTensor Cast(const DTensor& x, DType t) { return x.dtype() == t ? x : to(x, t); }

DTensor Apply(const OpDef& op, const DTensor& x, const DTensor& y, DType t,
              absl::Span<const Attr> attrs = {}) {
  if (x.dtype() == t && y.dtype() == t) {
    const DTensor* inputs[] = {&x, &y};
    return Call1(op, inputs, attrs);
  }
  const DTensor a = Cast(x, t), b = Cast(y, t);
  const DTensor* inputs[] = {&a, &b};
  return Call1(op, inputs, attrs);
}
DTensor Apply(const OpDef& op, const DTensor& x, DType t, absl::Span<const Attr> attrs = {}) {
  if (x.dtype() == t) {
    const DTensor* inputs[] = {&x};
    return Call1(op, inputs, attrs);
  }
  const DTensor a = Cast(x, t);
  const DTensor* inputs[] = {&a};
  return Call1(op, inputs, attrs);
}

DType BothTypes(const char* name, const DTensor& x, const DTensor& y) {
  CheckDefined(name, x);
  CheckDefined(name, y);
  return ResultType(x, y);
}
DType TypeWith(const char* name, const DTensor& x, const Scalar& s) {
  CheckDefined(name, x);
  return ResultType(x, s);
}

void RefuseBool(const char* name, DType t, const DTensor& x) {
  if (t != DType::kBool) return;
  ThrowInvalid(name, "is not defined for bool; use logical_not or eq", {{"x", x}});
}

// alpha must not change the dtype: a floating one needs floating tensors.
void CheckAlpha(const char* name, DType t, const Scalar& alpha, const DTensor& x,
                const DTensor& y) {
  if (!alpha.is_float || IsFloating(t)) return;
  ThrowInvalid(name, "alpha is a floating number, the tensors are integers", {{"x", x}, {"y", y}});
}

}  // namespace

void RegisterPointwiseOps() {
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, vjp, domain) \
  Finish(Op(sig) decl, Kind::kind, FactorsOf(Kind::kind), Vjp_##name, saves, #vjp);
#include "dtensor/ops/pointwise/elementwise.inc"
  Op("copy_(x, y)").Factors("..., ... -> ...").Linear("y").Pointwise().InPlace().Vjp(CopyVjp);
}

std::vector<PointwiseCase> PointwiseCases() {
  std::vector<PointwiseCase> cases;
  const auto add = [&cases](const char* name, Kind kind, const char* gradient, Domain d) {
    const int mask = kind == Kind::Where ? 0 : kind == Kind::MaskFill ? 1 : -1;
    cases.push_back({name, InputsOf(kind), mask, Given(gradient), d.lo, d.hi});
  };
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, vjp, domain) \
  add(#name, Kind::kind, #vjp, domain);
#include "dtensor/ops/pointwise/elementwise.inc"
  return cases;
}

#define DT_OP(name) static const OpDef& op = GetOp(#name)

DTensor add(const DTensor& x, const DTensor& y, Scalar alpha) {
  DT_OP(add);
  const DType t = BothTypes("add", x, y);
  CheckAlpha("add", t, alpha, x, y);
  const Attr attrs[] = {NumberAttr(alpha)};
  return Apply(op, x, y, t, attrs);
}
DTensor add(const DTensor& x, Scalar y, Scalar alpha) {
  DT_OP(add_scalar);
  const Scalar s = y.is_float || alpha.is_float ? Scalar(y.d * alpha.d) : Scalar(y.i * alpha.i);
  const DType t = TypeWith("add", x, s);
  const Attr attrs[] = {NumberAttr(s)};
  return Apply(op, x, t, attrs);
}
DTensor sub(const DTensor& x, const DTensor& y, Scalar alpha) {
  DT_OP(sub);
  const DType t = BothTypes("sub", x, y);
  RefuseBool("sub", t, x);
  CheckAlpha("sub", t, alpha, x, y);
  const Attr attrs[] = {NumberAttr(alpha)};
  return Apply(op, x, y, t, attrs);
}
DTensor sub(const DTensor& x, Scalar y, Scalar alpha) {
  return add(x, y.is_float ? Scalar(-y.d) : Scalar(-y.i), alpha);
}
DTensor sub(Scalar x, const DTensor& y) {
  DT_OP(rsub_scalar);
  const DType t = TypeWith("sub", y, x);
  const Attr attrs[] = {NumberAttr(x)};
  return Apply(op, y, t, attrs);
}
DTensor mul(const DTensor& x, const DTensor& y) {
  DT_OP(mul);
  return Apply(op, x, y, BothTypes("mul", x, y));
}
// The zeros of a pending sum stay zeros only under finite factors; t: the kernel's dtype.
static DTensor ReadyFor(double factor, DType t, const DTensor& x) {
  if (std::isfinite(NumberAs(t, factor)) || !x.defined() || !x.spec().has_partial()) return x;
  return x.Redistribute(WithoutPending(x.placements()));
}
DTensor mul(const DTensor& x, Scalar y) {
  DT_OP(mul_scalar);
  const DType t = TypeWith("mul", x, y);
  const Attr attrs[] = {NumberAttr(y)};
  return Apply(op, ReadyFor(y.d, t, x), t, attrs);
}
DTensor div(const DTensor& x, const DTensor& y) {
  DT_OP(div);
  return Apply(op, x, y, AsFloat(BothTypes("div", x, y)));
}
DTensor div(const DTensor& x, Scalar y) {
  DT_OP(div_scalar);
  const DType t = AsFloat(TypeWith("div", x, y));
  const Attr attrs[] = {NumberAttr(y)};
  return Apply(op, ReadyFor(1 / NumberAs(t, y.d), t, x), t, attrs);
}
DTensor div(Scalar x, const DTensor& y) {
  DT_OP(rdiv_scalar);
  const DType t = AsFloat(TypeWith("div", y, x));
  const Attr attrs[] = {NumberAttr(x)};
  return Apply(op, y, t, attrs);
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
  return Ternary("maximum_backward", dy, x, y);
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
  return masked_fill(a, logical_not(cond), y);
}
DTensor where(const DTensor& cond, Scalar x, const DTensor& y) {
  return masked_fill(Cast(y, TypeWith("where", y, x)), cond, x);
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
  if (value.is_float && !IsFloating(x.dtype())) {
    ThrowInvalid("masked_fill", "a floating value does not fit a tensor of integers",
                 {{"x", x}, {"mask", mask}});
  }
  const Attr attrs[] = {NumberAttr(value)};
  const DTensor* inputs[] = {&x, &mask};
  return Call1(op, inputs, attrs);
}

}  // namespace dtensor
