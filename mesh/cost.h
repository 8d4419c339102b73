// Cost model: how long a collective takes, from named parameters per link. A model for comparing
// plans, not a promise.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "mesh/comm.h"

namespace dtensor {

// One kind of link: a message of b bytes takes latency_us + b / bytes_per_us.
struct LinkCost {
  double latency_us = 0;
  double bytes_per_us = 1;
};

struct CostModel {
  LinkCost intra_node = {0.5, 10000};  // between ranks of one node
  LinkCost inter_node = {5, 2500};     // between nodes
  int64_t ranks_per_node = 8;          // rank r is on node r / ranks_per_node

  // Microseconds of one collective of this rank on `ranks`: `bytes` are those it receives
  // (CommEvent::bytes). Ring algorithms: n - 1 steps (all-reduce 2 (n - 1)), over the slowest link
  // that the group has. 0 for a group of one.
  double CollectiveUs(CollectiveKind kind, int64_t bytes, absl::Span<const int64_t> ranks) const;
  bool SpansNodes(absl::Span<const int64_t> ranks) const;

  // JSON with the names above, as bench/calibrate writes it.
  std::string ToJson() const;
  // Errors: InvalidArgument naming a key that is missing, unknown or not positive.
  static absl::StatusOr<CostModel> FromJson(absl::string_view text);
};

}  // namespace dtensor
