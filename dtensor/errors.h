// Errors at the surface: how functions of tensors say what failed, and who is told.
#pragma once

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/mesh/mesh.h"

namespace dtensor {

// The form of every error of an op: "[op] cause; inputs: x = <spec>, ... (rank r of n, in module
// m)", with OriginOf. At most eight inputs are listed; of no module the end is left out.
struct NamedInput {
  absl::string_view name;
  const DTensor& value;
  bool optional = false;  // may be null: then it is not mentioned
};
absl::Status ExplainError(absl::string_view op, absl::Span<const NamedInput> inputs,
                          const absl::Status& cause);

// InvalidArgument, rank-local, unless the tensor was made by the calling rank in this world. Does
// not wait for a pending one.
absl::Status CheckOwn(const DTensor& t);

// What keeps `value` from taking the place of a tensor with the spec `wanted`: its shape, dtype or
// mesh (which may be Self). "is float64, must be float32"; empty: nothing.
std::string Misfit(const DTensor& value, const Spec& wanted);

// The least number of an integer dtype, and what comes after the greatest.
std::pair<double, double> RangeOf(DType t);
// Why `t` does not hold `value`, whose fraction may be cut; empty: it does. Whole numbers wrap into
// uint8 from -255 up, and anything is a bool, as in PyTorch; floats round.
std::string Misfit(const Scalar& value, DType t);

// To be called where an error of a function on `mesh` leaves it: a rank-local one aborts the groups
// of the calling rank, whose peers may be waiting for it, and would until the deadline. Nothing for
// uniform errors and where nobody waits: a mesh of one rank, or none of data (meta, RunFake,
// Explain). Inside of a function of ops that is when the function ends, in its name. Returns
// `status`.
absl::Status TellPeers(const DeviceMesh& mesh, const absl::Status& status);

}  // namespace dtensor
