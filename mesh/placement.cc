#include "dtensor/mesh/placement.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "dtensor/tensor/shape.h"
#include "dtensor/tensor/status.h"
#include "dtensor/tensor/text.h"

namespace dtensor {
namespace {

void Append(Interval piece, std::vector<Interval>* out) {
  if (piece.length() <= 0) return;
  if (!out->empty() && out->back().end == piece.start) {
    out->back().end = piece.end;
  } else {
    out->push_back(piece);
  }
}

// What a kind does. Kinds that cut no dim have no segments.
struct KindFacts {
  std::string (*text)(const Placement&);
  std::string (*code)(const Placement&);
  Segments (*segments)(const Placement&, int64_t size, int64_t n);
};

Segments NoSegments(const Placement&, int64_t, int64_t) { return {}; }

std::string ReplicateText(const Placement&) { return "R"; }
std::string ReplicateCode(const Placement&) { return "Replicate()"; }

std::string ShardText(const Placement& p) {
  return p.unit() == 1 ? absl::StrCat("S(", p.dim(), ")")
                       : absl::StrCat("S(", p.dim(), ", unit=", p.unit(), ")");
}
std::string ShardCode(const Placement& p) {
  return p.unit() == 1 ? absl::StrCat("Shard(", p.dim(), ")")
                       : absl::StrCat("Shard(", p.dim(), ", ", p.unit(), ")");
}
Segments ShardSegments(const Placement& p, int64_t size, int64_t) { return {{size, p.unit()}}; }

std::string PartialText(const Placement& p) {
  return absl::StrCat("P(", View(Name(p.reduce_op())), ")");
}
std::string PartialCode(const Placement& p) {
  static constexpr const char* kOps[] = {"kSum", "kMax", "kMin", "kProd", "kAvg"};
  if (p.reduce_op() == ReduceOp::kSum) return "Partial()";
  return absl::StrCat("Partial(ReduceOp::", kOps[static_cast<int>(p.reduce_op())], ")");
}

std::string SegmentedText(const Placement& p) {
  const auto one = [](std::string* text, const Segment& s) {
    absl::StrAppend(text, s.size);
    if (s.unit != 1) absl::StrAppend(text, ":", s.unit);
  };
  return absl::StrCat("Segmented(", p.dim(), ", [", absl::StrJoin(p.segments(), ", ", one), "])");
}
std::string SegmentedCode(const Placement& p) {
  const auto one = [](std::string* text, const Segment& s) {
    absl::StrAppend(text, "{", s.size, ", ", s.unit, "}");
  };
  return absl::StrCat("SegmentedShard(", p.dim(), ", {", absl::StrJoin(p.segments(), ", ", one),
                      "})");
}
Segments SegmentedSegments(const Placement& p, int64_t, int64_t) { return p.segments(); }

std::string FlatText(const Placement& p) {
  return absl::StrCat("Flat([", absl::StrJoin(p.lengths(), ", "), "])");
}
std::string FlatCode(const Placement& p) {
  return absl::StrCat("FlatShard({", absl::StrJoin(p.lengths(), ", "), "})");
}

constexpr KindFacts kKinds[] = {
    // in the order of Placement::Kind
    {ReplicateText, ReplicateCode, NoSegments}, {ShardText, ShardCode, ShardSegments},
    {PartialText, PartialCode, NoSegments},     {SegmentedText, SegmentedCode, SegmentedSegments},
    {FlatText, FlatCode, NoSegments},
};
const KindFacts& FactsOf(const Placement& p) { return kKinds[static_cast<int>(p.kind())]; }

}  // namespace

IntSpan Placement::lengths() const { return is_flat() ? numbers() : IntSpan(); }

Segments Placement::segments() const {
  Segments segments;
  if (!is_segmented()) return segments;
  const size_t count = unit_ == 0 ? numbers().size() / 2 : numbers().size();
  for (size_t i = 0; i < count; ++i) {
    segments.push_back({numbers()[i], unit_ == 0 ? numbers()[count + i] : 1});
  }
  return segments;
}

Placement Placement::WithDim(int dim) const {
  Placement p = *this;
  p.dim_ = dim;
  return p;
}

Segments Placement::SegmentsOf(int64_t size, int64_t n) const {
  return FactsOf(*this).segments(*this, size, n);
}

std::string Placement::ToString() const { return FactsOf(*this).text(*this); }
std::string Placement::ToCode() const { return FactsOf(*this).code(*this); }

bool operator==(const Placement& a, const Placement& b) {
  return a.kind_ == b.kind_ && a.dim_ == b.dim_ && a.unit_ == b.unit_ && a.op_ == b.op_ &&
         (a.numbers_ == b.numbers_ || a.numbers() == b.numbers());
}

Placements WithoutPending(absl::Span<const Placement> placements) {
  Placements settled(placements.begin(), placements.end());
  for (Placement& p : settled) {
    if (p.is_partial()) p = Replicate();
  }
  return settled;
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

std::optional<int64_t> NeutralOf(ReduceOp op) {
  if (op == ReduceOp::kSum) return 0;
  if (op == ReduceOp::kProd) return 1;
  return std::nullopt;
}

Placement SegmentedShard(int dim, Segments segments) {
  Placement p;
  p.kind_ = Placement::Kind::kSegmented;
  p.dim_ = dim;
  std::vector<int64_t> numbers;
  for (const Segment& s : segments) numbers.push_back(s.size);
  if (std::any_of(segments.begin(), segments.end(), [](const Segment& s) { return s.unit != 1; })) {
    p.unit_ = 0;
    for (const Segment& s : segments) numbers.push_back(s.unit);
  }
  p.numbers_ = std::make_shared<const Placement::Numbers>(Placement::Numbers{std::move(numbers)});
  return p;
}

Placement SimplestSegmented(int dim, Segments segments, int64_t n) {
  if (n == 1) return Shard(dim);
  segments.erase(std::remove_if(segments.begin(), segments.end(),
                                [](const Segment& s) { return s.size == 0; }),
                 segments.end());
  for (Segment& s : segments) {
    if (SameCut(s.size, s.unit, 1, n)) s.unit = 1;
  }
  if (segments.empty()) return Shard(dim);
  if (segments.size() == 1) return Shard(dim, segments[0].unit);
  return SegmentedShard(dim, std::move(segments));
}

absl::StatusOr<Placement> InterleavedShard(int dim, int64_t pieces, int64_t size) {
  if (pieces < 1 || size < 0 || size % pieces != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("InterleavedShard: ", pieces, " pieces do not divide size ", size));
  }
  return SegmentedShard(dim, Segments(pieces, size / pieces));
}

Placement FlatShard(std::vector<int64_t> lengths) {
  Placement p;
  p.kind_ = Placement::Kind::kFlat;
  Placement::Numbers numbers;
  uint64_t sum = 0;  // of what nobody has checked yet: it may overflow
  for (size_t c = 0; c < lengths.size(); ++c) {
    if (c % Placement::kStep == 0) numbers.starts.push_back(static_cast<int64_t>(sum));
    sum += static_cast<uint64_t>(lengths[c]);
    numbers.longest = std::max(numbers.longest, lengths[c]);
  }
  numbers.values = std::move(lengths);
  p.numbers_ = std::make_shared<const Placement::Numbers>(std::move(numbers));
  return p;
}

int64_t Placement::FlatStart(int64_t coordinate) const {
  int64_t start = numbers_->starts[coordinate / kStep];
  for (int64_t c = coordinate - coordinate % kStep; c < coordinate; ++c) start += lengths()[c];
  return start;
}

int64_t Placement::FlatHolder(int64_t element) const {
  const std::vector<int64_t>& starts = numbers_->starts;
  const auto after = std::upper_bound(starts.begin(), starts.end(), element);
  int64_t c = (after - starts.begin() - 1) * kStep, end = *(after - 1);
  while ((end += lengths()[c]) <= element) ++c;
  return c;
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
  if (p.is_shard()) return Append(ShardInterval(size, p.unit(), n, coord), out);
  if (p.is_flat()) {
    const int64_t start = p.FlatStart(coord);
    return Append({start, start + p.lengths()[coord]}, out);
  }
  if (!p.cuts_dim()) return Append({0, size}, out);
  int64_t base = 0;
  for (const Segment& segment : p.SegmentsOf(size, n)) {
    const Interval piece = ShardInterval(segment.size, segment.unit, n, coord);
    Append({base + piece.start, base + piece.end}, out);
    base += segment.size;
  }
}

std::vector<int64_t> SegmentedLengths(absl::Span<const Segment> segments, int64_t n) {
  // Coordinates between the places where a segment's shards grow short hold equally much.
  std::vector<int64_t> coordinates = {0};
  for (const Segment& s : segments) {
    const int64_t chunk = ShardInterval(s.size, s.unit, n, 0).length();
    const int64_t full = chunk == 0 ? 0 : s.size / chunk;
    for (const int64_t c : {full, full + 1}) {
      if (c < n) coordinates.push_back(c);
    }
  }
  std::sort(coordinates.begin(), coordinates.end());
  coordinates.erase(std::unique(coordinates.begin(), coordinates.end()), coordinates.end());
  std::vector<int64_t> lengths;
  for (const int64_t c : coordinates) {
    int64_t length = 0;
    for (const Segment& s : segments) length += ShardInterval(s.size, s.unit, n, c).length();
    if (std::find(lengths.begin(), lengths.end(), length) == lengths.end()) {
      lengths.push_back(length);
    }
  }
  return lengths;
}

std::optional<Segments> RestrictSegments(absl::Span<const Segment> segments, int64_t n,
                                         int64_t start, int64_t end) {
  Segments parts;
  int64_t base = 0;
  for (const Segment& s : segments) {
    const int64_t from = std::max(start - base, int64_t{0}), to = std::min(end - base, s.size);
    base += s.size;
    if (from >= to) continue;
    const int64_t chunk = ShardInterval(s.size, s.unit, n, 0).length();
    const int64_t first = std::min(chunk, to) - from;  // what coordinate 0 has of it
    if (first <= 0) return std::nullopt;
    const int64_t rest = to - from - first;
    if (rest == 0 || first == chunk || rest <= first) {
      parts.push_back({to - from, first == chunk ? s.unit : first});
      if (!SameCut(to - from, parts.back().unit, first, n)) parts.back().unit = first;
    } else {
      return std::nullopt;
    }
  }
  return parts;
}

bool SameCut(int64_t size, int64_t u, int64_t v, int64_t n) {
  return u == v || ShardInterval(size, u, n, 0) == ShardInterval(size, v, n, 0);
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
