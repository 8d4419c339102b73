#include "dtensor/ops/long_list.h"

#include <algorithm>

#include "dtensor/ops/ops.h"
#include "dtensor/tensor/status.h"

namespace dtensor {

RankList<int64_t> ListOf(const DTensor& x) {
  const NoGrad no_grad;
  const Tensor whole = ValueOrThrow(internal::FullLocal(to(x, DType::kI64)).ToHost());
  const Tensor line = ValueOrThrow(whole.Contiguous());
  const auto* first = static_cast<const int64_t*>(line.data());
  return {first, first + line.numel()};
}

DTensor FromList(const RankList<int64_t>& values, IntSpan shape, const DeviceMesh& mesh) {
  const Tensor line = ValueOrThrow(Tensor::Empty(shape, DType::kI64));
  DT_CHECK(line.numel() == static_cast<int64_t>(values.size()));
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(line.data()));
  return DistributeTensor(line, mesh, Placements(mesh.defined() ? mesh.ndim() : 0));
}

}  // namespace dtensor
