// Results whose size is in the data: where a mask is true, and repetitions by numbers in a tensor.
#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
#include "dtensor/intercept.h"
#include "dtensor/ops/index/advanced.h"
#include "dtensor/ops/index/found.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// Placements for a list that is made of x's elements.
Placements ListLike(const DTensor& x) {
  Placements placements;
  for (const Placement& p : x.placements()) {
    placements.push_back(p.cuts() ? Shard(0) : Replicate());
  }
  return placements;
}

// The elements of `result` are there by the values of `of`.
DTensor Told(DTensor result, const DTensor& of) {
  internal::NoteMade(result, of);
  return result;
}

// Row-major places of what is true, as a tensor [n].
DTensor Positions(const DTensor& mask) {
  return Told(DistributeTensor(PlacesIn(mask), mask.mesh(), ListLike(mask)), mask);
}

void RequireBool(const char* op, const DTensor& mask) {
  if (mask.dtype() == DType::kBool) return;
  ThrowInvalid(op, absl::StrCat("mask must be bool, is ", TypeName(mask.dtype())));
}

// What the mask is true of, found where x and the mask lie alike; null where they do not.
std::shared_ptr<const Found> FoundWhere(const DTensor& x, const DTensor& mask) {
  const auto whole = [](const Placement& p) { return p.is_replicate(); };
  const bool alike = x.mesh() == mask.mesh() &&
                     (x.placements() == mask.placements() ||
                      std::all_of(mask.placements().begin(), mask.placements().end(), whole));
  if (!alike || x.spec().has_partial()) return nullptr;
  std::optional<Found> found = Found::In(mask.Detach().Redistribute(x.placements()));
  return found ? std::make_shared<const Found>(*std::move(found)) : nullptr;
}

// The elements of x where they were found; the gradient goes back there.
DTensor SelectFound(const std::shared_ptr<const Found>& found, const DTensor& x) {
  const auto backward = [found](const Values& grads) -> Values {
    return {found->Put(grads[0].Redistribute(found->ListPlacements()))};
  };
  return CustomFunction(
      "masked_select", {x}, [&]() -> Values { return {found->Select(x)}; }, backward)[0];
}

// The reverse: the elements of a list where they were found, else 0.
DTensor PutFound(const std::shared_ptr<const Found>& found, const DTensor& list) {
  const auto whole = [](const Placement& p) { return p.is_replicate(); };
  const bool here = std::all_of(list.placements().begin(), list.placements().end(), whole);
  const DTensor placed = here ? list : list.Redistribute(found->ListPlacements());
  const auto backward = [found](const Values& grads) -> Values {
    return {found->Select(grads[0].Redistribute(found->MaskPlacements()))};
  };
  return CustomFunction(
      "masked_scatter", {placed}, [&]() -> Values { return {found->Put(placed)}; }, backward)[0];
}

// Where index i comes from if each is repeated; throws for negative numbers and another sum than
// `wanted`.
RankList<int64_t> Repeated(const DTensor& repeats, std::optional<int64_t> wanted) {
  if (repeats.ndim() > 1 || (repeats.dtype() != DType::kI64 && repeats.dtype() != DType::kI32)) {
    ThrowInvalid("repeat_interleave", "repeats must be int64 or int32 and have one dim or none");
  }
  const RankList<int64_t> counts = ListOf(repeats);
  int64_t total = 0;
  for (const int64_t count : counts) {
    const bool fits = count >= 0 && !__builtin_add_overflow(total, count, &total);
    if (!fits || total > int64_t{1} << 40) {
      ThrowInvalid("repeat_interleave", absl::StrCat("cannot repeat ", count, " times"));
    }
  }
  if (wanted && *wanted != total) {
    ThrowInvalid("repeat_interleave",
                 absl::StrCat("output_size is ", *wanted, " and the sum of repeats ", total));
  }
  RankList<int64_t> from;
  from.reserve(total);
  for (size_t i = 0; i < counts.size(); ++i) from.insert(from.end(), counts[i], i);
  return from;
}

}  // namespace

DTensor nonzero(const DTensor& x) {
  return AsOp("nonzero", {{"x", x}}, [&] {
    if (const std::optional<Found> found = Found::In(x)) {
      return Told(found->Spread(found->Indices().local()), x);
    }
    return Told(DistributeTensor(IndicesOf(PlacesIn(x), x.shape()), x.mesh(), ListLike(x)), x);
  });
}

Values nonzero_tuple(const DTensor& x) {
  return AsOp("nonzero_tuple", {{"x", x}}, [&] { return unbind(nonzero(WithDims(x)), 1); });
}

DTensor argwhere(const DTensor& x) { return nonzero(x); }

DTensor masked_select(const DTensor& x, const DTensor& mask) {
  return AsOp("masked_select", {{"x", x}, {"mask", mask}}, [&] {
    RequireBool("masked_select", mask);
    const Values both = broadcast_tensors({x, mask});
    const auto found = FoundWhere(both[0], both[1]);
    if (found != nullptr) return Told(SelectFound(found, both[0]), both[1]);
    return index_select(flatten(both[0]), 0, Positions(both[1]));
  });
}

DTensor masked_scatter(const DTensor& x, const DTensor& mask, const DTensor& source) {
  return AsOp("masked_scatter", {{"x", x}, {"mask", mask}, {"source", source}}, [&] {
    RequireBool("masked_scatter", mask);
    if (x.dtype() != source.dtype()) {
      ThrowInvalid("masked_scatter",
                   absl::StrCat("x is ", TypeName(x.dtype()), " and source ",
                                TypeName(source.dtype()), ": they must have one dtype"));
    }
    const Values both = broadcast_tensors({x, mask});
    const auto first = [&](int64_t count) {
      if (source.numel() < count) {
        ThrowInvalid("masked_scatter",
                     absl::StrCat("source has ", source.numel(), " elements for the ", count,
                                  " where mask is true"));
      }
      return slice(flatten(source), 0, 0, count);
    };
    if (const auto found = FoundWhere(both[0], both[1])) {
      return where(both[1], PutFound(found, first(found->count())), both[0]);
    }
    const DTensor at = Positions(both[1]);
    return Owned(reshape(index_copy(flatten(both[0]), 0, at, first(at.size(0))), both[0].shape()));
  });
}

DTensor masked_scatter_(const DTensor& self, const DTensor& mask, const DTensor& source) {
  return AsOp("masked_scatter_", {{"self", self}, {"mask", mask}, {"source", source}},
              [&] { return copy_(self, masked_scatter(clone(self), mask, source)); });
}

DTensor repeat_interleave(const DTensor& x, int64_t repeats, std::optional<int64_t> dim) {
  return AsOp("repeat_interleave", {{"x", x}}, [&] {
    const DTensor from = dim ? WithDims(x) : flatten(x);
    const int d = dim ? CheckedDim("repeat_interleave", *dim, x.ndim()) : 0;
    if (repeats < 0 || repeats > int64_t{1} << 40) {
      ThrowInvalid("repeat_interleave", absl::StrCat("cannot repeat ", repeats, " times"));
    }
    Shape grown = from.shape();
    grown.insert(grown.begin() + d + 1, repeats);
    ThrowIfError(CheckedNumel(grown).status());
    return flatten(clone(expand(unsqueeze(from, d + 1), grown)), d, d + 1);
  });
}

DTensor repeat_interleave(const DTensor& x, const DTensor& repeats, std::optional<int64_t> dim,
                          std::optional<int64_t> output_size) {
  return AsOp("repeat_interleave", {{"x", x}, {"repeats", repeats}}, [&] {
    const DTensor from = dim ? WithDims(x) : flatten(x);
    const int d = dim ? CheckedDim("repeat_interleave", *dim, x.ndim()) : 0;
    const bool for_all = repeats.numel() == 1 && from.size(d) != 1;
    if (!for_all && repeats.numel() != from.size(d)) {
      ThrowInvalid("repeat_interleave",
                   absl::StrCat("repeats has ", repeats.numel(), " elements for dim ", d, " of ",
                                ToString(from.shape())));
    }
    const DTensor each = for_all ? expand(WithDims(repeats), {from.size(d)}) : repeats;
    return index_select(from, d, Told(IndexList(x, Repeated(each, output_size)), each));
  });
}

DTensor repeat_interleave(const DTensor& repeats, std::optional<int64_t> output_size) {
  return AsOp("repeat_interleave", {{"repeats", repeats}}, [&] {
    return Told(to(IndexList(repeats, Repeated(repeats, output_size)), repeats.dtype()), repeats);
  });
}

}  // namespace dtensor
