// What ranks tell each other of their parts: run_check of FromLocal, and sizes of uneven parts.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor::internal {

// Compares across all ranks of the mesh: global shape, dtype, whether the local shape fits
// (`fits`), and the bits of parts that should be equal. Every rank gets the same answer.
//   Errors: FailedPrecondition naming the ranks that differ.
absl::Status CheckLocals(const Tensor& local, const Spec& spec, const absl::Status& fits);

// The global shape, for FromLocal, of what the ranks of a mesh hold parts of, which may be uneven:
// a dim that is cut is as long as the parts together. Empty where nothing is cut by dims, and where
// nobody would answer (outside of the mesh, in a rehearsal, on meta): FromLocal then takes parts as
// even.
//   Comm:   the sizes of every rank's part, in host bytes.
//   Errors: InvalidArgument, on all ranks, naming the first rank whose part is not what the
//   placements give it, with its sizes; those of the exchange.
absl::StatusOr<Shape> ShapeOfParts(const Tensor& part, const DeviceMesh& mesh,
                                   absl::Span<const Placement> placements);

}  // namespace dtensor::internal
