// CommTrace: what a rank communicated while the scope was open, by kind, mesh dims, direction,
// module, op and whether a redistribution was implicit. Assertable in tests (mesh/expect_comm.h).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/node_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/tensor/trace.h"

namespace dtensor {

struct CostModel;

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
  // Dotted path of the module that ran ("blocks.0.mlp.up"; the root's is its type), in backward of
  // the one that ran in forward; "" outside of modules.
  std::string module;
  std::string op;  // what was called: "matmul", "cross_entropy", "redistribute"; "" if nothing was
};

// By what events are summed: each includes those before it.
enum class CommBy : uint8_t { kKind, kModule, kOp };

struct CommRow {
  CollectiveKind kind;
  std::string mesh_dims;
  CommPhase phase;
  std::string module = {};  // from kModule on
  std::string op = {};      // from kOp on
  bool implicit = false;    // from kOp on
  int64_t count = 0, bytes = 0;
  double modelled_us = 0;
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
  // Summed; sorted by kind, dims and phase, or first by module (in the order of their first events)
  // and phase.
  std::vector<CommRow> Rows(CommBy by = CommBy::kKind) const;
  std::string ToString(CommBy by = CommBy::kKind) const;  // a table
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
  const std::string* module = nullptr;  // from PathOf; null outside of modules
  absl::string_view op;                 // the outermost call that runs
  const CostModel* cost = nullptr;      // of a rehearsal; null: the world's
  // Functions that are one call to the program run, so many in each other: what is wrong in them
  // peers learn when the outermost ends, in its name (dtensor/errors.h: TellPeers).
  int functions = 0;
  absl::Status untold;
  bool active() const { return !scopes_.empty(); }
  void Record(CollectiveKind kind, const std::string& mesh_dims, int64_t bytes,
              int64_t payload_bytes, double modelled_us);
  // A module path that lives as long as the rank: what autograd nodes keep.
  const std::string* PathOf(std::string path) { return &*paths_.insert(std::move(path)).first; }

 private:
  friend class CommTrace;
  friend class HiddenCommTraces;
  std::vector<CommTrace*> scopes_;
  absl::node_hash_set<std::string> paths_;
};

// The calling rank's open CommTraces see nothing of a scope: what happens in it is only imagined.
class HiddenCommTraces {
 public:
  explicit HiddenCommTraces(TraceState& trace)
      : trace_(trace), scopes_(std::exchange(trace.scopes_, {})) {}
  ~HiddenCommTraces() { trace_.scopes_ = std::move(scopes_); }
  HiddenCommTraces(const HiddenCommTraces&) = delete;

 private:
  TraceState& trace_;
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
  Span span_;
};

// What runs now, for a scope: a module (its calls are then named anew) and a call in it.
class ScopedModule {
 public:
  ScopedModule(TraceState& trace, const std::string* module, absl::string_view op = {})
      : trace_(trace), module_(trace.module), op_(trace.op) {
    trace.module = module;
    trace.op = op;
  }
  ~ScopedModule() {
    trace_.module = module_;
    trace_.op = op_;
  }
  ScopedModule(const ScopedModule&) = delete;

 private:
  TraceState& trace_;
  const std::string* module_;
  absl::string_view op_;
};

// Names what is called, unless a call that it is part of has done so. `op` must outlive the scope.
class ScopedOp {
 public:
  ScopedOp(TraceState& trace, absl::string_view op) : trace_(trace), outermost_(trace.op.empty()) {
    if (outermost_) trace.op = op;
  }
  ~ScopedOp() {
    if (outermost_) trace_.op = {};
  }
  ScopedOp(const ScopedOp&) = delete;

 private:
  TraceState& trace_;
  bool outermost_;
};

}  // namespace dtensor
