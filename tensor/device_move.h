// What Fill, Copy and ReduceInPlace do where a tensor is not in CPU memory: nothing on meta, else
// the device's own. Throw Error where it refuses.
#pragma once

#include "dtensor/tensor/tensor.h"

namespace dtensor {

void FillElsewhere(const Tensor& out, const void* value, DType value_dtype);
// At least one of them is not on the CPU.
void CopyElsewhere(const Tensor& from, const Tensor& to);
void ReduceElsewhere(const Tensor& acc, const Tensor& x, ReduceOp op);
// Every `out` = the reduction of all `in` in their order; one shape and dtype; an input may be an
// output. On the device of out[0].
void ReduceOnDevice(absl::Span<const Tensor> in, absl::Span<const Tensor> out, ReduceOp op);

}  // namespace dtensor
