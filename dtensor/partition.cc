#include "dtensor/partition.h"

#include <algorithm>

namespace dtensor {
namespace {

// Repeating a factor's segments for every index of a large major one would cost more to plan with
// than the move that it saves.
constexpr int64_t kMostSegments = 1024;

int64_t Chunk(const Segment& s, int64_t n) { return ShardInterval(s.size, s.unit, n, 0).length(); }

// A factor's own segment for one of a dim, whose cuts fall between whole indices of the factor.
std::optional<Segment> Divided(const Segment& s, int64_t minor, int64_t n) {
  const int64_t chunk = Chunk(s, n);
  if (s.size % minor != 0 || (chunk < s.size && chunk % minor != 0)) return std::nullopt;
  const int64_t unit = s.unit % minor == 0 ? s.unit : chunk;
  Segment divided(s.size / minor, std::max<int64_t>(1, unit / minor));
  if (SameCut(divided.size, divided.unit, 1, n)) divided.unit = 1;
  return divided;
}

// The partition of factor number `at` of a dim (factors of these sizes, major first) that is cut
// into `segments`, if it is that factor that they cut.
std::optional<Partition> Fit(const Dims& sizes, size_t at, const Segments& segments, int64_t n) {
  int64_t major = 1, minor = 1;
  for (size_t k = 0; k < sizes.size(); ++k) {
    if (k != at) (k < at ? major : minor) *= sizes[k];
  }
  const int64_t period = sizes[at] * minor;
  if (major == 0 || period == 0) return std::nullopt;
  Segments first, run;
  int64_t length = 0, periods = 0;
  for (const Segment& s : segments) {
    const std::optional<Segment> own = Divided(s, minor, n);
    length += s.size;
    if (!own || length > period) return std::nullopt;
    run.push_back(*own);
    if (length < period) continue;
    if (periods++ > 0 && run != first) return std::nullopt;
    first = std::move(run);
    run.clear();
    length = 0;
  }
  if (length != 0 || periods != major) return std::nullopt;
  if (first.size() == 1) return Partition{first[0].unit};
  return Partition{1, std::move(first)};
}

// Factor sizes of dim `d` that a spec's own placements on the mesh dims before leave on the first
// coordinate; empty if it does not come out even.
Dims SizesBefore(const FactorMap& map, const FactorDim& dim, const Spec& spec, int d,
                 int mesh_dim) {
  Dims sizes;
  for (const int f : dim) sizes.push_back(map.sizes[f]);
  for (int m = 0; m < mesh_dim; ++m) {
    const Placement& p = spec.placement(m);
    if (!p.cuts_dim() || p.dim() != d) continue;
    const int64_t n = spec.mesh().size(m);
    bool found = false;
    for (size_t k = 0; k < sizes.size() && !found; ++k) {
      int64_t total = 1;
      for (const int64_t s : sizes) total *= s;
      const std::optional<Partition> cut = Fit(sizes, k, p.SegmentsOf(total, n), n);
      if (!cut) continue;
      found = true;
      int64_t left = 0;
      for (const Segment& s : cut->Of(sizes[k])) left += Chunk(s, n);
      sizes[k] = left;
    }
    if (!found) return {};
  }
  return sizes;
}

}  // namespace

void AddSize(int64_t size, SizeSet* set) {
  if (std::find(set->begin(), set->end(), size) == set->end()) set->push_back(size);
}

int64_t OnlySize(const SizeSet& set) { return set.size() == 1 ? set[0] : -1; }

SizeSet CutSizes(const SizeSet& sizes, const Partition& cut, int64_t n) {
  SizeSet left;
  if (!cut.is_block()) {
    for (const int64_t size : SegmentedLengths(cut.segments, n)) AddSize(size, &left);
    return left;
  }
  for (const int64_t size : sizes) {
    const int64_t chunk = ShardInterval(size, cut.unit, n, 0).length();
    AddSize(chunk, &left);
    if (chunk == 0) continue;
    if (size % chunk != 0) AddSize(size % chunk, &left);
    if ((size + chunk - 1) / chunk < n) AddSize(0, &left);
  }
  return left;
}

std::optional<Placement> PlaceFactor(const FactorMap& map, const FactorDim& dim, int d, int f,
                                     const Partition& cut, const std::vector<SizeSet>& sizes,
                                     int64_t n, bool repeats) {
  int64_t major = 1, minor = 1, minor_whole = 1;
  bool before = true, minor_known = true, missing = false;
  for (const int g : dim) {
    if (g == f) {
      before = false;
    } else if (before) {
      // Where an index of a major factor is missing, so is all that it holds.
      if (std::all_of(sizes[g].begin(), sizes[g].end(), [](int64_t s) { return s <= 1; })) {
        missing |= OnlySize(sizes[g]) != 1;
        continue;
      }
      const int64_t size = OnlySize(sizes[g]);
      if (size < 0 || major > kMostSegments / size) return std::nullopt;
      major *= size;
    } else {
      minor *= OnlySize(sizes[g]);
      minor_whole *= map.sizes[g];
      minor_known &= OnlySize(sizes[g]) >= 0;
    }
  }
  if (!minor_known) {  // several sizes of what is minor agree only where one rank takes all of f
    const auto taken = [&cut](int64_t s) { return s <= cut.unit; };
    const bool by_one = std::all_of(sizes[f].begin(), sizes[f].end(), taken);
    if (!by_one || !cut.is_block()) return std::nullopt;
    minor = minor_whole;
  }
  if (major == 1 && cut.is_block()) return Shard(d, std::max<int64_t>(1, cut.unit * minor));
  const int64_t size = OnlySize(sizes[f]);
  // Segments have one length on all coordinates: there are none of nothing.
  if (size < 0 || missing || !minor_known || (major > 1 && !repeats)) return std::nullopt;
  Segments segments;
  int64_t sum = 0;
  for (const Segment& s : cut.Of(size)) {
    sum += s.size;
    segments.emplace_back(s.size * minor, std::max<int64_t>(1, s.unit * minor));
  }
  const auto once = static_cast<int64_t>(segments.size());
  if (sum != size || once * major > kMostSegments) return std::nullopt;
  segments.reserve(once * major);
  for (int64_t k = once; k < once * major; ++k) segments.push_back(segments[k - once]);
  return SimplestSegmented(d, std::move(segments), n);
}

std::optional<Partition> PartitionOf(const FactorMap& map, const FactorOperand& operand,
                                     const Spec& spec, int mesh_dim, int f) {
  const Placement& p = spec.placement(mesh_dim);
  const int d = FactorNest::DimOf(operand, f);
  if (d < 0 || p.dim() != d || !p.cuts_dim()) return std::nullopt;
  const FactorDim& dim = operand[d];
  if (p.is_shard()) {
    int64_t minor = 1;
    for (auto it = dim.rbegin(); *it != f; ++it) minor *= map.sizes[*it];
    if (minor <= 0 || p.unit() % minor != 0) return std::nullopt;
    // A unit beyond the size says no more than the size, and may overflow elsewhere.
    return Partition{std::min(p.unit() / minor, std::max<int64_t>(1, map.sizes[f]))};
  }
  const Dims sizes = SizesBefore(map, dim, spec, d, mesh_dim);
  if (sizes.empty()) return std::nullopt;
  const size_t at = std::find(dim.begin(), dim.end(), f) - dim.begin();
  const int64_t n = spec.mesh().size(mesh_dim);
  int64_t total = 1;
  for (const int64_t s : sizes) total *= s;
  return Fit(sizes, at, p.SegmentsOf(total, n), n);
}

std::optional<Partition> JoinParts(const FactorDim& parts, const std::vector<Partition>& cuts,
                                   const std::vector<SizeSet>& sizes) {
  Partition whole;
  for (size_t k = 0; k < parts.size(); ++k) {
    const int64_t size = OnlySize(sizes[parts[k]]);
    if (size < 0) return std::nullopt;
    const Segments segments = cuts[k].Of(size);
    whole.segments.insert(whole.segments.end(), segments.begin(), segments.end());
  }
  return whole;
}

std::optional<std::vector<std::optional<Partition>>> SplitParts(const FactorDim& parts,
                                                                const Partition& whole,
                                                                const std::vector<SizeSet>& sizes,
                                                                int64_t n) {
  int64_t total = 0;
  for (const int part : parts) {
    if (OnlySize(sizes[part]) < 0) return std::nullopt;
    total += OnlySize(sizes[part]);
  }
  const Segments segments = whole.Of(total);
  std::vector<std::optional<Partition>> cuts;
  int64_t start = 0;
  for (const int part : parts) {
    const int64_t end = start + OnlySize(sizes[part]);
    std::optional<Segments> own = RestrictSegments(segments, n, start, end);
    start = end;
    if (!own) {
      cuts.emplace_back();
    } else if (own->size() <= 1) {
      cuts.push_back(Partition{own->empty() ? 1 : (*own)[0].unit});
    } else {
      cuts.push_back(Partition{1, *std::move(own)});
    }
  }
  return cuts;
}

}  // namespace dtensor
