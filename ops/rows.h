// Rows of a dim that is cut over mesh dims, moved to the ranks that want them: what functions over
// a communicator share. Inside of ops/.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "dtensor/ops/ops.h"

namespace dtensor {

// Rows [begin, end) of the whole, of which a rank has row i at i - origin.
struct Rows {
  int64_t origin, begin, end;
};
using RowsOfRanks = std::vector<std::vector<Rows>>;  // by index in the group of ranks

using MeshDims = absl::InlinedVector<int, 4>;  // ascending

// The mesh dims that cut `dim` of x, where all of them cut it into blocks and no dim is cut flat;
// else none.
MeshDims CutsOf(const Spec& x, int dim);
// The mesh dim over which alone `dim` of x is cut so; -1: there is none.
int OnlyCut(const DTensor& x, int dim);
// What each rank has of `dim`, which CutsOf found cut over `mesh_dims`: by row-major coordinate on
// these, as Comm::index counts. Ascending.
RowsOfRanks BlocksOf(const Spec& x, int dim, const MeshDims& mesh_dims);

// From what ranks have of a dim, every row once, to what they want.
struct RowMove {
  MeshDims mesh_dims;
  int dim;
  RowsOfRanks have, want;
  // Rows that ranks want and do not have, over all of them.
  int64_t Fetched() const;
};
// `to` gets what this rank wants: this rank's tensors, and what all hold.
//   Comm:   one exchange over the mesh dims, a message per peer; none if nothing is Fetched.
//           Members of the mesh call it.
void MoveRows(const RowMove& move, const DeviceMesh& mesh, const Tensor& from, const Tensor& to);
// The other way, as gradients go: rows that several ranks wanted add up in `to`.
void AddRowsBack(const RowMove& move, const DeviceMesh& mesh, const Tensor& from, const Tensor& to);

// y, a view of what no tensor of the program shows, as none: it may be changed in place while
// recording. What is one must not depend on the mesh.
DTensor Owned(DTensor y);

// The tensor of which `part` makes this rank's share, in memory that no tensor of the program has:
// it is no view. Ranks outside of the mesh have none, and a handle: the specs and histories of all
// ranks are alike.
DTensor OfParts(const Spec& spec, absl::FunctionRef<Tensor()> part);

}  // namespace dtensor
