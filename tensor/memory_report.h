// What errors for want of memory say besides: who holds it. Layers above know.
#pragma once

#include "absl/status/status.h"
#include "dtensor/tensor/rank_state.h"

namespace dtensor {

// Sets what a failing allocation of the rank whose code runs appends to its error, for a scope;
// scopes nest.
class ScopedMemoryReport {
 public:
  explicit ScopedMemoryReport(MemoryReportFn report);
  ~ScopedMemoryReport();
  ScopedMemoryReport(const ScopedMemoryReport&) = delete;

 private:
  RankState& state_;
  const MemoryReportFn outer_;
};

// An allocation's error with what the innermost scope says.
absl::Status WithMemoryReport(const absl::Status& status);

}  // namespace dtensor
