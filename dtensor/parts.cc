#include "dtensor/parts.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "dtensor/tensor/next_index.h"

namespace dtensor::internal {
namespace {

constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

struct Range {
  int64_t lo, hi;  // both inside
};
using Ranges = std::vector<Range>;

int64_t LengthOf(const std::vector<Interval>& index) {
  int64_t length = 0;
  for (const Interval& i : index) length += i.length();
  return length;
}

// The positions in `held` of indices that are in `wanted`.
std::vector<Interval> PositionsOf(const std::vector<Interval>& held,
                                  const std::vector<Interval>& wanted) {
  std::vector<Interval> positions;
  int64_t before = 0;
  for (size_t i = 0, j = 0; i < held.size() && j < wanted.size();) {
    const int64_t start = std::max(held[i].start, wanted[j].start),
                  end = std::min(held[i].end, wanted[j].end);
    if (start < end) {
      const Interval piece = {before + start - held[i].start, before + end - held[i].start};
      if (!positions.empty() && positions.back().end == piece.start) {
        positions.back().end = piece.end;
      } else {
        positions.push_back(piece);
      }
    }
    if (held[i].end < wanted[j].end) {
      before += held[i++].length();
    } else {
      ++j;
    }
  }
  return positions;
}

// Adds the coordinates among which chunks of `chunk` from `base` on are dealt out, of the positions
// that lie in [base, base + size).
void AddChunks(const std::vector<Interval>& positions, int64_t base, int64_t size, int64_t chunk,
               Ranges* ranges) {
  if (chunk == 0) return;
  for (const Interval& p : positions) {
    const int64_t start = std::max(p.start, base), end = std::min(p.end, base + size);
    if (start < end) ranges->push_back({(start - base) / chunk, (end - 1 - base) / chunk});
  }
}

// The coordinates of a cut that hold any of the positions of a list of `length`: ascending.
Ranges HoldersOf(const Placement& p, int64_t length, int64_t n,
                 const std::vector<Interval>& positions) {
  Ranges ranges;
  if (p.is_shard()) {
    AddChunks(positions, 0, length, ShardInterval(length, p.unit(), n, 0).length(), &ranges);
  } else {
    int64_t base = 0;
    for (const Segment& s : p.SegmentsOf(length, n)) {
      AddChunks(positions, base, s.size, ShardInterval(s.size, s.unit, n, 0).length(), &ranges);
      base += s.size;
    }
    std::sort(ranges.begin(), ranges.end(), [](Range a, Range b) { return a.lo < b.lo; });
  }
  Ranges merged;
  for (const Range& r : ranges) {
    if (!merged.empty() && r.lo <= merged.back().hi + 1) {
      merged.back().hi = std::max(merged.back().hi, r.hi);
    } else {
      merged.push_back(r);
    }
  }
  return merged;
}

// The first number of a product of lists, counted row-major in `shape`, that is at or after `at`.
int64_t NextIn(const std::vector<std::vector<Interval>>& lists, const Shape& shape, int64_t at) {
  const int ndim = static_cast<int>(shape.size());
  if (at >= Numel(shape)) return kNowhere;
  Dims digits(ndim, 0);
  for (int d = ndim - 1; d >= 0; --d) {
    digits[d] = at % shape[d];
    at /= shape[d];
  }
  // The smallest listed value of dim d from `least` on; kNowhere.
  const auto from = [&](int d, int64_t least) {
    for (const Interval& i : lists[d]) {
      if (i.end > least) return std::max(i.start, least);
    }
    return kNowhere;
  };
  int changed = ndim;  // digits after it start anew
  for (int d = 0; d < ndim && changed == ndim; ++d) {
    const int64_t next = from(d, digits[d]);
    if (next == digits[d]) continue;
    changed = d;
    if (next != kNowhere) {
      digits[d] = next;
      break;
    }
    while (--changed >= 0) {
      const int64_t step = from(changed, digits[changed] + 1);
      if (step == kNowhere) continue;
      digits[changed] = step;
      break;
    }
    if (changed < 0) return kNowhere;
  }
  int64_t number = 0;
  for (int d = 0; d < ndim; ++d) {
    number = number * shape[d] + (d > changed ? lists[d][0].start : digits[d]);
  }
  return number;
}

}  // namespace

int64_t CoordinateBox::size() const {
  int64_t size = 1;
  for (size_t m = 0; m < lo.size(); ++m) size *= hi[m] - lo[m] + 1;
  return size;
}
bool CoordinateBox::Contains(const Dims& coordinate) const {
  for (size_t m = 0; m < lo.size(); ++m) {
    if (coordinate[m] < lo[m] || coordinate[m] > hi[m]) return false;
  }
  return true;
}
int64_t CoordinateBox::IndexOf(const Dims& coordinate) const {
  int64_t index = 0;
  for (size_t m = 0; m < lo.size(); ++m) {
    index = index * (hi[m] - lo[m] + 1) + coordinate[m] - lo[m];
  }
  return index;
}
Dims CoordinateBox::At(int64_t index) const {
  Dims coordinate = lo;
  for (size_t m = lo.size(); m-- > 0;) {
    const int64_t size = hi[m] - lo[m] + 1;
    coordinate[m] += index % size;
    index /= size;
  }
  return coordinate;
}

void ForEach(const CoordinateBox& box, absl::FunctionRef<void(const Dims&)> visit) {
  Dims coordinate = box.lo, at(box.lo.size(), 0);
  do {
    visit(coordinate);
  } while (NextIndex(
      at, [&](size_t m) { return box.hi[m] - box.lo[m] + 1; },
      [&](size_t m, int64_t by) { coordinate[m] += by; }));
}

Parts::Parts(const Spec& spec) : spec_(spec), chains_(spec.ndim()) {
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    const Placement& p = spec.placement(m);
    if (p.is_flat()) {
      flats_.push_back(m);
    } else if (cuts(m)) {
      chains_[p.dim()].push_back(m);
    }
  }
}

CoordinateBox Parts::All() const {
  CoordinateBox all{Dims(spec_.mesh().ndim(), 0), Dims(spec_.mesh().ndim(), 0)};
  for (int m = 0; m < spec_.mesh().ndim(); ++m) all.hi[m] = spec_.mesh().size(m) - 1;
  return all;
}

Parts::Held Parts::Uncut(int dim) const {
  const int64_t length = spec_.shape()[dim];
  return {length > 0 ? std::vector<Interval>{{0, length}} : std::vector<Interval>{}, length};
}

Parts::Held Parts::AfterCut(const Held& held, int mesh_dim, int64_t coordinate) const {
  std::vector<Interval> kept;
  LocalIntervals(spec_.placement(mesh_dim), held.length, spec_.mesh().size(mesh_dim), coordinate,
                 &kept);
  Held inner{ComposeIntervals(held.index, kept), 0};
  inner.length = LengthOf(inner.index);
  return inner;
}

// Coordinates of the mesh dims that cut `dim` from `level` on, inside of `held`.
void Parts::Descend(int dim, size_t level, const Held& held, const std::vector<Interval>& wanted,
                    CoordinateBox* box, const CoordinateBox& among,
                    std::vector<CoordinateBox>* found) const {
  const int m = chains_[dim][level];
  for (const Range& r : HoldersOf(spec_.placement(m), held.length, spec_.mesh().size(m),
                                  PositionsOf(held.index, wanted))) {
    const int64_t lo = std::max(r.lo, among.lo[m]), hi = std::min(r.hi, among.hi[m]);
    if (level + 1 == chains_[dim].size()) {
      box->lo[m] = lo;
      box->hi[m] = hi;
      if (lo <= hi) found->push_back(*box);
      continue;
    }
    for (int64_t c = lo; c <= hi; ++c) {
      box->Pin(m, c);
      Descend(dim, level + 1, AfterCut(held, m, c), wanted, box, among, found);
    }
  }
}

std::vector<CoordinateBox> Parts::HoldingBlock(const Block& block,
                                               const CoordinateBox& among) const {
  std::vector<CoordinateBox> boxes = {among};
  for (int d = 0; d < spec_.ndim() && !boxes.empty(); ++d) {
    if (chains_[d].empty()) continue;
    std::vector<CoordinateBox> of_dim, both;
    CoordinateBox box = among;
    Descend(d, 0, Uncut(d), block.index[d], &box, among, &of_dim);
    for (const CoordinateBox& a : boxes) {
      for (const CoordinateBox& b : of_dim) {
        both.push_back(a);
        for (const int m : chains_[d]) {
          both.back().lo[m] = b.lo[m];
          both.back().hi[m] = b.hi[m];
        }
      }
    }
    boxes = std::move(both);
  }
  if (flats_.empty()) return boxes;
  std::vector<CoordinateBox> found;
  for (CoordinateBox& box : boxes) {
    for (const int m : flats_) box.Pin(m, 0);  // found from their starts
    ForEachPart(box, [&](const CoordinateBox& part) { FindFlat(block, part, among, &found); });
  }
  return found;
}

// The flat cuts' coordinates inside of one part of the others.
void Parts::FindFlat(const Block& block, const CoordinateBox& part, const CoordinateBox& among,
                     std::vector<CoordinateBox>* found) const {
  const Block whole = BlockOf(spec_, part.lo);
  std::vector<std::vector<Interval>> wanted;
  for (size_t d = 0; d < whole.index.size(); ++d) {
    wanted.push_back(PositionsOf(whole.index[d], block.index[d]));
    if (wanted.back().empty()) return;
  }
  CoordinateBox box = part;
  const auto find = [&](const auto& self, size_t level, int64_t start, int64_t end) -> void {
    if (level == flats_.size()) return found->push_back(box);
    const int m = flats_[level];
    const Placement& cut = spec_.placement(m);
    for (int64_t at = NextIn(wanted, whole.shape, start); at < end;) {
      const int64_t c = cut.FlatHolder(at - start), from = start + cut.FlatStart(c),
                    next = from + cut.lengths()[c];
      if (c > among.hi[m]) return;
      if (c >= among.lo[m]) {
        box.Pin(m, c);
        self(self, level + 1, from, next);
      }
      at = NextIn(wanted, whole.shape, next);
    }
  };
  find(find, 0, 0, whole.numel());
}

std::vector<CoordinateBox> Parts::Holding(const Region& region, const CoordinateBox& among) const {
  if (region.size() == 1) return HoldingBlock(region[0], among);
  std::vector<CoordinateBox> parts;  // what several blocks find may overlap
  for (const Block& block : region) {
    for (const CoordinateBox& box : HoldingBlock(block, among)) {
      ForEachPart(box, [&](const CoordinateBox& part) { parts.push_back(part); });
    }
  }
  std::sort(parts.begin(), parts.end(),
            [](const CoordinateBox& a, const CoordinateBox& b) { return a.lo < b.lo; });
  parts.erase(std::unique(parts.begin(), parts.end()), parts.end());
  return parts;
}

CoordinateBox Parts::Around(const Region& region, const CoordinateBox& among) const {
  CoordinateBox around = among;
  for (int d = 0; d < spec_.ndim(); ++d) {
    Held held = Uncut(d);
    for (const int m : chains_[d]) {
      int64_t lo = among.hi[m], hi = among.lo[m];
      for (const Block& block : region) {
        const Ranges ranges = HoldersOf(spec_.placement(m), held.length, spec_.mesh().size(m),
                                        PositionsOf(held.index, block.index[d]));
        if (ranges.empty()) continue;
        lo = std::min(lo, std::max(among.lo[m], ranges.front().lo));
        hi = std::max(hi, std::min(among.hi[m], ranges.back().hi));
      }
      if (lo > hi) break;
      around.lo[m] = lo;
      around.hi[m] = hi;
      if (lo != hi) break;  // what is inside differs
      held = AfterCut(held, m, lo);
    }
  }
  return around;
}

void Parts::ForEachPart(const CoordinateBox& box,
                        absl::FunctionRef<void(const CoordinateBox&)> visit) const {
  CoordinateBox cut = box;
  for (int m = 0; m < spec_.mesh().ndim(); ++m) {
    if (!cuts(m)) cut.hi[m] = cut.lo[m];
  }
  ForEach(cut, [&](const Dims& at) {
    CoordinateBox part = box;
    for (int m = 0; m < spec_.mesh().ndim(); ++m) {
      if (cuts(m)) part.Pin(m, at[m]);
    }
    visit(part);
  });
}

int Parts::RowsOver(absl::Span<const int> mesh_dims, const Dims& coordinate,
                    std::vector<Interval>* left) const {
  if (mesh_dims.empty() || !flats_.empty()) return -1;
  const Placement& first = spec_.placement(mesh_dims[0]);
  if (!first.is_shard()) return -1;
  const std::vector<int>& chain = chains_[first.dim()];
  const size_t n = mesh_dims.size();
  if (chain.size() < n || !std::equal(mesh_dims.begin(), mesh_dims.end(), chain.end() - n) ||
      !std::all_of(mesh_dims.begin(), mesh_dims.end(),
                   [&](int m) { return spec_.placement(m).is_shard(); })) {
    return -1;
  }
  Held held = Uncut(first.dim());
  for (size_t i = 0; i + n < chain.size(); ++i)
    held = AfterCut(held, chain[i], coordinate[chain[i]]);
  *left = std::move(held.index);
  return first.dim();
}

int64_t Parts::RowsOf(absl::Span<const int> mesh_dims, int64_t length,
                      const Dims& coordinate) const {
  for (const int m : mesh_dims) {
    const Placement& p = spec_.placement(m);
    length = ShardInterval(length, p.unit(), spec_.mesh().size(m), coordinate[m]).length();
  }
  return length;
}

}  // namespace dtensor::internal
