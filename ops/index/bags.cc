// one_hot, and embedding_bag: rows of a table, combined by bags.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// The bag of each id, from where bags begin, and how many bags; ids behind the last are in none.
struct Bags {
  RankList<int64_t> of_id;
  int64_t count;
};
Bags BagsOf(const DTensor& offsets, int64_t n, bool last_ends) {
  if (offsets.ndim() != 1 || IsFloating(offsets.dtype())) {
    ThrowInvalid("embedding_bag", "offsets must be integers with one dim");
  }
  RankList<int64_t> starts = ListOf(offsets);
  const bool ascend = std::is_sorted(starts.begin(), starts.end());
  if (starts.empty() || starts[0] != 0 || !ascend || starts.back() > n) {
    ThrowInvalid("embedding_bag",
                 absl::StrCat("offsets must start at 0, ascend, and end within ", n, " ids"));
  }
  const int64_t end = last_ends ? starts.back() : n;
  if (last_ends) starts.pop_back();
  Bags bags = {RankList<int64_t>(end), static_cast<int64_t>(starts.size())};
  for (int64_t i = 0; i < end; ++i) {
    bags.of_id[i] = std::upper_bound(starts.begin(), starts.end(), i) - starts.begin() - 1;
  }
  return bags;
}

// Of each bag and column the first of the largest rows, or n for an empty bag: [bags, d].
DTensor FirstOfLargest(const DTensor& rows, const DTensor& bag, int64_t bags) {
  const NoGrad no_grad;
  const int64_t n = rows.size(0);
  const Shape shape = {bags, rows.size(1)};
  const DTensor largest = index_reduce(zeros(shape, {rows.dtype(), rows.mesh(), {}}), 0, bag, rows,
                                       "amax", /*include_self=*/false);
  // A NaN, too, is the largest.
  const DTensor hit = logical_or(eq(rows, index_select(largest, 0, bag)), ne(rows, rows));
  const DTensor places = expand(unsqueeze(IndexRange(rows, 0, n, 1), 1), rows.shape());
  return index_reduce(full(shape, n, {DType::kI64, rows.mesh(), {}}), 0, bag,
                      masked_fill(places, logical_not(hit), n), "amin");
}

// rows [n, d], of which those count where `counts` (bool [n], or null: all) is true.
DTensor Combined(const DTensor& rows, const DTensor& counts, const DTensor& bag, int64_t bags,
                 const std::string& mode) {
  const auto size = [&] {
    const DTensor one = counts.defined() ? to(counts, rows.dtype())
                                         : ones({rows.size(0)}, {rows.dtype(), rows.mesh(), {}});
    return unsqueeze(AddUp(one, 0, bag, bags), 1);
  };
  if (mode == "max" && rows.size(0) > 0) {
    const double low = -std::numeric_limits<double>::infinity();
    const DTensor taken =
        counts.defined() ? masked_fill(rows, unsqueeze(logical_not(counts), 1), low) : rows;
    const DTensor first = FirstOfLargest(taken, bag, bags);
    const DTensor y = gather(taken, 0, clamp_max(first, rows.size(0) - 1));
    const DTensor none = eq(first, rows.size(0));
    // Of padding alone nothing counts either.
    return masked_fill(y, counts.defined() ? logical_or(none, eq(size(), 0)) : none, 0);
  }
  const DTensor taken =
      counts.defined() ? masked_fill(rows, unsqueeze(logical_not(counts), 1), 0) : rows;
  const DTensor sums = AddUp(taken, 0, bag, bags);
  if (mode != "mean") return sums;  // largest of nothing: 0
  const DTensor count = size();
  return div(sums, masked_fill(count, eq(count, 0), 1));
}

}  // namespace

DTensor embedding_bag(const DTensor& ids, const DTensor& weight, const DTensor& offsets,
                      const std::string& mode, bool scale_grad_by_freq,
                      const DTensor& per_sample_weights, int64_t padding_idx,
                      bool include_last_offset) {
  constexpr const char* kName = "embedding_bag";
  return AsOp(kName, {{"ids", ids}, {"weight", weight}}, [&] {
    if (mode != "sum" && mode != "mean" && mode != "max") {
      ThrowInvalid(kName, absl::StrCat("mode must be sum, mean or max, is \"", mode, "\""));
    }
    if (ids.ndim() != (offsets.defined() ? 1 : 2)) {
      ThrowInvalid(kName, "ids must be [bags, n], or [n] with offsets");
    }
    const bool weighted = per_sample_weights.defined();
    if (weighted && (mode != "sum" || per_sample_weights.shape() != ids.shape())) {
      ThrowInvalid(kName, "per_sample_weights need mode sum and the shape of ids");
    }
    DTensor flat = flatten(ids), weights = weighted ? flatten(per_sample_weights) : DTensor();
    DTensor bag;
    int64_t bags = 0;
    if (offsets.defined()) {
      const Bags found = BagsOf(offsets, ids.numel(), include_last_offset);
      const auto taken = static_cast<int64_t>(found.of_id.size());
      if (taken < flat.size(0)) flat = slice(flat, 0, 0, taken);
      if (weighted && taken < weights.size(0)) weights = slice(weights, 0, 0, taken);
      bag = IndexList(ids, found.of_id);
      bags = found.count;
    } else {
      bags = ids.size(0);
      bag = repeat_interleave(IndexRange(ids, 0, bags, 1), ids.size(1));
    }
    DTensor rows = embedding(flat, weight, -1, scale_grad_by_freq);
    const DTensor counts = padding_idx < 0 ? DTensor() : ne(flat, padding_idx);
    if (weighted && counts.defined()) weights = masked_fill(weights, logical_not(counts), 0);
    if (weighted) rows = mul(rows, unsqueeze(weights, 1));
    return Combined(rows, counts, bag, bags, mode);
  });
}

DTensor one_hot(const DTensor& classes, int64_t num_classes) {
  return AsOp("one_hot", {{"classes", classes}}, [&] {
    if (classes.dtype() != DType::kI64 && classes.dtype() != DType::kI32) {
      ThrowInvalid("one_hot",
                   absl::StrCat("classes must be int64 or int32, are ", TypeName(classes.dtype())));
    }
    int64_t n = num_classes;
    if (n < 0 && classes.numel() == 0) ThrowInvalid("one_hot", "no classes to count");
    if (n < 0) n = CountClasses("one_hot", classes);
    const DTensor checked = CheckedIndex(classes, n, /*wraps=*/false);
    return to(eq(unsqueeze(checked, -1), IndexRange(checked, 0, n, 1)), DType::kI64);
  });
}

}  // namespace dtensor
