// Convolutions: three ops, each the gradient of the others. All that an op reads of the geometry is
// in `window`, which they share: the kernel, too, so that each can make any of the three operands.
#include <utility>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/conv/halo.h"
#include "dtensor/ops/conv/spatial.h"
#include "dtensor/ops/ops.h"

namespace dtensor {
namespace {

// --- rules ---------------------------------------------------------------------------------------

// The operands as factors: x "... (g c) [i0]", w "(g o) c [k0]", y "... (g o) [t0]", and the bias
// of what is made of x and w, or of y and w.
struct ConvTexts {
  std::string x, w, y, c, o;
  std::vector<std::pair<std::string, int64_t>> sizes;
};
absl::StatusOr<ConvTexts> TextsOf(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const Windows windows, CheckedWindows(call));
  const int64_t groups = call.Int("groups");
  DT_RETURN_IF_ERROR(RequireDim("groups", groups - 1, kMostWindowNumber));
  ConvTexts t;
  t.c = groups == 1 ? "c" : "(g c)";
  t.o = groups == 1 ? "o" : "(g o)";
  t.x = absl::StrCat("... ", t.c, WholeDims("i", windows.dims));
  t.w = absl::StrCat(t.o, " c", WholeDims("k", windows.dims));
  t.y = absl::StrCat("... ", t.o, WholeDims("t", windows.dims));
  t.sizes = WindowSizes(windows);
  for (int d = 0; d < windows.dims; ++d) {
    t.sizes.emplace_back(absl::StrCat("k", d), windows.d[kMaxWindowDims - windows.dims + d].kernel);
  }
  if (groups != 1) t.sizes.emplace_back("g", groups);
  return t;
}

absl::StatusOr<FactorText> ConvFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const ConvTexts t, TextsOf(call));
  const std::string bias = call.num_inputs() == 3 ? absl::StrCat(", ", t.o) : "";
  return FactorText{absl::StrCat(t.x, ", ", t.w, bias, " -> ", t.y), t.sizes};
}

absl::StatusOr<FactorText> ConvInputFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const ConvTexts t, TextsOf(call));
  const std::string bias = call.num_inputs() == 3 ? absl::StrCat(", ", t.c) : "";
  return FactorText{absl::StrCat(t.y, ", ", t.w, bias, " -> ", t.x), t.sizes};
}

absl::StatusOr<FactorText> ConvWeightFactors(const OpCall& call) {
  DT_ASSIGN_OR_RETURN(const ConvTexts t, TextsOf(call));
  return FactorText{absl::StrCat(t.x, ", ", t.y, " -> ", t.w), t.sizes};
}

absl::Status SameBatch(const OpCall& call) {
  DT_RETURN_IF_ERROR(SameDTypes(call));
  DT_ASSIGN_OR_RETURN(const Windows windows, CheckedWindows(call));
  return SameLeading(call, {windows.dims + 1, windows.dims + 1});
}

// --- gradients -----------------------------------------------------------------------------------

DTensor ConvInput(const DTensor& dy, const DTensor& w, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp("conv_input");
  return Call1(op, {&dy, &w}, attrs);
}
DTensor ConvWeight(const DTensor& x, const DTensor& dy, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp("conv_weight");
  return Call1(op, {&x, &dy}, attrs);
}
DTensor Convolve(const DTensor& x, const DTensor& w, absl::Span<const Attr> attrs) {
  static const OpDef& op = GetOp("conv");
  return Call1(op, {&x, &w}, attrs);
}

// Of [n, c, s...] the sum over all dims but that of channels.
DTensor ChannelSums(const DTensor& dy, IntSpan window) {
  const int channel = dy.ndim() - 1 - static_cast<int>(window.size()) / kWindowNumbers;
  DimList others;
  for (int d = 0; d < dy.ndim(); ++d) {
    if (d != channel) others.push_back(d);
  }
  return sum(dy, others, false, dy.dtype());
}

void ConvVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, ConvInput(c.grad(), c.in(1), c.attrs()));
  if (c.needs(1)) c.set(1, ConvWeight(c.in(0), c.grad(), c.attrs()));
  if (c.num_inputs() == 3 && c.needs(2)) c.set(2, ChannelSums(c.grad(), c.Ints("window")));
}

void ConvInputVjp(VjpCall& c) {
  if (c.needs(0)) c.set(0, Convolve(c.grad(), c.in(1), c.attrs()));
  if (c.needs(1)) c.set(1, ConvWeight(c.grad(), c.in(0), c.attrs()));
  if (c.num_inputs() == 3 && c.needs(2)) c.set(2, ChannelSums(c.grad(), c.Ints("window")));
}

// --- arguments -----------------------------------------------------------------------------------

struct ConvArgs {
  absl::string_view op;
  int dims;
  const DTensor &x, &weight, &bias;
  int64_t groups;
};

// `transposed`: the weight is [in, out / groups, k...].
void CheckConv(const ConvArgs& a, bool transposed) {
  RequireSpatial(a.op, a.x, a.dims);
  if (a.weight.ndim() != a.dims + 2) {
    ThrowInvalid(a.op, absl::StrCat("weight must have ", a.dims + 2, " dims (",
                                    transposed ? "in, out / groups" : "out, in / groups", ", ",
                                    a.dims, " of the kernel), is ", ToString(a.weight.shape())));
  }
  if (a.groups < 1 || a.groups > kMostWindowNumber) {
    ThrowInvalid(a.op, absl::StrCat("groups must be at least 1, is ", a.groups));
  }
  const int64_t channels = a.x.size(-a.dims - 1), first = a.weight.size(0);
  const int64_t want = transposed ? first : a.weight.size(1) * a.groups;
  if (channels != want) {
    ThrowInvalid(
        a.op, absl::StrCat("x ", ToString(a.x.shape()), " has ", channels, " channels, weight ",
                           ToString(a.weight.shape()), " with ", a.groups, " groups takes ", want));
  }
  if (first % a.groups != 0) {
    ThrowInvalid(a.op, absl::StrCat("groups ", a.groups, " must divide the ", first,
                                    transposed ? " input" : " output", " channels"));
  }
  const int64_t out = transposed ? a.weight.size(1) * a.groups : first;
  if (a.bias.defined() && IntSpan(a.bias.shape()) != IntSpan({out})) {
    ThrowInvalid(a.op, absl::StrCat("bias must be [", out, "], is ", ToString(a.bias.shape())));
  }
}

// Elements before and behind dim d.
std::pair<int64_t, int64_t> PaddingOf(const ConvArgs& a, const Padding& padding, const WindowDim& w,
                                      int d) {
  if (padding.name.empty()) {
    const int64_t n = PerDim(a.op, "padding", padding.sizes, a.dims, 0)[d];
    return {n, n};
  }
  if (padding.name == "valid") return {0, 0};
  if (padding.name != "same") {
    ThrowInvalid(a.op, absl::StrCat("padding must be numbers, \"same\" or \"valid\", is \"",
                                    padding.name, "\""));
  }
  if (w.stride != 1) {
    ThrowInvalid(a.op, absl::StrCat("padding \"same\" needs stride 1, not ", w.stride));
  }
  const int64_t all = w.dilation * (w.kernel - 1);
  return {all / 2, all - all / 2};
}

WindowDims ConvWindows(const ConvArgs& a, const DimList& stride, const Padding& padding,
                       const DimList& dilation) {
  const DimList strides = PerDim(a.op, "stride", stride, a.dims, 1);
  const DimList dilations = PerDim(a.op, "dilation", dilation, a.dims, 1);
  WindowDims windows;
  for (int d = 0; d < a.dims; ++d) {
    WindowDim w = {a.x.size(d - a.dims), 0, a.weight.size(d - a.dims), strides[d], dilations[d], 0};
    const auto [before, behind] = PaddingOf(a, padding, w, d);
    const int64_t padded = w.in + before + behind, reach = w.dilation * (w.kernel - 1) + 1;
    if (w.kernel < 1 || padded < reach) {
      ThrowInvalid(a.op,
                   absl::StrCat("spatial dim ", d, " has ", padded,
                                " elements with padding; the kernel ", w.kernel, " with dilation ",
                                w.dilation, " takes ", reach, ", and must fit"));
    }
    w.before = before;
    w.out = (padded - reach) / w.stride + 1;
    windows.push_back(w);
  }
  return windows;
}

DTensor ConvNd(const ConvArgs& a, const DimList& stride, const Padding& padding,
               const DimList& dilation) {
  static const OpDef &op = GetOp("conv"), &with_bias = GetOp("conv_bias");
  return AsOp(a.op, {{"x", a.x}, {"weight", a.weight}, {"bias", a.bias, true}}, [&] {
    CheckConv(a, false);
    const auto call = [&](const DTensor& x, const WindowDims& windows) {
      const DimList window = Packed(windows);
      const Attr attrs[] = {IntsAttr(window), IntAttr(a.groups)};
      return a.bias.defined() ? Call1(with_bias, {&x, &a.weight, &a.bias}, attrs)
                              : Call1(op, {&x, &a.weight}, attrs);
    };
    const WindowDims windows = ConvWindows(a, stride, padding, dilation);
    return OverHalos(a.x, windows, 0, {a.weight, a.bias}, call);
  });
}

WindowDims TransposedWindows(const ConvArgs& a, const DimList& stride, const DimList& padding,
                             const DimList& output_padding, const DimList& dilation) {
  const DimList strides = PerDim(a.op, "stride", stride, a.dims, 1);
  const DimList dilations = PerDim(a.op, "dilation", dilation, a.dims, 1);
  const DimList before = PerDim(a.op, "padding", padding, a.dims, 0);
  const DimList more = PerDim(a.op, "output_padding", output_padding, a.dims, 0);
  WindowDims windows;
  for (int d = 0; d < a.dims; ++d) {
    WindowDim w = {0,          a.x.size(d - a.dims), a.weight.size(d - a.dims),
                   strides[d], dilations[d],         before[d]};
    if (more[d] >= w.stride && more[d] >= w.dilation) {
      ThrowInvalid(a.op, absl::StrCat("output_padding ", more[d], " must be less than stride ",
                                      w.stride, " or dilation ", w.dilation));
    }
    w.in = (w.out - 1) * w.stride - 2 * w.before + w.dilation * (w.kernel - 1) + more[d] + 1;
    if (w.kernel < 1 || w.out < 1 || w.in < 1) {
      ThrowInvalid(
          a.op, absl::StrCat("spatial dim ", d, " of the result would have ", w.in, " elements: x ",
                             ToString(a.x.shape()), ", weight ", ToString(a.weight.shape()),
                             ", stride ", w.stride, ", padding ", w.before));
    }
    windows.push_back(w);
  }
  return windows;
}

DTensor ConvTransposeNd(const ConvArgs& a, const DimList& stride, const DimList& padding,
                        const DimList& output_padding, const DimList& dilation) {
  static const OpDef& with_bias = GetOp("conv_input_bias");
  return AsOp(a.op, {{"x", a.x}, {"weight", a.weight}, {"bias", a.bias, true}}, [&] {
    CheckConv(a, true);
    const DimList window = Packed(TransposedWindows(a, stride, padding, output_padding, dilation));
    const Attr attrs[] = {IntsAttr(window), IntAttr(a.groups)};
    return a.bias.defined() ? Call1(with_bias, {&a.x, &a.weight, &a.bias}, attrs)
                            : ConvInput(a.x, a.weight, attrs);
  });
}

}  // namespace

void RegisterConvOps() {
  Op("conv(x, w; window, groups)")
      .Factors(ConvFactors)
      .Linear("x * w")
      .Check(SameDTypes)
      .Vjp(ConvVjp, "x for w, w for x");
  Op("conv_bias(x, w, b; window, groups)")
      .Factors(ConvFactors)
      .Linear("x * w + b")
      .Check(SameDTypes)
      .Vjp(ConvVjp, "x for w, w for x");
  Op("conv_input(dy, w; window, groups)")
      .Factors(ConvInputFactors)
      .Linear("dy * w")
      .Check(SameDTypes)
      .Vjp(ConvInputVjp, "dy for w, w for dy");
  Op("conv_input_bias(dy, w, b; window, groups)")
      .Factors(ConvInputFactors)
      .Linear("dy * w + b")
      .Check(SameDTypes)
      .Vjp(ConvInputVjp, "dy for w, w for dy");
  Op("conv_weight(x, dy; window, groups)")
      .Factors(ConvWeightFactors)
      .Linear("x * dy")
      .Check(SameBatch);
}

#define DT_CONV(name, dims)                                                                        \
  DTensor conv##name(const DTensor& x, const DTensor& weight, const DTensor& bias, DimList stride, \
                     const Padding& padding, DimList dilation, int64_t groups) {                   \
    return ConvNd({"conv" #name, dims, x, weight, bias, groups}, stride, padding, dilation);       \
  }                                                                                                \
  DTensor conv_transpose##name(const DTensor& x, const DTensor& weight, const DTensor& bias,       \
                               DimList stride, DimList padding, DimList output_padding,            \
                               int64_t groups, DimList dilation) {                                 \
    return ConvTransposeNd({"conv_transpose" #name, dims, x, weight, bias, groups}, stride,        \
                           padding, output_padding, dilation);                                     \
  }
DT_CONV(1d, 1)
DT_CONV(2d, 2)
DT_CONV(3d, 3)
#undef DT_CONV

}  // namespace dtensor
