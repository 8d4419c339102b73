#include "dtensor/timeline.h"

#include "dtensor/impl.h"
#include "mesh/launch.h"

namespace dtensor {

using internal::EngineState;

RecordTimeline::RecordTimeline(Timeline& timeline)
    : track_(timeline, RankContext::Current().rank()) {
  EngineState& state = internal::State();
  outermost_ = state.running == EngineState::Running::kPlain;
  if (outermost_) state.running = EngineState::Running::kWatched;
}

RecordTimeline::~RecordTimeline() {
  if (outermost_) internal::State().running = EngineState::Running::kPlain;
}

}  // namespace dtensor
