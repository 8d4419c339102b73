// FlightRecorder: the last 256 calls of one rank on one group. FlightReport: what all ranks of a
// world were doing when something went wrong, and where they first disagreed.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "dtensor/mesh/call_tag.h"
#include "dtensor/mesh/comm_call.h"
#include "dtensor/mesh/park.h"

namespace dtensor {

// One call as it is kept: no text is made before somebody asks.
struct FlightEntry {
  uint64_t sequence = 0;     // CollectiveCall's; 0 for messages (send, recv), which have none
  uint64_t fingerprint = 0;  // alike on all ranks of a call that agree
  int64_t start_ns = 0;      // steady clock, to a few milliseconds
  CollectiveKind kind = CollectiveKind::kBarrier;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kF32;
  int root = 0;
  int sends = 0, recvs = 0;  // pieces of an exchange
  Shape shape;               // of the tensor that names the call
  int label = 0;             // FlightRecorder::Label
  KeptTag tag;
  bool deferred = false;  // CommOptions::overlap
  bool done = false;
  absl::StatusCode code = absl::StatusCode::kOk;  // of a call that is done
};

// Nanoseconds of a steady clock that is cheap to read and some milliseconds coarse.
inline int64_t CoarseNow() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

// Written by its rank, read by any: a rank that hangs cannot report itself.
class FlightRecorder {
 public:
  static constexpr size_t kEntries = 256;
  FlightRecorder() : ring_(kEntries) {}
  FlightRecorder(const FlightRecorder&) = delete;

  // A name for the group ("tp"); ranks of one group may have several. The same name again: its
  // number.
  int AddLabel(const std::string& label);
  std::string Label(int label) const;
  std::string LabelAt(size_t place) const;  // of the call there
  // Owner only. A call starts; returns its place, for End.
  size_t Begin(const CollectiveCall& call, int label);
  void End(size_t place, absl::StatusCode code) {
    ring_[place].outcome.store(static_cast<int>(code), std::memory_order_release);
  }
  // The last `count` calls, oldest first.
  std::vector<FlightEntry> Last(size_t count = kEntries) const;

 private:
  static constexpr int kPending = -1;
  struct Place {
    FlightEntry entry;  // guarded by mutex_
    std::atomic<int> outcome{kPending};
  };
  mutable SpinLock mutex_;
  std::vector<Place> ring_;
  uint64_t count_ = 0;
  std::vector<std::string> labels_;
  absl::flat_hash_map<std::string, int> numbers_;  // of labels
};

struct FlightCall {
  uint64_t sequence = 0;  // deferred calls are numbered by themselves
  bool deferred = false;
  uint64_t fingerprint = 0;
  std::string group;  // label of the mesh dims: "tp"
  std::string call;   // "all_reduce(sum, float32 [4, 6])"
  std::string tag;    // what for; may be empty
  // posted (not yet seen by peers), waiting (for waits_for), moving (data), done, failed
  std::string state;
  std::string error;               // of a failed call: "ABORTED"
  std::vector<int64_t> waits_for;  // world ranks
  double age_ms = 0;               // since it started

  bool pending() const { return state != "done" && state != "failed"; }
};

// One rank's calls on one group.
struct FlightDump {
  int64_t rank = 0;
  bool left = false;              // its body has returned
  std::vector<FlightCall> calls;  // oldest first
  bool silent = false;            // a process that did not say: it is stopped, or gone
};

struct FlightGroup {
  std::string label;
  std::vector<FlightDump> dumps;  // by rank in the group
  // The first call on which ranks disagree: "call #12: rank 0 issued ...; rank 1 has not come to
  // it". Empty if all agree.
  std::string disagreement;
};

struct FlightReport {
  std::vector<FlightGroup> groups;

  // Ranks that others wait for and that wait for nobody; in a circle of waits, all of it. Sorted.
  std::vector<int64_t> Culprits() const;
  // Who waits for what since when, and the disagreements; at most `max_bytes`, ending with how many
  // lines were left out. Ranks that do the same share a line.
  std::string Summary(size_t max_bytes = 2048) const;
  std::string ToText() const;  // everything: the summary, then every call
  std::string ToJson() const;  // the same, for programs
};

// Merges the dumps of one group: finds where ranks first disagree.
FlightGroup MergeDumps(std::string label, std::vector<FlightDump> dumps);

// "ranks 0, 1, 2": at most eight are named.
std::string RankNames(absl::Span<const int64_t> ranks);
// "all_reduce(sum, float32 [4, 6])", "deferred all_gather(...)"; `ranks` are the group's world
// ranks.
std::string CallText(const FlightEntry& entry, absl::Span<const int64_t> ranks);

}  // namespace dtensor
