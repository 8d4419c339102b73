// Making DTensors: from full values, from local parts, and factories. All throw Error.
#pragma once

#include <optional>
#include <type_traits>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/errors.h"
#include "dtensor/rng/fill.h"

namespace dtensor {

using PlacementSpan = absl::Span<const Placement>;

// Distributes a full tensor. Every rank passes the same values (src_rank < 0), or rank `src_rank`
// of the mesh (index in row-major order) broadcasts its own.
DTensor DistributeTensor(const Tensor& full, const DeviceMesh& mesh, PlacementSpan placements,
                         int64_t src_rank = -1);
// From a tensor on Self, in memory of its own, recorded by autograd.
DTensor DistributeTensor(const DTensor& full, const DeviceMesh& mesh, PlacementSpan placements);
// A tensor on Self.
DTensor OnSelf(const Tensor& tensor);

struct FromLocalOptions {
  // Global shape; empty: derived from this rank's local shape (even shards).
  Shape shape = {};
  // Checks across ranks that shapes and dtypes agree and replicated parts hold the same bits.
  bool run_check = false;
  // Placement in which the gradient leaves; default as ToLocal's rule, but that a term of an
  // average of n has one nth of its gradient.
  Placements grad_placements = {};
};
// The inverse of ToLocal: `local` (on Self) becomes this rank's part, in its memory where that is
// row-major, else copied. Recorded by autograd.
//   Errors: InvalidArgument if the local shape is not what placements and global shape give on this
//   rank; with run_check FailedPrecondition naming the ranks that differ.
DTensor FromLocal(const DTensor& local, const DeviceMesh& mesh, PlacementSpan placements,
                  const FromLocalOptions& options = {});

// --- factories: by default on Self ---
struct TensorOptions {
  // float32; full, arange and FromVector go by what they are given (integers: int64; bools: bool).
  std::optional<DType> dtype = {};
  DeviceMesh mesh = DeviceMesh::Self();
  Placements placements = {};  // empty: Replicate everywhere
};
DTensor zeros(IntSpan shape, const TensorOptions& options = {});
DTensor ones(IntSpan shape, const TensorOptions& options = {});
DTensor full(IntSpan shape, Scalar value, const TensorOptions& options = {});
DTensor empty(IntSpan shape, const TensorOptions& options = {});
// Of x's shape, mesh, placements (Replicate where pending) and dtype, unless given. Random ops fill
// it in x's memory order, as torch's *_like do.
DTensor empty_like(const DTensor& x, std::optional<DType> dtype = {});
// Strides of the one-device tensor that x stands for (a transposed x: those of a transposed one);
// empty: row-major. The same on every rank.
IntSpan MemoryStrides(const DTensor& x);
// start, start + step, ... below end (above, for a negative step).
DTensor arange(Scalar start, Scalar end, Scalar step = 1, TensorOptions options = {});
// Uniform in [0, 1) and standard normal from the rank's default generator: the numbers of one
// device under any placement.
DTensor rand(IntSpan shape, const TensorOptions& options = {});
DTensor randn(IntSpan shape, const TensorOptions& options = {});
// In place, without history; a leaf that needs grad is fine here (initialisation).
//   Errors: InvalidArgument for parameters or dtypes the op does not take, a tensor with a history,
//   and views that cannot be written.
void random_fill_(const DTensor& t, const RandomOp& op);
// The same for a draw of one's own, which fills local(); `inputs`: besides t, for messages.
using FillFn = absl::FunctionRef<absl::Status(const DTensor&)>;
void random_fill_(const char* name, const DTensor& t, FillFn draw,
                  absl::Span<const NamedInput> inputs = {});
void uniform_(const DTensor& t, double from = 0, double to = 1);
void normal_(const DTensor& t, double mean = 0, double std = 1);
// From values given in the program, row-major. Without a dtype floating values become float32 and
// integers keep their type.
//   Errors: InvalidArgument for a number of values other than the shape's, and of placements other
//   than the mesh's dims.
template <class T>
DTensor FromVector(const std::vector<T>& values, IntSpan shape, const TensorOptions& options = {}) {
  const DType natural = std::is_floating_point_v<T> ? DType::kF32 : DTypeOf<T>();
  const Tensor t = ValueOrThrow(Tensor::FromVector(values, shape, options.dtype.value_or(natural)));
  Placements p = options.placements;
  if (p.empty() && options.mesh.defined()) p.resize(options.mesh.ndim());
  return DistributeTensor(t, options.mesh, p);
}
inline DTensor FromVector(const std::vector<bool>& values, IntSpan shape,
                          TensorOptions options = {}) {
  if (!options.dtype) options.dtype = DType::kBool;
  return FromVector(std::vector<uint8_t>(values.begin(), values.end()), shape, options);
}

}  // namespace dtensor
