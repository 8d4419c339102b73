// grid_sample: x at places that are data.
#include "dtensor/ops/conv/grid_sample.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/conv/spatial.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

// " a0 a1": the dims of the grid.
std::string GridDims(int dims) {
  std::string text;
  for (int d = 0; d < dims; ++d) absl::StrAppend(&text, " a", d);
  return text;
}

struct GridTexts {
  std::string x, grid, y;
};
absl::StatusOr<GridTexts> TextsOf(const OpCall& call, int x) {
  const int dims = call.in(x).ndim() - 2;
  if (dims < 2 || dims > 3) {
    return absl::InvalidArgumentError(
        absl::StrCat("x must have 4 or 5 dims, is ", ToString(call.shape(x))));
  }
  DT_RETURN_IF_ERROR(RequireDim("mode", call.Int("mode"), 2));
  DT_RETURN_IF_ERROR(RequireDim("padding", call.Int("padding"), 3));
  return GridTexts{absl::StrCat("n c", WholeDims("i", dims)),
                   absl::StrCat("n", GridDims(dims), " [k]"), absl::StrCat("n c", GridDims(dims))};
}

absl::StatusOr<FactorText> GridFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const GridTexts t, TextsOf(call, 0));
  return FactorText{absl::StrCat(t.x, ", ", t.grid, " -> ", t.y), {{"k", call.in(0).ndim() - 2}}};
}

absl::StatusOr<FactorText> GridBackwardFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const GridTexts t, TextsOf(call, 1));
  return FactorText{absl::StrCat(t.y, ", ", t.x, ", ", t.grid, " -> ", t.x, ", ", t.grid),
                    {{"k", call.in(1).ndim() - 2}}};
}

void GridSampleVjp(VjpCall& c) {
  static const OpDef& op = GetOp("grid_sample_backward");
  const DTensor &dy = c.grad(), &x = c.in(0), &grid = c.in(1);
  const Values grads = Call(op, {&dy, &x, &grid}, c.attrs());
  for (int i = 0; i < 2; ++i) {
    if (c.needs(i)) c.set(i, grads[i]);
  }
}

// For rules, which also see calls that no op function has looked at. `x`: which input it is.
absl::Status NumbersPerPoint(const OpCall& call, int x) {
  DT_RETURN_IF_ERROR(SameDTypes(call));
  const int64_t dims = call.in(x).ndim() - 2, numbers = call.shape(x + 1).back();
  if (numbers == dims) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("grid has ", numbers, " numbers per point, must have ", dims));
}

// Position of `text` among the words; throws where it is none.
int64_t OneOf(absl::string_view what, absl::string_view text,
              std::initializer_list<absl::string_view> words) {
  const auto found = std::find(words.begin(), words.end(), text);
  if (found != words.end()) return found - words.begin();
  std::string all;
  for (absl::string_view word : words) absl::StrAppend(&all, all.empty() ? "" : ", ", word);
  ThrowInvalid("grid_sample", absl::StrCat(what, " must be one of ", all, ", is ", text));
}

void CheckGrid(const DTensor& x, const DTensor& grid) {
  const int dims = x.ndim() - 2;
  if (dims < 2 || dims > 3 || grid.ndim() != x.ndim() || grid.size(-1) != dims ||
      grid.size(0) != x.size(0)) {
    ThrowInvalid("grid_sample",
                 absl::StrCat("takes x [n, c, h, w] and grid [n, a, b, 2], or of one dim more and "
                              "3 numbers, got x ",
                              ToString(x.shape()), ", grid ", ToString(grid.shape())));
  }
  for (int d = 2; d < x.ndim(); ++d) {
    if (x.size(d) > 0) continue;
    ThrowInvalid("grid_sample", absl::StrCat("dim ", d, " of x ", ToString(x.shape()),
                                             " is empty: there is nothing to read"));
  }
}

// --- bicubic: the sixteen elements around each point, read as what is nearest to points of theirs

// Keys' cubic of a distance up to 1, and of one from 1 to 2.
constexpr double kA = -0.75;
DTensor Inner(const DTensor& t) { return add(mul(sub(mul(t, kA + 2), kA + 3), mul(t, t)), 1); }
DTensor Outer(const DTensor& t) {
  return sub(mul(add(mul(sub(mul(t, kA), 5 * kA), t), 8 * kA), t), 4 * kA);
}

// Of one number of every point: what the four elements around it count, and the numbers that name
// them, both [n, a, b, 4].
struct CubicTaps {
  DTensor weights, numbers;
};
// `turns`: numbers name elements as with align_corners, not without.
CubicTaps CubicTapsOf(const DTensor& number, int64_t size, bool corners, bool turns) {
  const auto n = static_cast<double>(size);
  const DTensor from_edge = add(number, 1);
  const DTensor place = corners ? mul(from_edge, (n - 1) / 2) : mul(sub(mul(from_edge, n), 1), 0.5);
  const DTensor first = floor(place.Detach()), t = sub(place, first);
  const DTensor offsets = arange(-1, 3, 1, {number.dtype(), number.mesh(), {}});
  const DTensor elements = add(unsqueeze(first, -1), offsets);
  return {stack({Outer(add(t, 1)), Inner(t), Inner(sub(1, t)), Outer(sub(2, t))}, -1),
          turns ? sub(mul(elements, 2 / std::max(n - 1, 1.0)), 1)
                : sub(mul(add(mul(elements, 2), 1), 1 / n), 1)};
}

DTensor Bicubic(const DTensor& x, const DTensor& grid, int64_t padding, bool corners) {
  static const OpDef& op = GetOp("grid_sample");
  if (x.ndim() != 4) {
    ThrowInvalid("grid_sample",
                 absl::StrCat("mode bicubic takes x of 4 dims, got ", ToString(x.shape())));
  }
  const DType wide = ComputeType(x.dtype());
  const DTensor in = to(x, wide), points = to(grid, wide);
  // Elements outside depend on align_corners only where they are reflected.
  const bool turns = corners && padding == static_cast<int64_t>(GridPadding::kReflection);
  const auto taps = [&](int number) {
    return CubicTapsOf(select(points, -1, number), x.size(3 - number), corners, turns);
  };
  const CubicTaps across = taps(0), down = taps(1);
  const int64_t n = grid.size(0), a = grid.size(1), b = grid.size(2);
  const Shape sixteen = {n, a, b, 4, 4};
  const DTensor at = reshape(stack({expand(unsqueeze(across.numbers, 3), sixteen),
                                    expand(unsqueeze(down.numbers, 4), sixteen)},
                                   -1),
                             {n, a, b * 16, 2});
  const int64_t nearest = static_cast<int64_t>(GridMode::kNearest);
  const DTensor read = Call1(op, {&in, &at}, {IntAttr(nearest), IntAttr(padding), BoolAttr(turns)});
  const DTensor values = reshape(read, {n, x.size(1), a, b, 4, 4});
  const DTensor weights = mul(unsqueeze(down.weights, 4), unsqueeze(across.weights, 3));
  return to(sum(mul(values, unsqueeze(weights, 1)), {4, 5}), x.dtype());
}

}  // namespace

void RegisterGridSampleOps() {
  Op("grid_sample(x, grid; mode, padding, corners)")
      .Factors(GridFactors)
      .Linear("x(grid)")
      .Check([](const OpCall& c) { return NumbersPerPoint(c, 0); })
      .Vjp(GridSampleVjp, "x, grid");
  Op("grid_sample_backward(dy, x, grid; mode, padding, corners) -> dx, dgrid")
      .Factors(GridBackwardFactors)
      .Linear({"dx: dy(grid)", "dgrid: dy * x(grid)"})
      .Check([](const OpCall& c) { return NumbersPerPoint(c, 1); });
}

DTensor grid_sample(const DTensor& x, const DTensor& grid, absl::string_view mode,
                    absl::string_view padding_mode, bool align_corners) {
  static const OpDef& op = GetOp("grid_sample");
  return AsOp("grid_sample", {{"x", x}, {"grid", grid}}, [&] {
    CheckGrid(x, grid);
    RequireFloating("grid_sample", x);
    const int64_t how = OneOf("mode", mode, {"bilinear", "nearest", "bicubic"});
    const int64_t padding = OneOf("padding_mode", padding_mode, {"zeros", "border", "reflection"});
    if (mode == "bicubic") return Bicubic(x, grid, padding, align_corners);
    return Call1(op, {&x, &grid}, {IntAttr(how), IntAttr(padding), BoolAttr(align_corners)});
  });
}

}  // namespace dtensor
