// cosine_similarity and normalize: both divide by a norm that stays away from 0.
#include <cmath>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/common.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// The p norm over dims, which stay with size 1. Its gradient, sign(x) * (|x| / norm)^(p - 1), is 0
// where x is, or the norm: powers of small numbers may be none.
DTensor LengthOf(const DTensor& input, double p, const DimList& dims) {
  if (std::isinf(p)) return amax(abs(input), dims, true);
  const DTensor x = input.Detach();
  const auto length = std::make_shared<DTensor>();
  const auto forward = [&]() -> Values {
    const DTensor powers = p == 2 ? square(x) : pow(abs(x), p);
    const DTensor total = Settled(sum(powers, dims, true));
    return {*length = p == 2 ? sqrt(total) : pow(total, 1 / p)};
  };
  const auto backward = [x, p, length](const Values& grads) -> Values {
    const DTensor part = pow(div(abs(x), *length), p - 1);
    const DTensor none = logical_or(eq(x, 0), eq(*length, 0));
    return {masked_fill(abs_backward(mul(grads[0], part), x), none, 0)};
  };
  return CustomFunction("norm", {input}, forward, backward, {x})[0];
}

// x by its length over dim, which counts as `eps` at least; but gradients pass as if it did not, as
// in torch.
DTensor Direction(const DTensor& x, int dim, double eps) {
  const DTensor length = LengthOf(x, 2, {dim}), known = length.Detach();
  return div(x, add(length, sub(clamp_min(known, eps), known)));
}

}  // namespace

DTensor cosine_similarity(const DTensor& x1, const DTensor& x2, int64_t dim, double eps) {
  return AsOp("cosine_similarity", {{"x1", x1}, {"x2", x2}}, [&] {
    const DType dtype = PromoteTypes(x1.dtype(), x2.dtype());
    if (!IsFloating(dtype)) {
      ThrowInvalid("cosine_similarity", "needs floating tensors", {{"x1", x1}, {"x2", x2}});
    }
    const absl::StatusOr<Shape> shape = BroadcastShapes(x1.shape(), x2.shape());
    if (!shape.ok()) ThrowInvalid("cosine_similarity", shape.status().message());
    const int d = CheckedDim("cosine_similarity", dim, static_cast<int>(shape->size()));
    const DType wide = ComputeType(dtype);
    const DTensor a = Direction(expand(to(x1, wide), *shape), d, eps);
    const DTensor b = Direction(expand(to(x2, wide), *shape), d, eps);
    return to(sum(mul(a, b), {d}), dtype);
  });
}

DTensor normalize(const DTensor& x, double p, DimList dims, double eps) {
  return AsOp("normalize", {{"x", x}}, [&] {
    RequireFloating("normalize", x);
    if (std::isnan(p)) ThrowInvalid("normalize", "p must be a number, is NaN");
    const DTensor wide = Wide(x);
    const DTensor length = p > 0 ? LengthOf(wide, p, dims) : norm(wide, p, dims, true);
    return to(div(wide, clamp_min(length, eps)), x.dtype());
  });
}

}  // namespace dtensor
