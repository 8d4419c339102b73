// Work::State: what a backend that runs asynchronously implements. The local one never does.
#pragma once

#include "mesh/comm.h"

namespace dtensor {

struct Work::State {
  virtual ~State() = default;
  virtual bool Done() = 0;
  virtual absl::Status OrderBefore(Stream stream) = 0;
  virtual absl::Status Wait(absl::Duration timeout) = 0;
};

}  // namespace dtensor
