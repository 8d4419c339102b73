#include "dtensor/ops/cases.h"

#include "absl/strings/match.h"
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
OpCase OfTwo(const char* name, Domain d, Values (*call)(CaseArgs&)) {
  const bool gradient = absl::EndsWith(name, "_backward");  // has none of its own
  return {name, absl::StrCat(Operand("self", d), " ", Operand("other", d)), call,
          gradient ? kNoGradient : 0u};
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

DTensor ReversedSub(CaseArgs& a) {
  if (a.IsTensor("other")) return AddOrSub(a, sub, sub, "other", "self");
  if (a.Has("alpha")) a.LeaveOut("rsub of a number with alpha");
  return sub(a.Number("other"), a.T("self"));
}

DTensor Where(CaseArgs& a) {
  const DTensor c = a.T("condition");
  if (a.IsTensor("self") && a.IsTensor("other")) return where(c, a.T("self"), a.T("other"));
  if (a.IsTensor("self")) return where(c, a.T("self"), a.Number("other"));
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
              "self[...] other=2 alpha=3",
              AddOrSub(a, add, add, "self", "other")),
      DT_CASE(sub,
              "self[...] other[...] alpha=2 | self[...] other[...] | self[...] other=1.5 | "
              "self[...] other=2 alpha=3",
              AddOrSub(a, sub, sub, "self", "other")),
      DT_CASE(rsub, "self[...] other[...] | self[...] other=1.5", ReversedSub(a)),
      DT_CASE(mul, "self[...] other[...] | self[...] other=-1.5 | self[...] other=2",
              Either(a, mul, mul)),
      DT_CASE(div, "self[...] other[...]@0.5..3 | self[...] other=-1.5 | self=2 other[...]@0.5..3",
              Either(a, div, div, div)),
      DT_CASE(true_divide, "self[...] other[...]@0.5..3 | self[...] other=2", Either(a, div, div)),
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
          "condition[...]:bool other[...] self=0",
          Where(a)),
      DT_CASE(masked_fill,
              "self[...] mask[...]:bool value=0 | self[...] mask[...]:bool value=1.5 | "
              "self[a,b] mask[b]:bool value[]",
              MaskedFill(a)),
      DT_CASE(dropout_apply, "x[...] mask[...]:bool scale=2.0",
              dropout_apply(a.T("x"), a.T("mask"), a.Float("scale"))),
      DT_CASE(copy_, "self[a,b] src[b] | self[a,b] src[a,b] | self[...] src[...]",
              copy_(a.Written("self"), a.T("src"))),
      DT_CASE(add_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, AddInto, [](const DTensor& x, Scalar y) { return add_(x, y); })),
      DT_CASE(sub_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, sub_, sub_)),
      DT_CASE(mul_, "self[...] other[...] | self[a,b] other[b] | self[...] other=1.5",
              InPlace(a, mul_, mul_)),
      // Where `other` wants a gradient another op does it.
      DT_CASE(div_,
              "self[...] other[...]@0.5..3 | self[a,b] other[b]~@0.5..3 | self[...] other=1.5",
              InPlace(a, div_, div_)),
  });
  table->Judge({{"copy_", {{{I({5, 3}), I({5, 1})}}}}});
}

}  // namespace dtensor
