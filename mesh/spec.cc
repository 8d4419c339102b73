#include "dtensor/mesh/spec.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "dtensor/mesh/hash.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

// Sizes that a tensor dim (or the flat tensor) has left on some coordinate.
using Sizes = absl::InlinedVector<int64_t, 4>;

void AddSize(int64_t size, Sizes* sizes) {
  if (std::find(sizes->begin(), sizes->end(), size) == sizes->end()) sizes->push_back(size);
}

std::string DimName(const DeviceMesh& mesh, int mesh_dim) {
  const std::string& name = mesh.names()[mesh_dim];
  return name.empty() ? absl::StrCat(mesh_dim) : name;
}

// "placement S(3) of mesh dim tp: "
absl::Status Bad(const DeviceMesh& mesh, int mesh_dim, const Placement& p,
                 const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("placement ", p.ToString(), " of mesh dim ",
                                                 DimName(mesh, mesh_dim), ": ", what));
}

// Lengths of the shards of each size; the first, a shorter and an empty one are all there can be.
Sizes ShardSizes(const Sizes& sizes, int64_t unit, int64_t n) {
  Sizes result;
  for (int64_t size : sizes) {
    int64_t first = ShardInterval(size, unit, n, 0).length();
    AddSize(first, &result);
    if (first == 0) continue;
    if (size % first != 0) AddSize(size % first, &result);
    if ((size - 1) / first + 1 < n) AddSize(0, &result);
  }
  return result;
}

// Checks one spec's placements and rewrites them to their canonical form.
class Canonicalizer {
 public:
  Canonicalizer(const DeviceMesh& mesh, IntSpan shape, DType dtype)
      : mesh_(mesh), shape_(shape), dtype_(dtype) {}

  absl::Status Run(Placements* placements) {
    if (static_cast<int>(placements->size()) != mesh_.ndim()) {
      return absl::InvalidArgumentError(
          absl::StrCat(placements->size(), " placements ", ToString(*placements), " for mesh ",
                       mesh_.ToString(), " of ", mesh_.ndim(), " dims"));
    }
    for (int64_t size : shape_) left_.push_back(Sizes{size});
    for (int i = 0; i < mesh_.ndim(); ++i) DT_RETURN_IF_ERROR(One(i, &(*placements)[i]));
    return Flats(*placements);
  }

 private:
  absl::Status One(int mesh_dim, Placement* p) {
    if (p->is_partial()) return CheckPartial(mesh_dim, *p);
    if (!p->cuts_dim()) return absl::OkStatus();
    int ndim = static_cast<int>(shape_.size());
    if (p->dim() < -ndim || p->dim() >= ndim) {
      return Bad(mesh_, mesh_dim, *p,
                 ndim == 0
                     ? absl::StrCat("dim ", p->dim(), " of a tensor without dims")
                     : absl::StrCat("dim ", p->dim(), " is out of range for shape ",
                                    ToString(shape_), ": legal are ", -ndim, " to ", ndim - 1));
    }
    if (p->dim() < 0) *p = p->WithDim(p->dim() + ndim);
    if (p->is_segmented()) DT_RETURN_IF_ERROR(CheckSegments(mesh_dim, p));
    if (!p->is_shard()) CutSegments(mesh_dim, p);
    return p->is_shard() ? CutShard(mesh_dim, p) : absl::OkStatus();
  }

  absl::Status CheckPartial(int mesh_dim, const Placement& p) {
    if (partial_ && !(*partial_ == p)) {
      return Bad(mesh_, mesh_dim, p,
                 absl::StrCat("it cannot stand beside ", partial_->ToString(),
                              ": one spec holds one kind of Partial"));
    }
    partial_ = &p;
    if (p.reduce_op() != ReduceOp::kAvg || IsFloating(dtype_)) return absl::OkStatus();
    return Bad(mesh_, mesh_dim, p,
               absl::StrCat("an average is of floating numbers, not of ", View(Name(dtype_))));
  }

  absl::Status CutShard(int mesh_dim, Placement* p) {
    if (p->unit() < 1) {
      return Bad(mesh_, mesh_dim, *p, absl::StrCat("unit ", p->unit(), " is less than 1"));
    }
    Sizes& left = left_[p->dim()];
    int64_t n = mesh_.size(mesh_dim);
    // All cuts are multiples of the first, so equal first shards mean equal cuts.
    bool same = std::all_of(left.begin(), left.end(), [&](int64_t size) {
      return ShardInterval(size, p->unit(), n, 0) == ShardInterval(size, 1, n, 0);
    });
    if (same) *p = Shard(p->dim());
    left = ShardSizes(left, p->unit(), n);
    return absl::OkStatus();
  }

  // Leaves a Shard where one rank has all segments of what mesh dims before this one left.
  absl::Status CheckSegments(int mesh_dim, Placement* segmented) {
    const Placement& p = *segmented;
    int64_t total = 0;
    for (const Segment& s : p.segments()) {
      if (s.size < 0) {
        return Bad(mesh_, mesh_dim, p, absl::StrCat("segment size ", s.size, " is negative"));
      }
      if (s.unit < 1) {
        return Bad(mesh_, mesh_dim, p, absl::StrCat("unit ", s.unit, " is less than 1"));
      }
      if (__builtin_add_overflow(total, s.size, &total)) total = INT64_MAX;  // fits nothing
    }
    for (int64_t size : left_[p.dim()]) {
      if (size != total && total == shape_[p.dim()] && mesh_.size(mesh_dim) == 1) {
        *segmented = Shard(p.dim());
        return absl::OkStatus();
      }
      if (size != total) {
        return Bad(mesh_, mesh_dim, p,
                   absl::StrCat("the segments sum to ", total, ", but dim ", p.dim(), " of shape ",
                                ToString(shape_), " has ", size, " there",
                                total == shape_[p.dim()]
                                    ? ": mesh dims before this one cut it, and segments are of the "
                                      "whole; let this mesh dim come first"
                                    : ""));
      }
    }
    return absl::OkStatus();
  }

  // May leave a Shard, which is still to be cut.
  void CutSegments(int mesh_dim, Placement* p) {
    const int64_t n = mesh_.size(mesh_dim);
    Sizes& left = left_[p->dim()];
    const Placement simplest = SimplestSegmented(p->dim(), p->SegmentsOf(left[0], n), n);
    bool everywhere = true;  // whatever the size
    Sizes lengths;
    for (int64_t size : left) {
      const Segments segments = p->SegmentsOf(size, n);
      everywhere &= SimplestSegmented(p->dim(), segments, n) == simplest;
      for (int64_t length : SegmentedLengths(segments, n)) AddSize(length, &lengths);
    }
    if (everywhere) *p = simplest;
    if (!p->is_shard()) left = lengths;
  }

  // Flat placements cut what all the others left.
  absl::Status Flats(const Placements& placements) {
    Sizes numel{1};
    bool counted = false;
    for (int i = 0; i < mesh_.ndim(); ++i) {
      const Placement& p = placements[i];
      if (!p.is_flat()) continue;
      if (!counted) numel = LocalNumels();
      counted = true;
      int64_t total = 0, n = mesh_.size(i);
      if (static_cast<int64_t>(p.lengths().size()) != n) {
        return Bad(mesh_, i, p,
                   absl::StrCat(p.lengths().size(), " lengths for ", n, " coordinates"));
      }
      for (int64_t length : p.lengths()) {
        if (length < 0) return Bad(mesh_, i, p, absl::StrCat("length ", length, " is negative"));
        if (__builtin_add_overflow(total, length, &total)) total = INT64_MAX;  // fits nothing
      }
      for (int64_t have : numel) {
        if (have != total) {
          return Bad(mesh_, i, p,
                     absl::StrCat("the lengths sum to ", total, ", but the local tensor has ", have,
                                  " elements"));
        }
      }
      numel.clear();
      for (int64_t length : p.lengths()) AddSize(length, &numel);
    }
    return absl::OkStatus();
  }

  // Each mesh dim cuts one tensor dim at most, so every combination of sizes occurs.
  Sizes LocalNumels() const {
    Sizes numel{1};
    for (const Sizes& sizes : left_) {
      Sizes next;
      for (int64_t a : numel) {
        for (int64_t b : sizes) AddSize(a * b, &next);
      }
      numel = next;
    }
    return numel;
  }

  const DeviceMesh& mesh_;
  IntSpan shape_;
  DType dtype_;
  absl::InlinedVector<Sizes, 4> left_;
  const Placement* partial_ = nullptr;
};

// True if canonicalisation could not change the placements, whatever the shape.
bool Plain(absl::Span<const Placement> placements) {
  return std::all_of(placements.begin(), placements.end(), [](const Placement& p) {
    return !p.cuts_dim() || (p.is_shard() && p.dim() >= 0 && p.unit() == 1);
  });
}

}  // namespace

std::string Spec::ToString() const {
  return absl::StrCat(View(Name(dtype_)), " ", dtensor::ToString(shape_), " on ", mesh_.ToString(),
                      " ", dtensor::ToString(placements_));
}

std::optional<int64_t> Spec::NeutralHere() const {
  if (!in_mesh_ || !has_partial_) return std::nullopt;
  for (int m = 0; m < mesh_.ndim(); ++m) {
    const Placement& p = placements_[m];
    if (!p.is_partial() || coordinate_[m] == 0) continue;
    if (const auto neutral = NeutralOf(p.reduce_op())) return neutral;
  }
  return std::nullopt;
}

void SpecRef::Delete() { delete spec_; }

SpecInterner::Key SpecInterner::MakeKey(const DeviceMesh& mesh,
                                        absl::Span<const Placement> placements, IntSpan shape,
                                        DType dtype) {
  uint64_t h = HashMix(mesh.hash(), static_cast<uint64_t>(dtype));
  for (int64_t size : shape) h = HashMix(h, static_cast<uint64_t>(size));
  for (const Placement& p : placements) {
    h = HashMix(h, static_cast<uint64_t>(p.kind()) << 56 ^
                       static_cast<uint64_t>(p.reduce_op()) << 48 ^
                       static_cast<uint64_t>(p.dim() + 1) << 32 ^ static_cast<uint64_t>(p.unit()));
    if (!p.numbers().empty()) h = HashRange(h, p.numbers());
  }
  return {mesh, placements, shape, dtype, h};
}

bool SpecInterner::Eq::operator()(const SpecRef& a, const Key& b) const {
  return a->hash() == b.hash && a->dtype() == b.dtype && IntSpan(a->shape()) == b.shape &&
         a->placements() == b.placements && a->mesh() == b.mesh;
}

absl::StatusOr<SpecRef> SpecInterner::Intern(const DeviceMesh& mesh,
                                             absl::Span<const Placement> placements, IntSpan shape,
                                             DType dtype) {
  if (!mesh.defined()) return absl::InvalidArgumentError("the mesh is null");
  // What is in the table passed the checks below once, and they depend on nothing but the key.
  if (Plain(placements)) {
    auto it = table_.find(MakeKey(mesh, placements, shape, dtype));
    if (it != table_.end()) return *it;
  }
  DT_RETURN_IF_ERROR(CheckedBytes(shape, dtype).status());
  Placements canonical(placements.begin(), placements.end());
  DT_RETURN_IF_ERROR(Canonicalizer(mesh, shape, dtype).Run(&canonical));
  Key key = MakeKey(mesh, canonical, shape, dtype);
  auto it = table_.find(key);
  return it != table_.end() ? *it : Insert(key);
}

SpecRef SpecInterner::Insert(const Key& key) {
  if (table_.size() >= sweep_at_) Sweep();
  std::unique_ptr<Spec> owner(new Spec());
  Spec& spec = *owner;
  spec.mesh_ = key.mesh;
  spec.placements_.assign(key.placements.begin(), key.placements.end());
  spec.shape_.assign(key.shape.begin(), key.shape.end());
  spec.dtype_ = key.dtype;
  spec.numel_ = Numel(key.shape);
  spec.hash_ = key.hash;
  spec.is_replicated_ = true;
  for (const Placement& p : key.placements) {
    spec.has_partial_ |= p.is_partial();
    spec.is_replicated_ &= p.is_replicate();
  }
  spec.in_mesh_ = key.mesh.Coordinate(rank_, &spec.coordinate_);
  if (spec.in_mesh_) {
    spec.local_shape_ = LocalShape(spec, spec.coordinate_);
    std::vector<std::vector<Interval>> index = LocalIndex(spec, spec.coordinate_);
    for (size_t d = 0; d < index.size(); ++d) {
      spec.local_start_.push_back(index[d].empty() ? spec.shape_[d] : index[d][0].start);
    }
    spec.local_bytes_ = Numel(spec.local_shape_) * SizeOf(spec.dtype_);
  } else {
    spec.local_shape_.assign(spec.shape_.size(), 0);
    spec.local_start_ = spec.shape_;
  }
  spec.local_strides_ = ContiguousStrides(spec.local_shape_);
  SpecRef ref(owner.release());
  table_.insert(ref);
  return ref;
}

void SpecInterner::Sweep() {
  for (auto it = table_.begin(); it != table_.end();) {
    if ((*it)->refs_ == 1) {
      table_.erase(it++);
    } else {
      ++it;
    }
  }
  sweep_at_ = std::max<size_t>(1024, 2 * table_.size());
}

int64_t SpecInterner::size() const { return static_cast<int64_t>(table_.size()); }

std::vector<std::vector<Interval>> LocalIndex(const Spec& spec, IntSpan coordinate) {
  std::vector<std::vector<Interval>> index;
  std::vector<Interval> cut;
  for (int d = 0; d < spec.ndim(); ++d) {
    std::vector<Interval> held;
    int64_t length = spec.shape()[d];
    if (length > 0) held.push_back({0, length});
    for (int i = 0; i < spec.mesh().ndim(); ++i) {
      const Placement& p = spec.placement(i);
      if (!p.cuts_dim() || p.dim() != d) continue;
      LocalIntervals(p, length, spec.mesh().size(i), coordinate[i], &cut);
      held = ComposeIntervals(held, cut);
      length = 0;
      for (const Interval& piece : held) length += piece.length();
    }
    index.push_back(std::move(held));
  }
  return index;
}

Shape LocalShape(const Spec& spec, IntSpan coordinate) {
  Shape shape = spec.shape();
  int64_t flat = -1;
  std::vector<Interval> cut;
  for (int i = 0; i < spec.mesh().ndim(); ++i) {
    const Placement& p = spec.placement(i);
    if (p.is_flat()) flat = p.lengths()[coordinate[i]];  // the last one cuts last
    if (!p.cuts_dim()) continue;
    LocalIntervals(p, shape[p.dim()], spec.mesh().size(i), coordinate[i], &cut);
    shape[p.dim()] = 0;
    for (const Interval& piece : cut) shape[p.dim()] += piece.length();
  }
  if (flat >= 0) shape = {flat};
  return shape;
}

}  // namespace dtensor
