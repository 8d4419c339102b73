#include "dtensor/mesh/region.h"

#include <algorithm>
#include <utility>

#include "dtensor/tensor/next_index.h"

namespace dtensor {
namespace {

// Positions [a, a + length) of one list are positions [b, b + length) of another.
struct Run {
  int64_t a, b, length;
};
using Runs = absl::InlinedVector<Run, 2>;

// The indices in both lists. Runs that continue each other in both are one.
Runs CommonRuns(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  Runs runs;
  int64_t a_at = 0, b_at = 0;  // positions of the intervals' starts
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int64_t start = std::max(a[i].start, b[j].start), end = std::min(a[i].end, b[j].end);
    if (start < end) {
      const Run run = {a_at + start - a[i].start, b_at + start - b[j].start, end - start};
      if (!runs.empty() && runs.back().a + runs.back().length == run.a &&
          runs.back().b + runs.back().length == run.b) {
        runs.back().length += run.length;
      } else {
        runs.push_back(run);
      }
    }
    if (a[i].end < b[j].end) {
      a_at += a[i++].length();
    } else {
      b_at += b[j++].length();
    }
  }
  return runs;
}

// The part of a block with positions [start, end) of dim `d`.
Block Restrict(const Block& block, size_t d, int64_t start, int64_t end) {
  Block part = block;
  if (start == 0 && end == block.shape[d]) return part;
  part.index[d] = ComposeIntervals(block.index[d], {{start, end}});
  part.shape[d] = end - start;
  part.offset += start * block.strides[d];
  return part;
}

// AppendRange on the dims from `d` on; `inner` positions follow one of dim d.
void AppendFrom(const Block& block, size_t d, int64_t start, int64_t end, Region* out) {
  if (start == end) return;
  if (d == block.shape.size()) {
    out->push_back(block);
    return;
  }
  int64_t inner = 1;
  for (size_t k = d + 1; k < block.shape.size(); ++k) inner *= block.shape[k];
  const int64_t first = start / inner, last = (end - 1) / inner;
  if (first == last) {
    return AppendFrom(Restrict(block, d, first, first + 1), d + 1, start - first * inner,
                      end - first * inner, out);
  }
  const int64_t whole = (start + inner - 1) / inner, rest = end / inner;
  if (whole > first) {
    AppendFrom(Restrict(block, d, first, whole), d + 1, start - first * inner, inner, out);
  }
  if (rest > whole) out->push_back(Restrict(block, d, whole, rest));
  if (end > rest * inner) {
    AppendFrom(Restrict(block, d, rest, rest + 1), d + 1, 0, end - rest * inner, out);
  }
}

bool BlocksOverlap(const Block& a, const Block& b) {
  for (size_t d = 0; d < a.index.size(); ++d) {
    if (CommonRuns(a.index[d], b.index[d]).empty()) return false;
  }
  return true;
}

void AppendBoxes(const Block& a, const Block& b, std::vector<BoxPair>* out) {
  const size_t ndim = a.index.size();
  absl::InlinedVector<Runs, 6> runs;
  for (size_t d = 0; d < ndim; ++d) {
    runs.push_back(CommonRuns(a.index[d], b.index[d]));
    if (runs.back().empty()) return;
  }
  Dims at(ndim, 0);
  const auto count = [&](size_t d) { return runs[d].size(); };
  do {
    BoxPair pair{{{}, a.strides, a.offset}, {{}, b.strides, b.offset}};
    for (size_t d = 0; d < ndim; ++d) {
      const Run& run = runs[d][at[d]];
      pair.a.shape.push_back(run.length);
      pair.a.offset += run.a * a.strides[d];
      pair.b.offset += run.b * b.strides[d];
    }
    pair.b.shape = pair.a.shape;
    out->push_back(std::move(pair));
  } while (NextIndex(at, count, [](size_t, int64_t) {}));
}

}  // namespace

int64_t RegionNumel(const Region& region) {
  int64_t numel = 0;
  for (const Block& block : region) numel += block.numel();
  return numel;
}

Block BlockOf(const Spec& spec, IntSpan coordinate) {
  Block block;
  block.index = LocalIndex(spec, coordinate);
  for (const auto& list : block.index) {
    int64_t length = 0;
    for (const Interval& i : list) length += i.length();
    block.shape.push_back(length);
  }
  block.strides = ContiguousStrides(block.shape);
  return block;
}

Region FlatRange(const Block& block, int64_t start, int64_t length) {
  Region region;
  if (length == 0) return region;
  AppendRange(block, start, start + length, &region);
  for (Block& part : region) part.offset -= start;
  return region;
}

Region RegionOf(const Spec& spec, IntSpan coordinate) {
  Block block = BlockOf(spec, coordinate);
  int64_t start = 0, length = block.numel();
  bool flat = false;
  for (int m = 0; m < spec.mesh().ndim(); ++m) {  // every flat cut is inside of the one before
    const Placement& p = spec.placement(m);
    if (!p.is_flat()) continue;
    flat = true;
    start += p.FlatStart(coordinate[m]);
    length = p.lengths()[coordinate[m]];
  }
  if (flat) return FlatRange(block, start, length);
  if (length == 0) return {};
  return {std::move(block)};
}

void AppendRange(const Block& block, int64_t start, int64_t end, Region* out) {
  AppendFrom(block, 0, start, end, out);
}

Region PackedOverlap(const Region& a, const Region& b) {
  Region both;
  int64_t offset = 0;
  for (const Block& y : b) {
    for (const Block& x : a) {
      Block block;
      for (size_t d = 0; d < x.index.size(); ++d) {
        std::vector<Interval> common;
        int64_t length = 0;
        for (size_t i = 0, j = 0; i < x.index[d].size() && j < y.index[d].size();) {
          const Interval &p = x.index[d][i], &q = y.index[d][j];
          const Interval piece{std::max(p.start, q.start), std::min(p.end, q.end)};
          if (piece.length() > 0) {
            common.push_back(piece);
            length += piece.length();
          }
          (p.end < q.end ? i : j) += 1;
        }
        block.index.push_back(std::move(common));
        block.shape.push_back(length);
      }
      if (block.numel() == 0) continue;
      block.strides = ContiguousStrides(block.shape);
      block.offset = offset;
      offset += block.numel();
      both.push_back(std::move(block));
    }
  }
  return both;
}

Region PackedRange(const Region& region, int64_t start, int64_t end, int64_t offset) {
  Region out;
  int64_t before = 0;
  for (const Block& block : region) {
    const int64_t from = std::max(start, before), to = std::min(end, before + block.numel());
    if (from < to) {
      Block packed = block;
      packed.strides = ContiguousStrides(block.shape);
      packed.offset = offset + before - start;
      AppendRange(packed, from - before, to - before, &out);
    }
    before += block.numel();
  }
  return out;
}

std::vector<BoxPair> Overlap(const Region& a, const Region& b) {
  std::vector<BoxPair> pairs;
  for (const Block& y : b) {
    for (const Block& x : a) AppendBoxes(x, y, &pairs);
  }
  return pairs;
}

bool Overlaps(const Region& a, const Region& b) {
  return std::any_of(b.begin(), b.end(), [&](const Block& y) {
    return std::any_of(a.begin(), a.end(), [&](const Block& x) { return BlocksOverlap(x, y); });
  });
}

}  // namespace dtensor
