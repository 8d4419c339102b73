// Activation functions that take numbers, and those that are made of other ops.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/ops.h"
#include "dtensor/ops/pointwise/front.h"
#include "dtensor/ops/rules.h"

namespace dtensor {

using namespace pointwise;  // NOLINT(google-build-using-namespace): this file is its user

namespace {

// A floating op with numbers, of integers as float32.
DTensor RealWith(const OpDef& op, const char* name, const DTensor& x,
                 std::initializer_list<double> numbers) {
  CheckDefined(name, x);
  Attrs attrs;
  for (const double number : numbers) attrs.push_back(FloatAttr(number));
  return Apply(op, x, AsFloat(x.dtype()), attrs);
}

}  // namespace

DTensor softplus(const DTensor& x, double beta, double threshold) {
  DT_OP(softplus);
  return RealWith(op, "softplus", x, {beta, threshold});
}
DTensor leaky_relu(const DTensor& x, double negative_slope) {
  DT_OP(leaky_relu);
  return RealWith(op, "leaky_relu", x, {negative_slope});
}

static DTensor EluOf(const char* name, const DTensor& x, double alpha, double scale,
                     double input_scale) {
  DT_OP(elu);
  return RealWith(op, name, x, {alpha, scale, input_scale});
}
DTensor elu(const DTensor& x, double alpha) { return EluOf("elu", x, alpha, 1, 1); }
DTensor selu(const DTensor& x) {  // Klambauer et al. 2017
  return EluOf("selu", x, 1.6732632423543772848, 1.0507009873554804935, 1);
}
DTensor celu(const DTensor& x, double alpha) {
  if (alpha == 0) ThrowInvalid("celu", "alpha is 0, by which x is divided", {{"x", x}});
  return EluOf("celu", x, alpha, 1, 1 / alpha);
}

static DTensor HardTanh(const char* name, const DTensor& x, Scalar min_val, Scalar max_val) {
  DT_OP(hardtanh);
  CheckDefined(name, x);
  RefuseBool(name, x.dtype(), x);
  if (min_val.d > max_val.d) {
    ThrowInvalid(name, absl::StrCat("min_val ", min_val.d, " is above max_val ", max_val.d),
                 {{"x", x}});
  }
  const Attr attrs[] = {NumberIn(x.dtype(), min_val), NumberIn(x.dtype(), max_val)};
  return Apply(op, x, x.dtype(), attrs);
}
DTensor hardtanh(const DTensor& x, Scalar min_val, Scalar max_val) {
  return HardTanh("hardtanh", x, min_val, max_val);
}
DTensor relu6(const DTensor& x) { return HardTanh("relu6", x, 0, 6); }

DTensor softshrink(const DTensor& x, double lambd) {
  DT_OP(softshrink);
  if (!(lambd >= 0)) {
    ThrowInvalid("softshrink", absl::StrCat("lambd is ", lambd, ", which must not be negative"),
                 {{"x", x}});
  }
  return RealWith(op, "softshrink", x, {lambd});
}
DTensor hardshrink(const DTensor& x, double lambd) {
  DT_OP(hardshrink);
  return RealWith(op, "hardshrink", x, {lambd});
}
DTensor threshold(const DTensor& x, Scalar threshold, Scalar value) {
  DT_OP(threshold);
  CheckDefined("threshold", x);
  RefuseBool("threshold", x.dtype(), x);
  RequireHolds("threshold", x.dtype(), value, {{"x", x}});
  const Attr attrs[] = {NumberIn(x.dtype(), threshold), NumberIn(x.dtype(), value)};
  return Apply(op, x, x.dtype(), attrs);
}

DTensor prelu(const DTensor& x, const DTensor& weight) {
  DT_OP(prelu);
  return AsOp("prelu", {{"x", x}, {"weight", weight}}, [&] {
    const DType t = AsFloat(BothTypes("prelu", x, weight));
    if (weight.numel() == 1) return Apply(op, x, reshape(weight, {}), t);
    if (weight.ndim() != 1 || x.ndim() < 2 || x.shape()[1] != weight.numel()) {
      ThrowInvalid("prelu", absl::StrCat("weight ", ToString(weight.shape()),
                                         " is neither one number nor one for each channel (dim 1) "
                                         "of x ",
                                         ToString(x.shape())));
    }
    DimList channels(static_cast<size_t>(x.ndim()) - 1, 1);
    channels[0] = weight.numel();
    return Apply(op, x, reshape(weight, channels), t);
  });
}
DTensor glu(const DTensor& x, int64_t dim) {
  return AsOp("glu", {{"x", x}}, [&] {
    if (x.ndim() == 0) ThrowInvalid("glu", "x has no dims, of which one is halved");
    const int at = CheckedDim("glu", dim, x.ndim());
    const int64_t size = x.shape()[at];
    if (size % 2 != 0) {
      ThrowInvalid("glu", absl::StrCat("dim ", at, " is ", size, ", which has no half"));
    }
    const Values halves = split(x, DimList{size / 2, size / 2}, at);
    return mul(halves[0], sigmoid(halves[1]));
  });
}

}  // namespace dtensor
