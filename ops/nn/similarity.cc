// cosine_similarity and normalize: both divide by a norm that stays away from 0.
#include "absl/strings/str_cat.h"
#include "dtensor/ops/nn/common.h"
#include "dtensor/tensor/status.h"

namespace dtensor {
namespace {

// TEMPORARY until pointwise has them
DTensor clamp_min(const DTensor& x, double low) { return masked_fill(x, lt(x, low), low); }
DTensor linalg_vector_norm(const DTensor& x, double p, DimList dims, bool keep) {
  return pow(sum(pow(abs(x), p), dims, keep), 1 / p);
}

// x by its length over dim, which counts as `eps` at least; but gradients pass as if it did not, as
// in torch.
DTensor Direction(const DTensor& x, int dim, double eps) {
  const DTensor length = linalg_vector_norm(x, 2, {dim}, true), known = length.Detach();
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
    const DTensor wide = Wide(x);
    const DTensor length = linalg_vector_norm(wide, p, std::move(dims), true);
    return to(div(wide, clamp_min(length, eps)), x.dtype());
  });
}

}  // namespace dtensor
