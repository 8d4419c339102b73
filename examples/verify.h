// Comparing two trainings of the same model.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "dtensor/mesh/comm_trace.h"
#include "dtensor/tensor/dtype.h"

namespace dtensor {

struct TrainResult {
  std::vector<double> losses;
  std::vector<CommRow> collectives;  // of rank 0
  std::vector<int64_t> peak_bytes;   // per rank
  double tokens_per_s = 0;
  std::vector<std::pair<std::string, std::vector<double>>> parameters;  // whole, by FQN
};

struct Comparison {
  double loss_rel_diff = 0;   // largest |a - b| / |b| over the steps
  double param_rel_diff = 0;  // largest |a - b| over all parameters / largest |b|
  std::string worst;          // the parameter that has it
};

// Leaves out the attention key biases: their true gradient is zero (softmax does not see a constant
// added to all scores of a query), and Adam turns the rounding noise that stands for it into
// full-size steps.
Comparison Compare(const TrainResult& got, const TrainResult& reference);

// Prints both numbers. Errors: FailedPrecondition above 1e-4 (float32) or 1e-10 (float64).
absl::Status Judge(const Comparison& diff, DType dtype);

}  // namespace dtensor
