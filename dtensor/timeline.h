// RecordTimeline: the calling rank's ops, modules and collectives go to a Timeline
// (tensor/trace.h).
#pragma once

#include "dtensor/tensor/trace.h"

namespace dtensor {

// From construction to destruction.
class RecordTimeline {
 public:
  explicit RecordTimeline(Timeline& timeline);
  RecordTimeline(const RecordTimeline&) = delete;

 private:
  TimelineTrack track_;
};

}  // namespace dtensor
