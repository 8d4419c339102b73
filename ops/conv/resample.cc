// Mean pools and interpolation: one op, which multiplies each spatial dim by a sparse matrix, and
// its transpose.
#include "dtensor/ops/conv/resample.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/conv/halo.h"
#include "dtensor/ops/conv/pool.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

void ResampleVjp(VjpCall& c) {
  static const OpDef& op = GetOp("resample_backward");
  const DTensor& dy = c.grad();
  c.set(0, Call1(op, {&dy}, c.attrs()));
}

absl::Status CheckResample(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const Windows w, CheckedWindows(call));
  const int64_t mode = call.Int("mode");
  DT_RETURN_IF_ERROR(RequireDim("mode", mode, kNumResamples));
  if (mode <= static_cast<int64_t>(Resample::kSum)) return absl::OkStatus();
  for (const WindowDim& d : w.d) {
    if (d.in == 0 && d.out > 0) {
      return absl::InvalidArgumentError("a spatial dim is empty: there is nothing to read");
    }
  }
  return absl::OkStatus();
}

using Scales = std::vector<double>;  // per spatial dim

DTensor RunResample(const DTensor& x, const WindowDims& windows, Resample mode,
                    const Scales& scales) {
  static const OpDef& op = GetOp("resample");
  const DimList window = Packed(windows);
  const auto scale = [&](size_t d) { return FloatAttr(d < scales.size() ? scales[d] : 0); };
  return Call1(
      op, {&x},
      {IntsAttr(window), IntAttr(static_cast<int64_t>(mode)), scale(0), scale(1), scale(2)});
}

struct AvgPoolArgs {
  absl::string_view op;
  int dims;
  const DTensor& x;
};

// Whether every window counts for as much wherever it is: then zeros around a block of x, as halos
// have them, are those around x.
bool AreAlike(const WindowDims& windows, Resample mode) {
  return mode == Resample::kSum ||
         std::all_of(windows.begin(), windows.end(), [&](const WindowDim& w) {
           const bool within = (w.out - 1) * w.stride + w.kernel <= w.in + 2 * w.before;
           return within && (mode == Resample::kMeanWithin || w.before == 0);
         });
}

// How many elements each window counts, int64 in the spatial dims.
DTensor CountsOf(const DTensor& x, const WindowDims& windows, bool with_pad) {
  DTensor counts = full({}, 1, {DType::kI64, x.mesh(), {}});
  for (size_t d = 0; d < windows.size(); ++d) {
    const WindowDim& w = windows[d];
    DimList of_dim;
    for (int64_t o = 0; o < w.out; ++o) {
      const int64_t start = o * w.stride - w.before;
      const int64_t end = std::min(start + w.kernel, w.in + w.before);
      of_dim.push_back(with_pad ? end - start : std::min(end, w.in) - std::max<int64_t>(start, 0));
    }
    Shape shape(windows.size() - d, 1);
    shape[0] = w.out;
    counts = mul(counts, FromVector(of_dim, shape, {DType::kI64, x.mesh(), {}}));
  }
  return counts;
}

DTensor AvgPoolNd(const AvgPoolArgs& a, const DimList& kernel_size, const DimList& stride,
                  const DimList& padding, bool ceil_mode, bool count_include_pad,
                  std::optional<int64_t> divisor) {
  return AsOp(a.op, {{"x", a.x}}, [&] {
    RequireSpatial(a.op, a.x, a.dims);
    const bool whole = a.x.dtype() == DType::kI64;  // sums, which are divided as integers are
    if (!whole) RequireFloating(a.op, a.x);
    if (divisor == 0) ThrowInvalid(a.op, "divisor_override must not be 0");
    const DimList one = {1};
    const WindowDims windows =
        PoolWindows(a.op, a.x, a.dims, {kernel_size, stride, padding, one, ceil_mode});
    const Resample mode = divisor || whole    ? Resample::kSum
                          : count_include_pad ? Resample::kMeanWithin
                                              : Resample::kMean;
    Scales scales(a.dims, 1);
    if (divisor && !whole) scales[0] = 1.0 / static_cast<double>(*divisor);
    const auto call = [&](const DTensor& x, const WindowDims& w) {
      return RunResample(x, w, mode, scales);
    };
    const DTensor x = whole ? to(a.x, DType::kF64) : a.x;
    DTensor y = AreAlike(windows, mode) ? OverHalos(x, windows, 0, {}, call) : call(x, windows);
    if (!whole) return y;
    y = to(y, DType::kI64);
    return divisor ? div(y, *divisor, "trunc")
                   : div(y, CountsOf(x, windows, count_include_pad), "trunc");
  });
}

DTensor AdaptiveAvgPoolNd(const AvgPoolArgs& a, const DimList& output_size) {
  return AsOp(a.op, {{"x", a.x}}, [&] {
    RequireSpatial(a.op, a.x, a.dims);
    RequireFloating(a.op, a.x);
    return RunResample(a.x, AdaptiveWindows(a.op, a.x, a.dims, output_size), Resample::kMean, {});
  });
}

// --- interpolate ---------------------------------------------------------------------------------

// A mode by name: how many spatial dims it takes, and whether it knows align_corners.
struct InterpolateMode {
  absl::string_view name;
  int least, most;
  bool has_corners, takes_bytes;
  Resample plain, corners;
};
constexpr InterpolateMode kModes[] = {
    {"nearest", 1, 3, false, true, Resample::kNearest, Resample::kNearest},
    {"nearest-exact", 1, 3, false, true, Resample::kNearestExact, Resample::kNearestExact},
    {"area", 1, 3, false, false, Resample::kMean, Resample::kMean},
    {"linear", 1, 1, true, false, Resample::kLinear, Resample::kLinearCorners},
    {"bilinear", 2, 2, true, true, Resample::kLinear, Resample::kLinearCorners},
    {"trilinear", 3, 3, true, false, Resample::kLinear, Resample::kLinearCorners},
    {"bicubic", 2, 2, true, true, Resample::kCubic, Resample::kCubicCorners}};

const InterpolateMode& ModeOf(absl::string_view name, const DTensor& x,
                              std::optional<bool> align_corners) {
  const int dims = x.ndim() - 2;
  std::string all;
  for (const InterpolateMode& mode : kModes) {
    absl::StrAppend(&all, all.empty() ? "" : ", ", mode.name);
    if (mode.name != name) continue;
    if (dims < mode.least || dims > mode.most) {
      ThrowInvalid(
          "interpolate",
          absl::StrCat("mode ", name, " takes x of ", mode.least + 2, " to ", mode.most + 2,
                       " dims (batch, channels, spatial), got ", ToString(x.shape())));
    }
    if (align_corners.has_value() && !mode.has_corners) {
      ThrowInvalid("interpolate", absl::StrCat("mode ", name, " does not take align_corners"));
    }
    return mode;
  }
  ThrowInvalid("interpolate", absl::StrCat("mode must be one of ", all, ", is ", name));
}

Scales ScalesPerDim(const Scales& scales, int dims) {
  if (scales.size() != 1 && scales.size() != static_cast<size_t>(dims)) {
    ThrowInvalid("interpolate", absl::StrCat("scale_factor has ", scales.size(),
                                             " numbers, must have 1 or ", dims));
  }
  for (const double scale : scales) {
    if (scale > 0 && scale < 1e9) continue;
    ThrowInvalid("interpolate", absl::StrCat("scale_factor must be positive, is ", scale));
  }
  return scales.size() == 1 ? Scales(dims, scales[0]) : scales;
}

WindowDims SizedWindows(const DTensor& x, const DimList& size, const Scales& scales) {
  const int dims = x.ndim() - 2;
  const DimList sizes = size.empty() ? DimList() : PerDim("interpolate", "size", size, dims, 1);
  WindowDims windows;
  for (int d = 0; d < dims; ++d) {
    const int64_t in = SpatialSize(x, dims, d);
    const int64_t out = size.empty() ? static_cast<int64_t>(std::floor(in * scales[d])) : sizes[d];
    if (in < 1 || out < 1) {
      ThrowInvalid("interpolate", absl::StrCat("spatial dim ", d, " would go from ", in, " to ",
                                               out, " elements: both must be at least 1"));
    }
    windows.push_back({in, out, 0, 1, 1, 0});
  }
  return windows;
}

// To whole numbers from 0 to 255, halves up.
DTensor Bytes(const DTensor& x) { return clamp(floor(add(x, 0.5)), 0.0, 255.0); }

// Of bytes, dim by dim from the last, each rounded to bytes again: as torch does it.
DTensor InterpolateBytes(const DTensor& x, const WindowDims& windows, Resample mode,
                         const Scales& scales) {
  DTensor y = to(x, DType::kF32);
  for (size_t d = windows.size(); d-- > 0;) {
    WindowDims one = windows;
    Scales of_one(windows.size(), 0);
    for (size_t i = 0; i < windows.size(); ++i) {
      if (i < d) one[i].out = one[i].in;
      if (i > d) one[i].in = one[i].out;
    }
    if (!scales.empty()) of_one[d] = scales[d];
    y = Bytes(RunResample(y, one, mode, of_one));
  }
  return to(y, DType::kU8);
}

DTensor Interpolate(const DTensor& x, const DimList& size, const Scales& scale_factor,
                    absl::string_view name, std::optional<bool> align_corners, bool recompute) {
  const InterpolateMode& mode = ModeOf(name, x, align_corners);
  const bool bytes = x.dtype() == DType::kU8 && mode.takes_bytes;
  if (!bytes) RequireFloating("interpolate", x);
  if (size.empty() == scale_factor.empty()) {
    ThrowInvalid("interpolate", "takes size or scale_factor, one of the two");
  }
  if (recompute && scale_factor.empty()) {
    ThrowInvalid("interpolate", "recompute_scale_factor needs a scale_factor, not a size");
  }
  Scales scales;
  if (size.empty()) scales = ScalesPerDim(scale_factor, x.ndim() - 2);
  const WindowDims windows = SizedWindows(x, size, scales);
  if (recompute) scales.clear();
  const Resample way = align_corners.value_or(false) ? mode.corners : mode.plain;
  return bytes ? InterpolateBytes(x, windows, way, scales) : RunResample(x, windows, way, scales);
}

}  // namespace

void RegisterResampleOps() {
  Op("resample(x; window, mode, scale0, scale1, scale2)")
      .Factors(WindowFactors)
      .Linear("x")
      .Check(CheckResample)
      .Vjp(ResampleVjp);
  Op("resample_backward(dy; window, mode, scale0, scale1, scale2)")
      .Factors(WindowBackwardFactors)
      .Linear("dy")
      .Check(CheckResample);
}

DTensor interpolate(const DTensor& x, DimList size, std::vector<double> scale_factor,
                    absl::string_view mode, std::optional<bool> align_corners,
                    bool recompute_scale_factor) {
  return AsOp("interpolate", {{"x", x}}, [&] {
    return Interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor);
  });
}

DTensor avg_pool1d(const DTensor& x, DimList kernel_size, DimList stride, DimList padding,
                   bool ceil_mode, bool count_include_pad) {
  return AvgPoolNd({"avg_pool1d", 1, x}, kernel_size, stride, padding, ceil_mode, count_include_pad,
                   {});
}
#define DT_AVG_POOL(name, dims)                                                                  \
  DTensor avg_pool##name(const DTensor& x, DimList kernel_size, DimList stride, DimList padding, \
                         bool ceil_mode, bool count_include_pad,                                 \
                         std::optional<int64_t> divisor_override) {                              \
    return AvgPoolNd({"avg_pool" #name, dims, x}, kernel_size, stride, padding, ceil_mode,       \
                     count_include_pad, divisor_override);                                       \
  }
DT_AVG_POOL(2d, 2)
DT_AVG_POOL(3d, 3)
#undef DT_AVG_POOL
#define DT_ADAPTIVE_AVG_POOL(name, dims)                                         \
  DTensor adaptive_avg_pool##name(const DTensor& x, DimList output_size) {       \
    return AdaptiveAvgPoolNd({"adaptive_avg_pool" #name, dims, x}, output_size); \
  }
DT_ADAPTIVE_AVG_POOL(1d, 1)
DT_ADAPTIVE_AVG_POOL(2d, 2)
DT_ADAPTIVE_AVG_POOL(3d, 3)
#undef DT_ADAPTIVE_AVG_POOL

}  // namespace dtensor
