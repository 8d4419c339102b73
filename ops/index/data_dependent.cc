// Results whose size is in the data: where a mask is true, and repetitions by numbers in a tensor.
#include <algorithm>
#include <memory>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dtensor/autograd.h"
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

// Row-major positions of what is not 0, on every rank.
DimList PositionsWhere(const DTensor& x) {
  const NoGrad no_grad;
  const std::vector<int64_t> truth = (x.dtype() == DType::kBool ? x : ne(x, 0)).ToVector<int64_t>();
  DimList positions;
  for (size_t i = 0; i < truth.size(); ++i) {
    if (truth[i] != 0) positions.push_back(static_cast<int64_t>(i));
  }
  return positions;
}

// The same as a tensor [n].
DTensor Positions(const DTensor& mask) {
  const DimList positions = PositionsWhere(mask);
  return FromVector(positions, {static_cast<int64_t>(positions.size())},
                    {DType::kI64, mask.mesh(), ListLike(mask)});
}

void RequireBool(const char* op, const DTensor& mask) {
  if (mask.dtype() == DType::kBool) return;
  ThrowInvalid(op, absl::StrCat("mask must be bool, is ", TypeName(mask.dtype())));
}

// The elements of x where the mask is true, taken where both lie alike; null where they do not. The
// gradient goes back to where they were found.
DTensor SelectFound(const DTensor& x, const DTensor& mask) {
  const auto whole = [](const Placement& p) { return p.is_replicate(); };
  const bool alike = x.mesh() == mask.mesh() &&
                     (x.placements() == mask.placements() ||
                      std::all_of(mask.placements().begin(), mask.placements().end(), whole));
  if (!alike || x.spec().has_partial()) return {};
  const auto found =
      std::make_shared<std::optional<Found>>(Found::In(mask.Detach().Redistribute(x.placements())));
  if (!*found) return {};
  const SpecRef spec = x.spec_ref();
  const auto forward = [&]() -> Values {
    const DTensor line = flatten(OnSelf(x.local()));
    return {(*found)->Spread(index_select(line, 0, (*found)->places()).local())};
  };
  const auto backward = [found, spec](const Values& grads) -> Values {
    const Found& f = **found;
    const DTensor dy = grads[0].Redistribute(f.ListPlacements());
    return {OfParts(*spec, [&] {
      const TensorOptions here = {.dtype = dy.dtype(), .mesh = f.places().mesh()};
      const DTensor rows = zeros({f.places().numel()}, here);
      AddRowsBack(f.move(), spec->mesh(), dy.local(), rows.local());
      const DTensor line = zeros({Numel(spec->local_shape())}, here);
      return reshape(index_add(line, 0, f.places(), rows), spec->local_shape()).local();
    })};
  };
  return CustomFunction("masked_select", {x}, forward, backward)[0];
}

// Where index i comes from if each is repeated; throws for negative numbers and another sum than
// `wanted`.
DimList Repeated(const DTensor& repeats, std::optional<int64_t> wanted) {
  if (repeats.ndim() > 1 || (repeats.dtype() != DType::kI64 && repeats.dtype() != DType::kI32)) {
    ThrowInvalid("repeat_interleave", "repeats must be int64 or int32 and have one dim or none");
  }
  const std::vector<int64_t> counts = repeats.ToVector<int64_t>();
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
  DimList from;
  from.reserve(total);
  for (size_t i = 0; i < counts.size(); ++i) from.insert(from.end(), counts[i], i);
  return from;
}

}  // namespace

DTensor nonzero(const DTensor& x) {
  return AsOp("nonzero", {{"x", x}}, [&] {
    if (const std::optional<Found> found = Found::In(x)) {
      return found->Spread(found->Indices().local());
    }
    const DimList positions = PositionsWhere(x);
    const auto n = static_cast<int64_t>(positions.size());
    const int ndim = x.ndim();
    DimList indices(n * ndim);
    for (int64_t i = 0; i < n; ++i) {
      int64_t rest = positions[i];
      for (int d = ndim; d-- > 0;) {
        indices[i * ndim + d] = rest % x.size(d);
        rest /= x.size(d);
      }
    }
    return FromVector(indices, {n, ndim}, {DType::kI64, x.mesh(), ListLike(x)});
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
    const DTensor found = SelectFound(both[0], both[1]);
    return found.defined() ? found : index_select(flatten(both[0]), 0, Positions(both[1]));
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
    const DTensor at = Positions(both[1]);
    if (source.numel() < at.size(0)) {
      ThrowInvalid("masked_scatter",
                   absl::StrCat("source has ", source.numel(), " elements for the ", at.size(0),
                                " where mask is true"));
    }
    const DTensor from = slice(flatten(source), 0, 0, at.size(0));
    return reshape(index_copy(flatten(both[0]), 0, at, from), both[0].shape());
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
    return index_select(from, d, IndexList(x, Repeated(each, output_size)));
  });
}

DTensor repeat_interleave(const DTensor& repeats, std::optional<int64_t> output_size) {
  return AsOp("repeat_interleave", {{"repeats", repeats}}, [&] {
    return to(IndexList(repeats, Repeated(repeats, output_size)), repeats.dtype());
  });
}

}  // namespace dtensor
