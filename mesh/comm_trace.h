// CommTrace: what a rank communicated while the scope was open, by kind, mesh dims, direction and
// whether a redistribution was implicit. Assertable in tests.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "mesh/comm.h"

namespace dtensor {

enum class CommPhase : uint8_t { kForward, kBackward, kOptimizer, kOther };
std::string_view Name(CommPhase phase);

struct CommEvent {
  CollectiveKind kind;
  std::string mesh_dims;  // label of the group: "tp", "dp,tp"
  CommPhase phase;
  bool implicit;          // inserted by dispatch, not asked for
  int64_t bytes;          // received by this rank: all-reduce 2B(n-1)/n, gather B-b, exchange boxes
  int64_t payload_bytes;  // bytes of the largest tensor this rank hands to the call
  double modelled_us;     // by the world's cost model; 0 where there are real peers
};

struct CommRow {
  CollectiveKind kind;
  std::string mesh_dims;
  CommPhase phase;
  int64_t count = 0, bytes = 0;
};

// Scope of one rank; scopes nest, each sees what happens while it is open. Calls on groups of one
// rank are not recorded: they move nothing.
class CommTrace {
 public:
  CommTrace();
  ~CommTrace();
  CommTrace(const CommTrace&) = delete;
  CommTrace& operator=(const CommTrace&) = delete;

  const std::vector<CommEvent>& events() const { return events_; }
  int64_t Count(CollectiveKind kind) const;
  int64_t Count(CollectiveKind kind, CommPhase phase) const;
  int64_t TotalCount() const { return static_cast<int64_t>(events_.size()); }
  int64_t TotalBytes() const;
  int64_t MaxPayloadBytes() const;  // 0 if nothing was sent
  double ModelledUs() const;
  std::vector<CommRow> Rows() const;  // summed, sorted by kind, dims, phase
  std::string ToString() const;       // a table
  void Clear() { events_.clear(); }

 private:
  friend class TraceState;
  std::vector<CommEvent> events_;
};

// Owned by the RankContext: open scopes and the labels that new events get.
class TraceState {
 public:
  CommPhase phase = CommPhase::kForward;
  bool implicit = false;
  bool active() const { return !scopes_.empty(); }
  void Record(CollectiveKind kind, const std::string& mesh_dims, int64_t bytes,
              int64_t payload_bytes, double modelled_us);

 private:
  friend class CommTrace;
  std::vector<CommTrace*> scopes_;
};

// Sets TraceState::phase of the calling rank for a scope.
class ScopedPhase {
 public:
  explicit ScopedPhase(CommPhase phase);
  ~ScopedPhase();
  ScopedPhase(const ScopedPhase&) = delete;

 private:
  CommPhase previous_;
};

}  // namespace dtensor
