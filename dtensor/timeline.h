// RecordTimeline: the calling rank's ops, modules and collectives go to a Timeline
// (tensor/trace.h).
#pragma once

#include "tensor/trace.h"

namespace dtensor {

// From construction to destruction. Ops then take the longer way through dispatch, so the time
// between kernels is larger than in a run that nobody records (by about a microsecond per op).
class RecordTimeline {
 public:
  explicit RecordTimeline(Timeline& timeline);
  ~RecordTimeline();
  RecordTimeline(const RecordTimeline&) = delete;

 private:
  TimelineTrack track_;
  bool outermost_;
};

}  // namespace dtensor
