// Work::State and Loan: what a backend whose calls overlap implements.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "dtensor/mesh/comm_backend.h"
#include "dtensor/tensor/buffer.h"

namespace dtensor {

// Memory of this rank that its communicator may still read after the call that lent it has
// returned: for peers (deferred_pull), or because it has not come to it yet.
class Loan {
 public:
  virtual ~Loan() = default;
  virtual bool Returned() = 0;
  virtual bool Holds(const Buffer& buffer) = 0;
  // Lets the owner write: waits for those who are reading. For those who have not begun, and may
  // wait for the owner, it copies.
  virtual absl::Status TakeBack() = 0;
};

struct Work::State {
  virtual ~State() = default;
  virtual bool Done() = 0;
  virtual absl::Status Wait(absl::Duration timeout) = 0;
  // What this rank lent for the call; null: nothing.
  virtual std::shared_ptr<Loan> TheLoan() { return nullptr; }
};

}  // namespace dtensor
