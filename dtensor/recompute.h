// Recompute: a part of the forward whose nodes save nothing, and get their values by running it
// again when a backward first needs one. The public function is in autograd.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "dtensor/impl.h"
#include "dtensor/rng/tracker.h"
#include "dtensor/tensor/control_flow.h"

namespace dtensor::internal {

struct RecomputeRun;

// One call of Recompute. Shared by its nodes: while one lives it keeps the function and its inputs.
class RecomputeRegion : public std::enable_shared_from_this<RecomputeRegion> {
 public:
  // What happens to the values that nodes would save.
  enum class Mode : uint8_t {
    kDrop,    // the first time: they are dropped, and the node is noted
    kRefill,  // they go to the node that was noted
    kIgnore,  // they are dropped: the function of a region inside of one that is refilled
  };
  // Records fn(inputs) so that its values are not kept.
  static Values Record(const std::function<Values(const Values&)>& fn, const Values& inputs);
  // A node with values to save was made (kOp or kCustom) while something runs. After the last one
  // that is refilled this throws what only Fill catches: the rest of the function is not needed.
  static void Note(Node* node);
  // `source` is redistributed explicitly while something runs, or its numbers are read (Item).
  static void NoteMove(const DTensorImpl& source, bool numbers = false);
  // `t` is written to by something else than an op while something runs.
  static void NoteWrite(const DTensorImpl& t);
  void Forget(size_t step) { steps_[step].node = nullptr; }
  // Gives all nodes their values. Nothing if that was done.
  //   Comm:   that of the function. All ranks of the mesh must call it.
  //   Errors: FailedPrecondition if an input, or another tensor that the function reads (a
  //   parameter) and does not write to itself, was changed in place, or if the function does other
  //   things than the first time.
  absl::Status Fill();

 private:
  friend class RecomputeWatch;
  friend struct RecomputeRun;
  // What was read in a run: an op's input where the program has it, a source of a redistribution
  // (no op, input -1) or of numbers (-2), or what a CustomFunction saves (no op). Of values that
  // are made in the function both runs read the same version. `memory` is an address, not held:
  // that of a value from outside stays its own while the function runs.
  struct Read {
    const OpDef* op;
    int input;
    const void* memory;
    uint64_t version;
    SpecRef spec;
    std::string What() const;
  };
  using Reads = std::vector<Read>;
  static Read ReadOf(const OpDef* op, int input, const DTensorImpl& t);
  // What the function does that a second run has to find again, in this order.
  struct Step {
    Node* node = nullptr;  // null once it died
    std::weak_ptr<RecomputeRegion> nested = {};
    bool is_nested = false;
    Reads reads = {};  // since the step before
  };
  struct Done : ControlFlow {};

  void TakeInputs(const Values& inputs);
  absl::Status CheckInputs() const;
  absl::Status Rerun();
  void AddStep(Node* node, std::shared_ptr<RecomputeRegion> nested);
  // Whether what was read before `step` was changed since the first time.
  absl::Status CheckReads(const Step& step, const Reads& now) const;
  Step& NextStep(RecomputeRun* run);
  static Values Nested(RecomputeRun* run, const std::function<Values(const Values&)>& fn,
                       const Values& inputs);

  std::function<Values(const Values&)> fn_;
  std::shared_ptr<RecomputeRegion> outer_;  // that will give the inputs; null: they are there
  Values inputs_;                           // without history
  std::vector<bool> wanted_;                // which of them want a gradient
  std::vector<uint64_t> versions_;
  RngSnapshot before_;
  // The scopes that were open.
  bool implicit_replication_ = false;
  DeviceMesh mesh_;
  const std::string* module_ = nullptr;
  std::vector<Step> steps_;
  Reads reads_;  // since the last step, while it runs the first time
  // What the function writes to (running statistics), by address: its business, read or not. One
  // set for regions that nest.
  std::shared_ptr<absl::flat_hash_set<const void*>> written_;
  bool filled_ = false;
};

// A function that runs: EngineState::recompute.
struct RecomputeRun {
  RecomputeRegion* region;
  RecomputeRegion::Mode mode;
  size_t next = 0;                    // kRefill: the step that comes
  RecomputeRegion::Reads reads = {};  // kRefill: since the step before
  absl::Status failed = {};           // kRefill: why it was ended
  bool once = false;                  // kDrop: in the body of a RunOnce, which no other run reads
  RecomputeRegion::Reads* open_reads() {
    if (once || mode == RecomputeRegion::Mode::kIgnore) return nullptr;
    return mode == RecomputeRegion::Mode::kDrop ? &region->reads_ : &reads;
  }
};

// Whether what runs is a part of the forward that a backward runs again.
inline bool RunsAgain() {
  const RecomputeRun* run = State().recompute;
  return run != nullptr && run->mode != RecomputeRegion::Mode::kDrop;
}

}  // namespace dtensor::internal
