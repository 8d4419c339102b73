// Spec: mesh + one placement per mesh dim + global shape + dtype, interned per rank: inside a rank,
// equal specs are the same pointer. Immutable. Belongs to the rank (thread) that made it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/attributes.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "dtensor/mesh/mesh.h"
#include "dtensor/mesh/placement.h"

namespace dtensor {

class RankContext;

class Spec {
 public:
  const DeviceMesh& mesh() const { return mesh_; }
  absl::Span<const Placement> placements() const { return placements_; }
  const Placement& placement(int mesh_dim) const { return placements_[mesh_dim]; }
  const Shape& shape() const { return shape_; }  // global
  DType dtype() const { return dtype_; }
  int ndim() const { return static_cast<int>(shape_.size()); }
  int64_t numel() const { return numel_; }
  int64_t bytes() const { return numel_ * SizeOf(dtype_); }

  // --- this rank's part (of the rank that interned the spec) ---
  bool in_mesh() const { return in_mesh_; }
  const Dims& coordinate() const { return coordinate_; }
  const Shape& local_shape() const { return local_shape_; }        // [lengths] for a flat shard
  const Strides& local_strides() const { return local_strides_; }  // contiguous
  int64_t local_bytes() const { return local_bytes_; }
  // Global index of the first local element per dim (size where empty). Plain shards only.
  const Dims& local_start() const { return local_start_; }
  // What it holds instead of values, where it is not at coordinate 0 of a pending sum or product:
  // the neutral element. Null where it holds values.
  std::optional<int64_t> NeutralHere() const;

  bool has_partial() const { return has_partial_; }
  bool is_replicated() const { return is_replicated_; }  // Replicate on every mesh dim
  uint64_t hash() const { return hash_; }  // structural; equal specs of different ranks agree
  // "float32 [4, 6] on dp=2 tp=4 [S(0), R]"
  std::string ToString() const;
  // The same, made once and kept: for those who may outlive the spec or be on another thread.
  const std::shared_ptr<const std::string>& text() const {
    if (!text_) text_ = std::make_shared<const std::string>(ToString());
    return text_;
  }

 private:
  friend class SpecInterner;
  friend class SpecRef;
  Spec() = default;
  mutable int64_t refs_ = 0;
  mutable std::shared_ptr<const std::string> text_;
  DeviceMesh mesh_;
  Placements placements_;
  Shape shape_;
  DType dtype_ = DType::kF32;
  int64_t numel_ = 0;
  uint64_t hash_ = 0;
  bool in_mesh_ = false, has_partial_ = false, is_replicated_ = false;
  Dims coordinate_;
  Shape local_shape_;
  Strides local_strides_;
  Dims local_start_;
  int64_t local_bytes_ = 0;
};

// Counted handle; copying costs one increment (not atomic: specs belong to one rank).
class SpecRef {
 public:
  SpecRef() = default;
  explicit SpecRef(const Spec* spec) : spec_(spec) {
    if (spec_) ++spec_->refs_;
  }
  SpecRef(const SpecRef& o) : SpecRef(o.spec_) {}
  SpecRef(SpecRef&& o) noexcept : spec_(std::exchange(o.spec_, nullptr)) {}
  SpecRef& operator=(SpecRef o) noexcept {
    std::swap(spec_, o.spec_);
    return *this;
  }
  // Inlined where little is optimized, too: what destroys specs is linked once, of any object that
  // has it, and every call runs through it.
  ABSL_ATTRIBUTE_ALWAYS_INLINE ~SpecRef() {
    if (spec_ && --spec_->refs_ == 0) Delete();
  }
  const Spec* get() const { return spec_; }
  const Spec* operator->() const { return spec_; }
  const Spec& operator*() const { return *spec_; }
  explicit operator bool() const { return spec_ != nullptr; }
  friend bool operator==(const SpecRef& a, const SpecRef& b) { return a.spec_ == b.spec_; }

 private:
  void Delete();
  const Spec* spec_ = nullptr;
};

// The intern table of one rank. Specs that nobody else holds are dropped when the table has
// doubled.
class SpecInterner {
 public:
  explicit SpecInterner(int64_t rank) : rank_(rank) {}
  // Placements are canonicalised: negative dims normalised; a Shard's unit becomes 1 where both cut
  // at the same places on every coordinate, a SegmentedShard its simplest form (so equal layouts
  // are equal specs).
  //   Errors: InvalidArgument (count of placements != mesh dims; dim out of range, naming the legal
  //   range; segment sizes that do not sum to the dim; flat lengths that do not sum to the local
  //   numel; different Partial kinds in one spec; unit < 1) or a bad shape.
  absl::StatusOr<SpecRef> Intern(const DeviceMesh& mesh, absl::Span<const Placement> placements,
                                 IntSpan shape, DType dtype);
  int64_t size() const;  // specs in the table

 private:
  // The parts of a spec by reference: a lookup that hits copies nothing.
  struct Key {
    const DeviceMesh& mesh;
    absl::Span<const Placement> placements;
    IntSpan shape;
    DType dtype;
    uint64_t hash;
  };
  static Key MakeKey(const DeviceMesh& mesh, absl::Span<const Placement> placements, IntSpan shape,
                     DType dtype);
  struct Hash {
    using is_transparent = void;
    size_t operator()(const SpecRef& s) const { return s->hash(); }
    size_t operator()(const Key& k) const { return k.hash; }
  };
  struct Eq {
    using is_transparent = void;
    bool operator()(const SpecRef& a, const SpecRef& b) const { return a == b; }
    bool operator()(const SpecRef& a, const Key& b) const;
  };
  SpecRef Insert(const Key& key);
  void Sweep();
  int64_t rank_;
  size_t sweep_at_ = 1024;
  absl::flat_hash_set<SpecRef, Hash, Eq> table_;
};

// Per tensor dim, the global indices that the coordinate holds: placements other than Flat are
// applied left to right, each cutting what the one before left. [ndim] lists of ascending
// intervals.
std::vector<std::vector<Interval>> LocalIndex(const Spec& spec, IntSpan coordinate);
// Local shape of any coordinate (Flat: one dim, the length).
Shape LocalShape(const Spec& spec, IntSpan coordinate);

}  // namespace dtensor
