// What errors for want of memory say besides: who holds it. Layers above know.
#pragma once

#include <string>

#include "absl/status/status.h"

namespace dtensor {

using MemoryReportFn = std::string (*)();

// Sets what a failing allocation of the calling thread appends to its error, for a scope; scopes
// nest.
class ScopedMemoryReport {
 public:
  explicit ScopedMemoryReport(MemoryReportFn report);
  ~ScopedMemoryReport();
  ScopedMemoryReport(const ScopedMemoryReport&) = delete;

 private:
  const MemoryReportFn outer_;
};

// An allocation's error with what the innermost scope says.
absl::Status WithMemoryReport(const absl::Status& status);

}  // namespace dtensor
