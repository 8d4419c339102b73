#include "dtensor/ops/pointwise/pointwise.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

using pointwise::NumberAs;

namespace {

bool ZeroValue(const OpCall& call) { return call.Float("value") == 0; }

// --- when a pending maximum or minimum passes. Integers wrap, and where a rank has nothing its
// term is the least or greatest of them: sums and products of integers are never monotone. Of
// floats it is an infinity, which finite numbers leave where it is.

bool Floats(const OpCall& call, ReduceOp) { return IsFloating(call.dtype(0)); }
bool Integers(const OpCall& call, ReduceOp) { return !IsFloating(call.dtype(0)); }
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

// fmax and fmin, where a NaN loses: of integers they are maximum and minimum.
bool IntegerMaxima(const OpCall& call, ReduceOp pending) {
  return Integers(call, pending) && Maxima(call, pending);
}
bool IntegerMinima(const OpCall& call, ReduceOp pending) {
  return Integers(call, pending) && Minima(call, pending);
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

// dy and x, with the numbers that the op took, to the op that gives the gradient.
template <class... Numbers>
DTensor Helper(const char* name, const DTensor& g, const DTensor& x, Numbers... numbers) {
  const DTensor* inputs[] = {&g, &x};
  return Call1(GetOp(name), inputs, {FloatAttr(static_cast<double>(numbers))...});
}
DTensor fmax_backward(const DTensor& g, const DTensor& x, const DTensor& y, bool first) {
  const DTensor* inputs[] = {&g, &x, &y};
  return Call1(GetOp("fmax_backward"), inputs, {BoolAttr(first)});
}
// The parts of g that go to x, lo and hi of clamp_both. Where x is one of two bounds that differ
// each gets half; where all are one number x gets it whole, and what lies outside goes to the bound
// that is the result. As in torch, x keeps g next to a NaN, and hi has g of a NaN in x if it is
// below lo.
DTensor clamp_both_x(const DTensor& g, const VjpCall& c) {
  const DTensor &x = c.in(0), &lo = c.in(1), &hi = c.in(2);
  const DTensor shared = logical_and(lt(lo, hi), logical_or(eq(x, lo), eq(x, hi)));
  return masked_fill(where(shared, mul(g, 0.5), g), logical_or(lt(x, lo), gt(x, hi)), 0);
}
DTensor clamp_both_lo(const DTensor& g, const VjpCall& c) {
  const DTensor &x = c.in(0), &lo = c.in(1), &hi = c.in(2);
  const DTensor half = where(logical_and(eq(x, lo), lt(lo, hi)), mul(g, 0.5), 0);
  return where(logical_and(lt(x, lo), le(lo, hi)), g, half);
}
DTensor clamp_both_hi(const DTensor& g, const VjpCall& c) {
  const DTensor &x = c.in(0), &lo = c.in(1), &hi = c.in(2);
  const DTensor half = where(logical_and(eq(x, hi), lt(lo, hi)), mul(g, 0.5), 0);
  return where(logical_or(lt(hi, lo), logical_and(gt(x, hi), le(lo, hi))), g, half);
}
// Input i in the dtype that it had when the function was called.
DTensor Before(const VjpCall& c, int i, absl::string_view type) {
  const auto t = static_cast<DType>(c.Int(type));
  return IsFloating(t) && SizeOf(t) < SizeOf(c.in(i).dtype()) ? to(c.in(i), t) : c.in(i);
}
// At the origin, where there is no slope, 0 as in PyTorch.
DTensor OverSquares(const VjpCall& c) {
  const DTensor squares = add(mul(c.in(0), c.in(0)), mul(c.in(1), c.in(1)));
  return masked_fill(reciprocal(squares), eq(squares, 0), 0);
}
DTensor SoftsignBase(const VjpCall& c) { return add(abs(c.in(0)), 1); }

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

enum class Kind { Unary, Binary, Quotient, Ternary, Compare1, Compare2, MaskFill, Where };

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

}  // namespace

void RegisterPointwiseOps() {
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, vjp, domain) \
  Finish(Op(sig) decl, Kind::kind, FactorsOf(Kind::kind), Vjp_##name, saves, #vjp);
#include "dtensor/ops/pointwise/elementwise.inc"
  Op("copy_(x, y)")
      .Factors("..., ... -> ...")
      .Linear("y")
      .Monotone("x & y")
      .Pointwise()
      .InPlace()
      .Vjp(CopyVjp);
}

std::vector<PointwiseCase> PointwiseCases() {
  std::vector<PointwiseCase> cases;
  const auto add = [&cases](const char* name, Kind kind, const char* gradient, Domain d) {
    const int mask = kind == Kind::Where ? 0 : kind == Kind::MaskFill ? 1 : -1;
    cases.push_back({name, InputsOf(kind), mask, Given(gradient),
                     kind == Kind::Compare1 || kind == Kind::Compare2, kind == Kind::Quotient, d.lo,
                     d.hi});
  };
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, vjp, domain) \
  add(#name, Kind::kind, #vjp, domain);
#include "dtensor/ops/pointwise/elementwise.inc"
  return cases;
}

}  // namespace dtensor
