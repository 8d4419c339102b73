// Max pools. The op gives values and where they were found; its gradient goes by the latter.
#include "dtensor/ops/conv/pool.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/conv/halo.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

void MaxPoolVjp(VjpCall& c) {
  static const OpDef& op = GetOp("max_pool_backward");
  const DTensor &dy = c.grad(), &indices = c.out(1);
  c.set(0, Call1(op, {&dy, &indices}, c.attrs()));
}

absl::Status IndicesLike(const OpCall& call) {
  if (call.dtype(1) != DType::kI64) {
    return absl::InvalidArgumentError(
        absl::StrCat("indices must be int64, are ", TypeName(call.dtype(1))));
  }
  DT_ASSIGN_OR_RETURN(const Windows w, CheckedWindows(call));
  for (int d = 0; d < w.dims; ++d) {
    const int64_t size = call.shape(0)[call.in(0).ndim() - w.dims + d];
    const int64_t out = w.d[kMaxWindowDims - w.dims + d].out;
    if (size != out) {
      return absl::InvalidArgumentError(
          absl::StrCat("spatial dim ", d, " of dy is ", size, ", must be ", out));
    }
  }
  return SameLeading(call, {0, 0});
}

// The size of a result along one dim.
int64_t PooledSize(const WindowDim& w, bool ceil_mode) {
  const int64_t room = w.in + 2 * w.before - w.dilation * (w.kernel - 1) - 1;
  if (room < 0 && !(ceil_mode && room + w.stride > 0)) return 0;
  int64_t out = (room + (ceil_mode ? w.stride - 1 : 0)) / w.stride + 1;
  if (ceil_mode && (out - 1) * w.stride >= w.in + w.before) --out;
  return out;
}

struct MaxPoolArgs {
  absl::string_view op;
  int dims;
  const DTensor& x;
};

// The whole op, with the windows that `windows()` gives.
template <class F>
Values MaxPool(const MaxPoolArgs& a, bool with_indices, const F& windows) {
  static const OpDef& op = GetOp("max_pool");
  return AsOp(a.op, {{"x", a.x}}, [&]() -> Values {
    RequireSpatial(a.op, a.x, a.dims);
    const auto call = [&](const DTensor& x, const WindowDims& w) {
      const DimList window = Packed(w);
      return Call(op, {&x}, {IntsAttr(window)});
    };
    if (with_indices || !IsFloating(a.x.dtype())) {
      Values both = call(a.x, windows());
      return with_indices ? both : Values{both[0]};
    }
    const auto values = [&](const DTensor& x, const WindowDims& w) { return call(x, w)[0]; };
    return {OverHalos(a.x, windows(), -std::numeric_limits<double>::infinity(), {}, values)};
  });
}

Values MaxPoolNd(const MaxPoolArgs& a, const PoolArgs& args, bool with_indices) {
  return MaxPool(a, with_indices, [&] { return PoolWindows(a.op, a.x, a.dims, args); });
}
Values AdaptiveMaxPoolNd(const MaxPoolArgs& a, const DimList& output_size, bool with_indices) {
  return MaxPool(a, with_indices, [&] { return AdaptiveWindows(a.op, a.x, a.dims, output_size); });
}

}  // namespace

WindowDims PoolWindows(absl::string_view op, const DTensor& x, int dims, const PoolArgs& args) {
  const DimList kernel = PerDim(op, "kernel_size", args.kernel_size, dims, 1);
  const DimList stride = args.stride.empty() ? kernel : PerDim(op, "stride", args.stride, dims, 1);
  const DimList padding = PerDim(op, "padding", args.padding, dims, 0);
  const DimList dilation = PerDim(op, "dilation", args.dilation, dims, 1);
  WindowDims windows;
  for (int d = 0; d < dims; ++d) {
    WindowDim w = {SpatialSize(x, dims, d), 0, kernel[d], stride[d], dilation[d], padding[d]};
    const int64_t reach = w.dilation * (w.kernel - 1) + 1;
    if (2 * w.before > reach) {
      ThrowInvalid(
          op, absl::StrCat("padding ", w.before, " must be at most half of the window, ", reach));
    }
    w.out = PooledSize(w, args.ceil_mode);
    if (w.in < 1 || w.out < 1) {
      ThrowInvalid(
          op, absl::StrCat("spatial dim ", d, " of ", ToString(x.shape()),
                           " is too small for a window of ", reach, " with padding ", w.before));
    }
    windows.push_back(w);
  }
  return windows;
}

WindowDims AdaptiveWindows(absl::string_view op, const DTensor& x, int dims,
                           const DimList& output_size) {
  const DimList sizes = PerDim(op, "output_size", output_size, dims, -1);
  WindowDims windows;
  for (int d = 0; d < dims; ++d) {
    const int64_t in = SpatialSize(x, dims, d);
    if (in < 1) {
      ThrowInvalid(op, absl::StrCat("spatial dim ", d, " of ", ToString(x.shape()), " is empty"));
    }
    windows.push_back({in, sizes[d] < 0 ? in : sizes[d], 0, 1, 1, 0});
  }
  return windows;
}

void RegisterMaxPoolOps() {
  Op("max_pool(x; window) -> y, indices")
      .Factors(WindowFactors)
      .OutDType([](const OpCall& c, int output) -> absl::StatusOr<DType> {
        return output == 0 ? c.dtype(0) : DType::kI64;
      })
      .Vjp(MaxPoolVjp, "indices");
  Op("max_pool_backward(dy, indices; window)")
      .Factors(WindowBackwardFactors)
      .Linear("dy(indices)")
      .Check(IndicesLike);
}

#define DT_MAX_POOL(name, dims)                                                                  \
  DTensor max_pool##name(const DTensor& x, DimList kernel_size, DimList stride, DimList padding, \
                         DimList dilation, bool ceil_mode) {                                     \
    return MaxPoolNd({"max_pool" #name, dims, x},                                                \
                     {kernel_size, stride, padding, dilation, ceil_mode}, false)[0];             \
  }                                                                                              \
  Values max_pool##name##_with_indices(const DTensor& x, DimList kernel_size, DimList stride,    \
                                       DimList padding, DimList dilation, bool ceil_mode) {      \
    return MaxPoolNd({"max_pool" #name, dims, x},                                                \
                     {kernel_size, stride, padding, dilation, ceil_mode}, true);                 \
  }                                                                                              \
  DTensor adaptive_max_pool##name(const DTensor& x, DimList output_size) {                       \
    return AdaptiveMaxPoolNd({"adaptive_max_pool" #name, dims, x}, output_size, false)[0];       \
  }                                                                                              \
  Values adaptive_max_pool##name##_with_indices(const DTensor& x, DimList output_size) {         \
    return AdaptiveMaxPoolNd({"adaptive_max_pool" #name, dims, x}, output_size, true);           \
  }
DT_MAX_POOL(1d, 1)
DT_MAX_POOL(2d, 2)
DT_MAX_POOL(3d, 3)
#undef DT_MAX_POOL

}  // namespace dtensor
