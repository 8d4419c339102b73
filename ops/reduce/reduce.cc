// Reductions by one operation: sums, products, extremes, and what is made of them.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/cases.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/scan/run.h"

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
                     " is empty: nothing has no largest or least element"));
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

// x with the dims of `axes` as one, the last.
DTensor AxesLast(const DTensor& x, IntSpan axes) {
  DimList order;
  Shape shape;
  int64_t size = 1;
  for (int d = 0; d < x.ndim(); ++d) {
    if (Contains(axes, d)) {
      size *= x.size(d);
    } else {
      order.push_back(d);
      shape.push_back(x.size(d));
    }
  }
  order.insert(order.end(), axes.begin(), axes.end());
  shape.push_back(size);
  return reshape(permute(x, order), shape);
}
// Its inverse, for a tensor of shape `shape`.
DTensor AxesBack(const DTensor& y, const Shape& shape, IntSpan axes) {
  DimList order(shape.size());
  Shape permuted;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (Contains(axes, d)) continue;
    order[d] = static_cast<int64_t>(permuted.size());
    permuted.push_back(shape[d]);
  }
  for (const int64_t a : axes) {
    order[a] = static_cast<int64_t>(permuted.size());
    permuted.push_back(shape[a]);
  }
  return permute(reshape(y, permuted), order);
}

// The product of the others: the result by the element; in a line with a zero that of the elements
// before and of those after it.
void ProdVjp(VjpCall& c) {
  const Shape& shape = c.in_spec(0).shape();
  const IntSpan axes = c.Ints("axes");
  const DType type = ComputeType(c.in_spec(0).dtype());
  const auto stretched = [&](const DTensor& y) {
    return expand(WithReducedDims(y, shape, axes), shape);
  };
  const DTensor x = to(c.in(0), type), dy = stretched(to(c.grad(), type));
  const DTensor zero = eq(x, 0);
  const DTensor zeros = axes.empty() ? zero : any(zero, DimList(axes.begin(), axes.end()));
  const DTensor line = AxesLast(x, axes);
  const int64_t last = line.ndim() - 1;
  const DTensor others =
      mul(RunningProduct(line, last, {false, true}), RunningProduct(line, last, {true, true}));
  const DTensor quotient = div(stretched(to(c.out(), type)), x);
  const DTensor rest = where(stretched(zeros), AxesBack(others, shape, axes), quotient);
  c.set(0, to(mul(dy, rest), c.in_spec(0).dtype()));
}

void SumSquaresVjp(VjpCall& c) {
  const DTensor& x = c.in(0);
  const DTensor dy = WithReducedDims(c.grad(), x.shape(), c.Ints("axes"));
  c.set(0, mul(mul(dy, 2.0), x));
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
  Op("prod(x; axes, keepdim)")
      .Factors(ReduceFactors)
      .Elementwise()
      .Reduces(ReduceOp::kProd)
      .OutDType([](const OpCall& c, int) -> absl::StatusOr<DType> { return SumType(c.dtype(0)); })
      .Vjp(ProdVjp, "x, out");
  Op("sum_squares(x; axes, keepdim)")
      .Factors(ReduceFactors)
      .Elementwise()
      .Reduces(ReduceOp::kSum)
      .Vjp(SumSquaresVjp, "x");
  const auto extreme = [](const char* signature, ReduceOp op) -> OpDef& {
    return Op(signature).Factors(ReduceFactors).Elementwise().Reduces(op).Monotone("x");
  };
  extreme("amax(x; axes, keepdim)", ReduceOp::kMax).Check(NoEmptyAxis).Vjp(AmaxVjp, "x, out");
  extreme("amin(x; axes, keepdim)", ReduceOp::kMin).Check(NoEmptyAxis).Vjp(AmaxVjp, "x, out");
  // Of bools.
  extreme("any(x; axes, keepdim)", ReduceOp::kMax);
  extreme("all(x; axes, keepdim)", ReduceOp::kMin);
  Op("amax_backward(dy, x, y; axes, keepdim)")
      .Factors(AmaxBackwardFactors)
      .Check([](const OpCall& c) { return SameComputeTypes(c, 3); })
      .Linear("dy(x, y)")
      .Monotone("dy")
      .Decompose(AmaxBackwardParts);
}

namespace {

DTensor Reduce(const OpDef& op, const DTensor& x, const DimList& dims, bool keepdim) {
  const Dims axes = CheckedDims(op.name(), dims, x.ndim());
  return Call1(op, {&x}, {IntsAttr(axes), BoolAttr(keepdim)});
}

DTensor ReduceAs(const OpDef& op, const DTensor& x, const DimList& dims, bool keepdim,
                 std::optional<DType> dtype = {}) {
  return AsOp(op.name(), {{"x", x}}, [&] {
    // What the kernel adds up in anyway needs no copy of x in it.
    if (!dtype || *dtype == SumType(x.dtype())) return Reduce(op, x, dims, keepdim);
    return to(Reduce(op, to(x, *dtype), dims, keepdim), *dtype);
  });
}

// any and all: of elements that are not 0.
DTensor ReduceTruth(const OpDef& op, const DTensor& x, const DimList& dims, bool keepdim) {
  return AsOp(op.name(), {{"x", x}}, [&] {
    const DTensor y = Reduce(op, x.dtype() == DType::kBool ? x : ne(x, 0), dims, keepdim);
    return x.dtype() == DType::kU8 ? to(y, DType::kU8) : y;
  });
}

// x with 0 for NaN. The gradient is multiplied by 0 there, as PyTorch does it: an infinite one
// (of the mean of nothing) gives NaN.
DTensor WithoutNan(const DTensor& x) {
  if (!IsFloating(x.dtype())) return x;
  const DTensor in = x.Detach();
  const auto forward = [&]() -> Values { return {masked_fill(in, ne(in, in), 0)}; };
  const auto backward = [in](const Values& grads) -> Values {
    return {mul(grads[0], to(eq(in, in), in.dtype()))};
  };
  return CustomFunction("nansum", {x}, forward, backward, {x})[0];
}

#define DT_OP(name) static const OpDef& op = GetOp(#name)

}  // namespace

DTensor sum(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  DT_OP(sum);
  return ReduceAs(op, x, dims, keepdim, dtype);
}
DTensor prod(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  DT_OP(prod);
  // A rank's part of a float16 product would overflow where the whole, with a zero elsewhere, does
  // not.
  const bool narrow =
      x.defined() && x.dtype() == DType::kF16 && dtype.value_or(x.dtype()) == x.dtype();
  if (!narrow) return ReduceAs(op, x, dims, keepdim, dtype);
  return AsOp("prod", {{"x", x}},
              [&] { return to(Reduce(op, to(x, DType::kF32), dims, keepdim), DType::kF16); });
}
DTensor amax(const DTensor& x, DimList dims, bool keepdim) {
  DT_OP(amax);
  return ReduceAs(op, x, dims, keepdim);
}
DTensor amin(const DTensor& x, DimList dims, bool keepdim) {
  DT_OP(amin);
  return ReduceAs(op, x, dims, keepdim);
}
DTensor any(const DTensor& x, DimList dims, bool keepdim) {
  DT_OP(any);
  return ReduceTruth(op, x, dims, keepdim);
}
DTensor all(const DTensor& x, DimList dims, bool keepdim) {
  DT_OP(all);
  return ReduceTruth(op, x, dims, keepdim);
}

static DType MeanType(const char* name, DType result) {
  if (!IsFloating(result)) {
    ThrowInvalid(name, absl::StrCat("has no ", TypeName(result),
                                    " result: pass a floating dtype to convert x first"));
  }
  return result;
}
DTensor mean(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  return AsOp("mean", {{"x", x}}, [&] {
    const DType result = MeanType("mean", dtype.value_or(x.dtype()));
    const Dims axes = CheckedDims("mean", dims, x.ndim());
    double count = 1;
    for (int64_t a : axes) count *= static_cast<double>(x.shape()[a]);
    // A float16 sum would overflow where the mean does not, and a bfloat16 one be rounded before
    // it.
    const DType type = ComputeType(result);
    return to(div(sum(x, DimList(axes.begin(), axes.end()), keepdim, type), count), result);
  });
}

DTensor nansum(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  return AsOp("nansum", {{"x", x}}, [&] { return sum(WithoutNan(x), dims, keepdim, dtype); });
}
DTensor nanmean(const DTensor& x, DimList dims, bool keepdim, std::optional<DType> dtype) {
  return AsOp("nanmean", {{"x", x}}, [&] {
    RequireFloating("nanmean", x);
    const DType result = MeanType("nanmean", dtype.value_or(x.dtype()));
    const DType type = ComputeType(result);
    const DTensor numbers = sum(eq(x, x), dims, keepdim);
    const DTensor y = div(sum(WithoutNan(x), dims, keepdim, type), to(numbers, type));
    return to(y, result);
  });
}

DTensor count_nonzero(const DTensor& x, DimList dims) {
  return AsOp("count_nonzero", {{"x", x}}, [&] { return sum(ne(x, 0), dims); });
}

DTensor trace(const DTensor& x) {
  return AsOp("trace", {{"x", x}}, [&] {
    if (x.ndim() != 2) ThrowInvalid("trace", "needs a matrix", {{"x", x}});
    TensorOptions options = {DType::kI64, x.mesh(), Placements(x.mesh().ndim())};
    const DTensor row = unsqueeze(arange(0, x.size(0), 1, options), 1);
    return sum(masked_fill(x, ne(row, arange(0, x.size(1), 1, options)), 0));
  });
}

DTensor diff(const DTensor& x, int64_t n, int64_t dim, const DTensor& prepend,
             const DTensor& append) {
  return AsOp("diff", {{"x", x}}, [&] {
    if (n < 0 || x.ndim() == 0) {
      ThrowInvalid("diff", "needs a tensor with dims and n >= 0", {{"x", x}});
    }
    const int d = CheckedDim("diff", dim, x.ndim());
    if (n == 0) return clone(x);
    std::vector<DTensor> joined;
    for (const DTensor& part : {prepend, x, append}) {
      // As terms of one sum neighbours would meet after they have been rounded.
      if (part.defined()) joined.push_back(Settled(part));
    }
    DTensor y = joined.size() == 1 ? x : cat(joined, d);
    for (int64_t i = 0; i < n && y.size(d) > 0; ++i) {
      const DTensor after = slice(y, d, 1, y.size(d)), before = slice(y, d, 0, y.size(d) - 1);
      y = y.dtype() == DType::kBool ? ne(after, before) : sub(after, before);
    }
    return y;
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
  // In one sum, which rounds once.
  DTensor y = x;
  if (!grown.empty()) {
    DimList dims = leading;
    for (const int64_t d : grown) dims.push_back(d + extra);
    y = sum(x, dims, true);
    if (!leading.empty()) y = squeeze(y, leading);
  } else if (!leading.empty()) {
    y = sum(x, leading);
  }
  if (IntSpan(y.shape()) != shape) {
    ThrowInvalid("sum_to",
                 absl::StrCat("x ", ToString(x.shape()), " is no broadcast of ", ToString(shape)),
                 {{"x", x}});
  }
  return leading.empty() && grown.empty() ? Unchanged("sum_to", x) : y;
}

// --- case lines

#define DT_DIMS_SAMPLES "self[a,b] dim=1 | self[a,b,c] dim=0,1 keepdim=true | self[...]"
#define DT_TRUTH_SAMPLES                                                             \
  "self[a,b]:bool dim=1 | self[a,b,c]:bool dim=0,1 keepdim=true | self[...]:bool | " \
  "self[a,b]:uint8 dim=0 | self[a,0] dim=1"

void AddReduceCases(CaseTable* table) {
  table->Add({
      DT_CASE(sum,
              "self[a,b] dim=0 | self[a,b,c] dim=0,2 keepdim=true | self[...] | self[a,0] dim=1",
              sum(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(mean, "self[...] | self[a,b,c] dim=0,2 keepdim=true | self[...] dim=1",
              mean(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(prod, DT_DIMS_SAMPLES " | self[a,0] dim=1",
              prod(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(nansum, DT_DIMS_SAMPLES,
              nansum(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(nanmean, DT_DIMS_SAMPLES,
              nanmean(a.T("self"), a.Ints("dim"), a.Bool("keepdim"), a.Type("dtype"))),
      DT_CASE(count_nonzero, "self[a,b]:int64 dim=1 | self[...]:bool",
              count_nonzero(a.T("self"), a.Ints("dim"))),
      DT_CASE(any, DT_TRUTH_SAMPLES, any(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(all, DT_TRUTH_SAMPLES, all(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(amax, DT_DIMS_SAMPLES, amax(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(amin, DT_DIMS_SAMPLES, amin(a.T("self"), a.Ints("dim"), a.Bool("keepdim"))),
      DT_CASE(trace, "self[a,b] | self[a,a]", trace(a.T("self"))),
      DT_CASE(diff,
              "self[a,b] dim=0 | self[...] n=2 | self[a,b] dim=0 prepend[2,b] append[a,b] | "
              "self[a,b]:bool",
              diff(a.T("self"), a.Int("n", 1), a.Int("dim", -1), a.Optional("prepend"),
                   a.Optional("append"))),
      DT_CASE(sum_to, "self[a,b] shape=1,b | self[a,b,c] shape=b,1",
              sum_to(a.T("self"), a.Ints("shape"))),
  });
  const Attr no = BoolAttr(false), yes = BoolAttr(true);
  // Bools that are drawn anew: of those of a call few rows are all true, or none.
  std::vector<VerifySample> truths;
  for (const std::vector<int64_t>& axes : std::vector<std::vector<int64_t>>{{0}, {1}, {0, 1}}) {
    for (const Shape& shape : {Shape{4, 6}, Shape{5, 3, 2}, Shape{3, 2}}) {
      truths.push_back({{Of(DType::kBool, shape)}, {Attr(), no}, axes, 0});
    }
  }
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
      {"any", truths},
      {"all", truths},
      // With dims that are kept and were 1 before: a gradient that broadcasts.
      {"amax_backward", {{{F({1, 5}), F({3, 5}), F({1, 5})}, {Attr(), yes}, {0}, 0}}},
  });
}

}  // namespace dtensor
