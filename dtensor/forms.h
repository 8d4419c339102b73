// Linear forms: "x * w + b", "g(x) + b", "(x, m)": when a Partial passes through an op.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace dtensor {

// One product: input indices that it is linear in, by occurrence (x * x lists x twice), and its
// nonlinear parameters.
struct LinearProduct {
  std::vector<int> linear, params;
  bool Mentions(int input) const;
};
// A sum of products; an input that no product mentions does not affect the output.
using LinearSum = std::vector<LinearProduct>;

// Signs do not matter ("x - y" reads as "x + y").
//   Errors: InvalidArgument for a malformed form or a name that is no input.
absl::StatusOr<LinearSum> ParseLinear(absl::string_view form,
                                      const std::vector<std::string>& inputs);

}  // namespace dtensor
