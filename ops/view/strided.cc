// Views whose strides are not those of a slice: diagonal, unfold, as_strided. Their gradients add
// up where the view read.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/rules.h"
#include "dtensor/ops/view/diagonal.h"

namespace dtensor {
namespace {

using AttrSpan = absl::Span<const Attr>;
using FactorSpan = absl::Span<const FactorRange>;

// The other dims of x, then a new one of `length`, which x's dims `taken` are read whole for.
FactorText TakenLast(int ndim, IntSpan taken, int64_t length) {
  DimTexts x = DimNames(ndim), out;
  for (int d = 0; d < ndim; ++d) {
    if (Contains(taken, d)) {
      x[d] = Whole(x[d]);
    } else {
      out.push_back(x[d]);
    }
  }
  out.push_back("[n]");
  return {FactorString({x}, {out}), {{"n", length}}};
}

// --- diagonal

absl::StatusOr<FactorText> DiagonalRule(const OpCall& call) {
  const int64_t dims[] = {call.Int("dim1"), call.Int("dim2")};
  for (const int64_t d : dims) DT_RETURN_IF_ERROR(RequireDim("dim", d, call.in(0).ndim()));
  if (dims[0] == dims[1]) {
    return absl::InvalidArgumentError(absl::StrCat("dim ", dims[0], " twice"));
  }
  const Shape& x = call.shape(0);
  return TakenLast(call.in(0).ndim(), dims,
                   DiagonalOf(x[dims[0]], x[dims[1]], call.Int("offset")).length);
}

absl::StatusOr<Tensor> DiagonalView(const Tensor& in, const Shape&, AttrSpan attrs, FactorSpan) {
  const int a = static_cast<int>(attrs[1].i), b = static_cast<int>(attrs[2].i);
  const int64_t offset = attrs[0].i;
  const int64_t length = DiagonalOf(in.size(a), in.size(b), offset).length;
  const int64_t start = length == 0  ? 0
                        : offset < 0 ? -offset * in.strides()[a]
                                     : offset * in.strides()[b];
  Shape shape = in.shape();
  Strides strides = in.strides();
  const int64_t step = strides[a] + strides[b];
  for (const int d : {std::max(a, b), std::min(a, b)}) {
    shape.erase(shape.begin() + d);
    strides.erase(strides.begin() + d);
  }
  shape.push_back(length);
  strides.push_back(step);
  return in.AsStrided(shape, strides, in.offset() + start);
}

void DiagonalVjp(VjpCall& c) {
  const Shape& x = c.in_spec(0).shape();
  const int64_t a = c.Int("dim1"), b = c.Int("dim2");
  c.set(0, OnDiagonal(c.grad(), x[a], x[b], c.Int("offset"), a, b));
}

// --- unfold

absl::StatusOr<FactorText> UnfoldRule(const OpCall& call) {
  const int64_t dim = call.Int("dim"), size = call.Int("size"), step = call.Int("step");
  DT_RETURN_IF_ERROR(RequireDim("dim", dim, call.in(0).ndim()));
  const int64_t length = call.shape(0)[dim];
  if (size < 0 || size > length || step < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("no windows of ", size, ", one each ", step, ", in a dim of ", length));
  }
  DimTexts x = DimNames(call.in(0).ndim()), out = x;
  x[dim] = Whole(x[dim]);
  out[dim] = "[windows]";
  out.push_back("[size]");
  return FactorText{FactorString({x}, {out}),
                    {{"windows", (length - size) / step + 1}, {"size", size}}};
}

absl::StatusOr<Tensor> UnfoldView(const Tensor& in, const Shape& shape, AttrSpan attrs,
                                  FactorSpan) {
  const int dim = static_cast<int>(attrs[0].i);
  Strides strides = in.strides();
  strides.push_back(strides[dim]);
  strides[dim] *= attrs[2].i;
  return in.AsStrided(shape, strides, in.offset());
}

// What was at [window][i] came from window * step + i.
void UnfoldVjp(VjpCall& c) {
  const int64_t dim = c.Int("dim"), size = c.Int("size"), step = c.Int("step");
  const Shape& x = c.in_spec(0).shape();
  const int64_t windows = (x[dim] - size) / step + 1;
  RankList<int64_t> from;
  from.reserve(windows * size);
  for (int64_t w = 0; w < windows; ++w) {
    for (int64_t i = 0; i < size; ++i) from.push_back(w * step + i);
  }
  const DTensor dy = flatten(movedim(c.grad(), {-1}, {dim + 1}), dim, dim + 1);
  c.set(0, AddUp(dy, dim, IndexList(dy, from), x[dim], &c.in_spec(0)));
}

// --- as_strided

// Whether every element lies among the first `numel` ones.
absl::Status Inside(IntSpan size, IntSpan stride, int64_t offset, int64_t numel) {
  bool fits = size.size() == stride.size() && offset >= 0;
  __int128 last = offset;
  bool any = true;
  for (size_t d = 0; fits && d < size.size(); ++d) {
    fits = size[d] >= 0 && stride[d] >= 0;
    any = any && size[d] > 0;
    last += (static_cast<__int128>(size[d]) - 1) * stride[d];
    fits = fits && (last <= INT64_MAX || size[d] == 0);
  }
  if (fits && (!any || last < numel)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("size ", ToString(size), " with strides ", ToString(stride), " from ", offset,
                   " on is not within the ", numel, " elements of x"));
}

absl::StatusOr<FactorText> AsStridedRule(const OpCall& call) {
  const IntSpan layout = call.Ints("layout");
  const size_t n = layout.size() / 2;
  DT_RETURN_IF_ERROR(
      Inside(layout.first(n), layout.subspan(n), call.Int("offset"), call.in(0).numel()));
  DimTexts x, out;
  FactorText text;
  for (int d = 0; d < call.in(0).ndim(); ++d) x.push_back(Whole(DimName(d)));
  for (size_t d = 0; d < layout.size() / 2; ++d) {
    text.sizes.emplace_back(absl::StrCat("n", d), layout[d]);
    out.push_back(Whole(text.sizes.back().first));
  }
  text.text = FactorString({x}, {out});
  return text;
}

absl::StatusOr<Tensor> AsStridedView(const Tensor& in, const Shape& shape, AttrSpan attrs,
                                     FactorSpan) {
  const IntSpan layout(attrs[0].ints, attrs[0].n);
  const IntSpan strides = layout.subspan(shape.size());
  if (!in.is_contiguous()) return absl::InvalidArgumentError("x must be row-major");
  return in.AsStrided(shape, Strides(strides.begin(), strides.end()), in.offset() + attrs[1].i);
}

// The elements of x that a layout reads, in its order.
DTensor ElementsRead(const DTensor& like, IntSpan sizes, IntSpan strides, int64_t offset) {
  DTensor at = IndexRange(like, offset, 1, 1);
  for (size_t d = 0; d < sizes.size(); ++d) {
    const DTensor steps = mul(IndexRange(like, 0, sizes[d], 1), strides[d]);
    at = flatten(add(unsqueeze(at, 1), steps));
  }
  return at;
}

void AsStridedVjp(VjpCall& c) {
  const IntSpan layout = c.Ints("layout");
  const size_t n = layout.size() / 2;
  const DTensor& dy = c.grad();
  const DTensor at = ElementsRead(dy, layout.first(n), layout.subspan(n), c.Int("offset"));
  const Shape& x = c.in_spec(0).shape();
  c.set(0, reshape(AddUp(flatten(dy), 0, at, Numel(x)), x));
}

bool IsRowMajor(const DTensor& x) {
  const IntSpan strides = MemoryStrides(x);
  return strides.empty() || IsContiguous(x.shape(), strides);
}

}  // namespace

void RegisterStridedOps() {
  const auto view = [](OpDef& op, FactorFn rule, ViewFn fn, VjpFn vjp) {
    op.Factors(std::move(rule)).Linear("x").Monotone("x").View(fn).Vjp(vjp);
  };
  view(Op("diagonal(x; offset, dim1, dim2)"), DiagonalRule, DiagonalView, DiagonalVjp);
  view(Op("unfold(x; dim, size, step)"), UnfoldRule, UnfoldView, UnfoldVjp);
  view(Op("as_strided(x; layout, offset)"), AsStridedRule, AsStridedView, AsStridedVjp);
}

DiagonalDims CheckedDiagonal(absl::string_view op, int ndim, int64_t dim1, int64_t dim2) {
  if (ndim < 2) ThrowInvalid(op, "needs two dims or more");
  const DiagonalDims dims = {CheckedDim(op, dim1, ndim), CheckedDim(op, dim2, ndim)};
  if (dims.first == dims.second) ThrowInvalid(op, absl::StrCat("dim ", dims.first, " twice"));
  return dims;
}

DTensor OnDiagonal(const DTensor& x, int64_t rows, int64_t columns, int64_t offset, int64_t dim1,
                   int64_t dim2) {
  const DiagonalRange r = DiagonalOf(rows, columns, offset);
  const DTensor flat =
      AddUp(x, x.ndim() - 1, IndexRange(x, r.start, r.length, r.step), rows * columns);
  return movedim(unflatten(flat, -1, {rows, columns}), {-2, -1}, {dim1, dim2});
}

DTensor diagonal(const DTensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  static const OpDef& op = GetOp("diagonal");
  return AsOp("diagonal", {{"x", x}}, [&] {
    const DiagonalDims dims = CheckedDiagonal("diagonal", x.ndim(), dim1, dim2);
    return Call1(op, {&x}, {IntAttr(offset), IntAttr(dims.first), IntAttr(dims.second)});
  });
}

DTensor unfold(const DTensor& x, int64_t dim, int64_t size, int64_t step) {
  static const OpDef& op = GetOp("unfold");
  return AsOp("unfold", {{"x", x}}, [&] {
    const DTensor from = WithDims(x);
    const int d = CheckedDim("unfold", dim, x.ndim());
    const int64_t stride = std::min(step, from.size(d) + 1);  // beyond the end there is one window
    const DTensor y = Call1(op, {&from}, {IntAttr(d), IntAttr(size), IntAttr(stride)});
    return x.ndim() == 0 ? select(y, 0, 0) : y;
  });
}

DTensor as_strided(const DTensor& x, IntSpan size, IntSpan stride, int64_t offset) {
  static const OpDef& op = GetOp("as_strided");
  return AsOp("as_strided", {{"x", x}}, [&] {
    const absl::Status inside = Inside(size, stride, offset, x.numel());
    if (!inside.ok()) ThrowInvalid("as_strided", inside.message());
    const DTensor from = IsRowMajor(x) ? x : contiguous(x);
    Dims layout(size.begin(), size.end());
    layout.insert(layout.end(), stride.begin(), stride.end());
    return Call1(op, {&from}, {IntsAttr(layout), IntAttr(offset)});
  });
}

}  // namespace dtensor
