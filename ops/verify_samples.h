// The case lines of shipped ops for VerifyOp: one call, or a few, per op.
#pragma once

#include <string>
#include <vector>

#include "dtensor/verify.h"

namespace dtensor {

struct VerifyCase {
  std::string op;
  std::vector<VerifySample> samples;
};
// Every op of ops/list.inc that does not write in place. Registers the ops.
std::vector<VerifyCase> VerifyCases();

}  // namespace dtensor
