// Placement: how one mesh dim holds a tensor. All five kinds reduce to one function,
// rank -> list of index intervals (LocalIntervals).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "tensor/shape.h"
#include "tensor/tensor.h"

namespace dtensor {

// Half-open range [start, end) of indices.
struct Interval {
  int64_t start = 0, end = 0;
  int64_t length() const { return end - start; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// Immutable value; two placements are equal iff they read the same.
class Placement {
 public:
  enum class Kind : uint8_t { kReplicate, kShard, kPartial, kSegmented, kFlat };

  Placement() = default;  // Replicate
  Kind kind() const { return kind_; }
  bool is_replicate() const { return kind_ == Kind::kReplicate; }
  bool is_shard() const { return kind_ == Kind::kShard; }
  bool is_partial() const { return kind_ == Kind::kPartial; }
  bool is_segmented() const { return kind_ == Kind::kSegmented; }
  bool is_flat() const { return kind_ == Kind::kFlat; }

  int dim() const { return dim_; }            // kShard, kSegmented: tensor dim
  int64_t unit() const { return unit_; }      // kShard: cuts fall on multiples of unit
  ReduceOp reduce_op() const { return op_; }  // kPartial
  IntSpan sizes() const;  // kSegmented: segment sizes; kFlat: length held by each coordinate

  // Same placement on another tensor dim (kShard, kSegmented).
  Placement WithDim(int dim) const;

  // "R", "S(0)", "S(0, unit=4)", "P(sum)", "Segmented(0, [4, 2])", "Flat([3, 3, 0])"
  std::string ToString() const;
  friend bool operator==(const Placement& a, const Placement& b);
  template <typename H>
  friend H AbslHashValue(H h, const Placement& p) {
    for (int64_t s : p.sizes()) h = H::combine(std::move(h), s);
    return H::combine(std::move(h), static_cast<int>(p.kind_), p.dim_, p.unit_,
                      static_cast<int>(p.op_));
  }

 private:
  friend Placement Shard(int, int64_t);
  friend Placement Partial(ReduceOp);
  friend Placement SegmentedShard(int, std::vector<int64_t>);
  friend Placement FlatShard(std::vector<int64_t>);
  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  int dim_ = -1;
  int64_t unit_ = 1;
  std::shared_ptr<const std::vector<int64_t>> sizes_;
};
using Placements = absl::InlinedVector<Placement, 3>;

// Every rank of the mesh dim holds the whole.
inline Placement Replicate() { return {}; }
// torch.chunk semantics in multiples of `unit`: chunk = unit * ceil(ceil(size / unit) / n);
// trailing ranks may hold less or nothing. A negative dim counts from the end (normalised by Spec).
Placement Shard(int dim, int64_t unit = 1);
// Every rank holds a term; the value is their reduction. kAvg exists in redistribution only.
Placement Partial(ReduceOp op = ReduceOp::kSum);
// The dim is cut into segments of `sizes` (their sum is the dim's size); each is sharded by itself.
Placement SegmentedShard(int dim, std::vector<int64_t> sizes);
// SegmentedShard of `pieces` equal segments of a dim of `size` (veScale's InterleavedShard).
// Errors: InvalidArgument if pieces does not divide size.
absl::StatusOr<Placement> InterleavedShard(int dim, int64_t pieces, int64_t size);
// Cuts the flattened local tensor: coordinate r holds lengths[r] consecutive elements.
Placement FlatShard(std::vector<int64_t> lengths);

std::string ToString(absl::Span<const Placement> placements);  // "[S(0), R]"

// The indices in [0, size) that coordinate `coord` of `n` holds. For kShard and kSegmented `size`
// is the dim's (local) size, for kFlat the (local) number of elements; kReplicate and kPartial give
// everything. An empty shard gives no interval. Adjacent intervals are merged.
void LocalIntervals(const Placement& p, int64_t size, int64_t n, int64_t coord,
                    std::vector<Interval>* out);
// The same as the one interval of a kShard; empty shards give {size, size}.
Interval ShardInterval(int64_t size, int64_t unit, int64_t n, int64_t coord);
// Takes from the index list `outer` (ascending intervals) the positions listed in `inner`.
std::vector<Interval> ComposeIntervals(const std::vector<Interval>& outer,
                                       const std::vector<Interval>& inner);

}  // namespace dtensor
