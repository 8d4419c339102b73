// Cost model: how long a collective takes, from named parameters per link. A model for comparing
// plans, not a promise (docs/reference/cost.md).
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "dtensor/mesh/comm_call.h"

namespace dtensor {

// A message of b bytes takes latency_us + b / bytes_per_us.
struct MessageCost {
  double latency_us = 0;
  double bytes_per_us = 1;
};

// One kind of link. Collectives that were measured have parameters of their own; the others take
// those of the link, and reductions besides what adding up takes.
struct LinkCost : MessageCost {
  double reduce_bytes_per_us = 0;  // what a rank adds up in a microsecond; 0: for nothing
  std::map<CollectiveKind, MessageCost> measured = {};
};

struct CostModel {
  LinkCost intra_node = {{0.5, 10000}};  // between ranks of one node
  LinkCost inter_node = {{5, 2500}};     // between nodes
  int64_t ranks_per_node = 8;            // rank r is on node r / ranks_per_node

  // Microseconds of one collective of this rank on `ranks`: `bytes` are those it receives
  // (CommEvent::bytes). Ring algorithms: Steps(kind, n) messages one after the other, over the
  // slowest link that the group has. 0 for a group of one.
  double CollectiveUs(CollectiveKind kind, int64_t bytes, absl::Span<const int64_t> ranks) const;
  // The same for a group of `n` ranks that is known without a list of them.
  double CollectiveUs(CollectiveKind kind, double bytes, int64_t n, bool spans_nodes) const;
  bool SpansNodes(absl::Span<const int64_t> ranks) const;
  // n - 1; twice that for an all-reduce; 1 for a message between two ranks.
  static double Steps(CollectiveKind kind, int64_t n);

  // JSON with the names above: "intra_node.latency_us", "inter_node.all_reduce.bytes_per_us", ...
  // examples/calibrate writes it.
  std::string ToJson() const;
  // Errors: InvalidArgument naming a key that is missing (latency_us and bytes_per_us of both
  // links, ranks_per_node), unknown, without its pair, or not positive.
  static absl::StatusOr<CostModel> FromJson(absl::string_view text);
  // Errors: NotFound if the file cannot be read; those of FromJson.
  static absl::StatusOr<CostModel> FromFile(const std::string& path);
};

}  // namespace dtensor
