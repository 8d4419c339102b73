// Rims: slices crop, cat and gathers grow.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/index/arrange.h"
#include "dtensor/ops/index/pick.h"
#include "dtensor/ops/rules.h"

namespace dtensor {
namespace {

// What (before, after) adds to a dim of x, checked.
struct Rim {
  int dim;
  int64_t before, after;
};
std::vector<Rim> RimsOf(const char* op, const DTensor& x, const DimList& pad) {
  if (pad.size() % 2 != 0 || static_cast<int>(pad.size()) > 2 * x.ndim()) {
    ThrowInvalid(op, absl::StrCat("pad ", ToString(pad), " must have two sizes per dim of x ",
                                  ToString(x.shape()), ", for as many dims as are padded"));
  }
  std::vector<Rim> rims;
  Shape grown = x.shape();
  constexpr int64_t kFar = int64_t{1} << 48;
  for (size_t i = 0; i < pad.size(); i += 2) {
    const Rim rim = {x.ndim() - 1 - static_cast<int>(i / 2), pad[i], pad[i + 1]};
    const bool small =
        std::min(rim.before, rim.after) > -kFar && std::max(rim.before, rim.after) < kFar;
    if (small) grown[rim.dim] += rim.before + rim.after;
    if (!small || grown[rim.dim] < 0) {
      ThrowInvalid(op, absl::StrCat("dim ", rim.dim, " of ", x.size(rim.dim), " cannot grow by ",
                                    rim.before, " and ", rim.after));
    }
    rims.push_back(rim);
  }
  ThrowIfError(CheckedNumel(grown).status());
  return rims;
}

// x without what a negative rim crops, and the rim that is left.
DTensor Cropped(const DTensor& x, Rim* rim) {
  const int64_t size = x.size(rim->dim);
  const int64_t start = std::max<int64_t>(0, -rim->before);
  const int64_t end = size + std::min<int64_t>(0, rim->after);
  if (start > end) {
    ThrowInvalid("pad",
                 absl::StrCat("dim ", rim->dim, " of ", size, " cannot lose ", start + size - end));
  }
  rim->before = std::max<int64_t>(0, rim->before);
  rim->after = std::max<int64_t>(0, rim->after);
  return start == 0 && end == size ? x : slice(x, rim->dim, start, end);
}

DTensor Constant(const DTensor& x, const Rim& rim, Scalar value) {
  const auto block = [&](int64_t size) {
    RequireHolds("constant_pad_nd", x.dtype(), value);
    Shape shape = x.shape();
    shape[rim.dim] = size;
    Placements placements = WithoutPending(x.placements());
    for (Placement& p : placements) {
      if (p.is_flat() || (p.cuts_dim() && p.dim() == rim.dim)) p = Replicate();
    }
    return full(shape, value, {x.dtype(), x.mesh(), placements});
  };
  std::vector<DTensor> parts;
  if (rim.before > 0) parts.push_back(block(rim.before));
  parts.push_back(x);
  if (rim.after > 0) parts.push_back(block(rim.after));
  return parts.size() == 1 ? x : cat(parts, rim.dim);
}

// Where element i of a dim of n with a rim comes from; i counts from the dim's own first one.
using SourceFn = int64_t (*)(int64_t i, int64_t n);
int64_t Reflected(int64_t i, int64_t n) { return i < 0 ? -i : i < n ? i : 2 * n - 2 - i; }
int64_t Nearest(int64_t i, int64_t n) { return std::clamp<int64_t>(i, 0, n - 1); }
int64_t Wrapped(int64_t i, int64_t n) { return i < 0 ? i + n : i < n ? i : i - n; }

// Element i of a dim, from -before up to size + after, read where `source` says; the rim may be
// negative, too.
DTensor Grown(const DTensor& x, const Rim& rim, SourceFn source) {
  const int64_t n = x.size(rim.dim);
  RankList<int64_t> from;
  for (int64_t i = -rim.before; i < n + rim.after; ++i) from.push_back(source(i, n));
  return index_select(x, rim.dim, IndexList(x, from));
}

}  // namespace

DTensor constant_pad_nd(const DTensor& x, DimList pad, Scalar value) {
  return AsOp("constant_pad_nd", {{"x", x}}, [&] {
    DTensor y = x;
    for (Rim rim : RimsOf("constant_pad_nd", x, pad)) {
      y = Cropped(y, &rim);
      y = Constant(y, rim, value);
    }
    return y.impl() == x.impl() ? clone(x) : y;
  });
}

DTensor pad(const DTensor& x, DimList pad, const std::string& mode, Scalar value) {
  return AsOp("pad", {{"x", x}}, [&] {
    if (mode == "constant") return constant_pad_nd(x, pad, value);
    const SourceFn source = mode == "reflect"     ? Reflected
                            : mode == "replicate" ? Nearest
                            : mode == "circular"  ? Wrapped
                                                  : nullptr;
    if (source == nullptr) {
      ThrowInvalid("pad", absl::StrCat("mode must be constant, reflect, replicate or circular, is ",
                                       "\"", mode, "\""));
    }
    DTensor y = x;
    for (Rim rim : RimsOf("pad", x, pad)) {
      if (mode == "circular") y = Cropped(y, &rim);  // what is cropped does not come around
      const int64_t n = y.size(rim.dim), most = std::max(rim.before, rim.after);
      const int64_t largest = mode == "reflect" ? n - 1 : mode == "circular" ? n : n > 0 ? most : 0;
      if (most > largest) {
        ThrowInvalid("pad", absl::StrCat("a rim of ", most, " in mode ", mode, " needs more than ",
                                         n, " elements in dim ", rim.dim));
      }
      if (rim.before != 0 || rim.after != 0) y = Grown(y, rim, source);
    }
    return y.impl() == x.impl() ? clone(x) : y;
  });
}

}  // namespace dtensor
