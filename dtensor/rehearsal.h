// Rehearsal: a part of a program without its work. While it is open, ops of the calling rank choose
// strategies, redistribute and record gradients as they would, but on tensors without data (on
// meta): no kernel runs, no memory is taken, no peer is waited for. What would be communicated goes
// to CommTraces that are opened inside, and to no others.
//
// Inside of it the rank has another id (RehearsedRank), so every tensor from outside is foreign. In
// its place the rehearsal takes a twin: the same tensor on meta, with a gradient, redistributions
// and versions of its own. So what is written, accumulated or kept in a rehearsal stays in it. What
// is made in it is foreign outside: every use is an error that names the op.
//
// Explain (dtensor/explain.h, parallel/plan/explain.h) is made of it, and dispatch prices with it
// what an op would cost as other ops.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "dtensor/cache.h"
#include "dtensor/dispatch.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/mesh/cost.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/trace.h"
#include "dtensor/watch.h"

namespace dtensor {

class BackwardPass;
namespace internal {
class MemoScope;
struct RecomputeRun;
}  // namespace internal

// One op call of a rehearsal.
struct RehearsedOp {
  std::string module;  // as CommEvent::module
  std::string op;      // as CommEvent::op: the outermost call
  CommPhase phase;
  std::string strategy;  // "matmul: x [S(0), R], w [R, P => R] -> [S(0), R]"
};

class Rehearsal final : internal::CallWatcher {
 public:
  // Times of collectives are modelled by `cost`, which must outlive this. Rehearsals nest.
  explicit Rehearsal(const CostModel& cost);
  // Random generators go back to where they were.
  ~Rehearsal() override;
  Rehearsal(const Rehearsal&) = delete;
  // The calling rank's innermost; null: none is open.
  static Rehearsal* Current();

  const std::vector<RehearsedOp>& ops() const { return ops_; }
  // Of tensors made while it is open, twins among them.
  int64_t peak_bytes() const { return counter_->stats().peak_bytes; }
  // Modelled bytes of all redistributions so far: from global sizes, the same on every rank.
  double moved_bytes() const { return moved_bytes_; }

  // What stands for `t` here: itself if it was made here, else its twin. Valid as long as this is.
  //   Errors: InvalidArgument for a tensor of another rank or world, or of a rehearsal that is
  //   over.
  absl::StatusOr<const DTensor*> Enter(const DTensor& t);
  // A tensor that a module keeps under `key`, made at most once in this rehearsal.
  DTensor Cached(const void* owner, const std::string& key, absl::FunctionRef<DTensor()> make);

  void NoteMove(const Spec& from, const Spec& to);  // by every redistribution

 private:
  void Note(const OpDef& op, Inputs inputs, absl::Span<const Attr> attrs,
            const internal::DispatchEntry& entry) override;
  absl::StatusOr<DTensor> MakeTwin(const DTensor& t);
  absl::StatusOr<Buffer> TwinOf(const Buffer& buffer);  // one for all views of it
  absl::Status CopyHistory(const DTensor& from, const DTensor& twin);
  absl::Status CopyMemos(const DTensor& from, const DTensor& twin);
  absl::StatusOr<DTensor> MovedBefore(const DTensor& twin, const SpecRef& target);

  const RehearsedRank rank_;
  Rehearsal* const outer_;
  internal::CallWatcher* const outer_watcher_;
  // Of the program around.
  BackwardPass* const backward_;
  internal::RecomputeRun* const recompute_;
  const CostModel* const outer_cost_;
  std::shared_ptr<Allocator> counter_;
  ScopedMetaCounter counting_;
  RngSnapshot random_;
  HiddenCommTraces hidden_;
  TimelineTrack::Pause pause_;
  std::vector<RehearsedOp> ops_;
  double moved_bytes_ = 0;
  struct Twin {
    DTensor original, twin;  // the original is kept, so that its address stays its own
  };
  absl::node_hash_map<const internal::DTensorImpl*, Twin> twins_;
  // By identity of the original, which a tensor in twins_ keeps alive.
  absl::flat_hash_map<const void*, Buffer> buffers_;
  absl::flat_hash_map<std::pair<const void*, std::string>, DTensor> cached_;
  // Inside of a module's call: of the memos that it makes here, and ends before the twins do.
  // Outside of one a run keeps none of a module's tensors either.
  std::unique_ptr<internal::MemoScope> memos_;
};

namespace internal {
// `local`, or in a rehearsal a tensor like it on meta.
Tensor RehearsedLocal(const Tensor& local);
}  // namespace internal

}  // namespace dtensor
