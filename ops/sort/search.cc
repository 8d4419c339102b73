// Searching, counting, and what is there once.
#include <cmath>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rows.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/sort/along.h"
#include "dtensor/ops/sort/sharded_sort.h"
#include "dtensor/ops/sort/sort.h"

namespace dtensor {
namespace {

// "[s], ... -> ..." of one sequence; of several "d0 [s], d0 m -> d0 m", and a sorter like them.
absl::StatusOr<FactorText> SearchFactors(const OpCall& call) {
  const int n = call.in(0).ndim();
  if (n == 0) return absl::InvalidArgumentError("the sequence has no dims");
  DimTexts sequence = DimNames(n - 1), x = {"..."};
  if (n > 1) {
    x = sequence;
    x.push_back("m");
  }
  sequence.push_back("[s]");
  std::vector<DimTexts> inputs = {sequence, x};
  if (call.num_inputs() > 2) inputs.push_back(sequence);
  return FactorText{FactorString(inputs, {x}), {}};
}

absl::Status CheckSearch(const OpCall& call) {
  if (call.dtype(0) != call.dtype(1)) {
    return absl::InvalidArgumentError("the sequence and x have different dtypes");
  }
  if (call.num_inputs() == 2 || call.dtype(2) == DType::kI64) return absl::OkStatus();
  return absl::InvalidArgumentError("the sorter must be int64");
}

absl::StatusOr<DType> PlaceType(const OpCall& call, int) {
  return call.Bool("int32") ? DType::kI32 : DType::kI64;
}

// A larger x comes later; but NaN, which wins a minimum too, comes last.
bool PlacesKeepOrder(const OpCall& call, ReduceOp pending) {
  return pending == ReduceOp::kMax || !IsFloating(call.dtype(1));
}

}  // namespace

void RegisterSearchOps() {
  for (const char* signature : {"searchsorted(sequence, x; right, int32)",
                                "searchsorted_by(sequence, x, sorter; right, int32)"}) {
    Op(signature)
        .Factors(SearchFactors)
        .MonotoneIf(PlacesKeepOrder, "x")
        .Check(CheckSearch)
        .OutDType(PlaceType);
  }
  // x [n, m] -> the rows that differ and zeros, which of them each row is, how often they are
  // there, and how many there are.
  Op("unique_rows(x; consecutive) -> rows, inverse, counts, found")
      .Factors("[n] [m] -> [n] [m], [n], [n], 1")
      .OutDType(ValuesAndIndices);
}

DTensor searchsorted(const DTensor& sequence, const DTensor& x, bool out_int32, bool right,
                     const DTensor& sorter) {
  static const OpDef& op = GetOp("searchsorted");
  static const OpDef& op_by = GetOp("searchsorted_by");
  return AsOp("searchsorted",
              {{"sequence", sequence}, {"x", x}, {"sorter", sorter, /*optional=*/true}}, [&] {
                const NoGrad no_grad;
                const DType type = PromoteTypes(sequence.dtype(), x.dtype());
                const DTensor s = to(sequence, type), values = to(x, type);
                const Attr attrs[] = {BoolAttr(right), BoolAttr(out_int32)};
                if (!sorter.defined()) return Call1(op, {&s, &values}, attrs);
                return Call1(op_by, {&s, &values, &sorter}, attrs);
              });
}

DTensor bucketize(const DTensor& x, const DTensor& boundaries, bool out_int32, bool right) {
  return AsOp("bucketize", {{"x", x}, {"boundaries", boundaries}}, [&] {
    if (boundaries.ndim() != 1) ThrowInvalid("bucketize", "boundaries must have one dim");
    return searchsorted(boundaries, x, out_int32, right);
  });
}

DTensor searchsorted(const DTensor& sequence, Scalar x, bool out_int32, bool right,
                     const DTensor& sorter) {
  const DTensor number = pointwise::NumberLike("searchsorted", sequence, x,
                                               pointwise::TypeWith("searchsorted", sequence, x));
  return searchsorted(sequence, number, out_int32, right, sorter);
}
DTensor bucketize(Scalar x, const DTensor& boundaries, bool out_int32, bool right) {
  const DTensor number = pointwise::NumberLike("bucketize", boundaries, x,
                                               pointwise::TypeWith("bucketize", boundaries, x));
  return bucketize(number, boundaries, out_int32, right);
}

DTensor isin(const DTensor& elements, const DTensor& test, bool /*assume_unique*/, bool invert) {
  return AsOp("isin", {{"elements", elements}, {"test", test}}, [&] {
    const NoGrad no_grad;
    const DType type = PromoteTypes(elements.dtype(), test.dtype());
    const DTensor x = to(elements, type);
    const DTensor sorted = sort(reshape(to(test, type), {test.numel()}))[0];
    // Somewhere between the place before those equal to it and the one after them.
    const DTensor before = searchsorted(sorted, x), after = searchsorted(sorted, x, false, true);
    return invert ? eq(before, after) : ne(before, after);
  });
}
DTensor isin(const DTensor& elements, Scalar test, bool /*assume_unique*/, bool invert) {
  return AsOp("isin", {{"elements", elements}}, [&] {
    const NoGrad no_grad;
    return invert ? ne(elements, test) : eq(elements, test);
  });
}

DTensor bincount(const DTensor& x, const DTensor& weights, int64_t minlength) {
  return AsOp("bincount", {{"x", x}, {"weights", weights, /*optional=*/true}}, [&] {
    const NoGrad no_grad;
    if (x.ndim() != 1 || IsFloating(x.dtype()) || minlength < 0 ||
        (weights.defined() && weights.shape() != x.shape())) {
      ThrowInvalid("bincount",
                   "needs integers [n], weights (if any) of that shape, and minlength >= 0");
    }
    // Of nothing, which weighs nothing, int64 as in PyTorch.
    if (x.numel() == 0) return zeros({minlength}, {DType::kI64, x.mesh(), {}});
    const DTensor ids = to(x, DType::kI64);
    const double least = amin(ids).Item();
    if (least < 0) ThrowInvalid("bincount", absl::StrCat("x holds ", least, ", a negative"));
    const int64_t size = std::max(minlength, CountClasses("bincount", ids));
    if (!weights.defined()) return PutAlong(ones_like(ids), ids, 0, size);
    const bool single = weights.dtype() == DType::kF32;
    return PutAlong(single ? weights : to(weights, DType::kF64), ids, 0, size);
  });
}

DTensor histc(const DTensor& x, int64_t bins, Scalar min, Scalar max) {
  return AsOp("histc", {{"x", x}}, [&] {
    const NoGrad no_grad;
    RequireFloating("histc", x);
    double low = min.d, high = max.d;
    if (low == high && x.numel() > 0) {
      low = amin(x).Item();
      high = amax(x).Item();
    }
    if (low == high) {
      low -= 1;
      high += 1;
    }
    if (bins < 1 || bins == INT64_MAX || !(low < high) || !std::isfinite(low) ||
        !std::isfinite(high)) {
      ThrowInvalid("histc", absl::StrCat("needs bins >= 1 and a finite range, got ", bins,
                                         " bins of [", low, ", ", high, "]"));
    }
    // In bfloat16 every step is rounded, as in PyTorch: that decides in which bin a number is.
    const DType type = x.dtype() == DType::kBF16 ? x.dtype() : ComputeType(x.dtype());
    const DTensor line = to(reshape(x, {x.numel()}), type);
    // Elements outside, and NaN, go to a bin of their own, which is dropped.
    const DTensor outside = logical_not(mul(ge(line, low), le(line, high)));
    const DTensor at = div(mul(sub(line, low), static_cast<double>(bins)), high - low);
    const DTensor bin = to(masked_fill(at, outside, 0.0), DType::kI64);
    const DTensor within = masked_fill(bin, eq(bin, bins), bins - 1);  // the last one is closed
    const DTensor ids = masked_fill(within, outside, bins);
    return to(slice(PutAlong(ones_like(line, ComputeType(type)), ids, 0, bins + 1), 0, 0, bins),
              x.dtype());
  });
}

namespace {

// Results of whole tensors go where x was: along `dim`, where x was sharded at all.
DTensor Spread(const DTensor& y, const DTensor& x, int64_t dim) {
  Placements placements;
  for (const Placement& p : x.placements()) {
    placements.push_back(p.cuts() ? Shard(static_cast<int>(dim)) : Replicate());
  }
  return y.Redistribute(placements);
}

// A line in blocks that is searched where it lies, and where in x its elements stood (null: there).
struct LineToSearch {
  DTensor line, places;
};
// Null where gathering x moves less. `more`: bytes besides for each element.
LineToSearch LineInBlocks(const DTensor& x, bool consecutive, int64_t more) {
  if (x.mesh().is_self() || x.ndim() == 0 || x.spec().has_partial() || CutsOf(x.spec(), 0).empty())
    return {};
  for (const Placement& p : x.placements()) {
    if (p.cuts_dim() && p.dim() != 0) return {};
  }
  const DTensor line = reshape(x, {x.numel()});
  if (consecutive) return {AreLinesInBlocks(line, 0) ? line : DTensor(), {}};
  if (!SortsInBlocks(line, more)) return {};
  const Values sorted = SortInBlocks(line, false);
  return {sorted[0], sorted[1]};
}

// What differs from the element before it, and on demand which of these each element of x is, and
// how many follow each that do not. All of it goes from rank to rank as roll and masked_select send
// it.
Values RunsInBlocks(const LineToSearch& in, const DTensor& x, bool inverse, bool counts) {
  const DTensor& line = in.line;
  const Placements placements(line.placements().begin(), line.placements().end());
  const TensorOptions like = {DType::kI64, line.mesh(), placements};
  const int64_t n = line.numel();
  const DTensor index = arange(0, n, 1, like);
  const DTensor starts = logical_or(ne(line, roll(line, {1}, {0})), eq(index, 0));
  Values out = {masked_select(line, starts)};
  if (inverse) {
    const DTensor run = sub(cumsum(to(starts, DType::kI64), 0), 1).Redistribute(placements);
    const DTensor of_x = in.places.defined() ? PutInBlocks(run, in.places) : run;
    out.push_back(Spread(Owned(reshape(of_x, x.shape())), x, 0));
  }
  if (!counts) return out;
  const DTensor at = masked_select(index, starts);
  const DTensor is_last = eq(arange(0, at.numel(), 1, like), at.numel() - 1);
  out.push_back(sub(masked_fill(roll(at, {-1}, {0}), is_last, n), at));
  return out;
}

Values UniqueRows(const char* name, const DTensor& x, bool consecutive, bool inverse, bool counts,
                  std::optional<int64_t> dim) {
  static const OpDef& op = GetOp("unique_rows");
  return AsOp(name, {{"x", x}}, [&] {
    const NoGrad no_grad;
    const bool slices = dim && x.ndim() > 0;
    if (!slices || x.ndim() == 1) {
      const LineToSearch in = LineInBlocks(x, consecutive, inverse ? kPutBytes : 0);
      if (in.line.defined()) return RunsInBlocks(in, x, inverse, counts);
    }
    const int64_t d = slices ? CheckedDim(name, *dim, x.ndim()) : 0;
    const DTensor first = slices ? movedim(x, {d}, {0}) : x;
    const int64_t n = slices ? first.size(0) : x.numel();
    const int64_t width = slices ? x.numel() / std::max<int64_t>(n, 1) : 1;
    const DTensor rows = reshape(first, {n, width});
    const Values all = Call(op, {&rows}, {BoolAttr(consecutive)});
    const int64_t found = static_cast<int64_t>(all[3].Item());
    Shape shape = slices ? first.shape() : Shape{0};
    shape[0] = found;
    // Copies: results hold no more than they show.
    DTensor values = reshape(slice(all[0], 0, 0, found), shape);
    if (slices) values = movedim(values, {0}, {d});
    Values out = {Spread(clone(contiguous(values)), x, d)};
    if (inverse) {
      out.push_back(Spread(slices ? all[1] : Owned(reshape(all[1], x.shape())), x, 0));
    }
    if (counts) out.push_back(Spread(clone(slice(all[2], 0, 0, found)), x, 0));
    return out;
  });
}

}  // namespace

Values unique(const DTensor& x, bool /*sorted: always*/, bool return_inverse, bool return_counts,
              std::optional<int64_t> dim) {
  return UniqueRows("unique", x, false, return_inverse, return_counts, dim);
}
Values unique_consecutive(const DTensor& x, bool return_inverse, bool return_counts,
                          std::optional<int64_t> dim) {
  return UniqueRows("unique_consecutive", x, true, return_inverse, return_counts, dim);
}

}  // namespace dtensor
