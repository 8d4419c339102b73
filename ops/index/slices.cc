// Functions that read and write slices of one dim: index_select, index_add and their kin, and what
// views of a tensor would write.
#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/gather.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/view/diagonal.h"
#include "dtensor/ops/view/slice_range.h"

namespace dtensor {
namespace {

// An index of slices, with one dim.
DTensor Listed(const char* op, const DTensor& index) {
  if (index.ndim() > 1) {
    ThrowInvalid(op, absl::StrCat("index must have one dim or none, is ", ToString(index.shape())));
  }
  return WithDims(index);
}

using WriteFn = absl::FunctionRef<DTensor(const DTensor& x, int dim, const DTensor& index,
                                          const DTensor& source)>;

// Checks the operands and hands them on with the dims that they count as; the result has x's shape.
DTensor Written(const char* op, const DTensor& x, int64_t dim, const DTensor& index,
                const DTensor& source, WriteFn write) {
  return AsOp(op, {{"x", x}, {"index", index}, {"source", source}}, [&] {
    const int d = CheckedDim(op, dim, x.ndim());
    const DTensor at = Listed(op, index);
    const DTensor base = WithDims(x), from = WithDims(source);
    Shape wanted = base.shape();
    wanted[d] = at.size(0);
    if (from.shape() != wanted) {
      ThrowInvalid(op, absl::StrCat("source must be ", ToString(wanted), " (x with a slice of dim ",
                                    d, " for each index), is ", ToString(source.shape())));
    }
    if (x.dtype() != source.dtype()) {
      ThrowInvalid(op, absl::StrCat("x is ", TypeName(x.dtype()), " and source ",
                                    TypeName(source.dtype()), ": they must have one dtype"));
    }
    const DTensor y = write(base, d, at, from);
    return x.ndim() == 0 ? reshape(y, {}) : y;
  });
}

// source * alpha in its dtype: of bool source, if alpha is not 0.
DTensor Times(const char* op, const DTensor& source, Scalar alpha) {
  RequireDefined(op, {{"source", source}});
  if (alpha.is_float && !IsFloating(source.dtype())) {
    ThrowInvalid(op, absl::StrCat("alpha is a fraction and source ", TypeName(source.dtype())));
  }
  return alpha.d == 1 ? source : to(mul(source, alpha), source.dtype());
}

// One number in the slices of x that index names.
DTensor Filled(const char* op, const DTensor& x, int64_t dim, const DTensor& index, Scalar value,
               WriteFn write) {
  return AsOp(op, {{"x", x}, {"index", index}}, [&] {
    RequireOwn(op, {{"x", x}});  // before anything is made on its mesh
    const int d = CheckedDim(op, dim, x.ndim());
    const DTensor base = WithDims(x);
    const DTensor at = CheckedIndex(Listed(op, index), base.size(d), /*wraps=*/true);
    Shape shape = base.shape();
    shape[d] = at.size(0);
    RequireHolds(op, x.dtype(), value);
    const DTensor number = full({}, value, {x.dtype(), x.mesh(), {}});
    const DTensor y = write(base, d, at, expand(number, shape));
    return x.ndim() == 0 ? reshape(y, {}) : y;
  });
}

// In place: to(); of a 0-d self, whose one dim would be a view, what `anew` makes of a copy.
template <class To, class Anew>
DTensor InPlace(const char* op, const DTensor& self, const To& to, const Anew& anew) {
  if (self.defined() && self.ndim() == 0) {
    return AsOp(op, {{"self", self}}, [&] { return copy_(self, anew(clone(self))); });
  }
  to();
  return self;
}

// True for those slices, as a mask that broadcasts to x: of a value that wants a gradient each
// element counts once.
DTensor Named(const char* op, const DTensor& x, int64_t dim, const DTensor& index) {
  RequireOwn(op, {{"x", x}});
  const int d = CheckedDim(op, dim, x.ndim());
  const TensorOptions options = {DType::kBool, x.mesh(), {}};
  const DTensor none = zeros({WithDims(x).size(d)}, options);
  const DTensor named = index_fill(none, 0, index, 1);
  if (x.ndim() == 0) return reshape(named, {});
  Shape shape(x.ndim(), 1);
  shape[d] = x.size(d);
  return reshape(named, shape);
}

}  // namespace

DTensor index_select(const DTensor& x, int64_t dim, const DTensor& index) {
  return AsOp("index_select", {{"x", x}, {"index", index}}, [&] {
    const int d = CheckedDim("index_select", dim, x.ndim());
    const DTensor y = Pick(WithDims(x), d, Listed("index_select", index));
    return x.ndim() == 0 ? reshape(y, {}) : y;
  });
}

DTensor index_add(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source,
                  Scalar alpha) {
  return Written("index_add", x, dim, index, Times("index_add", source, alpha), Add);
}
DTensor index_copy(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source) {
  return Written("index_copy", x, dim, index, source, Write);
}
DTensor index_fill(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& value) {
  return AsOp("index_fill", {{"x", x}, {"index", index}, {"value", value}},
              [&] { return masked_fill(x, Named("index_fill", x, dim, index), value); });
}
DTensor index_fill(const DTensor& x, int64_t dim, const DTensor& index, Scalar value) {
  return Filled("index_fill", x, dim, index, value, Write);
}
DTensor index_reduce(const DTensor& x, int64_t dim, const DTensor& index, const DTensor& source,
                     const std::string& reduce, bool include_self) {
  return Written("index_reduce", x, dim, index, source,
                 [&](const DTensor& base, int d, const DTensor& at, const DTensor& from) {
                   return ReduceInto("index_reduce", base, d, at, from, reduce, include_self);
                 });
}

DTensor put(const DTensor& x, const DTensor& index, const DTensor& source, bool accumulate) {
  return AsOp("put", {{"x", x}, {"index", index}, {"source", source}}, [&] {
    if (index.numel() != source.numel()) {
      ThrowInvalid("put", absl::StrCat(index.numel(), " indices for ", source.numel(),
                                       " elements of source"));
    }
    const DTensor at = CheckedIndex(flatten(index), x.numel(), /*wraps=*/true);
    const DTensor from = flatten(source);
    const DTensor y =
        accumulate ? index_add(flatten(x), 0, at, from) : index_copy(flatten(x), 0, at, from);
    return reshape(y, x.shape());
  });
}

DTensor slice_scatter(const DTensor& x, const DTensor& src, int64_t dim,
                      std::optional<int64_t> start, std::optional<int64_t> end, int64_t step) {
  return AsOp("slice_scatter", {{"x", x}, {"src", src}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("slice_scatter", "x has no dims");
    if (step < 1) ThrowInvalid("slice_scatter", absl::StrCat("step must be positive, is ", step));
    const int d = CheckedDim("slice_scatter", dim, x.ndim());
    const SliceRange r = ClampSlice(x.size(d), start.value_or(0), end.value_or(x.size(d)), step);
    return index_copy(x, d, IndexRange(x, r.start, r.length, r.step), to(src, x.dtype()));
  });
}

DTensor select_scatter(const DTensor& x, const DTensor& src, int64_t dim, int64_t index) {
  return AsOp("select_scatter", {{"x", x}, {"src", src}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("select_scatter", "x has no dims");
    const int d = CheckedDim("select_scatter", dim, x.ndim());
    const int64_t size = x.size(d);
    if (index < -size || index >= size) {
      ThrowInvalid("select_scatter", absl::StrCat("index ", index, " is outside of dim ", d));
    }
    return index_copy(x, d, IndexRange(x, index < 0 ? index + size : index, 1, 1),
                      unsqueeze(to(src, x.dtype()), d));
  });
}

DTensor diagonal_scatter(const DTensor& x, const DTensor& src, int64_t offset, int64_t dim1,
                         int64_t dim2) {
  return AsOp("diagonal_scatter", {{"x", x}, {"src", src}}, [&] {
    const DiagonalDims dims = CheckedDiagonal("diagonal_scatter", x.ndim(), dim1, dim2);
    const DTensor last = movedim(x, {dims.first, dims.second}, {-2, -1});
    const DiagonalRange r = DiagonalOf(last.size(-2), last.size(-1), offset);
    const DTensor y = index_copy(flatten(last, -2, -1), -1,
                                 IndexRange(x, r.start, r.length, r.step), to(src, x.dtype()));
    return movedim(reshape(y, last.shape()), {-2, -1}, {dims.first, dims.second});
  });
}

// --- in place

DTensor index_add_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source,
                   Scalar alpha) {
  return InPlace(
      "index_add_", self,
      [&] { Written("index_add_", self, dim, index, Times("index_add_", source, alpha), AddTo); },
      [&](const DTensor& x) { return index_add(x, dim, index, source, alpha); });
}
DTensor index_copy_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source) {
  return InPlace(
      "index_copy_", self, [&] { Written("index_copy_", self, dim, index, source, WriteTo); },
      [&](const DTensor& x) { return index_copy(x, dim, index, source); });
}
DTensor index_fill_(const DTensor& self, int64_t dim, const DTensor& index, Scalar value) {
  return InPlace(
      "index_fill_", self, [&] { Filled("index_fill_", self, dim, index, value, WriteTo); },
      [&](const DTensor& x) { return index_fill(x, dim, index, value); });
}
DTensor index_fill_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& value) {
  return AsOp("index_fill_", {{"self", self}, {"index", index}, {"value", value}},
              [&] { return masked_fill_(self, Named("index_fill_", self, dim, index), value); });
}
DTensor index_reduce_(const DTensor& self, int64_t dim, const DTensor& index, const DTensor& source,
                      const std::string& reduce, bool include_self) {
  return AsOp("index_reduce_", {{"self", self}, {"index", index}, {"source", source}}, [&] {
    return copy_(self, index_reduce(clone(self), dim, index, source, reduce, include_self));
  });
}
DTensor put_(const DTensor& self, const DTensor& index, const DTensor& source, bool accumulate) {
  return AsOp("put_", {{"self", self}, {"index", index}, {"source", source}},
              [&] { return copy_(self, put(clone(self), index, source, accumulate)); });
}

}  // namespace dtensor
