#include "ops/widen.h"

#include <vector>

#include "tensor/kernels/runs.h"

namespace dtensor {
namespace {

int64_t NumelOf(const TensorRef& t) {
  int64_t n = 1;
  for (int d = 0; d < t.ndim; ++d) n *= t.sizes[d];
  return n;
}

void Convert(const TensorRef& from, const TensorRef& to) {
  ActiveRuns().copy[static_cast<int>(from.dtype)][static_cast<int>(to.dtype)](to.data, 1, from.data,
                                                                              1, NumelOf(from));
}

bool IsNarrow(DType t) { return t == DType::kBF16 || t == DType::kF16; }

}  // namespace

void RunWidened(const KernelCall& call, KernelFn f32) {
  std::vector<TensorRef> in(call.in.begin(), call.in.end()), out(call.out.begin(), call.out.end());
  const auto widen = [&](TensorRef* t) {
    t->data = call.workspace->Allocate(NumelOf(*t) * SizeOf(DType::kF32));
    t->dtype = DType::kF32;
  };
  for (size_t i = 0; i < in.size(); ++i) {
    if (!IsNarrow(in[i].dtype)) continue;
    widen(&in[i]);
    Convert(call.in[i], in[i]);
  }
  for (TensorRef& t : out) {
    if (IsNarrow(t.dtype)) widen(&t);
  }
  KernelCall converted = call;
  converted.in = in;
  converted.out = out;
  f32(converted);
  for (size_t i = 0; i < out.size(); ++i) {
    if (IsNarrow(call.out[i].dtype)) Convert(out[i], call.out[i]);
  }
}

}  // namespace dtensor
