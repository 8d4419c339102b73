// The samples of shipped ops for VerifyOp: one call, or a few, per op.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dtensor/verify/verify.h"

namespace dtensor {

struct VerifyCase {
  std::string op;
  std::vector<VerifySample> samples;
};
// Every registered op of ops/: those of the lines of elementwise.inc, and what the calls of the
// case lines (ops/cases.h), their gradients included, hand to ops on one rank. Registers them.
std::vector<VerifyCase> VerifyCases();

// --- samples by hand
inline VerifyInput F(Shape shape) { return {std::move(shape)}; }
inline VerifyInput I(Shape shape) { return {std::move(shape), DType::kI64}; }
inline VerifyInput Of(DType dtype, Shape shape) { return {std::move(shape), dtype}; }
inline VerifySample Group(int group, VerifySample sample) {
  sample.group = group;
  return sample;
}

}  // namespace dtensor
