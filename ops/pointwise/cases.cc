#include "dtensor/ops/cases.h"

#include "absl/strings/str_cat.h"

namespace dtensor {
namespace {

struct Domain {
  Domain(double low, double high) : low(low), high(high) {}
  double low, high;
};

// "self[...]@-3..3"
std::string Operand(const char* name, Domain d) {
  return absl::StrCat(name, "[...]@", d.low, "..", d.high);
}
OpCase OfOne(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  return {name, Operand("self", d), call};
}
std::string Operands(Domain d) {
  return absl::StrCat(Operand("self", d), " ", Operand("other", d));
}
OpCase OfTwo(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  return {name, Operands(d), call};
}
OpCase OfGradient(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  return {name, Operands(d), call, kNoGradient};
}
OpCase OfIntegers(const char* name, Domain, Values (*call)(CaseArgs&)) {
  return {name, "self[...]:int64<9 other[...]:int64<9", call};
}
OpCase WithNumbers(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  return {name,
          absl::StrCat(Operands(d), " | ", Operand("self", d), " other=1.5 | self=1.25 ",
                       Operand("other", d)),
          call};
}
OpCase WithIntegers(const char* name, Domain, Values (*call)(CaseArgs&)) {
  return {name,
          "self[...]:int64<9 other[...]:int64<9 | self[...]:int64<9 other=3 | "
          "self=5 other[...]:int64<9",
          call};
}
OpCase Comparison(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  OpCase c = OfTwo(name, d, call);
  absl::StrAppend(&c.samples, " | ", Operand("self", d), " other=0.5");
  return c;
}

using Binary = DTensor (*)(const DTensor&, const DTensor&);
using WithNumber = DTensor (*)(const DTensor&, Scalar);
using OfNumber = DTensor (*)(Scalar, const DTensor&);

// A tensor or a number on the right, and on the left where the function takes that.
DTensor Either(CaseArgs& a, Binary both, WithNumber number, OfNumber left = nullptr) {
  if (a.TensorAt(0) && a.TensorAt(1)) return both(a.At(0), a.At(1));
  if (a.TensorAt(0)) return number(a.At(0), a.Number(a.NameAt(1)));
  if (left == nullptr) a.LeaveOut(absl::StrCat(a.NameAt(0), " is a number"));
  return left(a.Number(a.NameAt(0)), a.At(1));
}

using Sum = DTensor (*)(const DTensor&, const DTensor&, Scalar);
using SumWithNumber = DTensor (*)(const DTensor&, Scalar, Scalar);
DTensor AddOrSub(CaseArgs& a, Sum both, SumWithNumber number, const char* x, const char* y) {
  const Scalar alpha = a.Has("alpha") ? a.Number("alpha") : Scalar(1);
  if (a.IsTensor(y)) return both(a.T(x), a.T(y), alpha);
  return number(a.T(x), a.Number(y), alpha);
}

DTensor Divided(CaseArgs& a) {
  if (!a.Has("rounding_mode")) return Either(a, div, div, div);
  const std::string mode = a.Text("rounding_mode");
  if (!a.TensorAt(0)) a.LeaveOut(absl::StrCat(a.NameAt(0), " is a number"));
  return a.TensorAt(1) ? div(a.At(0), a.At(1), mode) : div(a.At(0), a.Number(a.NameAt(1)), mode);
}

// What is absent, or null.
std::optional<Scalar> Bound(CaseArgs& a, const char* name) {
  if (!a.Has(name)) return std::nullopt;
  return a.Number(name);
}
std::optional<double> Real(CaseArgs& a, const char* name) {
  if (!a.Has(name)) return std::nullopt;
  return a.Float(name);
}
DTensor Clamp(CaseArgs& a) {
  if (!a.IsTensor("min") && !a.IsTensor("max")) {
    return clamp(a.T("self"), Bound(a, "min"), Bound(a, "max"));
  }
  return clamp(a.T("self"), a.Optional("min"), a.Optional("max"));
}
Scalar One(CaseArgs& a, const char* name) { return a.Has(name) ? a.Number(name) : Scalar(1); }
using OfThree = DTensor (*)(const DTensor&, const DTensor&, const DTensor&, Scalar);
DTensor Added(CaseArgs& a, OfThree fn) { return fn(a.At(0), a.At(1), a.At(2), One(a, "value")); }

DTensor Where(CaseArgs& a) {
  const DTensor c = a.T("condition");
  if (a.IsTensor("self") && a.IsTensor("other")) return where(c, a.T("self"), a.T("other"));
  if (a.IsTensor("self")) return where(c, a.T("self"), a.Number("other"));
  if (!a.IsTensor("other")) return where(c, a.Number("self"), a.Number("other"));
  return where(c, a.Number("self"), a.T("other"));
}

DTensor MaskedFill(CaseArgs& a) {
  const DTensor x = a.T("self"), mask = a.T("mask");
  if (a.IsTensor("value")) return masked_fill(x, mask, a.T("value"));
  return masked_fill(x, mask, a.Number("value"));
}

// In place. Of a copy that has a history, unless the call is told to write.
DTensor InPlace(CaseArgs& a, Binary tensor, WithNumber number) {
  const DTensor x = a.Written("self");
  return a.IsTensor("other") ? tensor(x, a.T("other")) : number(x, a.Number("other"));
}
DTensor AddInto(const DTensor& x, const DTensor& y) { return add_(x, y, 2); }
DTensor SubInto(const DTensor& x, const DTensor& y) { return sub_(x, y, 2); }

// Functions by hand, beyond arithmetic.
void AddMore(CaseTable* table) {
  table->Add({
      DT_CASE(float_power,
              "self[...]@0.5..2 exponent[...]@0.5..2 | self[...]@0.5..2 exponent=3 | "
              "self=1.5 exponent[...]@0.5..2",
              Either(a, float_power, float_power, float_power)),
      DT_CASE(ldexp, "self[...] other[...]", ldexp(a.At(0), a.At(1))),
      DT_CASE(square, "self[...]", square(a.At(0))),
      DT_CASE(positive, "self[...]", positive(a.At(0))),
      DT_CASE(sgn, "self[...]", sgn(a.At(0))),
      DT_CASE(deg2rad, "self[...]", deg2rad(a.At(0))),
      DT_CASE(rad2deg, "self[...]", rad2deg(a.At(0))),
      DT_CASE(bitwise_not, "self[...]:int64<9 | self[...]:bool", bitwise_not(a.At(0))),
      DT_CASE(round, "self[...] | self[...] decimals=2 | self[...] decimals=-1",
              round(a.T("self"), a.Int("decimals"))),
      DT_CASE_IS(kNoGradient, heaviside, "self[...] values[...]",
                 heaviside(a.T("self"), a.T("values"))),
      DT_CASE(nextafter, "self[...] other[...]", nextafter(a.At(0), a.At(1))),
      DT_CASE(isclose, "self[...] other[...] rtol=0.5 | self[...] other[...] equal_nan=true",
              isclose(a.At(0), a.At(1), a.Float("rtol", 1e-5), a.Float("atol", 1e-8),
                      a.Bool("equal_nan"))),
      DT_CASE(clamp,
              "self[...] min=-0.5 max=0.75 | self[...] min=0.25 | self[...] max=0.5 | "
              "self[...] min[...]@-1..-0.1 max[...]@0.1..1 | self[...] max[...]",
              Clamp(a)),
      DT_CASE(clamp_min, "self[...] min=0.25 | self[...] min[...]",
              a.IsTensor("min") ? clamp_min(a.T("self"), a.T("min"))
                                : clamp_min(a.T("self"), a.Number("min"))),
      DT_CASE(clamp_max, "self[...] max=0.25 | self[...] max[...]",
              a.IsTensor("max") ? clamp_max(a.T("self"), a.T("max"))
                                : clamp_max(a.T("self"), a.Number("max"))),
      DT_CASE(nan_to_num, "self[...] | self[...] nan=1.5 posinf=2.5 neginf=-1.5",
              nan_to_num(a.T("self"), Real(a, "nan"), Real(a, "posinf"), Real(a, "neginf"))),
      DT_CASE(lerp,
              "self[...] end[...] weight=0.25 | self[...] end[...] weight=1.5 | "
              "self[...] end[...] weight[...]@0.1..0.9",
              a.IsTensor("weight") ? lerp(a.T("self"), a.T("end"), a.T("weight"))
                                   : lerp(a.T("self"), a.T("end"), a.Float("weight"))),
      DT_CASE(addcmul, "self[...] tensor1[...] tensor2[...] value=1.5 | self[...] x[...] y[...]",
              Added(a, addcmul)),
      DT_CASE(addcdiv,
              "self[...] tensor1[...] tensor2[...]@0.5..3 value=1.5 | self[...] x[...] y[...]@1..3",
              Added(a, addcdiv)),
      DT_CASE(fill, "self[...]~ value=1.5 | self[...]~ value[]",
              a.IsTensor("value") ? fill(a.T("self"), a.T("value"))
                                  : fill(a.T("self"), a.Number("value"))),
      DT_CASE(logit, "self[...]@0.1..0.9 | self[...]@0.1..0.9 eps=0.05",
              logit(a.T("self"), Real(a, "eps"))),
      DT_CASE(polygamma, "n=1 self[...]@0.5..3 | n=2 self[...]@0.5..3",
              polygamma(a.Int("n"), a.T("self"))),
      DT_CASE(softplus, "self[...] | self[...] beta=2 threshold=0.5",
              softplus(a.At(0), a.Float("beta", 1), a.Float("threshold", 20))),
      DT_CASE(leaky_relu, "input[...]@0.1..2 | input[...]@-2..-0.1 negative_slope=0.25",
              leaky_relu(a.At(0), a.Float("negative_slope", 0.01))),
      DT_CASE(elu, "input[...]@0.1..2 | input[...]@-2..-0.1 alpha=0.75",
              elu(a.At(0), a.Float("alpha", 1))),
      DT_CASE(selu, "input[...]@-2..-0.1", selu(a.At(0))),
      DT_CASE(celu, "input[...]@-2..-0.1 alpha=0.75", celu(a.At(0), a.Float("alpha", 1))),
      DT_CASE(hardtanh, "input[...] | input[...] min_val=-0.5 max_val=0.25",
              hardtanh(a.At(0), a.Has("min_val") ? a.Number("min_val") : Scalar(-1),
                       One(a, "max_val"))),
      DT_CASE(relu6, "input[...]@0.1..2", relu6(a.At(0))),
      DT_CASE(softshrink, "self[...]@0.6..2 | self[...]@-2..-0.3 lambd=0.25",
              softshrink(a.At(0), a.Float("lambd", 0.5))),
      DT_CASE(hardshrink, "self[...]@0.6..2 | self[...]@-2..-0.3 lambd=0.25",
              hardshrink(a.At(0), a.Float("lambd", 0.5))),
      DT_CASE(threshold, "input[...] threshold=0.25 value=-1.5 | input[...] threshold=-2 value=3",
              threshold(a.At(0), a.Number("threshold"), a.Number("value"))),
      DT_CASE(prelu, "self[a,b]@0.1..2 weight[b] | self[a,b,c]@-2..-0.1 weight[]",
              prelu(a.T("self"), a.T("weight"))),
      DT_CASE(glu, "input[a,2b] | input[2a,b] dim=0", glu(a.At(0), a.Int("dim", -1))),
      DT_CASE(polygamma_, "self[...]@0.5..3 n=1", polygamma_(a.Written("self"), a.Int("n"))),
  });
}

}  // namespace

// Functions that elementwise.inc makes have their cases from there.
void AddPointwiseCases(CaseTable* table) {
#define DT_CASE_Hidden(name, domain)
#define DT_CASE_Real(name, domain) \
  OfOne(#name, domain, [](CaseArgs& a) -> Values { return {name(a.At(0))}; }),
#define DT_CASE_Same DT_CASE_Real
#define DT_CASE_NotBool DT_CASE_Real
#define DT_CASE_Two(name, domain) \
  OfTwo(#name, domain, [](CaseArgs& a) -> Values { return {name(a.At(0), a.At(1))}; }),
#define DT_CASE_TwoReal DT_CASE_Two
#define DT_CASE_TwoInt(name, domain) \
  OfIntegers(#name, domain, [](CaseArgs& a) -> Values { return {name(a.At(0), a.At(1))}; }),
#define DT_CASE_Backward(name, domain) \
  OfGradient(#name, domain, [](CaseArgs& a) -> Values { return {name(a.At(0), a.At(1))}; }),
#define DT_CASE_Mixed(name, domain) \
  WithNumbers(#name, domain, [](CaseArgs& a) -> Values { return {Either(a, name, name, name)}; }),
#define DT_CASE_MixedReal DT_CASE_Mixed
#define DT_CASE_MixedInt(name, domain) \
  WithIntegers(#name, domain, [](CaseArgs& a) -> Values { return {Either(a, name, name, name)}; }),
#define DT_CASE_Compared(name, domain) \
  Comparison(#name, domain, [](CaseArgs& a) -> Values { return {Either(a, name, name)}; }),
#define DT_POINTWISE(kind, user, name, sig, types, decl, kernel, saves, grad, domain) \
  DT_CASE_##user(name, domain)
  table->Add({
#include "dtensor/ops/pointwise/elementwise.inc"
  });
  table->Add({
      DT_CASE(add,
              "self[...] other[...] alpha=2 | self[...] other[...] | self[...] other=1.5 | "
              "self[...] other=2 alpha=3 | self=2 other[...] alpha=3",
              a.IsTensor("self") ? AddOrSub(a, add, add, "self", "other")
                                 : add(a.Number("self"), a.T("other"), One(a, "alpha"))),
      DT_CASE(sub,
              "self[...] other[...] alpha=2 | self[...] other[...] | self[...] other=1.5 | "
              "self[...] other=2 alpha=3",
              a.IsTensor("self") ? AddOrSub(a, sub, sub, "self", "other")
                                 : sub(a.Number("self"), a.T("other"))),
      DT_CASE(rsub, "self[...] other[...] | self[...] other=1.5 | self[...] other=1.5 alpha=2",
              AddOrSub(a, rsub, rsub, "self", "other")),
      DT_CASE(mul, "self[...] other[...] | self[...] other=-1.5 | self[...] other=2",
              Either(a, mul, mul, [](Scalar x, const DTensor& y) { return mul(y, x); })),
      DT_CASE(div,
              "self[...] other[...]@0.5..3 | self[...] other=-1.5 | self=2 other[...]@0.5..3 | "
              "self[...] other[...]@0.5..3 rounding_mode=trunc | "
              "self[...] other=-1.5 rounding_mode=floor",
              Divided(a)),
      DT_CASE(true_divide, "self[...] other[...]@0.5..3 | self[...] other=2",
              Either(a, true_divide, true_divide, div)),
      DT_CASE(pow,
              "self[...]@0.5..2 exponent[...]@0.5..2 | self[...]@0.5..2 exponent=3 | "
              "self=1.5 exponent[...]@0.5..2 | self[...]@0.5..2 exponent=-0.5",
              Either(a, pow, pow, pow)),
      DT_CASE(gelu, "self[...]@-3..3 | self[...]@-3..3 approximate=tanh",
              gelu(a.T("self"), a.TextOr("approximate", "none") == "tanh")),
      DT_CASE_IS(kNoGradient, gelu_backward,
                 "dy[...] x[...]@-3..3 approx_tanh=true | dy[...] x[...]@-3..3",
                 gelu_backward(a.T("dy"), a.T("x"), a.Bool("approx_tanh"))),
      DT_CASE_IS(kNoGradient, maximum_backward, "dy[...] x[...] y[...]",
                 maximum_backward(a.T("dy"), a.T("x"), a.T("y"))),
      DT_CASE(
          where,
          "condition[...]:bool self[...] other[...] | condition[...]:bool self[...] other=1.5 | "
          "condition[...]:bool other[...] self=0 | condition[...]:bool self=1.5 other=0",
          Where(a)),
      DT_CASE(masked_fill,
              "self[...] mask[...]:bool value=0 | self[...] mask[...]:bool value=1.5 | "
              "self[a,b] mask[b]:bool value[]",
              MaskedFill(a)),
      DT_CASE(dropout_apply, "x[...] mask[...]:bool scale=2.0",
              dropout_apply(a.T("x"), a.T("mask"), a.Float("scale"))),
      DT_CASE(copy_, "self[a,b] src[b] | self[a,b] src[a,b] | self[...] src[...]",
              copy_(a.Written("self"), a.T("src"))),
      DT_CASE(zero_, "self[...]", zero_(a.Written("self"))),
      DT_CASE(add_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, AddInto, [](const DTensor& x, Scalar y) { return add_(x, y); })),
      DT_CASE(sub_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, SubInto, sub_)),
      DT_CASE(mul_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, mul_, mul_)),
      // Where `other` wants a gradient another op does it.
      DT_CASE(div_,
              "self[...] other[...]@0.5..3 | self[a,b] other[b]~@0.5..3 | self[...] other=1.5",
              InPlace(a, div_, div_)),
  });
  AddMore(table);
  table->Judge({{"copy_", {{{I({5, 3}), I({5, 1})}}}}});
}

}  // namespace dtensor
