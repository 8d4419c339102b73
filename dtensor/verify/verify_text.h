// How the judge writes rows down: for people, as keys, and as C++ that repeats a finding.
#pragma once

#include <string>
#include <vector>

#include "dtensor/verify/verify.h"

namespace dtensor::internal {

// "x S(1), w R -> P(sum)"; several mesh dims in brackets. What is cut in segments or flat pieces is
// called so, whatever their sizes: a pattern is the same for all samples.
std::string Pattern(const OpDef& op, const std::vector<Placements>& inputs,
                    const std::vector<Placements>& outputs);
// The same with these sizes.
std::string RowText(const OpDef& op, const std::vector<Placements>& inputs,
                    const std::vector<Placements>& outputs);
// The pattern of one output, named.
std::string OutputPattern(const OpDef& op, const std::vector<Placements>& inputs, int output,
                          const Placements& placements);
VerifyFinding Finding(const OpDef& op, const VerifySample& sample, IntSpan mesh,
                      const std::vector<Placements>& inputs, const std::vector<Placements>& outputs,
                      std::string why);

}  // namespace dtensor::internal
