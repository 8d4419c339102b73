// Shares: which rank reduces which elements of a pending sum that is to end elsewhere. An element
// is reduced on a rank that wants it, if one holds its terms, else on any that does; evenly.
// Internal to dtensor/.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "absl/functional/function_ref.h"
#include "dtensor/parts.h"

namespace dtensor::internal {

// Elements of one part of the target.
struct Share {
  Dims target;    // the part: a coordinate that is lowest on mesh dims that cut nothing
  Region blocks;  // in the rank's packed share
};

class Shares {
 public:
  // The coordinates that take part are `of_source` and `of_target`; everything must outlive this.
  Shares(const Parts& source, const Parts& target, const CoordinateBox& of_source,
         const CoordinateBox& of_target);

  // Those of the rank at a coordinate of the source.
  std::vector<Share> Of(const Dims& coordinate) const;
  // Calls visit(rank, elements) for all who reduce elements of `both`, what a part of the source
  // and the part of the target at `target` have in common, packed.
  void ForEachReducer(const CoordinateBox& source_part, const Dims& target, const Region& both,
                      absl::FunctionRef<void(int64_t, const Region&)> visit) const;
  // Whether all elements have a rank that wants them and holds terms of them; sure, not sharp.
  bool NoneForeign() const;
  // The ranks that hold what the one at `coordinate` holds of the source.
  CoordinateBox PartAt(const Dims& coordinate) const;
  Dims TargetPart(const Dims& coordinate) const;

 private:
  // The ranks that share the reduction of some elements: a box of the source's coordinates, or, of
  // two meshes, a list of ranks.
  struct Reducers {
    CoordinateBox box;
    const std::vector<int64_t>* listed = nullptr;
    bool foreign = false;  // none of them wants the elements
  };
  Reducers ReducersOf(const CoordinateBox& source_part, const Dims& target) const;
  int64_t CountOf(const Reducers& reducers) const;
  int64_t RankOf(const Reducers& reducers, int64_t index) const;
  int64_t IndexIn(const Reducers& reducers, const Dims& coordinate) const;  // -1: none of them
  // Elements are dealt in turns, one after the other: those of `both` that the turn has, as if
  // there were Dealt() of them. Foreign reducers begin at another one for each part of the target.
  Region Range(const Reducers& reducers, const Dims& target, const Region& both, int64_t index,
               int64_t offset) const;
  int64_t Dealt(const Reducers& reducers, const Region& both) const;
  // One coordinate per part of the target.
  CoordinateBox TargetParts() const;
  int64_t MostOfATarget() const;  // elements
  std::vector<Dims> TargetsOf(const Dims& coordinate) const;
  const std::map<Dims, std::vector<int64_t>>& ByTarget(const CoordinateBox& source_part) const;

  const Parts &source_, &target_;
  const CoordinateBox &of_source_, &of_target_;
  const bool same_mesh_, apart_;
  // Of two meshes: the ranks of a part of the source by their part of the target.
  mutable std::map<Dims, std::map<Dims, std::vector<int64_t>>> by_target_;
};

}  // namespace dtensor::internal
