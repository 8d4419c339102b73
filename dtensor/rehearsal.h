// Rehearsal: a part of a program without its work. While it is open, ops of the calling rank choose
// strategies, redistribute and record gradients as they would, but with tensors on meta: no kernel
// runs, no memory is taken, no peer is waited for. What would be communicated goes to CommTraces
// that are opened inside, and to no others.
//
// Explain(module, inputs) is made of it (parallel/explain.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "dtensor/cache.h"
#include "dtensor/dispatch.h"
#include "mesh/comm_trace.h"
#include "mesh/cost.h"
#include "rng/tracker.h"

namespace dtensor {

// One op call of a rehearsal.
struct RehearsedOp {
  std::string module;  // as CommEvent::module
  std::string op;      // as CommEvent::op: the outermost call
  CommPhase phase;
  std::string strategy;  // "matmul: x [S(0), R], w [R, P => R] -> [S(0), R]"
};

class Rehearsal {
 public:
  // Times of collectives are modelled by `cost`, which must outlive this. Errors (thrown):
  // FailedPrecondition inside of another one.
  explicit Rehearsal(const CostModel& cost);
  // Random generators go back to where they were.
  ~Rehearsal();
  Rehearsal(const Rehearsal&) = delete;
  // The calling rank's; null: none is open.
  static Rehearsal* Current();

  const std::vector<RehearsedOp>& ops() const { return ops_; }
  // Of tensors made while it is open.
  int64_t peak_bytes() const { return counter_->stats().peak_bytes; }

  void Note(const OpDef& op, Inputs inputs, const internal::DispatchEntry& entry);  // by dispatch

 private:
  std::shared_ptr<Allocator> counter_;
  ScopedMetaCounter counting_;
  RngSnapshot random_;
  HiddenCommTraces hidden_;
  std::vector<RehearsedOp> ops_;
};

namespace internal {
// `local`, or in a rehearsal a tensor like it on meta.
Tensor RehearsedLocal(const Tensor& local);
}  // namespace internal

}  // namespace dtensor
