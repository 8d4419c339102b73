// Work::State: what a backend that runs asynchronously implements.
#pragma once

#include <memory>

#include "mesh/comm.h"

namespace dtensor {

// Memory that peers may still read after the call that lent it has returned.
class Loan {
 public:
  virtual ~Loan() = default;
  virtual bool Returned() = 0;
  virtual bool Holds(const Buffer& buffer) = 0;
  // Lets the owner write: waits for those who are reading and copies for those who have not begun.
  virtual absl::Status TakeBack() = 0;
};

struct Work::State {
  virtual ~State() = default;
  virtual bool Done() = 0;
  virtual absl::Status OrderBefore(Stream stream) = 0;
  virtual absl::Status Wait(absl::Duration timeout) = 0;
  // What this rank lent for the call; null: nothing.
  virtual std::shared_ptr<Loan> TheLoan() { return nullptr; }
};

}  // namespace dtensor
