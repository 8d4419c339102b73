// Reductions: sum, mean, amax.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/cases.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// `names` as the result of a reduction over `axes` writes them.
DimTexts Kept(const DimTexts& names, IntSpan axes, bool keepdim) {
  DimTexts out;
  for (size_t d = 0; d < names.size(); ++d) {
    if (!Contains(axes, static_cast<int64_t>(d))) {
      out.push_back(names[d]);
    } else if (keepdim) {
      out.push_back("1");
    }
  }
  return out;
}

// "d0 d1 -> d0 1" for axes = [1], keepdim.
absl::StatusOr<FactorText> ReduceFactors(const OpCall& call) {
  const DimTexts x = DimNames(call.in(0).ndim());
  DT_RETURN_IF_ERROR(RequireDims("axes", call.Ints("axes"), call.in(0).ndim()));
  return FactorText{FactorString({x}, {Kept(x, call.Ints("axes"), call.Bool("keepdim"))}), {}};
}

// dy, x, y -> dx; the reduced dims are read whole, because ties share the gradient.
absl::StatusOr<FactorText> AmaxBackwardFactors(const OpCall& call) {
  DimTexts x = DimNames(call.in(1).ndim());
  const IntSpan axes = call.Ints("axes");
  DT_RETURN_IF_ERROR(RequireDims("axes", axes, call.in(1).ndim()));
  const DimTexts y = Kept(x, axes, call.Bool("keepdim"));
  for (int64_t a : axes) x[a] = Whole(x[a]);
  return FactorText{FactorString({y, x, y}, {x}), {}};
}

absl::Status NoEmptyAxis(const OpCall& call) {
  for (int64_t a : call.Ints("axes")) {
    if (call.shape(0)[a] != 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("dim ", a, " of x ", ToString(call.shape(0)),
                     " is empty: the maximum of nothing is undefined"));
  }
  return absl::OkStatus();
}

// y, a reduction of a tensor of shape `shape`, with the reduced dims as size 1.
DTensor WithReducedDims(const DTensor& y, const Shape& shape, IntSpan axes) {
  Shape kept = shape;
  for (int64_t a : axes) kept[a] = 1;
  return reshape(y, kept);
}

DType SumType(DType x) { return IsFloating(x) ? x : DType::kI64; }

void SumVjp(VjpCall& c) {
  const Shape& shape = c.in_spec(0).shape();
  c.set(0, expand(WithReducedDims(c.grad(), shape, c.Ints("axes")), shape));
}

void AmaxVjp(VjpCall& c) {
  static const OpDef& op = GetOp("amax_backward");
  const DTensor &dy = c.grad(), &x = c.in(0), &y = c.out();
  c.set(0, Call1(op, {&dy, &x, &y}, c.attrs()));
}

// With a reduced dim sharded: the number of ties is one small reduction.
Values AmaxBackwardParts(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  const IntSpan axes(attrs[0].ints, attrs[0].n);
  const DTensor& x = in[1];
  const DTensor dy = WithReducedDims(in[0], x.shape(), axes);
  const DTensor y = WithReducedDims(in[2], x.shape(), axes);
  const DTensor hit = to(eq(x, y), x.dtype());
  const DTensor ties = sum(hit, DimList(axes.begin(), axes.end()), true);
  return {mul(hit, div(dy, ties))};
}

}  // namespace

void RegisterReduceOps() {
  // Terms of a narrow integer add up in its own type, where the sum of terms wraps around: a sum in
  // int64 of every term would be another number.
  Op("sum(x; axes, keepdim)")
      .Factors(ReduceFactors)
      .Elementwise()  // where all dims go: they are groups of one kind
      .LinearIf([](const OpCall& c) { return SumType(c.dtype(0)) == c.dtype(0); }, "x")
      .Reduces(ReduceOp::kSum)
      .OutDType([](const OpCall& c, int) -> absl::StatusOr<DType> { return SumType(c.dtype(0)); })
      .Vjp(SumVjp);
  Op("amax(x; axes, keepdim)")
      .Factors(ReduceFactors)
      .Elementwise()  // where all dims go: they are groups of one kind
      .Reduces(ReduceOp::kMax)
      .Monotone("x")
      .Check(NoEmptyAxis)
      .Vjp(AmaxVjp, "x, out");
  Op("amax_backward(dy, x, y; axes, keepdim)")
      .Factors(AmaxBackwardFactors)
      .Linear("dy(x, y)")
      .Decompose(AmaxBackwardParts);
}

DTensor sum(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  static const OpDef& op = GetOp("sum");
  return AsOp("sum", {{"x", x}}, [&] {
    const Dims axes = CheckedDims("sum", dims, x.ndim());
    const DTensor in = dtype ? to(x, *dtype) : x;
    const DTensor y = Call1(op, {&in}, {IntsAttr(axes), BoolAttr(keepdim)});
    return dtype ? to(y, *dtype) : y;
  });
}

DTensor mean(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  return AsOp("mean", {{"x", x}}, [&] {
    const DType result = dtype.value_or(x.dtype());
    if (!IsFloating(result)) {
      ThrowInvalid("mean", absl::StrCat("has no ", TypeName(result),
                                        " result: pass a floating dtype to convert x first"));
    }
    const Dims axes = CheckedDims("mean", dims, x.ndim());
    double count = 1;
    for (int64_t a : axes) count *= static_cast<double>(x.shape()[a]);
    // A float16 sum would overflow where the mean does not.
    const DType sum_type = result == DType::kF16 ? DType::kF32 : result;
    return to(mul(sum(x, DimList(axes.begin(), axes.end()), keepdim, sum_type), 1.0 / count),
              result);
  });
}

DTensor amax(const DTensor& x, DimList dims, bool keepdim) {
  static const OpDef& op = GetOp("amax");
  return AsOp("amax", {{"x", x}}, [&] {
    const Dims axes = CheckedDims("amax", dims, x.ndim());
    return Call1(op, {&x}, {IntsAttr(axes), BoolAttr(keepdim)});
  });
}

DTensor sum_to(const DTensor& x, IntSpan shape) {
  const int extra = x.ndim() - static_cast<int>(shape.size());
  DimList leading, grown;
  for (int d = 0; d < extra; ++d) leading.push_back(d);
  for (int d = std::max(extra, 0); d < x.ndim(); ++d) {
    const int64_t want = shape[d - extra];
    if (want == x.shape()[d]) continue;
    if (want != 1) break;
    grown.push_back(d - extra);
  }
  DTensor y = leading.empty() ? x : sum(x, leading);
  if (!grown.empty()) y = sum(y, grown, true);
  if (IntSpan(y.shape()) != shape) {
    ThrowInvalid("sum_to",
                 absl::StrCat("x ", ToString(x.shape()), " is no broadcast of ", ToString(shape)),
                 {{"x", x}});
  }
  return leading.empty() && grown.empty() ? Unchanged("sum_to", x) : y;
}

// --- case lines ---------------------------------------------------------------------------------

void AddReduceCases(CaseTable* table) {
  table->Add({
      DT_CASE(sum,
              "self[a,b] dim=0 | self[a,b,c] dim=0,2 keepdim=true | self[...] | self[a,0] dim=1",
              sum(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(mean, "self[...] | self[a,b,c] dim=0,2 keepdim=true | self[...] dim=1",
              mean(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(amax, "self[a,b] dim=1 | self[a,b,c] dim=0,1 keepdim=true | self[...]",
              amax(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(sum_to, "self[a,b] shape=1,b | self[a,b,c] shape=b,1",
              sum_to(a.T("self"), a.Ints("shape"))),
  });
  const Attr no = BoolAttr(false), yes = BoolAttr(true);
  table->Judge({
      {"sum",
       {{{I({5, 3})}, {Attr(), no}, {1}, 0},
        Group(1, {{Of(DType::kI32, {5, 3})}, {Attr(), no}, {1}, 0}),  // its sums are wider
        Group(1, {{Of(DType::kU8, {3, 2})}, {Attr(), no}, {0}, 0}),
        Group(1, {{Of(DType::kBool, {3, 2})}, {Attr(), no}, {0}, 0})}},
      {"amax",
       {{{I({5, 3})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kI32, {3, 2})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kU8, {3, 2})}, {Attr(), no}, {0}, 0},
        {{Of(DType::kBool, {3, 2})}, {Attr(), no}, {0}, 0}}},
      // With dims that are kept and were 1 before: a gradient that broadcasts.
      {"amax_backward", {{{F({1, 5}), F({3, 5}), F({1, 5})}, {Attr(), yes}, {0}, 0}}},
  });
}

}  // namespace dtensor
