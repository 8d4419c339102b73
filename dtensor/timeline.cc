#include "dtensor/timeline.h"

#include "dtensor/mesh/launch.h"

namespace dtensor {

RecordTimeline::RecordTimeline(Timeline& timeline)
    : track_(timeline, RankContext::Current().rank()) {}

}  // namespace dtensor
