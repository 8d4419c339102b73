// CheckLocals: run_check of FromLocal.
#pragma once

#include "absl/status/status.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::internal {

// Compares across all ranks of the mesh: global shape, dtype, whether the local shape fits
// (`fits`), and the bits of parts that should be equal. Every rank gets the same answer.
//   Errors: FailedPrecondition naming the ranks that differ.
absl::Status CheckLocals(const Tensor& local, const Spec& spec, const absl::Status& fits);

}  // namespace dtensor::internal
