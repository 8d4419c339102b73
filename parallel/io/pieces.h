// Which elements of a logical tensor a rank holds, as stretches of the row-major whole: what it
// reads from a file and writes to one.
#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/mesh/spec.h"

namespace dtensor {

// Elements [start, start + length) of the row-major whole.
struct Stretch {
  int64_t start = 0, length = 0;
  friend bool operator==(const Stretch&, const Stretch&) = default;
};

// Those of this rank, in the order of its row-major local tensor; neighbours are joined.
std::vector<Stretch> LocalStretches(const Spec& spec);

// Whether this rank is the one that writes them: of the ranks that hold the same the first.
bool IsFirstHolder(const Spec& spec);

}  // namespace dtensor
