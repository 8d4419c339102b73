// Recompute: a part of the forward whose nodes save nothing, and get their values by running it
// again when a backward first needs one. The public function is in autograd.h.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

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
  void Forget(size_t step) { steps_[step].node = nullptr; }
  // Gives all nodes their values. Nothing if that was done.
  //   Comm:   that of the function. All ranks of the mesh must call it.
  //   Errors: FailedPrecondition if an input was changed in place, or if the function does other
  //   things than the first time.
  absl::Status Fill();

 private:
  // What the function does that a second run has to find again, in this order.
  struct Step {
    Node* node = nullptr;  // null once it died
    std::weak_ptr<RecomputeRegion> nested = {};
    bool is_nested = false;
  };
  struct Done : ControlFlow {};

  void TakeInputs(const Values& inputs);
  absl::Status CheckInputs() const;
  absl::Status Rerun();
  Step& NextStep(RecomputeRun* run);
  static Values Nested(RecomputeRun* run, const std::function<Values(const Values&)>& fn,
                       const Values& inputs);

  std::function<Values(const Values&)> fn_;
  std::shared_ptr<RecomputeRegion> outer_;  // that will give the inputs; null: they are there
  Values inputs_;
  std::vector<uint64_t> versions_;
  RngSnapshot before_;
  const std::string* module_ = nullptr;
  std::vector<Step> steps_;
  bool filled_ = false;
};

// A function that runs: EngineState::recompute.
struct RecomputeRun {
  RecomputeRegion* region;
  RecomputeRegion::Mode mode;
  size_t next = 0;  // kRefill: the step that comes
};

// Whether what runs is a part of the forward that a backward runs again.
inline bool RunsAgain() {
  const RecomputeRun* run = State().recompute;
  return run != nullptr && run->mode != RecomputeRegion::Mode::kDrop;
}

}  // namespace dtensor::internal
