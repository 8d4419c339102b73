// Placement: how one mesh dim holds a tensor. All kinds reduce to one function, rank -> list of
// index intervals (LocalIntervals); those that cut one tensor dim do so as segments (SegmentsOf).
// What differs between kinds is asked by the predicates and the functions below, which
// placement.cc answers from one table. docs/reference/placements.md has the rules.
#pragma once

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/tensor.h"

namespace dtensor {

// Half-open range [start, end) of indices.
struct Interval {
  int64_t start = 0, end = 0;
  int64_t length() const { return end - start; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// A stretch of a tensor dim that is sharded by itself, in multiples of `unit` (see Shard).
struct Segment {
  Segment(int64_t elements, int64_t per_unit = 1)  // NOLINT: {4, 2} are sizes
      : size(elements), unit(per_unit) {}
  int64_t size, unit;
  friend bool operator==(const Segment&, const Segment&) = default;
};
using Segments = std::vector<Segment>;

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
  // Cuts the tensor dim dim(), whether into blocks or otherwise; flat pieces cut all of them.
  bool cuts_dim() const { return is_shard() || is_segmented(); }
  bool cuts() const { return cuts_dim() || is_flat(); }
  // Holds for one size only: a tensor of another shape has another such placement.
  bool is_sized() const { return is_segmented() || is_flat(); }

  int dim() const { return dim_; }            // where cuts_dim(): tensor dim
  int64_t unit() const { return unit_; }      // kShard: cuts fall on multiples of unit
  ReduceOp reduce_op() const { return op_; }  // kPartial
  IntSpan lengths() const;                    // kFlat: elements held by each coordinate
  // kFlat: how many elements the coordinates before this one hold; which coordinate holds one; the
  // largest of lengths(). Found without a walk along the lengths, of which there may be millions.
  int64_t FlatStart(int64_t coordinate) const;
  int64_t FlatHolder(int64_t element) const;
  int64_t longest() const { return numbers_->longest; }
  Segments segments() const;  // kSegmented
  // Where cuts_dim(): the segments, each cut as by Shard, into which it cuts a dim of `size` among
  // n.
  Segments SegmentsOf(int64_t size, int64_t n) const;
  // The numbers behind lengths() and segments(): equal iff those are.
  IntSpan numbers() const { return numbers_ ? IntSpan(numbers_->values) : IntSpan(); }

  // Same placement on another tensor dim (where cuts_dim()).
  Placement WithDim(int dim) const;

  // "R", "S(0)", "S(0, unit=4)", "P(sum)", "Segmented(0, [4, 2])", "Segmented(0, [8:4, 2])"
  // (a unit of 4 in the first segment), "Flat([3, 3, 0])"
  std::string ToString() const;
  std::string ToCode() const;  // the C++ expression: "Shard(0, 4)"
  friend bool operator==(const Placement& a, const Placement& b);
  template <typename H>
  friend H AbslHashValue(H h, const Placement& p) {
    for (int64_t s : p.numbers()) h = H::combine(std::move(h), s);
    return H::combine(std::move(h), static_cast<int>(p.kind_), p.dim_, p.unit_,
                      static_cast<int>(p.op_));
  }

 private:
  friend Placement Shard(int, int64_t);
  friend Placement Partial(ReduceOp);
  friend Placement SegmentedShard(int, Segments);
  friend Placement FlatShard(std::vector<int64_t>);
  struct Numbers {
    // kFlat: the lengths. kSegmented: the sizes, followed by as many units where unit_ is 0.
    std::vector<int64_t> values;
    std::vector<int64_t> starts = {};  // kFlat: of every kStep-th coordinate
    int64_t longest = 0;
  };
  static constexpr int64_t kStep = 128;
  Kind kind_ = Kind::kReplicate;
  ReduceOp op_ = ReduceOp::kSum;
  int dim_ = -1;
  int64_t unit_ = 1;
  std::shared_ptr<const Numbers> numbers_;
};
using Placements = absl::InlinedVector<Placement, 3>;

// Every rank of the mesh dim holds the whole.
inline Placement Replicate() { return {}; }
// The placements with Replicate for every pending one: those of the value once it is reduced, and
// of its gradient.
Placements WithoutPending(absl::Span<const Placement> placements);
// torch.chunk semantics in multiples of `unit`: chunk = unit * ceil(ceil(size / unit) / n);
// trailing ranks may hold less or nothing. A negative dim counts from the end (normalised by Spec).
Placement Shard(int dim, int64_t unit = 1);
// Every rank holds a term; the value is their reduction. kAvg exists in redistribution only.
Placement Partial(ReduceOp op = ReduceOp::kSum);
// The term that changes no other: where a sum or product becomes pending, coordinate 0 holds the
// value and the others hold this. Null for the rest: there all hold the value.
std::optional<int64_t> NeutralOf(ReduceOp op);
// The dim is cut into segments (their sizes sum to the dim's); each is sharded by itself, as by
// Shard. A fused q, k, v of 8 and 2 heads of size 16 that are to stay together in their groups:
// SegmentedShard(0, {{128, 64}, {32, 16}, {32, 16}}).
Placement SegmentedShard(int dim, Segments segments);
template <std::same_as<int64_t> Size>
Placement SegmentedShard(int dim, const std::vector<Size>& sizes) {  // of unit 1
  return SegmentedShard(dim, Segments(sizes.begin(), sizes.end()));
}
// The simplest placement that cuts as SegmentedShard does among n: empty segments dropped, units of
// 1 where they make no difference, Shard where one segment is left. The canonical form of whatever
// cuts so.
Placement SimplestSegmented(int dim, Segments segments, int64_t n);
// SegmentedShard of `pieces` equal segments of a dim of `size` (veScale's InterleavedShard).
// Errors: InvalidArgument if pieces does not divide size.
absl::StatusOr<Placement> InterleavedShard(int dim, int64_t pieces, int64_t size);
// Cuts the flattened local tensor: coordinate r holds lengths[r] consecutive elements.
Placement FlatShard(std::vector<int64_t> lengths);

std::string ToString(absl::Span<const Placement> placements);  // "[S(0), R]"

// The indices in [0, size) that coordinate `coord` of `n` holds. `size` is the (local) size of the
// dim that is cut, for kFlat the (local) number of elements; kReplicate and kPartial give
// everything. An empty shard gives no interval. Adjacent intervals are merged.
void LocalIntervals(const Placement& p, int64_t size, int64_t n, int64_t coord,
                    std::vector<Interval>* out);
// The same as the one interval of a kShard; empty shards give {size, size}.
Interval ShardInterval(int64_t size, int64_t unit, int64_t n, int64_t coord);
// The lengths that coordinates of `n` hold of a range cut into segments, each length once.
std::vector<int64_t> SegmentedLengths(absl::Span<const Segment> segments, int64_t n);
// How the indices [start, end) of a range cut among `n` are cut, as segments of their own; nothing
// where no segments cut so (what is left of a block must begin on coordinate 0).
std::optional<Segments> RestrictSegments(absl::Span<const Segment> segments, int64_t n,
                                         int64_t start, int64_t end);
// True if the units u and v cut `size` at the same places among n.
bool SameCut(int64_t size, int64_t u, int64_t v, int64_t n);
// Takes from the index list `outer` (ascending intervals) the positions listed in `inner`.
std::vector<Interval> ComposeIntervals(const std::vector<Interval>& outer,
                                       const std::vector<Interval>& inner);

}  // namespace dtensor
