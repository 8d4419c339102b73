// Views: the result shares the data of x where the local strides allow it.
#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/view/reshape_factors.h"
#include "dtensor/ops/view/slice_range.h"

namespace dtensor {
namespace {

using AttrSpan = absl::Span<const Attr>;
using FactorSpan = absl::Span<const FactorRange>;

// --- rules ---------------------------------------------------------------------------------------

absl::StatusOr<FactorText> ReshapeRule(const OpCall& call) {
  return ReshapeFactors(call.shape(0), call.Ints("shape"));
}

absl::StatusOr<FactorText> PermuteRule(const OpCall& call) {
  const DimTexts x = DimNames(call.in(0).ndim());
  const IntSpan dims = call.Ints("dims");
  Dims sorted(dims.begin(), dims.end());
  std::sort(sorted.begin(), sorted.end());
  DT_RETURN_IF_ERROR(RequireDims("dims", sorted, call.in(0).ndim()));
  DimTexts out;
  for (int64_t d : dims) out.push_back(x[d]);
  return FactorText{FactorString({x}, {out}), {}};
}

absl::StatusOr<FactorText> TransposeRule(const OpCall& call) {
  const DimTexts x = DimNames(call.in(0).ndim());
  DimTexts out = x;
  const int64_t a = call.Int("a"), b = call.Int("b");
  DT_RETURN_IF_ERROR(RequireDim("a", a, std::max(1, call.in(0).ndim())));
  DT_RETURN_IF_ERROR(RequireDim("b", b, std::max(1, call.in(0).ndim())));
  if (!x.empty()) std::swap(out[a], out[b]);
  return FactorText{FactorString({x}, {out}), {}};
}

absl::StatusOr<FactorText> SqueezeRule(const OpCall& call) {
  DimTexts x = DimNames(call.in(0).ndim()), out;
  const IntSpan dims = call.Ints("dims");
  DT_RETURN_IF_ERROR(RequireDims("dims", dims, call.in(0).ndim()));
  for (int d = 0; d < call.in(0).ndim(); ++d) {
    if (Contains(dims, d)) {
      x[d].assign(1, '1');
    } else {
      out.push_back(x[d]);
    }
  }
  return FactorText{FactorString({x}, {out}), {}};
}

absl::StatusOr<FactorText> UnsqueezeRule(const OpCall& call) {
  const DimTexts x = DimNames(call.in(0).ndim());
  DimTexts out = x;
  DT_RETURN_IF_ERROR(RequireDim("dim", call.Int("dim"), call.in(0).ndim() + 1));
  out.insert(out.begin() + call.Int("dim"), "1");
  return FactorText{FactorString({x}, {out}), {}};
}

// Grown and new dims are whole: every rank repeats them in full.
absl::StatusOr<FactorText> ExpandRule(const OpCall& call) {
  const Shape& from = call.shape(0);
  const IntSpan shape = call.Ints("shape");
  const int extra = static_cast<int>(shape.size()) - static_cast<int>(from.size());
  if (extra < 0) {
    return absl::InvalidArgumentError(absl::StrCat("attribute shape = ", ToString(shape),
                                                   " has fewer dims than x ", ToString(from)));
  }
  DimTexts x = DimNames(call.in(0).ndim()), out;
  FactorText text;
  for (int d = 0; d < static_cast<int>(shape.size()); ++d) {
    if (d >= extra && from[d - extra] == shape[d]) {
      out.push_back(x[d - extra]);
      continue;
    }
    if (d >= extra) x[d - extra].assign(1, '1');
    const std::string name = absl::StrCat("n", d);
    text.sizes.emplace_back(name, shape[d]);
    out.push_back(Whole(name));
  }
  text.text = FactorString({x}, {out});
  return text;
}

// A dim of `size` elements of which `length` from `start` on are kept: "{before kept after}" and
// "kept". Steps leave no ranges to be cut, so the dim is whole; keeping all of it cuts nothing.
struct Kept {
  int64_t start, length, step, size;
};
absl::StatusOr<FactorText> CutDim(const OpCall& call, Kept kept, bool backward) {
  const int64_t dim = call.Int("dim");
  DimTexts x = DimNames(call.in(0).ndim()), out = x;
  FactorText text;
  if (kept.length == kept.size) return FactorText{FactorString({x}, {out}), {}};
  DimTexts& all = backward ? out : x;
  DimTexts& part = backward ? x : out;
  const bool range = kept.step == 1 && SliceFits(kept.start, kept.length, kept.step, kept.size);
  all[dim] = range ? "{before kept after}" : "[all]";
  part[dim] = range ? "kept" : "[kept]";
  text.sizes = {{"kept", kept.length}};
  if (range) {
    text.sizes.emplace_back("before", kept.start);
    text.sizes.emplace_back("after", kept.size - kept.start - kept.length);
  } else {
    text.sizes.emplace_back("all", kept.size);
  }
  text.text = FactorString({x}, {out});
  return text;
}

// Where in the local dim the slice begins.
int64_t LocalStart(int64_t start, FactorSpan factors) {
  return factors.empty() || factors[0].global < 0 ? start : factors[0].local;
}

absl::StatusOr<FactorText> SliceRule(const OpCall& call) {
  DT_RETURN_IF_ERROR(RequireDim("dim", call.Int("dim"), call.in(0).ndim()));
  return CutDim(
      call,
      {call.Int("start"), call.Int("length"), call.Int("step"), call.shape(0)[call.Int("dim")]},
      /*backward=*/false);
}
absl::StatusOr<FactorText> SliceBackwardRule(const OpCall& call) {
  DT_RETURN_IF_ERROR(RequireDim("dim", call.Int("dim"), call.in(0).ndim()));
  return CutDim(
      call, {call.Int("start"), call.shape(0)[call.Int("dim")], call.Int("step"), call.Int("size")},
      /*backward=*/true);
}

absl::StatusOr<FactorText> SelectRule(const OpCall& call) {
  DimTexts x = DimNames(call.in(0).ndim()), out = x;
  const int64_t dim = call.Int("dim");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  x[dim] = Whole(x[dim]);
  out.erase(out.begin() + dim);
  return FactorText{FactorString({x}, {out}), {}};
}

// --- local views ---------------------------------------------------------------------------------

absl::StatusOr<Tensor> ReshapeView(const Tensor& in, const Shape& shape, AttrSpan, FactorSpan) {
  return in.Reshape(shape);
}

absl::StatusOr<Tensor> PermuteView(const Tensor& in, const Shape&, AttrSpan attrs, FactorSpan) {
  std::vector<int> order(attrs[0].ints, attrs[0].ints + attrs[0].n);
  return in.Permute(order);
}

absl::StatusOr<Tensor> TransposeView(const Tensor& in, const Shape&, AttrSpan attrs, FactorSpan) {
  if (in.ndim() == 0) return in;
  return in.Transpose(static_cast<int>(attrs[0].i), static_cast<int>(attrs[1].i));
}

// Of a flat piece nothing changes by dims of size 1.
absl::StatusOr<Tensor> SqueezeView(const Tensor& in, const Shape& shape, AttrSpan attrs,
                                   FactorSpan) {
  if (in.ndim() == static_cast<int>(shape.size())) return in;
  Tensor out = in;
  for (int64_t i = attrs[0].n - 1; i >= 0; --i) {
    out = out.Squeeze(static_cast<int>(attrs[0].ints[i]));
  }
  return out;
}

absl::StatusOr<Tensor> UnsqueezeView(const Tensor& in, const Shape& shape, AttrSpan attrs,
                                     FactorSpan) {
  if (in.ndim() == static_cast<int>(shape.size())) return in;
  return in.Unsqueeze(static_cast<int>(attrs[0].i));
}

absl::StatusOr<Tensor> ExpandView(const Tensor& in, const Shape& shape, AttrSpan, FactorSpan) {
  return in.Expand(shape);
}

absl::StatusOr<Tensor> SliceView(const Tensor& in, const Shape& shape, AttrSpan attrs,
                                 FactorSpan factors) {
  const int dim = static_cast<int>(attrs[0].i);
  const int64_t length = shape[dim], step = attrs[3].i;
  const int64_t start = LocalStart(attrs[1].i, factors);
  if (length == 0) return in.Slice(dim, 0, 0);
  if (!SliceFits(start, length, step, in.size(dim))) {
    return absl::OutOfRangeError(absl::StrCat(length, " elements from ", start, " in steps of ",
                                              step, " are not in [0, ", in.size(dim), ")"));
  }
  return in.Slice(dim, start, length, step);
}

absl::StatusOr<Tensor> SelectView(const Tensor& in, const Shape&, AttrSpan attrs, FactorSpan) {
  const int dim = static_cast<int>(attrs[0].i);
  DT_RETURN_IF_ERROR(RequireDim("index", attrs[1].i, in.size(dim)));
  return in.Select(dim, attrs[1].i);
}

// --- gradients -----------------------------------------------------------------------------------

void ReshapeVjp(VjpCall& c) { c.set(0, reshape(c.grad(), c.in_spec(0).shape())); }

void PermuteVjp(VjpCall& c) {
  const IntSpan dims = c.Ints("dims");
  Dims inverse(dims.size());
  for (size_t d = 0; d < dims.size(); ++d) inverse[dims[d]] = static_cast<int64_t>(d);
  c.set(0, permute(c.grad(), inverse));
}

void TransposeVjp(VjpCall& c) { c.set(0, transpose(c.grad(), c.Int("a"), c.Int("b"))); }

void UnsqueezeVjp(VjpCall& c) { c.set(0, squeeze(c.grad(), DimList{c.Int("dim")})); }

void ExpandVjp(VjpCall& c) { c.set(0, sum_to(c.grad(), c.in_spec(0).shape())); }

DTensor SliceBackward(const DTensor& dy, int64_t dim, int64_t start, int64_t step, const Spec& x) {
  static const OpDef& op = GetOp("slice_backward");
  DispatchOptions options;
  options.like = &x;
  return Call1(op, {&dy}, {IntAttr(dim), IntAttr(start), IntAttr(step), IntAttr(x.shape()[dim])},
               options);
}

void SliceVjp(VjpCall& c) {
  c.set(0, SliceBackward(c.grad(), c.Int("dim"), c.Int("start"), c.Int("step"), c.in_spec(0)));
}

void SelectVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim");
  c.set(0, SliceBackward(unsqueeze(c.grad(), dim), dim, c.Int("index"), 1, c.in_spec(0)));
}

OpDef& ViewOp(absl::string_view signature, FactorFn rule, ViewFn view, bool reorders = true) {
  return Op(signature).Factors(std::move(rule)).Linear("x").Monotone("x").View(view, reorders);
}

// `shape` for `numel` elements with its -1 filled in.
Shape InferShape(absl::string_view op, IntSpan shape, int64_t numel, IntSpan from) {
  Shape out(shape.begin(), shape.end());
  int64_t known = 1, unknown = -1;
  for (size_t d = 0; d < out.size(); ++d) {
    if (out[d] >= 0) {
      if (__builtin_mul_overflow(known, out[d], &known)) known = INT64_MAX;  // fits nothing
    } else if (out[d] == -1 && unknown < 0) {
      unknown = static_cast<int64_t>(d);
    } else {
      ThrowInvalid(op, absl::StrCat("bad shape ", ToString(shape),
                                    ": sizes are 0 or more, and one ", "may be -1"));
    }
  }
  const bool fits = unknown < 0 ? known == numel : known > 0 && numel % known == 0;
  if (!fits) {
    ThrowInvalid(op, absl::StrCat("shape ", ToString(shape), " does not fit the ", numel,
                                  " elements of ", ToString(from)));
  }
  if (unknown >= 0) out[unknown] = numel / known;
  return out;
}

}  // namespace

void RegisterViewOps() {
  ViewOp("reshape(x; shape)", ReshapeRule, ReshapeView, /*reorders=*/false).Vjp(ReshapeVjp);
  ViewOp("permute(x; dims)", PermuteRule, PermuteView).Vjp(PermuteVjp);
  ViewOp("transpose(x; a, b)", TransposeRule, TransposeView).Vjp(TransposeVjp);
  ViewOp("squeeze(x; dims)", SqueezeRule, SqueezeView, /*reorders=*/false).Vjp(ReshapeVjp);
  ViewOp("unsqueeze(x; dim)", UnsqueezeRule, UnsqueezeView, /*reorders=*/false).Vjp(UnsqueezeVjp);
  ViewOp("expand(x; shape)", ExpandRule, ExpandView).Vjp(ExpandVjp);
  ViewOp("slice(x; dim, start, length, step)", SliceRule, SliceView)
      .NeedsCount("before")
      .Cuts([](AttrSpan a) { return ViewCut{static_cast<int>(a[0].i), a[1].i, a[3].i, false}; })
      .Vjp(SliceVjp);
  ViewOp("select(x; dim, index)", SelectRule, SelectView)
      .Cuts([](AttrSpan a) { return ViewCut{static_cast<int>(a[0].i), a[1].i, 1, true}; })
      .Vjp(SelectVjp);
  Op("slice_backward(dy; dim, start, step, size)")
      .Factors(SliceBackwardRule)
      .NeedsCount("before")
      .Linear("dy")
      .Monotone("dy");
}

DTensor reshape(const DTensor& x, IntSpan shape) {
  static const OpDef& op = GetOp("reshape");
  return AsOp("reshape", {{"x", x}}, [&] {
    const Shape to = InferShape("reshape", shape, x.numel(), x.shape());
    if (to == x.shape()) return Unchanged("reshape", x);
    return Call1(op, {&x}, {IntsAttr(to)});
  });
}

DTensor alias(const DTensor& x) {
  static const OpDef& op = GetOp("reshape");
  return AsOp("alias", {{"x", x}}, [&] { return Call1(op, {&x}, {IntsAttr(x.shape())}); });
}

DTensor view(const DTensor& x, IntSpan shape) {
  return AsOp("view", {{"x", x}}, [&] { return reshape(x, shape); });
}

DTensor flatten(const DTensor& x, int64_t start_dim, int64_t end_dim) {
  return AsOp("flatten", {{"x", x}}, [&] {
    const int start = CheckedDim("flatten", start_dim, x.ndim());
    const int end = CheckedDim("flatten", end_dim, x.ndim());
    if (start > end) {
      ThrowInvalid("flatten",
                   absl::StrCat("start_dim ", start_dim, " comes after end_dim ", end_dim));
    }
    if (x.ndim() == 0) return reshape(x, {1});
    const Shape& from = x.shape();
    Shape shape(from.begin(), from.begin() + start);
    shape.push_back(Numel(IntSpan(from).subspan(start, end - start + 1)));
    shape.insert(shape.end(), from.begin() + end + 1, from.end());
    return reshape(x, shape);
  });
}

DTensor unflatten(const DTensor& x, int64_t dim, IntSpan sizes) {
  return AsOp("unflatten", {{"x", x}}, [&] {
    if (x.ndim() == 0 || sizes.empty()) ThrowInvalid("unflatten", "needs a dim and sizes for it");
    const int d = CheckedDim("unflatten", dim, x.ndim());
    const Shape parts = InferShape("unflatten", sizes, x.shape()[d], {x.shape()[d]});
    Shape shape = x.shape();
    shape.erase(shape.begin() + d);
    shape.insert(shape.begin() + d, parts.begin(), parts.end());
    return reshape(x, shape);
  });
}

DTensor transpose(const DTensor& x, int64_t a, int64_t b) {
  static const OpDef& op = GetOp("transpose");
  return AsOp("transpose", {{"x", x}}, [&] {
    const int first = CheckedDim("transpose", a, x.ndim());
    const int second = CheckedDim("transpose", b, x.ndim());
    return Call1(op, {&x}, {IntAttr(first), IntAttr(second)});
  });
}

DTensor permute(const DTensor& x, IntSpan dims) {
  static const OpDef& op = GetOp("permute");
  return AsOp("permute", {{"x", x}}, [&] {
    Dims order;
    for (int64_t d : dims) order.push_back(CheckedDim("permute", d, x.ndim()));
    if (static_cast<int>(dims.size()) != x.ndim() ||
        (x.ndim() > 0 && CheckedDims("permute", order, x.ndim()).size() != dims.size())) {
      ThrowInvalid("permute", absl::StrCat("dims ", ToString(dims), " must list each of the ",
                                           x.ndim(), " dims of x once"));
    }
    return Call1(op, {&x}, {IntsAttr(order)});
  });
}

DTensor squeeze(const DTensor& x) {
  return AsOp("squeeze", {{"x", x}}, [&] {
    DimList dims;
    for (int d = 0; d < x.ndim(); ++d) dims.push_back(d);
    return squeeze(x, std::move(dims));
  });
}

DTensor squeeze(const DTensor& x, DimList dims) {
  static const OpDef& op = GetOp("squeeze");
  return AsOp("squeeze", {{"x", x}}, [&] {
    if (dims.empty()) return Unchanged("squeeze", x);  // squeezes nothing, as in torch
    Dims ones;
    for (int64_t d : CheckedDims("squeeze", dims, x.ndim())) {
      if (x.shape()[d] == 1) ones.push_back(d);
    }
    return ones.empty() ? Unchanged("squeeze", x) : Call1(op, {&x}, {IntsAttr(ones)});
  });
}

DTensor unsqueeze(const DTensor& x, int64_t dim) {
  static const OpDef& op = GetOp("unsqueeze");
  return AsOp("unsqueeze", {{"x", x}}, [&] {
    return Call1(op, {&x}, {IntAttr(CheckedDim("unsqueeze", dim, x.ndim() + 1))});
  });
}

DTensor expand(const DTensor& x, IntSpan shape) {
  static const OpDef& op = GetOp("expand");
  return AsOp("expand", {{"x", x}}, [&] {
    Shape to(shape.begin(), shape.end());
    const int extra = static_cast<int>(to.size()) - x.ndim();
    bool fits = extra >= 0;
    for (int d = 0; fits && d < static_cast<int>(to.size()); ++d) {
      const int64_t from = d < extra ? 1 : x.shape()[d - extra];
      if (to[d] == -1 && d >= extra) to[d] = from;
      fits = to[d] >= 0 && (from == 1 || from == to[d]);
    }
    if (!fits) {
      ThrowInvalid("expand", absl::StrCat("x ", ToString(x.shape()), " does not expand to ",
                                          ToString(shape)));
    }
    return to == x.shape() ? Unchanged("expand", x) : Call1(op, {&x}, {IntsAttr(to)});
  });
}

DTensor slice(const DTensor& x, int64_t dim, int64_t start, int64_t end, int64_t step) {
  static const OpDef& op = GetOp("slice");
  return AsOp("slice", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("slice", "x has no dims");
    if (step < 1) ThrowInvalid("slice", absl::StrCat("step must be positive, is ", step));
    const int d = CheckedDim("slice", dim, x.ndim());
    const SliceRange range = ClampSlice(x.shape()[d], start, end, step);
    return Call1(op, {&x},
                 {IntAttr(d), IntAttr(range.start), IntAttr(range.length), IntAttr(range.step)});
  });
}

DTensor select(const DTensor& x, int64_t dim, int64_t index) {
  static const OpDef& op = GetOp("select");
  return AsOp("select", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("select", "x has no dims");
    const int d = CheckedDim("select", dim, x.ndim());
    const int64_t size = x.shape()[d];
    if (index < -size || index >= size) {
      Throw(InFunction("select",
                       absl::OutOfRangeError(absl::StrCat("index ", index, " is outside of dim ", d,
                                                          " of x ", ToString(x.shape())))));
    }
    return Call1(op, {&x}, {IntAttr(d), IntAttr(index < 0 ? index + size : index)});
  });
}

Values split(const DTensor& x, int64_t size, int64_t dim) {
  return AsOp("split", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("split", "x has no dims");
    const int64_t whole = x.shape()[CheckedDim("split", dim, x.ndim())];
    if (size < 0 || (size == 0 && whole != 0)) {
      ThrowInvalid("split", absl::StrCat("cannot cut a dim of ", whole, " into pieces of ", size));
    }
    DimList sizes;
    for (int64_t at = 0; at < whole; at += size) sizes.push_back(std::min(size, whole - at));
    if (sizes.empty()) sizes.push_back(0);
    return split(x, std::move(sizes), dim);
  });
}

Values split(const DTensor& x, DimList sizes, int64_t dim) {
  return AsOp("split", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("split", "x has no dims");
    const int d = CheckedDim("split", dim, x.ndim());
    int64_t left = x.shape()[d];
    bool fits = true;
    for (int64_t s : sizes) {  // compared before it is subtracted: sizes may be anything
      fits = fits && s >= 0 && s <= left;
      if (fits) left -= s;
    }
    if (!fits || left != 0) {
      ThrowInvalid("split", absl::StrCat("sizes ", ToString(sizes), " do not sum to dim ", d,
                                         " of x ", ToString(x.shape())));
    }
    Values pieces;  // backward puts their gradients together before it reduces them
    int64_t start = 0;
    for (const int64_t size : sizes) {
      pieces.push_back(slice(x, d, start, start + size));
      start += size;
    }
    return pieces;
  });
}

Values split_with_sizes(const DTensor& x, DimList sizes, int64_t dim) {
  return AsOp("split_with_sizes", {{"x", x}}, [&] { return split(x, std::move(sizes), dim); });
}

}  // namespace dtensor
