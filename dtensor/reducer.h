// Reducer: many tensors to be redistributed, those that are summed over the same mesh dims with few
// large all-reduces. Internal to dtensor/.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "dtensor/impl.h"

namespace dtensor::internal {

class Reducer {
 public:
  Reducer();
  // Brings c->tensor to `target`: at once, or with others of its bucket, when that is full or
  // flushed. `c` has to stay where it is until then. All ranks of the mesh must call it in the same
  // order.
  absl::Status Add(Contribution* c, const SpecRef& target);
  absl::Status Flush();

 private:
  using MeshDims = absl::InlinedVector<int, 3>;
  struct Item {
    Contribution* contribution;
    SpecRef target;
    const std::string* module;  // that the reduction is for
  };
  // What one all-reduce can sum: one mesh, dims, dtype.
  struct Bucket {
    DeviceMesh mesh;
    MeshDims dims;
    DType dtype;
    Comm* comm;
    int64_t most;  // bytes: emptied when it has them
    std::vector<Item> items;
    int64_t bytes;
  };
  // The mesh dims to sum over where that is all there is to do, else none.
  static MeshDims SumsOver(const Spec& from, const Spec& to);
  int64_t BucketBytes(const Comm& comm) const;
  static absl::Status Empty(Bucket* bucket);
  static absl::Status RunAlone(const Item& item);
  static absl::Status RunTogether(const Bucket& bucket, const std::vector<Item>& items);

  RankContext& context_;
  std::vector<Bucket> buckets_;  // in the order of their first items
};

}  // namespace dtensor::internal
