// The samples of shipped ops for VerifyOp: one call, or a few, per op.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "dtensor/verify/verify.h"
#include "dtensor/verify/verify_function.h"

namespace dtensor {

struct VerifyCase {
  std::string op;
  std::vector<VerifySample> samples;
};
// Every registered op of ops/: those of the lines of elementwise.inc, and what the calls of the
// case lines (ops/cases.h), their gradients included, hand to ops on one rank. Registers them.
std::vector<VerifyCase> VerifyCases();

struct FunctionCase {
  std::string name;
  std::vector<FunctionSample> samples;
  FunctionOptions options;
};
// Every function of ops/ that takes tensors, by its case line. Values are drawn from the domains
// that the line states, as short fractions, and once more as few different ones, which tie.
std::vector<FunctionCase> FunctionCases();

// --- samples by hand
inline VerifyInput F(Shape shape) { return {std::move(shape)}; }
inline VerifyInput I(Shape shape) { return {std::move(shape), DType::kI64}; }
inline VerifyInput Of(DType dtype, Shape shape) { return {std::move(shape), dtype}; }
inline VerifySample Group(int group, VerifySample sample) {
  sample.group = group;
  return sample;
}

}  // namespace dtensor
