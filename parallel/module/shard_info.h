// What ranks hold of a parameter, as nanotron says it: views of its spec.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/placement.h"
#include "dtensor/mesh/spec.h"
#include "dtensor/parallel/module/module.h"

namespace dtensor {

// A box of this rank's part, and where it lies in the whole: [start, end) per tensor dim.
struct SlicesPair {
  std::vector<Interval> local, global;
  friend bool operator==(const SlicesPair&, const SlicesPair&) = default;
};

// What the calling rank holds of a tensor that is cut.
//   Source: nanotron ShardedInfo
struct ShardedInfo {
  std::vector<int64_t> global_ranks;  // that it is cut among, this one included
  std::vector<SlicesPair> local_global_slices;
  Shape unsharded_shape;
  bool is_sharded() const { return global_ranks.size() > 1; }
  // "0,2,1|0,4,1#4,6,1|0,4,1;...": start, end and step per dim, local # global, one per pair.
  std::string ToText() const;
};
//   Errors: FailedPrecondition for a rank outside of the mesh; Unimplemented for flat pieces, which
//   are no boxes.
absl::StatusOr<ShardedInfo> ShardedInfoOf(const Spec& spec);
// The pairs of a text as ToText gives it. Errors: InvalidArgument naming what does not read.
absl::StatusOr<std::vector<SlicesPair>> ParseSlicesPairs(absl::string_view text);

// The names and holders of one logical parameter.
//   Source: nanotron TiedInfo. How gradients of its uses are summed follows from the placements.
struct TiedInfo {
  std::string name;                   // the first
  std::vector<std::string> names;     // all
  std::vector<int64_t> global_ranks;  // that hold what this rank holds, itself included
  bool is_tied() const { return names.size() > 1; }
};
//   Errors: FailedPrecondition for a rank outside of the parameter's mesh.
absl::StatusOr<TiedInfo> TiedInfoOf(const NamedParameter& parameter);

}  // namespace dtensor
