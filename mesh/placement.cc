#include "mesh/placement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "tensor/status.h"

namespace dtensor {
namespace {

absl::string_view View(std::string_view s) { return absl::string_view(s.data(), s.size()); }

int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

void Append(Interval piece, std::vector<Interval>* out) {
  if (piece.length() <= 0) return;
  if (!out->empty() && out->back().end == piece.start) {
    out->back().end = piece.end;
  } else {
    out->push_back(piece);
  }
}

}  // namespace

IntSpan Placement::sizes() const { return sizes_ ? IntSpan(*sizes_) : IntSpan(); }

Placement Placement::WithDim(int dim) const {
  Placement p = *this;
  p.dim_ = dim;
  return p;
}

std::string Placement::ToString() const {
  switch (kind_) {
    case Kind::kReplicate:
      return "R";
    case Kind::kShard:
      return unit_ == 1 ? absl::StrCat("S(", dim_, ")")
                        : absl::StrCat("S(", dim_, ", unit=", unit_, ")");
    case Kind::kPartial:
      return absl::StrCat("P(", View(Name(op_)), ")");
    case Kind::kSegmented:
      return absl::StrCat("Segmented(", dim_, ", [", absl::StrJoin(sizes(), ", "), "])");
    case Kind::kFlat:
      return absl::StrCat("Flat([", absl::StrJoin(sizes(), ", "), "])");
  }
  return "?";
}

bool operator==(const Placement& a, const Placement& b) {
  return a.kind_ == b.kind_ && a.dim_ == b.dim_ && a.unit_ == b.unit_ && a.op_ == b.op_ &&
         (a.sizes_ == b.sizes_ || a.sizes() == b.sizes());
}

Placement Shard(int dim, int64_t unit) {
  Placement p;
  p.kind_ = Placement::Kind::kShard;
  p.dim_ = dim;
  p.unit_ = unit;
  return p;
}

Placement Partial(ReduceOp op) {
  Placement p;
  p.kind_ = Placement::Kind::kPartial;
  p.op_ = op;
  return p;
}

Placement SegmentedShard(int dim, std::vector<int64_t> sizes) {
  Placement p;
  p.kind_ = Placement::Kind::kSegmented;
  p.dim_ = dim;
  p.sizes_ = std::make_shared<const std::vector<int64_t>>(std::move(sizes));
  return p;
}

absl::StatusOr<Placement> InterleavedShard(int dim, int64_t pieces, int64_t size) {
  if (pieces < 1 || size < 0 || size % pieces != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("InterleavedShard: ", pieces, " pieces do not divide size ", size));
  }
  return SegmentedShard(dim, std::vector<int64_t>(pieces, size / pieces));
}

Placement FlatShard(std::vector<int64_t> lengths) {
  Placement p;
  p.kind_ = Placement::Kind::kFlat;
  p.sizes_ = std::make_shared<const std::vector<int64_t>>(std::move(lengths));
  return p;
}

std::string ToString(absl::Span<const Placement> placements) {
  return absl::StrCat(
      "[",
      absl::StrJoin(placements, ", ",
                    [](std::string* s, const Placement& p) { absl::StrAppend(s, p.ToString()); }),
      "]");
}

Interval ShardInterval(int64_t size, int64_t unit, int64_t n, int64_t coord) {
  int64_t chunk = CeilDiv(CeilDiv(size, unit), n);  // in units; times unit it may pass `size` only
  // Compared by division, because coord * chunk * unit may overflow where the shard is empty.
  if (chunk == 0 || coord > (size - 1) / unit / chunk) return {size, size};
  int64_t start = coord * chunk * unit;
  return {start, size - start > chunk * unit ? start + chunk * unit : size};
}

void LocalIntervals(const Placement& p, int64_t size, int64_t n, int64_t coord,
                    std::vector<Interval>* out) {
  out->clear();
  switch (p.kind()) {
    case Placement::Kind::kReplicate:
    case Placement::Kind::kPartial:
      return Append({0, size}, out);
    case Placement::Kind::kShard:
      return Append(ShardInterval(size, p.unit(), n, coord), out);
    case Placement::Kind::kSegmented: {
      int64_t base = 0;
      for (int64_t segment : p.sizes()) {
        Interval piece = ShardInterval(segment, 1, n, coord);
        Append({base + piece.start, base + piece.end}, out);
        base += segment;
      }
      return;
    }
    case Placement::Kind::kFlat: {
      int64_t start = 0;
      for (int64_t i = 0; i < coord; ++i) start += p.sizes()[i];
      return Append({start, start + p.sizes()[coord]}, out);
    }
  }
}

std::vector<Interval> ComposeIntervals(const std::vector<Interval>& outer,
                                       const std::vector<Interval>& inner) {
  std::vector<Interval> result;
  size_t at = 0;
  int64_t before = 0;  // positions in outer[0 .. at)
  for (Interval want : inner) {
    while (want.length() > 0) {
      while (at < outer.size() && before + outer[at].length() <= want.start) {
        before += outer[at++].length();
      }
      DT_CHECK_MSG(at < outer.size(), "ComposeIntervals: position beyond the outer list");
      int64_t start = outer[at].start + (want.start - before);
      int64_t take = std::min(want.length(), outer[at].end - start);
      Append({start, start + take}, &result);
      want.start += take;
    }
  }
  return result;
}

}  // namespace dtensor
