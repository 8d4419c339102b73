#include "tests/cusim/ranges.h"

#include <algorithm>

namespace cusim {
namespace {

// The bytes of `r` in the page that a sparse range of `page` lies in.
PageBits BitsIn(const Range& r, uint64_t page) {
  if (r.sparse) return r.bits;
  PageBits bits{};
  const uint64_t base = page * kPage;
  const uint64_t low = std::max(r.low, base) - base;
  const uint64_t high = std::min(r.high, base + kPage) - base;
  for (uint64_t i = low; i < high; ++i) bits[i / 64] |= 1ull << (i % 64);
  return bits;
}

bool MeetOne(const Range& a, const Range& b) {
  if (a.low >= b.high || b.low >= a.high) return false;
  if (!a.sparse && !b.sparse) return true;
  const uint64_t page = (a.sparse ? a.low : b.low) / kPage;
  const PageBits x = BitsIn(a, page), y = BitsIn(b, page);
  for (size_t i = 0; i < x.size(); ++i) {
    if ((x[i] & y[i]) != 0) return true;
  }
  return false;
}

bool Holds(const Range& outer, const Range& inner) {
  if (inner.low < outer.low || inner.high > outer.high) return false;
  if (!outer.sparse) return true;
  const PageBits in = BitsIn(inner, outer.low / kPage);
  for (size_t i = 0; i < in.size(); ++i) {
    if ((in[i] & ~outer.bits[i]) != 0) return false;
  }
  return true;
}

bool Inside(const std::vector<Range>& inner, const std::vector<Range>& outer) {
  size_t at = 0;
  for (const Range& r : inner) {
    while (at < outer.size() && outer[at].high < r.high) ++at;
    if (at == outer.size() || !Holds(outer[at], r)) return false;
  }
  return true;
}

}  // namespace

void Tidy(std::vector<Range>* ranges) {
  std::sort(ranges->begin(), ranges->end(),
            [](const Range& a, const Range& b) { return a.low < b.low; });
  size_t kept = 0;
  for (const Range& r : *ranges) {
    if (r.low >= r.high) continue;
    Range* const last = kept == 0 ? nullptr : &(*ranges)[kept - 1];
    if (last != nullptr && !last->sparse && !r.sparse && r.low <= last->high) {
      last->high = std::max(last->high, r.high);
    } else {
      (*ranges)[kept++] = r;
    }
  }
  ranges->resize(kept);
}

bool Meet(const std::vector<Range>& a, const std::vector<Range>& b) {
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    if (MeetOne(a[i], b[j])) return true;
    a[i].high < b[j].high ? ++i : ++j;
  }
  return false;
}

bool Clash(const Use& a, const Use& b) {
  return Meet(a.writes, b.writes) || Meet(a.writes, b.reads) || Meet(a.reads, b.writes);
}

bool Covers(const Use& now, const Use& old) {
  return Inside(old.writes, now.writes) &&
         (Inside(old.reads, now.writes) || Inside(old.reads, now.reads));
}

}  // namespace cusim
