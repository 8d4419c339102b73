// What strategies cost, and how the search compares them.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "dtensor/mesh/spec.h"

namespace dtensor::internal {

// Bytes come first, then time. Both are rounded to binary fractions, whose sums are exact: ties are
// ties, in whatever order the inputs are added.
struct Cost {
  double bytes = 0, us = 0;

  static Cost Of(double bytes, double us) {
    return {std::round(bytes * 1024) / 1024, std::round(us * (1 << 20)) / (1 << 20)};
  }
  static Cost Infinite() { return {std::numeric_limits<double>::infinity(), 0}; }
  bool zero() const { return bytes == 0 && us == 0; }
  Cost& operator+=(const Cost& o) {
    bytes += o.bytes;
    us += o.us;
    return *this;
  }
  friend bool operator<(const Cost& a, const Cost& b) {
    return a.bytes != b.bytes ? a.bytes < b.bytes : a.us < b.us;
  }
};

// Of one redistribution, by the world's cost model. The same on every rank.
Cost CostOfMove(const DeviceMesh& mesh, IntSpan shape, DType dtype,
                absl::Span<const Placement> from, absl::Span<const Placement> to);

// What it costs to bring one input where a strategy wants it, and the least that it can cost once
// the strategy is known for the first mesh dims: moves are not separable by mesh dim (to cut a
// replica further makes it cheaper), so the least is looked for over all that may follow.
class InputPrices {
 public:
  // `options`: per mesh dim the placements that any row asks for; none where that is not known.
  InputPrices(const Spec& in, std::vector<Placements> options)
      : in_(in), options_(std::move(options)) {}

  double targets() const {
    double n = 1;
    for (const Placements& of_dim : options_) {
      n *= std::max<double>(1, static_cast<double>(of_dim.size()));
    }
    return n;
  }
  // `chosen`: of the first mesh dims.
  Cost Least(const Placements& chosen);

 private:
  const Spec& in_;
  std::vector<Placements> options_;
  absl::flat_hash_map<Placements, Cost> least_;
};

}  // namespace dtensor::internal
