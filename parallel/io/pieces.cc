#include "dtensor/parallel/io/pieces.h"

#include <algorithm>

namespace dtensor {
namespace {

class Walk {
 public:
  Walk(const Spec& spec, std::vector<std::vector<Interval>> index)
      : strides_(ContiguousStrides(spec.shape())), index_(std::move(index)) {
    // Dims from `whole_` on are held entirely, so one index before them is one stretch.
    whole_ = spec.ndim();
    while (whole_ > 0 &&
           index_[whole_ - 1] == std::vector<Interval>{{0, spec.shape()[whole_ - 1]}}) {
      --whole_;
    }
    inner_ = 1;
    for (int d = whole_; d < spec.ndim(); ++d) inner_ *= spec.shape()[d];
    if (spec.numel() > 0) From(0, 0);
  }
  std::vector<Stretch> Take() { return std::move(out_); }

 private:
  void From(int dim, int64_t base) {
    if (dim == whole_) return Add({base, inner_});
    for (const Interval& held : index_[dim]) {
      if (dim == whole_ - 1) {
        Add({base + held.start * strides_[dim], held.length() * strides_[dim]});
        continue;
      }
      for (int64_t i = held.start; i < held.end; ++i) From(dim + 1, base + i * strides_[dim]);
    }
  }
  void Add(Stretch s) {
    if (s.length == 0) return;
    if (!out_.empty() && out_.back().start + out_.back().length == s.start) {
      out_.back().length += s.length;
    } else {
      out_.push_back(s);
    }
  }

  const Strides strides_;
  const std::vector<std::vector<Interval>> index_;
  int whole_ = 0;
  int64_t inner_ = 1;
  std::vector<Stretch> out_;
};

// The elements `taken` (positions among all elements of `of`).
std::vector<Stretch> Part(const std::vector<Stretch>& of, const std::vector<Interval>& taken) {
  std::vector<Stretch> out;
  for (const Interval& want : taken) {
    int64_t at = 0;
    for (const Stretch& s : of) {
      const int64_t from = std::max(want.start, at), to = std::min(want.end, at + s.length);
      if (from < to) out.push_back({s.start + from - at, to - from});
      at += s.length;
    }
  }
  return out;
}

}  // namespace

std::vector<Stretch> LocalStretches(const Spec& spec) {
  std::vector<Stretch> out = Walk(spec, LocalIndex(spec, spec.coordinate())).Take();
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).is_flat()) continue;
    int64_t count = 0;
    for (const Stretch& s : out) count += s.length;
    std::vector<Interval> taken;
    LocalIntervals(spec.placement(m), count, spec.mesh().shape()[m], spec.coordinate()[m], &taken);
    out = Part(out, taken);
  }
  return out;
}

bool IsFirstHolder(const Spec& spec) {
  if (!spec.in_mesh()) return false;
  for (int m = 0; m < spec.mesh().ndim(); ++m) {
    if (!spec.placement(m).cuts() && spec.coordinate()[m] != 0) return false;
  }
  return true;
}

}  // namespace dtensor
