// Buffers that a training step changes in its forward (running statistics, counters), to be brought
// back where the step fails. Private to parallel/train/.
#pragma once

#include <cstdint>
#include <vector>

#include "dtensor/parallel/module/module.h"

namespace dtensor::internal {

// Of one rank: each keeps and brings back its own parts, and nothing is communicated. The model
// must outlive it.
class KeptBuffers {
 public:
  explicit KeptBuffers(const Module& model);

  // Before a step: copies of the buffers that steps change. Before the first one has passed that is
  // not known, and all are copied.
  void Keep();
  // What was kept is as it was then: as often as wanted. Throws nothing, since that may be while an
  // error is on its way.
  void Restore() const;
  // After a step that passed: frees the copies. What it changed is kept from now on.
  void Pass();

 private:
  struct Kept {
    Parameter* parameter;
    bool changes = true;   // by some step
    DTensor tensor = {};   // what the parameter was at Keep; null where this rank has no part
    uint64_t version = 0;  // of its memory then
    DTensor copy = {};     // of this rank's part, on Self
    bool Changed() const;
  };
  std::vector<Kept> buffers_;
  bool passed_ = false;  // some step has
};

}  // namespace dtensor::internal
