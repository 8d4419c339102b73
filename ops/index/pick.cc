// The ops gather and scatter: declarations, gradients, and calls on checked operands.
#include "dtensor/ops/index/pick.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/owners.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// The dims of x with `name` in the place of dim.
DimTexts NamesWith(int ndim, int64_t dim, const std::string& name) {
  DimTexts names = DimNames(ndim);
  names[dim] = name;
  return names;
}

// Of an index that picks `picks`: "[n]", or a name per dim of the operand with an element per pick.
DimTexts IndexNames(const OpCall& call, int i, const DimTexts& picks, int64_t dim) {
  return call.in(i).ndim() == 1 ? DimTexts{picks[dim]} : picks;
}

absl::StatusOr<FactorText> GatherFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  const int ndim = call.in(0).ndim();
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, ndim));
  const DimTexts picks = NamesWith(ndim, dim, "n");
  return FactorText{
      FactorString({NamesWith(ndim, dim, "v"), IndexNames(call, 1, picks, dim)}, {picks}), {}};
}

absl::StatusOr<FactorText> GatherBackwardFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim");
  const int ndim = call.in(0).ndim();
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, ndim));
  const DimTexts picks = NamesWith(ndim, dim, "n");
  return FactorText{
      FactorString({picks, IndexNames(call, 1, picks, dim)}, {NamesWith(ndim, dim, "v")}),
      {{"v", call.Int("size")}}};
}

// `n`: how the picks are named; "[n]" where they must be seen one after the other.
absl::StatusOr<FactorText> ScatterFactors(const OpCall& call, const std::string& n) {
  const int64_t dim = call.Int("dim");
  const int ndim = call.in(0).ndim();
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, ndim));
  const DimTexts rows = NamesWith(ndim, dim, "v"), picks = NamesWith(ndim, dim, n);
  return FactorText{FactorString({rows, IndexNames(call, 1, picks, dim), picks}, {rows}), {}};
}
absl::StatusOr<FactorText> WriteFactors(const OpCall& call) { return ScatterFactors(call, "[n]"); }
absl::StatusOr<FactorText> AddFactors(const OpCall& call) { return ScatterFactors(call, "n"); }

absl::Status IntegerIndex(const OpCall& call) {
  const DType index = call.dtype(1);
  if (index == DType::kI64 || index == DType::kI32) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("index must be int64 or int32, is ", TypeName(index)));
}

absl::Status CheckScatter(const OpCall& call) {
  DT_RETURN_IF_ERROR(IntegerIndex(call));
  if (call.dtype(0) == call.dtype(2)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("x is ", TypeName(call.dtype(0)), " and src ",
                                                 TypeName(call.dtype(2)),
                                                 ": they must have one dtype"));
}

// --- gradients

DTensor ZerosLike(const Spec& spec) {
  return zeros(spec.shape(), {spec.dtype(), spec.mesh(), WithoutPending(spec.placements())});
}

void GatherVjp(VjpCall& c) {
  const Spec& x = c.in_spec(0);
  c.set(0, AddUp(c.grad(), c.Int("dim"), c.in(1), x.shape()[c.Int("dim")], &x));
}
void GatherBackwardVjp(VjpCall& c) { c.set(0, Pick(c.grad(), c.Int("dim"), c.in(1))); }

void WriteVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  if (c.needs(0)) c.set(0, Write(c.grad(), dim, c.in(1), ZerosLike(c.in_spec(2))));
  if (c.needs(2)) c.set(2, Pick(c.grad(), dim, c.in(1)));
}
void AddVjp(VjpCall& c) {
  c.set(0, c.grad());
  if (c.needs(2)) c.set(2, Pick(c.grad(), c.Int("dim"), c.in(1)));
}

// Where a product has one zero only, the others are its gradient there; so each zero is left out
// and the product made again.
void ProdVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  const DTensor &g = c.grad(), &x = c.in(0), &index = c.in(1), &src = c.in(2);
  if (c.needs(0)) {
    const DTensor others = masked_fill(x, eq(x, 0), 1);
    c.set(0, div(mul(g, Combine(others, dim, index, src, ScatterKind::kProd)), others));
  }
  if (!c.needs(2)) return;
  const DTensor zero = eq(src, 0);
  const DTensor zeros = Pick(AddUp(to(zero, src.dtype()), dim, index, x.size(dim)), dim, index);
  const DTensor lone = masked_fill(zero, ne(zeros, 1), 0);
  const DTensor others = Combine(x, dim, index, masked_fill(src, lone, 1), ScatterKind::kProd);
  c.set(2, where(lone, Pick(mul(g, others), dim, index),
                 div(Pick(mul(g, c.out()), dim, index), masked_fill(src, zero, 1))));
}

// Ties share the gradient.
void ExtremeVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  const DTensor &x = c.in(0), &index = c.in(1), &src = c.in(2), &y = c.out();
  const DTensor own = to(eq(x, y), x.dtype());
  const DTensor hit = to(eq(src, Pick(y, dim, index)), x.dtype());
  const DTensor share = div(c.grad(), Add(own, dim, index, hit));
  c.set(0, mul(own, share));
  c.set(2, mul(hit, Pick(share, dim, index)));
}

}  // namespace

void RegisterGatherOps() {
  Op("gather(x, index; dim)")
      .Factors(GatherFactors)
      .Linear("x(index)")
      .Monotone("x")
      .NeedsOffset("v")
      .Check(IntegerIndex)
      .Vjp(GatherVjp, "index");
  Op("gather_backward(dy, index; dim, size)")
      .Factors(GatherBackwardFactors)
      .Linear("dy(index)")
      .NeedsOffset("v")
      .Check(IntegerIndex)
      .Vjp(GatherBackwardVjp, "index");
  const auto write = [](OpDef& op) {
    op.Factors(WriteFactors)
        .Linear("x(index) + src(index)")
        .Monotone("{x, src}")
        .Monotone("x & src")
        .NeedsOffset("v")
        .Check(CheckScatter)
        .Vjp(WriteVjp, "index");
  };
  const auto add = [](OpDef& op) {
    op.Factors(AddFactors)
        .Linear("x + src(index)")
        .NeedsOffset("v")
        .Check(CheckScatter)
        .Vjp(AddVjp, "index");
  };
  write(Op("scatter(x, index, src; dim)"));
  write(Op("scatter_(x, index, src; dim)").InPlace());
  add(Op("scatter_add(x, index, src; dim)"));
  add(Op("scatter_add_(x, index, src; dim)").InPlace());
  Op("scatter_prod(x, index, src; dim)")
      .Factors(WriteFactors)
      .Linear("x(index, src)")
      .NeedsOffset("v")
      .Check(CheckScatter)
      .Vjp(ProdVjp, "x, index, src, out");
  const auto extreme = [](OpDef& op, ReduceOp kind) {
    op.Factors(AddFactors)
        .Reduces(kind)
        .Monotone("{x, src}")
        .Monotone("x & src")
        .NeedsOffset("v")
        .Check(CheckScatter)
        .Vjp(ExtremeVjp, "x, index, src, out");
  };
  extreme(Op("scatter_amax(x, index, src; dim)"), ReduceOp::kMax);
  extreme(Op("scatter_amin(x, index, src; dim)"), ReduceOp::kMin);
  Op("check_index(index; size, wraps)").Factors("... -> ...").Elementwise().OutDType(DType::kI64);
}

DTensor Pick(const DTensor& x, int64_t dim, const DTensor& index) {
  static const OpDef& op = GetOp("gather");
  if (const RequestsPtr r = RequestsFor(x.spec(), dim, index)) return PickBy(r, x);
  return Call1(op, {&x, &index}, {IntAttr(dim)});
}

DTensor AddUp(const DTensor& dy, int64_t dim, const DTensor& index, int64_t size,
              const Spec* like) {
  static const OpDef& op = GetOp("gather_backward");
  DispatchOptions options;
  options.like = like;
  return Call1(op, {&dy, &index}, {IntAttr(dim), IntAttr(size)}, options);
}

DTensor Write(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src) {
  static const OpDef& op = GetOp("scatter");
  if (const RequestsPtr r = RequestsFor(x.spec(), dim, index, src)) return WriteBy(r, x, src);
  return Call1(op, {&x, &index, &src}, {IntAttr(dim)});
}
DTensor Add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src) {
  static const OpDef& op = GetOp("scatter_add");
  if (const RequestsPtr r = RequestsFor(x.spec(), dim, index, src)) return AddBy(r, x, src);
  return Call1(op, {&x, &index, &src}, {IntAttr(dim)});
}
DTensor WriteTo(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src) {
  static const OpDef& op = GetOp("scatter_");
  return Call1(op, {&self, &index, &src}, {IntAttr(dim)});
}
DTensor AddTo(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src) {
  static const OpDef& op = GetOp("scatter_add_");
  return Call1(op, {&self, &index, &src}, {IntAttr(dim)});
}
DTensor Combine(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                ScatterKind kind) {
  static const OpDef *const prod = &GetOp("scatter_prod"), *const amax = &GetOp("scatter_amax"),
                            *const amin = &GetOp("scatter_amin");
  const OpDef& op = *(kind == ScatterKind::kProd ? prod : kind == ScatterKind::kAmax ? amax : amin);
  return Call1(op, {&x, &index, &src}, {IntAttr(dim)});
}

DTensor CheckedIndex(const DTensor& index, int64_t size, bool wraps) {
  static const OpDef& op = GetOp("check_index");
  return Call1(op, {&index}, {IntAttr(size), BoolAttr(wraps)});
}

DTensor IndexRange(const DTensor& x, int64_t start, int64_t count, int64_t step) {
  return arange(start, start + count * step, step, {DType::kI64, x.mesh(), {}});
}
DTensor IndexList(const DTensor& x, const RankList<int64_t>& indices) {
  return FromList(indices, {static_cast<int64_t>(indices.size())}, x.mesh());
}

namespace {

// What leaves the other operand of a maximum (a minimum, a product) as it is.
Scalar Neutral(ScatterKind kind, DType dtype) {
  if (kind == ScatterKind::kProd) return 1;
  const bool low = kind == ScatterKind::kAmax;
  if (IsFloating(dtype)) {
    const double infinity = std::numeric_limits<double>::infinity();
    return low ? -infinity : infinity;
  }
  using Long = std::numeric_limits<int64_t>;
  using Int = std::numeric_limits<int32_t>;
  if (dtype == DType::kI64) return low ? Long::min() : Long::max();
  if (dtype == DType::kI32) return low ? Int::min() : Int::max();
  return low ? 0 : dtype == DType::kBool ? 1 : 255;
}

// Of integers rounded down, exactly.
DTensor Quotient(const DTensor& total, const DTensor& count) {
  return IsFloating(total.dtype()) ? div(total, count) : floor_divide(total, count);
}

DTensor Mean(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
             bool include_self) {
  const auto like = [](const DTensor& t, int value) {
    return full(t.shape(), value, {t.dtype(), t.mesh(), WithoutPending(t.placements())});
  };
  DTensor count;
  {
    const NoGrad no_grad;
    count = Add(like(x, include_self ? 1 : 0), dim, index, like(src, 1));
    count = masked_fill(count, eq(count, 0), 1);
  }
  const DTensor base = include_self ? x : Write(x, dim, index, like(src, 0));
  return Quotient(Add(base, dim, index, src), count);
}

}  // namespace

DTensor ReduceInto(const char* op, const DTensor& x, int64_t dim, const DTensor& index,
                   const DTensor& src, const std::string& reduce, bool include_self) {
  if (reduce == "mean") {
    if (x.dtype() == DType::kBool) ThrowInvalid(op, "truth values have no mean", {{"x", x}});
    return Mean(x, dim, index, src, include_self);
  }
  const auto without_self = [&](Scalar value) {
    const auto& p = src.placements();
    return Write(x, dim, index, full(src.shape(), value, {x.dtype(), x.mesh(), WithoutPending(p)}));
  };
  if (reduce == "sum") return Add(include_self ? x : without_self(0), dim, index, src);
  const ScatterKind kind = reduce == "prod"   ? ScatterKind::kProd
                           : reduce == "amax" ? ScatterKind::kAmax
                                              : ScatterKind::kAmin;
  if (kind == ScatterKind::kAmin && reduce != "amin") {
    ThrowInvalid(op,
                 absl::StrCat("reduce must be sum, prod, mean, amax or amin, is \"", reduce, "\""));
  }
  return Combine(include_self ? x : without_self(Neutral(kind, x.dtype())), dim, index, src, kind);
}

}  // namespace dtensor
