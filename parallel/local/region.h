// What a LocalMap region keeps: the types of its tensors, and how a call goes from one to another.
// Internal to parallel/local/.
#pragma once

#include <initializer_list>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dtensor/parallel/local/local_map.h"
#include "dtensor/parallel/local/types.h"
#include "dtensor/recompute.h"

namespace dtensor {
namespace internal {

[[noreturn]] void RefuseLocal(absl::string_view function, const std::string& why);

}  // namespace internal

struct LocalRegion::State {
  explicit State(const DeviceMesh& mesh) : types(mesh), recompute(internal::State().recompute) {}
  internal::LocalTypes types;
  const internal::RecomputeRun* const recompute;  // the call of Recompute that the region is in

  // Backward would run the function of a Recompute inside of the region again, without a region.
  //   Errors: InvalidArgument.
  absl::Status CheckRecompute() const;
  int DimOf(absl::string_view function, absl::string_view mesh_dim) const;

  // What a call changes: x on mesh dim m, from one of the types that it takes.
  struct Step {
    absl::string_view function;
    std::string mesh_dim;
    int m;
    DeviceMesh line;  // of the ranks of the mesh dim
    int64_t n, index;
    internal::TypedLocal typed;
    LocalType type() const { return typed.types[m]; }
  };
  Step Begin(absl::string_view function, const DTensor& x, absl::string_view mesh_dim,
             std::initializer_list<LocalType> from, absl::string_view hint) const;
  // The result, which is `to` on the step's mesh dim, in memory of its own: types are kept by it.
  DTensor End(Step step, const DTensor& x, DTensor y, LocalType to);
  // From one placement on the step's ranks to another, and the placements of the gradients there:
  // what leaves with `to`, what returns with `from`.
  static DTensor Move(const Step& step, const DTensor& x, const Placement& from,
                      const Placement& to, const Placement& grad_from, const Placement& grad_to,
                      const Shape& whole);
};

}  // namespace dtensor
