// Steps of random programs that are calls of case lines (ops/cases.h): every function of ops/, with
// nothing written for programs.
#pragma once

#include <string>
#include <vector>

#include "dtensor/ops/case_samples.h"
#include "tests/ops/program_ops.h"

namespace dtensor::testing {

// A case line and one of its patterns. A step of it is called "case NAME PATTERN"; its `shape` are
// the sizes of the pattern's letters, its operands the pattern's tensors.
struct ProgramCase {
  const OpCase* line;
  CasePattern pattern;
  OpEntry entry;  // what it means for the numbers
  bool shares;    // its gradient is shared by equal elements: thirds are not exact
};

// Lines whose numbers depend on nothing but their operands.
const std::vector<ProgramCase>& ProgramCases();
// Null where the step is no case.
const ProgramCase* FindProgramCase(const std::string& step);

// The sample for operands of these shapes.
CaseSample SampleOf(const ProgramCase& c, const Shape& letters, const std::vector<Shape>& operands);
Values RunCase(const ProgramCase& c, const Step& step, const std::vector<DTensor>& operands);

}  // namespace dtensor::testing
