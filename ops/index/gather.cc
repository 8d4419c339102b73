// Functions that read and write one element per index: gather, scatter and their kin.
#include "dtensor/ops/index/gather.h"

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// Throws unless `index` has as many dims as `other` and is no larger in any but `free` (-1: none).
void RequireWithin(const char* op, const DTensor& index, const char* name, const DTensor& other,
                   int free) {
  bool fits = index.ndim() == other.ndim();
  for (int d = 0; fits && d < index.ndim(); ++d) {
    fits = d == free || index.size(d) <= other.size(d);
  }
  if (fits) return;
  const std::string dims = free < 0 ? "in no dim" : absl::StrCat("in no dim but ", free);
  ThrowInvalid(op, absl::StrCat("index ", ToString(index.shape()), " must have the dims of ", name,
                                " ", ToString(other.shape()), " and be larger ", dims));
}

// The part of x, from index 0 on, that is as large as `shape` in all dims but `free`.
DTensor Fitted(const DTensor& x, IntSpan shape, int free) {
  DTensor part = x;
  for (int d = 0; d < x.ndim(); ++d) {
    if (d != free && x.size(d) > shape[d]) part = slice(part, d, 0, shape[d]);
  }
  return part;
}

using WriteFn =
    absl::FunctionRef<DTensor(const DTensor& x, int dim, const DTensor& index, const DTensor& src)>;

// write() on the part of x that index covers; the rest is x's.
DTensor OnCovered(const DTensor& x, int dim, const DTensor& index, const DTensor& src,
                  WriteFn write) {
  for (int d = 0; d < x.ndim(); ++d) {
    const int64_t covered = index.size(d);
    if (d == dim || covered == x.size(d)) continue;
    return cat({OnCovered(slice(x, d, 0, covered), dim, index, src, write),
                slice(x, d, covered, x.size(d))},
               d);
  }
  return write(x, dim, index, src);
}

// Checks the operands of a scatter and hands them on with the dims that they count as; `src` has
// the shape of the index then.
template <class Run>
DTensor WithScattered(const char* op, const DTensor& x, int64_t dim, const DTensor& index,
                      const DTensor& src, const Run& run) {
  return AsOp(op, {{"x", x}, {"index", index}, {"src", src}}, [&] {
    const int d = CheckedDim(op, dim, x.ndim());
    const DTensor base = WithDims(x), at = WithDims(index), from = WithDims(src);
    if (x.dtype() != src.dtype()) {
      ThrowInvalid(op, absl::StrCat("x is ", TypeName(x.dtype()), " and src ",
                                    TypeName(src.dtype()), ": they must have one dtype"));
    }
    RequireWithin(op, at, "src", from, -1);
    RequireWithin(op, at, "x", base, d);
    return run(base, d, at, Fitted(from, at.shape(), -1));
  });
}

DTensor Scattered(const char* op, const DTensor& x, int64_t dim, const DTensor& index,
                  const DTensor& src, WriteFn write) {
  return WithScattered(op, x, dim, index, src,
                       [&](const DTensor& base, int d, const DTensor& at, const DTensor& from) {
                         if (at.numel() == 0) return clone(x);
                         const DTensor y = OnCovered(base, d, at, from, write);
                         return x.ndim() == 0 ? reshape(y, {}) : y;
                       });
}

// In place where the index covers self: what covers a part would write to a view, which is not to
// be had of every layout, nor while recording.
DTensor ScatteredTo(const char* op, const DTensor& self, int64_t dim, const DTensor& index,
                    const DTensor& src, WriteFn to, WriteFn write) {
  return WithScattered(op, self, dim, index, src,
                       [&](const DTensor& base, int d, const DTensor& at, const DTensor& from) {
                         if (at.numel() == 0) return self;
                         bool whole = self.ndim() > 0;
                         for (int e = 0; e < base.ndim(); ++e) {
                           whole = whole && (e == d || at.size(e) == base.size(e));
                         }
                         if (whole) return to(self, d, at, from);
                         const DTensor y = OnCovered(clone(base), d, at, from, write);
                         return copy_(self, reshape(y, self.shape()));
                       });
}

// A number in the shape and layout of the index, in x's dtype.
DTensor Numbers(const char* op, const DTensor& x, const DTensor& index, Scalar value) {
  RequireDefined(op, {{"x", x}, {"index", index}});
  RequireOwn(op, {{"x", x}, {"index", index}});
  RequireHolds(op, x.dtype(), value, {{"x", x}, {"index", index}});
  return full(index.shape(), value, {x.dtype(), index.mesh(), WithoutPending(index.placements())});
}

std::string ReductionOf(const std::string& reduce) {
  if (reduce == "add") return "sum";
  if (reduce == "multiply") return "prod";
  ThrowInvalid("scatter", absl::StrCat("reduce must be add or multiply, is \"", reduce, "\""));
}

}  // namespace

DTensor gather(const DTensor& x, int64_t dim, const DTensor& index) {
  return AsOp("gather", {{"x", x}, {"index", index}}, [&] {
    const int d = CheckedDim("gather", dim, x.ndim());
    if (index.numel() == 0) return reshape(slice(flatten(x), 0, 0, 0), index.shape());
    const DTensor from = WithDims(x), at = WithDims(index);
    RequireWithin("gather", at, "x", from, d);
    const DTensor y = Pick(Fitted(from, at.shape(), d), d, at);
    return index.ndim() == 0 ? reshape(y, {}) : y;
  });
}

DTensor take_along_dim(const DTensor& x, const DTensor& index, std::optional<int64_t> dim) {
  return AsOp("take_along_dim", {{"x", x}, {"index", index}}, [&] {
    if (!dim) return gather(flatten(x), 0, flatten(index));
    if (x.ndim() != index.ndim()) {
      ThrowInvalid("take_along_dim", absl::StrCat("x has ", x.ndim(), " dims and index ",
                                                  index.ndim(), ": they must have equally many"));
    }
    const int d = CheckedDim("take_along_dim", *dim, x.ndim());
    if (x.ndim() == 0) return gather(x, d, CheckedIndex(index, 1, /*wraps=*/true));
    Shape with_one = index.shape();  // of index, with the indexed dim left out of broadcasting
    with_one[d] = x.size(d);
    const Shape grown = ValueOrThrow(BroadcastShapes(x.shape(), with_one));
    Shape picks = grown;
    picks[d] = index.size(d);
    const DTensor at = CheckedIndex(index, x.size(d), /*wraps=*/true);
    return gather(expand(x, grown), d, expand(at, picks));
  });
}

DTensor take(const DTensor& x, const DTensor& index) {
  return AsOp("take", {{"x", x}, {"index", index}}, [&] {
    const DTensor at = CheckedIndex(flatten(index), x.numel(), /*wraps=*/true);
    return reshape(gather(flatten(x), 0, at), index.shape());
  });
}

DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src) {
  return Scattered("scatter", x, dim, index, src, Write);
}
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, Scalar value) {
  return scatter(x, dim, index, Numbers("scatter", x, index, value));
}
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                const std::string& reduce) {
  return scatter_reduce(x, dim, index, src, ReductionOf(reduce));
}
DTensor scatter(const DTensor& x, int64_t dim, const DTensor& index, Scalar value,
                const std::string& reduce) {
  return scatter(x, dim, index, Numbers("scatter", x, index, value), reduce);
}

DTensor scatter_add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src) {
  return Scattered("scatter_add", x, dim, index, src, Add);
}

DTensor scatter_reduce(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& src,
                       const std::string& reduce, bool include_self) {
  return Scattered("scatter_reduce", x, dim, index, src,
                   [&](const DTensor& base, int d, const DTensor& at, const DTensor& from) {
                     return ReduceInto("scatter_reduce", base, d, at, from, reduce, include_self);
                   });
}

DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src) {
  return ScatteredTo("scatter_", self, dim, index, src, WriteTo, Write);
}
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value) {
  return scatter_(self, dim, index, Numbers("scatter_", self, index, value));
}
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src,
                 const std::string& reduce) {
  return AsOp("scatter_", {{"self", self}, {"index", index}, {"src", src}},
              [&] { return copy_(self, scatter(clone(self), dim, index, src, reduce)); });
}
DTensor scatter_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value,
                 const std::string& reduce) {
  return scatter_(self, dim, index, Numbers("scatter_", self, index, value), reduce);
}
DTensor scatter_add_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src) {
  return ScatteredTo("scatter_add_", self, dim, index, src, AddTo, Add);
}
DTensor scatter_reduce_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& src,
                        const std::string& reduce, bool include_self) {
  return AsOp("scatter_reduce_", {{"self", self}, {"index", index}, {"src", src}}, [&] {
    return copy_(self, scatter_reduce(clone(self), dim, index, src, reduce, include_self));
  });
}

}  // namespace dtensor
