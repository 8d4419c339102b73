// Sorting, ranks and quantiles.
#include "dtensor/ops/sort/sort.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rows.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/blocks.h"
#include "dtensor/ops/sort/sharded_sort.h"

namespace dtensor {
namespace {

// "d0 [d1] d2 -> d0 [k] d2, d0 [k] d2"
absl::StatusOr<FactorText> TopKFactors(const OpCall& call) {
  const int64_t dim = call.Int("dim"), k = call.Int("k");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  const int64_t size = call.shape(0)[dim];
  if (k < 0 || k > size) {
    return absl::InvalidArgumentError(absl::StrCat("k = ", k, " is not in [0, ", size,
                                                   "], the size of dim ", dim, " of x ",
                                                   ToString(call.shape(0))));
  }
  DimTexts x = DimNames(call.in(0).ndim()), y = x;
  x[dim] = Whole(x[dim]);
  y[dim] = "[k]";
  return FactorText{FactorString({x}, {y, y}), {{"k", k}}};
}

// The k first of every block hold the k first of all. Candidates stand in the order of the dim, so
// that of equal ones the first is taken.
Values TopKOfBlocks(absl::Span<const DTensor> in, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp("topk");
  const int64_t k = attrs[0].i, dim = attrs[1].i;
  const std::optional<Blocks> blocks = BlocksOf(in[0], dim);
  if (!blocks) {
    const DTensor x = Gathered(in[0], dim);
    return Call(op, {&x}, attrs);
  }
  const int64_t some = std::min(k, blocks->size);
  const Values best = Call(op, {&blocks->x}, {IntAttr(some), IntAttr(dim + 1), attrs[2]});
  const DTensor values = Gathered(Joined(best[0], dim), dim);
  const Values taken = Call(op, {&values}, attrs);
  const DTensor indices = Joined(add(best[1], BlockStarts(*blocks, dim)), dim);
  return {taken[0], IndexOfPlaces(indices, taken[1], dim)};
}

absl::Status RankInDim(const OpCall& call) {
  DT_RETURN_IF_ERROR(NonEmptyDim(call));
  const int64_t k = call.Int("k"), size = call.shape(0)[call.Int("dim")];
  if (k >= 1 && k <= size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("k = ", k, " is not in [1, ", size, "], the size of the dim"));
}

// From 1 up, of n elements of which `numbers` are not NaN.
using RankFn = int64_t (*)(int64_t n, int64_t k, int64_t numbers);
int64_t KthRank(int64_t, int64_t k, int64_t) { return k; }
int64_t MedianRank(int64_t n, int64_t, int64_t numbers) {
  return numbers < n ? numbers + 1 : (n + 1) / 2;  // the first NaN comes after all numbers
}
int64_t NanMedianRank(int64_t, int64_t, int64_t numbers) {
  return std::max<int64_t>((numbers + 1) / 2, 1);
}

// `rank`: null where only the op itself finds the element.
Values Pick(const OpDef& op, const DTensor& x, int64_t dim, bool keepdim, RankFn rank,
            int64_t k = 0) {
  return AsOp(op.name(), {{"x", x}}, [&] {
    const int d = CheckedDim(op.name(), dim, x.ndim());
    const int64_t n = x.ndim() == 0 ? 1 : x.size(d);
    if (rank == nullptr || !AreLinesInBlocks(x, d) || (rank == KthRank && (k < 1 || k > n))) {
      return CallOnLines(op, x, {IntAttr(d), BoolAttr(keepdim), IntAttr(k)});
    }
    const Values one =
        RankInBlocks(op.name().c_str(), x, d, [&](int64_t numbers) { return rank(n, k, numbers); });
    if (keepdim) return one;
    return Values{Owned(squeeze(one[0], {d})), Owned(squeeze(one[1], {d}))};
  });
}

// The elements of x as one line, in an order of its own: without moving them where ranks have
// equally many.
DTensor InAnyOrder(const DTensor& x) {
  const NoGrad no_grad;
  Placements placements(x.mesh().ndim());
  bool alike = x.ndim() > 1 && !x.mesh().is_self();
  for (int d = 0; d < x.ndim(); ++d) {
    int64_t ranks = 1;
    for (const int m : CutsOf(x.spec(), d)) {
      placements[m] = Shard(0);
      ranks *= x.mesh().size(m);
      alike = alike && x.placements()[m].unit() == 1;
    }
    alike = alike && x.size(d) % ranks == 0;
  }
  for (int m = 0; m < x.mesh().ndim(); ++m) {
    alike = alike && placements[m].is_replicate() == x.placements()[m].is_replicate();
  }
  if (!alike) return reshape(x, {x.numel()});
  const SpecRef spec = ValueOrThrow(
      RankContext::Current().specs().Intern(x.mesh(), placements, {x.numel()}, x.dtype()));
  return OfParts(*spec, [&] { return flatten(OnSelf(x.local())).local(); });
}

}  // namespace

void RegisterAlongOps();
void RegisterSearchOps();

void RegisterSortOps() {
  RegisterAlongOps();
  RegisterSearchOps();
  Op("sort(x; dim, descending) -> values, indices")
      .Factors(LineFactors)
      .OutDType(ValuesAndIndices)
      .Vjp(LinesVjp, "indices");
  Op("topk(x; k, dim, largest) -> values, indices")
      .Factors(TopKFactors)
      .OutDType(ValuesAndIndices)
      .Decompose(TopKOfBlocks)
      .Vjp(LinesVjp, "indices");
  Op("kthvalue(x; dim, keepdim, k) -> values, indices")
      .Factors(PickFactors)
      .OutDType(ValuesAndIndices)
      .Check(RankInDim)
      .Vjp(PickVjp, "indices");
  for (const char* signature : {"median(x; dim, keepdim, k) -> values, indices",
                                "nanmedian(x; dim, keepdim, k) -> values, indices",
                                "mode(x; dim, keepdim, k) -> values, indices"}) {
    Op(signature)
        .Factors(PickFactors)
        .OutDType(ValuesAndIndices)
        .Check(NonEmptyDim)
        .Vjp(PickVjp, "indices");
  }
}

#define DT_OP(name) static const OpDef& op = GetOp(#name)

Values sort(const DTensor& x, int64_t dim, bool descending, bool /*stable: always*/) {
  DT_OP(sort);
  return AsOp("sort", {{"x", x}}, [&] {
    const int d = CheckedDim("sort", dim, x.ndim());
    if (x.ndim() > 1 && x.size(d) == x.numel() &&
        AreLinesInBlocks(x, d)) {  // one line all the same
      Values sorted = sort(reshape(x, {x.numel()}), 0, descending);
      for (DTensor& y : sorted) y = Owned(reshape(y, x.shape()));
      return sorted;
    }
    if (SortsInBlocks(x)) return SortInBlocks(x, descending);
    return CallOnLines(op, x, {IntAttr(d), BoolAttr(descending)});
  });
}
DTensor argsort(const DTensor& x, int64_t dim, bool descending, bool stable) {
  const NoGrad no_grad;
  return AsOp("argsort", {{"x", x}}, [&] { return sort(x, dim, descending, stable)[1]; });
}
DTensor msort(const DTensor& x) {
  return AsOp("msort", {{"x", x}}, [&] { return sort(x, 0)[0]; });
}

Values topk(const DTensor& x, int64_t k, int64_t dim, bool largest, bool /*sorted: always*/) {
  DT_OP(topk);
  return AsOp("topk", {{"x", x}}, [&] {
    const int64_t taken = x.ndim() == 0 && k == 0 ? 1 : k;  // a number stays one, as in PyTorch
    const int d = CheckedDim("topk", dim, x.ndim());
    return CallOnLines(op, x, {IntAttr(taken), IntAttr(d), BoolAttr(largest)});
  });
}

Values kthvalue(const DTensor& x, int64_t k, int64_t dim, bool keepdim) {
  DT_OP(kthvalue);
  return Pick(op, x, dim, keepdim, KthRank, k);
}
Values median(const DTensor& x, int64_t dim, bool keepdim) {
  DT_OP(median);
  return Pick(op, x, dim, keepdim, MedianRank);
}
Values nanmedian(const DTensor& x, int64_t dim, bool keepdim) {
  DT_OP(nanmedian);
  return Pick(op, x, dim, keepdim, NanMedianRank);
}
Values mode(const DTensor& x, int64_t dim, bool keepdim) {
  DT_OP(mode);
  return Pick(op, x, dim, keepdim, nullptr);
}
// The median of no elements: NaN, and what PyTorch makes of that in other dtypes.
static DTensor MedianOfNothing(const DTensor& x) {
  const DType t = x.dtype();
  const Scalar value = IsFloating(t)       ? Scalar(std::numeric_limits<double>::quiet_NaN())
                       : t == DType::kI64  ? Scalar(std::numeric_limits<int64_t>::min())
                       : t == DType::kI32  ? Scalar(std::numeric_limits<int32_t>::min())
                       : t == DType::kBool ? Scalar(1)
                                           : Scalar(0);
  return full({}, value, {t, x.mesh(), {}});
}
DTensor median(const DTensor& x) {
  return SharedAmong("median", x, [&] {
    return x.numel() == 0 ? MedianOfNothing(x) : median(InAnyOrder(x), 0)[0];
  });
}
DTensor nanmedian(const DTensor& x) {
  return SharedAmong("nanmedian", x, [&] {
    return x.numel() == 0 ? MedianOfNothing(x) : nanmedian(InAnyOrder(x), 0)[0];
  });
}

namespace {

// The rank of each quantile among n sorted elements: whole, and what is left to the next.
struct Ranks {
  DTensor whole, rest;  // int64, and q's dtype
};
Ranks RanksOf(const DTensor& q, int64_t n, const std::string& interpolation) {
  const DTensor exact = mul(q, static_cast<double>(n - 1));
  const DTensor whole = to(exact.Detach(), DType::kI64);  // towards 0: down
  const DTensor rest = sub(exact, to(whole, q.dtype()));
  if (interpolation == "linear") return {whole, rest};
  const DTensor none = zeros_like(rest);
  const DTensor between = gt(rest, 0);
  if (interpolation == "lower") return {whole, none};
  if (interpolation == "higher") return {add(whole, to(between, DType::kI64)), none};
  if (interpolation == "midpoint") return {whole, mul(to(between, q.dtype()), 0.5)};
  // Adding 1.5 * 2^52 leaves no place for a fraction: rounded to the nearest, halves to even.
  constexpr double kNoFraction = 6755399441055744.0;
  const DTensor rounded = sub(add(to(exact.Detach(), DType::kF64), kNoFraction), kNoFraction);
  return {to(rounded, DType::kI64), none};
}

// Ranks of which those of a q outside of [0, 1] are no index of n elements: taking them is an
// error.
Ranks Checked(Ranks ranks, const DTensor& q, int64_t n) {
  ranks.whole = where(logical_and(ge(q, 0), le(q, 1)), ranks.whole, n);
  return ranks;
}

// Of lines in the last dim: [..., n] -> [..., k], for ranks [k].
DTensor QuantilesOf(const DTensor& x, const Ranks& ranks) {
  const int64_t last = x.ndim() - 1, n = x.size(-1);
  const DTensor sorted = sort(x)[0];
  const auto like_x = [&](const DTensor& rank) {
    Shape shape = x.shape();
    shape[last] = rank.size(0);
    return shape;
  };
  const auto at = [&](const DTensor& rank) {
    return TakeAlong(sorted, expand(rank, like_x(rank)), last);
  };
  const DTensor next = add(ranks.whole, to(ne(ranks.rest, 0), DType::kI64));
  const DTensor low = at(ranks.whole), high = at(next);
  const DTensor between = add(low, mul(ranks.rest, sub(high, low)));
  const Shape shape = like_x(ranks.whole);
  // Where nothing is left nothing is between; and all that follows an infinity is one, but for the
  // opposite one.
  const DTensor infinite = logical_and(isinf(low), ne(low, neg(high)));
  const DTensor y = where(logical_or(infinite, eq(ranks.rest, 0)), low, between);
  const DTensor greatest = at(IndexList(x, {n - 1}));  // NaN, if there is one
  return where(expand(ne(greatest, greatest), shape), expand(greatest, shape), y);
}

void CheckQuantile(const DTensor& x, const DTensor& q, int64_t n, const std::string& how) {
  RequireFloating("quantile", x);
  if (q.ndim() > 1 || q.dtype() != x.dtype()) {
    ThrowInvalid("quantile", "q must be [] or [k] and have x's dtype");
  }
  if (n == 0) ThrowInvalid("quantile", "x is empty: there is no element to take");
  for (const char* known : {"linear", "lower", "higher", "nearest", "midpoint"}) {
    if (how == known) return;
  }
  ThrowInvalid("quantile", absl::StrCat("interpolation \"", how,
                                        "\" is none of linear, lower, higher, nearest, midpoint"));
}

// `known`: that q is in [0, 1].
DTensor Quantile(const DTensor& x, const DTensor& q, std::optional<int64_t> dim, bool keepdim,
                 const std::string& interpolation, bool known) {
  return AsOp("quantile", {{"x", x}, {"q", q}}, [&] {
    const int d = CheckedDim("quantile", dim.value_or(0), x.ndim());
    const bool one_line = !dim || x.ndim() == 0;
    CheckQuantile(x, q, one_line ? x.numel() : x.size(d), interpolation);
    const DTensor lines = one_line ? reshape(x, {x.numel()}) : transpose(x, d, -1);
    const DTensor ranks = reshape(q, {q.numel()});
    const int64_t n = lines.size(-1);
    const Ranks exact = RanksOf(ranks, n, interpolation);
    DTensor y = QuantilesOf(lines, known ? exact : Checked(exact, ranks.Detach(), n));
    DimList order = {y.ndim() - 1};  // the quantiles first
    for (int i = 0; i + 1 < y.ndim(); ++i) order.push_back(i);
    y = unsqueeze(permute(y, order), -1);  // x's dims behind, with size 1 for the one that is gone
    if (!one_line) y = transpose(y, d + 1, -1);
    Shape shape;
    if (q.ndim() == 1) shape.push_back(q.size(0));
    for (int i = 0; i < x.ndim(); ++i) {
      const bool gone = one_line || i == d;
      if (!gone || keepdim) shape.push_back(gone ? 1 : x.size(i));
    }
    return reshape(y, shape);
  });
}

}  // namespace

DTensor quantile(const DTensor& x, const DTensor& q, std::optional<int64_t> dim, bool keepdim,
                 const std::string& interpolation) {
  return Quantile(x, q, dim, keepdim, interpolation, /*known=*/false);
}

DTensor quantile(const DTensor& x, double q, std::optional<int64_t> dim, bool keepdim,
                 const std::string& interpolation) {
  RequireDefined("quantile", {{"x", x}});
  if (!(q >= 0 && q <= 1)) {
    ThrowInvalid("quantile", absl::StrCat("q = ", q, " is not in [0, 1]"), {{"x", x}});
  }
  const DTensor number = full({}, q, {x.dtype(), x.mesh(), Placements(x.mesh().ndim())});
  return Quantile(x, number, dim, keepdim, interpolation, /*known=*/true);
}

}  // namespace dtensor
