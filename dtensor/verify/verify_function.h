// The judge of functions. What is made of several ops has no declaration that could be wrong, but
// it has a promise: on a mesh it gives what it gives on one rank, however its arguments lie.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "dtensor/distributed_tensor.h"
#include "dtensor/verify/verify.h"

namespace dtensor {

struct FunctionSample {
  std::vector<VerifyInput> inputs;   // with values
  std::vector<bool> differentiable;  // of each input: whether its gradient is compared, too
  // The same values for the same inputs: what draws numbers seeds itself.
  std::function<Values(const std::vector<DTensor>&)> call;
  std::string text;  // in findings
};

struct FunctionOptions {
  std::vector<Dims> meshes = {{2}, {3}, {2, 2}};
  int64_t most = 40;  // placements per sample and mesh
  // An input is written to and never moved: FailedPrecondition and InvalidArgument where one rank
  // has an answer are no findings.
  bool in_place = false;
  bool pending_extremes = true;  // pending maxima and minima have a meaning
};

// Runs the function on threads under placements of its inputs and compares all results, and the
// gradients of each result, on every rank with those of one rank. Placements: each input alone, and
// then drawn together, in {R, S(d), also with a unit and in segments, flat, P(sum), P(max),
// P(min)}. Gradients enter replicated or as pending sums. The report's combinations are the
// placements that gave an answer, `candidates` all.
//   Errors: those of the function on one rank.
absl::StatusOr<VerifyReport> VerifyFunction(const std::string& name,
                                            const std::vector<FunctionSample>& samples,
                                            const FunctionOptions& options = {});

}  // namespace dtensor
