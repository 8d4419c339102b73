// The case lines of shipped ops for VerifyOp: one call, or a few, per op.
#pragma once

#include <string>
#include <vector>

#include "dtensor/verify/verify.h"

namespace dtensor {

struct VerifyCase {
  std::string op;
  std::vector<VerifySample> samples;
};
// Every registered op of ops/. Registers them.
std::vector<VerifyCase> VerifyCases();

}  // namespace dtensor
