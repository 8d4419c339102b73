// Running sums, products and extremes. The ops of sums and products run either way, and may leave
// each element out of its own result (ops/scan/run.h).
#include "dtensor/ops/scan/scan.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/scan/run.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/blocks.h"

namespace dtensor {
namespace {

constexpr char kCummax[] = "cummax", kCummin[] = "cummin";

// Every block by itself, then with what the blocks before it come to.
template <class Whole, class Join>
Values RunOfBlocks(const OpDef& op, const DTensor& x, absl::Span<const Attr> attrs,
                   const Whole& whole, const Join& join) {
  const int64_t dim = attrs[0].i;
  const std::optional<Blocks> blocks = BlocksOf(x, dim);
  if (!blocks) {
    const DTensor gathered = Gathered(x, dim);
    return Call(op, {&gathered}, attrs);
  }
  const DTensor inside = Call1(op, {&blocks->x}, {IntAttr(dim + 1), attrs[1], attrs[2]});
  const DTensor totals = Gathered(whole(blocks->x, DimList{dim + 1}), dim);
  const DTensor before = Call1(op, {&totals}, {IntAttr(dim), attrs[1], BoolAttr(true)});
  return {Joined(join(inside, before), dim)};
}
Values CumsumOfBlocks(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  return RunOfBlocks(
      GetOp("cumsum"), in[0], attrs,
      [](const DTensor& x, DimList dims) { return sum(x, dims, true); },
      [](const DTensor& a, const DTensor& b) { return add(a, b); });
}
Values CumprodOfBlocks(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  return RunOfBlocks(
      GetOp("cumprod"), in[0], attrs,
      [](const DTensor& x, DimList dims) { return prod(x, dims, true); },
      [](const DTensor& a, const DTensor& b) { return mul(a, b); });
}

// Running extremes: a block's own, or what the blocks before it come to where that wins.
template <const char* kName>
Values ExtremesOfBlocks(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp(kName);
  const int64_t dim = attrs[0].i;
  const std::optional<Blocks> blocks = BlocksOf(in[0], dim);
  if (!blocks) {
    const DTensor gathered = Gathered(in[0], dim);
    return Call(op, {&gathered}, attrs);
  }
  const Values inside = Call(op, {&blocks->x}, {IntAttr(dim + 1)});
  const DTensor own = add(inside[1], BlockStarts(*blocks, dim));
  // The last of each block stands for all of it; the first block has nothing before it but its own
  // first element, which is no later than any of its own extremes.
  const auto before = [&](const DTensor& y) {
    const DTensor ends = slice(y, dim + 1, blocks->size - 1, blocks->size);
    const DTensor starts = slice(y, dim + 1, 0, 1);
    return cat({slice(starts, dim, 0, 1), slice(ends, dim, 0, blocks->count - 1)}, dim);
  };
  const DTensor earlier = Gathered(before(inside[0]), dim);
  const Values run = Call(op, {&earlier}, {IntAttr(dim)});
  const DTensor run_index = IndexOfPlaces(Gathered(before(own), dim), run[1], dim);
  const DTensor& values = inside[0];
  const DTensor behind = op.name() == kCummax ? lt(values, run[0]) : gt(values, run[0]);
  // NaN wins: one of the block's own, as the later one.
  const DTensor lost = masked_fill(behind, mul(ne(run[0], run[0]), eq(values, values)), true);
  return {Joined(where(lost, run[0], values), dim), Joined(where(lost, run_index, own), dim)};
}

void CumsumVjp(VjpCall& c) {
  c.set(0, RunningSum(c.grad(), c.Int("dim"), {!c.Bool("reverse"), c.Bool("exclusive")}));
}

void CumprodVjp(VjpCall& c) {
  static const OpDef& op = GetOp("cumprod_backward");
  const DTensor &dy = c.grad(), &x = c.in(0);
  c.set(0, Call1(op, {&dy, &x}, {IntAttr(c.Int("dim"))}));
}

DTensor LogRun(const DTensor& x, int64_t dim, bool reverse) {
  static const OpDef& op = GetOp("logcumsumexp");
  return Call1(op, {&x}, {IntAttr(dim), BoolAttr(reverse), BoolAttr(false)});
}

// dx[i] = sum of dy[j] exp(x[i] - y[j]) over j that come after i, as the logarithms of what is
// positive of dy and what is negative.
void LogcumsumexpVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  const bool reverse = c.Bool("reverse");
  const DType type = ComputeType(c.in_spec(0).dtype());
  const DTensor x = to(c.in(0), type), y = to(c.out(), type), dy = to(c.grad(), type);
  const double lowest = type == DType::kF64 ? std::numeric_limits<double>::lowest()
                                            : std::numeric_limits<float>::lowest();
  const auto part = [&](const DTensor& counted) {
    const DTensor logs = masked_fill(log(abs(dy)), logical_not(counted), lowest);
    return exp(add(LogRun(sub(logs, y), dim, !reverse), x));
  };
  c.set(0, to(sub(part(gt(dy, 0)), part(lt(dy, 0))), c.in_spec(0).dtype()));
}

DTensor Running(const OpDef& op, const DTensor& x, int64_t dim, Run run) {
  return CallOnLines(op, x, {IntAttr(dim), BoolAttr(run.reverse), BoolAttr(run.exclusive)})[0];
}

// In the dtype asked for, of integers in int64; float16 in float32, as totals of blocks may
// overflow where what they come to does not.
DTensor Accumulated(const OpDef& op, const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  return AsOp(op.name(), {{"x", x}}, [&] {
    const DType result = dtype.value_or(IsFloating(x.dtype()) ? x.dtype() : DType::kI64);
    const DType type = result == DType::kF16 ? DType::kF32
                       : IsFloating(result)  ? result
                                             : DType::kI64;
    return to(Running(op, to(to(x, result), type), CheckedDim(op.name(), dim, x.ndim()), {}),
              result);
  });
}

Values Extremes(const OpDef& op, const DTensor& x, int64_t dim) {
  return AsOp(op.name(), {{"x", x}},
              [&] { return CallOnLines(op, x, {IntAttr(CheckedDim(op.name(), dim, x.ndim()))}); });
}

#define DT_OP(name) static const OpDef& op = GetOp(#name)

}  // namespace

void RegisterScanOps() {
  Op("cumsum(x; dim, reverse, exclusive)")
      .Factors(LineFactors)
      .Linear("x")
      .Decompose(CumsumOfBlocks)
      .Vjp(CumsumVjp);
  Op("cumprod(x; dim, reverse, exclusive)")
      .Factors(LineFactors)
      .Decompose(CumprodOfBlocks)
      .Vjp(CumprodVjp, "x");
  Op("cumprod_backward(dy, x; dim)").Factors(LineFactors).Linear("dy(x)").Check(SameDTypes);
  Op("logcumsumexp(x; dim, reverse, exclusive)")
      .Factors(LineFactors)
      .Vjp(LogcumsumexpVjp, "x, out");
  const auto extremes = [](const char* signature, DecomposeFn of_blocks) {
    Op(signature)
        .Factors(LineFactors)
        .OutDType(ValuesAndIndices)
        .Decompose(of_blocks)
        .Vjp(LinesVjp, "indices");
  };
  extremes("cummax(x; dim) -> values, indices", ExtremesOfBlocks<kCummax>);
  extremes("cummin(x; dim) -> values, indices", ExtremesOfBlocks<kCummin>);
}

DTensor RunningSum(const DTensor& x, int64_t dim, Run run) {
  DT_OP(cumsum);
  return Running(op, x, dim, run);
}
DTensor RunningProduct(const DTensor& x, int64_t dim, Run run) {
  DT_OP(cumprod);
  return Running(op, x, dim, run);
}

DTensor cumsum(const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  DT_OP(cumsum);
  return Accumulated(op, x, dim, dtype);
}
DTensor cumprod(const DTensor& x, int64_t dim, std::optional<DType> dtype) {
  DT_OP(cumprod);
  return Accumulated(op, x, dim, dtype);
}
DTensor cumsum_(const DTensor& self, int64_t dim) {
  return internal::WriteInto("cumsum_", self, false,
                             [&](const DTensor& x) { return cumsum(x, dim); });
}
DTensor cumprod_(const DTensor& self, int64_t dim) {
  return internal::WriteInto("cumprod_", self, internal::WantsGradient(self),
                             [&](const DTensor& x) { return cumprod(x, dim); });
}
DTensor logcumsumexp(const DTensor& x, int64_t dim) {
  DT_OP(logcumsumexp);
  return AsOp("logcumsumexp", {{"x", x}}, [&] {
    RequireFloating("logcumsumexp", x);
    // The gradient reads the result before it is rounded.
    const DTensor wide = to(x, ComputeType(x.dtype()));
    return to(Running(op, wide, CheckedDim("logcumsumexp", dim, x.ndim()), {}), x.dtype());
  });
}
Values cummax(const DTensor& x, int64_t dim) {
  DT_OP(cummax);
  return Extremes(op, x, dim);
}
Values cummin(const DTensor& x, int64_t dim) {
  DT_OP(cummin);
  return Extremes(op, x, dim);
}

}  // namespace dtensor
